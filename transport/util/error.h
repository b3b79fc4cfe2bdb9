/* SPDX-License-Identifier: Apache-2.0 */
/* Errors. The function that detects an error calls prs_fail(), which keeps the text for this thread, logs it once and
 * returns the code. All callers forward the code unchanged and log nothing. */
#ifndef UTIL_ERROR_H
#define UTIL_ERROR_H

#include <stddef.h>
#include <stdint.h>

/* clang-format off */
/* return prs_fail(-ENOMEM, "what failed, object, value: likely cause"); */
#define prs_fail(code, ...) prs_error_raise(__FILE__, __LINE__, code, __VA_ARGS__)
/* clang-format on */

int prs_error_raise(const char *file, int line, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5), cold));

/* Keep a text without logging it: for an error that was logged before and is now returned again. */
int prs_error_repeat(int code, const char *text);

/* For a caller that continues after an error and returns the first error: later errors replace this thread's text. */
struct prs_first_error {
    int code; /* 0: none; the caller sets it to 0 */
    char text[512];
};

void prs_error_keep_text(struct prs_first_error *first, int code) __attribute__((cold));

/* r: what a call on this thread has just returned; below 0 it is an error */
static inline void prs_error_keep(struct prs_first_error *first, int r)
{
    if (r < 0 && !first->code)
        prs_error_keep_text(first, r);
}

/* Return 0, or the first error, whose text becomes this thread's text again. */
static inline int prs_error_kept(const struct prs_first_error *first)
{
    return first->code ? prs_error_repeat(first->code, first->text) : 0;
}

/* -EINVAL when the caller set a reserved word: a field that only a newer version has. `what` names the structure. */
int prs_error_reserved(const uint64_t *words, size_t count, const char *what);
#define prs_check_reserved(options, what)                                                                              \
    prs_error_reserved((options)->reserved, sizeof((options)->reserved) / sizeof(uint64_t), what)

/* The text of this thread's last failure; "" if none. */
const char *prs_error_last(void);

#endif
