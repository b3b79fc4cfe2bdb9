/* SPDX-License-Identifier: Apache-2.0 */
/* A plan: one shape on one context, its workspace and its way of running. */
#ifndef PERSEUS_FUSED_PLAN_H
#define PERSEUS_FUSED_PLAN_H

#include "fused/core/copy_stream.h"
#include "fused/core/symmetric.h"
#include "fused/gemm/layout.h"

struct prs_fused_plan {
    struct prs_fused *ctx;
    struct prs_fused_shape shape;
    struct prs_fused_plan_info info;
    struct prs_kernel_args args;   /* all but the maps of A, B and C, which each launch fills */
    struct prs_symmetric *staging; /* partial sums or gathered A, two banks; NULL without communication */
    struct prs_copy_stream copies; /* all-gather by copy engine */
    struct prs_lt *lt;             /* unfused path; else NULL */
    struct prs_symmetric *flags;   /* flags or counters, then one broadcast counter per rank of the node */
    struct prs_symmetric *signals; /* words that counterparts on other nodes set; NULL on a single node */
};

#endif
