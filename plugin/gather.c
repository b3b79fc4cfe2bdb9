/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/gather.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <perseus/sync.h>
#include "transport/util/clock.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

enum {
    INFO_MAGIC = 0x47524550, /* "PERG" */
    INFO_VERSION = 2,
    REPORT_MS = 60000,
    SPIN_MS = 1000, /* after that, sleep NAP_NS between two polls, so that others can use the core */
    NAP_NS = 100000,
};

static uint64_t slot_offset(const struct gather *g, uint64_t round, uint32_t rank)
{
    return ((round % GATHER_BANKS) * g->ranks + rank) * GATHER_BYTES;
}

static uint64_t flag_offset(const struct gather *g, uint64_t round, uint32_t rank)
{
    return (uint64_t)GATHER_BANKS * g->ranks * GATHER_BYTES + ((round % GATHER_BANKS) * g->ranks + rank) * 8;
}

int gather_init(struct gather *g, struct prs_fabric *fabric, const struct prs_rail_set *rails, uint32_t rank,
                uint32_t ranks, uint32_t timeout_ms, struct gather_info *info)
{
    size_t bytes = (size_t)GATHER_BANKS * ranks * (GATHER_BYTES + 8);
    struct prs_mem mem = {.kind = PRS_MEM_HOST, .dmabuf_fd = -1, .flags = PRS_MEM_STRICT};
    int r;

    memset(g, 0, sizeof(*g));
    g->rank = rank;
    g->ranks = ranks;
    g->timeout_ms = timeout_ms;
    g->report_ms = REPORT_MS;
    /* Whole pages of our own, whatever their size: registration exposes all of them to the other ranks. */
    g->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g->memory == MAP_FAILED) {
        g->memory = NULL;
        return prs_fail(-ENOMEM, "allgather among %u ranks: no memory", ranks);
    }
    g->bytes = bytes;
    mem.addr = g->memory;
    mem.len_bytes = bytes;
    r = prs_region_register(fabric, rails, &mem, &g->region);
    if (r < 0) {
        munmap(g->memory, bytes);
        g->memory = NULL;
        return r;
    }
    pthread_mutex_init(&g->lock, NULL);
    *info = (struct gather_info){.magic = INFO_MAGIC, .version = INFO_VERSION, .base = (uintptr_t)g->memory};
    prs_region_keys(g->region, &info->keys);
    return 0;
}

void gather_fini(struct gather *g)
{
    if (!g->memory)
        return;
    prs_region_release(g->region);
    munmap(g->memory, g->bytes);
    pthread_mutex_destroy(&g->lock);
    memset(g, 0, sizeof(*g));
}

int gather_connect(struct gather *g, struct prs_team *team)
{
    struct gather_info info = {0};
    const void *sent;
    int r;

    g->team = team;
    if (g->ranks == 1)
        return 0;
    r = prs_team_connect_ring(team, GATHER_CONTEXT);
    if (r < 0)
        return r;
    sent = prs_team_rank_info(team, GATHER_CONTEXT, (g->rank + 1) % g->ranks);
    if (sent)
        memcpy(&info, sent, sizeof(info));
    if (info.magic != INFO_MAGIC || info.version != INFO_VERSION)
        return prs_fail(-EPROTO,
                        "allgather: rank %u does not use version %d of it: is it another release of the plugin?",
                        (g->rank + 1) % g->ranks, INFO_VERSION);
    g->right_base = info.base;
    g->right_keys = info.keys;
    return 0;
}

/* What a wait is for, for error and log texts. */
struct wait {
    const char *what;
    uint32_t rank;
    uint64_t began_ms, reported_ms;
};

/* Called when a poll has found nothing. Return 0 to poll again, or -ETIMEDOUT. */
static int wait_more(const struct gather *g, struct wait *wait)
{
    uint64_t now = prs_clock_ms();

    if (now - wait->began_ms > g->timeout_ms)
        return prs_fail(-ETIMEDOUT,
                        "allgather %llu: rank %u waited %u ms for %s rank %u (PERSEUS_GIN_TIMEOUT_MS): all ranks must "
                        "register a window; has that rank not done so?",
                        (unsigned long long)g->round, g->rank, g->timeout_ms, wait->what, wait->rank);
    if (now - wait->reported_ms > g->report_ms) {
        PRS_WARN("allgather %llu: rank %u has waited %llu ms for %s rank %u, and will wait for %u ms at most",
                 (unsigned long long)g->round, g->rank, (unsigned long long)(now - wait->began_ms), wait->what,
                 wait->rank, g->timeout_ms);
        wait->reported_ms = now;
    }
    if (now - wait->began_ms > SPIN_MS)
        nanosleep(&(struct timespec){0, NAP_NS}, NULL);
    else
        sched_yield();
    return 0;
}

static bool has_flag(const struct gather *g, uint32_t rank)
{
    const uint64_t *flag = (const uint64_t *)(const void *)(g->memory + flag_offset(g, g->round, rank));

    /* [gather-flag] The slot is read after the flag. Pairs with the left neighbour's signal in pass_on(). */
    return prs_load_acquire_sys(flag) == g->round;
}

/* Progress until our ops are done and the left neighbour has written the flag of `rank`. */
static int wait_for(struct gather *g, struct prs_peer *left, uint32_t rank)
{
    struct wait wait = {"the data of", rank, prs_clock_ms(), prs_clock_ms()};

    while (!has_flag(g, rank) || g->data.status == PRS_OP_PENDING || g->flag.status == PRS_OP_PENDING) {
        int r = prs_team_progress(g->team, GATHER_CONTEXT);

        if (r > 0)
            continue;
        if (!r && !has_flag(g, rank))
            r = prs_peer_check_remote(left); /* if it has closed, nothing will come */
        if (!r)
            r = wait_more(g, &wait);
        if (r < 0)
            return r;
    }
    return g->data.status < 0 ? g->data.status : g->flag.status;
}

/* Send one rank's slot, then its flag, to the right neighbour. Return 0 or -errno. */
static int pass_on(struct gather *g, struct prs_peer *peer, uint32_t rank)
{
    struct prs_put put = {
        .src = g->region,
        .src_addr = g->memory + slot_offset(g, g->round, rank),
        .dst_addr = g->right_base + slot_offset(g, g->round, rank),
        .dst = &g->right_keys,
        .len_bytes = GATHER_BYTES,
    };
    struct prs_signal signal = {
        /* [gather-flag] visible only after the put. Pairs with has_flag(). */
        .dst_addr = g->right_base + flag_offset(g, g->round, rank),
        .dst = &g->right_keys,
        .value = g->round,
        .kind = PRS_SIGNAL_SET,
    };
    struct wait wait = {"room on the way to", (g->rank + 1) % g->ranks, prs_clock_ms(), prs_clock_ms()};
    bool posted = false;
    int r;

    g->data.status = g->flag.status = 0;
    for (;;) {
        r = posted ? 0 : prs_peer_put(peer, &g->data, &put);
        posted = r == 0;
        if (posted)
            r = prs_peer_signal(peer, &g->flag, &signal);
        if (r <= 0)
            return r;
        /* No room: under `counted` a late neighbour may not have returned the credits for the steps of many ranks. */
        r = prs_team_progress(g->team, GATHER_CONTEXT);
        if (r >= 0)
            r = wait_more(g, &wait);
        if (r < 0)
            return r;
    }
}

static int run_locked(struct gather *g, const void *mine, uint32_t bytes, uint8_t *all)
{
    struct prs_peer *right, *left;
    int r = 0;

    g->round++;
    memcpy(g->memory + slot_offset(g, g->round, g->rank), mine, bytes);
    if (g->ranks > 1) /* both were connected in gather_connect() */
        r = prs_team_peer(g->team, GATHER_CONTEXT, (g->rank + 1) % g->ranks, &right);
    if (g->ranks > 1 && !r)
        r = prs_team_peer(g->team, GATHER_CONTEXT, (g->rank + g->ranks - 1) % g->ranks, &left);
    for (uint32_t step = 0; step + 1 < g->ranks && !r; step++) {
        uint32_t give = (g->rank + g->ranks - step) % g->ranks, take = (give + g->ranks - 1) % g->ranks;

        r = pass_on(g, right, give);
        if (!r)
            r = wait_for(g, left, take);
    }
    if (!r && all)
        memcpy(all, g->memory + slot_offset(g, g->round, 0), (size_t)g->ranks * GATHER_BYTES);
    return r;
}

int gather_run(struct gather *g, const void *mine, uint32_t bytes, uint8_t *all)
{
    int r;

    if (bytes > GATHER_BYTES)
        return prs_fail(-EINVAL, "allgather of %u bytes from each rank: at most %d are possible", bytes, GATHER_BYTES);
    pthread_mutex_lock(&g->lock);
    if (g->error)
        r = prs_error_repeat(g->error,
                             "allgather: a previous one failed, so the ranks are no longer in the same round");
    else
        r = g->error = run_locked(g, mine, bytes, all);
    pthread_mutex_unlock(&g->lock);
    return r;
}
