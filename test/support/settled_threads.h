/* SPDX-License-Identifier: Apache-2.0 */
/* If a process forks while other threads start or allocate, locks of AddressSanitizer's allocator stay locked in the
 * child for ever. gcc 12's does not handle a fork, as the C library does for its own locks. */
#ifndef TEST_SUPPORT_SETTLED_THREADS_H
#define TEST_SUPPORT_SETTLED_THREADS_H

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Are all threads but this one asleep? */
static inline bool other_threads_sleep(void)
{
    DIR *tasks = opendir("/proc/self/task");
    bool asleep = tasks != NULL;

    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        char file[300], line[64], state = 'S';
        FILE *status;

        if (task->d_name[0] == '.' || atoi(task->d_name) == gettid())
            continue;
        snprintf(file, sizeof(file), "/proc/self/task/%s/status", task->d_name);
        status = fopen(file, "r");
        while (status && fgets(line, sizeof(line), status))
            sscanf(line, "State: %c", &state);
        if (status)
            fclose(status);
        asleep &= state == 'S';
    }
    if (tasks)
        closedir(tasks);
    return asleep;
}

/* Wait until all other threads, which have nothing to do, sleep. Return false if they do not within a minute. */
static inline bool other_threads_settle(void)
{
    time_t give_up = time(NULL) + 60;

    while (!other_threads_sleep()) {
        if (time(NULL) >= give_up)
            return false;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return true; /* not looked at again: a thread of the plugin wakes now and then */
}

#endif
