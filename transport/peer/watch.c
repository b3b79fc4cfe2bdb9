/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/watch.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/peer/fail.h"
#include "transport/peer/peer.h"
#include "transport/peer/recovery.h"
#include "transport/util/clock.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"
#include "transport/util/thread.h"

enum {
    DRAINING_MS = 1, /* between two looks at queues that are being flushed */
    READY_MOST = 16, /* streams for one call of epoll_wait() */
};

/* `life` is held while the thread starts or ends, `lock` while it uses a peer. A peer's own lock is taken inside, if it
 * is free. */
static struct {
    pthread_mutex_t life, lock;
    struct prs_watched *peers; /* under lock */
    pid_t owner;               /* this and the rest: under life; set before the thread starts */
    pthread_t thread;
    int epoll_fd, stop_fd;
} watch = {.life = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER};
PRS_RENEW_IN_CHILD(life, watch.life)
PRS_RENEW_IN_CHILD(lock, watch.lock)

/* ---- a peer, under its lock ---- */

/* Can the thread take this note? The owner takes the others, which end the peer or say that it ends. */
static bool is_for_thread(const struct prs_peer *peer, const struct prs_wire_note *note)
{
    const struct prs_failover *failover = peer->failover;
    uint32_t others = 0;

    if (!prs_failover_expects(peer, note))
        return false;
    if (note->type != PRS_NOTE_DOWN)
        return true;
    for (uint32_t i = 0; i < peer->path_count; i++)
        others += i != note->path && failover->path[i].stage == PRS_PATH_UP;
    return others || prs_peer_lost_path(peer, note->path);
}

/* Return false if no note for the thread is on the stream, which is unchanged then. */
static bool take_note(struct prs_peer *peer)
{
    struct prs_failover *failover = peer->failover;
    struct prs_wire_note note = failover->in; /* the owner may have read a part of it */
    char *rest = (char *)&note + failover->in_bytes, why[sizeof(note.why) + 32];
    size_t bytes = sizeof(note) - failover->in_bytes;

    if (recv(peer->stream_fd, rest, bytes, MSG_PEEK | MSG_DONTWAIT) != (ssize_t)bytes || !is_for_thread(peer, &note) ||
        recv(peer->stream_fd, rest, bytes, MSG_DONTWAIT) != (ssize_t)bytes)
        return false;
    failover->in_bytes = 0;
    if (prs_recovery_take(peer, &note))
        return true;
    note.why[sizeof(note.why) - 1] = 0;
    if (!prs_peer_lost_path(peer, note.path)) {
        snprintf(why, sizeof(why), "the other side lost it: %s", note.why);
        prs_failover_fence(peer, note.path, why);
    }
    prs_failover_told(peer, &note);
    failover->attended = true;
    return true;
}

/* Return true if the queues are not flushed yet. */
static bool drain(struct prs_peer *peer, uint32_t path)
{
    const struct prs_failover_path *lost = &peer->failover->path[path];

    if (lost->stage != PRS_PATH_DRAINING)
        return false;
    (void)prs_failover_keep_events(peer, path);
    if (!prs_failover_is_drained(peer, path))
        return prs_clock_ns() - lost->since_ns < PRS_FAILOVER_DRAIN_MS * 1000000ull; /* else the owner fails the peer */
    prs_failover_tell(peer, path);
    return false;
}

/* Return true if the peer is to be looked at again soon. */
static bool attend(struct prs_peer *peer)
{
    bool again = false;

    /* The owner may want the lock of the list, for another peer. While it makes progress it takes notes itself. */
    if (!prs_light_lock_try(&peer->failover->lock))
        return true;
    if (!peer->error && peer->stream_fd >= 0 && !peer->remote_closed) {
        while (take_note(peer))
            ;
        for (uint32_t i = 0; i < peer->path_count; i++)
            again |= drain(peer, i);
    }
    prs_peer_unlock(peer);
    return again;
}

/* ---- the thread ---- */

static bool attend_due(void)
{
    struct epoll_event ready[READY_MOST];
    bool again = false;
    int count;

    pthread_mutex_lock(&watch.lock); /* under the lock, so that each peer that is ready is still in the list */
    while ((count = epoll_wait(watch.epoll_fd, ready, READY_MOST, 0)) > 0)
        for (int i = 0; i < count; i++)
            ((struct prs_watched *)ready[i].data.ptr)->due = true;
    for (struct prs_watched *at = watch.peers; at; at = at->next) {
        at->due = at->due && attend(at->peer);
        again |= at->due;
    }
    pthread_mutex_unlock(&watch.lock);
    return again;
}

static void *run(void *none)
{
    struct pollfd fds[2] = {{.fd = watch.epoll_fd, .events = POLLIN}, {.fd = watch.stop_fd, .events = POLLIN}};
    bool again = false;

    while ((poll(fds, 2, again ? DRAINING_MS : -1) >= 0 || errno == EINTR) && !fds[1].revents && /* stop() ends it */
           prs_work_begin()) {
        again = attend_due();
        prs_work_end();
    }
    return none;
}

/* ---- start, stop ---- */

/* Return 0 or an errno. */
static int start(void)
{
    int r = 0;

    if (watch.owner) { /* in a forked child: close the parent's descriptors */
        close(watch.epoll_fd);
        close(watch.stop_fd);
        watch.owner = 0;
        watch.peers = NULL;
    }
    watch.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    watch.stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (watch.epoll_fd < 0 || watch.stop_fd < 0)
        r = errno;
    if (!r)
        r = prs_thread_start(&watch.thread, "prs-watch", run, NULL);
    if (!r) {
        watch.owner = getpid();
        return 0;
    }
    if (watch.epoll_fd >= 0)
        close(watch.epoll_fd);
    if (watch.stop_fd >= 0)
        close(watch.stop_fd);
    return r;
}

static void stop(void)
{
    uint64_t one = 1;

    if (write(watch.stop_fd, &one, sizeof(one)) != sizeof(one))
        PRS_WARN("cannot wake the thread that watches connections: %s", strerror(errno));
    pthread_join(watch.thread, NULL);
    close(watch.epoll_fd);
    close(watch.stop_fd);
    watch.owner = 0;
}

void prs_watch_add(struct prs_peer *peer)
{
    struct prs_watched *watched = &peer->failover->watched;
    /* Edge-triggered, so that a note that the thread leaves to the owner does not wake it again. */
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = watched};
    int r;

    pthread_mutex_lock(&watch.life);
    r = watch.owner == getpid() ? 0 : start();
    if (!r) {
        pthread_mutex_lock(&watch.lock);
        watched->peer = peer;
        watched->next = watch.peers;
        watch.peers = watched;
        if (epoll_ctl(watch.epoll_fd, EPOLL_CTL_ADD, peer->stream_fd, &event))
            r = errno;
        pthread_mutex_unlock(&watch.lock);
    }
    pthread_mutex_unlock(&watch.life);
    if (r)
        PRS_WARN("%s: no thread watches this connection: %s; while it is idle, it does not help to replace a lost rail",
                 peer->remote, strerror(r));
}

/* Remove the stream from the epoll set. Closing it does not, if a forked child holds it open. */
void prs_watch_lose_stream(struct prs_peer *peer)
{
    if (peer->failover->watched.peer)
        epoll_ctl(watch.epoll_fd, EPOLL_CTL_DEL, peer->stream_fd, NULL);
}

void prs_watch_remove(struct prs_peer *peer)
{
    struct prs_watched **at = &watch.peers, *watched = &peer->failover->watched;

    if (!watched->peer)
        return;
    pthread_mutex_lock(&watch.life);
    pthread_mutex_lock(&watch.lock);
    while (*at != watched)
        at = &(*at)->next;
    *at = watched->next;
    if (peer->stream_fd >= 0)
        prs_watch_lose_stream(peer);
    pthread_mutex_unlock(&watch.lock);
    if (!watch.peers)
        stop();
    pthread_mutex_unlock(&watch.life);
}
