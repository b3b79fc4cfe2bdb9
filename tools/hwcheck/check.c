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

/* Send one request and receive its answer. Return 0, or -errno with a text that comes from the connection or from the
 * other side. */
static int ask(const struct run *run, struct message *message, char *text, size_t bytes)
{
    int r = control_send(run->control, message);

    if (!r)
        r = control_receive(run->control, message);
    if (r)
        snprintf(text, bytes, "the other side: %s",
                 r == -EPROTO      ? "it is another program, or another version"
                 : r == -ETIMEDOUT ? "it does not answer: does it serve another check, or hang?"
                                   : strerror(-r));
    else if (message->status)
        snprintf(text, bytes, "the other side: %s", message->text);
    return r ? r : message->status;
}

/* ---- one connection ---- */

static int open_link(const struct run *run, const struct prs_rail_set *here, const struct prs_rail_set *there,
                     const char *policy, uint32_t queues, struct link *link, char *text, size_t bytes)
{
    struct message message = {.kind = MESSAGE_OPEN, .rails = *there, .queues = queues};
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
    link->control = run->control;
    opened = link_connect(link, run->fabric, here, &message.handle, policy, queues);
    if (opened)
        snprintf(why, sizeof(why), "%s", prs_error_text());
    message = (struct message){.kind = MESSAGE_OPEN, .status = opened, .memory = mine};
    r = ask(run, &message, text, bytes);
    if (opened)
        snprintf(text, bytes, "%s", why); /* the cause is on this side; the other side's error only follows from it */
    return opened ? opened : r;
}

static void close_link(const struct run *run, struct link *link)
{
    struct message message = {.kind = MESSAGE_CLOSE};
    char text[256];

    ask(run, &message, text, sizeof(text)); /* both sides close before the next one opens */
    link_close(link);
}

/* Over a link on which one has failed, all others fail as it did. */
static void try_one(const struct run *run, struct link *link, enum trial_kind kind, uint32_t count,
                    struct attempt *attempt)
{
    struct message message = {.kind = MESSAGE_RUN, .trial = kind, .count = count};
    int r;

    attempt->tried = true;
    if (link->failure[0]) {
        snprintf(attempt->text, sizeof(attempt->text), "%s", link->failure);
        return;
    }
    trial_prepare(link);
    if (ask(run, &message, attempt->text, sizeof(attempt->text)))
        return;
    r = trial_send(link, kind, count, &attempt->outcome);
    if (r)
        link_say_failure(link, r, attempt->text, sizeof(attempt->text));
    message = (struct message){.kind = MESSAGE_STOP};
    if (r)
        control_send(run->control, &message); /* the other side need not wait */
    message = (struct message){0};
    if (control_receive(run->control, &message) && !r)
        snprintf(attempt->text, sizeof(attempt->text), "the other side ended");
    else if (message.status && (!r || message.status != -ETIMEDOUT))
        snprintf(attempt->text, sizeof(attempt->text), "the other side: %s", message.text);
    attempt->outcome.late = message.late;
    attempt->outcome.wrong = message.wrong;
    snprintf(link->failure, sizeof(link->failure), "%s", attempt->text);
}

/* ---- one pair of rails, or of sets of rails ---- */

/* Run the trials that are made once, under the chosen policy. */
static void try_chosen(const struct run *run, struct link *link, struct pair_report *report)
{
    enum { MOST = 2000, MOST_ADDS = 5000 };
    const uint32_t pairs = run->options->pairs;
    size_t length;

    snprintf(report->path, sizeof(report->path), "%s", prs_peer_describe(link->peer[0]));
    try_one(run, link, TRIAL_LATENCY, pairs < MOST ? pairs : MOST, &report->latency);
    snprintf(report->text, sizeof(report->text), "%s", report->latency.text);
    if (report->text[0])
        return;
    try_one(run, link, TRIAL_BANDWIDTH, 1, &report->bandwidth);
    length = strlen(report->bandwidth.text);
    if (length)
        snprintf(report->bandwidth.text + length, sizeof(report->bandwidth.text) - length,
                 " (small packets arrive: does every switch carry packets of the path MTU?)");
    try_one(run, link, TRIAL_NOTIFY, pairs, &report->notify);
    try_one(run, link, TRIAL_EMPTY, pairs, &report->empty);
    if (link->queues > 1)
        try_one(run, link, TRIAL_SHARED, pairs, &report->shared);
    try_one(run, link, TRIAL_BESIDE, pairs < MOST_ADDS ? pairs : MOST_ADDS, &report->beside);
}

static void check_policy(const struct run *run, const struct prs_rail_set *here, const struct prs_rail_set *there,
                         int index, struct pair_report *report)
{
    struct policy_report *policy = &report->policy[index];
    char text[256] = "";
    struct link link = {0};
    int r;

    show(report->is_of_all    ? "all rails of"
         : report->queues > 1 ? "several queues of rail"
                              : "rail",
         report->rail_here, policy_names[index]);
    r = open_link(run, here, there, policy_names[index], report->queues, &link, text, sizeof(text));
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
        if (!report->text[0] && (report->policy[p].is_chosen || !report->is_of_all))
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

/* What each queue does while others of the rail are loaded, too. */
static void check_loaded(const struct run *run, const struct pair_report *pair, struct pair_report *report)
{
    const struct prs_rail_set here = {.count = 1, .rail = {(int)pair->rail_here}};
    const struct prs_rail_set there = {.count = 1, .rail = {(int)pair->rail_there}};

    report->rail_here = pair->rail_here;
    report->rail_there = pair->rail_there;
    report->queues = run->options->queues;
    report->there.atomic_scope = pair->there.atomic_scope;
    check_policies(run, &here, &there, report);
}

/* ---- all rails ---- */

static struct prs_rail_set first_rails(uint32_t count)
{
    struct prs_rail_set set = {.count = count < PRS_MAX_RAILS ? (int)count : PRS_MAX_RAILS};

    for (int i = 0; i < set.count; i++)
        set.rail[i] = i;
    return set;
}

/* Check all rails together, paired by the transport as in a job. */
static void check_all(const struct run *run, struct report *report)
{
    const struct prs_rail_set here = first_rails(report->rails_here), there = first_rails(report->rails_there);

    report->all.is_of_all = true;
    report->all.queues = 1;
    report->all.there.atomic_scope = PRS_ATOMIC_CPU; /* of all: what each of them claims at least */
    for (uint32_t i = 0; i < report->pairs; i++)
        if (report->pair[i].there.atomic_scope < report->all.there.atomic_scope)
            report->all.there.atomic_scope = report->pair[i].there.atomic_scope;
    check_policies(run, &here, &there, &report->all);
}

/* Check whether each remaining pair of rails is reachable. */
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
        if (!open_link(run, &here, &there, policy_names[DRAIN], 1, &link, reach->latency.text,
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
        report->pair[i].queues = 1;
        check_pair(run, &report->pair[i]);
        if (run->options->queues > 1 && !report->pair[i].text[0])
            check_loaded(run, &report->pair[i], &report->loaded[i]);
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
