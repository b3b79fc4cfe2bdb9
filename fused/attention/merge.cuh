/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention: the CTA that is last to finish a part of a task adds up all its parts. No CTA waits. A thread holds
 * the same elements in every part, so each warp can add up its rows alone. */
#ifndef PERSEUS_FUSED_ATTENTION_MERGE_CUH
#define PERSEUS_FUSED_ATTENTION_MERGE_CUH

#include "fused/attention/softmax.cuh"

/* The number of this warp's 16 rows in the task. */
PRS_DEVICE uint32_t warp_of_task(void)
{
    return threadIdx.x / 32 - 4;
}

/* Where one thread leaves its part of the result and then its struct row_state, with a stride of 32 floats. */
template <class E> PRS_DEVICE float *partial_of(const struct prs_attention_args &args, uint32_t part)
{
    return args.partial + (uint64_t)part * prs_attention_partial(E::tile_rows, E::value_dim) +
           warp_of_task() * (E::value_dim / 2 + 4) * 32 + threadIdx.x % 32;
}

template <class E>
PRS_DEVICE void leave_part(const struct prs_attention_args &args, uint32_t part, const float (&o)[E::value_dim / 2],
                           const struct row_state &rows)
{
    float *to = partial_of<E>(args, part);
#pragma unroll
    for (int i = 0; i < E::value_dim / 2; i++)
        to[i * 32] = o[i];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        to[(E::value_dim / 2 + h) * 32] = rows.top[h];
        to[(E::value_dim / 2 + 2 + h) * 32] = rows.sum[h];
    }
}

template <class E>
PRS_DEVICE void add_part(const struct prs_attention_args &args, uint32_t part, float (&o)[E::value_dim / 2],
                         struct row_state *rows)
{
    const float *from = partial_of<E>(args, part);
    float keep[2], take[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float other = from[(E::value_dim / 2 + h) * 32], top = fmaxf(rows->top[h], other);
        keep[h] = exp2_fast((rows->top[h] - top) * args.scale_log2);
        take[h] = exp2_fast((other - top) * args.scale_log2);
        rows->top[h] = top;
        rows->sum[h] = rows->sum[h] * keep[h] + from[(E::value_dim / 2 + 2 + h) * 32] * take[h];
    }
#pragma unroll
    for (int i = 0; i < E::value_dim / 2; i++)
        o[i] = o[i] * keep[i >> 1 & 1] + from[i * 32] * take[i >> 1 & 1];
}

/* Returns true for the last part. o and rows then belong to the whole task, and were added up in the same order as in
 * every run. */
template <class E>
PRS_DEVICE bool merge_parts(const struct prs_attention_args &args, uint32_t part, float (&o)[E::value_dim / 2],
                            struct row_state *rows)
{
    struct prs_attention_part p = args.parts[part];
    uint32_t *done = args.parts_done + p.first * prs_attention_part_counters(E::tile_rows) + warp_of_task(), before = 0;
    leave_part<E>(args, part, o, *rows);
    __syncwarp();
    /* [task-parts]: releases what this warp left, before the count; and acquires what the others left, after it. */
    if (threadIdx.x % 32 == 0)
        before = add_acq_rel_gpu(done, 1);
    if (__shfl_sync(~0u, before, 0) + 1 != p.parts)
        return false;
    if (threadIdx.x % 32 == 0)
        *done = 0; /* the next launch needs 0; this launch does not count any more */
    __syncwarp();
    *rows = {{-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll
    for (int i = 0; i < E::value_dim / 2; i++)
        o[i] = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < p.parts; i++)
        add_part<E>(args, p.first + i, o, rows);
    return true;
}

#endif
