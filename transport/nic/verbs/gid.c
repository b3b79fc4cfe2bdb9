/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/verbs/gid.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

void prs_gid_text(const uint8_t raw[16], char *text, size_t text_bytes)
{
    if (!inet_ntop(AF_INET6, raw, text, (socklen_t)text_bytes))
        snprintf(text, text_bytes, "?");
}

static bool is_mapped_ipv4(const uint8_t raw[16])
{
    static const uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

    return !memcmp(raw, prefix, sizeof(prefix));
}

static bool is_link_local(const uint8_t raw[16])
{
    return raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80;
}

static bool in_range(const uint8_t raw[16], const struct prs_config *config)
{
    int bytes = config->gid_range_bits / 8, bits = config->gid_range_bits % 8;

    if (!config->gid_range_set)
        return true;
    if (memcmp(raw, config->gid_range, (size_t)bytes))
        return false;
    return !bits || !((raw[bytes] ^ config->gid_range[bytes]) >> (8 - bits));
}

/* A GID whose prefix has a place for the FLID: 10 fixed bits, 22 of zero, 16 of FLID, 16 of subnet. */
uint16_t prs_gid_flid(const uint8_t raw[16])
{
    bool has_place = raw[0] == 0xfe && (raw[1] == 0x80 || raw[1] == 0xc0) && !raw[2] && !raw[3];

    return has_place ? (uint16_t)(raw[4] << 8 | raw[5]) : 0;
}

bool prs_gid_same_subnet(const uint8_t a[16], const uint8_t b[16])
{
    if (prs_gid_flid(a) || prs_gid_flid(b))
        return !memcmp(a, b, 4) && !memcmp(a + 6, b + 6, 2); /* the FLID is not part of the subnet's number */
    return !memcmp(a, b, 8);
}

static int choose_without_roce(const struct prs_gid *table, int count, const struct prs_config *config)
{
    int first = -ENOENT;

    for (int i = count - 1; i >= 0; i--) {
        if (table[i].type == PRS_GID_EMPTY)
            continue;
        if (table[i].index == config->flid_gid_index && prs_gid_flid(table[i].raw))
            return i;
        first = i;
    }
    return first;
}

int prs_gid_choose(const struct prs_gid *table, int count, bool is_roce, const struct prs_config *config)
{
    enum prs_gid_type version = config->roce_version == 2 ? PRS_GID_ROCE_V2 : PRS_GID_ROCE_V1;
    int best = -ENOENT, best_score = -1;

    if (!is_roce)
        return choose_without_roce(table, count, config);
    for (int i = 0; i < count; i++) {
        const struct prs_gid *gid = &table[i];
        bool ipv4 = is_mapped_ipv4(gid->raw);
        int score;

        if (gid->type == PRS_GID_EMPTY)
            continue;
        if (config->gid_index >= 0) {
            if (gid->index == config->gid_index)
                return i;
            continue;
        }
        if (!in_range(gid->raw, config))
            continue;
        score = 4 * (gid->type == version) + 2 * (ipv4 == (config->gid_family == AF_INET)) +
                (ipv4 || !is_link_local(gid->raw));
        if (score > best_score) {
            best = i;
            best_score = score;
        }
    }
    return best;
}

/* Read one entry of the table. sysfs and old kernels return EINVAL for an empty entry, which is no error. */
static void read_entry(struct ibv_context *context, uint8_t port, int index, bool is_roce, struct prs_gid *out)
{
    static const uint8_t all_zero[16];
    struct ibv_gid_entry entry;
    union ibv_gid gid;

    *out = (struct prs_gid){.index = index, .type = PRS_GID_EMPTY};
    if (prs_verbs.query_gid_ex) {
        if (prs_verbs.query_gid_ex(context, port, (uint32_t)index, &entry, 0, sizeof(entry)))
            return;
        memcpy(out->raw, entry.gid.raw, sizeof(out->raw));
        out->type = entry.gid_type == IBV_GID_TYPE_ROCE_V2   ? PRS_GID_ROCE_V2
                    : entry.gid_type == IBV_GID_TYPE_ROCE_V1 ? PRS_GID_ROCE_V1
                                                             : PRS_GID_IB;
    } else {
        if (prs_verbs.query_gid(context, port, index, &gid))
            return;
        memcpy(out->raw, gid.raw, sizeof(out->raw));
        /* Without query_gid_ex the version is unknown; in practice an IPv4-mapped GID is v2. */
        out->type = !is_roce ? PRS_GID_IB : is_mapped_ipv4(out->raw) ? PRS_GID_ROCE_V2 : PRS_GID_ROCE_V1;
    }
    if (!memcmp(out->raw, all_zero, sizeof(all_zero)))
        out->type = PRS_GID_EMPTY;
}

int prs_gid_query(struct ibv_context *context, uint8_t port, int table_length, bool is_roce,
                  const struct prs_config *config, struct prs_gid *out, char *why_not, size_t why_not_bytes)
{
    enum { LIMIT = 256 };
    struct prs_gid table[LIMIT] = {0};
    int count = table_length < LIMIT ? table_length : LIMIT, filled = 0, chosen;

    for (int i = 0; i < count; i++) {
        read_entry(context, port, i, is_roce, &table[i]);
        filled += table[i].type != PRS_GID_EMPTY;
    }
    chosen = prs_gid_choose(table, count, is_roce, config);
    if (chosen >= 0) {
        *out = table[chosen];
        return 0;
    }
    if (is_roce && config->gid_index >= 0)
        snprintf(why_not, why_not_bytes, "GID %d (NCCL_IB_GID_INDEX) is empty; %d of %d entries are filled",
                 config->gid_index, filled, count);
    else
        snprintf(why_not, why_not_bytes, "none of its %d GIDs can be used%s", filled,
                 is_roce && config->gid_range_set ? " within NCCL_IB_ADDR_RANGE" : "");
    return -ENOENT;
}
