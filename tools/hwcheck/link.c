/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/link.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/util/clock.h"

enum { PAGE = 4096 };

static void count_notification(void *user, uint32_t id, uint64_t bytes)
{
    struct link *link = user;

    link->notified[id % SLOTS]++;
    link->odd += bytes != link->announced_bytes;
}

static struct prs_peer_options options_of(struct link *link, const char *policy)
{
    return (struct prs_peer_options){
        .on_notify = count_notification, .user = link, .max_ops = 4 * SLOTS, .policy = policy};
}

int link_open(struct link *link, struct prs_fabric *fabric, const struct prs_rail_set *rails,
              struct place_of_memory *mine)
{
    struct prs_mem memory = {.len_bytes = DATA_BYTES, .kind = PRS_MEM_HOST};
    int r;

    memset(link, 0, sizeof(*link));
    link->data = aligned_alloc(PAGE, DATA_BYTES);
    link->words = aligned_alloc(PAGE, PAGE);
    if (!link->data || !link->words)
        return -ENOMEM;
    memset(link->data, 0, DATA_BYTES);
    memset(link->words, 0, PAGE);
    memory.addr = link->data;
    r = prs_region_register(fabric, rails, &memory, &link->data_region);
    if (r)
        return r;
    memory = (struct prs_mem){.addr = link->words, .len_bytes = PAGE, .kind = PRS_MEM_HOST, .flags = PRS_MEM_STRICT};
    r = prs_region_register(fabric, rails, &memory, &link->words_region);
    if (r)
        return r;
    mine->data = (uint64_t)(uintptr_t)link->data;
    mine->words = (uint64_t)(uintptr_t)link->words;
    prs_region_keys(link->data_region, &mine->data_keys);
    prs_region_keys(link->words_region, &mine->words_keys);
    return 0;
}

static void pause_briefly(void)
{
    nanosleep(&(struct timespec){0, 100000}, NULL);
}

static int accept_one(struct link *link, struct prs_listener *listener, const struct prs_peer_options *options,
                      int control)
{
    uint64_t start = prs_clock_ms();
    int r;

    while ((r = prs_accept(listener, options, &link->peer[link->queues])) == PRS_AGAIN) {
        if (control_has_input(control))
            return -ECANCELED;
        if (prs_clock_ms() - start > CONTROL_LIMIT_MS)
            return -ETIMEDOUT;
        pause_briefly();
    }
    return r;
}

int link_accept(struct link *link, struct prs_listener *listener, const char *policy, uint32_t queues, int control)
{
    struct prs_peer_options options = options_of(link, policy);
    int r = 0;

    for (; !r && link->queues < queues; link->queues += !r)
        r = accept_one(link, listener, &options, control);
    return r;
}

int link_connect(struct link *link, struct prs_fabric *fabric, const struct prs_rail_set *rails,
                 const struct prs_handle *handle, const char *policy, uint32_t queues)
{
    struct prs_peer_options options = options_of(link, policy);
    int r = 0;

    for (; !r && link->queues < queues; link->queues += !r) {
        struct prs_connector *connector;

        r = prs_connect(fabric, rails, handle, &options, &connector);
        while (!r && (r = prs_connector_step(connector, &link->peer[link->queues])) == PRS_AGAIN) {
            r = 0; /* the connector has its own time limit */
            pause_briefly();
        }
    }
    return r;
}

int link_progress(struct link *link)
{
    for (uint32_t i = 0; i < link->queues; i++) {
        int r = prs_peer_progress(link->peer[i]);

        if (r < 0)
            return r;
    }
    return 0;
}

void link_say_failure(const struct link *link, int r, char *text, size_t bytes)
{
    const char *error = r == -ETIMEDOUT ? "nothing arrives: do the NICs reach each other (subnets of their GIDs, VLAN, "
                                          "partition, filters of UDP port 4791)?"
                                        : strerror(-r);

    for (uint32_t i = 0; i < link->queues; i++)
        if (prs_peer_error(link->peer[i])[0]) {
            error = prs_peer_error(link->peer[i]);
            break;
        }
    snprintf(text, bytes, "%s", error);
}

void link_close(struct link *link)
{
    for (uint32_t i = 0; i < link->queues; i++)
        prs_peer_close(link->peer[i]);
    prs_region_release(link->data_region);
    prs_region_release(link->words_region);
    free(link->data);
    free(link->words);
    memset(link, 0, sizeof(*link));
}
