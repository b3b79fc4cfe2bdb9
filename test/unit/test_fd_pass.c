/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transport/host/fd_pass.h"
#include "transport/util/error.h"

enum { SIDES = 3, HEALTHY_MS = 60000 }; /* long: a busy machine may keep a thread off its cores for seconds */

struct side {
    struct prs_fd_pass pass;
    struct prs_fd_pass_address others[SIDES - 1];
    int files[PRS_FD_PASS_FILES];
    int got[SIDES - 1][PRS_FD_PASS_FILES];
    uint32_t count, timeout_ms;
    int result;
    char text[256];
    pthread_t thread;
};

static void make_files(struct side *side, int number)
{
    for (int k = 0; k < PRS_FD_PASS_FILES; k++) {
        char name[16];

        snprintf(name, sizeof(name), "%d.%d", number, k);
        side->files[k] = memfd_create(name, MFD_CLOEXEC);
        cr_assert_eq(write(side->files[k], name, 4), 4);
    }
}

static void *exchange(void *argument)
{
    struct side *side = argument;

    side->result =
        prs_fd_pass_exchange(&side->pass, side->files, side->others, side->count, side->got, side->timeout_ms);
    snprintf(side->text, sizeof(side->text), "%s", prs_error_last());
    return NULL;
}

static void open_sides(struct side *sides)
{
    memset(sides, 0, SIDES * sizeof(*sides));
    for (int i = 0; i < SIDES; i++) {
        make_files(&sides[i], i);
        sides[i].timeout_ms = HEALTHY_MS;
        cr_assert_eq(prs_fd_pass_open(&sides[i].pass), 0);
    }
    for (int i = 0; i < SIDES; i++)
        for (int k = 0; k < SIDES; k++)
            if (k != i)
                sides[i].others[sides[i].count++] = sides[k].pass.address;
}

/* Connect as a process that knows the socket's name. */
static int call(const struct prs_fd_pass *pass)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    socklen_t length = sizeof(name);
    int s = socket(AF_UNIX, SOCK_STREAM, 0);

    cr_assert_eq(getsockname(pass->listener, (struct sockaddr *)&name, &length), 0);
    cr_assert_eq(connect(s, (struct sockaddr *)&name, length), 0);
    return s;
}

/* Connect as a process that does not know the cookie. */
static int stranger(const struct prs_fd_pass *pass)
{
    int s = call(pass);

    cr_assert_eq(send(s, "0123456789abcdef", 16, 0), 16);
    return s;
}

Test(fd_pass, everyone_gets_everyones_files_and_a_stranger_none, .timeout = 120)
{
    struct side sides[SIDES];
    char byte;
    int s;

    open_sides(sides);
    s = stranger(&sides[0].pass);
    for (int i = 0; i < SIDES; i++)
        cr_assert_eq(pthread_create(&sides[i].thread, NULL, exchange, &sides[i]), 0);
    for (int i = 0; i < SIDES; i++) {
        pthread_join(sides[i].thread, NULL);
        cr_assert_eq(sides[i].result, 0, "side %d: %s", i, sides[i].text);
    }
    for (int i = 0; i < SIDES; i++)
        for (int k = 0; k < SIDES - 1; k++)
            for (int n = 0; n < PRS_FD_PASS_FILES; n++) {
                char want[16], have[4] = "";

                snprintf(want, sizeof(want), "%d.%d", k < i ? k : k + 1, n);
                cr_assert_eq(pread(sides[i].got[k][n], have, 4, 0), 4);
                cr_assert_str_eq(have, want);
            }
    cr_assert_eq(recv(s, &byte, 1, 0), 0, "the stranger was given something");
    for (int i = 0; i < SIDES; i++)
        prs_fd_pass_close(&sides[i].pass);
}

Test(fd_pass, a_process_that_does_not_come_is_waited_for_with_a_limit, .timeout = 120)
{
    struct side sides[SIDES];

    open_sides(sides);
    sides[0].timeout_ms = 50; /* the other sides listen but never connect */
    exchange(&sides[0]);
    cr_assert_eq(sides[0].result, -ETIMEDOUT);
    cr_assert(strstr(sides[0].text, "2 of 2 processes"), "%s", sides[0].text);
    prs_fd_pass_close(&sides[1].pass);
    sides[0].timeout_ms = HEALTHY_MS;
    exchange(&sides[0]);
    cr_assert_eq(sides[0].result, -ECONNREFUSED, "%d", sides[0].result);
    cr_assert(strstr(sides[0].text, "did that rank die"), "%s", sides[0].text);
}

/* More silent connections than a side keeps, and all of them before the first real one. */
Test(fd_pass, a_silent_connection_delays_nobody, .timeout = 120)
{
    enum { SILENT = 70 };
    struct side sides[SIDES];
    int s[SILENT];

    open_sides(sides);
    for (int i = 0; i < SILENT; i++)
        s[i] = call(&sides[0].pass);
    for (int i = 0; i < SIDES; i++)
        cr_assert_eq(pthread_create(&sides[i].thread, NULL, exchange, &sides[i]), 0);
    for (int i = 0; i < SIDES; i++) {
        pthread_join(sides[i].thread, NULL);
        cr_assert_eq(sides[i].result, 0, "side %d: %s", i, sides[i].text);
    }
    for (int i = 0; i < SILENT; i++)
        close(s[i]);
}

/* connect() itself blocks while the backlog is full. */
Test(fd_pass, a_process_whose_backlog_is_full_is_waited_for_with_a_limit, .timeout = 60)
{
    struct side sides[SIDES];
    int others;

    open_sides(sides);
    cr_assert_eq(listen(sides[1].pass.listener, 0), 0);
    others = call(&sides[1].pass);
    sides[0].timeout_ms = 50;
    exchange(&sides[0]);
    cr_assert_eq(sides[0].result, -ETIMEDOUT, "%d: %s", sides[0].result, sides[0].text);
    cr_assert(strstr(sides[0].text, "cannot reach"), "%s", sides[0].text);
    close(others);
}

/* A process that has asked is not waited for again. */
Test(fd_pass, a_process_that_asks_and_ends_is_not_waited_for, .timeout = 30)
{
    struct side sides[SIDES];
    int s;

    open_sides(sides);
    s = call(&sides[0].pass);
    cr_assert_eq(send(s, sides[0].pass.address.cookie, sizeof(sides[0].pass.address.cookie), 0),
                 (ssize_t)sizeof(sides[0].pass.address.cookie));
    close(s);
    exchange(&sides[0]);
    cr_assert_eq(sides[0].result, -EPIPE, "%d: %s", sides[0].result, sides[0].text);
    cr_assert(strstr(sides[0].text, "did that rank die"), "%s", sides[0].text);
}

/* Leave this process `count` free descriptors. Return the first of them. */
static int leave_files(int count, struct rlimit *before)
{
    struct rlimit limit;
    int last = 0, first;

    for (int fd = 0; fd < 1024; fd++)
        last = fcntl(fd, F_GETFD) >= 0 ? fd : last;
    while ((first = dup(0)) < last)
        cr_assert_geq(first, 0); /* use up all lower numbers */
    close(first);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, before), 0);
    limit = *before;
    limit.rlim_cur = (rlim_t)(first + count);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    return first;
}

/* Exchange between two processes; ours has `count` free descriptors. Return the first of them. */
static int exchange_with_few_files(struct side *sides, int count)
{
    struct rlimit before;
    int first, status;
    pid_t other;

    open_sides(sides);
    sides[0].others[0] = sides[1].pass.address;
    sides[1].others[0] = sides[0].pass.address;
    sides[0].count = sides[1].count = 1;
    other = fork();
    if (other == 0) {
        prs_fd_pass_close(&sides[0].pass);
        exchange(&sides[1]);
        _exit(0);
    }
    first = leave_files(count, &before);
    exchange(&sides[0]);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &before), 0); /* sanitizers open files when the process ends */
    prs_fd_pass_close(&sides[0].pass);                  /* so that the other process does not wait */
    cr_assert_eq(waitpid(other, &status, 0), other);
    return first;
}

Test(fd_pass, without_a_descriptor_to_accept_with_it_ends_at_once_and_says_so, .timeout = 120)
{
    struct side sides[SIDES];

    exchange_with_few_files(sides, 1); /* enough to connect, but not to accept */
    cr_assert_eq(sides[0].result, -EMFILE, "%d: %s", sides[0].result, sides[0].text);
    cr_assert(strstr(sides[0].text, "Too many open files"), "%s", sides[0].text);
}

Test(fd_pass, when_descriptors_run_out_none_that_came_is_left_open, .timeout = 120)
{
    struct side sides[SIDES];
    int first = exchange_with_few_files(sides, 2); /* to connect and to accept; then one is left for the two files */

    cr_assert_eq(sides[0].result, -EMFILE, "%d: %s", sides[0].result, sides[0].text);
    for (int fd = first; fd < first + 2; fd++)
        cr_assert_eq(fcntl(fd, F_GETFD), -1, "descriptor %d is still open", fd);
}
