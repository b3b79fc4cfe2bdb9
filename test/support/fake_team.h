/* SPDX-License-Identifier: Apache-2.0 */
/* A team without a NIC, linked in place of transport/team.c and peer.c: every rank is this process. Puts complete late
 * and in any order; a signal is placed once every put of its group that was posted before it is. */
#ifndef TEST_SUPPORT_FAKE_TEAM_H
#define TEST_SUPPORT_FAKE_TEAM_H

#include <perseus/team.h>

struct fake_team_options {
    uint32_t size;
    uint32_t window; /* ops in flight per peer before PRS_BUSY */
    uint32_t seed;
    uint32_t connect_asks; /* how often a peer says PRS_AGAIN first */
    bool ignore_groups;    /* break the rule, to see that a test notices */
    bool drain;            /* as prs_team_drains() says */
};

struct prs_team *fake_team_open(const struct fake_team_options *options);
/* Fails what is still in flight, as a team does: the ops must still be there. */
void fake_team_close(struct prs_team *team);
/* From now on progress fails with this error. */
void fake_team_kill(struct prs_team *team, int error);
/* Stop (or go on) completing: posted ops stay pending. */
void fake_team_hold(struct prs_team *team, bool hold);
/* While it is stopped: so many more calls of progress, each of which takes so long, and it goes on. */
void fake_team_hold_for(struct prs_team *team, uint32_t looks, uint32_t ms);
/* One of these calls has begun. */
bool fake_team_is_asleep(const struct prs_team *team);
/* Ops that the team still has: their owners must not free them. */
uint32_t fake_team_in_flight(const struct prs_team *team);
/* Why the peer was failed; 0: it was not. */
int fake_team_peer_error(const struct prs_team *team, uint32_t rank);
/* Most puts that were in flight at once. */
uint32_t fake_team_most_in_flight(const struct prs_team *team);

#endif
