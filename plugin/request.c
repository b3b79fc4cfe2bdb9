/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/request.h"

#include <errno.h>

#include "plugin/profile.h"
#include "plugin/result.h"
#include "transport/util/compiler.h"
#include "transport/util/error.h"

enum {
    /* Records in consecutive lazy writes, at most. If they filled the mirror, no irecv would find room, and no
     * completion would come to free any. */
    MAX_LAZY_RECORDS = CTS_RING / 4,
    OPCODE_WRITE_IMM = 1, /* IBV_WR_RDMA_WRITE_WITH_IMM, for NCCL's profiler */
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

/* A side that only waits has nothing in flight, so no completion would report that the peer or the device is gone. So
 * check them now and then. Return 0 or -errno. */
static int check_health(struct comm *comm)
{
    int r = prs_peer_progress(comm->peer);

    return r < 0 ? r : prs_peer_check_remote(comm->peer);
}

/* ---- receiver ---- */

static PRS_COLD void refuse_arrival(struct recv_comm *comm, uint32_t id, uint64_t bytes)
{
    if (!comm->error)
        comm->error = prs_fail(-EPROTO, "%s: notification %u of %llu bytes, which no receive expects",
                               prs_peer_describe(comm->base.peer), id, (unsigned long long)bytes);
    comm->misses = COMM_CHECK_EVERY; /* so that the next call without an event returns the error, too */
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

/* Retire completed writes of records, oldest first. */
static PRS_OUTLINED void retire_announcements(struct recv_comm *comm)
{
    while (comm->announce_tail != comm->announce_head) {
        struct announcement *oldest = &comm->announcement[comm->announce_tail % COMM_ANNOUNCEMENTS];

        if (oldest->op.status == PRS_OP_PENDING)
            break;
        comm->written = oldest->end;
        comm->announce_tail++;
    }
}

/* Whether to write the waiting records to the sender now. The record of a long message never waits, since the sender
 * may need it before this side's next call. Records of short messages wait while the sender has enough entries to fill,
 * and at least as many as wait here. So the sender never lacks a record, and the busier it is, the more records are in
 * one write. */
static inline bool should_announce(const struct recv_comm *comm)
{
    uint64_t unfilled = comm->announced - comm->arrived, waiting = comm->next - comm->announced;

    return waiting && (comm->has_long || unfilled < waiting || unfilled < COMM_UNFILLED_ENOUGH);
}

/* Write all waiting records to the sender. Return 0, also if the peer is busy and the rest must wait, or -errno. */
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
        is_lazy = comm->announced + records - comm->signaled <= MAX_LAZY_RECORDS;
        if (is_lazy)
            put.flags |= PRS_PUT_LAZY;
        r = prs_peer_put(comm->base.peer, &one->op, &put);
        if (r)
            return r == PRS_BUSY ? 0 : r;
        comm->announced += records;
        if (!is_lazy)
            comm->signaled = comm->announced;
        comm->has_long &= comm->announced != comm->next;
        one->end = comm->announced;
        comm->announce_head++;
    }
    return 0;
}

/* Called after many calls without an event, or when on_notify has found an error. Return 0 or -errno. */
static PRS_OUTLINED int check_recv_health(struct recv_comm *comm, bool for_sender)
{
    if (comm->error)
        return comm->error;
    comm->misses = 0;
    return for_sender ? prs_peer_check_remote(comm->base.peer) : 0;
}

/* for_sender: the caller still expects data. A flush does not, since the sender may have closed. Return 1 if there were
 * events, 0 if there were none, so that no request has changed, or -errno. */
static inline int progress_recv(struct recv_comm *comm, bool for_sender)
{
    int r = prs_peer_progress(comm->base.peer);

    if (!r)
        return ++comm->misses >= COMM_CHECK_EVERY ? check_recv_health(comm, for_sender) : 0;
    if (r < 0)
        return r;
    if (comm->error)
        return comm->error;
    r = should_announce(comm) ? announce(comm) : 0;
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

    comm->has_long |= size >= COMM_LONG_BYTES;
    if (!memory)
        memory = &none;
    cts_write(record, (uintptr_t)data, size, &memory->keys, cts_label((uint32_t)tag, sequence, index, n), sequence);
    comm->entry[sequence % CTS_RING] = request;
}

static PRS_COLD net_result refuse_receive(int n)
{
    if (n < 0 || n > COMM_MAX_RECVS)
        return result_from_errno(prs_fail(-EINVAL, "irecv of %d buffers: 0 to %d are possible", n, COMM_MAX_RECVS));
    return result_from_errno(prs_fail(-EINVAL, "irecv of %d buffers: one is not empty and has no registration", n));
}

/* No request is free, or the clear-to-send ring is full: NCCL calls again. */
static net_result nothing_posted(struct recv_comm *comm)
{
    int r = progress_recv(comm, true);

    return r < 0 ? result_from_errno(r) : NET_SUCCESS;
}

/* Fill in n records after the last one, without announcing them. Return false, and undo it, if a buffer that is not
 * empty has no registration. */
static PRS_SPECIALIZED bool fill_records(struct recv_comm *comm, struct request *request, int n, void **data,
                                         const size_t *sizes, const int *tags, void **mhandles)
{
    for (int i = 0; i < n; i++) {
        size_t size = sizes[i];

        if (!mhandles[i] && size) {
            while (i-- > 0)
                comm->entry[(comm->next + (uint64_t)i) % CTS_RING] = NULL;
            return false;
        }
        fill_record(comm, (uint32_t)i, (uint32_t)n, data[i], size, tags[i], mhandles[i], request);
    }
    return true;
}

/* Compiled twice: for one buffer, which is the usual case (31 of 511 instructions less), and for several. */
static PRS_SPECIALIZED net_result post_receive(struct recv_comm *comm, int n, void **data, const size_t *sizes,
                                               const int *tags, void **mhandles, void **out)
{
    struct request *request = comm->free;

    *out = NULL;
    if (n < 0 || n > COMM_MAX_RECVS)
        return refuse_receive(n);
    if (!request || !ring_has_room(comm, n))
        return nothing_posted(comm);
    if (!fill_records(comm, request, n, data, sizes, tags, mhandles))
        return refuse_receive(n);
    comm->free = request->next;
    request->kind = REQUEST_RECV;
    request->count = request->left = (uint8_t)n;
    request->first = (uint32_t)comm->next;
    comm->next += (uint64_t)n;
    if (should_announce(comm)) {
        int r = announce(comm);

        if (r < 0)
            return result_from_errno(r);
    }
    *out = request;
    return NET_SUCCESS;
}

static PRS_OUTLINED net_result post_multi_receive(struct recv_comm *comm, int n, void **data, const size_t *sizes,
                                                  const int *tags, void **mhandles, void **out)
{
    return post_receive(comm, n, data, sizes, tags, mhandles, out);
}

net_result request_irecv(void *recv_comm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                         void **profiles, void **out)
{
    const struct comm *comm = recv_comm;
    net_result result = n == 1 ? post_receive(recv_comm, 1, data, sizes, tags, mhandles, out)
                               : post_multi_receive(recv_comm, n, data, sizes, tags, mhandles, out);

    if (unlikely(profiles && comm->profile && *out))
        for (int i = 0; i < n; i++)
            profile_start(*out, i, profiles[i], 0, sizes[i]);
    return result;
}

net_result request_irecv_narrow(void *recv_comm, int n, void **data, int *sizes, int *tags, void **mhandles, void **out)
{
    size_t wide[COMM_MAX_RECVS];

    if (n == 1) {
        wide[0] = (size_t)sizes[0];
        return post_receive(recv_comm, 1, data, wide, tags, mhandles, out);
    }
    for (int i = 0; i < n && i < COMM_MAX_RECVS; i++)
        wide[i] = (size_t)sizes[i];
    return post_multi_receive(recv_comm, n, data, wide, tags, mhandles, out);
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

/* Return 0 or -errno. While too many ops are in flight the request stays waiting. */
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
        return NET_SUCCESS; /* the CPU sees data in host memory as soon as the receive is done */
    if (!request)
        return result_from_errno(prs_fail(-EINVAL, "iflush: all %d requests are in use", COMM_REQUESTS));
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

static PRS_OUTLINED net_result check_send_health(struct send_comm *comm)
{
    int r;

    comm->misses = 0;
    r = check_health(&comm->base);
    return r < 0 ? result_from_errno(r) : NET_SUCCESS;
}

/* There is no record yet, no free request or no room: NCCL calls again. */
static inline net_result nothing_sent(struct send_comm *comm)
{
    return likely(++comm->misses < COMM_CHECK_EVERY) ? NET_SUCCESS : check_send_health(comm);
}

/* The first unfilled record of the head receive with this tag. The search ends at a record that has not arrived: it may
 * have the same tag, and two sends with one tag must keep their order. */
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

static PRS_COLD net_result refuse_send(const struct send_comm *comm, size_t size, const struct cts_record *record,
                                       const struct memory *memory)
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

/* Out of line: most calls of isend find no record, and must cost little. */
static PRS_OUTLINED net_result send_to(struct send_comm *comm, const struct cts_record *record, const void *data,
                                       size_t size, const struct memory *memory, void **out)
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
    cts_keys_read(record, &comm->keys);
    put.dst = &comm->keys;
    put.len_bytes = size;
    put.notify_id = record->id % PRS_NOTIFY_IDS;
    put.group = PRS_GROUP_NONE; /* no signal follows: under `counted`, puts in groups cost the peer a count */
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

/* The head receive has several buffers, or another tag. */
static PRS_OUTLINED net_result send_to_match(struct send_comm *comm, const void *data, size_t size, int tag,
                                             const struct memory *memory, void **out)
{
    const struct cts_record *record = match(comm, (uint32_t)tag);

    return record ? send_to(comm, record, data, size, memory, out) : nothing_sent(comm);
}

static inline net_result send_message(struct send_comm *comm, const void *data, size_t size, int tag,
                                      const struct memory *memory, void **out)
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
    const struct comm *comm = send_comm;
    net_result result = send_message(send_comm, data, size, tag, mhandle, out);

    if (unlikely(profile && comm->profile && *out))
        profile_start(*out, 0, profile, OPCODE_WRITE_IMM, size);
    return result;
}

net_result request_isend_narrow(void *send_comm, void *data, int size, int tag, void *mhandle, void **out)
{
    /* A negative size becomes a very large one, which is refused. */
    return send_message(send_comm, data, (size_t)size, tag, mhandle, out);
}

/* ---- test ---- */

static inline net_result retire(struct request *request, struct request **free, int *done)
{
    if (unlikely(request->profiled))
        profile_stop(request);
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

/* Slow path: progress, then check again. Out of line, so that tests of finished requests stay cheap. */
static PRS_OUTLINED net_result drive_recv(struct request *request, int *done, int *sizes)
{
    int r = progress_recv((struct recv_comm *)request->comm, true);

    *done = 0;
    if (r <= 0)
        return r < 0 ? result_from_errno(r) : NET_SUCCESS;
    return request->left ? NET_SUCCESS : retire_recv(request, done, sizes);
}

static PRS_OUTLINED net_result drive_send(struct request *request, int *done, int *sizes)
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

/* The flush may still wait for room. */
static PRS_OUTLINED net_result drive_flush(struct request *request, int *done)
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
