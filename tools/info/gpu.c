/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/info/machine.h"

#define PCI_DEVICES "/sys/bus/pci/devices"

enum { VENDOR_NVIDIA = 0x10de, CLASS_VGA = 0x0300, CLASS_3D = 0x0302 };

static long read_number(const char *address, const char *file, long fallback)
{
    char path[512], text[64] = "";
    FILE *stream;

    snprintf(path, sizeof(path), PCI_DEVICES "/%s/%s", address, file);
    stream = fopen(path, "re");
    if (!stream)
        return fallback;
    if (!fgets(text, sizeof(text), stream))
        text[0] = '\0';
    fclose(stream);
    return text[0] ? strtol(text, NULL, 0) : fallback;
}

/* The part of NVML that names a device. It is opened at run time, since it is no error if a machine lacks it. */
struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_address)(const char *address, void **device);
    int (*name)(void *device, char *name, unsigned int length);
};

static bool nvml_open(struct nvml *nvml)
{
    nvml->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!nvml->library)
        return false;
    nvml->init = (int (*)(void))(uintptr_t)dlsym(nvml->library, "nvmlInit_v2");
    nvml->shutdown = (int (*)(void))(uintptr_t)dlsym(nvml->library, "nvmlShutdown");
    nvml->by_address =
        (int (*)(const char *, void **))(uintptr_t)dlsym(nvml->library, "nvmlDeviceGetHandleByPciBusId_v2");
    nvml->name = (int (*)(void *, char *, unsigned int))(uintptr_t)dlsym(nvml->library, "nvmlDeviceGetName");
    if (nvml->init && nvml->shutdown && nvml->by_address && nvml->name && nvml->init() == 0)
        return true;
    dlclose(nvml->library);
    return false;
}

static void name_gpus(struct machine *machine)
{
    struct nvml nvml;

    if (machine->gpu_count == 0 || !nvml_open(&nvml))
        return;
    for (int i = 0; i < machine->gpu_count; i++) {
        struct gpu *gpu = &machine->gpu[i];
        void *device;

        if (nvml.by_address(gpu->address, &device) != 0 || nvml.name(device, gpu->name, sizeof(gpu->name)) != 0)
            gpu->name[0] = '\0';
    }
    nvml.shutdown();
    dlclose(nvml.library);
}

static void add_gpu(struct machine *machine, const char *address)
{
    struct gpu *gpu = &machine->gpu[machine->gpu_count];
    char link[300], *real;
    long class = read_number(address, "class", 0) >> 8;

    if (machine->gpu_count == INFO_GPUS || read_number(address, "vendor", 0) != VENDOR_NVIDIA ||
        (class != CLASS_VGA && class != CLASS_3D))
        return;
    snprintf(gpu->address, sizeof(gpu->address), "%s", address);
    snprintf(link, sizeof(link), PCI_DEVICES "/%s", address);
    real = realpath(link, NULL);
    snprintf(gpu->pci_path, sizeof(gpu->pci_path), "%s", real ? real : "");
    free(real);
    gpu->numa_node = (int)read_number(address, "numa_node", -1);
    machine->gpu_count++;
}

void gpu_find(struct machine *machine)
{
    struct dirent **entries;
    int count = scandir(PCI_DEVICES, &entries, NULL, alphasort);

    for (int i = 0; i < count; i++) {
        if (entries[i]->d_name[0] != '.')
            add_gpu(machine, entries[i]->d_name);
        free(entries[i]);
    }
    if (count >= 0)
        free(entries);
    name_gpus(machine);
}

/* ---- distance ---- */

/* The path from the host bridge on, "pci0000:17/0000:17:01.0/..."; NULL when there is no bridge in it. */
static const char *from_bridge(const char *path)
{
    const char *at = strstr(path, "/pci");

    if (at)
        return at + 1;
    return strncmp(path, "pci", 3) == 0 ? path : NULL;
}

static int depth(const char *path)
{
    int parts = 1;

    for (; *path; path++)
        parts += *path == '/' && path[1];
    return parts;
}

static int common_depth(const char *a, const char *b)
{
    int parts = 0;

    for (;;) {
        size_t na = strcspn(a, "/"), nb = strcspn(b, "/");

        if (na == 0 || na != nb || strncmp(a, b, na) != 0)
            return parts;
        parts++;
        a += na + (a[na] == '/');
        b += nb + (b[nb] == '/');
    }
}

const char *distance_name(const char *path_a, int numa_a, const char *path_b, int numa_b)
{
    const char *a = from_bridge(path_a), *b = from_bridge(path_b);
    int common, rest;

    if (!a || !b)
        return "-";
    common = common_depth(a, b);
    if (common == 0)
        return numa_a == numa_b ? "NODE" : "SYS";
    if (common == 1)
        return "PHB";
    /* Below one switch each path has two more parts: a downstream port and the device. More parts mean more
     * switches. */
    rest = depth(a) + depth(b) - 2 * common;
    return rest <= 4 ? "PIX" : "PXB";
}
