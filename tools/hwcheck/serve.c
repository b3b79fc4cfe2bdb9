/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/serve.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/hwcheck/trial.h"

enum { PAIRS_MAX = 100000000, HELLO_LIMIT_MS = 5000 };

void describe_rail(struct prs_fabric *fabric, int rail, struct network *network, struct side *side)
{
    struct prs_rail_info info;

    *side = (struct side){.rail_count = (uint32_t)prs_fabric_rails(fabric)};
    gethostname(side->host, sizeof(side->host) - 1);
    if (prs_fabric_interface(fabric, side->interface, sizeof(side->interface)))
        snprintf(side->interface, sizeof(side->interface), "none: %.150s", prs_error_text());
    if (prs_rail_query(fabric, rail, &info))
        return;
    snprintf(side->device, sizeof(side->device), "%s:%d", info.name, info.port);
    snprintf(side->gid, sizeof(side->gid), "%s", info.gid);
    snprintf(side->link, sizeof(side->link), "%s", info.link);
    side->speed_mbps = info.speed_mbps;
    side->path_mtu = info.mtu;
    side->traffic_class = info.traffic_class;
    side->atomic_scope = info.atomic_scope;
    network_begin(network, info.name, info.port);
    side->network_mtu = network_mtu(network);
    network_settings(network, side->settings, sizeof(side->settings));
    side->counters = network->count;
}

void describe_growth(const struct network *network, struct side *side)
{
    network_grown(network, side->grown, sizeof(side->grown));
}

static int refuse(struct message *answer, int error)
{
    answer->status = error;
    snprintf(answer->text, sizeof(answer->text), "%s", prs_error_text()[0] ? prs_error_text() : strerror(-error));
    return 0;
}

/* Do all these rails exist, and is there at least one? */
static bool is_rail_set(struct prs_fabric *fabric, const struct prs_rail_set *rails)
{
    bool good = rails->count >= 1 && rails->count <= PRS_MAX_RAILS;

    for (int i = 0; good && i < rails->count; i++)
        good = rails->rail[i] >= 0 && rails->rail[i] < prs_fabric_rails(fabric);
    return good;
}

/* Return 0 (the answers went out, whatever they say) or -errno (the client is gone). */
static int open_link(struct prs_fabric *fabric, int control, struct link *link, const struct message *request)
{
    struct message answer = {.kind = MESSAGE_OPEN}, theirs;
    struct prs_listener *listener = NULL;
    int r = 0, sent;

    link_close(link);
    if (!is_rail_set(fabric, &request->rails))
        r = -ENODEV;
    if (request->queues < 1 || request->queues > QUEUES_MOST)
        r = -EINVAL;
    if (!r)
        r = link_open(link, fabric, &request->rails, &answer.memory);
    if (!r)
        r = prs_listen(fabric, &request->rails, &answer.handle, &listener);
    if (r)
        refuse(&answer, r);
    sent = control_send(control, &answer);
    if (!sent && !r)
        r = link_accept(link, listener, request->policy, request->queues, control);
    prs_listener_close(listener);
    if (sent || answer.status)
        return sent;
    /* The client tells its result and its memory; then it gets this side's. */
    sent = control_receive(control, &theirs);
    if (sent)
        return sent;
    link->remote = theirs.memory;
    answer.status = 0;
    if (r)
        refuse(&answer, r);
    return control_send(control, &answer);
}

static int run_trial(int control, struct link *link, const struct message *request)
{
    struct message answer = {.kind = MESSAGE_RUN};
    struct outcome outcome = {0};
    int r;

    if (!link->queues || request->count < 1 || request->count > PAIRS_MAX || request->trial < TRIAL_LATENCY ||
        request->trial > TRIAL_LAST)
        answer.status = -EINVAL;
    else
        trial_prepare(link);
    link->control = control;
    r = control_send(control, &answer); /* ready */
    if (r || answer.status)
        return r;
    r = trial_receive(link, (enum trial_kind)request->trial, request->count, &outcome);
    answer.late = outcome.late;
    answer.wrong = outcome.wrong;
    answer.status = r;
    if (r)
        link_say_failure(link, r, answer.text, sizeof(answer.text));
    return control_send(control, &answer);
}

int welcome(struct prs_fabric *fabric, int control, const char *cookie)
{
    struct message request, answer = {.kind = MESSAGE_HELLO};
    char wanted[COOKIE_BYTES] = "";
    unsigned differs = 0;
    int sent, r;

    control_set_limit(control, HELLO_LIMIT_MS); /* a stranger must not keep others waiting */
    r = control_receive(control, &request);
    if (r)
        return r;
    control_set_limit(control, CONTROL_LIMIT_MS);
    snprintf(wanted, sizeof(wanted), "%s", cookie);
    for (int i = 0; i < COOKIE_BYTES; i++) /* compare all bytes, so that the time does not tell how many were right */
        differs |= (unsigned char)request.cookie[i] ^ (unsigned char)wanted[i];
    if (request.kind != MESSAGE_HELLO || differs)
        r = -EACCES;
    if (r) {
        answer.status = r;
        snprintf(answer.text, sizeof(answer.text), "wrong cookie: --listen prints the command with the right one");
    } else {
        answer.side.rail_count = (uint32_t)prs_fabric_rails(fabric);
        snprintf(answer.text, sizeof(answer.text), "%s", prs_version());
    }
    sent = control_send(control, &answer);
    return r ? r : sent;
}

/* Answer all requests except OPEN and RUN, which have functions of their own. */
static int answer_short(struct prs_fabric *fabric, int control, struct link *link, struct network *network,
                        const struct message *request)
{
    struct message answer = {.kind = request->kind};

    if (request->kind == MESSAGE_CLOSE) {
        link_close(link);
    } else if (request->kind == MESSAGE_GROWN) {
        describe_growth(network, &answer.side);
    } else if (request->kind == MESSAGE_RAIL && is_rail_set(fabric, &request->rails)) {
        describe_rail(fabric, request->rails.rail[0], network, &answer.side);
    } else {
        answer.status = -EINVAL;
        snprintf(answer.text, sizeof(answer.text), "no such request, or no such rail");
    }
    return control_send(control, &answer);
}

int serve(struct prs_fabric *fabric, int control)
{
    static struct network network;
    struct link link = {0};
    struct message request;
    int r = 0;

    while (!r && !(r = control_receive(control, &request)) && request.kind != MESSAGE_BYE) {
        if (request.kind == MESSAGE_OPEN)
            r = open_link(fabric, control, &link, &request);
        else if (request.kind == MESSAGE_RUN)
            r = run_trial(control, &link, &request);
        else if (request.kind != MESSAGE_STOP)
            r = answer_short(fabric, control, &link, &network, &request);
    }
    link_close(&link);
    return r;
}
