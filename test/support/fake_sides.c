/* SPDX-License-Identifier: Apache-2.0 */
#include "test/support/fake_sides.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "test/support/fake_verbs.h"
#include "transport/nic/verbs/address.h"
#include "transport/peer/health.h"
#include "transport/peer/links.h"
#include "transport/peer/recovery.h"

#define must(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* ---- a NIC whose queues only know whom they are connected to ---- */

struct side sides[2];
uint32_t links_open;
bool answers;
static uint32_t last_number;

struct fake_link *fake(struct prs_link *link)
{
    return (struct fake_link *)link;
}

static const struct prs_nic_ops fake_nic;

static const bool never_overrun;

static int open_link(const struct prs_link_options *options, struct prs_link **out)
{
    struct fake_link *link = calloc(1, sizeof(*link));

    must(link);
    link->base =
        (struct prs_link){.overrun = &never_overrun, .rail = options->rail, .own = *options->own, .queue_count = 1};
    link->base.queue = link->list;
    link->list[0] = &link->queue;
    link->queue = (struct prs_queue){.link = &link->base, .id = options->ids[0], .number = 1, .takes_inline = true};
    link->base.ops = &fake_nic;
    link->number = ++last_number;
    link->polls_until_flushed = 2;
    links_open++;
    *out = &link->base;
    return 0;
}

static void close_link(struct prs_link *link)
{
    links_open--;
    free(link);
}

static void tell_address(const struct prs_queue *queue, struct prs_nic_address *out)
{
    prs_verbs_tell_queue(&(struct prs_verbs_queue){.number = ((struct fake_link *)queue->link)->number}, out);
}

static int locate(const struct prs_rail *rail, const struct prs_config *config, struct prs_rail_address *out, char *why,
                  size_t why_bytes)
{
    *out = rail->address;
    return 0;
}

static int connect_queue(struct prs_queue *queue, const struct prs_nic_address *told,
                         const struct prs_nic_address *port, int *error)
{
    struct prs_verbs_queue address;
    struct prs_verbs_port remote;

    if (prs_verbs_read_queue(told, &address) || prs_verbs_read_port(port, &remote))
        return -EPROTO;
    fake(queue->link)->connected_to = address.number;
    fake(queue->link)->mtu = remote.mtu;
    fake(queue->link)->reads = remote.reads;
    return 0;
}

static void stop(struct prs_link *link)
{
    link->stopped = true;
}

static int post(struct prs_queue *queue, const struct prs_wr *ring, uint32_t mask, uint32_t first, uint32_t count)
{
    fake(queue->link)->posted += count;
    fake(queue->link)->last = first + count - 1;
    return 0;
}

static uint32_t taken(const struct prs_queue *queue)
{
    return 0;
}

static bool drained(const struct prs_link *link)
{
    return link->stopped && fake((struct prs_link *)link)->polls_until_flushed-- <= 0;
}

static int poll_link(struct prs_link *link, struct prs_event *events)
{
    struct fake_link *at = fake(link);

    if (!at->posted)
        return 0;
    at->posted = 0;
    events[0] = (struct prs_event){.kind = PRS_EVENT_DONE, .queue = at->queue.id, .value = at->last};
    if (!answers || link->stopped)
        events[0] = (struct prs_event){.kind = PRS_EVENT_ERROR, .queue = at->queue.id, .text = "no answer"};
    return 1;
}

static const struct prs_nic_ops fake_nic = {.in_order = true,
                                            .fails_over = true,
                                            .open = open_link,
                                            .close = close_link,
                                            .address = tell_address,
                                            .locate = locate,
                                            .is_port = prs_verbs_is_port,
                                            .address_text = prs_verbs_address_text,
                                            .stop = stop,
                                            .kill = stop,
                                            .connect = connect_queue,
                                            .post = post,
                                            .taken = taken,
                                            .drained = drained,
                                            .poll = poll_link};

/* ---- two sides ---- */

struct prs_failover_path *path_at(int s)
{
    return &sides[s].peer.failover->path[0];
}

static void open_side(struct side *side, int fd, bool offers)
{
    struct prs_order_options options = {.policy = PRS_POLICY_COUNTED,
                                        .in_order = true,
                                        .fence = true,
                                        .failover = true,
                                        .max_ops = 64,
                                        .path_count = PATHS,
                                        .queues_per_path = 1,
                                        .depth = 16,
                                        .max_part_bytes = 1 << 20};
    const struct prs_verbs_own_port port = {.port = {.mtu = 5, .reads = 1}};

    memset(side, 0, sizeof(*side));
    side->fabric.config =
        (struct prs_config){.timeout_ms = 60000, .return_async_events = 1, .failover = 1, .recovery = 1};
    side->peer.fabric = &side->fabric;
    side->peer.nic = &fake_nic;
    side->peer.stream_fd = fd;
    side->peer.offers = offers;
    side->peer.path_count = PATHS;
    side->peer.queues = PATHS;
    side->peer.queues_per_path = 1;
    for (uint32_t i = 0; i < PATHS; i++) {
        side->domain[i].nic = &fake_nic;
        side->fabric.rail[i] = (struct prs_rail){.domain = &side->domain[i], .port = 1};
        prs_verbs_tell_port(&port, &side->fabric.rail[i].address);
        side->peer.path[i].local_rail = (int)i;
        options.path[i] = (struct prs_order_path){.local_rail = i, .remote_rail = i, .rate = 1000};
    }
    must(prs_order_init(&side->peer.order, &options) == 0);
    for (uint32_t i = 0; i < PATHS; i++) {
        must(prs_links_open_path(&side->peer, i, &side->fabric.rail[i].address, NULL, &side->peer.link[i]) == 0);
        side->peer.queue[i] = side->peer.link[i]->queue[0];
    }
    must(prs_failover_open(&side->peer) == 0);
}

void open_sides(void)
{
    int fds[2];

    fake_verbs_install();
    answers = true;
    links_open = last_number = 0;
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    for (int s = 0; s < 2; s++)
        open_side(&sides[s], fds[s], s == A);
    for (uint32_t i = 0; i < PATHS; i++)
        for (int s = 0; s < 2; s++)
            fake(sides[s].peer.link[i])->connected_to = fake(sides[!s].peer.link[i])->number;
}

void fail_early(int s)
{
    static struct prs_nic_ops early;

    early = fake_nic;
    early.fails_early = true;
    sides[s].peer.nic = &early;
}

void fail_request(int s, uint32_t path)
{
    struct prs_event failure = {
        .kind = PRS_EVENT_ERROR, .queue = path, .error = -ETIMEDOUT, .text = "no answer", .cause = "the test"};

    must(prs_health_judge(&sides[s].peer, &failure) == 0);
}

void close_sides(void)
{
    for (int s = 0; s < 2; s++) {
        struct prs_peer *peer = &sides[s].peer;

        prs_recovery_close(peer);
        for (uint32_t i = 0; i < PATHS; i++)
            close_link(peer->link[i]);
        prs_order_fini(&peer->order);
        prs_failover_close(peer);
        close(peer->stream_fd);
    }
    must(links_open == 0);
}
