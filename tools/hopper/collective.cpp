/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of another library, which take SMs away from ours and wait for each other. */
#include <atomic>

#include "tools/hopper/hopper.h"
#include "tools/hopper/instructions.h"
#include "tools/hopper/launch.h"

struct hopper_collective {
    uint32_t sms, ctas;
    std::atomic<uint32_t> arrived;
};

/* What every CTA runs. */
static void meet(struct hopper_collective *c)
{
    c->arrived++;
    while (!hopper_collective_met(c))
        hopper::thread_sleep(200);
}

extern "C" struct hopper_collective *hopper_collective_open(uint32_t ranks, uint32_t sms)
{
    auto *c = new hopper_collective();
    c->sms = sms;
    c->ctas = ranks * sms;
    return c;
}

extern "C" bool hopper_collective_launch(struct hopper_collective *c, struct CUstream_st *stream)
{
    const void *kernel = (const void *)meet;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(c->sms);
    config.blockDim = dim3(1);
    config.dynamicSmemBytes = hopper::MOST_SHARED_BYTES; /* so that no other CTA fits on the SM */
    config.stream = stream;
    return c->sms <= hopper_sms() &&
           cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, hopper::MOST_SHARED_BYTES) ==
               cudaSuccess &&
           hopper::launch_enqueue(&config, kernel, [c] { meet(c); }) == cudaSuccess;
}

extern "C" bool hopper_collective_met(const struct hopper_collective *c)
{
    return c->arrived == c->ctas;
}

extern "C" void hopper_collective_close(struct hopper_collective *c)
{
    delete c;
}
