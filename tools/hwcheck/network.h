/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel knows of a rail's port and of its network interface: settings, and counters of loss and of
 * congestion. A device of libfabric is an interface itself. */
#ifndef HWCHECK_NETWORK_H
#define HWCHECK_NETWORK_H

#include <stddef.h>
#include <stdint.h>

enum { COUNTERS_MOST = 256 };

struct counter {
    char name[48];
    uint32_t kind; /* of network.c */
    uint64_t value;
};

struct network {
    char device[64];
    int port;
    char interface[288]; /* its folder in sysfs; "": it has none */
    uint32_t count;
    struct counter counter[COUNTERS_MOST];
};

/* Find the port's interface, and read the counters. */
void network_begin(struct network *network, const char *device, int port);
/* MTU of the interface; 0: unknown. */
uint32_t network_mtu(const struct network *network);
/* What changes the class of packets, and the priorities with congestion control, as text; "": nothing is known. */
void network_settings(const struct network *network, char *text, size_t bytes);
/* The counters that have grown since network_begin(), by kind, as text; "": none. */
void network_grown(const struct network *network, char *text, size_t bytes);

#endif
