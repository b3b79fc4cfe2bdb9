/* SPDX-License-Identifier: Apache-2.0 */
/* The life of one op: it starts with a number of parts, each of them one work request, and is done when the last part
 * is done, or fails. The caller owns the storage, which may vanish the moment status leaves PRS_OP_PENDING. */
#ifndef TRANSPORT_OP_H
#define TRANSPORT_OP_H

#include <stdbool.h>

#include <perseus/perseus.h>

static inline void prs_op_start(struct prs_op *op, uint32_t parts)
{
    op->status = PRS_OP_PENDING;
    op->parts = parts;
}

/* Return true when that was the last part. Then op must not be touched again. */
static inline bool prs_op_part_done(struct prs_op *op)
{
    if (--op->parts)
        return false;
    op->status = 0;
    return true;
}

static inline void prs_op_fail(struct prs_op *op, int status)
{
    op->parts = 0;
    op->status = status;
}

#endif
