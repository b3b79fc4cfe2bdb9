/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/copy_stream.h"

#include <stdlib.h>

#include "fused/core/context.h"

int prs_copy_stream_open(struct prs_copy_stream *c)
{
    const char *blocking = getenv("CUDA_LAUNCH_BLOCKING"), *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    int r = prs_cuda_check(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "cudaStreamCreate");
    if (!r)
        r = prs_cuda_check(cudaEventCreateWithFlags(&c->forked, cudaEventDisableTiming), "cudaEventCreate");
    if (!r)
        r = prs_cuda_check(cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming), "cudaEventCreate");
    c->go_first = (blocking && strtol(blocking, NULL, 10) != 0) || (queues && strtol(queues, NULL, 10) == 1);
    return r;
}

void prs_copy_stream_close(struct prs_copy_stream *c)
{
    if (c->done)
        (void)cudaEventDestroy(c->done);
    if (c->forked)
        (void)cudaEventDestroy(c->forked);
    if (c->stream)
        (void)cudaStreamDestroy(c->stream);
    *c = (struct prs_copy_stream){.stream = NULL};
}

int prs_copy_stream_fork(struct prs_copy_stream *c, cudaStream_t stream)
{
    int r = prs_cuda_check(cudaEventRecord(c->forked, stream), "cudaEventRecord");
    return r ? r : prs_cuda_check(cudaStreamWaitEvent(c->stream, c->forked, 0), "cudaStreamWaitEvent");
}

int prs_copy_stream_join(struct prs_copy_stream *c, cudaStream_t stream)
{
    int r = prs_cuda_check(cudaEventRecord(c->done, c->stream), "cudaEventRecord");
    return r ? r : prs_cuda_check(cudaStreamWaitEvent(stream, c->done, 0), "cudaStreamWaitEvent");
}

int prs_copy_stream_rows(struct prs_copy_stream *c, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t bytes, size_t rows)
{
    cudaError_t e;
    if (rows == 1 || (bytes == to_pitch && bytes == from_pitch))
        e = cudaMemcpyAsync(to, from, bytes * rows, cudaMemcpyDeviceToDevice, c->stream);
    else
        e = cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, rows, cudaMemcpyDeviceToDevice, c->stream);
    return prs_cuda_check(e, "copy to another rank");
}

int prs_copy_stream_word(struct prs_copy_stream *c, uint32_t *to, const uint32_t *from)
{
    return prs_cuda_check(cudaMemcpyAsync(to, from, sizeof(*to), cudaMemcpyDeviceToDevice, c->stream),
                          "copy of a flag to another rank");
}
