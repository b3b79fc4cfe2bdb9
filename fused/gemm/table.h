/* SPDX-License-Identifier: Apache-2.0 */
/* Tunings that were measured: a table that comes with the library (table.txt), and a file of the user's. A shape takes
 * the entry of the nearest shape, if one is near. */
#ifndef PERSEUS_FUSED_GEMM_TABLE_H
#define PERSEUS_FUSED_GEMM_TABLE_H

#include "fused/core/context.h"
#include "fused/gemm/layout.h"

enum prs_table_source {
    PRS_TABLE_NONE = 0,
    PRS_TABLE_FILE = 1,
    PRS_TABLE_SHIPPED = 2,
    PRS_TABLE_MEASURED = 3 /* just now */
};

struct prs_table_found {
    uint32_t source;               /* enum prs_table_source */
    float us;                      /* expected for the shape: the entry's, by the ratio of the products; 0: unknown */
    struct prs_gemm_tuning tuning; /* as measured; 0: by the model */
};

/* The entry of the nearest shape, among those of this number of SMs, operation, world and nodes, and of types as wide:
 * all 16-bit types have the same entries. The distance of two shapes is |log2| of the ratio of their m, plus that of n,
 * plus that of k, plus 1/4 where B is laid out differently, plus 1/4 where they are scaled differently, plus 0.3 where
 * the GPU has another name; an entry further than 1/2 is none. Of equally near ones the file's wins over the library's,
 * and a later line over an earlier one. */
void prs_table_find(const struct prs_fused *ctx, const struct prs_gemm_shape *shape, struct prs_table_found *found);

/* Appends to the file that PERSEUS_FUSED_TUNING names, if any. 0 or -errno. */
int prs_table_append(const struct prs_fused *ctx, const struct prs_gemm_shape *shape, const struct prs_gemm_tuning *t,
                     double us);

/* The ranks that take part in a product of the shape. */
const struct prs_place *prs_table_place(const struct prs_fused *ctx, const struct prs_gemm_shape *shape);

/* The text of table.txt. */
const char *prs_table_shipped(void);

#endif
