/* SPDX-License-Identifier: Apache-2.0 */
/* A program of softnic-run over the driver of fake_cuda: a kernel runs until a write of the NIC into GPU memory is
 * done, and meanwhile another thread makes a call that the driver would let wait for the kernel with its lock held.
 *
 *   driver_calls copy|launch|free [stuck]   stuck: expect that they wait for each other, as under --plain-cuda
 *   driver_calls late                       a kernel that waits for the launch: the wait before it has an end
 *   driver_calls pass                       calls that must not wait */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 4096, LIMIT_S = 30, STUCK_S = 3, LOOK_US = 1000, NON_BLOCKING = 1 };

#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "driver_calls:%d: failed: %s\n", __LINE__, #condition);                                    \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

static void *library;

static struct {
    int (*init)(unsigned), (*retain)(void **, int), (*push)(void *);
    int (*alloc)(uint64_t *, size_t), (*free)(uint64_t), (*host_alloc)(void **, size_t, unsigned);
    int (*copy)(uint64_t, uint64_t, size_t), (*copy_async)(uint64_t, uint64_t, size_t, void *);
    int (*stream)(void **, unsigned), (*begin)(void *, int), (*end)(void *, void **);
    int (*proc)(const char *, void **, int, uint64_t, int *);
    void (*busy)(int);
    int (*waits)(void), (*synchronized)(void);
} cu;

typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                         void **);
static launch_fn launch;
static void *context;
static uint64_t freed, target;

static void find(const char *name, void *field)
{
    void *at = dlsym(library, name);
    if (!at) {
        fprintf(stderr, "driver_calls: no %s: not the driver of tools/fake_cuda\n", name);
        _exit(1);
    }
    memcpy(field, &at, sizeof(at));
}

static void open_driver(void)
{
    void *at;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    MUST(library);
    find("cuInit", &cu.init);
    find("cuDevicePrimaryCtxRetain", &cu.retain);
    find("cuCtxPushCurrent_v2", &cu.push);
    find("cuMemAlloc_v2", &cu.alloc);
    find("cuMemFree_v2", &cu.free);
    find("cuMemHostAlloc", &cu.host_alloc);
    find("cuMemcpy", &cu.copy);
    find("cuMemcpyAsync", &cu.copy_async);
    find("cuStreamCreate", &cu.stream);
    find("cuStreamBeginCapture_v2", &cu.begin);
    find("cuStreamEndCapture", &cu.end);
    find("cuGetProcAddress_v2", &cu.proc);
    find("fakeCudaBusy", &cu.busy);
    find("fakeCudaWaits", &cu.waits);
    find("fakeCudaSynchronized", &cu.synchronized);
    /* As CUDA's runtime library does it. */
    MUST(cu.proc("cuLaunchKernel", &at, 12000, 0, NULL) == 0);
    memcpy(&launch, &at, sizeof(launch));
    MUST(cu.init(0) == 0 && cu.retain(&context, 0) == 0 && cu.push(context) == 0);
    MUST(cu.alloc(&target, BYTES) == 0 && cu.alloc(&freed, BYTES) == 0);
}

static void copy(void)
{
    uint8_t pageable[BYTES];
    MUST(cu.copy((uintptr_t)pageable, target, BYTES) == 0);
}

static void first_launch(void)
{
    static int kernel;
    MUST(launch(&kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == 0);
}

static void free_memory(void)
{
    MUST(cu.free(freed) == 0);
}

static void *call(void *arg)
{
    void (*what)(void);
    memcpy(&what, &arg, sizeof(what));
    MUST(cu.push(context) == 0);
    what();
    return NULL;
}

/* A queue pair that is connected to itself. */
static struct ibv_qp *loop(struct ibv_pd *pd, struct ibv_cq *cq)
{
    struct ibv_qp_init_attr with = {.send_cq = cq,
                                    .recv_cq = cq,
                                    .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(pd, &with);
    MUST(qp);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR,
                                .path_mtu = IBV_MTU_1024,
                                .dest_qp_num = qp->qp_num,
                                .max_dest_rd_atomic = 1,
                                .min_rnr_timer = 1,
                                .ah_attr = {.is_global = 1, .port_num = 1}};
    MUST(ibv_query_gid(pd->context, 1, 0, &attr.ah_attr.grh.dgid) == 0);
    MUST(ibv_modify_qp(qp, &attr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    MUST(ibv_modify_qp(qp, &attr,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                           IBV_QP_MAX_QP_RD_ATOMIC) == 0);
    return qp;
}

struct job {
    struct ibv_qp *qp;
    struct ibv_mr *source, *device;
};

/* As NCCL: post, poll, and let the kernel continue. */
static void *write_and_end(void *arg)
{
    const struct job *job = arg;
    struct ibv_sge sge = {(uintptr_t)job->source->addr, BYTES, job->source->lkey};
    struct ibv_send_wr *bad,
        wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_wc wc = {0};

    wr.wr.rdma.remote_addr = target;
    wr.wr.rdma.rkey = job->device->rkey;
    MUST(ibv_post_send(job->qp, &wr, &bad) == 0);
    while (ibv_poll_cq(job->qp->send_cq, 1, &wc) == 0)
        usleep(LOOK_US);
    MUST(wc.status == IBV_WC_SUCCESS);
    cu.busy(0);
    return NULL;
}

static bool ends(pthread_t thread, int seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    return pthread_timedjoin_np(thread, NULL, &until) == 0;
}

static void while_a_kernel_runs(void (*what)(void), bool stuck)
{
    static uint8_t source[BYTES];
    int count, waited;
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list && count > 0);
    struct ibv_context *device = ibv_open_device(list[0]);
    struct ibv_pd *pd = ibv_alloc_pd(device);
    struct ibv_cq *cq = ibv_create_cq(device, 4, NULL, NULL, 0);
    struct job job = {
        loop(pd, cq), ibv_reg_mr(pd, source, BYTES, IBV_ACCESS_LOCAL_WRITE),
        ibv_reg_mr(pd, (void *)(uintptr_t)target, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)};
    pthread_t caller, writer;
    void *arg;

    MUST(job.source && job.device);
    waited = cu.waits() + cu.synchronized();
    cu.busy(1);
    memcpy(&arg, &what, sizeof(arg));
    MUST(pthread_create(&caller, NULL, call, arg) == 0);
    for (int i = 0; cu.waits() + cu.synchronized() == waited; i++) {
        MUST(i < LIMIT_S * 1000);
        usleep(LOOK_US);
    }
    MUST(pthread_create(&writer, NULL, write_and_end, &job) == 0);
    if (stuck) {
        MUST(!ends(writer, STUCK_S)); /* otherwise this test would show nothing */
        _exit(0);
    }
    MUST(ends(writer, LIMIT_S));
    MUST(ends(caller, LIMIT_S));
}

/* The library in front of the driver waits first, then the driver. */
static void end_late(void)
{
    pthread_t caller;
    void (*what)(void) = first_launch;
    void *arg;

    cu.busy(1);
    memcpy(&arg, &what, sizeof(arg));
    MUST(pthread_create(&caller, NULL, call, arg) == 0);
    for (int i = 0; cu.waits() < 2; i++) {
        MUST(i < 2 * LIMIT_S * 1000);
        usleep(LOOK_US);
    }
    cu.busy(0);
    MUST(ends(caller, LIMIT_S));
}

static bool lies_in(void *function, const char *library_name)
{
    Dl_info info;
    return dladdr(function, &info) && strstr(info.dli_fname, library_name);
}

/* Calls that the driver lets return at once, or that are recorded: nothing may wait. */
static void pass(void)
{
    static int kernels[2];
    void *pinned, *stream, *graph;

    MUST(lies_in(dlsym(library, "cuMemcpy"), "libsoftnic_driver_calls"));
    MUST(lies_in(dlsym(library, "cuDeviceGet"), "libcuda") &&
         lies_in(dlsym(RTLD_DEFAULT, "ibv_open_device"), "libibverbs"));
    MUST(cu.host_alloc(&pinned, BYTES, 0) == 0 && cu.stream(&stream, NON_BLOCKING) == 0);
    cu.busy(1);
    MUST(cu.copy_async(target, (uintptr_t)pinned, BYTES, stream) == 0);
    MUST(cu.copy_async((uintptr_t)pinned, target, BYTES, stream) == 0);
    MUST(cu.begin(stream, 0) == 0);
    MUST(launch(&kernels[0], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) == 0);
    MUST(cu.synchronized() == 0);
    cu.busy(0);
    MUST(cu.end(stream, &graph) == 0);
    MUST(launch(&kernels[1], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) == 0);
    MUST(cu.synchronized() == 1);
    MUST(launch(&kernels[1], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) == 0);
    MUST(cu.synchronized() == 1);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    bool stuck = argc > 2;

    open_driver();
    if (!strcmp(what, "copy"))
        while_a_kernel_runs(copy, stuck);
    else if (!strcmp(what, "launch"))
        while_a_kernel_runs(first_launch, stuck);
    else if (!strcmp(what, "free"))
        while_a_kernel_runs(free_memory, stuck);
    else if (!strcmp(what, "late"))
        end_late();
    else if (!strcmp(what, "pass"))
        pass();
    else
        return 1;
    return 0;
}
