/* SPDX-License-Identifier: Apache-2.0 */
/* Rows on their way: warp 3 pushes this rank's tokens to the others, once each; warp 2 puts what is here in place,
 * expert by expert. One thread each, one buffer each; neither waits for the product, and pushing waits for nothing, so
 * that no rank can wait in a circle: push -> put in place -> load -> multiply -> store.
 *
 * Between nodes (not built): push_row() and signal_row() are the seam. For a peer on another node the row becomes a
 * prs_put of perseus/device.cuh to the peer's staging, and the flags of a group of rows (a destination, or a piece of
 * what it gets) one signal; the waiting side then reads the group's word in place of the row's. */
#ifndef PERSEUS_FUSED_ROWS_CUH
#define PERSEUS_FUSED_ROWS_CUH

#include "fused/cta.cuh"
#include "fused/moe.h"

/* A buffer in shared memory and the barrier that says it is full. */
struct row_buffer {
    uint8_t *at;
    uint64_t *full;
    uint32_t phase;
};

/* Rows travel in pieces that fit the buffer, all but the last of the same length. */
PRS_DEVICE uint32_t piece_bytes(uint32_t row_bytes)
{
    uint32_t pieces = prs_ceil_div(row_bytes, PRS_PUSH_BYTES);
    return (prs_ceil_div(row_bytes, pieces) + 15) / 16 * 16;
}

/* Starts to fill the buffer, which the stores before have read. */
PRS_DEVICE void fetch_piece(struct row_buffer *b, const uint8_t *from, uint32_t bytes)
{
    bulk_wait_read<0>();
    mbarrier_expect(b->full, bytes);
    bulk_load(b->at, from, bytes, b->full);
}

PRS_DEVICE void await_piece(struct row_buffer *b)
{
    mbarrier_wait(b->full, b->phase);
    b->phase ^= 1;
}

/* ---- warp 3 --------------------------------------------------------------------------------------------------------
 */
PRS_DEVICE void push_row(const struct prs_moe_args &args, struct row_buffer *b, uint32_t p, uint32_t row,
                         uint32_t offset, uint32_t bytes)
{
    const struct prs_route *r = &args.route;
    bulk_store(args.staging[p] + prs_route_staging_at(r, prs_route_mirror(r, p), row) + offset, b->at, bytes);
    bulk_commit();
}

/* The row has landed. Pairs with the acquire in await_row(). */
PRS_DEVICE void signal_row(const struct prs_moe_args &args, uint32_t epoch, uint32_t p, uint32_t row)
{
    const struct prs_route *r = &args.route;
    bulk_wait_done<0>();
    store_release_sys(args.staging_flags[p] + prs_route_row_flag(r, prs_route_mirror(r, p), row), epoch);
}

/* Row after row of all destinations in turn, each in the order in which its receiver computes. A row is signalled while
 * the next one is fetched. */
PRS_DEVICE void push_rows(const struct prs_moe_args &args, const struct cta_memory &m, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    struct row_buffer b = {m.base + PRS_SMEM_PUSH, &m.pushed[0], 0};
    uint32_t others = r->world - 1, most = 0, piece = piece_bytes(r->row_bytes), last_p = 0, last_row = 0;
    int64_t next = 0;
    for (uint32_t p = 1; p < r->world; p++)
        most = args.head->sent[p] > most ? args.head->sent[p] : most;
    for (uint32_t i = blockIdx.x; i < most * others; i += gridDim.x) {
        uint32_t p = 1 + i % others, row = i / others;
        const uint8_t *token;
        if (row >= args.head->sent[p])
            continue;
        sleep_until(next);
        next = clock64() + args.push_gap;
        token = args.tokens + (uint64_t)args.sent[(uint64_t)p * r->tokens + row] * r->row_bytes;
        for (uint32_t offset = 0; offset < r->row_bytes; offset += piece) {
            uint32_t bytes = r->row_bytes - offset < piece ? r->row_bytes - offset : piece;
            fetch_piece(&b, token + offset, bytes);
            if (offset == 0 && last_p != 0)
                signal_row(args, epoch, last_p, last_row);
            await_piece(&b);
            push_row(args, &b, p, row, offset, bytes);
        }
        last_p = p, last_row = row;
    }
    if (last_p != 0)
        signal_row(args, epoch, last_p, last_row);
}

/* ---- warp 2 --------------------------------------------------------------------------------------------------------
 */
/* Exactly this epoch: a row's word may not have been raised for many epochs, so that an old one could pass for a later
 * one after a wrap; and nobody raises it for the next epoch before this rank has begun that. */
PRS_DEVICE void await_row(const struct prs_moe_args &args, uint32_t epoch, uint32_t p, uint32_t row)
{
    uint32_t index = prs_route_row_flag(&args.route, p, row);
    const uint32_t *flag = args.staging_flags[0] + index;
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = load_acquire_sys(flag);
        if (seen == epoch || !keep_waiting(&args.sync, &clock, PRS_AWAIT_TOKEN,
                                           (args.route.rank + p) % args.route.world, index, epoch, seen))
            break;
    }
    fence_async_global(); /* the flag was read by an ordinary load, the row is read by the copy engine */
}

/* The item's rows have landed. */
PRS_DEVICE void signal_item(const struct prs_moe_args &args, const struct prs_route_item *item)
{
    bulk_wait_done<0>();
    fence_release_gpu(); /* R6: one fence for all its rows. Pairs with A1 in await_block(). */
    for (uint32_t u = 0; u < item->uses; u++)
        add_relaxed_gpu(args.ready + item->row[u] / PRS_TILE_M, 1);
}

/* What is here was sorted by the expert that needs it first, and all CTAs take turns: the first blocks are complete
 * first. */
PRS_DEVICE void place_rows(const struct prs_moe_args &args, const struct cta_memory &m, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    struct row_buffer b = {m.base + PRS_SMEM_PUSH + PRS_PUSH_BYTES, &m.pushed[1], 0};
    uint32_t items = args.head->items, piece = piece_bytes(r->row_bytes);
    const struct prs_route_item *last = NULL;
    for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) {
        const struct prs_route_item *item =
            (const struct prs_route_item *)(args.items + (uint64_t)i * prs_route_item_bytes(r));
        const uint8_t *from = args.tokens + (uint64_t)item->at * r->row_bytes;
        if (item->peer != 0) {
            from = args.staging[0] + prs_route_staging_at(r, item->peer, item->at);
            await_row(args, epoch, item->peer, item->at);
        }
        for (uint32_t offset = 0; offset < r->row_bytes; offset += piece) {
            uint32_t bytes = r->row_bytes - offset < piece ? r->row_bytes - offset : piece;
            fetch_piece(&b, from + offset, bytes);
            if (offset == 0 && last != NULL)
                signal_item(args, last);
            await_piece(&b);
            for (uint32_t u = 0; u < item->uses; u++)
                bulk_store(args.row_bytes + (uint64_t)item->row[u] * r->row_bytes + offset, b.at, bytes);
            bulk_commit();
        }
        last = item;
    }
    if (last != NULL)
        signal_item(args, last);
}

#endif
