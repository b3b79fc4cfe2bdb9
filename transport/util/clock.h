/* SPDX-License-Identifier: Apache-2.0 */
/* The clock for time limits and measurements. <perseus/sync.h> has one that kernels can read too. */
#ifndef UTIL_CLOCK_H
#define UTIL_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds since a fixed point in the past; never decreases. */
static inline uint64_t prs_clock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* As prs_clock_ns(), in milliseconds. */
static inline uint64_t prs_clock_ms(void)
{
    return prs_clock_ns() / 1000000u;
}

#endif
