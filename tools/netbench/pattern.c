/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/pattern.h"

#include <string.h>

static uint64_t hash(uint64_t x)
{
    x = (x ^ x >> 31) * 0x7fb5d329728ea185u;
    x = (x ^ x >> 27) * 0x81dadef4bc2dd44du;
    return x ^ x >> 33;
}

/* Eight products of one byte each, modulo 256. */
static uint64_t times_bytes(uint64_t bytes, uint8_t factor)
{
    const uint64_t even = 0x00ff00ff00ff00ffu;

    return ((bytes & even) * factor & even) | (((bytes >> 8 & even) * factor & even) << 8);
}

static uint64_t add_bytes(uint64_t a, uint64_t b)
{
    const uint64_t low = 0x7f7f7f7f7f7f7f7fu;

    return ((a & low) + (b & low)) ^ ((a ^ b) & ~low);
}

struct pattern pattern_of_rank(uint64_t iteration, int rank)
{
    return (struct pattern){.iteration = iteration, .base = 1, .step = (uint8_t)rank};
}

struct pattern pattern_of_sum(uint64_t iteration, int ranks)
{
    return (struct pattern){.iteration = iteration, .base = (uint8_t)ranks, .step = (uint8_t)(ranks * (ranks - 1) / 2)};
}

/* Bytes 8 * word to 8 * word + 7, the first in the lowest bits. */
static uint64_t pattern_word(struct pattern pattern, size_t word)
{
    uint64_t seed = hash(word + (pattern.iteration << 40) + 1);

    return add_bytes(times_bytes(seed, pattern.base), times_bytes(hash(seed), pattern.step));
}

static uint8_t pattern_byte(const struct pattern *pattern, size_t at)
{
    return (uint8_t)(pattern_word(*pattern, at / 8) >> at % 8 * 8);
}

/* Buffers are read and written a block at a time: under a sanitizer each access is a call. */
enum { BLOCK = 64 };

/* Fills a block with the words from byte `from` on, as many as `len` bytes have; returns their bytes. */
static size_t pattern_block(struct pattern pattern, size_t from, size_t len, uint64_t block[BLOCK])
{
    size_t words = len / 8 < BLOCK ? len / 8 : BLOCK;

    for (size_t w = 0; w < words; w++)
        block[w] = pattern_word(pattern, from / 8 + w);
    return words * 8;
}

void pattern_fill(const struct pattern *pattern, uint8_t *data, size_t from, size_t len)
{
    uint64_t block[BLOCK];
    size_t i = 0, bytes;

    for (; i < len && (from + i) % 8; i++)
        data[i] = pattern_byte(pattern, from + i);
    for (; i + 8 <= len; i += bytes) {
        bytes = pattern_block(*pattern, from + i, len - i, block);
        memcpy(data + i, block, bytes);
    }
    for (; i < len; i++)
        data[i] = pattern_byte(pattern, from + i);
}

static size_t count_byte(const struct pattern *pattern, const uint8_t *data, size_t from, size_t i, size_t wrong,
                         size_t *first)
{
    if (data[i] == pattern_byte(pattern, from + i))
        return 0;
    if (!wrong)
        *first = i;
    return 1;
}

size_t pattern_differs(const struct pattern *pattern, const uint8_t *data, size_t from, size_t len, size_t *first)
{
    uint64_t block[BLOCK];
    size_t i = 0, wrong = 0, bytes;

    for (; i < len && (from + i) % 8; i++)
        wrong += count_byte(pattern, data, from, i, wrong, first);
    for (; i + 8 <= len; i += bytes) {
        bytes = pattern_block(*pattern, from + i, len - i, block);
        if (memcmp(data + i, block, bytes) == 0)
            continue;
        for (size_t j = i; j < i + bytes; j++)
            wrong += count_byte(pattern, data, from, j, wrong, first);
    }
    for (; i < len; i++)
        wrong += count_byte(pattern, data, from, i, wrong, first);
    return wrong;
}

void pattern_poison(uint8_t *data, size_t len)
{
    memset(data, 0xdb, len);
}

void pattern_add(uint8_t *to, const uint8_t *from, size_t len)
{
    uint64_t a[BLOCK], b[BLOCK];
    size_t i = 0, bytes;

    for (; i + 8 <= len; i += bytes) {
        bytes = len - i < sizeof(a) ? (len - i) / 8 * 8 : sizeof(a);
        memcpy(a, to + i, bytes);
        memcpy(b, from + i, bytes);
        for (size_t w = 0; w < bytes / 8; w++)
            a[w] = add_bytes(a[w], b[w]);
        memcpy(to + i, a, bytes);
    }
    for (; i < len; i++)
        to[i] = (uint8_t)(to[i] + from[i]);
}
