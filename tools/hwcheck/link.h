/* SPDX-License-Identifier: Apache-2.0 */
/* One rail or several, one ordering policy: a peer, and memory on both sides. */
#ifndef HWCHECK_LINK_H
#define HWCHECK_LINK_H

#include "tools/hwcheck/control.h"

enum {
    SLOTS = 64,            /* transfers in flight */
    SLOT_BYTES = 16 << 10, /* several packets at every MTU */
    SMALL_BYTES = 64,      /* of a notified put */
    BULK_BYTES = 1 << 20,  /* where bandwidth is measured */
    DATA_BYTES = 2 << 20,  /* slots, then small slots; bulk goes to the start */
    WORDS = 256,
};
/* Words: one of each slot, then these. */
enum { WORD_ADDED = SLOTS, WORD_CREDIT, WORD_END };

struct link {
    struct prs_peer *peer;
    struct prs_region *data_region, *words_region;
    uint8_t *data;   /* DATA_BYTES */
    uint64_t *words; /* WORDS */
    struct place_of_memory remote;
    uint64_t notified;               /* notifications that have come */
    uint64_t odd;                    /* of them, those that named another number of bytes than was sent */
    struct prs_op op[2 * SLOTS + 1]; /* live until link_close(), also when a trial gives up with transfers in flight */
};

/* Memory and its registration. Return 0 or -errno with prs_error_text(). */
int link_open(struct link *link, struct prs_fabric *fabric, const struct prs_rail_set *rails,
              struct place_of_memory *mine);
/* The connection: the passive side gives the handle away and then accepts; the active side connects. `control` is
 * looked at meanwhile: when the other side says something, it has given up. */
int link_accept(struct link *link, struct prs_listener *listener, const char *policy, int control);
int link_connect(struct link *link, struct prs_fabric *fabric, const struct prs_rail_set *rails,
                 const struct prs_handle *handle, const char *policy);
/* Safe on a link that is open in part, or zero. */
void link_close(struct link *link);

#endif
