/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cli/pci.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PCI_MOST = 1024,
    CLASS_NETWORK = 0x02,
    CLASS_DISPLAY = 0x03,
    CLASS_BRIDGE = 0x06,
    VENDOR_NVIDIA = 0x10de,
};

struct function {
    char path[256];
    char address[16]; /* dddd:bb:dd.f */
    unsigned class, vendor;
    bool bus_taken; /* a NIC sits on this bus */
    bool taken;     /* a NIC sits here */
};

struct inventory {
    struct function *functions;
    uint32_t count;
    const struct function *gpus[64];
    uint32_t num_gpus;
};

static unsigned read_hex(const char *dir, const char *name)
{
    char path[PATH_MAX], text[32] = "";
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    if (!fgets(text, sizeof(text), file))
        text[0] = '\0';
    fclose(file);
    return (unsigned)strtoul(text, NULL, 16);
}

static int by_address(const void *a, const void *b)
{
    return strcmp(((const struct function *)a)->address, ((const struct function *)b)->address);
}

static void take_inventory(struct inventory *inv)
{
    DIR *dir = opendir("/sys/bus/pci/devices");
    inv->functions = calloc(PCI_MOST, sizeof(*inv->functions));
    if (!dir || !inv->functions)
        goto out;
    for (struct dirent *e; (e = readdir(dir)) && inv->count < PCI_MOST;) {
        char link[PATH_MAX], real[PATH_MAX];
        struct function *f = &inv->functions[inv->count];
        snprintf(link, sizeof(link), "/sys/bus/pci/devices/%s", e->d_name);
        if (e->d_name[0] == '.' || !realpath(link, real) || strlen(real) >= sizeof(f->path))
            continue;
        snprintf(f->path, sizeof(f->path), "%s", real);
        snprintf(f->address, sizeof(f->address), "%s", e->d_name);
        f->class = read_hex(real, "class") >> 16;
        f->vendor = read_hex(real, "vendor");
        inv->count++;
    }
    qsort(inv->functions, inv->count, sizeof(*inv->functions), by_address);
    for (uint32_t i = 0; i < inv->count && inv->num_gpus < 64; i++)
        if (inv->functions[i].class == CLASS_DISPLAY && inv->functions[i].vendor == VENDOR_NVIDIA)
            inv->gpus[inv->num_gpus++] = &inv->functions[i];
out:
    if (dir)
        closedir(dir);
}

/* "dddd:bb": everything before the last colon. */
static bool same_bus(const struct function *a, const struct function *b)
{
    size_t n = (size_t)(strrchr(a->address, ':') - a->address);
    return !strncmp(a->address, b->address, n + 1);
}

static int bus_number(const struct function *f)
{
    unsigned domain = 0, bus = 0;
    sscanf(f->address, "%x:%x", &domain, &bus);
    return (int)(domain << 8 | bus);
}

/* The number of bridges that both paths share; more means nearer. */
static int shared_bridges(const struct function *a, const struct function *b)
{
    int shared = 0;
    for (const char *p = a->path, *q = b->path; *p && *p == *q; p++, q++)
        shared += *p == '/';
    return shared;
}

/* Larger is better. Network cards win among equals, then the nearest bus number. */
static int score(const struct function *f, const struct function *gpu)
{
    int value = f->class == CLASS_NETWORK ? 1 : 0;
    if (gpu)
        value += shared_bridges(f, gpu) * 100000 - abs(bus_number(f) - bus_number(gpu)) * 2;
    return value;
}

/* NCCL drops the device and function digits of a NIC's address, so a NIC on a shared bus coincides with the other
 * devices there. Where a machine has only one bus (virtual machines), that is still better than no PCI device, from
 * which NCCL finds no path to a GPU. */
enum strictness { OWN_BUS, OWN_FUNCTION, STRICTNESSES };

static bool eligible(const struct inventory *inv, const struct function *f, enum strictness how)
{
    if (f->taken || f->class == CLASS_DISPLAY || f->class == CLASS_BRIDGE)
        return false;
    if (how == OWN_FUNCTION)
        return true;
    for (uint32_t i = 0; i < inv->num_gpus; i++)
        if (same_bus(f, inv->gpus[i]))
            return false;
    return !f->bus_taken;
}

static struct function *best_for(struct inventory *inv, const struct function *gpu)
{
    struct function *best = NULL;

    for (int how = OWN_BUS; !best && how < STRICTNESSES; how++) {
        for (uint32_t k = 0; k < inv->count; k++) {
            struct function *f = &inv->functions[k];
            if (eligible(inv, f, (enum strictness)how) && (!best || score(f, gpu) > score(best, gpu)))
                best = f;
        }
    }
    return best;
}

void sn_pci_choose(struct sn_pci_slot *slots, uint32_t count)
{
    struct inventory inv = {0};
    take_inventory(&inv);
    for (uint32_t i = 0; i < count; i++) {
        const struct function *gpu = inv.num_gpus ? inv.gpus[(uint64_t)i * inv.num_gpus / count] : NULL;
        struct function *best = best_for(&inv, gpu);

        memset(&slots[i], 0, sizeof(slots[i]));
        if (gpu)
            snprintf(slots[i].near, sizeof(slots[i].near), "%s", gpu->address);
        if (!best)
            continue;
        snprintf(slots[i].path, sizeof(slots[i].path), "%s", best->path);
        best->taken = true;
        for (uint32_t k = 0; k < inv.count; k++)
            if (same_bus(&inv.functions[k], best))
                inv.functions[k].bus_taken = true;
    }
    free(inv.functions);
}
