/* SPDX-License-Identifier: Apache-2.0 */
/* What the host passes to the kernels that quantise. */
#ifndef PERSEUS_FUSED_QUANTISE_KERNELS_H
#define PERSEUS_FUSED_QUANTISE_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <perseus/quantise.h>

#ifdef __cplusplus
extern "C" {
#endif

/* x: checked, with every default decided. 0 or -EIO. */
int prs_quantise_kernels_launch(const struct prs_quantise *x, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
