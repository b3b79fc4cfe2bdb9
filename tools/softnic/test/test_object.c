/* SPDX-License-Identifier: Apache-2.0 */
/* Making one more object fails when there is no room. */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>

#include "tools/softnic/test/support.h"

enum { MOST = 4096 };

static struct end e;

/* Give this thread a /dev/shm of its own with kib left. */
static void small_shm(unsigned kib)
{
    char size[32];

    if (unshare(CLONE_NEWNS))
        cr_skip_test("no mount namespace of one's own: not root?");
    snprintf(size, sizeof(size), "size=%uk", kib);
    /* In a chroot the root is not a mount point. */
    if (mount("none", "/dev/shm", NULL, MS_PRIVATE, NULL))
        cr_assert_eq(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL), 0);
    if (mount("test", "/dev/shm", "tmpfs", 0, size))
        cr_skip_test("tmpfs cannot be mounted here");
}

Test(object, a_world_that_does_not_fit_is_not_made)
{
    struct sn_config config;
    struct sn_world *world;

    small_shm(128);
    setenv("SOFTNIC_LOG", "none", 1);
    sn_config_default(&config);
    cr_assert_eq(sn_world_create("/dev/shm/softnic.test", &config, false, &world), -ENOSPC);
    cr_assert_eq(sn_world_open("/dev/shm/softnic.test", &world), -ENOENT, "nothing of it is left");
}

/* Without the check, the first write to the memory would end a process by SIGBUS. */
Test(object, a_full_dev_shm_is_an_error_of_who_wants_more)
{
    static struct ibv_context *contexts[MOST];
    static struct ibv_mr *regions[MOST];
    static struct ibv_cq *queues[MOST];
    struct ibv_device **list;
    int context = 0, region = 0, queue = 0;

    small_shm(1024);
    test_world(NULL);
    end_open(&e, NULL);
    list = ibv_get_device_list(NULL);
    while (region < MOST / 2 && (regions[region] = ibv_reg_mr(e.pd, e.buf, 4096, ALL_ACCESS)))
        region++;
    while (context < MOST && (contexts[context] = ibv_open_device(list[0])))
        context++;
    cr_assert_eq(errno, ENOMEM);
    while (queue < MOST && (queues[queue] = ibv_create_cq(e.ctx, 4, NULL, NULL, 0)))
        queue++;
    cr_assert_eq(errno, ENOMEM);
    cr_assert(context < MOST && queue < MOST, "%d opened devices, %d queues", context, queue);
    while (region < MOST && (regions[region] = ibv_reg_mr(e.pd, e.buf, 4096, ALL_ACCESS)))
        region++;
    cr_assert_lt(region, MOST);
    while (region > 0)
        cr_assert_eq(ibv_dereg_mr(regions[--region]), 0);
    while (queue > 0)
        cr_assert_eq(ibv_destroy_cq(queues[--queue]), 0);
    while (context > 0)
        cr_assert_eq(ibv_close_device(contexts[--context]), 0);
    ibv_free_device_list(list);
    end_close(&e);
}
