/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/records.h"

#include "transport/peer.h"
#include "util/error.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    RING_BYTES = PRS_RECORDS * (int)sizeof(struct prs_record),
    MEMORY_BYTES = RING_BYTES + 4096,
};

int prs_records_open(struct prs_peer *peer)
{
    struct prs_records *records;

    if (peer->records)
        return 0;
    records = calloc(1, sizeof *records);
    if (!records)
        return prs_fail(-ENOMEM, "no memory for signal records");
    peer->records = records; /* from here on prs_records_close() undoes what has been done */
    records->memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (records->memory == MAP_FAILED) {
        records->memory = NULL;
        return prs_fail(-errno, "mmap of %d bytes: %s", MEMORY_BYTES, strerror(errno));
    }
    for (uint32_t i = 0; i < peer->path_count; i++) {
        const struct prs_rail *rail = &peer->fabric->rail[peer->path[i].local_rail];

        /* Without relaxed ordering: a record must be there when its completion is. */
        records->mr[i] = prs_verbs.reg_mr(rail->domain->pd, records->memory, MEMORY_BYTES,
                                          IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        if (!records->mr[i])
            return prs_fail(errno ? -errno : -ENOMEM, "%s: cannot register %d bytes for signal records: %s",
                            rail->info.name, MEMORY_BYTES, strerror(errno));
    }
    return 0;
}

void prs_records_close(struct prs_peer *peer)
{
    struct prs_records *records = peer->records;

    if (!records)
        return;
    for (uint32_t i = 0; i < peer->path_count; i++)
        if (records->mr[i])
            prs_verbs.dereg_mr(records->mr[i]);
    if (records->memory)
        munmap(records->memory, MEMORY_BYTES);
    free(records);
    peer->records = NULL;
}

void prs_records_window(const struct prs_peer *peer, struct prs_wire_window *ring, struct prs_wire_window *credit)
{
    const struct prs_records *records = peer->records;

    ring->addr = (uintptr_t)records->memory;
    credit->addr = (uintptr_t)records->memory + RING_BYTES;
    for (uint32_t i = 0; i < peer->path_count; i++)
        ring->key[i] = credit->key[i] = records->mr[i]->rkey;
}

int prs_records_arrive(struct prs_peer *peer, const struct prs_imm *imm)
{
    struct prs_records *records = peer->records;
    struct prs_record record;

    if (!records || !records->credit.addr)
        return -EPROTO; /* the peer never said that it counts */
    if (!imm->bare || imm->kind == PRS_BARE_COUNT)
        return prs_counts_arrive(&records->counts, imm->tag, imm->bare ? 1 : imm->run);
    memcpy(&record, records->memory + imm->tag * sizeof record, sizeof record);
    return prs_counts_record(&records->counts, imm->tag, &record);
}

static int raise_one(struct prs_peer *peer, const struct prs_record *record)
{
    struct prs_wr wr = {.remote_addr = record->addr,
                        .remote_key = record->key,
                        .value = record->value,
                        .len_bytes = sizeof record->value,
                        .opcode = record->kind == PRS_RECORD_ADD ? PRS_WR_ADD : PRS_WR_WRITE};

    return record->kind == PRS_RECORD_CLOSE ? 0 : prs_order_self(&peer->order, &wr);
}

int prs_records_raise(struct prs_peer *peer)
{
    struct prs_records *records = peer->records;
    struct prs_counts *counts = &records->counts;
    const struct prs_record *record;

    while (counts->waiting) {
        int r = prs_counts_next(counts, &record);

        if (r)
            return prs_peer_fail(peer, r, "more puts of a group have come than its signal announced");
        if (!record || raise_one(peer, record))
            break; /* nothing may leave yet, or no room: the next progress comes by here again */
        prs_counts_raised(counts, record);
    }
    if (counts->raised - records->credits_sent >= PRS_RECORD_CREDIT &&
        prs_order_word(&peer->order, records->credit.addr, records->credit.key[0], counts->raised) == 0)
        records->credits_sent = counts->raised;
    return 0;
}
