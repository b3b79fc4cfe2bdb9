/* SPDX-License-Identifier: Apache-2.0 */
/* Typed environment variables. An unset or empty variable gives the default. An invalid value gives -EINVAL, with a
 * text that names the variable, its value and the allowed values. */
#ifndef UTIL_ENV_H
#define UTIL_ENV_H

int prs_env_int(const char *name, long fallback, long min, long max, long *out);

/* The value must be one of words[] (NULL-terminated, case-insensitive); *out is its index. */
int prs_env_word(const char *name, int fallback, const char *const words[], int *out);

/* For NCCL's variables. A job that NCCL's own transport would run must not lose its network by a bad value: take the
 * nearest allowed value, or the default if it is no number, and warn. */
int prs_env_clamp(const char *name, long fallback, long min, long max);

/* NULL when unset or empty. */
const char *prs_env_text(const char *name);

#endif
