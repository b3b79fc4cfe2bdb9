/* SPDX-License-Identifier: Apache-2.0 */
/* What a process without CUDA is told about DMA-BUFs, and what it costs it. How device memory moves: cuda_rw.c. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include "test/softnic/fake_cuda/driver.h"
#include "test/softnic/support.h"

/* As NCCL and the transport ask, with an impossible file: EBADF says yes, EOPNOTSUPP no. */
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

    cr_assert(found, "not the driver of test/softnic/fake_cuda: no %s", name);
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
