/* SPDX-License-Identifier: Apache-2.0 */
/**
 * A team: a set of ranks that reach each other through peers, each made when it is first used. A team has contexts.
 * Each pair of ranks has its own peer in each context, so contexts are independent ordering domains. Different threads
 * may drive different contexts, one thread at a time for each.
 *
 * There is no accept thread. Connections are accepted inside prs_team_progress(), on behalf of every context.
 *
 * Threads. One thread at a time may use a context and its peers. prs_team_set_traffic_class(), prs_team_drains(),
 * prs_team_rank(), prs_team_world() and, until the context is closed, prs_team_stats() may be called from any
 * thread. */
#ifndef PERSEUS_TEAM_H
#define PERSEUS_TEAM_H

#include <perseus/perseus.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PRS_TEAM_CONTEXTS = 4096,       /* open at a time; a context id may be any number */
    PRS_TEAM_RANK_INFO_BYTES = 192, /* caller's bytes that ranks exchange while connecting */
};

struct prs_team;

/** Options of prs_team_open(). */
struct prs_team_options {
    struct prs_fabric *fabric;
    const struct prs_rail_set *rails; /* copied */
    struct prs_listener *listener;    /* made by prs_listen() on the same rails; from here on the team owns it */
    const struct prs_handle *handles; /* [world], of every rank's listener, by rank; copied */
    uint32_t rank;
    uint32_t world;   /* the number of ranks */
    uint32_t max_ops; /* as in struct prs_peer_options */
    int queues_per_rail;
    int traffic_class;   /* -1: the fabric's */
    const char *policy;  /* as in struct prs_peer_options; copied */
    bool exclusive_adds; /* as in struct prs_peer_options */
    /* limit of prs_team_connect(), and of a connection if longer than the fabric's; 0: the fabric's */
    uint32_t timeout_ms;
    const void *rank_info;    /* what this rank tells about itself: copied; every rank that connects gets it */
    uint32_t rank_info_bytes; /* at most PRS_TEAM_RANK_INFO_BYTES */
    uint64_t reserved[PRS_RESERVED_WORDS]; /* 0 */
};

/** Local. On failure the caller still owns the listener. Return 0, -EINVAL or -ENOMEM. */
PRS_API int prs_team_open(const struct prs_team_options *options, struct prs_team **out);
/** Close every peer, then the listener. NULL is allowed. */
PRS_API void prs_team_close(struct prs_team *team);

/** The traffic class of connections that are made or accepted from now on; -1: the fabric's. */
PRS_API void prs_team_set_traffic_class(struct prs_team *team, int traffic_class);

/** Return whether the policy is `drain`: a signal waits until all puts before it are complete. */
PRS_API bool prs_team_drains(const struct prs_team *team);

/**
 * The peer to a rank in a context. This rank has one to itself, too: a loop through the NIC. Return 0, PRS_AGAIN
 * (connecting: make progress and ask again) or -errno. */
PRS_API int prs_team_peer(struct prs_team *team, uint32_t context_id, uint32_t rank, struct prs_peer **out);
/** The rank_info of a rank that is connected in a context: rank_info_bytes bytes, or NULL. It came over the network:
 * check it. */
PRS_API const void *prs_team_rank_info(struct prs_team *team, uint32_t context_id, uint32_t rank);
/** Close a context's peers; a rank that still sends to them gets an error. No thread may be using the context. */
PRS_API void prs_team_close_context(struct prs_team *team, uint32_t context_id);
/** Accept, connect, and progress every peer of one context. Return how many events were handled or the first error. */
PRS_API int prs_team_progress(struct prs_team *team, uint32_t context_id);
/**
 * Collective: connect to every other rank in a context, with one connection for each pair. Blocks, at most for the time
 * limit. Return 0, -ETIMEDOUT (the text names a missing rank) or another -errno. */
PRS_API int prs_team_connect(struct prs_team *team, uint32_t context_id);
/** As prs_team_connect(), but not to the `count` ranks from `first` on, which need not be there: those of this rank's
 * node, which are reached without a NIC. A connection to one of them is made when it is first used. */
PRS_API int prs_team_connect_except(struct prs_team *team, uint32_t context_id, uint32_t first, uint32_t count);
/** As prs_team_connect(), but only to the ranks before and after this one, modulo the world. */
PRS_API int prs_team_connect_ring(struct prs_team *team, uint32_t context_id);
/** Calls prs_peer_settle() for every peer of a context. Return 0 when all have settled, PRS_AGAIN (make progress and
 * ask again) or -errno. */
PRS_API int prs_team_settle(struct prs_team *team, uint32_t context_id);
/**
 * Return whether signals have arrived in a context, with all puts before them, that this rank has not raised yet. If
 * there are none after a prs_team_progress() that handled nothing, and no peer is still sending, memory that signals
 * target may be released. Call it on the thread that progresses the context. */
PRS_API bool prs_team_is_raising(struct prs_team *team, uint32_t context_id);
/** The sum of the counters of a context's peers; they may be slightly out of date. */
PRS_API void prs_team_stats(struct prs_team *team, uint32_t context_id, struct prs_stats *out);
/** The first error of the team, naming the rank; "" while there is none. */
PRS_API const char *prs_team_error(const struct prs_team *team);
/** The rank that the first error of the team is about. Return 0, or -ENOENT: there is no error, or it does not concern
 * a single rank. */
PRS_API int prs_team_failed_rank(const struct prs_team *team, uint32_t *rank);

/** This rank, and the number of ranks. */
PRS_API uint32_t prs_team_rank(const struct prs_team *team);
PRS_API uint32_t prs_team_world(const struct prs_team *team);

#ifdef __cplusplus
}
#endif
#endif
