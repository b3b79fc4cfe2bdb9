/* SPDX-License-Identifier: Apache-2.0 */
/* Attributes the time of a rank to causes. If several causes are active at the same time, the time goes to the first
 * one in the list. */
#ifndef SIM_EXPLAIN_H
#define SIM_EXPLAIN_H

#include <stdint.h>

enum sim_cause {
    SIM_COMPUTE, /* the products */
    SIM_FENCE,   /* a drain, or a fence in the NIC */
    SIM_PROXY,   /* the proxy's core is busy */
    SIM_INCAST,  /* a message waits for others at the receiving port */
    SIM_LINK,    /* the rank's own port sends or receives */
    SIM_LATENCY, /* none of these: the data is in flight */
    SIM_CAUSES
};

struct sim_explain {
    uint64_t until_ps[SIM_CAUSES]; /* each cause is active until this time */
    uint64_t since_ps;             /* all time before is attributed */
    uint64_t total_ps[SIM_CAUSES];
};

extern const char *const sim_cause_names[SIM_CAUSES];

/* Attribute the time up to now. */
void sim_explain_advance(struct sim_explain *explain, uint64_t now_ps);
/* The cause is active from now until at least this time. */
void sim_explain_note(struct sim_explain *explain, enum sim_cause cause, uint64_t now_ps, uint64_t until_ps);
/* Forget what was attributed so far. */
void sim_explain_restart(struct sim_explain *explain, uint64_t now_ps);
/* The cause is no longer active. */
void sim_explain_end(struct sim_explain *explain, enum sim_cause cause, uint64_t now_ps);

#endif
