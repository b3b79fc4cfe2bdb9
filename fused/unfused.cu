/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of the unfused path: meetings of all ranks, and sums over mapped memory. */
#include "fused/launch.cuh"
#include "fused/sync.cuh"
#include "fused/unfused.h"

/* All ranks have come here, and what they wrote before is visible. words->exits counts meetings. One warp. */
static __global__ void meet(const __grid_constant__ struct prs_kernel_args args)
{
    const struct prs_schedule *s = &args.schedule;
    uint32_t slot = threadIdx.x, count = *(volatile uint32_t *)&args.sync.words->exits + 1;
    if (slot + 1 < s->world) {
        uint32_t from = (s->rank + 1 + slot) % s->world, p = slot + 1;
        /* R4: earlier kernels of this stream are complete. Pairs with A1 in the other rank's wait_flag(). */
        store_release_sys(args.flags[p] + prs_schedule_slot(s, s->rank, from), count);
        wait_flag(&args.sync, args.flags[0] + slot, count, PRS_AWAIT_PEERS, from, slot);
    }
    __syncwarp();
    if (slot == 0)
        *(volatile uint32_t *)&args.sync.words->exits = count;
}

struct sum_args {
    const uint8_t *from[PRS_MAX_WORLD]; /* in slot order, own last */
    uint8_t *to[PRS_MAX_WORLD];
    uint64_t elements;
    uint32_t count, copies;
};

/* fp32 sums in a fixed order, one rounding; WIDE: eight elements at a time. */
template <bool WIDE> static __global__ void sum(const __grid_constant__ struct sum_args a)
{
    uint64_t step = (uint64_t)gridDim.x * blockDim.x, i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    for (; i < a.elements / (WIDE ? 8 : 1); i += step) {
        if (WIDE) {
            float s[8] = {};
            for (uint32_t k = 0; k < a.count; k++) {
                uint4 x = ((const uint4 *)a.from[k])[i];
                s[0] += bf16_low(x.x), s[1] += bf16_high(x.x), s[2] += bf16_low(x.y), s[3] += bf16_high(x.y);
                s[4] += bf16_low(x.z), s[5] += bf16_high(x.z), s[6] += bf16_low(x.w), s[7] += bf16_high(x.w);
            }
            uint4 y = make_uint4(pack_bf16x2(s[0], s[1]), pack_bf16x2(s[2], s[3]), pack_bf16x2(s[4], s[5]),
                                 pack_bf16x2(s[6], s[7]));
            for (uint32_t k = 0; k < a.copies; k++)
                ((uint4 *)a.to[k])[i] = y;
        } else {
            float s = 0;
            for (uint32_t k = 0; k < a.count; k++)
                s += __bfloat162float(((const __nv_bfloat16 *)a.from[k])[i]);
            for (uint32_t k = 0; k < a.copies; k++)
                ((__nv_bfloat16 *)a.to[k])[i] = __float2bfloat16(s);
        }
    }
}

extern "C" int prs_unfused_meet(const struct prs_kernel_args *args, cudaStream_t stream)
{
    static const struct launch_shape one_warp = {1, 32, 0};
    return launch_kernel(meet, &one_warp, 1, stream, *args);
}

extern "C" int prs_unfused_sum(const struct prs_kernel_args *args, uint64_t first, uint64_t elements, void *const *to,
                               uint32_t copies, int offset_result, cudaStream_t stream)
{
    static const struct launch_shape shape = {1, 256, 0};
    struct sum_args a = {};
    uint64_t misaligned = elements % 8 | first % 8;
    a.elements = elements;
    a.count = args->schedule.world;
    a.copies = copies;
    for (uint32_t k = 0; k < a.count; k++)
        a.from[k] = args->staging[(k + 1) % a.count] + first * 2;
    for (uint32_t k = 0; k < copies; k++) {
        a.to[k] = (uint8_t *)to[k] + (offset_result ? first * 2 : 0);
        misaligned |= (uintptr_t)a.to[k] % 16;
    }
    if (elements == 0)
        return 0;
    if (misaligned)
        return launch_kernel(sum<false>, &shape, 1056, stream, a);
    return launch_kernel(sum<true>, &shape, 528, stream, a);
}
