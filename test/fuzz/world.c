/* SPDX-License-Identifier: Apache-2.0 */
/* A damaged world of the software NIC: a program that opens it, sweeps it, reports on it or takes part in it gets an
 * error, or continues. It touches nothing outside the file, and does not wait for ever. An input is a list of words to
 * change. */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include "test/fuzz/fuzz.h"
#include "tools/softnic/cli/ctl_report.h"
#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/object.h"
#include "tools/softnic/world/proc.h"
#include "tools/softnic/world/queues.h"
#include "tools/softnic/world/wake.h"

enum { CHANGES_MOST = 16 };

struct change {
    uint8_t where; /* index of parts[] */
    uint8_t width; /* its low bits: 4 or 8 bytes */
    uint16_t at;   /* within the part */
    uint64_t value;
};

#define PART(member, index)                                                                                            \
    {                                                                                                                  \
        offsetof(struct sn_world, member) + (index) * sizeof(((struct sn_world *)0)->member[0]),                       \
            sizeof(((struct sn_world *)0)->member[0])                                                                  \
    }
static const struct {
    size_t at, bytes;
} parts[] = {{0, offsetof(struct sn_world, copier)},
             {offsetof(struct sn_world, proc_lock),
              offsetof(struct sn_world, atomic_locks) - offsetof(struct sn_world, proc_lock)},
             PART(procs, 0),
             PART(procs, 1),
             PART(devs, 0),
             PART(cqs, 0),
             PART(qps, 0),
             PART(srqs, 0),
             PART(mrs, 0),
             {offsetof(struct sn_world, ctxs), 64},
             {offsetof(struct sn_world, qp_free), 64},
             {offsetof(struct sn_world, cq_free), 64}};
enum { PARTS = sizeof(parts) / sizeof(parts[0]) };

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    struct change change = {
        .where = (uint8_t)(n / 32), .width = (uint8_t)n, .at = (uint16_t)(n % 32 * 4), .value = UINT64_MAX};

    if (n >= PARTS * 16)
        return 0;
    memcpy(out, &change, sizeof(change));
    return sizeof(change);
}

static char path[64];

static void drop_file(void)
{
    unlink(path);
}

struct made {
    uint32_t proc, ctx, cq, qp, srq, mr;
};

/* Objects as a process has them. Any may fail. */
static int make_objects(struct sn_world *world, uint64_t *nonce, struct made *m)
{
    if (sn_proc_enter(world, *nonce, nonce, 0, &m->proc) || sn_ctx_shm_take(world, m->proc, 0, &m->ctx) ||
        sn_cq_shm_take(world, m->proc, m->ctx, 16, &m->cq) || sn_srq_shm_take(world, m->proc, &m->srq) ||
        sn_qp_shm_take(world, m->proc, &m->qp) || sn_mr_shm_take(world, m->proc, &m->mr))
        return -1;
    if (sn_rq_shm_init(world, &world->qps[m->qp].rq, 8, 2) || sn_rq_shm_init(world, &world->srqs[m->srq].rq, 8, 2))
        return -1;
    return 0;
}

static void use_queues(struct sn_world *world, const struct made *m)
{
    struct sn_sge sge[2] = {{4096, 64, 1}, {8192, 64, 1}};
    struct sn_cqe cqe = {.wr_id = 1, .status = IBV_WC_SUCCESS};
    struct sn_recv recv;

    (void)sn_cq_push(world, m->cq, &cqe, 1, true);
    (void)sn_rq_push(world, &world->qps[m->qp].rq, 1, sge, 2);
    (void)sn_rq_pop(world, &world->qps[m->qp].rq, &recv);
    (void)sn_rq_push(world, &world->srqs[m->srq].rq, 2, sge, 2);
    (void)sn_rq_pop(world, &world->srqs[m->srq].rq, &recv);
    (void)sn_qp_error(world, world->qps[m->qp].qpn);
    sn_async_raise(world, m->ctx, IBV_EVENT_CQ_ERR, m->cq);
    (void)sn_cable_set(world, 0, false);
}

static void damage(struct sn_world *world, const uint8_t *data, size_t bytes)
{
    struct fuzz_reader in = {data, bytes};

    for (int i = 0; i < CHANGES_MOST && in.left; i++) {
        struct change change;
        size_t width;

        fuzz_take(&in, &change, sizeof(change));
        width = change.width % 2 ? 8 : 4;
        change.where %= PARTS;
        memcpy((uint8_t *)world + parts[change.where].at + change.at % (parts[change.where].bytes - width + 1),
               &change.value, width);
    }
}

/* Free the locks. A lock of a living process would be waited for, for some seconds (test_proc.c), which is no
 * damage. */
static void free_locks(struct sn_world *world)
{
    struct sn_lock *locks[] = {&world->proc_lock,         &world->arena_lock,     &world->ctx_slots.lock,
                               &world->cq_slots.lock,     &world->qp_slots.lock,  &world->srq_slots.lock,
                               &world->mr_slots.lock,     &world->ctxs[0].lock,   &world->cqs[0].lock,
                               &world->qps[0].lock,       &world->qps[0].rq.lock, &world->srqs[0].rq.lock,
                               &world->devs[0].clock_lock};

    for (size_t i = 0; i < sizeof(locks) / sizeof(locks[0]); i++)
        locks[i]->owner = 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static uint64_t nonce = 77;
    struct sn_config config;
    struct sn_world *world, *opened;
    struct made first = {0}, second = {0};

    if (!path[0]) {
        snprintf(path, sizeof(path), "/dev/shm/softnic.fuzz.%d", (int)getpid());
        atexit(drop_file);
        setenv("SOFTNIC_LOG", "none", 1);
        fuzz_require(freopen("/dev/null", "w", stdout), "no /dev/null"); /* the reports */
    }
    sn_config_default(&config);
    config.nics = 2;
    unlink(path);
    fuzz_require(sn_world_create(path, &config, false, &world) == 0, "no world");
    fuzz_require(make_objects(world, &nonce, &first) == 0, "no objects");
    damage(world, data, bytes);
    free_locks(world);
    sn_world_close(world);
    if (sn_world_open(path, &opened) == 0) {
        fuzz_accepted++;
        sn_report_status(path, opened, true);
        sn_report_counters(opened, false);
        (void)sn_proc_sweep(opened);
        use_queues(opened, &first);
        if (make_objects(opened, &nonce, &second) == 0)
            use_queues(opened, &second);
        sn_proc_leave(opened, second.proc, path);
        (void)sn_world_remove(opened, path, false);
        sn_world_close(opened);
    }
    return 0;
}
