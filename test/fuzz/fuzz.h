/* SPDX-License-Identifier: Apache-2.0 */
/* What a fuzz target offers. Each target is one file; loop.c (our own seeded loop) and libFuzzer call the same entry
 * function. */
#ifndef TEST_FUZZ_H
#define TEST_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Handle one hostile input. Return 0; a broken promise ends the process. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Write the n-th valid input, from which hostile ones are derived. Return its length, at most room; 0: there are no
 * more. They are made by code, since they change with the wire format; texts are files in corpus/. */
size_t fuzz_seed(uint32_t n, uint8_t *out, size_t room);

/* Inputs, or parts of them, that were taken for valid. A target that takes none tests nothing. */
extern uint64_t fuzz_accepted;

#define fuzz_require(condition, ...)                                                                                   \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Reads an input from its beginning; after its end come zeros. */
struct fuzz_reader {
    const uint8_t *data;
    size_t left;
};

static inline void fuzz_take(struct fuzz_reader *in, void *out, size_t bytes)
{
    size_t n = bytes < in->left ? bytes : in->left;

    memset(out, 0, bytes);
    if (n)
        memcpy(out, in->data, n);
    in->data += n;
    in->left -= n;
}

static inline uint32_t fuzz_u32(struct fuzz_reader *in)
{
    uint32_t v;

    fuzz_take(in, &v, sizeof(v));
    return v;
}

#endif
