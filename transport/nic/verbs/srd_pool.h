/* SPDX-License-Identifier: Apache-2.0 */
/* The SRD queue pairs of a rail, which all connections of the process over that rail share (decisions/0016).
 *
 * An arrival names our queue pair, the address handle of the sender's rail, and the sender's queue pair. These three
 * must name one connection. So a rail has queue pairs for connections that it accepts and others for those that it
 * makes. For a new connection the listener takes the accepting queue pair with the fewest connections to the
 * connector's rail. The connector is told which one that is, and takes a connecting queue pair that has no connection
 * to it yet. Then k connections from one process to another need about the square root of k queue pairs at each side,
 * however many other peers there are. */
#ifndef TRANSPORT_SRD_POOL_H
#define TRANSPORT_SRD_POOL_H

#include "transport/nic/nic.h"
#include "transport/nic/verbs/address.h"
#include "transport/nic/verbs/receives.h"
#include "transport/nic/reorder.h"
#include "transport/util/spin.h"
#include "transport/nic/verbs/verbs.h"

enum { PRS_SRD_NONE = 0xffffffff };

struct prs_srd_pool; /* of one rail */

/* The address handle of another rail, or of our own. All connections to that rail share it. */
struct prs_srd_handle {
    struct prs_srd_handle *next;
    uint32_t refs;
    uint8_t gid[16];
    struct ibv_ah *ah; /* NULL until a queue connects */
    uint32_t number;   /* by which arrivals name it */
};

/* An arrival that waits for the owner of its connection. Its receive is not replaced before the owner takes it, so
 * there are never more of them than receives. */
struct prs_srd_arrival {
    uint32_t value, bytes;
    uint32_t next; /* index in prs_srd_qp.arrival, or PRS_SRD_NONE */
};

/* A queue of a connection: its share of a queue pair. The thread that uses the connection, and any thread that polls
 * the queue pair, change it under the lock of the queue pair. */
struct prs_srd_end {
    struct prs_queue base; /* base.number: of the shared queue pair */
    struct prs_srd_qp *qp;
    struct ibv_ah *ah;
    uint32_t remote_number, remote_key;
    uint64_t wr_id_high; /* slot in prs_srd_qp.end */
    uint32_t in_flight;  /* requests that the NIC has */
    bool closed;         /* takes no requests: stopped, or its queue pair was killed */
    bool stopped;        /* by its owner, so nothing more is reported, either */
    /* What waits for the owner: completions in reorder, and, if kept, arrivals or a failure. `mail` has a bit for each
     * end of a link on this queue pair, and is also read without the lock. NULL: the end is new. */
    uint64_t *mail;
    uint64_t bit; /* of this end */
    bool kept;
    struct prs_reorder reorder;
    uint32_t first, last;     /* arrivals, by index; PRS_SRD_NONE: none */
    struct prs_event failure; /* kind is PRS_EVENT_ERROR, if there is one */
    int broken;               /* 0, or a -errno that polling returns */
    /* Requests that were posted, but for which the NIC has no room yet: from next up to upto in the ring. */
    const struct prs_wr *ring;
    uint32_t ring_mask, next, upto;
    struct prs_srd_end *behind; /* the next end that waits for room */
    bool in_line;
    /* Under the lock of the pools. */
    struct prs_srd_handle *to;
    /* keeps the name after the close; NULL: not needed, since the other side chose last */
    struct prs_srd_linger *linger;
    bool to_itself; /* a loopback queue: connected to the queue pair itself */
    bool named;     /* arrivals find it */
};

struct prs_srd_name { /* entry of a hash table; end NULL: free */
    uint64_t name;
    struct prs_srd_end *end;
};

/* A shared queue pair with its completion queue. */
struct prs_srd_qp {
    struct prs_srd_qp *next; /* under the lock of the pools, like all down to key */
    struct prs_srd_pool *pool;
    struct prs_srd_linger *linger;
    bool accepts; /* used by connections that this process accepts, else by those that it makes */
    uint32_t end_count;
    uint32_t key;              /* key that senders to this queue pair must show */
    uint32_t locked;           /* by prs_srd_lock(); protects all below */
    bool killed;               /* in the error state: nothing takes effect any more, and nobody may join */
    bool failed;               /* its receives were flushed, and all ends have been told */
    uint32_t depth, in_flight; /* send slots */
    struct ibv_qp *qp;
    struct ibv_qp_ex *ex; /* qp, for posting */
    struct ibv_cq *cq;
    bool overrun;         /* it has lost completions. The event thread sets it */
    struct prs_link link; /* stands for the queue pair where functions of receives.h need a link */
    struct prs_queue queue;
    struct prs_receives receives;
    struct ibv_sge dummy_sge;
    struct prs_srd_end *line, *line_last; /* ends that wait for room */
    struct prs_srd_end **end;             /* by slot; NULL: free */
    uint32_t slots;
    struct prs_srd_name *name; /* [name_mask + 1] */
    uint32_t name_mask;
    struct prs_srd_arrival *arrival;
    uint32_t free_arrival; /* first free arrival */
    struct ibv_wc wc[PRS_POLL_MOST];
};

/* The pool of a rail, made for its first user. Return 0 or -errno. */
int prs_srd_pool_open(const struct prs_rail *rail, int gid_index, uint16_t pkey_index, struct prs_srd_pool **out);
void prs_srd_pool_close(struct prs_srd_pool *pool);

/* Give the end, whose base and bit are filled in, a place on a queue pair, for a connection to the rail with this GID.
 * remote: the queue that it will connect to, or NULL: the other side chooses next. depth: send slots. Return 0 or
 * -errno, logged. */
int prs_srd_join(struct prs_srd_pool *pool, struct prs_srd_end *end, const uint8_t gid[16],
                 const struct prs_verbs_queue *remote, uint32_t depth);
/* Give the end a place on this queue pair, connected to itself. */
int prs_srd_join_self(struct prs_srd_qp *qp, struct prs_srd_end *end, const uint8_t own_gid[16], uint32_t depth);
/* From now on the end can send, and arrivals from the remote queue find it. Return 0, or -errno: not logged where no
 * address handle could be made, which may pass. */
int prs_srd_connect(struct prs_srd_end *end, const struct prs_verbs_queue *remote);
/* Give up the place of a stopped end. Nothing of it is in flight, or its queue pair was killed. stream_fd: the stream
 * that ends when the other side has closed too. With -1 the name is never used again, if the other side knows the
 * connection. */
void prs_srd_leave(struct prs_srd_end *end, int stream_fd);

/* The lock of a queue pair. Each message takes it twice. */
static inline bool prs_srd_trylock(struct prs_srd_qp *qp)
{
    return prs_spin_trylock(&qp->locked);
}

static inline void prs_srd_lock(struct prs_srd_qp *qp)
{
    prs_spin_lock(&qp->locked);
}

static inline void prs_srd_unlock(struct prs_srd_qp *qp)
{
    prs_spin_unlock(&qp->locked);
}

/* Move a queue pair to the error state. The caller holds its lock. */
void prs_srd_kill_locked(struct prs_srd_qp *qp);

static inline uint64_t prs_srd_full_name(uint32_t handle, uint32_t number)
{
    return (uint64_t)handle << 32 | number;
}

static inline uint32_t prs_srd_first_entry(const struct prs_srd_qp *qp, uint32_t handle, uint32_t number)
{
    return (number ^ handle * 31) & qp->name_mask;
}

/* The end that an arrival from this rail and queue belongs to, or NULL: it has closed. The caller holds the lock. */
static inline struct prs_srd_end *prs_srd_find(const struct prs_srd_qp *qp, uint32_t handle, uint32_t number)
{
    uint64_t name = prs_srd_full_name(handle, number);
    uint32_t at = prs_srd_first_entry(qp, handle, number);

    while (qp->name[at].end && qp->name[at].name != name)
        at = (at + 1) & qp->name_mask;
    return qp->name[at].end;
}

#endif
