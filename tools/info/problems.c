/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tools/info/machine.h"

#define VERBS_DEVICES "/sys/class/infiniband"

enum { PORTS_MAX = 8 };

static void add(struct machine *machine, const char *class, const char *fix, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void add(struct machine *machine, const char *class, const char *fix, const char *format, ...)
{
    struct problem *problem = &machine->problem[machine->problem_count];
    va_list args;

    if (machine->problem_count == INFO_PROBLEMS)
        return;
    va_start(args, format);
    vsnprintf(problem->what, sizeof(problem->what), format, args);
    va_end(args);
    problem->class = class;
    snprintf(problem->fix, sizeof(problem->fix), "%s", fix);
    machine->problem_count++;
}

static void find_open_error(struct machine *machine)
{
    if (machine->open_error == -EINVAL)
        add(machine, "setting", "unset the variable, or give it a value that the text allows",
            "a setting cannot be used: %s", machine->open_text);
    else if (!strncmp(machine->open_text, "PERSEUS_PROVIDER", strlen("PERSEUS_PROVIDER")))
        add(machine, "setting", "name a provider that 'fi_info -l' lists, or unset the variable to use verbs",
            "no RDMA: %s", machine->open_text);
    else if (strstr(machine->open_text, "libibverbs"))
        add(machine, "driver", "install libibverbs: libibverbs1 (Debian) or libibverbs (RPM)", "no RDMA: %s",
            machine->open_text);
    else
        add(machine, "driver",
            "load it ('modprobe ib_uverbs'), and give a container /dev/infiniband; without a NIC, try: softnic-run -- "
            "perseus-info",
            "no RDMA: %s", machine->open_text);
}

/* Devices that are there and are not used, each with the reason that the transport logged. */
static int find_passed_over(struct machine *machine)
{
    static const char by_filter[] = " passed over: NCCL_IB_HCA";
    char filtered[160] = "";
    int found = 0;

    for (int i = 0; i < machine->line_count; i++) {
        const char *line = machine->line[i], *at = strstr(line, by_filter);

        if (at)
            snprintf(filtered + strlen(filtered), sizeof(filtered) - strlen(filtered), " %.*s", (int)(at - line), line);
        else if (strstr(line, " passed over: "))
            add(machine, strstr(line, "NCCL_") ? "setting" : "device",
                strstr(line, "NCCL_") ? "change the variable that is named, or unset it" : "see the reason", "%s",
                line);
        found += at || strstr(line, " passed over: ");
    }
    if (filtered[0])
        add(machine, "setting", "name devices of this list in NCCL_IB_HCA, or unset it",
            "NCCL_IB_HCA=%s admits none of the devices:%s", getenv("NCCL_IB_HCA") ? getenv("NCCL_IB_HCA") : "",
            filtered);
    return found;
}

static void find_no_rail(struct machine *machine)
{
    const char *disabled = getenv("NCCL_IB_DISABLE");

    if (machine->open_error)
        find_open_error(machine);
    else if (machine->rail_count)
        return;
    else if (disabled && !strcmp(disabled, "1"))
        add(machine, "setting", "unset NCCL_IB_DISABLE", "NCCL_IB_DISABLE=1 turns RDMA off");
    else if (!find_passed_over(machine))
        add(machine, "device",
            "load the NIC's driver and check 'ibv_devinfo'; without a NIC, try: softnic-run -- perseus-info",
            "no RDMA device was found");
}

/* Settings about which the transport warned; it uses other values instead. */
static void find_warned_variables(struct machine *machine)
{
    for (int i = 0; i < machine->line_count; i++) {
        char text[sizeof(machine->line[0])]; /* with UBSan gcc 12 takes an element of an array for a null pointer */

        memcpy(text, machine->line[i], sizeof(text));
        if (strstr(text, " is no variable of Perseus"))
            add(machine, "setting", "correct the name, or unset it: doc/variables.md has all", "%s", text);
        else if (strstr(text, " has no effect"))
            add(machine, "setting", "unset it, or change what the text names", "%s", text);
        else if ((strstr(text, ": must be ") || strstr(text, ": is not one of ")) && !machine->open_error)
            add(machine, "setting", "give it a value that the text allows, or unset it", "%s", text);
    }
}

static void find_policy(struct machine *machine)
{
    if (machine->policy_error)
        add(machine, "policy", "unset PERSEUS_ORDER, so that the best policy is chosen, or choose one that is named",
            "the policy cannot be had: %s", machine->policy + strlen("none: "));
}

static void find_interface(struct machine *machine)
{
    const char *wanted = getenv("NCCL_SOCKET_IFNAME");

    if (machine->interface_error)
        add(machine, "network", "name one of them in NCCL_SOCKET_IFNAME, or unset it", "NCCL_SOCKET_IFNAME=%s: %s",
            wanted ? wanted : "", machine->interface + strlen("none: "));
}

/* Without NCCL_NET_PLUGIN, NCCL loads libnccl-net.so if there is one. */
static void find_other_plugins(struct machine *machine)
{
    for (int i = 0; i < machine->plugin_count && !getenv("NCCL_NET_PLUGIN"); i++) {
        const struct plugin_file *plugin = &machine->plugin[i];

        if (!plugin->is_perseus && strstr(plugin->path, "/libnccl-net.so")) {
            add(machine, "plugin",
                "set NCCL_NET=Perseus, and NCCL_NET_PLUGIN to the absolute path of libnccl-net-perseus.so (NCCL before "
                "2.21: to perseus, with its folder in LD_LIBRARY_PATH)",
                "NCCL would load another plugin by itself: %s", plugin->path);
            return;
        }
    }
}

/* NCCL_NET_PLUGIN names a file, or a part of a file's name; if NCCL finds neither, it uses its own transport. */
static void find_named_plugin(struct machine *machine)
{
    const char *named = getenv("NCCL_NET_PLUGIN");
    char file[256];

    if (!named || !*named || !strcmp(named, "none"))
        return;
    if (strchr(named, '/')) {
        if (access(named, R_OK))
            add(machine, "plugin", "name the file as this node sees it", "NCCL_NET_PLUGIN=%s: %s", named,
                strerror(errno));
        return;
    }
    snprintf(file, sizeof(file), "/libnccl-net-%s.so", named);
    for (int i = 0; i < machine->plugin_count; i++) {
        const char *end = strrchr(machine->plugin[i].path, '/');

        if (end && (!strcmp(end, file) || !strcmp(end + 1, named)))
            return;
    }
    add(machine, "plugin", "set it to the absolute path of libnccl-net-perseus.so (NCCL 2.21 and newer)",
        "NCCL_NET_PLUGIN=%s: no folder of LD_LIBRARY_PATH or of the system has %s", named, file + 1);
}

static void find_memlock(struct machine *machine)
{
    struct rlimit limit;

    if (machine->rail_count == 0 || getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return;
    add(machine, "memory",
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
            add(machine, "port",
                "check the cable and the switch; RoCE: 'ip link set ... up'; InfiniBand: a subnet manager",
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
            add(machine, "memory",
                "load nvidia_peermem ('modprobe nvidia_peermem'), or use a kernel, driver and NIC with DMA-BUF; until "
                "then NCCL stages through host memory",
                "%s cannot register GPU memory: %s", rail->name,
                rail->mem_note[0] ? rail->mem_note : "the reason is unknown");
        if (rail->is_roce && strncmp(rail->gid, "fe80", 4) == 0)
            add(machine, "network", "give its network interface an address, or choose by NCCL_IB_GID_INDEX",
                "%s port %d has only a link-local GID (%s), which routers do not pass on", rail->name, rail->port,
                rail->gid);
    }
}

void problems_find(struct machine *machine)
{
    find_no_rail(machine);
    find_policy(machine);
    find_interface(machine);
    find_warned_variables(machine);
    find_other_plugins(machine);
    find_named_plugin(machine);
    find_memlock(machine);
    find_ports(machine);
    find_in_rails(machine);
}
