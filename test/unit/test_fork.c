/* SPDX-License-Identifier: Apache-2.0 */
/* Which descriptors a forked child keeps. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transport/util/fork.h"

enum { HIGH = 3000 /* beyond what the table holds at first */ };

static int make(void)
{
    int fd;

    prs_fork_begin();
    fd = prs_fork_end(open("/dev/null", O_RDONLY | O_CLOEXEC));
    cr_assert_geq(fd, 0);
    return fd;
}

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD) >= 0;
}

static int in_child(int (*fn)(void))
{
    int status = 0;
    pid_t child = fork();

    if (child == 0)
        _exit(fn());
    cr_assert(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int connection, other;

static int look(void)
{
    return is_open(connection) << 1 | is_open(other);
}

Test(fork, a_child_keeps_no_connection)
{
    connection = make();
    other = open("/dev/null", O_RDONLY);
    cr_assert_eq(in_child(look), 1, "only what nobody named stays open");
    cr_assert_eq(look(), 3, "the parent has both");
    prs_fork_close(connection);
    cr_assert_eq(look(), 1);
    cr_assert_eq(in_child(look), 1);
}

Test(fork, a_child_keeps_no_connection_of_any_number)
{
    int high = fcntl(STDERR_FILENO, F_DUPFD, HIGH);

    if (high < 0)
        cr_skip_test("%s: too few descriptors", strerror(errno));
    prs_fork_begin();
    connection = prs_fork_end(high);
    other = make();
    cr_assert_eq(in_child(look), 0);
    cr_assert_eq(look(), 3);
}

/* The number may belong to the child's own file by now. */
static int close_what_was_closed(void)
{
    int again = open("/dev/null", O_RDONLY);

    if (again != connection)
        return 1;
    prs_fork_close(connection);
    return is_open(again) ? 0 : 2;
}

Test(fork, a_child_that_closes_a_connection_of_its_parent_closes_nothing)
{
    connection = make();
    cr_assert_eq(in_child(close_what_was_closed), 0);
    cr_assert(is_open(connection));
}

static int close_own(void)
{
    int own = make();

    prs_fork_close(own);
    return is_open(own) ? 1 : 0;
}

Test(fork, a_child_may_have_connections_of_its_own)
{
    connection = make();
    cr_assert_eq(in_child(close_own), 0);
    cr_assert(is_open(connection));
}

static int may_fork_again(void)
{
    connection = make();
    return in_child(look);
}

Test(fork, so_may_its_own_children)
{
    other = make();
    cr_assert_eq(in_child(may_fork_again), 0);
}

Test(fork, a_failure_is_passed_on)
{
    prs_fork_begin();
    cr_assert_eq(prs_fork_end(open("/nowhere", O_RDONLY)), -1);
    cr_assert_eq(errno, ENOENT);
    prs_fork_close(-1);
}
