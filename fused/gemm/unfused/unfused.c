/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/gemm/unfused/unfused.h"

#include <errno.h>
#include <string.h>

#include "fused/gemm/norm.h"
#include "fused/gemm/scales.h"
#include "fused/gemm/tuning.h"
#include "fused/gemm/unfused/lt.h"
#include "fused/gemm/unfused/inbox.h"
#include "transport/util/error.h"

/* How the ranks divide the matrix that they exchange, the whole partial product or the gathered A. Parts of an
 * all-reduce's result are stored as whole vectors of 16 bytes, or of 32. */
static struct prs_slice slice_of(const struct prs_gemm_plan *p)
{
    const struct prs_gemm_shape *s = &p->shape;
    return prs_slice_of((uint64_t)p->rows * (s->op == PRS_GEMM_ALLGATHER ? s->k : s->n), p->args.schedule.place.world,
                        s->op == PRS_GEMM_ALLREDUCE ? PRS_INBOX_ITEM : 1);
}

static struct prs_slice_bytes slice_bytes_of(const struct prs_gemm_plan *p)
{
    struct prs_slice slice = slice_of(p);
    bool gathers = p->shape.op == PRS_GEMM_ALLGATHER;
    return prs_slice_scale(&slice, gathers ? prs_operand_bytes(&p->shape) : prs_sum_bytes(&p->shape));
}

/* Bytes of a product from which the epilogue makes C. */
static uint64_t product_bytes(const struct prs_gemm_plan *p)
{
    return prs_lt_apart(&p->shape) ? (uint64_t)p->shape.m * p->shape.n * prs_sum_bytes(&p->shape) : 0;
}

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + PRS_EXCHANGE_ALIGNMENT - 1) / PRS_EXCHANGE_ALIGNMENT * PRS_EXCHANGE_ALIGNMENT;
}

/* Where the gathered scales of A are: after the gathered A of the most rows. */
static uint64_t scales_place(const struct prs_gemm_plan *p)
{
    return aligned((uint64_t)p->shape.m * p->shape.k * prs_operand_bytes(&p->shape));
}

static uint64_t scales_bytes(const struct prs_gemm_plan *p, uint32_t each_row)
{
    return aligned(each_row * prs_lt_scale_pitch(p->shape.m) * sizeof(float));
}

/* Where such a product lies: after the gathered A and its scales. */
static uint64_t product_place(const struct prs_gemm_plan *p)
{
    return scales_place(p) + scales_bytes(p, prs_scales_sent(&p->shape));
}

/* Between nodes: where the scales of each rank's rows of A lie without gaps, as they are sent. They come after the
 * other three. */
static uint64_t beside_place(const struct prs_gemm_plan *p)
{
    return product_place(p) + aligned(product_bytes(p));
}

static uint64_t staging_bytes(const struct prs_gemm_plan *p)
{
    struct prs_slice_bytes slice = slice_bytes_of(p);
    uint32_t far = p->args.schedule.place.nodes - 1;
    if (p->shape.op == PRS_GEMM_ALLGATHER)
        return beside_place(p) + (far != 0 ? (uint64_t)p->shape.m * prs_scales_sent(&p->shape) * sizeof(float) : 0);
    if (far == 0)
        return slice.all_bytes;
    return prs_exchange_received(&slice, p->args.schedule.place.nodes, far);
}

/* One handle and one workspace serve all plans of a context, whose launches run one after the other. */
struct lt_shared {
    void *handle;
    struct prs_local workspace; /* which goes with the context */
};

static void close_shared(void *data)
{
    struct lt_shared *shared = data;
    prs_lt_release(shared->handle);
    free(shared);
}

static int share_lt(struct prs_fused *ctx, struct lt_shared **out)
{
    static const char key;
    struct lt_shared *shared = prs_context_kept(ctx, &key);
    int r = 0;
    if (!shared) {
        shared = calloc(1, sizeof(*shared));
        r = shared ? prs_local_take(ctx, PRS_LT_WORKSPACE, 0, &shared->workspace)
                   : prs_fail(-ENOMEM, "fused: no memory for what plans share");
        if (!r)
            r = prs_context_keep(ctx, &key, shared, close_shared);
        if (r) {
            if (shared)
                prs_local_give_back(ctx, &shared->workspace);
            free(shared);
        }
    }
    *out = shared;
    return r;
}

static int open_lt(struct prs_gemm_plan *p)
{
    struct prs_fused *ctx = p->base.ctx;
    struct prs_gemm_shape shape = p->shape;
    struct lt_shared *shared;
    int r;
    if (shape.k == 0)
        return 0;
    r = share_lt(ctx, &shared);
    if (p->args.schedule.place.world == 1)
        shape.op = PRS_GEMM_ALONE; /* no other rank adds to it */
    if (!r)
        r = prs_lt_open(&shared->handle, shared->workspace.at, &shape, ctx->config.max_sms, &p->lt);
    p->base.shared_bytes += r ? 0 : PRS_LT_WORKSPACE;
    return r;
}

/* How a launch of `rows` rows is added up by inboxes. */
struct inbox_parts {
    uint32_t all, part, part_step; /* as in struct prs_unfused_inbox_sum */
    uint32_t hops, vectors;        /* vectors: prs_inbox_bank_bytes() */
};

static struct inbox_parts inbox_parts(const struct prs_gemm_plan *p, uint32_t rows)
{
    const struct prs_place *at = &p->args.schedule.place;
    uint32_t all = rows * p->shape.n;
    uint32_t slice = (uint32_t)prs_slice_of(all, at->world, PRS_INBOX_ITEM).each; /* 16 MB at most */
    if (p->shape.op == PRS_GEMM_REDUCE_SCATTER)
        return (struct inbox_parts){all, all / at->world, all / at->world, 1, 1};
    if (rows <= prs_tuning_one_hop_rows(&p->shape, at))
        return (struct inbox_parts){all, all, 0, 1, 1};
    return (struct inbox_parts){all, slice, slice, 2, 1 + PRS_INBOX_ITEM * prs_result_bytes(&p->shape) / 16};
}

bool prs_unfused_norms(const struct prs_gemm_plan *p)
{
    return p->info.tuning.path == PRS_GEMM_PATH_UNFUSED && prs_unfused_has_inbox(p) &&
           inbox_parts(p, p->rows).hops == 1;
}

static uint64_t inbox_bytes(const struct prs_gemm_plan *p, uint32_t rows)
{
    struct inbox_parts parts = inbox_parts(p, rows);
    return prs_inbox_bytes(prs_inbox_bank_bytes(p->args.schedule.place.local_ranks, parts.part, parts.vectors));
}

/* The most rows in one hop may need more than the most rows in two. */
static void need_inbox(struct prs_gemm_plan *p)
{
    const struct prs_place *at = &p->args.schedule.place;
    uint32_t one = prs_tuning_one_hop_rows(&p->shape, at);
    uint64_t bytes, more;
    p->inbox_rows = prs_tuning_inbox_rows(&p->shape, at);
    if (p->inbox_rows == 0)
        return;
    bytes = inbox_bytes(p, p->inbox_rows);
    more = inbox_bytes(p, one != 0 && one < p->inbox_rows ? one : p->inbox_rows);
    prs_plan_need(&p->base, PRS_GEMM_INBOX, (struct prs_need){PRS_SYMMETRIC_CLEAN, false, PRS_POOL_INBOX},
                  bytes > more ? bytes : more);
}

/* Bytes for copies of scales of blocks in cuBLASLt's layout: those of A, then those of B. */
static uint64_t scratch_bytes(const struct prs_gemm_plan *p)
{
    uint32_t k_blocks = p->shape.k / PRS_SCALE_BLOCK, n_blocks = p->shape.n / PRS_SCALE_BLOCK;
    return scales_bytes(p, k_blocks) + n_blocks * prs_lt_block_pitch(p->shape.k) * sizeof(float);
}

int prs_unfused_open(struct prs_gemm_plan *p)
{
    const struct prs_schedule *s = &p->args.schedule;
    bool far = s->place.nodes > 1;
    const char *pool;
    int r = open_lt(p);
    if (!r && s->place.world == 1 && prs_lt_apart(&p->shape))
        r = prs_plan_local(&p->base, product_bytes(p), 0);
    if (!r && p->shape.scaling == PRS_SCALING_BLOCKS)
        r = prs_plan_scratch(&p->base, scratch_bytes(p));
    if (s->place.world == 1 || r)
        return r;
    /* On one node every launch ends when all ranks have read what the others wrote, so that all plans of a context can
     * use the same memory. A sum by inboxes is different: another rank may begin to gather rows before this rank has
     * read its own product. So products have memory of their own. Between nodes each plan awaits credit for its
     * memory. */
    pool = p->shape.op == PRS_GEMM_ALLGATHER ? PRS_POOL_GATHERED : PRS_POOL_PRODUCTS;
    prs_plan_need(&p->base, PRS_GEMM_STAGING, (struct prs_need){PRS_SYMMETRIC_DATA, far, far ? NULL : pool},
                  staging_bytes(p));
    prs_plan_need(&p->base, PRS_GEMM_FLAGS, (struct prs_need){PRS_SYMMETRIC_CLEAN, false, NULL},
                  PRS_MAX_LOCAL_RANKS * sizeof(uint32_t));
    if (far)
        prs_plan_need(&p->base, PRS_GEMM_SIGNALS, (struct prs_need){PRS_SYMMETRIC_SIGNALS, true, NULL},
                      prs_exchange_word(s, PRS_EXCHANGE_WORDS, 0) * sizeof(uint64_t));
    need_inbox(p);
    return 0;
}

/* Adds CUDA's reason to the error of a refused launch. */
static int launched(int r, const char *what)
{
    return r == 0 ? 0
                  : prs_fail(r, "fused: CUDA refused to launch %s: %s", what, cudaGetErrorString(cudaGetLastError()));
}

static int copy(const struct prs_unfused_copy *c, cudaStream_t stream)
{
    return launched(prs_unfused_copy(c, stream), "a copy of rows");
}

int prs_unfused_copy_rows(const void *from, void *to, uint64_t bytes, cudaStream_t stream)
{
    return copy(&(struct prs_unfused_copy){.from = from, .bytes = bytes, .to = {to}, .copies = 1}, stream);
}

static bool gathers_scales(const struct prs_gemm_plan *p)
{
    return p->args.schedule.place.world > 1 && prs_scales_sent(&p->shape) != 0;
}

/* Describes a copy of the scales of a rank's rows of A from `from` to where row `row` is their first. at, pitch: the
 * address and pitch of the scales there. */
static struct prs_copied_scales scales_to(const struct prs_gemm_plan *p, const float *from, uint64_t from_step,
                                          uint8_t *const *at, uint32_t ranks, uint64_t row, uint64_t pitch)
{
    struct prs_copied_scales s = {.from = from, .from_step = from_step, .to_step = pitch, .copies = ranks};
    s.lines = p->args.scales.k_blocks != 0 ? p->args.scales.k_blocks : 1;
    s.each = (uint32_t)prs_scales_rows_of_a(p, &p->operands);
    for (uint32_t i = 0; i < ranks; i++)
        s.to[i] = (float *)(void *)at[i] + row;
    return s;
}

/* The same, to the place where cuBLASLt reads them, on all ranks of the node. */
static struct prs_copied_scales scales_to_all(const struct prs_gemm_plan *p, const float *from, uint64_t from_step,
                                              uint32_t rank)
{
    const struct prs_place *at = &p->args.schedule.place;
    uint8_t *scales[PRS_MAX_LOCAL_RANKS];
    for (uint32_t i = 0; i < at->local_ranks; i++)
        scales[i] = p->args.staging[i] + scales_place(p);
    return scales_to(p, from, from_step, scales, at->local_ranks, (uint64_t)rank * (p->rows / at->world),
                     prs_lt_scale_pitch(p->rows));
}

/* For a matrix at at[p] in neighbour p, of which every rank of this node has its own slice: puts this rank's slice to
 * the counterparts, waits for theirs, and copies them to the neighbours. */
static int spread(struct prs_gemm_plan *p, const struct prs_exchange *x, uint8_t *const *at, cudaStream_t stream)
{
    const struct prs_schedule *s = &p->args.schedule;
    int r = launched(prs_unfused_cross(&p->args, x, stream), "an exchange between nodes");
    for (uint32_t i = 1; i < s->place.nodes && r == 0; i++) {
        uint32_t block = (s->place.node + i) % s->place.nodes * s->place.local_ranks + s->place.local_rank;
        uint64_t first = prs_slice_offset(&x->slice, block);
        struct prs_unfused_copy c = {
            .from = at[0] + first, .bytes = prs_slice_len(&x->slice, block), .copies = s->place.local_ranks - 1};
        for (uint32_t k = 0; k < c.copies; k++)
            c.to[k] = at[k + 1] + first;
        if (x->beside_bytes != 0)
            c.scales = scales_to_all(p, (const float *)(const void *)(at[0] + x->beside + block * x->beside_bytes),
                                     prs_scales_rows_of_a(p, &p->operands), block);
        r = copy(&c, stream);
    }
    return r;
}

/* For the caller. */
static int keep(struct prs_gemm_plan *p, const void *gathered, cudaStream_t stream)
{
    void *to = p->operands.gathered;
    return to ? prs_unfused_copy_rows(gathered, to, (uint64_t)p->rows * p->shape.k * prs_operand_bytes(&p->shape),
                                      stream)
              : 0;
}

/* Sets *at to where cuBLASLt finds the scales of A. It accepts only one pitch for scales of blocks. */
static int place_scales(struct prs_gemm_plan *p, const float **at, cudaStream_t stream)
{
    struct prs_unfused_copy c = {.copies = 1};
    uint64_t pitch = prs_lt_scale_pitch(p->rows);
    uint8_t *scratch = p->base.scratch.at;
    *at = gathers_scales(p) ? (const float *)(const void *)(p->args.staging[0] + scales_place(p)) : p->args.scales.a;
    if (gathers_scales(p) || p->args.scales.k_blocks == 0 || p->args.scales.a_pitch == pitch)
        return 0;
    c.scales = scales_to(p, p->args.scales.a, p->args.scales.a_pitch, &scratch, 1, 0, pitch);
    *at = c.scales.to[0];
    return launched(prs_unfused_copy(&c, stream), "a copy of scales");
}

/* The same of B. */
static int place_scales_of_b(struct prs_gemm_plan *p, const float **at, cudaStream_t stream)
{
    const struct prs_scales *x = &p->args.scales;
    uint64_t pitch = prs_lt_block_pitch(p->shape.k);
    struct prs_unfused_copy c = {.copies = 0};
    *at = x->b;
    if (x->k_blocks == 0 || x->k_blocks == pitch)
        return 0;
    c.scales = (struct prs_copied_scales){.from = x->b,
                                          .from_step = x->k_blocks,
                                          .to_step = pitch,
                                          .lines = p->shape.n / PRS_SCALE_BLOCK,
                                          .each = x->k_blocks,
                                          .copies = 1};
    c.scales.to[0] = (float *)(void *)((uint8_t *)p->base.scratch.at + scales_bytes(p, x->k_blocks));
    *at = c.scales.to[0];
    return launched(prs_unfused_copy(&c, stream), "a copy of scales");
}

/* Sends this rank's rows of A, with their scales, to all ranks of the node. */
static int send_rows(struct prs_gemm_plan *p, const void *a, const struct prs_slice_bytes *slice, cudaStream_t stream)
{
    const struct prs_place *at = &p->args.schedule.place;
    uint64_t first = prs_slice_offset(slice, at->rank);
    struct prs_unfused_copy c = {.from = a, .bytes = prs_slice_len(slice, at->rank), .copies = at->local_ranks};
    for (uint32_t i = 0; i < at->local_ranks; i++)
        c.to[i] = p->args.staging[i] + first;
    if (gathers_scales(p))
        c.scales = scales_to_all(p, p->args.scales.a, p->args.scales.a_pitch, at->rank);
    return copy(&c, stream);
}

/* Between nodes: makes this rank's scales ready to be put with its rows. */
static int pack_scales(struct prs_gemm_plan *p, struct prs_exchange *x, cudaStream_t stream)
{
    uint64_t rows = prs_scales_rows_of_a(p, &p->operands);
    struct prs_unfused_copy c = {.copies = 0};
    uint8_t *to;
    x->beside = beside_place(p);
    x->beside_bytes = rows * prs_scales_sent(&p->shape) * sizeof(float);
    to = p->args.staging[0] + x->beside + p->args.schedule.place.rank * x->beside_bytes;
    c.scales = scales_to(p, p->args.scales.a, p->args.scales.a_pitch, &to, 1, 0, rows);
    return launched(prs_unfused_copy(&c, stream), "a copy of scales");
}

static int gather(struct prs_gemm_plan *p, const void *a, cudaStream_t stream)
{
    const struct prs_schedule *s = &p->args.schedule;
    struct prs_exchange x = {.slice = slice_bytes_of(p),
                             .window = p->args.far.staging_window,
                             .word = PRS_EXCHANGE_THERE,
                             .what = PRS_AWAIT_CHUNK,
                             .credit = 1};
    int r = send_rows(p, a, &x.slice, stream);
    if (r == 0 && s->place.nodes > 1 && gathers_scales(p))
        r = pack_scales(p, &x, stream);
    if (r == 0 && s->place.nodes > 1)
        r = spread(p, &x, p->args.staging, stream);
    if (!r)
        r = launched(prs_unfused_meet(&p->args, stream), "a meeting of the ranks");
    return r ? r : keep(p, p->args.staging[0], stream);
}

/* Adds up the partial sums that the ranks of this node have for a rank's slice, this rank's last; for its own slice
 * then the sums that other nodes sent. */
static int add_slice(struct prs_gemm_plan *p, const struct prs_slice *slice, uint32_t rank, uint8_t *const *to,
                     uint32_t copies, cudaStream_t stream)
{
    const struct prs_schedule *s = &p->args.schedule;
    uint32_t far = s->place.nodes - 1;
    struct prs_slice_bytes bytes = prs_slice_scale(slice, prs_sum_bytes(&p->shape));
    struct prs_unfused_sum sum = {.elements = prs_slice_count(slice, rank),
                                  .near_count = s->place.local_ranks,
                                  .copies = copies,
                                  .type = p->shape.sum_dtype,
                                  .result = p->shape.sum_dtype,
                                  .far_step = prs_exchange_slot_bytes(&bytes)};
    for (uint32_t i = 0; i < s->place.local_ranks; i++)
        sum.near[i] = p->args.staging[(i + 1) % s->place.local_ranks] + prs_slice_offset(&bytes, rank);
    if (rank == s->place.rank) {
        sum.epilogue = p->args.epilogue;
        sum.result = p->shape.c_dtype;
        sum.first = p->shape.op == PRS_GEMM_ALLREDUCE ? prs_slice_first(slice, rank) : 0;
        sum.columns = p->shape.n;
    }
    if (rank == s->place.rank && far != 0) {
        sum.far_count = far;
        sum.far = p->args.staging[0] + prs_exchange_received(&bytes, s->place.nodes, 0);
    }
    memcpy(sum.to, to, copies * sizeof(*to));
    return launched(prs_unfused_add(&sum, stream), "a sum over ranks");
}

/* Puts this node's sums to each counterpart, and waits for the counterparts' sums for this rank's slice. */
static int cross_sums(struct prs_gemm_plan *p, const struct prs_slice *slice, cudaStream_t stream)
{
    const struct prs_schedule *s = &p->args.schedule;
    struct prs_slice_bytes bytes = prs_slice_scale(slice, prs_sum_bytes(&p->shape));
    struct prs_exchange x = {.slice = bytes,
                             .source = prs_exchange_sent(&bytes, 0),
                             .target = prs_exchange_received(&bytes, s->place.nodes, 0),
                             .slot_bytes = prs_exchange_slot_bytes(&bytes),
                             .window = p->args.far.staging_window,
                             .word = PRS_EXCHANGE_THERE,
                             .what = PRS_AWAIT_PARTIAL,
                             .credit = p->shape.op == PRS_GEMM_REDUCE_SCATTER};
    int r = 0;
    for (uint32_t i = 0; i + 1 < s->place.nodes && r == 0; i++) {
        uint8_t *to = p->args.staging[0] + prs_exchange_sent(&bytes, i);
        r = add_slice(p, slice, (s->place.node + 1 + i) % s->place.nodes * s->place.local_ranks + s->place.local_rank,
                      &to, 1, stream);
    }
    return r != 0 ? r : launched(prs_unfused_cross(&p->args, &x, stream), "an exchange between nodes");
}

/* Checks the memory for an all-reduce's result. A sum by inboxes could use any memory, but then the same C would work
 * with few rows and fail with many. */
static int check_result(const struct prs_gemm_plan *p)
{
    uint64_t bytes = (uint64_t)p->rows * p->shape.n * prs_result_bytes(&p->shape);
    if (p->shape.op != PRS_GEMM_ALLREDUCE || p->shape.c_anywhere || prs_result_home(p, bytes))
        return 0;
    return prs_fail(-EINVAL,
                    "fused: the result of an all-reduce (%p) must lie in memory of prs_fused_alloc() or "
                    "prs_fused_import(), unless c_anywhere is set",
                    p->operands.c);
}

/* This rank's part of the sum. */
static uint8_t *summand_of(const struct prs_gemm_plan *p)
{
    return p->shape.k == 0 ? (uint8_t *)p->operands.a : p->args.staging[0];
}

/* On one node this is all that is needed after the product. */
static int sum_by_inbox(struct prs_gemm_plan *p, cudaStream_t stream)
{
    const struct prs_symmetric *inbox = p->base.memory[PRS_GEMM_INBOX];
    struct inbox_parts parts = inbox_parts(p, p->rows);
    int r = check_result(p);
    struct prs_unfused_inbox_sum a = {.sync = p->args.sync,
                                      .place = p->args.schedule.place,
                                      .product = summand_of(p),
                                      .all = parts.all,
                                      .part = parts.part,
                                      .part_step = parts.part_step,
                                      .bank_step = prs_inbox_bank_step(inbox->bytes),
                                      .c = p->operands.c,
                                      .epilogue = p->args.epilogue,
                                      .columns = p->shape.n,
                                      .type = p->shape.sum_dtype,
                                      .result = p->shape.c_dtype,
                                      .hops = parts.hops,
                                      .most_ctas = 2 * p->info.tuning.clusters};
    a.c_first = parts.hops == 2 ? a.place.rank * parts.part_step : 0;
    memcpy(a.inbox, inbox->at, sizeof(a.inbox));
    if (r == 0 && p->shape.norm && parts.hops == 1) {
        struct prs_unfused_row_sum rows = {.sum = a, .norm = prs_norm_of(p)};
        return launched(prs_unfused_sum_rows_by_inbox(&rows, stream), "a sum over ranks by inboxes, with a norm");
    }
    return r ? r : launched(prs_unfused_sum_by_inbox(&a, stream), "a sum over ranks by inboxes");
}

/* The destinations of the sum: c here, and for an all-reduce c of every rank of this node. */
static int reduce(struct prs_gemm_plan *p, void *c, cudaStream_t stream)
{
    const struct prs_schedule *s = &p->args.schedule;
    const struct prs_symmetric *home = NULL;
    struct prs_slice slice = slice_of(p);
    struct prs_exchange x = {.slice = prs_slice_scale(&slice, prs_result_bytes(&p->shape)),
                             .word = PRS_EXCHANGE_BACK,
                             .what = PRS_AWAIT_BROADCAST};
    uint8_t *at[PRS_MAX_LOCAL_RANKS] = {c}, *to[PRS_MAX_LOCAL_RANKS] = {c};
    uint32_t copies = 1;
    int r = check_result(p);
    if (r)
        return r;
    if (p->shape.op == PRS_GEMM_ALLREDUCE) {
        home = prs_result_home(p, x.slice.all_bytes);
        x.window = home->window;
        x.source = (uint64_t)((uint8_t *)c - home->at[0]);
        for (copies = 0; copies < s->place.local_ranks; copies++) {
            at[copies] = home->at[copies] + x.source;
            to[copies] = at[copies] + prs_slice_offset(&x.slice, s->place.rank);
        }
    }
    if (s->place.nodes > 1)
        r = cross_sums(p, &slice, stream);
    if (!r)
        r = add_slice(p, &slice, s->place.rank, to, copies, stream);
    return r != 0 || !home || s->place.nodes == 1 ? r : spread(p, &x, at, stream);
}

/* Returns the residual if cuBLASLt can add it, else NULL. The residual may be C itself, which the product
 * overwrites. */
static const void *added_by_lt(const struct prs_gemm_plan *p)
{
    return p->shape.activation == PRS_ACTIVATION_NONE && !p->shape.gated ? p->operands.residual : NULL;
}

/* Where cuBLASLt puts a product to which no other rank adds. */
static void *product_of(const struct prs_gemm_plan *p)
{
    if (!prs_lt_apart(&p->shape))
        return p->operands.c;
    return p->args.schedule.place.world == 1 ? p->base.own.at : p->args.staging[0] + product_place(p);
}

/* Multiplies A, or the gathered A, by B, and adds the residual if no other rank adds to the product. Without a product,
 * copies A to where other ranks read it. */
static int multiply(struct prs_gemm_plan *p, const void *a, const void *residual, void *to, cudaStream_t stream)
{
    uint64_t bytes = (uint64_t)p->rows * p->shape.n * prs_sum_bytes(&p->shape);
    struct prs_lt_operands x = {.a = a, .b = p->operands.b, .add = residual, .c = to};
    if (p->shape.k != 0) {
        int r = place_scales(p, &x.scale_a, stream);
        if (!r)
            r = place_scales_of_b(p, &x.scale_b, stream);
        return r ? r : prs_lt_run(p->lt, p->rows, &x, stream);
    }
    return prs_unfused_has_inbox(p) || p->args.schedule.place.world == 1 ? 0
                                                                         : prs_unfused_copy_rows(a, to, bytes, stream);
}

/* The rest of the epilogue of a product to which no other rank adds. */
static int finish_result(struct prs_gemm_plan *p, cudaStream_t stream)
{
    struct prs_unfused_finish f = {.epilogue = p->args.epilogue,
                                   .from = product_of(p),
                                   .to = p->operands.c,
                                   .elements = (uint64_t)p->rows * p->args.n,
                                   .columns = p->args.n,
                                   .type = p->shape.sum_dtype,
                                   .from_type = prs_lt_apart(&p->shape) ? p->shape.sum_dtype : p->shape.c_dtype,
                                   .result = p->shape.c_dtype,
                                   .quantised = p->args.quantised};
    if (p->shape.k == 0) {
        f.from = p->operands.a, f.from_type = p->shape.sum_dtype;
        return launched(prs_unfused_finish_result(&f, stream), "an epilogue");
    }
    if (added_by_lt(p))
        f.epilogue.residual = NULL;
    f.epilogue.any =
        f.epilogue.bias || f.epilogue.residual || f.epilogue.gated || p->shape.activation != PRS_ACTIVATION_NONE;
    return f.epilogue.any == 0 && !f.quantised.to ? 0 : launched(prs_unfused_finish_result(&f, stream), "an epilogue");
}

int prs_unfused_launch(struct prs_gemm_plan *p, cudaStream_t stream)
{
    const void *a = p->operands.a;
    void *c = p->operands.c;
    bool gathers = p->shape.op == PRS_GEMM_ALLGATHER;
    int r = prs_plan_begin(&p->base);
    if (r)
        return r;
    if (p->args.schedule.place.world == 1) {
        r = multiply(p, a, added_by_lt(p), product_of(p), stream);
        if (!r)
            r = finish_result(p, stream);
        return r || !gathers ? r : keep(p, a, stream);
    }
    if (gathers)
        r = gather(p, a, stream);
    if (!r)
        r = multiply(p, gathers ? p->args.staging[0] : a, gathers ? added_by_lt(p) : NULL,
                     gathers ? product_of(p) : p->args.staging[0], stream);
    if (r == 0 && gathers)
        r = finish_result(p, stream);
    if (r || prs_unfused_has_inbox(p))
        return r ? r : sum_by_inbox(p, stream);
    if (r == 0 && !gathers)
        r = launched(prs_unfused_meet(&p->args, stream), "a meeting of the ranks");
    if (r == 0 && !gathers)
        r = reduce(p, c, stream);
    if (r)
        return r;
    /* No rank may overwrite data that another still reads, and an all-reduce's result must have arrived everywhere. */
    if (p->args.schedule.place.nodes == 1)
        return launched(prs_unfused_meet(&p->args, stream), "a meeting of the ranks");
    return launched(prs_unfused_finish(&p->args, p->shape.op != PRS_GEMM_ALLREDUCE, stream), "the end of a launch");
}
