/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Definitions that all public headers share.
 *
 * Time limits. A field `timeout_ms` is the limit of each single wait for another rank. 0: the default, which depends
 * on where the wait is. The host waits for things that the other side does at once, for example a connection. The
 * default there is PERSEUS_TIMEOUT_MS, else PRS_TIMEOUT_MS. A kernel waits for data that another rank may first have
 * to compute or load. The default there is PRS_KERNEL_TIMEOUT_MS.
 *
 * Growing. Structures of options, operands and results end in `reserved` words, which later versions turn into fields.
 * A caller sets them to 0, and a library refuses a word that is not 0, by the name of its structure. */
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
