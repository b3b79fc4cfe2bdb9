/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/raise.h"

#include <errno.h>
#include <string.h>

#include "transport/peer/fail.h"
#include "transport/peer/peer.h"
#include "transport/peer/signal_word.h"
#include "transport/util/clock.h"

void prs_raise_drop(struct prs_raise *raise)
{
    prs_claim_drop(&raise->claim);
    raise->stage = PRS_RAISE_IDLE;
    raise->record = NULL;
}

/* ---- host memory ---- */

struct word {
    const struct prs_record *record;
    bool may_store; /* no earlier signal is on its way through our NIC */
    bool stored;
    bool on_device;
    uint64_t key; /* the whole key of its memory */
};

/* prs_mr_use_fn: the registration, and with it the memory, stays until this returns. */
static void raise_on_host(void *arg, const struct prs_mr *mr)
{
    struct word *word = arg;
    const struct prs_record *record = word->record;
    uint64_t *at = (uint64_t *)(uintptr_t)record->addr;

    word->key = mr->registered.remote_key;
    word->on_device = mr->key.kind != PRS_MEM_HOST;
    if (word->on_device || !word->may_store)
        return;
    word->stored = true;
    /* [raise] This thread has polled the completions of the puts that the signal follows, so their bytes are in memory.
     * The release makes them visible to every reader that acquires the word. */
    if (record->kind == PRS_RECORD_ADD)
        __atomic_fetch_add(at, record->value, __ATOMIC_RELEASE);
    else
        __atomic_store_n(at, record->value, __ATOMIC_RELEASE);
}

/* ---- device memory ---- */

static int post(struct prs_peer *peer, struct prs_raise *raise, uint8_t opcode, uint64_t value, uint64_t addr,
                uint64_t key)
{
    struct prs_wr wr = {.local_addr = (uintptr_t)raise->landing,
                        .local_key = raise->landing_key,
                        .remote_addr = addr,
                        .remote_key = key,
                        .value = value,
                        .len_bytes = sizeof(value),
                        .opcode = opcode};

    return prs_order_self(&peer->order, &raise->op, &wr) ? PRS_AGAIN : 0;
}

/* Another peer of this process has claimed the word, until its next progress. */
static int await_claim(struct prs_peer *peer, struct prs_raise *raise, const struct prs_record *record)
{
    uint32_t limit_ms = peer->fabric->config.timeout_ms;
    uint64_t now_ns = prs_clock_ns();

    if (!raise->refused_ns)
        raise->refused_ns = now_ns;
    if (now_ns - raise->refused_ns > limit_ms * 1000000ull)
        return prs_peer_fail(peer, -ETIMEDOUT,
                             "a signal waited %u ms for another peer of this process that is writing the same word of "
                             "device memory, at %#llx: does nobody progress that peer?",
                             limit_ms, (unsigned long long)record->addr);
    peer->idle_polls = PRS_PEER_IDLE_POLLS; /* retry at the next progress, even if nothing arrives */
    return PRS_AGAIN;
}

static int start_on_device(struct prs_peer *peer, struct prs_raise *raise, const struct prs_record *record,
                           uint64_t key)
{
    bool add = record->kind == PRS_RECORD_ADD;

    if (add && !peer->exclusive_adds)
        return prs_peer_fail(
            peer, -EOPNOTSUPP,
            "the peer adds to a word in device memory at %#llx, where others may add as well: %s has no "
            "atomics, so one of them could be lost; use PRS_SIGNAL_SET, or keep the word in host "
            "memory",
            (unsigned long long)record->addr, peer->link[0]->rail->info.name);
    if (peer->order.path[0].probe != PRS_PROBE_WORKS)
        return prs_peer_fail(peer, -ENETDOWN,
                             "%s, which has no atomics and raises the signals that arrive here in device memory, is "
                             "lost: %s",
                             peer->link[0]->rail->info.name, peer->failover->path[0].why);
    if (!prs_claim_take(&raise->claim, record->addr))
        return await_claim(peer, raise, record);
    raise->refused_ns = 0;
    raise->stage = add ? PRS_RAISE_READING : PRS_RAISE_WRITING;
    if (post(peer, raise, add ? PRS_WR_READ : PRS_WR_WRITE, record->value, record->addr, key)) {
        prs_raise_drop(raise);
        return PRS_AGAIN; /* no room: retried after the next completion */
    }
    if (!add)
        return 0;
    raise->record = record;
    raise->key = key;
    return PRS_AGAIN;
}

static int fail_on_other_rail(struct prs_peer *peer, uint32_t path, uint64_t addr)
{
    return prs_peer_fail(peer, -ENETDOWN,
                         "a rail is lost, and a signal goes to device memory at %#llx that is not registered on %s",
                         (unsigned long long)addr, peer->link[path]->rail->domain->name);
}

/* The NIC has atomics, so it writes the word itself. Neither side may have given up its rail. */
static int raise_by_nic(struct prs_peer *peer, const struct prs_record *record, uint64_t key)
{
    uint32_t path = peer->order.self_path;
    struct prs_domain *domain = peer->link[path]->rail->domain;
    struct prs_wr wr = {.remote_addr = record->addr,
                        .remote_key = key,
                        .value = record->value,
                        .len_bytes = sizeof(record->value),
                        .opcode = record->kind == PRS_RECORD_ADD ? PRS_WR_ADD : PRS_WR_WRITE};

    if (prs_peer_lost_path(peer, path))
        return PRS_AGAIN; /* the last requests of that rail are still in flight */
    if (path && !prs_mr_cache_device_key(&domain->mrs, record->addr, sizeof(record->value), &wr.remote_key))
        return fail_on_other_rail(peer, path, record->addr);
    return prs_order_self(&peer->order, NULL, &wr) ? PRS_AGAIN : 0;
}

/* Sets that were in flight on the lost rail are repeated over this path, so give them the keys of this path's rail. */
static int show_keys(struct prs_peer *peer, uint32_t path)
{
    struct prs_domain *domain = peer->link[path]->rail->domain;
    struct prs_wr *wr;
    uint32_t at = 0;

    while ((wr = prs_order_self_left(&peer->order, &at)))
        if (!prs_mr_cache_device_key(&domain->mrs, wr->remote_addr, sizeof(wr->value), &wr->remote_key))
            return fail_on_other_rail(peer, path, wr->remote_addr);
    return 0;
}

int prs_raise_over_living_rail(struct prs_peer *peer)
{
    struct prs_records *records = peer->records;
    uint32_t path = 0;
    int r;

    while (path < peer->path_count && (prs_peer_lost_path(peer, path) || !peer->link[path]->rail->domain->adds))
        path++;
    if (path == peer->path_count || path == peer->order.self_path)
        return 0;
    r = show_keys(peer, path);
    if (r || prs_order_self_over(&peer->order, path))
        return r;
    /* Another rail raises from now on, so its writes no longer follow the data of the previous rail by themselves. */
    records->unordered++;
    /* not NULL, since there are several paths */
    memset(records->ready_at, 0, PRS_RECORDS * sizeof(*records->ready_at));
    return 0;
}

void prs_raise_finish(struct prs_raise *raise)
{
    if (raise->stage == PRS_RAISE_WRITING && raise->op.status != PRS_OP_PENDING)
        prs_raise_drop(raise);
}

int prs_raise_signal(struct prs_peer *peer, const struct prs_record *record)
{
    struct prs_raise *raise = &peer->records->raise;
    bool by_nic = peer->link[0]->rail->domain->adds;
    struct word word = {.record = record, .may_store = !by_nic || prs_order_self_idle(&peer->order)};
    int r;

    if (raise->stage != PRS_RAISE_IDLE && raise->op.status == PRS_OP_PENDING)
        return PRS_AGAIN;
    prs_raise_finish(raise);
    /* nobody has added to the word since the read, because this peer claims it */
    if (raise->stage == PRS_RAISE_READING) {
        if (post(peer, raise, PRS_WR_WRITE, *raise->landing + record->value, record->addr, raise->key))
            return PRS_AGAIN;
        raise->stage = PRS_RAISE_WRITING;
        raise->record = NULL;
        return 0;
    }
    r = prs_signal_word_use(peer, record, raise_on_host, &word);
    if (r)
        return r;
    if (!word.on_device)
        return word.stored ? 0 : PRS_AGAIN;
    return by_nic ? raise_by_nic(peer, record, word.key) : start_on_device(peer, raise, record, word.key);
}
