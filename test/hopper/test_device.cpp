/* SPDX-License-Identifier: Apache-2.0 */
/* The warp-wide and block-wide calls of perseus/device.cuh, to a mapped peer, for which no proxy is needed. */
#include <criterion/criterion.h>
#include <cuda_runtime.h>

#include "fused/core/launch.cuh"
#include "tools/hopper/hopper.h"
#include <perseus/device.cuh>

enum { THREADS = 64, BYTES = 1000, CALLS = 4 };

/* One allocation with everything that the kernel reads and writes. */
struct memory {
    struct prs_ring_local local;
    struct prs_ring_control control;
    uint64_t map[2]; /* one window of two ranks */
    uint64_t bytes[1];
    uint8_t data[2][1024];
    int result[CALLS][THREADS];
};

struct args {
    struct prs_device device;
    struct memory *memory;
};

static __global__ void put_by_teams(const struct args a)
{
    struct prs_device_put put = {0, 0, BYTES, 1, 0, 0, 1};
    struct prs_device_signal signal = {1016, 7, 1, 0, 1, 0, 0};

    a.memory->result[0][threadIdx.x] = prs_put_block(&a.device, &put);
    a.memory->result[1][threadIdx.x] = prs_put_signal_block(&a.device, &put, &signal);
    if (threadIdx.x < 32) {
        a.memory->result[2][threadIdx.x] = prs_put_warp(&a.device, &put);
        a.memory->result[3][threadIdx.x] = prs_put_signal_warp(&a.device, &put, &signal);
    }
}

/* Runs one launch, on a device whose first error was `failed`. */
static struct memory *run(uint64_t failed)
{
    struct launch_shape shape = {1, THREADS, 1024};
    struct args a = {};
    uint32_t clusters;

    hopper_setup(1, 4, 0);
    cr_assert_eq(cudaMalloc((void **)&a.memory, sizeof(*a.memory)), cudaSuccess);
    cr_assert_eq(cudaMemset(a.memory, 0, sizeof(*a.memory)), cudaSuccess);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    for (int i = 0; i < 1000; i++)
        a.memory->data[0][i] = (uint8_t)(i * 7 + 1);
    for (int rank = 0; rank < 2; rank++)
        a.memory->map[rank] = (uint64_t)(uintptr_t)a.memory->data[rank];
    a.memory->bytes[0] = sizeof(a.memory->data[0]);
    a.memory->local.failed = failed;
    a.device.control = &a.memory->control;
    a.device.local = &a.memory->local;
    a.device.map = a.memory->map;
    a.device.bytes = a.memory->bytes;
    a.device.world = 2;
    a.device.windows = 1;
    cr_assert_eq(launch_prepare(put_by_teams, &shape, &clusters), 0);
    cr_assert_eq(launch_kernel(put_by_teams, &shape, 1, NULL, a), 0);
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    return a.memory;
}

static void assert_all_return(const struct memory *memory, int want)
{
    for (int call = 0; call < CALLS; call++)
        for (int thread = 0; thread < (call < 2 ? THREADS : 32); thread++)
            cr_assert_eq(memory->result[call][thread], want, "call %d, thread %d: %d, want %d", call, thread,
                         memory->result[call][thread], want);
}

Test(device, a_mapped_peer_is_written_by_all_threads, .timeout = 200)
{
    const struct memory *memory = run(0);

    assert_all_return(memory, 0);
    for (int i = 0; i < BYTES; i++)
        cr_assert_eq(memory->data[1][i], memory->data[0][i], "byte %d", i);
    cr_assert_eq(*(const uint64_t *)&memory->data[1][1016], 7);
}

/* prs_put_block() once returned 0 here, where every other call fails at once. */
Test(device, after_the_first_error_each_call_returns_it_to_each_thread, .timeout = 200)
{
    assert_all_return(run(PRS_DEVICE_TIMEOUT), -PRS_DEVICE_TIMEOUT);
}
