/* SPDX-License-Identifier: Apache-2.0 */
/* Which memory exists, which device owns it, and which bytes copies and tensor cores may read. "Asynchronous
 * operations" below are the copies and products that run concurrently with the threads (the async proxy of PTX). */
#ifndef TOOLS_HOPPER_DEVICE_MEMORY_H
#define TOOLS_HOPPER_DEVICE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "tools/hopper/scheduler.h"

namespace hopper
{

enum memory_kind { MEMORY_DEVICE, MEMORY_HOST };

/* Memory of a device, or page-locked host memory, filled with not-a-numbers. The pages around it fault. */
void *memory_allocate(size_t bytes, int device, enum memory_kind kind);
bool memory_free(void *p, enum memory_kind kind);
struct allocation {
    uint8_t *base;
    size_t bytes;
    int device;
    enum memory_kind kind;
    bool is_virtual;
    uint64_t access; /* virtual memory: a bit for each device that may use it */
};
/* Pages of a device that virtual.cpp has mapped, and is about to unmap. Nobody may use them until memory_allow(), which
 * returns false if there are no such pages. */
void memory_map(void *p, size_t bytes, int device);
void memory_unmap(void *p);
bool memory_allow(void *p, int device);
/* Finds the allocation that holds the whole range; false: none does. Any thread may call it. */
bool memory_find(const void *p, size_t bytes, struct allocation *out);
/* Whether any allocation lies in these bytes. */
bool memory_in_page(const void *p, size_t bytes);
void memory_allow_peer(int device, int peer);
bool memory_peer_allowed(int device, int peer);

/* The writes of copies to device memory are numbered in the order in which they land: these functions return the number
 * of the newest write, count a new write, and return the newest number in a range. On the scheduler's thread only. */
uint32_t memory_write_count(void);
void memory_note_write(const void *p, size_t bytes);
uint32_t memory_newest_write(const void *p, size_t bytes);

/* A violation of `who` unless its device may reach the range. what: the operation, for the text. */
void memory_check(const struct fiber *who, const void *p, size_t bytes, const char *what);

/* The CTA that a shared-memory address of `from` names, and the memory at that address; both check the address. */
struct cta *shared_cta(struct cta *from, uint32_t address, const char *what);
uint8_t *shared_bytes_at(struct cta *from, uint32_t address, uint32_t bytes, uint32_t alignment, const char *what);
/* An asynchronous operation is about to read: a violation if an ordinary store there was not fenced. */
void shared_check_fenced(const struct fiber *who, struct cta *c, uint32_t offset, uint32_t bytes, const char *what);
/* An asynchronous operation has written. */
void shared_mark_clean(struct cta *c, uint32_t offset, uint32_t bytes);
/* f has written with an ordinary store. */
void shared_mark_dirty(struct fiber *f, struct cta *c, uint32_t offset, uint32_t bytes);

} // namespace hopper

#endif
