/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/handshake.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "transport/util/error.h"
#include "transport/util/fork.h"
#include "transport/util/log.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "structs are sent as they are in memory");

/* ---- frames ---- */

void prs_stream_init(struct prs_stream *stream, int fd, const union prs_address *remote, const uint8_t cookie[16])
{
    memset(stream, 0, sizeof(*stream));
    stream->fd = fd;
    memcpy(stream->cookie, cookie, sizeof(stream->cookie));
    prs_address_text(remote, stream->remote);
}

void prs_stream_close(struct prs_stream *stream)
{
    prs_fork_close(stream->fd);
    stream->fd = -1;
}

void prs_stream_put(struct prs_stream *stream, enum prs_frame_type type, const void *body, uint32_t bytes)
{
    stream->out.head = (struct prs_frame_head){
        .magic = PRS_FRAME_MAGIC, .version = PRS_WIRE_VERSION, .type = (uint16_t)type, .length = bytes};
    memcpy(stream->out.head.cookie, stream->cookie, sizeof(stream->cookie));
    if (bytes)
        memcpy(&stream->out.body, body, bytes);
    stream->out_bytes = sizeof(stream->out.head) + bytes;
    stream->out_done = 0;
}

int prs_stream_flush(struct prs_stream *stream)
{
    while (stream->out_done < stream->out_bytes) {
        ssize_t n = send(stream->fd, (uint8_t *)&stream->out + stream->out_done, stream->out_bytes - stream->out_done,
                         MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return PRS_AGAIN;
        if (n < 0)
            return prs_fail(-ECONNRESET, "%s: connection lost while connecting: %s; has the peer died?", stream->remote,
                            strerror(errno));
        stream->out_done += (size_t)n;
    }
    return 0;
}

int prs_stream_lost(const struct prs_stream *stream)
{
    char byte;
    ssize_t n = recv(stream->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)))
        return 0;
    return n == 0 || errno == EPIPE ? -ECONNRESET : -errno;
}

static uint32_t body_bytes(unsigned type)
{
    switch (type) {
    case PRS_FRAME_HELLO:
        return sizeof(struct prs_wire_hello);
    case PRS_FRAME_REPLY:
        return sizeof(struct prs_wire_reply);
    case PRS_FRAME_QUEUES:
        return sizeof(struct prs_wire_queues);
    case PRS_FRAME_READY:
        return sizeof(struct prs_wire_ready);
    case PRS_FRAME_REFUSE:
        return sizeof(struct prs_wire_refusal);
    default:
        return 0;
    }
}

/* As prs_fail(), without a line in the log for a stranger: the listener sums those up. */
static int __attribute__((format(printf, 3, 4), cold))
fail(const struct prs_stream *stream, int code, const char *format, ...)
{
    char text[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return stream->is_stranger ? prs_error_repeat(code, text) : prs_fail(code, "%s", text);
}

/* Read up to byte `upto` and not beyond, where the next frame begins. Return 0, PRS_AGAIN or -errno. */
static int fill_in(struct prs_stream *stream, size_t upto)
{
    while (stream->in_bytes < upto) {
        ssize_t n = recv(stream->fd, (uint8_t *)&stream->in + stream->in_bytes, upto - stream->in_bytes, MSG_DONTWAIT);

        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return PRS_AGAIN;
        if (n < 0)
            return fail(stream, -ECONNRESET, "%s: connection lost while connecting: %s; has the peer died?",
                        stream->remote, strerror(errno));
        if (n == 0)
            return fail(stream, -ECONNRESET,
                        "%s: the other side hung up after %zu bytes of a frame; has it died, or "
                        "refused our handle (see its log)?",
                        stream->remote, stream->in_bytes);
        stream->in_bytes += (size_t)n;
    }
    return 0;
}

static int check_head(const struct prs_stream *stream, enum prs_frame_type wanted)
{
    const struct prs_frame_head *head = &stream->in.head;

    /* MUTANT(peer) a frame has the magic: delete */
    if (head->magic != PRS_FRAME_MAGIC)
        return fail(stream, -EPROTO, "%s: magic %#x, expected %#x: not Perseus", stream->remote, head->magic,
                    PRS_FRAME_MAGIC);
    /* MUTANT(peer) a frame has our version: delete */
    if (head->version != PRS_WIRE_VERSION)
        return fail(stream, -EPROTO, "%s: wire version %u, expected %d: both sides need the same release",
                    stream->remote, head->version, PRS_WIRE_VERSION);
    /* MUTANT(peer) a frame has the cookie: delete */
    if (memcmp(head->cookie, stream->cookie, sizeof(head->cookie)))
        return fail(stream, -EPROTO, "%s: wrong cookie: it holds the handle of another listener", stream->remote);
    /* MUTANT(peer) a frame is the one that is due: delete */
    if (head->type != wanted && head->type != PRS_FRAME_REFUSE)
        return fail(stream, -EPROTO, "%s: frame type %u, expected %d", stream->remote, head->type, (int)wanted);
    /* MUTANT(peer) a frame has the length of its type: delete */
    if (head->length != body_bytes(head->type))
        return fail(stream, -EPROTO, "%s: frame type %u of %u bytes, expected %u", stream->remote, head->type,
                    head->length, body_bytes(head->type));
    return 0;
}

int prs_stream_get(struct prs_stream *stream, enum prs_frame_type type)
{
    struct prs_wire_refusal *refusal = &stream->in.body.refusal;
    int r = fill_in(stream, sizeof(stream->in.head));

    if (r)
        return r;
    r = check_head(stream, type);
    if (r)
        return r;
    r = fill_in(stream, sizeof(stream->in.head) + stream->in.head.length);
    if (r)
        return r;
    stream->in_bytes = 0;
    /* MUTANT(peer) the cookie ends being a stranger: delete */
    stream->is_stranger = false;
    if (stream->in.head.type != PRS_FRAME_REFUSE)
        return 0;
    refusal->text[sizeof(refusal->text) - 1] = 0;
    return fail(stream, refusal->error < 0 && refusal->error > -4096 ? refusal->error : -EPROTO, "%s refused: %s",
                stream->remote, refusal->text);
}

/* ---- handle ---- */

static uint32_t handle_check(const struct prs_handle_wire *handle)
{
    struct prs_handle_wire copy = *handle;
    uint32_t hash = 2166136261u; /* FNV-1a: detects truncation and mix-ups; the cookie protects against malice */

    copy.check = 0;
    for (size_t i = 0; i < sizeof(copy); i++)
        hash = (hash ^ ((const uint8_t *)&copy)[i]) * 16777619u;
    return hash;
}

void prs_handle_fill(const uint8_t cookie[16], const union prs_address *address, struct prs_handle *out)
{
    struct prs_handle_wire handle = {.magic = PRS_HANDLE_MAGIC,
                                     .version = PRS_WIRE_VERSION,
                                     .length = sizeof(handle),
                                     .transport = PRS_TRANSPORT_RC};

    memcpy(handle.cookie, cookie, sizeof(handle.cookie));
    if (address->any.sa_family == AF_INET6) {
        handle.family = 6;
        handle.port = ntohs(address->v6.sin6_port);
        handle.scope = address->v6.sin6_scope_id;
        memcpy(handle.address, &address->v6.sin6_addr, 16);
    } else {
        handle.family = 4;
        handle.port = ntohs(address->v4.sin_port);
        memcpy(handle.address, &address->v4.sin_addr, 4);
    }
    handle.check = handle_check(&handle);
    memset(out->bytes, 0, PRS_HANDLE_BYTES - PRS_HANDLE_CALLER_BYTES);
    memcpy(out->bytes, &handle, sizeof(handle));
}

int prs_handle_parse(const struct prs_handle *bytes, uint8_t cookie[16], union prs_address *out)
{
    struct prs_handle_wire handle;

    memcpy(&handle, bytes->bytes, sizeof(handle));
    if (handle.magic != PRS_HANDLE_MAGIC)
        return prs_fail(-EPROTO, "foreign handle: magic %#x, expected %#x; does the peer use another network plugin?",
                        handle.magic, PRS_HANDLE_MAGIC);
    if (handle.version != PRS_WIRE_VERSION)
        return prs_fail(-EPROTO, "handle of wire version %u, expected %d: both sides need the same release",
                        handle.version, PRS_WIRE_VERSION);
    if (handle.length != sizeof(handle) || handle.check != handle_check(&handle))
        return prs_fail(-EPROTO,
                        "damaged handle: length %u (expected %zu), check %#x (expected %#x); was it truncated?",
                        handle.length, sizeof(handle), handle.check, handle_check(&handle));
    if (handle.transport != PRS_TRANSPORT_RC || (handle.family != 4 && handle.family != 6))
        return prs_fail(-EPROTO, "handle of transport %u, address family %u: not known here", handle.transport,
                        handle.family);
    memset(out, 0, sizeof(*out));
    if (handle.family == 6) {
        out->v6.sin6_family = AF_INET6;
        out->v6.sin6_port = htons(handle.port);
        out->v6.sin6_scope_id = handle.scope;
        memcpy(&out->v6.sin6_addr, handle.address, 16);
    } else {
        out->v4.sin_family = AF_INET;
        out->v4.sin_port = htons(handle.port);
        memcpy(&out->v4.sin_addr, handle.address, 4);
    }
    memcpy(cookie, handle.cookie, sizeof(handle.cookie));
    return 0;
}

/* ---- rails ---- */

void prs_wire_rails(const struct prs_fabric *fabric, const struct prs_rail_set *rails, bool standby,
                    struct prs_rail_address *own, struct prs_wire_rail *out)
{
    for (int i = 0; i < rails->count; i++) {
        const struct prs_rail *rail = &fabric->rail[rails->rail[i]];

        prs_rail_locate(rail, &fabric->config, &own[i]);
        out[i] = (struct prs_wire_rail){.speed_mbps = rail->info.speed_mbps,
                                        .rail_id = rail->info.rail_id,
                                        .plane_id = rail->info.plane_id,
                                        .port = rail->port,
                                        .is_roce = rail->info.is_roce,
                                        .adds = rail->domain->adds,
                                        .standby = standby && i == rails->count - 1};
        memcpy(out[i].queue_kind, rail->domain->nic->name, sizeof(out[i].queue_kind));
        snprintf(out[i].name, sizeof(out[i].name), "%.62s", rail->info.name);
        out[i].address = own[i].told;
    }
}

static bool can_pair(const struct prs_wire_rail *a, const struct prs_wire_rail *b)
{
    return !strcmp(a->queue_kind, b->queue_kind) && a->is_roce == b->is_roce && a->standby == b->standby &&
           (a->plane_id < 0 || b->plane_id < 0 || a->plane_id == b->plane_id);
}

static void list_rails(const struct prs_wire_rail *rail, uint32_t count, char *text, size_t bytes)
{
    text[0] = 0;
    for (uint32_t i = 0; i < count; i++)
        snprintf(text + strlen(text), bytes - strlen(text), "%s%.63s:%u", i ? "," : "", rail[i].name, rail[i].port);
}

int prs_wire_pair_rails(const struct prs_wire_rail *connector, uint32_t connector_count,
                        const struct prs_wire_rail *listener, uint32_t listener_count,
                        struct prs_wire_pair pair[PRS_MAX_RAILS])
{
    char ours[512], theirs[512];
    uint32_t taken = 0, pairs = 0, alike = 0;

    for (int pass = 0; pass < 4; pass++) {
        bool standby = pass >= 2, by_id = pass % 2 == 0;

        if (standby && !pairs)
            break;
        for (uint32_t c = 0; c < connector_count; c++) {
            for (uint32_t l = 0; l < listener_count; l++) {
                bool known = connector[c].rail_id >= 0 && listener[l].rail_id >= 0;
                bool same_id = known && connector[c].rail_id == listener[l].rail_id;

                if ((taken >> (16 + c) & 1) || (taken >> l & 1) || same_id != by_id || (alike && known && !by_id) ||
                    connector[c].standby != standby || !can_pair(&connector[c], &listener[l]))
                    continue;
                taken |= 1u << (16 + c) | 1u << l;
                pair[pairs++] = (struct prs_wire_pair){(uint16_t)c, (uint16_t)l};
            }
        }
        if (pass == 0)
            alike = pairs;
    }
    list_rails(connector, connector_count, ours, sizeof(ours));
    list_rails(listener, listener_count, theirs, sizeof(theirs));
    if (!pairs)
        return prs_fail(
            -ENETUNREACH,
            "no rail of the connector (%s; %s queues) can reach one of the listener (%s; %s queues): planes, "
            "link layers or kinds of queues differ",
            ours, connector->queue_kind, theirs, listener->queue_kind);
    if (pairs != connector_count || pairs != listener_count)
        PRS_INFO("rails are unequal: %u pairs of the connector's %s and the listener's %s", pairs, ours, theirs);
    return (int)pairs;
}

static int check_rails(const struct prs_wire_rail *rail, uint32_t count, const char *remote)
{
    /* MUTANT(peer) rails are one to eight: delete */
    if (count < 1 || count > PRS_MAX_RAILS)
        return prs_fail(-EPROTO, "%s: %u rails: expected 1 to %d", remote, count, PRS_MAX_RAILS);
    /* MUTANT(peer) the name of a rail ends: s/!memchr(rail[i].name, 0, sizeof(rail[i].name)) ||// */
    /* MUTANT(peer) a rail has a kind of queues: s/!rail[i].queue_kind[0] ||// */
    /* MUTANT(peer) a rail stands by or not: s/|| rail[i].standby > 1// */
    for (uint32_t i = 0; i < count; i++)
        if (!memchr(rail[i].name, 0, sizeof(rail[i].name)) || !rail[i].queue_kind[0] ||
            !memchr(rail[i].queue_kind, 0, sizeof(rail[i].queue_kind)) || rail[i].standby > 1)
            return prs_fail(-EPROTO, "%s: rail %u: impossible name or kind of queues, or standby %u", remote, i,
                            rail[i].standby);
    return 0;
}

static int check_private(const struct prs_wire_private *private_data, const char *remote)
{
    /* MUTANT(peer) private data fits: s/private_data->bytes > sizeof(private_data->data)/false/ */
    return private_data->bytes > sizeof(private_data->data)
               ? prs_fail(-EPROTO, "%s: %u private bytes", remote, private_data->bytes)
               : 0;
}

int prs_wire_check_hello(const struct prs_wire_hello *hello, const char *remote)
{
    int r = check_rails(hello->rail, hello->rail_count, remote);

    /* MUTANT(peer) a hello asks for some queues: delete */
    if (!r && (hello->queues_per_rail < 1 || hello->queues_per_rail > PRS_ORDER_MAX_QUEUES_PER_RAIL))
        r = prs_fail(-EPROTO, "%s: %u queues per rail", remote, hello->queues_per_rail);
    return r ? r : check_private(&hello->private_data, remote);
}

int prs_wire_check_reply(const struct prs_wire_reply *reply, uint32_t own_rails, const char *remote)
{
    uint32_t seen = 0;
    int r = check_rails(reply->rail, reply->rail_count, remote);

    if (r)
        return r;
    /* MUTANT(peer) queues are pairs times queues of a pair:
     * s/reply->queues.count != reply->pair_count * reply->queues_per_pair ||// */
    if (reply->pair_count < 1 || reply->pair_count > PRS_MAX_RAILS || reply->queues_per_pair < 1 ||
        reply->queues_per_pair > PRS_ORDER_MAX_QUEUES_PER_RAIL ||
        reply->queues.count != reply->pair_count * reply->queues_per_pair ||
        reply->queues.count > PRS_ORDER_MAX_DATA_QUEUES)
        return prs_fail(-EPROTO, "%s: %u rail pairs, %u queues each, %u in all", remote, reply->pair_count,
                        reply->queues_per_pair, reply->queues.count);
    for (uint32_t i = 0; i < reply->pair_count; i++) {
        const struct prs_wire_pair *pair = &reply->pair[i];

        /* MUTANT(peer) a pair is of rails that exist: s/pair->connector_rail >= own_rails ||// */
        /* MUTANT(peer) each rail is in one pair: s/|| (seen >> pair->connector_rail & 1)// */
        if (pair->connector_rail >= own_rails || pair->listener_rail >= reply->rail_count ||
            (seen >> pair->connector_rail & 1))
            return prs_fail(-EPROTO, "%s: impossible rail pair %u-%u", remote, pair->connector_rail,
                            pair->listener_rail);
        seen |= 1u << pair->connector_rail;
    }
    return check_private(&reply->private_data, remote);
}
