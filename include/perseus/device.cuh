/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The device API for CUDA: device.h, whose calls are for one thread, and the same calls for a warp and for a block. All
 * threads of the warp or block call them, converged and with the same arguments. Any of them may have written what the
 * put reads. All of them return the same value: 0 or a negative prs_device_code, as in device.h. A mapped peer is
 * written by all threads together. */
#ifndef PERSEUS_DEVICE_CUH
#define PERSEUS_DEVICE_CUH

#include <perseus/device.h>

/** Return the result of lane 0 to the whole warp. */
static __device__ __forceinline__ int prs_warp_result(int r)
{
    return __shfl_sync(0xffffffffu, r, 0);
}

/** The lane of the calling thread in its warp. */
static __device__ __forceinline__ uint32_t prs_warp_lane(void)
{
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31;
}

/** The index of the calling thread in its block. */
static __device__ __forceinline__ uint32_t prs_block_thread(void)
{
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

/** The number of threads in the block. */
static __device__ __forceinline__ uint32_t prs_block_threads(void)
{
    return blockDim.x * blockDim.y * blockDim.z;
}

/** Do the put if the peer is mapped, as thread `index` of `count`. Return false if only the proxy reaches the peer. The
 * put must be in range. */
static __device__ __forceinline__ bool prs_put_mapped(const struct prs_device *dev, const struct prs_device_put *put,
                                                      uint32_t index, uint32_t count)
{
    uint64_t mapped = prs_device_map(dev, put->dst_window, put->peer);

    if (mapped == 0)
        return false;
    prs_copy_part((void *)(mapped + put->dst_offset),
                  (const void *)(prs_device_map(dev, put->src_window, dev->rank) + put->src_offset), put->bytes, index,
                  count);
    prs_fence_acq_rel_sys(); /* the stores of this thread are visible at the peer before what its leader does next */
    return true;
}

/** Is the put in range, so that the peer may be looked up in the map? A put out of range goes to the call for one
 * thread, which refuses it with a report. */
static __device__ __forceinline__ bool prs_put_is_mappable(const struct prs_device *dev,
                                                           const struct prs_device_put *put)
{
    return put->peer < dev->world && prs_device_in_window(dev, put->dst_window, put->dst_offset, put->bytes) &&
           prs_device_in_window(dev, put->src_window, put->src_offset, put->bytes);
}

/** prs_put() by a warp, without a ticket. */
static __device__ __forceinline__ int prs_put_warp(const struct prs_device *dev, const struct prs_device_put *put)
{
    int r = 0;

    __syncwarp();
    if (prs_put_is_mappable(dev, put) && prs_put_mapped(dev, put, prs_warp_lane(), 32))
        r = prs_device_error(dev); /* read again, so that all lanes return lane 0's error, since the device may fail
                                    * while they read it */
    else if (prs_warp_lane() == 0)
        r = prs_put(dev, put, NULL);
    return prs_warp_result(r);
}

/** prs_signal() by a warp, without a ticket. */
static __device__ __forceinline__ int prs_signal_warp(const struct prs_device *dev,
                                                      const struct prs_device_signal *signal)
{
    int r = 0;

    __syncwarp();
    if (prs_warp_lane() == 0)
        r = prs_signal(dev, signal, NULL);
    return prs_warp_result(r);
}

/** prs_put_signal() by a warp, without a ticket. */
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
    return prs_warp_result(r);
}

/** Return the error of thread 0, or 0, to the whole block. Orders the call of thread 0 before what the others do
 * next. */
static __device__ __forceinline__ int prs_block_result(const struct prs_device *dev, int r)
{
    return __syncthreads_or(prs_block_thread() == 0 && r < 0) != 0 ? prs_device_error(dev) : 0;
}

/** prs_put() by a block, without a ticket. */
static __device__ __forceinline__ int prs_put_block(const struct prs_device *dev, const struct prs_device_put *put)
{
    int r = 0;

    __syncthreads();
    if (prs_put_is_mappable(dev, put) && prs_put_mapped(dev, put, prs_block_thread(), prs_block_threads()))
        r = prs_device_error(dev); /* thread 0's is returned */
    else if (prs_block_thread() == 0)
        r = prs_put(dev, put, NULL);
    __syncthreads();
    return prs_block_result(dev, r);
}

/** prs_signal() by a block, without a ticket. */
static __device__ __forceinline__ int prs_signal_block(const struct prs_device *dev,
                                                       const struct prs_device_signal *signal)
{
    int r = 0;

    __syncthreads();
    if (prs_block_thread() == 0)
        r = prs_signal(dev, signal, NULL);
    return prs_block_result(dev, r);
}

/** prs_put_signal() by a block, without a ticket. */
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
    return prs_block_result(dev, r);
}

/** prs_arrival_counter_arrive() by a block: one arrival, after the puts of all its threads. Return 0 to the last
 * arrival too. */
static __device__ __forceinline__ int prs_arrival_counter_arrive_block(const struct prs_device *dev,
                                                                       struct prs_arrival_counter *counter,
                                                                       const struct prs_device_signal *signal)
{
    int r = 0;

    __syncthreads();
    if (prs_block_thread() == 0)
        r = prs_arrival_counter_arrive(dev, counter, signal);
    return prs_block_result(dev, r);
}

/** prs_wait_signal() by a block: all threads may then read the bytes of the puts that the signal follows. */
static __device__ __forceinline__ int prs_wait_signal_block(const struct prs_device *dev, const uint64_t *word,
                                                            enum prs_compare compare, uint64_t value)
{
    int r = 0;

    if (prs_block_thread() == 0)
        r = prs_wait_signal(dev, word, compare, value);
    return prs_block_result(dev, r);
}

#endif
