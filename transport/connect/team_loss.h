/* SPDX-License-Identifier: Apache-2.0 */
/* If rank A has lost rank B, ranks that wait for A must learn of it, since their own connections still work. */
#ifndef TRANSPORT_TEAM_LOSS_H
#define TRANSPORT_TEAM_LOSS_H

#include <stdbool.h>
#include <stdint.h>

struct prs_team;

/* For the thread of a context whose work an error has ended. If a peer has failed, tell all other ranks which rank was
 * lost: each once, when all requests posted to it are complete (`now`: at once). Never blocks. Return 0 (nothing is
 * left to do) or PRS_AGAIN. */
int prs_team_tell_loss(struct prs_team *team, uint32_t context_id, bool now);

#endif
