/* SPDX-License-Identifier: Apache-2.0 */
/* LD_PRELOAD: the time of day jumps, forth and back, by up to an hour, several times a second, as an administrator or
 * NTP could make it. CLOCK_MONOTONIC does not. Code that measures a limit by the time of day gives up at once, or
 * never. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

typedef int gettime_fn(clockid_t, struct timespec *);

static int real_gettime(clockid_t clock, struct timespec *out)
{
    static gettime_fn *real;

    if (!real) {
        void *symbol = dlsym(RTLD_NEXT, "clock_gettime");

        memcpy(&real, &symbol, sizeof(real));
    }
    return real(clock, out);
}

/* Another offset every 300 ms, the same for all processes of a seed. */
static long offset_s(void)
{
    const char *text = getenv("JUMPING_CLOCK_SEED");
    struct timespec now;
    uint64_t z;

    real_gettime(CLOCK_MONOTONIC, &now);
    z = (uint64_t)now.tv_sec * 10 + (uint64_t)now.tv_nsec / 100000000;
    z = (z / 3 + (text ? strtoull(text, NULL, 10) : 0)) * 0x9e3779b97f4a7c15ull;
    z ^= z >> 31;
    return (long)(z % 7200) - 3600;
}

int clock_gettime(clockid_t clock, struct timespec *out)
{
    int r = real_gettime(clock, out);

    if (!r && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        out->tv_sec += offset_s();
    return r;
}

int gettimeofday(struct timeval *restrict out, __attribute__((unused)) void *restrict zone)
{
    struct timespec now;
    int r = clock_gettime(CLOCK_REALTIME, &now);

    *out = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return r;
}

time_t time(time_t *out)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
