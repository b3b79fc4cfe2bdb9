/* SPDX-License-Identifier: Apache-2.0 */
/* JSON by a format string, like that of printf(). Usable from C and from C++. */
#ifndef TOOLS_COMMON_JSON_H
#define TOOLS_COMMON_JSON_H

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Print JSON, for example json_print(stdout, "{op:%s,bytes:%zu,usec:%.2f,checked:%hhd}\n", op, bytes, usec, checked).
 * Words of the format become strings, except true, false and null. Of the conversions:
 *   %s          a string, in quotes; any bytes: what JSON does not allow is escaped, and what is not UTF-8 is replaced
 *   %hhd        true or false
 *   %f %e %g    a number, null when it is not finite
 *   %d %u %lu %llu %zu    a number */
void json_print(FILE *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

#ifdef __cplusplus
}
#endif
#endif
