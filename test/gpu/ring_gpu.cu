/* SPDX-License-Identifier: Apache-2.0 */
/* The command ring between a real GPU and a CPU thread: no command is lost or repeated; how fast it is; how long a
 * command and its credit take. usage: ring_gpu [COMMANDS] (100000000) */
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

#include <perseus/device.cuh>

extern "C" {
#include "transport/gpu/ring.h"
}

enum { PRODUCERS = 96, SLOTS = 4096, PINGS = 20000, STUCK_S = 20 };

static void check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "ring_gpu: %s: %s\n", what, cudaGetErrorString(error));
    exit(error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ? 77 : 1);
}

/* One thread of each block, as in a kernel. A command holds its sender, its number and the slot that it must be in. */
static __global__ void produce(struct prs_device device, uint64_t each)
{
    for (uint64_t i = 0; i < each; i++) {
        struct prs_cmd_fields fields = {0, i, 0, PRS_CMD_PUT, 0, blockIdx.x, 0, 0, 0, device.epoch, 0};
        uint64_t at = 0;

        if (prs_ring_claim(&device, 1, &at) != 0)
            return;
        fields.src_offset = at;
        prs_ring_write(&device, at, &fields);
    }
}

/* One command at a time: clocks until its credit is seen. */
static __global__ void ping(struct prs_device device, uint64_t first, double *ns, double ns_per_clock)
{
    for (uint64_t i = 0; i < PINGS; i++) {
        struct prs_cmd_fields fields = {first + i, i, 0, PRS_CMD_PUT, 0, 0, 0, 0, 0, device.epoch, 0};
        uint64_t at = 0;
        long long start = clock64();

        if (prs_ring_claim(&device, 1, &at) != 0)
            return;
        prs_ring_write(&device, at, &fields);
        for (uint32_t looks = 1; prs_load_acquire_sys(&device.control->credit) <= at; looks++)
            if (looks % 1024 == 0 && prs_load_relaxed(&device.control->abort) != 0)
                return;
        ns[i] = (double)(clock64() - start) * ns_per_clock;
    }
}

/* The time of one load from host memory: there and back. */
static __global__ void look(struct prs_device device, double *ns, double ns_per_clock)
{
    for (uint64_t i = 0; i < PINGS; i++) {
        long long start = clock64();
        uint64_t credit = prs_load_acquire_sys(&device.control->credit);

        ns[i] = (double)(clock64() - start + (long long)(credit == ~0ull)) * ns_per_clock;
    }
}

/* Take count commands; each must be the next of its producer, and in the slot that it names. Return how many were
 * wrong. */
static uint64_t consume(struct prs_ring *ring, uint64_t count, bool ordered)
{
    std::vector<uint64_t> next(PRODUCERS, 0);
    uint64_t wrong = 0, last_ns = prs_now_ns();

    for (uint64_t taken = 0; taken < count;) {
        struct prs_cmd_fields fields;

        if (!prs_ring_take(ring, &fields)) {
            prs_ring_return(ring);
            if (prs_now_ns() - last_ns > STUCK_S * 1000000000ull) {
                fprintf(stderr, "ring_gpu: stuck at command %" PRIu64 "\n", taken);
                prs_ring_abort(ring, -110);
                return count - taken;
            }
            continue;
        }
        if (ordered)
            wrong += fields.src_offset != ring->taken - 1 || fields.peer >= PRODUCERS ||
                     fields.dst_offset != next[fields.peer]++;
        if (++taken % 64 == 0 || !ordered)
            prs_ring_return(ring);
        if (taken % 65536 == 0)
            last_ns = prs_now_ns();
    }
    prs_ring_return(ring);
    return wrong;
}

/* Print what a kernel measured; return the median. */
static double report(const char *test, const char *note, const double *device_ns)
{
    std::vector<double> ns(PINGS);

    check(cudaDeviceSynchronize(), test);
    check(cudaMemcpy(ns.data(), device_ns, PINGS * sizeof(double), cudaMemcpyDeviceToHost), "cudaMemcpy");
    std::sort(ns.begin(), ns.end());
    printf("{\"test\":\"%s\",\"p50_ns\":%.0f,\"p99_ns\":%.0f,\"note\":\"%s\"}\n", test, ns[PINGS / 2],
           ns[PINGS * 99 / 100], note);
    return ns[PINGS / 2];
}

int main(int argc, char **argv)
{
    uint64_t commands = argc > 1 ? strtoull(argv[1], NULL, 0) : 100000000, each = commands / PRODUCERS, wrong;
    struct prs_device device = {};
    struct prs_ring ring;
    double *device_ns;
    int khz = 0;

    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0), "clock rate");
    if (prs_ring_init(&ring, SLOTS) < 0)
        return 1;
    check(cudaHostRegister(ring.control, ring.map_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable), "mapping");
    check(cudaMalloc(&device.local, sizeof(*device.local)), "cudaMalloc");
    check(cudaMemset(device.local, 0, sizeof(*device.local)), "cudaMemset");
    check(cudaMalloc(&device_ns, PINGS * sizeof(double)), "cudaMalloc");
    device.slots = ring.slots;
    device.control = ring.control;
    device.slot_count = SLOTS;
    device.timeout_ns = 10000000000ull;
    device.epoch = 1;

    produce<<<PRODUCERS, 1>>>(device, each);
    check(cudaGetLastError(), "starting the producers");
    uint64_t start = prs_now_ns();
    wrong = consume(&ring, each * PRODUCERS, true);
    double seconds = (double)(prs_now_ns() - start) / 1e9;
    check(cudaDeviceSynchronize(), "the producers");
    printf("{\"test\":\"ring_gpu\",\"commands\":%" PRIu64 ",\"wrong\":%" PRIu64 ",\"commands_per_s\":%.0f}\n",
           each * PRODUCERS, wrong, (double)(each * PRODUCERS) / seconds);

    ping<<<1, 1>>>(device, each * PRODUCERS, device_ns, 1e6 / khz);
    wrong += consume(&ring, PINGS, false);
    double there_and_back = report("ring_round_trip", "command to the CPU and credit back", device_ns);
    look<<<1, 1>>>(device, device_ns, 1e6 / khz);
    double one_look = report("host_read", "one look at host memory", device_ns);
    /* The load that sees the credit reaches host memory after the credit was written. It ends half a load later, and on
     * average it began half a load late: together one load. */
    printf("{\"test\":\"ring_one_way\",\"p50_ns\":%.0f,\"note\":\"round trip less one look\"}\n",
           there_and_back - one_look);
    return wrong ? 1 : 0;
}
