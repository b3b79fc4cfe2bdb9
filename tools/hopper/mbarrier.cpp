/* SPDX-License-Identifier: Apache-2.0 */
/* Barriers in shared memory, which count arrivals and bytes. */
#include "tools/hopper/mbarrier.h"

#include <cstring>

#include "tools/hopper/device_memory.h"
#include "tools/hopper/order.h"
#include "tools/hopper/place.h"

namespace hopper
{

enum : int64_t { MOST_BYTES = (1 << 20) - 1 };
enum : uint64_t { MARK = 0xbaa1baa100000000ull }; /* the 8 bytes of a live barrier hold this + its slot */

static uint32_t slot_of(uint32_t address)
{
    return ((address & 0xffffff) - SHARED_BASE) / 8;
}

static struct mbarrier *find(struct cta *from, uint32_t address, const char *what)
{
    uint8_t *word = shared_bytes_at(from, address, 8, 8, what);
    struct cta *c = shared_cta(from, address, what);
    struct mbarrier *b = c->barriers[slot_of(address)].get();
    uint64_t mark;
    if (!b)
        violation("%s: %s: no barrier was initialised at shared offset %u",
                  self ? fiber_name(self).c_str() : cta_name(from).c_str(), what, slot_of(address) * 8);
    memcpy(&mark, word, sizeof(mark));
    if (mark != MARK + slot_of(address))
        violation("%s: %s: the barrier at shared offset %u was overwritten: %#llx",
                  self ? fiber_name(self).c_str() : cta_name(from).c_str(), what, slot_of(address) * 8,
                  (unsigned long long)mark);
    return b;
}

void mbarrier_start(uint32_t address, uint32_t arrivals)
{
    uint8_t *word = shared_bytes_at(self->block, address, 8, 8, "mbarrier.init");
    uint64_t mark = MARK + slot_of(address);
    if (arrivals == 0 || arrivals > MOST_BYTES)
        violation("%s: mbarrier.init of %#x with %u arrivals", fiber_name(self).c_str(), address, arrivals);
    auto &barrier = self->block->barriers[slot_of(address)];
    if (barrier)
        violation("%s: mbarrier.init at shared offset %u, where one is in use", fiber_name(self).c_str(),
                  slot_of(address) * 8);
    barrier.reset(new mbarrier{arrivals, arrivals, 0, 0, {}, {}, {}});
    order_mbarrier_init(self->block, slot_of(address) * 8, CALLER);
    memcpy(word, &mark, sizeof(mark));
    thread_yield();
}

void mbarrier_start_fence(void)
{
    if (!place_taken().removed)
        order_fence_async(false);
    thread_yield();
}

void mbarrier_end(uint32_t address)
{
    struct mbarrier *b = find(self->block, address, "mbarrier.inval");
    if (!b->waiting.empty())
        violation("%s: mbarrier.inval at %#x, where %zu threads wait", fiber_name(self).c_str(), address,
                  b->waiting.size());
    self->block->barriers[slot_of(address)].reset();
}

static void complete_if_due(struct mbarrier *b, struct cta *c, uint32_t address)
{
    if (b->pending != 0 || b->bytes != 0)
        return;
    b->phase++;
    b->pending = b->arrivals;
    order_mbarrier_complete(b, c, slot_of(address) * 8);
    for (fiber *f : b->waiting) {
        order_mbarrier_pass(b, f);
        scheduler_wake(f);
    }
    b->waiting.clear();
}

static void check_bytes(const struct mbarrier *b, const struct fiber *who, uint32_t address)
{
    if (b->bytes > MOST_BYTES || b->bytes < -MOST_BYTES || (b->pending == 0 && b->bytes < 0))
        violation("%s: the barrier at shared offset %u expects %lld bytes, with %u of %u arrivals to come: "
                  "more bytes have come than were expected, or too many were expected",
                  fiber_name(who).c_str(), slot_of(address) * 8, (long long)b->bytes, b->pending, b->arrivals);
}

void mbarrier_signal(uint32_t address, uint32_t arrivals, uint32_t bytes, enum scope scope)
{
    struct mbarrier *b = find(self->block, address, "arrival at a barrier");
    struct cta *c = shared_cta(self->block, address, "arrival at a barrier");
    order_mbarrier_used(c, slot_of(address) * 8, "an arrival", CALLER);
    b->bytes += bytes;
    if (b->pending < arrivals)
        violation("%s: one arrival too many at the barrier at shared offset %u: phase %llu has all its %u arrivals and "
                  "waits for %lld bytes",
                  fiber_name(self).c_str(), slot_of(address) * 8, (unsigned long long)b->phase, b->arrivals,
                  (long long)b->bytes);
    b->pending -= arrivals;
    check_bytes(b, self, address);
    order_mbarrier_arrive(b, c, scope);
    complete_if_due(b, c, address);
    thread_yield();
}

void mbarrier_complete_bytes(const struct fiber *issuer, struct cta *c, uint32_t address, uint32_t bytes)
{
    struct mbarrier *b = find(c, address & 0xffffff, "completion of a copy");
    b->bytes -= bytes;
    check_bytes(b, issuer, address);
    complete_if_due(b, c, address);
}

bool mbarrier_done(uint32_t address, uint32_t parity)
{
    struct mbarrier *b = find(self->block, address, "test of a barrier");
    order_mbarrier_used(self->block, slot_of(address) * 8, "a test", CALLER);
    thread_yield();
    if ((b->phase & 1) == (parity & 1))
        return false;
    order_mbarrier_pass(b, self);
    return true;
}

void mbarrier_block(uint32_t address, uint32_t parity)
{
    struct mbarrier *b = find(self->block, address, "wait at a barrier");
    uint64_t phase = b->phase;
    order_mbarrier_used(self->block, slot_of(address) * 8, "a wait", CALLER);
    thread_yield();
    phase = b->phase;
    if ((phase & 1) != (parity & 1))
        return order_mbarrier_pass(b, self);
    b->waiting.push_back(self);
    scheduler_block({"barrier", address, parity, CALLER});
    /* On a GPU a thread may test the barrier only now; it would see the old parity again and wait for ever. */
    if (b->phase != phase + 1)
        violation("%s: waited for phase %llu of the barrier at shared offset %u, which is in phase %llu now: it "
                  "completed more "
                  "than one phase while this thread waited",
                  fiber_name(self).c_str(), (unsigned long long)phase, slot_of(address) * 8,
                  (unsigned long long)b->phase);
}

std::string describe_wait(const struct fiber *f)
{
    char text[200] = "";
    if (strcmp(f->wait.what, "barrier") == 0) {
        uint32_t address = (uint32_t)f->wait.object, slot = slot_of(address);
        const struct mbarrier *b = f->block->barriers[slot].get();
        snprintf(text, sizeof(text),
                 "at shared offset %u, parity %u (phase %llu; %u of %u arrivals and %lld bytes to come)", slot * 8,
                 (uint32_t)f->wait.value, (unsigned long long)b->phase, b->pending, b->arrivals, (long long)b->bytes);
    } else {
        snprintf(text, sizeof(text), "%#llx, %llu", (unsigned long long)f->wait.object,
                 (unsigned long long)f->wait.value);
    }
    return text;
}

} // namespace hopper
