/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Data that tells where it is from. Byte i of rank r's input in iteration t is a hash of (t, i) plus r times another
 * such hash, modulo 256: so that the sum over ranks is known without adding them up, and a byte from a wrong place,
 * rank or iteration shows.
 */
#ifndef NETBENCH_PATTERN_H
#define NETBENCH_PATTERN_H

#include <stddef.h>
#include <stdint.h>

/** Multipliers of the two hashes: {1, r} is rank r's input, {n, n(n-1)/2} the sum over n ranks. */
struct pattern {
    uint64_t iteration;
    uint8_t base, step;
};

struct pattern pattern_of_rank(uint64_t iteration, int rank);
struct pattern pattern_of_sum(uint64_t iteration, int ranks);

/** Write bytes [from, from + len) of the pattern to data. */
void pattern_fill(const struct pattern *pattern, uint8_t *data, size_t from, size_t len);
/** How many bytes differ; *first is the position in data of the first that does. */
size_t pattern_differs(const struct pattern *pattern, const uint8_t *data, size_t from, size_t len, size_t *first);
/** What no pattern is expected to hold, so that a byte nobody wrote shows. */
void pattern_poison(uint8_t *data, size_t len);
/** to[i] += from[i] */
void pattern_add(uint8_t *to, const uint8_t *from, size_t len);

#endif
