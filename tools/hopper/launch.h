/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of kernels, and how much of a device a CTA takes. */
#ifndef TOOLS_HOPPER_LAUNCH_H
#define TOOLS_HOPPER_LAUNCH_H

#include <cuda_runtime_api.h>
#include <functional>
#include <stdint.h>

namespace hopper
{

enum { MOST_SHARED_BYTES = 227 << 10, SM_SHARED_BYTES = 228 << 10, SM_THREADS = 2048, CTA_RESERVED_BYTES = 1024 };

/* body runs once on every thread of the launch. */
cudaError_t launch_enqueue(const cudaLaunchConfig_t *config, const void *kernel, std::function<void()> body);
/* How many clusters of such CTAs an idle device can run at once. */
uint32_t device_max_clusters(uint32_t threads, uint32_t shared_bytes, uint32_t cluster);

} // namespace hopper

#endif
