/* SPDX-License-Identifier: Apache-2.0 */
/* Each of these kernels does one thing wrong that a GPU would not report. The emulator must report it. */
#include <criterion/criterion.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <string>

#include "fused/core/launch.cuh"
#include "fused/core/ptx.cuh"
#include "tools/hopper/hopper.h"

enum { BYTES = 4096, SHARED = 64 << 10, BARRIER = 60 << 10 };

struct args {
    uint8_t *memory;  /* BYTES on this device */
    uint8_t *foreign; /* BYTES on a device without peer access */
};

PRS_DEVICE uint64_t *barrier_at(uint32_t index)
{
    return (uint64_t *)(dynamic_shared() + BARRIER) + index;
}

/* Runs one launch on device 0; returns the violation, or "". */
static std::string verdict_of(void (*kernel)(const struct args), uint32_t threads, uint32_t cluster, struct args a)
{
    struct launch_shape shape = {cluster, threads, SHARED};
    uint32_t clusters;
    cr_assert_eq(launch_prepare(kernel, &shape, &clusters), 0);
    cr_assert_eq(launch_kernel(kernel, &shape, 1, NULL, a), 0);
    cudaError_t e = cudaDeviceSynchronize();
    cr_assert_eq(e == cudaSuccess, hopper_violation()[0] == 0);
    return hopper_violation();
}

static std::string verdict(void (*kernel)(const struct args), uint32_t threads, uint32_t cluster)
{
    struct args a;
    hopper_setup(2, 4, 0);
    hopper_tolerate();
    cr_assert_eq(cudaSetDevice(1), cudaSuccess);
    cr_assert_eq(cudaMalloc((void **)&a.foreign, BYTES), cudaSuccess);
    cr_assert_eq(cudaSetDevice(0), cudaSuccess);
    cr_assert_eq(cudaMalloc((void **)&a.memory, BYTES), cudaSuccess);
    return verdict_of(kernel, threads, cluster, a);
}

static void assert_says(void (*kernel)(const struct args), uint32_t threads, uint32_t cluster, const char *text)
{
    std::string found = verdict(kernel, threads, cluster);
    cr_assert(found.find(text) != std::string::npos, "wanted \"%s\", found \"%s\"", text, found.c_str());
}

#define WRONG(name, threads, cluster, text)                                                                            \
    static __global__ void kernel_##name(const struct args a);                                                         \
    Test(checks, name, .timeout = 200)                                                                                 \
    {                                                                                                                  \
        assert_says(kernel_##name, threads, cluster, text);                                                            \
    }                                                                                                                  \
    static __global__ void kernel_##name([[maybe_unused]] const struct args a)

/* ---- copies ---- */
WRONG(a_misaligned_copy_is_found, 1, 1, "must be multiples of 16")
{
    mbarrier_init(barrier_at(0), 1);
    mbarrier_expect(barrier_at(0), 16);
    bulk_load(dynamic_shared(), a.memory + 8, 16, barrier_at(0));
    mbarrier_wait(barrier_at(0), 0);
}

WRONG(a_copy_beyond_an_allocation_is_found, 1, 1, "lie in no allocation")
{
    bulk_store(a.memory + BYTES - 16, dynamic_shared(), 32);
    bulk_commit();
    bulk_wait_done<0>();
}

WRONG(a_copy_without_peer_access_is_found, 1, 1, "was not given access")
{
    bulk_store(a.foreign, dynamic_shared(), 32);
    bulk_commit();
    bulk_wait_done<0>();
}

WRONG(a_copy_beyond_shared_memory_is_found, 1, 1, "lie outside the CTA's")
{
    mbarrier_init(barrier_at(0), 1);
    mbarrier_expect(barrier_at(0), 32);
    bulk_load(dynamic_shared() + SHARED - 16, a.memory, 32, barrier_at(0));
    mbarrier_wait(barrier_at(0), 0);
}

WRONG(a_copy_of_unfenced_stores_is_found, 32, 1, "without fence.proxy.async after it")
{
    store_shared_v4(smem_address(dynamic_shared()) + threadIdx.x * 16, 1, 2, 3, 4);
    if (threadIdx.x != 5)
        fence_async_shared(); /* all threads but one */
    __syncwarp();
    if (threadIdx.x == 0) {
        bulk_store(a.memory, dynamic_shared(), 512);
        bulk_commit();
        bulk_wait_done<0>();
    }
}

WRONG(a_buffer_written_before_it_was_read_is_found, 1, 1,
      "changed after a bulk store was issued and before it read them")
{
    for (uint32_t i = 0; i < 64; i++) { /* a single store may read its source at once */
        uint32_t to = smem_address(dynamic_shared()) + i % 2 * 512;
        store_shared_v4(to, i, 2, 3, 4);
        fence_async_shared();
        bulk_store(a.memory, dynamic_shared() + i % 2 * 512, 512);
        bulk_commit();
    }
    bulk_wait_done<0>();
}

WRONG(leaving_before_a_store_has_read_is_found, 1, 1, "have still to read its shared memory")
{
    for (uint32_t i = 0; i < 64; i++)
        bulk_store(a.memory, dynamic_shared(), 1024);
    bulk_commit();
}

WRONG(leaving_before_a_load_has_landed_is_found, 1, 1, "copies to its shared memory are in flight")
{
    mbarrier_init(barrier_at(0), 1);
    mbarrier_expect(barrier_at(0), 64 * 1024);
    for (uint32_t i = 0; i < 64; i++)
        bulk_load(dynamic_shared(), a.memory, 1024, barrier_at(0));
}

WRONG(a_copy_through_something_else_than_a_tensor_map_is_found, 1, 1, "is not a tensor map")
{
    mbarrier_init(barrier_at(0), 1);
    tma_load_2d(dynamic_shared(), (const CUtensorMap *)a.memory, barrier_at(0), 0, 0);
}

WRONG(a_load_of_what_another_copy_wrote_without_a_fence_is_found, 64, 1,
      "since this warp's last fence.proxy.async.global")
{
    uint32_t *flag = (uint32_t *)(a.memory + 1024);
    if (threadIdx.x == 0)
        mbarrier_init(barrier_at(0), 1);
    *flag = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(a.memory, dynamic_shared(), 512);
        bulk_commit();
        bulk_wait_done<0>();
        store_release_sys(flag, 1);
    } else if (threadIdx.x == 32) {
        while (load_acquire_sys(flag) != 1)
            __nanosleep(40);
        mbarrier_expect(barrier_at(0), 512);
        bulk_load(dynamic_shared() + 1024, a.memory, 512, barrier_at(0));
        mbarrier_wait(barrier_at(0), 0);
    }
}

/* ---- barriers ---- */
WRONG(a_barrier_that_was_not_initialised_is_found, 1, 1, "no barrier was initialised")
{
    mbarrier_arrive(barrier_at(3));
}

WRONG(a_barrier_that_was_overwritten_is_found, 1, 1, "was overwritten")
{
    mbarrier_init(barrier_at(0), 1);
    store_shared_v4(smem_address(barrier_at(0)), 0, 0, 0, 0);
    mbarrier_arrive(barrier_at(0));
}

WRONG(one_arrival_too_many_is_found, 1, 1, "one arrival too many")
{
    mbarrier_init(barrier_at(0), 1);
    mbarrier_expect(barrier_at(0), 16); /* these bytes never come */
    mbarrier_arrive(barrier_at(0));
}

WRONG(more_bytes_than_expected_are_found, 1, 1, "more bytes have come than were expected")
{
    mbarrier_init(barrier_at(0), 1);
    mbarrier_expect(barrier_at(0), 16);
    bulk_load(dynamic_shared(), a.memory, 32, barrier_at(0));
    mbarrier_wait(barrier_at(0), 0);
}

WRONG(a_barrier_that_went_round_twice_is_found, 64, 1, "completed more than one phase while this thread waited")
{
    if (threadIdx.x == 0)
        mbarrier_init(barrier_at(0), 1);
    __syncthreads();
    for (uint32_t i = 0; i < 1000; i++)
        if (threadIdx.x == 0)
            mbarrier_arrive(barrier_at(0));
        else if (threadIdx.x == 32)
            mbarrier_wait(barrier_at(0), i & 1);
}

WRONG(an_arrival_at_a_cta_that_has_left_is_found, 1, 2, "has left")
{
    mbarrier_init(barrier_at(0), 1000);
    cluster_arrive();
    cluster_wait();
    if (blockIdx.x == 0)
        for (uint32_t i = 0; i < 1000; i++)
            mbarrier_arrive_at(barrier_at(0), 1);
}

WRONG(a_deadlock_names_who_waits_for_what, 64, 1, "CTA 0 warp 1: barrier at shared offset 61448, parity 0")
{
    if (threadIdx.x == 0) {
        mbarrier_init(barrier_at(0), 1);
        mbarrier_init(barrier_at(1), 2);
        mbarrier_arrive(barrier_at(1));
    }
    __syncthreads();
    mbarrier_wait(barrier_at(threadIdx.x / 32), 0);
}

WRONG(a_cluster_barrier_reached_twice_is_found, 32, 2, "twice without waiting")
{
    cluster_arrive();
    if (blockIdx.x == 0)
        cluster_arrive();
    cluster_wait();
}

WRONG(a_named_barrier_for_two_numbers_of_threads_is_found, 96, 1, "where 32 wait for 64")
{
    if (threadIdx.x < 32)
        barrier_sync(1, 64);
    if (threadIdx.x >= 64)
        for (uint32_t i = 0; i < 100; i++)
            __nanosleep(100);
    if (threadIdx.x >= 64)
        barrier_sync(1, 96);
    if (threadIdx.x >= 32 && threadIdx.x < 64)
        __syncthreads();
}

/* ---- warps ---- */
WRONG(a_collective_without_some_lanes_is_found, 32, 1, "__syncwarp")
{
    if (threadIdx.x < 16)
        __syncwarp();
}

WRONG(lanes_at_different_collectives_are_found, 32, 1, "must be at the same one")
{
    if (threadIdx.x < 16)
        __syncwarp();
    else
        (void)__ballot_sync(~0u, 1);
}

WRONG(taking_more_registers_than_there_are_is_found, 384, 1, "would wait for ever")
{
    registers_take<224>(); /* there are 168 for each thread */
}

/* ---- tensor cores ---- */
PRS_DEVICE void multiply(float (&d)[128], uint32_t times)
{
    uint64_t at = matrix_descriptor(smem_address(dynamic_shared()), 16);
    for (uint32_t i = 0; i < times; i++)
        wgmma_m64n256k16_bf16<0>(d, at, at, i != 0);
    wgmma_commit();
}

WRONG(a_product_of_unfenced_stores_is_found, 128, 1, "wgmma reads shared offset")
{
    float d[128];
    store_shared_v4(smem_address(dynamic_shared()) + threadIdx.x * 16, 1, 2, 3, 4);
    __syncthreads();
    wgmma_fence();
    multiply(d, 1);
    wgmma_wait<0>();
}

WRONG(a_product_without_wgmma_fence_is_found, 128, 1, "without wgmma.fence")
{
    float d[128];
    multiply(d, 1);
    wgmma_wait<0>();
}

WRONG(operands_overwritten_under_a_product_are_found, 128, 1, "shared memory changed after a wgmma")
{
    float d[128];
    for (uint32_t i = 0; i < 64; i++) {
        wgmma_fence();
        multiply(d, 1);
        store_shared_v4(smem_address(dynamic_shared()) + threadIdx.x * 16, i, 2, 3, 4);
        fence_async_shared();
        __syncthreads();
    }
    wgmma_wait<0>();
}

WRONG(leaving_under_a_product_is_found, 128, 1, "leaves while its wgmma are in flight")
{
    float d[128];
    wgmma_fence();
    multiply(d, 32);
}

WRONG(a_product_that_a_warp_does_not_join_is_a_deadlock, 128, 1, "wgmma groups")
{
    float d[128];
    wgmma_fence();
    if (threadIdx.x < 96)
        multiply(d, 1);
    else
        barrier_sync(1, 128);
    wgmma_wait<0>();
}

/* ---- nothing is reported where nothing is wrong ---- */
static __global__ void kernel_right(const struct args a)
{
    float d[128];
    uint32_t mine = smem_address(dynamic_shared()) + threadIdx.x * 16;
    store_shared_v4(mine, threadIdx.x, 2, 3, 4);
    for (uint32_t i = 128; i < 8192 / 16; i += 128)
        store_shared_v4(mine + i * 16, 0, 0, 0, 0);
    fence_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(a.memory, dynamic_shared(), 2048);
        bulk_commit();
        bulk_wait_read<0>();
    }
    wgmma_fence();
    uint64_t at = matrix_descriptor(smem_address(dynamic_shared()), 16);
    wgmma_shared<0, hopper::WGMMA_BF16>(d, at, at, 0);
    wgmma_commit();
    wgmma_wait<0>();
    if (threadIdx.x == 0)
        bulk_wait_done<0>();
}

Test(checks, what_is_right_is_not_complained_of, .timeout = 900)
{
    std::string found = verdict(kernel_right, 128, 1);
    cr_assert(found.empty(), "%s", found.c_str());
}

/* ---- memory of cuMemCreate() ---- */
template <typename... T> static void driver(const char *name, T... arguments)
{
    void *fn = NULL;
    cr_assert_eq(cudaGetDriverEntryPointByVersion(name, &fn, 12000, cudaEnableDefault, NULL), cudaSuccess);
    cr_assert_not_null(fn);
    cr_assert_eq(((CUresult(*)(T...))fn)(arguments...), CUDA_SUCCESS, "%s", name);
}

struct virtual_memory {
    CUdeviceptr at;
    size_t bytes;
    CUmemGenericAllocationHandle handle;
};

/* Of device 0, mapped, and accessible to nobody. */
static struct virtual_memory make_virtual(void)
{
    CUmemAllocationProp prop = {};
    struct virtual_memory v = {0, 2 << 20, 0};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    hopper_setup(2, 4, 0);
    hopper_tolerate();
    cr_assert_eq(cudaSetDevice(0), cudaSuccess);
    driver("cuMemCreate", &v.handle, v.bytes, (const CUmemAllocationProp *)&prop, 0ull);
    driver("cuMemAddressReserve", &v.at, v.bytes, (size_t)0, (CUdeviceptr)0, 0ull);
    driver("cuMemMap", v.at, v.bytes, (size_t)0, v.handle, 0ull);
    return v;
}

static void allow(const struct virtual_memory &v, int device)
{
    CUmemAccessDesc access = {};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    driver("cuMemSetAccess", v.at, v.bytes, (const CUmemAccessDesc *)&access, (size_t)1);
}

static std::string store_to(const struct virtual_memory &v)
{
    return verdict_of(kernel_a_copy_without_peer_access_is_found, 1, 1,
                      {NULL, reinterpret_cast<uint8_t *>((uintptr_t)v.at)});
}

Test(checks, virtual_memory_needs_access_for_the_device_itself, .timeout = 200)
{
    struct virtual_memory v = make_virtual();
    allow(v, 1);
    cr_assert_neq(store_to(v).find("was not given access"), std::string::npos);
}

Test(checks, virtual_memory_is_gone_when_it_is_unmapped_and_released, .timeout = 200)
{
    struct virtual_memory v = make_virtual();
    allow(v, 0);
    cr_assert_eq(store_to(v), "");
    driver("cuMemUnmap", v.at, v.bytes);
    cr_assert_eq(hopper_virtual_bytes(0), v.bytes, "it has a handle");
    driver("cuMemRelease", v.handle);
    cr_assert_eq(hopper_virtual_bytes(0), 0);
    cr_assert_neq(store_to(v).find("lie in no allocation"), std::string::npos);
    driver("cuMemAddressFree", v.at, v.bytes);
}
