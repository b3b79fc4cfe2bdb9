/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/copies.h"

#include <errno.h>
#include <stdlib.h>

#include "fused/kernels.h"
#include "util/error.h"

struct prs_copies {
    struct prs_fused_plan *plan;
    bool go_first;
    cudaStream_t stream;
    cudaEvent_t forked, done;
};

int prs_copies_open(struct prs_fused_plan *plan, struct prs_copies **out)
{
    const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
    struct prs_copies *c = calloc(1, sizeof(*c));
    int r;
    if (c == NULL)
        return prs_fail(-ENOMEM, "fused: no memory for a copy stream");
    c->plan = plan;
    c->go_first = blocking != NULL && strtol(blocking, NULL, 10) != 0;
    r = prs_cuda_check(cudaEventCreateWithFlags(&c->forked, cudaEventDisableTiming), "cudaEventCreate");
    if (r == 0)
        r = prs_cuda_check(cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming), "cudaEventCreate");
    if (r == 0)
        r = prs_cuda_check(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "cudaStreamCreate");
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
    if (c->stream != NULL)
        (void)cudaStreamDestroy(c->stream);
    if (c->done != NULL)
        (void)cudaEventDestroy(c->done);
    if (c->forked != NULL)
        (void)cudaEventDestroy(c->forked);
    free(c);
}

/* A piece, then its flag: copies of one stream finish in order. */
static int copy_piece(struct prs_copies *c, const uint8_t *a, const struct prs_copy *piece)
{
    const struct prs_kernel_args *args = &c->plan->args;
    const struct prs_schedule *s = &args->schedule;
    uint64_t pitch = (uint64_t)c->plan->shape.k * 2, row = (uint64_t)piece->band * s->band * PRS_PAIR_M;
    uint64_t rows = (uint64_t)s->band * PRS_PAIR_M, left = (uint64_t)prs_schedule_segment_steps(s) * PRS_TILE_K * 2;
    uint32_t slot = prs_schedule_slot(s, s->rank, (s->rank + piece->distance) % s->world);
    uint8_t *to = args->staging[piece->distance] + ((uint64_t)slot * s->pairs * PRS_PAIR_M + row) * pitch;
    cudaError_t e;
    if (row + rows > s->block_rows)
        rows = s->block_rows - row;
    if (s->segments == 1) {
        e = cudaMemcpyAsync(to, a + row * pitch, rows * pitch, cudaMemcpyDeviceToDevice, c->stream);
    } else {
        uint64_t begin = piece->segment * left, width = begin + left > pitch ? pitch - begin : left;
        if (begin >= pitch)
            return 0; /* nothing left: nobody waits for this piece either */
        e = cudaMemcpy2DAsync(to + begin, pitch, a + row * pitch + begin, pitch, width, rows, cudaMemcpyDeviceToDevice,
                              c->stream);
    }
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(args->flags[piece->distance] +
                                prs_schedule_segment_flag(s, slot, piece->band, piece->segment),
                            &args->sync.words->copying, sizeof(uint32_t), cudaMemcpyDeviceToDevice, c->stream);
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
    int r = prs_cuda_check(cudaStreamWaitEvent(c->stream, c->forked, 0), "cudaStreamWaitEvent");
    for (uint32_t at = 0; at < prs_schedule_copies(s) && r == 0; at++) {
        struct prs_copy piece;
        prs_schedule_copy(s, at, &piece);
        r = copy_piece(c, a, &piece);
    }
    return r != 0 ? r : prs_cuda_check(cudaEventRecord(c->done, c->stream), "cudaEventRecord");
}

bool prs_copies_go_first(const struct prs_copies *c)
{
    return c->go_first;
}

int prs_copies_join(struct prs_copies *c, cudaStream_t stream)
{
    return prs_cuda_check(cudaStreamWaitEvent(stream, c->done, 0), "cudaStreamWaitEvent");
}
