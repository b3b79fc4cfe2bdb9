/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of perseus/device.cuh from the roles of a kernel: a call that fails (the proxy died, or takes no commands) ends
 * the launch like a wait that gave up. */
#ifndef PERSEUS_FUSED_NETWORK_CUH
#define PERSEUS_FUSED_NETWORK_CUH

#include <perseus/device.cuh>

#include "fused/core/sync.cuh"

PRS_DEVICE_OUTLINED void give_up_network(const struct prs_sync *sync, uint32_t rank, uint32_t index, int r)
{
    uint32_t what = PRS_AWAIT_NETWORK;
    __threadfence_system(); /* [proxy-failed]: the error of the ring before the word of told_to_abort() */
    if (told_to_abort(sync))
        what |= PRS_FAULT_ABORTED;
    give_up(sync, what, rank, index, 0, (uint32_t)-r, 0);
}

PRS_DEVICE_OUTLINED void network_put(const struct prs_sync *sync, const struct prs_device *device,
                                     const struct prs_device_put &put)
{
    int r = prs_put(device, &put, NULL);
    if (r)
        give_up_network(sync, put.peer, put.group, r);
}

PRS_DEVICE_OUTLINED void network_signal(const struct prs_sync *sync, const struct prs_device *device,
                                        const struct prs_device_signal &signal)
{
    int r = prs_signal(device, &signal, NULL);
    if (r)
        give_up_network(sync, signal.peer, signal.group, r);
}

/* The last step of a launch: waits until the network has read everything that was put, so that it may be
 * overwritten. */
PRS_DEVICE_OUTLINED void network_quiet(const struct prs_sync *sync, const struct prs_device *device)
{
    int r = prs_quiet(device);
    if (r)
        give_up_network(sync, device->rank, 0, r);
}

#endif
