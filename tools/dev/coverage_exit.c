/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded by tools/dev/coverage: _exit() writes the counters, as exit() does. Ranks end by _exit(). */
#include <sys/syscall.h>
#include <unistd.h>

enum { LIBRARIES = 64 };

static void (*dumps[LIBRARIES])(void);
static int count;

void coverage_counters(void (*dump)(void));

void coverage_counters(void (*dump)(void))
{
    int i = __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);

    if (i < LIBRARIES)
        dumps[i] = dump;
}

void _exit(int status)
{
    for (int i = 0; i < count && i < LIBRARIES; i++)
        dumps[i]();
    for (;;)
        syscall(SYS_exit_group, status);
}
