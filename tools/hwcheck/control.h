/* SPDX-License-Identifier: Apache-2.0 */
/* The TCP connection over which the two sides of perseus-hwcheck agree on each step. Every call has a time limit. */
#ifndef HWCHECK_CONTROL_H
#define HWCHECK_CONTROL_H

#include <perseus/perseus.h>

enum { CONTROL_LIMIT_MS = 60000 };

enum message_kind { MESSAGE_HELLO = 1, MESSAGE_OPEN, MESSAGE_RUN, MESSAGE_CLOSE, MESSAGE_BYE };

enum trial_kind { TRIAL_LATENCY = 1, TRIAL_BANDWIDTH, TRIAL_SET, TRIAL_ADD, TRIAL_NOTIFY };

/* What a side tells the other about its rail and its memory. */
struct place_of_memory {
    uint64_t data, words;
    struct prs_keys data_keys, words_keys;
};

/* A request, or the answer to it. Both sides are this program, of the same version: HELLO checks that. */
struct message {
    uint32_t magic, bytes;
    uint32_t kind;
    int32_t status; /* of an answer: 0 or -errno, with a text */
    char text[256];
    uint32_t rail, trial, count, rails;
    char policy[16], host[64];
    struct prs_handle handle;
    struct place_of_memory memory;
    uint64_t late, wrong;
    char device[96], gid[64], link[16], interface[160];
    uint32_t speed_mbps, mtu;
};

/* Return a socket, or -errno after printing why. */
int control_connect(const char *host, const char *port);
/* host: the address to listen on; NULL: all of IPv4. */
int control_listen(const char *host, const char *port);
/* Wait for the next client, without limit. */
int control_accept(int listener);

/* Return 0, or -errno: -EPROTO when the other side is not this program, or another version of it. */
int control_send(int fd, struct message *message);
int control_receive(int fd, struct message *message);
/* Has the other side sent something, or closed? */
bool control_has_input(int fd);

#endif
