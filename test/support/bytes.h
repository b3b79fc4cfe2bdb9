/* SPDX-License-Identifier: Apache-2.0 */
/* Fills and compares memory by blocks: under a sanitizer each access to a byte is a call, and tests that touched single
 * bytes spent most of their time there. */
#ifndef TEST_SUPPORT_BYTES_H
#define TEST_SUPPORT_BYTES_H

#include <stdint.h>
#include <string.h>

enum { BYTES_BLOCK = 64 }; /* words */

/* The byte at a position of a stream. */
typedef uint8_t bytes_fn(uint32_t seed, size_t at);

static inline void bytes_make(uint64_t block[BYTES_BLOCK], size_t len, bytes_fn *byte, uint32_t seed, size_t at)
{
    for (size_t w = 0; w * 8 < len; w++) {
        uint64_t word = 0;
        for (uint32_t b = 0; b < 8; b++)
            word |= (uint64_t)byte(seed, at + w * 8 + b) << 8 * b; /* the host is little-endian */
        block[w] = word;
    }
}

static inline void bytes_fill(uint8_t *bytes, size_t len, bytes_fn *byte, uint32_t seed)
{
    uint64_t block[BYTES_BLOCK];
    for (size_t at = 0; at < len; at += sizeof(block)) {
        size_t n = len - at < sizeof(block) ? len - at : sizeof(block);
        bytes_make(block, n, byte, seed, at);
        memcpy(bytes + at, block, n);
    }
}

/* The position of the first byte that differs from the stream; len: none differs. */
static inline size_t bytes_differ(const uint8_t *bytes, size_t len, bytes_fn *byte, uint32_t seed)
{
    uint64_t block[BYTES_BLOCK];
    for (size_t at = 0; at < len; at += sizeof(block)) {
        size_t n = len - at < sizeof(block) ? len - at : sizeof(block);
        bytes_make(block, n, byte, seed, at);
        if (memcmp(bytes + at, block, n) == 0)
            continue;
        while (bytes[at] == byte(seed, at))
            at++;
        return at;
    }
    return len;
}

#endif
