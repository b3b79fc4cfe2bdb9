/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/sync.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "fused/core/board.h"
#include "fused/core/context.h"
#include "fused/core/network.h"
#include "fused/core/symmetric.h"
#include "transport/util/error.h"

int prs_sync_open(struct prs_fused *ctx, struct prs_sync *sync, struct prs_local *memory)
{
    struct prs_plan_words words = {.rank = ctx->config.rank};
    int r = prs_local_take(ctx, sizeof(words), 0, memory);
    if (r)
        return r;
    words.neighbours = ctx->alarm ? ctx->place.local_ranks - 1 : 0;
    for (uint32_t i = 0; i < words.neighbours; i++)
        words.alarm[i] = (struct prs_alarm *)ctx->alarm->at[i + 1];
    words.network = !ctx->network ? NULL : &ctx->network->device.local->failed;
    sync->words = (struct prs_plan_words *)memory->at;
    sync->fault = ctx->fault_device;
    sync->alarm = ctx->alarm ? (struct prs_alarm *)ctx->alarm->at[0] : NULL;
    sync->limit_ns = (uint64_t)ctx->config.timeout_ms * 1000000;
    return prs_cuda_upload(ctx, sync->words, &words, sizeof(words), "cudaMemcpy of plan words");
}

bool prs_sync_lost(const struct prs_fused *ctx)
{
    const struct prs_fault *f = ctx->fault;
    if (__atomic_load_n(&f->abort, __ATOMIC_RELAXED) || (ctx->network && prs_proxy_check(ctx->network->proxy) != 0))
        return true;
    return __atomic_load_n(&f->state, __ATOMIC_ACQUIRE) != 0 && f->what != PRS_FAULT_ROWS &&
           f->what != PRS_FAULT_BOUNDS && f->what != PRS_FAULT_STRIPES;
}

int prs_sync_check(struct prs_fused *ctx)
{
    struct prs_fused_error error;
    int r = prs_fused_poll_error(ctx, &error);
    return r == 0 ? 0 : prs_fail(r, "fused: an earlier launch failed: %s", error.text);
}

int prs_sync_name(struct prs_fused *ctx, prs_awaited_fn *awaited)
{
    for (uint32_t i = 0; i < PRS_MOST_FAMILIES; i++) {
        if (!ctx->awaited[i])
            ctx->awaited[i] = awaited;
        if (ctx->awaited[i] == awaited)
            return 0;
    }
    return prs_fail(-ENOSPC, "fused: a context has room for the flags of %d families of kernels", PRS_MOST_FAMILIES);
}

static const char *awaited_name(const struct prs_fused *ctx, uint32_t what)
{
    const char *name = NULL;
    switch (what) {
    case PRS_AWAIT_PEERS:
        return "its arrival";
    case PRS_AWAIT_NETWORK:
        return "the proxy to take or finish a command to or";
    case PRS_AWAIT_SWITCH:
        return "the end of another plan's launch";
    case PRS_AWAIT_CTAS:
        return "all CTAs";
    }
    for (uint32_t i = 0; i < PRS_MOST_FAMILIES && ctx->awaited[i] && !name; i++)
        name = ctx->awaited[i](what);
    return name ? name : "an unknown flag";
}

/* Where the network between nodes failed, the rank that a kernel waited for may be one that waits itself. */
static void blame_connection(const struct prs_fused *ctx, struct prs_fused_error *error)
{
    uint32_t rank;
    if (prs_team_failed_rank(ctx->network->team, &rank) == 0)
        error->blamed = (uint64_t)rank + 1;
}

/* The kernel was told to give up. The device API reports that too, and a kernel may find it there first. */
static int describe_abort(const struct prs_fused *ctx, const struct prs_fault *f, struct prs_fused_error *error)
{
    char *text = error->text;
    size_t bytes = sizeof(error->text);
    const char *awaited = awaited_name(ctx, f->what & ~(uint32_t)PRS_FAULT_ABORTED);
    int r = ctx->network ? prs_proxy_check(ctx->network->proxy) : 0;
    if (r == 0 || __atomic_load_n(&ctx->fault->asked, __ATOMIC_RELAXED)) {
        (void)snprintf(
            text, bytes,
            "rank %u was told to abort (prs_fused_abort(), here or on a rank of this node, or the network of "
            "one failed) after %" PRIu64 " ms of waiting for %s of rank %u: flag %u, want %u, have %u",
            ctx->config.rank, f->waited_ns / 1000000, awaited, f->from, f->index, f->want, f->seen);
        return -ECANCELED;
    }
    blame_connection(ctx, error);
    (void)snprintf(text, bytes,
                   "rank %u gave up waiting for %s of rank %u after %" PRIu64
                   " ms (flag %u, want %u, have %u): the network between nodes failed: %s",
                   ctx->config.rank, awaited, f->from, f->waited_ns / 1000000, f->index, f->want, f->seen,
                   prs_proxy_error(ctx->network->proxy));
    return r;
}

uint64_t prs_said_attention(float scale, uint32_t batch, uint32_t rows)
{
    uint32_t bits, hash;
    memcpy(&bits, &scale, sizeof(bits));
    hash = bits * 0x9e3779b1u >> 20;
    return (uint64_t)(hash != 0 ? hash : 1) << 36 | (uint64_t)(batch & 0xfff) << 24 | (rows & 0xffffff);
}

/* What a word says (say_launch()); scale and batch 0: not attention. */
struct said {
    uint32_t plan, scale, batch, rows;
};

static struct said read_word(uint64_t word)
{
    struct said x = {.plan = word >> 48 & 0xfff, .scale = word >> 36 & 0xfff, .rows = (uint32_t)word};
    if (x.scale != 0)
        x.batch = word >> 24 & 0xfff, x.rows = word & 0xffffff;
    return x;
}

static int describe_difference(const struct prs_fused *ctx, const struct prs_difference *d,
                               struct prs_fused_error *error)
{
    struct said mine = read_word(d->mine), other = read_word(d->other);
    bool plans = mine.plan != other.plan, batch = !plans && mine.batch != other.batch;
    bool scale = !plans && !batch && mine.rows == other.rows;
    char *text = error->text;
    size_t bytes = sizeof(error->text);
    error->from_rank = d->from;
    error->blamed = (uint64_t)d->from + 1;
    error->flag = mine.plan;
    error->want = batch ? mine.batch : mine.rows;
    error->seen = batch ? other.batch : other.rows;
    if (plans)
        (void)snprintf(text, bytes,
                       "rank %u launched plan %u of those that all ranks opened, with %u rows, and rank %u launched "
                       "plan %u with %u rows instead: all ranks must make the same launches, of as many rows, in the "
                       "same order",
                       ctx->config.rank, mine.plan, mine.rows, d->from, other.plan, other.rows);
    else if (scale)
        (void)snprintf(text, bytes,
                       "rank %u launched plan %u with another scale than rank %u: all ranks must pass the same one; "
                       "what the launch wrote is wrong",
                       ctx->config.rank, mine.plan, d->from);
    else
        (void)snprintf(text, bytes,
                       "rank %u launched plan %u with %u %s, and rank %u with %u: all ranks must pass the same "
                       "number; what the launch wrote is wrong",
                       ctx->config.rank, mine.plan, error->want, batch ? "sequences" : "rows", d->from, error->seen);
    return -EINVAL;
}

/* A call of the device API failed: its code is in `seen`. The device's report, which the proxy reads, says more. */
static int describe_network(const struct prs_fused *ctx, const struct prs_fault *f, struct prs_fused_error *error)
{
    const char *details = prs_proxy_check(ctx->network->proxy) ? prs_proxy_error(ctx->network->proxy) : "";
    bool late = f->seen == PRS_DEVICE_TIMEOUT;
    char what[48] = "its commands", limit[32] = "";
    if (f->from != ctx->config.rank)
        (void)snprintf(what, sizeof(what), "a command to rank %u", f->from);
    if (late)
        (void)snprintf(limit, sizeof(limit), " within %u ms", ctx->config.timeout_ms);
    (void)snprintf(error->text, sizeof(error->text), "the proxy of rank %u %s %s%s%s%s", ctx->config.rank,
                   late ? "did not take or finish" : "refused", what, limit, *details ? ": " : "", details);
    return late ? -ETIMEDOUT : -EINVAL;
}

static int describe_fault(const struct prs_fused *ctx, const struct prs_fault *f, struct prs_fused_error *error)
{
    char *text = error->text;
    size_t bytes = sizeof(error->text);
    uint32_t awaited = f->what & ~(uint32_t)PRS_FAULT_ABORTED;
    /* When the device reports a failure, its proxy fails, and then the device is told to abort. So a report of the
     * device other than the abort came first. */
    if (awaited == PRS_AWAIT_NETWORK && f->seen != PRS_DEVICE_ABORTED)
        return describe_network(ctx, f, error);
    if (awaited != f->what || awaited == PRS_AWAIT_NETWORK)
        return describe_abort(ctx, f, error);
    switch (f->what) {
    case PRS_FAULT_ROWS:
        (void)snprintf(
            text, bytes,
            "rank %u: m_on_device holds %u rows; it must be 1 to %u, the plan's shape.m, and a multiple of %u", f->from,
            f->seen, f->index, f->want);
        return -EINVAL;
    case PRS_FAULT_BOUNDS:
        (void)snprintf(
            text, bytes,
            "rank %u: cu_seqlens[%u] is %d, after %d: its numbers must not decrease, begin with 0 or more, and "
            "end within the plan's seq; what the launch wrote is wrong",
            f->from, f->index, (int32_t)f->seen, (int32_t)f->want);
        return -EINVAL;
    case PRS_FAULT_STRIPES:
        (void)snprintf(text, bytes,
                       "rank %u: stripe_ranks gives rank %u %u stripes; all ranks must have equally many, here %u, and "
                       "each number must be a rank; what the launch wrote is wrong",
                       f->from, f->index, f->seen, f->want);
        return -EINVAL;
    case PRS_FAULT_PATH:
        (void)snprintf(
            text, bytes,
            "rank %u runs a layer of MoE as one kernel, and rank %u launched several kernels of MoE instead: "
            "all ranks must make the same calls in the same order, and either all or none of them pass rows, "
            "expert_rows, maps or kept_rows to the layer",
            ctx->config.rank, f->from);
        return -EINVAL;
    case PRS_FAULT_NEIGHBOUR:
        (void)snprintf(
            text, bytes,
            "rank %u gave up in a launch that rank %u took part in: what it sent may be wrong; its own error "
            "says what it waited for",
            f->from, ctx->config.rank);
        return -ECANCELED;
    default:
        (void)snprintf(text, bytes, "rank %u waited %" PRIu64 " ms for %s of rank %u: flag %u, want %u, have %u",
                       ctx->config.rank, f->waited_ns / 1000000, awaited_name(ctx, f->what), f->from, f->index, f->want,
                       f->seen);
        return -ETIMEDOUT;
    }
}

const char *prs_fused_version(void)
{
    return PRS_VERSION;
}

const char *prs_fused_error_text(void)
{
    return prs_error_last();
}

/* The error when no kernel has reported one; 0: none. */
static int describe_host(const struct prs_fused *ctx, struct prs_fused_error *error)
{
    char *text = error->text;
    size_t bytes = sizeof(error->text);
    int r = !ctx->network ? 0 : prs_proxy_check(ctx->network->proxy);
    if (__atomic_load_n(&ctx->fault->asked, __ATOMIC_RELAXED)) {
        (void)snprintf(text, bytes, "rank %u was told to abort (prs_fused_abort())", ctx->config.rank);
        return -ECANCELED;
    }
    if (r) {
        blame_connection(ctx, error);
        (void)snprintf(text, bytes, "rank %u: the network between nodes failed: %s", ctx->config.rank,
                       prs_proxy_error(ctx->network->proxy));
    }
    return r;
}

int prs_fused_poll_error(struct prs_fused *ctx, struct prs_fused_error *error)
{
    const struct prs_fault *f = ctx->fault;
    memset(error, 0, sizeof(*error));
    if (__atomic_load_n(&f->difference.state, __ATOMIC_ACQUIRE) == 2) { /* [fault-record] */
        error->code = describe_difference(ctx, &f->difference, error);
        return error->code;
    }
    /* [fault-record]: state 2 means that the report is complete. Pairs with the fence in record_fault(). */
    if (__atomic_load_n(&f->state, __ATOMIC_ACQUIRE) != 2) {
        error->code = describe_host(ctx, error);
        return error->code;
    }
    error->from_rank = f->from;
    error->flag = f->index;
    error->want = f->want;
    error->seen = f->seen;
    error->waited_ns = f->waited_ns;
    error->blamed = (uint64_t)f->from + 1;
    error->code = describe_fault(ctx, f, error);
    return error->code;
}

/* ---- going on without ranks (doc/decisions/0020) ---- */
uint64_t prs_fused_lost(const struct prs_fused *ctx)
{
    uint64_t lost = 0;
    for (uint32_t i = 0; ctx->board && ctx->place.nodes == 1 && i < ctx->place.local_ranks; i++)
        if (i != ctx->place.local_rank && prs_board_has_left(ctx->board, i))
            lost |= 1ull << i;
    return lost;
}

int prs_fused_leave_out(struct prs_fused *ctx, uint64_t ranks)
{
    uint64_t other = ranks & ~prs_fused_lost(ctx);
    if (ctx->place.nodes > 1)
        return prs_fail(-EOPNOTSUPP,
                        "fused: ranks 0x%" PRIx64 " cannot be left out: the job has %u nodes, and this "
                        "works on one only: open a smaller world",
                        ranks, ctx->place.nodes);
    if (other != 0)
        return prs_fail(-EINVAL,
                        "fused: rank %d cannot be left out of the %u ranks: it still runs, as far as rank %u "
                        "can tell, and may write; its process must have ended, or it must have closed its context",
                        __builtin_ctzll(other), ctx->config.world, ctx->config.rank);
    (void)__atomic_fetch_or(&ctx->fault->absent, (uint32_t)ranks, __ATOMIC_RELEASE); /* [left-out] */
    return 0;
}

int prs_sync_check_absent(const struct prs_fused *ctx, const char *name)
{
    uint32_t absent = __atomic_load_n(&ctx->fault->absent, __ATOMIC_RELAXED);
    return absent == 0 ? 0
                       : prs_fail(-ECANCELED,
                                  "fused: %s: ranks 0x%x were left out (prs_fused_leave_out()): only "
                                  "layers of MoE as one kernel go on without them",
                                  name, absent);
}

void prs_fused_abort(struct prs_fused *ctx)
{
    __atomic_store_n(&ctx->fault->asked, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&ctx->fault->abort, 1, __ATOMIC_RELAXED);
    if (ctx->network) /* ends the waits of perseus/device.cuh too */
        prs_store_relaxed(&ctx->network->device.control->abort, ECANCELED);
}
