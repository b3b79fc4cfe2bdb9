/* SPDX-License-Identifier: Apache-2.0 */
/* What peers cost: memory, descriptors, the time of a round of progress over all of them, and that of a message when
 * all of them send in turn. Both ends are in this process, so N connections are 2 N peers. Memory is what libperseus
 * allocates, and what of the process is resident, which includes the software NIC's queues. Prints one JSON object;
 * exits with 1 if a word is wrong.
 *
 * usage: peers CONNECTIONS POLICY [MOST_KIB [SIGNALS [RAILS [TURNS]]]]. Policy net: peers as the plugin's net comms,
 * without signals. Policy team-NAME: one end of each is a peer of one team context, and a round is one of that context.
 * Exits with 1 also if a peer allocates more than MOST_KIB. SIGNALS: how many a connection sends, at most 1100. TURNS:
 * how often each connection then sends one message. */
#include <perseus/perseus.h>
#include <perseus/team.h>

#include <dirent.h>
#include <link.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- what the library allocates ---- */

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *memory);

static long allocated; /* bytes that libperseus holds, from malloc() and by mmap() */
static uintptr_t library_start, library_end;

static int find_library(struct dl_phdr_info *info, size_t bytes, void *arg)
{
    (void)bytes;
    (void)arg;
    if (!strstr(info->dlpi_name, "libperseus.so"))
        return 0;
    library_start = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz > library_end)
            library_end = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
    return 1;
}

#define FROM_LIBRARY() ((uintptr_t)__builtin_return_address(0) - library_start < library_end - library_start)

void *malloc(size_t bytes)
{
    void *memory = __libc_malloc(bytes);

    allocated += FROM_LIBRARY() ? (long)malloc_usable_size(memory) : 0;
    return memory;
}

void *calloc(size_t count, size_t bytes)
{
    void *memory = __libc_calloc(count, bytes);

    allocated += FROM_LIBRARY() ? (long)malloc_usable_size(memory) : 0;
    return memory;
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    void *memory = __libc_memalign(alignment, bytes);

    allocated += FROM_LIBRARY() ? (long)malloc_usable_size(memory) : 0;
    return memory;
}

void free(void *memory)
{
    allocated -= FROM_LIBRARY() ? (long)malloc_usable_size(memory) : 0;
    __libc_free(memory);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    allocated += FROM_LIBRARY() ? (long)bytes : 0;
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset); /* NOLINT */
}

int munmap(void *at, size_t bytes)
{
    allocated -= FROM_LIBRARY() ? (long)bytes : 0;
    return (int)syscall(SYS_munmap, at, bytes);
}

/* ---- peers ---- */

enum { MAX_OPS = 512, SIGNALS = 1100, ROUNDS = 1000, TURNS = 100, PAYLOAD = 64, MOST_POLLS = 1 << 28 };

static uint64_t notified;

static void on_notify(void *user, uint32_t id, uint64_t bytes)
{
    (void)user;
    (void)id;
    notified += bytes == PAYLOAD;
}

static double read_s(clockid_t clock)
{
    struct timespec at;

    clock_gettime(clock, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static double now_s(void)
{
    return read_s(CLOCK_MONOTONIC);
}

static void stop(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, prs_error_text());
    exit(1);
}

/* KiB of memory that only this process has: not what the software NIC shares with others. */
static long own_kib(void)
{
    FILE *file = fopen("/proc/self/status", "re");
    char line[256];
    long kib = 0;

    while (file && fgets(line, sizeof(line), file))
        if (!strncmp(line, "RssAnon:", 8))
            kib = strtol(line + 8, NULL, 10);
    if (file)
        fclose(file);
    return kib;
}

static int open_files(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;

    while (directory && readdir(directory))
        count++;
    if (directory)
        closedir(directory);
    return count;
}

static void *map(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    if (memory == MAP_FAILED)
        stop("mmap");
    return memory;
}

static void connect_pair(struct prs_fabric *fabric, const struct prs_rail_set *rails, struct prs_listener *listener,
                         const struct prs_handle *handle, const struct prs_peer_options *options,
                         struct prs_peer *peer[2])
{
    struct prs_connector *connector;
    int r[2] = {PRS_AGAIN, PRS_AGAIN};

    if (prs_connect(fabric, rails, handle, options, &connector))
        stop("connect");
    while (r[0] == PRS_AGAIN || r[1] == PRS_AGAIN) {
        if (r[0] == PRS_AGAIN)
            r[0] = prs_connector_step(connector, &peer[0]);
        if (r[1] == PRS_AGAIN)
            r[1] = prs_accept(listener, options, &peer[1]);
        if (r[0] < 0 || r[1] < 0)
            stop("connect");
    }
}

/* The context of a team, rank 0, whose other ranks are the accepting ends of this process: they all have one
 * listener. */
static struct prs_team *open_team(struct prs_fabric *fabric, const struct prs_rail_set *rails, int count,
                                  const struct prs_handle *handle, const char *policy)
{
    struct prs_team_options options = {.fabric = fabric,
                                       .rails = rails,
                                       .world = (uint32_t)count + 1,
                                       .max_ops = MAX_OPS,
                                       .traffic_class = -1,
                                       .policy = policy};
    struct prs_handle *handles = calloc((size_t)count + 1, sizeof(*handles));
    struct prs_team *team;

    if (!handles || prs_listen(fabric, rails, &handles[0], &options.listener))
        stop("listen");
    for (int rank = 1; rank <= count; rank++)
        handles[rank] = *handle;
    options.handles = handles;
    if (prs_team_open(&options, &team))
        stop("team");
    free(handles);
    return team;
}

static void connect_rank(struct prs_team *team, int rank, struct prs_listener *listener,
                         const struct prs_peer_options *options, struct prs_peer *peer[2])
{
    int r[2] = {PRS_AGAIN, PRS_AGAIN};

    while (r[0] == PRS_AGAIN || r[1] == PRS_AGAIN) {
        if (r[0] == PRS_AGAIN)
            r[0] = prs_team_peer(team, 0, (uint32_t)rank, &peer[0]);
        if (r[1] == PRS_AGAIN)
            r[1] = prs_accept(listener, options, &peer[1]);
        if (r[0] < 0 || r[1] < 0 || prs_team_progress(team, 0) < 0)
            stop("connect");
    }
}

/* A function of its own, so that its instructions can be counted (callgrind --toggle-collect=make_round). */
static __attribute__((noinline)) void make_round(struct prs_team *team, struct prs_peer *(*peer)[2], int count)
{
    if (team && prs_team_progress(team, 0) < 0)
        stop("progress");
    for (int i = 0; !team && i < count; i++)
        if (prs_peer_progress(peer[i][0]) < 0 || prs_peer_progress(peer[i][1]) < 0)
            stop("progress");
}

static bool make_progress(struct prs_team *team, struct prs_peer *peer[2])
{
    return (team ? prs_team_progress(team, 0) : prs_peer_progress(peer[0])) >= 0 && prs_peer_progress(peer[1]) >= 0;
}

static uint64_t read_word(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* Make this many puts, each with a signal, or with a notification. */
static __attribute__((noinline)) void use(struct prs_team *team, struct prs_peer *peer[2], struct prs_region *region,
                                          uint64_t *words, const struct prs_keys *keys, bool is_net, int signals)
{
    static struct prs_op put_op[SIGNALS], signal_op[SIGNALS];
    uint64_t wanted = notified + (uint64_t)signals;

    words[0] = 0;
    for (int i = 0; i < signals; i++) {
        struct prs_put put = {.src = region,
                              .src_addr = words + 64,
                              .dst_addr = (uintptr_t)(words + 128),
                              .dst = keys,
                              .len_bytes = PAYLOAD,
                              .notify_id = (uint32_t)i % 512,
                              .group = is_net ? PRS_GROUP_NONE : 0,
                              .flags = is_net ? PRS_PUT_NOTIFY : 0};
        struct prs_signal signal = {.dst_addr = (uintptr_t)words, .dst = keys, .value = 1, .kind = PRS_SIGNAL_ADD};

        while (prs_peer_put(peer[0], &put_op[i], &put) == PRS_BUSY)
            if (!make_progress(team, peer))
                stop("put");
        while (!is_net && prs_peer_signal(peer[0], &signal_op[i], &signal) == PRS_BUSY)
            if (!make_progress(team, peer))
                stop("signal");
        if (i % 100 == 99) /* not more at a time than ids */
            while (is_net ? notified < wanted - (uint64_t)signals + (uint64_t)i + 1
                          : read_word(words) < (uint64_t)i + 1)
                if (!make_progress(team, peer))
                    stop("progress");
    }
    /* Under counted an op may be done before its signal is raised. */
    for (long polls = 0; polls < MOST_POLLS && (put_op[signals - 1].status == PRS_OP_PENDING ||
                                                (!is_net && signal_op[signals - 1].status == PRS_OP_PENDING) ||
                                                (is_net ? notified < wanted : read_word(words) < (uint64_t)signals));
         polls++)
        if (!make_progress(team, peer))
            stop("progress");
    if (is_net ? notified != wanted : words[0] != (uint64_t)signals)
        stop("a signal or a notification is missing, or came twice");
}

/* Each connection sends one message, in turn. A function of its own, for callgrind (--toggle-collect=send_each). */
static __attribute__((noinline)) void send_each(struct prs_team *team, struct prs_peer *(*peer)[2], int count,
                                                struct prs_region *region, uint64_t *words, const struct prs_keys *keys,
                                                bool is_net)
{
    for (int i = 0; i < count; i++)
        use(team, peer[i], region, words, keys, is_net, 1);
}

int main(int argc, char **argv)
{
    int signals = argc >= 5 ? atoi(argv[4]) : SIGNALS, turns = argc == 7 ? atoi(argv[6]) : TURNS;
    int count = argc >= 3 && argc <= 7 ? atoi(argv[1]) : 0;
    bool is_net = count > 0 && !strcmp(argv[2], "net"), is_team = count > 0 && !strncmp(argv[2], "team-", 5);
    struct prs_peer_options options = {.traffic_class = -1, .max_ops = MAX_OPS};
    struct rlimit files = {0};
    struct prs_rail_set rails = {.count = 1};
    struct prs_mem mem = {.len_bytes = 4096, .kind = PRS_MEM_HOST, .flags = PRS_MEM_STRICT, .dmabuf_fd = -1};
    struct prs_peer *(*peer)[2];
    struct prs_team *team = NULL;
    struct prs_listener *listener;
    struct prs_region *region;
    struct prs_fabric *fabric;
    struct prs_handle handle;
    struct prs_keys keys;
    long before, connected, used, allocated_before, allocated_after;
    int files_before, files_after;
    double rounds_s = 1e9, turn_s = 1e9, connect_s, close_s, kib;

    if (argc >= 6)
        rails.count = atoi(argv[5]);
    for (int i = 0; i < rails.count && i < PRS_MAX_RAILS; i++)
        rails.rail[i] = i;
    if (count < 2 || signals < 1 || signals > SIGNALS || rails.count < 1 || rails.count > PRS_MAX_RAILS || turns < 1) {
        fprintf(stderr,
                "usage: peers CONNECTIONS POLICY|net|team-POLICY [MOST_KIB [SIGNALS [RAILS [TURNS]]]]; at least 2 "
                "connections\n");
        return 2;
    }
    options.policy = is_net ? NULL : is_team ? argv[2] + 5 : argv[2];
    options.on_notify = is_net ? on_notify : NULL;
    dl_iterate_phdr(find_library, NULL);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    peer = calloc((size_t)count, sizeof(*peer));
    mem.addr = map(mem.len_bytes);
    if (!peer || prs_fabric_open(NULL, &fabric) || prs_fabric_rails(fabric) < 1 ||
        prs_region_register(fabric, &rails, &mem, &region) || prs_listen(fabric, &rails, &handle, &listener))
        stop("open");
    prs_region_keys(region, &keys);
    if (is_team) {
        team = open_team(fabric, &rails, count, &handle, options.policy);
        connect_rank(team, 1, listener, &options, peer[0]);
    } else {
        connect_pair(fabric, &rails, listener, &handle, &options, peer[0]);
    } /* all that is made only once exists now */
    use(team, peer[0], region, mem.addr, &keys, is_net, signals);
    before = own_kib();
    allocated_before = allocated;
    files_before = open_files();
    connect_s = now_s();
    for (int i = 1; i < count; i++) {
        if (team)
            connect_rank(team, i + 1, listener, &options, peer[i]);
        else
            connect_pair(fabric, &rails, listener, &handle, &options, peer[i]);
    }
    connect_s = now_s() - connect_s;
    connected = own_kib();
    allocated_after = allocated;
    files_after = open_files();
    for (int i = 1; i < count; i++)
        use(team, peer[i], region, mem.addr, &keys, is_net, signals);
    used = own_kib();
    for (int round = 0; round < ROUNDS; round++) { /* the best round, since others share the core */
        double took, began = now_s();

        make_round(team, peer, count);
        took = now_s() - began;
        rounds_s = took < rounds_s ? took : rounds_s;
    }
    for (int turn = 0; turn < turns; turn++) { /* likewise; and long enough that others always use part of the core */
        double took, began = read_s(CLOCK_THREAD_CPUTIME_ID);

        send_each(team, peer, count, region, mem.addr, &keys, is_net);
        took = read_s(CLOCK_THREAD_CPUTIME_ID) - began;
        turn_s = took < turn_s ? took : turn_s;
    }
    kib = (double)(allocated_after - allocated_before) / 1024 / (2 * (count - 1));
    close_s = now_s();
    prs_team_close(team); /* its peers with it */
    for (int i = 0; i < count; i++) {
        if (!team)
            prs_peer_close(peer[i][0]);
        prs_peer_close(peer[i][1]);
    }
    close_s = now_s() - close_s;
    printf("{\"peers\": %d, \"policy\": \"%s\", \"rails\": %d, \"allocated_kib_a_peer\": %.1f, "
           "\"connected_kib_a_peer\": %.1f, "
           "\"used_kib_a_peer\": %.1f, "
           "\"files_a_peer\": %.2f, \"round_us\": %.2f, \"round_ns_a_peer\": %.1f, \"message_ns\": %.0f, "
           "\"connect_us_a_peer\": %.0f, "
           "\"close_us_a_peer\": %.0f}\n",
           2 * count, argv[2], rails.count, kib, (double)(connected - before) / (2 * (count - 1)),
           (double)(used - before) / (2 * (count - 1)), (double)(files_after - files_before) / (2 * (count - 1)),
           rounds_s * 1e6, rounds_s / (team ? count : 2 * count) * 1e9, turn_s / count * 1e9,
           connect_s / (2 * (count - 1)) * 1e6, close_s / (2 * count) * 1e6);
    fflush(stdout);
    if (argc >= 4 && kib > atof(argv[3])) {
        fprintf(stderr, "a peer allocates %.1f KiB, more than %s\n", kib, argv[3]);
        _Exit(1);
    }
    _Exit(0); /* faster than closing everything */
}
