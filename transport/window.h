/* SPDX-License-Identifier: Apache-2.0 */
/* Windows: registered memory by index, the same size on every rank. What a command may touch is decided here. */
#ifndef TRANSPORT_WINDOW_H
#define TRANSPORT_WINDOW_H

#include <perseus/proxy.h>
#include <perseus/ring.h>

/* Free, or dropped: no remotes, no bytes. */
struct prs_window {
    uint64_t base; /* here */
    uint64_t bytes;
    const struct prs_region *region;
    uint32_t flags;                    /* enum prs_window_flags */
    struct prs_window_remote *remotes; /* [world] */
};

struct prs_windows {
    struct prs_window *window;
    uint32_t count; /* highest index in use so far, plus one */
    uint32_t limit;
    uint32_t world;
    uint32_t epoch; /* that commands must carry */
};

int prs_windows_init(struct prs_windows *windows, uint32_t world, uint32_t epoch, uint32_t limit);
void prs_windows_fini(struct prs_windows *windows);
/* Return the index (>= 0), the lowest that is free, or -errno. May run beside prs_windows_check(): a command that names
 * the window is written after this returned, and the ring's release and acquire order the two. */
int prs_windows_add(struct prs_windows *windows, const struct prs_window_options *options);
/* Not beside prs_windows_check(), or anything else that looks at windows. */
void prs_windows_drop(struct prs_windows *windows, uint32_t index);
/*
 * Whether a command may be executed. Return 0, -EBADMSG (malformed), -ESTALE (another epoch), -EINVAL (no such peer or
 * window, or a word that cannot be a signal) or -ERANGE (outside the window); the text names command and field. */
int prs_windows_check(const struct prs_windows *windows, const struct prs_cmd_fields *cmd);

#endif
