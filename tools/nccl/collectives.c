/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/nccl/collectives.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/json.h"
#include "tools/nccl/values.h"
#include "transport/util/clock.h"

enum { POISON = 0xA5, CHECK_ALL_BYTES = 1 << 20 /* larger rows are checked once, after the last run */ };

/* How much one collective sends and receives at a rank, in elements. */
struct shape {
    size_t send, recv; /* buffer lengths */
    size_t per_rank;   /* the count argument */
    double bus_factor; /* of nccl-tests: bytes on the wire over algorithm bytes */
};

struct rank_state {
    const struct options *options;
    struct meeting *meeting;
    const struct nccl_library *nccl;
    nccl_comm comm;
    cuda_stream stream;
    cuda_event start, end;
    cuda_ptr pristine, send, recv; /* each of the largest size; in place, recv is also the send buffer */
    void *host;                    /* for filling and checking */
    uint32_t rank;
};

struct row {
    enum collective op;
    enum nccl_type type;
    uint64_t bytes; /* as nccl-tests counts: the larger of what is sent and received */
    bool in_place;
};

static void must(const struct rank_state *s, int result, const char *call)
{
    if (result == 0)
        return;
    atomic_store(&s->meeting->failed, true);
    fprintf(stderr, "perseus-nccl: rank %u (%s): %s failed: %s\n", s->rank, s->options->label, call,
            s->nccl->get_error_string(result));
    exit(1);
}

static struct shape shape_of(enum collective op, size_t elements, size_t ranks)
{
    size_t part = elements / ranks;
    double n = (double)ranks;

    switch (op) {
    case ALL_REDUCE:
        return (struct shape){elements, elements, elements, 2 * (n - 1) / n};
    case ALL_GATHER:
        return (struct shape){part, part * ranks, part, (n - 1) / n};
    case REDUCE_SCATTER:
        return (struct shape){part * ranks, part, part, (n - 1) / n};
    case ALL_TO_ALL:
        return (struct shape){part * ranks, part * ranks, part, (n - 1) / n};
    default:
        return (struct shape){elements, elements, elements, 1};
    }
}

static void send_recv_ring(struct rank_state *s, const void *send, void *recv, const struct row *row, size_t count)
{
    uint32_t ranks = s->options->ranks;

    must(s, s->nccl->group_start(), "ncclGroupStart");
    must(s, s->nccl->send(send, count, row->type, (s->rank + 1) % ranks, s->comm, s->stream), "ncclSend");
    must(s, s->nccl->recv(recv, count, row->type, (s->rank + ranks - 1) % ranks, s->comm, s->stream), "ncclRecv");
    must(s, s->nccl->group_end(), "ncclGroupEnd");
}

static void all_to_all(struct rank_state *s, const char *send, char *recv, const struct row *row, size_t count)
{
    size_t bytes = count * values_size(row->type);

    must(s, s->nccl->group_start(), "ncclGroupStart");
    for (uint32_t peer = 0; peer < s->options->ranks; peer++) {
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
    case ALL_REDUCE:
        must(s, nccl->all_reduce(send, recv, n, row->type, NCCL_SUM, s->comm, s->stream), "ncclAllReduce");
        break;
    case ALL_GATHER:
        must(s, nccl->all_gather(send, recv, n, row->type, s->comm, s->stream), "ncclAllGather");
        break;
    case REDUCE_SCATTER:
        must(s, nccl->reduce_scatter(send, recv, n, row->type, NCCL_SUM, s->comm, s->stream), "ncclReduceScatter");
        break;
    case BROADCAST:
        must(s, nccl->broadcast(send, recv, n, row->type, 0, s->comm, s->stream), "ncclBroadcast");
        break;
    case REDUCE:
        must(s, nccl->reduce(send, recv, n, row->type, NCCL_SUM, 0, s->comm, s->stream), "ncclReduce");
        break;
    case SENDRECV:
        send_recv_ring(s, send, recv, row, n);
        break;
    default:
        all_to_all(s, send, recv, row, n);
        break;
    }
}

/* Where the send buffer starts in the receive buffer, in elements, when a run is in place (NCCL's rules). */
static size_t in_place_offset(const struct row *row, const struct shape *shape, uint32_t rank)
{
    return row->op == ALL_GATHER ? rank * shape->per_rank : 0;
}

static bool can_run_in_place(enum collective op)
{
    return op != SENDRECV && op != ALL_TO_ALL;
}

/* Wait for the stream, and check for errors meanwhile: after the death of a peer this process must end. */
static void wait_for_stream(struct rank_state *s, const char *what)
{
    uint64_t start = prs_clock_ms();
    int error = 0;

    while (!cuda_stream_idle(s->stream)) {
        must(s, s->nccl->comm_get_async_error(s->comm, &error), "ncclCommGetAsyncError");
        if (error && error != NCCL_IN_PROGRESS)
            must(s, error, what);
        if (prs_clock_ms() - start > s->options->timeout_s * 1000ull) {
            atomic_store(&s->meeting->failed, true);
            fprintf(stderr, "perseus-nccl: rank %u (%s): %s did not end within %u s\n", s->rank, s->options->label,
                    what, s->options->timeout_s);
            exit(1);
        }
    }
}

static size_t check_blocks(struct rank_state *s, const struct row *row, const struct shape *shape, unsigned seed)
{
    size_t size = values_size(row->type), n = shape->per_rank, where = 0, wrong = 0;
    uint32_t ranks = s->options->ranks, me = s->rank;
    char *got = s->host;

    switch (row->op) {
    case ALL_REDUCE:
        return values_check(got, row->type, NCCL_SUM, 0, ranks, 0, n, seed, &where);
    case REDUCE:
        return me != 0 ? 0 : values_check(got, row->type, NCCL_SUM, 0, ranks, 0, n, seed, &where);
    case REDUCE_SCATTER:
        return values_check(got, row->type, NCCL_SUM, 0, ranks, me * n, n, seed, &where);
    case BROADCAST:
        return values_check(got, row->type, NCCL_SUM, 0, 1, 0, n, seed, &where);
    case SENDRECV:
        return values_check(got, row->type, NCCL_SUM, (me + ranks - 1) % ranks, 1, 0, n, seed, &where);
    default:
        for (unsigned r = 0; r < ranks; r++)
            wrong += values_check(got + r * n * size, row->type, NCCL_SUM, r, 1, row->op == ALL_TO_ALL ? me * n : 0, n,
                                  seed, &where);
        return wrong;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Before each run the receive buffer is poisoned and the send buffer is filled again. */
static double run_row(struct rank_state *s, const struct row *row, const struct shape *shape)
{
    size_t size = values_size(row->type), seed = row->bytes + row->op;
    size_t send_bytes = shape->send * size, recv_bytes = shape->recv * size;
    cuda_ptr send = row->in_place ? s->recv + in_place_offset(row, shape, s->rank) * size : s->send;
    cuda_ptr recv = row->in_place && row->op == REDUCE_SCATTER ? s->recv + s->rank * shape->per_rank * size : s->recv;
    double usec[ITERATIONS_MAX];
    int runs = (int)s->options->iterations;

    values_fill(s->host, row->type, s->rank, 0, shape->send, (unsigned)seed);
    cuda_copy_in_async(s->pristine, s->host, send_bytes, s->stream);
    for (int i = -(int)s->options->warmup; i < runs; i++) {
        cuda_fill_async(s->recv, POISON, row->in_place && send_bytes > recv_bytes ? send_bytes : recv_bytes, s->stream);
        cuda_copy_async(send, s->pristine, send_bytes, s->stream);
        wait_for_stream(s, "filling the buffers");
        meeting_wait(s->options, s->meeting, s->rank);
        cuda_event_mark(s->start, s->stream);
        launch(s, row, shape, send, recv);
        cuda_event_mark(s->end, s->stream);
        wait_for_stream(s, collective_name(row->op));
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
    double slowest = 0, algbw;

    for (uint32_t r = 0; r < s->options->ranks; r++)
        if (s->meeting->usec[r] > slowest)
            slowest = s->meeting->usec[r];
    algbw = (double)row->bytes / slowest / 1e3;
    json_print(stdout,
               "{transport:%s,program:%s,op:%s,type:%s,ranks:%u,bytes:%llu,in_place:%hhd,registered:%hhd,iterations:%u,"
               "usec_p50:%.2f,algbw_GBps:%.4f,busbw_GBps:%.4f,wrong:%llu}\n",
               s->options->label, "perseus-nccl", collective_name(row->op), values_type_names[row->type],
               s->options->ranks, (unsigned long long)row->bytes, row->in_place, s->options->register_buffers,
               s->options->iterations, slowest, algbw, algbw * shape->bus_factor,
               (unsigned long long)atomic_load(&s->meeting->wrong));
    fflush(stdout);
}

static void measure_row(struct rank_state *s, const struct row *row)
{
    size_t elements = row->bytes / values_size(row->type);
    struct shape shape = shape_of(row->op, elements, (size_t)s->options->ranks);

    if (shape.per_rank == 0)
        return; /* fewer elements than ranks */
    if (s->rank == 0)
        atomic_store(&s->meeting->wrong, 0);
    meeting_wait(s->options, s->meeting, s->rank);
    s->meeting->usec[s->rank] = run_row(s, row, &shape);
    meeting_wait(s->options, s->meeting, s->rank);
    if (s->rank == 0)
        report_row(s, row, &shape);
    meeting_wait(s->options, s->meeting, s->rank);
}

static void measure_all(struct rank_state *s)
{
    const struct options *o = s->options;

    for (uint32_t i = 0; i < o->ops.count; i++) {
        for (uint32_t t = 0; t < o->types.count; t++) {
            for (uint32_t k = 0; k < o->sizes.count; k++) {
                struct row row = {(enum collective)o->ops.value[i], (enum nccl_type)o->types.value[t],
                                  o->sizes.value[k], false};

                if (o->place != IN_PLACE)
                    measure_row(s, &row);
                row.in_place = true;
                if (o->place != OUT_OF_PLACE && can_run_in_place(row.op))
                    measure_row(s, &row);
            }
        }
    }
}

static void open_rank(struct rank_state *s)
{
    const struct options *options = s->options;
    size_t bytes = 4096;
    void *handles[2];

    for (uint32_t i = 0; i < options->sizes.count; i++)
        bytes = options->sizes.value[i] > bytes ? options->sizes.value[i] : bytes;

    if (cuda_use_device((int)s->rank % cuda_device_count()))
        exit(1);
    if (s->rank == 0)
        must(s, s->nccl->get_unique_id(&s->meeting->id), "ncclGetUniqueId");
    meeting_wait(options, s->meeting, s->rank);
    must(s, s->nccl->comm_init_rank(&s->comm, (int)options->ranks, s->meeting->id, (int)s->rank), "ncclCommInitRank");
    s->stream = cuda_stream_new();
    s->start = cuda_event_new();
    s->end = cuda_event_new();
    s->pristine = cuda_alloc(bytes);
    s->send = cuda_alloc(bytes);
    s->recv = cuda_alloc(bytes);
    s->host = malloc(bytes);
    if (!s->host) {
        fprintf(stderr, "perseus-nccl: rank %u: no memory for %zu bytes\n", s->rank, bytes);
        exit(1);
    }
    if (options->register_buffers && s->nccl->comm_register) {
        must(s, s->nccl->comm_register(s->comm, (void *)(uintptr_t)s->send, bytes, &handles[0]), "ncclCommRegister");
        must(s, s->nccl->comm_register(s->comm, (void *)(uintptr_t)s->recv, bytes, &handles[1]), "ncclCommRegister");
    }
}

int collectives_run(const struct options *options, struct meeting *meeting, uint32_t rank)
{
    struct rank_state state = {.options = options, .meeting = meeting, .rank = rank};
    char host[32];

    if (options->hosts) {
        snprintf(host, sizeof(host), "perseus-nccl-%u", rank);
        setenv("NCCL_HOSTID", host, 1);
    }
    state.nccl = nccl_library_open(options->nccl_path);
    if (!state.nccl || cuda_device_count() == 0) {
        atomic_store(&meeting->failed, true);
        fprintf(stderr, "perseus-nccl: rank %u: needs NCCL and a GPU\n", rank);
        return 1;
    }
    open_rank(&state);
    measure_all(&state);
    must(&state, state.nccl->comm_destroy(state.comm), "ncclCommDestroy");
    free(state.host);
    return 0;
}
