/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_SOFTNIC_CUDA_BUSY_H
#define TEST_SOFTNIC_CUDA_BUSY_H

#include "tools/softnic/test/cuda_side.h"

/* Only with fake_cuda: it knows which calls wait. */
void no_transfer_waits_for_a_running_kernel(struct side *side, enum memory memory);

#endif
