/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/nic/datagram.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <string.h>

#include "tools/softnic/nic/responder.h"

#define QKEY_OF_THE_QUEUE_PAIR 0x80000000u

enum { GRH_VERSION = 6, GRH_NEXT_IBA = 0x1b, IPV4_AT = SN_GRH_BYTES - 20, IPV4_DONT_FRAGMENT = 0x4000 };

static_assert(sizeof(struct ibv_grh) == SN_GRH_BYTES && sizeof(struct iphdr) == SN_GRH_BYTES - IPV4_AT,
              "as on the wire");

void sn_wqe_to(const struct sn_qp *qp, struct sn_wqe *w, const struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
    const struct sn_ah *to = (const struct sn_ah *)ah;

    w->dest_dev = to->dev;
    w->route = to->route;
    w->dest_qpn = qpn;
    w->qkey = qkey & QKEY_OF_THE_QUEUE_PAIR && sn_qp_is_ud(qp) ? qp->shm->qkey : qkey;
}

int sn_ud_check(const struct sn_qp *qp, struct sn_wqe *w)
{
    const char *why = NULL;

    if (!sn_is_send(w->opcode))
        why = "UD has sends only";
    else if (!w->dest_qpn)
        why = "it has no target: set wr.ud.ah, or call ibv_wr_set_ud_addr";
    if (why) {
        sn_log("queue pair %u: UD refuses a request, opcode %u, wr_id %llu: %s", qp->qpn, w->opcode,
               (unsigned long long)w->wr_id, why);
        return EINVAL;
    }
    if (w->length > SN_UD_MAX_SEND) {
        sn_log("queue pair %u: UD: wr_id %llu: %llu bytes do not fit into a packet of %d", qp->qpn,
               (unsigned long long)w->wr_id, (unsigned long long)w->length, SN_UD_MAX_SEND);
        w->status = IBV_WC_LOC_LEN_ERR;
    }
    return 0;
}

uint32_t sn_ud_packet(const struct sn_wqe *w)
{
    return w->route.sgid == 0 ? SN_UD_ROCE_V1 : SN_UD_ROCE_V2_IPV4; /* as in entry_fill in gid_table.c */
}

/* The checksum of an IPv4 header; 0 if the header holds the right one. */
static uint16_t checksum(const struct iphdr *ip)
{
    uint16_t words[sizeof(*ip) / 2];
    uint32_t sum = 0;

    memcpy(words, ip, sizeof(words));
    for (unsigned i = 0; i < sizeof(words) / 2; i++)
        sum += words[i];
    sum = (sum >> 16) + (sum & 0xffff);
    return (uint16_t) ~(sum + (sum >> 16));
}

static void ipv4_fill(struct iphdr *ip, const struct sn_wqe *w, const uint8_t *from, const uint8_t *to)
{
    *ip = (struct iphdr){.version = 4,
                         .ihl = 5,
                         .tos = (uint8_t)(w->route.class_label >> 20),
                         .tot_len = htons((uint16_t)(sizeof(*ip) + w->length)),
                         .frag_off = htons(IPV4_DONT_FRAGMENT),
                         .ttl = w->route.hop_limit ? w->route.hop_limit : SN_HOP_LIMIT,
                         .protocol = IPPROTO_UDP};
    memcpy(&ip->saddr, from + 12, 4); /* of ::ffff:a.b.c.d */
    memcpy(&ip->daddr, to + 12, 4);
    ip->check = checksum(ip);
}

void sn_ud_header(struct sn_qp *qp, const struct sn_qp_shm *target, const struct sn_wqe *w)
{
    const uint8_t *from = sn_ctx_dev(qp->ctx)->gid[w->route.sgid % SN_MAX_GIDS],
                  *to = sn_self->world->devs[target->dev].gid[w->route.dgid % SN_MAX_GIDS];
    struct iphdr ip;
    struct ibv_grh grh = {.version_tclass_flow = htonl((uint32_t)GRH_VERSION << 28 | w->route.class_label),
                          .paylen = htons((uint16_t)w->length),
                          .next_hdr = GRH_NEXT_IBA,
                          .hop_limit = w->route.hop_limit ? w->route.hop_limit : SN_HOP_LIMIT};

    memset(qp->header, 0, sizeof(qp->header));
    if (sn_ud_packet(w) == SN_UD_ROCE_V2_IPV4) {
        ipv4_fill(&ip, w, from, to);
        memcpy(qp->header + IPV4_AT, &ip, sizeof(ip));
        return;
    }
    memcpy(grh.sgid.raw, from, 16);
    memcpy(grh.dgid.raw, to, 16);
    memcpy(qp->header, &grh, sizeof(grh));
}

static void mapped(uint8_t gid[16], uint32_t address)
{
    memset(gid, 0, 10);
    memset(gid + 10, 0xff, 2);
    memcpy(gid + 12, &address, 4);
}

void sn_ud_header_read(const uint8_t header[SN_GRH_BYTES], struct ibv_global_route *to_sender, uint8_t receiver[16])
{
    struct ibv_grh grh;
    struct iphdr ip;

    memcpy(&grh, header, sizeof(grh));
    memcpy(&ip, header + IPV4_AT, sizeof(ip));
    *to_sender = (struct ibv_global_route){.hop_limit = SN_HOP_LIMIT};
    if (ip.version == 4 && ip.ihl == 5 && checksum(&ip) == 0) {
        mapped(to_sender->dgid.raw, ip.saddr);
        mapped(receiver, ip.daddr);
        to_sender->traffic_class = ip.tos;
        return;
    }
    to_sender->dgid = grh.sgid;
    memcpy(receiver, grh.dgid.raw, 16);
    to_sender->flow_label = ntohl(grh.version_tclass_flow) & 0xfffff;
    to_sender->traffic_class = (uint8_t)(ntohl(grh.version_tclass_flow) >> 20);
}
