/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/cuda.h"

#include <errno.h>

#include "fused/core/context.h"
#include "transport/util/error.h"

int prs_cuda_check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return 0;
    (void)cudaGetLastError(); /* the caller's next call must not report this failure again */
    return prs_fail(e == cudaErrorMemoryAllocation ? -ENOMEM : -EIO, "%s failed: %s", what, cudaGetErrorString(e));
}

int prs_cuda_enter(struct prs_fused *ctx, int *before)
{
    int r = prs_cuda_check(cudaGetDevice(before), "cudaGetDevice");
    /* Also if the device is the same: a thread that has not used CUDA yet reports device 0 but has no context, and
     * cuTensorMapEncodeTiled() needs one. */
    return r ? r : prs_cuda_check(cudaSetDevice(ctx->config.device), "cudaSetDevice");
}

void prs_cuda_leave(int before)
{
    (void)cudaSetDevice(before);
}

int prs_cuda_upload(struct prs_fused *ctx, void *to, const void *from, size_t bytes, const char *what)
{
    int r = prs_cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, ctx->stream), what);
    return r ? r : prs_cuda_check(cudaStreamSynchronize(ctx->stream), what);
}
