/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/records.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "transport/peer/fail.h"
#include "transport/peer/links.h"
#include "transport/peer/peer.h"
#include "transport/peer/signal_word.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"

enum {
    RING_BYTES = PRS_RECORDS * (int)sizeof(struct prs_record),
    LANDING_AT = RING_BYTES + 64, /* not next to the word for credits, which the peer writes */
    MEMORY_BYTES = RING_BYTES + 128,
};

static void *byte_at(const struct prs_records *records, size_t offset)
{
    return (uint8_t *)records->memory.addr + offset;
}

int prs_records_open(struct prs_peer *peer)
{
    struct prs_records *records;
    int r;

    if (peer->records)
        return 0;
    records = malloc(sizeof(*records));
    if (!records)
        return prs_fail(-ENOMEM, "no memory for signal records");
    memset(records, 0, offsetof(struct prs_records, counts));
    prs_counts_init(&records->counts);
    peer->records = records;                            /* from here on prs_records_close() cleans up */
    if (peer->path_count > 1 || !peer->nic->in_order) { /* arrivals may come in any order */
        records->ready_at = calloc(PRS_RECORDS, sizeof(*records->ready_at));
        if (!records->ready_at)
            return prs_fail(-ENOMEM, "no memory for signal records");
    }
    r = prs_own_memory_init(&records->memory, MEMORY_BYTES, "signal records");
    if (r)
        return r;
    memset(byte_at(records, RING_BYTES), 0, MEMORY_BYTES - RING_BYTES); /* the ring is written before it is read */
    for (uint32_t i = 0; i < peer->path_count && !r; i++)
        r = prs_own_memory_register(&records->memory, i, peer->link[i]->rail->domain, PRS_ACCESS_WRITTEN);
    if (r)
        return r;
    records->raise.landing = (volatile uint64_t *)byte_at(records, LANDING_AT);
    records->raise.landing_key = prs_own_memory_local_key(&records->memory, 0);
    return 0;
}

void prs_records_close(struct prs_peer *peer)
{
    struct prs_records *records = peer->records;

    if (!records)
        return;
    prs_raise_drop(&records->raise);
    prs_own_memory_fini(&records->memory);
    free(records->ready_at);
    free(records);
    peer->records = NULL;
}

void prs_records_window(const struct prs_peer *peer, struct prs_wire_window *ring, struct prs_wire_window *credit)
{
    const struct prs_records *records = peer->records;

    ring->addr = (uintptr_t)records->memory.addr;
    credit->addr = ring->addr + RING_BYTES;
    for (uint32_t i = 0; i < peer->path_count; i++)
        ring->key[i] = credit->key[i] = prs_own_memory_remote_key(&records->memory, i);
}

int prs_records_arrive(struct prs_peer *peer, const struct prs_imm *imm, uint32_t path)
{
    struct prs_records *records = peer->records;
    struct prs_record record;

    if (!records || !records->credit.addr)
        return -EPROTO; /* the peer did not announce records */
    if (path != peer->order.self_path || !peer->nic->in_order)
        records->unordered++;
    if (imm->bare && imm->kind > PRS_BARE_RECORD)
        return -EPROTO;
    if (!imm->bare || imm->kind == PRS_BARE_COUNT)
        return prs_counts_arrive(&records->counts, imm->tag, imm->bare ? 1 : imm->run);
    if (imm->tag >= PRS_RECORDS)
        return -EPROTO; /* no such slot */
    memcpy(&record, byte_at(records, imm->tag * sizeof(record)), sizeof(record));
    return prs_counts_record(&records->counts, imm->tag, &record);
}

static bool raises(const struct prs_record *record)
{
    return record->kind == PRS_RECORD_SET || record->kind == PRS_RECORD_ADD;
}

static int start_flush(struct prs_peer *peer, uint64_t addr, uint64_t first_key)
{
    struct prs_records *records = peer->records;
    uint64_t rkey[PRS_MAX_RAILS] = {first_key};

    for (uint32_t i = 1; i < peer->path_count; i++) {
        struct prs_domain *domain = peer->link[i]->rail->domain;

        if (!prs_mr_cache_device_key(&domain->mrs, addr, sizeof(uint64_t), &rkey[i]))
            return prs_peer_fail(
                peer, -EINVAL,
                "a signal goes to device memory at %#llx that is not registered on %s, over which data "
                "arrived: it cannot be ordered after that data",
                (unsigned long long)addr, domain->name);
    }
    if (prs_links_probe(peer, &records->flush, addr, rkey))
        return PRS_AGAIN; /* no room: retried after the next completion */
    records->flush_covers = records->unordered;
    records->flushing = true;
    records->flushes++;
    return PRS_AGAIN;
}

/* Before a signal in device memory, make data visible that arrived over other rails. Their completions are in host
 * memory and say nothing about bytes on their way to the device; only bytes of the rail that writes the signal are sure
 * to precede it, if that rail keeps order. So each other rail first reads from the device: a read does not overtake
 * earlier writes. Host memory needs no flush, since data and completions take the same path. Return 0 (the signal may
 * be raised), PRS_AGAIN or -errno (the peer has failed). */
static int flush_before(struct prs_peer *peer, const struct prs_record *record)
{
    struct prs_records *records = peer->records;
    uint64_t *ready_at, key;

    if (!records->unordered)
        return 0;
    ready_at = &records->ready_at[record->number % PRS_RECORDS];

    if (records->flushing && records->flush.status != PRS_OP_PENDING) {
        records->flushed = records->flush_covers;
        records->flushing = false;
    }
    if (!*ready_at)
        *ready_at = records->unordered + 1;
    if (records->flushed + 1 >= *ready_at || !raises(record) ||
        !prs_mr_cache_device_key(&peer->link[0]->rail->domain->mrs, record->addr, sizeof(uint64_t), &key))
        return 0;
    return records->flushing ? PRS_AGAIN : start_flush(peer, record->addr, key);
}

/* The peer asks whether all signals are raised. Answer once our NIC has completed its writes for the signals before.
 * Return 0 or PRS_AGAIN: retried after the next completion. */
static int answer_ask(struct prs_peer *peer)
{
    if (!prs_order_self_idle(&peer->order))
        return PRS_AGAIN;
    peer->records->credits_wanted = true;
    return 0;
}

/* Return 0, PRS_BUSY or PRS_AGAIN (try later), or -errno (the peer has failed). */
static int raise_one(struct prs_peer *peer, const struct prs_record *record)
{
    const struct prs_domain *domain = peer->link[0]->rail->domain;
    struct prs_wr wr = {.remote_addr = record->addr,
                        .remote_key = record->key,
                        .value = record->value,
                        .len_bytes = sizeof(record->value),
                        .opcode = record->kind == PRS_RECORD_ADD ? PRS_WR_ADD : PRS_WR_WRITE};

    if (!raises(record))
        return record->kind == PRS_RECORD_ASK ? answer_ask(peer) : 0;
    /* Where rails may be lost, the CPU raises as many signals as possible: an atomic that is in flight when its rail is
     * lost cannot be repeated. */
    if (!domain->adds || peer->failover)
        return prs_raise_signal(peer, record);
    if (unlikely(prs_mr_cache_is_wide(&domain->mrs))) {
        int r = prs_signal_word_key(peer, record, &wr.remote_key);

        if (r)
            return r;
    }
    return prs_order_self(&peer->order, NULL, &wr);
}

int prs_records_raise(struct prs_peer *peer)
{
    struct prs_records *records = peer->records;
    struct prs_counts *counts = &records->counts;
    const struct prs_record *record;
    int r;

    prs_raise_finish(&records->raise);
    r = unlikely(peer->failover) ? prs_raise_over_living_rail(peer) : 0; /* sets may wait even if no record does */
    if (unlikely(r))
        return r;
    while (counts->waiting) {
        record = records->raise.record;
        if (!record) {
            r = prs_counts_next(counts, &record);
            if (r)
                return prs_peer_fail(peer, r, "more puts of a group have arrived than its signal announced");
            r = record ? flush_before(peer, record) : PRS_AGAIN;
        }
        if (!r)
            r = raise_one(peer, record);
        if (r < 0)
            return r;
        if (r)
            break; /* not ready yet, or no room: the next progress tries again */
        if (records->ready_at)
            records->ready_at[record->number % PRS_RECORDS] = 0;
        prs_counts_raised(counts, record);
    }
    if ((records->credits_wanted || counts->raised - records->credits_sent >= PRS_RECORD_CREDIT) &&
        prs_order_word(&peer->order, records->credit.addr, records->credit.key, counts->raised) == 0) {
        records->credits_sent = counts->raised;
        records->credits_wanted = false;
    }
    return 0;
}

bool prs_records_busy(const struct prs_peer *peer)
{
    const struct prs_records *records = peer->records;
    const struct prs_record *record;

    if (!records || peer->error)
        return false;
    return records->raise.stage != PRS_RAISE_IDLE || !prs_order_self_idle(&peer->order) ||
           (prs_counts_next(&records->counts, &record) == 0 && record);
}
