/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA driver API, opened when first needed. Every function uses the current CUDA context of the calling thread and
 * returns 0 or -errno; the text names the driver call and its error. Without a driver: -ENODEV. */
#ifndef TRANSPORT_CUDA_H
#define TRANSPORT_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

int prs_cuda_alloc(void **out, size_t bytes); /* device memory, zeroed */
void prs_cuda_free(void *pointer);
int prs_cuda_copy(void *dst, const void *src, size_t bytes); /* in any direction; complete on return */
int prs_cuda_zero(void *pointer, size_t bytes);
int prs_cuda_map_host(void *pointer, size_t bytes); /* the device uses the same address */
void prs_cuda_unmap_host(void *pointer);

/* Memory that other processes of the node can map (virtual memory management, POSIX file handles). */
struct prs_cuda_span {
    uint64_t address;
    size_t bytes; /* rounded up to the granularity */
    uint64_t handle;
};
int prs_cuda_span_make(size_t bytes, struct prs_cuda_span *out);
int prs_cuda_span_export(const struct prs_cuda_span *span, int *fd);
int prs_cuda_span_import(int fd, size_t bytes, struct prs_cuda_span *out);
void prs_cuda_span_drop(struct prs_cuda_span *span);
/* The device that device memory is of. */
int prs_cuda_device_of(uint64_t address, int *device);
/* A DMA-BUF file for a range of whole pages. required: there is no other way, so a failure is logged. */
int prs_cuda_dmabuf(uint64_t address, size_t bytes, bool required, int *fd);

#endif
