/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cli/ctl_report.h"

#include <arpa/inet.h>
#include <endian.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "tools/softnic/cli/sweep.h"
#include "tools/softnic/world/proc.h"

/* Strings in a world are device names and paths that this project made. A quote or control character is dropped rather
 * than escaped. */
static void json_string(const char *text)
{
    putchar('"');
    for (; *text; text++)
        if ((unsigned char)*text >= ' ' && *text != '"' && *text != '\\')
            putchar(*text);
    putchar('"');
}

static const struct {
    const char *name;
    size_t offset;
} counters[] = {
    {"send_wrs", offsetof(struct sn_counters, send_wrs)},   {"recv_wrs", offsetof(struct sn_counters, recv_wrs)},
    {"doorbells", offsetof(struct sn_counters, doorbells)}, {"cqes_send", offsetof(struct sn_counters, cqes_send)},
    {"cqes_recv", offsetof(struct sn_counters, cqes_recv)}, {"bytes_tx", offsetof(struct sn_counters, bytes_tx)},
    {"bytes_rx", offsetof(struct sn_counters, bytes_rx)},   {"fences", offsetof(struct sn_counters, fences)},
    {"errors", offsetof(struct sn_counters, errors)},       {"rnr_naks", offsetof(struct sn_counters, rnr_naks)},
    {"retries", offsetof(struct sn_counters, retries)},     {"flushed", offsetof(struct sn_counters, flushed)},
    {"dropped", offsetof(struct sn_counters, dropped)},
};
enum { NUM_COUNTERS = sizeof(counters) / sizeof(counters[0]) };

static uint64_t counter(const struct sn_dev *dev, int i)
{
    return __atomic_load_n((const uint64_t *)((const char *)&dev->counters + counters[i].offset), __ATOMIC_RELAXED);
}

void sn_report_counters(const struct sn_world *world, bool json)
{
    if (!json)
        printf("%-12s", "device");
    else
        printf("{\"devices\": [");
    for (int i = 0; !json && i < NUM_COUNTERS; i++)
        printf(" %14s", counters[i].name);
    if (!json)
        putchar('\n');
    for (uint32_t d = 0; d < world->dev_count; d++) {
        const struct sn_dev *dev = &world->devs[d];
        if (json) {
            printf("%s{\"name\": ", d ? ", " : "");
            json_string(dev->name);
        } else {
            printf("%-12s", dev->name);
        }
        for (int i = 0; i < NUM_COUNTERS; i++)
            if (json)
                printf(", \"%s\": %" PRIu64, counters[i].name, counter(dev, i));
            else
                printf(" %14" PRIu64, counter(dev, i));
        fputs(json ? "}" : "\n", stdout);
    }
    if (json)
        puts("]}");
}

static const char *qp_state(uint32_t state)
{
    static const char *const names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
    return state < sizeof(names) / sizeof(names[0]) ? names[state] : "?";
}

static void model_report(const struct sn_config *c, bool json)
{
    const struct {
        const char *name;
        uint64_t value;
    } fields[] = {
        {"nodes", c->nodes},
        {"nics", c->nics},
        {"rate_bps", c->rate_bps},
        {"latency_ns", c->latency_ns},
        {"wr_cost_ns", c->wr_cost_ns},
        {"doorbell_cost_ns", c->doorbell_cost_ns},
        {"fence_cost_ns", c->fence_cost_ns},
        {"jitter_ns", c->jitter_ns},
        {"retry_cap_ns", c->retry_cap_ns},
        {"seed", c->seed},
        {"copier", c->copier},
        {"efa", c->efa},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        printf(json ? "\"%s\": %" PRIu64 ", " : "  %s %" PRIu64, fields[i].name, fields[i].value);
    printf(json ? "\"fence\": \"%s\", " : "  fence %s\n", c->fence_meaning == SN_FENCE_STRICT ? "strict" : "spec");
}

static void gid_print(const uint8_t *gid)
{
    char text[INET6_ADDRSTRLEN];
    fputs(inet_ntop(AF_INET6, gid, text, sizeof(text)), stdout);
}

static void devices_report(const struct sn_world *world, bool json)
{
    fputs(json ? "\"devices\": [" : "devices\n", stdout);
    for (uint32_t d = 0; d < world->dev_count; d++) {
        const struct sn_dev *dev = &world->devs[d];
        uint32_t named = dev->efa ? 0 : 1; /* the GID by which the other end names the device; an EFA has only one */
        printf(json ? "%s{\"name\": \"%s\", \"node\": %u, \"link\": \"%s\", \"guid\": \"%016" PRIx64
                      "\", \"gid_index\": %u, \"gid\": \""
                    : "%s%-12s node %u  link %-4s  guid %016" PRIx64 "  gid[%u] ",
               json ? (d ? ", " : "") : "  ", dev->name, dev->node, dev->port_up ? "up" : "down", be64toh(dev->guid),
               named);
        gid_print(dev->gid[named]);
        printf(json ? "\", \"rate_bps\": %" PRIu64 ", \"latency_ns\": %" PRIu64 ", \"loss_ppb\": %u"
                    : "  rate_bps %" PRIu64 "  latency_ns %" PRIu64 "  loss_ppb %u",
               dev->rate_bps, dev->latency_ns, dev->loss_ppb);
        fputs(json ? ", \"pci\": " : "  ", stdout);
        if (json)
            json_string(dev->sysfs_device);
        else
            fputs(dev->sysfs_device[0] ? dev->sysfs_device : "virtual", stdout);
        fputs(json ? "}" : "\n", stdout);
    }
    fputs(json ? "], " : "", stdout);
}

static unsigned owned_mrs(const struct sn_world *world, uint32_t proc)
{
    unsigned count = 0;
    for (uint32_t i = 0; i < world->mr_slots.fresh && i < SN_MAX_MRS; i++)
        count += world->mrs[i].owner == proc + 1 && world->mrs[i].key;
    return count;
}

static void processes_report(const struct sn_world *world, bool json)
{
    bool first = true;
    fputs(json ? "\"processes\": [" : "processes\n", stdout);
    for (uint32_t i = 0; i < SN_MAX_PROCS; i++) {
        const struct sn_proc *proc = &world->procs[i];
        if (proc->state != SN_PROC_LIVE)
            continue;
        bool copier = world->copier.proc == i + 1;
        printf(json ? "%s{\"pid\": %u, \"node\": %d, \"regions\": %u%s}" : "%spid %u  node %d  regions %u%s\n",
               json ? (first ? "" : ", ") : "  ", proc->pid, (int)proc->node, owned_mrs(world, i),
               !copier ? ""
               : json  ? ", \"copier\": true"
                       : "  (copier)");
        first = false;
    }
    fputs(json ? "], " : "", stdout);
}

static const char *transport(uint32_t code)
{
    static const char *const names[] = {"rc", "srd", "uc", "ud"};
    return code < sizeof(names) / sizeof(names[0]) ? names[code] : "?";
}

static void qps_report(const struct sn_world *world, bool json)
{
    bool first = true;
    fputs(json ? "\"queue_pairs\": [" : "queue pairs\n", stdout);
    for (uint32_t i = 0; i < world->qp_slots.fresh && i < SN_MAX_QPS; i++) {
        const struct sn_qp_shm *qp = &world->qps[i];
        uint32_t owner = qp->owner;
        if (!owner || owner > SN_MAX_PROCS || !qp->qpn || qp->dev >= world->dev_count)
            continue;
        printf(json ? "%s{\"qpn\": %u, \"state\": \"%s\", \"device\": \"%s\", \"pid\": %u, \"dest_qpn\": %u, "
                      "\"transport\": \"%s\"}"
                    : "%s%u  %-5s  %s  pid %u  to %u  %s\n",
               json ? (first ? "" : ", ") : "  ", qp->qpn, qp_state(qp->state), world->devs[qp->dev].name,
               world->procs[owner - 1].pid, qp->dest_qpn, transport(qp->transport));
        first = false;
    }
    fputs(json ? "]" : "", stdout);
}

void sn_report_status(const char *path, struct sn_world *world, bool json)
{
    bool creator = sn_creator_lives(world);
    sn_sweep_members(world); /* do not report objects of dead processes */
    fputs(json ? "{\"world\": " : "world ", stdout);
    if (json)
        json_string(path);
    else
        fputs(path, stdout);
    printf(json ? ", \"creator\": %u, \"creator_runs\": %s, " : "  made by %u (%s)\n", world->creator_pid,
           json ? (creator ? "true" : "false") : (creator ? "runs" : "gone"));
    model_report(&world->config, json);
    devices_report(world, json);
    processes_report(world, json);
    qps_report(world, json);
    fputs(json ? "}\n" : "", stdout);
}

struct listing {
    bool json;
    unsigned count;
};

static void list_one(const char *path, struct sn_world *world, void *arg)
{
    struct listing *list = arg;
    bool creator = sn_creator_lives(world);
    unsigned members = sn_sweep_members(world);
    if (list->json) {
        printf("%s{\"world\": ", list->count ? ", " : "");
        json_string(path);
        printf(", \"creator\": %u, \"creator_runs\": %s, \"processes\": %u}", world->creator_pid,
               creator ? "true" : "false", members);
    } else {
        printf("%s  made by %u (%s)  %u processes\n", path, world->creator_pid, creator ? "runs" : "gone", members);
    }
    list->count++;
}

void sn_report_worlds(bool json)
{
    struct listing list = {.json = json};
    fputs(json ? "[" : "", stdout);
    sn_sweep_each(list_one, &list);
    fputs(json ? "]\n" : "", stdout);
}
