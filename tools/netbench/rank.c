/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/rank.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "tools/netbench/link.h"
#include "tools/netbench/pattern.h"
#include "tools/netbench/report.h"

enum {
    SLOT_ALIGN = 64,
    SLOTS_MAX = 17,         /* one that leads in and 16 timed */
    SLOTS_BYTES = 64 << 20, /* of larger sizes only two are kept */
    COMPLAINTS_MAX = 10,
    LOOK_EVERY = 256, /* idle passes between looks at the clock */
};

enum phase { SERVICE_OPENING, SERVICE_OPEN, SERVICE_CLOSING };

struct rank {
    const struct options *options;
    struct world *world;
    int id;
    struct net net;
    int lane_count;
    struct lane *lanes;
    uint8_t *input, *output, *scratch;
    size_t buffer_bytes, scratch_bytes; /* of each; scratch: of one lane */
    int complaints;                     /* about data, that were printed */
    uint64_t iteration;                 /* of all sizes, counted up: no two have the same data */
    /* service thread */
    pthread_t service;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum phase phase;
    int service_result;
};

/* ------------------------------------------------------------------------------------------------------------------
 * sizes and buffers */

static size_t slot_bytes(size_t bytes)
{
    return (bytes + SLOT_ALIGN) / SLOT_ALIGN * SLOT_ALIGN;
}

static int slots_for(const struct options *options, size_t bytes)
{
    size_t fit = SLOTS_BYTES / slot_bytes(bytes);
    int most = options->iters + options->warmup + 1;

    most = most < SLOTS_MAX ? most : SLOTS_MAX;
    return fit < 2 ? 2 : fit > (size_t)most ? most : (int)fit;
}

static uint8_t *map_bytes(size_t bytes)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return data == MAP_FAILED ? NULL : data;
}

static bool has_input(enum op op)
{
    return op == OP_SENDRECV || op == OP_ALLTOALL;
}

static bool has_scratch(enum op op)
{
    return op == OP_ALLREDUCE || op == OP_REDUCESCATTER;
}

static int map_buffers(struct rank *rank)
{
    const struct options *options = rank->options;

    for (int i = 0; i < options->size_count; i++) {
        size_t bytes = slot_bytes(options->size[i]) * slots_for(options, options->size[i]);

        rank->buffer_bytes = bytes > rank->buffer_bytes ? bytes : rank->buffer_bytes;
    }
    rank->scratch_bytes = has_scratch(options->op) ? lane_scratch_bytes(options) : 0;
    rank->output = map_bytes(rank->buffer_bytes);
    rank->input = has_input(options->op) ? map_bytes(rank->buffer_bytes) : NULL;
    rank->scratch = rank->scratch_bytes ? map_bytes(rank->scratch_bytes * rank->lane_count) : NULL;
    if (!rank->output || (has_input(options->op) && !rank->input) || (rank->scratch_bytes && !rank->scratch)) {
        fprintf(stderr, "perseus-netbench: rank %d: cannot map buffers of %zu bytes: %s\n", rank->id,
                rank->buffer_bytes, strerror(errno));
        return -ENOMEM;
    }
    for (int i = 0; i < rank->lane_count; i++) {
        struct lane *lane = &rank->lanes[i];

        lane->output = (struct buffer){.data = rank->output, .bytes = rank->buffer_bytes};
        lane->input = (struct buffer){.data = rank->input, .bytes = rank->input ? rank->buffer_bytes : 0};
        lane->scratch = (struct buffer){.bytes = rank->scratch_bytes};
        if (rank->scratch)
            lane->scratch.data = rank->scratch + (size_t)i * rank->scratch_bytes;
    }
    return 0;
}

static void unmap_buffers(struct rank *rank)
{
    if (rank->output)
        munmap(rank->output, rank->buffer_bytes);
    if (rank->input)
        munmap(rank->input, rank->buffer_bytes);
    if (rank->scratch)
        munmap(rank->scratch, rank->scratch_bytes * rank->lane_count);
    rank->output = rank->input = rank->scratch = NULL;
}

/* ------------------------------------------------------------------------------------------------------------------
 * devices and lanes */

/** Return the first device to use and in *count how many, or -errno after printing why. */
static int choose_devices(struct rank *rank, int *count)
{
    struct net_vdevice_v12 all = {.count = 0};
    net_result result;
    int device = 0;

    result = rank->net.table.v6->devices(count);
    if (result != NET_SUCCESS || *count < 1) {
        fprintf(stderr, "perseus-netbench: rank %d: devices returned %d (%s) and %d devices\n", rank->id, result,
                net_result_text(result), *count);
        return -ENODEV;
    }
    if (!rank->options->fuse)
        return 0;
    for (int i = 0; i < *count && i < NET_VDEVICE_MAX_V12; i++)
        all.device[all.count++] = i;
    *count = 1;
    result = net_make_vdevice(&rank->net, &device, &all);
    if (result == NET_SUCCESS)
        return device;
    fprintf(stderr, "perseus-netbench: rank %d: makeVDevice of %d devices returned %d (%s)\n", rank->id, all.count,
            result, net_result_text(result));
    return -EIO;
}

static int check_group(const struct rank *rank, int device)
{
    struct net_properties_v12 properties;
    net_result result = net_properties(&rank->net, device, &properties);

    if (result != NET_SUCCESS) {
        fprintf(stderr, "perseus-netbench: rank %d: getProperties(%d) returned %d (%s)\n", rank->id, device, result,
                net_result_text(result));
        return -EIO;
    }
    if (rank->options->group <= properties.max_recvs)
        return 0;
    fprintf(stderr, "perseus-netbench: --group %d: this plugin has maxRecvs %d\n", rank->options->group,
            properties.max_recvs);
    return -EINVAL;
}

/** The ring's neighbours, or in an alltoall everybody. */
static int make_lanes(struct rank *rank)
{
    const struct options *options = rank->options;
    int peers = options->op == OP_ALLTOALL ? options->ranks - 1 : 1;
    int per_node = (options->ranks + options->nodes - 1) / options->nodes;
    int devices, first = choose_devices(rank, &devices);

    if (first < 0)
        return first;
    rank->lane_count = peers * options->comms;
    rank->lanes = calloc(rank->lane_count, sizeof(*rank->lanes));
    if (!rank->lanes)
        return -ENOMEM;
    for (int i = 0; i < rank->lane_count; i++) {
        struct lane *lane = &rank->lanes[i];
        int distance = 1 + i / options->comms;

        lane->net = &rank->net;
        lane->options = options;
        lane->share = (struct share){.rank = rank->id,
                                     .ranks = options->ranks,
                                     .to = (rank->id + distance) % options->ranks,
                                     .from = (rank->id + options->ranks - distance) % options->ranks,
                                     .comm = i % options->comms,
                                     .comms = options->comms};
        lane->device = first + (rank->id % per_node + lane->share.comm) % devices;
    }
    return check_group(rank, first);
}

/* ------------------------------------------------------------------------------------------------------------------
 * service thread */

static void set_phase(struct rank *rank, enum phase phase)
{
    pthread_mutex_lock(&rank->lock);
    rank->phase = phase;
    pthread_cond_broadcast(&rank->changed);
    pthread_mutex_unlock(&rank->lock);
}

static void await_phase(struct rank *rank, enum phase phase)
{
    pthread_mutex_lock(&rank->lock);
    while (rank->phase < phase)
        pthread_cond_wait(&rank->changed, &rank->lock); /* bounded: every call of the service thread is */
    pthread_mutex_unlock(&rank->lock);
}

/** Until the rank closes. Return 0 or -errno. */
static int churn(struct rank *rank)
{
    const struct timespec pause = {.tv_nsec = 200000};
    int r = 0;

    for (int i = 0; r == 0; i++) {
        bool is_closing;

        pthread_mutex_lock(&rank->lock);
        is_closing = rank->phase == SERVICE_CLOSING;
        pthread_mutex_unlock(&rank->lock);
        if (is_closing)
            break;
        r = link_churn(&rank->lanes[i % rank->lane_count]);
        nanosleep(&pause, NULL);
    }
    return r;
}

static void *serve(void *argument)
{
    struct rank *rank = argument;
    int r = link_open(rank->world, rank->lanes, rank->lane_count);

    if (r == 0)
        r = map_buffers(rank);
    if (r == 0)
        r = link_register(rank->lanes, rank->lane_count);
    rank->service_result = r;
    if (r < 0)
        world_stop(rank->world);
    set_phase(rank, SERVICE_OPEN);
    if (r == 0 && rank->options->churn)
        r = churn(rank);
    await_phase(rank, SERVICE_CLOSING);
    if (r < 0)
        rank->service_result = r;
    /* NCCL's order: registrations, then the memory, and only then the queues that may still know of it. */
    r = link_deregister(rank->lanes, rank->lane_count);
    unmap_buffers(rank);
    r |= link_close(rank->lanes, rank->lane_count);
    if (r < 0 && rank->service_result == 0)
        rank->service_result = -EIO;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------------------
 * iterations */

static void prepare(struct rank *rank, size_t bytes, int slot, uint64_t iteration)
{
    const struct options *options = rank->options;
    size_t offset = (size_t)slot * slot_bytes(bytes);
    struct pattern own = pattern_of_rank(iteration, rank->id);
    struct range block = plan_block(bytes, rank->id, options->ranks);

    if (has_input(options->op))
        pattern_fill(&own, rank->input + offset, 0, bytes);
    if (has_scratch(options->op))
        pattern_fill(&own, rank->output + offset, 0, bytes);
    else
        pattern_poison(rank->output + offset, bytes);
    if (options->op == OP_ALLGATHER)
        pattern_fill(&own, rank->output + offset + block.offset, block.offset, block.len);
}

static uint64_t compare(struct rank *rank, const struct pattern *pattern, const uint8_t *data, size_t from, size_t len)
{
    size_t first = 0;
    size_t wrong = pattern_differs(pattern, data, from, len, &first);

    if (wrong && rank->complaints++ < COMPLAINTS_MAX)
        fprintf(stderr, "perseus-netbench: rank %d: %zu of %zu bytes are wrong, the first at %zu (%#x)\n", rank->id,
                wrong, len, from + first, data[first]);
    return wrong;
}

static uint64_t check(struct rank *rank, size_t bytes, int slot, uint64_t iteration)
{
    const struct options *options = rank->options;
    const uint8_t *data = rank->output + (size_t)slot * slot_bytes(bytes);
    struct pattern sum = pattern_of_sum(iteration, options->ranks), of;
    struct range block = plan_block(bytes, rank->id, options->ranks);
    uint64_t wrong = 0;

    switch (options->op) {
    case OP_SENDRECV:
        of = pattern_of_rank(iteration, (rank->id + options->ranks - 1) % options->ranks);
        return compare(rank, &of, data, 0, bytes);
    case OP_ALLREDUCE:
        return compare(rank, &sum, data, 0, bytes);
    case OP_REDUCESCATTER:
        return compare(rank, &sum, data + block.offset, block.offset, block.len);
    case OP_ALLGATHER:
        for (int q = 0; q < options->ranks; q++) {
            block = plan_block(bytes, q, options->ranks);
            of = pattern_of_rank(iteration, q);
            wrong += compare(rank, &of, data + block.offset, block.offset, block.len);
        }
        return wrong;
    default: /* alltoall: block q came from rank q, out of what it had for this rank */
        block = plan_equal(bytes, rank->id, options->ranks);
        for (int q = 0; q < options->ranks; q++) {
            struct range to = plan_equal(bytes, q, options->ranks);

            of = pattern_of_rank(iteration, q);
            wrong += compare(rank, &of, data + to.offset, block.offset, block.len);
        }
        return wrong;
    }
}

/** An alltoall's block for oneself does not take the network. */
static void copy_own(struct rank *rank, size_t bytes, size_t offset)
{
    struct range block = plan_equal(bytes, rank->id, rank->options->ranks);

    if (rank->options->op == OP_ALLTOALL)
        memcpy(rank->output + offset + block.offset, rank->input + offset + block.offset, block.len);
}

static void report_waits(const struct rank *rank)
{
    for (int i = 0; i < rank->lane_count; i++) {
        char text[512];

        if (lane_is_done(&rank->lanes[i]))
            continue;
        lane_describe(&rank->lanes[i], text, sizeof(text));
        fprintf(stderr, "perseus-netbench: rank %d: %s\n", rank->id, text);
    }
}

/** Return 0 to go on waiting, -ECANCELED or -ETIMEDOUT. */
static int look_up(struct rank *rank, double since)
{
    __atomic_add_fetch(&rank->world->rank[rank->id].beats, 1, __ATOMIC_RELAXED);
    if (world_stopped(rank->world))
        return -ECANCELED;
    return world_now() - since > rank->options->timeout_s * 1e6 ? -ETIMEDOUT : 0;
}

/** One operation. Return 0 or -errno. */
static int run_once(struct rank *rank, size_t bytes, int slot)
{
    size_t offset = (size_t)slot * slot_bytes(bytes);
    double since = world_now();
    int idle = 0, left = rank->lane_count;

    for (int i = 0; i < rank->lane_count; i++)
        lane_begin(&rank->lanes[i], offset);
    copy_own(rank, bytes, offset);
    while (left > 0) {
        int happened = 0;

        left = 0;
        for (int i = 0; i < rank->lane_count; i++) {
            int r;

            if (lane_is_done(&rank->lanes[i]))
                continue;
            r = lane_step(&rank->lanes[i]);
            if (r < 0)
                return r;
            happened |= r;
            left += !lane_is_done(&rank->lanes[i]);
        }
        if (happened) {
            idle = 0;
            continue;
        }
        if (idle++ == 0)
            since = world_now();
        if (idle % LOOK_EVERY == 0) {
            int r = look_up(rank, since);

            if (r < 0) {
                report_waits(rank);
                return r;
            }
        }
        if (idle % rank->options->yield == 0)
            sched_yield(); /* ranks may be more than cores */
    }
    return 0;
}

/**
 * A batch: fill all slots, run them back to back, check them. The first leads in: it makes up for ranks leaving the
 * barrier one after the other, and is not timed. Return the number of iterations timed or -errno.
 */
static int run_batch(struct rank *rank, size_t bytes, int slots, int done, uint64_t *errors)
{
    const struct options *options = rank->options;
    double *usec = world_usec(rank->world, rank->id), before = 0;
    int total = options->warmup + options->iters - done + 1;
    int batch = slots < total ? slots : total;
    uint64_t first = rank->iteration;
    int r;

    rank->iteration += batch;
    for (int i = 0; i < batch; i++)
        if (options->check || done == 0)
            prepare(rank, bytes, i, first + i);
    r = world_barrier(rank->world, options->setup_timeout_s);
    for (int i = 0; i < batch && r == 0; i++) {
        double now;

        r = run_once(rank, bytes, i);
        now = world_now();
        if (i > 0 && done + i - 1 >= options->warmup)
            usec[done + i - 1 - options->warmup] = now - before;
        before = now;
    }
    if (r < 0)
        return r;
    for (int i = 0; options->check && i < batch; i++)
        *errors += check(rank, bytes, i, first + i);
    return batch - 1;
}

/** Return 0 or -errno; the errors found go to the world. */
static int run_size(struct rank *rank, size_t bytes)
{
    const struct options *options = rank->options;
    struct rank_state *state = &rank->world->rank[rank->id];
    int slots = slots_for(options, bytes), r = 0;
    uint64_t errors = 0;

    for (int i = 0; i < rank->lane_count; i++) {
        rank->lanes[i].errors = 0;
        plan_make(&rank->lanes[i].plan, options, bytes, &rank->lanes[i].share);
    }
    for (int done = 0; done < options->warmup + options->iters; done += r) {
        r = run_batch(rank, bytes, slots, done, &errors);
        if (r < 0)
            return r;
    }
    for (int i = 0; i < rank->lane_count; i++)
        errors += rank->lanes[i].errors;
    state->errors = errors;
    r = world_barrier(rank->world, options->setup_timeout_s);
    if (r == 0 && rank->id == 0)
        report_size(options, &rank->net, rank->world, bytes);
    return r < 0 ? r : world_barrier(rank->world, options->setup_timeout_s);
}

/** Return 0 or -errno. */
static int run_sizes(struct rank *rank)
{
    bool is_wrong = false;
    int r = rank->service_result;

    for (int i = 0; i < rank->options->size_count && r == 0; i++) {
        r = run_size(rank, rank->options->size[i]);
        is_wrong |= rank->world->rank[rank->id].errors > 0;
    }
    if (r < 0) {
        if (r == -ETIMEDOUT)
            fprintf(stderr, "perseus-netbench: rank %d: no progress for %d s (%d s while all ranks meet)\n", rank->id,
                    rank->options->timeout_s, rank->options->setup_timeout_s);
        world_stop(rank->world);
    }
    return r < 0 ? r : is_wrong ? -EBADMSG : 0;
}

int rank_run(const struct options *options, struct world *world, int id)
{
    struct rank rank = {.options = options,
                        .world = world,
                        .id = id,
                        .lock = PTHREAD_MUTEX_INITIALIZER,
                        .changed = PTHREAD_COND_INITIALIZER,
                        .phase = SERVICE_OPENING};
    net_result result;
    int r;

    r = net_load(&rank.net, options->plugin, options->api);
    if (r < 0)
        goto stop;
    result = net_init(&rank.net);
    if (result != NET_SUCCESS) {
        fprintf(stderr, "perseus-netbench: rank %d: init returned %d (%s)\n", id, result, net_result_text(result));
        r = -EIO;
        goto unload;
    }
    r = make_lanes(&rank);
    if (r < 0)
        goto finalize;
    r = -pthread_create(&rank.service, NULL, serve, &rank);
    if (r < 0)
        goto finalize;
    await_phase(&rank, SERVICE_OPEN);
    r = run_sizes(&rank);
    set_phase(&rank, SERVICE_CLOSING);
    pthread_join(rank.service, NULL);
    if (r == 0)
        r = rank.service_result;
finalize:
    free(rank.lanes);
    result = net_finalize(&rank.net);
    if (result != NET_SUCCESS && r == 0)
        r = -EIO;
unload:
    net_unload(&rank.net);
stop:
    if (r < 0)
        world_stop(world);
    return r < 0 ? 1 : 0;
}
