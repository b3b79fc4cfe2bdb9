/* SPDX-License-Identifier: Apache-2.0 */
/* A plan of MoE: opened by plan.c, and shared by its forward launches (launch.c) and those that gradients need
 * (gradients.c). */
#ifndef PERSEUS_FUSED_MOE_PLAN_H
#define PERSEUS_FUSED_MOE_PLAN_H

#include <stdbool.h>

#include "fused/core/element.h"
#include "fused/core/plan.h"
#include "fused/moe/few.h"

/* The type of results, and of tokens, rows and weights unless they are e4m3. */
enum { PRS_MOE_TYPE = PRS_DTYPE_BF16 };

struct prs_moe_plan {
    struct prs_plan base;
    struct prs_moe_shape shape;
    struct prs_moe_info info;
    struct prs_moe_args args; /* without the caller's pointers and the maps of weights and out */
    struct prs_moe_args down; /* a layer's second product */
    /* The first product of a layer, if its result is kept or quantised; or a product of prs_moe_multiply(). */
    struct prs_moe_args first;
    bool first_is_n_k;    /* layout of the weights of prs_moe_multiply() */
    uint8_t *activations; /* [capacity, I], in scratch memory: between a layer's products */
    struct prs_moe_tuning wanted;
    struct prs_few few; /* for a plan whose layer is one kernel */
    uint32_t few_ctas;
};

static inline struct prs_moe_plan *prs_moe_self(struct prs_plan *p)
{
    return (struct prs_moe_plan *)p;
}

/* Whether tokens, rows and weights are e4m3, with scales of blocks. */
static inline bool prs_moe_is_scaled(const struct prs_moe_plan *p)
{
    return p->args.type == PRS_DTYPE_E4M3;
}

/* Columns of a tile of the product. */
static inline uint32_t prs_moe_tile_columns(void)
{
    return PRS_TILE_N;
}

/* Bytes of a row of the product's A. */
static inline uint32_t prs_moe_row_bytes(uint32_t type, uint32_t columns)
{
    return type == PRS_DTYPE_E4M3 ? prs_moe_scaled_bytes(columns) : columns * prs_element_bytes(type);
}

/* Bytes of a row of results. */
static inline uint32_t prs_moe_result_bytes(const struct prs_moe_plan *p)
{
    return p->shape.hidden * prs_element_bytes(PRS_MOE_TYPE);
}

/* 0, or -EINVAL if the plan is of e4m3, which has no gradients. what: the name of the call. */
int prs_moe_check_gradients(const struct prs_moe_plan *p, const char *what);

/* Lets the next launch use the caller's maps; NULL: the plan's own. */
void prs_moe_use_maps(struct prs_moe_plan *p, const void *maps);

/* Enqueues one launch. steps: as in prs_plan_launch(). ends: as in struct prs_moe_args. A launch that neither
 * dispatches nor ends is local to this rank. */
int prs_moe_launch(struct prs_moe_plan *p, prs_launch_step_fn *const *steps, bool dispatches, uint32_t ends,
                   cudaStream_t stream);
/* A launch step: sets rows that only fill an expert's last block of 128 to zero. */
int prs_moe_clear_fill(struct prs_plan *base, cudaStream_t stream);

/* The experts' matrices of a product, [k, n] each, or [n, k]. */
struct prs_moe_matrices {
    const void *at;
    uint32_t k, n;
    bool n_k;
    const float *scales; /* e4m3: [n / 128, k / 128] each */
};

/* Encodes tensor maps of the matrices and of the results, which have args->n columns, and sets the scales. rows: memory
 * of the product's A. */
int prs_moe_encode_product(const struct prs_moe_plan *p, struct prs_moe_args *args, const void *rows,
                           const struct prs_moe_matrices *m, void *to);
/* Encodes the tensor map of the product's A. */
int prs_moe_encode_rows(const struct prs_moe_plan *p, const void *rows, uint32_t columns, CUtensorMap *map);
/* Encodes everything for a product of rows [capacity, k] without an epilogue. */
int prs_moe_encode_plain(const struct prs_moe_plan *p, struct prs_moe_args *args, const void *rows,
                         const struct prs_moe_matrices *m, void *to);
int prs_moe_enqueue_product(struct prs_moe_plan *p, const struct prs_moe_args *args, bool n_k, cudaStream_t stream);

/* ---- few.c ---- */
/* A flag of the hint: on this rank a layer as one kernel cannot run, or would be slower. */
enum { PRS_FEW_REFUSED = 1 };
/* For decide(), after the time is predicted: decides the path of the layer. agreed: as of decide(). */
int prs_few_choose(struct prs_moe_plan *p, const struct prs_hint *agreed);
/* For decide(): prepares the kernel, and says what memory it needs, as need number `need`. Nothing if the plan's layer
 * is several kernels. */
int prs_few_decide(struct prs_moe_plan *p, uint32_t need);
/* Lays out what one launch as one kernel keeps in memory that other launches use, too, at `base`; NULL: only counts the
 * bytes. Returns them. */
uint64_t prs_few_lay_out_scratch(struct prs_moe_plan *p, uint8_t *base);
/* For place(). switches: the words of plan_switch.h, or NULL. */
int prs_few_place(struct prs_moe_plan *p, const struct prs_symmetric *memory, const struct prs_symmetric *switches);
/* Whether prs_few_layer() runs this layer. All ranks must agree. */
bool prs_few_runs(const struct prs_moe_plan *p, const struct prs_moe_batch *b);
/* Enqueues a layer, with the operands that p->args has. */
int prs_few_layer(struct prs_moe_plan *p, const struct prs_moe_batch *b, cudaStream_t stream);

#endif
