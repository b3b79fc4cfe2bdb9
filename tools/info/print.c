/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "tools/info/machine.h"
#include "tools/common/json.h"

static const char *memory_text(const struct prs_rail_info *rail)
{
    static const char *const text[] = {"host", "host, GPU by peermem", "host, GPU by DMA-BUF",
                                       "host, GPU by DMA-BUF or peermem"};

    return text[(rail->mem_kinds & PRS_MEM_CUDA ? 1 : 0) + (rail->mem_kinds & PRS_MEM_DMABUF ? 2 : 0)];
}

static void print_rails(const struct machine *machine)
{
    printf("rails: %d\n", machine->rail_count);
    for (int i = 0; i < machine->rail_count; i++) {
        const struct prs_rail_info *rail = &machine->rail[i];

        printf("  %d  %s:%d  %s %.0f Gb/s  GID %s  NUMA %d  %s%s%s%s\n", i, rail->name, rail->port, rail->link,
               rail->speed_mbps / 1000.0, rail->gid, rail->numa_node, rail->pci_path[0] ? rail->pci_path : "virtual",
               rail->in_order ? "" : "  ", rail->in_order ? "" : rail->queue_kind,
               rail->in_order ? "" : ": unordered, without atomics");
        printf("       memory: %s%s%s%s%s%s\n", memory_text(rail), rail->mem_note[0] ? " (" : "", rail->mem_note,
               rail->mem_note[0] ? ")" : "", rail->relaxed_ordering ? "; relaxed ordering" : "",
               rail->adaptive_routing ? "; adaptive routing" : "");
    }
}

static void print_gpus(const struct machine *machine)
{
    printf("GPUs: %d%s\n", machine->gpu_count,
           machine->gpu_count && machine->rail_count ? "  (distance to each rail)" : "");
    for (int i = 0; i < machine->gpu_count; i++) {
        const struct gpu *gpu = &machine->gpu[i];

        printf("  %d  %s  %s  NUMA %d ", i, gpu->address, gpu->name[0] ? gpu->name : "NVIDIA", gpu->numa_node);
        for (int j = 0; j < machine->rail_count; j++)
            printf(" %s=%s", machine->rail[j].name,
                   distance_name(gpu->pci_path, gpu->numa_node, machine->rail[j].pci_path, machine->rail[j].numa_node));
        printf("\n");
    }
}

void print_text(const struct machine *machine)
{
    printf("Perseus %s\n", prs_version());
    print_rails(machine);
    print_gpus(machine);
    printf("order of a peer over all rails: %s\n",
           machine->policy[0] ? machine->policy : "none, since there is no rail");
    printf("interface of handshakes: %s\n", machine->interface[0] ? machine->interface : "not asked for");
    printf("net plugins of NCCL in the linker's folders: %d\n", machine->plugin_count);
    for (int i = 0; i < machine->plugin_count; i++)
        printf("  %s%s\n", machine->plugin[i].path, machine->plugin[i].is_perseus ? "  (Perseus)" : "");
    for (int i = 0; i < machine->line_count; i++)
        printf("  log: %s\n", machine->line[i]);
    printf("problems: %d\n", machine->problem_count);
    for (int i = 0; i < machine->problem_count; i++)
        printf("  - %s: %s\n    fix: %s\n", machine->problem[i].class, machine->problem[i].what,
               machine->problem[i].fix);
}

/* ---- JSON ---- */

static void json_rail(const struct prs_rail_info *rail)
{
    json_print(stdout, "{name:%s,gid:%s,pci_path:%s,mem_note:%s,port:%d,gid_index:%d,speed_mbps:%u,", rail->name,
               rail->gid, rail->pci_path, rail->mem_note, rail->port, rail->gid_index, rail->speed_mbps);
    printf("\"guid\":\"%#llx\",", (unsigned long long)rail->guid);
    json_print(stdout,
               "numa_node:%d,latency_us:%.1f,max_peers:%u,rail_id:%d,plane_id:%d,in_order:%hhd,relaxed_ordering:%hhd,"
               "adaptive_routing:%hhd,link:%s,queues:%s,memory:[host",
               rail->numa_node, (double)rail->latency_us, rail->max_peers, rail->rail_id, rail->plane_id,
               rail->in_order, rail->relaxed_ordering, rail->adaptive_routing, rail->link, rail->queue_kind);
    json_print(stdout, rail->mem_kinds & PRS_MEM_CUDA ? ",peermem" : "");
    json_print(stdout, rail->mem_kinds & PRS_MEM_DMABUF ? ",dmabuf]}" : "]}");
}

static void json_gpu(const struct machine *machine, const struct gpu *gpu)
{
    json_print(stdout, "{address:%s,name:%s,pci_path:%s,numa_node:%d,distance:{", gpu->address, gpu->name,
               gpu->pci_path, gpu->numa_node);
    for (int i = 0; i < machine->rail_count; i++) {
        const struct prs_rail_info *rail = &machine->rail[i];
        char port[128];

        snprintf(port, sizeof(port), "%s:%d", rail->name, rail->port);
        json_print(stdout, i ? ",%s:%s" : "%s:%s", port,
                   distance_name(gpu->pci_path, gpu->numa_node, rail->pci_path, rail->numa_node));
    }
    json_print(stdout, "}}");
}

void print_json(const struct machine *machine)
{
    json_print(stdout, "{version:%s,policy:%s,error:%s,rails:[", prs_version(), machine->policy, machine->open_text);
    for (int i = 0; i < machine->rail_count; i++) {
        json_print(stdout, i ? "," : "");
        json_rail(&machine->rail[i]);
    }
    json_print(stdout, "],gpus:[");
    for (int i = 0; i < machine->gpu_count; i++) {
        json_print(stdout, i ? "," : "");
        json_gpu(machine, &machine->gpu[i]);
    }
    json_print(stdout, "],interface:%s,plugins:[", machine->interface);
    for (int i = 0; i < machine->plugin_count; i++)
        json_print(stdout, i ? ",{path:%s,perseus:%hhd}" : "{path:%s,perseus:%hhd}", machine->plugin[i].path,
                   machine->plugin[i].is_perseus);
    json_print(stdout, "],log:[");
    for (int i = 0; i < machine->line_count; i++)
        json_print(stdout, i ? ",%s" : "%s", machine->line[i]);
    json_print(stdout, "],problems:[");
    for (int i = 0; i < machine->problem_count; i++)
        json_print(stdout, i ? ",{class:%s,what:%s,fix:%s}" : "{class:%s,what:%s,fix:%s}", machine->problem[i].class,
                   machine->problem[i].what, machine->problem[i].fix);
    json_print(stdout, "]}\n");
}
