/* SPDX-License-Identifier: Apache-2.0 */
/* How near two PCI devices are to each other. */
#ifndef TRANSPORT_UTIL_PCI_PATH_H
#define TRANSPORT_UTIL_PCI_PATH_H

/* How many components two paths in /sys/devices have in common. */
static inline int prs_pci_path_common(const char *a, const char *b)
{
    int common = 0;

    for (; *a && *a == *b; a++, b++)
        common += *a == '/';
    return common;
}

#endif
