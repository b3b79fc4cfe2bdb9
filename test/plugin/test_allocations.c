/* SPDX-License-Identifier: Apache-2.0 */
/* Each allocation fails once, over open, connect, a transfer and close of the plugin's tables for networks and GIN:
 * there is an error that says so, nothing is left behind, and the next try works. The plugin's objects and the
 * transport are linked in, with --wrap=malloc, calloc, realloc, free and mmap. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#include "plugin/abi_gin.h"
#include "test/support/open_files.h"
#include "transport/util/clock.h"

enum { LIMIT_MS = 60000, MOST = 4096 /* allocations, and pieces of memory at a time */, BYTES = 4096 };

extern const struct net_v12 ncclNetPlugin_v12;
extern const struct gin_v13 ncclGinPlugin_v13;

/* ---- allocations ---- */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void __real_free(void *at);
void *__real_mmap(void *at, size_t bytes, int rights, int flags, int fd, off_t offset);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);
void __wrap_free(void *at);
void *__wrap_mmap(void *at, size_t bytes, int rights, int flags, int fd, off_t offset);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* the devices' threads allocate, too */
static void *pieces[MOST];
static int live, made, fail_at; /* fail_at: the number of the one that fails, from 1 on; 0: none */

static bool fails(void)
{
    bool it_does;

    pthread_mutex_lock(&lock);
    it_does = ++made == fail_at;
    pthread_mutex_unlock(&lock);
    errno = it_does ? ENOMEM : errno;
    return it_does;
}

/* An old piece is gone, and a new one is there; either may be NULL. */
static void *note(const void *old, void *new)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; old && i < live; i++)
        if (pieces[i] == old) {
            pieces[i] = pieces[--live];
            break;
        }
    cr_assert_lt(live, MOST);
    if (new)
        pieces[live++] = new;
    pthread_mutex_unlock(&lock);
    return new;
}

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : note(NULL, __real_malloc(bytes));
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : note(NULL, __real_calloc(count, bytes));
}

void *__wrap_realloc(void *old, size_t bytes)
{
    const void *before = old; /* the compiler must not see a freed pointer used */

    return fails() ? NULL : note(before, __real_realloc(old, bytes));
}

void __wrap_free(void *at)
{
    note(at, NULL);
    __real_free(at);
}

void *__wrap_mmap(void *at, size_t bytes, int rights, int flags, int fd, off_t offset)
{
    return fails() ? MAP_FAILED : __real_mmap(at, bytes, rights, flags, fd, offset);
}

/* ---- jobs ---- */

static char said[4096]; /* warnings of the job */

static void keep(int level, unsigned long subsystems, const char *file, int line, const char *format, ...)
{
    size_t used = strlen(said);
    va_list args;

    (void)subsystems;
    (void)file;
    (void)line;
    if (level != NET_LOG_WARN)
        return;
    va_start(args, format);
    vsnprintf(said + used, sizeof(said) - used, format, args);
    va_end(args);
}

static char memory[2 * BYTES] __attribute__((aligned(BYTES)));

struct comms {
    void *context, *listen, *send, *recv, *from, *to;
};

static net_result connect_comms(struct comms *c)
{
    const struct net_v12 *net = &ncclNetPlugin_v12;
    uint64_t give_up = prs_clock_ms() + LIMIT_MS;
    uint8_t handle[NET_HANDLE_BYTES];
    net_result r = net->listen(c->context, 0, handle, &c->listen);

    while (r == NET_SUCCESS && (!c->send || !c->recv)) {
        if (!c->send)
            r = net->connect(c->context, 0, handle, &c->send, NULL);
        if (r == NET_SUCCESS && !c->recv)
            r = net->accept(c->listen, &c->recv, NULL);
        cr_assert_lt(prs_clock_ms(), give_up, "neither connected nor failed");
    }
    return r;
}

static net_result transfer(struct comms *c)
{
    const struct net_v12 *net = &ncclNetPlugin_v12;
    uint64_t give_up = prs_clock_ms() + LIMIT_MS;
    void *send = NULL, *recv = NULL, *data = memory + BYTES;
    int tag = 1, sent = 0, received = 0;
    size_t size = BYTES;
    net_result r = net->reg(c->send, memory, BYTES, NET_PTR_HOST, &c->from);

    if (r == NET_SUCCESS)
        r = net->reg(c->recv, memory + BYTES, BYTES, NET_PTR_HOST, &c->to);
    if (r == NET_SUCCESS)
        r = net->irecv(c->recv, 1, &data, &size, &tag, &c->to, NULL, &recv);
    while (r == NET_SUCCESS && (!sent || !received)) {
        if (!send)
            r = net->isend(c->send, memory, BYTES, tag, c->from, NULL, &send);
        else if (!sent)
            r = net->test(send, &sent, NULL);
        if (r == NET_SUCCESS && !received)
            r = net->test(recv, &received, NULL);
        cr_assert_lt(prs_clock_ms(), give_up, "the transfer does not end");
    }
    return r;
}

static net_result net_job(void)
{
    const struct net_v12 *net = &ncclNetPlugin_v12;
    struct comms c = {NULL};
    net_result r = net->init(&c.context, 1, NULL, keep, NULL);

    if (r == NET_SUCCESS)
        r = connect_comms(&c);
    if (r == NET_SUCCESS)
        r = transfer(&c);
    if (c.from)
        net->dereg(c.send, c.from);
    if (c.to)
        net->dereg(c.recv, c.to);
    if (c.send)
        net->close_send(c.send);
    if (c.recv)
        net->close_recv(c.recv);
    if (c.listen)
        net->close_listen(c.listen);
    net->finalize(c.context);
    return r;
}

/* A rank that is alone, and puts to itself. */
static net_result gin_job(void)
{
    const struct gin_v13 *gin = &ncclGinPlugin_v13;
    struct gin_config_v13 config = {.contexts = 1, .traffic_class = -1};
    uint8_t handle[NET_HANDLE_BYTES];
    void *handles[] = {handle}, *context, *listen = NULL, *comm = NULL, *set = NULL, *window = NULL, *kernel, *put;
    uint64_t give_up = prs_clock_ms() + LIMIT_MS;
    int done = 0;
    net_result r = gin->init(&context, 1, keep);

    if (r == NET_SUCCESS)
        r = gin->listen(context, 0, handle, &listen);
    if (r == NET_SUCCESS)
        r = gin->connect(context, handles, 1, 0, listen, &comm);
    if (r == NET_SUCCESS)
        r = gin->create_context(comm, &config, &set, NULL);
    if (r == NET_SUCCESS)
        r = gin->reg(comm, memory, sizeof(memory), NET_PTR_HOST, 0, &window, &kernel);
    if (r == NET_SUCCESS)
        r = gin->iput_signal(set, 0, 0, window, 64, 128, window, 0, 256, window, 1, GIN_SIGNAL_INC, &put);
    while (r == NET_SUCCESS && !done) {
        r = gin->progress(set);
        if (r == NET_SUCCESS)
            r = gin->test(comm, put, &done);
        cr_assert_lt(prs_clock_ms(), give_up, "the put does not end");
    }
    if (window)
        gin->dereg(comm, window);
    if (set)
        gin->destroy_context(set);
    gin->close_coll(comm);
    gin->close_listen(listen);
    gin->finalize(context);
    return r;
}

static net_result run(net_result (*job)(void), int number)
{
    net_result r;

    said[0] = 0;
    made = 0;
    fail_at = number;
    r = job();
    fail_at = 0;
    return r;
}

/* The software NIC's threads open some for a moment. */
static void wait_for_files(int files)
{
    uint64_t give_up = prs_clock_ms() + LIMIT_MS;
    int now;

    while ((now = open_files()) > files && prs_clock_ms() < give_up)
        usleep(1000);
    cr_assert_leq(now, files, "%d files are left", now - files);
}

/* How often the job's warnings speak of memory. */
static int memory_words(void)
{
    int count = 0;

    for (const char *at = said; (at = strstr(at, "memory")); at++)
        count++;
    return count;
}

static void fail_each(net_result (*job)(void))
{
    int pieces_before, files, n = 1, all, usual, survived = 0;

    cr_assert_eq(run(job, 0), NET_SUCCESS, "%s", said); /* makes what is made once */
    pieces_before = live;
    files = open_files();
    cr_assert_eq(run(job, 0), NET_SUCCESS, "%s", said);
    all = made;
    usual = memory_words();
    cr_assert_gt(all, 10, "%d allocations: they are not seen", all);
    for (; n <= all; n++) {
        net_result r = run(job, n);

        if (made < n)
            break; /* how many there are depends a little on the time */
        if (r == NET_SUCCESS)
            survived++; /* the plugin goes on without it: without a log line, or more slowly */
        else
            cr_assert(memory_words() > usual || strstr(said, strerror(ENOMEM)), "number %d of %d: error %d, and: %s", n,
                      all, r, said);
        cr_expect_eq(live, pieces_before, "number %d of %d: %d pieces are left", n, all, live - pieces_before);
        wait_for_files(files);
        if (n % 8 == 0)
            cr_assert_eq(run(job, 0), NET_SUCCESS, "after number %d of %d: %s", n, all, said);
    }
    cr_assert_eq(run(job, 0), NET_SUCCESS, "%s", said);
    fprintf(stderr, "%d allocations failed, %d of them were no error\n", n - 1, survived);
}

Test(allocations, a_connection_without_memory_fails_leaves_nothing_and_the_next_one_works, .timeout = 300)
{
    fail_each(net_job);
}

Test(allocations, gin_without_memory_fails_leaves_nothing_and_the_next_one_works, .timeout = 300)
{
    fail_each(gin_job);
}
