/* SPDX-License-Identifier: Apache-2.0 */
/* Two sides of a connection of three paths, joined by a stream, without a NIC: their queues only know whom they are
 * connected to. For tests of what the sides tell each other of lost rails; without Criterion, so fuzz targets use them,
 * too. A failed condition ends the process. */
#ifndef TEST_SUPPORT_FAKE_SIDES_H
#define TEST_SUPPORT_FAKE_SIDES_H

#include "transport/nic/nic.h"
#include "transport/peer/peer.h"

enum { PATHS = 3, A = 0 /* offers */, B = 1 };

struct fake_link {
    struct prs_link base;
    struct prs_queue queue, *list[1];
    uint32_t number, connected_to, posted, last;
    uint8_t mtu, reads;      /* that the queue was connected with */
    int polls_until_flushed; /* after it was stopped */
};

struct side {
    struct prs_fabric fabric;
    struct prs_domain domain[PATHS];
    struct prs_peer peer;
};

extern struct side sides[2];
extern uint32_t links_open;
extern bool answers; /* whether writes of no bytes are answered */

struct fake_link *fake(struct prs_link *link);
/* The state of path 0 of a side. */
struct prs_failover_path *path_at(int side);

void open_sides(void);
/* The NICs of this side report at once that the other side does not answer, as libfabric does. */
void fail_early(int side);
/* A request of the path fails, since the other side does not answer. */
void fail_request(int side, uint32_t path);
/* Every link must be closed. */
void close_sides(void);

#endif
