/* SPDX-License-Identifier: Apache-2.0 */
/* The first part of the kernel of few.cuh, by all warps: a rank sends its tokens to their slots. Then each CTA finds
 * the rows of this rank's experts among the choices of all ranks. */
#ifndef PERSEUS_FUSED_MOE_FEW_ROUTE_CUH
#define PERSEUS_FUSED_MOE_FEW_ROUTE_CUH

#include "fused/core/units.cuh"
#include "fused/moe/choices.cuh"
#include "fused/moe/few.h"
#include "fused/moe/scaled_rows.cuh"

enum {
    FEW_THREADS = PRS_FEW_WARPS * 32,
    FEW_ROW_VECTORS = PRS_FEW_STEP / 16, /* vectors of a row in a stage */
    /* bytes from one row of a unit's results to the next: 16 more than the row, so that the next row uses other
     * banks */
    FEW_OUT_PITCH = PRS_FEW_WEIGHTS * 2 + 16,
    FEW_PACKED_ROWS = 8, /* rows that a warp copies at a time */
    FEW_TERMS = 8,       /* results that a lane reads at a time */
    FEW_PLACES = 4,      /* vectors of places that a thread reads at a time */
    /* of a thread, if consumers need more than the 128 that each thread has at first */
    FEW_PRODUCER_REGISTERS = 96,
    FEW_CONSUMER_REGISTERS = 160,
    /* named barriers, one for each warpgroup of consumers; 0 is __syncthreads() */
    FEW_TURN_BARRIER = 1,
    FEW_OUT_BARRIER = FEW_TURN_BARRIER + PRS_FEW_WARPGROUPS
};
static_assert((uint32_t)PRS_FEW_PIECE == QUANTISE_PART, "a warp quantises what it sends");

/* TYPE: the type of tokens and weights. TILE: how many rows of an expert are multiplied at a time, the N of the tensor
 * cores. */
template <int TYPE, uint32_t TILE> struct few_engine {
    static constexpr int type = TYPE;
    static constexpr uint32_t tile = TILE;
    static constexpr int result = element<TYPE>::sum;                     /* the type of results of both products */
    static constexpr bool packed = TILE == PRS_FEW_WIDE;                  /* pack_rows() copies the tokens */
    static constexpr bool scaled = TYPE == PRS_DTYPE_E4M3;                /* operands have scales of blocks */
    static constexpr uint32_t step = PRS_FEW_STEP / element<TYPE>::bytes; /* columns in a stage */
    static constexpr uint32_t piece_vectors = PRS_FEW_PIECE * element<TYPE>::bytes / 16 / 32; /* vectors of a lane */
    static constexpr bool moves_registers = packed && scaled; /* sums of two blocks and their total */
    /* For units.cuh. */
    static constexpr int cluster = 1;
    /* Layout of shared memory. Wide tiles leave room for fewer stages. */
    static constexpr uint32_t stage_weights = PRS_FEW_WEIGHTS * PRS_FEW_STEP, stage_rows = TILE * PRS_FEW_STEP;
    static constexpr uint32_t stage = stage_weights + stage_rows;
    /* Numbers of floats. A stage has the scales of its rows for 128 columns, those for the next 128, and then struct
     * weight_scales. */
    static constexpr uint32_t row_scales = scaled ? 2 * TILE : 0, stage_scales = scaled ? row_scales + 4 : 0;
    static constexpr int stages = packed ? 5 : scaled ? 7 : 8;
    /* Warps that load rows: at most as many as stages, because a barrier can only tell a phase from the next one. */
    static constexpr uint32_t gatherers = stages < PRS_FEW_GATHERERS ? stages : PRS_FEW_GATHERERS;
    /* units.cuh needs it. Only one warpgroup of consumers reads a unit. */
    static constexpr int unit_readers = 1 + gatherers + PRS_FEW_CONSUMERS;
    static_assert((int)UNIT_SLOTS == (int)PRS_FEW_WARPGROUPS, "each warpgroup has a slot");
    static constexpr uint32_t out = TILE * FEW_OUT_PITCH;
    static constexpr uint32_t at_scales = stages * stage;
    static constexpr uint32_t at_out = at_scales + stages * stage_scales * sizeof(float);
    static constexpr uint32_t at_barriers = at_out + PRS_FEW_WARPGROUPS * out;
    static constexpr uint32_t at_tiles = at_barriers + 512;
    static constexpr uint32_t at_counts = at_tiles + (PRS_FEW_MOST_CHOICES / TILE + PRS_ROUTE_MAX_EXPERTS) * 4;
    static constexpr uint32_t at_list = at_counts + PRS_ROUTE_MAX_EXPERTS * 4;
    static constexpr uint32_t smem_bytes = 232448; /* all that a Hopper CTA can have */
    static_assert(at_list < smem_bytes, "the stages leave room for a list");
    static constexpr uint32_t listed = (smem_bytes - at_list) / 2; /* rows of the list that shared memory holds */
    /* Before the memory becomes stages, it holds the counts of warps and the codes. */
    static constexpr uint32_t at_codes = PRS_FEW_WARPS * PRS_ROUTE_MAX_EXPERTS * 4;
    static_assert(at_codes + PRS_FEW_MOST_CHOICES * 2 <= at_scales, "they fit");
};

/* Rows of one expert. */
struct few_tile {
    uint32_t expert : 10, first : 15, rows : 7; /* expert: its number among this rank's; first: position in the list */
};
static_assert(sizeof(struct few_tile) == 4 && PRS_ROUTE_MAX_EXPERTS <= 1 << 10 && PRS_FEW_MOST_CHOICES <= 1 << 15 &&
                  PRS_FEW_WIDE < 1 << 7,
              "a word for each tile");

struct few_memory {
    uint8_t *base, *out;    /* [stages][stage], [warpgroup of consumers][out]; few_engine has the sizes */
    uint64_t *full, *empty; /* [stages] */
    float *scales;          /* [stages][stage_scales] */
    struct unit_memory units;
    /* blocks: how many blocks of PRS_TILE_M rows, for the status; rows: how many the list has */
    uint32_t *claimed, *tiles, *blocks, *rows;
    struct few_tile *tile;
    uint32_t *count; /* [expert here] */
    /* Until list_rows() has ended, when the memory becomes stages. */
    uint32_t *counts_of_warps; /* [warp][expert here] */
    uint16_t *code;            /* [choice of any rank]: its expert's number among this rank's, or PRS_ROUTE_NONE */
    /* [E::listed]: choices of this rank's experts, expert by expert; if there are more, prs_few.list has all of them */
    uint16_t *list;
};

/* It is the same in all CTAs of a launch. */
struct few_launch {
    uint32_t number, bank;
    uint32_t absent; /* bit r: the launch continues without rank r (doc/decisions/0020) */
};

struct few_unit {
    struct few_tile tile;
    uint32_t product, block, index; /* block: number of the block of columns; index: number of the tile */
};

template <class E> PRS_DEVICE struct few_memory few_memory_map(uint8_t *base)
{
    struct few_memory m;
    m.base = base;
    m.counts_of_warps = (uint32_t *)base;
    m.out = base + E::at_out;
    m.scales = (float *)(base + E::at_scales);
    m.full = (uint64_t *)(base + E::at_barriers);
    m.empty = m.full + E::stages;
    m.units.full = m.empty + E::stages;
    m.units.empty = m.units.full + UNIT_SLOTS;
    m.units.slot = (uint8_t *)(m.units.empty + UNIT_SLOTS);
    m.units.out = m.units.slot + UNIT_SLOTS * UNIT_BYTES;
    m.claimed = (uint32_t *)(m.units.out + UNIT_BYTES);
    m.tiles = m.claimed + 1;
    m.blocks = m.tiles + 1;
    m.rows = m.blocks + 1;
    m.tile = (struct few_tile *)(base + E::at_tiles);
    m.count = (uint32_t *)(base + E::at_counts);
    m.code = (uint16_t *)(base + E::at_codes);
    m.list = (uint16_t *)(base + E::at_list);
    return m;
}

template <class E> PRS_DEVICE void few_memory_init(const struct prs_few_args &args, const struct few_memory &m)
{
    for (uint32_t e = threadIdx.x; e < args.moe.route.experts_per_rank; e += FEW_THREADS)
        m.count[e] = 0;
    for (uint32_t e = threadIdx.x; e < PRS_FEW_WARPS * args.moe.route.experts_per_rank; e += FEW_THREADS)
        m.counts_of_warps[e] = 0;
    if (threadIdx.x == 32) {
        tensor_map_prefetch(&args.few.weights[0]);
        tensor_map_prefetch(&args.few.weights[1]);
        tensor_map_prefetch(&args.few.sent);
    }
    if (threadIdx.x != 0)
        return;
    unit_memory_init<E>(m.units);
    for (int i = 0; i < E::stages; i++) {
        mbarrier_init(&m.full[i], 2); /* the weights, and the rows */
        mbarrier_init(&m.empty[i], PRS_FEW_CONSUMERS);
    }
    mbarrier_init_fence();
}

/* ---- sending ---- */
/* Tells every rank which experts the token goes to. All ranks wait for these words, also ranks that do not get the
 * token. Lane i has the expert of choice i. */
PRS_DEVICE void send_places(const struct prs_few_args &args, const struct few_launch &l, uint32_t token,
                            uint32_t expert)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t lane = threadIdx.x % 32, words = prs_few_place_words(r), four[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        four[i] = prs_few_word(l.number, __shfl_sync(~0u, expert, (lane * 4 + i) % 32));
    if (lane >= words / 4)
        return;
    uint64_t at = (uint64_t)prs_few_slot(r, l.bank, r->place.rank, token) * words + lane * 4;
    for (uint32_t q = 0; q < r->place.world; q++)
        if ((l.absent >> prs_place_after(&r->place, q) & 1) == 0)
            store_relaxed_sys_v4(args.few.places[q] + at, make_uint4(four[0], four[1], four[2], four[3]));
}

/* The address of a token's slot at a rank. */
PRS_DEVICE uint8_t *slot_at(const struct prs_few_args &args, uint32_t slot, uint32_t rank)
{
    const struct prs_route *r = &args.moe.route;
    return args.few.rows[prs_place_distance(&r->place, rank)] + (uint64_t)slot * r->row_bytes;
}

/* Sends a piece of a row to the ranks in the mask, in the type that it has. */
template <class E>
PRS_DEVICE void copy_piece(const struct prs_few_args &args, uint32_t token, uint32_t slot, uint32_t piece,
                           uint32_t ranks)
{
    constexpr uint32_t each = E::piece_vectors;
    const struct prs_route *r = &args.moe.route;
    uint32_t columns = args.few.inputs[0], vectors = columns * element<E::type>::bytes / 16;
    uint32_t lane = threadIdx.x % 32, first = piece * each * 32 + lane;
    const uint4 *from = (const uint4 *)args.moe.unscaled + (uint64_t)token * vectors;
    uint4 x[each];
    float scale = 0;
    uint32_t block = piece * (PRS_FEW_PIECE / PRS_SCALE_BLOCK) + lane, blocks = columns / PRS_SCALE_BLOCK;
    bool scales = E::scaled && lane < PRS_FEW_PIECE / PRS_SCALE_BLOCK && block < blocks;
#pragma unroll
    for (uint32_t i = 0; i < each; i++)
        x[i] = first + i * 32 < vectors ? from[first + i * 32] : make_uint4(0, 0, 0, 0);
    if (scales)
        scale = args.moe.token_scales[(uint64_t)token * blocks + block];
    for (uint32_t rank = 0; rank < r->place.world; rank++) {
        if ((ranks >> rank & 1) == 0)
            continue;
        uint8_t *to = slot_at(args, slot, rank);
#pragma unroll
        for (uint32_t i = 0; i < each; i++)
            if (first + i * 32 < vectors)
                ((uint4 *)to)[first + i * 32] = x[i];
        if (scales)
            ((float *)(to + columns))[block] = scale;
    }
}

/* Quantises a piece of a row of bf16, and sends it as e4m3 with its scales. */
template <class E>
PRS_DEVICE void quantise_piece(const struct prs_few_args &args, uint32_t token, uint32_t slot, uint32_t piece,
                               uint32_t ranks)
{
    uint32_t columns = args.few.inputs[0], world = args.moe.route.place.world;
    const uint8_t *from = (const uint8_t *)args.moe.unscaled + (uint64_t)token * columns * element<E::result>::bytes;
    auto each = [&](auto store) {
        for (uint32_t rank = 0; rank < world; rank++)
            if ((ranks >> rank & 1) != 0)
                store(slot_at(args, slot, rank));
    };
    quantise_part(
        columns, piece * PRS_FEW_PIECE,
        [&](uint32_t column, float(&x)[8]) {
            unpack_vector<E::result>(*(const uint4 *)(from + column * element<E::result>::bytes), x);
        },
        [&](uint32_t column, uint2 packed) { each([&](uint8_t *to) { *(uint2 *)(to + column) = packed; }); },
        [&](uint32_t block, float scale) { each([&](uint8_t *to) { ((float *)(to + columns))[block] = scale; }); });
}

/* Sends a piece of a row to the ranks in the mask, and then raises its flags there. */
template <class E>
PRS_DEVICE void send_piece(const struct prs_few_args &args, const struct few_launch &l, uint32_t token, uint32_t piece,
                           uint32_t ranks)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t lane = threadIdx.x % 32, slot = prs_few_slot(r, l.bank, r->place.rank, token);
    if (E::scaled && args.moe.token_scales == NULL)
        quantise_piece<E>(args, token, slot, piece, ranks);
    else
        copy_piece<E>(args, token, slot, piece, ranks);
    __syncwarp();                                          /* all lanes have stored the piece before it is flagged */
    if (lane < r->place.world && (ranks >> lane & 1) != 0) /* [few-row]: pairs with await_inputs() */
        store_release_sys(args.few.row_flags[prs_place_distance(&r->place, lane)] + slot * args.few.pieces + piece,
                          l.number);
}

template <class E>
PRS_DEVICE void send_token(const struct prs_few_args &args, const struct few_launch &l, uint32_t token, uint32_t piece)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t lane = threadIdx.x % 32, expert = PRS_ROUTE_NONE, ranks = 0;
    if (lane < r->choices && token < token_count(args.moe)) {
        int64_t choice = args.moe.chosen[(uint64_t)token * r->choices + lane];
        int32_t place = prs_route_place(r, args.moe.placement, choice, token);
        /* MUTANT(emulator absent/a_layer_goes_on_without_a_lost_rank) an absent rank has no experts: s/l.absent/0u/ */
        if (place >= 0 && (l.absent >> (uint32_t)place / r->experts_per_rank & 1) != 0)
            place = PRS_ROUTE_ABSENT;
        if (place < 0 && piece == 0)
            count_without_place(args.moe, place, token);
        expert = prs_route_expert(place);
        ranks = place < 0 ? 0 : 1u << expert / r->experts_per_rank;
    }
    ranks = __reduce_or_sync(~0u, ranks);
    if (piece == 0)
        send_places(args, l, token, expert);
    if (ranks != 0)
        send_piece<E>(args, l, token, piece, ranks);
}

/* A CTA claims a piece for each warp. The first pieces of all tokens are sent first, because places go with them. */
template <class E>
PRS_DEVICE void send_tokens(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l)
{
    uint32_t tokens = args.moe.route.tokens, all = tokens * args.few.pieces;
    for (;;) {
        if (threadIdx.x == 0)
            *m.claimed = atomicAdd(&args.moe.claims->pushed, (uint32_t)PRS_FEW_WARPS);
        __syncthreads();
        uint32_t first = *m.claimed, at = first + threadIdx.x / 32;
        if (at < all)
            send_token<E>(args, l, at % tokens, at / tokens);
        if (first + PRS_FEW_WARPS >= all)
            return;
        __syncthreads(); /* all have read the number */
    }
}

/* ---- tiles ---- */
PRS_DEVICE bool places_have_come(uint4 v, uint32_t launch)
{
    /* MUTANT(emulator moe_few/few_tokens_take_one_launch) a place is its own flag:
     * s/prs_few_has_come(v.x, launch) &&// */
    return prs_few_has_come(v.x, launch) && prs_few_has_come(v.y, launch) && prs_few_has_come(v.z, launch) &&
           prs_few_has_come(v.w, launch);
}

/* Whether a rank whose places of this launch are missing has launched several kernels of MoE instead, which wait for
 * this rank. If so, its routes have the number of this rank's next launch, since all launches are counted together; or
 * it has reached a switch of plans that this rank has not reached (plan_switch.h). Its places would have arrived before
 * that switch. */
PRS_DEVICE_OUTLINED bool took_other_path(const struct prs_few_args &args, const uint4 *places, uint32_t launch,
                                         uint32_t source)
{
    uint32_t p = prs_place_distance(&args.moe.route.place, source);
    if (p == 0)
        return false;
    if (*(const volatile uint32_t *)(args.moe.message_flags[0] + p) == launch_epoch(&args.moe.sync))
        return true;
    const uint32_t *word = (const uint32_t *)(args.few.switches + prs_switch_neighbour_word(p));
    uint32_t its = load_acquire_sys(word); /* [plan-switch]: before the places are read once more */
    return its == ((const volatile struct prs_switch_state *)args.few.switches)->switches + 1 &&
           !places_have_come(load_relaxed_sys_v4(places), launch);
}

/* Makes both ranks give up: records the fault here, and tells the other rank. */
PRS_DEVICE_OUTLINED void refuse_path(const struct prs_few_args &args, uint32_t launch, uint32_t source)
{
    record_fault(&args.moe.sync, PRS_FAULT_PATH, source, 0, launch, 0, 0);
    give_up(&args.moe.sync, PRS_FAULT_ABORTED, args.moe.route.place.rank, 0, 0, 0, 0);
}

/* For four places of a rank that was left out: those that are missing name no expert. They are written to the memory
 * that is polled. So all CTAs see the same places, and no old launch number can match after numbers have wrapped
 * around. */
PRS_DEVICE_OUTLINED void replace_places_of_absent(uint4 *at, uint32_t launch)
{
    uint32_t none = prs_few_word(launch, PRS_ROUTE_NONE);
    if (!places_have_come(load_relaxed_sys_v4(at), launch))
        store_relaxed_sys_v4(at, make_uint4(none, none, none, none));
}

/* Waits for up to FEW_PLACES vectors of four places of a token, FEW_THREADS vectors apart. It reads all of them before
 * it waits for one. first: index of the first one among all `all` vectors. If this launch gives up, places that are
 * missing name no expert. */
PRS_DEVICE void await_places(const struct prs_few_args &args, const struct few_launch &l, uint32_t first, uint32_t all,
                             uint4 (&v)[FEW_PLACES])
{
    const struct prs_route *r = &args.moe.route;
    uint4 *at = (uint4 *)(args.few.places[0] + (uint64_t)prs_few_slot(r, l.bank, 0, 0) * prs_few_place_words(r));
    uint32_t none = prs_few_word(l.number, PRS_ROUTE_NONE);
    struct wait_clock clock = {0, 0};
    for (;;) {
        uint32_t missing = all, seen = 0;
#pragma unroll
        for (uint32_t i = 0; i < FEW_PLACES; i++)
            if (first + i * FEW_THREADS < all)
                v[i] = load_relaxed_sys_v4(at + first + i * FEW_THREADS);
            else
                v[i] = make_uint4(none, none, none, none);
#pragma unroll
        for (uint32_t i = 0; i < FEW_PLACES; i++)
            if (!places_have_come(v[i], l.number))
                missing = first + i * FEW_THREADS, seen = v[i].x >> 16;
        if (missing == all)
            return;
        uint32_t source = missing / (r->tokens * (prs_few_place_words(r) / 4));
        if (asks_for_absent(clock, l.absent, source) && is_left_out(&args.moe.sync, source)) {
            replace_places_of_absent(at + missing, l.number);
            continue;
        }
        /* MUTANT(emulator moe_few/ranks_that_take_different_paths_are_named) the other path is noticed:
         * s/took_other_path(args, at + missing, l.number, source)/false/ */
        if (clock.spins % SPINS_PER_CLOCK_READ == SPINS_PER_CLOCK_READ - 1 &&
            took_other_path(args, at + missing, l.number, source))
            refuse_path(args, l.number, source);
        if (!keep_waiting(&args.moe.sync, &clock, PRS_AWAIT_ROUTES, source, missing, l.number & 0xffff, seen))
            break;
    }
#pragma unroll
    for (uint32_t i = 0; i < FEW_PLACES; i++)
        if (!places_have_come(v[i], l.number))
            v[i] = make_uint4(none, none, none, none);
}

/* Keeps which of this rank's experts every choice has, and counts their rows. */
PRS_DEVICE void take_places(const struct prs_few_args &args, const struct few_memory &m, const struct few_launch &l)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t of_token = prs_few_place_words(r) / 4, all = r->place.world * r->tokens * of_token;
    uint32_t first_here = r->place.rank * r->experts_per_rank;
    for (uint32_t first = threadIdx.x; first < all; first += FEW_PLACES * FEW_THREADS) {
        uint4 v[FEW_PLACES];
        await_places(args, l, first, all, v);
#pragma unroll
        for (uint32_t k = 0; k < FEW_PLACES; k++) {
            uint32_t i = first + k * FEW_THREADS, four[4] = {v[k].x, v[k].y, v[k].z, v[k].w}, slot = i % of_token * 4;
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                uint32_t expert = prs_few_expert(four[j]) - first_here; /* of another rank, or none: too large */
                bool here = expert < r->experts_per_rank;
                if (i >= all || slot + j >= r->choices)
                    continue;
                m.code[i / of_token * r->choices + slot + j] = (uint16_t)(here ? expert : PRS_ROUTE_NONE);
                if (here)
                    atomicAdd(&m.count[expert], 1u);
            }
        }
    }
}

/* One warp makes tiles from the counts, and turns each count into the position of its expert's first row in the
 * list. */
template <class E> PRS_DEVICE void make_tiles(const struct prs_few_args &args, const struct few_memory &m)
{
    uint32_t lane = threadIdx.x % 32, experts = args.moe.route.experts_per_rank, carry = 0, blocks = 0;
    for (uint32_t first = 0; first < experts; first += 32) { /* rows in the low half of a word, tiles in the high one */
        uint32_t e = first + lane, rows = e < experts ? m.count[e] : 0;
        uint32_t mine = rows | prs_ceil_div(rows, E::tile) << 16, sum = mine;
        for (uint32_t d = 1; d < 32; d *= 2) {
            uint32_t before = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? before : 0;
        }
        uint32_t at = carry + sum - mine, row = at & 0xffff, tile = at >> 16;
        for (uint32_t i = 0; i < rows; i += E::tile)
            m.tile[tile++] = {e, row + i, rows - i < E::tile ? rows - i : E::tile};
        if (e < experts)
            m.count[e] = row;
        carry += __shfl_sync(~0u, sum, 31);
        blocks += __reduce_add_sync(~0u, prs_ceil_div(rows, PRS_TILE_M));
    }
    if (lane == 0) {
        *m.tiles = carry >> 16;
        *m.rows = carry & 0xffff;
        *m.blocks = blocks;
    }
}

/* How many consecutive choices a warp handles in list_rows(). */
PRS_DEVICE uint32_t choices_of_warp(const struct prs_route *r)
{
    return prs_ceil_div(prs_few_choices(r), FEW_THREADS) * 32;
}

/* Counts the rows of each of this rank's experts among a warp's choices. */
PRS_DEVICE void count_rows(const struct prs_few_args &args, const struct few_memory &m)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t each = choices_of_warp(r), all = prs_few_choices(r), begin = threadIdx.x / 32 * each;
    uint32_t *count = m.counts_of_warps + threadIdx.x / 32 * r->experts_per_rank;
    for (uint32_t choice = begin + threadIdx.x % 32; choice < begin + each && choice < all; choice += 32)
        if (m.code[choice] != PRS_ROUTE_NONE)
            atomicAdd(&count[m.code[choice]], 1u);
}

/* Turns the counts of warps into the positions of their first rows in the list. */
PRS_DEVICE void place_rows(const struct prs_few_args &args, const struct few_memory &m)
{
    uint32_t experts = args.moe.route.experts_per_rank;
    for (uint32_t e = threadIdx.x; e < experts; e += FEW_THREADS) {
        uint32_t at = m.count[e];
        for (uint32_t warp = 0; warp < PRS_FEW_WARPS; warp++) {
            uint32_t rows = m.counts_of_warps[warp * experts + e];
            m.counts_of_warps[warp * experts + e] = at;
            /* MUTANT(emulator moe_few/few_tokens_take_one_launch) each warp has places of its own: delete */
            at += rows;
        }
    }
}

/* The choice at a position of the list. The list is in shared memory, or, if choices are so skewed that it has no room
 * there, in memory. */
template <class E>
PRS_DEVICE uint32_t few_listed(const struct prs_few_args &args, const struct few_memory &m, uint32_t at)
{
    /* MUTANT(emulator moe_few/more_than_4096_choices_are_right) a long list is in memory: s/E::listed/~0u/ */
    return *m.rows <= E::listed ? m.list[at] : *(const volatile uint32_t *)(args.few.list + at);
}

/* Lists rows by expert, in the order of choices. All CTAs must have the same rows in each tile, in the same order: one
 * stores inner rows where another reads them. So all of them may write the same list in memory. */
template <class E> PRS_DEVICE void list_rows(const struct prs_few_args &args, const struct few_memory &m)
{
    const struct prs_route *r = &args.moe.route;
    uint32_t lane = threadIdx.x % 32, each = choices_of_warp(r), all = prs_few_choices(r);
    uint32_t begin = threadIdx.x / 32 * each;
    uint32_t *at = m.counts_of_warps + threadIdx.x / 32 * r->experts_per_rank;
    for (uint32_t first = begin; first < begin + each && first < all; first += 32) {
        uint32_t choice = first + lane, expert = choice < all ? m.code[choice] : PRS_ROUTE_NONE;
        bool here = expert != PRS_ROUTE_NONE;
        uint32_t same = __match_any_sync(~0u, expert), before = __popc(same & ((1u << lane) - 1));
        uint32_t place = here ? at[expert] + before : 0;
        __syncwarp(); /* all lanes have read the place */
        if (here && before == 0)
            /* MUTANT(emulator moe_few/few_tokens_take_one_launch) rows of a warp have places of their own: delete */
            at[expert] += __popc(same);
        if (here && *m.rows <= E::listed)
            m.list[place] = (uint16_t)choice;
        else if (here)
            *(volatile uint32_t *)(args.few.list + place) = choice;
        __syncwarp(); /* the next places are there */
    }
}

#endif
