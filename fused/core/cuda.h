/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of CUDA: their errors, a context's device, and its memory. */
#ifndef PERSEUS_FUSED_CUDA_H
#define PERSEUS_FUSED_CUDA_H

#include <cuda_runtime_api.h>
#include <stddef.h>

struct prs_fused;

/* Logs a CUDA error (positive) and turns it into -EIO or -ENOMEM. */
int prs_cuda_check(cudaError_t e, const char *what);

/* Makes the context's device current; *before gets the device that prs_cuda_leave() restores. */
int prs_cuda_enter(struct prs_fused *ctx, int *before);
void prs_cuda_leave(int before);

/* Copies from the host to device memory of this rank. Waits for no other work of the device. 0 or -EIO. */
int prs_cuda_upload(struct prs_fused *ctx, void *to, const void *from, size_t bytes, const char *what);

#endif
