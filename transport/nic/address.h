/* SPDX-License-Identifier: Apache-2.0 */
/* The address of a port or a queue of a NIC, as sent to the other side. */
#ifndef TRANSPORT_NIC_ADDRESS_H
#define TRANSPORT_NIC_ADDRESS_H

#include <assert.h>
#include <stdint.h>

enum { PRS_NIC_ADDRESS_BYTES = 63 /* decisions/0018 */ };

/* Only the back end reads the bytes, and checks them: they may come from anybody. */
struct prs_nic_address {
    uint8_t length;
    uint8_t bytes[PRS_NIC_ADDRESS_BYTES];
};
static_assert(sizeof(struct prs_nic_address) == 64, "part of the wire format");

/* Where a rail is in its network. Subnet managers, DHCP and the kernel change it, so each connection reads it again. */
struct prs_rail_address {
    struct prs_nic_address told; /* sent to the other side */
    uint32_t own;                /* the back end's, of this host: never sent */
};

#endif
