/* SPDX-License-Identifier: Apache-2.0 */
/* What perseus-info finds out about this machine; filled once, then printed. */
#ifndef INFO_MACHINE_H
#define INFO_MACHINE_H

#include <perseus/perseus.h>

enum { INFO_RAILS = 64, INFO_GPUS = 32, INFO_PROBLEMS = 64, INFO_LINES = 128, INFO_PLUGINS = 32 };

struct gpu {
    char address[32];   /* PCI, as in 0000:18:00.0 */
    char pci_path[256]; /* real path below /sys/devices */
    char name[96];      /* "" without NVML */
    int numa_node;
};

struct problem {
    const char *class; /* setting, driver, device, port, memory, network, policy or plugin */
    char what[256], fix[256];
};

/* A net plugin of NCCL in a folder where the dynamic linker looks. */
struct plugin_file {
    char path[512];
    bool is_perseus;
};

struct machine {
    int open_error; /* of prs_fabric_open() */
    char open_text[256];
    int rail_count;
    struct prs_rail_info rail[INFO_RAILS];
    int gpu_count;
    struct gpu gpu[INFO_GPUS];
    char policy[256];
    int policy_error;
    char interface[256];
    int interface_error;
    int plugin_count; /* in the order in which the linker would find them */
    struct plugin_file plugin[INFO_PLUGINS];
    int problem_count;
    struct problem problem[INFO_PROBLEMS];
    int line_count; /* what the transport logged about the devices that it found */
    char line[INFO_LINES][256];
};

/* NVIDIA GPUs of this machine, from sysfs; names by NVML where it can be opened. */
void gpu_find(struct machine *machine);

/* How far apart two PCI devices are, in nvidia-smi's words: PIX, PXB, PHB, NODE, SYS; "-" when one has no path. */
const char *distance_name(const char *path_a, int numa_a, const char *path_b, int numa_b);

/* Find libnccl-net*.so in LD_LIBRARY_PATH and the linker's default folders. */
void plugins_find(struct machine *machine);

/* Look for common mistakes in the configuration. */
void problems_find(struct machine *machine);

/* Print the counters of a process (--job). Return the exit status. */
int job_print(const char *pid);

void print_text(const struct machine *machine);
void print_json(const struct machine *machine);

#endif
