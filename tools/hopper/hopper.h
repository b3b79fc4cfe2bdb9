/* SPDX-License-Identifier: Apache-2.0 */
/* How a test sets up the emulated Hopper GPUs; everything else is the CUDA runtime's own interface. See
 * tools/hopper/README.md. */
#ifndef TOOLS_HOPPER_HOPPER_H
#define TOOLS_HOPPER_HOPPER_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Before the first CUDA call of the process. HOPPER_SMS and HOPPER_SEED in the environment win over these. 0: 8 GPUs of
 * 8 SMs; seed 0: one made from the clock. */
void hopper_setup(uint32_t devices, uint32_t sms, uint64_t seed);
uint64_t hopper_seed(void);
uint32_t hopper_devices(void);
uint32_t hopper_sms(void);

/* A violation no longer ends the process; launches then fail with cudaErrorLaunchFailure. */
void hopper_tolerate(void);
/* A rank that gave up goes on with memory that others may be writing: reading that is no violation any more. */
void hopper_forgive_late_writes(void);
/* The text of the first violation; "" if there was none. */
const char *hopper_violation(void);
/* How often peer access was asked for that was there already: an error to CUDA, which compute-sanitizer reports. */
uint32_t hopper_repeated_access(void);

#ifdef __cplusplus
}
#endif

#endif
