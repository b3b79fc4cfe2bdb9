/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/util/fork.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BITS = 64, FEWEST = 16 /* words of the table, at first */ };

/* The lock is held while a descriptor is made or closed, so no fork happens in between. */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t *table; /* a bit for each descriptor */
static int words;

/* Return false: no memory. */
static bool has_room(int fd)
{
    int wanted = words ? words : FEWEST;
    uint64_t *larger;

    while (fd / BITS >= wanted)
        wanted *= 2;
    if (wanted == words)
        return true;
    larger = realloc(table, (size_t)wanted * sizeof(*table));
    if (!larger)
        return false;
    memset(larger + words, 0, (size_t)(wanted - words) * sizeof(*table));
    table = larger;
    words = wanted;
    return true;
}

void prs_fork_begin(void)
{
    pthread_mutex_lock(&table_lock);
}

int prs_fork_end(int fd)
{
    int error = errno;

    if (fd >= 0 && !has_room(fd)) {
        close(fd);
        fd = -1;
        error = ENOMEM;
    }
    if (fd >= 0)
        table[fd / BITS] |= 1ull << fd % BITS;
    pthread_mutex_unlock(&table_lock);
    errno = error;
    return fd;
}

void prs_fork_close(int fd)
{
    pthread_mutex_lock(&table_lock);
    if (fd >= 0 && fd / BITS < words && table[fd / BITS] >> fd % BITS & 1) {
        table[fd / BITS] &= ~(1ull << fd % BITS);
        close(fd);
    }
    pthread_mutex_unlock(&table_lock);
}

/* ---- forks ---- */

static void unlock_table(void)
{
    pthread_mutex_unlock(&table_lock);
}

/* Use close(), never shutdown(), because the connections belong to the parent. */
static void close_in_child(void)
{
    for (int i = 0; i < words; i++) {
        for (; table[i]; table[i] &= table[i] - 1)
            close(i * BITS + __builtin_ctzll(table[i]));
    }
    unlock_table(); /* this thread locked it before the fork */
}

static __attribute__((constructor)) void watch_forks(void)
{
    pthread_atfork(prs_fork_begin, unlock_table, close_in_child);
}
