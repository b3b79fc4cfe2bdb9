/* SPDX-License-Identifier: Apache-2.0 */
/* Errors. The function that detects an error calls prs_fail(), which keeps the text for this thread, logs it once and
 * returns the code. All callers forward the code unchanged and log nothing. */
#ifndef UTIL_ERROR_H
#define UTIL_ERROR_H

/* clang-format off */
/* return prs_fail(-ENOMEM, "what failed, object, value: likely cause"); */
#define prs_fail(code, ...) prs_error_raise(__FILE__, __LINE__, code, __VA_ARGS__)
/* clang-format on */

int prs_error_raise(const char *file, int line, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5), cold));

/* Keep a text without logging it: for an error that was logged before and is now returned again. */
int prs_error_repeat(int code, const char *text);

/* The text of this thread's last failure; "" if none. */
const char *prs_error_last(void);

#endif
