/* SPDX-License-Identifier: Apache-2.0 */
/* Making one more object fails when there is no room. */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

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

/* A queue reads what a ring has held before as entries of its own. Here rings share pages that are larger than they. */
Test(object, a_ring_that_is_used_again_is_empty)
{
    static const uint64_t sizes[] = {4096, 8192, 40000, 200000, 1000000};
    uint64_t off[5], again;
    struct sn_world *world;
    struct sn_config config;

    sn_config_default(&config);
    cr_assert_eq(sn_world_create("/dev/shm/softnic.test.rings", &config, true, &world), 0);
    cr_assert_eq(unlink("/dev/shm/softnic.test.rings"), 0);
    for (int i = 0; i < 5; i++) {
        cr_assert_eq(sn_arena_alloc(world, sizes[i], &off[i]), 0);
        memset((uint8_t *)world + off[i], 0xa0 + i, sizes[i]);
    }
    for (int i = 0; i < 5; i++) {
        const uint8_t *ring = (uint8_t *)world + off[i];

        sn_arena_free(world, off[i], sizes[i]);
        cr_assert_eq(sn_arena_alloc(world, sizes[i], &again), 0);
        cr_assert_eq(again, off[i]);
        for (uint64_t at = 0; at < sizes[i]; at++)
            cr_assert_eq(ring[at], 0, "byte %lu of %lu", (unsigned long)at, (unsigned long)sizes[i]);
        memset((uint8_t *)world + again, 0xa0 + i, sizes[i]);
    }
    for (int i = 0; i < 5; i++)
        cr_assert_eq(((uint8_t *)world)[off[i]] + ((uint8_t *)world)[off[i] + sizes[i] - 1], 2 * (0xa0 + i), "ring %d",
                     i);
    sn_world_close(world);
}
