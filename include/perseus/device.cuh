/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The device API for CUDA: device.h (thread-wide) and the same calls for a warp and for a block. All threads of the
 * warp or block call them, converged, with the same arguments; what the put reads may have been written by any of them.
 * All return the same value. A peer that is mapped is written by all threads together. */
#ifndef PERSEUS_DEVICE_CUH
#define PERSEUS_DEVICE_CUH

#include <perseus/device.h>

/** Make what the threads of a warp wrote readable by the one that speaks for them, and its result known to all. */
static __device__ __forceinline__ int prs_warp_tell(int r)
{
    return __shfl_sync(0xffffffffu, r, 0);
}

static __device__ __forceinline__ uint32_t prs_warp_lane(void)
{
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31;
}

static __device__ __forceinline__ uint32_t prs_block_thread(void)
{
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

static __device__ __forceinline__ uint32_t prs_block_threads(void)
{
    return blockDim.x * blockDim.y * blockDim.z;
}

/** The stores of this thread to a mapped peer are visible there before what its leader does next. */
static __device__ __forceinline__ void prs_fence_sys(void)
{
    prs_fence_acq_rel_sys();
}

/** Copy by the whole team when the peer is mapped: returns true when it was. */
static __device__ __forceinline__ bool prs_put_mapped(const struct prs_device *dev, const struct prs_device_put *put,
                                                      uint32_t index, uint32_t count)
{
    uint64_t mapped = prs_device_map(dev, put->dst_window, put->peer);

    if (mapped == 0)
        return false;
    prs_copy_part((void *)(mapped + put->dst_offset),
                  (const void *)(prs_device_map(dev, put->src_window, dev->rank) + put->src_offset), put->bytes, index,
                  count);
    prs_fence_sys();
    return true;
}

static __device__ __forceinline__ bool prs_put_is_mappable(const struct prs_device *dev,
                                                           const struct prs_device_put *put)
{
    /* Out of range goes to the thread-wide call, which refuses it with a report. */
    return put->peer < dev->world && prs_device_in_window(dev, put->dst_window, put->dst_offset, put->bytes) &&
           prs_device_in_window(dev, put->src_window, put->src_offset, put->bytes);
}

static __device__ __forceinline__ int prs_put_warp(const struct prs_device *dev, const struct prs_device_put *put)
{
    int r = 0;

    __syncwarp();
    if (prs_put_is_mappable(dev, put) && prs_put_mapped(dev, put, prs_warp_lane(), 32))
        r = prs_device_error(dev); /* of lane 0 below: the device may fail while the others look */
    else if (prs_warp_lane() == 0)
        r = prs_put(dev, put, NULL);
    return prs_warp_tell(r);
}

static __device__ __forceinline__ int prs_signal_warp(const struct prs_device *dev,
                                                      const struct prs_device_signal *signal)
{
    int r = 0;

    __syncwarp();
    if (prs_warp_lane() == 0)
        r = prs_signal(dev, signal, NULL);
    return prs_warp_tell(r);
}

static __device__ __forceinline__ int prs_put_signal_warp(const struct prs_device *dev,
                                                          const struct prs_device_put *put,
                                                          const struct prs_device_signal *signal)
{
    int r = 0;

    __syncwarp();
    if (prs_put_is_mappable(dev, put) && prs_put_mapped(dev, put, prs_warp_lane(), 32))
        return prs_signal_warp(dev, signal);
    if (prs_warp_lane() == 0)
        r = prs_put_signal(dev, put, signal, NULL);
    return prs_warp_tell(r);
}

/** Tell a whole block the result of its first thread; also orders that thread's call before what the others do next. */
static __device__ __forceinline__ int prs_block_tell(const struct prs_device *dev, int r)
{
    return __syncthreads_or(prs_block_thread() == 0 && r < 0) != 0 ? prs_device_error(dev) : 0;
}

static __device__ __forceinline__ int prs_put_block(const struct prs_device *dev, const struct prs_device_put *put)
{
    int r = 0;

    __syncthreads();
    if (prs_put_is_mappable(dev, put) && prs_put_mapped(dev, put, prs_block_thread(), prs_block_threads()))
        r = prs_device_error(dev); /* thread 0's counts */
    else if (prs_block_thread() == 0)
        r = prs_put(dev, put, NULL);
    __syncthreads();
    return prs_block_tell(dev, r);
}

static __device__ __forceinline__ int prs_signal_block(const struct prs_device *dev,
                                                       const struct prs_device_signal *signal)
{
    int r = 0;

    __syncthreads();
    if (prs_block_thread() == 0)
        r = prs_signal(dev, signal, NULL);
    return prs_block_tell(dev, r);
}

static __device__ __forceinline__ int prs_put_signal_block(const struct prs_device *dev,
                                                           const struct prs_device_put *put,
                                                           const struct prs_device_signal *signal)
{
    int r = 0;

    __syncthreads();
    if (prs_put_is_mappable(dev, put) && prs_put_mapped(dev, put, prs_block_thread(), prs_block_threads()))
        return prs_signal_block(dev, signal);
    if (prs_block_thread() == 0)
        r = prs_put_signal(dev, put, signal, NULL);
    return prs_block_tell(dev, r);
}

/** Every thread of the block has started its puts of the round; one arrival for the block. */
static __device__ __forceinline__ int prs_group_arrive_block(const struct prs_device *dev, struct prs_group *group,
                                                             const struct prs_device_signal *signal)
{
    int r = 0;

    __syncthreads();
    if (prs_block_thread() == 0)
        r = prs_group_arrive(dev, group, signal);
    return prs_block_tell(dev, r);
}

/** All threads return once the word compares true; what it stands for may be read by all of them. */
static __device__ __forceinline__ int prs_wait_signal_block(const struct prs_device *dev, const uint64_t *word,
                                                            enum prs_compare compare, uint64_t value)
{
    int r = 0;

    if (prs_block_thread() == 0)
        r = prs_wait_signal(dev, word, compare, value);
    return prs_block_tell(dev, r);
}

#endif
