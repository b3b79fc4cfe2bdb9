/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "test/support/order_net.h"
#include "test/support/order_start.h"
#include "transport/order/wire.h"

/* Several adds use one word, one bit each, so that they may be merged. Each set has its own word. */
enum { ADD_WORDS = 1 << 20, ADDS_A_WORD = 32 };

/* Puts write to addresses from here on, where no memory of this process is. */
static const uint64_t PUTS_BEGIN = 1ull << 62;

/* Both halves of each key differ from those of the others. */
static const struct prs_keys keys = {{0x5100000061, 0x5200000062, 0x5300000063, 0x5400000064}};
static const uint64_t own_keys[PRS_MAX_RAILS] = {0x7100000081, 0x7200000082, 0x7300000083, 0x7400000084};
static const uint32_t local_keys[PRS_MAX_RAILS];

static bool has_plain(enum network network)
{
    return network == NET_PLAIN || network == NET_ADAPTIVE;
}

void net_init(struct net *net, enum prs_policy policy, enum network network, uint32_t paths, uint32_t queues,
              bool split_queues)
{
    struct prs_order_options options = {.policy = policy,
                                        .max_ops = NET_WINDOW,
                                        .in_order = network <= NET_ADAPTIVE,
                                        .fence = network < NET_FREE,
                                        .path_count = paths,
                                        .queues_per_path = queues,
                                        .depth = NET_DEPTH,
                                        .adaptive_routing = network == NET_ADAPTIVE,
                                        .plain_bytes = has_plain(network) ? 8192 : 0,
                                        .split_queues = split_queues,
                                        .failover = true,
                                        .max_part_bytes = 1 << 20};

    memset(net, 0, sizeof(*net));
    net->network = network;
    for (uint32_t i = 0; i < paths; i++) {
        options.path[i].local_rail = options.path[i].remote_rail = i;
        options.path[i].rate = 1000.0f * (float)(i + 1);
    }
    cr_assert_eq(prs_order_init(&net->order, &options), 0);
    for (uint32_t q = 0; q < paths * queues + 1; q++)
        net->order.queue[q].inline_bytes = net->copies[q];
    if (has_plain(network))
        prs_order_set_sizes(&net->order, (uintptr_t)net->sizes, own_keys);
    if (policy == PRS_POLICY_COUNTED || network == NET_SRD || network == NET_CXI || network == NET_PLAIN)
        cr_assert_eq(prs_order_set_records(&net->order, (uintptr_t)net->ring, own_keys, &net->credit), 0);
}

void net_start(struct net *net, uint32_t position)
{
    order_start(&net->order, position);
    for (uint32_t q = 0; q < net->order.data_queues; q++)
        net->to_deliver[q] = net->posted_to[q] = net->taken[q] = position;
    net->counts.upto = net->counts.raised = position;
    net->credit = position;
}

/* Make a signal visible. Check that everything that it must follow has arrived. */
static void raise_signal(struct net *net, int index)
{
    struct net_signal *signal = &net->signal[index];
    bool strong = signal->signal.flags & PRS_SIGNAL_STRONG;

    cr_assert(!signal->raised, "signal %d twice", index);
    for (int i = 0; i < signal->puts_before; i++) {
        struct net_put *put = &net->put[i];

        if (strong || put->put.group == signal->signal.group) {
            put->released = true;
            cr_assert(put->missing == 0 && put->parts_missing == 0, "signal %d was seen before put %d (seed %u)", index,
                      i, net->seed);
        }
    }
    for (int i = 0; i < signal->signals_before; i++)
        if (strong || (net->network != NET_FENCED && net->signal[i].signal.group == signal->signal.group))
            cr_assert(net->signal[i].raised, "signal %d was seen before signal %d", index, i);
    signal->raised = true;
}

/* Write a word, or add to it. */
static void raise_word(struct net *net, uint64_t addr, uint64_t value)
{
    if (addr < ADD_WORDS) {
        raise_signal(net, (int)(addr / 8));
        return;
    }
    for (; value; value &= value - 1)
        raise_signal(net, (int)((addr - ADD_WORDS) / 8 * ADDS_A_WORD) + __builtin_ctzll(value));
}

static void notice(struct net *net, const struct prs_imm *imm, uint32_t bytes)
{
    struct prs_notice out = {0};
    int r = prs_arrivals_add(&net->arrivals, imm, bytes, &out);

    cr_assert_geq(r, 0);
    if (imm->sized)
        out.bytes = net->sizes[imm->id];
    for (uint32_t i = 0; r == 1 && i < out.count; i++) {
        struct net_put *put = &net->put[(out.first_id + i) % PRS_NOTIFY_IDS]; /* ids are indices here */

        cr_assert_eq(put->notified++, 0u);
        cr_assert(put->put.flags & PRS_PUT_NOTIFY && put->put.len_bytes == out.bytes && put->missing == 0,
                  "notification of %llu bytes for a put of %zu, %llu missing", (unsigned long long)out.bytes,
                  put->put.len_bytes, (unsigned long long)put->missing);
    }
}

void net_raise(struct net *net)
{
    const struct prs_record *record;

    for (;;) {
        cr_assert_eq(prs_counts_next(&net->counts, &record), 0);
        if (!record)
            break;
        if (record->kind == PRS_RECORD_SET || record->kind == PRS_RECORD_ADD) {
            cr_assert_eq(record->key, prs_record_key(keys.rkey[0]));
            raise_word(net, record->addr, record->value);
        }
        prs_counts_raised(&net->counts, record);
        if (record->kind == PRS_RECORD_ASK)
            net->credit = net->counts.raised;
    }
}

static uint64_t put_address(uint32_t index)
{
    return PUTS_BEGIN + ((uint64_t)index << 32);
}

/* A part of a put is written, for the second time perhaps if its path was lost before a completion came. */
static void write_part(struct net *net, uint32_t index, const struct prs_wr *wr)
{
    struct net_put *put = &net->put[index];
    uint64_t offset = wr->remote_addr - put_address(index);

    for (uint32_t i = 0; i < put->offsets; i++) {
        if (put->offset[i] == offset) {
            cr_assert(net->has_lost && wr->opcode == PRS_WR_WRITE, "put %u was written twice at %llu", index,
                      (unsigned long long)offset);
            cr_assert(put->op.status == PRS_OP_PENDING && !put->notified && !put->released,
                      "a late write of put %u (seed %u): status %d, notified %u", index, net->seed, put->op.status,
                      put->notified);
            return;
        }
    }
    put->offset[put->offsets++] = offset;
    cr_assert_leq(wr->len_bytes, put->missing);
    put->missing -= wr->len_bytes;
    put->parts_missing--;
}

static void take_effect(struct net *net, uint32_t q, uint32_t position)
{
    const struct prs_wr *wr = &net->posted[q][position % NET_DEPTH];
    uint32_t path = net->order.queue[q].path;
    bool is_own = false; /* the memory that the engine was told of */
    struct prs_imm imm;

    net->delivered[q][position % NET_DEPTH] = true;
    if (wr->opcode == PRS_WR_WRITE_IMM && wr->imm >> 31 && !wr->len_bytes) {
        /* it only counts */
    } else if (wr->remote_addr >= (uintptr_t)net->sizes && wr->remote_addr < (uintptr_t)(net->sizes + PRS_NOTIFY_IDS)) {
        is_own = true;
        memcpy((void *)(uintptr_t)wr->remote_addr, (void *)(uintptr_t)wr->local_addr, wr->len_bytes);
    } else if (wr->remote_addr >= (uintptr_t)net->ring && wr->remote_addr < (uintptr_t)(net->ring + PRS_RECORDS)) {
        is_own = true;
        memcpy((void *)(uintptr_t)wr->remote_addr, (void *)(uintptr_t)wr->local_addr, wr->len_bytes);
    } else if (wr->remote_addr >= PUTS_BEGIN) {
        write_part(net, (uint32_t)((wr->remote_addr - PUTS_BEGIN) >> 32), wr);
    } else {
        cr_assert((wr->opcode == PRS_WR_ADD) || *(uint64_t *)(uintptr_t)wr->local_addr == wr->remote_addr / 8,
                  "the copy of the value lives until now");
        raise_word(net, wr->remote_addr, wr->value);
    }
    cr_assert(!wr->len_bytes || wr->remote_key == (is_own ? own_keys[path] : keys.rkey[path]), "key %#llx on path %u",
              (unsigned long long)wr->remote_key, path);
    if (wr->opcode != PRS_WR_WRITE_IMM)
        return;
    net->taken[q]++;
    cr_assert_eq(prs_imm_parse(wr->imm, &imm), 0);
    if (imm.bare && imm.kind == PRS_BARE_RECORD)
        cr_assert_eq(prs_counts_record(&net->counts, imm.tag, &net->ring[imm.tag]), 0);
    else if (imm.tag)
        cr_assert_eq(prs_counts_arrive(&net->counts, imm.tag, imm.bare ? 1 : imm.run), 0);
    if (!imm.bare)
        notice(net, &imm, wr->len_bytes);
    if (!net->raises_later)
        net_raise(net);
}

bool net_may_deliver(const struct net *net, uint32_t q, uint32_t position)
{
    if (net->delivered[q][position % NET_DEPTH])
        return false;
    for (uint32_t p = net->to_deliver[q]; p != position; p++) {
        bool there = net->delivered[q][p % NET_DEPTH];

        if (net->network == NET_ADAPTIVE && !there && net->posted[q][position % NET_DEPTH].opcode != PRS_WR_WRITE)
            return false;
        if (!there && (net->network <= NET_PLAIN || net->posted[q][p % NET_DEPTH].flags & PRS_WR_FENCE ||
                       net->posted[q][position % NET_DEPTH].flags & PRS_WR_FENCE))
            return net->network >= NET_FREE;
    }
    return true;
}

void net_deliver(struct net *net, uint32_t q, uint32_t position)
{
    take_effect(net, q, position);
    while (net->to_deliver[q] != net->posted_to[q] && net->delivered[q][net->to_deliver[q] % NET_DEPTH])
        net->to_deliver[q]++;
}

/* Does this write only notify of the one before it? */
static bool is_notice(const struct prs_wr *wr)
{
    struct prs_imm imm;

    return wr->opcode == PRS_WR_WRITE_IMM && prs_imm_parse(wr->imm, &imm) == 0 &&
           (imm.sized || (imm.bare && imm.kind == PRS_BARE_COUNT && !wr->len_bytes));
}

bool net_post(struct net *net)
{
    struct prs_chain chain;
    bool is_long;

    if (!prs_order_take(&net->order, 0, &chain))
        return false;
    const struct prs_order_queue *queue = &net->order.queue[chain.queue];

    if (chain.first != net->posted_to[chain.queue]) { /* an empty ring goes on at its first slot */
        cr_assert(chain.first == queue->tail && chain.first % NET_DEPTH == 0);
        cr_assert_eq(net->to_deliver[chain.queue], net->posted_to[chain.queue]);
        net->to_deliver[chain.queue] = chain.first;
    }
    cr_assert_leq(chain.first + chain.count - queue->tail, (uint32_t)NET_DEPTH, "more than the send queue holds");
    for (uint32_t p = chain.first; p != chain.first + chain.count; p++) {
        net->posted[chain.queue][p % NET_DEPTH] = queue->wr[p % NET_DEPTH];
        net->delivered[chain.queue][p % NET_DEPTH] = false;
        is_long = queue->wr[p % NET_DEPTH].len_bytes >= PRS_ORDER_PROMPT_BYTES &&
                  queue->wr[p % NET_DEPTH].opcode != PRS_WR_READ;
        if (has_plain(net->network) && is_notice(&queue->wr[p % NET_DEPTH]))
            is_long = queue->wr[(p - 1) % NET_DEPTH].len_bytes >= PRS_ORDER_PROMPT_BYTES;
        else if (has_plain(net->network) && p + 1 != chain.first + chain.count)
            is_long &= !is_notice(&queue->wr[(p + 1) % NET_DEPTH]);
        if (!net->has_lost ||
            p + 1 == chain.first + chain.count) /* a replayed request is not signaled for its length */
            cr_assert_eq((queue->wr[p % NET_DEPTH].flags & PRS_WR_SIGNALED) != 0,
                         p + 1 == chain.first + chain.count || is_long,
                         "the last of a chain is signaled, and what is long; nothing else");
    }
    net->posted_to[chain.queue] = chain.first + chain.count;
    return true;
}

static void check_done(const struct net *net)
{
    for (int i = 0; i < net->puts; i++)
        cr_assert(net->put[i].op.status == PRS_OP_PENDING || (net->put[i].missing == 0 && !net->put[i].parts_missing),
                  "put %d is done but not delivered (seed %u)", i, net->seed);
}

/* A signaled request completes once it and all earlier ones of its queue are delivered. */
bool net_complete(struct net *net, uint32_t q)
{
    const struct prs_order_queue *queue = &net->order.queue[q];
    uint32_t p = queue->tail;

    if (net->order.path[queue->path].use >= PRS_PATH_STOPPED || p == queue->posted)
        return false;
    while (p != net->to_deliver[q] && !(net->posted[q][p % NET_DEPTH].flags & PRS_WR_SIGNALED))
        p++;
    if (p == net->to_deliver[q])
        return false;
    net->completions++;
    cr_assert_geq(prs_order_complete(&net->order, q, p, 0), 0);
    check_done(net);
    return true;
}

void net_lose(struct net *net, uint32_t path)
{
    uint32_t each = net->order.data_queues / net->order.path_count, taken[PRS_ORDER_MAX_QUEUES_PER_RAIL];
    struct prs_order_replay replay;

    cr_assert_eq(prs_order_path_stop(&net->order, path), 0);
    net->has_lost = true;
    for (uint32_t k = 0; k < each; k++)
        taken[k] = net->taken[k * net->order.path_count + path];
    cr_assert_geq(prs_order_path_down(&net->order, path, taken, &replay), 0);
    net->replayed += replay.replayed;
    net->taken_late += replay.taken;
    check_done(net);
    for (uint32_t q = path; q < net->order.data_queues; q += net->order.path_count)
        net->to_deliver[q] = net->posted_to[q]; /* nothing is in flight there */
}

bool net_regain(struct net *net, uint32_t path)
{
    if (prs_order_path_up(&net->order, path) == PRS_BUSY)
        return false;
    for (uint32_t q = path; q < net->order.data_queues; q += net->order.path_count) {
        net->taken[q] = 0;
        net->to_deliver[q] = net->posted_to[q] = net->order.queue[q].head;
    }
    return true;
}

bool net_put(struct net *net, struct prs_put wanted)
{
    struct net_put *put = &net->put[net->puts];
    uint32_t head[PRS_ORDER_MAX_QUEUES], parts = 0;

    put->put = wanted;
    put->put.dst = &keys;
    put->put.dst_addr = put_address((uint32_t)net->puts);
    put->put.notify_id = (uint32_t)net->puts;
    put->missing = put->put.len_bytes;
    for (uint32_t q = 0; q < net->order.data_queues; q++)
        head[q] = net->order.queue[q].head;
    if (prs_order_put(&net->order, &put->op, &put->put, local_keys) == PRS_BUSY)
        return false;
    for (uint32_t q = 0; q < net->order.data_queues; q++)
        parts += net->order.queue[q].head - head[q];
    cr_assert(parts == put->op.parts || (has_plain(net->network) && parts == 2 * put->op.parts));
    put->parts_missing = put->op.parts;
    net->puts++;
    return true;
}

bool net_signal(struct net *net, struct prs_signal wanted)
{
    struct net_signal *signal = &net->signal[net->signals];

    signal->signal = wanted;
    signal->signal.dst = &keys;
    if (wanted.kind == PRS_SIGNAL_ADD) {
        signal->signal.dst_addr = ADD_WORDS + (uint64_t)net->signals / ADDS_A_WORD * 8;
        signal->signal.value = 1ull << net->signals % ADDS_A_WORD;
    } else {
        signal->signal.dst_addr = (uint64_t)net->signals * 8;
        signal->signal.value = (uint64_t)net->signals;
    }
    signal->puts_before = net->puts;
    signal->signals_before = net->signals;
    if (prs_order_signal(&net->order, &signal->op, &signal->signal) == PRS_BUSY)
        return false;
    net->signals++;
    return true;
}

bool net_settle(struct net *net)
{
    uint32_t records = net->order.tally ? net->order.tally->next_number : 0;
    bool asked = net->order.tally && prs_tally_asked(net->order.tally);

    if (prs_order_settle(&net->order)) {
        cr_assert(!asked || net->order.tally->next_number == records, "asked twice without news");
        return false;
    }
    for (int i = 0; i < net->puts; i++)
        cr_assert_eq(net->put[i].missing, 0, "settled without put %d (seed %u)", i, net->seed);
    for (int i = 0; i < net->signals; i++)
        cr_assert(net->signal[i].raised, "settled without signal %d (seed %u)", i, net->seed);
    return true;
}

void net_finish(struct net *net)
{
    for (int i = 0; i < net->puts; i++)
        cr_assert(net->put[i].op.status == 0 && net->put[i].missing == 0 &&
                      net->put[i].notified == (net->put[i].put.flags & PRS_PUT_NOTIFY),
                  "put %d: status %d, notified %u times (seed %u)", i, net->put[i].op.status, net->put[i].notified,
                  net->seed);
    for (int i = 0; i < net->signals; i++)
        cr_assert(net->signal[i].op.status == 0 && net->signal[i].raised, "signal %d was lost (seed %u)", i, net->seed);
    prs_order_fini(&net->order);
}

int net_stride(void)
{
    const char *text = getenv("PRS_TEST_STRIDE");
    int stride = text ? atoi(text) : 1;

    return stride > 0 ? stride : 1;
}
