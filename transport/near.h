/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TRANSPORT_NEAR_H
#define TRANSPORT_NEAR_H

/* Keep the calling thread on the CPUs of a NUMA node, as far as it may run there. -1, or a node that is not there:
 * leave it. Never an error: a wrong place is slow, not wrong; it is said once in the log. */
void prs_near_node(int node);

/* A CPU list as the kernel writes it ("0-3,8,10-11") into a set. Return 0 or -EINVAL. */
int prs_near_parse(const char *list, void *cpu_set);

#endif
