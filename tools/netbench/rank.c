/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/rank.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tools/netbench/buffers.h"
#include "tools/netbench/connection.h"
#include "tools/netbench/holding.h"
#include "tools/netbench/iteration.h"
#include "tools/netbench/bandwidth.h"
#include "tools/netbench/rank_state.h"

enum {
    SLICE_USEC = 10000, /* time slice of a plugin, when two alternate */
    SLICE_TIMES = 65536,
    SETTLED_MOST = 100,
};

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
        pthread_cond_wait(&rank->changed, &rank->lock); /* this wait ends, since every call of the service thread has
                                                         * a limit */
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
        r = buffers_map(rank);
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
    /* NCCL's order: registrations are closed first, then the memory is freed, then comms are closed, although they may
     * still refer to the memory. */
    r = connection_deregister(rank->streams, rank->stream_count);
    buffers_unmap(rank);
    r |= connection_close(rank->streams, rank->stream_count);
    if (r < 0 && rank->service_result == 0)
        rank->service_result = -EIO;
    return NULL;
}

/* ---- sizes ---- */

/* Where a side is in the iterations of one size. */
struct turn {
    int done;
    bool told_to_end;
    uint64_t errors;
};

static bool is_finished(const struct rank *rank, const struct turn *turn)
{
    return turn->told_to_end || turn->done >= rank->options->warmup + rank->options->iters;
}

/* All ranks end a slice, or a size, after the same batch: rank 0 decides. Return whether the slice is over, or
 * -errno. */
static int ask_whether_over(struct rank *rank, double start, struct turn *turn)
{
    const struct options *options = rank->options;
    int r;

    if (rank->id == 0) {
        rank->job->slice_is_over = options->peer && job_now() - start > SLICE_USEC;
        rank->job->told_to_end = options->until && turn->done > options->warmup && access(options->until, F_OK) == 0;
    }
    /* the next batch passes a barrier before the words change again */
    r = job_barrier(rank->job, options->setup_timeout_s);
    if (r < 0)
        return r;
    turn->told_to_end = rank->job->told_to_end;
    return rank->job->slice_is_over;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* One plugin's turn: all iterations when it is alone, else those of some 10 ms. *median is the time of an iteration, 0
 * when there were none; the first batch is left out, since it finds the other plugin's data in the caches. Return 0 or
 * -errno. */
static int run_slice(struct rank *rank, size_t bytes, struct turn *turn, double *median)
{
    static double sorted[SLICE_TIMES];
    const double *usec = job_usec(rank->job, rank->id);
    double start = job_now();
    int slots = buffers_slots(rank->options, bytes), timed = 0, over = 0;

    for (bool first = true; !over && !is_finished(rank, turn); first = false) {
        int r = iteration_run_batch(rank, bytes, slots, turn->done, &turn->errors), ran = r;

        if (r < 0)
            return r;
        for (int i = turn->done - rank->options->warmup; !first && r-- > 0 && timed < SLICE_TIMES; i++)
            if (i >= 0)
                sorted[timed++] = usec[i];
        turn->done += ran;
        if ((rank->options->peer || rank->options->until) && !is_finished(rank, turn))
            over = ask_whether_over(rank, start, turn);
        if (over < 0)
            return over;
    }
    qsort(sorted, (size_t)timed, sizeof(*sorted), by_value);
    *median = timed ? sorted[timed / 2] : 0;
    return 0;
}

/* Add the ratio of two successive slices. Their order alternates (A, B, then B, A), so that a slow drift cancels
 * out. */
static int run_pair(struct rank *sides, int count, size_t bytes, struct turn *turns, int index, struct ratios *ratios)
{
    double median[SIDES_MAX] = {0};

    for (int i = 0; i < count; i++) {
        int side = index % 2 ? count - 1 - i : i;
        int r = run_slice(&sides[side], bytes, &turns[side], &median[side]);

        if (r < 0)
            return r;
    }
    if (median[0] > 0 && median[1] > 0 && ratios->count < RATIOS_MAX)
        ratios->value[ratios->count++] = median[0] / median[1];
    return 0;
}

/* Return 0 or -errno; the errors found go to the jobs. */
static int run_size(struct rank *sides, int count, size_t bytes)
{
    static struct ratios ratios;
    struct turn turns[SIDES_MAX] = {{0}};
    int r = 0;

    ratios.count = 0;
    for (int side = 0; side < count; side++)
        for (int i = 0; i < sides[side].stream_count; i++) {
            struct stream *stream = &sides[side].streams[i];

            stream->errors = 0;
            plan_make(&stream->plan, sides[side].options, bytes, &stream->route);
        }
    for (int i = 0; r == 0 && !is_finished(&sides[0], &turns[0]); i++)
        r = run_pair(sides, count, bytes, turns, i, &ratios);
    while (r == 0 && count > 1 && !is_finished(&sides[1], &turns[1]))
        r = run_pair(sides, count, bytes, turns, 0, &ratios);
    for (int side = 0; side < count && r == 0; side++) {
        struct rank *rank = &sides[side];

        for (int i = 0; i < rank->stream_count; i++)
            turns[side].errors += rank->streams[i].errors;
        rank->job->rank[rank->id].errors = turns[side].errors;
        r = job_barrier(rank->job, rank->options->setup_timeout_s);
        if (r == 0 && rank->prints)
            bandwidth_print_size(rank->options, &rank->net, rank->job, bytes, turns[side].done - rank->options->warmup);
        if (r == 0)
            r = job_barrier(rank->job, rank->options->setup_timeout_s);
    }
    if (r == 0 && count > 1 && sides[0].prints)
        bandwidth_print_ratio(sides[0].options, bytes, &ratios);
    return r;
}

/* Return 0 or -errno. */
static int run_sizes(struct rank *sides, int count)
{
    const struct options *options = sides[0].options;
    bool is_wrong = false;
    int r = 0;

    for (int i = 0; i < (int)options->sizes.count && r == 0; i++) {
        r = run_size(sides, count, options->sizes.value[i]);
        for (int side = 0; side < count; side++)
            is_wrong |= sides[side].job->rank[sides[side].id].errors > 0;
    }
    if (r == -ETIMEDOUT)
        fprintf(stderr, "perseus-netbench: rank %d: no progress for %d s (%d s while all ranks meet)\n", sides[0].id,
                options->timeout_s, options->setup_timeout_s);
    return r < 0 ? r : is_wrong ? -EBADMSG : 0;
}

/* ---- opening and closing ---- */

/* Return 0 or -errno; then nothing is left open. An error of the service thread is in service_result. */
static int open_side(struct rank *rank, const char *plugin)
{
    net_result result;
    int r = net_load(&rank->net, plugin, rank->options->api);

    if (r < 0)
        return r;
    result = net_init(&rank->net);
    if (result != NET_SUCCESS) {
        fprintf(stderr, "perseus-netbench: rank %d: init returned %d (%s)\n", rank->id, result,
                net_result_text(result));
        net_unload(&rank->net);
        return -EIO;
    }
    r = make_streams(rank);
    if (!r)
        r = -pthread_create(&rank->service, NULL, serve, rank);
    if (r < 0) {
        free(rank->streams);
        net_finalize(&rank->net);
        net_unload(&rank->net);
        return r;
    }
    await_phase(rank, SERVICE_OPEN);
    return 0;
}

static int close_side(struct rank *rank)
{
    net_result result;

    set_phase(rank, SERVICE_CLOSING);
    pthread_join(rank->service, NULL);
    free(rank->streams);
    result = net_finalize(&rank->net);
    net_unload(&rank->net);
    return rank->service_result < 0 ? rank->service_result : result != NET_SUCCESS ? -EIO : 0;
}

static void stop_jobs(struct job *const *jobs)
{
    for (int i = 0; i < SIDES_MAX && jobs[i]; i++)
        job_stop(jobs[i]);
}

/* Open, run, close. Return 0 or -errno. */
static int run_round(const struct options *options, struct job *const *jobs, int id, bool is_last)
{
    const char *const plugins[SIDES_MAX] = {options->plugin, options->peer};
    struct rank sides[SIDES_MAX];
    int count = options->peer ? 2 : 1, opened = 0, r = 0;

    while (opened < count && r == 0) {
        sides[opened] = (struct rank){.options = options,
                                      .job = jobs[opened],
                                      .id = id,
                                      .prints = id == 0 && is_last,
                                      .lock = PTHREAD_MUTEX_INITIALIZER,
                                      .changed = PTHREAD_COND_INITIALIZER,
                                      .phase = SERVICE_OPENING};
        r = open_side(&sides[opened], plugins[opened]);
        if (r == 0)
            r = sides[opened++].service_result;
    }
    if (r == 0 && sides[0].prints)
        bandwidth_print_head(options);
    if (r == 0)
        r = run_sizes(sides, count);
    if (r < 0 && r != -EBADMSG)
        stop_jobs(jobs);
    while (opened > 0) {
        int closed = close_side(&sides[--opened]);

        r = r == 0 ? closed : r;
    }
    if (r < 0)
        stop_jobs(jobs);
    return r;
}

int rank_run(const struct options *options, struct job *const *jobs, int id)
{
    /* Caches and pools fill in the first rounds. */
    int settled = options->rounds / 10 < SETTLED_MOST ? options->rounds / 10 : SETTLED_MOST, r = 0;
    struct holding before = {0}, now = {0};

    for (int round = 0; round < options->rounds && r == 0; round++) {
        r = run_round(options, jobs, id, round == options->rounds - 1);
        if (r == 0 && round == settled)
            r = holding_read(&before);
    }
    if (r == 0)
        r = holding_read(&now);
    if (r < 0 || options->rounds == 1)
        return r < 0 ? 1 : 0;
    if (id == 0)
        bandwidth_print_holding(options, &before, &now);
    return holding_has_grown(&before, &now, id) ? 1 : 0;
}
