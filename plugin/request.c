/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/request.h"

#include <errno.h>

#include "plugin/result.h"
#include "transport/util/error.h"

enum {
    ANNOUNCE_LAZILY = CTS_RING / 4, /* records in writes that nobody waits for: were they the whole mirror, no irecv
                                       would have room, and nothing would complete that makes some */
};

/* ---- common ---- */

struct request *request_pool(struct request *request, struct comm *comm)
{
    for (int i = 0; i < COMM_REQUESTS; i++) {
        request[i].comm = comm;
        request[i].next = i + 1 < COMM_REQUESTS ? &request[i + 1] : NULL;
    }
    return request;
}

/* Nothing is in flight of a side that only waits, so neither its queue nor its calls would ever notice that the peer
 * or the device is gone: look on purpose, now and then. */
static int look_around(struct comm *comm)
{
    int r = prs_fabric_check(comm->fabric, &comm->rails);

    if (!r)
        r = prs_peer_progress(comm->peer);
    return r ? r : prs_peer_awaited(comm->peer);
}

/* ---- receiver ---- */

static __attribute__((cold)) void refuse_arrival(struct recv_comm *comm, uint32_t id, uint64_t bytes)
{
    if (!comm->error)
        comm->error = prs_fail(-EPROTO, "%s: notification %u of %llu bytes, which no receive expects",
                               prs_peer_describe(comm->base.peer), id, (unsigned long long)bytes);
    comm->misses = COMM_CHECK_EVERY; /* the next call that finds nothing tells it as well */
}

void request_arrived(void *recv_comm, uint32_t id, uint64_t bytes)
{
    struct recv_comm *comm = recv_comm;
    uint32_t slot = id % CTS_RING;
    struct request *request = comm->entry[slot];
    uint64_t tail = comm->tail;
    uint32_t index;

    if (!request || (index = (id - request->first) % PRS_NOTIFY_IDS) >= request->count || bytes > COMM_MAX_BYTES) {
        refuse_arrival(comm, id, bytes);
        return;
    }
    request->size[index] = (int)bytes;
    request->left--;
    comm->entry[slot] = NULL;
    comm->arrived++;
    while (tail != comm->next && !comm->entry[tail % CTS_RING])
        tail++;
    comm->tail = tail;
}

/* Retire writes of records that have left the mirror. They complete in the order of posting or later; never earlier.
 */
static __attribute__((noinline)) void retire_announcements(struct recv_comm *comm)
{
    while (comm->announce_tail != comm->announce_head) {
        struct announcement *oldest = &comm->announcement[comm->announce_tail % COMM_ANNOUNCEMENTS];

        if (oldest->op.status == PRS_OP_PENDING)
            break;
        comm->written = oldest->end;
        comm->announce_tail++;
    }
}

/* Whether the records that wait are to be written to the sender now: at once when one is for a long message, since
 * the sender may be faster than this side's next look. Records of short messages wait only while the sender has
 * enough entries to fill, and at least as many as wait here: so it never runs dry for want of a record, a short
 * window is not made shorter, and the busier the sender is the more records share one write. */
static inline bool is_announcing(const struct recv_comm *comm)
{
    uint64_t unfilled = comm->announced - comm->arrived, waiting = comm->next - comm->announced;

    return waiting && (comm->is_prompt || unfilled < waiting || unfilled < COMM_UNFILLED_ENOUGH);
}

/* Write all waiting records to the sender. Return 0, also when the peer is busy and the rest goes later, or -errno. */
static int announce(struct recv_comm *comm)
{
    retire_announcements(comm);
    while (comm->announced != comm->next && comm->announce_head - comm->announce_tail < COMM_ANNOUNCEMENTS) {
        struct announcement *one = &comm->announcement[comm->announce_head % COMM_ANNOUNCEMENTS];
        uint32_t slot = comm->announced % CTS_RING;
        uint64_t records = comm->next - comm->announced;
        bool is_lazy;
        struct prs_put put = {
            .src = comm->mirror_region,
            .src_addr = &comm->mirror[slot],
            .dst_addr = comm->ring_addr + slot * sizeof(struct cts_record),
            .dst = &comm->ring_keys,
            .group = PRS_GROUP_NONE,
        };
        int r;

        if (records > CTS_RING - slot)
            records = CTS_RING - slot;
        put.len_bytes = records * sizeof(struct cts_record);
        put.flags = records == 1 ? PRS_PUT_INLINE : 0;
        is_lazy = comm->announced + records - comm->awaited <= ANNOUNCE_LAZILY;
        if (is_lazy)
            put.flags |= PRS_PUT_LAZY;
        r = prs_peer_put(comm->base.peer, &one->op, &put);
        if (r)
            return r == PRS_BUSY ? 0 : r;
        comm->announced += records;
        if (!is_lazy)
            comm->awaited = comm->announced;
        comm->is_prompt &= comm->announced != comm->next;
        one->end = comm->announced;
        comm->announce_head++;
    }
    return 0;
}

/* Nothing has come for long, or something wrong has. Return 0 or -errno. */
static __attribute__((noinline)) int look_around_recv(struct recv_comm *comm, bool for_sender)
{
    int r;

    if (comm->error)
        return comm->error;
    comm->misses = 0;
    r = prs_fabric_check(comm->base.fabric, &comm->base.rails);
    return !r && for_sender ? prs_peer_awaited(comm->base.peer) : r;
}

/* Whether the caller waits for_sender: it may have closed when all is here but not flushed. Return 1 (events were
 * taken), 0 (there was nothing: whatever was not done is not done) or -errno. */
static inline int progress_recv(struct recv_comm *comm, bool for_sender)
{
    int r = prs_peer_progress(comm->base.peer);

    if (!r)
        return ++comm->misses >= COMM_CHECK_EVERY ? look_around_recv(comm, for_sender) : 0;
    if (r < 0)
        return r;
    if (comm->error)
        return comm->error;
    r = is_announcing(comm) ? announce(comm) : 0;
    return r < 0 ? r : 1;
}

static inline bool ring_has_room(struct recv_comm *comm, int n)
{
    if (comm->next + n - comm->tail > CTS_RING)
        return false;
    if (comm->next + n - comm->written <= CTS_RING)
        return true;
    retire_announcements(comm);
    return comm->next + n - comm->written <= CTS_RING;
}

static inline void fill_record(struct recv_comm *comm, uint32_t index, uint32_t n, const void *data, size_t size,
                               int tag, const struct memory *memory, struct request *request)
{
    static const struct memory none; /* no keys, whose check is 0 */
    uint64_t sequence = comm->next + index;
    struct cts_record *record = &comm->mirror[sequence % CTS_RING];

    comm->is_prompt |= size >= COMM_PROMPT_BYTES;
    if (!memory)
        memory = &none;
    record->keys = memory->keys;
    cts_write(record, (uintptr_t)data, size, cts_label((uint32_t)tag, sequence, index, n), memory->keys_check,
              sequence);
    comm->entry[sequence % CTS_RING] = request;
}

static __attribute__((cold)) net_result refuse_receive(int n)
{
    if (n < 0 || n > COMM_MAX_RECVS)
        return result_from_errno(prs_fail(-EINVAL, "irecv: %d buffers; 0 to %d are possible", n, COMM_MAX_RECVS));
    return result_from_errno(prs_fail(-EINVAL, "irecv of %d buffers: one that is not empty is not registered", n));
}

/* No request or no room in the sender's ring: NCCL calls again. */
static net_result nothing_posted(struct recv_comm *comm)
{
    int r = progress_recv(comm, true);

    return r < 0 ? result_from_errno(r) : NET_SUCCESS;
}

static inline __attribute__((always_inline)) size_t size_at(const void *sizes, bool is_wide, int i)
{
    return is_wide ? ((const size_t *)sizes)[i] : (size_t)((const int *)sizes)[i];
}

/* Fill in n records behind the last one. Return n, or which buffer is refused: what was filled in is not announced. */
static inline __attribute__((always_inline)) int fill_records(struct recv_comm *comm, struct request *request, int n,
                                                              void **data, const void *sizes, bool is_wide,
                                                              const int *tags, void **mhandles)
{
    for (int i = 0; i < n; i++) {
        size_t size = size_at(sizes, is_wide, i);

        if (!mhandles[i] && size) {
            while (i-- > 0)
                comm->entry[(comm->next + (uint64_t)i) % CTS_RING] = NULL;
            return -1;
        }
        fill_record(comm, (uint32_t)i, (uint32_t)n, data[i], size, tags[i], mhandles[i], request);
    }
    return n;
}

/* Sizes are int in the older tables, and one buffer is the usual case: compiled for each, so that none costs. */
static inline __attribute__((always_inline)) net_result post_receive(struct recv_comm *comm, int n, void **data,
                                                                     const void *sizes, bool is_wide, const int *tags,
                                                                     void **mhandles, void **out)
{
    struct request *request = comm->free;

    *out = NULL;
    if (n < 0 || n > COMM_MAX_RECVS)
        return refuse_receive(n);
    if (!request || !ring_has_room(comm, n))
        return nothing_posted(comm);
    if (fill_records(comm, request, n, data, sizes, is_wide, tags, mhandles) != n)
        return refuse_receive(n);
    comm->free = request->next;
    request->kind = REQUEST_RECV;
    request->count = request->left = (uint8_t)n;
    request->first = (uint32_t)comm->next;
    comm->next += (uint64_t)n;
    if (is_announcing(comm)) {
        int r = announce(comm);

        if (r < 0)
            return result_from_errno(r);
    }
    *out = request;
    return NET_SUCCESS;
}

static __attribute__((noinline)) net_result post_group(struct recv_comm *comm, int n, void **data, const void *sizes,
                                                       bool is_wide, const int *tags, void **mhandles, void **out)
{
    return post_receive(comm, n, data, sizes, is_wide, tags, mhandles, out);
}

net_result request_irecv(void *recv_comm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                         void **profiles, void **out)
{
    (void)profiles;
    return n == 1 ? post_receive(recv_comm, 1, data, sizes, true, tags, mhandles, out)
                  : post_group(recv_comm, n, data, sizes, true, tags, mhandles, out);
}

net_result request_irecv_narrow(void *recv_comm, int n, void **data, int *sizes, int *tags, void **mhandles, void **out)
{
    return n == 1 ? post_receive(recv_comm, 1, data, sizes, false, tags, mhandles, out)
                  : post_group(recv_comm, n, data, sizes, false, tags, mhandles, out);
}

/* The last buffer that a NIC has written for a GPU to read; NULL if none was. */
static const struct memory *flush_target(int n, void **data, const int *sizes, void **mhandles, void **addr)
{
    for (int i = n; i-- > 0;) {
        const struct memory *memory = mhandles[i];

        if (memory && memory->is_device && sizes[i] > 0) {
            *addr = data[i];
            return memory;
        }
    }
    return NULL;
}

/* Return 0 or -errno; when the peer's window is full the request stays waiting. */
static int start_flush(struct request *request)
{
    int r = prs_peer_flush(request->comm->peer, &request->op, request->flush_memory->region, request->flush_addr);

    request->waiting = r == PRS_BUSY;
    return r < 0 ? r : 0;
}

net_result request_iflush(void *recv_comm, int n, void **data, int *sizes, void **mhandles, void **out)
{
    struct recv_comm *comm = recv_comm;
    struct request *request = comm->free;
    const struct memory *memory;
    void *addr = NULL;
    int r;

    *out = NULL;
    memory = flush_target(n, data, sizes, mhandles, &addr);
    if (!memory)
        return NET_SUCCESS; /* the CPU sees what is in host memory as soon as the receive is done */
    if (!request)
        return result_from_errno(prs_fail(-EINVAL, "iflush: %d requests are out already", COMM_REQUESTS));
    request->kind = REQUEST_FLUSH;
    request->flush_memory = memory;
    request->flush_addr = addr;
    r = start_flush(request);
    if (r < 0)
        return result_from_errno(r);
    comm->free = request->next;
    *out = request;
    return NET_SUCCESS;
}

/* ---- sender ---- */

/* Return what isend is to return. */
static __attribute__((noinline)) net_result look_around_send(struct send_comm *comm)
{
    int r;

    comm->misses = 0;
    r = look_around(&comm->base);
    return r < 0 ? result_from_errno(r) : NET_SUCCESS;
}

/* No record to fill yet, or no room: NCCL calls again. */
static inline net_result nothing_sent(struct send_comm *comm)
{
    return __builtin_expect(++comm->misses < COMM_CHECK_EVERY, 1) ? NET_SUCCESS : look_around_send(comm);
}

/* The first unfilled record of the head receive with this tag. Stops at the first that is not here: were a later one
 * of the same tag taken, two sends of one tag would change places. */
static const struct cts_record *match(const struct send_comm *comm, uint32_t tag)
{
    uint32_t count = comm->ring[comm->head % CTS_RING].count;

    for (uint32_t i = 0; i < count; i++) {
        const struct cts_record *record = &comm->ring[(comm->head + i) % CTS_RING];

        if (comm->filled & 1u << i)
            continue;
        if (!cts_arrived(record, comm->head + i) || record->index != i || record->count != count)
            return NULL;
        if (record->tag == tag)
            return record;
    }
    return NULL;
}

static inline void consume(struct send_comm *comm, const struct cts_record *record)
{
    uint32_t count = record->count;

    if (count == 1) {
        comm->head++;
        return;
    }
    comm->filled |= 1u << record->index;
    if (comm->filled == (1u << count) - 1) {
        comm->head += count;
        comm->filled = 0;
    }
}

static __attribute__((cold)) net_result refuse_send(const struct send_comm *comm, size_t size,
                                                    const struct cts_record *record, const struct memory *memory)
{
    const char *peer = prs_peer_describe(comm->base.peer);
    int r;

    if (size > record->size)
        r = prs_fail(-EINVAL,
                     "isend of %zu bytes with tag %d, but the receiver's buffer holds %llu: do both sides agree "
                     "on the count? (%s)",
                     size, (int)record->tag, (unsigned long long)record->size, peer);
    else if (size > COMM_MAX_BYTES)
        r = prs_fail(-EINVAL, "isend of %zu bytes: at most %d are possible (%s)", size, COMM_MAX_BYTES, peer);
    else
        r = prs_fail(-EINVAL, "isend of %zu bytes from memory that is not registered (mhandle %p, %s)", size,
                     (const void *)memory, peer);
    return result_from_errno(r);
}

/* Separate from request_isend(), which is called in vain so often that it is to do as little as possible then. */
static __attribute__((noinline)) net_result send_to(struct send_comm *comm, const struct cts_record *record,
                                                    const void *data, size_t size, const struct memory *memory,
                                                    void **out)
{
    struct request *request = comm->free;
    struct prs_put put;
    int r;

    if (!request)
        return nothing_sent(comm);
    if (size > record->size || size > COMM_MAX_BYTES || (size && !memory))
        return refuse_send(comm, size, record, memory);
    put.src = memory ? memory->region : NULL;
    put.src_addr = data;
    put.dst_addr = record->addr;
    put.dst = &record->keys;
    put.len_bytes = size;
    put.notify_id = record->id % PRS_NOTIFY_IDS;
    put.group = PRS_GROUP_NONE; /* no signals here: under `counted` a put of a group costs the peer an arrival */
    put.flags = PRS_PUT_NOTIFY;
    r = prs_peer_put(comm->base.peer, &request->op, &put);
    if (r)
        return r < 0 ? result_from_errno(r) : nothing_sent(comm);
    consume(comm, record);
    comm->free = request->next;
    request->kind = REQUEST_SEND;
    request->size[0] = (int)size;
    *out = request;
    return NET_SUCCESS;
}

/* A receive of several buffers. */
static __attribute__((noinline)) net_result send_to_match(struct send_comm *comm, const void *data, size_t size,
                                                          int tag, const struct memory *memory, void **out)
{
    const struct cts_record *record = match(comm, (uint32_t)tag);

    return record ? send_to(comm, record, data, size, memory, out) : nothing_sent(comm);
}

static inline __attribute__((always_inline)) net_result
send_message(struct send_comm *comm, const void *data, size_t size, int tag, const struct memory *memory, void **out)
{
    const struct cts_record *record = &comm->ring[comm->head % CTS_RING];

    *out = NULL;
    if (!cts_arrived(record, comm->head))
        return nothing_sent(comm);
    if (record->count != 1 || record->tag != (uint32_t)tag)
        return send_to_match(comm, data, size, tag, memory, out);
    return send_to(comm, record, data, size, memory, out);
}

net_result request_isend(void *send_comm, void *data, size_t size, int tag, void *mhandle, void *profile, void **out)
{
    (void)profile;
    return send_message(send_comm, data, size, tag, mhandle, out);
}

net_result request_isend_narrow(void *send_comm, void *data, int size, int tag, void *mhandle, void **out)
{
    /* A negative size becomes one that is too large, and is refused as such. */
    return send_message(send_comm, data, (size_t)size, tag, mhandle, out);
}

/* ---- test ---- */

/* Give the request back and tell that it is done. */
static inline net_result retire(struct request *request, struct request **free, int *done)
{
    request->next = *free;
    *free = request;
    *done = 1;
    return NET_SUCCESS;
}

static inline net_result retire_recv(struct request *request, int *done, int *sizes)
{
    for (int i = 0; sizes && i < request->count; i++)
        sizes[i] = request->size[i];
    return retire(request, &((struct recv_comm *)request->comm)->free, done);
}

static inline net_result retire_send(struct request *request, int *done, int *sizes)
{
    if (sizes)
        sizes[0] = request->size[0];
    return retire(request, &((struct send_comm *)request->comm)->free, done);
}

/* What is not done yet: drive it, and look again. Apart, so that a request that is done takes the short way. */
static __attribute__((noinline)) net_result drive_recv(struct request *request, int *done, int *sizes)
{
    int r = progress_recv((struct recv_comm *)request->comm, true);

    *done = 0;
    if (r <= 0)
        return r < 0 ? result_from_errno(r) : NET_SUCCESS;
    return request->left ? NET_SUCCESS : retire_recv(request, done, sizes);
}

static __attribute__((noinline)) net_result drive_send(struct request *request, int *done, int *sizes)
{
    *done = 0;
    if (request->op.status == PRS_OP_PENDING) {
        int r = prs_peer_progress(request->comm->peer);

        if (r <= 0)
            return r < 0 ? result_from_errno(r) : NET_SUCCESS;
        if (request->op.status == PRS_OP_PENDING)
            return NET_SUCCESS;
    }
    return request->op.status < 0 ? result_from_errno(request->op.status) : retire_send(request, done, sizes);
}

/* The flush of a receive may have to wait until the peer has room for it. */
static __attribute__((noinline)) net_result drive_flush(struct request *request, int *done)
{
    struct recv_comm *comm = (struct recv_comm *)request->comm;
    int r = 0;

    *done = 0;
    if (request->op.status == PRS_OP_PENDING || request->waiting)
        r = progress_recv(comm, false);
    if (r >= 0 && request->waiting)
        r = start_flush(request);
    if (r < 0)
        return result_from_errno(r);
    if (request->op.status == PRS_OP_PENDING || request->waiting)
        return NET_SUCCESS;
    return request->op.status < 0 ? result_from_errno(request->op.status) : retire(request, &comm->free, done);
}

net_result request_test(void *handle, int *done, int *sizes)
{
    struct request *request = handle;

    if (request->kind == REQUEST_RECV)
        return request->left ? drive_recv(request, done, sizes) : retire_recv(request, done, sizes);
    if (request->kind == REQUEST_SEND)
        return request->op.status ? drive_send(request, done, sizes) : retire_send(request, done, sizes);
    return drive_flush(request, done);
}
