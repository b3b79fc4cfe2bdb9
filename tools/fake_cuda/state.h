/* SPDX-License-Identifier: Apache-2.0 */
/* State that the parts of the fake driver use together: results, known ranges of addresses, failures on demand. */
#ifndef TEST_SOFTNIC_FAKE_CUDA_STATE_H
#define TEST_SOFTNIC_FAKE_CUDA_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/fake_cuda/driver.h"

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
};

enum range_kind { FREE, LEGACY, RESERVED, MAPPED, PINNED, REGISTERED, IPC };

struct object;

struct range {
    enum range_kind kind;
    uint64_t va, bytes;
    uint8_t *shadow; /* the driver's own mapping */
    int fd;          /* LEGACY: the memfd */
    int dev;
    unsigned access; /* MAPPED: devices that cuMemSetAccess named, as bits; IPC: the one that opened it */
    bool accessible; /* MAPPED: cuMemSetAccess was called; REGISTERED: for the device, too */
    uint64_t id;
    struct object *object; /* MAPPED */
};

extern pthread_mutex_t fake_mutex; /* protects ranges, objects and counters */

/* The table of ranges; the caller has the mutex. */
struct range *fake_find(uint64_t va); /* the range that holds memory there; NULL: none */
struct range *fake_find_reserved(uint64_t va);
/* NULL: the table is full. */
struct range *fake_fresh(enum range_kind kind, uint64_t va, uint64_t bytes);
bool fake_any_mapped(uint64_t va, uint64_t bytes);
/* The next range of that kind at or after index *at, which moves past it; NULL: none. */
struct range *fake_next(enum range_kind kind, int *at);
/* Count a call that freed something unknown or already freed. Return its result. */
int fake_refuse_locked(int result);

/* The driver's mapping of n bytes at an address that a copy engine can reach, or NULL. Adjacent ranges may be mapped
 * apart: n shrinks to the end of the first one. */
uint8_t *fake_view(uint64_t va, size_t *n);
/* May that device use the memory, and does a copy between two pieces of device memory find both mapped for that device?
 * Memory of cuMemAlloc needs no mapping, and neither does a copy to or from the host. */
bool fake_has_access(const struct range *r, int dev);
bool fake_reaches(int dev, uint64_t a, uint64_t b);
/* Is it device memory that a kernel of that device could use, with no access enabled between devices? */
bool fake_maps(int dev, uint64_t va);

uint8_t *fake_map_shared(int fd, uint64_t bytes); /* NULL on failure */
uint64_t fake_reserve(uint64_t bytes);            /* inaccessible addresses; 0 on failure */

/* For a range that is MAPPED; the caller has the mutex. */
bool fake_object_rdma(const struct object *object); /* it may be exported as a DMA-BUF */

/* The result that this call must return, which is used once; OK: the call may proceed. */
int fake_failure(const char *call);

bool fake_started(void); /* cuInit was called */
int fake_current(void);  /* device of this thread's context; -1: it has none */

#endif
