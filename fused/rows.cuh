/* SPDX-License-Identifier: Apache-2.0 */
/* Rows on their way: warp 3 pushes this rank's tokens to the others, once each; warp 2 puts what is here in place,
 * expert by expert. One thread each, one buffer each; neither waits for the product, and pushing waits for nothing, so
 * that no rank can wait in a circle: push -> put in place -> load -> multiply -> store.
 *
 * Other nodes. Rows for a node are first copied, in the order in which its ranks compute, to where puts may read them;
 * whoever completes a put's rows puts them to the counterpart there, whoever completes a group's signals it. When all
 * own rows are on their way, warp 3 gives those that other nodes' counterparts have put here to the ranks of this node,
 * as if their senders had. */
#ifndef PERSEUS_FUSED_ROWS_CUH
#define PERSEUS_FUSED_ROWS_CUH

#include "fused/cta.cuh"
#include "fused/moe.h"
#include "fused/network.cuh"

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

/* Where the row of sender (a distance) goes at a neighbour that is at distance p from here. */
PRS_DEVICE uint8_t *staged_at(const struct prs_moe_args &args, uint32_t p, uint32_t sender, uint32_t row)
{
    const struct prs_route *r = &args.route;
    return args.staging[prs_route_neighbour(r, p)] + prs_route_staging_at(r, sender, row);
}

PRS_DEVICE void flag_row(const struct prs_moe_args &args, uint32_t epoch, uint32_t p, uint32_t sender, uint32_t row)
{
    const struct prs_route *r = &args.route;
    store_release_sys(args.staging_flags[prs_route_neighbour(r, p)] + prs_route_row_flag(r, sender, row), epoch);
}

/* A row's pieces, one after the other, each to all places; what was copied before is told while the first is fetched.
 */
template <class Store, class Tell>
PRS_DEVICE void copy_row_of(struct row_buffer *b, const uint8_t *from, uint32_t row_bytes, Store store, Tell tell)
{
    uint32_t piece = piece_bytes(row_bytes);
    for (uint32_t offset = 0; offset < row_bytes; offset += piece) {
        uint32_t bytes = row_bytes - offset < piece ? row_bytes - offset : piece;
        fetch_piece(b, from + offset, bytes);
        if (offset == 0)
            tell();
        await_piece(b);
        store(offset, bytes);
        bulk_commit();
    }
}

/* Exactly this epoch: the word of a row, or of a group of rows, may not have been raised for many epochs, so that an
 * old one could pass for a later one after a wrap; and nobody raises it for the next epoch before this rank has begun
 * that.
 */
PRS_DEVICE void await_token(const struct prs_moe_args &args, const uint32_t *flag, uint32_t epoch, uint32_t from,
                            uint32_t index)
{
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = load_acquire_sys(flag);
        if (seen == epoch || !keep_waiting(&args.sync, &clock, PRS_AWAIT_TOKEN, from, index, epoch, seen))
            break;
    }
    fence_async_global(); /* the flag was read by an ordinary load, the row is read by the copy engine */
}

/* ---- warp 3: own rows for this node --------------------------------------------------------------------------------
 */
/* Row after row of all destinations in turn, each in the order in which its receiver computes. */
PRS_DEVICE void push_rows(const struct prs_moe_args &args, struct row_buffer *b, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    uint32_t others = r->seats - 1, most = 0, last_p = 0, last_row = 0;
    int64_t next = 0;
    auto tell = [&]() {
        if (last_p == 0)
            return;
        bulk_wait_done<0>(); /* the row has landed. Pairs with the acquire in await_token(). */
        flag_row(args, epoch, last_p, prs_route_mirror(r, last_p), last_row);
    };
    for (uint32_t q = 1; q < r->seats; q++) {
        uint32_t p = prs_route_seat_distance(r, (r->seat + q) % r->seats);
        most = args.head->sent[p] > most ? args.head->sent[p] : most;
    }
    for (uint32_t i = blockIdx.x; i < most * others; i += gridDim.x) {
        uint32_t p = prs_route_seat_distance(r, (r->seat + 1 + i % others) % r->seats), row = i / others;
        if (row >= args.head->sent[p])
            continue;
        sleep_until(next);
        next = clock64() + args.push_gap;
        copy_row_of(
            b, args.tokens + (uint64_t)args.sent[(uint64_t)p * r->tokens + row] * r->row_bytes, r->row_bytes,
            [&](uint32_t offset, uint32_t bytes) {
                bulk_store(staged_at(args, p, prs_route_mirror(r, p), row) + offset, b->at, bytes);
            },
            tell);
        last_p = p, last_row = row;
    }
    tell();
}

/* ---- warp 3: other nodes -------------------------------------------------------------------------------------------
 */
/* A row for the node at distance n lies where it is put from. */
static __device__ __noinline__ void relay_row_out(const struct prs_moe_args &args, uint32_t epoch, uint32_t n,
                                                  uint32_t row)
{
    const struct prs_route *r = &args.route;
    const struct prs_moe_far *far = &args.far;
    uint32_t all = args.head->relayed[n], first = row / PRS_ROUTE_PUT_ROWS * PRS_ROUTE_PUT_ROWS, group = row / r->group;
    uint32_t rows = prs_route_piece_rows(row, PRS_ROUTE_PUT_ROWS, all);
    uint32_t puts = prs_ceil_div(prs_route_piece_rows(row, r->group, all), PRS_ROUTE_PUT_ROWS);
    uint32_t peer = prs_route_counterpart(r, n), from = prs_route_node_mirror(r, n);
    struct prs_device_put put = {prs_route_relay_at(r, 1, n, first),
                                 prs_route_relay_at(r, 0, from, first),
                                 (uint64_t)rows * r->row_bytes,
                                 peer,
                                 far->relay_window,
                                 far->relay_window,
                                 group % PRS_CMD_GROUPS};
    struct prs_device_signal signal = {
        prs_route_relay_word(r, from, group) * 8ull, epoch, peer, far->signal_window, group % PRS_CMD_GROUPS, 0, 0};
    bulk_wait_done<0>();
    if (add_acq_rel_gpu(far->counters + prs_route_put_counter(r, n, row), 1) + 1 != rows)
        return;
    network_put(&args.sync, &far->device, put);
    if (add_acq_rel_gpu(far->counters + prs_route_group_counter(r, n, row), 1) + 1 == puts)
        network_signal(&args.sync, &far->device, signal);
}

/* This and relay_in() are out of line and take the buffer by value: else the other roles pay in registers. Gives the
 * buffer as it is then. */
static __device__ __noinline__ struct row_buffer relay_out(const struct prs_moe_args &args, struct row_buffer b,
                                                           uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    uint32_t others = r->nodes - 1, most = 0, last_n = 0, last_row = 0;
    auto tell = [&]() {
        if (last_n != 0)
            relay_row_out(args, epoch, last_n, last_row);
    };
    for (uint32_t n = 1; n < r->nodes; n++)
        most = args.head->relayed[n] > most ? args.head->relayed[n] : most;
    for (uint32_t i = blockIdx.x; i < most * others; i += gridDim.x) {
        uint32_t n = 1 + i % others, row = i / others;
        if (row >= args.head->relayed[n])
            continue;
        copy_row_of(
            &b, args.tokens + (uint64_t)args.far.tokens[n * r->tokens + row] * r->row_bytes, r->row_bytes,
            [&](uint32_t offset, uint32_t bytes) {
                bulk_store(args.far.relay + prs_route_relay_at(r, 1, n, row) + offset, b.at, bytes);
            },
            tell);
        last_n = n, last_row = row;
    }
    tell();
    return b;
}

/* Rows that the counterparts have put here, to all ranks of this node that want them, this one too. */
static __device__ __noinline__ void relay_in(const struct prs_moe_args &args, struct row_buffer b, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    const int32_t *last = NULL;
    uint32_t last_n = 0;
    /* The peer's sender: its counterpart here, as far from rank x as x says. */
    auto each = [&](const int32_t *note, uint32_t n, auto act) {
        for (uint32_t seat = 0; seat < r->seats; seat++) {
            uint32_t p = prs_route_seat_distance(r, seat);
            uint32_t sender = (prs_route_counterpart(r, n) + r->world - prs_route_peer(r, p)) % r->world;
            if (note[seat] != PRS_ROUTE_NOWHERE)
                act(p, sender, (uint32_t)note[seat]);
        }
    };
    auto tell = [&]() {
        if (last == NULL)
            return;
        bulk_wait_done<0>(); /* the row has landed. Pairs with the acquire in await_token(). */
        each(last, last_n, [&](uint32_t p, uint32_t sender, uint32_t row) { flag_row(args, epoch, p, sender, row); });
    };
    for (uint32_t n = 1; n < r->nodes; n++) {
        const uint8_t *notes = args.mail[0] + prs_route_note_at(r, epoch & 1, n);
        uint32_t rows = *(const uint32_t *)notes;
        for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) {
            const int32_t *note = (const int32_t *)(notes + 16) + row * r->seats;
            uint32_t word = prs_route_relay_word(r, n, row / r->group);
            await_token(args, (const uint32_t *)(args.far.signals + word), epoch, prs_route_counterpart(r, n), word);
            copy_row_of(
                &b, args.far.relay + prs_route_relay_at(r, 0, n, row), r->row_bytes,
                [&](uint32_t offset, uint32_t bytes) {
                    each(note, n, [&](uint32_t p, uint32_t sender, uint32_t place) {
                        bulk_store(staged_at(args, p, sender, place) + offset, b.at, bytes);
                    });
                },
                tell);
            last = note, last_n = n;
        }
    }
    tell();
}

template <class E>
PRS_DEVICE void send_rows(const struct prs_moe_args &args, const struct cta_memory &m, uint32_t epoch)
{
    struct row_buffer b = {m.base + PRS_SMEM_PUSH, &m.pushed[0], 0};
    if (E::far)
        b = relay_out(args, b, epoch); /* first: the slower way */
    push_rows(args, &b, epoch);
    if (E::far)
        relay_in(args, b, epoch);
}

/* ---- warp 2 --------------------------------------------------------------------------------------------------------
 */
PRS_DEVICE void await_row(const struct prs_moe_args &args, uint32_t epoch, uint32_t p, uint32_t row)
{
    uint32_t index = prs_route_row_flag(&args.route, p, row);
    await_token(args, args.staging_flags[0] + index, epoch, prs_route_peer(&args.route, p), index);
}

/* What is here was sorted by the expert that needs it first, and all CTAs take turns: the first blocks are complete
 * first. */
PRS_DEVICE void place_rows(const struct prs_moe_args &args, const struct cta_memory &m, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    struct row_buffer b = {m.base + PRS_SMEM_PUSH + PRS_PUSH_BYTES, &m.pushed[1], 0};
    uint32_t items = args.head->items;
    const struct prs_route_item *last = NULL;
    auto tell = [&]() {
        if (last == NULL)
            return;
        bulk_wait_done<0>();
        fence_release_gpu(); /* R6: one fence for all its rows. Pairs with A1 in await_block(). */
        for (uint32_t u = 0; u < last->uses; u++)
            add_relaxed_gpu(args.ready + last->row[u] / PRS_TILE_M, 1);
    };
    for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) {
        const struct prs_route_item *item =
            (const struct prs_route_item *)(args.items + (uint64_t)i * prs_route_item_bytes(r));
        const uint8_t *from = args.tokens + (uint64_t)item->at * r->row_bytes;
        if (item->peer != 0) {
            from = args.staging[0] + prs_route_staging_at(r, item->peer, item->at);
            await_row(args, epoch, item->peer, item->at);
        }
        copy_row_of(
            &b, from, r->row_bytes,
            [&](uint32_t offset, uint32_t bytes) {
                for (uint32_t u = 0; u < item->uses; u++)
                    bulk_store(args.row_bytes + (uint64_t)item->row[u] * r->row_bytes + offset, b.at, bytes);
            },
            tell);
        last = item;
    }
    tell();
}

#endif
