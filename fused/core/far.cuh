/* SPDX-License-Identifier: Apache-2.0 */
/* Puts and signals to the counterparts on other nodes. Args: kernel arguments with `sync`, and `far`, which has
 * `device`, `signals` and `signal_window`. A signal follows the puts of its group. */
#ifndef PERSEUS_FUSED_FAR_CUH
#define PERSEUS_FUSED_FAR_CUH

#include "fused/core/network.cuh"

/* from, to: offsets in this rank's window and in the peer's. */
template <class Args>
PRS_DEVICE void put_far(const Args &args, uint32_t peer, uint32_t window, uint64_t from, uint64_t to, uint64_t bytes,
                        uint32_t group)
{
    struct prs_device_put put = {from, to, bytes, peer, window, window, group % PRS_CMD_GROUPS};
    network_put(&args.sync, &args.far.device, put);
}

/* Sets the peer's signal word to the epoch, after the group's puts to it. */
template <class Args>
PRS_DEVICE void signal_far(const Args &args, uint32_t peer, uint32_t word, uint32_t epoch, uint32_t group)
{
    struct prs_device_signal signal = {word * 8ull, epoch, peer, args.far.signal_window, group % PRS_CMD_GROUPS, 0, 0};
    network_signal(&args.sync, &args.far.device, signal);
}

/* The low half of a signal word, because epochs have 32 bits. */
template <class Args> PRS_DEVICE const uint32_t *far_flag(const Args &args, uint32_t word)
{
    return (const uint32_t *)(args.far.signals + word);
}

#endif
