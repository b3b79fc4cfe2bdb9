/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/util/clock.h"

enum { PAGE = 4096 };

static void count_notification(void *user, uint32_t id, uint64_t bytes)
{
    struct link *link = user;

    (void)id;
    link->notified++;
    link->odd += bytes != SMALL_BYTES;
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

int link_accept(struct link *link, struct prs_listener *listener, const char *policy, int control)
{
    struct prs_peer_options options = options_of(link, policy);
    uint64_t start = prs_clock_ms();
    int r;

    while ((r = prs_accept(listener, &options, &link->peer)) == PRS_AGAIN) {
        if (control_has_input(control))
            return -ECANCELED;
        if (prs_clock_ms() - start > CONTROL_LIMIT_MS)
            return -ETIMEDOUT;
        pause_briefly();
    }
    return r;
}

int link_connect(struct link *link, struct prs_fabric *fabric, const struct prs_rail_set *rails,
                 const struct prs_handle *handle, const char *policy)
{
    struct prs_peer_options options = options_of(link, policy);
    struct prs_connector *connector;
    int r = prs_connect(fabric, rails, handle, &options, &connector);

    while (!r && (r = prs_connector_step(connector, &link->peer)) == PRS_AGAIN) {
        r = 0; /* the connector has its own time limit */
        pause_briefly();
    }
    return r;
}

void link_close(struct link *link)
{
    prs_peer_close(link->peer);
    prs_region_release(link->data_region);
    prs_region_release(link->words_region);
    free(link->data);
    free(link->words);
    memset(link, 0, sizeof(*link));
}
