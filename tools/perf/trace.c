/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/perf/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/perf/bench.h"

enum { ROOM = 1024 /* commands: two for each of the most transfers that may be in flight */ };

struct trace {
    FILE *file;
    const char *path;
    double began_us;
    uint32_t count;
    struct command {
        double us;
        uint64_t bytes; /* 0: a signal */
        uint32_t peer, group;
    } command[ROOM];
};

int trace_open(const char *path, struct trace **out)
{
    struct trace *trace = calloc(1, sizeof(*trace));
    int r = 0;

    *out = trace;
    if (!trace)
        return -ENOMEM;
    trace->path = path;
    trace->file = fopen(path, "w");
    if (trace->file)
        return 0;
    r = -errno;
    fprintf(stderr, "perseus-perf: cannot write the trace '%s': %s\n", path, strerror(errno));
    free(trace);
    *out = NULL;
    return r;
}

void trace_restart(struct trace *trace)
{
    if (!trace)
        return;
    trace->count = 0;
    trace->began_us = bench_now_us();
}

static void add(struct trace *trace, uint32_t peer, uint64_t bytes, uint32_t group)
{
    if (trace && trace->count < ROOM)
        trace->command[trace->count++] = (struct command){bench_now_us() - trace->began_us, bytes, peer, group};
}

void trace_put(struct trace *trace, uint32_t peer, uint64_t bytes, uint32_t group)
{
    add(trace, peer, bytes, group);
}

void trace_signal(struct trace *trace, uint32_t peer, uint32_t group)
{
    add(trace, peer, 0, group);
}

int trace_close(struct trace *trace, uint32_t rank, const char *what)
{
    int r = 0;

    if (!trace)
        return 0;
    fprintf(trace->file, "# %s\n", what);
    for (uint32_t i = 0; i < trace->count; i++) {
        const struct command *is = &trace->command[i];

        if (is->bytes)
            fprintf(trace->file, "%.3f %u put %u %" PRIu64 " %u\n", is->us, rank, is->peer, is->bytes, is->group);
        else
            fprintf(trace->file, "%.3f %u signal %u %u\n", is->us, rank, is->peer, is->group);
    }
    if (fclose(trace->file)) {
        r = -errno;
        fprintf(stderr, "perseus-perf: cannot write the trace '%s': %s\n", trace->path, strerror(errno));
    }
    free(trace);
    return r;
}
