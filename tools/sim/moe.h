/* SPDX-License-Identifier: Apache-2.0 */
/* A layer of a mixture of experts: dispatch, the experts' products, combine. */
#ifndef SIM_MOE_H
#define SIM_MOE_H

#include "tools/sim/sim.h"

struct moe_model {
    uint32_t experts, chosen; /* number of experts, and of those that a token goes to */
    uint32_t hidden, inner;   /* sizes of the products */
};

/* From the models' own config.json. */
extern const struct moe_model moe_models[];
extern const char *const moe_model_names[];

/* The share of tokens of each expert, in random order; the sum is 1. The caller frees the array. NULL: no memory. */
double *moe_draw_shares(struct sim *sim, uint32_t experts, double zipf);
/* Draw an expert by such shares. */
uint32_t moe_draw_expert(struct sim *sim, const double *share, uint32_t experts);

#endif
