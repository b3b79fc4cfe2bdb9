/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the transport itself that NICs use: scratch bytes, copies of payloads, signal records, sizes of messages.
 * It has pages of its own, since a fork could otherwise move what a NIC writes. Registered strictly: what is written
 * there is seen in the order of writing. */
#ifndef TRANSPORT_OWN_MEMORY_H
#define TRANSPORT_OWN_MEMORY_H

#include <stddef.h>

#include "transport/nic/registration.h"
#include <perseus/perseus.h>

struct prs_domain;

struct prs_own_memory {
    void *addr; /* NULL: none */
    size_t bytes;
    const char *what; /* what the memory is for, in error texts */
    struct prs_own_registration {
        struct prs_domain *domain; /* NULL: not registered */
        struct prs_registration registered;
    } at[PRS_MAX_RAILS]; /* by an index of the caller: the path, or 0 */
};

/* Map the memory. Return 0 or -errno. */
int prs_own_memory_init(struct prs_own_memory *memory, size_t bytes, const char *what);
/* Register all of it with a domain, unless index `at` is. Return 0 or -errno. */
int prs_own_memory_register(struct prs_own_memory *memory, uint32_t at, struct prs_domain *domain,
                            enum prs_access access);
/* End the registrations and unmap it. Does nothing if the struct is zeroed or init failed. */
void prs_own_memory_fini(struct prs_own_memory *memory);

static inline uint32_t prs_own_memory_local_key(const struct prs_own_memory *memory, uint32_t at)
{
    return memory->at[at].registered.local_key;
}

static inline uint64_t prs_own_memory_remote_key(const struct prs_own_memory *memory, uint32_t at)
{
    return memory->at[at].registered.remote_key;
}

#endif
