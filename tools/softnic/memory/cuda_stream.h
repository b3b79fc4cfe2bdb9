/* SPDX-License-Identifier: Apache-2.0 */
/* Private streams of a GPU, and how far each has come. A mark is a number that counts up in a stream; it is reached
 * when all copies given to the stream before it are done. A mark is recorded as a CUDA event, and only when somebody
 * asks, so one event may serve for many copies. */
#ifndef SOFTNIC_CUDA_STREAM_H
#define SOFTNIC_CUDA_STREAM_H

#include "tools/softnic/memory/cuda_api.h"

struct sn_cuda_stream;

enum {
    SN_CUDA_STREAM_BUSY = 1,
    SN_CUDA_STREAM_WORDS = 32, /* words that one call writes at most */
};

/* Make the streams of a GPU, which must be current. Return 0, -ENOMEM, or -EIO (logged). */
int sn_cuda_streams_open(const struct sn_cuda *cuda, struct sn_cuda_dev *dev);

/* The next stream in turn, so that copies of different queue pairs need not wait for each other. */
struct sn_cuda_stream *sn_cuda_stream_next(struct sn_cuda_dev *dev);

/* The GPU that the stream belongs to. */
struct sn_cuda_dev *sn_cuda_stream_dev(const struct sn_cuda_stream *s);

/* Copy, after all earlier work of the stream. The GPU is current. *mark: what to ask sn_cuda_stream_done for. Return 0
 * or -EIO (logged). */
int sn_cuda_stream_copy(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr dst, sn_cu_ptr src,
                        uint64_t bytes, uint64_t *mark);

/* The same for several copies, which may be made in any order. */
int sn_cuda_stream_copies(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr *dst, sn_cu_ptr *src,
                          size_t *bytes, size_t count, uint64_t *mark);

/* Write words of device memory that the stream's GPU can reach, at most SN_CUDA_STREAM_WORDS. No program sees a word
 * before the preceding ones, or before earlier work of the stream. Otherwise as sn_cuda_stream_copy. */
int sn_cuda_stream_write(const struct sn_cuda *cuda, struct sn_cuda_stream *s, const sn_cu_ptr *to,
                         const uint64_t *values, unsigned count, uint64_t *mark);

/* Is everything up to the mark done? Return 0, SN_CUDA_STREAM_BUSY, or -EIO (logged). ask: record the mark if that was
 * not done yet; without it, only look at what is known. No GPU need be current. */
int sn_cuda_stream_done(const struct sn_cuda *cuda, struct sn_cuda_stream *s, uint64_t mark, bool ask);

/* Report, once, that a copy has been in the driver for seconds (doc/softnic.md, "What a copy may wait for"). Any thread
 * that makes no copies itself calls it at least once a second; now: sn_now_ns(). */
void sn_cuda_streams_watch(uint64_t now);

#endif
