/* SPDX-License-Identifier: Apache-2.0 */
/* The clock of limits and measurements; <perseus/sync.h> has one that kernels can read too. */
#ifndef UTIL_CLOCK_H
#define UTIL_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds since some fixed point; never goes back. */
static inline uint64_t prs_clock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The same, for limits that are given in milliseconds. */
static inline uint64_t prs_clock_ms(void)
{
    return prs_clock_ns() / 1000000u;
}

#endif
