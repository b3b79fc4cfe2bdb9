/* SPDX-License-Identifier: Apache-2.0 */
/* What is applied to a finished sum before it is rounded: C = activation(sum + bias) + residual. Plain C. */
#ifndef PERSEUS_FUSED_EPILOGUE_H
#define PERSEUS_FUSED_EPILOGUE_H

#include <stdint.h>

/* A rank's rows of the result. Fields that are 0 have no effect. */
struct prs_epilogue {
    const uint16_t *bias;     /* bf16, one per column */
    const uint16_t *residual; /* bf16 */
    uint64_t residual_pitch;  /* elements from one row of the residual to the next */
    uint32_t activation;      /* enum prs_fused_activation */
    uint32_t any;             /* 0: the result is the sum itself */
};

#endif
