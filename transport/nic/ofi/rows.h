/* SPDX-License-Identifier: Apache-2.0 */
/* Keys where memory is addressed by offsets and the provider chooses the keys. The other back ends use virtual
 * addresses and 64-bit keys, which have no room for both the provider's key and the start of its registration. So the
 * key that is sent to others names a row of a table. The table is in memory that they may read; the port's address has
 * its key. A sender reads a row before it first uses the key, and keeps it. */
#ifndef TRANSPORT_OFI_ROWS_H
#define TRANSPORT_OFI_ROWS_H

#include <rdma/fi_rma.h>

#include "transport/nic/ofi/endpoint.h"
#include "transport/nic/own_memory.h"

struct prs_wr;

struct prs_ofi_row { /* part of the wire format */
    uint64_t told;   /* the key that others are told; 0: the row is not in use */
    uint64_t start;  /* address of the registration */
    uint64_t key;    /* the provider's */
    uint64_t check;  /* over the fields above: a reader rejects a row that changes while it reads */
};

enum {
    PRS_OFI_TABLE_ROWS = 1 << 15, /* cxi has room for 2^15 registrations with completion data */
    PRS_OFI_ROW_BITS = 20,        /* bits of a told key that name the row; the other bits count the uses of the row */
    PRS_OFI_ROW_READS = 64,       /* reads of rows at a time, for each device */
};

/* ---- the table of this side ---- */

struct prs_ofi_rows {
    bool used;
    struct prs_own_memory table; /* struct prs_ofi_row [PRS_OFI_TABLE_ROWS] */
    struct fid_mr *registered;
    struct prs_own_memory slots; /* for rows that are being read from other sides */
    uint64_t busy;               /* a bit for each slot. Atomic: endpoints share the slots */
    struct prs_ofi_request request[PRS_OFI_ROW_READS];
    uint64_t asked[PRS_OFI_ROW_READS]; /* key */
    uint64_t uses;                     /* of rows, under the lock of the device */
};

/* Return the key to be told; 0: there is no row of this number. */
uint64_t prs_ofi_rows_add(struct prs_ofi_device *device, uint32_t number, uint64_t start, uint64_t key);
void prs_ofi_rows_drop(struct prs_ofi_device *device, uint32_t number);

/* ---- rows of the other side of a link, under the lock of its endpoint ---- */

struct prs_ofi_known {
    uint64_t told; /* 0: not known */
    uint64_t start, key;
    bool asked; /* it is being read */
    bool wrong; /* it is not in use */
};

/* Where the request goes, as the provider counts. Return 0, -FI_EAGAIN: the row is being read, or a negative error of
 * libfabric; -FI_ENOKEY: no memory has this key. */
int prs_ofi_rows_aim(struct prs_ofi_link *link, bool loopback, const struct prs_wr *wr, struct fi_rma_iov *out);
/* A request without queue has completed; does it read a row? */
void prs_ofi_rows_arrive(struct prs_ofi_endpoint *endpoint, struct prs_ofi_request *request, bool read);
/* The endpoint of this link has closed: none of its reads will arrive. */
void prs_ofi_rows_leave(struct prs_ofi_link *link);

#endif
