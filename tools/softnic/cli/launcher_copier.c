/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cli/launcher_copier.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/softnic/world/world.h"

enum { START_MS = 10000 };

/* Runs in the child. It loads the same library as the command, with a CUDA driver of its own. */
static _Noreturn void run_copier(const char *libdir, pid_t parent, int ready_fd)
{
    char path[PATH_MAX + 32];
    int (*copier)(int) = NULL;
    void *library, *symbol;
    int null = open("/dev/null", O_RDWR);

    /* Die by SIGKILL, even when the launcher is killed: there is nothing to save, and work given to a GPU may never
     * end. A process group of its own keeps the terminal's signals away. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    setpgid(0, 0);
    if (null >= 0) {
        dup2(null, STDIN_FILENO);
        dup2(null, STDOUT_FILENO);
    }
    unsetenv(SN_NODE_ENV); /* it serves all nodes */
    snprintf(path, sizeof(path), "%s/libibverbs.so.1", libdir);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    symbol = library ? dlsym(library, "softnic_copier") : NULL;
    if (!symbol) {
        fprintf(stderr, "softnic-run: the copier: %s\n", dlerror());
        _exit(1);
    }
    memcpy(&copier, &symbol, sizeof(copier));
    copier(ready_fd);
    _exit(1);
}

/* Return 0 or -errno. */
static int wait_ready(int fd)
{
    struct pollfd poller = {.fd = fd, .events = POLLIN};
    char ready;
    int n;

    while ((n = poll(&poller, 1, START_MS)) < 0 && errno == EINTR)
        ;
    if (n == 0)
        fprintf(stderr, "softnic-run: the copier is not ready after %d s\n", START_MS / 1000);
    if (n == 0)
        return -ETIMEDOUT;
    if (n > 0 && read(fd, &ready, 1) == 1)
        return 0;
    fprintf(stderr, "softnic-run: the copier has ended before it was ready\n"); /* it has logged the reason */
    return -ECHILD;
}

pid_t sn_launcher_copier_start(const char *libdir, int (*prepare)(const void *arg), const void *arg)
{
    pid_t parent = getpid(), pid;
    int pipe_fds[2], r;

    if (pipe2(pipe_fds, O_CLOEXEC) < 0) {
        r = -errno;
        fprintf(stderr, "softnic-run: the copier: pipe: %s\n", strerror(-r));
        return r;
    }
    fflush(NULL);
    pid = fork();
    if (pid < 0) {
        r = -errno;
        fprintf(stderr, "softnic-run: the copier: fork: %s\n", strerror(-r));
        goto close_pipe;
    }
    if (!pid) {
        close(pipe_fds[0]);
        if (prepare(arg)) {
            perror("softnic-run: the copier: environment");
            _exit(1);
        }
        run_copier(libdir, parent, pipe_fds[1]);
    }
    close(pipe_fds[1]);
    pipe_fds[1] = -1;
    r = wait_ready(pipe_fds[0]);
    if (r)
        sn_launcher_copier_stop(pid);
close_pipe:
    close(pipe_fds[0]);
    if (pipe_fds[1] >= 0)
        close(pipe_fds[1]);
    return r ? r : pid;
}

void sn_launcher_copier_stop(pid_t pid)
{
    int status;

    if (pid <= 0)
        return;
    kill(pid, SIGKILL);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
}
