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

#include "tools/netbench/connection.h"
#include "tools/netbench/pattern.h"
#include "tools/netbench/bandwidth.h"

enum {
    SLOT_ALIGN = 64,
    SLOTS_MAX = 17,         /* one to start with, and 16 that are timed */
    SLOTS_BYTES = 64 << 20, /* larger sizes have two slots only */
    COMPLAINTS_MAX = 10,
    CHECK_EVERY = 256, /* idle passes between checks of the clock */
};

enum phase { SERVICE_OPENING, SERVICE_OPEN, SERVICE_CLOSING };

struct rank {
    const struct options *options;
    struct job *job;
    int id;
    struct net net;
    int stream_count;
    struct stream *streams;
    uint8_t *input, *output, *scratch;
    size_t buffer_bytes, scratch_bytes; /* of each; scratch: of one stream */
    int complaints;                     /* lines printed about wrong data */
    uint64_t iteration;                 /* counts over all sizes: no two iterations have the same data */
    /* service thread */
    pthread_t service;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum phase phase;
    int service_result;
};

/* ---- sizes and buffers ---- */

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

    for (int i = 0; i < (int)options->sizes.count; i++) {
        size_t bytes = slot_bytes(options->sizes.value[i]) * slots_for(options, options->sizes.value[i]);

        rank->buffer_bytes = bytes > rank->buffer_bytes ? bytes : rank->buffer_bytes;
    }
    rank->scratch_bytes = has_scratch(options->op) ? stream_scratch_bytes(options) : 0;
    rank->output = map_bytes(rank->buffer_bytes);
    rank->input = has_input(options->op) ? map_bytes(rank->buffer_bytes) : NULL;
    rank->scratch = rank->scratch_bytes ? map_bytes(rank->scratch_bytes * rank->stream_count) : NULL;
    if (!rank->output || (has_input(options->op) && !rank->input) || (rank->scratch_bytes && !rank->scratch)) {
        fprintf(stderr, "perseus-netbench: rank %d: cannot map buffers of %zu bytes: %s\n", rank->id,
                rank->buffer_bytes, strerror(errno));
        return -ENOMEM;
    }
    for (int i = 0; i < rank->stream_count; i++) {
        struct stream *stream = &rank->streams[i];

        stream->output = (struct buffer){.data = rank->output, .bytes = rank->buffer_bytes};
        stream->input = (struct buffer){.data = rank->input, .bytes = rank->input ? rank->buffer_bytes : 0};
        stream->scratch = (struct buffer){.bytes = rank->scratch_bytes};
        if (rank->scratch)
            stream->scratch.data = rank->scratch + (size_t)i * rank->scratch_bytes;
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
        munmap(rank->scratch, rank->scratch_bytes * rank->stream_count);
    rank->output = rank->input = rank->scratch = NULL;
}

/* ---- devices and streams ---- */

/* Return the first device to use and in *count how many, or -errno after printing why. */
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

static int check_per_receive(const struct rank *rank, int device)
{
    struct net_properties_v12 properties;
    net_result result = net_properties(&rank->net, device, &properties);

    if (result != NET_SUCCESS) {
        fprintf(stderr, "perseus-netbench: rank %d: getProperties(%d) returned %d (%s)\n", rank->id, device, result,
                net_result_text(result));
        return -EIO;
    }
    if (rank->options->per_receive <= properties.max_recvs)
        return 0;
    fprintf(stderr, "perseus-netbench: --group %d: this plugin has maxRecvs %d\n", rank->options->per_receive,
            properties.max_recvs);
    return -EINVAL;
}

/* To the neighbours in the ring of ranks, or, in an alltoall, to every rank. */
static int make_streams(struct rank *rank)
{
    const struct options *options = rank->options;
    int peers = options->op == OP_ALLTOALL ? options->ranks - 1 : 1;
    int per_node = (options->ranks + options->nodes - 1) / options->nodes;
    int devices, first = choose_devices(rank, &devices);

    if (first < 0)
        return first;
    rank->stream_count = peers * options->comms;
    rank->streams = calloc(rank->stream_count, sizeof(*rank->streams));
    if (!rank->streams)
        return -ENOMEM;
    for (int i = 0; i < rank->stream_count; i++) {
        struct stream *stream = &rank->streams[i];
        int distance = 1 + i / options->comms;

        stream->net = &rank->net;
        stream->options = options;
        stream->route = (struct route){.rank = rank->id,
                                       .ranks = options->ranks,
                                       .to = (rank->id + distance) % options->ranks,
                                       .from = (rank->id + options->ranks - distance) % options->ranks,
                                       .comm = i % options->comms,
                                       .comms = options->comms};
        stream->device = first + (rank->id % per_node + stream->route.comm) % devices;
    }
    return check_per_receive(rank, first);
}

/* ---- service thread ---- */

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
        pthread_cond_wait(&rank->changed, &rank->lock); /* ends, since every call of the service thread has a limit */
    pthread_mutex_unlock(&rank->lock);
}

/* Register and deregister until the rank closes. Return 0 or -errno. */
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
        r = connection_churn(&rank->streams[i % rank->stream_count]);
        nanosleep(&pause, NULL);
    }
    return r;
}

static void *serve(void *argument)
{
    struct rank *rank = argument;
    int r = connection_open(rank->job, rank->streams, rank->stream_count);

    if (!r)
        r = map_buffers(rank);
    if (!r)
        r = connection_register(rank->streams, rank->stream_count);
    rank->service_result = r;
    if (r < 0)
        job_stop(rank->job);
    set_phase(rank, SERVICE_OPEN);
    if (r == 0 && rank->options->churn)
        r = churn(rank);
    await_phase(rank, SERVICE_CLOSING);
    if (r < 0)
        rank->service_result = r;
    /* NCCL's order: first registrations, then the memory, then the comms, which may still refer to it. */
    r = connection_deregister(rank->streams, rank->stream_count);
    unmap_buffers(rank);
    r |= connection_close(rank->streams, rank->stream_count);
    if (r < 0 && rank->service_result == 0)
        rank->service_result = -EIO;
    return NULL;
}

/* ---- iterations ---- */

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
    default: /* alltoall: block q is the block that rank q has for this rank */
        block = plan_equal(bytes, rank->id, options->ranks);
        for (int q = 0; q < options->ranks; q++) {
            struct range to = plan_equal(bytes, q, options->ranks);

            of = pattern_of_rank(iteration, q);
            wrong += compare(rank, &of, data + to.offset, block.offset, block.len);
        }
        return wrong;
    }
}

/* In an alltoall, a rank's block for itself does not use the network. */
static void copy_own(struct rank *rank, size_t bytes, size_t offset)
{
    struct range block = plan_equal(bytes, rank->id, rank->options->ranks);

    if (rank->options->op == OP_ALLTOALL)
        memcpy(rank->output + offset + block.offset, rank->input + offset + block.offset, block.len);
}

static void report_waits(const struct rank *rank)
{
    for (int i = 0; i < rank->stream_count; i++) {
        char text[512];

        if (stream_is_done(&rank->streams[i]))
            continue;
        stream_describe(&rank->streams[i], text, sizeof(text));
        fprintf(stderr, "perseus-netbench: rank %d: %s\n", rank->id, text);
    }
}

/* Return 0 to go on waiting, -ECANCELED or -ETIMEDOUT. */
static int check_limits(struct rank *rank, double since)
{
    __atomic_add_fetch(&rank->job->rank[rank->id].beats, 1, __ATOMIC_RELAXED);
    if (job_stopped(rank->job))
        return -ECANCELED;
    return job_now() - since > rank->options->timeout_s * 1e6 ? -ETIMEDOUT : 0;
}

/* One operation. Return 0 or -errno. */
static int run_once(struct rank *rank, size_t bytes, int slot)
{
    size_t offset = (size_t)slot * slot_bytes(bytes);
    double since = job_now();
    int idle = 0, left = rank->stream_count;

    for (int i = 0; i < rank->stream_count; i++)
        stream_begin(&rank->streams[i], offset);
    copy_own(rank, bytes, offset);
    while (left > 0) {
        int happened = 0;

        left = 0;
        for (int i = 0; i < rank->stream_count; i++) {
            int r;

            if (stream_is_done(&rank->streams[i]))
                continue;
            r = stream_step(&rank->streams[i]);
            if (r < 0)
                return r;
            happened |= r;
            left += !stream_is_done(&rank->streams[i]);
        }
        if (happened) {
            idle = 0;
            continue;
        }
        if (idle++ == 0)
            since = job_now();
        if (idle % CHECK_EVERY == 0) {
            int r = check_limits(rank, since);

            if (r < 0) {
                report_waits(rank);
                return r;
            }
        }
        if (idle % rank->options->yield == 0)
            sched_yield(); /* there may be more ranks than cores */
    }
    return 0;
}

/* Fill all slots, run them back to back, check them. The first iteration is not timed: the ranks leave the barrier one
 * after the other, and it absorbs that. Return the number of timed iterations or -errno. */
static int run_batch(struct rank *rank, size_t bytes, int slots, int done, uint64_t *errors)
{
    const struct options *options = rank->options;
    double *usec = job_usec(rank->job, rank->id), before = 0;
    int total = options->warmup + options->iters - done + 1;
    int batch = slots < total ? slots : total;
    uint64_t first = rank->iteration;
    int r;

    rank->iteration += batch;
    for (int i = 0; i < batch; i++)
        if (options->check || done == 0)
            prepare(rank, bytes, i, first + i);
    r = job_barrier(rank->job, options->setup_timeout_s);
    for (int i = 0; i < batch && r == 0; i++) {
        double now;

        r = run_once(rank, bytes, i);
        now = job_now();
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

/* Return 0 or -errno; the errors found go to the job. */
static int run_size(struct rank *rank, size_t bytes)
{
    const struct options *options = rank->options;
    struct rank_state *state = &rank->job->rank[rank->id];
    int slots = slots_for(options, bytes), r = 0;
    uint64_t errors = 0;

    for (int i = 0; i < rank->stream_count; i++) {
        rank->streams[i].errors = 0;
        plan_make(&rank->streams[i].plan, options, bytes, &rank->streams[i].route);
    }
    for (int done = 0; done < options->warmup + options->iters; done += r) {
        r = run_batch(rank, bytes, slots, done, &errors);
        if (r < 0)
            return r;
    }
    for (int i = 0; i < rank->stream_count; i++)
        errors += rank->streams[i].errors;
    state->errors = errors;
    r = job_barrier(rank->job, options->setup_timeout_s);
    if (r == 0 && rank->id == 0)
        bandwidth_print_size(options, &rank->net, rank->job, bytes);
    return r < 0 ? r : job_barrier(rank->job, options->setup_timeout_s);
}

/* Return 0 or -errno. */
static int run_sizes(struct rank *rank)
{
    bool is_wrong = false;
    int r = rank->service_result;

    for (int i = 0; i < (int)rank->options->sizes.count && r == 0; i++) {
        r = run_size(rank, rank->options->sizes.value[i]);
        is_wrong |= rank->job->rank[rank->id].errors > 0;
    }
    if (r < 0) {
        if (r == -ETIMEDOUT)
            fprintf(stderr, "perseus-netbench: rank %d: no progress for %d s (%d s while all ranks meet)\n", rank->id,
                    rank->options->timeout_s, rank->options->setup_timeout_s);
        job_stop(rank->job);
    }
    return r < 0 ? r : is_wrong ? -EBADMSG : 0;
}

int rank_run(const struct options *options, struct job *job, int id)
{
    struct rank rank = {.options = options,
                        .job = job,
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
    r = make_streams(&rank);
    if (r < 0)
        goto finalize;
    r = -pthread_create(&rank.service, NULL, serve, &rank);
    if (r < 0)
        goto finalize;
    await_phase(&rank, SERVICE_OPEN);
    if (id == 0 && rank.service_result == 0)
        bandwidth_print_head(options);
    r = run_sizes(&rank);
    set_phase(&rank, SERVICE_CLOSING);
    pthread_join(rank.service, NULL);
    if (!r)
        r = rank.service_result;
finalize:
    free(rank.streams);
    result = net_finalize(&rank.net);
    if (result != NET_SUCCESS && r == 0)
        r = -EIO;
unload:
    net_unload(&rank.net);
stop:
    if (r < 0)
        job_stop(job);
    return r < 0 ? 1 : 0;
}
