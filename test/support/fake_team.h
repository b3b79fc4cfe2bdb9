/* SPDX-License-Identifier: Apache-2.0 */
/* A team without a NIC, linked in place of transport/connect/team.c and peer.c: every rank is this process. Puts
 * complete late and in any order. A signal is raised after every put of its group that was posted before it. */
#ifndef TEST_SUPPORT_FAKE_TEAM_H
#define TEST_SUPPORT_FAKE_TEAM_H

#include <perseus/team.h>

struct fake_team_options {
    uint32_t size;
    uint32_t window; /* ops in flight per peer before PRS_BUSY */
    uint32_t seed;
    uint32_t connect_asks; /* how often a peer first returns PRS_AGAIN */
    bool ignore_groups;    /* break the rule, to see that a test notices */
    bool drain;            /* the result of prs_team_drains() */
    uint32_t tells;        /* how often prs_team_tell_loss() returns PRS_AGAIN */
};

struct prs_team *fake_team_open(const struct fake_team_options *options);
/* Fails all ops in flight, as a team does, so their memory must still exist. */
void fake_team_close(struct prs_team *team);
/* From now on progress fails with this error. */
void fake_team_kill(struct prs_team *team, int error);
/* Stop (or continue) completing: posted ops stay pending. */
void fake_team_hold(struct prs_team *team, bool hold);
/* Stop completing for the next `looks` calls of progress, each of which takes `ms`; then continue. */
void fake_team_hold_for(struct prs_team *team, uint32_t looks, uint32_t ms);
/* Has one of these calls begun? */
bool fake_team_is_asleep(const struct prs_team *team);
/* The number of ops that the team still uses: their owners must not free them. */
uint32_t fake_team_in_flight(const struct prs_team *team);
/* The error with which the peer was failed; 0: none. */
int fake_team_peer_error(const struct prs_team *team, uint32_t rank);
/* How often the team was asked to tell of a loss; *now: at once, in one of these calls. */
uint32_t fake_team_tells(const struct prs_team *team, bool *now);
/* The most puts that were in flight at once. */
uint32_t fake_team_most_in_flight(const struct prs_team *team);

#endif
