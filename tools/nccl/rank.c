/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of perseus-nccl: runs each collective on its GPU, checks every element of the runs that it times. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tools/nccl/job.h"
#include "tools/nccl/values.h"

enum { POISON = 0xA5, CHECK_ALL_BYTES = 1 << 20, MAX_ITERATIONS = 1000 };

/* What one collective sends and receives at a rank, in elements. */
struct shape {
    size_t send, recv; /* buffer lengths */
    size_t per_rank;   /* the count argument */
    double bus_factor; /* of nccl-tests: bytes on the wire over algorithm bytes */
};

struct rank_state {
    const struct job *job;
    struct job_meeting *meeting;
    const struct nccl_library *nccl;
    nccl_comm comm;
    cuda_stream stream;
    cuda_event start, end;
    cuda_ptr pristine, send, recv; /* max_bytes each (in place: send lies inside recv) */
    void *host;                    /* for filling and checking */
    int rank;
};

struct row {
    enum job_op op;
    enum nccl_type type;
    uint64_t bytes; /* as nccl-tests counts: the larger of what is sent and received */
    bool in_place;
};

static void must(const struct rank_state *s, int result, const char *call)
{
    if (result == 0)
        return;
    atomic_store(&s->meeting->failed, true);
    fprintf(stderr, "perseus-nccl: rank %d (%s): %s failed: %s\n", s->rank, s->job->label, call,
            s->nccl->get_error_string(result));
    exit(1);
}

static struct shape shape_of(enum job_op op, size_t elements, size_t ranks)
{
    size_t part = elements / ranks;
    double n = (double)ranks;

    switch (op) {
    case JOB_ALL_REDUCE:
        return (struct shape){elements, elements, elements, 2 * (n - 1) / n};
    case JOB_ALL_GATHER:
        return (struct shape){part, part * ranks, part, (n - 1) / n};
    case JOB_REDUCE_SCATTER:
        return (struct shape){part * ranks, part, part, (n - 1) / n};
    case JOB_ALL_TO_ALL:
        return (struct shape){part * ranks, part * ranks, part, (n - 1) / n};
    default:
        return (struct shape){elements, elements, elements, 1};
    }
}

static void send_recv_ring(struct rank_state *s, const void *send, void *recv, const struct row *row, size_t count)
{
    int ranks = s->job->ranks;

    must(s, s->nccl->group_start(), "ncclGroupStart");
    must(s, s->nccl->send(send, count, row->type, (s->rank + 1) % ranks, s->comm, s->stream), "ncclSend");
    must(s, s->nccl->recv(recv, count, row->type, (s->rank + ranks - 1) % ranks, s->comm, s->stream), "ncclRecv");
    must(s, s->nccl->group_end(), "ncclGroupEnd");
}

static void all_to_all(struct rank_state *s, const char *send, char *recv, const struct row *row, size_t count)
{
    size_t bytes = count * values_size(row->type);

    must(s, s->nccl->group_start(), "ncclGroupStart");
    for (int peer = 0; peer < s->job->ranks; peer++) {
        must(s, s->nccl->send(send + peer * bytes, count, row->type, peer, s->comm, s->stream), "ncclSend");
        must(s, s->nccl->recv(recv + peer * bytes, count, row->type, peer, s->comm, s->stream), "ncclRecv");
    }
    must(s, s->nccl->group_end(), "ncclGroupEnd");
}

static void launch(struct rank_state *s, const struct row *row, const struct shape *shape, cuda_ptr send_at,
                   cuda_ptr recv_at)
{
    const struct nccl_library *nccl = s->nccl;
    const void *send = (const void *)(uintptr_t)send_at;
    void *recv = (void *)(uintptr_t)recv_at;
    size_t n = shape->per_rank;

    switch (row->op) {
    case JOB_ALL_REDUCE:
        must(s, nccl->all_reduce(send, recv, n, row->type, NCCL_SUM, s->comm, s->stream), "ncclAllReduce");
        break;
    case JOB_ALL_GATHER:
        must(s, nccl->all_gather(send, recv, n, row->type, s->comm, s->stream), "ncclAllGather");
        break;
    case JOB_REDUCE_SCATTER:
        must(s, nccl->reduce_scatter(send, recv, n, row->type, NCCL_SUM, s->comm, s->stream), "ncclReduceScatter");
        break;
    case JOB_BROADCAST:
        must(s, nccl->broadcast(send, recv, n, row->type, 0, s->comm, s->stream), "ncclBroadcast");
        break;
    case JOB_REDUCE:
        must(s, nccl->reduce(send, recv, n, row->type, NCCL_SUM, 0, s->comm, s->stream), "ncclReduce");
        break;
    case JOB_SENDRECV:
        send_recv_ring(s, send, recv, row, n);
        break;
    default:
        all_to_all(s, send, recv, row, n);
        break;
    }
}

/* Where the send buffer lies for an in-place run, in elements from the receive buffer's start (NCCL's rules). */
static size_t in_place_offset(const struct row *row, const struct shape *shape, int rank)
{
    return row->op == JOB_ALL_GATHER ? (size_t)rank * shape->per_rank : 0;
}

static bool can_run_in_place(enum job_op op)
{
    return op != JOB_SENDRECV && op != JOB_ALL_TO_ALL;
}

/* Wait for the stream while looking for errors: a dead peer must not leave this process spinning for ever. */
static void wait_for_stream(struct rank_state *s, const char *what)
{
    struct timespec begin, now;
    int error = 0;

    clock_gettime(CLOCK_MONOTONIC, &begin);
    while (!cuda_stream_idle(s->stream)) {
        must(s, s->nccl->comm_get_async_error(s->comm, &error), "ncclCommGetAsyncError");
        if (error != 0 && error != 7) /* 7: in progress */
            must(s, error, what);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)(now.tv_sec - begin.tv_sec) > s->job->timeout_s) {
            atomic_store(&s->meeting->failed, true);
            fprintf(stderr, "perseus-nccl: rank %d (%s): %s did not end within %.0f s\n", s->rank, s->job->label, what,
                    s->job->timeout_s);
            exit(1);
        }
    }
}

static size_t check_blocks(struct rank_state *s, const struct row *row, const struct shape *shape, unsigned seed)
{
    size_t size = values_size(row->type), n = shape->per_rank, where = 0, wrong = 0;
    unsigned ranks = (unsigned)s->job->ranks, me = (unsigned)s->rank;
    char *got = s->host;

    switch (row->op) {
    case JOB_ALL_REDUCE:
        return values_check(got, row->type, NCCL_SUM, 0, ranks, 0, n, seed, &where);
    case JOB_REDUCE:
        return me != 0 ? 0 : values_check(got, row->type, NCCL_SUM, 0, ranks, 0, n, seed, &where);
    case JOB_REDUCE_SCATTER:
        return values_check(got, row->type, NCCL_SUM, 0, ranks, me * n, n, seed, &where);
    case JOB_BROADCAST:
        return values_check(got, row->type, NCCL_SUM, 0, 1, 0, n, seed, &where);
    case JOB_SENDRECV:
        return values_check(got, row->type, NCCL_SUM, (me + ranks - 1) % ranks, 1, 0, n, seed, &where);
    default:
        for (unsigned r = 0; r < ranks; r++)
            wrong += values_check(got + r * n * size, row->type, NCCL_SUM, r, 1, row->op == JOB_ALL_TO_ALL ? me * n : 0,
                                  n, seed, &where);
        return wrong;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Receive buffers are poisoned before each run, send buffers laid anew; small rows are checked after each run, large
 * ones after the last. */
static double run_row(struct rank_state *s, const struct row *row, const struct shape *shape)
{
    size_t size = values_size(row->type), seed = row->bytes + row->op;
    size_t send_bytes = shape->send * size, recv_bytes = shape->recv * size;
    cuda_ptr send = row->in_place ? s->recv + in_place_offset(row, shape, s->rank) * size : s->send;
    cuda_ptr recv =
        row->in_place && row->op == JOB_REDUCE_SCATTER ? s->recv + (size_t)s->rank * shape->per_rank * size : s->recv;
    double usec[MAX_ITERATIONS];
    int runs = s->job->iterations;

    values_fill(s->host, row->type, (unsigned)s->rank, 0, shape->send, (unsigned)seed);
    cuda_copy_in(s->pristine, s->host, send_bytes);
    for (int i = -s->job->warmup; i < runs; i++) {
        cuda_fill_async(s->recv, POISON, row->in_place && send_bytes > recv_bytes ? send_bytes : recv_bytes, s->stream);
        cuda_copy_async(send, s->pristine, send_bytes, s->stream);
        wait_for_stream(s, "laying the buffers");
        job_meet(s->job, s->meeting, s->rank);
        cuda_event_mark(s->start, s->stream);
        launch(s, row, shape, send, recv);
        cuda_event_mark(s->end, s->stream);
        wait_for_stream(s, job_op_name(row->op));
        if (i >= 0)
            usec[i] = cuda_event_usec(s->start, s->end);
        if (row->bytes <= CHECK_ALL_BYTES || i == runs - 1) {
            cuda_copy_out(s->host, recv, recv_bytes);
            atomic_fetch_add(&s->meeting->wrong, check_blocks(s, row, shape, (unsigned)seed));
        }
    }
    qsort(usec, (size_t)runs, sizeof(usec[0]), by_value);
    return usec[runs / 2];
}

static void report_row(struct rank_state *s, const struct row *row, const struct shape *shape)
{
    double slowest = 0;

    for (int r = 0; r < s->job->ranks; r++)
        if (s->meeting->usec[r] > slowest)
            slowest = s->meeting->usec[r];
    double algbw = (double)row->bytes / slowest / 1e3;
    printf("{\"transport\":\"%s\",\"program\":\"perseus-nccl\",\"op\":\"%s\",\"type\":\"%s\",\"ranks\":%d,\"bytes\":%"
           "llu,\"in_place\":%s,"
           "\"registered\":%s,\"iterations\":%d,\"usec_p50\":%.2f,\"algbw_GBps\":%.4f,\"busbw_GBps\":%.4f,\"wrong\":%"
           "llu}\n",
           s->job->label, job_op_name(row->op), values_type_name(row->type), s->job->ranks,
           (unsigned long long)row->bytes, row->in_place ? "true" : "false",
           s->job->register_buffers ? "true" : "false", s->job->iterations, slowest, algbw, algbw * shape->bus_factor,
           (unsigned long long)atomic_load(&s->meeting->wrong));
    fflush(stdout);
}

static void measure_row(struct rank_state *s, const struct row *row)
{
    size_t elements = row->bytes / values_size(row->type);
    struct shape shape = shape_of(row->op, elements, (size_t)s->job->ranks);

    if (shape.per_rank == 0)
        return; /* fewer elements than ranks: nothing to do for anyone */
    if (s->rank == 0)
        atomic_store(&s->meeting->wrong, 0);
    job_meet(s->job, s->meeting, s->rank);
    s->meeting->usec[s->rank] = run_row(s, row, &shape);
    job_meet(s->job, s->meeting, s->rank);
    if (s->rank == 0)
        report_row(s, row, &shape);
    job_meet(s->job, s->meeting, s->rank);
}

static void measure_all(struct rank_state *s)
{
    const struct job *job = s->job;

    for (int op = 0; op < JOB_OPS; op++) {
        for (int t = 0; job->ops[op] && t < job->type_count; t++) {
            for (uint64_t bytes = job->min_bytes; bytes <= job->max_bytes; bytes *= job->factor) {
                struct row row = {(enum job_op)op, job->types[t], bytes, false};

                if (job->out_of_place)
                    measure_row(s, &row);
                row.in_place = true;
                if (job->in_place && can_run_in_place(row.op))
                    measure_row(s, &row);
            }
        }
    }
}

static void open_rank(struct rank_state *s)
{
    const struct job *job = s->job;
    size_t bytes = job->max_bytes < 4096 ? 4096 : job->max_bytes;
    void *handles[2];

    if (cuda_use_device(s->rank % cuda_device_count()) != 0)
        exit(1);
    if (s->rank == 0)
        must(s, s->nccl->get_unique_id(&s->meeting->id), "ncclGetUniqueId");
    job_meet(job, s->meeting, s->rank);
    must(s, s->nccl->comm_init_rank(&s->comm, job->ranks, s->meeting->id, s->rank), "ncclCommInitRank");
    s->stream = cuda_stream_new();
    s->start = cuda_event_new();
    s->end = cuda_event_new();
    s->pristine = cuda_alloc(bytes);
    s->send = cuda_alloc(bytes);
    s->recv = cuda_alloc(bytes);
    s->host = malloc(bytes);
    if (s->host == NULL) {
        fprintf(stderr, "perseus-nccl: rank %d: no memory for %zu bytes\n", s->rank, bytes);
        exit(1);
    }
    if (job->register_buffers && s->nccl->comm_register != NULL) {
        must(s, s->nccl->comm_register(s->comm, (void *)(uintptr_t)s->send, bytes, &handles[0]), "ncclCommRegister");
        must(s, s->nccl->comm_register(s->comm, (void *)(uintptr_t)s->recv, bytes, &handles[1]), "ncclCommRegister");
    }
}

int job_run_rank(const struct job *job, struct job_meeting *meeting, int rank)
{
    struct rank_state state = {.job = job, .meeting = meeting, .rank = rank};
    char host[32];

    if (job->hosts) {
        snprintf(host, sizeof(host), "perseus-nccl-%d", rank);
        setenv("NCCL_HOSTID", host, 1);
    }
    state.nccl = nccl_library_open(job->nccl_path);
    if (state.nccl == NULL || cuda_device_count() == 0) {
        atomic_store(&meeting->failed, true);
        fprintf(stderr, "perseus-nccl: rank %d: needs NCCL and a GPU\n", rank);
        return 1;
    }
    open_rank(&state);
    measure_all(&state);
    must(&state, state.nccl->comm_destroy(state.comm), "ncclCommDestroy");
    free(state.host);
    return 0;
}
