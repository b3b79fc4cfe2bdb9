/* SPDX-License-Identifier: Apache-2.0 */
/* Copies to other ranks by copy engines. They run on a stream of the library, at the same time as the kernel on the
 * caller's stream. Each plan decides which data and which flags are copied. One stream is enough: a GPU has one engine
 * for all its peers, which finishes one stream before it serves the next (seen on H200). */
#ifndef PERSEUS_FUSED_COPY_STREAM_H
#define PERSEUS_FUSED_COPY_STREAM_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct prs_copy_stream {
    cudaStream_t stream;
    cudaEvent_t forked, done;
    /* Copies are enqueued before the kernel if CUDA_LAUNCH_BLOCKING is set, or CUDA_DEVICE_MAX_CONNECTIONS=1: there
     * they would start only after all CTAs of a kernel that was enqueued first. */
    bool go_first;
};

/* *c must be zeroed. 0 or -EIO; call prs_copy_stream_close() in either case. */
int prs_copy_stream_open(struct prs_copy_stream *c);
void prs_copy_stream_close(struct prs_copy_stream *c);

/* The copies wait for all earlier work of `stream`. 0 or -EIO. */
int prs_copy_stream_fork(struct prs_copy_stream *c, cudaStream_t stream);
/* `stream` waits for the copies, so that its later work may change their source. 0 or -EIO. */
int prs_copy_stream_join(struct prs_copy_stream *c, cudaStream_t stream);

/* Copies `rows` rows of `bytes` bytes, which begin to_pitch and from_pitch bytes apart. 0 or -EIO. */
int prs_copy_stream_rows(struct prs_copy_stream *c, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t bytes, size_t rows);

/* Copies a word of this device after those rows, as their flag. 0 or -EIO. */
int prs_copy_stream_word(struct prs_copy_stream *c, uint32_t *to, const uint32_t *from);

#endif
