/* SPDX-License-Identifier: Apache-2.0 */
/* Calls a fuzz target with seeded inputs. Input i of a seed is the same wherever and whenever it runs, so a failure is
 * replayed with --seed S --only I.
 *
 * usage: fuzz_TARGET [--count N] [--seed S] [--only I] [--corpus FOLDER] [--write FOLDER] */
#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test/fuzz/fuzz.h"

enum { BYTES_MOST = 1 << 14, SEEDS_MOST = 256, MUTATIONS_MOST = 8, LIMIT_S = 20 /* of one input */ };

struct seed {
    uint8_t *data;
    size_t bytes;
};

static struct seed seeds[SEEDS_MOST];
static uint32_t seed_count;
static uint64_t seed = 1, current;
static const char *program;

static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static size_t below(uint64_t *state, size_t limit)
{
    return limit ? draw(state) % limit : 0;
}

/* Also called by sanitizers, before they end the process. */
static void report(void)
{
    char line[PATH_MAX + 128];
    int n = snprintf(line, sizeof(line), "\n%s: failed; again: %s --seed %" PRIu64 " --only %" PRIu64 "\n", program,
                     program, seed, current);

    if (write(STDERR_FILENO, line, (size_t)n) < 0)
        _exit(1);
}

static void on_signal(int signal_number)
{
    if (signal_number == SIGALRM)
        fprintf(stderr, "%s: one input took more than %d s\n", program, LIMIT_S);
    report();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

extern void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void catch_failures(void)
{
    static const int caught[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM};

    /* A sanitizer has handlers of its own for the others. */
    for (size_t i = 0; i < sizeof(caught) / sizeof(caught[0]); i++)
        if (!__sanitizer_set_death_callback || caught[i] == SIGABRT || caught[i] == SIGALRM)
            signal(caught[i], on_signal);
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(report);
}

static void add_seed(const void *data, size_t bytes)
{
    if (seed_count == SEEDS_MOST || bytes > BYTES_MOST)
        return;
    seeds[seed_count].data = malloc(bytes + 1);
    fuzz_require(seeds[seed_count].data, "no memory");
    memcpy(seeds[seed_count].data, data, bytes);
    seeds[seed_count++].bytes = bytes;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static void read_corpus(const char *folder)
{
    static uint8_t data[BYTES_MOST + 1];
    struct dirent **entries;
    int count = scandir(folder, &entries, NULL, by_name);

    fuzz_require(count >= 0, "%s: %s", folder, strerror(errno));
    for (int i = 0; i < count; i++) {
        char path[PATH_MAX];
        FILE *f;

        snprintf(path, sizeof(path), "%s/%s", folder, entries[i]->d_name);
        f = entries[i]->d_name[0] == '.' ? NULL : fopen(path, "re");
        if (f) {
            add_seed(data, fread(data, 1, sizeof(data), f));
            fclose(f);
        }
        free(entries[i]);
    }
    free(entries);
}

static void make_seeds(void)
{
    static uint8_t data[BYTES_MOST];
    size_t bytes;

    for (uint32_t i = 0; (bytes = fuzz_seed(i, data, sizeof(data))); i++)
        add_seed(data, bytes);
    add_seed("", 0);
}

static void write_seeds(const char *folder)
{
    for (uint32_t i = 0; i < seed_count; i++) {
        char path[PATH_MAX];
        FILE *f;

        snprintf(path, sizeof(path), "%s/seed-%u", folder, i);
        f = fopen(path, "we");
        fuzz_require(f && fwrite(seeds[i].data, 1, seeds[i].bytes, f) == seeds[i].bytes && fclose(f) == 0, "%s: %s",
                     path, strerror(errno));
    }
}

/* A number of 1, 2, 4 or 8 bytes: near a limit, near what is there, or any. */
static void change_number(uint64_t *state, uint8_t *data, size_t bytes)
{
    static const uint64_t limits[] = {0, 1, 2, 7, 8, 63, 64, 255, 256, 511, 512, 1023, 1024, 4095, 4096, 65535, 65536};
    size_t width = 1ull << below(state, 4), at;
    uint64_t value = 0;

    if (bytes < width)
        return;
    at = below(state, bytes - width + 1) & (draw(state) & 1 ? ~(width - 1) : ~0ull);
    memcpy(&value, data + at, width);
    switch (below(state, 5)) {
    case 0:
        value = limits[below(state, sizeof(limits) / sizeof(limits[0]))];
        break;
    case 1:
        value = 0 - limits[below(state, 6)]; /* the largest, and negative ones */
        break;
    case 2:
        value += draw(state) % 17 - 8;
        break;
    case 3:
        value ^= 1ull << below(state, 8 * width);
        break;
    default:
        value = draw(state);
    }
    memcpy(data + at, &value, width);
}

static size_t mutate(uint64_t *state, uint8_t *data, size_t bytes)
{
    size_t at = below(state, bytes + 1), n = below(state, 64) + 1;
    const struct seed *other;

    switch (below(state, 10)) {
    case 0: /* cut off */
        return at;
    case 1: /* take out */
        n = n < bytes - at ? n : bytes - at;
        memmove(data + at, data + at + n, bytes - at - n);
        return bytes - n;
    case 2: /* put in */
        n = n < BYTES_MOST - bytes ? n : BYTES_MOST - bytes;
        memmove(data + at + n, data + at, bytes - at);
        for (size_t i = 0; i < n; i++)
            data[at + i] = (uint8_t)(draw(state) & 1 ? draw(state) : 32 + draw(state) % 95);
        return bytes + n;
    case 3: /* the end of another one */
        other = &seeds[below(state, seed_count)];
        n = below(state, other->bytes + 1);
        n = n < BYTES_MOST - at ? n : BYTES_MOST - at;
        if (n)
            memcpy(data + at, other->data + other->bytes - n, n);
        return at + n;
    default:
        change_number(state, data, bytes);
        return bytes;
    }
}

static void run_one(uint64_t i)
{
    static uint8_t data[BYTES_MOST];
    uint64_t state = seed * 0x2545f4914f6cdd1dull + i;
    const struct seed *from = &seeds[below(&state, seed_count)];
    size_t bytes = from->bytes, mutations = i < seed_count ? 0 : 1 + below(&state, MUTATIONS_MOST);
    uint8_t *exact;

    if (i < seed_count) { /* each valid input first, as it is */
        from = &seeds[i];
        bytes = from->bytes;
    }
    if (bytes)
        memcpy(data, from->data, bytes);
    while (mutations--)
        bytes = mutate(&state, data, bytes);
    exact = malloc(bytes ? bytes : 1); /* so that a sanitizer sees a read beyond its end */
    fuzz_require(exact, "no memory");
    memcpy(exact, data, bytes);
    current = i;
    alarm(LIMIT_S);
    LLVMFuzzerTestOneInput(exact, bytes);
    free(exact);
}

static uint64_t number_of(const char *name, const char *text)
{
    char *end;
    uint64_t value = strtoull(text, &end, 10);

    if (*text < '0' || *text > '9' || *end) {
        fprintf(stderr, "%s: --%s: '%s' is not a whole number\n", program, name, text);
        exit(2);
    }
    return value;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"count", 1, NULL, 'c'},  {"seed", 1, NULL, 's'},  {"only", 1, NULL, 'o'},
                                            {"corpus", 1, NULL, 'f'}, {"write", 1, NULL, 'w'}, {NULL, 0, NULL, 0}};
    uint64_t count = 10000, only = UINT64_MAX;
    const char *folder = NULL;
    int c;

    program = argv[0];
    make_seeds();
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 'c')
            count = number_of("count", optarg);
        else if (c == 's')
            seed = number_of("seed", optarg);
        else if (c == 'o')
            only = number_of("only", optarg);
        else if (c == 'f')
            read_corpus(optarg);
        else if (c == 'w')
            folder = optarg;
        else
            return 2;
    }
    if (folder) {
        write_seeds(folder);
        return 0;
    }
    catch_failures();
    for (uint64_t i = only == UINT64_MAX ? 0 : only; i < (only == UINT64_MAX ? count : only + 1); i++)
        run_one(i);
    alarm(0);
    fprintf(stderr, "%" PRIu64 " inputs, seed %" PRIu64 ", %" PRIu64 " times accepted\n",
            only == UINT64_MAX ? count : 1, seed, fuzz_accepted);
    if (only == UINT64_MAX && count >= seed_count && !fuzz_accepted) {
        fprintf(stderr, "%s: not even a valid input was accepted\n", program);
        return 1;
    }
    for (uint32_t i = 0; i < seed_count; i++)
        free(seeds[i].data);
    return 0;
}
