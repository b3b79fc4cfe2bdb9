/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/gpu/ring.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "transport/util/error.h"

int prs_ring_init(struct prs_ring *ring, uint64_t slot_count)
{
    void *map;

    memset(ring, 0, sizeof(*ring));
    if (slot_count < 4 || slot_count > 1u << 20 || (slot_count & (slot_count - 1)) != 0)
        return prs_fail(-EINVAL, "command ring of %" PRIu64 " slots: want a power of two from 4 to %u", slot_count,
                        1u << 20);
    ring->map_bytes = sizeof(struct prs_ring_control) + slot_count * sizeof(struct prs_cmd);
    /* Shared, so that a test may have producers in another process. In pages of its own, so that CUDA can map it. */
    map = mmap(NULL, ring->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return prs_fail(-ENOMEM, "command ring: mmap of %zu bytes: %s", ring->map_bytes, strerror(errno));
    ring->control = map;
    ring->slots = (struct prs_cmd *)(ring->control + 1);
    ring->slot_count = slot_count;
    return 0;
}

void prs_ring_fini(struct prs_ring *ring)
{
    if (ring->control)
        munmap(ring->control, ring->map_bytes);
    memset(ring, 0, sizeof(*ring));
}

int prs_ring_take(struct prs_ring *ring, struct prs_cmd_fields *out)
{
    const struct prs_cmd *slot = &ring->slots[ring->taken & (ring->slot_count - 1)];
    uint64_t lap = prs_cmd_lap(ring->taken, ring->slot_count);
    struct prs_cmd cmd;

    /* [ring-slot] Each word is checked by itself, so the words may arrive in any order. Acquiring the last one acquires
     * all that its writer had seen. Pairs with prs_ring_write(), perseus/device.h. */
    cmd.word[3] = prs_load_acquire_sys(&slot->word[3]);
    if ((cmd.word[3] & 1) != lap)
        return 0;
    for (int i = 0; i < 3; i++) {
        cmd.word[i] = prs_load_relaxed(&slot->word[i]);
        if ((cmd.word[i] & 1) != lap)
            return 0;
    }
    *out = prs_cmd_unpack(&cmd);
    ring->taken++;
    return 1;
}

void prs_ring_return(struct prs_ring *ring)
{
    if (ring->returned == ring->taken)
        return;
    ring->returned = ring->taken;
    /* [ring-credit] The slots have been read before they may be written again. Pairs with prs_ring_look(). */
    prs_store_release_sys(&ring->control->credit, ring->returned);
}

void prs_ring_done(struct prs_ring *ring, uint64_t position)
{
    if (ring->done == position)
        return;
    ring->done = position;
    /* [ring-done] The effects of the commands are visible before this store. Pairs with prs_ring_look(). */
    prs_store_release_sys(&ring->control->done, position);
}

void prs_ring_abort(struct prs_ring *ring, int error)
{
    if (prs_load_relaxed(&ring->control->abort) == 0)
        prs_store_release_sys(&ring->control->abort, (uint64_t)(error < 0 ? -error : ECANCELED));
}

int prs_ring_report(const struct prs_ring *ring, struct prs_device_report *report)
{
    const struct prs_device_report *from = &ring->control->report;

    /* [device-report] Pairs with prs_device_fail(). */
    report->code = prs_load_acquire_sys(&from->code);
    if (report->code == 0)
        return 0;
    report->kind = prs_load_relaxed(&from->kind);
    report->index = prs_load_relaxed(&from->index);
    report->want = prs_load_relaxed(&from->want);
    report->have = prs_load_relaxed(&from->have);
    report->thread = prs_load_relaxed(&from->thread);
    return 1;
}

void prs_ring_report_text(const struct prs_device_report *r, char *text, size_t bytes)
{
    static const char *const kinds[] = {
        "nothing",
        "a free slot of the command ring, for position",
        "completion of position",
        "the signal word at",
        "the signals of the round before, of group",
        "nothing; refused a command for peer",
        "nothing; refused an arrival, where none is expected, at group",
    };
    static const char *const codes[] = {"no error", "timed out", "was stopped by the host", "was misused"};
    const char *code = r->code < sizeof(codes) / sizeof(codes[0]) ? codes[r->code] : "reports an unknown code";
    const char *kind = r->kind < sizeof(kinds) / sizeof(kinds[0]) ? kinds[r->kind] : "an unknown thing";

    snprintf(text, bytes,
             "the device %s; block %" PRIu64 " thread %" PRIu64 " waited for %s %s%" PRIx64 ": want %" PRIu64
             ", have %" PRIu64,
             code, r->thread >> 32, r->thread & 0xffffffffu, kind, "0x", r->index, r->want, r->have);
}
