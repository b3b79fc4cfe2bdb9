/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "plugin/device.h"
#include "plugin/gin.h"
#include "plugin/result.h"
#include "transport/util/env.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum { MAX_CONTEXTS = PRS_TEAM_CONTEXTS - 1 }; /* gather.c uses one */

/* ---- listening ---- */

net_result gin_comm_listen(void *context, int device, void *handle, void **listen_comm)
{
    struct gin_listener *listener = calloc(1, sizeof(*listener));
    const struct plugin_context *plugin = context;
    struct prs_handle out;
    int r;

    *listen_comm = NULL;
    if (!listener)
        return result_from_errno(prs_fail(-ENOMEM, "GIN: listen: no memory"));
    r = device_rails(plugin, device, &listener->rails);
    if (!r) {
        listener->fabric = plugin->fabric;
        memset(&out, 0, sizeof(out));
        r = prs_listen(listener->fabric, &listener->rails, &out, &listener->listener);
    }
    if (r < 0) {
        free(listener);
        return result_from_errno(r);
    }
    memcpy(handle, &out, sizeof(out));
    *listen_comm = listener;
    return NET_SUCCESS;
}

net_result gin_comm_close_listen(void *listen_comm)
{
    struct gin_listener *listener = listen_comm;

    if (listener)
        prs_listener_close(listener->listener); /* NULL after the team has taken it */
    free(listener);
    return NET_SUCCESS;
}

/* ---- coll comms ---- */

static void learn_of_rails(struct gin_comm *comm)
{
    struct prs_rail_info info;

    comm->raises =
        prs_fabric_receiver_raises(comm->fabric, &comm->rails) == 1; /* errors are reported when peers connect */
    /* A word that the CPU raises flushes nothing, and a NIC does not flush the writes of another. */
    comm->signal_flushes = !comm->raises && comm->rails.count == 1;
    for (int i = 0; i < comm->rails.count; i++) {
        if (prs_rail_query(comm->fabric, comm->rails.rail[i], &info))
            continue;
        comm->relaxed |= info.relaxed_ordering;
        comm->signal_flushes &= info.strict_is_last;
    }
}

/* As in NCCL's own transport, variables override what the communicator asks for. */
static int choose_traffic_class(int wanted, int *out)
{
    long value;
    int r = prs_env_int("NCCL_GIN_IB_TC", -1, -1, 255, &value);

    if (r < 0)
        return r;
    if (value < 0 && !prs_env_text("NCCL_IB_TC"))
        value = wanted;
    if (value > 255)
        return prs_fail(-EINVAL, "GIN: traffic class %d of the communicator: must be at most 255", wanted);
    *out = value < 0 ? -1 : (int)value;
    return 0;
}

/* The team takes the listener, unless this fails. Return 0 or -errno. */
static int open_team(struct gin_comm *comm, struct gin_listener *listener, void *handles[])
{
    struct prs_handle *copy = calloc(comm->ranks, sizeof(*copy));
    struct gather_info info;
    struct prs_team_options options = {
        .fabric = comm->fabric,
        .rails = &comm->rails,
        .listener = listener->listener,
        .handles = copy,
        .rank = comm->rank,
        .world = comm->ranks,
        .max_ops = GIN_MAX_OPS,
        .traffic_class = -1,
        /* Only GIN adds to NCCL's signals, and no kernel resets one while adds are in flight. */
        .exclusive_adds = true,
        .timeout_ms = GIN_CONNECT_MS,
        .rank_info = &info,
        .rank_info_bytes = sizeof(info),
    };
    long gather_ms;
    int r;

    if (!copy)
        return prs_fail(-ENOMEM, "GIN: connect: no memory for %u handles", comm->ranks);
    for (uint32_t rank = 0; rank < comm->ranks; rank++)
        memcpy(&copy[rank], handles[rank], sizeof(*copy));
    r = prs_env_int("PERSEUS_GIN_TIMEOUT_MS", GIN_GATHER_MS, 10, 86400000, &gather_ms);
    if (!r)
        r = gather_init(&comm->gather, comm->fabric, &comm->rails, comm->rank, comm->ranks, (uint32_t)gather_ms, &info);
    if (!r)
        r = prs_team_open(&options, &comm->team);
    if (!r)
        listener->listener = NULL;
    free(copy);
    return r;
}

net_result gin_comm_connect(void *handles[], int ranks, int rank, int own_contexts, void *listen_comm, void **coll_comm)
{
    struct gin_listener *listener = listen_comm;
    struct gin_comm *comm;
    void *own = NULL;
    long hold_ns = 0;
    int r;

    *coll_comm = NULL;
    if (!listener || !listener->listener || ranks < 1 || rank < 0 || rank >= ranks)
        return result_from_errno(
            prs_fail(-EINVAL, "GIN: connect of rank %d of %d: there is no such rank, or no listener", rank, ranks));
    r = prs_env_int("PERSEUS_GIN_HOLD_NS", GIN_HOLD_NS, 0, 1000000000, &hold_ns);
    if (r < 0)
        return result_from_errno(r);
    comm = calloc(1, sizeof(*comm));
    if (!comm)
        return result_from_errno(prs_fail(-ENOMEM, "GIN: connect: no memory"));
    comm->base = (struct gin_base){GIN_COMM, comm};
    comm->fabric = listener->fabric;
    comm->rails = listener->rails;
    comm->rank = (uint32_t)rank;
    comm->ranks = (uint32_t)ranks;
    learn_of_rails(comm);
    pthread_mutex_init(&comm->lock, NULL);
    comm->hold_ns = (uint32_t)hold_ns;
    r = open_team(comm, listener, handles);
    if (!r)
        r = gather_connect(&comm->gather, comm->team);
    if (!r && own_contexts > 0 &&
        gin_set_create(comm, &(struct gin_set_options){.contexts = own_contexts, .traffic_class = -1}, &own) !=
            NET_SUCCESS)
        r = -ENOMEM;
    if (r < 0) {
        gin_comm_close(comm);
        return result_from_errno(r);
    }
    comm->own = own;
    PRS_INFO("GIN: rank %d of %d is ready; it connects to others when they are first used", rank, ranks);
    *coll_comm = comm;
    return NET_SUCCESS;
}

net_result gin_comm_close(void *coll_comm)
{
    struct gin_comm *comm = coll_comm;

    if (!comm)
        return NET_SUCCESS;
    gin_set_destroy(comm->own);
    prs_team_close(comm->team);
    gather_fini(&comm->gather);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
    return NET_SUCCESS;
}

net_result gin_comm_properties(void *coll_comm, struct rma_properties_v16 *properties)
{
    const struct gin_comm *comm = gin_comm_of(coll_comm);

    if (!comm)
        return result_from_errno(prs_fail(-EINVAL, "RMA: properties of a handle that is not a comm"));
    properties->signal_flushes_all_puts = comm->signal_flushes;
    return NET_SUCCESS;
}

/* ---- sets of contexts ---- */

static uint32_t contexts_left(struct gin_comm *comm)
{
    uint32_t left, numbers = GATHER_CONTEXT - comm->next_context;

    pthread_mutex_lock(&comm->lock);
    left = MAX_CONTEXTS - comm->contexts;
    pthread_mutex_unlock(&comm->lock);
    return left < numbers ? left : numbers;
}

net_result gin_set_create(void *coll_comm, const struct gin_set_options *options, void **out)
{
    struct gin_comm *comm = gin_comm_of(coll_comm);
    int contexts = options->contexts, traffic_class = -1, r;
    struct gin_set *set;

    *out = NULL;
    r = choose_traffic_class(options->traffic_class, &traffic_class);
    if (r < 0)
        return result_from_errno(r);
    if (!comm || contexts < 1 || (uint32_t)contexts > contexts_left(comm))
        return result_from_errno(
            prs_fail(-EINVAL, "GIN: %d contexts requested: %u are left", contexts, comm ? contexts_left(comm) : 0));
    set = calloc(1, sizeof(*set));
    if (!set)
        return result_from_errno(prs_fail(-ENOMEM, "GIN: contexts: no memory"));
    set->base = (struct gin_base){GIN_SET, comm};
    set->contexts = (uint32_t)contexts;
    set->hold_ns = options->says_more ? 0 : comm->hold_ns;
    set->queues = calloc((size_t)set->contexts * comm->ranks, sizeof(*set->queues));
    if (!set->queues) {
        free(set);
        return result_from_errno(prs_fail(-ENOMEM, "GIN: %d contexts of %u ranks: no memory", contexts, comm->ranks));
    }
    /* Contexts connect when they are first used, so contexts of older sets that connect from now on also get this
     * class. */
    prs_team_set_traffic_class(comm->team, traffic_class);
    /* Every rank creates the same sets in the same order, so the numbers agree. A number is never used again, since
     * other ranks may not have destroyed the old set. */
    set->first_context = comm->next_context;
    comm->next_context += set->contexts;
    for (uint32_t c = 0; c < set->contexts; c++)
        for (uint32_t rank = 0; rank < comm->ranks; rank++) {
            struct gin_queue *queue = &set->queues[c * comm->ranks + rank];

            queue->context = set->first_context + c;
            queue->rank = rank;
        }
    pthread_mutex_lock(&comm->lock);
    set->next = comm->sets;
    comm->sets = set;
    comm->contexts += set->contexts;
    pthread_mutex_unlock(&comm->lock);
    set->metrics.team = comm->team;
    set->metrics.first_context = set->first_context;
    set->metrics.contexts = set->contexts;
    metrics_add(&set->metrics, "gin", comm->fabric, &comm->rails);
    *out = set;
    return NET_SUCCESS;
}

static void remove_from_comm(struct gin_set *set)
{
    struct gin_comm *comm = set->base.comm;
    struct gin_set **link;

    pthread_mutex_lock(&comm->lock);
    for (link = &comm->sets; *link != set; link = &(*link)->next)
        ;
    *link = set->next;
    comm->contexts -= set->contexts;
    pthread_mutex_unlock(&comm->lock);
}

net_result gin_set_destroy(void *handle)
{
    struct gin_set *set = handle;

    if (!set)
        return NET_SUCCESS;
    metrics_remove(&set->metrics);
    remove_from_comm(set);
    /* Close the peers before the requests are freed: completions write to requests. */
    for (uint32_t c = 0; c < set->contexts; c++)
        prs_team_close_context(set->base.comm->team, set->first_context + c);
    gin_request_free_all(set);
    free(set->queues);
    free(set);
    return NET_SUCCESS;
}
