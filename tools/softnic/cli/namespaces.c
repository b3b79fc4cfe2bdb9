/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cli/namespaces.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/softnic/world/proc.h"

enum { READY_MS = 10000, NAP_US = 2000 };

static int open_proc(uint32_t pid, const char *name)
{
    char path[64];
    int fd;

    snprintf(path, sizeof(path), "/proc/%u/%s", pid, name);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

static bool is_ours(int fd, const char *path)
{
    struct stat its, ours;

    return fstat(fd, &its) == 0 && stat(path, &ours) == 0 && its.st_ino == ours.st_ino;
}

/* The process may not have begun its command yet; until then its namespaces cannot be opened (EACCES). A world without
 * a launcher has only processes that never left their namespaces. */
static int wait_command(const struct sn_world *world, uint32_t *pid)
{
    uint64_t until = sn_now_ns() + READY_MS * 1000000ull;
    int fd;

    for (;;) {
        *pid = world->ephemeral ? world->creator_pid : __atomic_load_n(&world->command_pid, __ATOMIC_ACQUIRE);
        fd = *pid ? open_proc(*pid, "ns/user") : -ETIMEDOUT;
        if (fd >= 0)
            return fd;
        if (*pid ? !sn_pid_runs(*pid) : !sn_creator_lives(world))
            return -ESRCH;
        if (sn_now_ns() > until)
            return fd;
        usleep(NAP_US);
    }
}

/* A mount namespace brings its own root and working folder. */
static int enter_mounts(int mounts, int root)
{
    char folder[PATH_MAX];

    if (!getcwd(folder, sizeof(folder)) || setns(mounts, CLONE_NEWNS))
        return -errno;
    if (fchdir(root) || chroot(".") || chdir(folder))
        return -errno;
    return 0;
}

int sn_namespaces_enter(const struct sn_world *world, bool mounts, uint32_t *pid)
{
    int user = wait_command(world, pid), mount = -1, root = -1, r = 0;

    if (user < 0)
        return user;
    if (is_ours(user, "/proc/self/ns/user"))
        goto close_user;
    mount = open_proc(*pid, "ns/mnt");
    root = open_proc(*pid, "root");
    r = mount < 0 ? mount : root < 0 ? root : setns(user, CLONE_NEWUSER) ? -errno : 0;
    if (!r && mounts)
        r = enter_mounts(mount, root);
    if (!r)
        r = 1;
    if (root >= 0)
        close(root);
    if (mount >= 0)
        close(mount);
close_user:
    close(user);
    return r;
}
