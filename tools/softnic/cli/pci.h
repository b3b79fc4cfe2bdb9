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

/** Choose places for `count` NICs: near the GPUs, which are dealt out to the NICs in order; never a GPU or a bridge
 * itself; one bus each while there are buses, because NCCL takes NICs of one bus for ports of one card; then one device
 * each. Never fails: what cannot be placed stays empty. */
void sn_pci_choose(struct sn_pci_slot *slots, uint32_t count);

#endif
