/* SPDX-License-Identifier: Apache-2.0 */
/* Which memory exists, whose it is, and what of shared memory the asynchronous engines may read. */
#ifndef TOOLS_HOPPER_DEVICE_MEMORY_H
#define TOOLS_HOPPER_DEVICE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "tools/hopper/scheduler.h"

namespace hopper
{

enum memory_kind { MEMORY_DEVICE, MEMORY_HOST };

/* Memory of a device, or page-locked host memory, filled with not-a-numbers, with pages behind it that fault. */
void *memory_take(size_t bytes, int device, enum memory_kind kind);
bool memory_give(void *p, enum memory_kind kind);
/* The allocation that holds all of it; false: none does. Any thread. */
struct allocation {
    uint8_t *base;
    size_t bytes;
    int device;
    enum memory_kind kind;
};
bool memory_find(const void *p, size_t bytes, struct allocation *out);
void memory_allow_peer(int device, int peer);
bool memory_peer_allowed(int device, int peer);

/* What copies wrote to device memory, in order of time: the number of the newest write so far, and of the newest in a
 * range. The engine's thread only. */
uint32_t memory_writes(void);
void memory_written(const void *p, size_t bytes);
uint32_t memory_newest_write(const void *p, size_t bytes);

/* On a fiber or in an operation of `c`: the range must be live and reachable from c's device. who: for the text. */
void memory_check(const struct fiber *who, const void *p, size_t bytes, const char *what);

/* The CTA that a shared-memory address means, seen from `from`, and the bytes there; checked. */
struct cta *shared_cta(struct cta *from, uint32_t address, const char *what);
uint8_t *shared_bytes_at(struct cta *from, uint32_t address, uint32_t bytes, uint32_t alignment, const char *what);
/* The asynchronous side is about to read: nothing there may be unfenced. */
void shared_check_fenced(const struct fiber *who, struct cta *c, uint32_t offset, uint32_t bytes, const char *what);
/* The asynchronous side has written. */
void shared_mark_clean(struct cta *c, uint32_t offset, uint32_t bytes);
/* Written by an ordinary store of f. */
void shared_mark_dirty(struct fiber *f, struct cta *c, uint32_t offset, uint32_t bytes);

} // namespace hopper

#endif
