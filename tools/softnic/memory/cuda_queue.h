/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers into device memory that follow each other on one stream without being waited for: place.h says how. A copy
 * is one call, and many share one mark. */
#ifndef SOFTNIC_CUDA_FLIGHT_H
#define SOFTNIC_CUDA_FLIGHT_H

#include "tools/softnic/memory/device_mem.h"

int sn_cuda_fly(struct sn_copy *c, struct sn_lane *lane, struct sn_flight *flight);
int sn_cuda_fly_landed(struct sn_lane *lane, struct sn_flight *flight, bool ask);

#endif
