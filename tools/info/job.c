/* SPDX-License-Identifier: Apache-2.0 */
/* The counters that a running process writes when PERSEUS_METRICS is set. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/info/machine.h"

/* The value of a variable in the environment of a process. Return 0, 1 (not set) or -errno. */
static int read_variable(const char *pid, const char *name, char *out, size_t bytes)
{
    size_t length = strlen(name);
    char path[64], *text = NULL;
    size_t room = 0;
    FILE *file;
    int r = 1;

    snprintf(path, sizeof(path), "/proc/%.20s/environ", pid);
    file = fopen(path, "re");
    if (!file)
        return -errno;
    while (r && getdelim(&text, &room, 0, file) > 0)
        if (!strncmp(text, name, length) && text[length] == '=') {
            snprintf(out, bytes, "%s", text + length + 1);
            r = 0;
        }
    free(text);
    fclose(file);
    return r;
}

int job_print(const char *pid)
{
    char folder[512], path[600], line[1024];
    FILE *file;
    int r;

    if (!*pid || pid[strspn(pid, "0123456789")]) {
        fprintf(stderr, "perseus-info: --job '%s': not the id of a process\n", pid);
        return 2;
    }
    r = read_variable(pid, "PERSEUS_METRICS", folder, sizeof(folder));
    if (r < 0) {
        fprintf(stderr, "perseus-info: --job %s: %s: is the process alive, and yours?\n", pid, strerror(-r));
        return 1;
    }
    if (r > 0) {
        fprintf(stderr,
                "perseus-info: --job %s: the process was started without PERSEUS_METRICS; set it to a folder such as "
                "/dev/shm\n",
                pid);
        return 1;
    }
    snprintf(path, sizeof(path), "%s/perseus-%s.prom", folder, pid);
    file = fopen(path, "re");
    if (!file) {
        fprintf(stderr, "perseus-info: --job %s: %s: %s; no connection has been open for a second yet?\n", pid, path,
                strerror(errno));
        return 1;
    }
    while (fgets(line, sizeof(line), file)) {
        char *value = strrchr(line, ' ');

        if (line[0] == '#' || !value)
            continue;
        *value++ = '\0';
        printf("%-90s %s", line, value);
    }
    fclose(file);
    return 0;
}
