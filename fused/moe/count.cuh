/* SPDX-License-Identifier: Apache-2.0 */
/* The first part of routing (route.cuh): CTAs claim chunks of tokens, and number the choices of each, expert by
 * expert. */
#ifndef PERSEUS_FUSED_COUNT_CUH
#define PERSEUS_FUSED_COUNT_CUH

#include "fused/moe/choices.cuh"

struct route_memory {
    uint32_t *table[PRS_ROUTE_TABLES]; /* [experts] each */
    uint32_t *total;
    uint32_t *claimed;                     /* the number that thread 0 has claimed last */
    uint32_t *mine;                        /* bits of the chunks that this CTA has counted */
    uint16_t *code, *index, *lead, *relay; /* [choice of a chunk] */
};

enum { NO_CHUNK = ~0u };

/* A chunk of this rank's tokens. */
struct routing_chunk {
    uint32_t chunk, epoch, bank;
    uint32_t first, tokens;
};

PRS_DEVICE struct route_memory route_memory_map(const struct prs_moe_args &args, uint8_t *base)
{
    const struct prs_route *r = &args.route;
    uint32_t choices = (prs_ceil_div(r->tokens, r->chunks) * r->choices + 7) / 8 * 8;
    struct route_memory m;
    uint32_t *words = (uint32_t *)base;
    for (uint32_t i = 0; i < PRS_ROUTE_TABLES; i++)
        m.table[i] = words + i * prs_moe_table_words(r);
    m.total = words + PRS_ROUTE_TABLES * prs_moe_table_words(r);
    m.claimed = m.total + PRS_ROUTE_TOTALS;
    m.mine = m.claimed + 4;
    m.code = (uint16_t *)(m.claimed + PRS_ROUTE_CLAIM_WORDS);
    m.index = m.code + choices;
    m.lead = m.index + choices;
    m.relay = m.lead + choices;
    return m;
}

/* One warp replaces v by its exclusive prefix sums; returns the total. */
PRS_DEVICE uint32_t scan_exclusive(uint32_t *v, uint32_t count)
{
    uint32_t lane = threadIdx.x % 32, carry = 0;
    for (uint32_t first = 0; first < count; first += 32) {
        uint32_t mine = first + lane < count ? v[first + lane] : 0, sum = mine;
        for (uint32_t d = 1; d < 32; d *= 2) {
            uint32_t before = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? before : 0;
        }
        if (first + lane < count)
            v[first + lane] = carry + sum - mine;
        carry += __shfl_sync(~0u, sum, 31);
    }
    __syncwarp();
    return carry;
}

/* All threads call it, and get the same number. */
PRS_DEVICE uint32_t claim_for_cta(const struct route_memory &m, uint32_t *counter)
{
    __syncthreads(); /* all have read the number before */
    if (threadIdx.x == 0)
        *m.claimed = atomicAdd(counter, 1u);
    __syncthreads();
    return *m.claimed;
}

PRS_DEVICE struct routing_chunk chunk_at(const struct prs_moe_args &args, uint32_t epoch, uint32_t chunk)
{
    uint32_t count = token_count(args), each = prs_route_chunk_tokens(&args.route, count), first = chunk * each;
    uint32_t left = count > first ? count - first : 0;
    return {chunk, epoch, epoch & 1, first, left < each ? left : each};
}

/* ---- count ---- */
/* First finds the expert of each choice, then which of them are leads. Choices without a place are counted in the first
 * reading. */
PRS_DEVICE void read_choices(const struct prs_moe_args &args, const struct route_memory &m,
                             const struct routing_chunk &at, bool again)
{
    const struct prs_route *r = &args.route;
    uint32_t choices = at.tokens * r->choices;
    uint16_t *experts = m.lead; /* number_choices() fills it later */
    for (uint32_t i = threadIdx.x; i < choices; i += PRS_ROUTE_THREADS) {
        uint32_t token = at.first + i / r->choices;
        int32_t place = prs_route_place(r, args.placement, args.chosen[(uint64_t)at.first * r->choices + i], token);
        if (place < 0 && !again)
            count_without_place(args, place, token);
        experts[i] = prs_route_expert(place);
    }
    /* MUTANT(emulator moe/tokens_go_where_the_map_of_their_rank_says) a token's choices are found first: delete */
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < (choices + 7) / 8 * 8; i += PRS_ROUTE_THREADS)
        m.code[i] = (uint16_t)(i < choices ? prs_route_code(r, experts + i / r->choices * r->choices, i % r->choices)
                                           : PRS_ROUTE_NONE);
}

/* One thread per expert goes through all choices of the chunk. It uses no atomics, so that every result has the same
 * position in every run. */
PRS_DEVICE void number_choices(const struct prs_moe_args &args, const struct route_memory &m,
                               const struct routing_chunk &at, bool again)
{
    const struct prs_route *r = &args.route;
    uint32_t choices = at.tokens * r->choices;
    for (uint32_t e = threadIdx.x; e < r->experts; e += PRS_ROUTE_THREADS) {
        uint32_t rows = 0, leads = 0, relays = 0;
        for (uint32_t i = 0; i < choices; i += 8) {
            uint4 eight = *(const uint4 *)(m.code + i);
            uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                uint32_t code = pairs[j / 2] >> j % 2 * 16 & 0xffff;
                if ((code & PRS_ROUTE_NONE) == e) {
                    m.index[i + j] = (uint16_t)rows++;
                    if (code & PRS_ROUTE_LEAD)
                        m.lead[i + j] = (uint16_t)leads++;
                    if (code & PRS_ROUTE_RELAY)
                        m.relay[i + j] = (uint16_t)relays++;
                }
            }
        }
        if (!again)
            args.chunks[at.chunk * r->experts + e] = rows | leads << 16 | (uint64_t)relays << 32;
    }
}

/* Reads a chunk's choices into shared memory and numbers them. Out of line, because it is called twice. */
PRS_DEVICE_OUTLINED void take_chunk(const struct prs_moe_args &args, uint32_t epoch, uint32_t chunk, bool again)
{
    struct route_memory m = route_memory_map(args, dynamic_shared());
    struct routing_chunk at = chunk_at(args, epoch, chunk);
    __syncthreads(); /* all have read the chunk before */
    read_choices(args, m, at, again);
    __syncthreads();
    number_choices(args, m, at, again);
    __syncthreads();
}

/* Counts all chunks that it can claim. Returns the last one, which is still in shared memory, or NO_CHUNK. When it
 * returns a chunk, all chunks of the rank are counted. */
PRS_DEVICE uint32_t count_chunks(const struct prs_moe_args &args, const struct route_memory &m, uint32_t epoch)
{
    const struct prs_route *r = &args.route;
    uint32_t last = NO_CHUNK;
    for (uint32_t i = threadIdx.x; i < PRS_ROUTE_MAX_CHUNKS / 32; i += PRS_ROUTE_THREADS)
        m.mine[i] = 0;
    for (uint32_t chunk; (chunk = claim_for_cta(m, &args.claims->chunks)) < r->chunks; last = chunk) {
        take_chunk(args, epoch, chunk, false);
        if (threadIdx.x == 0) {
            m.mine[chunk / 32] |= 1u << chunk % 32;
            add_acq_rel_gpu(&args.claims->counted, 1); /* [chunk-counts]: after the counts of all threads */
        }
    }
    if (last != NO_CHUNK && threadIdx.x == 0)
        wait_flag(&args.sync, &args.claims->counted, r->chunks, PRS_AWAIT_CTAS, r->place.rank, last);
    __syncthreads();
    return last;
}

#endif
