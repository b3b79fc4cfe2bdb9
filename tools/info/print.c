/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "tools/info/machine.h"

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

        printf("  %d  %s:%d  %s %.0f Gb/s  GID %s  NUMA %d  %s%s\n", i, rail->name, rail->port, rail->link,
               rail->speed_mbps / 1000.0, rail->gid, rail->numa_node, rail->pci_path[0] ? rail->pci_path : "virtual",
               rail->in_order ? "" : "  srd: unordered, without atomics");
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
           machine->policy[0] ? machine->policy : "nothing to choose without a rail");
    for (int i = 0; i < machine->line_count; i++)
        printf("  said: %s\n", machine->line[i]);
    printf("problems: %d\n", machine->problem_count);
    for (int i = 0; i < machine->problem_count; i++)
        printf("  - %s\n    mend: %s\n", machine->problem[i].what, machine->problem[i].mend);
}

/* ------------------------------------------------------------------------------------------------------------------
 * JSON */

static void json_string(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;

        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 0x20)
            printf("\\u%04x", c);
        else
            putchar(c);
    }
    putchar('"');
}

static void json_member(const char *name, const char *text)
{
    printf("\"%s\": ", name);
    json_string(text);
    printf(", ");
}

static void json_rail(const struct prs_rail_info *rail)
{
    printf("{");
    json_member("name", rail->name);
    json_member("gid", rail->gid);
    json_member("pci_path", rail->pci_path);
    json_member("mem_note", rail->mem_note);
    printf("\"port\": %d, \"gid_index\": %d, \"speed_mbps\": %u, \"guid\": \"%#llx\", \"numa_node\": %d, "
           "\"latency_us\": %.1f, \"max_peers\": %u, \"rail_id\": %d, \"plane_id\": %d, \"in_order\": %s, "
           "\"relaxed_ordering\": %s, \"adaptive_routing\": %s, \"link\": \"%s\", \"queues\": \"%s\", \"memory\": "
           "[\"host\"%s%s]}",
           rail->port, rail->gid_index, rail->speed_mbps, (unsigned long long)rail->guid, rail->numa_node,
           (double)rail->latency_us, rail->max_peers, rail->rail_id, rail->plane_id, rail->in_order ? "true" : "false",
           rail->relaxed_ordering ? "true" : "false", rail->adaptive_routing ? "true" : "false", rail->link,
           rail->queue_kind, rail->mem_kinds & PRS_MEM_CUDA ? ", \"peermem\"" : "",
           rail->mem_kinds & PRS_MEM_DMABUF ? ", \"dmabuf\"" : "");
}

static void json_gpu(const struct machine *machine, const struct gpu *gpu)
{
    printf("{");
    json_member("address", gpu->address);
    json_member("name", gpu->name);
    json_member("pci_path", gpu->pci_path);
    printf("\"numa_node\": %d, \"distance\": {", gpu->numa_node);
    for (int i = 0; i < machine->rail_count; i++) {
        const struct prs_rail_info *rail = &machine->rail[i];

        printf("%s\"%s:%d\": \"%s\"", i ? ", " : "", rail->name, rail->port,
               distance_name(gpu->pci_path, gpu->numa_node, rail->pci_path, rail->numa_node));
    }
    printf("}}");
}

void print_json(const struct machine *machine)
{
    printf("{");
    json_member("version", prs_version());
    json_member("policy", machine->policy);
    json_member("error", machine->open_text);
    printf("\"rails\": [");
    for (int i = 0; i < machine->rail_count; i++) {
        printf("%s", i ? ", " : "");
        json_rail(&machine->rail[i]);
    }
    printf("], \"gpus\": [");
    for (int i = 0; i < machine->gpu_count; i++) {
        printf("%s", i ? ", " : "");
        json_gpu(machine, &machine->gpu[i]);
    }
    printf("], \"problems\": [");
    for (int i = 0; i < machine->problem_count; i++) {
        printf("%s{", i ? ", " : "");
        json_member("what", machine->problem[i].what);
        printf("\"mend\": ");
        json_string(machine->problem[i].mend);
        printf("}");
    }
    printf("]}\n");
}
