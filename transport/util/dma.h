/* SPDX-License-Identifier: Apache-2.0 */
/* Orders a CPU's loads before the NIC's work that it starts. Drivers do not do that (doc/barriers.md). */
#ifndef TRANSPORT_UTIL_DMA_H
#define TRANSPORT_UTIL_DMA_H

/* [nic-post] This thread's earlier loads are done before the request that it posts next. That request may allow
 * somebody to overwrite what was loaded: a credit, a record in a used slot, a clear-to-send. Drivers order stores only,
 * and an Arm processor may do a load after a later store. The partner is the NIC of the other side, which writes there.
 * x86 does no load after a later store. */
static inline void prs_dma_reads_before_post(void)
{
#if defined(__aarch64__)
    __asm__ volatile("dmb oshld" ::: "memory");
#endif
}

#endif
