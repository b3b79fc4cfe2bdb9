/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/host/config.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "transport/order/order.h"
#include "transport/util/env.h"
#include "transport/util/error.h"
#include "transport/util/log.h"

struct number {
    const char *name;
    long fallback, min, max;
    int *out;
};

static void read_numbers(struct prs_config *config)
{
    const struct number numbers[] = {
        {"NCCL_IB_GID_INDEX", -1, -1, 255, &config->gid_index},
        {"NCCL_IB_ROUTABLE_FLID_GID_INDEX", 1, -1, 255, &config->flid_gid_index},
        {"NCCL_IB_ROCE_VERSION_NUM", 2, 1, 2, &config->roce_version},
        {"NCCL_IB_SL", -1, -1, 15, &config->service_level},
        {"NCCL_IB_TC", 0, -1, 255, &config->traffic_class},
        {"NCCL_IB_PKEY", 0, 0, 65535, &config->pkey_index},
        {"NCCL_IB_TIMEOUT", 20, 0, 31, &config->timeout},
        {"NCCL_IB_RETRY_CNT", 7, 0, 7, &config->retry_count},
        {"NCCL_IB_QPS_PER_CONNECTION", 1, 1, PRS_ORDER_MAX_QUEUES_PER_RAIL, &config->queues_per_rail},
        {"NCCL_IB_SPLIT_DATA_ON_QPS", 0, 0, 1, &config->split_queues},
        {"NCCL_IB_PCI_RELAXED_ORDERING", 2, 0, 2, &config->relaxed_ordering},
        {"NCCL_IB_ADAPTIVE_ROUTING", -1, -1, 1, &config->adaptive_routing},
        {"NCCL_IB_MQP_RETRY_CNT", 34, 0, 100000, &config->mqp_retry_count},
        {"NCCL_IB_MQP_RETRY_SLEEP_MSEC", 100, 1, 60000, &config->mqp_retry_ms},
        {"NCCL_IB_RETURN_ASYNC_EVENTS", 1, 0, 1, &config->return_async_events},
        {"NCCL_IB_ECE_ENABLE", 1, 0, 1, &config->ece},
        {"NCCL_IB_RESILIENCY_PORT_FAILOVER", PRS_FAILOVER_UNSET, 0, 1, &config->failover},
        {"NCCL_IB_RESILIENCY_PORT_RECOVERY", 1, 0, 1, &config->recovery},
        {"NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY", 200, 0, 3600000, &config->recovery_ms},
        {"NCCL_IB_AR_THRESHOLD", 8192, 1, 1 << 30, &config->ar_bytes},
    };

    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++)
        *numbers[i].out = prs_env_clamp(numbers[i].name, numbers[i].fallback, numbers[i].min, numbers[i].max);
    if (config->traffic_class < 0)
        config->traffic_class = 0;
}

/* Parse "10.0.0.0/8" or "fd00::/16" into the leading bits of a 16-byte address (IPv4 is mapped). NCCL ignores any
 * other. */
static void read_range(struct prs_config *config)
{
    const char *text = prs_env_text("NCCL_IB_ADDR_RANGE");
    char address[64], *slash, *end = NULL;
    long bits;

    if (!text)
        return;
    snprintf(address, sizeof(address), "%s", text);
    slash = strchr(address, '/');
    if (slash)
        *slash = 0;
    bits = slash ? strtol(slash + 1, &end, 10) : -1;
    if (bits > 128 || (slash && (end == slash + 1 || *end)))
        bits = -1;
    if (inet_pton(AF_INET, address, config->gid_range + 12) == 1) {
        config->gid_range[10] = config->gid_range[11] = 0xff;
        config->gid_range_bits = (int)bits + 96;
    } else if (inet_pton(AF_INET6, address, config->gid_range) == 1) {
        config->gid_range_bits = (int)bits;
    } else {
        bits = -1;
    }
    config->gid_range_set = bits >= 0 && config->gid_range_bits <= 128;
    if (!config->gid_range_set)
        PRS_WARN("NCCL_IB_ADDR_RANGE=%s: must be address/bits, as in 10.0.0.0/8; it is ignored", text);
}

/* NCCL_COMM_ID is the address of rank 0, as ip:port or [ip]:port: its subnet tells which interface reaches the others.
 * A host name tells nothing here. */
static void read_comm_id(struct prs_config *config)
{
    const char *text = prs_env_text("NCCL_COMM_ID");
    char address[64], *end;

    if (!text)
        return;
    snprintf(address, sizeof(address), "%s", text + (*text == '['));
    end = strpbrk(address, *text == '[' ? "]%" : ":");
    if (end)
        *end = 0;
    if (inet_pton(AF_INET, address, config->comm_id) == 1)
        config->comm_id_family = AF_INET;
    else if (inet_pton(AF_INET6, address, config->comm_id) == 1)
        config->comm_id_family = AF_INET6;
}

/* The index of the variable's value in words[], or the fallback, which NCCL takes for any other word too. */
static int read_nccl_word(const char *name, int fallback, const char *const words[])
{
    const char *value = prs_env_text(name);

    for (int i = 0; value && words[i]; i++)
        if (!strcasecmp(value, words[i]))
            return i;
    if (value)
        PRS_WARN("%s=%s: is not one of %s, %s; it is ignored", name, value, words[0], words[1]);
    return fallback;
}

static int read_provider(struct prs_config *config)
{
    const char *text = prs_env_text("PERSEUS_PROVIDER");

    if (text && strlen(text) >= sizeof(config->provider))
        return prs_fail(-EINVAL, "PERSEUS_PROVIDER=%s: longer than any name of a provider", text);
    if (text)
        memcpy(config->provider, text, strlen(text));
    return 0;
}

static int read_words(struct prs_config *config)
{
    static const char *const families[] = {"AF_INET", "AF_INET6", NULL};
    static const char *const levels[] = {"error", "warn", "info", "debug", NULL};
    int family, level, r;
    long standby, required;

    r = prs_env_word("PERSEUS_LOG", -1, levels, &level); /* transport/util/log.c uses it, but cannot return an error */
    if (!r)
        r = prs_env_int("PERSEUS_REQUIRED", 0, 0, 1, &required); /* the plugin uses it */
    if (r)
        return r;
    family = read_nccl_word("NCCL_SOCKET_FAMILY", -1, families);
    config->socket_family = family < 0 ? AF_UNSPEC : family ? AF_INET6 : AF_INET;
    config->gid_family = read_nccl_word("NCCL_IB_ADDR_FAMILY", 0, families) ? AF_INET6 : AF_INET;
    r = read_provider(config);
    if (r)
        return r;
    config->disabled = prs_env_clamp("NCCL_IB_DISABLE", 0, 0, 1);
    config->dmabuf = prs_env_clamp("NCCL_DMABUF_ENABLE", 1, 0, 1);
    r = prs_env_int("PERSEUS_STANDBY_RAIL", 0, 0, 1, &standby);
    if (r)
        return r;
    config->standby = (int)standby;
    if (standby && config->failover == PRS_FAILOVER_UNSET)
        config->failover = 1;
    if (standby && !config->failover)
        PRS_WARN("PERSEUS_STANDBY_RAIL=1 has no effect with NCCL_IB_RESILIENCY_PORT_FAILOVER=0");
    r = prs_env_word("PERSEUS_ORDER", PRS_POLICY_AUTO, prs_policy_names, &config->policy);
    if (!r && config->failover == 1 && config->policy != PRS_POLICY_AUTO && config->policy != PRS_POLICY_COUNTED)
        PRS_WARN("NCCL_IB_RESILIENCY_PORT_FAILOVER=1 has no effect with PERSEUS_ORDER=%s, which cannot replace a lost "
                 "rail: use auto or counted",
                 prs_policy_names[config->policy]);
    return r;
}

/* Edits that make one word of the other: a letter more, a letter less, or another letter. */
static int word_distance(const char *a, const char *b)
{
    enum { LONGEST = 32 };
    int row[LONGEST + 1], length = (int)strlen(b);

    if (length > LONGEST)
        return LONGEST;
    for (int k = 0; k <= length; k++)
        row[k] = k;
    for (int i = 1; *a; a++, i++) {
        int diagonal = row[0];

        row[0] = i;
        for (int k = 1; k <= length; k++) {
            int least = diagonal + (*a != b[k - 1]);

            diagonal = row[k];
            if (diagonal + 1 < least)
                least = diagonal + 1;
            if (row[k - 1] + 1 < least)
                least = row[k - 1] + 1;
            row[k] = least;
        }
    }
    return row[length];
}

/* A misspelt name would have no effect, and nothing else would say so. */
static void warn_unknown(void)
{
    static const char prefix[] = "PERSEUS_";
    /* test/variables.py compares them with doc/variables.md. */
    static const char *const known[] = {"REQUIRED",     "ORDER", "TIMEOUT_MS",   "GIN_TIMEOUT_MS", "GIN_HOLD_NS",
                                        "STANDBY_RAIL", "NODE",  "FUSED_TUNING", "FUSED_LIBRARY",  "FUSED_MEASURE_MS",
                                        "METRICS",      "LOG",   "PROVIDER"};

    for (char **at = environ; at && *at; at++) {
        const char *name = *at + sizeof(prefix) - 1, *nearest = NULL;
        char word[64];
        int least = 4;

        if (strncmp(*at, prefix, sizeof(prefix) - 1) || !strncmp(name, "TEST_", 5))
            continue;
        snprintf(word, sizeof(word), "%.*s", (int)strcspn(name, "="), name);
        for (size_t i = 0; i < sizeof(known) / sizeof(*known) && least; i++) {
            int distance = word_distance(word, known[i]);

            if (distance < least) {
                least = distance;
                nearest = known[i];
            }
        }
        if (least)
            PRS_WARN("%s%s is no variable of Perseus and has no effect%s%s%s", prefix, word,
                     nearest ? ": did you mean PERSEUS_" : "", nearest ? nearest : "", nearest ? "?" : "");
    }
}

void prs_config_warn_ignored(void)
{
    static const struct {
        const char *name, *why;
    } ignored[] = {
        {"NCCL_GDR_FLUSH_DISABLE", "NCCL asks for a flush where one is needed, and it is done"},
        {"NCCL_IB_DATA_DIRECT", "data-direct devices are not used"},
        {"NCCL_IB_DEVICE_PCI_ORDER", "rails are in the order of their names"},
        {"NCCL_IB_FIFO_TC", "clear-to-send records share the queue and the traffic class of the data: NCCL_IB_TC"},
        {"NCCL_IB_MERGE_VFS", "each virtual function is a separate rail"},
        {"NCCL_IB_MQP_RETRY_ALL", "only temporary errors are retried: NCCL_IB_MQP_RETRY_CNT"},
        {"NCCL_IB_OOO_RQ", "out-of-order receive queues are not used"},
        {"NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS", "receives are always posted before they are needed"},
        {"NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME", "the sender matches, by clear-to-send records"},
        {"NCCL_IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS", "a rail fails over once; the receiver says what has arrived"},
        {"NCCL_IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY", "nothing is probed; the receiver says what has arrived"},
        {"NCCL_IB_SUBNET_AWARE_ROUTING", "rails are paired by position: NCCL_IB_HCA lists them in order"},
        {"NCCL_IB_SUBNET_PREFIX_LEN", "rails are paired by position: NCCL_IB_HCA lists them in order"},
        {"NCCL_IB_USE_INLINE", "payloads that fit are always sent inline"},
        {"NCCL_IB_WARN_RAIL_LOCAL", "unequal rails are always logged"},
    };

    for (size_t i = 0; i < sizeof(ignored) / sizeof(*ignored); i++) {
        const char *value = prs_env_text(ignored[i].name);

        if (value)
            PRS_WARN("%s=%s has no effect: %s", ignored[i].name, value, ignored[i].why);
    }
    warn_unknown();
}

uint64_t prs_config_patience_ns(const struct prs_config *config)
{
    if (config->timeout == 0) /* the NIC would retry for ever */
        return (uint64_t)config->timeout_ms * 1000000;
    return (4096ull << config->timeout) * (uint64_t)(config->retry_count + 1);
}

int prs_config_read(const struct prs_fabric_options *options, struct prs_config *out)
{
    const char *hca = options && options->hca ? options->hca : prs_env_text("NCCL_IB_HCA");
    long timeout_ms;
    int r;

    *out = (struct prs_config){0};
    if (options && prs_check_reserved(options, "struct prs_fabric_options"))
        return -EINVAL;
    r = prs_hca_filter_parse("NCCL_IB_HCA", hca, &out->hca);
    if (r)
        return r;
    r = prs_hca_filter_parse("NCCL_SOCKET_IFNAME", prs_env_text("NCCL_SOCKET_IFNAME"), &out->ifname);
    if (r)
        return r;
    r = prs_env_int("PERSEUS_TIMEOUT_MS", PRS_TIMEOUT_MS, 10, 86400000, &timeout_ms);
    if (r)
        return r;
    out->timeout_ms = options && options->timeout_ms ? options->timeout_ms : (uint32_t)timeout_ms;
    read_numbers(out);
    if (options && options->traffic_class > 0)
        out->traffic_class = options->traffic_class;
    read_range(out);
    read_comm_id(out);
    return read_words(out);
}
