/* SPDX-License-Identifier: Apache-2.0 */
/* Private to team.c, team_connect.c and team_progress.c: what a team knows of its contexts and their peers. */
#ifndef TRANSPORT_TEAM_STATE_H
#define TRANSPORT_TEAM_STATE_H

#include <pthread.h>

#include "transport/connect/setup.h"
#include "transport/nic/fabric.h"
#include "transport/nic/cq_group.h"
#include "transport/util/error.h"
#include <perseus/team.h>

enum { PRS_TEAM_HELLO_MAGIC = 0x4d544550 /* "PETM" */ };

/* What each side sends while connecting. */
struct prs_team_hello {
    uint32_t magic, rank, size, context;
    uint8_t rank_info[PRS_TEAM_RANK_INFO_BYTES];
};
static_assert(sizeof(struct prs_team_hello) <= PRS_PRIVATE_DATA_BYTES, "sent as private data");

/* One rank in one context, with up to two connections, since both ranks may connect at once. */
struct prs_team_member {
    struct prs_peer *made;            /* this rank connected */
    struct prs_peer *accepted;        /* the other side connected */
    struct prs_connector *connecting; /* in progress */
    struct prs_peer *chosen;          /* the one that this rank sends on: never changes once set */
};

struct prs_team_context {
    uint64_t key;                    /* atomic: context id plus 1, stored after all other members; 0: free */
    struct prs_team_member *members; /* [size] */
    uint32_t *active;                /* ranks with a peer or a connector, in any order */
    uint32_t active_count;
    uint32_t connecting;       /* how many of them have a connector */
    uint32_t connect_at;       /* which active one is looked at first */
    struct prs_peer **peers;   /* [2 * size] those that are connected, in the order in which they came */
    uint32_t peer_count;       /* atomic: any thread may accept */
    uint32_t adopted;          /* how many of them the thread of the context knows */
    struct prs_peer_list list; /* of the adopted peers */
    struct prs_cq_group cqs;
    uint32_t look_in, look_at; /* rounds until peers may be due for a look, and which is the next */
    uint32_t look_rounds;      /* since the last look */
    uint64_t looked_ns;
    unsigned rounds;
    struct prs_first_error error; /* of this round, which goes on with the other ranks */
};

struct prs_team {
    struct prs_team_options options;
    struct prs_rail_set rails;
    struct prs_handle *handles;
    char policy[24];
    uint8_t rank_info[PRS_TEAM_RANK_INFO_BYTES];
    /* Protects the listener, all connecting, and the table of contexts. Transfers on chosen peers need no lock, since
     * one thread at a time uses a context. */
    pthread_mutex_t lock;
    struct prs_team_context contexts[PRS_TEAM_CONTEXTS]; /* hash table with linear probing, by context id */
    pthread_mutex_t text_lock;                           /* contexts of several threads may fail at once */
    char text[512];                                      /* of the first error; written once */
    uint32_t failed;                                     /* the rank that it is about, plus one; 0: no single one */
    const char *error;                                   /* [team-error] the text, once it is complete; "" before */
};

/* The slot with this key. Works without the lock too, since a context is closed only while no thread uses it. */
static inline struct prs_team_context *prs_team_find_key(struct prs_team *team, uint32_t context_id, uint64_t key)
{
    for (uint32_t i = 0; i < PRS_TEAM_CONTEXTS; i++) {
        struct prs_team_context *context = &team->contexts[(context_id + i) % PRS_TEAM_CONTEXTS];

        /* [context-key] pairs with the release in prs_team_make_context_locked(): the other members are complete. */
        if (__atomic_load_n(&context->key, __ATOMIC_ACQUIRE) == key)
            return context;
    }
    return NULL;
}

static inline struct prs_team_context *prs_team_find(struct prs_team *team, uint32_t context_id)
{
    return prs_team_find_key(team, context_id, context_id + 1ull);
}

/* Does this hello come from a rank of this team? */
bool prs_team_is_hello(const struct prs_team *team, const struct prs_team_hello *hello);
/* Find or create the context. Return 0, -ENOSPC (too many contexts) or -ENOMEM; then *out is NULL. */
int prs_team_make_context_locked(struct prs_team *team, uint32_t context_id, struct prs_team_context **out);
void prs_team_activate_locked(struct prs_team_context *context, uint32_t rank);
/* Let the thread of the context use the peer. */
void prs_team_file_locked(struct prs_team_context *context, uint32_t rank, struct prs_peer *peer);

/* Remember the text of the team's first error. */
void prs_team_keep_text(struct prs_team *team, const char *text);
/* Add the rank to the text of an error. The peer or connector has logged the cause. Return the error. */
int prs_team_fail_rank(struct prs_team *team, uint32_t context, uint32_t rank, int error);

/* team_connect.c. Making queues takes a NIC milliseconds, while established peers wait: both functions below begin no
 * more after until_ns (0: no limit), but take one step at least.
 *
 * Take the peers that have connected to this rank. Return 0 or -errno. */
int prs_team_accept_locked(struct prs_team *team, uint64_t until_ns);
/* A peer was accepted: find out which rank and context it belongs to. Its hello comes over the network, so check it:
 * one that is not of this team is closed. Return 0 or -errno. */
void prs_team_file_accepted_locked(struct prs_team *team, struct prs_peer *peer);
/* Go on with the connections that this rank makes. *did grows by those that are made; the context keeps an error. */
void prs_team_step_connectors(struct prs_team *team, struct prs_team_context *context, uint32_t context_id,
                              uint64_t until_ns, int *did);

#endif
