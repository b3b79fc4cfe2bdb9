/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention's keys and values by copy engines: group by group to one rank after the other, as they lie in the
 * caller's tensors (attention_schedule.h, "by copy engines"). */
#ifndef PERSEUS_FUSED_ATTENTION_COPIES_H
#define PERSEUS_FUSED_ATTENTION_COPIES_H

#include "fused/attention_layout.h"
#include "fused/copy_stream.h"

/* What one copy moves: as many pairs as lie so that their positions are rows of equal length at equal distance. */
struct prs_attention_run {
    uint64_t begin; /* in the tensor; this and the next two in bytes */
    uint64_t pitch, bytes;
    uint32_t rows, pairs;
};

#ifdef __cplusplus
extern "C" {
#endif

/* The pairs from `pair` on, up to `end` at most. */
struct prs_attention_run prs_attention_run_at(const struct prs_attention_args *a, uint32_t pair, uint32_t end);

/* Bytes of the keys of one rank. */
uint64_t prs_attention_tensor_bytes(const struct prs_attention_args *a);

/* Enqueues all copies of a launch. 0 or -EIO; the kernels of all ranks then give up waiting. */
int prs_attention_copies_enqueue(struct prs_copy_stream *c, const struct prs_attention_args *a, const void *k,
                                 const void *v);

#ifdef __cplusplus
}
#endif

#endif
