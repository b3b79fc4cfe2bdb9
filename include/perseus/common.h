/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Definitions that all public headers share.
 *
 * Time limits. A field `timeout_ms` is the limit of each single wait for another rank. 0 means the default. On the host
 * it is the variable PERSEUS_TIMEOUT_MS, or PRS_TIMEOUT_MS if that is not set: there the other rank does its part at
 * once, for example in making a connection. In a kernel it is PRS_KERNEL_TIMEOUT_MS: there the other rank may first
 * have to compute or load the data.
 *
 * Versions. Structures of options, operands and results end in `reserved` words, which later versions turn into fields.
 * A caller sets them to 0. If one is not 0, the call fails, and the error text names the structure. */
#ifndef PERSEUS_COMMON_H
#define PERSEUS_COMMON_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PRS_API __attribute__((visibility("default")))

enum {
    PRS_RESERVED_WORDS = 8,        /**< room for the fields of later versions */
    PRS_TIMEOUT_MS = 30000,        /**< limit of a wait on the host */
    PRS_KERNEL_TIMEOUT_MS = 600000 /**< limit of a wait in a kernel: as long as torch lets NCCL wait */
};

/**
 * Collective: each rank contributes `bytes` bytes and receives those of all ranks, in order of rank. Return 0 or
 * -errno; a positive value counts as a failure. It must not block for ever: when a rank has died, it should fail. */
typedef int prs_allgather_fn(void *user, const void *mine, void *all, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
