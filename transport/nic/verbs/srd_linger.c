/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/srd_linger.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "transport/util/fork.h"

static bool has_ended(int stream_fd)
{
    char bytes[64];
    ssize_t n;

    do
        n = recv(stream_fd, bytes, sizeof(bytes), MSG_DONTWAIT);
    while (n > 0 || (n < 0 && errno == EINTR));
    return n == 0 || errno != EAGAIN;
}

static void forget_ended_locked(struct prs_srd_qp *qp)
{
    struct prs_srd_linger **at = &qp->linger;

    while (*at) {
        struct prs_srd_linger *linger = *at;

        if (linger->stream_fd < 0 || !has_ended(linger->stream_fd)) {
            at = &linger->next;
            continue;
        }
        *at = linger->next;
        prs_fork_close(linger->stream_fd);
        free(linger);
    }
}

void prs_srd_linger_keep_locked(struct prs_srd_qp *qp, const struct prs_srd_end *end, int stream_fd)
{
    struct prs_srd_linger *linger = end->linger;

    forget_ended_locked(qp);
    memcpy(linger->gid, end->to->gid, sizeof(linger->gid));
    linger->number = end->remote_number;
    prs_fork_begin();
    linger->stream_fd = prs_fork_end(stream_fd < 0 ? -1 : fcntl(stream_fd, F_DUPFD_CLOEXEC, 0));
    linger->next = qp->linger;
    qp->linger = linger;
}

bool prs_srd_linger_has_locked(struct prs_srd_qp *qp, const uint8_t gid[16], uint32_t number)
{
    forget_ended_locked(qp);
    for (const struct prs_srd_linger *linger = qp->linger; linger; linger = linger->next)
        if (linger->number == number && !memcmp(linger->gid, gid, sizeof(linger->gid)))
            return true;
    return false;
}

void prs_srd_linger_drop_all(struct prs_srd_qp *qp)
{
    while (qp->linger) {
        struct prs_srd_linger *linger = qp->linger;

        qp->linger = linger->next;
        if (linger->stream_fd >= 0)
            prs_fork_close(linger->stream_fd);
        free(linger);
    }
}
