/* SPDX-License-Identifier: Apache-2.0 */
/* Three processes with a communicator, and what each registers with it: data to send, data that comes, signals. */
#ifndef TEST_PLUGIN_GIN_WORLD_H
#define TEST_PLUGIN_GIN_WORLD_H

#include <stdio.h>

#include "test/plugin/gin_api.h"

enum {
    RANKS = 3,
    CONTEXTS = 2,
    MESSAGES = 64,
    WORDS = 128, /* of a message */
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

struct world {
    struct gin_api api;
    uint64_t *source, *target, *signals;
    void *source_handle, *target_handle, *signal_handle;
};

/* All three return 0 or 1, said on stderr; world_open() 77 where there is no device. */
int world_open(struct world *w, struct ranks *ranks, const struct plan *plan);
int world_close(struct world *w);
/* Wait until a signal has a value; progress is the only thing that is called meanwhile. */
int wait_signal(struct world *w, uint32_t index, uint64_t value);
/* The body in each rank; skips the test where there is no device. */
int run(int (*body)(struct ranks *, void *), struct plan plan);

#endif
