/* SPDX-License-Identifier: Apache-2.0 */
/* The result of checking sampled elements, added up on the GPU (check.cu). */
#ifndef TOOLS_FUSED_SUMS_CUH
#define TOOLS_FUSED_SUMS_CUH

#include "tools/fused/bench.h"

#include <math.h>

struct bench_sums {
    unsigned long long beyond, poisoned, maps; /* maps: MoE's entries that are wrong */
    double square, worst;                      /* square: sum of squares of the references; worst: the largest error */
};

/* Called by one thread: an element, and its reference. */
static __device__ __forceinline__ void bench_sums_add(struct bench_sums *to, double have, double want, double bound)
{
    double error = fabs(have - want);
    if (!(error <= bound)) /* NaN is beyond any bound */
        atomicAdd(&to->beyond, 1ull);
    atomicAdd(&to->square, want * want);
    atomicMax((unsigned long long *)&to->worst, (unsigned long long)__double_as_longlong(isnan(error) ? 1e300 : error));
}

/* On the device, all zero. */
struct bench_sums *bench_sums_open(cudaStream_t stream);
/* Add the elements that still have the value of bench_poison(). */
void bench_sums_poisoned(struct bench_sums *device, const void *c, uint64_t count, uint32_t words, cudaStream_t stream);
/* Wait for the stream, and free it. */
struct bench_sums bench_sums_close(struct bench_sums *device, cudaStream_t stream);
struct bench_verdict bench_sums_verdict(const struct bench_sums *sums, uint64_t sampled);

#endif
