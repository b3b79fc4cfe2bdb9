/* SPDX-License-Identifier: Apache-2.0 */
/* A context gives its device memory back while it has nothing to do, and takes it again at the same addresses. */
#ifndef PERSEUS_FUSED_SLEEP_H
#define PERSEUS_FUSED_SLEEP_H

#include <stdint.h>

struct prs_fused;
struct prs_memory;

/* 0, or -EBUSY: the context is asleep. name: what needs its memory, for the error text. */
int prs_sleep_check(const struct prs_fused *ctx, const char *name);

/* How many bytes of host memory keep the content that must survive. */
uint64_t prs_sleep_saved(const struct prs_memory *m);
/* Frees that memory. */
void prs_sleep_forget(struct prs_memory *m);

#endif
