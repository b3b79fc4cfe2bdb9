/* SPDX-License-Identifier: Apache-2.0 */
/* The log. Silent unless a sink is set or PERSEUS_LOG names a level (error, warn, info, debug). */
#ifndef UTIL_LOG_H
#define UTIL_LOG_H

/* Same values as enum prs_log_level of perseus.h, which this layer does not know. */
enum { PRS_LEVEL_ERROR = 0, PRS_LEVEL_WARN, PRS_LEVEL_INFO, PRS_LEVEL_DEBUG };

typedef void prs_log_sink_fn(void *user, int level, const char *file, int line, const char *text);

/* Set the sink of this process. NULL: stderr, by PERSEUS_LOG. A concurrent line may still reach the former sink. */
void prs_log_sink(prs_log_sink_fn *fn, void *user);

/* Is a line of this level written anywhere? For callers that must build it first. */
int prs_log_wanted(int level);

void prs_log_line(int level, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));

/* clang-format off */
#define PRS_LOG(level, ...) (prs_log_wanted(level) ? prs_log_line(level, __FILE__, __LINE__, __VA_ARGS__) : (void)0)
#define PRS_ERROR(...)      PRS_LOG(PRS_LEVEL_ERROR, __VA_ARGS__)
#define PRS_WARN(...)       PRS_LOG(PRS_LEVEL_WARN, __VA_ARGS__)
#define PRS_INFO(...)       PRS_LOG(PRS_LEVEL_INFO, __VA_ARGS__)
#define PRS_DEBUG(...)      PRS_LOG(PRS_LEVEL_DEBUG, __VA_ARGS__)
/* clang-format on */

#endif
