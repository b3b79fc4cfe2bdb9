/* SPDX-License-Identifier: Apache-2.0 */
/* Moving rows. Warp 3 pushes this rank's tokens to the other ranks, each token once. Warp 2 delivers rows that have
 * arrived to their experts. Each warp has one buffer. Neither waits for the product, and pushing waits for nothing. So
 * ranks cannot wait in a circle: push -> deliver -> load -> multiply -> store. CTAs claim what they move from counters,
 * so a CTA that does not run delays nothing.
 *
 * Other nodes. First, rows for another node are written to memory that puts may read, in the order in which the ranks
 * of that node compute. The CTA that completes the rows of a put puts them to the counterpart there. The CTA that
 * completes a group signals it. Then warp 3 sends this rank's rows for this node. Between two of them it forwards rows
 * that counterparts have put here to the ranks of this node. It waits for such rows only when all its own rows are
 * sent. */
#ifndef PERSEUS_FUSED_ROWS_CUH
#define PERSEUS_FUSED_ROWS_CUH

#include "fused/core/cta.cuh"
#include "fused/core/far.cuh"
#include "fused/moe/args.h"
#include "fused/core/network.cuh"

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

/* Starts to fill the buffer when earlier stores have read it. */
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

/* Where to stage a row at the neighbour at distance p. sender: the distance of the row's sender from that neighbour. */
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

/* Copies a row piece by piece; store() writes a piece to all destinations. Signals the previous row while the first
 * piece is fetched. */
template <class Store, class Signal>
PRS_DEVICE void copy_row_of(struct row_buffer *b, const uint8_t *from, uint32_t row_bytes, Store store,
                            Signal signal_last)
{
    uint32_t piece = piece_bytes(row_bytes);
    for (uint32_t offset = 0; offset < row_bytes; offset += piece) {
        uint32_t bytes = row_bytes - offset < piece ? row_bytes - offset : piece;
        fetch_piece(b, from + offset, bytes);
        if (offset == 0)
            signal_last();
        await_piece(b);
        store(offset, bytes);
        bulk_commit();
    }
}

/* Waits until the word equals this epoch; a larger value is not enough. The word of a row, or of a group of rows, can
 * stay unchanged for many epochs, and after a wrap an old value would look like a later one. No rank raises the word
 * for the next epoch before this rank has begun that epoch. */
PRS_DEVICE void await_word(const struct prs_moe_args &args, const uint32_t *flag, uint32_t epoch, uint32_t what,
                           uint32_t from, uint32_t index)
{
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t seen = load_acquire_sys(flag);
        if (seen == epoch || !keep_waiting(&args.sync, &clock, what, from, index, epoch, seen))
            return;
    }
}

PRS_DEVICE void await_token(const struct prs_moe_args &args, const uint32_t *flag, uint32_t epoch, uint32_t from,
                            uint32_t index)
{
    await_word(args, flag, epoch, PRS_AWAIT_TOKEN, from, index);
    fence_async_global(); /* the flag was read by an ordinary load, the row is read by TMA */
}

/* ---- claims ---- */
enum { DELIVERIES_PER_CLAIM = 16 };

/* Claims the next position in a list of rows that all CTAs share. A claim is for one row, and is made when the row can
 * be moved. Receivers need rows in the order of the list. A CTA that held several would send them one after the other,
 * while other CTAs send later ones. */
PRS_DEVICE uint32_t claim_row(uint32_t *counter)
{
    return atomicAdd(counter, 1u);
}

/* All lanes get the same position of a list. */
PRS_DEVICE uint32_t claim_for_warp(uint32_t *counter)
{
    uint32_t at = threadIdx.x % 32 == 0 ? claim_row(counter) : 0;
    return __shfl_sync(~0u, at, 0);
}

/* ---- launches without routing ---- */
/* Waits until every neighbour and counterpart has read the rows that it was sent in the previous launch. */
PRS_DEVICE void await_room(const struct prs_moe_args &args, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    for (uint32_t i = threadIdx.x % 32; i < r->place.local_ranks + r->place.nodes - 1; i += 32) {
        bool near = i < r->place.local_ranks;
        uint32_t b = near ? 0 : i - r->place.local_ranks + 1;
        uint32_t peer = near ? prs_place_neighbour(&r->place, i) : prs_place_counterpart(&r->place, b);
        uint32_t word = near ? prs_place_distance(&r->place, peer) : prs_route_end_word(r, b);
        if (i != 0)
            wait_flag(&args.sync, near ? args.end_flags[0] + word : far_flag(args, word), epoch - 1, PRS_AWAIT_END,
                      peer, word);
    }
    __syncwarp();
}

/* ---- warp 3: own rows for this node ---- */
/* Row `row` of those that this rank pushes to the neighbour at distance p. */
struct pushed_row {
    uint32_t at, p, row, token; /* at: position in the list */
};

/* Claims the next row that exists; its position is `end` or more if there is none. */
PRS_DEVICE struct pushed_row find_row(const struct prs_moe_args &args, uint32_t end)
{
    const struct prs_route *r = &args.route;
    uint32_t others = r->place.local_ranks - 1, at;
    while ((at = claim_row(&args.claims->pushed)) < end) {
        uint32_t p = prs_place_distance(&r->place, prs_place_neighbour(&r->place, 1 + at % others)), row = at / others;
        if (row < args.totals->sent[p])
            return {at, p, row, args.sent[(uint64_t)p * r->tokens + row]};
    }
    return {at, 0, 0, 0};
}

/* Pushes rows to all destinations in turn, to each in the order in which it computes. Looks up the next row while one
 * is on its way. pause(until) is called between two rows. */
template <class Pause>
PRS_DEVICE void push_rows(const struct prs_moe_args &args, struct row_buffer *b, uint32_t epoch, Pause pause)
{
    const struct prs_route *r = &args.route;
    uint32_t most = 0;
    struct pushed_row now, last = {0, 0, 0, 0};
    int64_t next = 0;
    auto signal_last = [&]() {
        if (last.p == 0)
            return;
        bulk_wait_done<0>(); /* the row has landed. Pairs with the acquire in await_deliveries(). */
        flag_row(args, epoch, last.p, prs_distance_back(last.p, r->place.world), last.row);
    };
    for (uint32_t q = 1; q < r->place.local_ranks; q++) {
        uint32_t p = prs_place_distance(&r->place, prs_place_neighbour(&r->place, q));
        most = args.totals->sent[p] > most ? args.totals->sent[p] : most;
    }
    uint32_t end = most * (r->place.local_ranks - 1);
    for (now = find_row(args, end); now.at < end;) {
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
                after = find_row(args, end);
                signal_last();
            });
        last = now, now = after;
    }
    signal_last();
}

/* ---- warp 3: other nodes ---- */
/* Counts one of `all` rows for the node at distance n, which is stored in relay memory. Puts and signals what this row
 * completes. back: the row is a sum that returns. The last arrival at a counter leaves it at zero. */
PRS_DEVICE_OUTLINED void relay_row_out(const struct prs_moe_args &args, uint32_t epoch, uint32_t n, uint32_t row,
                                       uint32_t all, bool back)
{
    const struct prs_route *r = &args.route;
    const struct prs_moe_far *far = &args.far;
    uint32_t first = row / r->put * r->put, group = row / r->group, in = back ? far->back : 0;
    uint32_t *counters = far->counters + (back ? prs_route_back_counters(r) : 0);
    uint32_t *in_put = counters + prs_route_put_counter(r, n, row);
    uint32_t *in_group = counters + prs_route_group_counter(r, n, row);
    uint32_t rows = prs_route_piece_rows(row, r->put, all);
    uint32_t puts = prs_ceil_div(prs_route_piece_rows(row, r->group, all), r->put);
    uint32_t peer = prs_place_counterpart(&r->place, n), from = prs_distance_back(n, r->place.nodes);
    struct prs_device_put put = {prs_route_relay_at(r, in + 1, n, first),
                                 prs_route_relay_at(r, in, from, first),
                                 (uint64_t)rows * r->row_bytes,
                                 peer,
                                 far->relay_window,
                                 far->relay_window,
                                 group % PRS_CMD_GROUPS};
    uint32_t word = back ? prs_route_back_word(r, from, group) : prs_route_relay_word(r, from, group);
    struct prs_device_signal signal = {word * 8ull, epoch, peer, far->signal_window, group % PRS_CMD_GROUPS, 0, 0};
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * a put only after all its rows: s/rows/1/ */
    if (add_acq_rel_gpu(in_put, 1) + 1 != rows)
        return;
    *in_put = 0;
    network_put(&args.sync, &far->device, put);
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * a signal only after all puts of its group: s/puts/1/ */
    if (add_acq_rel_gpu(in_group, 1) + 1 != puts)
        return;
    *in_group = 0;
    network_signal(&args.sync, &far->device, signal);
}

/* Stores this rank's rows for other nodes in relay memory, for all nodes in turn. Nothing is forwarded meanwhile:
 * memory is ten times as fast as a link, and the command ring has room. */
PRS_DEVICE void relay_out(const struct prs_moe_args &args, struct row_buffer *b, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    uint32_t others = r->place.nodes - 1, most = 0, last_n = 0, last_row = 0;
    auto signal_last = [&]() {
        if (last_n == 0)
            return;
        /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
         * a row for another node is counted when it has landed: delete */
        bulk_wait_done<0>();
        relay_row_out(args, epoch, last_n, last_row, args.totals->relayed[last_n], false);
    };
    for (uint32_t n = 1; n < r->place.nodes; n++)
        most = args.totals->relayed[n] > most ? args.totals->relayed[n] : most;
    for (uint32_t at; (at = claim_row(&args.claims->relayed)) < most * others;) {
        uint32_t n = 1 + at % others, row = at / others;
        if (row >= args.totals->relayed[n])
            continue;
        copy_row_of(
            b, args.tokens + (uint64_t)args.far.tokens[n * r->tokens + row] * r->row_bytes, r->row_bytes,
            [&](uint32_t offset, uint32_t bytes) {
                bulk_store(args.far.relay + prs_route_relay_at(r, 1, n, row) + offset, b->at, bytes);
            },
            signal_last);
        last_n = n, last_row = row;
    }
    signal_last();
}

/* Rows that counterparts put here: the row that this CTA forwards next, from all nodes in turn, and the previous row
 * until its receivers' flags are raised. */
struct incoming {
    uint32_t at, end; /* position in the list, and its end */
    uint32_t n, row;  /* row `row` of those from the node at distance n */
    uint32_t last_n;
    const int32_t *last; /* the previous row's entry in the forwarding table; NULL: its flags are raised */
};

/* The forwarding table from the node at distance n, which routing has kept: prs_route_forwarding_at(). */
PRS_DEVICE const uint32_t *forwarding_of(const struct prs_moe_args &args, uint32_t n)
{
    return (const uint32_t *)(args.far.forwarding + n * prs_route_forwarding_bytes(&args.route));
}

/* Moves to the first existing row at this position or later; the position becomes in->end or more if there is none. */
PRS_DEVICE void find_incoming(const struct prs_moe_args &args, struct incoming *in)
{
    uint32_t others = args.route.place.nodes - 1;
    for (; in->at < in->end; in->at = claim_row(&args.claims->forwarded)) {
        in->n = 1 + in->at % others, in->row = in->at / others;
        if (in->row < forwarding_of(args, in->n)[0])
            return;
    }
}

PRS_DEVICE struct incoming first_incoming(const struct prs_moe_args &args)
{
    struct incoming in = {claim_row(&args.claims->forwarded), 0, 0, 0, 0, NULL};
    for (uint32_t n = 1; n < args.route.place.nodes; n++) {
        uint32_t rows = forwarding_of(args, n)[0];
        in.end = rows > in.end ? rows : in.end;
    }
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * the rows of all nodes are forwarded: delete */
    in.end *= args.route.place.nodes - 1;
    find_incoming(args, &in);
    return in;
}

/* Calls act(distance of the receiver, distance of the sender from there, place) for all ranks of this node that get a
 * row from the node at distance n; places: its row of the forwarding table. */
template <class Act>
PRS_DEVICE void each_receiver(const struct prs_route *r, const int32_t *places, uint32_t n, Act act)
{
    for (uint32_t local = 0; local < r->place.local_ranks; local++) {
        uint32_t p = prs_route_local(r, local);
        uint32_t sender =
            prs_distance(prs_place_after(&r->place, p), prs_place_counterpart(&r->place, n), r->place.world);
        if (places[local] != PRS_ROUTE_NOWHERE)
            act(p, sender, (uint32_t)places[local]);
    }
}

PRS_DEVICE void flag_incoming(const struct prs_moe_args &args, uint32_t epoch, struct incoming *in)
{
    if (!in->last)
        return;
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * bulk_wait_done before a row that was forwarded is flagged: delete */
    bulk_wait_done<0>(); /* the row has landed. Pairs with the acquire in await_deliveries(). */
    each_receiver(&args.route, in->last, in->last_n,
                  [&](uint32_t p, uint32_t sender, uint32_t row) { flag_row(args, epoch, p, sender, row); });
    in->last = NULL;
}

/* Forwards the next row from another node to all ranks of this node that get it, this rank included. Returns false if
 * there is none, or if it has not come and `waits` is false. In both cases, and before it waits, it flags the previous
 * row. */
PRS_DEVICE bool forward_row(const struct prs_moe_args &args, struct row_buffer *b, uint32_t epoch, struct incoming *in,
                            bool waits)
{
    const struct prs_route *r = &args.route;
    uint32_t word = prs_route_relay_word(r, in->n, in->row / r->group);
    const uint32_t *flag = (const uint32_t *)(args.far.signals + word);
    if (in->at >= in->end || load_acquire_sys(flag) != epoch) {
        /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
         * the last row that was forwarded is flagged: delete */
        flag_incoming(args, epoch, in);
        if (!waits || in->at >= in->end)
            return false;
    }
    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
     * wait for other nodes' rows that are forwarded: delete */
    await_token(args, flag, epoch, prs_place_counterpart(&r->place, in->n), word);
    const int32_t *places = (const int32_t *)forwarding_of(args, in->n) + 4 + in->row * r->place.local_ranks;
    copy_row_of(
        b, args.far.relay + prs_route_relay_at(r, 0, in->n, in->row), r->row_bytes,
        [&](uint32_t offset, uint32_t bytes) {
            each_receiver(r, places, in->n, [&](uint32_t p, uint32_t sender, uint32_t place) {
                bulk_store(staged_at(args, p, sender, place) + offset, b->at, bytes);
            });
        },
        [&]() { flag_incoming(args, epoch, in); });
    in->last = places, in->last_n = in->n;
    in->at = claim_row(&args.claims->forwarded);
    find_incoming(args, in);
    return true;
}

/* Out of line, so that the other roles do not need more registers. Only the last loop waits for other ranks, after all
 * own rows have been sent. */
PRS_DEVICE_OUTLINED void send_rows_far(const struct prs_moe_args &args, uint8_t *at, uint64_t *full, uint32_t epoch)
{
    struct row_buffer b = {at, full, 0};
    relay_out(args, &b, epoch); /* first, because links between nodes are slower */
    struct incoming in = first_incoming(args);
    push_rows(args, &b, epoch, [&](int64_t until) {
        while (forward_row(args, &b, epoch, &in, false) && clock64() < until)
            ;
        sleep_until(until);
    });
    while (forward_row(args, &b, epoch, &in, true))
        ;
}

template <bool FAR> PRS_DEVICE void send_rows(const struct prs_moe_args &args, struct row_buffer b, uint32_t epoch)
{
    if (FAR)
        send_rows_far(args, b.at, b.full, epoch);
    else
        push_rows(args, &b, epoch, [](int64_t until) { sleep_until(until); });
}

/* ---- warp 2 ---- */
/* All lanes take part: each looks up one of the next 32 deliveries and waits for its row; each writes and counts one
 * target row of a delivery. A single lane would spend most of its time waiting for a few words. */
struct placed_row {
    uint32_t peer, at, targets, place; /* place: index of the delivery */
};

PRS_DEVICE const struct prs_route_delivery *delivery_at(const struct prs_moe_args &args, uint32_t place)
{
    return (const struct prs_route_delivery *)(args.deliveries +
                                               (uint64_t)place * prs_route_delivery_bytes(&args.route));
}

/* The flag of this lane's delivery, which must equal this epoch: see await_token(). */
PRS_DEVICE uint32_t delivery_seen(const struct prs_moe_args &args, uint32_t epoch, const struct placed_row &mine,
                                  uint32_t index)
{
    return mine.peer == 0 ? epoch : load_acquire_sys(args.staging_flags[0] + index);
}

/* Waits until the row of the delivery of lane `wanted` has arrived. Returns the mask of the lanes whose rows have
 * arrived, or all lanes if it gave up. */
PRS_DEVICE uint32_t await_deliveries(const struct prs_moe_args &args, uint32_t epoch, const struct placed_row &mine,
                                     uint32_t wanted)
{
    struct wait_clock clock = {0, 0};
    uint32_t index = prs_route_row_flag(&args.route, mine.peer, mine.at);
    for (;;) {
        uint32_t seen = delivery_seen(args, epoch, mine, index);
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

/* Whether the row of the delivery of lane `wanted` has arrived. */
PRS_DEVICE bool delivery_is_here(const struct prs_moe_args &args, uint32_t epoch, const struct placed_row &mine,
                                 uint32_t wanted)
{
    uint32_t index = prs_route_row_flag(&args.route, mine.peer, mine.at);
    bool here = threadIdx.x % 32 == wanted && delivery_seen(args, epoch, mine, index) == epoch;
    return __shfl_sync(~0u, here, wanted);
}

/* Calls act() for each of the delivery's target rows that belong to this lane: numbers lane, lane + 32, and so on. row:
 * the first of these rows. */
template <class Act>
PRS_DEVICE void each_target(const struct prs_moe_args &args, const struct placed_row &delivery, uint32_t row, Act act)
{
    uint32_t lane = threadIdx.x % 32;
    if (lane < delivery.targets)
        act(row);
    for (uint32_t u = lane + 32; u < delivery.targets; u += 32)
        act(delivery_at(args, delivery.place)->row[u]);
}

/* Counts a delivery when its rows are in place. */
PRS_DEVICE void count_delivery(const struct prs_moe_args &args, const struct placed_row &delivery, uint32_t row)
{
    if (threadIdx.x % 32 >= delivery.targets)
        return;
    bulk_wait_done<0>();
    fence_release_gpu(); /* [delivered-rows]: one fence for a lane's rows, before the counts in await_block() */
    each_target(args, delivery, row, [&](uint32_t r) { add_relaxed_gpu(args.ready + r / PRS_TILE_M, 1); });
}

/* Copies one delivery to all its rows, piece by piece. Counts the previous delivery while the first piece is
 * fetched. */
PRS_DEVICE void deliver_row(const struct prs_moe_args &args, struct row_buffer *b, const struct placed_row &delivery,
                            uint32_t row, const struct placed_row &last, uint32_t last_row)
{
    const struct prs_route *r = &args.route;
    uint32_t piece = piece_bytes(r->row_bytes);
    const uint8_t *from = delivery.peer != 0 ? args.staging[0] + prs_route_staging_at(r, delivery.peer, delivery.at)
                                             : args.tokens + (uint64_t)delivery.at * r->row_bytes;
    for (uint32_t offset = 0; offset < r->row_bytes; offset += piece) {
        uint32_t bytes = r->row_bytes - offset < piece ? r->row_bytes - offset : piece;
        bulk_wait_read<0>();
        __syncwarp(); /* all lanes' stores have read the buffer */
        if (threadIdx.x % 32 == 0) {
            mbarrier_expect(b->full, bytes);
            bulk_load(b->at, from + offset, bytes, b->full);
        }
        if (offset == 0)
            count_delivery(args, last, last_row);
        await_piece(b);
        __syncwarp(); /* else a late lane could mistake the phase of the next use for this one */
        each_target(args, delivery, row, [&](uint32_t to) {
            bulk_store(args.row_bytes + (uint64_t)to * r->row_bytes + offset, b->at, bytes);
        });
        bulk_commit();
    }
}

/* Deliveries are sorted by the first expert that needs them. Each warp of the grid that places rows claims lists that
 * take every `warps`-th delivery, so the first blocks are complete first. Returns the first delivery of the list; the
 * next ones follow at a distance of `warps`. */
PRS_DEVICE uint32_t first_delivery(uint32_t list, uint32_t warps)
{
    return list / warps * warps * DELIVERIES_PER_CLAIM + list % warps;
}

/* warps: how many warps of the grid place rows. */
template <bool FAR>
PRS_DEVICE void place_rows(const struct prs_moe_args &args, struct row_buffer b, uint32_t epoch, uint32_t warps)
{
    uint32_t deliveries = args.totals->deliveries, lane = threadIdx.x % 32, last_row = 0;
    uint32_t list = lane == 0 ? atomicAdd(&args.claims->deliveries, 1u) : 0, first;
    struct placed_row last = {0, 0, 0, 0};
    while ((first = first_delivery(__shfl_sync(~0u, list, 0), warps)) < deliveries) {
        struct placed_row mine = {0, 0, 0, first + lane * warps};
        uint32_t here = 0;
        if (lane < DELIVERIES_PER_CLAIM && mine.place < deliveries) {
            const struct prs_route_delivery *delivery = delivery_at(args, mine.place);
            mine.peer = delivery->peer, mine.at = delivery->at, mine.targets = delivery->targets;
        }
        for (uint32_t k = 0; k < DELIVERIES_PER_CLAIM && first + k * warps < deliveries; k++) {
            struct placed_row delivery = {__shfl_sync(~0u, mine.peer, k), __shfl_sync(~0u, mine.at, k),
                                          __shfl_sync(~0u, mine.targets, k), first + k * warps};
            uint32_t row = lane < delivery.targets ? delivery_at(args, delivery.place)->row[lane] : 0;
            if ((here >> k & 1) == 0) {
                if (FAR && !delivery_is_here(args, epoch, mine, k)) {
                    count_delivery(args, last, last_row); /* before the wait: a row from another node may come late */
                    /* MUTANT(emulator moe/tokens_cross_between_nodes_and_are_given_to_all_who_want_them)
                     * a delivery that was counted is not counted again: delete */
                    last.targets = 0;
                }
                here = await_deliveries(args, epoch, mine, k);
                __syncwarp();
                fence_async_global(); /* flags were read by ordinary loads, rows are read by TMA */
            }
            deliver_row(args, &b, delivery, row, last, last_row);
            last = delivery, last_row = row;
        }
        if (lane == 0)
            list = atomicAdd(&args.claims->deliveries, 1u);
    }
    count_delivery(args, last, last_row);
}

/* ---- the end ---- */
/* Tells the ranks of the node, and the counterparts, that this rank has read what they sent. It is out of line, so that
 * the roles need no registers for it. */
PRS_DEVICE_OUTLINED void tell_end(const struct prs_moe_args &args, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    if (r->place.nodes > 1)
        network_quiet(&args.sync, &args.far.device);
    fence_release_sys(); /* [moe-ended]: all CTAs' reads, before the flags that await_room() waits for */
    for (uint32_t q = 1; q < r->place.local_ranks; q++) {
        uint32_t p = prs_place_distance(&r->place, prs_place_neighbour(&r->place, q));
        store_release_sys(args.end_flags[q] + prs_distance_back(p, r->place.world), epoch);
    }
    for (uint32_t b = 1; b < r->place.nodes; b++)
        signal_far(args, prs_place_counterpart(&r->place, b),
                   prs_route_end_word(r, prs_distance_back(b, r->place.nodes)), epoch, b);
}

/* One thread of each CTA calls it after all waits of its CTA. A launch without routing advances the epoch by two. The
 * banks of messages follow the parity of the epoch: so they alternate from routing to routing, and the messages of the
 * last routing stay unchanged. */
PRS_DEVICE void leave_moe(const struct prs_moe_args &args)
{
    uint32_t epoch = launch_epoch(&args.sync) + args.ends - 1;
    if (arrives_last(&args.claims->left, gridDim.x))
        *args.claims = {}; /* the next kernel needs zeros */
    if (args.ends != 0 && leave_epoch(&args.sync, epoch, gridDim.x))
        tell_end(args, epoch);
}

#endif
