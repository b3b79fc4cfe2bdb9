/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>

#include "fused/core/place.h"

struct row {
    char ids[20]; /* the node of each rank, one letter per rank */
    int result;
    uint32_t nodes, locals;
};

static struct row rows[] = {
    {"a", 0, 1, 1},
    {"aaaa", 0, 1, 4},
    {"aaaaaaaa", 0, 1, 8},
    {"aabb", 0, 2, 2},
    {"abc", 0, 3, 1},              /* one GPU per node */
    {"ccaabb", 0, 3, 2},           /* the order of the numbers does not matter */
    {"aaaaaaaabbbbbbbb", 0, 2, 8}, /* more ranks than one node can have */
    {"aaaaaaaaa", -EINVAL, 0, 0},  /* too many GPUs on one node */
    {"aab", -EINVAL, 0, 0},
    {"abb", -EINVAL, 0, 0},
    {"aabbb", -EINVAL, 0, 0},
    {"abab", -EINVAL, 0, 0}, /* scattered */
    {"aabbaa", -EINVAL, 0, 0},
    {"aabc", -EINVAL, 0, 0},
};

ParameterizedTestParameters(place, nodes_are_of_equal_size_and_consecutive_or_refused)
{
    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(rows[0]));
}

ParameterizedTest(struct row *row, place, nodes_are_of_equal_size_and_consecutive_or_refused)
{
    uint64_t ids[20];
    uint32_t world = 0;
    for (; row->ids[world] != '\0'; world++)
        ids[world] = (uint64_t)row->ids[world];
    for (uint32_t rank = 0; rank < world; rank++) {
        struct prs_place place;
        cr_assert_eq(prs_place_find(ids, rank, world, &place), row->result, "rank %u of %s", rank, row->ids);
        if (row->result != 0)
            continue;
        cr_assert(place.nodes == row->nodes && place.local_ranks == row->locals, "%s: %u nodes of %u", row->ids,
                  place.nodes, place.local_ranks);
        cr_assert_eq(prs_place_rank(&place, place.node, place.local_rank), rank);
        for (uint32_t other = 0; other < world; other++)
            cr_assert_eq(other / place.local_ranks == place.node, ids[other] == ids[rank], "rank %u and %u", rank,
                         other);
    }
}
