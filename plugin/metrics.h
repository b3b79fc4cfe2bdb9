/* SPDX-License-Identifier: Apache-2.0 */
/* Counters of this process in a file, for monitoring: PERSEUS_METRICS=FOLDER writes FOLDER/perseus-PID.prom every
 * second, in Prometheus's text format, and removes it when the process exits. Without the variable nothing here does
 * anything, and no counter costs more. */
#ifndef PERSEUS_PLUGIN_METRICS_H
#define PERSEUS_PLUGIN_METRICS_H

#include <perseus/perseus.h>

struct prs_team;

/* What is counted: a peer, or some contexts of a team. It is in the owner's storage, zeroed at first. */
struct metrics_source {
    struct metrics_source *next;
    const struct prs_peer *peer; /* NULL: the team's contexts */
    struct prs_team *team;
    uint32_t first_context, contexts;
    uint32_t row; /* plus 1; 0: not added */
};

/* Count from now on, under this table's name ("net", "gin"). peer, or team and contexts, are set. */
void metrics_add(struct metrics_source *source, const char *table, const struct prs_fabric *fabric,
                 const struct prs_rail_set *rails);
/* Call it before the peer or the contexts are closed. Their counters stay in the sums. */
void metrics_remove(struct metrics_source *source);

#endif
