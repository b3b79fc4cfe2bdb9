/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/attention/tuning.h"

#include <errno.h>
#include <math.h>

#include "fused/core/machine.h"
#include "transport/util/error.h"

/* bf16, on all SMs of an H200: the rate of cuDNN at head_dim 128 (21 November 2026). These kernels should reach it. */
static const double FLOPS_PER_US = 650e6;
/* head_dim 64 reaches only this share, because exponentials limit it, not the tensor cores. */
static const double HALF_HEAD_SHARE = 0.75;
/* The time of a copy in addition to its bytes. Measured: 2.6, or as long as the host takes to enqueue the copy. */
static const double COPY_US = 5;
/* Larger caps change no score of bf16 inputs, and would cost precision. */
static const double MAX_SOFT_CAP = 1e4;
static const double LEAST_SCALE = 1e-20, MOST_SCALE = 1e20;

enum {
    DEFAULT_SLAB_ROWS = 512,
    FAR_SLAB_ROWS = 2048,
    STRIPE_SLAB_ROWS = 256, /* a multiple of the rows of a message, for any head_dim */
    SPREAD = 60,            /* percent of the time to push in */
    SPREAD_BUSY = 90,       /* where links are busy */
    MOST_COPIED_GROUPS = 8,
    RING_BUFFERS = 2,
    LARGE_CAUSAL_ROWS = 4096,
    TOP_KEPT_KEYS_128 = 16384,
    TOP_KEPT_KEYS_64 = 4096,
    MAX_TASKS = 1 << 22,
    MAX_COUNT = 1 << 30
};

/* What only striped attention has. */
static int check_stripes(const struct prs_attention_shape *a)
{
    if (a->stripe == 0 && (a->window != 0 || a->packed != 0 || a->soft_cap != 0))
        return prs_fail(-EINVAL,
                        "attention: window %u, packed %u, soft_cap %g: only with stripes: `stripe` of the shape is 0",
                        a->window, a->packed, (double)a->soft_cap);
    if (a->stripe == 0)
        return 0;
    if (a->stripe < PRS_STRIPE_LEAST || (a->stripe & (a->stripe - 1)) != 0)
        return prs_fail(-EINVAL, "attention: stripes of %u rows: not a power of two, or less than %d", a->stripe,
                        PRS_STRIPE_LEAST);
    if (a->packed != 0 && a->batch != 1)
        return prs_fail(-EINVAL, "attention: packed sequences in a batch of %u: only one is possible", a->batch);
    if (!(a->soft_cap >= 0) || a->soft_cap > MAX_SOFT_CAP)
        return prs_fail(-EINVAL, "attention: soft_cap %g is not in 0 ... %g", (double)a->soft_cap, MAX_SOFT_CAP);
    return 0;
}

static bool is_built(uint32_t head_dim, uint32_t value_dim)
{
    if (head_dim == 192)
        return value_dim == 128;
    return value_dim == head_dim && (head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256);
}

/* Whether the ranks, or their chunks, divide a sequence; or stripes, in pairs. */
static int check_parts(const struct prs_attention_shape *a, uint32_t world, uint64_t seq)
{
    uint32_t parts = a->causal != 0 && world > 1 ? 2 * world : world;
    uint64_t round = 2ull * world * a->stripe;
    if (a->stripe != 0 && seq % round != 0)
        return prs_fail(
            -EINVAL,
            "attention: a sequence of %llu is not a multiple of %llu, 2 stripes of %u rows for each of %u ranks: "
            "pad it",
            (unsigned long long)seq, (unsigned long long)round, a->stripe, world);
    if (a->stripe != 0 || seq % parts == 0)
        return 0;
    return prs_fail(-EINVAL, "attention: a sequence of %llu does not divide into %u equal parts (%u ranks%s): pad it",
                    (unsigned long long)seq, parts, world, parts > world ? ", two chunks each" : "");
}

int prs_attention_tuning_launch(const struct prs_attention_shape *plan, const struct prs_place *place, uint64_t batch,
                                uint64_t seq, struct prs_attention_shape *launch)
{
    *launch = *plan;
    if (batch > plan->batch)
        return prs_fail(-EINVAL,
                        "attention: batch %llu of a launch is more than %u, the plan's: a plan is opened for the "
                        "largest batch of its launches",
                        (unsigned long long)batch, plan->batch);
    if (seq > plan->seq)
        return prs_fail(-EINVAL,
                        "attention: seq %llu of a launch is more than %u, the plan's: a plan is opened for the longest "
                        "sequence of its launches",
                        (unsigned long long)seq, plan->seq);
    launch->batch = batch != 0 ? (uint32_t)batch : plan->batch;
    launch->seq = seq != 0 ? (uint32_t)seq : plan->seq;
    return check_parts(plan, place->world, launch->seq);
}

/* Maxima are taken of scores before the scale, so it must be positive. The limits keep it, its inverse and its product
 * with log2(e) normal numbers of fp32. */
int prs_attention_tuning_scale(const struct prs_attention_shape *plan, double launch, double *scale)
{
    double given = launch != 0 ? launch : (double)plan->scale;
    *scale = given != 0 ? given : 1 / sqrt((double)plan->head_dim);
    if (*scale >= LEAST_SCALE && *scale <= MOST_SCALE)
        return 0;
    return prs_fail(-EINVAL, "attention: scale %g of a %s is not in %g ... %g%s", given,
                    launch != 0 ? "launch" : "plan", LEAST_SCALE, MOST_SCALE,
                    given < 0 ? ": negate the queries instead" : "");
}

int prs_attention_tuning_check(const struct prs_attention_shape *a, uint32_t world)
{
    double scale;
    int r;
    if (a->batch == 0 || a->heads_q == 0 || a->heads_kv == 0 || a->seq == 0)
        return prs_fail(-EINVAL, "attention: empty shape: batch %u, heads %u and %u, sequence %u", a->batch, a->heads_q,
                        a->heads_kv, a->seq);
    if ((uint64_t)a->batch * a->heads_q >= MAX_TASKS)
        return prs_fail(-EINVAL, "attention: a batch of %u with %u heads is too large for one launch: split the batch",
                        a->batch, a->heads_q);
    if (a->value_dim > UINT32_MAX || !is_built(a->head_dim, prs_attention_value_dim(a)))
        return prs_fail(
            -EINVAL,
            "attention: head_dim %u with values of %llu: built are 64, 96, 128 and 256 for both, and 192 with "
            "values of 128",
            a->head_dim, (unsigned long long)(a->value_dim != 0 ? a->value_dim : a->head_dim));
    if (a->heads_q % a->heads_kv != 0)
        return prs_fail(-EINVAL, "attention: %u KV heads do not divide %u query heads", a->heads_kv, a->heads_q);
    r = check_stripes(a);
    if (r)
        return r;
    r = check_parts(a, world, a->seq);
    if (r)
        return r;
    return prs_attention_tuning_scale(a, 0, &scale);
}

bool prs_attention_tuning_plain(const struct prs_attention_shape *a)
{
    return (a->head_dim == 64 || a->head_dim == 128) && prs_attention_value_dim(a) == a->head_dim;
}

/* The fastest block_rows on H200. Larger steps make a better pipeline, but waste more of a causal tile on masked keys,
 * which matters where there are few keys. Between nodes, and for most head_dims, only one kernel is compiled. */
uint32_t prs_attention_tuning_block(const struct prs_attention_shape *a, const struct prs_place *place)
{
    if (place->nodes > 1 || !prs_attention_tuning_plain(a))
        return 0;
    return a->head_dim == 64 || (a->causal != 0 && a->seq / place->world < LARGE_CAUSAL_ROWS) ? 128 : 176;
}

/* Keeping an earlier maximum avoids rescaling of the result; the more keys there are, the more that saves. From
 * TOP_KEPT_KEYS keys on, probabilities up to 2^8 cost no more precision than the rounding of the products: the worst
 * error is 1.05 times cuDNN's for 16384 keys and a head of 128; for 8192 keys it is 1.24 times. */
uint32_t prs_attention_tuning_overlap(const struct prs_attention_shape *a, const struct prs_place *place)
{
    uint32_t least = a->head_dim == 64 ? TOP_KEPT_KEYS_64 : TOP_KEPT_KEYS_128;
    return place->nodes > 1 || a->seq < least || !prs_attention_tuning_plain(a) ? 0 : 7;
}

uint64_t prs_attention_tuning_staging(const struct prs_attention_shape *a, const struct prs_attention_schedule *s)
{
    return (uint64_t)prs_attention_stages(s) * s->room_rows * prs_attention_row_bytes(a);
}

/* The time of this rank's products: all ranks have as many; causal, half of them. */
static double compute_us(const struct prs_attention_shape *a, uint32_t world, uint32_t ctas)
{
    double columns = a->head_dim + (double)prs_attention_value_dim(a);
    double flops = 2.0 * a->batch * a->heads_q * columns * a->seq * a->seq / world * (a->causal != 0 ? 0.5 : 1);
    return prs_compute_us(flops, FLOPS_PER_US, ctas) / (a->head_dim == 64 ? HALF_HEAD_SHARE : 1);
}

void prs_attention_tuning_predict(const struct prs_attention_shape *a, const struct prs_attention_schedule *s,
                                  struct prs_attention_info *info)
{
    uint32_t ctas = info->tuning.ctas, segments = 0;
    double compute = compute_us(a, s->place.world, ctas), travel;
    bool copied = info->tuning.mover == PRS_MOVED_BY_COPY_ENGINES;
    for (uint32_t way = 0; way < s->place.nodes; way++)
        for (uint32_t d = 1; d < s->place.local_ranks; d++)
            segments += copied || a->stripe != 0 ? s->segments : prs_attention_wanted(s, way, d);
    info->sent_bytes = (uint64_t)segments * s->pairs * s->segment_rows * (a->head_dim + prs_attention_value_dim(a)) *
                       prs_element_bytes(PRS_ATTENTION_TYPE);
    travel = (double)info->sent_bytes / (copied ? PRS_BESIDE_COPY_BYTES_PER_US : PRS_STORE_BYTES_PER_US);
    info->predicted_us = PRS_START_US + (compute > travel ? compute : travel);
}

/* Bytes that the busiest rank sends: causal, the rank whose segments all others read. */
static double most_sent(const struct prs_attention_shape *a, const struct prs_attention_schedule *s)
{
    return (double)(s->place.local_ranks - 1) * s->segments * s->pairs * s->segment_rows *
           (a->head_dim + prs_attention_value_dim(a)) * prs_element_bytes(PRS_ATTENTION_TYPE);
}

/* The share of the compute time over which messages are spread. If the busiest link is busy for more than half of the
 * time, nearly all of it: causal attention of 16384 keys on 4 H200 then takes 2007 us, and 2284 with 60 %. Otherwise 60
 * %, because late messages delay the end: 16384 keys on 2 GPUs take 6950 us, and 7290 with 90 %. Between nodes there is
 * no pause, because data for other nodes should leave soon. */
static uint32_t default_spread(const struct prs_attention_shape *a, const struct prs_attention_schedule *s,
                               uint32_t ctas)
{
    if (s->place.nodes > 1)
        return 1;
    return most_sent(a, s) / PRS_STORE_BYTES_PER_US > compute_us(a, s->place.world, ctas) / 2 ? SPREAD_BUSY : SPREAD;
}

/* How long a launch takes when copy engines move `groups` groups. If the copies are the limit, the tasks of the last
 * group remain after it has arrived, except for a first wave, which waits only for the last slice. If the products are
 * the limit, their first wave waits for all of the first group. */
static double copied_us(const struct prs_attention_shape *a, const struct prs_attention_schedule *s,
                        const struct prs_attention_tuning *t, uint32_t groups)
{
    double compute = compute_us(a, s->place.world, t->ctas);
    double wave = compute / ((double)s->tasks / t->ctas);
    double copies = most_sent(a, s) / PRS_BESIDE_COPY_BYTES_PER_US + 3.0 * groups * (s->place.world - 1) * COPY_US;
    double waits = copies / groups + wave / s->place.world - wave, rest = compute / groups - wave;
    double busy = compute + (waits > 0 ? waits : 0), late = copies + (rest > 0 ? rest : 0) + wave / s->place.world;
    return busy > late ? busy : late;
}

/* The same when the CTAs push. A full link delays their loads; causal senders also delay each other; and where heads
 * share keys, CTAs push more while they compute. */
static double pushed_us(const struct prs_attention_shape *a, const struct prs_attention_schedule *s, uint32_t ctas)
{
    double compute = compute_us(a, s->place.world, ctas), link = most_sent(a, s) / PRS_STORE_BYTES_PER_US;
    double alone = link * (s->segments == 2 ? 1.4 : 1.2), both = compute < link ? compute : link;
    return (compute > alone ? compute : alone) + 0.3 * both + (s->heads_per_kv > 1 ? 0.1 * compute : 0);
}

/* Chooses what moves keys and values, and for copy engines the groups, where the caller has not chosen. For the 18
 * shapes of doc/results/attention-copies-4xH200.json, this choice took 0 to 2 % longer than the best of four (pushing,
 * and copies with three sizes of groups), which differ by up to 2 times; for those of attention-copies-2xH200.json, 0
 * to 7 %. */
static void choose_copies(const struct prs_attention_shape *a, struct prs_attention_schedule *s,
                          struct prs_attention_tuning *t, uint32_t asked)
{
    uint32_t group = s->group;
    double best = asked != 0 ? copied_us(a, s, t, s->groups) : INFINITY;
    for (uint32_t groups = 2; groups <= MOST_COPIED_GROUPS && asked == 0; groups *= 2) {
        uint32_t size = prs_ceil_div(s->pairs, groups);
        double us = copied_us(a, s, t, prs_ceil_div(s->pairs, size));
        if (us < best)
            best = us, group = size;
    }
    if (t->mover == 0)
        t->mover = best < pushed_us(a, s, t->ctas) ? PRS_MOVED_BY_COPY_ENGINES : PRS_MOVED_BY_CTAS;
    if (t->mover == PRS_MOVED_BY_COPY_ENGINES)
        s->group = group;
}

static int check_counts(const struct prs_attention_schedule *s)
{
    uint64_t rows = (uint64_t)s->pairs * 2 * s->segments * s->segment_rows * s->place.world;
    uint64_t tasks = (uint64_t)s->pairs * s->heads_per_kv * s->segments * s->tiles;
    uint64_t padded = (uint64_t)s->groups * s->group * 2 * s->segments * s->slabs * s->slab_chunks *
                      (s->place.world + s->place.nodes);
    if (rows / s->chunk_rows >= MAX_COUNT || tasks >= MAX_TASKS || padded >= MAX_COUNT)
        return prs_fail(-EINVAL, "attention: %llu tasks and %llu messages are too many for one launch: split the batch",
                        (unsigned long long)tasks, (unsigned long long)padded);
    return 0;
}

/* Keeps everything resident if it fits, else two buffers. */
static int choose_depth(const struct prs_attention_shape *a, struct prs_attention_schedule *s,
                        struct prs_attention_info *info)
{
    struct prs_attention_tuning *t = &info->tuning;
    uint64_t resident = prs_attention_tuning_staging(a, s), ring;
    uint32_t wanted = t->mode;
    if (s->place.world == 1) {
        t->mode = PRS_ATTENTION_ALONE;
        info->reason = "one rank";
        return 0;
    }
    t->mode = PRS_ATTENTION_RESIDENT;
    info->reason = wanted == PRS_ATTENTION_RESIDENT ? "given by the caller" : "fits the workspace limit";
    if (wanted == PRS_ATTENTION_RESIDENT || (wanted == 0 && resident <= t->workspace_limit))
        return 0;
    if (wanted != 0 && wanted != PRS_ATTENTION_RING)
        return prs_fail(-EINVAL, "attention: mode %u is not possible with %u ranks", wanted, s->place.world);
    t->mode = PRS_ATTENTION_RING;
    info->reason = wanted != 0 ? "given by the caller" : "all keys and values do not fit the workspace limit";
    s->depth = s->groups < RING_BUFFERS ? s->groups : RING_BUFFERS;
    ring = prs_attention_tuning_staging(a, s);
    if (wanted == 0 && ring > t->workspace_limit)
        return prs_fail(-ENOMEM,
                        "attention: two buffers of %u heads take %llu bytes, the limit is %llu: a smaller group or a "
                        "larger limit is needed",
                        s->group, (unsigned long long)ring, (unsigned long long)t->workspace_limit);
    return 0;
}

/* Chooses how many rows are one message, and how many messages share a counter. segment_rows: positions of a
 * segment. */
static int choose_slabs(const struct prs_attention_shape *a, struct prs_attention_schedule *s,
                        const struct prs_place *place, struct prs_attention_tuning *t, uint32_t segment_rows)
{
    if (a->stripe != 0 && t->slab_rows != 0)
        return prs_fail(-EINVAL, "attention: slab_rows %u of the tuning: a slab of striped attention is a stripe",
                        t->slab_rows);
    if (a->stripe != 0) /* one slab for each segment, of whole pieces */
        t->slab_rows = a->stripe < STRIPE_SLAB_ROWS ? STRIPE_SLAB_ROWS : a->stripe;
    if (t->slab_rows == 0) /* between nodes each slab costs a put and a signal: long slabs take 0.69 of the time */
        t->slab_rows = place->nodes > 1 ? FAR_SLAB_ROWS : DEFAULT_SLAB_ROWS;
    s->chunk_rows = prs_attention_piece_rows(prs_attention_row_bytes(a));
    if (t->slab_rows % s->chunk_rows != 0)
        return prs_fail(-EINVAL, "attention: a slab of %u rows is not a multiple of %u, what is sent at a time",
                        t->slab_rows, s->chunk_rows);
    for (uint32_t i = 2; i <= PRS_ATTENTION_PUSH_PIECES && t->slab_rows % (s->chunk_rows * 2) == 0; i *= 2)
        s->chunk_rows *= 2;
    s->slab_chunks = t->slab_rows / s->chunk_rows;
    if (s->slab_chunks > prs_ceil_div(segment_rows, s->chunk_rows))
        s->slab_chunks = prs_ceil_div(segment_rows, s->chunk_rows);
    t->slab_rows = s->slab_chunks * s->chunk_rows;
    return 0;
}

int prs_attention_tuning_choose(const struct prs_attention_shape *a, const struct prs_place *place, uint32_t ctas,
                                struct prs_attention_info *info, struct prs_attention_schedule *s)
{
    struct prs_attention_tuning *t = &info->tuning;
    uint32_t world = place->world;
    struct prs_attention_slice slice = {a->batch,       a->heads_q,   a->heads_kv, a->causal != 0,
                                        a->seq / world, place->nodes, a->stripe};
    uint32_t asked = t->heads_per_step, pairs, per_pair, segments = a->causal != 0 && world > 1 ? 2 : 1;
    int r;
    if (a->stripe != 0)
        segments = slice.rows / a->stripe;
    if (t->ctas == 0 || t->ctas > ctas)
        t->ctas = ctas;
    if (t->mover > PRS_MOVED_BY_CTAS)
        return prs_fail(-EINVAL, "attention: mover %u of the tuning does not exist", t->mover);
    r = choose_slabs(a, s, place, t, slice.rows / segments);
    if (r)
        return r;
    /* A step should have as many tasks as CTAs run at a time, and no step should have much fewer than the others. */
    per_pair = a->heads_q / a->heads_kv * segments * prs_ceil_div(slice.rows / segments, s->tile_rows);
    pairs = a->batch * a->heads_kv;
    s->group = t->heads_per_step != 0 ? t->heads_per_step
                                      : prs_ceil_div(pairs, prs_ceil_div(pairs, prs_ceil_div(t->ctas, per_pair)));
    s->depth = UINT32_MAX;
    prs_attention_schedule_init(s, place->rank, world, &slice);
    t->heads_per_step = s->group;
    if (t->spread == 0 && a->stripe != 0)
        t->spread = 1; /* how long the products take depends on the sequences */
    if (t->spread == 0)
        t->spread = default_spread(a, s, t->ctas);
    r = check_counts(s);
    if (!r)
        r = choose_depth(a, s, info);
    if (r)
        return r;
    if (t->mode != PRS_ATTENTION_RESIDENT || s->place.nodes > 1 || a->stripe != 0)
        t->mover = t->mode == PRS_ATTENTION_ALONE ? 0 : PRS_MOVED_BY_CTAS;
    else if (t->mover != PRS_MOVED_BY_CTAS)
        choose_copies(a, s, t, asked);
    if (t->mover == PRS_MOVED_BY_COPY_ENGINES) {
        s->depth = UINT32_MAX;
        prs_attention_schedule_init(s, place->rank, world, &slice);
        t->heads_per_step = s->group;
    }
    prs_attention_tuning_predict(a, s, info);
    return 0;
}

uint32_t prs_attention_tuning_gap(const struct prs_attention_info *info)
{
    uint32_t ctas = info->tuning.mover == PRS_MOVED_BY_CTAS ? info->tuning.ctas : 0;
    double pieces = ctas == 0 ? 0 : (double)info->sent_bytes / PRS_ATTENTION_PUSH_BYTES / ctas;
    double clocks = info->predicted_us * PRS_CLOCKS_PER_US * info->tuning.spread / 100;
    return info->tuning.spread <= 1 || pieces < 1 ? 0 : (uint32_t)(clocks / pieces);
}
