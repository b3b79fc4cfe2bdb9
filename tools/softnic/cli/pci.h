/* SPDX-License-Identifier: Apache-2.0 */
/* Which real PCI device each software NIC pretends to sit on. */
#ifndef SOFTNIC_PCI_H
#define SOFTNIC_PCI_H

#include <stdbool.h>
#include <stdint.h>

struct sn_pci_slot {
    char path[256]; /* resolved sysfs directory of the device; empty: none was left, the NIC is virtual */
    char near[16];  /* PCI address of the GPU it was chosen for; empty: no GPU */
};

/* Choose PCI slots for `count` NICs. The GPUs are dealt out to the NICs in order, and each NIC goes near its GPU,
 * never onto a GPU or bridge itself. Each gets a bus of its own while there are buses, because NCCL takes NICs of one
 * bus for ports of one card; after that, a device of its own. Never fails: a NIC without a slot stays empty. */
void sn_pci_choose(struct sn_pci_slot *slots, uint32_t count);

#endif
