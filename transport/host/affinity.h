/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps a thread on the CPUs of one NUMA node. */
#ifndef TRANSPORT_AFFINITY_H
#define TRANSPORT_AFFINITY_H

/* Restrict the calling thread to the CPUs of a NUMA node, as far as it may run there. With -1, or a node that does not
 * exist, nothing changes. A failure is only logged: the wrong node makes the thread slow, not wrong. */
void prs_affinity_set_node(int node);

/* Read a CPU list in the kernel's syntax ("0-3,8,10-11") into a cpu_set_t. Return 0 or -EINVAL. */
int prs_affinity_parse(const char *list, void *cpu_set);

#endif
