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
static uint64_t pattern_word(const struct pattern *pattern, size_t word)
{
    uint64_t seed = hash(word + (pattern->iteration << 40) + 1);

    return add_bytes(times_bytes(seed, pattern->base), times_bytes(hash(seed), pattern->step));
}

static uint8_t pattern_byte(const struct pattern *pattern, size_t at)
{
    return (uint8_t)(pattern_word(pattern, at / 8) >> at % 8 * 8);
}

void pattern_fill(const struct pattern *pattern, uint8_t *data, size_t from, size_t len)
{
    size_t i = 0;

    for (; i < len && (from + i) % 8; i++)
        data[i] = pattern_byte(pattern, from + i);
    for (; i + 8 <= len; i += 8) {
        uint64_t word = pattern_word(pattern, (from + i) / 8);

        memcpy(data + i, &word, 8);
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
    size_t i = 0, wrong = 0;

    for (; i < len && (from + i) % 8; i++)
        wrong += count_byte(pattern, data, from, i, wrong, first);
    for (; i + 8 <= len; i += 8) {
        uint64_t word;

        memcpy(&word, data + i, 8);
        if (word == pattern_word(pattern, (from + i) / 8))
            continue;
        for (size_t j = i; j < i + 8; j++)
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
    size_t i = 0;

    for (; i + 8 <= len; i += 8) {
        uint64_t a, b;

        memcpy(&a, to + i, 8);
        memcpy(&b, from + i, 8);
        a = add_bytes(a, b);
        memcpy(to + i, &a, 8);
    }
    for (; i < len; i++)
        to[i] = (uint8_t)(to[i] + from[i]);
}
