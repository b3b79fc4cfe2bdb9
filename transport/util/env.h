/* SPDX-License-Identifier: Apache-2.0 */
/* Typed environment variables. An unset or empty variable gives the default; an impossible value gives -EINVAL with a
 * text that names the variable, its value and what is allowed. */
#ifndef UTIL_ENV_H
#define UTIL_ENV_H

int prs_env_int(const char *name, long fallback, long min, long max, long *out);

/* One of words[] (NULL-terminated, compared without case); *out is its index. */
int prs_env_word(const char *name, int fallback, const char *const words[], int *out);

/* NULL when unset or empty. */
const char *prs_env_text(const char *name);

#endif
