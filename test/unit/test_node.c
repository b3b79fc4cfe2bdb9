/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transport/util/node.h"

Test(node, is_what_perseus_node_says)
{
    uint64_t own;

    unsetenv("PERSEUS_NODE");
    own = prs_node_id();
    cr_assert_neq(own, 0);
    cr_assert_eq(prs_node_id(), own);
    setenv("PERSEUS_NODE", "a", 1);
    cr_assert(prs_node_id() != 0 && prs_node_id() != own);
    setenv("PERSEUS_NODE", "b", 1);
    cr_assert_neq(prs_node_id(), own);
}

/* Ranks of one node pass memory over a UNIX socket. Containers with separate networks cannot reach each other's. */
Test(node, is_another_one_in_a_container_with_a_network_of_its_own)
{
    enum { SAME = 1, NOT_ALLOWED = 2 };
    uint64_t own;
    int status;
    pid_t child;

    unsetenv("PERSEUS_NODE");
    own = prs_node_id();
    child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET))
            _exit(NOT_ALLOWED);
        _exit(prs_node_id() == own ? SAME : 0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status));
    if (WEXITSTATUS(status) == NOT_ALLOWED)
        cr_skip_test("no network namespace can be made here");
    cr_assert_eq(WEXITSTATUS(status), 0);
}
