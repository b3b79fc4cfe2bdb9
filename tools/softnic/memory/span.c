/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/memory/span.h"

uint32_t sn_spans_slice(struct sn_span *to, const struct sn_span *from, uint32_t count, uint64_t offset, uint64_t bytes)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < count && bytes; i++) {
        if (offset >= from[i].length) {
            offset -= from[i].length;
            continue;
        }
        to[n] = from[i];
        to[n].addr += offset;
        to[n].length -= offset;
        if (to[n].length > bytes)
            to[n].length = bytes;
        bytes -= to[n++].length;
        offset = 0;
    }
    return n;
}

bool sn_spans_any_device(const struct sn_span *span, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (span[i].kind != SN_MEM_HOST)
            return true;
    return false;
}
