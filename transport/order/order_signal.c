/* SPDX-License-Identifier: Apache-2.0 */
/* The order engine: when a signal may leave, over which queue, and with which flag or record. */
#include "transport/order/op.h"
#include "transport/order/order_queue.h"
#include "transport/order/wire.h"

/* Return the mask of the queues with unfinished requests that the signal must follow. position[] gets the last of
 * them. */
static uint64_t unfinished(const struct prs_order *order, const struct prs_signal *signal, uint32_t *position)
{
    const struct prs_order_group *group = &order->group[signal->group % PRS_ORDER_GROUPS];
    /* MUTANT(order) a strong signal waits for all groups: s/signal->flags & PRS_SIGNAL_STRONG/false/ */
    bool drain = order->policy == PRS_POLICY_DRAIN, strong = signal->flags & PRS_SIGNAL_STRONG;
    /* MUTANT(order) a strong signal drains behind signals too: s/&& !strong// */
    /* MUTANT(order) where queues keep no order each signal drains: s/order->ordered_writes &&// */
    /* MUTANT(order) signals in a row drain once: s/drain && order->ordered_writes && !strong/false/ */
    bool transfers_only =
        drain && order->ordered_writes && !strong; /* earlier signals of the group are on the same queue */
    uint64_t found = 0;

    for (uint32_t i = 0; i < order->data_queues; i++) {
        const struct prs_order_queue *queue = &order->queue[i];

        position[i] = transfers_only    ? queue->last_transfer - 1
                      : drain || strong ? queue->last_ordered - 1
                                        : group->last[i];
        /* MUTANT(order) a drained signal waits for work of all groups: s/drain ||// */
        if ((drain || strong || (group->used >> i & 1)) && queue_has(queue, position[i]))
            found |= 1ull << i;
    }
    return found;
}

/* The last request of the queue, if it is not posted and the signal adds: the two may then be merged. Since it is the
 * last, nothing that the signal must follow can come after it on this queue. */
static struct prs_wr *joinable(struct prs_order_queue *queue, const struct prs_signal *signal)
{
    /* MUTANT(order) only adds are joined: s/signal->kind == PRS_SIGNAL_ADD &&// */
    /* MUTANT(order) a posted add is not joined: s/posted/tail/ */
    return signal->kind == PRS_SIGNAL_ADD && queue->head != queue->posted ? &queue->wr[(queue->head - 1) & queue->mask]
                                                                          : NULL;
}

static void join(struct prs_order *order, struct prs_order_queue *queue, struct prs_op *op)
{
    owner_merge(&queue->wr[(queue->head - 1) & queue->mask].owner, op);
    order->stats.merged++;
}

uint32_t prs_order_retire_merged(struct prs_op *owner)
{
    uint32_t done = 0;

    /* MUTANT(order) merged signals are all done: s/while (owner)// */
    while (owner)
        done += prs_op_part_done(owner_pop(&owner)); /* pop first: once it is done, its storage may vanish */
    return done;
}

static void set_fence(struct prs_order *order, struct prs_wr *wr)
{
    if (!(wr->flags & PRS_WR_FENCE))
        order->stats.fences++;
    wr->flags |= PRS_WR_FENCE;
}

/* ---- signals as records ---- */

static inline uint32_t record_key(const struct prs_order *order, const struct prs_keys *keys)
{
    return prs_record_key(keys->rkey[order->path[0].remote_rail]);
}

static void admit_record(struct prs_order *order, uint32_t index, struct prs_op *op, const struct prs_record *record)
{
    struct prs_order_queue *queue = &order->queue[index];
    uint32_t slot = record->number % PRS_RECORDS;
    struct prs_wr *wr = admit_request(order, index, op);

    static_assert(sizeof(*record) <= PRS_INLINE_BYTES, "a record travels inside its request");
    *wr = (struct prs_wr){.remote_addr = order->record_addr + slot * sizeof(*record),
                          .remote_key = order->record_key[queue->path],
                          .len_bytes = sizeof(*record),
                          .imm = prs_imm_make_bare(PRS_BARE_RECORD, slot),
                          .opcode = PRS_WR_WRITE_IMM,
                          .owner = op};
    queue->immediates++;
    set_aim(queue, NULL, order->record_key, NULL);
    copy_inline(queue, wr, record, sizeof(*record));
    /* MUTANT(order) a drained signal knows where records went: delete */
    queue->last_ordered = queue->head;
    end_run(queue);
    add_backlog(order, index, sizeof(*record));
}

/* Merge an add into the record of the last add to its word, if nothing came between the two. */
static bool join_record(struct prs_order *order, struct prs_order_queue *queue, struct prs_op *op,
                        const struct prs_signal *signal, const struct prs_keys *keys)
{
    uint32_t slot = signal->group % PRS_ORDER_GROUPS;
    struct prs_wr *wr = joinable(queue, signal);
    struct prs_record record;
    void *copy;

    /* MUTANT(order) a record is joined only while its group is closed: s/|| order->tally->interval[slot].tag// */
    if (!wr || wr->opcode != PRS_WR_WRITE_IMM || wr->len_bytes != sizeof(record) ||
        (wr->imm & 0x801fffff) != prs_imm_make_bare(PRS_BARE_RECORD, 0) || order->tally->interval[slot].tag)
        return false;
    copy = queue->inline_bytes + (size_t)(wr - queue->wr) * PRS_INLINE_BYTES;
    memcpy(&record, copy, sizeof(record));
    /* MUTANT(order) a record is joined only by its own group: s/record.slot != slot ||// */
    /* MUTANT(order) only adds to the same word share a record: s/record.addr != signal->dst_addr ||// */
    if (record.kind != PRS_RECORD_ADD || record.addr != signal->dst_addr || record.slot != slot ||
        record.key != record_key(order, keys))
        return false;
    /* MUTANT(order) only the newest record is joined: delete */
    if (record.number != order->tally->next_number - 1)
        return false; /* a later record on another queue may have closed an interval of the group */
    record.value += signal->value;
    memcpy(copy, &record, sizeof(record));
    join(order, queue, op);
    return true;
}

/* Where the NIC has no adds, a drained signal leaves as a record too, once all that it must follow is complete. The
 * receiver then raises it. The record has room: prs_order_signal() has checked that. */
static int admit_as_record(struct prs_order *order, uint32_t index, struct prs_op *op, const struct prs_signal *signal,
                           const struct prs_keys *keys, bool fenced)
{
    struct prs_order_queue *queue = &order->queue[index];
    /* MUTANT(order) a record has its own copy of the keys: s/keys/signal->dst/ */
    struct prs_record record = {.addr = signal->dst_addr,
                                .value = signal->value,
                                .key = record_key(order, keys),
                                .kind = signal->kind == PRS_SIGNAL_ADD ? PRS_RECORD_ADD : PRS_RECORD_SET,
                                .barrier = (signal->flags & PRS_SIGNAL_STRONG) != 0};

    if (!join_record(order, queue, op, signal, keys)) {
        if (queue_full(queue))
            return PRS_BUSY;
        prs_tally_close(order->tally, signal->group % PRS_ORDER_GROUPS, &record);
        admit_record(order, index, op, &record);
    }
    /* MUTANT(order) a record is fenced as a word is: s/if (fenced)/if (false)/ */
    if (fenced)
        set_fence(order, &queue->wr[(queue->head - 1) & queue->mask]);
    group_of(order, signal->group)->unfenced = false;
    return 0;
}

/* ---- signals as words ---- */

/* Remember where a signal went, for later ones of its group and for strong ones. */
static inline void note_signal(struct prs_order *order, struct prs_order_group *group, uint32_t index)
{
    struct prs_order_queue *queue = &order->queue[index];

    /* MUTANT(order) a group has one fence, not one a signal: delete */
    group->unfenced = false;
    /* MUTANT(order) later signals of a group know of the earlier: delete */
    group_note(group, index, queue->head - 1);
    order->signal_used |= 1ull << index;
    order->signal_last[index] = queue->head - 1;
    /* MUTANT(order) a strong signal knows where signals went: delete */
    queue->last_ordered = queue->head;
}

/* Admit the signal on a queue whose earlier requests it follows. Return 0 or PRS_BUSY. */
static int admit_signal(struct prs_order *order, uint32_t index, struct prs_op *op, const struct prs_signal *signal,
                        const struct prs_keys *keys)
{
    struct prs_order_queue *queue = &order->queue[index];
    struct prs_order_group *group = order->one_in_order ? NULL : group_of(order, signal->group);
    uint64_t remote_key = keys->rkey[queue->remote_rail];
    bool strong = signal->flags & PRS_SIGNAL_STRONG;
    /* A strong signal may tell the peer that its memory has been read. A later request may overtake the response to an
     * earlier read, so a strong signal after a read needs the fence under every policy. */
    /* MUTANT(order) a strong signal fences behind reads:
     * s/(strong && queue_has(queue, queue->last_read - 1))/false/ */
    /* MUTANT(order) nic_fence fences strong signals: s/(group->unfenced || strong)/group->unfenced/ */
    /* MUTANT(order) nic_fence fences behind puts: s/(group->unfenced || strong)/strong/ */
    bool fenced = (order->policy == PRS_POLICY_NIC_FENCE && (group->unfenced || strong)) ||
                  (strong && queue_has(queue, queue->last_read - 1));
    struct prs_wr *wr = joinable(queue, signal);

    /* MUTANT(order) without adds a drained signal is a record: delete */
    if (order->tally)
        return admit_as_record(order, index, op, signal, keys, fenced);
    /* MUTANT(order) only adds to the same word are joined: s/wr->remote_addr == signal->dst_addr &&// */
    if (wr && wr->opcode == PRS_WR_ADD && wr->remote_addr == signal->dst_addr && wr->remote_key == remote_key) {
        /* MUTANT(order) a join adds: delete */
        wr->value += signal->value;
        if (fenced)
            set_fence(order, wr);
        if (group)
            note_signal(order, group, index);
        join(order, queue, op);
        return 0;
    }
    if (queue_full(queue))
        return PRS_BUSY;
    wr = admit_request(order, index, op);
    *wr = (struct prs_wr){.remote_addr = signal->dst_addr,
                          .remote_key = remote_key,
                          .value = signal->value,
                          .len_bytes = sizeof(signal->value),
                          .opcode = signal->kind == PRS_SIGNAL_ADD ? PRS_WR_ADD : PRS_WR_WRITE,
                          .owner = op};
    /* MUTANT(order) a signal carries its value with it: delete */
    if (signal->kind == PRS_SIGNAL_SET)
        copy_inline(queue, wr, &signal->value, sizeof(signal->value));
    if (fenced)
        set_fence(order, wr);
    /* MUTANT(order) a signal ends a run: delete */
    end_run(queue);
    add_backlog(order, index, sizeof(signal->value));
    if (group)
        note_signal(order, group, index);
    return 0;
}

static void hold_signal(struct prs_order *order, struct prs_op *op, const struct prs_signal *signal, uint64_t need,
                        const uint32_t *position)
{
    struct prs_order_held *held = &order->held[(order->held_first + order->held_count++) % PRS_ORDER_HELD];

    held->op = op;
    held->signal = *signal;
    /* MUTANT(order) a held signal has its own copy of the keys: s#*signal->dst#(struct prs_keys){{0}}# */
    held->keys = *signal->dst; /* the caller may change its keys after the call */
    held->need = need;
    memcpy(held->need_position, position, order->data_queues * sizeof(*position));
    if (order->policy == PRS_POLICY_DRAIN) {
        /* MUTANT(order) a held drained signal stalls the rest: delete */
        order->stalled = true;
        order->stats.drains++;
    }
}

static inline bool at_most_one(uint64_t mask)
{
    return (mask & (mask - 1)) == 0;
}

/* Must the signal use add_path? */
static inline bool adds_on_one_nic(const struct prs_order *order, const struct prs_signal *signal)
{
    /* MUTANT(order) adds take one NIC: s/order->path_count > 1/false/ */
    return signal->kind == PRS_SIGNAL_ADD && order->path_count > 1 && !order->tally;
}

/* May a signal that must follow requests on these queues leave now? */
static bool may_leave(const struct prs_order *order, const struct prs_signal *signal, uint64_t need)
{
    /* MUTANT(order) a drained signal waits for everything: s/order->policy == PRS_POLICY_DRAIN/false/ */
    if (need == 0 || order->policy == PRS_POLICY_DRAIN)
        return need == 0;
    /* MUTANT(order) under adaptive routing a set waits for its puts: s/!order->ordered_writes/false/ */
    if (!order->ordered_writes && signal->kind == PRS_SIGNAL_SET && !order->tally)
        return false;
    /* MUTANT(order) a signal waits while two queues have its puts: s/at_most_one(need)/true/ */
    /* MUTANT(order) an add waits for puts to other NICs: s/!adds_on_one_nic(order, signal)/true/ */
    return at_most_one(need) && (!adds_on_one_nic(order, signal) || order->queue[lowest(need)].path == order->add_path);
}

/* The queue of a signal that may leave. */
static uint32_t queue_of(const struct prs_order *order, const struct prs_signal *signal, uint64_t need)
{
    if (order->one_in_order)
        return 0;
    /* MUTANT(order) nic_fence posts signals where the puts are: s/0/1 % order->data_queues/ */
    if (order->policy == PRS_POLICY_NIC_FENCE)
        return 0;
    /* MUTANT(order) a signal goes to the queue of its puts: s/if (need)/if (false)/ */
    if (need)
        return lowest(need);
    /* MUTANT(order) drain keeps the signals of a group on one queue: s/order->policy == PRS_POLICY_DRAIN ||// */
    if (order->policy == PRS_POLICY_DRAIN || adds_on_one_nic(order, signal))
        return order->add_path + signal->group % (order->data_queues / order->path_count) * order->path_count;
    return signal->group % order->data_queues;
}

/* ---- counted ---- */

/* Return the mask of the queues with unfinished reads. */
static uint64_t unfinished_reads(const struct prs_order *order)
{
    uint64_t found = 0;

    for (uint32_t i = 0; i < order->data_queues; i++)
        if (queue_has(&order->queue[i], order->queue[i].last_read - 1))
            found |= 1ull << i;
    return found;
}

/* Return the mask of the group slots, other than one, with puts that no record has announced. */
static uint32_t open_intervals(const struct prs_tally *tally, uint32_t except)
{
    uint32_t open = 0;

    for (uint32_t i = 0; i < PRS_TALLY_SLOTS; i++)
        if (tally->interval[i].tag && i != except)
            open |= 1u << i;
    return open;
}

/* Close these intervals by records on one queue, as many as there is room for. Return those that are left. */
static uint32_t close_intervals(struct prs_order *order, uint32_t index, uint32_t open)
{
    const struct prs_order_queue *queue = &order->queue[index];
    struct prs_record record = {.kind = PRS_RECORD_CLOSE};

    /* MUTANT(order) closing needs slots of the queue: s/!queue_full(queue) &&// */
    for (; open && !queue_full(queue) && prs_tally_room(order->tally, 1); open &= open - 1) {
        prs_tally_close(order->tally, lowest(open), &record);
        admit_record(order, index, &order->no_op, &record);
    }
    return open;
}

/* Admit the signal as a record. A strong one closes the intervals of all other groups first. Return 0 or PRS_BUSY. */
static int signal_counted(struct prs_order *order, struct prs_op *op, const struct prs_signal *signal)
{
    bool strong = signal->flags & PRS_SIGNAL_STRONG;
    uint32_t slot = signal->group % PRS_ORDER_GROUPS, records = 1, index;
    /* MUTANT(order) a strong record closes all other groups: s/strong ? open_intervals(order->tally, slot) :// */
    uint32_t others = strong ? open_intervals(order->tally, slot) : 0;
    uint64_t reads = strong ? unfinished_reads(order) : 0;
    struct prs_order_queue *queue;
    struct prs_record record;

    records += (uint32_t)__builtin_popcount(others);
    /* MUTANT(order) without a fence a strong record waits for reads:
     * s/(order->fence ? at_most_one(reads) : reads == 0/at_most_one(reads/ */
    /* MUTANT(order) a strong record waits while two queues read: s/? at_most_one(reads) :/||/ */
    if (!(order->fence ? at_most_one(reads) : reads == 0) || !prs_tally_room(order->tally, records))
        return PRS_BUSY;
    index = reads ? lowest(reads) : order->small_queue;
    /* MUTANT(order) a record after reads of a lost path waits for their replay: delete */
    if (path_is_stopped(order, index))
        return PRS_BUSY;
    queue = &order->queue[index];
    if (!strong && join_record(order, queue, op, signal, signal->dst))
        return 0;
    if (records >
        queue->mask + 1) { /* the queue can never hold all of them; the intervals closed now need no record at the
                            * next try */
        /* MUTANT(order) records that have no room together leave one by one: delete */
        (void)close_intervals(order, index, others);
        return PRS_BUSY;
    }
    /* MUTANT(order) records need slots of the queue: delete */
    if (queue->head - queue->tail + records > queue->mask + 1)
        return PRS_BUSY;
    (void)close_intervals(order, index, others);
    /* MUTANT(order) a strong record is a barrier: s/strong/0/ */
    record = (struct prs_record){.addr = signal->dst_addr,
                                 .value = signal->value,
                                 .key = record_key(order, signal->dst),
                                 .kind = signal->kind == PRS_SIGNAL_ADD ? PRS_RECORD_ADD : PRS_RECORD_SET,
                                 .barrier = strong};
    prs_tally_close(order->tally, slot, &record);
    admit_record(order, index, op, &record);
    /* MUTANT(order) a strong record follows reads: s/set_fence(order, &queue->wr[(queue->head - 1) & queue->mask])// */
    if (reads)
        set_fence(order, &queue->wr[(queue->head - 1) & queue->mask]);
    return 0;
}

/* ---- admit ---- */

int prs_order_signal(struct prs_order *order, struct prs_op *op, const struct prs_signal *signal)
{
    uint32_t position[PRS_ORDER_MAX_QUEUES];
    uint64_t need;
    uint32_t index;

    /* MUTANT(order) a second signal waits while drain stalls: s/stalled || order->// */
    /* MUTANT(order) the window bounds signals: s/ops >= order->max_ops || order->// */
    /* MUTANT(order) no signal is held beyond the room for it: s/|| order->held_count == PRS_ORDER_HELD// */
    if (order->ops >= order->max_ops || order->stalled || order->held_count == PRS_ORDER_HELD)
        return PRS_BUSY;
    if (order->policy == PRS_POLICY_COUNTED) {
        if (signal_counted(order, op, signal))
            return PRS_BUSY;
        prs_op_start(op, 1);
        order->ops++;
        order->stats.signals++;
        return 0;
    }
    /* Check this before the signal is held: only the peer makes room, and no completion here reports that. */
    /* MUTANT(order) a drained record needs room before it is held: delete */
    if (order->tally && !prs_tally_room(order->tally, 1))
        return PRS_BUSY;
    need = order->one_in_order ? 0 : unfinished(order, signal, position); /* 0: it may leave, over queue 0 */
    /* MUTANT(order) no signal overtakes one that is held: s/order->held_count ||// */
    if (order->held_count || !may_leave(order, signal, need)) {
        hold_signal(order, op, signal, need, position);
    } else {
        index = queue_of(order, signal, need);
        if (admit_signal(order, index, op, signal, signal->dst))
            return PRS_BUSY;
    }
    prs_op_start(op, 1);
    order->ops++;
    order->stats.signals++;
    return 0;
}

int prs_order_settle(struct prs_order *order)
{
    uint32_t index = order->small_queue;
    /* MUTANT(order) an ask is behind all that was sent: s/, .barrier = true// */
    struct prs_record record = {.kind = PRS_RECORD_ASK, .barrier = true};

    /* MUTANT(order) settling waits for what is in flight: delete */
    if (order->ops)
        return PRS_AGAIN;
    if (!order->tally || order->tally == &prs_tally_full || prs_tally_answered(order->tally))
        return 0;
    /* MUTANT(order) one ask is enough: s/!prs_tally_asked(order->tally) &&// */
    if (!prs_tally_asked(order->tally) && prs_tally_room(order->tally, 1) && !queue_full(&order->queue[index])) {
        prs_tally_close(order->tally, 0, &record);
        admit_record(order, index, &order->no_op, &record);
    }
    return PRS_AGAIN;
}

/* Return the mask of the queues with a signal in flight. A held signal must not overtake signals that were held before
 * it and have been sent since, and its `need` does not include these. */
static uint64_t unfinished_signals(struct prs_order *order)
{
    for (uint64_t left = order->signal_used; left; left &= left - 1) {
        uint32_t i = lowest(left);

        if (!queue_has(&order->queue[i], order->signal_last[i]))
            order->signal_used &= ~(1ull << i);
    }
    return order->signal_used;
}

void prs_order_release(struct prs_order *order)
{
    while (order->held_count) {
        struct prs_order_held *held = &order->held[order->held_first];
        uint64_t need;
        uint32_t index;

        for (uint64_t left = held->need; left; left &= left - 1) {
            uint32_t i = lowest(left);

            if (!queue_has(&order->queue[i], held->need_position[i]))
                held->need &= ~(1ull << i);
        }
        /* MUTANT(order) a released signal stays behind those that left: s/| unfinished_signals(order)// */
        /* MUTANT(order) a held signal waits for all that it needs: s/held->need |// */
        need = held->need | unfinished_signals(order);
        if (!may_leave(order, &held->signal, need))
            return;
        index = queue_of(order, &held->signal, need);
        if (admit_signal(order, index, held->op, &held->signal, &held->keys))
            return; /* that queue is full: try again at its next completion */
        /* MUTANT(order) held signals leave oldest first: delete */
        order->held_first = (order->held_first + 1) % PRS_ORDER_HELD;
        order->held_count--;
        /* MUTANT(order) the stall ends with its signal: delete */
        order->stalled = false;
    }
}
