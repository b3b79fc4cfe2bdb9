/* SPDX-License-Identifier: Apache-2.0 */
/* Copies into device memory that follow each other on one stream without being waited for (device_mem.h). Each copy is
 * one call, and many share one mark. Words from host memory need no copy: the stream writes them itself. */
#ifndef SOFTNIC_CUDA_QUEUE_H
#define SOFTNIC_CUDA_QUEUE_H

#include "tools/softnic/memory/device_mem.h"

int sn_cuda_enqueue(struct sn_copy *c, struct sn_copy_queue *queue, struct sn_queued_copy *queued);
int sn_cuda_queued_done(struct sn_copy_queue *queue, struct sn_queued_copy *queued, bool ask);

#endif
