/* SPDX-License-Identifier: Apache-2.0 */
/* A kernel that writes to another rank's memory and signals it, and a kernel there that waits for the signal and reads.
 * The ranks count as two nodes, so that every put goes through a NIC.
 *
 *     nvcc -arch=sm_90a put_signal.cu $(pkg-config --cflags --libs perseus) -o put_signal
 *     softnic-run ./put_signal            # without an RDMA NIC; on a machine with one, leave softnic-run away
 *
 * An argument puts the symmetric memory into the host's memory, for the emulated GPUs of tools/hopper. */
#include <cuda_runtime.h>
#include <perseus/bootstrap.h>
#include <perseus/device.cuh>
#include <perseus/heap.h>
#include <perseus/proxy.h>

#include "ranks.h"

enum { WORDS = 512, THREADS = 64, GROUP = 1 };

struct kernel_args {
    struct prs_device device; /* plain data, passed by value */
    uint64_t *data;           /* of this rank: its own words, then those that the other rank writes */
    const uint64_t *signal;
    int *result;
};

/* One block: fill the source, put it, signal; then wait for the other rank's signal, and check its words. */
static __global__ void exchange(const struct kernel_args args)
{
    uint32_t peer = 1 - args.device.rank;
    struct prs_device_put put = {};
    struct prs_device_signal signal = {};
    int result;

    for (uint32_t i = threadIdx.x; i < WORDS; i += THREADS)
        args.data[i] = args.device.rank * 1000 + i;
    __syncthreads(); /* the source is complete before the put */

    put.dst_offset = WORDS * 8; /* window 0: data, the same layout on all ranks */
    put.bytes = WORDS * 8;
    put.peer = peer;
    put.group = GROUP;
    signal.value = 1;
    signal.peer = peer;
    signal.window = 1;    /* signal words */
    signal.group = GROUP; /* the peer sees it after the puts of this group */
    result = prs_put_signal_block(&args.device, &put, &signal);
    if (!result)
        result = prs_wait_signal_block(&args.device, args.signal, PRS_COMPARE_GE, 1);
    for (uint32_t i = threadIdx.x; i < WORDS && !result; i += THREADS)
        if (args.data[WORDS + i] != peer * 1000 + i)
            result = 1;
    if (result)
        *args.result = result;
    if (threadIdx.x == 0 && !result)
        *args.result = prs_quiet(&args.device); /* own puts are complete: their sources may be written again */
}

static bool on_host;

static void body(struct rank *rank)
{
    struct prs_bootstrap bootstrap = {allgather, rank, rank->index, RANKS};
    struct prs_team_options team_options = {};
    struct prs_heap_options heap_options = {};
    struct prs_proxy_options proxy_options = {};
    struct prs_rail_set rails = {1, {0}};
    struct kernel_args args = {};
    cudaLaunchConfig_t config = {};
    struct prs_fabric *fabric;
    struct prs_proxy *proxy;
    struct prs_team *team;
    struct prs_heap *heap;

    CHECK(prs_fabric_open(NULL, &fabric), prs_error_text());
    if (prs_fabric_rails(fabric) == 0) {
        fprintf(stderr, "no RDMA device: run it under softnic-run, and perseus-info says what is wrong\n");
        exit(77);
    }
    team_options.fabric = fabric;
    team_options.rails = &rails;
    team_options.traffic_class = -1;
    CHECK(prs_bootstrap_team(&bootstrap, &team_options, &team), prs_error_text()); /* collective */

    heap_options.fabric = fabric;
    heap_options.rails = &rails;
    heap_options.data_bytes = 2 * WORDS * 8;
    heap_options.signal_bytes = 4096;
    heap_options.cuda = !on_host;
    heap_options.node = rank->index + 1;
    CHECK(prs_heap_open(&bootstrap, &heap_options, &heap), prs_error_text()); /* collective */

    proxy_options.team = team;
    proxy_options.cuda = !on_host;
    proxy_options.numa_node = -1;
    CHECK(prs_proxy_open(&proxy_options, &proxy), prs_error_text());
    CHECK(prs_heap_windows(heap, proxy), prs_error_text());
    CHECK(prs_team_connect(team, 0), prs_error_text()); /* collective */
    CHECK(prs_proxy_start(proxy, &args.device), prs_error_text());

    args.data = (uint64_t *)prs_heap_base(heap, PRS_HEAP_DATA);
    args.signal = (const uint64_t *)prs_heap_base(heap, PRS_HEAP_SIGNALS);
    CHECK_CUDA(cudaMalloc((void **)&args.result, sizeof(int)));
    CHECK_CUDA(cudaMemset(args.result, 0, sizeof(int)));
    config.gridDim = dim3(1);
    config.blockDim = dim3(THREADS);
    CHECK_CUDA(cudaLaunchKernelEx(&config, exchange, args));
    CHECK_CUDA(cudaDeviceSynchronize());
    int *result = (int *)download(args.result, sizeof(int));
    CHECK(*result, prs_proxy_error(proxy));
    printf("put + signal: rank %u has %d words of rank %u, right\n", rank->index, WORDS, 1 - rank->index);

    /* Before memory goes: all that this rank sent has taken effect, and the other rank says the same. */
    free(result);
    CHECK(prs_proxy_settle(proxy, 10000), prs_proxy_error(proxy));
    CHECK(prs_bootstrap_agree(&bootstrap, 0, "settle"), prs_error_text());
    prs_proxy_close(proxy);
    prs_heap_close(heap);
    prs_team_close(team);
    prs_fabric_close(fabric);
}

int main(int argc, char **argv)
{
    (void)argv;
    on_host = argc > 1;
    run_ranks(body);
    return 0;
}
