/* SPDX-License-Identifier: Apache-2.0 */
/* Passes file descriptors between processes of one node and one user, over UNIX sockets with abstract names. */
#ifndef TRANSPORT_FD_PASS_H
#define TRANSPORT_FD_PASS_H

#include <assert.h>
#include <stdint.h>

enum { PRS_FD_PASS_FILES = 2 };

/* Where a process can be asked for its files. Plain data, which the caller sends by other means. */
struct prs_fd_pass_address {
    uint8_t name[16];   /* random; names the socket */
    uint8_t cookie[16]; /* random; a process that asks for the files must send it */
};
static_assert(sizeof(struct prs_fd_pass_address) == 32, "travels between processes");

struct prs_fd_pass {
    int listener; /* -1: closed */
    struct prs_fd_pass_address address;
};

int prs_fd_pass_open(struct prs_fd_pass *pass);
void prs_fd_pass_close(struct prs_fd_pass *pass);
/* Give files[] to `count` processes and receive theirs. All of them must call this at the same time, each with the
 * addresses of the others. got[i] are the files of addresses[i]; the caller closes them. timeout_ms bounds the whole
 * exchange. Return 0, -ETIMEDOUT (the text names the missing process) or -errno; on failure no file is left open. */
int prs_fd_pass_exchange(struct prs_fd_pass *pass, const int files[PRS_FD_PASS_FILES],
                         const struct prs_fd_pass_address *addresses, uint32_t count, int (*got)[PRS_FD_PASS_FILES],
                         uint32_t timeout_ms);

#endif
