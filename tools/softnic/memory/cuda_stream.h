/* SPDX-License-Identifier: Apache-2.0 */
/* Private streams of a GPU, and how far each has come: marks, which are counted, follow what the stream was given. A
 * mark is an event. Only under `softnic-run --stream-stores` is it a store of the count to pinned memory, so that
 * looking needs no call, and then short writes may be stores too; where the driver refuses stores, events again. One
 * mark may serve for much, and is not made before somebody asks. */
#ifndef SOFTNIC_CUDA_STREAM_H
#define SOFTNIC_CUDA_STREAM_H

#include "tools/softnic/memory/cuda_api.h"

struct sn_cuda_stream;

enum { SN_CUDA_STREAM_BUSY = 1 };

/** Make the streams of a GPU, which must be current. Return 0 or -EIO (logged). */
int sn_cuda_streams_open(const struct sn_cuda *cuda, struct sn_cuda_dev *dev);

/** Streams in turn: transfers of different queue pairs need not wait for each other. */
struct sn_cuda_stream *sn_cuda_stream_next(struct sn_cuda_dev *dev);

/** The GPU it works from. */
struct sn_cuda_dev *sn_cuda_stream_dev(const struct sn_cuda_stream *s);

/** Copy behind what the stream was given before. The GPU is current. *mark: what to ask sn_cuda_stream_landed for.
 * Return 0 or -EIO (logged). */
int sn_cuda_stream_copy(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr dst, sn_cu_ptr src,
                        uint64_t bytes, uint64_t *mark);

/** Store 4 or 8 aligned bytes behind it. The GPU gets it with sn_cuda_stream_flush, or with the next copy. Return as
 * above, or SN_CUDA_STREAM_BUSY: not to be done here, copy instead. */
int sn_cuda_stream_store(const struct sn_cuda *cuda, struct sn_cuda_stream *s, sn_cu_ptr dst, uint64_t value,
                         unsigned bytes, uint64_t *mark);

/** Let the GPU have the stores that wait; nothing where none do. A failure is that of their mark. */
void sn_cuda_stream_flush(const struct sn_cuda *cuda, struct sn_cuda_stream *s);

/** Is all up to the mark done? Return 0, SN_CUDA_STREAM_BUSY, or -EIO (logged). ask: write the mark if that was not
 * done yet; else nothing is done but to look. No GPU need be current. */
int sn_cuda_stream_landed(const struct sn_cuda *cuda, struct sn_cuda_stream *s, uint64_t mark, bool ask);

#endif
