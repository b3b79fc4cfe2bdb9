/* SPDX-License-Identifier: Apache-2.0 */
/* GIN and RMA: one-sided transfers between the ranks of a communicator. A "coll comm" is a team and its registrations.
 * A "set" is what createContext makes: some team contexts, each of which orders its transfers independently and has a
 * peer for each rank, connected at first use.
 *
 * Threads: one thread (NCCL's proxy) calls put, get, flush, test and progress of a set. Other threads register and
 * close at the same time. */
#ifndef PERSEUS_PLUGIN_GIN_H
#define PERSEUS_PLUGIN_GIN_H

#include <sys/types.h>

#include "plugin/abi_gin.h"
#include "plugin/gather.h"
#include "plugin/metrics.h"

enum {
    GIN_MAX_OPS = 512,      /* requests in flight to one rank in one context; further ones wait in the queue */
    GIN_CONNECT_MS = 60000, /* limit for connecting, which all ranks do at about the same time */
    /* limit for registering, which ranks may do later, since their programs may load or compile first */
    GIN_GATHER_MS = 1800000,
    GIN_HOLD_NS = 500, /* CTAs of a GPU write commands one after the other over PCIe: the next may come this soon */
    GIN_MAX_HELD = 16,
    GIN_PROMPT_BYTES = 8192, /* a put this long does not wait for others to share a doorbell */
};

/* First member of comms and sets: NCCL passes either to some functions. */
struct gin_base {
    uint32_t magic; /* enum gin_magic */
    struct gin_comm *comm;
};
enum gin_magic { GIN_COMM = 0x4e49475f, GIN_SET = 0x5445535f };

struct gin_listener {
    struct prs_fabric *fabric;
    struct prs_rail_set rails;
    struct prs_listener *listener; /* NULL after the team has taken it */
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
    uint32_t hold_ns;     /* for sets whose caller does not say whether more requests follow */
    bool relaxed;         /* some rail registers data with relaxed ordering */
    bool signal_flushes;  /* as signal_flushes_all_puts of struct rma_properties_v16 */
    bool raises;          /* this process raises the signals that arrive */
    pthread_mutex_t lock; /* protects sets and contexts, which other threads read */
    struct gin_set *sets;
    uint32_t contexts; /* of all sets that exist */
    int error;         /* atomic; sticky */
};

struct gin_remote {
    uint64_t base, bytes;
    struct prs_keys keys;        /* data */
    struct prs_keys signal_keys; /* keys of the strict registration; equal to `keys` if that region is strict */
};

struct gin_memory {
    struct prs_region *region, *strict; /* strict: a second registration, for signals; NULL: region is used */
    uint64_t base, bytes;
    bool is_device;
    uint32_t ranks;
    struct gin_remote remote[];
};

enum gin_kind { GIN_REQUEST_PUT, GIN_REQUEST_GET, GIN_REQUEST_FLUSH };

struct gin_request {
    struct prs_op data, signal;
    struct gin_request *next; /* in a queue, or in the list of free ones */
    struct gin_set *set;
    struct gin_queue *queue;
    const struct gin_memory *src, *dst, *signal_memory;
    uint64_t src_offset, dst_offset, size, signal_offset, value;
    uint32_t group;
    uint8_t kind; /* enum gin_kind */
    bool has_signal, strong;
    bool more;        /* another request to this rank follows at once */
    bool data_posted; /* the data is posted; the signal may still wait for room */
};

/* The transfers to one rank in one context, in order. */
struct gin_queue {
    struct prs_peer *peer;            /* NULL until connected */
    struct gin_request *first, *last; /* not yet posted */
    struct gin_queue *next_waiting;   /* next queue with requests that wait */
    uint32_t context;                 /* of the team */
    uint32_t rank;
    uint32_t groups; /* how many groups weak signals have used */
    bool waiting;
};

struct gin_set {
    struct gin_base base;
    struct gin_set *next; /* of the comm's */
    uint32_t first_context, contexts;
    uint32_t hold_ns; /* see hold_back() */
    /* A thread that releases memory asks whether all signals that have arrived are raised (gin_raise.c). */
    uint32_t asked;           /* atomic: number of the last question */
    uint32_t answered;        /* atomic: number of the last question answered with yes */
    uint32_t rounds;          /* atomic: how often progress was called */
    uint32_t gave_up_at;      /* value of `rounds` when a question got no answer; under the comm's lock */
    pid_t driver;             /* atomic: the thread that called progress last; 0: none yet */
    struct gin_queue *queues; /* [contexts][ranks] */
    struct gin_queue *waiting;
    struct gin_request *free;
    const void *tested;             /* the last request that was tested and not done; it is only compared */
    uint32_t idle_tests;            /* tests of unfinished requests since the last progress */
    uint32_t new_requests;          /* since progress was last called */
    uint32_t held;                  /* requests that wait for others to share a doorbell with */
    uint64_t held_since, newest_at; /* when the first and the last of the held requests came */
    struct gin_block *blocks;       /* of requests */
    struct metrics_source metrics;
};

/* gin_handle.c */
/* The comm or the set of a handle, which is a comm or a set; NULL if it is neither. */
struct gin_comm *gin_comm_of(void *handle);
struct gin_set *gin_set_of(void *handle);
/* Keep the first error of the comm. Return NCCL's result for this error. */
net_result gin_fail(struct gin_comm *comm, int error);
net_result gin_comm_error(void *handle, bool *has_error);

/* gin_comm.c */
net_result gin_comm_listen(void *context, int device, void *handle, void **listen_comm);
net_result gin_comm_close_listen(void *listen_comm);
/* own_contexts: how many contexts come with the comm (v11, v12), or 0. */
net_result gin_comm_connect(void *handles[], int ranks, int rank, int own_contexts, void *listen_comm,
                            void **coll_comm);
net_result gin_comm_close(void *coll_comm);
rma_properties_v16_fn gin_comm_properties;
struct gin_set_options {
    int contexts;
    int traffic_class; /* -1: none given */
    bool says_more;    /* the caller says when more requests to a rank follow */
};
net_result gin_set_create(void *coll_comm, const struct gin_set_options *options, void **set);
net_result gin_set_destroy(void *set);

/* gin_memory.c */
net_result gin_memory_register(void *coll_comm, const struct prs_mem *mem, bool is_device, uint64_t flags,
                               void **mhandle);
gin_reg_fn gin_memory_reg;
gin_reg_dmabuf_fn gin_memory_reg_dmabuf;
rma_reg_fn rma_memory_reg;
rma_reg_dmabuf_fn rma_memory_reg_dmabuf;
net_result gin_memory_release(void *coll_comm, void *mhandle);

/* gin_raise.c */
/* Call it before memory of the comm is released: raises all signals that their senders know to be done. Waits for the
 * thread that drives the comm's sets, for a short time at most; if the caller is that thread, calls `progress`. */
void gin_raise_arrived(struct gin_comm *comm, gin_progress_fn *progress);
/* For the driver. gin_raise_asked() before a round of progress: the question that the round may answer. Then
 * gin_raise_answer(), with the number of events that the round has handled. */
uint32_t gin_raise_asked(const struct gin_set *set);
void gin_raise_answer(struct gin_set *set, uint32_t asked, int handled);

/* gin_request.c */
struct gin_transfer {
    uint64_t src_offset, dst_offset, size, signal_offset, value;
    struct gin_memory *src, *dst, *signal;
    uint32_t rank, operation; /* operation: GIN_SIGNAL_* */
    bool strong, more;
};
net_result gin_request_put(struct gin_set *set, int context, const struct gin_transfer *transfer, void **request);
rma_get_v15 gin_request_get;
gin_flush_v13 gin_request_flush;
gin_test_fn gin_request_test;
gin_progress_fn gin_request_progress;
void gin_request_free_all(struct gin_set *set);

#endif
