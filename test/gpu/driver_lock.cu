/* SPDX-License-Identifier: Apache-2.0 */
/* Which calls of CUDA wait for a kernel that runs, and which of them keep other threads' copies waiting meanwhile, as
 * the copies of the software NIC are (doc/softnic.md, "What a copy may wait for"). Prints a table: whether the call
 * returned while the kernel ran; whether another thread could enqueue a copy meanwhile; whether this copy was done.
 * Each row is a process of its own. Under softnic-run the calls wait without the driver's lock.
 *
 *   driver_lock [DEVICE [ROWS]]    ROWS: a part of the names of the calls wanted
 *
 * Status 1: under softnic-run, a call kept the other thread waiting. */
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <csignal>
#include <cstring>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <cuda_runtime.h>

enum { LIMIT_S = 20, LOOK_MS = 250, SMALL = 4096, STAGED = 64 << 10, LARGE = 4 << 20, HUGE_BYTES = 64 << 20 };
static const uint64_t KERNEL_LIMIT_NS = 5000000000u; /* it ends by itself if this process fails */

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t e_ = (call);                                                                                       \
        if (e_ != cudaSuccess) {                                                                                       \
            fprintf(stderr, "driver_lock: %s: %s\n", #call, cudaGetErrorString(e_));                                   \
            _exit(e_ == cudaErrorNoDevice || e_ == cudaErrorInsufficientDriver ? 77 : 3);                              \
        }                                                                                                              \
    } while (0)

static __global__ void spin(volatile uint32_t *go, uint64_t limit_ns)
{
    uint64_t from, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*go == 0 && now - from < limit_ns);
}

static __global__ void other(uint32_t *p)
{
    atomicAdd(p, 1);
}

/* Needs more local memory than any kernel before it. */
static __global__ void deep(uint32_t *p)
{
    volatile uint32_t local[8192];
    for (uint32_t i = 0; i < 8192; i++)
        local[i] = *p + i;
    atomicAdd(p, local[*p % 8192]);
}

static const char *const PTX = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n";

struct bench {
    cudaStream_t kernel, blocking, waits, free_stream, copies;
    cudaEvent_t ran, done, spare;
    uint8_t *device, *target, *pinned, *pageable, *freed, *pinned_freed, *registered;
    uint32_t *go;
};

enum where { APART, DEFAULT_WAITS, STREAM_WAITS, BLOCKING }; /* the kernel's stream, and which stream waits for it */
static const char *const WHERE[] = {"nothing", "default stream", "a stream", "default stream (implicitly)"};

struct row {
    const char *name;
    enum where where;
    void (*call)(bench *b);
};

static void pageable_to_device(bench *b, size_t n, bool async, cudaStream_t s)
{
    if (async)
        CHECK(cudaMemcpyAsync(b->device, b->pageable, n, cudaMemcpyHostToDevice, s));
    else
        CHECK(cudaMemcpy(b->device, b->pageable, n, cudaMemcpyHostToDevice));
}

static void device_to_pageable(bench *b, size_t n, bool async, cudaStream_t s)
{
    if (async)
        CHECK(cudaMemcpyAsync(b->pageable, b->device, n, cudaMemcpyDeviceToHost, s));
    else
        CHECK(cudaMemcpy(b->pageable, b->device, n, cudaMemcpyDeviceToHost));
}

static void load_module()
{
    int (*load)(void **module, const void *image);
    void *module;
    cudaDriverEntryPointQueryResult found;

    CHECK(cudaGetDriverEntryPointByVersion("cuModuleLoadData", (void **)&load, 12000, cudaEnableDefault, &found));
    if (load(&module, PTX))
        _exit(3);
}

static const row ROWS[] = {
    {"cudaMemcpy, 4 KB of pageable memory to the GPU", DEFAULT_WAITS,
     [](bench *b) { pageable_to_device(b, SMALL, false, 0); }},
    {"cudaMemcpy, 4 MB of pageable memory to the GPU", DEFAULT_WAITS,
     [](bench *b) { pageable_to_device(b, LARGE, false, 0); }},
    {"cudaMemcpy, GPU to 4 KB of pageable memory", DEFAULT_WAITS,
     [](bench *b) { device_to_pageable(b, SMALL, false, 0); }},
    {"cudaMemcpy, GPU to pageable memory", BLOCKING, [](bench *b) { device_to_pageable(b, SMALL, false, 0); }},
    {"cudaMemcpyAsync, default stream, 4 KB of pageable memory to the GPU", DEFAULT_WAITS,
     [](bench *b) { pageable_to_device(b, SMALL, true, 0); }},
    {"cudaMemcpyAsync, default stream, 64 KB of pageable memory to the GPU", DEFAULT_WAITS,
     [](bench *b) { pageable_to_device(b, STAGED, true, 0); }},
    {"cudaMemcpyAsync, default stream, 4 MB of pageable memory to the GPU", DEFAULT_WAITS,
     [](bench *b) { pageable_to_device(b, LARGE, true, 0); }},
    {"cudaMemcpyAsync, default stream, GPU to 4 KB of pageable memory", DEFAULT_WAITS,
     [](bench *b) { device_to_pageable(b, SMALL, true, 0); }},
    {"cudaMemcpyAsync, a stream, 4 KB of pageable memory to the GPU", STREAM_WAITS,
     [](bench *b) { pageable_to_device(b, SMALL, true, b->waits); }},
    {"cudaMemcpyAsync, a stream, 4 MB of pageable memory to the GPU", STREAM_WAITS,
     [](bench *b) { pageable_to_device(b, LARGE, true, b->waits); }},
    {"cudaMemcpyAsync, a stream, GPU to 4 KB of pageable memory", STREAM_WAITS,
     [](bench *b) { device_to_pageable(b, SMALL, true, b->waits); }},
    {"cudaMemcpyAsync, an idle stream, GPU to 4 KB of pageable memory", APART,
     [](bench *b) { device_to_pageable(b, SMALL, true, b->free_stream); }},
    {"cudaMemcpy, GPU to pinned memory", DEFAULT_WAITS,
     [](bench *b) { CHECK(cudaMemcpy(b->pinned, b->device, SMALL, cudaMemcpyDeviceToHost)); }},
    {"cudaMemcpy, pinned memory to the GPU", DEFAULT_WAITS,
     [](bench *b) { CHECK(cudaMemcpy(b->device, b->pinned, SMALL, cudaMemcpyHostToDevice)); }},
    {"cudaMemcpyAsync, default stream, pinned memory to the GPU", DEFAULT_WAITS,
     [](bench *b) { CHECK(cudaMemcpyAsync(b->device, b->pinned, SMALL, cudaMemcpyHostToDevice, 0)); }},
    {"cudaStreamSynchronize(0)", DEFAULT_WAITS, [](bench *) { CHECK(cudaStreamSynchronize(0)); }},
    {"cudaStreamSynchronize(0)", BLOCKING, [](bench *) { CHECK(cudaStreamSynchronize(0)); }},
    {"cudaStreamQuery(0) until done", BLOCKING,
     [](bench *) {
         while (cudaStreamQuery(0) == cudaErrorNotReady)
             usleep(100);
     }},
    {"cudaDeviceSynchronize", APART, [](bench *) { CHECK(cudaDeviceSynchronize()); }},
    {"cudaMalloc, 4 KB", APART, [](bench *b) { CHECK(cudaMalloc(&b->freed, SMALL)); }},
    {"cudaMalloc, 64 MB", APART, [](bench *b) { CHECK(cudaMalloc(&b->freed, HUGE_BYTES)); }},
    {"cudaFree, 4 MB", APART, [](bench *b) { CHECK(cudaFree(b->freed)); }},
    {"cudaHostAlloc, 4 KB", APART,
     [](bench *b) { CHECK(cudaHostAlloc(&b->pinned_freed, SMALL, cudaHostAllocDefault)); }},
    {"cudaHostAlloc, 64 MB", APART,
     [](bench *b) { CHECK(cudaHostAlloc(&b->pinned_freed, HUGE_BYTES, cudaHostAllocDefault)); }},
    {"cudaFreeHost", APART, [](bench *b) { CHECK(cudaFreeHost(b->pinned_freed)); }},
    {"cudaHostRegister, 4 MB", APART, [](bench *b) { CHECK(cudaHostRegister(b->pageable, LARGE, 0)); }},
    {"cudaHostUnregister", APART, [](bench *b) { CHECK(cudaHostUnregister(b->registered)); }},
    {"cudaStreamCreate", APART, [](bench *b) { CHECK(cudaStreamCreate(&b->waits)); }},
    {"cudaStreamDestroy", APART, [](bench *b) { CHECK(cudaStreamDestroy(b->waits)); }},
    {"cudaEventCreate", APART, [](bench *b) { CHECK(cudaEventCreate(&b->spare)); }},
    {"a kernel's first launch, on an idle stream", APART,
     [](bench *b) {
         other<<<1, 1, 0, b->free_stream>>>((uint32_t *)b->device);
         CHECK(cudaGetLastError());
     }},
    {"the first launch of a kernel with local memory, on an idle stream", APART,
     [](bench *b) {
         deep<<<1, 1, 0, b->free_stream>>>((uint32_t *)b->device);
         CHECK(cudaGetLastError());
     }},
    {"cuModuleLoadData", APART, [](bench *) { load_module(); }},
    {"cudaMallocAsync, 4 MB", APART, [](bench *b) { CHECK(cudaMallocAsync(&b->freed, LARGE, b->free_stream)); }},
    {"cudaMemset", DEFAULT_WAITS, [](bench *b) { CHECK(cudaMemset(b->device, 0, SMALL)); }},
};
enum { NUM_ROWS = sizeof(ROWS) / sizeof(ROWS[0]) };

static void prepare(bench *b, int device)
{
    CHECK(cudaSetDevice(device));
    CHECK(cudaStreamCreateWithFlags(&b->kernel, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&b->waits, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&b->free_stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&b->copies, cudaStreamNonBlocking));
    CHECK(cudaStreamCreate(&b->blocking));
    CHECK(cudaEventCreateWithFlags(&b->ran, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&b->done, cudaEventDisableTiming));
    CHECK(cudaMalloc(&b->device, LARGE));
    CHECK(cudaMalloc(&b->target, LARGE));
    CHECK(cudaMalloc(&b->freed, LARGE));
    CHECK(cudaHostAlloc(&b->pinned, LARGE, cudaHostAllocPortable));
    CHECK(cudaHostAlloc(&b->pinned_freed, LARGE, cudaHostAllocPortable));
    CHECK(cudaHostAlloc(&b->go, sizeof(*b->go), cudaHostAllocPortable));
    b->pageable = (uint8_t *)aligned_alloc(SMALL, LARGE);
    b->registered = (uint8_t *)aligned_alloc(SMALL, LARGE);
    memset(b->pageable, 1, LARGE);
    CHECK(cudaHostRegister(b->registered, LARGE, 0));
    CHECK(cudaMemcpy(b->device, b->pageable, LARGE, cudaMemcpyHostToDevice)); /* a first copy initialises the driver */
    CHECK(cudaMemcpy(b->pageable, b->device, LARGE, cudaMemcpyDeviceToHost));
    *b->go = 1;
    spin<<<1, 1, 0, b->kernel>>>(b->go, 0);
    CHECK(cudaDeviceSynchronize());
    *b->go = 0;
}

static void run(const row *row, int device)
{
    bench b = {};
    std::atomic<int> returned{0}, given{0};

    prepare(&b, device);
    cudaStream_t kernel = row->where == BLOCKING ? b.blocking : b.kernel;
    spin<<<1, 1, 0, kernel>>>(b.go, KERNEL_LIMIT_NS);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(b.ran, kernel));
    if (row->where == DEFAULT_WAITS)
        CHECK(cudaStreamWaitEvent(0, b.ran, 0));
    if (row->where == STREAM_WAITS)
        CHECK(cudaStreamWaitEvent(b.waits, b.ran, 0));
    std::thread caller([&] {
        CHECK(cudaSetDevice(device));
        row->call(&b);
        returned = 1;
    });
    usleep(LOOK_MS * 1000);
    std::thread nic([&] {
        CHECK(cudaSetDevice(device));
        CHECK(cudaMemcpyAsync(b.target, b.pinned, SMALL, cudaMemcpyHostToDevice, b.copies));
        CHECK(cudaEventRecord(b.done, b.copies));
        given = 1;
        while (cudaEventQuery(b.done) == cudaErrorNotReady)
            usleep(100);
        given = 2;
    });
    usleep(LOOK_MS * 1000);
    int call = returned, copy = given;
    __atomic_store_n(b.go, 1, __ATOMIC_RELEASE);
    printf("%-68s %-28s %-8s %-8s %s\n", row->name, WHERE[row->where], call ? "yes" : "no", copy ? "yes" : "NO",
           copy == 2 ? "yes" : "NO");
    fflush(stdout);
    caller.join();
    nic.join();
    _exit(copy != 2);
}

int main(int argc, char **argv)
{
    int device = argc > 1 ? atoi(argv[1]) : 0, kept = 0;
    const char *audit = getenv("LD_AUDIT");
    bool watched = audit && strstr(audit, "softnic");

    printf("driver_lock: %s\n%-68s %-28s %-8s %-8s %s\n", watched ? "with softnic's calls" : "plain", "call",
           "waits for the kernel", "returned", "copy given", "done");
    fflush(stdout);
    for (int i = 0; i < NUM_ROWS; i++) {
        if (argc > 2 && !strstr(ROWS[i].name, argv[2]))
            continue;
        pid_t child = fork();
        int status = 0, slept_ms = 0;
        if (!child)
            run(&ROWS[i], device);
        while (waitpid(child, &status, WNOHANG) == 0 && slept_ms < LIMIT_S * 1000) {
            usleep(10000);
            slept_ms += 10;
        }
        if (slept_ms >= LIMIT_S * 1000) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            printf("%-68s did not end\n", ROWS[i].name);
            kept = 1;
        } else if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
            printf("skipped: no GPU\n");
            return 77;
        } else if (!WIFEXITED(status) || WEXITSTATUS(status) > 1) {
            printf("%-68s failed, status %#x\n", ROWS[i].name, status);
        } else {
            kept |= watched && WEXITSTATUS(status);
        }
    }
    return kept;
}
