/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a peer: the steps that listener and connector have in common. */
#ifndef TRANSPORT_SETUP_H
#define TRANSPORT_SETUP_H

#include "transport/peer/peer.h"

/* A copy of the caller's options, private data included. */
struct prs_setup_options {
    prs_notify_fn *on_notify;
    void *user;
    uint32_t max_ops;
    int traffic_class;
    int service_level; /* on InfiniBand */
    uint32_t queues_per_rail;
    enum prs_policy policy; /* may be PRS_POLICY_AUTO */
    bool exclusive_adds;
    bool patient;
    bool replaces_rails;
    bool no_signals;
    uint32_t timeout_ms;
    struct prs_cq_group *cqs; /* completion queues to share; NULL: this peer shares none */
    struct prs_wire_private private_data;
};

/* Return 0 or -EINVAL. */
int prs_setup_options(const struct prs_fabric *fabric, const struct prs_peer_options *options,
                      struct prs_setup_options *out);

/* For a team, whose contexts each have one thread: the completion queues for a peer that sends this as private data.
 * NULL: its own. */
typedef struct prs_cq_group *prs_share_fn(void *user, const struct prs_wire_private *private_data);
void prs_listener_share(struct prs_listener *listener, prs_share_fn *share, void *user);
/* prs_accept() begins nothing new after this time, but takes one step at least. 0: no limit. */
void prs_listener_hurry(struct prs_listener *listener, uint64_t until_ns);
void prs_connector_share(struct prs_connector *connector, struct prs_cq_group *cqs);

/* State of prs_setup_connect(), which may need several tries. */
struct prs_setup_progress {
    uint32_t next_queue;
    int tries;
    uint64_t again_ns;
};

/* Create the queues of a peer over these paths. remote_position[i] is the index of path i's remote rail in the other
 * side's list, and so in its keys. remote: the other side's queues; NULL: not known yet. Return 0 or -errno. */
int prs_setup_open(const struct prs_fabric *fabric, const struct prs_setup_options *options,
                   const struct prs_path *path, const uint32_t *remote_position, uint32_t path_count,
                   uint32_t queues_per_path, const struct prs_wire_queues *remote, struct prs_peer **out);
/* Our queues, and our memory for records, as the other side needs to know them. */
void prs_setup_addresses(const struct prs_peer *peer, struct prs_wire_queues *out);
/* If the other side will send its signals as records, prepare to raise them. Return 0 or -errno. */
int prs_setup_accept_records(struct prs_peer *peer, const struct prs_wire_queues *remote);
/* Note where the other side wants the sizes of long messages, if it wants any. */
void prs_setup_send_sizes(struct prs_peer *peer, const struct prs_wire_window *sizes);
/* If our own signals go as records, send them to this memory. Return 0 or -errno. */
int prs_setup_send_records(struct prs_peer *peer, const struct prs_wire_window *records);
/* Connect to the other side's queues. Return 0, PRS_AGAIN or -errno. */
int prs_setup_connect(struct prs_peer *peer, const struct prs_wire_queues *remote, struct prs_setup_progress *progress);
/* The handshake is over: take over the stream and the private data. */
void prs_setup_finish(struct prs_peer *peer, struct prs_stream *stream, const struct prs_wire_private *private_data);

#endif
