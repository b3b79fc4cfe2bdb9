/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that wait for one that has lost another rank learn of it: their own connections work. */
#ifndef TRANSPORT_TEAM_LOSS_H
#define TRANSPORT_TEAM_LOSS_H

#include <stdbool.h>
#include <stdint.h>

struct prs_team;

/* For the thread of a context that ends, since an error has ended its work: if a peer has failed, tell the rank to all
 * others, once each, when what was posted to them is complete; `now`: at once. Never blocks. Return 0 (nothing is left
 * to do) or PRS_AGAIN. */
int prs_team_tell_loss(struct prs_team *team, uint32_t context_id, bool now);

#endif
