/* SPDX-License-Identifier: Apache-2.0 */
/* Files handed between processes of one node over UNIX sockets (abstract names, the same user only). Bounded. */
#ifndef TRANSPORT_SHARE_H
#define TRANSPORT_SHARE_H

#include <assert.h>
#include <stdint.h>

enum { PRS_SHARE_FILES = 2 };

/* Where to ask for a process's files; plain data, sent by other means. */
struct prs_share_address {
    uint8_t name[16];   /* random, names the socket */
    uint8_t cookie[16]; /* random, must be shown by who asks */
};
static_assert(sizeof(struct prs_share_address) == 32, "travels between processes");

struct prs_share {
    int listener; /* -1: closed */
    struct prs_share_address address;
};

int prs_share_open(struct prs_share *share);
void prs_share_close(struct prs_share *share);
/*
 * Give files[] to `count` processes, which do the same at the same time with ours among their addresses; got[i] are the
 * files of addresses[i], the caller's to close. timeout_ms bounds all of it. Return 0, -ETIMEDOUT (who is missing), or
 * -errno; on failure no file is left open. */
int prs_share_exchange(struct prs_share *share, const int files[PRS_SHARE_FILES],
                       const struct prs_share_address *addresses, uint32_t count, int (*got)[PRS_SHARE_FILES],
                       uint32_t timeout_ms);

#endif
