/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>

#include "transport/host/hca_filter.h"

struct row {
    char text[48];
    char name[16];
    int port;
    int admits;
};

ParameterizedTestParameters(hca_filter, follows_nccl_syntax)
{
    static struct row rows[] = {
        {"", "mlx5_0", 1, 1},
        {"mlx5", "mlx5_0", 1, 1},
        {"mlx5_1", "mlx5_10", 1, 1}, /* a prefix also matches the longer name */
        {"=mlx5_1", "mlx5_10", 1, 0},
        {"=mlx5_1", "mlx5_1", 2, 1},
        {"=mlx5_1:1", "mlx5_1", 2, 0},
        {"mlx5_1:2", "mlx5_1", 2, 1},
        {"mlx5_0,mlx5_2", "mlx5_1", 1, 0},
        {"mlx5_0,mlx5_2", "mlx5_2", 1, 1},
        {"^mlx5_0", "mlx5_0", 1, 0},
        {"^mlx5_0", "mlx5_1", 1, 1},
        {"^=mlx5_1", "mlx5_10", 1, 1},
        {"^=mlx5_1:1", "mlx5_1", 2, 1},
        {"mlx5_0:1:3:1", "mlx5_0", 1, 1},
        {"mlx5_0:2", "mlx5_0", -1, 1}, /* the port is not known yet */
        {"^", "mlx5_0", 1, 1},
        {",,mlx5_3,", "mlx5_3", 1, 1},
    };
    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct row *row, hca_filter, follows_nccl_syntax)
{
    struct prs_hca_filter filter;

    cr_assert_eq(prs_hca_filter_parse("NCCL_IB_HCA", row->text, &filter), 0);
    cr_assert_eq(prs_hca_filter_admits(&filter, row->name, row->port), row->admits, "\"%s\" for %s:%d", row->text,
                 row->name, row->port);
}

Test(hca_filter, refuses_what_is_no_list)
{
    static const char *const texts[] = {"mlx5_0:", "mlx5_0:x", "mlx5_0:1:2:3:4", ":1", "mlx5_0:-1", "mlx5_0:99999"};
    struct prs_hca_filter filter;

    for (size_t i = 0; i < sizeof(texts) / sizeof(*texts); i++)
        cr_assert_eq(prs_hca_filter_parse("NCCL_IB_HCA", texts[i], &filter), -EINVAL, "\"%s\"", texts[i]);
}

Test(hca_filter, gives_rail_and_plane)
{
    struct prs_hca_filter filter;

    cr_assert_eq(prs_hca_filter_parse("NCCL_IB_HCA", "mlx5_0:1:3:1,mlx5_2:1:4", &filter), 0);
    cr_assert_eq(filter.item[prs_hca_filter_find(&filter, "mlx5_0", 1)].rail, 3);
    cr_assert_eq(filter.item[prs_hca_filter_find(&filter, "mlx5_0", 1)].plane, 1);
    cr_assert_eq(filter.item[prs_hca_filter_find(&filter, "mlx5_2", 1)].plane, -1);
}
