/* SPDX-License-Identifier: Apache-2.0 */
/* Whether our copies and stores wait while streams of the application wait for a running kernel: streams share the
 * GPU's hardware queues, whose number is CUDA_DEVICE_MAX_CONNECTIONS (doc/softnic.md, "What a copy may wait for").
 * Prints a table. Status 1: ours wait although no stream does, or softnic-run's 32 queues are not enough for 12
 * streams. */
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda.h>
#include <cuda_runtime.h>

enum { OURS = 8, MOST_WAITING = 40, BYTES = 2048, SLOT_BYTES = 4096, CHILD_LIMIT_S = 60 };
/* An operation that is not done this long after the last one was enqueued waits for the kernel. */
static const double LOOK_US = 20e3;
static const uint64_t KERNEL_LIMIT_NS = 20000000000u; /* it ends by itself if this process fails */

enum operation { TO_HOST, TO_DEVICE, STORE, KERNEL };
static const char *const NAMES[] = {"copy to host", "copy to device", "store", "kernel"};

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t e_ = (call);                                                                                       \
        if (e_ != cudaSuccess) {                                                                                       \
            fprintf(stderr, "hardware_queues: %s: %s\n", #call, cudaGetErrorString(e_));                               \
            exit(e_ == cudaErrorNoDevice || e_ == cudaErrorInsufficientDriver ? 77 : 1);                               \
        }                                                                                                              \
    } while (0)

struct shared { /* pinned; the kernel reads it */
    uint32_t go, gave_up;
};

struct bench {
    cudaStream_t kernel, waiting[MOST_WAITING], ours[OURS];
    cudaEvent_t ran, done[OURS];
    uint8_t *device, *pinned;
    struct shared *shared;
    CUresult (*write_value)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
};

static __global__ void spin(volatile struct shared *s, uint64_t limit_ns)
{
    uint64_t from, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - from > limit_ns) {
            s->gave_up = 1;
            return;
        }
    } while (s->go == 0);
}

static __global__ void touch(uint8_t *p)
{
    *p = 1;
}

/* slot: each operation uses its own memory. */
static void enqueue(const struct bench *b, enum operation what, cudaStream_t stream, uint32_t slot)
{
    uint8_t *device = b->device + (size_t)slot * SLOT_BYTES, *pinned = b->pinned + (size_t)slot * SLOT_BYTES;
    if (what == TO_HOST)
        CHECK(cudaMemcpyAsync(pinned, device, BYTES, cudaMemcpyDeviceToHost, stream));
    else if (what == TO_DEVICE)
        CHECK(cudaMemcpyAsync(device, pinned, BYTES, cudaMemcpyHostToDevice, stream));
    else if (what == KERNEL)
        touch<<<1, 1, 0, stream>>>(device);
    else if (b->write_value((CUstream)stream, (CUdeviceptr)device, 1, 0) != CUDA_SUCCESS) {
        fprintf(stderr, "hardware_queues: cuStreamWriteValue64 failed\n");
        exit(1);
    }
    CHECK(cudaGetLastError());
}

static void open_bench(struct bench *b)
{
    size_t bytes = (size_t)(MOST_WAITING + OURS) * SLOT_BYTES;
    cudaDriverEntryPointQueryResult found;
    void *fn = NULL;
    CHECK(cudaStreamCreateWithFlags(&b->kernel, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&b->ran, cudaEventDisableTiming));
    for (int i = 0; i < MOST_WAITING; i++)
        CHECK(cudaStreamCreateWithFlags(&b->waiting[i], cudaStreamNonBlocking));
    for (int i = 0; i < OURS; i++) {
        CHECK(cudaStreamCreateWithFlags(&b->ours[i], cudaStreamNonBlocking));
        CHECK(cudaEventCreateWithFlags(&b->done[i], cudaEventDisableTiming));
    }
    CHECK(cudaMalloc((void **)&b->device, bytes));
    CHECK(cudaMallocHost((void **)&b->pinned, bytes));
    CHECK(cudaMallocHost((void **)&b->shared, sizeof(*b->shared)));
    memset(b->shared, 0, sizeof(*b->shared));
    CHECK(cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &fn, 12000, cudaEnableDefault, &found));
    if (!fn) {
        fprintf(stderr, "hardware_queues: the driver has no cuStreamWriteValue64\n");
        exit(77);
    }
    b->write_value = (CUresult(*)(CUstream, CUdeviceptr, cuuint64_t, unsigned))fn;
    for (int i = TO_HOST; i <= KERNEL; i++) /* the first call of each takes longer */
        enqueue(b, (enum operation)i, b->ours[0], MOST_WAITING);
    CHECK(cudaDeviceSynchronize());
}

/* How many of our operations were done while the kernel ran; usec: from the first call until the last was done. */
static int count_done(const struct bench *b, std::chrono::steady_clock::time_point from, double *usec)
{
    bool done[OURS] = {};
    int count = 0;
    double now = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - from).count();
    double until = now + LOOK_US;
    *usec = 0;
    while (count < OURS && now < until) {
        now = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - from).count();
        for (int i = 0; i < OURS; i++) {
            if (done[i] || cudaEventQuery(b->done[i]) != cudaSuccess)
                continue;
            done[i] = true;
            count++;
            *usec = now;
        }
    }
    (void)cudaGetLastError(); /* clears cudaErrorNotReady, which is no error */
    return count;
}

static int measure(const struct bench *b, int streams, enum operation theirs, enum operation mine, double *usec)
{
    int count;
    __atomic_store_n(&b->shared->go, 0, __ATOMIC_SEQ_CST);
    spin<<<1, 1, 0, b->kernel>>>(b->shared, KERNEL_LIMIT_NS);
    CHECK(cudaEventRecord(b->ran, b->kernel));
    for (int i = 0; i < streams; i++) {
        CHECK(cudaStreamWaitEvent(b->waiting[i], b->ran, 0));
        enqueue(b, theirs, b->waiting[i], (uint32_t)i);
    }
    auto from = std::chrono::steady_clock::now();
    for (int i = 0; i < OURS; i++) {
        enqueue(b, mine, b->ours[i], (uint32_t)(MOST_WAITING + i));
        CHECK(cudaEventRecord(b->done[i], b->ours[i]));
    }
    count = count_done(b, from, usec);
    __atomic_store_n(&b->shared->go, 1, __ATOMIC_SEQ_CST); /* read by spin() */
    CHECK(cudaDeviceSynchronize());
    if (b->shared->gave_up != 0) {
        fprintf(stderr, "hardware_queues: the kernel waited 20 s for its signal: this process was too slow\n");
        exit(1);
    }
    return count;
}

/* Rows for one number of queues, which CUDA has read before main(). */
static int run(int queues)
{
    static const int STREAMS[] = {0, 1, 12, MOST_WAITING};
    static struct bench b;
    int bad = 0;
    open_bench(&b);
    for (int streams : STREAMS)
        for (int theirs : {TO_HOST, TO_DEVICE, KERNEL}) {
            if (streams == 0 && theirs != TO_HOST)
                continue;
            printf("%6d %7d  %-15s", queues, streams, streams == 0 ? "-" : NAMES[theirs]);
            for (int mine : {TO_HOST, TO_DEVICE, STORE}) {
                double usec;
                int count = measure(&b, streams, (enum operation)theirs, (enum operation)mine, &usec);
                printf("  %d of %d %6.0f us", count, OURS, usec);
                bad += count < OURS && (streams == 0 || (queues == 32 && streams <= 12 && mine != STORE));
            }
            printf("\n");
            fflush(stdout);
        }
    if (bad != 0)
        fprintf(stderr, "hardware_queues: %d kinds of copies stood still that %d queues should let through\n", bad,
                queues);
    return bad != 0;
}

static int run_child(const char *self, const char *queues)
{
    int status;
    pid_t pid = fork(); /* before any CUDA call */
    if (pid == 0) {
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues, 1);
        setenv("CUDA_MODULE_LOADING", "EAGER", 1); /* a first launch must not wait for spin() */
        alarm(CHILD_LIMIT_S);
        execl(self, self, queues, (char *)NULL);
        _exit(127);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return 1;
    if (!WIFEXITED(status))
        fprintf(stderr, "hardware_queues: with %s queues: ended by signal %d\n", queues, WTERMSIG(status));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argc, char **argv)
{
    int worst = 0;
    if (argc == 2)
        return run(atoi(argv[1]));
    printf("%6s %7s  %-15s  %-16s  %-16s  %-16s\n", "queues", "waiting", "with a", NAMES[TO_HOST], NAMES[TO_DEVICE],
           NAMES[STORE]);
    fflush(stdout);
    for (const char *queues : {"8", "32"}) {
        int r = run_child("/proc/self/exe", queues);
        worst = r != 0 ? r : worst;
    }
    return worst;
}
