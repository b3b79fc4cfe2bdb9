/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine: an op becomes requests on queues. Signals: order_signal.c. */
#include "transport/order/op.h"
#include "transport/order/order_cut.h"
#include "transport/order/order_queue.h"
#include "transport/order/stripe.h"
#include "transport/order/wire.h"
#include "transport/util/compiler.h"

/* Small puts stay on their queue while its backlog exceeds the smallest one by at most this: this makes longer runs. */
enum { SMALL_SLACK_BYTES = 16384 };

/* ---- the queue of a put, and the signals that follow it ---- */

/* Remember where a put went, for the signals that must follow it. */
static inline void note_put(struct prs_order *order, const struct prs_put *put, uint32_t index)
{
    struct prs_order_queue *queue = &order->queue[index];
    struct prs_order_group *group;

    /* MUTANT(order) no signal waits for puts of no group: delete */
    if (put->group == PRS_GROUP_NONE)
        return;
    /* MUTANT(order) a strong signal knows where puts went: s/last_ordered = queue->// */
    /* MUTANT(order) drain remembers where puts went: s/queue->last_transfer =// */
    queue->last_transfer = queue->last_ordered = queue->head;
    if (!order->tracks_groups)
        return;
    group = group_of(order, put->group);
    /* MUTANT(order) a group remembers where its puts went: delete */
    group_note(group, index, queue->head - 1);
    /* MUTANT(order) a put makes its group need a fence: delete */
    group->unfenced = true;
}

/* Under counted, announce a put of this many parts to the receiver. Return the tag that each part names, 0 under
 * another policy, or -1 when no tag is free. */
static inline int count_put(struct prs_order *order, const struct prs_put *put, uint32_t parts)
{
    uint16_t tag;

    /* MUTANT(order) only counted counts puts: s/order->policy != PRS_POLICY_COUNTED/!order->tally/ */
    if (order->policy != PRS_POLICY_COUNTED || put->group == PRS_GROUP_NONE)
        return 0;
    /* MUTANT(order) a put counts all its parts for its tag: s/parts/1/ */
    tag = prs_tally_count(order->tally, put->group % PRS_ORDER_GROUPS, parts);
    /* MUTANT(order) a put without a free tag waits: s/? tag : -1// */
    return tag ? tag : -1;
}

/* Does a queue end in lazy requests? Their ops stay pending until a later request of that queue is signaled. */
static inline bool ends_lazily(const struct prs_order_queue *queue)
{
    bool will_be_signaled = queue->eager && queue->head != queue->posted;

    return queue->head != queue->signaled && !will_be_signaled;
}

/* Return the queue that would finish first, but keep the present queue unless another would be much faster. */
static uint32_t choose_small_queue(struct prs_order *order, uint64_t len_bytes)
{
    struct prs_stripe stripes[PRS_ORDER_MAX_DATA_QUEUES];
    uint32_t now = order->small_queue, best;
    float slack;

    prs_order_backlogs(order, stripes);
    best = prs_stripe_fastest(stripes, order->data_queues, len_bytes);
    slack = (float)(stripes[best].backlog_bytes + len_bytes + SMALL_SLACK_BYTES) / stripes[best].rate;
    if ((float)(stripes[now].backlog_bytes + len_bytes) / stripes[now].rate <= slack)
        return now;
    /* MUTANT(order) a queue is left behind a signaled request: s/(ends_lazily/(0 && ends_lazily/ */
    if (ends_lazily(&order->queue[now])) { /* perhaps no request follows there, so add one more, which is signaled */
        order->queue[now].eager = true;
        return now;
    }
    order->small_queue = best;
    return best;
}

static inline uint32_t choose_queue(struct prs_order *order, const struct prs_put *put)
{
    /* MUTANT(order) nic_fence keeps a peer on one queue: s/|| order->policy == PRS_POLICY_NIC_FENCE// */
    if (order->data_queues == 1 || order->policy == PRS_POLICY_NIC_FENCE)
        return 0;
    /* MUTANT(order) in_order keeps a group's puts on one queue:
     * s/return put->group/return (put->group + order->queue[0].head)/ */
    if (order->policy == PRS_POLICY_IN_ORDER && !(put->flags & PRS_PUT_NOTIFY) && put->group != PRS_GROUP_NONE)
        return put->group % order->data_queues;
    return choose_small_queue(order, put->len_bytes);
}

static inline void fill_write(const struct prs_order *order, const struct prs_order_queue *queue, struct prs_wr *wr,
                              const struct prs_put *put, const uint32_t *local_keys, uint64_t offset, uint32_t bytes)
{
    wr->local_addr = (uintptr_t)put->src_addr + offset;
    wr->remote_addr = put->dst_addr + offset;
    wr->local_key = local_keys ? local_keys[queue->local_rail] : 0;
    /* MUTANT(order) a put without keys names memory of the peer:
     * s/name_records(order, queue, wr)/wr->remote_key = 0/ */
    if (likely(put->dst))
        wr->remote_key = put->dst->rkey[queue->remote_rail];
    else
        name_records(order, queue, wr);
    wr->len_bytes = bytes;
    wr->opcode = PRS_WR_WRITE;
    wr->flags = 0;
}

/* All that a message must match to continue a run, in one word; never 0. */
static inline uint64_t run_key(uint32_t id, uint32_t tag, uint32_t bytes)
{
    return (uint64_t)bytes << 32 | tag << 16 | (id % PRS_NOTIFY_IDS + 1);
}

/* Make a single-part message the end of a run. If it continues the run before it, it takes over the immediate of the
 * message that ended that run. */
static inline void extend_run(struct prs_order_queue *queue, struct prs_wr *wr, uint32_t id, uint32_t tag,
                              uint32_t max_run)
{
    uint32_t bytes = wr->len_bytes, run = 1;

    if (queue->run_next == run_key(id, tag, bytes)) {
        /* MUTANT(order) only the last of a run has the immediate: delete */
        queue->wr[(queue->head - 2) & queue->mask].opcode = PRS_WR_WRITE;
        run = queue->run + 1;
    }
    queue->run = run;
    /* MUTANT(order) a long message ends a run: s/&& bytes < PRS_ORDER_PROMPT_BYTES// */
    /* MUTANT(order) a run is as long as the format allows at most: s/run < max_run &&// */
    queue->run_next = run < max_run && bytes < PRS_ORDER_PROMPT_BYTES ? run_key(id + 1, tag, bytes) : 0;
    wr->opcode = PRS_WR_WRITE_IMM;
    wr->imm = prs_imm_make(id, run, 1, tag);
}

/* Does the put's immediate follow its bytes in a separate write? */
static bool notifies_apart(const struct prs_order *order, const struct prs_put *put)
{
    uint64_t parts = put->len_bytes / order->max_part_bytes + order->data_queues; /* at most */

    if (put->len_bytes <= order->plain_bytes)
        return false;
    if (!(put->flags & PRS_PUT_NOTIFY))
        return order->policy == PRS_POLICY_COUNTED && put->group != PRS_GROUP_NONE;
    /* If there are more parts than such an immediate can count, each part carries an immediate itself. */
    return order->size_addr && parts <= PRS_IMM_MAX_SIZED_PARTS;
}

/* Admit the write that carries the immediate of the part before it. */
static void admit_notice(struct prs_order *order, uint32_t index, struct prs_op *op, const struct prs_put *put,
                         uint32_t imm)
{
    struct prs_order_queue *queue = &order->queue[index];
    struct prs_wr *wr = admit_request(order, index, op);
    uint64_t size = put->len_bytes;

    *wr = (struct prs_wr){.opcode = PRS_WR_WRITE_IMM, .imm = imm, .owner = op};
    queue->immediates++;
    set_aim(queue, NULL, order->size_key, NULL);
    if (!(put->flags & PRS_PUT_NOTIFY))
        return; /* this write only counts, so nobody needs the size */
    wr->remote_addr = order->size_addr + put->notify_id * sizeof(size);
    wr->remote_key = order->size_key[queue->path];
    wr->len_bytes = sizeof(size);
    copy_inline(queue, wr, &size, sizeof(size));
    add_backlog(order, index, sizeof(size));
}

static uint32_t part_imm(const struct prs_put *put, bool apart, uint32_t parts, uint32_t tag)
{
    if (!(put->flags & PRS_PUT_NOTIFY))
        return prs_imm_make_bare(PRS_BARE_COUNT, tag);
    return apart ? prs_imm_make_sized(put->notify_id, parts, tag) : prs_imm_make(put->notify_id, 1, parts, tag);
}

static PRS_OUTLINED int put_in_parts(struct prs_order *order, struct prs_op *op, const struct prs_put *put,
                                     const uint32_t *local_keys)
{
    bool pinned =
        order->policy == PRS_POLICY_NIC_FENCE ||
        (order->policy == PRS_POLICY_IN_ORDER && !(put->flags & PRS_PUT_NOTIFY) && put->group != PRS_GROUP_NONE);
    bool one_queue = pinned || put->len_bytes <= order->split_bytes, apart = notifies_apart(order, put);
    struct prs_stripe stripes[PRS_ORDER_MAX_DATA_QUEUES];
    uint32_t parts;
    int tag, r;

    r = prs_order_check_parts(order, "put", put->len_bytes, put->flags & PRS_PUT_NOTIFY, pinned);
    if (r)
        return r;
    /* MUTANT(order) a queue must hold a message and its notifications:
     * s#2 * (put->len_bytes / order->max_part_bytes + 1) <= order->queue[0].mask + 1#true# */
    apart = apart && 2 * (put->len_bytes / order->max_part_bytes + 1) <= order->queue[0].mask + 1;
    /* MUTANT(order) a notification apart needs a slot: s/apart ? 2 : 1/1/ */
    parts =
        prs_order_cut(order, put->len_bytes, one_queue ? (int)choose_queue(order, put) : -1, apart ? 2 : 1, stripes);
    if (!parts)
        return PRS_BUSY;
    tag = count_put(order, put, parts);
    if (tag < 0)
        return PRS_BUSY;
    prs_op_start(op, parts);
    for (struct prs_order_part part = PRS_ORDER_FIRST_PART; prs_order_next_part(order, stripes, &part);) {
        struct prs_order_queue *queue = &order->queue[part.queue];
        struct prs_wr *wr = admit_request(order, part.queue, apart ? &order->no_op : op);

        fill_write(order, queue, wr, put, local_keys, part.offset, part.bytes);
        set_aim(queue, local_keys, NULL, put->dst);
        add_backlog(order, part.queue, part.bytes);
        if (apart) {
            admit_notice(order, part.queue, op, put, part_imm(put, true, parts, (uint32_t)tag));
        } else if (put->flags & PRS_PUT_NOTIFY || tag) {
            /* MUTANT(order) each part has an immediate: delete */
            wr->opcode = PRS_WR_WRITE_IMM;
            wr->imm = part_imm(put, false, parts, (uint32_t)tag);
            queue->immediates++;
        }
        if (part.bytes >= PRS_ORDER_PROMPT_BYTES)
            signal_request(order, queue, queue->head - 1);
        end_run(queue);
        note_put(order, put, part.queue);
    }
    order->ops++;
    order->stats.puts++;
    order->stats.bytes += put->len_bytes;
    return 0;
}

/* Out of line and called last, so that puts without inline data need no stack frame. */
static PRS_OUTLINED int copy_payload(const struct prs_order_queue *queue, struct prs_wr *wr, const struct prs_put *put)
{
    copy_inline(queue, wr, put->src_addr, put->len_bytes);
    return 0;
}

/* A put that is one request. Compiled a second time for one_in_order, where the compiler drops most of it. */
static PRS_SPECIALIZED int put_whole(struct prs_order *order, struct prs_op *op, const struct prs_put *put,
                                     const uint32_t *local_keys, bool one_in_order)
{
    uint32_t index = one_in_order ? 0 : choose_queue(order, put), flags = put->flags;
    struct prs_order_queue *queue = &order->queue[index];
    struct prs_wr *wr;
    int tag;

    /* MUTANT(order) a put needs a free slot: delete */
    if (queue_full(queue))
        return PRS_BUSY;
    tag = one_in_order ? 0 : count_put(order, put, 1);
    if (tag < 0)
        return PRS_BUSY;
    prs_op_start(op, 1);
    wr = admit_lazily(order, index, op);
    fill_write(order, queue, wr, put, local_keys, 0, (uint32_t)put->len_bytes);
    /* MUTANT(order) a put of no group stays lazy: s/&& put->group != PRS_GROUP_NONE// */
    /* MUTANT(order) what a held signal waits for is signaled:
     * s/|| (!one_in_order && order->may_hold && put->group != PRS_GROUP_NONE)// */
    /* MUTANT(order) a long request is signaled itself:
     * s/if (put->len_bytes >= PRS_ORDER_PROMPT_BYTES) signal_request(order, queue, queue->head - 1); else// */
    if (put->len_bytes >= PRS_ORDER_PROMPT_BYTES)
        signal_request(order, queue, queue->head - 1);
    else if (!(flags & PRS_PUT_LAZY) || (!one_in_order && order->may_hold && put->group != PRS_GROUP_NONE))
        queue->eager = true; /* a held signal waits for the completion of this put, even if the put is lazy */
    if (flags & PRS_PUT_NOTIFY) {
        extend_run(queue, wr, put->notify_id, (uint32_t)tag, order->max_run);
    } else {
        /* MUTANT(order) a plain put ends a run: delete */
        end_run(queue);
        /* MUTANT(order) a small put names its tag: s/(tag)/(tag && order->ops)/ */
        if (tag) {
            wr->opcode = PRS_WR_WRITE_IMM;
            wr->imm = prs_imm_make_bare(PRS_BARE_COUNT, (uint32_t)tag);
            queue->run = 1;
        }
    }
    if (!one_in_order) {
        /* MUTANT(order) a small put counts its immediate: delete */
        /* a message that continues a run brings no further immediate: it takes that of the message before it */
        queue->immediates += wr->opcode == PRS_WR_WRITE_IMM && queue->run == 1;
        set_aim(queue, local_keys, NULL, put->dst);
        note_put(order, put, index);
        add_backlog(order, index, put->len_bytes);
    }
    order->ops++;
    order->stats.puts++;
    order->stats.bytes += put->len_bytes;
    return flags & PRS_PUT_INLINE ? copy_payload(queue, wr, put) : 0;
}

static PRS_OUTLINED int put_general(struct prs_order *order, struct prs_op *op, const struct prs_put *put,
                                    const uint32_t *local_keys)
{
    return put_whole(order, op, put, local_keys, false);
}

int prs_order_put(struct prs_order *order, struct prs_op *op, const struct prs_put *put, const uint32_t *local_keys)
{
    /* MUTANT(order) drain starts no put while a signal is held: s/|| order->stalled// */
    /* MUTANT(order) the window bounds puts: s/ops >= order->max_ops || order->// */
    if (order->ops >= order->max_ops || order->stalled)
        return PRS_BUSY;
    if (put->len_bytes > order->whole_bytes && (put->len_bytes > order->split_bytes || notifies_apart(order, put)))
        return put_in_parts(order, op, put, local_keys);
    return order->one_in_order ? put_whole(order, op, put, local_keys, true) : put_general(order, op, put, local_keys);
}

int prs_order_get(struct prs_order *order, struct prs_op *op, const struct prs_get *get, const uint32_t *local_keys)
{
    struct prs_stripe stripes[PRS_ORDER_MAX_DATA_QUEUES];
    uint32_t parts;
    int only = -1, r;

    if (order->ops >= order->max_ops || order->stalled)
        return PRS_BUSY;
    /* MUTANT(order) a get is cut over the queues: s/<= order->split_bytes// */
    if (get->len_bytes <= order->split_bytes || order->policy == PRS_POLICY_NIC_FENCE)
        only = order->policy == PRS_POLICY_NIC_FENCE ? 0 : (int)choose_small_queue(order, get->len_bytes);
    r = prs_order_check_parts(order, "get", get->len_bytes, false, only >= 0);
    if (r)
        return r;
    parts = prs_order_cut(order, get->len_bytes, only, 1, stripes);
    if (!parts)
        return PRS_BUSY;
    prs_op_start(op, parts);
    for (struct prs_order_part part = PRS_ORDER_FIRST_PART; prs_order_next_part(order, stripes, &part);) {
        struct prs_order_queue *queue = &order->queue[part.queue];

        *admit_request(order, part.queue, op) = (struct prs_wr){.local_addr = (uintptr_t)get->dst_addr + part.offset,
                                                                .remote_addr = get->src_addr + part.offset,
                                                                .local_key = local_keys[queue->local_rail],
                                                                .remote_key = get->src->rkey[queue->remote_rail],
                                                                .len_bytes = part.bytes,
                                                                .opcode = PRS_WR_READ,
                                                                .owner = op};
        set_aim(queue, local_keys, NULL, get->src);
        end_run(queue);
        /* MUTANT(order) a strong signal knows where gets went: s/last_ordered = queue->// */
        /* MUTANT(order) drain remembers where gets went: s/last_transfer = queue->// */
        /* MUTANT(order) a get is remembered for strong signals: s/queue->last_read =// */
        queue->last_read = queue->last_transfer = queue->last_ordered = queue->head;
        add_backlog(order, part.queue, part.bytes);
    }
    order->ops++;
    order->stats.gets++;
    order->stats.bytes += get->len_bytes;
    return 0;
}

int prs_order_probe(struct prs_order *order, struct prs_op *op, const struct prs_wr *requests)
{
    uint32_t parts = 0;

    if (order->ops >= order->max_ops)
        return PRS_BUSY;
    for (uint32_t i = 0; i < order->probe_queues; i++) {
        /* MUTANT(order) a probe waits until both sides have given a path up:
         * s/order->path[i].use == PRS_PATH_STOPPED ||// */
        if (order->path[i].use == PRS_PATH_STOPPED || queue_full(&order->queue[order->data_queues + i]))
            return PRS_BUSY;
        parts += !prs_order_path_is_lost(order, i);
    }
    prs_op_start(op, parts);
    for (uint32_t i = 0; i < order->probe_queues; i++) {
        struct prs_wr *wr;

        /* MUTANT(order) a lost path is not probed: delete */
        if (prs_order_path_is_lost(order, i))
            continue; /* all writes of the path have arrived long ago */
        wr = admit_request(order, order->data_queues + i, op);
        *wr = requests[i];
        wr->owner = op;
        wr->opcode = PRS_WR_READ;
        wr->flags = 0;
    }
    order->ops++;
    return 0;
}

/* Start an op; the caller may have passed none. Return the owner of its request. */
static struct prs_op *start_optional(struct prs_order *order, struct prs_op *op)
{
    if (!op)
        return &order->no_op;
    prs_op_start(op, 1);
    order->ops++;
    return op;
}

int prs_order_self(struct prs_order *order, struct prs_op *op, const struct prs_wr *request)
{
    uint32_t index = order->data_queues + order->self_path;
    struct prs_order_queue *queue = &order->queue[index];
    struct prs_op *owner;
    struct prs_wr *wr;

    if (queue_full(queue))
        return PRS_BUSY;
    owner = start_optional(order, op);
    wr = admit_request(order, index, owner);
    *wr = *request;
    wr->owner = owner;
    if (request->opcode == PRS_WR_WRITE)
        copy_inline(queue, wr, &request->value, sizeof(request->value));
    return 0;
}

int prs_order_word(struct prs_order *order, uint64_t remote_addr, const uint64_t *remote_key, uint64_t value)
{
    struct prs_order_queue *queue = &order->queue[order->word_queue];
    struct prs_wr *wr;

    /* MUTANT(order) a word waits for the one before:
     * s/|| (!order->in_order && queue_has(queue, order->last_word - 1))// */
    if (queue_full(queue) || (!order->in_order && queue_has(queue, order->last_word - 1)))
        return PRS_BUSY;
    /* MUTANT(order) a word waits for those that are replayed: delete */
    if (order->replaying || path_is_stopped(order, order->word_queue))
        return PRS_BUSY;
    wr = admit_request(order, order->word_queue, &order->no_op);
    order->last_word = queue->head;
    *wr = (struct prs_wr){.remote_addr = remote_addr,
                          .remote_key = remote_key[queue->path],
                          .len_bytes = sizeof(value),
                          .opcode = PRS_WR_WRITE,
                          .owner = &order->no_op};
    set_aim(queue, NULL, remote_key, NULL);
    copy_inline(queue, wr, &value, sizeof(value));
    end_run(queue);
    add_backlog(order, order->word_queue, sizeof(value));
    return 0;
}

int prs_order_touch(struct prs_order *order)
{
    struct prs_order_queue *queue = &order->queue[order->word_queue];
    struct prs_wr *wr;

    /* MUTANT(order) one touch at a time: s/|| queue_has(queue, order->last_touch - 1)// */
    if (queue_full(queue) || queue_has(queue, order->last_touch - 1) || path_is_stopped(order, order->word_queue))
        return PRS_BUSY;
    wr = admit_request(order, order->word_queue, &order->no_op);
    *wr = (struct prs_wr){.opcode = PRS_WR_WRITE, .owner = &order->no_op};
    /* MUTANT(order) a touch names memory of the peer: delete */
    name_records(order, queue, wr);
    set_aim(queue, NULL, order->record_key, NULL);
    order->last_touch = queue->head;
    end_run(queue);
    return 0;
}
