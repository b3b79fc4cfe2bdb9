/* SPDX-License-Identifier: Apache-2.0 */
/* Three processes with a communicator. Each registers memory to send from, memory to receive into, and signals. */
#ifndef TEST_PLUGIN_GIN_JOB_H
#define TEST_PLUGIN_GIN_JOB_H

#include <stdio.h>

#include "test/plugin/gin_api.h"

enum {
    RANKS = 3,
    CONTEXTS = 2,
    MESSAGES = 64,
    WORDS = 128, /* 64-bit words of a message */
    TIMEOUT_S = 240,
    DATA_BYTES = RANKS * CONTEXTS * MESSAGES * WORDS * 8,
    SIGNAL_WORDS = 512,
};

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

struct plan {
    int version;
    int contexts;
};

struct job {
    struct gin_api api;
    uint64_t *source, *target, *signals;
    void *source_handle, *target_handle, *signal_handle;
};

/* All three return 0, or 1 after a report on stderr; job_open() returns 77 if there is no device. */
int job_open(struct job *job, struct ranks *ranks, const struct plan *plan);
int job_close(struct job *job);
/* Wait until a signal has a value. Calls only progress meanwhile. */
int wait_signal(struct job *job, uint32_t index, uint64_t value);
/* Run body in each rank. Skips the test if there is no device. */
int run(int (*body)(struct ranks *, void *), struct plan plan);

#endif
