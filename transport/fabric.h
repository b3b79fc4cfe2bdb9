/* SPDX-License-Identifier: Apache-2.0 */
/* The process's usable rails and the settings they were opened with. */
#ifndef TRANSPORT_FABRIC_H
#define TRANSPORT_FABRIC_H

#include "transport/rail.h"

enum { PRS_FABRIC_RAILS = 64 }; /* bits of a rail mask */

struct prs_fabric {
    struct prs_fabric *next; /* list of the process, under the list's lock */
    uint32_t refs;           /* the same */
    pid_t owner;
    struct prs_config config;
    int rail_count;
    struct prs_rail rail[PRS_FABRIC_RAILS];
};

/* Are all indices of the set rails of this fabric, each once? Return 0 or -EINVAL; who is for the text. */
int prs_fabric_check_set(const struct prs_fabric *fabric, const struct prs_rail_set *rails, const char *who);

/* prs_fabric_check() of one rail; a port that is down is an error only for who is waiting for it. */
int prs_fabric_check_rail(const struct prs_fabric *fabric, int rail, bool waiting);

#endif
