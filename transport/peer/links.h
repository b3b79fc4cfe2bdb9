/* SPDX-License-Identifier: Apache-2.0 */
/* The links of a peer: the queues of each path, and its loopback queue. */
#ifndef TRANSPORT_LINKS_H
#define TRANSPORT_LINKS_H

#include <stdint.h>

struct prs_link;
struct prs_op;
struct prs_peer;
struct prs_rail_address;
struct prs_wire_queues;

/* Slots of a loopback queue, if the data queues have `depth`. It raises signals and flushes; when it is full, the
 * caller tries again. */
static inline uint32_t prs_links_loopback_depth(uint32_t depth)
{
    return depth < 64 ? depth : 64;
}

/* Create the queues of all paths. remote: the other side's queues; NULL: not known yet. Return 0 or -errno. */
int prs_links_open(struct prs_peer *peer, const struct prs_wire_queues *remote);
/* Create the queues of one path, for the rail's present address. remote: as above. Return 0 or -errno. */
int prs_links_open_path(const struct prs_peer *peer, uint32_t path, const struct prs_rail_address *own,
                        const struct prs_wire_queues *remote, struct prs_link **out);

/* Make the loopback queues, which read and write our own memory, unless they exist. Return 0 or -errno. */
int prs_links_open_loopbacks(struct prs_peer *peer);
/* Read a byte at addr through each path's loopback queue, with these keys. When op is done, everything that the paths'
 * NICs had written there is visible. The loopback queues must be open. Return 0, PRS_BUSY or -errno. */
int prs_links_probe(struct prs_peer *peer, struct prs_op *op, uint64_t addr, const uint64_t *rkey);

#endif
