/* SPDX-License-Identifier: Apache-2.0 */
/* Quantities on the command line. Parsing is strict, because a misread rate or latency makes every figure after it
 * wrong. */
#ifndef SOFTNIC_QUANTITY_H
#define SOFTNIC_QUANTITY_H

#include <stdint.h>

/* Bits per second: "400G", "12.5G", "10Gbps"; K, M, G, T are powers of ten. "off" and "0" give 0 (unlimited).
 *  Return 0 or -EINVAL; -ERANGE when the number does not fit. */
int sn_quantity_rate(const char *text, uint64_t *bits_per_s);

/* Nanoseconds: "2us", "1.5ms", "50ns", "1s"; a bare "0" and "off" give 0, any other bare number is refused.
 *  Return as above. */
int sn_quantity_duration(const char *text, uint64_t *ns);

/* A fraction in parts per billion: "0.001", "0.1%", "1", "off". Return as above; -ERANGE when above 1. */
int sn_quantity_fraction(const char *text, uint64_t *parts_per_billion);

/* A whole number in [least, most]. Return as above. */
int sn_quantity_count(const char *text, uint64_t least, uint64_t most, uint64_t *count);

#endif
