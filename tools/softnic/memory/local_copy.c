/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/local_copy.h"

#include <errno.h>

#include "tools/softnic/memory/copy_threads.h"
#include "tools/softnic/memory/device_mem.h"
#include "tools/softnic/memory/host_copy.h"

/* Several threads make a long copy of one piece on each side. */
static bool is_split(const struct sn_copy *c)
{
    return c->length >= SN_SPLIT_LEAST && c->dst_count == 1 && c->src_count == 1 && sn_host_copy_can_split();
}

static int copy_split(const struct sn_copy *c)
{
    struct sn_host_copy copy = {.world = c->world,
                                .self = c->self,
                                .dst_proc = c->dst_proc,
                                .src_proc = c->src_proc,
                                .dst = c->dst[0].addr,
                                .src = c->src[0].addr,
                                .bytes = c->length};

    return sn_host_copy_split(&copy);
}

int sn_local_copy_start(struct sn_copy *c)
{
    c->by = SN_BY_DEVICE;
    if (c->length == 0)
        return 0;
    if (!sn_spans_any_device(c->dst, c->dst_count) && !sn_spans_any_device(c->src, c->src_count))
        return is_split(c) ? copy_split(c) : sn_host_copy_spans(c);
    if (!sn_device_mem) {
        sn_log("a transfer names device memory, but this process has no CUDA driver");
        return -EIO;
    }
    return sn_device_mem->copy_start(c);
}
