/* SPDX-License-Identifier: Apache-2.0 */
/* The file of counters in a folder that others may write to, and the thread that writes it. test_metrics.py reads what
 * is in it. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test/plugin/pair.h"

static char folder[] = "/tmp/perseus-metrics-XXXXXX";

static const char *in_folder(const char *format, int pid)
{
    static char path[256];
    int used = snprintf(path, sizeof(path), "%s/", folder);

    snprintf(path + used, sizeof(path) - (size_t)used, format, pid);
    return path;
}

/* The signals that the thread of this name blocks. */
static uint64_t blocked_by(const char *thread)
{
    DIR *tasks = opendir("/proc/self/task");
    unsigned long long blocked = 0;

    for (struct dirent *task; (task = readdir(tasks));) {
        char path[300], line[256], name[64] = "";
        FILE *status;

        snprintf(path, sizeof(path), "/proc/self/task/%s/status", task->d_name);
        status = fopen(path, "r");
        while (status && fgets(line, sizeof(line), status)) {
            sscanf(line, "Name: %63s", name);
            if (!strcmp(name, thread))
                sscanf(line, "SigBlk: %llx", &blocked);
        }
        if (status)
            fclose(status);
    }
    closedir(tasks);
    return blocked;
}

static void wait_for(const char *path)
{
    uint64_t give_up = prs_clock_ms() + PAIR_LIMIT_MS;
    struct stat status;

    while (lstat(path, &status) || !S_ISREG(status.st_mode)) {
        cr_assert_lt(prs_clock_ms(), give_up, "no %s", path);
        usleep(1000);
    }
}

/* In a process of its own, which exits as a job does. */
static void work(void)
{
    struct plugin plugin = plugin_open();
    struct pair pair = pair_open(&plugin, 0);
    const char *path = in_folder("perseus-%d.prom", getpid());

    wait_for(path);
    cr_assert(blocked_by("prs-metrics") >> (SIGTERM - 1) & 1, "a signal of the program's may end in the thread");
    pair_close(&plugin, &pair);
    wait_for(path); /* the last counts stay readable until the process ends */
    plugin_close(&plugin);
    exit(0);
}

Test(metrics, a_file_follows_no_link_and_is_gone_at_exit, .timeout = 300)
{
    static const char text[] = "precious";
    char victim[256], have[sizeof(text)] = "";
    int start[2], status, fd;
    pid_t child;
    DIR *rest;

    cr_assert_not_null(mkdtemp(folder));
    setenv("PERSEUS_METRICS", folder, 1);
    snprintf(victim, sizeof(victim), "%s", in_folder("victim", 0));
    fd = open(victim, O_RDWR | O_CREAT, 0600);
    cr_assert(fd >= 0 && write(fd, text, sizeof(text)) == sizeof(text) && pipe(start) == 0);
    child = fork();
    if (!child) {
        char byte;

        if (read(start[0], &byte, 1) == 1)
            work();
        _exit(1);
    }
    cr_assert_eq(symlink(victim, in_folder("perseus-%d.prom.partial", child)), 0);
    cr_assert_eq(symlink(victim, in_folder("perseus-%d.prom", child)), 0);
    cr_assert_eq(write(start[1], "", 1), 1);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && !WEXITSTATUS(status), "status %#x", status);
    cr_assert_eq(pread(fd, have, sizeof(have), 0), sizeof(text));
    cr_assert_str_eq(have, text, "the file that the link names was changed");
    rest = opendir(folder);
    for (struct dirent *at; (at = readdir(rest));)
        cr_assert(at->d_name[0] == '.' || !strcmp(at->d_name, "victim"), "%s is left", at->d_name);
    closedir(rest);
    unlink(victim);
    rmdir(folder);
}
