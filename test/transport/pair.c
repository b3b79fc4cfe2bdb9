/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test/support/bytes.h"
#include "test/transport/pair.h"
#include "transport/nic/fabric.h"
#include "transport/nic/nic.h"
#include "transport/util/clock.h"

enum {
    WORDS = 512,
    UNORDERED = 128,
    UNFENCED = 64,
    ENDS = 32,
    NO_ADDS = 16
}; /* flags, added to the number of rails in an exit status */

struct pair_shared {
    struct prs_handle handle;
    uint32_t listening;
    uint32_t arrived[2];
    uint64_t value[2];
    uint32_t said[2];
};

struct hello { /* private data */
    uint64_t buffer, words;
    struct prs_keys keys, words_keys;
};

void pair_die(const char *file, int line, const char *what, const char *format, ...)
{
    va_list args;

    fprintf(stderr, "%s:%d: %s does not hold: ", file, line, what);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\n");
    _exit(1);
}

/* Count the rails in this process. Afterwards it may have more threads. */
int pair_rails_here(void)
{
    struct prs_fabric *fabric;
    struct prs_rail_info info;
    int count;

    if (prs_fabric_open(NULL, &fabric))
        return 0;
    count = prs_fabric_rails(fabric);
    if (count && prs_rail_query(fabric, 0, &info) == 0 && !info.in_order)
        count |= UNORDERED;
    if (count && !fabric->rail[0].domain->nic->fence)
        count |= UNFENCED;
    if (count && !fabric->rail[0].domain->nic->fails_over)
        count |= ENDS;
    if (count && !fabric->rail[0].domain->adds)
        count |= NO_ADDS;
    prs_fabric_close(fabric);
    return count;
}

static int ask_rails(void)
{
    char *argv[] = {"pair", "--rails", NULL};
    int status = 0;
    pid_t child = fork();

    if (child == 0) {
        unsetenv("BXFI_MAP");
        execv("/proc/self/exe", argv);
        _exit(0);
    }
    cr_assert(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

int pair_rails(void)
{
    return ask_rails() & (NO_ADDS - 1);
}

bool pair_rails_keep(const char *policy)
{
    int promises = ask_rails();

    return !(!strcmp(policy, "in_order") && promises & UNORDERED) &&
           !(!strcmp(policy, "nic_fence") && promises & UNFENCED);
}

bool pair_rails_fail_over(void)
{
    return !(ask_rails() & ENDS);
}

bool pair_rails_add(void)
{
    return !(ask_rails() & NO_ADDS);
}

bool pair_in_order(const struct pair *pair)
{
    struct prs_rail_info info;

    must(prs_rail_query(pair->fabric, 0, &info) == 0, "%s", prs_error_text());
    return info.in_order;
}

static void on_notify(void *user, uint32_t id, uint64_t bytes)
{
    struct pair *pair = user;

    pair->count[id]++;
    pair->bytes[id] = bytes;
    pair->order[pair->notified++ % 4096] = id;
}

static void *map(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    must(memory != MAP_FAILED, "mmap");
    return memory;
}

static void open_side(struct pair *pair)
{
    int count = pair->spec->rails[pair->side] ? pair->spec->rails[pair->side] : 1;
    struct prs_mem data, words;

    must(prs_fabric_open(NULL, &pair->fabric) == 0, "%s", prs_error_text());
    must(prs_fabric_rails(pair->fabric) >= count, "%d rails", prs_fabric_rails(pair->fabric));
    pair->rails.count = count;
    for (int i = 0; i < count; i++)
        pair->rails.rail[i] = i;
    pair->buffer_bytes = pair->spec->buffer_bytes ? pair->spec->buffer_bytes : 1 << 20;
    pair->buffer = map(pair->buffer_bytes);
    pair->words = map(WORDS * sizeof(*pair->words));
    data = (struct prs_mem){.addr = pair->buffer, .len_bytes = pair->buffer_bytes, .kind = PRS_MEM_HOST};
    words = (struct prs_mem){
        .addr = pair->words, .len_bytes = WORDS * sizeof(*pair->words), .kind = PRS_MEM_HOST, .flags = PRS_MEM_STRICT};
    for (int i = 0; pair->spec->no_atomics[pair->side] && i < count; i++)
        pair->fabric->rail[i].domain->adds = false;
    for (int i = 0; pair->spec->words_on_device && i < count; i++)
        pair->fabric->rail[i].info.mem_kinds |= PRS_MEM_CUDA;
    if (pair->spec->words_on_device)
        words.kind = PRS_MEM_CUDA;
    must(prs_region_register(pair->fabric, &pair->rails, &data, &pair->region) == 0, "%s", prs_error_text());
    must(prs_region_register(pair->fabric, &pair->rails, &words, &pair->words_region) == 0, "%s", prs_error_text());
}

static struct prs_peer *connect_side(struct pair *pair, const struct prs_peer_options *options)
{
    uint64_t deadline_ms = prs_clock_ms() + PAIR_TIMEOUT_MS;
    struct prs_listener *listener = NULL;
    struct prs_connector *connector;
    struct prs_peer *peer;
    int r = PRS_AGAIN;

    if (pair->side == 1) {
        r = prs_listen(pair->fabric, &pair->rails, &pair->shared->handle, &listener);
        must(r == 0, "%s", prs_error_text());
        __atomic_store_n(&pair->shared->listening, 1,
                         __ATOMIC_RELEASE); /* pairs with the acquire below: publishes the handle */
        while ((r = prs_accept(listener, options, &peer)) == PRS_AGAIN && prs_clock_ms() < deadline_ms)
            sched_yield();
        must(r == 0, "accept: %d %s", r, prs_error_text());
        prs_listener_close(listener);
        return peer;
    }
    while (!__atomic_load_n(&pair->shared->listening, __ATOMIC_ACQUIRE) && prs_clock_ms() < deadline_ms)
        usleep(100);
    must(prs_connect(pair->fabric, &pair->rails, &pair->shared->handle, options, &connector) == 0, "%s",
         prs_error_text());
    while ((r = prs_connector_step(connector, &peer)) == PRS_AGAIN && prs_clock_ms() < deadline_ms)
        sched_yield();
    must(r == 0, "connect: %d %s", r, prs_error_text());
    return peer;
}

static void run_side(struct pair *pair, pair_fn *fn)
{
    struct hello own = {0}, other;
    struct prs_peer_options options = {.private_data = &own,
                                       .private_bytes = sizeof(own),
                                       .on_notify = on_notify,
                                       .user = pair,
                                       .max_ops = pair->spec->max_ops,
                                       .traffic_class = -1,
                                       .queues_per_rail = pair->spec->queues_per_rail,
                                       .policy = pair->spec->policy,
                                       .exclusive_adds = pair->spec->exclusive_adds,
                                       .no_signals = pair->spec->no_signals[pair->side]};
    uint32_t bytes;

    open_side(pair);
    own.buffer = (uintptr_t)pair->buffer;
    own.words = (uintptr_t)pair->words;
    prs_region_keys(pair->region, &own.keys);
    prs_region_keys(pair->words_region, &own.words_keys);
    pair->peer = connect_side(pair, &options);
    memcpy(&other, prs_peer_private(pair->peer, &bytes), sizeof(other));
    must(bytes == sizeof(other), "%u private bytes", bytes);
    pair->remote_buffer = other.buffer;
    pair->remote_words = other.words;
    pair->remote_keys = other.keys;
    pair->remote_words_keys = other.words_keys;
    fn(pair);
    if (!pair->spec->b_dies)
        pair_barrier(pair);
    prs_peer_close(pair->peer);
    prs_region_release(pair->words_region);
    prs_region_release(pair->region);
    prs_fabric_close(pair->fabric);
}

/* A side is a fresh process (fork and exec): ThreadSanitizer allows no threads after a plain fork, and no process of a
 * real job starts with another one's memory. fn is passed as its distance to pair_run(), which is the same there. */
static pid_t start_side(const struct pair_spec *spec, int shared_fd, int side, pair_fn *fn)
{
    char text[14][32], *argv[] = {"pair",  "--side", text[0], text[1],  text[2],  text[3],  text[4],  text[5], text[6],
                                  text[7], text[8],  text[9], text[10], text[11], text[12], text[13], NULL};
    pid_t child;

    snprintf(text[0], sizeof(text[0]), "%d", side);
    snprintf(text[1], sizeof(text[1]), "%td", (char *)(uintptr_t)fn - (char *)(uintptr_t)pair_run);
    snprintf(text[2], sizeof(text[2]), "%d", shared_fd);
    snprintf(text[3], sizeof(text[3]), "%d", spec->rails[0]);
    snprintf(text[4], sizeof(text[4]), "%d", spec->rails[1]);
    snprintf(text[5], sizeof(text[5]), "%d", spec->queues_per_rail);
    snprintf(text[6], sizeof(text[6]), "%s", spec->policy ? spec->policy : "");
    snprintf(text[7], sizeof(text[7]), "%zu", spec->buffer_bytes);
    snprintf(text[8], sizeof(text[8]), "%u", spec->max_ops);
    snprintf(text[9], sizeof(text[9]), "%d", spec->b_dies);
    snprintf(text[10], sizeof(text[10]), "%d", spec->words_on_device);
    snprintf(text[11], sizeof(text[11]), "%d", spec->exclusive_adds);
    snprintf(text[12], sizeof(text[12]), "%d", spec->no_atomics[0] | spec->no_signals[0] << 1);
    snprintf(text[13], sizeof(text[13]), "%d", spec->no_atomics[1] | spec->no_signals[1] << 1);
    fflush(NULL);
    child = fork();
    if (child)
        return child;
    unsetenv("BXFI_MAP"); /* otherwise Criterion's sandbox takes over the program before main() */
    if (spec->hca[side])
        setenv("NCCL_IB_HCA", spec->hca[side], 1);
    execv("/proc/self/exe", argv);
    _exit(126);
}

int pair_side_main(char **argv)
{
    static struct pair pair;
    static struct pair_spec spec;
    pair_fn *fn = (pair_fn *)(uintptr_t)((char *)(uintptr_t)pair_run + atol(argv[3]));

    alarm(PAIR_TIMEOUT_MS / 1000);
    spec = (struct pair_spec){.rails = {atoi(argv[5]), atoi(argv[6])},
                              .queues_per_rail = atoi(argv[7]),
                              .policy = argv[8][0] ? argv[8] : NULL,
                              .buffer_bytes = (size_t)atol(argv[9]),
                              .max_ops = (uint32_t)atol(argv[10]),
                              .b_dies = atoi(argv[11]),
                              .words_on_device = atoi(argv[12]),
                              .exclusive_adds = atoi(argv[13]),
                              .no_signals = {atoi(argv[14]) & 2, atoi(argv[15]) & 2},
                              .no_atomics = {atoi(argv[14]) & 1, atoi(argv[15]) & 1}};
    pair.spec = &spec;
    pair.side = atoi(argv[2]);
    pair.shared = mmap(NULL, sizeof(*pair.shared), PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[4]), 0);
    must(pair.shared != MAP_FAILED, "mmap");
    close(atoi(argv[4]));
    run_side(&pair, fn);
    return 0;
}

void pair_run(const struct pair_spec *spec, pair_fn *a, pair_fn *b)
{
    int shared_fd = memfd_create("pair", 0);
    int most = spec->rails[0] > spec->rails[1] ? spec->rails[0] : spec->rails[1];
    int status[2] = {0, 0};
    pid_t side[2];

    if (pair_rails() < (most ? most : 1))
        cr_skip_test("needs %d rails, there are %d", most ? most : 1, pair_rails());
    if (spec->policy && !pair_rails_keep(spec->policy))
        cr_skip_test("these rails do not promise what %s needs", spec->policy);
    cr_assert(shared_fd >= 0 && ftruncate(shared_fd, sizeof(struct pair_shared)) == 0);
    side[0] = start_side(spec, shared_fd, 0, a);
    side[1] = start_side(spec, shared_fd, 1, b);
    for (int done = 0; done < 2; done++) {
        int how;
        pid_t ended = wait(&how);

        if (ended == side[0])
            status[0] = how;
        else if (ended == side[1])
            status[1] = how;
        if (spec->b_dies && ended == side[1] && WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL)
            status[1] = how = 0;
        if (how && done == 0) /* the other side would wait for this one */
            kill(ended == side[0] ? side[1] : side[0], SIGALRM);
    }
    close(shared_fd);
    cr_assert(status[0] == 0 && status[1] == 0, "side A ended with status %#x, side B with %#x", status[0], status[1]);
}

void pair_vanish(void)
{
    raise(SIGKILL);
    _exit(1);
}

void pair_barrier(struct pair *pair)
{
    uint32_t *own = &pair->shared->arrived[pair->side], *other = &pair->shared->arrived[!pair->side];
    uint64_t deadline_ms = prs_clock_ms() + PAIR_TIMEOUT_MS;

    pair->barriers++;
    __atomic_store_n(own, pair->barriers, __ATOMIC_RELEASE); /* pairs with the acquire below, in the other process */
    while (__atomic_load_n(other, __ATOMIC_ACQUIRE) < pair->barriers) {
        must(prs_clock_ms() < deadline_ms, "the other side did not come to barrier %u", pair->barriers);
        prs_peer_progress(pair->peer);
        sched_yield();
    }
}

uint64_t pair_swap(struct pair *pair, uint64_t value)
{
    uint64_t other;

    pair->shared->value[pair->side] = value;
    pair_barrier(pair);
    other = pair->shared->value[!pair->side];
    pair_barrier(pair);
    return other;
}

void pair_say(struct pair *pair)
{
    __atomic_store_n(&pair->shared->said[pair->side], 1, __ATOMIC_RELEASE); /* pairs with pair_has_said() */
}

bool pair_has_said(const struct pair *pair)
{
    return __atomic_load_n(&pair->shared->said[!pair->side], __ATOMIC_ACQUIRE);
}

struct prs_put pair_put_of(struct pair *pair, size_t from, size_t to, size_t len_bytes, uint32_t id, uint32_t flags)
{
    return (struct prs_put){.src = pair->region,
                            .src_addr = pair->buffer + from,
                            .dst_addr = pair->remote_buffer + to,
                            .dst = &pair->remote_keys,
                            .len_bytes = len_bytes,
                            .notify_id = id,
                            .flags = flags};
}

static void progress(struct pair *pair, uint64_t deadline_ms, const char *what)
{
    int r = prs_peer_progress(pair->peer);

    must(r >= 0, "progress: %d %s", r, prs_error_text());
    must(prs_clock_ms() < deadline_ms, "waited too long for %s", what);
    if (!r)
        sched_yield(); /* soft-RoCE needs the processor too */
}

void pair_put(struct pair *pair, struct prs_op *op, const struct prs_put *put)
{
    uint64_t deadline_ms = prs_clock_ms() + PAIR_TIMEOUT_MS;
    int r;

    while ((r = prs_peer_put(pair->peer, op, put)) == PRS_BUSY)
        progress(pair, deadline_ms, "room for a put");
    must(r == 0, "put: %d %s", r, prs_error_text());
}

void pair_signal(struct pair *pair, struct prs_op *op, const struct prs_signal *signal)
{
    uint64_t deadline_ms = prs_clock_ms() + PAIR_TIMEOUT_MS;
    int r;

    while ((r = prs_peer_signal(pair->peer, op, signal)) == PRS_BUSY)
        progress(pair, deadline_ms, "room for a signal");
    must(r == 0, "signal: %d %s", r, prs_error_text());
}

void pair_wait_op(struct pair *pair, struct prs_op *op)
{
    uint64_t deadline_ms = prs_clock_ms() + PAIR_TIMEOUT_MS;

    while (op->status == PRS_OP_PENDING)
        progress(pair, deadline_ms, "an op");
    must(op->status == 0, "op status %d: %s", op->status, prs_peer_error(pair->peer));
}

void pair_wait_notified(struct pair *pair, uint32_t total)
{
    uint64_t deadline_ms = prs_clock_ms() + PAIR_TIMEOUT_MS;

    while (pair->notified < total)
        progress(pair, deadline_ms, "notifications");
}

int pair_wait_error(struct pair *pair)
{
    uint64_t deadline_ms = prs_clock_ms() + PAIR_TIMEOUT_MS;
    int r;

    while ((r = prs_peer_progress(pair->peer)) >= 0) {
        must(prs_clock_ms() < deadline_ms, "no error came");
        sched_yield();
    }
    return r;
}

void pair_fill(uint8_t *bytes, size_t len_bytes, uint32_t seed)
{
    bytes_fill(bytes, len_bytes, pair_byte, seed);
}

void pair_check(const uint8_t *bytes, size_t len_bytes, uint32_t seed, const char *what)
{
    size_t i = bytes_differ(bytes, len_bytes, pair_byte, seed);
    must(i == len_bytes, "%s: byte %zu is %#x, expected %#x", what, i, bytes[i], pair_byte(seed, i));
}
