/* SPDX-License-Identifier: Apache-2.0 */
/* One rail or several, one ordering policy: memory on both sides, and one queue or several. Each is a peer of its own,
 * as the connections of a job are. */
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
/* Words: one of each slot, one of each queue, then these. */
enum { WORD_ADDED = SLOTS, WORD_CREDIT = WORD_ADDED + QUEUES_MOST, WORD_END, WORD_BESIDE };

struct link {
    struct prs_peer *peer[QUEUES_MOST];
    uint32_t queues;   /* number of open ones */
    int control;       /* to the other side, which has ended a trial when it says something */
    char failure[512]; /* of a trial; "": none has failed */
    struct prs_region *data_region, *words_region;
    uint8_t *data;   /* DATA_BYTES */
    uint64_t *words; /* WORDS */
    struct place_of_memory remote;
    uint64_t announced_bytes;        /* of a notified put of this trial */
    uint64_t notified[SLOTS];        /* notifications of each slot that have come */
    uint64_t odd;                    /* how many of these notifications named a wrong number of bytes */
    struct prs_op op[2 * SLOTS + 1]; /* live until link_close(), also when a trial gives up with transfers in flight */
};

/* Memory and its registration. Return 0 or -errno with prs_error_text(). */
int link_open(struct link *link, struct prs_fabric *fabric, const struct prs_rail_set *rails,
              struct place_of_memory *mine);
/* The connections, one a queue: the passive side gives the handle away and then accepts; the active side connects.
 * `control` is looked at meanwhile: when the other side says something, it has given up. */
int link_accept(struct link *link, struct prs_listener *listener, const char *policy, uint32_t queues, int control);
int link_connect(struct link *link, struct prs_fabric *fabric, const struct prs_rail_set *rails,
                 const struct prs_handle *handle, const char *policy, uint32_t queues);
/* Make progress on all queues. Return 0 or -errno. */
int link_progress(struct link *link);
/* Why a trial over it has failed, whose result r is: the first error of a queue, if there is one. */
void link_say_failure(const struct link *link, int r, char *text, size_t bytes);
/* Safe on a link that is open in part, or zero. */
void link_close(struct link *link);

#endif
