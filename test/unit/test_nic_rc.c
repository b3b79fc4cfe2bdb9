/* SPDX-License-Identifier: Apache-2.0 */
/* The RC back end on devices, and in networks, that we do not have. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include "test/support/fake_verbs.h"
#include "transport/nic/verbs/cqs.h"
#include "transport/nic/verbs/device.h"
#include "transport/nic/verbs/verbs_nic.h"
#include "transport/util/error.h"

struct row {
    uint32_t depth;    /* entries of the receive queue */
    uint32_t receives; /* posted when the queue is created */
    uint32_t batch;    /* number of arrivals after which more are posted */
};

ParameterizedTestParameters(nic_rc, small_devices_get_receives_too)
{
    static struct row rows[] = {{1, 1, 1},    {2, 2, 1},      {16, 16, 8},     {63, 62, 31},
                                {64, 64, 32}, {100, 100, 50}, {1024, 1024, 64}};

    return cr_make_param_array(struct row, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct row *row, nic_rc, small_devices_get_receives_too)
{
    static const struct prs_config config;
    static const struct prs_rail_address own;
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1};
    uint32_t id = 0;
    struct prs_link_options options = {.rail = &rail,
                                       .own = &own,
                                       .config = &config,
                                       .queues = 1,
                                       .ids = &id,
                                       .depth = 64,
                                       .loopback_depth = 64,
                                       .receive_depth = row->depth};
    struct prs_event events[PRS_POLL_MOST];
    struct prs_link *link;

    fake_verbs_install();
    cr_assert_eq(prs_nic_rc.open(&options, &link), 0);
    cr_assert_leq(fake_verbs.asked_receives, row->depth);
    cr_assert_eq(fake_verbs.posted_receives, row->receives, "of %u: %u are posted, want %u", row->depth,
                 fake_verbs.posted_receives, row->receives);
    for (uint32_t i = 1; i <= row->batch; i++) {
        cr_assert_eq(fake_verbs.posted_receives, row->receives, "after %u arrivals", i - 1);
        fake_verbs_complete((struct ibv_wc){.wr_id = 1ull << 63, .opcode = IBV_WC_RECV_RDMA_WITH_IMM});
        cr_assert_eq(prs_nic_rc.poll(link, events), 1);
    }
    cr_assert_eq(fake_verbs.posted_receives, row->receives + row->batch, "after %u arrivals", row->batch);
    prs_nic_rc.close(link);
}

static struct prs_link *open_queue(struct prs_rail *rail, const struct prs_rail_address *own, int service_level)
{
    static const struct prs_config config = {.ece = 1};
    static const uint32_t id = 0;
    struct prs_link_options options = {.rail = rail,
                                       .own = own,
                                       .config = &config,
                                       .traffic_class = 3,
                                       .service_level = service_level,
                                       .queues = 1,
                                       .ids = &id,
                                       .depth = 64,
                                       .loopback_depth = 64,
                                       .receive_depth = 64};
    struct prs_link *link;

    cr_assert_eq(prs_nic_rc.open(&options, &link), 0);
    return link;
}

static struct prs_verbs_queue address_of(const struct prs_link *link)
{
    struct prs_nic_address told;
    struct prs_verbs_queue queue;

    prs_nic_rc.address(link->queue[0], &told);
    cr_assert_eq(prs_verbs_read_queue(&told, &queue), 0);
    return queue;
}

static void complete_receive(struct prs_link *link, enum ibv_wc_status status)
{
    struct prs_event events[PRS_POLL_MOST];

    fake_verbs_complete((struct ibv_wc){.wr_id = 1ull << 63, .status = status, .opcode = IBV_WC_RECV_RDMA_WITH_IMM});
    cr_assert_eq(prs_nic_rc.poll(link, events), 1);
}

/* soft-RoCE never completes a receive that is posted to a queue in the error state: its driver only writes a ring. */
Test(nic_rc, arrivals_that_are_polled_after_the_stop_post_no_receives)
{
    static const struct prs_rail_address own;
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1};
    struct prs_link *link;
    uint32_t receives;

    fake_verbs_install();
    link = open_queue(&rail, &own, 0);
    receives = fake_verbs.posted_receives;
    for (uint32_t i = 1; i < receives / 2; i++) /* one less than a batch */
        complete_receive(link, IBV_WC_SUCCESS);
    prs_nic_rc.stop(link);
    for (int i = 0; i < 3; i++)
        complete_receive(link, IBV_WC_SUCCESS);
    cr_assert_eq(fake_verbs.posted_receives, receives);
    cr_assert_eq(prs_nic_rc.taken(link->queue[0]), receives / 2 + 2);
    for (uint32_t i = receives / 2 + 2; i < receives; i++) {
        cr_assert_not(prs_nic_rc.drained(link));
        complete_receive(link, IBV_WC_WR_FLUSH_ERR);
    }
    cr_assert(prs_nic_rc.drained(link));
    prs_nic_rc.close(link);
}

static uint32_t destroyed;

static int refuse_to_change(struct ibv_qp *which, struct ibv_qp_attr *attr, int mask)
{
    return attr->qp_state == IBV_QPS_ERR ? EIO : 0;
}

static int count_destroyed(struct ibv_qp *which)
{
    destroyed++;
    return 0;
}

/* Otherwise the NIC would continue with requests whose memory is used again. */
Test(nic_rc, a_queue_that_cannot_be_stopped_is_destroyed)
{
    static const struct prs_rail_address own;
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1};
    struct prs_event events[PRS_POLL_MOST];
    struct prs_link *link;

    fake_verbs_install();
    link = open_queue(&rail, &own, 0);
    prs_verbs.modify_qp = refuse_to_change;
    prs_verbs.destroy_qp = count_destroyed;
    fake_verbs_complete((struct ibv_wc){.wr_id = 0, .opcode = IBV_WC_RDMA_WRITE});
    prs_nic_rc.stop(link);
    cr_assert(link->unflushed && destroyed == 0, "first what has completed is to be polled");
    prs_nic_rc.kill(link);
    cr_assert_eq(destroyed, 1u);
    cr_assert_eq(prs_nic_rc.poll(link, events), 0, "what the driver left there is no news");
    prs_nic_rc.close(link);
    cr_assert_eq(destroyed, 1u);
}

/* ---- the way to the peer ---- */

struct way {
    char own[40], remote[40]; /* GIDs */
    bool is_roce, grh_required;
    bool is_global; /* expected, like the LID */
    uint16_t lid;
};

enum { REMOTE_LID = 9 };

ParameterizedTestParameters(nic_rc, packets_have_the_header_that_their_way_needs)
{
    static struct way rows[] = {
        {"fe80::1", "fe80::2", false, false, false, REMOTE_LID}, /* one subnet: the LID is enough */
        {"fe80::1", "fe80::2", false, true, true, REMOTE_LID},   /* a virtual function whose port requires the header */
        {"fe80::1", "fe80:0:0:1::2", false, false, true,
         REMOTE_LID}, /* another subnet, of which no router has told us a LID */
        {"fec0:0:20:1::1", "fec0:0:30:2::2", false, false, true, 0x30}, /* another subnet, by its router's LID */
        {"fec0:0:20:1::1", "fec0:0:30:1::2", false, false, false,
         REMOTE_LID}, /* one subnet, though the routers' LIDs differ */
        {"fec0:0:20:1::1", "fec0:0:30:1::2", false, true, true, REMOTE_LID},
        {"::ffff:10.0.0.1", "::ffff:10.0.0.2", true, false, true, REMOTE_LID}, /* RoCE always has the header, and no
                                                                                * LID */
    };

    return cr_make_param_array(struct way, rows, sizeof(rows) / sizeof(*rows));
}

ParameterizedTest(struct way *way, nic_rc, packets_have_the_header_that_their_way_needs)
{
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1, .info.is_roce = way->is_roce};
    struct prs_verbs_own_port own = {
        .port = {.lid = 7, .mtu = 5, .reads = 16}, .gid_index = 4, .grh_required = way->grh_required};
    struct prs_verbs_own_port remote = {.port = {.lid = REMOTE_LID, .mtu = 4, .reads = 16}};
    struct prs_rail_address own_address, remote_address;
    struct prs_nic_address queue;
    const struct ibv_ah_attr *ah = &fake_verbs.rtr.ah_attr;
    struct prs_link *link;
    int error;

    fake_verbs_install();
    inet_pton(AF_INET6, way->own, own.port.gid);
    inet_pton(AF_INET6, way->remote, remote.port.gid);
    prs_verbs_tell_port(&own, &own_address);
    prs_verbs_tell_port(&remote, &remote_address);
    prs_verbs_tell_queue(&(struct prs_verbs_queue){.number = 11}, &queue);
    link = open_queue(&rail, &own_address, 6);
    cr_assert_eq(prs_nic_rc.connect(link->queue[0], &queue, &remote_address.told, &error), 0);
    cr_assert_eq(ah->is_global, way->is_global, "%s to %s", way->own, way->remote);
    cr_assert_eq(ah->dlid, way->lid, "%s to %s: LID %u", way->own, way->remote, ah->dlid);
    cr_assert_eq(ah->sl, 6);
    cr_assert(!ah->is_global || (ah->grh.sgid_index == 4 && ah->grh.traffic_class == 3 && ah->grh.hop_limit == 255 &&
                                 !memcmp(ah->grh.dgid.raw, remote.port.gid, 16)));
    cr_assert_eq(fake_verbs.rtr.path_mtu, 4, "the smaller of both");
    prs_nic_rc.close(link);
}

/* Addresses come from the other side, by the handshake or by a note. */
Test(nic_rc, addresses_with_impossible_values_are_refused)
{
    static const struct prs_rail_address own;
    static const struct {
        struct prs_verbs_port port;
        uint32_t number;
        int port_bytes, queue_bytes; /* more or fewer than there should be */
    } rows[] = {{{.mtu = 0, .reads = 1}, 1, 0, 0},   {{.mtu = 6, .reads = 1}, 1, 0, 0},
                {{.mtu = 5, .reads = 0}, 1, 0, 0},   {{.mtu = 5, .reads = 1}, 1, 1, 0},
                {{.mtu = 5, .reads = 1}, 1, -1, 0},  {{.mtu = 5, .reads = 1}, 1, 0, 1},
                {{.mtu = 5, .reads = 1}, 1, 0, -20}, {{.mtu = 5, .reads = 1}, 1 << 24, 0, 0}};
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1};

    fake_verbs_install();
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct prs_link *link = open_queue(&rail, &own, 0);
        struct prs_rail_address port;
        struct prs_nic_address queue;
        int error;

        prs_verbs_tell_port(&(struct prs_verbs_own_port){.port = rows[i].port}, &port);
        prs_verbs_tell_queue(&(struct prs_verbs_queue){.number = rows[i].number}, &queue);
        port.told.length = (uint8_t)(port.told.length + rows[i].port_bytes);
        queue.length = (uint8_t)(queue.length + rows[i].queue_bytes);
        cr_assert_eq(prs_nic_rc.connect(link->queue[0], &queue, &port.told, &error), -EPROTO, "row %zu", i);
        cr_assert(strstr(prs_error_text(), "impossible address"), "%s", prs_error_text());
        prs_nic_rc.close(link);
    }
}

/* Drivers refuse the flag on devices without atomics, and with it the queue. */
Test(nic_rc, only_devices_with_atomics_are_asked_for_them)
{
    static const struct prs_rail_address own;

    fake_verbs_install();
    for (int adds = 0; adds < 2; adds++) {
        struct prs_verbs_device device = {.base.adds = adds, .context = &fake_verbs.extended.context};
        struct prs_rail rail = {.domain = &device.base, .port = 1};

        prs_nic_rc.close(open_queue(&rail, &own, 0));
        cr_assert_eq(!!(fake_verbs.init.qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC), adds);
    }
}

/* Whether payloads are registered is decided once, for the first queue. */
Test(nic_rc, all_queues_take_inline_data_or_none)
{
    struct prs_rail_address own;
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1};
    struct prs_queue *loopback = NULL;
    struct prs_link *link;

    fake_verbs_install();
    prs_verbs_tell_port(&(struct prs_verbs_own_port){.port = {.mtu = 5, .reads = 1}}, &own);
    link = open_queue(&rail, &own, 0);
    cr_assert(link->queue[0]->takes_inline);
    fake_verbs.max_inline = 0; /* short of memory, for example */
    cr_assert_lt(prs_nic_rc.loopback(link, 1, &loopback), 0, "its payloads are not registered");
    prs_nic_rc.close(link);

    link = open_queue(&rail, &own, 0);
    cr_assert_not(link->queue[0]->takes_inline, "a device without inline data");
    fake_verbs.max_inline = 64;
    cr_assert_eq(prs_nic_rc.loopback(link, 1, &loopback), 0);
    cr_assert_not(loopback->takes_inline);
    prs_nic_rc.close(link);
}

Test(nic_rc, queues_agree_on_what_both_nics_can_do)
{
    static const struct prs_rail_address own;
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1};
    struct prs_verbs_queue listener = {.number = 5, .ece = {.vendor = 0x1405, .options = 6, .mask = 0}}, connector;
    struct prs_rail_address remote;
    struct prs_nic_address told;
    struct prs_link *link;
    int error;

    fake_verbs_install();
    fake_verbs.ece = (struct ibv_ece){.vendor_id = 0x1405, .options = 12};
    link = open_queue(&rail, &own, 0);
    prs_verbs_tell_port(&(struct prs_verbs_own_port){.port = {.mtu = 5, .reads = 1}}, &remote);
    connector = address_of(link);
    cr_assert(connector.ece.vendor == 0x1405 && connector.ece.options == 12, "a listener names all that it can do");
    prs_verbs_tell_queue(&listener, &told);
    cr_assert_eq(prs_nic_rc.connect(link->queue[0], &told, &remote.told, &error), 0);
    cr_assert_eq(fake_verbs.asked_ece.options, 6);
    connector = address_of(link);
    cr_assert_eq(connector.ece.options, 4, "a connector answers what is left");
    prs_nic_rc.close(link);
    prs_verbs.set_ece = NULL; /* a library without it */
    link = open_queue(&rail, &own, 0);
    connector = address_of(link);
    cr_assert_eq(connector.ece.vendor, 0);
    prs_nic_rc.close(link);
}

/* A call of the driver takes a few at a time, whatever the length of the chain and wherever the ring wraps. */
Test(nic_rc, a_long_chain_is_posted_whole_and_in_order)
{
    static const uint32_t lengths[] = {1, 31, 32, 33, 64};
    static const struct prs_rail_address own;
    static struct prs_wr ring[64];
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1};
    uint32_t first = 50;
    struct prs_link *link;

    fake_verbs_install();
    link = open_queue(&rail, &own, 0);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); i++) {
        fake_verbs.sends = fake_verbs.send_calls = 0;
        cr_assert_eq(prs_nic_rc.post(link->queue[0], ring, 63, first, lengths[i]), 0);
        cr_assert_eq(fake_verbs.sends, lengths[i]);
        cr_assert_eq(fake_verbs.send_calls, (lengths[i] + 31) / 32);
        for (uint32_t k = 0; k < lengths[i]; k++)
            cr_assert_eq((uint32_t)fake_verbs.send_ids[k], first + k, "request %u of %u", k, lengths[i]);
        first += lengths[i];
    }
    prs_nic_rc.close(link);
}

/* Keys have 64 bits on the wire. The NIC must never see the lower half of one that is not its own. */
Test(nic_rc, a_key_of_more_than_32_bits_is_refused_by_name)
{
    static const struct prs_rail_address own;
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1, .info.name = "mlx5_7"};
    struct prs_link *link;

    fake_verbs_install();
    link = open_queue(&rail, &own, 0);
    for (uint8_t opcode = PRS_WR_WRITE; opcode <= PRS_WR_ADD; opcode++) {
        for (uint32_t at = 0; at < 40; at++) {
            struct prs_wr ring[64] = {{0}};

            for (uint32_t i = 0; i < 64; i++)
                ring[i] = (struct prs_wr){.remote_addr = 0x9000, .remote_key = UINT32_MAX, .len_bytes = 8};
            ring[at] =
                (struct prs_wr){.remote_addr = 0x5000, .remote_key = 0x100000007, .len_bytes = 8, .opcode = opcode};
            fake_verbs.sends = 0;
            cr_assert_eq(prs_nic_rc.post(link->queue[0], ring, 63, 60, 4), 0, "not in this chain");
            cr_assert_eq(prs_nic_rc.post(link->queue[0], ring, 63, 0, 40), -EKEYREJECTED, "request %u", at);
            cr_assert_eq(fake_verbs.sends, at < 32 ? 4u : 36u, "neither it nor its neighbours are posted");
            cr_assert(strstr(prs_error_last(), "mlx5_7:1") && strstr(prs_error_last(), "key 0x100000007") &&
                          strstr(prs_error_last(), "for 0x5000"),
                      "%s", prs_error_last());
        }
    }
    prs_nic_rc.close(link);
}

/* ---- links that share completion queues ---- */

static struct prs_link *open_sharing(struct prs_rail *rail, struct prs_cqs *cqs, uint32_t id)
{
    static const struct prs_config config;
    static const struct prs_rail_address own;
    struct prs_link_options options = {.rail = rail,
                                       .own = &own,
                                       .config = &config,
                                       .queues = 1,
                                       .ids = &id,
                                       .depth = 64,
                                       .loopback_depth = 64,
                                       .receive_depth = 64,
                                       .shared = &cqs->base};
    struct prs_link *link;

    cr_assert_eq(prs_nic_rc.open(&options, &link), 0);
    return link;
}

static void complete_arrival(uint32_t name, uint32_t value)
{
    fake_verbs_complete((struct ibv_wc){
        .wr_id = 1ull << 63 | (uint64_t)name << 32, .opcode = IBV_WC_RECV_RDMA_WITH_IMM, .imm_data = htonl(value)});
}

static void complete_request(uint32_t name, uint32_t position)
{
    fake_verbs_complete((struct ibv_wc){.wr_id = (uint64_t)name << 32 | position});
}

/* The next events must be `count` of this link, from this value on. */
static void expect_events(struct prs_cqs *cqs, const struct prs_link *link, int count, uint32_t value, bool want_more)
{
    struct prs_event events[PRS_POLL_MOST];
    struct prs_link *from;
    bool more;

    cr_assert_eq(prs_nic_rc.poll_shared(&cqs->base, &from, events, &more), count);
    cr_assert_eq(from, link);
    for (int i = 0; i < count; i++) {
        cr_assert_eq(events[i].value, value + (uint32_t)i);
        cr_assert_eq(events[i].queue, link->queue[0]->id);
    }
    cr_assert_eq(more, want_more);
}

/* Three links with queues 5, 6 and 7 of their peers, which the completion queue knows as 0, 1 and 2. */
struct sharing {
    struct prs_verbs_device device;
    struct prs_rail rail;
    struct prs_cqs *cqs;
    struct prs_link *link[3];
};

static struct sharing open_three(uint32_t adopted)
{
    static struct sharing s;
    static int users[3];

    fake_verbs_install();
    s.device.context = &fake_verbs.extended.context;
    s.rail = (struct prs_rail){.domain = &s.device.base, .port = 1};
    cr_assert_eq(prs_cqs_open(&s.rail, true, &s.cqs), 0);
    for (uint32_t i = 0; i < 3; i++) {
        s.link[i] = open_sharing(&s.rail, s.cqs, 5 + i);
        if (i < adopted)
            cr_assert_eq(prs_cqs_adopt(s.cqs, s.link[i], &users[i]), 0);
    }
    return s;
}

static void close_three(struct sharing *s)
{
    for (int i = 0; i < 3; i++)
        if (s->link[i])
            prs_nic_rc.close(s->link[i]);
    prs_cqs_drop(s->cqs);
}

Test(nic_rc, completions_of_one_queue_reach_each_link_in_order)
{
    struct sharing s = open_three(3);

    complete_arrival(1, 10);
    complete_arrival(1, 11);
    complete_request(2, 20);
    complete_request(1, 12);
    expect_events(s.cqs, s.link[1], 2, 10, true);
    expect_events(s.cqs, s.link[2], 1, 20, true);
    expect_events(s.cqs, s.link[1], 1, 12, false);
    expect_events(s.cqs, NULL, 0, 0, false);
    close_three(&s);
}

Test(nic_rc, one_link_takes_its_own_and_leaves_the_rest)
{
    struct sharing s = open_three(3);
    struct prs_event events[PRS_POLL_MOST];

    for (uint32_t i = 0; i < 20; i++) { /* more than one call of poll returns */
        complete_request(0, i);
        complete_request(2, 100 + i);
    }
    cr_assert_eq(prs_nic_rc.poll(s.link[2], events), 8, "of the first 16 completions");
    cr_assert_eq(events[0].value, 100);
    for (uint32_t i = 8; i < 20;) {
        int count = prs_nic_rc.poll(s.link[2], events);

        cr_assert_gt(count, 0);
        for (int k = 0; k < count; k++)
            cr_assert_eq(events[k].value, 100 + i++);
    }
    cr_assert_eq(prs_nic_rc.poll(s.link[2], events), 0);
    expect_events(s.cqs, s.link[0], 16, 0, true);
    expect_events(s.cqs, s.link[0], 4, 16, false);
    close_three(&s);
}

/* Another thread is still making the link when the other side's first message arrives. */
Test(nic_rc, what_comes_before_a_link_is_used_waits_for_its_user)
{
    struct sharing s = open_three(2);
    int user;

    complete_arrival(2, 30);
    complete_arrival(0, 1);
    complete_arrival(2, 31);
    expect_events(s.cqs, s.link[0], 1, 1, false);
    complete_arrival(2, 32);
    complete_arrival(1, 2);
    expect_events(s.cqs, s.link[1], 1, 2, false);
    cr_assert_eq(prs_cqs_adopt(s.cqs, s.link[2], &user), 0);
    complete_arrival(2, 33);
    expect_events(s.cqs, s.link[2], 3, 30, false);
    expect_events(s.cqs, s.link[2], 1, 33, false);
    close_three(&s);
}

/* Drivers may leave completions of a destroyed queue pair in the queue. The next link gets the same name, but must not
 * get those completions. */
Test(nic_rc, what_a_closed_link_has_left_is_dropped)
{
    struct sharing s = open_three(2);
    int user;

    complete_arrival(2, 30); /* will be held back */
    complete_request(1, 10);
    complete_request(1, 11);
    complete_request(0, 1);
    expect_events(s.cqs, s.link[1], 2, 10, true);
    complete_request(2, 31); /* stays in the completion queue */
    complete_request(0, 2);
    prs_nic_rc.close(s.link[2]);
    s.link[2] = open_sharing(&s.rail, s.cqs, 9);
    cr_assert_eq(prs_cqs_adopt(s.cqs, s.link[2], &user), 0);
    complete_request(2, 40);
    expect_events(s.cqs, s.link[0], 2, 1, false);
    expect_events(s.cqs, s.link[2], 1, 40, false);
    expect_events(s.cqs, NULL, 0, 0, false);
    close_three(&s);
}

/* The links may end later than the context whose completion queues they share. */
Test(nic_rc, links_keep_the_completion_queues_that_they_share)
{
    struct sharing s = open_three(3);

    prs_cqs_drop(s.cqs);
    s.cqs = NULL;
    close_three(&s);
}

/* ---- a driver that is told which requests will come ---- */

static struct ibv_qp_init_attr_ex asked;
static int refused_sized;

static struct ibv_qp *make_sized(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    asked = *attr;
    errno = EOPNOTSUPP;
    if (refused_sized)
        return NULL;
    fake_verbs.qp.qp_base.context = context;
    return &fake_verbs.qp.qp_base;
}

Test(nic_rc, a_send_ring_is_for_the_requests_that_will_come)
{
    struct prs_verbs_device device = {.context = &fake_verbs.extended.context};
    struct prs_rail rail = {.domain = &device.base, .port = 1};
    struct prs_rail_address own = {0};
    struct prs_link *link;

    fake_verbs_install();
    fake_verbs.extended.create_qp_ex = make_sized;
    for (refused_sized = 0; refused_sized < 2; refused_sized++) {
        fake_verbs.asked_receives = 0;
        link = open_queue(&rail, &own, 0);
        cr_assert(asked.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS && asked.cap.max_send_wr == 64 &&
                  asked.cap.max_inline_data == PRS_INLINE_BYTES && asked.qp_type == IBV_QPT_RC);
        cr_assert_eq(asked.send_ops_flags, (uint64_t)(IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                                                      IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD));
        cr_assert(link->queue[0]->takes_inline);
        cr_assert_eq(fake_verbs.asked_receives > 0, refused_sized,
                     "the other call is for drivers that refuse this one");
        prs_nic_rc.close(link);
    }
}
