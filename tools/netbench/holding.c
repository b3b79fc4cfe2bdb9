/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/netbench/holding.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MEMORY_KB = 1 << 30 /* a sanitizer keeps freed memory, and AddressSanitizer finds leaks itself */ };
#else
/* allocators keep some freed memory; a leak of 200 bytes a round exceeds this after 10000 rounds */
enum { MEMORY_KB = 2048 };
#endif

static int failed(const char *path)
{
    int r = errno ? -errno : -EINVAL;

    fprintf(stderr, "perseus-netbench: %s cannot be read: %s\n", path, strerror(-r));
    return r;
}

static int count_entries(const char *path, int *count)
{
    DIR *folder = opendir(path);

    if (!folder)
        return failed(path);
    *count = 0;
    for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder))
        *count += entry->d_name[0] != '.';
    closedir(folder);
    return 0;
}

static int read_memory(long *kb)
{
    static const char path[] = "/proc/self/status";
    FILE *file = fopen(path, "r");
    char line[256];
    bool found = false;

    if (!file)
        return failed(path);
    errno = 0;
    while (!found && fgets(line, sizeof(line), file))
        found = sscanf(line, "RssAnon: %ld", kb) == 1;
    fclose(file);
    return found ? 0 : failed(path);
}

int holding_read(struct holding *holding)
{
    int r = read_memory(&holding->memory_kb);

    if (!r)
        r = count_entries("/proc/self/fd", &holding->descriptors);
    return r ? r : count_entries("/proc/self/task", &holding->threads);
}

bool holding_has_grown(const struct holding *before, const struct holding *now, int rank)
{
    if (now->descriptors <= before->descriptors && now->threads <= before->threads &&
        now->memory_kb <= before->memory_kb + MEMORY_KB)
        return false;
    fprintf(stderr,
            "perseus-netbench: rank %d holds more than before: memory %ld KB, then %ld; descriptors %d, then %d; "
            "threads %d, then %d\n",
            rank, before->memory_kb, now->memory_kb, before->descriptors, now->descriptors, before->threads,
            now->threads);
    return true;
}
