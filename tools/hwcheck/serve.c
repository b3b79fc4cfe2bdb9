/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/serve.h"

#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/hwcheck/trial.h"

enum { PAIRS_MAX = 100000000 };

static uint32_t network_mtu(const char *device)
{
    char pattern[256];
    uint32_t mtu = 0;
    glob_t found;
    FILE *file;

    snprintf(pattern, sizeof(pattern), "/sys/class/infiniband/%s/device/net/*/mtu", device);
    if (glob(pattern, 0, NULL, &found))
        return 0;
    file = fopen(found.gl_pathv[0], "re");
    if (file && fscanf(file, "%u", &mtu) != 1)
        mtu = 0;
    if (file)
        fclose(file);
    globfree(&found);
    return mtu;
}

void describe_rail(struct prs_fabric *fabric, int rail, struct message *message)
{
    struct prs_rail_info info;

    gethostname(message->host, sizeof(message->host) - 1);
    message->rails = (uint32_t)prs_fabric_rails(fabric);
    if (prs_fabric_interface(fabric, message->interface, sizeof(message->interface)))
        snprintf(message->interface, sizeof(message->interface), "none: %.150s", prs_error_text());
    if (prs_rail_query(fabric, rail, &info))
        return;
    snprintf(message->device, sizeof(message->device), "%s:%d", info.name, info.port);
    snprintf(message->gid, sizeof(message->gid), "%s", info.gid);
    snprintf(message->link, sizeof(message->link), "%s", info.link);
    message->speed_mbps = info.speed_mbps;
    message->mtu = network_mtu(info.name);
}

static int refuse(struct message *answer, int error)
{
    answer->status = error;
    snprintf(answer->text, sizeof(answer->text), "%s", prs_error_text()[0] ? prs_error_text() : strerror(-error));
    return 0;
}

/* Return 0 (the answers went out, whatever they say) or -errno (the client is gone). */
static int open_link(struct prs_fabric *fabric, int control, struct link *link, const struct message *request)
{
    const struct prs_rail_set rails = {.count = 1, .rail = {(int)request->rail}};
    struct message answer = {.kind = MESSAGE_OPEN}, theirs;
    struct prs_listener *listener = NULL;
    int r = 0, sent;

    link_close(link);
    if (request->rail >= (uint32_t)prs_fabric_rails(fabric))
        r = -ENODEV;
    else
        describe_rail(fabric, (int)request->rail, &answer);
    if (!r)
        r = link_open(link, fabric, (int)request->rail, &answer.memory);
    if (!r)
        r = prs_listen(fabric, &rails, &answer.handle, &listener);
    if (r)
        refuse(&answer, r);
    sent = control_send(control, &answer);
    if (!sent && !r)
        r = link_accept(link, listener, request->policy, control);
    prs_listener_close(listener);
    if (sent || answer.status)
        return sent;
    /* The client says how its side went, and with which memory; then it hears of this side. */
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

    if (!link->peer || request->count < 1 || request->count > PAIRS_MAX || request->trial < TRIAL_LATENCY ||
        request->trial > TRIAL_NOTIFY)
        answer.status = -EINVAL;
    else
        trial_prepare(link);
    r = control_send(control, &answer); /* ready */
    if (r || answer.status)
        return r;
    r = trial_receive(link, (enum trial_kind)request->trial, request->count, &outcome);
    answer.late = outcome.late;
    answer.wrong = outcome.wrong;
    if (r)
        refuse(&answer, r);
    return control_send(control, &answer);
}

int serve(struct prs_fabric *fabric, int control)
{
    struct link link = {0};
    struct message request, answer;
    int r;

    while (!(r = control_receive(control, &request)) && request.kind != MESSAGE_BYE) {
        if (request.kind == MESSAGE_OPEN) {
            r = open_link(fabric, control, &link, &request);
        } else if (request.kind == MESSAGE_RUN) {
            r = run_trial(control, &link, &request);
        } else {
            if (request.kind == MESSAGE_CLOSE)
                link_close(&link);
            answer = (struct message){.kind = request.kind};
            describe_rail(fabric, 0, &answer);
            snprintf(answer.text, sizeof(answer.text), "%s", prs_version());
            r = control_send(control, &answer);
        }
        if (r)
            break;
    }
    link_close(&link);
    return r;
}
