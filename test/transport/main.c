/* SPDX-License-Identifier: Apache-2.0 */
/* Criterion's main(). Without a usable rail it exits with 77, which Meson counts as a skip. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "test/transport/pair.h"

int main(int argc, char **argv)
{
    struct criterion_test_set *tests;
    int result = 0;

    if (argc == 2 && !strcmp(argv[1], "--rails"))
        return pair_rails_here();
    if (argc > 2 && !strcmp(argv[1], "--side"))
        return pair_side_main(argv);
    if (pair_rails() == 0) {
        printf("skipped: no RDMA device is usable (set LD_LIBRARY_PATH to softnic's, or see PERSEUS_LOG=info)\n");
        return 77;
    }
    tests = criterion_initialize();
    if (criterion_handle_args(argc, argv, true))
        result = !criterion_run_all_tests(tests);
    criterion_finalize(tests);
    return result;
}
