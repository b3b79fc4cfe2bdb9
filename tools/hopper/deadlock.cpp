/* SPDX-License-Identifier: Apache-2.0 */
/* What the threads of a cluster wait for when none of them can go on. */
#include "tools/hopper/scheduler.h"

#include <cstdio>
#include <map>
#include <string>

namespace hopper
{

/* The lanes of `w` that wait for the same thing as its lane `first`. */
static uint32_t same_wait(const struct warp *w, uint32_t first)
{
    const struct fiber *all = &w->block->threads[w->index * WARP], *f = &all[first];
    uint32_t lanes = 0;
    for (uint32_t l = 0; l < WARP && w->index * WARP + l < w->block->threads.size(); l++)
        if (all[l].state == THREAD_BLOCKED && all[l].wait.what == f->wait.what &&
            all[l].wait.object == f->wait.object && all[l].wait.value == f->wait.value)
            lanes |= 1u << l;
    return lanes;
}

std::string describe_waits(const struct cluster *c)
{
    std::string all;
    for (const auto &b : c->ctas) {
        std::map<std::string, std::string> lines;
        for (const auto &w : b->warps) {
            uint32_t described = 0;
            for (uint32_t l = 0; l < WARP && w.index * WARP + l < b->threads.size(); l++) {
                const struct fiber *f = &b->threads[w.index * WARP + l];
                char waiters[48];
                if ((described >> l & 1) || f->state != THREAD_BLOCKED)
                    continue;
                uint32_t lanes = same_wait(&w, l);
                described |= lanes;
                snprintf(waiters, sizeof(waiters), lanes == ~0u ? " %u" : " %u (lanes %08x)", w.index, lanes);
                lines[f->wait.what + (" " + describe_wait(f)) + " at " + code_location(f->wait.from)] += waiters;
            }
        }
        for (const auto &line : lines)
            all += "\n  CTA " + std::to_string(b->index) + " warp" + line.second + ": " + line.first;
    }
    return all;
}

} // namespace hopper
