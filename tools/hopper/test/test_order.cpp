/* SPDX-License-Identifier: Apache-2.0 */
/* The checker of memory order: kernels that pass data in each way that PTX has: with everything that the way needs, and
 * without one part of it. */
#include <criterion/criterion.h>
#include <cuda_runtime.h>
#include <string>

#include <perseus/sync.h>

#include "fused/core/launch.cuh"
#include "fused/core/ptx.cuh"
#include "tools/hopper/hopper.h"

enum { BYTES = 4096, SHARED = 16 << 10, BARRIER = 12 << 10 };

struct args {
    uint8_t *here, *there; /* BYTES on device 0 and on device 1 */
    uint32_t *flag;        /* on device 0, zero */
    uint32_t device;       /* of this launch */
};

PRS_DEVICE uint64_t *barrier_at(uint32_t index)
{
    return (uint64_t *)(dynamic_shared() + BARRIER) + index;
}

static void *zeros(int device, size_t bytes)
{
    void *p;
    cr_assert_eq(cudaSetDevice(device), cudaSuccess);
    cr_assert_eq(cudaMalloc(&p, bytes), cudaSuccess);
    cr_assert_eq(cudaMemset(p, 0, bytes), cudaSuccess);
    return p;
}

/* Runs one launch on each device; returns the violation, or "". */
static std::string verdict(void (*kernel)(const struct args), uint32_t devices, uint32_t threads, uint32_t cluster)
{
    struct launch_shape shape = {cluster, threads, SHARED};
    struct args a = {};
    uint32_t clusters;
    hopper_setup(2, 4, 0);
    hopper_tolerate();
    a.here = (uint8_t *)zeros(0, BYTES);
    a.there = (uint8_t *)zeros(1, BYTES);
    a.flag = (uint32_t *)zeros(0, BYTES);
    for (uint32_t d = 0; d < 2; d++) {
        cr_assert_eq(cudaSetDevice((int)d), cudaSuccess);
        cr_assert_eq(cudaDeviceEnablePeerAccess((int)d ^ 1, 0), cudaSuccess);
        cr_assert_eq(launch_prepare(kernel, &shape, &clusters), 0);
        cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    }
    for (uint32_t d = 0; d < devices; d++) {
        cr_assert_eq(cudaSetDevice((int)d), cudaSuccess);
        a.device = d;
        cr_assert_eq(launch_kernel(kernel, &shape, 1, NULL, a), 0);
    }
    for (uint32_t d = 0; d < devices; d++) {
        cr_assert_eq(cudaSetDevice((int)d), cudaSuccess);
        (void)cudaDeviceSynchronize();
    }
    return hopper_violation();
}

static void assert_says(void (*kernel)(const struct args), uint32_t devices, uint32_t threads, uint32_t cluster,
                        const char *text)
{
    std::string found = verdict(kernel, devices, threads, cluster);
    if (!text)
        cr_assert(found.empty(), "found \"%s\"", found.c_str());
    else
        cr_assert(found.find("race at ") == 0 && found.find(text) != std::string::npos, "wanted \"%s\", found \"%s\"",
                  text, found.c_str());
}

#define ORDER(name, devices, threads, cluster, text)                                                                   \
    static __global__ void kernel_##name(const struct args a);                                                         \
    Test(order, name, .timeout = 200)                                                                                  \
    {                                                                                                                  \
        assert_says(kernel_##name, devices, threads, cluster, text);                                                   \
    }                                                                                                                  \
    static __global__ void kernel_##name([[maybe_unused]] const struct args a)

#define NOTHING "nothing orders them"
#define NARROW  "whose scope is too narrow"
#define PROXY   "no fence.proxy.async between them"
#define UNREAD  "has not acquired it"

/* ---- a flag between threads of two devices: device 0 writes, device 1 reads ---- */
PRS_DEVICE void write_words(uint8_t *to)
{
    for (uint32_t i = threadIdx.x; i < 64; i += blockDim.x)
        ((uint32_t *)to)[i] = i;
}

PRS_DEVICE uint32_t read_words(const uint8_t *from)
{
    uint32_t sum = 0;
    for (uint32_t i = threadIdx.x; i < 64; i += blockDim.x)
        sum += ((const uint32_t *)from)[i];
    return sum;
}

PRS_DEVICE void keep(const struct args &a, uint32_t sum)
{
    ((uint32_t *)a.there)[512 + threadIdx.x] = sum;
}

template <class Raise, class Wait> PRS_DEVICE void pass_words(const struct args &a, Raise raise, Wait wait)
{
    if (a.device == 0) {
        write_words(a.here);
        raise(a.flag);
    } else {
        wait(a.flag);
        keep(a, read_words(a.here));
    }
}

PRS_DEVICE void wait_acquire(uint32_t *flag)
{
    while (load_acquire_sys(flag) == 0)
        __nanosleep(100);
}

template <hopper::order ORDER, hopper::scope SCOPE> PRS_DEVICE void wait_by(uint32_t *flag)
{
    while (hopper::atomic_load(flag, 4, ORDER, SCOPE) == 0)
        __nanosleep(100);
}

ORDER(a_release_and_an_acquire_order_two_devices, 2, 1, 1, NULL)
{
    pass_words(
        a, [](uint32_t *f) { store_release_sys(f, 1); }, wait_acquire);
}

ORDER(a_relaxed_store_does_not_release, 2, 1, 1, NOTHING)
{
    pass_words(
        a, [](uint32_t *f) { add_relaxed_sys(f, 1); }, wait_acquire);
}

ORDER(a_fence_makes_a_relaxed_store_release, 2, 1, 1, NULL)
{
    pass_words(
        a,
        [](uint32_t *f) {
            fence_release_sys();
            add_relaxed_sys(f, 1);
        },
        wait_acquire);
}

ORDER(a_fence_of_one_gpu_does_not_reach_another, 2, 1, 1, NARROW)
{
    pass_words(
        a,
        [](uint32_t *f) {
            fence_release_gpu();
            add_relaxed_sys(f, 1);
        },
        wait_acquire);
}

ORDER(a_release_for_one_gpu_does_not_reach_another, 2, 1, 1, "race at memory of device 0")
{
    pass_words(
        a, [](uint32_t *f) { add_acq_rel_gpu(f, 1); }, wait_acquire);
}

ORDER(a_relaxed_load_does_not_acquire, 2, 1, 1, UNREAD)
{
    pass_words(
        a, [](uint32_t *f) { store_release_sys(f, 1); }, wait_by<hopper::ORDER_RELAXED, hopper::SCOPE_SYS>);
}

ORDER(a_fence_after_a_relaxed_load_acquires, 2, 1, 1, NULL)
{
    pass_words(
        a, [](uint32_t *f) { store_release_sys(f, 1); },
        [](uint32_t *f) {
            wait_by<hopper::ORDER_RELAXED, hopper::SCOPE_SYS>(f);
            fence_release_sys();
        });
}

/* The read of the flag itself is no race: the store is an atomic access of the whole system and so is the load. */
ORDER(a_volatile_flag_orders_nothing, 2, 1, 1, UNREAD)
{
    pass_words(
        a, [](uint32_t *f) { store_release_sys(f, 1); },
        [](uint32_t *f) {
            while (*(volatile uint32_t *)f == 0)
                __nanosleep(100);
        });
}

ORDER(an_ordinary_store_beside_an_atomic_load_is_found, 2, 1, 1, NOTHING)
{
    if (a.device == 0)
        *a.flag = 1;
    else
        wait_acquire(a.flag);
}

ORDER(counts_of_many_threads_order_all_of_them, 1, 64, 1, NULL)
{
    ((uint32_t *)a.here)[threadIdx.x] = threadIdx.x;
    if (add_acq_rel_gpu(a.flag, 1) + 1 == blockDim.x)
        for (uint32_t i = 0; i < blockDim.x; i++)
            keep(a, ((uint32_t *)a.here)[i]);
}

/* The last thread sets the counter back by an ordinary store: it knows of all additions. */
ORDER(a_counter_may_be_set_back_by_the_last_arrival, 1, 64, 1, NULL)
{
    fence_release_gpu();
    if (hopper::atomic_add(a.flag, 4, 1, hopper::ORDER_RELAXED, hopper::SCOPE_GPU) + 1 == blockDim.x) {
        fence_release_gpu();
        *a.flag = 0;
    }
}

/* ---- threads of a CTA ---- */
ORDER(threads_that_write_one_word_race, 1, 64, 1, NOTHING)
{
    *(uint32_t *)a.here = threadIdx.x;
}

ORDER(halves_of_a_word_do_not_race, 1, 64, 1, NULL)
{
    ((uint16_t *)a.here)[threadIdx.x] = (uint16_t)threadIdx.x;
}

ORDER(a_barrier_orders_a_cta, 1, 96, 1, NULL)
{
    ((uint32_t *)dynamic_shared())[threadIdx.x] = threadIdx.x;
    __syncthreads();
    keep(a, ((uint32_t *)dynamic_shared())[(threadIdx.x + 40) % blockDim.x]);
}

ORDER(a_barrier_that_is_left_out_is_found, 1, 96, 1, "race at shared offset")
{
    ((uint32_t *)dynamic_shared())[threadIdx.x] = threadIdx.x;
    keep(a, ((uint32_t *)dynamic_shared())[(threadIdx.x + 40) % blockDim.x]);
}

ORDER(lanes_are_ordered_by_syncwarp, 1, 32, 1, NULL)
{
    ((uint32_t *)dynamic_shared())[threadIdx.x] = threadIdx.x;
    __syncwarp();
    keep(a, ((uint32_t *)dynamic_shared())[threadIdx.x ^ 1]);
}

ORDER(lanes_are_not_ordered_by_a_vote, 1, 32, 1, NOTHING)
{
    ((uint32_t *)dynamic_shared())[threadIdx.x] = threadIdx.x;
    (void)__ballot_sync(~0u, 1);
    keep(a, ((uint32_t *)dynamic_shared())[threadIdx.x ^ 1]);
}

/* Warp 0 only arrives: it releases and does not wait. */
ORDER(an_arrival_at_a_named_barrier_hands_over, 1, 64, 1, NULL)
{
    if (threadIdx.x < 32) {
        ((uint32_t *)dynamic_shared())[threadIdx.x] = threadIdx.x;
        barrier_arrive(1, 64);
    } else {
        barrier_sync(1, 64);
        keep(a, ((uint32_t *)dynamic_shared())[threadIdx.x - 32]);
    }
}

ORDER(an_arrival_at_a_named_barrier_does_not_take_over, 1, 64, 1, NOTHING)
{
    if (threadIdx.x < 32) {
        barrier_arrive(1, 64);
        keep(a, ((uint32_t *)dynamic_shared())[threadIdx.x]);
    } else {
        ((uint32_t *)dynamic_shared())[threadIdx.x - 32] = threadIdx.x;
        barrier_sync(1, 64);
    }
}

/* ---- copies ---- */
PRS_DEVICE void start_barrier(bool fenced)
{
    if (threadIdx.x == 0) {
        mbarrier_init(barrier_at(0), 1);
        if (fenced)
            mbarrier_init_fence();
    }
    __syncthreads();
}

ORDER(a_barrier_orders_a_load_and_its_reader, 1, 64, 1, NULL)
{
    start_barrier(true);
    if (threadIdx.x == 0) {
        mbarrier_expect(barrier_at(0), 256);
        bulk_load(dynamic_shared(), a.here, 256, barrier_at(0));
    }
    mbarrier_wait(barrier_at(0), 0);
    keep(a, read_words(dynamic_shared()));
}

ORDER(a_load_that_is_not_waited_for_is_found, 1, 64, 1, NOTHING)
{
    start_barrier(true);
    if (threadIdx.x == 0) {
        mbarrier_expect(barrier_at(0), 256);
        bulk_load(dynamic_shared(), a.here, 256, barrier_at(0));
    }
    if (threadIdx.x < 32) /* one warp alone */
        mbarrier_wait(barrier_at(0), 0);
    keep(a, read_words(dynamic_shared()));
    mbarrier_wait(barrier_at(0), 0);
}

ORDER(a_barrier_that_the_copy_engine_may_not_see_is_found, 1, 32, 1, PROXY)
{
    start_barrier(false);
    if (threadIdx.x == 0) {
        mbarrier_expect(barrier_at(0), 256);
        bulk_load(dynamic_shared(), a.here, 256, barrier_at(0));
    }
    mbarrier_wait(barrier_at(0), 0);
}

/* The words are written by ordinary stores of another thread, and read by TMA. */
PRS_DEVICE void load_words_of_a_thread(const struct args &a, bool fence_here, bool fence_there)
{
    start_barrier(true);
    if (threadIdx.x == 32) {
        for (uint32_t i = 0; i < 64; i++)
            ((uint32_t *)a.here)[i] = i;
        if (fence_there)
            fence_async_global();
        store_release_sys(a.flag, 1);
    }
    if (threadIdx.x == 0) {
        wait_acquire(a.flag);
        if (fence_here)
            fence_async_global();
        mbarrier_expect(barrier_at(0), 256);
        bulk_load(dynamic_shared(), a.here, 256, barrier_at(0));
    }
    mbarrier_wait(barrier_at(0), 0);
}

ORDER(a_proxy_fence_of_the_reader_is_enough, 1, 64, 1, NULL)
{
    load_words_of_a_thread(a, true, false);
}

ORDER(a_proxy_fence_of_the_writer_is_enough, 1, 64, 1, NULL)
{
    load_words_of_a_thread(a, false, true);
}

ORDER(ordinary_stores_that_a_copy_reads_without_a_proxy_fence_are_found, 1, 64, 1, PROXY)
{
    load_words_of_a_thread(a, false, false);
}

PRS_DEVICE void fill_and_store(const struct args &a)
{
    for (uint32_t i = 0; i < 16; i++)
        store_shared_v4(smem_address(dynamic_shared()) + i * 16, i, 2, 3, 4);
    fence_async_shared();
    bulk_store(a.here, dynamic_shared(), 256);
    bulk_commit();
}

template <class Wait> PRS_DEVICE void hand_a_store_over(const struct args &a, Wait wait)
{
    if (a.device == 0) {
        fill_and_store(a);
        wait();
        store_release_sys(a.flag, 1);
        bulk_wait_done<0>();
    } else {
        wait_acquire(a.flag);
        keep(a, read_words(a.here));
    }
}

ORDER(a_store_that_has_landed_is_handed_over, 2, 1, 1, NULL)
{
    hand_a_store_over(a, [] { bulk_wait_done<0>(); });
}

ORDER(a_store_that_has_been_read_has_not_landed, 2, 1, 1, NOTHING)
{
    hand_a_store_over(a, [] { bulk_wait_read<0>(); });
}

ORDER(a_buffer_may_be_filled_again_after_it_was_read, 1, 1, 1, NULL)
{
    fill_and_store(a);
    bulk_wait_read<0>();
    store_shared_v4(smem_address(dynamic_shared()), 1, 2, 3, 4);
    bulk_wait_done<0>();
}

ORDER(a_buffer_that_is_filled_again_too_early_is_found, 1, 1, 1, NOTHING)
{
    fill_and_store(a);
    store_shared_v4(smem_address(dynamic_shared()), 0, 2, 3, 4); /* unchanged, so that a checksum does not change */
    bulk_wait_done<0>();
}

/* ---- a cluster ---- */
ORDER(a_cluster_barrier_orders_both_ctas, 1, 32, 2, NULL)
{
    if (blockIdx.x == 0)
        write_words(a.here);
    cluster_arrive();
    cluster_wait();
    if (blockIdx.x == 1)
        keep(a, read_words(a.here));
}

ORDER(an_arrival_at_the_other_cta_hands_over, 1, 32, 2, NULL)
{
    start_barrier(true);
    cluster_arrive();
    cluster_wait();
    if (blockIdx.x == 0) {
        write_words(a.here);
        __syncwarp();
        if (threadIdx.x == 0)
            mbarrier_arrive_at(barrier_at(0), 1);
    } else {
        mbarrier_wait(barrier_at(0), 0);
        keep(a, read_words(a.here));
    }
    cluster_arrive();
    cluster_wait();
}

ORDER(an_arrival_for_one_cta_does_not_reach_another, 1, 32, 2, NARROW)
{
    start_barrier(true);
    cluster_arrive();
    cluster_wait();
    if (blockIdx.x == 0) {
        write_words(a.here);
        __syncwarp();
        if (threadIdx.x == 0)
            hopper::mbarrier_signal(hopper::shared_map(smem_address(barrier_at(0)), 1), 1, 0, hopper::SCOPE_CTA);
    } else {
        mbarrier_wait(barrier_at(0), 0);
        keep(a, read_words(a.here));
    }
    cluster_arrive();
    cluster_wait();
}

/* ---- streams ---- */
static __global__ void write_all(const struct args a)
{
    write_words(a.here);
}

static std::string copy_after_launch(bool wait)
{
    struct launch_shape shape = {1, 32, SHARED};
    struct args a = {};
    uint32_t clusters;
    cudaStream_t streams[2];
    cudaEvent_t written;
    hopper_setup(2, 4, 0);
    hopper_tolerate();
    a.there = (uint8_t *)zeros(0, BYTES);
    a.here = (uint8_t *)zeros(0, BYTES);
    cr_assert_eq(launch_prepare(write_all, &shape, &clusters), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (auto &s : streams)
        cr_assert_eq(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    cr_assert_eq(cudaEventCreateWithFlags(&written, cudaEventDisableTiming), cudaSuccess);
    cr_assert_eq(launch_kernel(write_all, &shape, 1, streams[0], a), 0);
    cr_assert_eq(cudaEventRecord(written, streams[0]), cudaSuccess);
    if (wait)
        cr_assert_eq(cudaStreamWaitEvent(streams[1], written, 0), cudaSuccess);
    cr_assert_eq(cudaMemcpyAsync(a.there, a.here, 256, cudaMemcpyDeviceToDevice, streams[1]), cudaSuccess);
    (void)cudaDeviceSynchronize();
    return hopper_violation();
}

Test(order, an_event_orders_a_copy_after_a_launch, .timeout = 200)
{
    std::string found = copy_after_launch(true);
    cr_assert(found.empty(), "found \"%s\"", found.c_str());
}

Test(order, a_copy_beside_a_launch_is_found, .timeout = 200)
{
    std::string found = copy_after_launch(false);
    cr_assert(found.find(NOTHING) != std::string::npos, "found \"%s\"", found.c_str());
}

/* ---- what a report says ---- */
Test(order, a_report_names_both_places, .timeout = 200)
{
    std::string found = verdict(kernel_a_relaxed_store_does_not_release, 2, 1, 1);
    for (const char *part : {"first: write by thread 0 (warp 0 lane 0) of kernel kernel_a_relaxed_store", "device 0",
                             "second: read by an ordinary access", "device 1, CTA 0",
                             "at test_order.cpp:", "byte 0 of an allocation of 4096"})
        cr_assert(found.find(part) != std::string::npos, "wanted \"%s\", found \"%s\"", part, found.c_str());
}
