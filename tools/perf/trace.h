/* SPDX-License-Identifier: Apache-2.0 */
/* The commands of one iteration as a file that `perseus-sim trace` plays (doc/simulator.md has the format). */
#ifndef TOOLS_PERF_TRACE_H
#define TOOLS_PERF_TRACE_H

#include <stdint.h>

struct trace;

/* Return 0, or -errno with a line on stderr. A rank that writes no trace passes NULL to the functions below, which then
 * do nothing. */
int trace_open(const char *path, struct trace **out);
/* Forget what was recorded: an iteration begins. */
void trace_restart(struct trace *trace);
void trace_put(struct trace *trace, uint32_t peer, uint64_t bytes, uint32_t group);
void trace_signal(struct trace *trace, uint32_t peer, uint32_t group);
/* Write the file. Return 0, or -errno with a line on stderr. */
int trace_close(struct trace *trace, uint32_t rank, const char *what);

#endif
