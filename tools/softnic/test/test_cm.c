/* SPDX-License-Identifier: Apache-2.0 */
/* rdma_cm: connections, their events and their order; channels, synchronous calls, and calls out of turn. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "tools/softnic/test/cm_support.h"

TestSuite(cm, .init = cm_setup, .timeout = 300);

/* Both ends connected, with queue pairs. */
static void connect_both(void)
{
    struct sn_rdma_conn_param param = {
        .responder_resources = 3, .initiator_depth = 5, .retry_count = 4, .rnr_retry_count = 6};
    struct sn_rdma_conn_param answer = {
        .responder_resources = SN_RDMA_MAX_DEPTH, .initiator_depth = SN_RDMA_MAX_DEPTH, .rnr_retry_count = 2};

    listen_on("0.0.0.0", PORT, SN_RDMA_PS_TCP, 0);
    resolve(&client, DEVICE_0, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    queue_make(&client);
    require(!rdma_connect(client.id, &param), "connect: %s", strerror(errno));
    take_request();
    queue_make(&server);
    require(!rdma_accept(server.id, &answer), "accept: %s", strerror(errno));
    ack(client.channel, SN_RDMA_ESTABLISHED, 0);
    ack(server.channel, SN_RDMA_ESTABLISHED, 0);
}

static void send_one(struct side *from, struct side *to)
{
    struct ibv_sge sge = {(uintptr_t)to->buf, BYTES, to->mr->lkey};
    struct ibv_recv_wr recv = {.sg_list = &sge, .num_sge = 1}, *bad_recv;
    struct ibv_send_wr send = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;

    memset(from->buf, 0x5a, BYTES);
    memset(to->buf, 0, BYTES);
    cr_assert_eq(ibv_post_recv(to->id->qp, &recv, &bad_recv), 0);
    sge = (struct ibv_sge){(uintptr_t)from->buf, BYTES, from->mr->lkey};
    cr_assert_eq(ibv_post_send(from->id->qp, &send, &bad), 0);
    cr_assert_eq(wait_wc(from->id->send_cq, "a send").status, IBV_WC_SUCCESS);
    cr_assert_eq(wait_wc(to->id->recv_cq, "a receive").status, IBV_WC_SUCCESS);
    cr_assert_arr_eq(to->buf, from->buf, BYTES);
}

/* ---- connections ---- */

Test(cm, a_connection_carries_data_and_ends_at_both_sides)
{
    connect_both();
    send_one(&client, &server);
    send_one(&server, &client);
    cr_assert_eq(rdma_disconnect(client.id), 0);
    ack(client.channel, SN_RDMA_DISCONNECTED, 0);
    ack(server.channel, SN_RDMA_DISCONNECTED, 0);
    cr_assert_eq(rdma_disconnect(server.id), 0, "the answer to a disconnect");
    cr_assert_eq(client.id->qp->state, IBV_QPS_ERR);
    cr_assert_eq(server.id->qp->state, IBV_QPS_ERR);
    ack(client.channel, SN_RDMA_TIMEWAIT_EXIT, 0);
    ack(server.channel, SN_RDMA_TIMEWAIT_EXIT, 0);
    cr_assert(silent(client.channel, 50) && silent(server.channel, 50), "each event comes once");
    all_close();
}

Test(cm, a_send_is_tried_again_after_the_timer_that_linux_sets)
{
    struct ibv_sge sge;
    struct ibv_recv_wr recv = {.sg_list = &sge, .num_sge = 1}, *bad_recv;
    struct ibv_send_wr send = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;

    connect_both(); /* the server tries a send again twice */
    sge = (struct ibv_sge){(uintptr_t)server.buf, BYTES, server.mr->lkey};
    cr_assert_eq(ibv_post_send(server.id->qp, &send, &bad), 0);
    (void)usleep(700 * 1000);
    sge = (struct ibv_sge){(uintptr_t)client.buf, BYTES, client.mr->lkey};
    cr_assert_eq(ibv_post_recv(client.id->qp, &recv, &bad_recv), 0);
    cr_assert_eq(wait_wc(server.id->send_cq, "a send").status, IBV_WC_SUCCESS);
    all_close();
}

Test(cm, an_address_of_the_peer_is_where_it_called_from)
{
    struct sockaddr_in *src, *dst;

    connect_both();
    cr_assert_eq(client.id->verbs == server.id->verbs, 0, "bound to two devices");
    src = (struct sockaddr_in *)&client.id->route.addr.src_addr;
    dst = (struct sockaddr_in *)&server.id->route.addr.dst_addr;
    cr_assert_eq(src->sin_addr.s_addr, inet_addr(DEVICE_0));
    cr_assert_eq(dst->sin_addr.s_addr, inet_addr(DEVICE_0));
    cr_assert_eq(ntohs(rdma_get_dst_port(client.id)), PORT);
    cr_assert_eq(ntohs(rdma_get_src_port(server.id)), PORT);
    cr_assert_neq(rdma_get_src_port(client.id), 0);
    cr_assert_eq(rdma_get_src_port(client.id), rdma_get_dst_port(server.id));
    cr_assert_eq(((struct sockaddr_in *)&server.id->route.addr.src_addr)->sin_addr.s_addr, inet_addr(DEVICE_1));
    cr_assert_eq(server.id->context, server.channel, "a request has its listener's context");
    all_close();
}

/* The reads of one side are those that the other side answers. */
Test(cm, depths_and_retries_reach_the_queue_pairs)
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr a, b;

    connect_both();
    cr_assert_eq(ibv_query_qp(client.id->qp, &a, IBV_QP_STATE, &init), 0);
    cr_assert_eq(ibv_query_qp(server.id->qp, &b, IBV_QP_STATE, &init), 0);
    cr_assert_eq(a.max_rd_atomic, 5);
    cr_assert_eq(b.max_dest_rd_atomic, 5);
    cr_assert_eq(a.max_dest_rd_atomic, 3);
    cr_assert_eq(b.max_rd_atomic, 3);
    cr_assert_eq(a.retry_cnt, 4);
    cr_assert_eq(b.retry_cnt, 4);
    cr_assert_eq(b.rnr_retry, 6, "the caller says how often the listener tries");
    cr_assert_eq(a.rnr_retry, 2, "and the other way round");
    cr_assert_eq(a.qp_state, IBV_QPS_RTS);
    cr_assert_eq(b.qp_state, IBV_QPS_RTS);
    all_close();
}

Test(cm, private_data_arrives_padded_to_the_length_of_its_message)
{
    struct sn_rdma_conn_param param = {.private_data = "question", .private_data_len = 9}, too_long = param;
    struct sn_rdma_event *event;

    listen_on(DEVICE_1, PORT, SN_RDMA_PS_TCP, 0);
    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    too_long.private_data_len = 57;
    cr_assert(rdma_connect(client.id, &too_long) == -1 && errno == EINVAL);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    event = want(server.channel, SN_RDMA_CONNECT_REQUEST, 0);
    server.id = event->id;
    cr_assert_eq(event->param.conn.private_data_len, 56);
    cr_assert_str_eq(event->param.conn.private_data, "question");
    cr_assert_eq(((const uint8_t *)event->param.conn.private_data)[55], 0);
    rdma_ack_cm_event(event);
    cr_assert_eq(rdma_reject(server.id, "answer", 7), 0);
    event = want(client.channel, SN_RDMA_REJECTED, 28);
    cr_assert_eq(event->param.conn.private_data_len, 148);
    cr_assert_str_eq(event->param.conn.private_data, "answer");
    rdma_ack_cm_event(event);
    all_close();
}

Test(cm, a_queue_pair_of_the_programs_own_needs_rdma_establish)
{
    struct sn_rdma_conn_param param = {.qp_num = 0x123456, .responder_resources = 1, .initiator_depth = 1};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    struct sn_rdma_event *event;
    int mask;

    listen_on("0.0.0.0", PORT, SN_RDMA_PS_TCP, 0);
    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    cr_assert(rdma_init_qp_attr(client.id, &attr, &mask) == -1 && errno == EINVAL, "the peer is not known yet");
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    event = want(server.channel, SN_RDMA_CONNECT_REQUEST, 0);
    server.id = event->id;
    cr_assert_eq(event->param.conn.qp_num, 0x123456);
    rdma_ack_cm_event(event);
    cr_assert(rdma_establish(client.id) == -1 && errno == EINVAL);
    param.qp_num = 0x654321;
    cr_assert_eq(rdma_accept(server.id, &param), 0);
    event = want(client.channel, SN_RDMA_CONNECT_RESPONSE, 0);
    cr_assert_eq(event->param.conn.qp_num, 0x654321);
    rdma_ack_cm_event(event);
    attr.qp_state = IBV_QPS_RTR;
    cr_assert_eq(rdma_init_qp_attr(client.id, &attr, &mask), 0);
    cr_assert_eq(attr.dest_qp_num, 0x654321);
    cr_assert_eq(attr.max_dest_rd_atomic, 1);
    cr_assert(silent(server.channel, 20), "the other side waits");
    cr_assert_eq(rdma_establish(client.id), 0);
    ack(server.channel, SN_RDMA_ESTABLISHED, 0);
    all_close();
}

Test(cm, data_that_comes_first_establishes_once)
{
    struct sn_rdma_conn_param param = {.qp_num = 1};

    listen_on("0.0.0.0", PORT, SN_RDMA_PS_TCP, 0);
    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    take_request();
    cr_assert_eq(rdma_accept(server.id, &param), 0);
    cr_assert_eq(rdma_notify(server.id, IBV_EVENT_COMM_EST), 0);
    ack(server.channel, SN_RDMA_ESTABLISHED, 0);
    ack(client.channel, SN_RDMA_CONNECT_RESPONSE, 0);
    cr_assert_eq(rdma_establish(client.id), 0);
    cr_assert(silent(server.channel, 50));
    all_close();
}

Test(cm, datagrams_find_their_queue_pair)
{
    struct sn_rdma_conn_param param = {.private_data = "ud", .private_data_len = 3};
    struct sn_rdma_event *event;

    listen_on("0.0.0.0", PORT, SN_RDMA_PS_UDP, 0);
    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_UDP);
    queue_make(&client);
    cr_assert_eq(client.id->qp->state, IBV_QPS_RTS);
    cr_assert_eq(rdma_connect(client.id, &param), 0);
    event = want(server.channel, SN_RDMA_CONNECT_REQUEST, 0);
    cr_assert_eq(event->param.ud.private_data_len, 180);
    cr_assert_str_eq(event->param.ud.private_data, "ud");
    server.id = event->id;
    rdma_ack_cm_event(event);
    queue_make(&server);
    cr_assert_eq(rdma_accept(server.id, NULL), 0);
    event = want(client.channel, SN_RDMA_ESTABLISHED, 0);
    cr_assert_eq(event->param.ud.qp_num, server.id->qp->qp_num);
    cr_assert_eq(event->param.ud.qkey, 0x01234567);
    cr_assert_eq(event->param.ud.ah_attr.grh.dgid.raw[14], 1, "device 1");
    rdma_ack_cm_event(event);
    cr_assert(silent(server.channel, 20), "the side that answers learns no more");
    all_close();
}

Test(cm, a_shared_receive_queue_has_its_completion_queue)
{
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = 8, .max_sge = 1}};
    struct ibv_sge sge;
    struct ibv_recv_wr recv = {.sg_list = &sge, .num_sge = 1}, *bad_recv;
    struct ibv_send_wr send = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;

    listen_on("0.0.0.0", PORT, SN_RDMA_PS_TCP, 0);
    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    queue_make(&client);
    cr_assert_eq(rdma_connect(client.id, NULL), 0);
    take_request();
    cr_assert_eq(rdma_create_srq(server.id, NULL, &attr), 0, "%s", strerror(errno));
    cr_assert(rdma_create_srq(server.id, NULL, &attr) == -1 && errno == EINVAL, "one for an id");
    queue_make(&server);
    cr_assert_eq(server.id->qp->srq, server.id->srq);
    cr_assert_eq(server.id->qp->recv_cq, server.id->recv_cq);
    sge = (struct ibv_sge){(uintptr_t)server.buf, BYTES, server.mr->lkey};
    cr_assert_eq(ibv_post_srq_recv(server.id->srq, &recv, &bad_recv), 0);
    cr_assert_eq(rdma_accept(server.id, NULL), 0);
    ack(client.channel, SN_RDMA_ESTABLISHED, 0);
    sge = (struct ibv_sge){(uintptr_t)client.buf, BYTES, client.mr->lkey};
    cr_assert_eq(ibv_post_send(client.id->qp, &send, &bad), 0);
    cr_assert_eq(wait_wc(server.id->recv_cq, "a receive").status, IBV_WC_SUCCESS);
    rdma_destroy_qp(server.id);
    cr_assert(server.id->recv_cq, "the shared queue still needs it");
    rdma_destroy_srq(server.id);
    cr_assert_not(server.id->recv_cq);
    all_close();
}

enum { ROUNDS = 40 };

/* A program's thread of events: blocks, and refuses whatever comes. */
static void *refuse_all(void *unused)
{
    for (int i = 0; i < ROUNDS; i++) {
        struct sn_rdma_event *event;
        struct sn_rdma_id *id;

        require(!rdma_get_cm_event(server.channel, &event), "get_cm_event: %s", strerror(errno));
        require(event->event == SN_RDMA_CONNECT_REQUEST, "%s", rdma_event_str(event->event));
        id = event->id;
        rdma_ack_cm_event(event);
        require(!rdma_reject(id, NULL, 0), "reject: %s", strerror(errno));
        rdma_destroy_id(id);
    }
    return NULL;
}

Test(cm, threads_share_channels_and_ids)
{
    struct sn_rdma_conn_param param = {.qp_num = 5};
    pthread_t thread;

    listen_on("0.0.0.0", PORT, SN_RDMA_PS_TCP, 0);
    cr_assert_eq(fcntl(server.channel->fd, F_SETFL, 0), 0, "block");
    cr_assert_eq(pthread_create(&thread, NULL, refuse_all, NULL), 0);
    for (int i = 0; i < ROUNDS; i++) {
        struct sn_rdma_id *other = id_new(server.channel, SN_RDMA_PS_TCP); /* beside the thread that waits */

        resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
        cr_assert_eq(rdma_connect(client.id, &param), 0);
        rdma_destroy_id(other);
        ack(client.channel, SN_RDMA_REJECTED, 28);
        side_close(&client);
    }
    client.id = NULL;
    cr_assert_eq(pthread_join(thread, NULL), 0);
    all_close();
}

/* ---- channels and synchronous calls ---- */

/* Take events until there is an error. */
static void *take_all(void *arg)
{
    struct sn_rdma_event *event;

    while (!rdma_get_cm_event(arg, &event))
        rdma_ack_cm_event(event);
    return arg;
}

/* rping destroys its channel while a thread asks for events: that one may wait, be awake, or be about to ask. */
Test(cm, who_asks_for_events_of_a_destroyed_channel_waits)
{
    enum { TRIES = 300 };
    pthread_t thread;
    void *result;

    for (int i = 0; i < TRIES; i++) {
        struct sn_rdma_channel *channel = channel_new();
        struct sn_rdma_id *id = id_new(channel, SN_RDMA_PS_TCP);

        cr_assert_eq(fcntl(channel->fd, F_SETFL, 0), 0, "block");
        cr_assert_eq(pthread_create(&thread, NULL, take_all, channel), 0);
        if (i % 2)
            usleep((useconds_t)(i * 2));
        cr_assert_eq(rdma_resolve_addr(id, NULL, at(DEVICE_1, PORT), 1000), 0); /* wakes the thread */
        rdma_destroy_id(id);
        rdma_destroy_event_channel(channel);
        usleep(500);
        pthread_cancel(thread);
        cr_assert_eq(pthread_join(thread, &result), 0);
        cr_assert_eq(result, PTHREAD_CANCELED, "try %d: the thread got an error", i);
    }
}

Test(cm, an_id_takes_its_events_along_to_another_channel)
{
    struct sn_rdma_channel *other = channel_new();

    listen_on(DEVICE_1, PORT, SN_RDMA_PS_TCP, 0);
    client.channel = channel_new();
    client.id = id_new(client.channel, SN_RDMA_PS_TCP);
    cr_assert(silent(client.channel, 0));
    cr_assert_eq(rdma_resolve_addr(client.id, NULL, at(DEVICE_1, PORT), 1000), 0);
    cr_assert_eq(rdma_migrate_id(client.id, other), 0);
    cr_assert(silent(client.channel, 0));
    ack(other, SN_RDMA_ADDR_RESOLVED, 0);
    cr_assert_eq(rdma_resolve_route(client.id, 1000), 0);
    ack(other, SN_RDMA_ROUTE_RESOLVED, 0);
    queue_make(&client);
    cr_assert_eq(rdma_connect(client.id, NULL), 0);
    cr_assert_eq(rdma_migrate_id(client.id, client.channel), 0);
    take_request();
    cr_assert_eq(rdma_reject(server.id, NULL, 0), 0);
    ack(client.channel, SN_RDMA_REJECTED, 28);
    cr_assert(silent(other, 0));
    rdma_destroy_event_channel(other);
    all_close();
}

static void *call_synchronously(void *arg)
{
    struct sn_rdma_addrinfo hints = {.ai_port_space = SN_RDMA_PS_TCP}, *info;
    struct ibv_qp_init_attr attr = {.cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    struct sn_rdma_id *id;

    (void)arg;
    require(!rdma_getaddrinfo(DEVICE_1, "4711", &hints, &info), "getaddrinfo: %s", strerror(errno));
    require(!rdma_create_ep(&id, info, NULL, &attr), "create_ep: %s", strerror(errno));
    rdma_freeaddrinfo(info);
    require(!rdma_connect(id, NULL), "connect: %s", strerror(errno));
    require(id->event && id->event->event == SN_RDMA_ESTABLISHED, "the event is kept");
    require(!rdma_disconnect(id), "disconnect: %s", strerror(errno));
    rdma_destroy_ep(id);
    return NULL;
}

Test(cm, endpoints_work_without_channels)
{
    struct sn_rdma_addrinfo hints = {.ai_flags = SN_RAI_PASSIVE, .ai_port_space = SN_RDMA_PS_TCP}, *info;
    struct ibv_qp_init_attr attr = {.cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    struct sn_rdma_id *listen, *id;
    pthread_t thread;

    cr_assert_eq(rdma_getaddrinfo(NULL, "4711", &hints, &info), 0);
    cr_assert_eq(info->ai_qp_type, IBV_QPT_RC);
    cr_assert_eq(rdma_create_ep(&listen, info, NULL, &attr), 0);
    rdma_freeaddrinfo(info);
    cr_assert_eq(rdma_listen(listen, 0), 0);
    cr_assert_eq(pthread_create(&thread, NULL, call_synchronously, NULL), 0);
    cr_assert_eq(rdma_get_request(listen, &id), 0);
    cr_assert(id->qp && id->qp != listen->qp, "made with the listener's attributes");
    cr_assert_eq(rdma_accept(id, NULL), 0);
    cr_assert_eq(id->event->event, SN_RDMA_ESTABLISHED);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_eq(rdma_disconnect(id), 0);
    rdma_destroy_ep(id);
    rdma_destroy_ep(listen);
}

/* ---- what does not fit the state, and what is not there ---- */

Test(cm, calls_out_of_turn_are_refused)
{
    struct sn_rdma_channel *channel = channel_new();
    struct sn_rdma_conn_param param = {.qp_num = 1}, deep = {.qp_num = 1, .initiator_depth = 200};
    struct ibv_qp_init_attr attr = {.cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    struct sn_rdma_id *id = id_new(channel, SN_RDMA_PS_TCP), *other;
    uint8_t byte = 32;

#define REFUSED(call, error) cr_assert((call) == -1 && errno == (error), "%s: errno %d", #call, errno)
    REFUSED(rdma_connect(id, &param), EINVAL);
    REFUSED(rdma_accept(id, &param), EINVAL);
    REFUSED(rdma_reject(id, NULL, 0), EINVAL);
    REFUSED(rdma_disconnect(id), EINVAL);
    REFUSED(rdma_establish(id), EINVAL);
    REFUSED(rdma_notify(id, IBV_EVENT_COMM_EST), EINVAL);
    REFUSED(rdma_resolve_route(id, 1000), EINVAL);
    REFUSED(rdma_create_qp(id, NULL, &attr), EINVAL);
    REFUSED(rdma_create_id(channel, &other, NULL, 0x999), EINVAL);
    REFUSED(rdma_set_option(id, SN_RDMA_OPTION_ID, SN_RDMA_ID_ACK_TIMEOUT, &byte, 1), EINVAL);
    REFUSED(rdma_set_option(id, SN_RDMA_OPTION_ID, 99, &byte, 1), ENOSYS);
    REFUSED(rdma_set_option(id, SN_RDMA_OPTION_IB, 1, &byte, 1), ENOSYS);
    REFUSED(rdma_join_multicast(id, at("224.0.0.9", 0), NULL), EOPNOTSUPP);
    REFUSED(rdma_set_local_ece(id, NULL), EOPNOTSUPP);
    rdma_destroy_id(id);
    client.channel = channel;
    resolve(&client, NULL, DEVICE_1, PORT, SN_RDMA_PS_TCP);
    REFUSED(rdma_connect(client.id, &deep), EINVAL);
    REFUSED(rdma_listen(client.id, 0), EINVAL);
    all_close();
}

Test(cm, devices_stay_open_and_are_those_of_the_ids)
{
    int count;
    struct ibv_context **list = rdma_get_devices(&count), **again = rdma_get_devices(NULL);

    cr_assert_eq(count, 2);
    cr_assert(list[0] == again[0] && list[1] == again[1] && !list[2]);
    client.channel = channel_new();
    client.id = id_new(client.channel, SN_RDMA_PS_TCP);
    cr_assert_eq(rdma_bind_addr(client.id, at(DEVICE_1, 0)), 0);
    cr_assert_eq(client.id->verbs, list[1]);
    cr_assert_eq(client.id->pd->context, list[1]);
    rdma_free_devices(list);
    rdma_free_devices(again);
    all_close();
}
