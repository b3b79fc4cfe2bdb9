/* SPDX-License-Identifier: Apache-2.0 */
/* Hints to the compiler, named by their meaning here. Use one only where a measurement shows that it helps. */
#ifndef PRS_UTIL_COMPILER_H
#define PRS_UTIL_COMPILER_H

#define likely(x)   __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* A function that reads counters while another thread counts: it may see an old value, but never half of one. */
#define PRS_READS_COUNTERS __attribute__((no_sanitize_thread))

/* Errors and rare events: kept out of the code that each message runs. */
#define PRS_COLD __attribute__((cold, noinline))

/* A slow branch of a hot function: a call, so that the fast branch needs no stack frame. */
#define PRS_OUTLINED __attribute__((noinline))

/* A body that is compiled once for each constant argument that its callers pass. */
#define PRS_SPECIALIZED __attribute__((always_inline)) inline

#endif
