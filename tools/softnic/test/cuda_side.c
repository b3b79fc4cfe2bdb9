/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/test/cuda_side.h"
#include "tools/softnic/test/test_cuda_srd.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "test/support/bytes.h"
#include "tools/softnic/world/world.h"

enum { CHUNK = 2 << 20, PORT = 1, DMA_BUF_FD = 1, POSIX_FD = 1 };

const char *const memory_names[MEMORY_KINDS] = {"legacy", "vmm", "dmabuf", "private", "pageable", "pinned"};

/* The first members of CUmemAllocationProp; the others are zero. */
struct vmm_prop {
    int type, handle_types, location_type, location_id;
    void *win32;
    uint8_t flags[32];
};

static struct {
    int (*init)(unsigned), (*count)(int *), (*get)(int *, int), (*retain)(void **, int), (*push)(void *),
        (*pop)(void **);
    int (*alloc)(uint64_t *, size_t), (*free)(uint64_t), (*host_alloc)(void **, size_t, unsigned);
    int (*h2d)(uint64_t, const void *, size_t), (*d2h)(void *, uint64_t, size_t);
    int (*create)(unsigned long long *, size_t, const struct vmm_prop *, unsigned long long),
        (*release)(unsigned long long);
    int (*reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long), (*address_free)(uint64_t, size_t);
    int (*map)(uint64_t, size_t, size_t, unsigned long long, unsigned long long), (*unmap)(uint64_t, size_t);
    int (*access)(uint64_t, size_t, const int *, size_t);
    int (*range_handle)(void *, uint64_t, size_t, int, unsigned long long);
    int (*stream_query)(void *);
    int (*module)(void **, const void *), (*function)(void **, void *, const char *), (*sync)(void);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                  void **);
    void (*fail)(const char *, int), (*busy)(int);
    int (*waits)(void), (*calls)(const char *);
    void (*fail_later)(const char *, int, int);
    void (*hold_lock)(int);
    int (*lock_waits)(void);
} cu;
static int device;
static void *primary;
static pthread_t watcher;
static bool watching;

static const struct {
    const char *name;
    void *field;
    bool optional; /* fake_cuda does not have it */
} symbols[] = {
    {"cuInit", &cu.init},
    {"cuDeviceGetCount", &cu.count},
    {"cuDeviceGet", &cu.get},
    {"cuDevicePrimaryCtxRetain", &cu.retain},
    {"cuCtxPushCurrent_v2", &cu.push},
    {"cuCtxPopCurrent_v2", &cu.pop},
    {"cuMemAlloc_v2", &cu.alloc},
    {"cuMemFree_v2", &cu.free},
    {"cuMemHostAlloc", &cu.host_alloc},
    {"cuMemcpyHtoD_v2", &cu.h2d},
    {"cuMemcpyDtoH_v2", &cu.d2h},
    {"cuMemCreate", &cu.create},
    {"cuMemRelease", &cu.release},
    {"cuMemAddressReserve", &cu.reserve},
    {"cuMemAddressFree", &cu.address_free},
    {"cuMemMap", &cu.map},
    {"cuMemUnmap", &cu.unmap},
    {"cuMemSetAccess", &cu.access},
    {"cuStreamQuery", &cu.stream_query},
    {"cuModuleLoadData", &cu.module},
    {"cuMemGetHandleForAddressRange", &cu.range_handle},
    {"cuModuleGetFunction", &cu.function, true},
    {"cuLaunchKernel", &cu.launch, true},
    {"cuCtxSynchronize", &cu.sync, true},
    {"fakeCudaFail", &cu.fail, true},
    {"fakeCudaBusy", &cu.busy, true},
    {"fakeCudaWaits", &cu.waits, true},
    {"fakeCudaCalls", &cu.calls, true},
    {"fakeCudaFailLater", &cu.fail_later, true},
    {"fakeCudaHoldLock", &cu.hold_lock, true},
    {"fakeCudaLockWaits", &cu.lock_waits, true},
};

_Noreturn void die(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
    exit(1);
}

void side_exchange(struct side *side, const void *mine, void *theirs, size_t bytes)
{
    MUST(write(side->socket, mine, bytes) == (ssize_t)bytes);
    for (size_t got = 0; got < bytes;) {
        ssize_t n = read(side->socket, (char *)theirs + got, bytes - got);
        MUST(n > 0); /* 0: the other side has died */
        got += (size_t)n;
    }
}

void side_barrier(struct side *side)
{
    char mine = 'b', theirs;
    side_exchange(side, &mine, &theirs, 1);
    MUST(theirs == 'b');
}

double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void times_print(const char *what, double *us, size_t n)
{
    qsort(us, n, sizeof(us[0]), by_value);
    printf("  %-56s %8.2f us (tenth %.2f, nine tenths %.2f, worst %.2f)\n", what, us[n / 2], us[n / 10], us[n * 9 / 10],
           us[n - 1]);
}

static bool cuda_open(struct side *side)
{
    void *lib = dlopen("libcuda.so.1", RTLD_NOW);
    int count = 0;

    if (!lib) {
        printf("skipped: no CUDA driver (%s)\n", dlerror());
        return false;
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(lib, symbols[i].name);
        MUST(symbol || symbols[i].optional);
        memcpy(symbols[i].field, &symbol, sizeof(symbol));
    }
    side->fake = cu.fail != NULL;
    if (cu.init(0) || cu.count(&count) || count == 0) {
        printf("skipped: no GPU\n");
        return false;
    }
    MUST(!cu.get(&device, side->initiator ? 0 : 1 % count));
    MUST(!cu.retain(&primary, device) && !cu.push(primary));
    return true;
}

void side_enter_thread(void)
{
    MUST(!cu.push(primary));
}

int side_gpus(void)
{
    int count = 0;

    MUST(!cu.count(&count));
    return count;
}

void side_other_gpu(bool other)
{
    static void *context;
    void *popped;

    MUST(context || !cu.retain(&context, !device));
    device = !device;
    MUST(other ? !cu.push(context) : !cu.pop(&popped));
}

struct address {
    uint32_t qpn;
    union ibv_gid gid;
};

static struct address address_of(const struct side *side)
{
    struct address mine = {.qpn = side->qp->qp_num};
    MUST(!ibv_query_gid(side->context, PORT, side->srd ? 0 : 1, &mine.gid));
    return mine;
}

static void connect_rc(struct side *side, const struct address *theirs)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
                               .port_num = PORT,
                               .qp_access_flags =
                                   IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC};
    MUST(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = theirs->qpn,
        .max_dest_rd_atomic = 16,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = PORT, .grh = {.dgid = theirs->gid, .sgid_index = 1, .hop_limit = 1}}};
    MUST(!ibv_modify_qp(side->qp, &attr,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16};
    MUST(!ibv_modify_qp(side->qp, &attr,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                            IBV_QP_MAX_QP_RD_ATOMIC));
}

static void connect_to(struct side *side, const struct address *theirs)
{
    if (side->srd)
        srd_connect(side, &theirs->gid, theirs->qpn);
    else
        connect_rc(side, theirs);
}

void side_connect(struct side *side)
{
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    MUST(!ibv_modify_qp(side->qp, &reset, IBV_QP_STATE));
    side_barrier(side); /* the old connection must be idle before the new one begins */
    struct address mine = address_of(side), theirs;
    side_exchange(side, &mine, &theirs, sizeof(mine));
    connect_to(side, &theirs);
    side_barrier(side);
}

static void qp_make(const struct side *side, struct side *more)
{
    struct ibv_qp_init_attr init = {
        .send_cq = side->cq,
        .recv_cq = side->cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 256, .max_recv_wr = 16, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = 64}};
    *more = *side;
    more->qp = side->srd ? srd_make(side) : ibv_create_qp(side->pd, &init);
    MUST(more->qp);
}

void side_add(const struct side *side, struct side *more)
{
    qp_make(side, more);
    side_connect(more);
}

static int copier_pid(void)
{
    const char *path = getenv(SN_WORLD_ENV);
    struct sn_world *world;
    int pid = 0;

    if (!path || sn_world_open(path, &world))
        return 0;
    if (world->config.copier)
        pid = (int)world->procs[world->copier.proc - 1].pid;
    sn_world_close(world);
    return pid;
}

void side_loop(const struct side *side, struct side *loop)
{
    qp_make(side, loop);
    struct address mine = address_of(loop);
    connect_to(loop, &mine);
}

bool side_open(struct side *side)
{
    int count = 0;
    if (!cuda_open(side))
        return false;
    side->copier = copier_pid();
    side->srd = srd_wanted();
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list && count > 0);
    side->context = ibv_open_device(list[0]);
    MUST(side->context);
    ibv_free_device_list(list);
    side->pd = ibv_alloc_pd(side->context);
    side->cq = ibv_create_cq(side->context, 256, NULL, NULL, 0);
    MUST(side->pd && side->cq);
    side_add(side, side);
    return true;
}

static bool own_gpu_only;

void side_own_gpu_only(bool only)
{
    own_gpu_only = only;
}

/* Several allocations in a row, like PyTorch's expandable segments. */
static void vmm_make(struct buf *buf)
{
    bool private = buf->memory == PRIVATE;
    struct vmm_prop prop = {
        .type = 1, .handle_types = private ? 0 : POSIX_FD, .location_type = 1, .location_id = device};
    int access[3] = {1, device, 3};
    size_t chunk = buf->bytes > CHUNK * 3u ? (buf->bytes / 2 + CHUNK - 1) / CHUNK * CHUNK : CHUNK;

    prop.flags[1] = private; /* gpuDirectRDMACapable: allows a DMA-BUF */
    if (private)
        chunk = (buf->bytes + CHUNK - 1) / CHUNK * CHUNK;

    buf->num_handles = (int)((buf->bytes + chunk - 1) / chunk);
    MUST(buf->num_handles <= 4);
    MUST(!cu.reserve(&buf->addr, chunk * (size_t)buf->num_handles, 0, 0, 0));
    for (int i = 0; i < buf->num_handles; i++) {
        MUST(!cu.create(&buf->handles[i], chunk, &prop, 0));
        MUST(!cu.map(buf->addr + chunk * (size_t)i, chunk, 0, buf->handles[i], 0));
    }
    MUST(!cu.access(buf->addr, chunk * (size_t)buf->num_handles, access, 1));
    for (access[1] = 0; !own_gpu_only && access[1] < side_gpus();
         access[1]++) /* as NCCL does, if the GPUs reach each other */
        (void)(access[1] == device || cu.access(buf->addr, chunk * (size_t)buf->num_handles, access, 1));
    buf->bytes = chunk * (size_t)buf->num_handles;
}

static int dmabuf_of(const struct buf *buf)
{
    int fd = -1;
    MUST(!cu.range_handle(&fd, buf->addr, buf->bytes, DMA_BUF_FD, 0));
    return fd;
}

void buf_make(struct side *side, struct buf *buf, enum memory memory, size_t bytes)
{
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    void *host;
    size_t wanted = bytes;

    *buf = (struct buf){
        .memory = memory, .bytes = memory == DMABUF ? (bytes + 65535) & ~(size_t)65535 : bytes, .dmabuf = -1};
    if (memory == LEGACY || memory == DMABUF) {
        MUST(!cu.alloc(&buf->addr, buf->bytes));
    } else if (memory == VMM || memory == PRIVATE) {
        vmm_make(buf);
    } else {
        MUST(memory == PINNED ? !cu.host_alloc(&host, bytes, 1) : !posix_memalign(&host, 4096, bytes));
        buf->addr = (uintptr_t)host;
    }
    if (memory == DMABUF || memory == PRIVATE) {
        buf->dmabuf = dmabuf_of(buf);
        buf->mr = ibv_reg_dmabuf_mr(side->pd, 0, buf->bytes, buf->addr, buf->dmabuf, access);
        if (memory == DMABUF)
            buf->bytes = wanted;
    } else {
        buf->mr = ibv_reg_mr(side->pd, (void *)(uintptr_t)buf->addr, buf->bytes, access);
    }
    MUST(buf->mr);
}

void buf_free(struct buf *buf)
{
    size_t chunk = buf->num_handles ? buf->bytes / (size_t)buf->num_handles : 0;
    MUST(!ibv_dereg_mr(buf->mr));
    if (buf->dmabuf >= 0)
        close(buf->dmabuf);
    if (buf->memory == LEGACY || buf->memory == DMABUF)
        MUST(!cu.free(buf->addr));
    for (int i = 0; i < buf->num_handles; i++) {
        MUST(!cu.unmap(buf->addr + chunk * (size_t)i, chunk));
        MUST(!cu.release(buf->handles[i]));
    }
    if (buf->num_handles)
        MUST(!cu.address_free(buf->addr, buf->bytes));
    if (buf->memory == PAGEABLE)
        free((void *)(uintptr_t)buf->addr);
    /* Pinned memory stays until the process ends: freeing it is not under test. */
}

static uint8_t pattern(uint32_t seed, size_t i)
{
    return (uint8_t)((i * 2654435761u + seed * 40503u) >> 13) | 1; /* never 0: unwritten bytes are 0 */
}

/* From pageable memory, cuMemcpyHtoD returns before the bytes are in place. Like hardware, the NIC does not wait for
 * copies that the application has not waited for. */
static void device_put(const struct buf *buf, const uint8_t *bytes)
{
    MUST(!cu.h2d(buf->addr, bytes, buf->bytes));
    MUST(!cu.sync || !cu.sync());
}

void buf_fill(const struct buf *buf, uint32_t seed)
{
    uint8_t *bytes = malloc(buf->bytes);
    MUST(bytes);
    bytes_fill(bytes, buf->bytes, pattern, seed);
    if (buf->memory >= PAGEABLE)
        memcpy((void *)(uintptr_t)buf->addr, bytes, buf->bytes);
    else
        device_put(buf, bytes);
    free(bytes);
}

void buf_zero(const struct buf *buf)
{
    uint8_t *bytes = calloc(1, buf->bytes);
    MUST(bytes);
    if (buf->memory >= PAGEABLE)
        memset((void *)(uintptr_t)buf->addr, 0, buf->bytes);
    else
        device_put(buf, bytes);
    free(bytes);
}

void buf_read(const struct buf *buf, size_t offset, void *to, size_t bytes)
{
    if (buf->memory >= PAGEABLE)
        memcpy(to, (const char *)(uintptr_t)buf->addr + offset, bytes);
    else
        MUST(!cu.d2h(to, buf->addr + offset, bytes));
}

bool buf_check(const struct buf *buf, size_t bytes, uint32_t seed, const char *what)
{
    uint8_t *have = malloc(buf->bytes);
    size_t i;
    MUST(have);
    buf_read(buf, 0, have, buf->bytes);
    i = bytes_differ(have, bytes, pattern, seed);
    for (; i >= bytes && i < buf->bytes && have[i] == 0; i++) {
    }
    if (i < buf->bytes)
        fprintf(stderr, "%s: byte %zu of %zu is %02x, want %02x\n", what, i, bytes, have[i],
                i < bytes ? pattern(seed, i) : 0);
    free(have);
    return i >= buf->bytes;
}

struct ibv_wc side_poll(struct side *side)
{
    struct ibv_wc wc;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    for (time_t give_up = now.tv_sec + PATIENCE_S;;) {
        int n = ibv_poll_cq(side->cq, 1, &wc);
        MUST(n >= 0);
        if (n)
            return wc;
        clock_gettime(CLOCK_MONOTONIC, &now);
        MUST(now.tv_sec < give_up); /* fails if no completion came for PATIENCE_S */
        sched_yield();              /* the NIC is threads, and other tests run, too */
    }
}

void post(struct side *side, enum ibv_wr_opcode opcode, const struct buf *buf, size_t offset, size_t bytes,
          struct remote remote)
{
    if (side->srd) {
        srd_post(side, opcode, buf, offset, bytes, remote);
        return;
    }
    struct ibv_sge sge = {buf->addr + offset, (uint32_t)bytes, buf->mr->lkey};
    struct ibv_send_wr *bad,
        wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(IMM)};
    wr.wr.rdma.remote_addr = remote.addr + offset;
    wr.wr.rdma.rkey = remote.rkey;
    MUST(!ibv_post_send(side->qp, &wr, &bad));
}

void expect_success(struct side *side, const char *what)
{
    struct ibv_wc wc = side_poll(side);
    if (wc.status != IBV_WC_SUCCESS) {
        fprintf(stderr, "%s: completion status %d (%s)\n", what, wc.status, ibv_wc_status_str(wc.status));
        exit(1);
    }
}

struct remote swap_remote(struct side *side, const struct buf *buf)
{
    struct remote mine = {buf->addr, buf->mr->rkey}, theirs;
    side_exchange(side, &mine, &theirs, sizeof(mine));
    return theirs;
}

static const char spin_ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry spin(.param .u64 word)\n{\n"
    ".reg .pred %p<3>;\n.reg .u64 %rd<8>;\n"
    "ld.param.u64 %rd1, [word];\ncvta.to.global.u64 %rd1, %rd1;\n"
    "mov.u64 %rd2, %globaltimer;\nadd.u64 %rd2, %rd2, 10000000000;\n"
    "again:\nld.volatile.global.u64 %rd3, [%rd1];\nsetp.ne.u64 %p1, %rd3, 0;\n@%p1 bra found;\n"
    "mov.u64 %rd4, %globaltimer;\nsetp.lt.u64 %p2, %rd4, %rd2;\n@%p2 bra again;\n"
    "mov.u64 %rd5, 2;\nst.volatile.global.u64 [%rd1+8], %rd5;\nret;\n"
    "found:\nmov.u64 %rd5, 1;\nst.volatile.global.u64 [%rd1+8], %rd5;\nret;\n}\n";

bool spin_start(uint64_t flag)
{
    void *module, *kernel, *arguments[] = {&flag};
    if (cu.module(&module, spin_ptx))
        return false;
    MUST(!cu.function(&kernel, module, "spin"));
    MUST(!cu.launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL));
    return true;
}

static void *watch(void *unused)
{
    MUST(!cu.push(primary));
    while (__atomic_load_n(&watching, __ATOMIC_RELAXED))
        cu.stream_query(NULL);
    return unused;
}

void spin_watch(void)
{
    watching = true;
    MUST(!pthread_create(&watcher, NULL, watch, NULL));
}

void spin_watch_end(void)
{
    __atomic_store_n(&watching, false, __ATOMIC_RELAXED);
    pthread_join(watcher, NULL);
}

void spin_wait(void)
{
    MUST(!cu.sync());
}

void fail_next(const char *call, int result)
{
    cu.fail(call, result);
}

void kernel_runs(bool runs)
{
    cu.busy(runs);
}

int kernel_waits(void)
{
    return cu.waits();
}

int driver_calls(const char *call)
{
    return cu.calls ? cu.calls(call) : 0;
}

void fail_later(const char *call, int after, int result)
{
    cu.fail_later(call, after, result);
}

void driver_locked(bool locked)
{
    cu.hold_lock(locked);
}

int driver_lock_waits(void)
{
    return cu.lock_waits ? cu.lock_waits() : 0;
}
