/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/sim/cluster.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MORE_IS_FAST = 1, CHOICE = 2 };

static const struct row {
    const char *name;
    size_t field;
    uint32_t kind;
    double initial, least, most;
    const char *meaning;
} rows[] = {
#define ROW(member, kind, initial, least, most, meaning)                                                               \
    {                                                                                                                  \
#        member, offsetof(struct sim_cluster, member), kind, initial, least, most, meaning                             \
    }
    ROW(link_gbps, MORE_IS_FAST, 400, 0.001, 1e5, "rate of each direction of a NIC's link"),
    ROW(pcie_gbps, MORE_IS_FAST, 1e5, 0.001, 1e5, "rate at which a NIC reads or writes memory"),
    ROW(latency_ns, 0, 1000, 0, 1e9, "one way between two NICs of one leaf, without the transfer time"),
    ROW(jitter_ns, 0, 0, 0, 1e9, "most by which a delivery comes later, at random"),
    ROW(wr_ns, 0, 0, 0, 1e6, "time that a NIC is busy with each request"),
    ROW(doorbell_ns, 0, 0, 0, 1e6, "time that a NIC is busy with each doorbell"),
    ROW(fence_ns, 0, 0, 0, 1e6, "time that a fence adds"),
    ROW(atomic_ns, 0, 0, 0, 1e6, "time that a remote add takes at its target"),
    ROW(loopback_ns, 0, 1000, 0, 1e6, "time of a request of a NIC to its own host"),
    ROW(post_latency_ns, 0, 0, 0, 1e6, "from a doorbell until the NIC has the request"),
    ROW(completion_latency_ns, 0, 0, 0, 1e6, "from the NIC until a completion can be polled"),
    ROW(fence_strict, CHOICE, 0, 0, 1, "1: a fence waits for all earlier requests of its queue; 0: for reads and adds"),
    ROW(fence_stalls, CHOICE, 1, 0, 1, "1: what follows a waiting fence on its queue waits too"),
    ROW(in_order, CHOICE, 1, 0, 1, "1: queues keep order (RC); 0: they do not (SRD)"),
    ROW(adds, CHOICE, 1, 0, 1, "1: the NIC has remote adds"),
    ROW(whole_messages, CHOICE, 0, 0, 1, "1: queues take turns by messages; 0: by parts of quantum_bytes"),
    ROW(software, CHOICE, 0, 0, 1, "1: threads of the host carry requests out, as in tools/softnic"),
    ROW(call_ns, 0, 0, 0, 1e6, "software NIC: a call of the kernel, of up to 32 requests of 4 KB or less"),
    ROW(request_ns, 0, 0, 0, 1e6, "software NIC: a request"),
    ROW(scatter_ns, 0, 0, 0, 1e6, "software NIC: a request that does not follow in memory on the one before"),
    ROW(copy_gbps, MORE_IS_FAST, 100, 0.001, 1e5, "software NIC: rate at which a thread copies to another process"),
    ROW(quantum_bytes, 0, 16384, 256, 1e12, "what a queue sends at a turn"),
    ROW(routing, CHOICE, 0, 0, 2, "between leaves: 0 by hash, 1 the least busy uplink, 2 packets sprayed over all"),
    ROW(adaptive_unordered, CHOICE, 0, 0, 1, "1: messages of a queue that took different ways arrive out of order"),
    ROW(nodes_per_leaf, CHOICE, 32, 1, 1024, "nodes whose NICs of one rail share a leaf switch"),
    ROW(oversubscription, 0, 1, 1, 64, "rate of a leaf's links to nodes over that of its links to spines"),
    ROW(hop_ns, 0, 0, 0, 1e6, "what a way over a spine adds to the latency, one way"),
    ROW(step_ns, 0, 0, 0, 1e9, "proxy: a round"),
    ROW(poll_ns, 0, 0, 0, 1e6, "proxy: looking at one peer in a round"),
    ROW(command_ns, 0, 0, 0, 1e6, "proxy: a command, from the ring to a request"),
    ROW(post_ns, 0, 0, 0, 1e6, "proxy: a doorbell"),
    ROW(completion_ns, 0, 0, 0, 1e6, "proxy: a completion"),
    ROW(arrival_ns, 0, 0, 0, 1e6, "proxy: an arrival with an immediate"),
    ROW(raise_ns, 0, 0, 0, 1e6, "proxy: raising a signal by the CPU"),
    ROW(pickup_ns, 0, 0, 0, 1e6, "proxy: from something to do until an idle proxy sees it"),
    ROW(drain_ns, 0, 0, 0, 1e9, "proxy: a drain of all peers, without the wait for completions"),
    ROW(drain_peer_ns, 0, 0, 0, 1e9, "proxy: what each connected peer adds to a drain"),
    ROW(gpus_per_node, CHOICE, 8, 1, 64, "GPUs, and ranks, of a node"),
    ROW(lost_ns, 0, 1e6, 0, 1e11, "from a request over a lost rail until its NIC reports the failure"),
    ROW(tcp_ns, 0, 30000, 0, 1e9, "one way of a TCP connection, over which both sides agree on a lost rail"),
    ROW(nics_per_gpu, CHOICE, 1, 1, 8, "NICs of a GPU"),
    ROW(push_ns, 0, 20, 0, 1e6, "GPU: from one command to the next"),
    ROW(ring_latency_ns, 0, 1000, 0, 1e6, "GPU: from writing a command until the proxy can read it"),
    ROW(see_ns, 0, 500, 0, 1e6, "GPU: from a signal in memory until the kernel goes on"),
    ROW(tflops, MORE_IS_FAST, 600, 0.001, 1e5, "GPU: products, in 10^12 operations a second"),
    ROW(nvlink_gbps, MORE_IS_FAST, 3600, 0.001, 1e6, "between GPUs of a node, each direction"),
    ROW(nvlink_latency_ns, 0, 1000, 0, 1e6, "between GPUs of a node"),
#undef ROW
};

enum { ROWS = sizeof(rows) / sizeof(rows[0]) };

static double *field(struct sim_cluster *cluster, const struct row *row)
{
    return (double *)(void *)((char *)cluster + row->field);
}

static const struct row *find(const char *name, size_t length)
{
    for (uint32_t i = 0; i < ROWS; i++)
        if (strlen(rows[i].name) == length && !strncmp(rows[i].name, name, length))
            return &rows[i];
    return NULL;
}

/* Read "value" or "low..high". The middle of a range is the geometric mean, since values are uncertain by a factor. */
static bool read_value(const char *text, const struct row *row, enum sim_band band, double *out)
{
    const char *dots = strstr(text, "..");
    char first[32], *end;
    double low, high;

    if (snprintf(first, sizeof(first), "%.*s", dots ? (int)(dots - text) : (int)strlen(text), text) >=
        (int)sizeof(first))
        return false;
    low = high = strtod(first, &end);
    if (end == first || *end)
        return false;
    if (dots) {
        high = strtod(dots + 2, &end);
        if (end == dots + 2 || *end || !(high >= low))
            return false;
    }
    if (band == SIM_BAND_MIDDLE)
        *out = low > 0 ? sqrt(low * high) : (low + high) / 2;
    else
        *out = (band == SIM_BAND_FAST) == (row->kind == MORE_IS_FAST) ? high : low;
    return true;
}

static int set(struct sim_cluster *cluster, const char *where, const char *name, size_t length, const char *text,
               enum sim_band band)
{
    const struct row *row = find(name, length);
    double value;

    if (!row) {
        fprintf(stderr, "perseus-sim: %s: no parameter is called '%.*s'; --parameters prints all\n", where, (int)length,
                name);
        return -EINVAL;
    }
    if (!read_value(text, row, band, &value)) {
        fprintf(stderr, "perseus-sim: %s: %s '%s': want a number, or low..high\n", where, row->name, text);
        return -EINVAL;
    }
    if (!(value >= row->least && value <= row->most)) { /* NaN is neither */
        fprintf(stderr, "perseus-sim: %s: %s %g: want %g to %g\n", where, row->name, value, row->least, row->most);
        return -EINVAL;
    }
    *field(cluster, row) = value;
    return 0;
}

int sim_cluster_set(struct sim_cluster *cluster, const char *text, enum sim_band band)
{
    const char *equals = strchr(text, '=');

    if (!equals) {
        fprintf(stderr, "perseus-sim: --set '%s': want NAME=VALUE\n", text);
        return -EINVAL;
    }
    return set(cluster, "--set", text, (size_t)(equals - text), equals + 1, band);
}

static void take_name(const char *path, char *name, size_t room)
{
    const char *slash = strrchr(path, '/'), *start = slash ? slash + 1 : path, *dot = strrchr(start, '.');

    snprintf(name, room, "%.*s", (int)(dot ? dot - start : (long)strlen(start)), start);
}

int sim_cluster_read(const char *path, enum sim_band band, struct sim_cluster *out)
{
    char line[1024], where[512];
    FILE *file = fopen(path, "r");
    int number = 0, found = 0, r = 0;

    memset(out, 0, sizeof(*out));
    for (uint32_t i = 0; i < ROWS; i++)
        *field(out, &rows[i]) = rows[i].initial;
    take_name(path, out->name, sizeof(out->name));
    if (!file) {
        r = -errno;
        fprintf(stderr, "perseus-sim: cannot open the cluster file '%s': %s\n", path, strerror(-r));
        return r;
    }
    while (!r && fgets(line, sizeof(line), file)) {
        char *save, *name, *value;

        line[strcspn(line, "#\n")] = 0;
        number++;
        name = strtok_r(line, " \t", &save);
        if (!name)
            continue;
        value = strtok_r(NULL, " \t", &save);
        snprintf(where, sizeof(where), "%s:%d", path, number);
        if (!value || strtok_r(NULL, " \t", &save)) {
            fprintf(stderr, "perseus-sim: %s: want \"name value  # source\"\n", where);
            r = -EINVAL;
        } else {
            r = set(out, where, name, strlen(name), value, band);
            found++;
        }
    }
    fclose(file);
    if (!r && !found) { /* no file was read, so all values would be the initial ones */
        fprintf(stderr, "perseus-sim: %s: has no \"name value  # source\": is it a cluster file?\n", path);
        r = -EINVAL;
    }
    return r;
}

int sim_cluster_check(const struct sim_cluster *c)
{
    if (!c->in_order && c->adds) {
        fprintf(stderr, "perseus-sim: in_order 0 with adds 1: no NIC is known that adds without keeping order\n");
        return -EINVAL;
    }
    if (!c->fence_stalls && !c->whole_messages) {
        fprintf(stderr, "perseus-sim: fence_stalls 0 needs whole_messages 1: the NIC keeps one place in a queue\n");
        return -EINVAL;
    }
    if (c->software && (!c->in_order || !c->whole_messages || c->adaptive_unordered)) {
        fprintf(stderr, "perseus-sim: software 1 needs in_order 1, whole_messages 1 and adaptive_unordered 0\n");
        return -EINVAL;
    }
    return 0;
}

void sim_cluster_print(const struct sim_cluster *cluster)
{
    for (uint32_t i = 0; i < ROWS; i++)
        printf("%-22s %-12g # %s\n", rows[i].name,
               *(const double *)(const void *)((const char *)cluster + rows[i].field), rows[i].meaning);
}
