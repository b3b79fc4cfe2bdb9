/* SPDX-License-Identifier: Apache-2.0 */
/* A rank that cannot register its window, whatever the reason, tells the others, which would wait for it. No NIC: the
 * allgather and the regions are the test's. Linked with --wrap=malloc and --wrap=calloc. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "plugin/gin.h"
#include "transport/util/error.h"

enum { RANKS = 3, OWN = 1 };

static struct gin_comm comm = {.base = {GIN_COMM, &comm}, .rank = OWN, .ranks = RANKS, .relaxed = true};
static int gathers, told, left_out, regions, fail_alloc, fail_region, bad_rank = -1;
static char region[2];
static struct prs_mem asked[2]; /* of each region */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);

/* One in fail_alloc is the one that fails; 0: none. */
static bool allocation_fails(void)
{
    return fail_alloc && --fail_alloc == 0;
}

void *__wrap_malloc(size_t bytes)
{
    return allocation_fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return allocation_fails() ? NULL : __real_calloc(count, bytes);
}

int gather_run(struct gather *gather, const void *mine, uint32_t bytes, uint8_t *all)
{
    (void)gather;
    gathers++;
    memcpy(&told, mine, sizeof(told));
    left_out += !all;
    for (int rank = 0; all && rank < RANKS; rank++) {
        memset(all + (size_t)rank * GATHER_BYTES, 0, GATHER_BYTES);
        memcpy(all + (size_t)rank * GATHER_BYTES, rank == OWN ? mine : (const void *)"", rank == OWN ? bytes : 0);
        if (rank == bad_rank)
            memcpy(all + (size_t)rank * GATHER_BYTES, &(int32_t){-EFAULT}, sizeof(int32_t));
    }
    return 0;
}

int prs_region_register(struct prs_fabric *fabric, const struct prs_rail_set *rails, const struct prs_mem *mem,
                        struct prs_region **out)
{
    (void)fabric;
    (void)rails;
    asked[regions % 2] = *mem;
    if (fail_region && --fail_region == 0)
        return prs_fail(-EFAULT, "no such memory");
    *out = (struct prs_region *)(void *)&region[regions++];
    return 0;
}

void prs_region_release(struct prs_region *released)
{
    regions -= released != NULL;
}

void prs_region_keys(const struct prs_region *of, struct prs_keys *out)
{
    (void)of;
    memset(out, 0, sizeof(*out));
}

void gin_raise_arrived(struct gin_comm *of, gin_progress_fn *progress)
{
    (void)of;
    (void)progress;
}

net_result gin_request_progress(void *set)
{
    (void)set;
    return NET_SUCCESS;
}

static net_result registered(int type, void **mhandle)
{
    static char memory[64];

    gathers = told = 0;
    return rma_memory_reg(&comm, memory, sizeof(memory), type, 0, mhandle);
}

Test(window, a_rank_that_cannot_register_takes_part_in_the_gather_and_leaves_nothing, .timeout = 60)
{
    static const struct {
        int alloc, region, type, rank;
        int told;
        net_result result;
    } rows[] = {
        {1, 0, NET_PTR_HOST, -1, -ENOMEM, NET_SYSTEM_ERROR},
        {2, 0, NET_PTR_HOST, -1, -ENOMEM, NET_SYSTEM_ERROR},
        {0, 1, NET_PTR_HOST, -1, -EFAULT, NET_INVALID_ARGUMENT},
        {0, 2, NET_PTR_HOST, -1, -EFAULT, NET_INVALID_ARGUMENT},
        {0, 0, 77, -1, -EINVAL, NET_INVALID_ARGUMENT},
        {0, 0, NET_PTR_CUDA, 2, 0, NET_INVALID_ARGUMENT},
    };
    void *mhandle;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        fail_alloc = rows[i].alloc;
        fail_region = rows[i].region;
        bad_rank = rows[i].rank;
        mhandle = &comm;
        cr_expect_eq(registered(rows[i].type, &mhandle), rows[i].result, "row %zu", i);
        cr_expect_eq(gathers, 1, "row %zu: %d gathers", i, gathers);
        cr_expect_eq(told, rows[i].told, "row %zu: the others were told %d", i, told);
        cr_expect(!mhandle && regions == 0, "row %zu: %d regions are left", i, regions);
    }
    cr_expect_leq(left_out, 1);
    bad_rank = -1;
    cr_assert_eq(registered(NET_PTR_HOST, &mhandle), NET_SUCCESS, "%s", prs_error_last());
    cr_assert_eq(regions, 2);
    gin_memory_release(&comm, mhandle);
    cr_assert_eq(regions, 0);
}

/* GPU memory comes as a file, an offset in it, and its address. What kernels and the proxy name must be one handle. */
Test(window, device_memory_is_registered_by_its_file, .timeout = 60)
{
    static char memory[64];
    enum { FILE_OF_IT = 7, OFFSET = 4096 };

    for (int table = 0; table < 2; table++) { /* RMA, GIN */
        void *mhandle = NULL, *for_kernels = NULL;
        struct gin_memory *window;
        net_result r;

        gathers = 0;
        r = table ? gin_memory_reg_dmabuf(&comm, memory, sizeof(memory), NET_PTR_CUDA, OFFSET, FILE_OF_IT, 0, &mhandle,
                                          &for_kernels)
                  : rma_memory_reg_dmabuf(&comm, memory, sizeof(memory), NET_PTR_CUDA, OFFSET, FILE_OF_IT, 0, &mhandle);
        cr_assert_eq(r, NET_SUCCESS, "%s", prs_error_last());
        window = mhandle;
        cr_assert(gathers == 1 && regions == 2 && window->is_device && window->base == (uintptr_t)memory);
        cr_assert(!table || for_kernels == mhandle);
        for (int i = 0; i < 2; i++) /* data, and signals in strict order */
            cr_assert(asked[i].kind == PRS_MEM_DMABUF && asked[i].dmabuf_fd == FILE_OF_IT &&
                          asked[i].dmabuf_offset == OFFSET && asked[i].addr == memory &&
                          asked[i].len_bytes == sizeof(memory),
                      "region %d", i);
        cr_assert_neq(asked[0].flags & PRS_MEM_STRICT, asked[1].flags & PRS_MEM_STRICT);
        gin_memory_release(&comm, mhandle);
        cr_assert_eq(regions, 0);
        fail_region = 1;
        r = rma_memory_reg_dmabuf(&comm, memory, sizeof(memory), NET_PTR_CUDA, OFFSET, FILE_OF_IT, 0, &mhandle);
        cr_assert(r == NET_INVALID_ARGUMENT && !mhandle && regions == 0, "a file that cannot be registered");
    }
}
