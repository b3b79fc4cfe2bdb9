/* SPDX-License-Identifier: Apache-2.0 */
/* A copy: pieces of memory (spans) on two sides, of two processes or of one. */
#ifndef SOFTNIC_SPAN_H
#define SOFTNIC_SPAN_H

#include "tools/softnic/world/world.h"

/* A piece of memory as its owner sees it. mr: index of its registration; SN_NONE: plain host memory of the caller. */
struct sn_span {
    uint64_t addr;
    uint64_t length;
    uint32_t mr;
    uint32_t kind; /* enum sn_mem_kind */
};

/* Take the part [offset, offset + bytes) of a list. Return the number of spans. */
uint32_t sn_spans_slice(struct sn_span *to, const struct sn_span *from, uint32_t count, uint64_t offset,
                        uint64_t bytes);

/* Is any of it device memory? */
bool sn_spans_any_device(const struct sn_span *span, uint32_t count);

/* Who makes a copy that takes time: sn_device_mem, the owner of the memory (owner_copy.h), or the steps of an atomic
 * operation. */
enum sn_copy_by { SN_BY_DEVICE, SN_BY_OWNER, SN_BY_STEPS };

/* One copy. dst and src hold the same number of bytes in total. */
struct sn_copy {
    struct sn_world *world;
    uint32_t self;     /* process index of the caller */
    uint32_t dst_proc; /* process indices; at least one is self, except in the copier */
    uint32_t src_proc;
    uint32_t dst_count, src_count;
    uint64_t length;
    void *async; /* private to the one that `by` names, until the last poll */
    uint32_t by; /* enum sn_copy_by */
    struct sn_span dst[SN_MAX_SPANS], src[SN_MAX_SPANS];
};

enum {
    SN_COPY_BUSY = 1,
    SN_COPY_OWNER = 2, /* from sn_device_mem: only the owner of the other side's memory can reach it */
};

#endif
