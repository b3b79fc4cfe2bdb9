/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hwcheck/network.h"

#include <ctype.h>
#include <dirent.h>
#include <fnmatch.h>
#include <glob.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum kind { LOST, ECN, PAUSED, KINDS };

static const char *const kind_names[KINDS] = {"lost or sent again", "ECN", "paused (PFC, credits)"};

/* The names of counters in the drivers of NVIDIA, Broadcom and Amazon, in soft-RoCE, and in InfiniBand's standard. */
static const struct {
    const char *pattern;
    enum kind kind;
} known[] = {
    {"np_cnp_sent", ECN},
    {"np_ecn_marked_roce_packets", ECN},
    {"rp_cnp_handled", ECN},
    {"rp_cnp_ignored", ECN},
    {"[rt]x_cnp_pkts", ECN},
    {"*ecn_marked*", ECN},
    {"[rt]x_prio[0-7]_pause", PAUSED},
    {"[rt]x_global_pause", PAUSED},
    {"[rt]x_pause*", PAUSED},
    {"port_xmit_wait", PAUSED},
    {"out_of_seq*", LOST},
    {"packet_seq_err", LOST},
    {"implied_nak_seq_err", LOST},
    {"duplicate_request", LOST},
    {"local_ack_timeout_err", LOST},
    {"rnr_nak_retry_err", LOST},
    {"rcvd_rnr_err", LOST},
    {"rcvd_seq_err", LOST},
    {"retry_*exceeded_err", LOST},
    {"roce_adp_retrans*", LOST},
    {"*retrans_*", LOST},
    {"*out_of_buffer", LOST},
    {"*discard*", LOST},
    {"[rt]x_drop*", LOST},
    {"[rt]x_errors", LOST},
    {"rx_missed_errors", LOST},
    {"port_rcv_*errors", LOST},
    {"symbol_error", LOST},
    {"link_error_recovery", LOST},
    {"link_downed", LOST},
};

static void add(struct network *network, const char *name, uint64_t value)
{
    struct counter *counter = &network->counter[network->count];

    if (network->count == COUNTERS_MOST)
        return;
    for (uint32_t i = 0; i < network->count; i++)
        if (!strcmp(network->counter[i].name, name)) /* the driver also has some of the kernel's counters */
            return;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (fnmatch(known[i].pattern, name, 0))
            continue;
        *counter = (struct counter){.kind = known[i].kind, .value = value};
        snprintf(counter->name, sizeof(counter->name), "%s", name);
        network->count++;
        return;
    }
}

/* ---- sysfs ---- */

/* The first line of a file. Return NULL if it cannot be read. */
static const char *read_line(const char *path, char *line, size_t bytes)
{
    FILE *file = fopen(path, "re");
    const char *text = file ? fgets(line, (int)bytes, file) : NULL;

    if (file)
        fclose(file);
    if (text)
        line[strcspn(line, "\n")] = '\0';
    return text;
}

static void read_folder(struct network *network, const char *folder)
{
    struct dirent *entry;
    DIR *dir = opendir(folder);

    while (dir && (entry = readdir(dir)) != NULL) {
        char path[640], line[64];

        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        if (entry->d_name[0] != '.' && read_line(path, line, sizeof(line)) && isdigit((unsigned char)line[0]))
            add(network, entry->d_name, strtoull(line, NULL, 10));
    }
    if (dir)
        closedir(dir);
}

/* ---- the driver's own counters of the interface ---- */

static bool ask(int fd, const char *interface, void *request)
{
    struct ifreq frame = {.ifr_data = request};

    snprintf(frame.ifr_name, sizeof(frame.ifr_name), "%s", interface);
    return ioctl(fd, SIOCETHTOOL, &frame) == 0;
}

static void read_statistics(struct network *network, int fd, const char *interface, uint32_t count)
{
    struct ethtool_gstrings *names = calloc(1, sizeof(*names) + (size_t)count * ETH_GSTRING_LEN);
    struct ethtool_stats *values = calloc(1, sizeof(*values) + (size_t)count * sizeof(values->data[0]));

    if (names && values) {
        *names = (struct ethtool_gstrings){.cmd = ETHTOOL_GSTRINGS, .string_set = ETH_SS_STATS, .len = count};
        *values = (struct ethtool_stats){.cmd = ETHTOOL_GSTATS, .n_stats = count};
        if (ask(fd, interface, names) && ask(fd, interface, values))
            for (uint32_t i = 0; i < count && i < names->len && i < values->n_stats; i++) {
                char name[ETH_GSTRING_LEN + 1];

                snprintf(name, sizeof(name), "%.*s", ETH_GSTRING_LEN,
                         (const char *)names->data + (size_t)i * ETH_GSTRING_LEN);
                add(network, name, values->data[i]);
            }
    }
    free(names);
    free(values);
}

static void read_driver(struct network *network)
{
    struct ethtool_drvinfo info = {.cmd = ETHTOOL_GDRVINFO};
    const char *interface = strrchr(network->interface, '/');
    int fd = interface ? socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1;

    if (fd < 0)
        return;
    if (ask(fd, interface + 1, &info) && info.n_stats > 0)
        read_statistics(network, fd, interface + 1, info.n_stats);
    close(fd);
}

/* ---- one rail ---- */

static void read_counters(struct network *network)
{
    static const char *const folders[] = {"counters", "hw_counters"};
    char folder[320];

    network->count = 0;
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        snprintf(folder, sizeof(folder), "/sys/class/infiniband/%s/ports/%d/%s", network->device, network->port,
                 folders[i]);
        read_folder(network, folder);
    }
    if (!network->interface[0])
        return;
    snprintf(folder, sizeof(folder), "%s/statistics", network->interface);
    read_folder(network, folder);
    read_driver(network);
}

void network_begin(struct network *network, const char *device, int port)
{
    char pattern[160];
    glob_t found;

    *network = (struct network){.port = port};
    snprintf(network->device, sizeof(network->device), "%s", device);
    snprintf(pattern, sizeof(pattern), "/sys/class/infiniband/%s/device/net/*", network->device);
    if (glob(pattern, 0, NULL, &found) == 0)
        snprintf(network->interface, sizeof(network->interface), "%s", found.gl_pathv[0]);
    else
        snprintf(network->interface, sizeof(network->interface), "/sys/class/net/%s", network->device);
    globfree(&found);
    if (access(network->interface, F_OK))
        network->interface[0] = '\0';
    read_counters(network);
}

uint32_t network_mtu(const struct network *network)
{
    char path[320], line[64];

    snprintf(path, sizeof(path), "%s/mtu", network->interface);
    return network->interface[0] && read_line(path, line, sizeof(line)) ? (uint32_t)strtoul(line, NULL, 10) : 0;
}

/* Append. Return the new length, at most bytes - 1. */
static size_t append(char *text, size_t bytes, size_t at, const char *before, const char *what)
{
    int n = snprintf(text + at, bytes - at, "%s%s", at ? before : "", what);

    return n < 0 || at + (size_t)n >= bytes ? bytes - 1 : at + (size_t)n;
}

static size_t append_priorities(const struct network *network, const char *folder, const char *what, char *text,
                                size_t bytes, size_t at)
{
    char path[352], line[64], list[32] = "";
    bool known_any = false;
    size_t end = 0;

    for (int i = 0; i < 8; i++) {
        char one[8];

        snprintf(path, sizeof(path), "%s/ecn/%s/enable/%d", network->interface, folder, i);
        if (!read_line(path, line, sizeof(line)))
            continue;
        known_any = true;
        snprintf(one, sizeof(one), "%d", i);
        if (line[0] == '1')
            end = append(list, sizeof(list), end, " ", one);
    }
    if (!known_any)
        return at;
    at = append(text, bytes, at, "; ", what);
    return append(text, bytes, at, "", list[0] ? list : "none");
}

void network_settings(const struct network *network, char *text, size_t bytes)
{
    char path[320], line[64];
    size_t at = 0;

    text[0] = '\0';
    snprintf(path, sizeof(path), "/sys/class/infiniband/%s/tc/%d/traffic_class", network->device, network->port);
    if (read_line(path, line, sizeof(line)) && line[0]) {
        at = append(text, bytes, at, "; ", "the device sets the class of all packets: ");
        at = append(text, bytes, at, "", line);
    }
    if (!network->interface[0])
        return;
    at = append_priorities(network, "roce_np", "ECN is notified on priorities ", text, bytes, at);
    append_priorities(network, "roce_rp", "ECN is obeyed on priorities ", text, bytes, at);
}

static uint64_t value_before(const struct network *network, const char *name, uint64_t none)
{
    for (uint32_t i = 0; i < network->count; i++)
        if (!strcmp(network->counter[i].name, name))
            return network->counter[i].value;
    return none;
}

void network_grown(const struct network *network, char *text, size_t bytes)
{
    struct network now = *network;
    size_t at = 0;

    text[0] = '\0';
    read_counters(&now);
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        bool is_first = true;

        for (uint32_t i = 0; i < now.count; i++) {
            const struct counter *counter = &now.counter[i];
            uint64_t before = value_before(network, counter->name, counter->value);
            char one[80];

            if (counter->kind != kind || counter->value <= before)
                continue;
            snprintf(one, sizeof(one), "%s +%llu", counter->name, (unsigned long long)(counter->value - before));
            if (is_first) {
                at = append(text, bytes, at, "; ", kind_names[kind]);
                at = append(text, bytes, at, "", ": ");
            }
            at = append(text, bytes, at, is_first ? "" : ", ", one);
            is_first = false;
        }
    }
}
