/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/device_memory.h"

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

#include "tools/hopper/order.h"
#include "tools/hopper/place.h"

namespace hopper
{

static std::mutex lock; /* protects everything below; nothing below is ever destroyed */
static std::map<uintptr_t, allocation> &allocations = *new std::map<uintptr_t, allocation>();
/* The number of the newest write to each 16-byte granule, by the base of the allocation. */
static std::map<uintptr_t, std::vector<uint32_t>> &stamps = *new std::map<uintptr_t, std::vector<uint32_t>>();
static uint32_t writes;
static std::set<std::pair<int, int>> &peers = *new std::set<std::pair<int, int>>();

/* ---- global memory ---- */
static size_t mapped_bytes(size_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

/* Large blocks that were freed keep their pages for the next block of the same size, because making pages would take
 * most of the time. Until then an access faults. */
enum : size_t { KEPT_LEAST = 1 << 20, KEPT_MOST = 512 << 20 };
static std::multimap<size_t, uint8_t *> &kept = *new std::multimap<size_t, uint8_t *>(); /* by their mapped bytes */
static size_t kept_bytes;

static bool keep_locked(uint8_t *pages, size_t mapped)
{
    if (mapped < KEPT_LEAST || kept_bytes + mapped > KEPT_MOST || mprotect(pages, mapped, PROT_NONE) != 0)
        return false;
    kept.insert({mapped, pages});
    kept_bytes += mapped;
    return true;
}

static uint8_t *take_kept(size_t mapped)
{
    std::lock_guard<std::mutex> held(lock);
    auto found = kept.find(mapped);
    if (found == kept.end() || mprotect(found->second, mapped, PROT_READ | PROT_WRITE) != 0)
        return NULL;
    uint8_t *pages = found->second;
    kept.erase(found);
    kept_bytes -= mapped;
    return pages;
}

/* An access to the page before them or after them faults. */
static uint8_t *map_pages(size_t mapped)
{
    uint8_t *p = (uint8_t *)mmap(NULL, mapped + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == (uint8_t *)MAP_FAILED)
        return NULL;
    if (mprotect(p + 4096, mapped, PROT_READ | PROT_WRITE) != 0) {
        (void)munmap(p, mapped + 8192);
        return NULL;
    }
    return p + 4096;
}

/* The memory, rounded up to CUDA's alignment, ends at the end of a page, so that an access beyond it faults. */
void *memory_allocate(size_t bytes, int device, enum memory_kind kind)
{
    size_t mapped = mapped_bytes(bytes), room = (bytes + 255) / 256 * 256;
    uint8_t *pages = take_kept(mapped);
    if (!pages)
        pages = map_pages(mapped);
    if (!pages)
        return NULL;
    memset(pages, 0xff, mapped);
    uint8_t *p = pages + mapped - room;
    std::lock_guard<std::mutex> held(lock);
    allocations[(uintptr_t)p] = {p, bytes, device, kind, false, 0};
    order_forget(p, room);
    return p;
}

bool memory_free(void *p, enum memory_kind kind)
{
    std::lock_guard<std::mutex> held(lock);
    auto found = allocations.find((uintptr_t)p);
    if (found == allocations.end() || found->second.kind != kind || found->second.is_virtual)
        return false;
    uint8_t *pages = (uint8_t *)((uintptr_t)p & ~(uintptr_t)4095);
    size_t mapped = mapped_bytes(found->second.bytes);
    if (!keep_locked(pages, mapped))
        (void)munmap(pages - 4096, mapped + 8192);
    stamps.erase(found->first);
    order_forget(p, found->second.bytes);
    allocations.erase(found);
    return true;
}

void memory_map(void *p, size_t bytes, int device)
{
    std::lock_guard<std::mutex> held(lock);
    allocations[(uintptr_t)p] = {(uint8_t *)p, bytes, device, MEMORY_DEVICE, true, 0};
    order_forget(p, bytes);
}

void memory_unmap(void *p)
{
    std::lock_guard<std::mutex> held(lock);
    auto found = allocations.find((uintptr_t)p);
    stamps.erase(found->first);
    order_forget(p, found->second.bytes);
    allocations.erase(found);
}

bool memory_allow(void *p, int device)
{
    std::lock_guard<std::mutex> held(lock);
    auto found = allocations.find((uintptr_t)p);
    if (found == allocations.end() || !found->second.is_virtual || device < 0 || device >= 64)
        return false;
    found->second.access |= 1ull << device;
    return true;
}

bool memory_find(const void *p, size_t bytes, struct allocation *out)
{
    std::lock_guard<std::mutex> held(lock);
    auto after = allocations.upper_bound((uintptr_t)p);
    if (after == allocations.begin())
        return false;
    *out = std::prev(after)->second;
    return (const uint8_t *)p + bytes <= out->base + out->bytes;
}

bool memory_in_page(const void *p, size_t bytes)
{
    std::lock_guard<std::mutex> held(lock);
    auto after = allocations.lower_bound((uintptr_t)p + bytes);
    if (after == allocations.begin())
        return false;
    const struct allocation &a = std::prev(after)->second;
    return a.base + (a.bytes + 255) / 256 * 256 > (const uint8_t *)p;
}

/* The stamps of a range; NULL if no device allocation holds it. */
static uint32_t *stamps_of_locked(const void *p, size_t bytes, size_t *count)
{
    auto after = allocations.upper_bound((uintptr_t)p);
    if (bytes == 0 || after == allocations.begin())
        return NULL;
    const struct allocation &a = std::prev(after)->second;
    size_t offset = (size_t)((const uint8_t *)p - a.base);
    if (offset + bytes > a.bytes || a.kind != MEMORY_DEVICE)
        return NULL;
    std::vector<uint32_t> &all = stamps[(uintptr_t)a.base];
    if (all.empty())
        all.resize((a.bytes + 15) / 16);
    *count = (offset + bytes + 15) / 16 - offset / 16;
    return &all[offset / 16];
}

uint32_t memory_write_count(void)
{
    return writes;
}

void memory_note_write(const void *p, size_t bytes)
{
    std::lock_guard<std::mutex> held(lock);
    size_t count = 0;
    uint32_t *at = stamps_of_locked(p, bytes, &count);
    writes++;
    for (size_t i = 0; at && i < count; i++)
        at[i] = writes;
}

uint32_t memory_newest_write(const void *p, size_t bytes)
{
    std::lock_guard<std::mutex> held(lock);
    size_t count = 0;
    uint32_t *at = stamps_of_locked(p, bytes, &count), newest = 0;
    for (size_t i = 0; at && i < count; i++)
        newest = at[i] > newest ? at[i] : newest;
    return newest;
}

void memory_allow_peer(int device, int peer)
{
    std::lock_guard<std::mutex> held(lock);
    peers.insert({device, peer});
}

bool memory_peer_allowed(int device, int peer)
{
    std::lock_guard<std::mutex> held(lock);
    return device == peer || peers.count({device, peer}) != 0;
}

void memory_check(const struct fiber *who, const void *p, size_t bytes, const char *what)
{
    struct allocation a = {};
    int device = who->block->of->device;
    if (!memory_find(p, bytes, &a))
        violation_of(who, "%s: %zu bytes at %p lie in no allocation; the nearest below is %zu bytes at %p", what, bytes,
                     p, a.bytes, (void *)a.base);
    if (a.kind == MEMORY_DEVICE &&
        !(a.is_virtual ? a.access >> device & 1 : (uint64_t)memory_peer_allowed(device, a.device)))
        violation_of(who, "%s: %p is memory of device %d, to which device %d was not given access", what, p, a.device,
                     device);
}

/* ---- shared memory ---- */
static_assert(SHARED_BASE % 1024 == 0, "swizzles use address bits");

void *shared_dynamic(void)
{
    return self->block->shared;
}

uint32_t shared_address(const void *p)
{
    const struct cta *c = self->block;
    uint64_t offset = (uint64_t)((const uint8_t *)p - c->shared);
    if (offset > c->shared_bytes)
        violation("%s: %p is not in this CTA's %u bytes of shared memory", fiber_name(self).c_str(), p,
                  c->shared_bytes);
    return SHARED_BASE + (uint32_t)offset;
}

uint32_t shared_map(uint32_t address, uint32_t rank)
{
    if (address >> 24 != OWN_WINDOW || rank >= self->block->cluster->ctas.size())
        violation("%s: mapa of address %#x to CTA %u of a cluster of %zu", fiber_name(self).c_str(), address, rank,
                  self->block->cluster->ctas.size());
    return address | (rank + 1) << 24;
}

struct cta *shared_cta(struct cta *from, uint32_t address, const char *what)
{
    uint32_t window = address >> 24;
    if (window == OWN_WINDOW)
        return from;
    if (window > from->cluster->ctas.size())
        violation("%s: %s: address %#x names CTA %u of a cluster of %zu", cta_name(from).c_str(), what, address,
                  window - 1, from->cluster->ctas.size());
    struct cta *c = from->cluster->ctas[window - 1].get();
    if (c->alive == 0)
        violation("%s: %s: CTA %u of the cluster, whose shared memory address %#x names, has left",
                  cta_name(from).c_str(), what, window - 1, address);
    return c;
}

uint8_t *shared_bytes_at(struct cta *from, uint32_t address, uint32_t bytes, uint32_t alignment, const char *what)
{
    struct cta *c = shared_cta(from, address, what);
    uint32_t offset = (address & 0xffffff) - SHARED_BASE;
    if (address % alignment != 0)
        violation("%s: %s: shared address %#x is not a multiple of %u", self ? fiber_name(self).c_str() : "", what,
                  address, alignment);
    if (offset > c->shared_bytes || bytes > c->shared_bytes - offset)
        violation("%s: %s: %u bytes at shared offset %d lie outside the CTA's %u bytes",
                  self ? fiber_name(self).c_str() : cta_name(from).c_str(), what, bytes, (int)offset, c->shared_bytes);
    return c->shared + offset;
}

void shared_mark_dirty(struct fiber *f, struct cta *c, uint32_t offset, uint32_t bytes)
{
    for (uint32_t g = offset / 16; g <= (offset + bytes - 1) / 16; g++) {
        if (c == f->block && c->dirty[g] != f->thread + 1) {
            c->dirty[g] = f->thread + 1;
            f->dirty.push_back(g);
        }
    }
}

void shared_mark_clean(struct cta *c, uint32_t offset, uint32_t bytes)
{
    memset(&c->dirty[offset / 16], 0, (bytes + 15) / 16 * sizeof(c->dirty[0]));
}

void shared_check_fenced(const struct fiber *who, struct cta *c, uint32_t offset, uint32_t bytes, const char *what)
{
    for (uint32_t g = offset / 16; g <= (offset + bytes - 1) / 16; g++)
        if (c->dirty[g] != 0)
            violation("%s: %s reads shared offset %u, which thread %u wrote with an ordinary store, without "
                      "fence.proxy.async after it",
                      fiber_name(who).c_str(), what, g * 16, c->dirty[g] - 1);
}

const void *shared_load(uint32_t address, uint32_t bytes)
{
    const uint8_t *at = shared_bytes_at(self->block, address, bytes, bytes, "load from shared memory");
    struct cta *c = shared_cta(self->block, address, "load from shared memory");
    order_shared(self, c, (uint32_t)(at - c->shared), bytes, ACCESS_READ, CALLER);
    return at;
}

void shared_store(uint32_t address, const void *from, uint32_t bytes)
{
    uint8_t *to = shared_bytes_at(self->block, address, bytes, bytes, "store to shared memory");
    struct cta *c = shared_cta(self->block, address, "store to shared memory");
    order_shared(self, c, (uint32_t)(to - c->shared), bytes, ACCESS_WRITE, CALLER);
    memcpy(to, from, bytes);
    shared_mark_dirty(self, c, (uint32_t)(to - c->shared), bytes);
}

void shared_fence_async(void)
{
    struct cta *c = self->block;
    if (place_taken().removed)
        return thread_yield();
    for (uint32_t g : self->dirty)
        if (c->dirty[g] == self->thread + 1)
            c->dirty[g] = 0;
    self->dirty.clear();
    order_fence_async(false);
    thread_yield();
}

void global_fence_async(void)
{
    if (place_taken().removed)
        return thread_yield();
    self->warp->writes_fenced = memory_write_count();
    order_fence_async(true);
    thread_yield();
}

} // namespace hopper
