/* SPDX-License-Identifier: Apache-2.0 */
/* A caller's allgather fails: what error the caller gets. No NIC. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include <perseus/bootstrap.h>
#include <perseus/heap.h>

/* Fail as MPI does: return a positive number and write nothing. */
static int fails(void *user, const void *mine, void *all, size_t bytes)
{
    (void)mine;
    (void)all;
    (void)bytes;
    return *(const int *)user;
}

Test(bootstrap, an_allgather_that_fails_in_its_own_way_is_an_error_of_ours_too)
{
    static const int codes[] = {15, 1, -ECONNRESET};
    const struct prs_heap_options options = {.data_bytes = 4096, .signal_bytes = 4096};

    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
        int code = codes[i], want = code < 0 ? code : -EIO;
        const struct prs_bootstrap bootstrap = {.allgather = fails, .user = &code, .world = 1};
        struct prs_heap *heap = NULL;

        cr_assert_eq(prs_bootstrap_agree(&bootstrap, 0, "test"), want, "allgather returned %d", code);
        cr_assert(strstr(prs_error_text(), "test: the caller's allgather failed"), "%s", prs_error_text());
        cr_assert_eq(prs_heap_open(&bootstrap, &options, &heap), want, "allgather returned %d", code);
        cr_assert(strstr(prs_error_text(), "heap: the caller's allgather failed"), "%s", prs_error_text());
    }
}
