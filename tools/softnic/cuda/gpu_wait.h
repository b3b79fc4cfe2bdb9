/* SPDX-License-Identifier: Apache-2.0 */
/* Wait until the work of the current CUDA context has ended, outside of the driver's lock. */
#ifndef SOFTNIC_CUDA_GPU_WAIT_H
#define SOFTNIC_CUDA_GPU_WAIT_H

#include <stdbool.h>
#include <stdint.h>

/* Functions of the driver that the wait needs. */
struct sn_gpu_wait_calls {
    int (*ctx_get)(void **ctx);
    int (*ctx_set)(void *ctx);
    int (*ctx_synchronize)(void);
};

/* Once, before the others. */
void sn_gpu_wait_open(const struct sn_gpu_wait_calls *calls);

/* Wait, at most 30 s. Not while a stream of the process is captured: the wait would end the capture. name: the
 * call that would wait, for the line that says that the time is up. Any thread. */
void sn_gpu_wait(const char *name);

/* Whether this is the first call with these two values in the current context. */
bool sn_gpu_first(uint64_t a, uint64_t b);

/* Code was unloaded: forget the pairs that were seen, since other code may get the same addresses. */
void sn_gpu_forget(void);

/* A capture has begun (1) or ended (-1). */
void sn_gpu_captures(int more);

#endif
