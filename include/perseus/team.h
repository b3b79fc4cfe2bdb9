/* SPDX-License-Identifier: Apache-2.0 */
/**
 * A team: ranks that reach each other by peers which are made when first used. A team has contexts; each pair of ranks
 * has a peer of its own in each context, so contexts are independent ordering domains and may be driven by different
 * threads (one thread at a time for one context).
 *
 * Nobody accepts for you: while a rank waits for others to connect, prs_team_progress() of any context accepts for all.
 */
#ifndef PERSEUS_TEAM_H
#define PERSEUS_TEAM_H

#include <perseus/perseus.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PRS_TEAM_CONTEXTS = 4096,  /* at a time; their numbers are any, and those of dropped ones need not come again */
    PRS_TEAM_CARD_BYTES = 192, /* caller's bytes that ranks exchange while connecting */
};

struct prs_team;

struct prs_team_options {
    struct prs_fabric *fabric;
    const struct prs_rail_set *rails; /* copied */
    struct prs_listener *listener;    /* made by prs_listen() on the same rails; the team's from here on */
    const struct prs_handle *handles; /* [size], of every rank's listener, by rank; copied */
    uint32_t rank;
    uint32_t size;
    uint32_t window_ops; /* as in struct prs_peer_options */
    int queues_per_rail;
    int traffic_class;   /* -1: the fabric's */
    const char *policy;  /* as in struct prs_peer_options; copied */
    bool adds_alone;     /* as in struct prs_peer_options */
    uint32_t timeout_ms; /* limit of prs_team_connect(), and of each connection if the fabric's is shorter; 0: 30000 */
    const void *card;    /* copied; every rank that connects gets it */
    uint32_t card_bytes; /* at most PRS_TEAM_CARD_BYTES */
};

/** Local. On failure the listener stays the caller's. Return 0, -EINVAL or -ENOMEM. */
PRS_API int prs_team_open(const struct prs_team_options *options, struct prs_team **out);
/** Close every peer, then the listener. NULL is allowed. */
PRS_API void prs_team_close(struct prs_team *team);

/** Whether the policy is `drain`: a signal waits until all puts before it are complete. */
PRS_API bool prs_team_drains(const struct prs_team *team);

/**
 * The peer to a rank (its own included: a loop through the NIC) in a context. Return 0, PRS_AGAIN (connecting: progress
 * and ask again) or -errno. */
PRS_API int prs_team_peer(struct prs_team *team, uint32_t context, uint32_t rank, struct prs_peer **out);
/** The card of a rank that is connected in a context: card_bytes bytes, or NULL. Its content is from the wire. */
PRS_API const void *prs_team_card(struct prs_team *team, uint32_t context, uint32_t rank);
/** Close a context's peers; who still sends there gets an error. Nobody may be using the context. */
PRS_API void prs_team_drop(struct prs_team *team, uint32_t context);
/** Accept, connect, and progress every peer of one context. Return how many events were handled or the first error. */
PRS_API int prs_team_progress(struct prs_team *team, uint32_t context);
/**
 * Collective: have a peer to every other rank in a context, one connection a pair. Blocks, at most the time limit.
 * Return 0, -ETIMEDOUT (the text names a rank that is missing) or another -errno. */
PRS_API int prs_team_connect(struct prs_team *team, uint32_t context);
/** The same for one's two neighbours on the ring of ranks only. */
PRS_API int prs_team_connect_ring(struct prs_team *team, uint32_t context);
/** prs_peer_settle() of every peer of a context: 0 when all have settled, PRS_AGAIN (progress, and ask again), -errno.
 */
PRS_API int prs_team_settle(struct prs_team *team, uint32_t context);
/**
 * The receiving half: whether signals that have come to a context, with all that they stand for, are still being raised
 * here. Where that is false after a prs_team_progress() that handled nothing, the memory of signals that no peer is
 * still sending may go. For the thread that progresses the context. */
PRS_API bool prs_team_raises(struct prs_team *team, uint32_t context);
/** Add up the counters of a context's peers. */
PRS_API void prs_team_stats(struct prs_team *team, uint32_t context, struct prs_stats *out);
/** First error of the team, naming the rank; "" while it is sound. */
PRS_API const char *prs_team_error(const struct prs_team *team);

PRS_API uint32_t prs_team_rank(const struct prs_team *team);
PRS_API uint32_t prs_team_size(const struct prs_team *team);

#ifdef __cplusplus
}
#endif
#endif
