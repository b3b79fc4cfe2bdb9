/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/load.h"

#include <assert.h>
#include <stdint.h>

#include "transport/util/error.h"

enum { MOST_LOADERS = 8 }; /* one for each file of kernels */

static prs_load_fn *loaders[MOST_LOADERS]; /* written before main() only */
static uint32_t count;

bool prs_load_add(prs_load_fn *load)
{
    assert(count < MOST_LOADERS);
    loaders[count++] = load;
    return true;
}

int prs_load_all(int device)
{
    int r = 0;
    for (uint32_t i = 0; i < count && r == 0; i++)
        r = loaders[i]();
    return r ? prs_fail(r, "fused: the kernels cannot be loaded on device %d: built for another GPU?", device) : 0;
}
