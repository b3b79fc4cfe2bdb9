/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the driver without a GPU share: results, the ranges of addresses it knows, failures on demand. */
#ifndef TEST_SOFTNIC_FAKE_CUDA_STATE_H
#define TEST_SOFTNIC_FAKE_CUDA_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "test/softnic/fake_cuda/driver.h"

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_CONTEXT = 201,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    DEVICES = 2,
    GRANULARITY = 2 << 20,
    PAGE = 4096,
};

enum range_kind { FREE, LEGACY, RESERVED, MAPPED, PINNED, REGISTERED, IPC };

struct object;

/* A range of addresses. */
struct range {
    enum range_kind kind;
    uint64_t va, bytes;
    uint8_t *shadow; /* how the driver reaches it */
    int fd;          /* LEGACY: the memfd */
    int dev;
    bool accessible; /* MAPPED: cuMemSetAccess was called; REGISTERED: for the device, too */
    uint64_t id;
    struct object *object; /* MAPPED */
};

extern pthread_mutex_t fake_mutex; /* protects ranges, objects and counters */

/* The table of ranges; the caller has the mutex. */
struct range *fake_find(uint64_t va); /* one that holds memory, NULL: none */
struct range *fake_find_reserved(uint64_t va);
/* NULL: the table is full. */
struct range *fake_fresh(enum range_kind kind, uint64_t va, uint64_t bytes);
bool fake_any_mapped(uint64_t va, uint64_t bytes);
/* The next range of that kind at or behind index *at, which moves behind it; NULL: none. */
struct range *fake_next(enum range_kind kind, int *at);
/* A call gave back what was not there, or twice. Return its result. */
int fake_refuse_locked(int result);

/* The driver's view of n bytes at an address that a copy engine can reach, or NULL. Ranges that follow each other may
 * lie apart: n shrinks to the end of the first. */
uint8_t *fake_view(uint64_t va, size_t *n);

uint8_t *fake_map_shared(int fd, uint64_t bytes); /* NULL on failure */
uint64_t fake_reserve(uint64_t bytes);            /* addresses where nothing is accessible; 0 on failure */

/* Of a range that is MAPPED; the caller has the mutex. */
bool fake_object_rdma(const struct object *object); /* it may leave the device by DMA-BUF */

/* What the next call of that name has to return, once; OK: go on. */
int fake_failure(const char *call);

bool fake_started(void); /* cuInit was called */
int fake_current(void);  /* device of this thread's context; -1: it has none */

#endif
