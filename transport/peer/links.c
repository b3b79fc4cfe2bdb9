/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/links.h"

#include "transport/nic/cq_group.h"
#include "transport/peer/fail.h"
#include "transport/peer/peer.h"

enum { RECEIVE_DEPTH = PRS_NOTIFY_IDS / 2 /* the most unfinished notifications */ };

int prs_links_open_path(const struct prs_peer *peer, uint32_t path, const struct prs_rail_address *own,
                        const struct prs_wire_queues *remote, struct prs_link **out)
{
    const struct prs_config *config = &peer->fabric->config;
    const struct prs_rail *rail = &peer->fabric->rail[peer->path[path].local_rail];
    uint32_t most = rail->domain->max_receive_wr, depth = peer->order.queue[0].mask + 1;
    uint32_t ids[PRS_ORDER_MAX_QUEUES_PER_RAIL];
    struct prs_shared_cqs *shared = NULL;
    int r = peer->cqs ? prs_cq_group_get(peer->cqs, rail, &shared) : 0;
    struct prs_link_options options = {.rail = rail,
                                       .config = config,
                                       .own = own,
                                       .traffic_class = peer->traffic_class,
                                       .service_level =
                                           rail->info.is_roce && config->service_level < 0 ? 0 : peer->service_level,
                                       .queues = peer->queues_per_path,
                                       .ids = ids,
                                       .remote_port = &peer->path[path].peer.address,
                                       .remote = remote ? remote->queue : NULL,
                                       .depth = depth,
                                       .loopback_depth = prs_links_loopback_depth(depth),
                                       .receive_depth = most && most < RECEIVE_DEPTH ? most : RECEIVE_DEPTH,
                                       .shared = shared};

    if (r)
        return r;
    for (uint32_t k = 0; k < peer->queues_per_path; k++)
        ids[k] = k * peer->path_count + path; /* numbered as in order.h */
    return peer->nic->open(&options, out);
}

int prs_links_open(struct prs_peer *peer, const struct prs_wire_queues *remote)
{
    for (uint32_t i = 0; i < peer->path_count; i++) {
        int r = prs_links_open_path(peer, i, &peer->path[i].own, remote, &peer->link[i]);

        if (r)
            return r;
        for (uint32_t k = 0; k < peer->queues_per_path; k++)
            peer->queue[k * peer->path_count + i] = peer->link[i]->queue[k];
    }
    return 0;
}

static bool has_loopbacks(const struct prs_peer *peer)
{
    uint32_t i = 0;

    while (i < peer->path_count && peer->queue[peer->queues + i])
        i++;
    return i == peer->path_count;
}

int prs_links_open_loopbacks(struct prs_peer *peer)
{
    int r = 0;

    if (has_loopbacks(peer))
        return 0;
    prs_peer_lock(peer); /* links may be replaced */
    for (uint32_t i = 0; i < peer->path_count && !r; i++) {
        uint32_t id = peer->queues + i;

        /* A path that is lost, or stopped to be, gets one when it comes back: until then nothing is posted there. */
        if (!peer->queue[id] && peer->order.path[i].use != PRS_PATH_STOPPED && !prs_order_path_is_lost(&peer->order, i))
            r = peer->nic->loopback(peer->link[i], id, &peer->queue[id]);
    }
    prs_peer_unlock(peer);
    return r;
}

int prs_links_probe(struct prs_peer *peer, struct prs_op *op, uint64_t addr, const uint64_t *rkey)
{
    struct prs_wr requests[PRS_MAX_RAILS];

    for (uint32_t i = 0; i < peer->path_count; i++) {
        const struct prs_domain *domain = peer->link[i]->rail->domain;

        requests[i] = (struct prs_wr){.local_addr = (uintptr_t)domain->scratch.addr,
                                      .local_key = prs_own_memory_local_key(&domain->scratch, 0),
                                      .remote_addr = addr,
                                      .remote_key = rkey[i],
                                      .len_bytes = 1};
    }
    return prs_order_probe(&peer->order, op, requests);
}
