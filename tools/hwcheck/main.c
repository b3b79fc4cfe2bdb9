/* SPDX-License-Identifier: Apache-2.0 */
/* perseus-hwcheck: compares what two hosts and the network between them do with what Perseus relies on. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/common/option_table.h"
#include "tools/hwcheck/report.h"
#include "tools/hwcheck/serve.h"

struct options {
    bool listen, json;
    const char *bind; /* NULL: all of IPv4 */
    uint32_t port, pairs;
};

#define FIELD(member) OPTION_FIELD(struct options, member)

static const struct option_row rows[] = {
    {OPTION_SET, "listen", NULL, "be the other side: serve one check, then end", FIELD(listen), 1},
    {OPTION_TEXT, "bind", "ADDRESS", "with --listen: take clients on this address only", FIELD(bind)},
    {OPTION_NUMBER, "port", "PORT", "TCP port of the side that listens (18517)", FIELD(port), 1, 65535},
    {OPTION_NUMBER, "pairs", "N", "transfers of each trial of order (10000)", FIELD(pairs), 100, 100000000},
    {OPTION_SET, "json", NULL, "one JSON object, to attach to a report", FIELD(json), 1},
};

static const struct option_table table = {
    "perseus-hwcheck",
    "usage: perseus-hwcheck [options] HOST      on one host\n"
    "       perseus-hwcheck [options] --listen  on the other, first\n"
    "Checks each pair of rails between two hosts: reachability, latency, bandwidth, and what the ordering policies\n"
    "assume: that a write or an atomic does not pass an earlier write, and what the fence flag waits for.\n",
    "Whoever reaches the port can run a check, and gets keys of the memory that it writes to: see --bind. Exit status "
    "1: something that Perseus relies on did not hold, or could\n"
    "not be tried.\n"
    "Example, two nodes on one machine without a NIC:\n"
    "  softnic-run --nodes 2 -- sh -c 'SOFTNIC_NODE=0 perseus-hwcheck --listen & SOFTNIC_NODE=1 perseus-hwcheck "
    "127.0.0.1'\n",
    rows,
    sizeof(rows) / sizeof(rows[0]),
};

static void show(const char *format, uint32_t rail, const char *what)
{
    if (isatty(STDERR_FILENO))
        fprintf(stderr, format, rail, what);
}

/* One request and its answer. Return 0, or -errno with a text: of the connection, or of the other side. */
static int ask(int control, struct message *message, char *text, size_t bytes)
{
    int r = control_send(control, message);

    if (!r)
        r = control_receive(control, message);
    if (r)
        snprintf(text, bytes, "the other side: %s",
                 r == -EPROTO ? "it is another program, or another version" : strerror(-r));
    else if (message->status)
        snprintf(text, bytes, "the other side: %s", message->text);
    return r ? r : message->status;
}

static int open_link(struct prs_fabric *fabric, int control, int rail, const char *policy, struct link *link,
                     struct rail_report *report, char *text, size_t bytes)
{
    struct message message = {.kind = MESSAGE_OPEN, .rail = (uint32_t)rail};
    struct place_of_memory mine;
    char why[256] = "";
    int opened, r = link_open(link, fabric, rail, &mine);

    if (r) {
        snprintf(text, bytes, "%s", prs_error_text());
        return r;
    }
    snprintf(message.policy, sizeof(message.policy), "%s", policy);
    r = ask(control, &message, text, bytes);
    if (r)
        return r;
    report->there = message;
    link->remote = message.memory;
    opened = link_connect(link, fabric, rail, &message.handle, policy);
    if (opened)
        snprintf(why, sizeof(why), "%s", prs_error_text());
    message = (struct message){.kind = MESSAGE_OPEN, .status = opened, .memory = mine};
    r = ask(control, &message, text, bytes);
    if (opened)
        snprintf(text, bytes, "%s", why); /* the cause is here, and what the other side says follows from it */
    return opened ? opened : r;
}

static void close_link(int control, struct link *link)
{
    struct message message = {.kind = MESSAGE_CLOSE};
    char text[256];

    ask(control, &message, text, sizeof(text)); /* both sides close before the next one opens */
    link_close(link);
}

static void try_one(int control, struct link *link, enum trial_kind kind, uint32_t count, struct attempt *attempt)
{
    struct message message = {.kind = MESSAGE_RUN, .trial = kind, .count = count};
    int r;

    attempt->tried = true;
    trial_prepare(link);
    if (ask(control, &message, attempt->text, sizeof(attempt->text)))
        return;
    r = trial_send(link, kind, count, &attempt->outcome);
    if (r)
        snprintf(attempt->text, sizeof(attempt->text), "%s",
                 prs_peer_error(link->peer)[0] ? prs_peer_error(link->peer) : strerror(-r));
    message = (struct message){0};
    if (control_receive(control, &message) && !r)
        snprintf(attempt->text, sizeof(attempt->text), "the other side ended");
    else if (message.status && !r)
        snprintf(attempt->text, sizeof(attempt->text), "the other side: %s", message.text);
    attempt->outcome.late = message.late;
    attempt->outcome.wrong = message.wrong;
}

static void check_policy(struct prs_fabric *fabric, int control, int rail, int index, uint32_t pairs,
                         struct rail_report *report)
{
    enum { LATENCY_COUNT = 2000 };
    struct policy_report *policy = &report->policy[index];
    char text[256] = "";
    struct link link = {0};
    int r;

    show("\r\033[Kperseus-hwcheck: rail %u, %s", (uint32_t)rail, policy_names[index]);
    r = open_link(fabric, control, rail, policy_names[index], &link, report, text, sizeof(text));
    policy->set.tried = policy->add.tried = true;
    if (r) {
        snprintf(policy->set.text, sizeof(policy->set.text), "%s", text);
        snprintf(policy->add.text, sizeof(policy->add.text), "%s", text);
        if (policy->is_chosen)
            snprintf(report->text, sizeof(report->text), "%s", text);
    } else {
        if (policy->is_chosen) {
            try_one(control, &link, TRIAL_LATENCY, LATENCY_COUNT, &report->latency);
            try_one(control, &link, TRIAL_BANDWIDTH, 1, &report->bandwidth);
            try_one(control, &link, TRIAL_NOTIFY, pairs, &report->notify);
        }
        try_one(control, &link, TRIAL_SET, pairs, &policy->set);
        try_one(control, &link, TRIAL_ADD, pairs, &policy->add);
    }
    close_link(control, &link);
}

static void check_rail(struct prs_fabric *fabric, int control, int rail, uint32_t pairs, struct rail_report *report)
{
    const struct prs_rail_set one = {.count = 1, .rail = {rail}};
    struct prs_rail_info info;

    describe_rail(fabric, rail, &report->here);
    if (prs_rail_query(fabric, rail, &info) == 0)
        report->adaptive_routing = info.adaptive_routing;
    if (prs_fabric_policy(fabric, &one, report->chosen, sizeof(report->chosen))) {
        snprintf(report->text, sizeof(report->text), "%s", prs_error_text());
        return;
    }
    for (int p = 0; p < POLICIES; p++) {
        size_t length = strlen(policy_names[p]);

        report->policy[p].is_chosen =
            !strncmp(report->chosen, policy_names[p], length) && report->chosen[length] == ' ';
        check_policy(fabric, control, rail, p, pairs, report);
    }
}

static int check(struct prs_fabric *fabric, int control, const struct options *options, const char *host)
{
    static struct report report;
    struct message message = {.kind = MESSAGE_HELLO};
    char text[256];

    report.host = host;
    report.pairs = options->pairs;
    if (ask(control, &message, text, sizeof(text))) {
        fprintf(stderr, "perseus-hwcheck: %s: %s\n", host, text);
        return 1;
    }
    snprintf(report.other_version, sizeof(report.other_version), "%.31s", message.text);
    report.rails_here = (uint32_t)prs_fabric_rails(fabric);
    report.rails_there = message.rails;
    report.rail_count = report.rails_here < report.rails_there ? report.rails_here : report.rails_there;
    if (report.rail_count > RAILS_MAX)
        report.rail_count = RAILS_MAX;
    if (!report.rail_count)
        fprintf(stderr, "perseus-hwcheck: rails: %u here, %u there: see perseus-info on each host\n", report.rails_here,
                report.rails_there);
    for (uint32_t i = 0; i < report.rail_count; i++)
        check_rail(fabric, control, (int)i, options->pairs, &report.rail[i]);
    message = (struct message){.kind = MESSAGE_BYE};
    control_send(control, &message);
    show("\r\033[K", 0, "");
    if (options->json)
        report_json(&report);
    else
        report_text(&report);
    return report_is_good(&report) ? 0 : 1;
}

static int wait_for_client(struct prs_fabric *fabric, const struct options *options, const char *port)
{
    int listener = control_listen(options->bind, port), control, r;

    if (listener < 0)
        return 1;
    fprintf(stderr, "perseus-hwcheck: listening on %s%sport %s\n", options->bind ? options->bind : "",
            options->bind ? " " : "", port);
    control = control_accept(listener);
    close(listener);
    if (control < 0)
        return 1;
    r = serve(fabric, control);
    if (r)
        fprintf(stderr, "perseus-hwcheck: the client: %s\n",
                r == -EPROTO ? "it is another program, or another version" : strerror(-r));
    close(control);
    return r ? 1 : 0;
}

int main(int argc, char **argv)
{
    struct options options = {.port = 18517, .pairs = 10000};
    int words = option_table_parse(&table, &options, argc, argv), control, r;
    struct prs_fabric *fabric;
    char port[16];

    snprintf(port, sizeof(port), "%u", options.port);
    if (options.bind && !options.listen)
        option_table_refuse(&table, "--bind '%s': only with --listen", options.bind);
    if (options.listen && words < argc)
        option_table_refuse(&table, "'%s': --listen takes no host", argv[words]);
    if (!options.listen && words + 1 != argc)
        option_table_refuse(&table, "want one host, or --listen");
    r = prs_fabric_open(NULL, &fabric);
    if (r) {
        fprintf(stderr, "perseus-hwcheck: %s (see perseus-info)\n", prs_error_text());
        return 1;
    }
    if (options.listen) {
        r = wait_for_client(fabric, &options, port);
    } else {
        control = control_connect(argv[words], port);
        r = control < 0 ? 1 : check(fabric, control, &options, argv[words]);
        if (control >= 0)
            close(control);
    }
    prs_fabric_close(fabric);
    return r;
}
