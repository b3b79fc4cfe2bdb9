/* SPDX-License-Identifier: Apache-2.0 */
/* Windows: registered memory that remote ranks may address, by index, of the same size on every rank. Decides what the
 * commands of kernels may access. */
#ifndef TRANSPORT_WINDOW_H
#define TRANSPORT_WINDOW_H

#include <perseus/proxy.h>
#include <perseus/ring.h>

/* remotes is NULL and bytes is 0 if the index is free. */
struct prs_window {
    uint64_t base; /* address on this rank */
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
    uint32_t epoch; /* commands must carry this value */
};

int prs_windows_init(struct prs_windows *windows, uint32_t world, uint32_t epoch, uint32_t limit);
void prs_windows_fini(struct prs_windows *windows);
/* Return the lowest free index (>= 0) or -errno. May run concurrently with prs_windows_check(): a command that names
 * the window is written after this has returned, and the ring's release and acquire order the two. */
int prs_windows_add(struct prs_windows *windows, const struct prs_window_options *options);
/* Must not run concurrently with prs_windows_check() or any other use of the windows. */
void prs_windows_drop(struct prs_windows *windows, uint32_t index);
/* May this command be executed? Return 0, -EBADMSG (malformed), -ESTALE (another epoch), -EINVAL (no such peer or
 * window, or an invalid signal word) or -ERANGE (outside the window); the text names command and field. */
int prs_windows_check(const struct prs_windows *windows, const struct prs_cmd_fields *cmd);

#endif
