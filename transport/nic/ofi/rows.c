/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/rows.h"

#include <rdma/fi_errno.h>
#include <stdlib.h>

#include "transport/nic/ofi/device.h"
#include "transport/nic/ofi/link.h"

static_assert(sizeof(struct prs_ofi_row) == 32, "part of the wire format");
static_assert(PRS_OFI_TABLE_ROWS <= 1 << PRS_OFI_ROW_BITS, "a key names each row");

static uint64_t check_of(const struct prs_ofi_row *row)
{
    uint64_t sum = row->told;

    sum = (sum ^ row->start) * 0x9e3779b97f4a7c15ull;
    sum = (sum ^ sum >> 29 ^ row->key) * 0xbf58476d1ce4e5b9ull;
    return sum ^ sum >> 32;
}

static struct prs_ofi_row *row_at(const struct prs_ofi_rows *rows, uint32_t number)
{
    return (struct prs_ofi_row *)rows->table.addr + number;
}

static uint32_t number_of(uint64_t told)
{
    return (uint32_t)(told & ((1u << PRS_OFI_ROW_BITS) - 1));
}

/* ---- the table of this side ---- */

uint64_t prs_ofi_rows_add(struct prs_ofi_device *device, uint32_t number, uint64_t start, uint64_t key)
{
    struct prs_ofi_row row = {.start = start, .key = key};
    struct prs_ofi_row *at;

    if (number >= PRS_OFI_TABLE_ROWS)
        return 0;
    row.told = __atomic_add_fetch(&device->rows.uses, 1, __ATOMIC_RELAXED) << PRS_OFI_ROW_BITS | number;
    row.check = check_of(&row);
    at = row_at(&device->rows, number);
    at->start = row.start;
    at->key = row.key;
    at->check = row.check;
    __atomic_store_n(&at->told, row.told, __ATOMIC_RELEASE);
    return row.told;
}

void prs_ofi_rows_drop(struct prs_ofi_device *device, uint32_t number)
{
    if (number < PRS_OFI_TABLE_ROWS)
        __atomic_store_n(&row_at(&device->rows, number)->told, 0, __ATOMIC_RELAXED);
}

/* ---- rows of the other side ---- */

static struct prs_ofi_known *known_at(struct prs_ofi_link *link, uint32_t number)
{
    if (number >= link->known_room) {
        uint32_t room = (number + 64) & ~63u;
        struct prs_ofi_known *known = realloc(link->known, room * sizeof(*known));

        if (!known)
            return NULL;
        for (uint32_t i = link->known_room; i < room; i++)
            known[i] = (struct prs_ofi_known){0};
        link->known = known;
        link->known_room = room;
    }
    return &link->known[number];
}

/* Return PRS_OFI_ROW_READS: none is free. */
static uint32_t take_slot(struct prs_ofi_rows *rows)
{
    uint64_t busy = __atomic_load_n(&rows->busy, __ATOMIC_RELAXED);

    while (~busy)
        if (__atomic_compare_exchange_n(&rows->busy, &busy, busy | (busy + 1), false, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED))
            return (uint32_t)__builtin_ctzll(~busy);
    return PRS_OFI_ROW_READS;
}

static void give_slot(struct prs_ofi_rows *rows, size_t at)
{
    rows->request[at].link = NULL;
    __atomic_fetch_and(&rows->busy, ~(1ull << at), __ATOMIC_RELEASE);
}

/* Return 0 or a negative error of libfabric. */
static int read_row(struct prs_ofi_link *link, uint64_t told)
{
    struct prs_ofi_device *device = link->endpoint->device;
    struct prs_ofi_rows *rows = &device->rows;
    uint32_t at = take_slot(rows);
    struct prs_ofi_request *request = &rows->request[at];
    size_t bytes = sizeof(struct prs_ofi_row);
    void *descriptor = prs_ofi_descriptor(device, prs_own_memory_local_key(&rows->slots, 0));
    int r;

    if (at == PRS_OFI_ROW_READS)
        return -FI_EAGAIN;
    *request = (struct prs_ofi_request){.link = link};
    rows->asked[at] = told;
    r = (int)fi_read(link->endpoint->ep, (struct prs_ofi_row *)rows->slots.addr + at, bytes, descriptor, link->to,
                     number_of(told) * bytes, link->remote.table_key, &request->space);
    if (r)
        give_slot(rows, at);
    else
        link->in_flight++;
    return r;
}

int prs_ofi_rows_aim(struct prs_ofi_link *link, bool loopback, const struct prs_wr *wr, struct fi_rma_iov *out)
{
    uint32_t number = number_of(wr->remote_key);
    struct prs_ofi_known *known;
    int r;

    if (number >= PRS_OFI_TABLE_ROWS)
        return -FI_ENOKEY;
    if (loopback) {
        const struct prs_ofi_row *row = row_at(&link->endpoint->device->rows, number);

        *out = (struct fi_rma_iov){wr->remote_addr - row->start, wr->len_bytes, row->key};
        return row->told == wr->remote_key ? 0 : -FI_ENOKEY;
    }
    known = known_at(link, number);
    if (!known)
        return -FI_ENOMEM;
    if (known->told != wr->remote_key) {
        if (known->asked)
            return -FI_EAGAIN;
        r = read_row(link, wr->remote_key);
        known->asked = !r;
        return r ? r : -FI_EAGAIN;
    }
    *out = (struct fi_rma_iov){wr->remote_addr - known->start, wr->len_bytes, known->key};
    return known->wrong ? -FI_ENOKEY : 0;
}

void prs_ofi_rows_arrive(struct prs_ofi_endpoint *endpoint, struct prs_ofi_request *request, bool read)
{
    struct prs_ofi_rows *rows = &endpoint->device->rows;
    struct prs_ofi_known *known;
    struct prs_ofi_row row;
    size_t at = (size_t)(request - rows->request);

    if (request < rows->request || at >= PRS_OFI_ROW_READS)
        return;
    row = ((struct prs_ofi_row *)rows->slots.addr)[at];
    known = &request->link->known[number_of(rows->asked[at])];
    *known = (struct prs_ofi_known){.told = rows->asked[at], .start = row.start, .key = row.key};
    known->wrong = !read || row.told != known->told || row.check != check_of(&row);
    give_slot(rows, at);
}

void prs_ofi_rows_leave(struct prs_ofi_link *link)
{
    struct prs_ofi_rows *rows = &link->endpoint->device->rows;

    for (size_t at = 0; rows->used && at < PRS_OFI_ROW_READS; at++)
        if (__atomic_load_n(&rows->request[at].link, __ATOMIC_RELAXED) == link)
            give_slot(rows, at);
}
