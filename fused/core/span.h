/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory of a context. It comes from cudaMalloc(), or, if it must be given back while its address stays, from
 * CUDA's virtual memory management. The device is current. Functions return 0 or -errno. */
#ifndef PERSEUS_FUSED_SPAN_H
#define PERSEUS_FUSED_SPAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct prs_span {
    uint8_t *at; /* NULL: none */
    size_t bytes;
    bool sleeps;     /* the memory can be given back and taken again */
    size_t reserved; /* if it sleeps: bytes of address space, a multiple of CUDA's granularity */
    uint64_t handle; /* if it sleeps: handle of the memory; 0: the memory is given back */
};

int prs_span_take(struct prs_span *s, size_t bytes, bool sleeps);
/* Frees memory and addresses. An empty span does nothing. */
void prs_span_drop(struct prs_span *s);

/* For spans that sleep. A span that is asleep has addresses and no memory. */
int prs_span_sleep(struct prs_span *s);
int prs_span_wake(struct prs_span *s, int device); /* new memory, at the same addresses */

/* A file by which other processes get the memory; the caller closes it. */
int prs_span_export(const struct prs_span *s, int *file);
/* Memory of another process. A span that is asleep gets the memory at the addresses that it has. The caller keeps the
 * file. */
int prs_span_import(struct prs_span *s, int file, size_t bytes, int device);
/* Lets a device use memory of this process: all `reserved` bytes of a span that sleeps. */
int prs_span_allow(uint8_t *at, size_t reserved, int device);

#endif
