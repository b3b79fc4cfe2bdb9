/* SPDX-License-Identifier: Apache-2.0 */
/* Test data that shows where it is from. Byte i of rank r's input in iteration t is a hash of (t, i) plus r times
 * another such hash, modulo 256. So the sum over all ranks has a formula, and a byte from a wrong offset, rank or
 * iteration is found. */
#ifndef NETBENCH_PATTERN_H
#define NETBENCH_PATTERN_H

#include <stddef.h>
#include <stdint.h>

/* Multipliers of the two hashes: {1, r} is rank r's input, {n, n(n-1)/2} the sum over n ranks. */
struct pattern {
    uint64_t iteration;
    uint8_t base, step;
};

struct pattern pattern_of_rank(uint64_t iteration, int rank);
struct pattern pattern_of_sum(uint64_t iteration, int ranks);

/* Write bytes [from, from + len) of the pattern to data. */
void pattern_fill(const struct pattern *pattern, uint8_t *data, size_t from, size_t len);
/* How many bytes differ; *first is the index in data of the first. */
size_t pattern_differs(const struct pattern *pattern, const uint8_t *data, size_t from, size_t len, size_t *first);
/* Fill with a byte that a pattern is unlikely to have, so that a byte that nobody wrote is found. */
void pattern_poison(uint8_t *data, size_t len);
/* to[i] += from[i] */
void pattern_add(uint8_t *to, const uint8_t *from, size_t len);

#endif
