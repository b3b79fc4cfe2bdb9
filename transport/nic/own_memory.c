/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/own_memory.h"

#include <errno.h>
#include <string.h>

#include "transport/nic/nic.h"
#include "transport/util/error.h"
#include "transport/util/lines.h"

int prs_own_memory_init(struct prs_own_memory *memory, size_t bytes, const char *what)
{
    void *addr = prs_pages_alloc(bytes);

    *memory = (struct prs_own_memory){0};
    if (!addr)
        return prs_fail(-errno, "mmap of %zu bytes for %s: %s", bytes, what, strerror(errno));
    memory->addr = addr;
    memory->bytes = bytes;
    memory->what = what;
    return 0;
}

int prs_own_memory_register(struct prs_own_memory *memory, uint32_t at, struct prs_domain *domain,
                            enum prs_access access)
{
    struct prs_own_registration *one = &memory->at[at];
    struct prs_memory_range range = {.addr = (uintptr_t)memory->addr,
                                     .bytes = memory->bytes,
                                     .kind = PRS_MEM_HOST,
                                     .dmabuf_fd = -1,
                                     .access = access};
    int r = one->domain ? 0 : domain->nic->register_memory(domain, &range, &one->registered);

    if (r)
        return prs_fail(r, "%s: cannot register %zu bytes for %s: %s; is the memlock limit (ulimit -l) too low?",
                        domain->name, memory->bytes, memory->what, strerror(-r));
    one->domain = domain;
    return 0;
}

void prs_own_memory_fini(struct prs_own_memory *memory)
{
    for (uint32_t i = 0; i < PRS_MAX_RAILS; i++)
        if (memory->at[i].domain)
            (void)memory->at[i].domain->nic->release_memory(memory->at[i].domain, &memory->at[i].registered);
    prs_pages_free(memory->addr, memory->bytes);
    *memory = (struct prs_own_memory){0};
}
