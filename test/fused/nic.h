/* SPDX-License-Identifier: Apache-2.0 */
/* Proxy and NIC of one rank in the models: a thread that does puts in any order and as late as it likes, and a signal
 * only after the puts of its group to its peer. include/perseus/device.h promises this, and nothing more. */
#ifndef TEST_FUSED_NIC_H
#define TEST_FUSED_NIC_H

#include <pthread.h>

#include "test/fused/watch.h"

enum { NIC_COMMANDS = 4096 };

/* A put (words != 0), or a signal that sets *to to value. */
struct nic_command {
    uint32_t *to;
    const uint32_t *from;
    uint32_t words, value, peer, group;
};

struct nic {
    struct watch *watch;
    pthread_t thread;
    pthread_mutex_t lock;   /* protects the commands, the counts, and stop */
    pthread_cond_t changed; /* signalled for the first command, after the last one, and for stop */
    struct nic_command commands[NIC_COMMANDS];
    uint32_t count, random;
    bool stop;
    uint64_t puts, signals, words;
};

void nic_open(struct nic *nic, struct watch *watch, uint32_t seed);
/* Commands that are not done are dropped. */
void nic_close(struct nic *nic);

void nic_post(struct nic *nic, const struct nic_command *command);
/* Waits until every put has been read and written, as prs_quiet() does. False: another thread failed. */
bool nic_quiet(struct nic *nic);

#endif
