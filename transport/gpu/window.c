/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/gpu/window.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "transport/util/error.h"

int prs_windows_init(struct prs_windows *windows, uint32_t world, uint32_t epoch, uint32_t limit)
{
    memset(windows, 0, sizeof(*windows));
    windows->window = calloc(limit, sizeof(*windows->window));
    if (!windows->window)
        return prs_fail(-ENOMEM, "window table: no memory for %u windows", limit);
    windows->limit = limit;
    windows->world = world;
    windows->epoch = epoch;
    return 0;
}

void prs_windows_fini(struct prs_windows *windows)
{
    for (uint32_t i = 0; i < windows->count; i++)
        free(windows->window[i].remotes);
    free(windows->window);
    memset(windows, 0, sizeof(*windows));
}

int prs_windows_add(struct prs_windows *windows, const struct prs_window_options *options)
{
    struct prs_window *window;
    uint32_t index = 0;

    if (prs_check_reserved(options, "struct prs_window_options"))
        return -EINVAL;
    while (index < windows->count && windows->window[index].remotes)
        index++;
    if (index == windows->limit)
        return prs_fail(-ENOSPC, "window table: all %u windows are in use", windows->limit);
    if (options->bytes > PRS_CMD_MAX_OFFSET)
        return prs_fail(-EINVAL, "window of %" PRIu64 " bytes is larger than a command can address", options->bytes);
    window = &windows->window[index];
    window->remotes = calloc(windows->world, sizeof(*window->remotes));
    if (!window->remotes)
        return prs_fail(-ENOMEM, "window table: no memory for %u ranks", windows->world);
    memcpy(window->remotes, options->remotes, windows->world * sizeof(*window->remotes));
    window->base = (uint64_t)(uintptr_t)options->base;
    window->bytes = options->bytes;
    window->region = options->region;
    window->flags = options->flags;
    if (index == windows->count)
        __atomic_store_n(&windows->count, index + 1, __ATOMIC_RELAXED); /* an invalid command may read it now */
    return (int)index;
}

void prs_windows_drop(struct prs_windows *windows, uint32_t index)
{
    struct prs_window *window = &windows->window[index];

    free(window->remotes);
    memset(window, 0, sizeof(*window));
}

static const char *op_name(uint32_t op)
{
    switch (op) {
    case PRS_CMD_PUT:
        return "put";
    case PRS_CMD_SIGNAL_SET:
        return "signal set";
    case PRS_CMD_SIGNAL_ADD:
        return "signal add";
    default:
        return "unknown command";
    }
}

static int check_span(const struct prs_windows *windows, const struct prs_cmd_fields *cmd, const char *end,
                      uint32_t index, uint64_t offset, uint64_t bytes)
{
    const struct prs_window *window;
    uint32_t count = __atomic_load_n(&windows->count, __ATOMIC_RELAXED);

    if (index >= count)
        return prs_fail(-EINVAL, "device command refused: %s to peer %u names %s window %u, there are %u",
                        op_name(cmd->op), cmd->peer, end, index, count);
    window = &windows->window[index];
    if (!window->remotes)
        return prs_fail(-EINVAL, "device command refused: %s to peer %u names %s window %u, which was given back",
                        op_name(cmd->op), cmd->peer, end, index);
    /* No sum here can wrap around. */
    if (offset > window->bytes || bytes > window->bytes - offset)
        return prs_fail(-ERANGE,
                        "device command refused: %s to peer %u: %s window %u, offset %" PRIu64 " + %" PRIu64
                        " bytes is outside its %" PRIu64 " bytes",
                        op_name(cmd->op), cmd->peer, end, index, offset, bytes, window->bytes);
    return 0;
}

static int check_signal(const struct prs_windows *windows, const struct prs_cmd_fields *cmd)
{
    int r;

    if (cmd->src_window != 0 || cmd->pad != 0 || (cmd->flags & ~(uint32_t)PRS_CMD_STRONG) != 0)
        return prs_fail(-EBADMSG, "device command refused: %s to peer %u with flags %u and stray bits: malformed",
                        op_name(cmd->op), cmd->peer, cmd->flags);
    r = check_span(windows, cmd, "signal", cmd->dst_window, cmd->dst_offset, 8);
    if (r < 0)
        return r;
    if (!(windows->window[cmd->dst_window].flags & PRS_WINDOW_SIGNALS))
        return prs_fail(-EINVAL, "device command refused: %s to peer %u in window %u, which is not made for signals",
                        op_name(cmd->op), cmd->peer, cmd->dst_window);
    if (cmd->dst_offset % 8 != 0)
        return prs_fail(-EINVAL, "device command refused: %s to peer %u at offset %" PRIu64 ", not a multiple of 8",
                        op_name(cmd->op), cmd->peer, cmd->dst_offset);
    return 0;
}

int prs_windows_check(const struct prs_windows *windows, const struct prs_cmd_fields *cmd)
{
    int r;

    if (cmd->op != PRS_CMD_PUT && cmd->op != PRS_CMD_SIGNAL_SET && cmd->op != PRS_CMD_SIGNAL_ADD)
        return prs_fail(-EBADMSG, "device command refused: operation %u is unknown: malformed", cmd->op);
    /* Checked first: the other fields of a stale command may be valid by accident. */
    if (cmd->epoch != windows->epoch)
        return prs_fail(-ESTALE,
                        "device command refused: %s to peer %u has epoch %u, this ring has %u: the kernel holds the "
                        "description of a proxy that was closed",
                        op_name(cmd->op), cmd->peer, cmd->epoch, windows->epoch);
    if (cmd->peer >= windows->world)
        return prs_fail(-EINVAL, "device command refused: %s to peer %u of %u", op_name(cmd->op), cmd->peer,
                        windows->world);
    if (cmd->op != PRS_CMD_PUT)
        return check_signal(windows, cmd);
    if (cmd->flags != 0)
        return prs_fail(-EBADMSG, "device command refused: put to peer %u with flags %u: malformed", cmd->peer,
                        cmd->flags);
    r = check_span(windows, cmd, "source", cmd->src_window, cmd->src_offset, cmd->bytes);
    if (!r)
        r = check_span(windows, cmd, "destination", cmd->dst_window, cmd->dst_offset, cmd->bytes);
    return r;
}
