/* SPDX-License-Identifier: Apache-2.0 */
/* Reaches the ranks of other nodes: the transport's fabric, team and proxy, one of each for a context. Kernels put and
 * signal through `device` (perseus/device.cuh); they name memory by windows, which symmetric.c opens. */
#ifndef PERSEUS_FUSED_NETWORK_H
#define PERSEUS_FUSED_NETWORK_H

#include <cuda_runtime_api.h>
#include <perseus/bootstrap.h>
#include <perseus/device.h>
#include <perseus/proxy.h>

#include "fused/core/place.h"

struct prs_fused;

struct prs_network {
    struct prs_fabric *fabric;
    struct prs_rail_set rails; /* those of this rank's GPU */
    struct prs_team *team;     /* all ranks */
    struct prs_proxy *proxy;
    struct prs_device device; /* kernels get a copy; opening and closing windows does not change it */
};

/* Collective; the context's device is current. -ENODEV on every rank when one of them has no RDMA device. */
int prs_network_open(struct prs_fused *ctx, struct prs_network **out);
/* To close a context without an error: settle, barrier, stop the proxy, barrier, release the regions, close. To close
 * one that has lost a rank: stop, release, close. To settle is to wait until everything that was sent has taken effect.
 * The proxies of the other ranks must confirm that, so they must still run. The wait has a limit; what has not settled
 * by then is logged. */
void prs_network_settle(struct prs_network *n);
void prs_network_stop(struct prs_network *n);
/* NULL does nothing. */
void prs_network_close(struct prs_network *n);

/* Registers memory of the context's device on its rails; signals: the memory holds signal words. */
int prs_network_register(struct prs_network *n, void *at, size_t bytes, bool signals, struct prs_region **out);

#endif
