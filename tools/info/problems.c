/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "tools/info/machine.h"

#define VERBS_DEVICES "/sys/class/infiniband"

enum { PORTS_MAX = 8 };

static void add(struct machine *machine, const char *fix, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void add(struct machine *machine, const char *fix, const char *format, ...)
{
    struct problem *problem = &machine->problem[machine->problem_count];
    va_list args;

    if (machine->problem_count == INFO_PROBLEMS)
        return;
    va_start(args, format);
    vsnprintf(problem->what, sizeof(problem->what), format, args);
    va_end(args);
    snprintf(problem->fix, sizeof(problem->fix), "%s", fix);
    machine->problem_count++;
}

static void find_no_rail(struct machine *machine)
{
    if (machine->open_error)
        add(machine, "see the reason; libibverbs is in the package libibverbs1 (Debian) or libibverbs (RPM)",
            "no RDMA: %s", machine->open_text);
    else if (machine->rail_count == 0)
        add(machine,
            "load the NIC's driver, check 'ibv_devinfo' and NCCL_IB_HCA; without a NIC, try: softnic-run -- "
            "perseus-info",
            "no usable RDMA device was found");
}

static void find_memlock(struct machine *machine)
{
    struct rlimit limit;

    if (machine->rail_count == 0 || getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return;
    add(machine,
        "raise it: 'ulimit -l unlimited', a 'memlock' line in /etc/security/limits.conf, LimitMEMLOCK=infinity in a "
        "unit, or --ulimit memlock=-1 for a container",
        "locked memory is limited to %llu KiB, so large registrations will fail",
        (unsigned long long)limit.rlim_cur / 1024);
}

static void find_down_ports(struct machine *machine, const char *device)
{
    for (int port = 1; port <= PORTS_MAX; port++) {
        char path[512], state[64] = "";
        FILE *stream;

        snprintf(path, sizeof(path), VERBS_DEVICES "/%s/ports/%d/state", device, port);
        stream = fopen(path, "re");
        if (!stream)
            return;
        if (fgets(state, sizeof(state), stream) && !strstr(state, "ACTIVE")) {
            state[strcspn(state, "\n")] = '\0';
            add(machine, "check the cable and the switch; RoCE: 'ip link set ... up'; InfiniBand: a subnet manager",
                "%s port %d is not active (%s)", device, port, state);
        }
        fclose(stream);
    }
}

static void find_ports(struct machine *machine)
{
    struct dirent **entries;
    int count = scandir(VERBS_DEVICES, &entries, NULL, alphasort);

    for (int i = 0; i < count; i++) {
        if (entries[i]->d_name[0] != '.')
            find_down_ports(machine, entries[i]->d_name);
        free(entries[i]);
    }
    if (count >= 0)
        free(entries);
}

static void find_in_rails(struct machine *machine)
{
    for (int i = 0; i < machine->rail_count; i++) {
        const struct prs_rail_info *rail = &machine->rail[i];

        if (machine->gpu_count && !(rail->mem_kinds & (PRS_MEM_CUDA | PRS_MEM_DMABUF)))
            add(machine,
                "load nvidia_peermem ('modprobe nvidia_peermem'), or use a kernel, driver and NIC with DMA-BUF; until "
                "then NCCL stages through host memory",
                "%s cannot register GPU memory: %s", rail->name,
                rail->mem_note[0] ? rail->mem_note : "the reason is unknown");
        if (rail->is_roce && strncmp(rail->gid, "fe80", 4) == 0)
            add(machine, "give its network interface an address, or choose by NCCL_IB_GID_INDEX",
                "%s port %d has only a link-local GID (%s), which routers do not pass on", rail->name, rail->port,
                rail->gid);
    }
}

void problems_find(struct machine *machine)
{
    find_no_rail(machine);
    find_memlock(machine);
    find_ports(machine);
    find_in_rails(machine);
}
