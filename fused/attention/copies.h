/* SPDX-License-Identifier: Apache-2.0 */
/* Ring attention whose keys and values copy engines send: group by group, to one rank after the other, in the layout of
 * the caller's tensors (schedule.h, "by copy engines"). */
#ifndef PERSEUS_FUSED_ATTENTION_COPIES_H
#define PERSEUS_FUSED_ATTENTION_COPIES_H

#include <perseus/attention.h>

#include "fused/attention/layout.h"
#include "fused/core/copy_stream.h"

/* Enqueues all copies of a launch. 0, or -EIO, after which the kernels of all ranks stop waiting and report. */
int prs_attention_copies_enqueue(struct prs_copy_stream *c, const struct prs_attention_shape *shape,
                                 const struct prs_attention_args *a, const void *k, const void *v);

#endif
