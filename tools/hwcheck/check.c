/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/check.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/hwcheck/report.h"
#include "tools/hwcheck/serve.h"

/* A check under way. */
struct run {
    struct prs_fabric *fabric;
    int control;
    const struct check_options *options;
    struct network network; /* of the rail of this side */
};

static void show(const char *what, uint32_t rail, const char *policy)
{
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r\033[Kperseus-hwcheck: %s %u, %s", what, rail, policy);
}

/* One request and its answer. Return 0, or -errno with a text: of the connection, or of the other side. */
static int ask(const struct run *run, struct message *message, char *text, size_t bytes)
{
    int r = control_send(run->control, message);

    if (!r)
        r = control_receive(run->control, message);
    if (r)
        snprintf(text, bytes, "the other side: %s",
                 r == -EPROTO ? "it is another program, or another version" : strerror(-r));
    else if (message->status)
        snprintf(text, bytes, "the other side: %s", message->text);
    return r ? r : message->status;
}

/* ---- one connection ---- */

static int open_link(const struct run *run, const struct prs_rail_set *here, const struct prs_rail_set *there,
                     const char *policy, struct link *link, char *text, size_t bytes)
{
    struct message message = {.kind = MESSAGE_OPEN, .rails = *there};
    struct place_of_memory mine;
    char why[256] = "";
    int opened, r = link_open(link, run->fabric, here, &mine);

    if (r) {
        snprintf(text, bytes, "%s", prs_error_text());
        return r;
    }
    snprintf(message.policy, sizeof(message.policy), "%s", policy);
    r = ask(run, &message, text, bytes);
    if (r)
        return r;
    link->remote = message.memory;
    opened = link_connect(link, run->fabric, here, &message.handle, policy);
    if (opened)
        snprintf(why, sizeof(why), "%s", prs_error_text());
    message = (struct message){.kind = MESSAGE_OPEN, .status = opened, .memory = mine};
    r = ask(run, &message, text, bytes);
    if (opened)
        snprintf(text, bytes, "%s", why); /* the cause is here, and what the other side says follows from it */
    return opened ? opened : r;
}

static void close_link(const struct run *run, struct link *link)
{
    struct message message = {.kind = MESSAGE_CLOSE};
    char text[256];

    ask(run, &message, text, sizeof(text)); /* both sides close before the next one opens */
    link_close(link);
}

static void try_one(const struct run *run, struct link *link, enum trial_kind kind, uint32_t count,
                    struct attempt *attempt)
{
    struct message message = {.kind = MESSAGE_RUN, .trial = kind, .count = count};
    int r;

    attempt->tried = true;
    trial_prepare(link);
    if (ask(run, &message, attempt->text, sizeof(attempt->text)))
        return;
    r = trial_send(link, kind, count, &attempt->outcome);
    if (r)
        snprintf(attempt->text, sizeof(attempt->text), "%s",
                 prs_peer_error(link->peer)[0] ? prs_peer_error(link->peer) : strerror(-r));
    message = (struct message){0};
    if (control_receive(run->control, &message) && !r)
        snprintf(attempt->text, sizeof(attempt->text), "the other side ended");
    else if (message.status && !r)
        snprintf(attempt->text, sizeof(attempt->text), "the other side: %s", message.text);
    attempt->outcome.late = message.late;
    attempt->outcome.wrong = message.wrong;
}

/* ---- one pair of rails, or of sets of rails ---- */

/* What is tried once, under the chosen policy. */
static void try_chosen(const struct run *run, struct link *link, struct pair_report *report)
{
    enum { MOST = 2000 };
    const uint32_t pairs = run->options->pairs;
    size_t length;

    snprintf(report->path, sizeof(report->path), "%s", prs_peer_describe(link->peer));
    try_one(run, link, TRIAL_LATENCY, pairs < MOST ? pairs : MOST, &report->latency);
    try_one(run, link, TRIAL_BANDWIDTH, 1, &report->bandwidth);
    length = strlen(report->bandwidth.text);
    if (length && !report->latency.text[0])
        snprintf(report->bandwidth.text + length, sizeof(report->bandwidth.text) - length,
                 " (small packets arrive: does every switch carry packets of the path MTU?)");
    try_one(run, link, TRIAL_NOTIFY, pairs, &report->notify);
}

static void check_policy(const struct run *run, const struct prs_rail_set *here, const struct prs_rail_set *there,
                         int index, struct pair_report *report)
{
    struct policy_report *policy = &report->policy[index];
    char text[256] = "";
    struct link link = {0};
    int r;

    show(report->is_of_all ? "all rails of" : "rail", report->rail_here, policy_names[index]);
    r = open_link(run, here, there, policy_names[index], &link, text, sizeof(text));
    policy->set.tried = policy->add.tried = true;
    if (r) {
        snprintf(policy->set.text, sizeof(policy->set.text), "%s", text);
        snprintf(policy->add.text, sizeof(policy->add.text), "%s", text);
        if (policy->is_chosen)
            snprintf(report->text, sizeof(report->text), "%s", text);
    } else {
        if (policy->is_chosen)
            try_chosen(run, &link, report);
        try_one(run, &link, TRIAL_SET, run->options->pairs, &policy->set);
        try_one(run, &link, TRIAL_ADD, run->options->pairs, &policy->add);
    }
    close_link(run, &link);
}

static void check_policies(const struct run *run, const struct prs_rail_set *here, const struct prs_rail_set *there,
                           struct pair_report *report)
{
    if (prs_fabric_policy(run->fabric, here, report->chosen, sizeof(report->chosen))) {
        snprintf(report->text, sizeof(report->text), "%s", prs_error_text());
        return;
    }
    for (int p = 0; p < POLICIES; p++) {
        size_t length = strlen(policy_names[p]);

        report->policy[p].is_chosen =
            !strncmp(report->chosen, policy_names[p], length) && report->chosen[length] == ' ';
        if (report->policy[p].is_chosen || !report->is_of_all)
            check_policy(run, here, there, p, report);
    }
}

static void check_pair(struct run *run, struct pair_report *report)
{
    const struct prs_rail_set here = {.count = 1, .rail = {(int)report->rail_here}};
    const struct prs_rail_set there = {.count = 1, .rail = {(int)report->rail_there}};
    struct message message = {.kind = MESSAGE_RAIL, .rails = there};
    struct prs_rail_info info;

    describe_rail(run->fabric, here.rail[0], &run->network, &report->here);
    if (prs_rail_query(run->fabric, here.rail[0], &info) == 0)
        report->adaptive_routing = info.adaptive_routing;
    if (ask(run, &message, report->text, sizeof(report->text)))
        return;
    report->there = message.side;
    check_policies(run, &here, &there, report);
    describe_growth(&run->network, &report->here);
    message = (struct message){.kind = MESSAGE_GROWN};
    if (!ask(run, &message, report->text, sizeof(report->text)))
        snprintf(report->there.grown, sizeof(report->there.grown), "%s", message.side.grown);
}

/* ---- all rails ---- */

static struct prs_rail_set first_rails(uint32_t count)
{
    struct prs_rail_set set = {.count = count < PRS_MAX_RAILS ? (int)count : PRS_MAX_RAILS};

    for (int i = 0; i < set.count; i++)
        set.rail[i] = i;
    return set;
}

/* As a job has them: the transport pairs the rails. */
static void check_all(const struct run *run, struct report *report)
{
    const struct prs_rail_set here = first_rails(report->rails_here), there = first_rails(report->rails_there);

    report->all.is_of_all = true;
    check_policies(run, &here, &there, &report->all);
}

/* Each pair that was not checked. */
static void check_reach(const struct run *run, struct report *report)
{
    enum { FEW = 100 };

    for (uint32_t i = 0; i < report->rails_here * report->rails_there; i++) {
        const uint32_t a = i / report->rails_there, b = i % report->rails_there;
        const struct prs_rail_set here = {.count = 1, .rail = {(int)a}}, there = {.count = 1, .rail = {(int)b}};
        struct reach *reach = &report->reach[report->reaches];
        struct link link = {0};
        bool is_known = false;

        for (uint32_t p = 0; p < report->pairs; p++)
            is_known |= report->pair[p].rail_here == a && report->pair[p].rail_there == b;
        if (is_known)
            continue;
        *reach = (struct reach){.rail_here = a, .rail_there = b, .latency.tried = true};
        show("rail", a, "with another rail there");
        if (!open_link(run, &here, &there, policy_names[DRAIN], &link, reach->latency.text,
                       sizeof(reach->latency.text)))
            try_one(run, &link, TRIAL_LATENCY, FEW, &reach->latency);
        close_link(run, &link);
        report->reaches++;
    }
}

static uint32_t at_most(uint32_t a, uint32_t most)
{
    return a < most ? a : most;
}

static void check_rails(struct run *run, struct report *report)
{
    uint32_t here = report->rails_here, there = report->rails_there;

    report->pairs = !here || !there ? 0 : here > there ? here : there;
    for (uint32_t i = 0; i < report->pairs; i++) {
        report->pair[i].rail_here = i % here;
        report->pair[i].rail_there = i % there;
        check_pair(run, &report->pair[i]);
    }
    if (report->pairs > 1)
        check_all(run, report);
    if (run->options->all_pairs)
        check_reach(run, report);
}

int check(struct prs_fabric *fabric, int control, const struct check_options *options)
{
    static struct report report;
    static struct run run;
    struct message message = {.kind = MESSAGE_HELLO};
    char text[256];

    run.fabric = fabric;
    run.control = control;
    run.options = options;
    report.host = options->host;
    report.count = options->pairs;
    snprintf(message.cookie, sizeof(message.cookie), "%s", options->cookie);
    if (ask(&run, &message, text, sizeof(text))) {
        fprintf(stderr, "perseus-hwcheck: %s: %s\n", options->host, text);
        return 1;
    }
    snprintf(report.other_version, sizeof(report.other_version), "%.31s", message.text);
    report.rails_here = at_most((uint32_t)prs_fabric_rails(fabric), RAILS_MAX);
    report.rails_there = at_most(message.side.rail_count, RAILS_MAX);
    if (!report.rails_here || !report.rails_there)
        fprintf(stderr, "perseus-hwcheck: rails: %u here, %u there: see perseus-info on each host\n", report.rails_here,
                report.rails_there);
    check_rails(&run, &report);
    message = (struct message){.kind = MESSAGE_BYE};
    control_send(control, &message);
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r\033[K");
    if (options->json)
        report_json(&report);
    else
        report_text(&report);
    return report_is_good(&report) ? 0 : 1;
}
