/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/launch.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

int make_cookie(char *cookie, size_t bytes)
{
    uint64_t value;

    if (getrandom(&value, sizeof(value), 0) != sizeof(value)) {
        fprintf(stderr, "perseus-hwcheck: getrandom: %s\n", strerror(errno));
        return -EIO;
    }
    snprintf(cookie, bytes, "%016llx", (unsigned long long)value);
    return 0;
}

FILE *launch(const char *command, unsigned port, const char *cookie)
{
    char program[1024], line[4096];
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    FILE *launched;
    int n;

    if (length < 0) {
        fprintf(stderr, "perseus-hwcheck: /proc/self/exe: %s\n", strerror(errno));
        return NULL;
    }
    program[length] = '\0';
    n = snprintf(line, sizeof(line), "exec %s '%s' --listen --port %u --cookie -", command, program, port);
    if (n < 0 || (size_t)n >= sizeof(line) || strchr(program, '\'')) {
        fprintf(stderr, "perseus-hwcheck: --launch: the command or the path of this program cannot be passed on\n");
        return NULL;
    }
    launched = popen(line, "we");
    if (!launched) {
        fprintf(stderr, "perseus-hwcheck: --launch: %s\n", strerror(errno));
        return NULL;
    }
    fprintf(launched, "%s\n", cookie);
    fflush(launched);
    return launched;
}

int launched_end(FILE *launched)
{
    int status = pclose(launched);

    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
