/* SPDX-License-Identifier: Apache-2.0 */
/* GIN and RMA: one-sided transfers of a communicator's ranks. A "coll comm" is a team and its registrations; a "set"
 * is what createContext makes: some contexts, each an independent ordering domain with a peer to each rank, made
 * when first used.
 *
 * Threads: transfers, test and progress of a set come from one thread (NCCL's proxy); registrations and closing from
 * others, at the same time. */
#ifndef PERSEUS_PLUGIN_GIN_H
#define PERSEUS_PLUGIN_GIN_H

#include "plugin/abi_gin.h"
#include "plugin/gather.h"

enum {
    GIN_WINDOW_OPS = 512,      /* transfers in flight to one rank in one context; more wait in the lane */
    GIN_CONNECT_MS = 60000,    /* ranks come to connect one right after the other */
    GIN_EXCHANGE_MS = 1800000, /* but to a registration when their program does, which may compile or load before */
    GIN_HOLD_NS = 500,         /* a GPU's CTAs signal one after the other, each by a write over PCIe */
    GIN_HOLD_MOST = 16,
};

/* First member of what NCCL hands to functions that take either of the two. */
struct gin_base {
    uint32_t magic; /* enum gin_magic */
    struct gin_comm *comm;
};
enum gin_magic { GIN_COMM = 0x4e49475f, GIN_SET = 0x5445535f };

struct gin_listener {
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    struct prs_listener *listener; /* NULL once a comm has it */
};

struct gin_comm {
    struct gin_base base;
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    struct prs_team *team;
    struct gather gather;
    struct gin_set *own;   /* v11, v12: the contexts that come with the comm */
    uint32_t next_context; /* of the team */
    uint32_t rank, ranks;
    uint32_t hold_ns;     /* see gin_request_progress() */
    bool relaxed;         /* a rail registers data with relaxed ordering */
    bool raises;          /* signals that come are raised by this process */
    pthread_mutex_t lock; /* protects sets and contexts: they come and go beside registrations */
    struct gin_set *sets;
    uint32_t contexts; /* of all sets that there are */
    int error;         /* atomic; sticky */
};

struct gin_remote {
    uint64_t base, bytes;
    struct prs_keys keys;        /* data */
    struct prs_keys signal_keys; /* strict: the same keys where a region is strict anyway */
};

struct gin_memory {
    struct prs_region *region, *strict; /* strict: a second registration for signals; NULL: region serves */
    uint64_t base, bytes;
    bool is_device;
    uint32_t ranks;
    struct gin_remote remote[];
};

enum gin_kind { GIN_REQUEST_PUT, GIN_REQUEST_GET, GIN_REQUEST_FLUSH };

struct gin_request {
    struct prs_op data, signal;
    struct gin_request *next; /* in a lane's queue, or free */
    struct gin_set *set;
    struct gin_lane *lane;
    const struct gin_memory *src, *dst, *signal_memory;
    uint64_t src_offset, dst_offset, size, signal_offset, value;
    uint32_t group;
    uint8_t kind; /* enum gin_kind */
    bool has_signal, strong;
    bool data_posted; /* the data is, the signal waits for room */
};

/* One rank in one context. */
struct gin_lane {
    struct prs_peer *peer;            /* NULL until connected */
    struct gin_request *first, *last; /* not yet posted, in order */
    struct gin_lane *next_waiting;    /* lanes with a queue */
    uint32_t context;                 /* of the team */
    uint32_t rank;
    uint32_t groups; /* used for weak signals */
    bool waiting;
};

struct gin_set {
    struct gin_base base;
    struct gin_set *next; /* of the comm's */
    uint32_t first_context, contexts;
    /* Whoever gives memory up asks whether all signals that have come are raised (gin_settle.c). */
    uint32_t asked;         /* atomic: number of the last question */
    uint32_t answered;      /* atomic: of the last that was answered with yes */
    uint32_t rounds;        /* atomic: how often progress was called */
    uint32_t left_at;       /* rounds when somebody asked in vain; comm's lock */
    pthread_t driver;       /* atomic: the thread that did; 0: none yet */
    struct gin_lane *lanes; /* [contexts][ranks] */
    struct gin_lane *waiting;
    struct gin_request *free;
    const void *tested;         /* the request last tested in vain: only compared */
    uint32_t fruitless;         /* tests in vain since the queues were last looked at */
    uint32_t fresh;             /* requests since progress was last called */
    uint32_t held;              /* requests whose doorbell waits for more to come, */
    uint64_t held_at, fresh_at; /* since then; the last of them came then */
    struct gin_block *blocks;   /* of requests */
};

/* Of a comm or of a set; NULL when it is neither. */
struct gin_comm *gin_comm_of(void *handle);
struct gin_set *gin_set_of(void *handle);
/* Keep the first error of the comm; return it in NCCL's words. */
net_result gin_fail(struct gin_comm *comm, int error);

/* gin_comm.c */
net_result gin_comm_listen(void *context, int device, void *handle, void **listen_comm);
net_result gin_comm_close_listen(void *listen_comm);
/* own_contexts: how many contexts come with the comm (v11, v12), or 0. */
net_result gin_comm_connect(void *handles[], int ranks, int rank, int own_contexts, void *listen_comm,
                            void **coll_comm);
net_result gin_comm_close(void *coll_comm);
net_result gin_comm_error(void *handle, bool *has_error);
net_result gin_set_create(void *coll_comm, int contexts, void **set);
net_result gin_set_destroy(void *set);

/* gin_memory.c */
net_result gin_memory_register(void *coll_comm, const struct prs_mem *mem, bool is_device, uint64_t flags,
                               void **mhandle);
gin_reg_fn gin_memory_reg;
gin_reg_dmabuf_fn gin_memory_reg_dmabuf;
rma_reg_fn rma_memory_reg;
rma_reg_dmabuf_fn rma_memory_reg_dmabuf;
net_result gin_memory_release(void *coll_comm, void *mhandle);

/* gin_settle.c */
/* Before memory of the comm goes: what was sent before this call, by a rank that knows that it is done, is raised.
 * Waits for whoever drives the comm's sets, but not for long. */
void gin_settle(struct gin_comm *comm);
/* By the driver: the question that a round of progress, which begins after this, may answer; and the round's end, when
 * it has handled so many events. */
uint32_t gin_settle_asked(const struct gin_set *set);
void gin_settle_answer(struct gin_set *set, uint32_t asked, int handled);

/* gin_request.c */
struct gin_transfer {
    uint64_t src_offset, dst_offset, size, signal_offset, value;
    struct gin_memory *src, *dst, *signal;
    uint32_t rank, operation;
    bool strong;
};
net_result gin_request_put(struct gin_set *set, int context, const struct gin_transfer *transfer, void **request);
gin_get_v13 gin_request_get;
gin_flush_v13 gin_request_flush;
gin_test_fn gin_request_test;
gin_progress_fn gin_request_progress;
void gin_request_free_all(struct gin_set *set);

#endif
