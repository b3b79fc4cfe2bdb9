/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention's keys and values by copy engines: group by group to one rank after the other, as they lie in the
 * caller's tensors (schedule.h, "by copy engines"). */
#ifndef PERSEUS_FUSED_ATTENTION_COPIES_H
#define PERSEUS_FUSED_ATTENTION_COPIES_H

#include "fused/attention/layout.h"
#include "fused/core/copy_stream.h"

/* Enqueues all copies of a launch. 0 or -EIO; the kernels of all ranks then give up waiting. */
int prs_attention_copies_enqueue(struct prs_copy_stream *c, const struct prs_attention_args *a, const void *k,
                                 const void *v);

#endif
