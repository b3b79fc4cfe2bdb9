/* SPDX-License-Identifier: Apache-2.0 */
/* The order that the emulated runtime promises, and what fits on a device at once. */
#include <criterion/criterion.h>
#include <cuda_runtime.h>

#include "fused/core/launch.cuh"
#include "fused/core/ptx.cuh"
#include "tools/hopper/hopper.h"

enum { WORDS = 1024, ROUNDS = 20, MOST_LOOKS = 3000, ADDS = 20000, FEW_LOOKS = ADDS / 10, LANES = 32 };

static uint32_t *words(void)
{
    uint32_t *p = NULL;
    hopper_setup(1, 4, 0);
    cr_assert_eq(cudaMalloc((void **)&p, WORDS * 4), cudaSuccess);
    cr_assert_eq(cudaMemset(p, 0, WORDS * 4), cudaSuccess);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    return p;
}

static uint32_t value_of(const uint32_t *p)
{
    uint32_t v = 0;
    cr_assert_eq(cudaMemcpy(&v, p, 4, cudaMemcpyDeviceToHost), cudaSuccess);
    return v;
}

Test(streams, the_null_stream_waits_for_blocking_streams, .timeout = 900)
{
    uint32_t *p = words();
    cudaStream_t s;
    cr_assert_eq(cudaStreamCreate(&s), cudaSuccess);
    for (int i = 1; i <= ROUNDS; i++) {
        cr_assert_eq(cudaMemsetAsync(p, i, 4, s), cudaSuccess);
        cr_assert_eq(value_of(p), (uint32_t)i * 0x01010101u);
    }
}

Test(streams, a_stream_that_waits_for_an_event_comes_after_it, .timeout = 900)
{
    uint32_t *p = words();
    cudaStream_t s[2];
    cudaEvent_t e;
    cr_assert_eq(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), cudaSuccess);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking), cudaSuccess);
    for (uint32_t i = 1; i < ROUNDS; i++) { /* both streams in turn set a word and copy it */
        cr_assert_eq(cudaMemsetAsync(p, (int)i, 4, s[0]), cudaSuccess);
        cr_assert_eq(cudaEventRecord(e, s[0]), cudaSuccess);
        cr_assert_eq(cudaStreamWaitEvent(s[1], e, 0), cudaSuccess);
        cr_assert_eq(cudaMemcpyAsync(p + i, p, 4, cudaMemcpyDeviceToDevice, s[1]), cudaSuccess);
        cr_assert_eq(cudaEventRecord(e, s[1]), cudaSuccess);
        cr_assert_eq(cudaStreamWaitEvent(s[0], e, 0), cudaSuccess);
    }
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (uint32_t i = 1; i < ROUNDS; i++)
        cr_assert_eq(value_of(p + i), i * 0x01010101u);
}

/* p[0]: the flag, which the second warp raises after its work; p[1]: how often the first has looked at it. */
static __global__ void look_without_pause(uint32_t *const p)
{
    uint32_t looks = 1;
    if (threadIdx.x == 0) {
        while (load_acquire_sys(p) == 0)
            looks++;
        p[1] = looks;
    } else if (threadIdx.x == LANES) {
        for (uint32_t i = 0; i < ADDS; i++)
            add_relaxed_sys(p + 2, 1);
        store_release_sys(p, 1);
    }
}

Test(streams, a_thread_that_waits_leaves_the_turns_to_those_with_work, .timeout = 900)
{
    static const struct launch_shape shape = {1, 2 * LANES, 0};
    uint32_t *p = words(), looks;
    cr_assert_eq(launch_kernel(look_without_pause, &shape, 1, NULL, p), 0);
    looks = value_of(p + 1);
    cr_assert(looks > 0 && looks < FEW_LOOKS, "%u looks during %d additions", looks, ADDS);
}

static __global__ void sleep_once(uint32_t *const p)
{
    __nanosleep(1000);
    p[threadIdx.x] = (uint32_t)clock64();
}

Test(streams, the_lanes_of_a_warp_sleep_equally_long, .timeout = 900)
{
    static const struct launch_shape shape = {1, LANES, 0};
    uint32_t *p = words();
    cr_assert_eq(launch_kernel(sleep_once, &shape, 1, NULL, p), 0);
    for (uint32_t i = 1; i < LANES; i++)
        cr_assert_eq(value_of(p + i), value_of(p), "lane %u", i);
}

/* p[0]: the flag, which the other launch raises; p[1]: this launch saw it; p[2]: CTAs that have stopped looking. A
 * single CTA looks until it sees the flag. Several CTAs look for a while, and none leaves before all have stopped. */
static __global__ void look(uint32_t *const p)
{
    for (uint32_t i = 0; (gridDim.x == 1 || i < MOST_LOOKS) && p[1] == 0; i++) {
        __nanosleep(100);
        if (load_acquire_sys(p) != 0)
            p[1] = 1;
    }
    add_relaxed_sys(p + 2, 1);
    while (load_acquire_sys(p + 2) != gridDim.x)
        __nanosleep(100);
}

static __global__ void raise_flag(uint32_t *const p)
{
    store_release_sys(p, 1);
}

/* Whether `ctas` CTAs, each of which takes one of four SMs, saw the flag that a CTA of another stream raised
 * meanwhile. */
static bool sees_the_other(uint32_t ctas)
{
    static const struct launch_shape most = {1, 1, 200 << 10};
    uint32_t *p = words(), fit = 0;
    cudaStream_t s[2];
    cr_assert_eq(launch_prepare(raise_flag, &most, &fit), 0);
    cr_assert_eq(launch_prepare(look, &most, &fit), 0);
    cr_assert_eq(fit, 4);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking), cudaSuccess);
    cr_assert_eq(launch_kernel(look, &most, ctas, s[0], p), 0);
    cr_assert_eq(launch_kernel(raise_flag, &most, 1, s[1], p), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    cr_assert_eq(value_of(p), 1);
    return value_of(p + 1) != 0;
}

Test(streams, launches_run_together_where_there_is_room, .timeout = 900)
{
    cr_assert(sees_the_other(1));
}

Test(streams, a_launch_that_does_not_fit_waits, .timeout = 900)
{
    cr_assert_not(sees_the_other(4));
}
