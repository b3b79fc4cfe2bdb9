/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/banner.h"

#include <stdarg.h>
#include <stdio.h>

#include "transport/util/log.h"

struct text {
    char bytes[1024];
    size_t used;
};

static void append(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void append(struct text *text, const char *format, ...)
{
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(text->bytes + text->used, sizeof(text->bytes) - text->used, format, args);
    va_end(args);
    if (n > 0)
        text->used += (size_t)n < sizeof(text->bytes) - text->used ? (size_t)n : sizeof(text->bytes) - text->used - 1;
}

static const char *memory_mode(const struct prs_rail_info *info)
{
    if (info->mem_kinds & PRS_MEM_DMABUF)
        return info->mem_kinds & PRS_MEM_CUDA ? "DMA-BUF or peermem" : "DMA-BUF";
    return info->mem_kinds & PRS_MEM_CUDA ? "peermem" : "staged through host memory";
}

void banner_log(const struct prs_fabric *fabric)
{
    struct text text = {.used = 0};
    struct prs_rail_info info, first = {.mem_kinds = 0};
    struct prs_rail_set all = {.count = 0};
    int rails = prs_fabric_rails(fabric);
    char policy[256];

    append(&text, "Perseus %s: %d rail%s", prs_version(), rails, rails == 1 ? "" : "s");
    for (int i = 0; i < rails; i++) {
        if (prs_rail_query(fabric, i, &info) < 0)
            continue;
        if (i == 0)
            first = info;
        if (all.count < PRS_MAX_RAILS)
            all.rail[all.count++] = i;
        append(&text, "%s %s:%d/%s %.0f Gb/s", i ? "," : "", info.name, info.port, info.link, info.speed_mbps / 1000.0);
    }
    append(&text, "; GPU memory: %s%s%s%s", memory_mode(&first), first.mem_note[0] ? " (" : "", first.mem_note,
           first.mem_note[0] ? ")" : "");
    if (prs_fabric_policy(fabric, &all, policy, sizeof(policy)) == 0)
        append(&text, "; order: %s", policy);
    PRS_INFO("%s", text.bytes);
}
