/* SPDX-License-Identifier: Apache-2.0 */
/* softnicctl: look into a world of software NICs, and break it on purpose. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/common/stdout_check.h"
#include "tools/softnic/cli/ctl_report.h"
#include "tools/softnic/cli/sweep.h"
#include "tools/softnic/world/proc.h"
#include "tools/softnic/world/quantity.h"
#include "tools/softnic/world/queues.h"
#include "tools/softnic/world/wake.h"
#include "tools/softnic/world/world.h"

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

struct request {
    const char *world_name; /* --world */
    bool json;
    char *words[4]; /* command and its arguments */
    int num_words;
};

static void usage(FILE *to)
{
    fprintf(to, "usage: softnicctl [--world NAME|PATH] [--json] command\n"
                "Shows what the software NIC does in a world of softnic-run, and changes its links and faults.\n"
                "  worlds                what worlds there are\n"
                "  status                model, devices, processes, queue pairs of a world\n"
                "  counters              what each device has done\n"
                "  link DEVICE up|down   plug a port in, or pull it\n"
                "  fatal DEVICE          let the NIC die: an event, EIO for each command, and silence\n"
                "  set DEVICE rate|latency|loss VALUE\n"
                "                        for requests posted from now on; values as for softnic-run\n"
                "  qp-error QPN          put a queue pair into the error state, as a fatal NIC fault does\n"
                "  sweep                 remove worlds whose processes are all gone\n"
                "  --help                print this\n"
                "  --version             print the version\n"
                "The world is --world, else SOFTNIC_WORLD, else the only one there is.\n"
                "Example, a job that loses its link for a second:\n"
                "  softnic-run --name lab -- ./job &\n"
                "  softnicctl --world lab link softnic0 down; sleep 1; softnicctl --world lab link softnic0 up\n");
}

struct only {
    unsigned count;
    char path[PATH_MAX];
};

static void remember(const char *path, struct sn_world *world, void *arg)
{
    struct only *only = arg;
    if (!sn_creator_lives(world) && !sn_sweep_members(world))
        return;
    only->count++;
    snprintf(only->path, sizeof(only->path), "%s", path);
}

static int find_world(const struct request *q, char *path, size_t bytes)
{
    const char *named = q->world_name ? q->world_name : getenv(SN_WORLD_ENV);
    struct only only = {0};

    if (named && *named) {
        sn_sweep_path(named, path, bytes);
        return 0;
    }
    sn_sweep_each(remember, &only);
    if (only.count == 1) {
        snprintf(path, bytes, "%s", only.path);
        return 0;
    }
    if (only.count == 0)
        fprintf(stderr, "softnicctl: no world is running: start one with softnic-run\n");
    else
        fprintf(stderr,
                "softnicctl: %u worlds are running: name one with --world or SOFTNIC_WORLD (softnicctl worlds lists "
                "them)\n",
                only.count);
    return -ENOENT;
}

static int open_world(const struct request *q, char *path, size_t bytes, struct sn_world **world)
{
    int r = find_world(q, path, bytes);
    if (r)
        return r;
    r = sn_world_open(path, world);
    if (r)
        fprintf(stderr, "softnicctl: world %s: %s%s\n", path, sn_world_error(r),
                r == -ENOENT ? " (softnicctl worlds lists those that there are)" : "");
    return r;
}

/* Index of a device, or -1 after printing that it does not exist. */
static int find_device(const struct sn_world *world, const char *command, const char *name)
{
    for (uint32_t i = 0; i < world->dev_count; i++)
        if (!strcmp(world->devs[i].name, name))
            return (int)i;
    fprintf(stderr, "softnicctl: %s: no device '%s' (softnicctl status lists them)\n", command, name);
    return -1;
}

static int set_command(struct sn_world *world, const char *device, const char *what, const char *text)
{
    uint64_t value = 0;
    int dev, r;

    if (!strcmp(what, "rate")) {
        r = sn_quantity_rate(text, &value);
    } else if (!strcmp(what, "latency")) {
        r = sn_quantity_duration(text, &value);
    } else if (!strcmp(what, "loss")) {
        r = sn_quantity_fraction(text, &value);
    } else {
        fprintf(stderr, "softnicctl: set: '%s' is neither rate nor latency nor loss\n", what);
        return EXIT_USAGE;
    }
    if (r) {
        const char *want = !strcmp(what, "rate")      ? "rate: want bits per second with K, M, G or T, such as 400G"
                           : !strcmp(what, "latency") ? "latency: want a time in ns, us, ms or s, such as 2us"
                                                      : "loss: want 0 to 1, such as 0.001, or a percentage";

        fprintf(stderr, "softnicctl: set: '%s' is not a %s, or off\n", text, want);
        return EXIT_USAGE;
    }
    dev = find_device(world, "set", device);
    if (dev < 0)
        return EXIT_FAILED;
    if (!strcmp(what, "rate"))
        sn_world_set_rate(world, (uint32_t)dev, value);
    else if (!strcmp(what, "latency"))
        sn_world_set_latency(world, (uint32_t)dev, value);
    else
        sn_world_set_loss(world, (uint32_t)dev, (uint32_t)value);
    return EXIT_OK;
}

static int link_command(struct sn_world *world, const char *device, const char *state)
{
    bool up = !strcmp(state, "up");
    int dev, r;

    if (!up && strcmp(state, "down")) {
        fprintf(stderr, "softnicctl: link: '%s' is neither up nor down\n", state);
        return EXIT_USAGE;
    }
    dev = find_device(world, "link", device);
    if (dev < 0)
        return EXIT_FAILED;
    r = sn_cable_set(world, (uint32_t)dev, up);
    if (r)
        fprintf(stderr, "softnicctl: link %s %s: %s\n", device, state, strerror(-r));
    return r ? EXIT_FAILED : EXIT_OK;
}

static int fatal_command(struct sn_world *world, const char *device)
{
    int dev = find_device(world, "fatal", device);

    return dev >= 0 && sn_device_kill(world, (uint32_t)dev) == 0 ? EXIT_OK : EXIT_FAILED;
}

static int qp_error_command(struct sn_world *world, const char *number)
{
    uint64_t qpn;
    if (sn_quantity_count(number, 1, 0xffffff, &qpn)) {
        fprintf(stderr, "softnicctl: qp-error: '%s' is not a queue pair number\n", number);
        return EXIT_USAGE;
    }
    int r = sn_qp_error(world, (uint32_t)qpn);
    if (r)
        fprintf(stderr, "softnicctl: qp-error %s: %s\n", number,
                r == -ENOENT ? "no such queue pair in this world" : strerror(-r));
    return r ? EXIT_FAILED : EXIT_OK;
}

static int in_world(const struct request *q)
{
    char path[PATH_MAX];
    struct sn_world *world;
    int status;

    if (open_world(q, path, sizeof(path), &world))
        return EXIT_FAILED;
    if (!strcmp(q->words[0], "status")) {
        sn_report_status(path, world, q->json);
        status = EXIT_OK;
    } else if (!strcmp(q->words[0], "counters")) {
        sn_report_counters(world, q->json);
        status = EXIT_OK;
    } else if (!strcmp(q->words[0], "link")) {
        status = link_command(world, q->words[1], q->words[2]);
    } else if (!strcmp(q->words[0], "set")) {
        status = set_command(world, q->words[1], q->words[2], q->words[3]);
    } else if (!strcmp(q->words[0], "fatal")) {
        status = fatal_command(world, q->words[1]);
    } else {
        status = qp_error_command(world, q->words[1]);
    }
    sn_world_close(world);
    return status;
}

/* Options may be anywhere on the command line. Return EXIT_OK, or the exit status plus one. */
static int parse(struct request *q, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            usage(stdout);
            return EXIT_OK + 1;
        }
        if (!strcmp(argv[i], "--version")) {
            printf("softnicctl %s\n", PRS_VERSION);
            return EXIT_OK + 1;
        }
        if (!strcmp(argv[i], "--json")) {
            q->json = true;
        } else if (!strcmp(argv[i], "--world") && i + 1 < argc) {
            q->world_name = argv[++i];
        } else if (!strcmp(argv[i], "--world")) {
            fprintf(stderr, "softnicctl: --world: needs a value (softnicctl --help lists the options)\n");
            return EXIT_USAGE + 1;
        } else if (argv[i][0] == '-') {
            fprintf(stderr, "softnicctl: '%s' is not an option (softnicctl --help lists the options)\n", argv[i]);
            return EXIT_USAGE + 1;
        } else if (q->num_words == 4) {
            fprintf(stderr, "softnicctl: '%s' is one word too many (softnicctl --help lists the commands)\n", argv[i]);
            return EXIT_USAGE + 1;
        } else {
            q->words[q->num_words++] = argv[i];
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name, *arguments;
        int words;
    } commands[] = {
        {"worlds", "no argument", 1},   {"sweep", "no argument", 1},   {"status", "no argument", 1},
        {"counters", "no argument", 1}, {"link", "DEVICE up|down", 3}, {"set", "DEVICE rate|latency|loss VALUE", 4},
        {"qp-error", "QPN", 2},         {"fatal", "DEVICE", 2},
    };
    struct request q = {0};
    int r;

    stdout_check_at_exit("softnicctl");
    r = parse(&q, argc, argv);

    if (r)
        return r - 1;
    for (size_t i = 0; q.num_words && i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(q.words[0], commands[i].name))
            continue;
        if (q.num_words != commands[i].words) {
            fprintf(stderr, "softnicctl: %s: wants %s (softnicctl --help lists the commands)\n", q.words[0],
                    commands[i].arguments);
            return EXIT_USAGE;
        }
        if (!strcmp(q.words[0], "worlds")) {
            sn_report_worlds(q.json);
            return EXIT_OK;
        }
        if (!strcmp(q.words[0], "sweep")) {
            printf("%u\n", sn_sweep_all());
            return EXIT_OK;
        }
        return in_world(&q);
    }
    if (q.num_words)
        fprintf(
            stderr,
            "softnicctl: '%s' is not a command: want worlds, status, counters, link, set, fatal, qp-error or sweep\n",
            q.words[0]);
    else
        fprintf(stderr, "softnicctl: want a command (softnicctl --help lists them)\n");
    return EXIT_USAGE;
}
