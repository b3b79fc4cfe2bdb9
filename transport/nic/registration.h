/* SPDX-License-Identifier: Apache-2.0 */
/* Memory as a back end registers it with its NIC. */
#ifndef TRANSPORT_REGISTRATION_H
#define TRANSPORT_REGISTRATION_H

#include <stdbool.h>
#include <stdint.h>

/* What the other side may do with memory. Requests of this side may always read and write it. */
enum prs_access {
    PRS_ACCESS_LOCAL,   /* nothing */
    PRS_ACCESS_WRITTEN, /* the other side writes there */
    PRS_ACCESS_ALL,     /* the other side reads, writes, and adds where the domain has adds */
};

struct prs_memory_range {
    uint64_t addr;
    uint64_t bytes;
    int kind;               /* enum prs_mem_kind */
    int dmabuf_fd;          /* PRS_MEM_DMABUF only */
    uint64_t dmabuf_offset; /* of addr in the file */
    enum prs_access access;
    bool relaxed; /* writes may be seen in any order */
};

struct prs_registration {
    uint32_t local_key;  /* that requests of this side show */
    uint64_t remote_key; /* that those of the other side do */
    void *object;        /* the back end's */
};

#endif
