/* SPDX-License-Identifier: Apache-2.0 */
/* Rows on their way: warp 3 pushes this rank's tokens to the others, once each; warp 2 puts what is here in place,
 * expert by expert. One buffer each; neither waits for the product, and pushing waits for nothing, so
 * that no rank can wait in a circle: push -> put in place -> load -> multiply -> store.
 *
 * Other nodes. Rows for a node are first copied, in the order in which its ranks compute, to where puts may read them;
 * whoever completes a put's rows puts them to the counterpart there, whoever completes a group's signals it. Then,
 * between own rows for this node, warp 3 gives those that other nodes' counterparts have put here to the ranks of this
 * node, as if their senders had; it waits for them only when all own rows are on their way. */
#ifndef PERSEUS_FUSED_ROWS_CUH
#define PERSEUS_FUSED_ROWS_CUH

#include "fused/core/cta.cuh"
#include "fused/moe/args.h"
#include "fused/core/far.cuh"

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
 * that. */
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

/* ---- warp 3: own rows for this node ---- */
/* A row that is to be pushed: to the neighbour at distance p, where it is the row'th from here. */
struct pushed_row {
    uint32_t at, p, row, token; /* at: among the positions of all CTAs */
};

/* The first from position `at` on that exists; beyond `end` if none does. */
PRS_DEVICE struct pushed_row find_row(const struct prs_moe_args &args, uint32_t at, uint32_t end)
{
    const struct prs_route *r = &args.route;
    uint32_t others = r->place.local_ranks - 1;
    for (; at < end; at += gridDim.x) {
        uint32_t p = prs_place_distance(&r->place, prs_place_neighbour(&r->place, 1 + at % others)), row = at / others;
        if (row < args.head->sent[p])
            return {at, p, row, args.sent[(uint64_t)p * r->tokens + row]};
    }
    return {at, 0, 0, 0};
}

/* Row after row of all destinations in turn, each in the order in which its receiver computes. The next is looked up
 * while one is on its way. pause(until): between two rows, until then. */
template <class Pause>
PRS_DEVICE void push_rows(const struct prs_moe_args &args, struct row_buffer *b, uint32_t epoch, Pause pause)
{
    const struct prs_route *r = &args.route;
    uint32_t most = 0;
    struct pushed_row now, last = {0, 0, 0, 0};
    int64_t next = 0;
    auto tell = [&]() {
        if (last.p == 0)
            return;
        bulk_wait_done<0>(); /* the row has landed. Pairs with the acquire in await_items(). */
        flag_row(args, epoch, last.p, prs_distance_back(last.p, r->place.world), last.row);
    };
    for (uint32_t q = 1; q < r->place.local_ranks; q++) {
        uint32_t p = prs_place_distance(&r->place, prs_place_neighbour(&r->place, q));
        most = args.head->sent[p] > most ? args.head->sent[p] : most;
    }
    uint32_t end = most * (r->place.local_ranks - 1);
    for (now = find_row(args, blockIdx.x, end); now.at < end;) {
        struct pushed_row after;
        pause(next);
        next = clock64() + args.push_gap;
        copy_row_of(
            b, args.tokens + (uint64_t)now.token * r->row_bytes, r->row_bytes,
            [&](uint32_t offset, uint32_t bytes) {
                bulk_store(staged_at(args, now.p, prs_distance_back(now.p, r->place.world), now.row) + offset, b->at,
                           bytes);
            },
            [&]() {
                after = find_row(args, now.at + gridDim.x, end);
                tell();
            });
        last = now, now = after;
    }
    tell();
}

/* ---- warp 3: other nodes ---- */
/* A row for the node at distance n lies where it is put from. */
static __device__ __noinline__ void relay_row_out(const struct prs_moe_args &args, uint32_t epoch, uint32_t n,
                                                  uint32_t row)
{
    const struct prs_route *r = &args.route;
    const struct prs_moe_far *far = &args.far;
    uint32_t all = args.head->relayed[n], first = row / r->put * r->put, group = row / r->group;
    uint32_t rows = prs_route_piece_rows(row, r->put, all);
    uint32_t puts = prs_ceil_div(prs_route_piece_rows(row, r->group, all), r->put);
    uint32_t peer = prs_place_counterpart(&r->place, n), from = prs_distance_back(n, r->place.nodes);
    /* Both are ready before the counters are read: put_far() and signal_far() after them made send_rows_far() spill. */
    struct prs_device_put put = {prs_route_relay_at(r, 1, n, first),
                                 prs_route_relay_at(r, 0, from, first),
                                 (uint64_t)rows * r->row_bytes,
                                 peer,
                                 far->relay_window,
                                 far->relay_window,
                                 group % PRS_CMD_GROUPS};
    struct prs_device_signal signal = {
        prs_route_relay_word(r, from, group) * 8ull, epoch, peer, far->signal_window, group % PRS_CMD_GROUPS, 0, 0};
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * a row for another node is counted when it has landed: delete */
    bulk_wait_done<0>();
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * a put only behind all its rows: s/rows/1/ */
    if (!arrives_last(far->counters + prs_route_put_counter(r, n, row), rows))
        return;
    network_put(&args.sync, &far->device, put);
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * a signal only behind all puts of its group: s/puts/1/ */
    if (arrives_last(far->counters + prs_route_group_counter(r, n, row), puts))
        network_signal(&args.sync, &far->device, signal);
}

/* Own rows for other nodes, all destinations in turn. Nothing that came is handed on meanwhile: memory takes rows ten
 * times as fast as a link, and the ring has room for the commands. */
PRS_DEVICE void relay_out(const struct prs_moe_args &args, struct row_buffer *b, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    uint32_t others = r->place.nodes - 1, most = 0, last_n = 0, last_row = 0;
    auto tell = [&]() {
        if (last_n != 0)
            relay_row_out(args, epoch, last_n, last_row);
    };
    for (uint32_t n = 1; n < r->place.nodes; n++)
        most = args.head->relayed[n] > most ? args.head->relayed[n] : most;
    for (uint32_t i = blockIdx.x; i < most * others; i += gridDim.x) {
        uint32_t n = 1 + i % others, row = i / others;
        if (row >= args.head->relayed[n])
            continue;
        copy_row_of(
            b, args.tokens + (uint64_t)args.far.tokens[n * r->tokens + row] * r->row_bytes, r->row_bytes,
            [&](uint32_t offset, uint32_t bytes) {
                bulk_store(args.far.relay + prs_route_relay_at(r, 1, n, row) + offset, b->at, bytes);
            },
            tell);
        last_n = n, last_row = row;
    }
    tell();
}

/* Rows that counterparts put here: which one this CTA hands on next, all nodes in turn, and which was the last, as long
 * as nobody has been told of it. */
struct incoming {
    uint32_t at, end; /* among the positions of all CTAs */
    uint32_t n, row;  /* row `row` of what the node at distance n sends */
    uint32_t last_n;
    const int32_t *last; /* its note; NULL: all have been told of */
};

/* Of the node at distance n: how many rows it sends, padding, then [row][seat] places. */
PRS_DEVICE const uint32_t *notes_of(const struct prs_moe_args &args, uint32_t epoch, uint32_t n)
{
    return (const uint32_t *)(args.mail[0] + prs_route_note_at(&args.route, epoch & 1, n));
}

/* The first from position `at` on that exists; beyond `end` if none does. */
PRS_DEVICE void find_incoming(const struct prs_moe_args &args, uint32_t epoch, struct incoming *in)
{
    uint32_t others = args.route.place.nodes - 1;
    for (; in->at < in->end; in->at += gridDim.x) {
        in->n = 1 + in->at % others, in->row = in->at / others;
        if (in->row < notes_of(args, epoch, in->n)[0])
            return;
    }
}

PRS_DEVICE struct incoming first_incoming(const struct prs_moe_args &args, uint32_t epoch)
{
    struct incoming in = {blockIdx.x, 0, 0, 0, 0, NULL};
    for (uint32_t n = 1; n < args.route.place.nodes; n++) {
        uint32_t rows = notes_of(args, epoch, n)[0];
        in.end = rows > in.end ? rows : in.end;
    }
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * the rows of all nodes are handed on: delete */
    in.end *= args.route.place.nodes - 1;
    find_incoming(args, epoch, &in);
    return in;
}

/* All seats that want a row of the node at distance n: act(their distance, the sender's as they see it, place). */
template <class Act> PRS_DEVICE void each_receiver(const struct prs_route *r, const int32_t *note, uint32_t n, Act act)
{
    for (uint32_t local = 0; local < r->place.local_ranks; local++) {
        uint32_t p = prs_route_local(r, local);
        uint32_t sender =
            prs_distance(prs_place_after(&r->place, p), prs_place_counterpart(&r->place, n), r->place.world);
        if (note[local] != PRS_ROUTE_NOWHERE)
            act(p, sender, (uint32_t)note[local]);
    }
}

PRS_DEVICE void tell_incoming(const struct prs_moe_args &args, uint32_t epoch, struct incoming *in)
{
    if (!in->last)
        return;
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * bulk_wait_done before a row that was handed on is told of: delete */
    bulk_wait_done<0>(); /* the row has landed. Pairs with the acquire in await_items(). */
    each_receiver(&args.route, in->last, in->last_n,
                  [&](uint32_t p, uint32_t sender, uint32_t row) { flag_row(args, epoch, p, sender, row); });
    in->last = NULL;
}

/* The next row that came, to all ranks of this node that want it, this one too. False: it has not come, or, if this
 * waits for it, there is none. While it has not, nobody is kept waiting for the one before. */
PRS_DEVICE bool hand_on(const struct prs_moe_args &args, struct row_buffer *b, uint32_t epoch, struct incoming *in,
                        bool waits)
{
    const struct prs_route *r = &args.route;
    uint32_t word = prs_route_relay_word(r, in->n, in->row / r->group);
    const uint32_t *flag = far_flag(args, word);
    if (in->at >= in->end || load_acquire_sys(flag) != epoch) {
        /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
         * the last row that was handed on is told of: delete */
        tell_incoming(args, epoch, in);
        if (!waits || in->at >= in->end)
            return false;
    }
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * wait for other nodes' rows that are handed on: delete */
    await_token(args, flag, epoch, prs_place_counterpart(&r->place, in->n), word);
    const int32_t *note = (const int32_t *)notes_of(args, epoch, in->n) + 4 + in->row * r->place.local_ranks;
    copy_row_of(
        b, args.far.relay + prs_route_relay_at(r, 0, in->n, in->row), r->row_bytes,
        [&](uint32_t offset, uint32_t bytes) {
            each_receiver(r, note, in->n, [&](uint32_t p, uint32_t sender, uint32_t place) {
                bulk_store(staged_at(args, p, sender, place) + offset, b->at, bytes);
            });
        },
        [&]() { tell_incoming(args, epoch, in); });
    in->last = note, in->last_n = in->n;
    in->at += gridDim.x;
    find_incoming(args, epoch, in);
    return true;
}

/* Out of line: else the other roles pay in registers. Only the last loop waits for other ranks, when all own rows are
 * on their way. */
static __device__ __noinline__ void send_rows_far(const struct prs_moe_args &args, uint8_t *at, uint64_t *full,
                                                  uint32_t epoch)
{
    struct row_buffer b = {at, full, 0};
    relay_out(args, &b, epoch); /* first: the slower way */
    struct incoming in = first_incoming(args, epoch);
    push_rows(args, &b, epoch, [&](int64_t until) {
        while (hand_on(args, &b, epoch, &in, false) && clock64() < until)
            ;
        sleep_until(until);
    });
    while (hand_on(args, &b, epoch, &in, true))
        ;
}

template <class E>
PRS_DEVICE void send_rows(const struct prs_moe_args &args, const struct cta_memory &m, uint32_t epoch)
{
    struct row_buffer b = {m.base + PRS_SMEM_PUSH, &m.pushed[0], 0};
    if (E::far)
        send_rows_far(args, b.at, b.full, epoch);
    else
        push_rows(args, &b, epoch, [](int64_t until) { sleep_until(until); });
}

/* ---- warp 2 --------------------------------------------------------------------------------------------------------
 * All lanes: each looks up, and waits for, one of the next 32 items, and each copies to, and counts, one of an item's
 * rows. One lane would spend most of its time waiting for answers of a few words. */
struct placed_item {
    uint32_t peer, at, uses, place; /* place: among the items */
};

PRS_DEVICE const struct prs_route_item *item_at(const struct prs_moe_args &args, uint32_t place)
{
    return (const struct prs_route_item *)(args.items + (uint64_t)place * prs_route_item_bytes(&args.route));
}

/* The word of this lane's item; exactly this epoch: see await_token(). */
PRS_DEVICE uint32_t item_seen(const struct prs_moe_args &args, uint32_t epoch, const struct placed_item &mine,
                              uint32_t index)
{
    return mine.peer == 0 ? epoch : load_acquire_sys(args.staging_flags[0] + index);
}

/* Which of the lanes' items are here, the one of lane `wanted` among them, or waiting was given up. */
PRS_DEVICE uint32_t await_items(const struct prs_moe_args &args, uint32_t epoch, const struct placed_item &mine,
                                uint32_t wanted)
{
    struct wait_clock clock = {0, 0};
    uint32_t index = prs_route_row_flag(&args.route, mine.peer, mine.at);
    for (;;) {
        uint32_t seen = item_seen(args, epoch, mine, index);
        uint32_t here = __ballot_sync(~0u, seen == epoch);
        if ((here >> wanted & 1) != 0)
            return here;
        bool go = threadIdx.x % 32 != wanted ||
                  keep_waiting(&args.sync, &clock, PRS_AWAIT_TOKEN, prs_place_after(&args.route.place, mine.peer),
                               index, epoch, seen);
        if (!__shfl_sync(~0u, go, wanted))
            return ~0u;
    }
}

/* The item of lane `wanted`. */
PRS_DEVICE bool item_is_here(const struct prs_moe_args &args, uint32_t epoch, const struct placed_item &mine,
                             uint32_t wanted)
{
    uint32_t index = prs_route_row_flag(&args.route, mine.peer, mine.at);
    bool here = threadIdx.x % 32 == wanted && item_seen(args, epoch, mine, index) == epoch;
    return __shfl_sync(~0u, here, wanted);
}

/* Lane u's rows of an item: u, u + 32 and so on. */
template <class Act>
PRS_DEVICE void each_use(const struct prs_moe_args &args, const struct placed_item &item, uint32_t row, Act act)
{
    uint32_t lane = threadIdx.x % 32;
    if (lane < item.uses)
        act(row);
    for (uint32_t u = lane + 32; u < item.uses; u += 32)
        act(item_at(args, item.place)->row[u]);
}

/* The rows of an item are in place. */
PRS_DEVICE void tell_item(const struct prs_moe_args &args, const struct placed_item &item, uint32_t row)
{
    if (threadIdx.x % 32 >= item.uses)
        return;
    bulk_wait_done<0>();
    fence_release_gpu(); /* R6: one fence for a lane's rows. Pairs with A1 in await_block(). */
    each_use(args, item, row, [&](uint32_t r) { add_relaxed_gpu(args.ready + r / PRS_TILE_M, 1); });
}

/* One item: to all its rows, piece by piece; the one before is told of while the first piece is fetched. */
PRS_DEVICE void place_item(const struct prs_moe_args &args, struct row_buffer *b, const struct placed_item &item,
                           uint32_t row, const struct placed_item &last, uint32_t last_row)
{
    const struct prs_route *r = &args.route;
    uint32_t piece = piece_bytes(r->row_bytes);
    const uint8_t *from = item.peer != 0 ? args.staging[0] + prs_route_staging_at(r, item.peer, item.at)
                                         : args.tokens + (uint64_t)item.at * r->row_bytes;
    for (uint32_t offset = 0; offset < r->row_bytes; offset += piece) {
        uint32_t bytes = r->row_bytes - offset < piece ? r->row_bytes - offset : piece;
        bulk_wait_read<0>();
        __syncwarp(); /* all lanes' stores have read the buffer */
        if (threadIdx.x % 32 == 0) {
            mbarrier_expect(b->full, bytes);
            bulk_load(b->at, from + offset, bytes, b->full);
        }
        if (offset == 0)
            tell_item(args, last, last_row);
        await_piece(b);
        __syncwarp(); /* a lane that looks only when the buffer was filled anew would take that phase for an older one
                       */
        each_use(args, item, row,
                 [&](uint32_t to) { bulk_store(args.row_bytes + (uint64_t)to * r->row_bytes + offset, b->at, bytes); });
        bulk_commit();
    }
}

/* What is here was sorted by the expert that needs it first, and all CTAs take turns: the first blocks are complete
 * first. */
template <class E>
PRS_DEVICE void place_rows(const struct prs_moe_args &args, const struct cta_memory &m, uint32_t epoch)
{
    struct row_buffer b = {m.base + PRS_SMEM_PUSH + PRS_PUSH_BYTES, &m.pushed[1], 0};
    uint32_t items = args.head->items, lane = threadIdx.x % 32, last_row = 0;
    struct placed_item last = {0, 0, 0, 0};
    for (uint32_t first = blockIdx.x; first < items; first += 32 * gridDim.x) {
        struct placed_item mine = {0, 0, 0, first + lane * gridDim.x};
        uint32_t here = 0;
        if (mine.place < items) {
            const struct prs_route_item *item = item_at(args, mine.place);
            mine.peer = item->peer, mine.at = item->at, mine.uses = item->uses;
        }
        for (uint32_t k = 0; k < 32 && first + k * gridDim.x < items; k++) {
            struct placed_item item = {__shfl_sync(~0u, mine.peer, k), __shfl_sync(~0u, mine.at, k),
                                       __shfl_sync(~0u, mine.uses, k), first + k * gridDim.x};
            uint32_t row = lane < item.uses ? item_at(args, item.place)->row[lane] : 0;
            if ((here >> k & 1) == 0) {
                if (E::far && !item_is_here(args, epoch, mine, k)) {
                    tell_item(args, last, last_row); /* between nodes the next row may be long in coming */
                    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
                     * an item that was told of is not told of again: delete */
                    last.uses = 0;
                }
                here = await_items(args, epoch, mine, k);
                __syncwarp();
                fence_async_global(); /* flags were read by ordinary loads, rows are read by the copy engine */
            }
            place_item(args, &b, item, row, last, last_row);
            last = item, last_row = row;
        }
    }
    tell_item(args, last, last_row);
}

#endif
