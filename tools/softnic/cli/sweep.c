/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cli/sweep.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "tools/softnic/world/proc.h"

static const char prefix[] = "softnic.";

void sn_sweep_path(const char *name, char *path, size_t bytes)
{
    if (strchr(name, '/'))
        snprintf(path, bytes, "%s", name);
    else
        snprintf(path, bytes, "%s/%s%s", SN_WORLD_DIR, prefix, name);
}

unsigned sn_sweep_members(struct sn_world *world)
{
    unsigned live = 0;
    sn_proc_sweep(world);
    for (int i = 0; i < SN_MAX_PROCS; i++)
        live += __atomic_load_n(&world->procs[i].state, __ATOMIC_RELAXED) == SN_PROC_LIVE;
    return live;
}

void sn_sweep_each(void (*visit)(const char *path, struct sn_world *world, void *arg), void *arg)
{
    DIR *dir = opendir(SN_WORLD_DIR);
    if (!dir)
        return;
    for (struct dirent *e; (e = readdir(dir));) {
        char path[PATH_MAX];
        struct sn_world *world;
        if (strncmp(e->d_name, prefix, sizeof(prefix) - 1))
            continue;
        snprintf(path, sizeof(path), "%s/%s", SN_WORLD_DIR, e->d_name);
        if (sn_world_open(path, &world)) /* another version's, another user's or another container's */
            continue;
        visit(path, world, arg);
        sn_world_close(world);
    }
    closedir(dir);
}

static void remove_abandoned(const char *path, struct sn_world *world, void *arg)
{
    unsigned *count = arg;
    *count += sn_world_remove(world, path, false);
}

unsigned sn_sweep_all(void)
{
    unsigned count = 0;
    sn_sweep_each(remove_abandoned, &count);
    return count;
}
