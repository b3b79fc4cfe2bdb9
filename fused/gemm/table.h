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

/* Entries are also looked for with half of the rows, a quarter, and so on. The last class holds for all fewer rows. */
enum { PRS_TABLE_CLASSES = 6 };

/* By class: the values of the entry nearest to m >> i rows. All are 0 if there is none. */
struct prs_table_found {
    uint32_t source;             /* enum prs_table_source of class 0 */
    float us[PRS_TABLE_CLASSES]; /* expected time for m >> i rows; 0: unknown */
    /* Measured values; 0: the model decides. If the other path than the measured one should be faster, only the path is
     * set. */
    struct prs_gemm_tuning tuning[PRS_TABLE_CLASSES];
    /* The time of the unfused path over that of the fused one. PRS_RATIO_FUSED, PRS_RATIO_UNFUSED: the entry says only
     * which is faster. */
    float ratio[PRS_TABLE_CLASSES];
};
#define PRS_RATIO_FUSED   1e9f
#define PRS_RATIO_UNFUSED 1e-9f

/* The entry of the nearest shape, among those of this number of SMs, operation, world and nodes, and of types as wide:
 * all 16-bit types have the same entries. The distance of two shapes is |log2| of the ratio of their m, plus that of n,
 * plus that of k, plus 1/4 where B is laid out differently, plus 1/4 where they are scaled differently, plus 0.3 where
 * the GPU has another name; an entry further away than 1/2 is not used. Among equally near ones, the file's wins over
 * the library's, and a later line over an earlier one. Times of another shape are carried over by the model
 * (prs_tuning_carry()). */
void prs_table_find(const struct prs_fused *ctx, const struct prs_gemm_shape *shape, struct prs_table_found *found);

/* Appends to the file that PERSEUS_FUSED_TUNING names, if any. other_us: the time of the path that is not t->path; 0:
 * unknown. 0 or -errno. */
int prs_table_append(const struct prs_fused *ctx, const struct prs_gemm_shape *shape, const struct prs_gemm_tuning *t,
                     double us, double other_us);

/* The ratio of struct prs_table_found for a tuning of a decided path that takes `us`. */
float prs_table_ratio(const struct prs_gemm_tuning *t, double us, double other_us);

/* The ranks that take part in a product of the shape. */
const struct prs_place *prs_table_place(const struct prs_fused *ctx, const struct prs_gemm_shape *shape);

/* The text of table.txt. */
const char *prs_table_shipped(void);

#endif
