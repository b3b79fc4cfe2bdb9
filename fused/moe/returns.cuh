/* SPDX-License-Identifier: Apache-2.0 */
/* Returning rows. The owner of experts adds up the results of a token's choices and stores the sum at the token's rank.
 * In layers of many tokens on one node it does so during the second product (return_early()), otherwise in combine's
 * kernel (return_sums()). Sums are fp32, in the order of the choices; each sum that travels is rounded once. */
#ifndef PERSEUS_FUSED_RETURNS_CUH
#define PERSEUS_FUSED_RETURNS_CUH

#include "fused/core/element.cuh"
#include "fused/moe/rows.cuh"

enum {
    PRS_COMBINE_WARPS = 16,
    VECTORS_IN_FLIGHT = 4, /* vectors that a lane loads of each term */
    TERMS_IN_FLIGHT = 2
};

/* This lane's term: a row, and its factor. */
struct term {
    const uint4 *row;
    float weight;
};

/* TYPE, here and below: the type of rows and sums. */
template <int TYPE> PRS_DEVICE void add_vector(float *sum, uint4 x, float weight)
{
    float columns[element<TYPE>::in_vector];
    unpack_vector<TYPE>(x, columns);
#pragma unroll
    for (uint32_t i = 0; i < element<TYPE>::in_vector; i++)
        sum[i] += columns[i] * weight;
}

/* Adds up the rows of the lanes in `terms`, in the order of lanes, and `last`, which may be NULL or `to`; stores the
 * sum. */
template <int TYPE>
PRS_DEVICE void add_up(const struct prs_moe_args &args, const struct term &mine, uint32_t terms, const uint4 *last,
                       uint4 *to)
{
    uint32_t lane = threadIdx.x % 32, vectors = args.route.row_bytes / 16;
    for (uint32_t first = lane; first < prs_ceil_div(vectors, 32) * 32; first += 32 * VECTORS_IN_FLIGHT) {
        float sum[VECTORS_IN_FLIGHT][element<TYPE>::in_vector] = {};
        for (uint32_t left = terms; left != 0;) {
            uint4 x[TERMS_IN_FLIGHT][VECTORS_IN_FLIGHT];
            float weight[TERMS_IN_FLIGHT];
#pragma unroll
            for (int t = 0; t < TERMS_IN_FLIGHT; t++, left &= left - 1) {
                bool there = left != 0; /* else zeros: no sum is -0, so they change none */
                int from = there ? __ffs((int)left) - 1 : 0;
                const uint4 *row = (const uint4 *)__shfl_sync(~0u, (unsigned long long)mine.row, from);
                weight[t] = __shfl_sync(~0u, mine.weight, from);
                weight[t] = there ? weight[t] : 0;
#pragma unroll
                for (int i = 0; i < VECTORS_IN_FLIGHT; i++)
                    x[t][i] = there && first + i * 32 < vectors ? row[first + i * 32] : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int t = 0; t < TERMS_IN_FLIGHT; t++)
#pragma unroll
                for (int i = 0; i < VECTORS_IN_FLIGHT; i++)
                    add_vector<TYPE>(sum[i], x[t][i], weight[t]);
        }
#pragma unroll
        for (int i = 0; i < VECTORS_IN_FLIGHT; i++) {
            if (first + i * 32 >= vectors)
                break;
            if (last)
                add_vector<TYPE>(sum[i], last[first + i * 32], 1.0f);
            to[first + i * 32] = pack_vector<TYPE>(sum[i]);
        }
    }
}

PRS_DEVICE const uint4 *result_row(const struct prs_moe_args &args, uint32_t row)
{
    return (const uint4 *)(args.results + (uint64_t)row * args.route.row_bytes);
}

/* The neighbour to which a sum for the peer at distance p goes: the peer, or, if it is on another node, the peer's
 * counterpart here, which adds up this node's sums. There the sum has the same place as a row from this rank's
 * counterpart on the peer's node. from: the distance of that counterpart, or of this rank, from the neighbour. */
PRS_DEVICE uint32_t return_to(const struct prs_route *r, uint32_t p, uint32_t *from)
{
    uint32_t q = prs_route_neighbour(r, p), b = prs_route_node_of(r, p);
    *from = prs_distance(prs_place_neighbour(&r->place, q), prs_place_counterpart(&r->place, b), r->place.world);
    return q;
}

/* ---- during the second product ---- */
/* Here the second product begins with the last expert, and deliveries are sorted by the first expert that they need. So
 * deliveries become complete one by one, from the last one on. Two warps of each CTA, which the product does not use,
 * return their sums in that order. They claim deliveries, and wait only for experts whose units were claimed before.
 * The next kernel tells the ranks of all sums at once (exchange_returned()).
 *
 * Such a warp has few registers. So its loads in flight are copies into shared memory: pieces of rows, one for each
 * term of a piece of a sum. A lane looks up one piece at a time and starts its copy; all lanes add it up. */
enum {
    RETURNS_PER_CLAIM = 8, /* deliveries in a claim */
    RETURN_BACK_OFF_NS = 500,
    RETURN_SLOTS = 7, /* slots and their barriers lie in the buffer of a warp that sends rows */
    RETURN_PIECE = 1024,
    RETURN_VECTORS = RETURN_PIECE / 16 / 32 /* vectors of a lane */
};
static_assert(RETURN_SLOTS * (RETURN_PIECE + 8) <= PRS_PUSH_BYTES, "slots and barriers fit the buffer");

/* Waits until all tiles of an expert are stored. cluster: CTAs that share a unit. Sleeps between two reads, because all
 * waiting warps read the same cache line. */
PRS_DEVICE void await_expert(const struct prs_moe_args &args, uint32_t expert, uint32_t cluster)
{
    uint32_t want = prs_route_expert_blocks(&args.table[expert]) * args.route.columns * cluster, seen;
    struct wait_clock clock = {0, 0};
    /* MUTANT(emulator moe_combine/a_layer_returns_its_sums_early) sums wait for their experts: s/!prs/prs/ */
    while (seen = load_acquire_sys(args.stored + expert), !prs_flag_reached(seen, want)) {
        if (!keep_waiting(&args.sync, &clock, PRS_AWAIT_EXPERT, args.route.place.rank, expert, want, seen))
            return;
        __nanosleep(RETURN_BACK_OFF_NS);
    }
}

/* Waits until all tiles of the experts from `first` to before `end` are stored. The first expert is usually the last to
 * be complete. */
PRS_DEVICE void await_experts(const struct prs_moe_args &args, uint32_t first, uint32_t end, uint32_t cluster)
{
    if (threadIdx.x % 32 == 0)
        await_expert(args, first, cluster);
    __syncwarp();
    for (uint32_t e = first + 1 + threadIdx.x % 32; e < end; e += 32)
        /* MUTANT(emulator moe_combine/a_layer_returns_its_sums_early) sums wait for all of their experts: delete */
        await_expert(args, e, cluster);
    __syncwarp();         /* what one lane has waited for, all lanes read */
    fence_async_global(); /* the counts were read by ordinary loads, the results are read by TMA */
}

/* A lane's delivery: where its sum goes, the first expert that it needs, and how many pieces of rows are copied for it
 * and, by earlier lanes, before. */
struct returned {
    uint8_t *to;
    uint32_t targets, expert, before, pieces;
};

/* Exclusive sums over the lanes; all lanes get the total. */
PRS_DEVICE uint32_t sums_before(uint32_t v, uint32_t *total)
{
    uint32_t lane = threadIdx.x % 32, sum = v;
    for (uint32_t d = 1; d < 32; d *= 2) {
        uint32_t other = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? other : 0;
    }
    *total = __shfl_sync(~0u, sum, 31);
    return sum - v;
}

/* Delivery number `at`, counted from the last one; it need not exist. *pieces: the pieces of all lanes. */
PRS_DEVICE struct returned find_returned(const struct prs_moe_args &args, uint32_t at, bool exists, uint32_t *pieces)
{
    const struct prs_route *r = &args.route;
    struct returned m = {NULL, 0, r->experts_per_rank, 0, 0};
    const struct prs_route_delivery *delivery = delivery_at(args, args.totals->deliveries - 1 - at);
    uint32_t from, peer = exists ? delivery->peer : 0;
    if (peer != 0) { /* else it is a token of this rank: combine_token() reads its rows */
        uint32_t q = return_to(r, peer, &from);
        m.to = args.returns[q] + prs_route_staging_at(r, from, delivery->at);
        m.targets = delivery->targets;
        m.pieces = m.targets * prs_ceil_div(r->row_bytes, RETURN_PIECE);
        if (m.targets != 0)
            m.expert = prs_route_block_expert(r, args.table, delivery->row[0] / PRS_TILE_M);
        /* MUTANT(emulator moe_combine/a_layer_returns_its_sums_early) without room for a choice its sum is 0:
         * delete */
        for (uint32_t i = 0; i < r->row_bytes && m.targets == 0; i += 16)
            *(uint4 *)(m.to + i) = make_uint4(0, 0, 0, 0);
    }
    m.before = sums_before(m.pieces, pieces);
    return m;
}

/* A lane's piece of a row: where it is read, and what becomes of it. */
struct returned_piece {
    const uint8_t *from;
    uint8_t *to; /* the sum, if this is its last term; else NULL */
    uint32_t bytes;
    float weight;
};

/* Piece `at` of those that the lanes have; the first lane has delivery number `list` from the last. It belongs to the
 * last lane whose pieces begin at or before it. */
PRS_DEVICE struct returned_piece find_piece(const struct prs_moe_args &args, const struct returned &mine, uint32_t list,
                                            uint32_t at)
{
    uint32_t owner = 0;
    for (uint32_t i = 0; i < RETURNS_PER_CLAIM; i++) {
        uint32_t before = __shfl_sync(~0u, mine.before, i), pieces = __shfl_sync(~0u, mine.pieces, i);
        owner = at >= before && pieces != 0 ? i : owner;
    }
    uint32_t targets = __shfl_sync(~0u, mine.targets, owner), in = at - __shfl_sync(~0u, mine.before, owner);
    uint8_t *to = (uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.to, owner);
    if (in >= __shfl_sync(~0u, mine.pieces, owner))
        return {NULL, NULL, 0, 0};
    uint32_t term = in % targets, offset = in / targets * RETURN_PIECE, left = args.route.row_bytes - offset;
    const struct prs_route_delivery *delivery = delivery_at(args, args.totals->deliveries - 1 - list - owner);
    struct returned_piece p = {(const uint8_t *)result_row(args, delivery->row[term]) + offset,
                               term + 1 == targets ? to + offset : NULL, left < RETURN_PIECE ? left : RETURN_PIECE,
                               1.0f};
    if (args.unweighted == 0)
        p.weight = __uint_as_float(delivery->row[prs_route_weight_at(&args.route) + term]);
    return p;
}

/* The slots of a warp. */
struct return_slots {
    uint8_t *at;
    uint64_t *full;
    struct pipeline filled, read;
};

PRS_DEVICE void copy_returned(struct return_slots *s, const struct returned_piece &p, bool mine)
{
    if (mine) {
        mbarrier_expect(&s->full[s->filled.stage], p.bytes);
        bulk_load(s->at + s->filled.stage * RETURN_PIECE, p.from, p.bytes, &s->full[s->filled.stage]);
    }
    pipeline_next<RETURN_SLOTS>(&s->filled);
}

/* Adds a piece that has arrived, times its weight, to the sum. Stores the sum to `to` unless that is NULL. */
template <int TYPE>
PRS_DEVICE void add_returned(struct return_slots *s, uint32_t bytes, float weight, uint8_t *to,
                             float (&sum)[RETURN_VECTORS][element<TYPE>::in_vector])
{
    uint32_t lane = threadIdx.x % 32, slot = smem_address(s->at + s->read.stage * RETURN_PIECE);
    mbarrier_wait(&s->full[s->read.stage], s->read.phase);
#pragma unroll
    for (uint32_t i = 0; i < RETURN_VECTORS; i++) {
        uint32_t vector = i * 32 + lane;
        if (vector * 16 >= bytes)
            break;
        add_vector<TYPE>(sum[i], load_shared_v4(slot + vector * 16), weight);
        if (!to)
            continue;
        ((uint4 *)to)[vector] = pack_vector<TYPE>(sum[i]);
#pragma unroll
        for (uint32_t j = 0; j < element<TYPE>::in_vector; j++)
            sum[i][j] = 0;
    }
    pipeline_next<RETURN_SLOTS>(&s->read);
    __syncwarp(); /* all lanes have read the slot */
}

/* Adds up to 32 pieces, one for each lane. */
template <int TYPE>
PRS_DEVICE void return_pieces(struct return_slots *s, const struct returned_piece &mine, uint32_t count,
                              float (&sum)[RETURN_VECTORS][element<TYPE>::in_vector])
{
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = 0; i < RETURN_SLOTS && i < count; i++)
        copy_returned(s, mine, lane == i);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *to = (uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.to, i);
        add_returned<TYPE>(s, __shfl_sync(~0u, mine.bytes, i), __shfl_sync(~0u, mine.weight, i), to, sum);
        if (i + RETURN_SLOTS < count)
            copy_returned(s, mine, lane == i + RETURN_SLOTS);
    }
}

/* buffer: PRS_PUSH_BYTES of shared memory that only this warp uses. */
template <int TYPE>
PRS_DEVICE_OUTLINED void return_early(const struct prs_moe_args &args, uint8_t *buffer, uint32_t epoch,
                                      uint32_t cluster)
{
    struct return_slots slots = {buffer, (uint64_t *)(buffer + RETURN_SLOTS * RETURN_PIECE), {0, 0}, {0, 0}};
    uint32_t lane = threadIdx.x % 32, all = args.totals->deliveries, complete = args.route.experts_per_rank, first;
    float sum[RETURN_VECTORS][element<TYPE>::in_vector] = {};
    if (lane < RETURN_SLOTS)
        mbarrier_init(&slots.full[lane], 1);
    mbarrier_init_fence();
    __syncwarp();
    /* MUTANT(emulator moe_combine/a_layer_returns_its_sums_early) sums wait until the last ones were read:
     * delete */
    await_room(args, epoch);
    while ((first = claim_for_warp(&args.claims->returned) * RETURNS_PER_CLAIM) < all) {
        uint32_t pieces;
        struct returned mine =
            find_returned(args, first + lane, lane < RETURNS_PER_CLAIM && first + lane < all, &pieces);
        uint32_t expert = __reduce_min_sync(~0u, mine.expert);
        if (expert < complete) {
            await_experts(args, expert, complete, cluster);
            complete = expert;
        }
        for (uint32_t at = 0; at < pieces; at += 32) {
            struct returned_piece piece = find_piece(args, mine, first, at + lane);
            return_pieces<TYPE>(&slots, piece, pieces - at < 32 ? pieces - at : 32, sum);
        }
    }
}

/* ---- in combine's kernel ---- */
template <int TYPE>
PRS_DEVICE void return_sum(const struct prs_moe_args &args, uint32_t epoch, const struct prs_route_delivery *delivery)
{
    const struct prs_route *r = &args.route;
    uint32_t lane = threadIdx.x % 32, targets = delivery->targets, at = delivery->at, from;
    uint32_t q = return_to(r, delivery->peer, &from);
    struct term mine = {NULL, 1.0f};
    if (lane < targets) {
        mine.row = result_row(args, delivery->row[lane]);
        if (args.unweighted == 0)
            mine.weight = __uint_as_float(delivery->row[prs_route_weight_at(r) + lane]);
    }
    add_up<TYPE>(args, mine, targets == 0 ? 0 : ~0u >> (32 - targets), NULL,
                 (uint4 *)(args.returns[q] + prs_route_staging_at(r, from, at)));
    /* MUTANT(emulator moe_combine/many_launches_of_any_choices_are_right) a sum is flagged when all lanes have stored:
     * delete */
    __syncwarp();
    if (lane == 0)
        store_release_sys(args.return_flags[q] + prs_route_row_flag(r, from, at), epoch);
}

/* Rows of this rank's tokens are not added up here: combine_token() reads them. The last deliveries belong to other
 * nodes. Their sums need the most time to return, so they are done first. */
template <int TYPE> PRS_DEVICE void return_sums(const struct prs_moe_args &args, uint32_t epoch)
{
    uint32_t deliveries = args.totals->deliveries;
    /* MUTANT(emulator moe_combine/a_dispatch_is_combined_any_number_of_times) sums wait until the last ones were read:
     * delete */
    await_room(args, epoch);
    for (uint32_t i; (i = claim_for_warp(&args.claims->returned)) < deliveries;) {
        const struct prs_route_delivery *delivery = delivery_at(args, deliveries - 1 - i);
        if (delivery->peer != 0)
            return_sum<TYPE>(args, epoch, delivery);
    }
}

/* After the kernel of return_early() has ended: tells the other ranks of the node that their sums have arrived, and
 * waits until all of them have told this rank. */
PRS_DEVICE void exchange_returned(const struct prs_moe_args &args, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    for (uint32_t q = 1 + threadIdx.x; q < r->place.local_ranks; q += PRS_COMBINE_WARPS * 32) {
        uint32_t peer = prs_place_neighbour(&r->place, q), p = prs_place_distance(&r->place, peer);
        if (blockIdx.x == 0) {
            fence_release_sys(); /* [moe-returned]: the sums of the kernel before, before the flag */
            store_release_sys(args.returned_flags[q] + prs_distance_back(p, r->place.world), epoch);
        }
        /* MUTANT(emulator moe_combine/a_layer_returns_its_sums_early) wait for the sums of all ranks: delete */
        await_word(args, args.returned_flags[0] + p, epoch, PRS_AWAIT_SUM, peer, p);
    }
    __syncthreads(); /* what one thread has waited for, all threads read */
}

#endif
