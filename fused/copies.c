/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/copies.h"

#include <errno.h>
#include <stdlib.h>

#include "fused/kernels.h"
#include "util/error.h"

struct prs_copies {
    struct prs_fused_plan *plan;
    uint32_t others, count; /* ranks; streams that were opened: one for each rank, or, in turn, one */
    bool go_first;
    cudaStream_t streams[PRS_MAX_WORLD];
    cudaEvent_t forked, done[PRS_MAX_WORLD];
};

int prs_copies_open(struct prs_fused_plan *plan, struct prs_copies **out)
{
    const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
    struct prs_copies *c = calloc(1, sizeof(*c));
    uint32_t streams;
    int r;
    if (c == NULL)
        return prs_fail(-ENOMEM, "fused: no memory for copy streams");
    c->plan = plan;
    c->others = plan->args.schedule.world - 1;
    c->go_first = blocking != NULL && strtol(blocking, NULL, 10) != 0;
    streams = plan->args.schedule.in_turn ? 1 : c->others;
    r = prs_cuda_check(cudaEventCreateWithFlags(&c->forked, cudaEventDisableTiming), "cudaEventCreate");
    for (; c->count < streams && r == 0; c->count++) {
        r = prs_cuda_check(cudaStreamCreateWithFlags(&c->streams[c->count], cudaStreamNonBlocking), "cudaStreamCreate");
        if (r == 0)
            r = prs_cuda_check(cudaEventCreateWithFlags(&c->done[c->count], cudaEventDisableTiming), "cudaEventCreate");
    }
    if (r != 0)
        prs_copies_close(c);
    else
        *out = c;
    return r;
}

void prs_copies_close(struct prs_copies *c)
{
    if (c == NULL)
        return;
    for (uint32_t p = 0; p < c->count; p++) {
        if (c->done[p] != NULL)
            (void)cudaEventDestroy(c->done[p]);
        if (c->streams[p] != NULL)
            (void)cudaStreamDestroy(c->streams[p]);
    }
    if (c->forked != NULL)
        (void)cudaEventDestroy(c->forked);
    free(c);
}

/* One piece of one band to the rank p after this one, then its flag: copies of one stream finish in order. */
static int copy_piece(struct prs_copies *c, const uint8_t *a, uint32_t p, uint32_t band, uint32_t segment,
                      cudaStream_t stream)
{
    const struct prs_kernel_args *args = &c->plan->args;
    const struct prs_schedule *s = &args->schedule;
    uint64_t pitch = (uint64_t)c->plan->shape.k * 2, row = (uint64_t)band * s->band * PRS_PAIR_M;
    uint64_t rows = (uint64_t)s->band * PRS_PAIR_M, left = (uint64_t)prs_schedule_segment_steps(s) * PRS_TILE_K * 2;
    uint32_t slot = prs_schedule_slot(s, s->rank, (s->rank + p) % s->world);
    uint8_t *to = args->staging[p] + ((uint64_t)slot * s->pairs * PRS_PAIR_M + row) * pitch;
    cudaError_t e;
    if (row + rows > s->block_rows)
        rows = s->block_rows - row;
    if (s->segments == 1) {
        e = cudaMemcpyAsync(to, a + row * pitch, rows * pitch, cudaMemcpyDeviceToDevice, stream);
    } else {
        uint64_t begin = segment * left, width = begin + left > pitch ? pitch - begin : left;
        if (begin >= pitch)
            return 0; /* nothing left: nobody waits for this piece either */
        e = cudaMemcpy2DAsync(to + begin, pitch, a + row * pitch + begin, pitch, width, rows, cudaMemcpyDeviceToDevice,
                              stream);
    }
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(args->flags[p] + prs_schedule_segment_flag(s, slot, band, segment),
                            &args->sync.words->copying, sizeof(uint32_t), cudaMemcpyDeviceToDevice, stream);
    return prs_cuda_check(e, "copy of a block of A to another rank");
}

int prs_copies_begin(struct prs_copies *c, cudaStream_t stream)
{
    int r = prs_kernels_begin_copies(&c->plan->args, stream);
    if (r != 0)
        return prs_fail(r, "fused: CUDA refused the launch: %s", cudaGetErrorString(cudaGetLastError()));
    return prs_cuda_check(cudaEventRecord(c->forked, stream), "cudaEventRecord");
}

int prs_copies_enqueue(struct prs_copies *c, const void *a)
{
    const struct prs_schedule *s = &c->plan->args.schedule;
    uint32_t pieces = s->bands * s->segments;
    int r = 0;
    for (uint32_t i = 0; i < c->count && r == 0; i++)
        r = prs_cuda_check(cudaStreamWaitEvent(c->streams[i], c->forked, 0), "cudaStreamWaitEvent");
    for (uint32_t i = 0; i < pieces * c->others && r == 0; i++) {
        /* In turn: all of one rank before the next; else all ranks' piece before the next piece. */
        uint32_t piece = s->in_turn ? i % pieces : i / c->others;
        uint32_t p = 1 + (s->in_turn ? i / pieces : i % c->others);
        r = copy_piece(c, a, p, piece / s->segments, piece % s->segments, c->streams[i % c->count]);
    }
    for (uint32_t i = 0; i < c->count && r == 0; i++)
        r = prs_cuda_check(cudaEventRecord(c->done[i], c->streams[i]), "cudaEventRecord");
    return r;
}

bool prs_copies_go_first(const struct prs_copies *c)
{
    return c->go_first;
}

int prs_copies_join(struct prs_copies *c, cudaStream_t stream)
{
    int r = 0;
    for (uint32_t i = 0; i < c->count && r == 0; i++)
        r = prs_cuda_check(cudaStreamWaitEvent(stream, c->done[i], 0), "cudaStreamWaitEvent");
    return r;
}
