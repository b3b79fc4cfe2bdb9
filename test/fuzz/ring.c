/* SPDX-License-Identifier: Apache-2.0 */
/* Any four words in a slot of a command ring: a command that is let through stays within the windows. */
#include "test/fuzz/fuzz.h"
#include "transport/gpu/ring.h"
#include "transport/gpu/window.h"

enum { SLOTS = 64, WORLD = 4, EPOCH = 7 };

size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room)
{
    struct prs_cmd cmd[8];

    if (n > 2)
        return 0;
    for (uint32_t i = 0; i < 8; i++) {
        struct prs_cmd_fields f = {.op = 1 + n,
                                   .peer = i % WORLD,
                                   .group = i,
                                   .epoch = EPOCH,
                                   .bytes = 64,
                                   .src_offset = n ? 0 : 128 * i,
                                   .dst_offset = 64 * i,
                                   .dst_window = n != 0};

        cmd[i] = prs_cmd_pack(&f, 1);
    }
    memcpy(out, cmd, sizeof(cmd));
    return sizeof(cmd);
}

static void check(const struct prs_windows *windows, const struct prs_cmd_fields *cmd)
{
    const struct prs_window *to = &windows->window[cmd->dst_window], *from = &windows->window[cmd->src_window];
    uint64_t bytes = cmd->op == PRS_CMD_PUT ? cmd->bytes : 8;

    fuzz_require(cmd->op >= PRS_CMD_PUT && cmd->op <= PRS_CMD_SIGNAL_ADD, "operation %u", cmd->op);
    fuzz_require(cmd->peer < WORLD && cmd->epoch == EPOCH, "peer %u, epoch %u", cmd->peer, cmd->epoch);
    fuzz_require(cmd->dst_window < windows->count && cmd->dst_offset <= to->bytes &&
                     bytes <= to->bytes - cmd->dst_offset,
                 "window %u, offset %llu", cmd->dst_window, (unsigned long long)cmd->dst_offset);
    fuzz_require(cmd->op == PRS_CMD_PUT || to->flags & PRS_WINDOW_SIGNALS, "a signal where none may be");
    fuzz_require(cmd->op != PRS_CMD_PUT || (cmd->src_window < windows->count && cmd->src_offset <= from->bytes &&
                                            bytes <= from->bytes - cmd->src_offset),
                 "source window %u", cmd->src_window);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static uint8_t memory[2][4096];
    struct prs_window_remote remotes[WORLD];
    struct fuzz_reader in = {data, bytes};
    struct prs_windows windows;
    struct prs_cmd_fields cmd;
    struct prs_ring ring;
    uint64_t at;

    memset(remotes, 0, sizeof(remotes));
    fuzz_require(prs_ring_init(&ring, SLOTS) == 0 && prs_windows_init(&windows, WORLD, EPOCH, 8) == 0, "no memory");
    for (uint32_t i = 0; i < 2; i++) {
        struct prs_window_options options = {
            .base = memory[i], .bytes = sizeof(memory[i]), .remotes = remotes, .flags = i ? PRS_WINDOW_SIGNALS : 0};

        fuzz_require(prs_windows_add(&windows, &options) == (int)i, "no window");
    }
    for (at = 0; in.left; at++) {
        fuzz_take(&in, &ring.slots[at % SLOTS], sizeof(ring.slots[0]));
        while (prs_ring_take(&ring, &cmd)) {
            if (!prs_windows_check(&windows, &cmd)) {
                check(&windows, &cmd);
                fuzz_accepted++;
            }
            prs_ring_return(&ring);
        }
        fuzz_require(ring.taken <= at + SLOTS + 1, "%llu commands taken", (unsigned long long)ring.taken);
    }
    prs_windows_fini(&windows);
    prs_ring_fini(&ring);
    return 0;
}
