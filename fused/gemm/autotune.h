/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PERSEUS_FUSED_GEMM_AUTOTUNE_H
#define PERSEUS_FUSED_GEMM_AUTOTUNE_H

#include "fused/core/context.h"
#include "fused/gemm/table.h"

/* Whether opening a plan of the shape times candidates, where no entry of a table is near. The same on all ranks. */
bool prs_autotune_measures(const struct prs_fused *ctx, const struct prs_gemm_shape *shape);

/* Collective: times candidates on memory of its own for ctx->measure_ms, and one candidate longer. Waits for all work
 * of the device. found->source is PRS_TABLE_NONE where memory is too short on some rank. 0 or -errno. */
int prs_autotune_opening(struct prs_fused *ctx, const struct prs_gemm_shape *shape, struct prs_table_found *found);

#endif
