/* SPDX-License-Identifier: Apache-2.0 */
/* DMA-BUFs and their cost for a process without CUDA; device memory with a model. test_cuda_rw.c tests the
 * transfers. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tools/fake_cuda/busy.h"
#include "tools/fake_cuda/driver.h"
#include "tools/softnic/test/support.h"

/* NCCL and the transport probe with an invalid file: EBADF means yes, EOPNOTSUPP means no. */
static int probe(const struct end *end)
{
    errno = 0;
    cr_assert_null(ibv_reg_dmabuf_mr(end->pd, 0, 0, 0, -1, 0));
    return errno;
}

static void open_probe(struct end *end)
{
    struct end_options options = {0};

    test_world(NULL);
    end_open(end, &options);
}

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);

    cr_assert(found, "not the driver of tools/fake_cuda: no %s", name);
    return found;
}

Test(cuda_mem, dmabufs_are_to_be_had_before_the_application_starts_cuda)
{
    void (*counts)(struct fake_counts *);
    int (*init)(unsigned);
    struct fake_counts have;
    struct end end;
    void *library, *at;

    open_probe(&end);
    cr_assert_null(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "the driver is there too early to test anything");
    cr_assert_eq(probe(&end), EBADF, "not loaded: %s", strerror(errno));
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    cr_assert(library, "%s", dlerror());
    at = symbol(library, "fakeCudaCounts");
    memcpy(&counts, &at, sizeof(counts));
    at = symbol(library, "cuInit");
    memcpy(&init, &at, sizeof(init));
    counts(&have);
    cr_assert_eq(have.started, 0, "asking has started CUDA: a fork of this process could not use it");
    cr_assert_eq(probe(&end), EBADF, "loaded, not started: %s", strerror(errno));
    counts(&have);
    cr_assert_eq(have.started, 0, "asking has started CUDA, which was loaded: a fork of this process could not use it");
    cr_assert_eq(init(0), 0);
    cr_assert_eq(probe(&end), EBADF, "started: %s", strerror(errno));
    end_close(&end);
}

Test(cuda_mem, without_a_driver_there_are_no_dmabufs)
{
    struct end end;

    if (dlopen("libcuda.so.1", RTLD_NOW))
        cr_skip_test("this machine has a CUDA driver");
    open_probe(&end);
    cr_assert_eq(probe(&end), EOPNOTSUPP, "%s", strerror(errno));
    end_close(&end);
}

/* A function of the driver, which is opened at the first call. */
#define DRIVER(function, name)                                                                                         \
    __typeof__(&(name)) function;                                                                                      \
    do {                                                                                                               \
        void *library_ = dlopen("libcuda.so.1", RTLD_NOW), *at_;                                                       \
        cr_assert(library_, "%s", dlerror());                                                                          \
        at_ = symbol(library_, #name);                                                                                 \
        memcpy(&(function), &at_, sizeof(at_));                                                                        \
    } while (0)

/* Device memory with a current context. */
static uint64_t device_memory(size_t bytes)
{
    uint64_t at = 0;
    void *context;

    DRIVER(init, cuInit);
    DRIVER(retain, cuDevicePrimaryCtxRetain);
    DRIVER(push, cuCtxPushCurrent_v2);
    DRIVER(allocate, cuMemAlloc_v2);
    cr_assert(!init(0) && !retain(&context, 0) && !push(context) && !allocate(&at, bytes));
    return at;
}

static void post_write(struct end *from, uint32_t key, uint64_t at, uint32_t bytes, struct address to, uint64_t wr_id)
{
    struct ibv_sge sge = {.addr = at, .length = bytes, .lkey = key};
    struct ibv_send_wr *bad, wr = {.wr_id = wr_id,
                                   .sg_list = &sge,
                                   .num_sge = 1,
                                   .opcode = IBV_WR_RDMA_WRITE,
                                   .send_flags = IBV_SEND_SIGNALED,
                                   .wr.rdma = {to.addr, to.rkey}};

    cr_assert_eq(ibv_post_send(from->qp, &wr, &bad), 0);
}

enum { SHORT = 4096, LONG = 8 << 20, LATER = 30, FAST = 800000000 /* bits a second */ };

/* Two ends with a modelled rate, and device memory for both. */
struct modelled {
    struct end a, b;
    uint64_t device;
    struct ibv_mr *from, *to;
    struct address at;
};

static void modelled_open(struct modelled *m, uint64_t rate_bps)
{
    struct sn_config config;

    sn_config_default(&config);
    config.nics = 2;
    config.rate_bps = rate_bps;
    test_world(&config);
    pair_open(&m->a, &m->b);
    m->device = device_memory(2 * LONG);
    m->from = ibv_reg_mr(m->a.pd, (void *)(uintptr_t)m->device, LONG, IBV_ACCESS_LOCAL_WRITE);
    m->to = ibv_reg_mr(m->b.pd, (void *)(uintptr_t)(m->device + LONG), LONG,
                       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    cr_assert(m->from && m->to);
    m->at = (struct address){.addr = m->device + LONG, .rkey = m->to->rkey};
}

static void modelled_close(struct modelled *m)
{
    cr_assert(!ibv_dereg_mr(m->from) && !ibv_dereg_mr(m->to));
    end_close(&m->a);
    end_close(&m->b);
}

/* Post a short write while the copy engines stand still; return when they have been given it. */
static void copy_held(struct modelled *m)
{
    uint64_t give_up = now_ns() + WAIT_S * 1000000000ull;
    int before;

    DRIVER(calls, fakeCudaCalls);
    DRIVER(stand_still, fakeCudaPause);
    stand_still(1);
    before = calls("cuMemcpyAsync");
    post_write(&m->a, m->from->lkey, m->device, SHORT, m->at, 1);
    while (calls("cuMemcpyAsync") == before && now_ns() < give_up)
        usleep(1000);
    cr_assert_gt(calls("cuMemcpyAsync"), before, "the short write is under way");
}

static void expect_write(struct modelled *m)
{
    struct ibv_wc wc = wait_wc(m->a.cq, "the short write");
    cr_assert(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS, "%s", ibv_wc_status_str(wc.status));
}

static void copy_goes_on(struct modelled *m)
{
    DRIVER(stand_still, fakeCudaPause);
    stand_still(0);
    expect_write(m);
}

/* These take 41 ms and 84 s at this rate: the latter is longer than any wait here. */
Test(cuda_mem, what_is_posted_for_later_delays_no_copy_under_way, .timeout = 150)
{
    struct modelled m;

    modelled_open(&m, 800000);
    copy_held(&m);
    for (int i = 0; i < LATER; i++) { /* one of them is posted while the queue pair waits for its next look */
        post_write(&m.a, m.from->lkey, m.device, LONG, m.at, 2);
        usleep(100);
    }
    copy_goes_on(&m);
    modelled_close(&m);
}

/* Standard error as a file, where the NIC's lines can be read. */
struct captured {
    int file, log;
};

static void capture(struct captured *c)
{
    unsetenv("SOFTNIC_LOG");
    c->file = memfd_create("captured", 0);
    c->log = dup(STDERR_FILENO);
    cr_assert(c->file >= 0 && c->log >= 0 && dup2(c->file, STDERR_FILENO) >= 0);
}

static void release(const struct captured *c)
{
    cr_assert(dup2(c->log, STDERR_FILENO) >= 0);
    close(c->file);
    close(c->log);
}

/* How many lines name the copier. */
static int hints(const struct captured *c)
{
    char text[8192];
    ssize_t bytes = pread(c->file, text, sizeof(text) - 1, 0);
    int n = 0;

    text[bytes > 0 ? bytes : 0] = 0;
    for (const char *at = text; (at = strstr(at, "softnic-run --copier")); at++)
        n++;
    return n;
}

static void wait_hint(const struct captured *c)
{
    uint64_t give_up = now_ns() + WAIT_S * 1000000000ull;

    while (!hints(c) && now_ns() < give_up)
        usleep(10000);
}

/* With a model an engine makes the copy, so it is the engine that waits for the lock. */
Test(cuda_mem, who_waits_for_the_drivers_lock_is_told_of_the_copier_once, .timeout = 150)
{
    enum { LONGER_US = 2500000 /* another look or two */ };
    struct captured said;
    struct modelled m;
    int first, last;

    modelled_open(&m, FAST);
    DRIVER(hold_lock, fakeCudaHoldLock);
    capture(&said);
    hold_lock(1);
    post_write(&m.a, m.from->lkey, m.device, SHORT, m.at, 1);
    wait_hint(&said);
    first = hints(&said);
    usleep(LONGER_US);
    last = hints(&said);
    hold_lock(0);
    release(&said);
    cr_assert_eq(first, 1, "no line in %d s", WAIT_S);
    cr_assert_eq(last, 1, "the line came again");
    expect_write(&m);
    modelled_close(&m);
}

Test(cuda_mem, who_waits_for_a_copy_engine_is_told_of_the_copier, .timeout = 150)
{
    struct captured said;
    struct modelled m;
    int lines;

    modelled_open(&m, FAST);
    capture(&said);
    copy_held(&m);
    wait_hint(&said);
    lines = hints(&said);
    release(&said);
    copy_goes_on(&m);
    cr_assert_eq(lines, 1, "no line in %d s", WAIT_S);
    modelled_close(&m);
}

Test(cuda_mem, copies_that_end_are_not_taken_for_a_wait, .timeout = 150)
{
    uint64_t until = now_ns() + 6500000000ull; /* longer than the NIC watches a copy before it speaks */
    struct captured said;
    struct modelled m;
    int lines;

    modelled_open(&m, FAST);
    capture(&said);
    while (now_ns() < until) {
        post_write(&m.a, m.from->lkey, m.device, SHORT, m.at, 1);
        expect_write(&m);
    }
    lines = hints(&said);
    release(&said);
    cr_assert_eq(lines, 0, "every copy had ended");
    modelled_close(&m);
}

/* How often threads of that name have gone to sleep voluntarily. */
static long sleeps_of(const char *name)
{
    DIR *tasks = opendir("/proc/self/task");
    long sum = 0, value;

    cr_assert(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        char file[300], line[200];
        bool is_it = false;
        FILE *status;

        snprintf(file, sizeof(file), "/proc/self/task/%s/status", task->d_name);
        status = task->d_name[0] == '.' ? NULL : fopen(file, "r");
        while (status && fgets(line, sizeof(line), status)) {
            if (!strncmp(line, "Name:\t", 6))
                is_it = !strncmp(line + 6, name, strlen(name));
            else if (is_it && sscanf(line, "voluntary_ctxt_switches: %ld", &value) == 1)
                sum += value;
        }
        if (status)
            fclose(status);
    }
    closedir(tasks);
    return sum;
}

Test(cuda_mem, an_engine_that_waits_for_a_copy_leaves_others_its_core, .timeout = 150)
{
    enum { MANY = 50 };
    uint64_t give_up = now_ns() + WAIT_S * 1000000000ull;
    struct modelled m;
    long before;

    setenv("SOFTNIC_CORES", "2", 1);
    modelled_open(&m, FAST); /* with a model, the engine asks for real-time scheduling */
    copy_held(&m);
    before = sleeps_of("softnic-engine");
    while (sleeps_of("softnic-engine") < before + MANY && now_ns() < give_up)
        usleep(1000);
    cr_assert_geq(sleeps_of("softnic-engine"), before + MANY, "in %d s", WAIT_S);
    copy_goes_on(&m);
    modelled_close(&m);
}
