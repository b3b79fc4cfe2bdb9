/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-hwcheck: compares what two hosts and the network between them do with what Perseus relies on. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/common/option_table.h"
#include "tools/hwcheck/check.h"
#include "tools/hwcheck/launch.h"
#include "tools/hwcheck/serve.h"

enum { PORT = 18517 };

struct options {
    bool listen;
    const char *bind; /* NULL: all of IPv4 */
    const char *launch;
    uint32_t port;
    struct check_options check;
};

#define FIELD(member) OPTION_FIELD(struct options, member)

static const struct option_row rows[] = {
    {OPTION_SET, "listen", NULL, "be the other side: serve one check, then end", FIELD(listen), 1},
    {OPTION_TEXT, "launch", "COMMAND", "start the other side by this command, such as 'ssh HOST'", FIELD(launch)},
    {OPTION_TEXT, "cookie", "TEXT", "what --listen printed; with --listen: the one to print, or - to read it",
     FIELD(check.cookie)},
    {OPTION_TEXT, "bind", "ADDRESS", "with --listen: take clients on this address only", FIELD(bind)},
    {OPTION_NUMBER, "port", "PORT", "TCP port of the side that listens (18517)", FIELD(port), 1, 65535},
    {OPTION_NUMBER, "pairs", "N", "transfers of each trial of order (10000)", FIELD(check.pairs), 100, 100000000},
    {OPTION_NUMBER, "queues", "N", "try each rail with so many queues at once, too (4); 1: do not", FIELD(check.queues),
     1, QUEUES_MOST},
    {OPTION_SET, "all-pairs", NULL, "also try each rail with each of the other host's; a pair without a way takes long",
     FIELD(check.all_pairs), 1},
    {OPTION_SET, "json", NULL, "one JSON object, to attach to a report", FIELD(check.json), 1},
};

static const struct option_table table = {
    "perseus-hwcheck",
    "usage: perseus-hwcheck [options] --launch 'ssh HOST' HOST   on one host; or\n"
    "       perseus-hwcheck [options] --listen                   on one host, and then what it prints on another:\n"
    "       perseus-hwcheck [options] --cookie COOKIE HOST\n"
    "Checks each pair of rails between two hosts, with one queue and with several at once, and all rails together:\n"
    "reachability, latency, bandwidth, packets, counters of loss and congestion, what NICs claim of their atomics,\n"
    "and what the ordering policies assume: that a write or an atomic does not pass an earlier write, and what the\n"
    "fence flag waits for.\n",
    "Variables as for a job (NCCL_IB_HCA, NCCL_IB_TC, PERSEUS_PROVIDER, ...): with --launch, 'ssh HOST env "
    "NAME=VALUE'.\n"
    "Exit status 1: something that Perseus relies on did not hold, or could not be tried.\n"
    "Example, two nodes on one machine without a NIC:\n"
    "  softnic-run --nodes 2 -- sh -c 'SOFTNIC_NODE=1 perseus-hwcheck --launch \"env SOFTNIC_NODE=0\" 127.0.0.1'\n",
    rows,
    sizeof(rows) / sizeof(rows[0]),
};

/* ---- the side that listens ---- */

/* Read the cookie from the first line of stdin. Return 0, or -EINVAL after printing why. */
static int read_cookie(char *cookie, size_t bytes)
{
    if (fgets(cookie, (int)bytes, stdin)) {
        cookie[strcspn(cookie, "\n")] = '\0';
        if (cookie[0])
            return 0;
    }
    fprintf(stderr, "perseus-hwcheck: --cookie -: no cookie on standard input\n");
    return -EINVAL;
}

static void say_how(const struct options *options, const char *cookie)
{
    char port[24] = "";

    if (options->port != PORT)
        snprintf(port, sizeof(port), " --port %u", options->port);
    fprintf(stderr,
            "perseus-hwcheck: listening on %s%sport %u. On the other host:\n"
            "  perseus-hwcheck%s --cookie %s %s\n",
            options->bind ? options->bind : "", options->bind ? " " : "", options->port, port, cookie,
            options->bind ? options->bind : "THIS_HOST");
}

/* Serve the first client with the cookie; others are refused. owner: see control_accept(). Return 0 or -errno. */
static int serve_one(struct prs_fabric *fabric, int listener, int owner, const char *cookie)
{
    for (;;) {
        int r, control = control_accept(listener, owner);
        char peer[64];

        if (control < 0)
            return control;
        r = welcome(fabric, control, cookie);
        if (!r) {
            r = serve(fabric, control);
            close(control);
            if (r)
                fprintf(stderr, "perseus-hwcheck: the client: %s\n", strerror(-r));
            return r;
        }
        control_peer(control, peer, sizeof(peer));
        close(control);
        fprintf(stderr, "perseus-hwcheck: refused the client at %s: %s\n", peer,
                r == -EACCES   ? "it has another cookie"
                : r == -EPROTO ? "it is another program, or another version"
                               : strerror(-r));
    }
}

static int be_the_other_side(struct prs_fabric *fabric, const struct options *options, const char *port)
{
    bool is_launched = options->check.cookie && !strcmp(options->check.cookie, "-");
    char made[COOKIE_BYTES] = "";
    const char *cookie = options->check.cookie && !is_launched ? options->check.cookie : made;
    int listener, r;

    if (!options->check.cookie && make_cookie(made, sizeof(made)))
        return 1;
    if (is_launched && read_cookie(made, sizeof(made)))
        return 1;
    listener = control_listen(options->bind, port);
    if (listener < 0)
        return 1;
    if (!is_launched)
        say_how(options, cookie);
    r = serve_one(fabric, listener, is_launched ? STDIN_FILENO : -1, cookie);
    close(listener);
    return r ? 1 : 0;
}

/* ---- the side that asks ---- */

static int be_the_client(struct prs_fabric *fabric, const struct options *options, const char *port)
{
    struct check_options how = options->check;
    char made[COOKIE_BYTES];
    FILE *launched = NULL;
    int control, r = 1;

    if (options->launch) {
        if (make_cookie(made, sizeof(made)))
            return 1;
        how.cookie = made;
        launched = launch(options->launch, options->port, made);
        if (!launched)
            return 1;
    }
    control = control_connect(how.host, port, launched ? fileno(launched) : -1);
    if (control >= 0) {
        r = check(fabric, control, &how);
        close(control);
    }
    if (launched && launched_end(launched))
        r = 1;
    return r;
}

static void refuse_wrong_words(const struct options *options, int words, int argc, char **argv)
{
    const char *cookie = options->check.cookie;

    if (options->bind && !options->listen)
        option_table_refuse(&table, "--bind '%s': only with --listen", options->bind);
    if (options->launch && (options->listen || cookie))
        option_table_refuse(&table, "--launch '%s': not with %s", options->launch,
                            options->listen ? "--listen" : "--cookie, since it makes one");
    if (options->listen && words < argc)
        option_table_refuse(&table, "'%s': --listen takes no host", argv[words]);
    if (!options->listen && words + 1 != argc)
        option_table_refuse(&table, "want one host, or --listen");
    if (!options->listen && !options->launch && !cookie)
        option_table_refuse(&table, "want --cookie, which --listen prints on the other host; or --launch 'ssh %s'",
                            argv[words]);
    if (cookie && (!cookie[0] || strlen(cookie) >= COOKIE_BYTES))
        option_table_refuse(&table, "--cookie '%s': want 1 to %d characters", cookie, COOKIE_BYTES - 1);
}

int main(int argc, char **argv)
{
    struct options options = {.port = PORT, .check.pairs = 10000, .check.queues = 4};
    int words = option_table_parse(&table, &options, argc, argv), r;
    struct prs_fabric *fabric;
    char port[16];

    snprintf(port, sizeof(port), "%u", options.port);
    refuse_wrong_words(&options, words, argc, argv);
    options.check.host = argv[words];
    signal(SIGPIPE, SIG_IGN); /* writing to a --launch command that has ended must not kill this process */
    r = prs_fabric_open(NULL, &fabric);
    if (r) {
        fprintf(stderr, "perseus-hwcheck: %s (see perseus-info)\n", prs_error_text());
        return 1;
    }
    r = options.listen ? be_the_other_side(fabric, &options, port) : be_the_client(fabric, &options, port);
    prs_fabric_close(fabric);
    return r;
}
