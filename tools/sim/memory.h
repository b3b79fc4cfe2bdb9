/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of connections, of which a run opens and closes up to a million: pieces of one size lie together on huge
 * pages, and a piece that is freed is the next that is given out. */
#ifndef SIM_MEMORY_H
#define SIM_MEMORY_H

#include <stddef.h>

/* Allocate memory on a cache line of its own, with undefined content. Return NULL without memory. */
void *sim_malloc(size_t bytes);
/* The same, zeroed. */
void *sim_calloc(size_t count, size_t each);
void sim_free(void *piece);
/* Bytes that are allocated now. */
size_t sim_memory_used(void);
/* Give all memory back to the kernel, even if it was not freed. */
void sim_memory_fini(void);

#endif
