/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/copies.h"

#include <errno.h>
#include <stdlib.h>

#include "fused/kernels.h"
#include "util/error.h"

struct prs_copies {
    struct prs_fused_plan *plan;
    uint32_t count;                      /* other ranks */
    cudaStream_t streams[PRS_MAX_WORLD]; /* [p]: copies to rank + p; in turn, all go through [1] */
    cudaEvent_t forked, done[PRS_MAX_WORLD];
};

int prs_copies_open(struct prs_fused_plan *plan, struct prs_copies **out)
{
    struct prs_copies *c = calloc(1, sizeof(*c));
    int r;
    if (c == NULL)
        return prs_fail(-ENOMEM, "fused: no memory for copy streams");
    c->plan = plan;
    r = prs_cuda_check(cudaEventCreateWithFlags(&c->forked, cudaEventDisableTiming), "cudaEventCreate");
    for (uint32_t p = 1; p < plan->args.schedule.world && r == 0; p++) {
        r = prs_cuda_check(cudaStreamCreateWithFlags(&c->streams[p], cudaStreamNonBlocking), "cudaStreamCreate");
        if (r == 0)
            r = prs_cuda_check(cudaEventCreateWithFlags(&c->done[p], cudaEventDisableTiming), "cudaEventCreate");
        c->count = p;
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
    for (uint32_t p = 1; p <= c->count; p++) {
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
static int copy_piece(struct prs_copies *c, const uint8_t *a, uint32_t p, uint32_t band, uint32_t segment)
{
    cudaStream_t stream = c->streams[c->plan->args.schedule.in_turn ? 1 : p];
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

int prs_copies_fork(struct prs_copies *c, const void *a, cudaStream_t stream)
{
    const struct prs_schedule *s = &c->plan->args.schedule;
    int r = prs_kernels_begin_copies(&c->plan->args, stream);
    if (r != 0)
        return prs_fail(r, "fused: CUDA refused the launch: %s", cudaGetErrorString(cudaGetLastError()));
    r = prs_cuda_check(cudaEventRecord(c->forked, stream), "cudaEventRecord");
    for (uint32_t p = 1; p <= c->count && r == 0; p++)
        r = prs_cuda_check(cudaStreamWaitEvent(c->streams[p], c->forked, 0), "cudaStreamWaitEvent");
    for (uint32_t i = 0; i < s->bands * s->segments * c->count && r == 0; i++) {
        /* In turn: all of one rank before the next; else all ranks' piece before the next piece. */
        uint32_t piece = s->in_turn ? i % (s->bands * s->segments) : i / c->count;
        uint32_t p = 1 + (s->in_turn ? i / (s->bands * s->segments) : i % c->count);
        r = copy_piece(c, a, p, piece / s->segments, piece % s->segments);
    }
    for (uint32_t p = 1; p <= c->count && r == 0; p++)
        r = prs_cuda_check(cudaEventRecord(c->done[p], c->streams[p]), "cudaEventRecord");
    return r;
}

int prs_copies_join(struct prs_copies *c, cudaStream_t stream)
{
    int r = 0;
    for (uint32_t p = 1; p <= c->count && r == 0; p++)
        r = prs_cuda_check(cudaStreamWaitEvent(stream, c->done[p], 0), "cudaStreamWaitEvent");
    return r;
}
