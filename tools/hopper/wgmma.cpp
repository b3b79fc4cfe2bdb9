/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/wgmma.h"

#include <cmath>
#include <cstring>

#include "tools/hopper/bulk_copy.h"
#include "tools/hopper/order.h"
#include "tools/hopper/tile_map.h"

namespace hopper
{

static const char WGMMA_WAIT[] = "wgmma groups";
static const uint32_t POISON = 0x7fc0dead; /* a not-a-number */

std::shared_ptr<warpgroup> warpgroup_new(struct cta *c)
{
    auto g = std::make_shared<warpgroup>();
    g->block = c;
    g->index = (uint32_t)c->warpgroups.size();
    return g;
}

static struct warpgroup *warpgroup_of(const struct fiber *f)
{
    if ((f->thread / WARPGROUP + 1) * WARPGROUP > f->block->threads.size())
        violation("%s: wgmma in a warpgroup of fewer than 128 threads", fiber_name(f).c_str());
    return f->block->warpgroups[f->thread / WARPGROUP].get();
}

/* ---- where operands lie ---- */
struct descriptor {
    uint32_t start, lead, stride, span; /* in bytes; span: of a swizzled row, or 16 without swizzle */
};

static struct descriptor decode(uint64_t d, const char *operand)
{
    static const uint32_t spans[4] = {16, 128, 64, 32};
    struct descriptor out = {(uint32_t)(d & 0x3fff) << 4, (uint32_t)(d >> 16 & 0x3fff) << 4,
                             (uint32_t)(d >> 32 & 0x3fff) << 4, spans[d >> 62]};
    uint32_t inside = out.span < 32 ? 0 : out.start & (out.span * 8 - 1) & 0x380;
    if ((d >> 49 & 7) != 0 || inside != 0)
        violation("%s: wgmma: the %s descriptor %#llx starts at %#x, inside a swizzle pattern of %u bytes (base offset "
                  "%u is not emulated)",
                  fiber_name(self).c_str(), operand, (unsigned long long)d, out.start, out.span * 8,
                  (unsigned)(d >> 49 & 7));
    return out;
}

/* The shared offsets of the 16-byte chunks of an operand: `size` rows of A, or columns of B, by 32 bytes along K.
 * K-major: chunk 2 r + h holds half h of row r. MN-major, of elements of two bytes: chunk k * size / 8 + j holds rows
 * 8 j to 8 j + 7 at K k. */
static void find_chunks(const struct descriptor &d, uint32_t size, bool mn_major, std::vector<uint32_t> *out)
{
    out->resize(size * WGMMA_K / 8);
    for (uint32_t i = 0; i < out->size(); i++) {
        uint32_t at;
        if (!mn_major) {
            uint32_t r = i / 2, h = i % 2;
            at = d.start + r / 8 * d.stride + r % 8 * d.span + (d.span == 16 ? h * d.lead : h * 16);
        } else {
            uint32_t k = i / (size / 8), j = i % (size / 8), in_atom = d.span / 16;
            at = d.span == 16 ? d.start + j * d.stride + k / 8 * d.lead + k % 8 * 16
                              : d.start + j / in_atom * d.lead + k / 8 * d.stride + k % 8 * d.span + j % in_atom * 16;
        }
        (*out)[i] = swizzled(at, d.span) - SHARED_BASE;
    }
}

static void check_chunks(const std::vector<uint32_t> &chunks, const char *operand)
{
    struct cta *c = self->block;
    for (uint32_t at : chunks) {
        if (at > c->shared_bytes || c->shared_bytes - at < CHUNK)
            violation("%s: wgmma: operand %s reaches shared offset %d, outside the CTA's %u bytes",
                      fiber_name(self).c_str(), operand, (int)at, c->shared_bytes);
        shared_check_fenced(self, c, at, CHUNK, "wgmma");
    }
}

static uint64_t checksum_of(const struct wgmma_op *op, const struct cta *c)
{
    uint64_t sum = 0;
    for (uint32_t at : op->a_chunks)
        sum = shared_checksum(c->shared + at, CHUNK, sum);
    for (uint32_t at : op->b_chunks)
        sum = shared_checksum(c->shared + at, CHUNK, sum);
    return sum;
}

/* ---- executing ---- */
static float bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static float f16(uint16_t x)
{
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13;
    float f;
    if ((x & 0x7c00) == 0x7c00)
        bits |= 0x7f800000; /* infinity, or not a number */
    memcpy(&f, &bits, 4);
    f = f * 0x1p112f;
    return x & 0x8000 ? -f : f;
}

typedef float number_fn(uint16_t);

static float e4m3(uint8_t x)
{
    int exponent = x >> 3 & 15, fraction = x & 7;
    float size = exponent == 0 ? (float)fraction * 0x1p-9f : ldexpf((float)(8 + fraction), exponent - 10);
    if ((x & 0x7f) == 0x7f)
        size = NAN;
    return x & 0x80 ? -size : size;
}

/* Element e of row r goes to to[r * of_row + e * of_element]. */
static void unpack_e4m3(const std::vector<uint32_t> &chunks, const struct cta *c, float *to, uint32_t of_row,
                        uint32_t of_element)
{
    static const std::vector<float> numbers = [] {
        std::vector<float> all;
        for (uint32_t x = 0; x < 256; x++)
            all.push_back(e4m3((uint8_t)x));
        return all;
    }();
    for (uint32_t i = 0; i < chunks.size(); i++)
        for (uint32_t e = 0; e < CHUNK; e++)
            to[i / 2 * of_row + (i % 2 * CHUNK + e) * of_element] = numbers[c->shared[chunks[i] + e]];
}

template <number_fn number> static void unpack_a(const struct wgmma_op *op, const struct cta *c, float *a)
{
    if (op->call.a_registers) {
        for (uint32_t t = 0; t < WARPGROUP; t++)
            for (uint32_t i = 0; i < 8; i++) {
                uint32_t row = t / 32 * 16 + t % 32 / 4 + (i / 2 & 1) * 8, k = t % 4 * 2 + i % 2 + i / 4 * 8;
                a[row * WGMMA_K + k] = number((uint16_t)(op->registers[t][i / 2] >> (i % 2 * 16)));
            }
        return;
    }
    for (uint32_t i = 0; i < op->a_chunks.size(); i++) {
        const uint16_t *x = (const uint16_t *)(c->shared + op->a_chunks[i]);
        for (uint32_t e = 0; e < 8; e++) {
            if (op->call.trans_a)
                a[(i % (WGMMA_M / 8) * 8 + e) * WGMMA_K + i / (WGMMA_M / 8)] = number(x[e]);
            else
                a[i / 2 * WGMMA_K + i % 2 * 8 + e] = number(x[e]);
        }
    }
}

template <number_fn number> static void unpack_b(const struct wgmma_op *op, const struct cta *c, float *b)
{
    uint32_t n = op->call.n;
    for (uint32_t i = 0; i < op->b_chunks.size(); i++) {
        const uint16_t *x = (const uint16_t *)(c->shared + op->b_chunks[i]);
        if (op->call.trans_b)
            for (uint32_t e = 0; e < 8; e++)
                b[i * 8 + e] = number(x[e]);
        else
            for (uint32_t e = 0; e < 8; e++)
                b[(i % 2 * 8 + e) * n + i / 2] = number(x[e]);
    }
}

static void multiply(const struct wgmma_op *op, const struct cta *c)
{
    static float a[WGMMA_M * WGMMA_MOST_K], b[WGMMA_MOST_K * WGMMA_MOST_N];
    switch (op->call.type) {
    case WGMMA_E4M3:
        unpack_e4m3(op->a_chunks, c, a, WGMMA_MOST_K, 1);
        unpack_e4m3(op->b_chunks, c, b, 1, op->call.n);
        return wgmma_multiply_e4m3(op->target->value, a, b, op->call.n);
    case WGMMA_F16:
        unpack_a<f16>(op, c, a);
        unpack_b<f16>(op, c, b);
        break;
    case WGMMA_BF16:
        unpack_a<bf16>(op, c, a);
        unpack_b<bf16>(op, c, b);
    }
    wgmma_multiply(op->target->value, a, b, op->call.n);
}

static void execute(void *object)
{
    struct warpgroup *g = (struct warpgroup *)object;
    struct wgmma_op *op = g->ops.front().get();
    if (checksum_of(op, g->block) != op->sum)
        violation("%s, warpgroup %u: shared memory changed after a wgmma (A %#llx, B %#llx) was issued and before it "
                  "read it: wait for the wgmma before writing there again",
                  cta_name(g->block).c_str(), g->index, (unsigned long long)op->call.a_descriptor,
                  (unsigned long long)op->call.b_descriptor);
    if (!op->call.add)
        memset(op->target->value, 0, WGMMA_M * op->call.n * sizeof(float));
    multiply(op, g->block);
    g->ops.pop_front();
    g->executed++;
    for (fiber *f : g->waiting)
        scheduler_wake(f);
    g->waiting.clear();
    if (!g->ops.empty() && g->ops.front()->joined == WARPGROUP)
        scheduler_run_late(execute, g);
    scheduler_operation_ended(g->block->cluster);
}

/* ---- accumulators ---- */
/* Calls each(index in the thread's registers, index in the 64 x n matrix) for each accumulator of thread t. */
template <class Each> static void for_fragment(uint32_t t, uint32_t n, Each each)
{
    uint32_t row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
    for (uint32_t i = 0; i < n / 8; i++)
        for (uint32_t e = 0; e < 4; e++)
            each(i * 4 + e, (row + e / 2 * 8) * n + i * 8 + column + e % 2);
}

static struct accumulators *find_accumulators(struct warpgroup *g, uint32_t t, const float *d)
{
    for (auto &a : g->in_flight)
        if (a->home[t] == d)
            return a.get();
    return NULL;
}

static void hold(struct accumulators *a, struct fiber *f, float *d, const struct wgmma_call *call)
{
    uint32_t t = f->thread % WARPGROUP;
    if (!f->wgmma_fenced)
        violation("%s: wgmma on accumulators without wgmma.fence since they were last touched", fiber_name(f).c_str());
    a->home[t] = d;
    a->held++;
    for_fragment(t, call->n, [&](uint32_t reg, uint32_t at) {
        if (call->add)
            a->value[at] = d[reg];
        memcpy(&d[reg], &POISON, sizeof(POISON));
    });
}

static void check_same(const struct wgmma_op *op, const struct wgmma_call *call, const struct accumulators *held)
{
    const struct wgmma_call *first = &op->call;
    if (first->n != call->n || first->b_descriptor != call->b_descriptor || first->a_descriptor != call->a_descriptor ||
        first->add != call->add || first->type != call->type || first->trans_a != call->trans_a ||
        first->trans_b != call->trans_b || (!first->a_registers) != (!call->a_registers))
        violation(
            "%s: its wgmma (N %u, A %#llx, B %#llx, add %d) differs from that of the rest of its warpgroup (N %u, A "
            "%#llx, B %#llx, add %d)",
            fiber_name(self).c_str(), call->n, (unsigned long long)call->a_descriptor,
            (unsigned long long)call->b_descriptor, call->add, first->n, (unsigned long long)first->a_descriptor,
            (unsigned long long)first->b_descriptor, first->add);
    if (held && held != op->target)
        violation("%s: its accumulators are in flight in another wgmma than those of the rest of its warpgroup",
                  fiber_name(self).c_str());
}

/* Each warp issues its own part of the product, so one lane of each warp must be ordered after the operand's writes;
 * each time another lane. */
static void order_operands(struct warpgroup *g, const struct wgmma_op *op, void *from)
{
    struct async_agent a = order_product_agent();
    for (uint32_t w = 0; order_on && w < WARPGROUP / WARP; w++) {
        struct fiber *f = &g->block->threads[g->index * WARPGROUP + w * WARP + a.time % WARP];
        for (uint32_t at : op->a_chunks)
            order_async_shared(f, a, g->block, at, CHUNK, ACCESS_READ, from);
        for (uint32_t at : op->b_chunks)
            order_async_shared(f, a, g->block, at, CHUNK, ACCESS_READ, from);
    }
}

/* All 128 threads have issued it. */
static void start(struct warpgroup *g, struct wgmma_op *op, void *from)
{
    struct descriptor b = decode(op->call.b_descriptor, "B");
    find_chunks(b, op->call.n, op->call.trans_b, &op->b_chunks);
    check_chunks(op->b_chunks, "B");
    if (!op->call.a_registers) {
        struct descriptor a = decode(op->call.a_descriptor, "A");
        find_chunks(a, WGMMA_M, op->call.trans_a, &op->a_chunks);
        check_chunks(op->a_chunks, "A");
    }
    op->sum = checksum_of(op, g->block);
    order_operands(g, op, from);
    scheduler_operation_began(g->block->cluster);
    if (g->ops.front().get() == op)
        scheduler_run_late(execute, g);
}

static struct wgmma_op *op_of(struct warpgroup *g, struct fiber *f, const struct wgmma_call *call)
{
    uint64_t index = f->wgmma_issued++ - g->executed;
    if (call->n < 8 || call->n > WGMMA_MOST_N || call->n % 8 != 0)
        violation("%s: wgmma with N %u", fiber_name(f).c_str(), call->n);
    if (call->type == WGMMA_E4M3 && (call->trans_a || call->trans_b || call->a_registers))
        violation("%s: wgmma of e4m3: both operands are K-major (A in registers is not emulated)",
                  fiber_name(f).c_str());
    while (g->ops.size() <= index)
        g->ops.push_back(std::make_unique<wgmma_op>());
    return g->ops[index].get();
}

void wgmma_issue(float *d, const struct wgmma_call *call)
{
    struct fiber *f = self;
    struct warpgroup *g = warpgroup_of(f);
    struct wgmma_op *op = op_of(g, f, call);
    uint32_t t = f->thread % WARPGROUP;
    struct accumulators *held = find_accumulators(g, t, d);
    if (op->joined == 0) {
        op->call = *call;
        op->target = held;
        if (!held) {
            g->in_flight.push_back(std::make_unique<accumulators>());
            op->target = g->in_flight.back().get();
            op->target->n = call->n;
        }
    }
    check_same(op, call, held);
    if (!held)
        hold(op->target, f, d, call);
    op->target->last[t] = f->wgmma_issued;
    if (call->a_registers)
        memcpy(op->registers[t], call->a_registers, sizeof(op->registers[t]));
    if (++op->joined == WARPGROUP)
        start(g, op, CALLER);
    thread_yield();
}

void wgmma_fence_registers(void)
{
    self->wgmma_fenced = true;
}

void wgmma_commit_group(void)
{
    self->wgmma_groups.push_back(self->wgmma_issued);
}

/* Returns the accumulators of the first `covered` operations to the thread's registers. */
static void return_accumulators(struct warpgroup *g, struct fiber *f, uint64_t covered)
{
    uint32_t t = f->thread % WARPGROUP;
    for (size_t i = 0; i < g->in_flight.size();) {
        struct accumulators *a = g->in_flight[i].get();
        if (a->home[t] && a->last[t] <= covered) {
            for_fragment(t, a->n, [&](uint32_t reg, uint32_t at) { a->home[t][reg] = a->value[at]; });
            a->home[t] = NULL;
            f->wgmma_fenced = false;
            if (--a->held == 0) {
                g->in_flight.erase(g->in_flight.begin() + (long)i);
                continue;
            }
        }
        i++;
    }
}

void wgmma_wait_group(uint32_t left)
{
    struct fiber *f = self;
    struct warpgroup *g = warpgroup_of(f);
    uint64_t covered = 0;
    if (f->wgmma_groups.size() > left)
        covered = f->wgmma_groups[f->wgmma_groups.size() - 1 - left];
    while (g->executed < covered) {
        g->waiting.push_back(f);
        scheduler_block({WGMMA_WAIT, covered, g->executed, CALLER});
    }
    while (f->wgmma_groups.size() > left)
        f->wgmma_groups.erase(f->wgmma_groups.begin());
    if (covered != 0)
        return_accumulators(g, f, covered);
    order_products_waited(covered);
    thread_yield();
}

void wgmma_thread_left(struct fiber *f)
{
    if ((f->thread / WARPGROUP + 1) * WARPGROUP > f->block->threads.size())
        return;
    if (warpgroup_of(f)->executed < f->wgmma_issued)
        violation("%s: leaves while its wgmma are in flight", fiber_name(f).c_str());
}

} // namespace hopper
