/* SPDX-License-Identifier: Apache-2.0 */
/* A layer of a mixture of experts: dispatch, the experts' products, combine. */
#ifndef SIM_MOE_H
#define SIM_MOE_H

#include "tools/sim/sim.h"

struct moe_model {
    uint32_t experts, chosen; /* experts, and how many each token goes to */
    uint32_t hidden, inner;   /* sizes of the products */
};

/* From the models' own config.json. */
extern const struct moe_model moe_models[];
extern const char *const moe_model_names[];

/* How popular each expert is, in random order. They sum up to 1. The caller frees them; NULL without memory. */
double *moe_draw_shares(struct sim *sim, uint32_t experts, double zipf);
/* Draw an expert by such shares. */
uint32_t moe_draw_expert(struct sim *sim, const double *share, uint32_t experts);

#endif
