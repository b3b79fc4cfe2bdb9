/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <sched.h>

#include "transport/host/affinity.h"

Test(affinity, a_list_of_cpus_as_the_kernel_writes_it_is_understood)
{
    static const struct {
        const char *list;
        int result, count, has, has_not;
    } rows[] = {
        {"0\n", 0, 1, 0, 1},         {"0-3,8,10-11\n", 0, 7, 10, 9}, {"5-5", 0, 1, 5, 4},
        {"\n", 0, 0, -1, 0},         {"3-1", -EINVAL, -1, -1, -1},   {"a", -EINVAL, -1, -1, -1},
        {"1-", -EINVAL, -1, -1, -1}, {"-2", -EINVAL, -1, -1, -1},    {"0-99999", 0, CPU_SETSIZE, 1023, -1},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        cpu_set_t set;

        cr_assert_eq(prs_affinity_parse(rows[i].list, &set), rows[i].result, "'%s'", rows[i].list);
        if (rows[i].result < 0)
            continue;
        cr_assert_eq(CPU_COUNT(&set), rows[i].count, "'%s': %d CPUs", rows[i].list, CPU_COUNT(&set));
        if (rows[i].has >= 0)
            cr_assert(CPU_ISSET(rows[i].has, &set), "'%s' lacks %d", rows[i].list, rows[i].has);
        if (rows[i].has_not >= 0)
            cr_assert(!CPU_ISSET(rows[i].has_not, &set), "'%s' has %d", rows[i].list, rows[i].has_not);
    }
}

Test(affinity, a_node_that_is_not_there_leaves_the_thread_where_it_is)
{
    cpu_set_t before, after;

    cr_assert_eq(sched_getaffinity(0, sizeof(before), &before), 0);
    prs_affinity_set_node(-1);
    prs_affinity_set_node(4711);
    cr_assert_eq(sched_getaffinity(0, sizeof(after), &after), 0);
    cr_assert(CPU_EQUAL(&before, &after));
}
