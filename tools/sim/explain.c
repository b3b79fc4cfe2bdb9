/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/explain.h"

const char *const sim_cause_names[SIM_CAUSES] = {"compute", "fence", "proxy", "incast", "link", "latency"};

void sim_explain_advance(struct sim_explain *explain, uint64_t now_ps)
{
    while (explain->since_ps < now_ps) {
        uint64_t until = now_ps;
        uint32_t cause = SIM_LATENCY;

        for (uint32_t i = 0; i < SIM_LATENCY; i++)
            if (explain->until_ps[i] > explain->since_ps) {
                cause = i;
                if (explain->until_ps[i] < until)
                    until = explain->until_ps[i];
                break;
            }
        explain->total_ps[cause] += until - explain->since_ps;
        explain->since_ps = until;
    }
}

void sim_explain_note(struct sim_explain *explain, enum sim_cause cause, uint64_t now_ps, uint64_t until_ps)
{
    sim_explain_advance(explain, now_ps);
    if (until_ps > explain->until_ps[cause])
        explain->until_ps[cause] = until_ps;
}

void sim_explain_end(struct sim_explain *explain, enum sim_cause cause, uint64_t now_ps)
{
    sim_explain_advance(explain, now_ps);
    explain->until_ps[cause] = now_ps;
}

void sim_explain_restart(struct sim_explain *explain, uint64_t now_ps)
{
    sim_explain_advance(explain, now_ps);
    for (int i = 0; i < SIM_CAUSES; i++)
        explain->total_ps[i] = 0;
}
