/* SPDX-License-Identifier: Apache-2.0 */
/* The TCP connection over which the two sides of perseus-hwcheck agree on each step. Every call has a time limit. */
#ifndef HWCHECK_CONTROL_H
#define HWCHECK_CONTROL_H

#include <perseus/perseus.h>

enum { CONTROL_LIMIT_MS = 60000, COOKIE_BYTES = 65, QUEUES_MOST = 16 };

/* RAIL: describe a rail, and begin to count what its network loses; GROWN: what that is. STOP: the client has given up
 * the trial that runs; it is not answered. */
enum message_kind {
    MESSAGE_HELLO = 1,
    MESSAGE_RAIL,
    MESSAGE_OPEN,
    MESSAGE_RUN,
    MESSAGE_STOP,
    MESSAGE_CLOSE,
    MESSAGE_GROWN,
    MESSAGE_BYE
};

/* EMPTY: as NOTIFY, by writes of no bytes. SHARED: all queues add to one word. BESIDE: so does the CPU. */
enum trial_kind {
    TRIAL_LATENCY = 1,
    TRIAL_BANDWIDTH,
    TRIAL_SET,
    TRIAL_ADD,
    TRIAL_NOTIFY,
    TRIAL_EMPTY,
    TRIAL_SHARED,
    TRIAL_BESIDE,
    TRIAL_LAST = TRIAL_BESIDE
};

/* What a side tells the other about its rail and its memory. */
struct place_of_memory {
    uint64_t data, words;
    struct prs_keys data_keys, words_keys;
};

/* What a side tells about a rail, and about itself. */
struct side {
    char host[64], interface[160];
    char device[96], gid[64], link[16];
    char settings[192]; /* settings that the kernel has for the port */
    char grown[384];    /* counters that have grown */
    uint32_t rail_count, speed_mbps, path_mtu, network_mtu, traffic_class, counters;
    uint32_t atomic_scope; /* enum prs_atomic_scope */
};

/* A request, or the answer to it. Both sides are this program, of the same version: HELLO checks that. */
struct message {
    uint32_t magic, bytes;
    uint32_t kind;
    int32_t status; /* in an answer: 0 or -errno, with a text */
    char text[256];
    char cookie[COOKIE_BYTES];
    struct prs_rail_set rails; /* rails of the side that is asked; RAIL, GROWN: the first of them */
    uint32_t trial, count;
    uint32_t queues; /* of OPEN: 1 to QUEUES_MOST */
    char policy[16];
    struct prs_handle handle;
    struct place_of_memory memory;
    uint64_t late, wrong;
    struct side side; /* of an answer */
};

/* Return a socket, or -errno after printing why. launched: a pipe to the process that will listen there, which is given
 * time to start; -1: it should listen by now. */
int control_connect(const char *host, const char *port, int launched);
/* host: the address to listen on; NULL: all of IPv4. */
int control_listen(const char *host, const char *port);
/* Wait for the next client, without limit; or return -ECANCELED when there is input on `owner`, because the owner has
 * then ended. owner -1: there is none. */
int control_accept(int listener, int owner);
/* The address of the other side, as text. */
void control_peer(int fd, char *text, size_t bytes);
/* Of each call from now on, in seconds' steps. */
void control_set_limit(int fd, uint32_t limit_ms);

/* Return 0, or -errno: -EPROTO when the other side is not this program, or another version of it. */
int control_send(int fd, struct message *message);
int control_receive(int fd, struct message *message);
/* Has the other side sent something, or closed? */
bool control_has_input(int fd);

#endif
