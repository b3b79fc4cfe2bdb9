/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/util/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <unistd.h>

#include "transport/util/fork.h"

struct sink {
    prs_log_sink_fn *fn;
    void *user;
};

static pthread_mutex_t sink_lock = PTHREAD_MUTEX_INITIALIZER; /* protects sink */
static struct sink sink;
PRS_RENEW_IN_CHILD(sink, sink_lock)
static int stderr_level = -2; /* highest level written to stderr; -1: none; -2: PERSEUS_LOG is not read yet */

static const char *const level_names[] = {"error", "warn", "info", "debug"};

static struct sink sink_now(void)
{
    struct sink now;

    pthread_mutex_lock(&sink_lock);
    now = sink;
    pthread_mutex_unlock(&sink_lock);
    return now;
}

static int level_from_environment(void)
{
    int level = __atomic_load_n(&stderr_level, __ATOMIC_RELAXED); /* two threads may both set it, to the same value */
    const char *name;

    if (level != -2)
        return level;
    level = -1;
    name = getenv("PERSEUS_LOG");
    for (int i = 0; name && i < 4; i++)
        if (!strcasecmp(name, level_names[i]))
            level = i;
    __atomic_store_n(&stderr_level, level, __ATOMIC_RELAXED);
    return level;
}

void prs_log_sink(prs_log_sink_fn *fn, void *user)
{
    pthread_mutex_lock(&sink_lock);
    sink = (struct sink){fn, user};
    pthread_mutex_unlock(&sink_lock);
}

int prs_log_wanted(int level)
{
    return sink_now().fn || level <= level_from_environment();
}

void prs_log_line(int level, const char *file, int line, const char *format, ...)
{
    struct sink now = sink_now();
    char text[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (now.fn)
        now.fn(now.user, level, file, line, text); /* without the lock: the sink may log or set another sink */
    else if (level <= level_from_environment())
        fprintf(stderr, "perseus[%d] %s %s:%d: %s\n", (int)getpid(), level_names[level], file, line, text);
}
