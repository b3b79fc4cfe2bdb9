/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/cli/sysfs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

static const char class_dir[] = "/sys/class";
static const char ib_dir[] = "/sys/class/infiniband";
static const char dev_dir[] = "/dev/infiniband";

/* Write one attribute, and make the directories of its path. Failures are remembered in *failed, so that a list of
 * calls needs one check. */
__attribute__((format(printf, 3, 4))) static void put(int *failed, const char *path, const char *format, ...)
{
    char copy[PATH_MAX];
    snprintf(copy, sizeof(copy), "%s", path);
    for (char *p = copy + 1; (p = strchr(p, '/')); *p++ = '/') {
        *p = '\0';
        if (mkdir(copy, 0755) && errno != EEXIST)
            *failed = -errno;
    }
    FILE *file = fopen(path, "we");
    if (!file) {
        *failed = -errno;
        return;
    }
    va_list args;
    va_start(args, format);
    vfprintf(file, format, args);
    va_end(args);
    fputc('\n', file);
    if (fclose(file))
        *failed = -errno;
}

static int write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int r = write(fd, text, strlen(text)) < 0 ? -errno : 0;
    close(fd);
    return r;
}

/* Root makes a mount namespace. Anyone else needs a user namespace around it, with the same user and group inside. */
static int unshare_mounts(bool may_make_user_namespace, bool *user_namespace)
{
    char map[64];
    uid_t uid = geteuid();
    gid_t gid = getegid();
    int r;

    *user_namespace = false;
    if (!unshare(CLONE_NEWNS))
        return 0;
    if (!may_make_user_namespace)
        return -errno;
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
        return -errno;
    *user_namespace = true;
    r = write_text("/proc/self/setgroups", "deny"); /* a condition for writing gid_map without privilege */
    if (r)
        return r;
    snprintf(map, sizeof(map), "%u %u 1", gid, gid);
    r = write_text("/proc/self/gid_map", map);
    if (r)
        return r;
    snprintf(map, sizeof(map), "%u %u 1", uid, uid);
    return write_text("/proc/self/uid_map", map);
}

/* Each attribute takes a page, about 26 for each NIC: 6.6 MB for 64 NICs. This is a limit, not an allocation. */
static int mount_tmpfs(const char *where)
{
    return mount("softnic", where, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=32m") ? -errno : 0;
}

/* No process can make a directory in sysfs. So where the kernel has no infiniband class, a tmpfs replaces all of
 * /sys/class, and every class of the kernel is bind-mounted in it at its old path. Links out of the classes are
 * relative and still resolve. */
static int rebuild_class_dir(void)
{
    char from[PATH_MAX], to[PATH_MAX];
    int old = open(class_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int r = old < 0 ? -errno : mount_tmpfs(class_dir);
    DIR *dir = r ? NULL : fdopendir(old);

    if (!dir) {
        if (!r)
            r = -errno;
        goto close_old;
    }
    for (struct dirent *e; !r && (e = readdir(dir));) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(from, sizeof(from), "/proc/self/fd/%d/%s", old, e->d_name);
        snprintf(to, sizeof(to), "%s/%s", class_dir, e->d_name);
        if (mkdir(to, 0755) || mount(from, to, NULL, MS_BIND | MS_REC, NULL))
            r = -errno;
    }
    if (!r && mkdir(ib_dir, 0755))
        r = -errno;
    if (r)
        umount2(class_dir, MNT_DETACH);
    closedir(dir);
    return r;
close_old:
    if (old >= 0)
        close(old);
    return r;
}

static const char *gid_text(const uint8_t *gid, char *text)
{
    for (int i = 0; i < 8; i++)
        sprintf(text + 5 * i, "%02x%02x%s", gid[2 * i], gid[2 * i + 1], i < 7 ? ":" : "");
    return text;
}

static void put_port(int *failed, const char *dir, const struct sn_sysfs_nic *nic)
{
    const struct {
        const char *name, *value;
    } attributes[] = {
        {"state", "4: ACTIVE"}, {"phys_state", "5: LinkUp"}, {"link_layer", nic->efa ? "Unspecified" : "Ethernet"},
        {"lid", "0x0"},         {"lid_mask_count", "0"},     {"sm_lid", "0x0"},
        {"sm_sl", "0"},         {"cap_mask", "0x00010000"},  {"pkeys/0", "0xffff"},
    };
    char path[PATH_MAX], text[64];
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++) {
        snprintf(path, sizeof(path), "%s/ports/1/%s", dir, attributes[i].name);
        put(failed, path, "%s", attributes[i].value);
    }
    snprintf(path, sizeof(path), "%s/ports/1/rate", dir);
    put(failed, path, "%g Gb/sec (4X)", nic->rate_bps ? (double)nic->rate_bps / 1e9 : 400.0);
    for (int i = 0; i < (nic->efa ? 1 : 2); i++) {
        snprintf(path, sizeof(path), "%s/ports/1/gids/%d", dir, i);
        put(failed, path, "%s", gid_text(nic->gid[i], text));
        snprintf(path, sizeof(path), "%s/ports/1/gid_attrs/types/%d", dir, i);
        put(failed, path, "%s", i ? "RoCE v2" : "IB/RoCE v1"); /* the types that ibv_query_gid_ex returns */
        snprintf(path, sizeof(path), "%s/ports/1/gid_attrs/ndevs/%d", dir, i);
        put(failed, path, "lo");
    }
}

/* Without a "subsystem" link NCCL sees that this is not a PCI device and attaches the NIC to the first CPU. The name
 * still looks like a PCI address, because NVSHMEM and others parse it. */
static void put_virtual_device(int *failed, const char *path, bool efa)
{
    const struct {
        const char *name, *value;
    } attributes[] = {{"vendor", efa ? "0x1d0f" : "0x1af4"},
                      {"device", efa ? "0xefa1" : "0x0000"},
                      {"class", "0x020700"},
                      {"numa_node", "-1"}};
    char file[PATH_MAX];
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++) {
        snprintf(file, sizeof(file), "%s/%s", path, attributes[i].name);
        put(failed, file, "%s", attributes[i].value);
    }
    if (!efa)
        return;
    /* libfabric reads the driver's name. */
    snprintf(file, sizeof(file), "%s/.virtual/drivers/efa/name", ib_dir);
    put(failed, file, "%s", "efa");
    snprintf(file, sizeof(file), "%s/driver", path);
    if (symlink("../drivers/efa", file))
        *failed = -errno;
}

static void put_nic(int *failed, uint32_t index, const struct sn_sysfs_nic *nic)
{
    char dir[PATH_MAX], path[PATH_MAX], device[PATH_MAX], guid[64];
    snprintf(dir, sizeof(dir), "%s/%s", ib_dir, nic->name);
    snprintf(guid, sizeof(guid), "%04x:%04x:%04x:%04x", (unsigned)(nic->guid >> 48),
             (unsigned)(nic->guid >> 32) & 0xffff, (unsigned)(nic->guid >> 16) & 0xffff, (unsigned)nic->guid & 0xffff);
    const struct {
        const char *name, *value;
    } attributes[] = {{"node_type", nic->efa ? "7: unspecified" : "1: CA"},
                      {"node_guid", guid},
                      {"sys_image_guid", guid},
                      {"fw_ver", PRS_VERSION},
                      {"hca_type", "softnic"},
                      {"node_desc", nic->name}};
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, attributes[i].name);
        put(failed, path, "%s", attributes[i].value);
    }
    put_port(failed, dir, nic);
    snprintf(device, sizeof(device), "%s", nic->slot.path);
    if (!device[0]) {
        /* Buses e0 and up are seldom used, and a clash does no harm, since nothing looks the address up. */
        snprintf(device, sizeof(device), "%s/.virtual/%04x:%02x:00.0", ib_dir, index / 32, 0xe0 + index % 32);
        put_virtual_device(failed, device, nic->efa);
    }
    snprintf(path, sizeof(path), "%s/device", dir);
    if (symlink(device, path))
        *failed = -errno;
}

/* libfabric reads the version of the verbs interface, which every machine with RDMA has. */
static void put_abi_version(int *failed)
{
    if (access("/sys/class/infiniband_verbs", F_OK))
        put(failed, "/sys/class/infiniband_verbs/abi_version", "6");
}

/* Keep mounts below /sys from spreading to the rest of the system. In a chroot the root is not a mount point, but /sys
 * is. */
static int keep_to_ourselves(void)
{
    if (!mount("none", "/sys", NULL, MS_REC | MS_PRIVATE, NULL))
        return 0;
    return mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ? -errno : 0;
}

/* UCX uses a device only if its character device is there. Nobody opens it: an empty folder to mount on and /dev/null
 * are enough. Where there is no such folder and none can be made, only UCX finds no device. */
static void put_verbs_devices(uint32_t count)
{
    char path[64];
    int fd;

    if (mkdir(dev_dir, 0755) && errno != EEXIST)
        return;
    if (mount("none", "/dev", NULL, MS_REC | MS_PRIVATE, NULL) && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return;
    if (mount_tmpfs(dev_dir))
        return;
    for (uint32_t i = 0; i < count; i++) {
        snprintf(path, sizeof(path), "%s/uverbs%u", dev_dir, i);
        fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        if (fd >= 0)
            close(fd);
        if (fd < 0 || mount("/dev/null", path, NULL, MS_BIND, NULL))
            return;
    }
}

static int populate(const struct sn_sysfs_nic *nics, uint32_t count)
{
    int r = 0;
    bool had_class = access(ib_dir, F_OK) == 0;
    r = had_class ? mount_tmpfs(ib_dir) : rebuild_class_dir();
    if (r)
        return r;
    for (uint32_t i = 0; i < count; i++)
        put_nic(&r, i, &nics[i]);
    if (!had_class) /* else /sys/class is the kernel's */
        put_abi_version(&r);
    if (r)
        umount2(had_class ? ib_dir : class_dir, MNT_DETACH);
    else
        put_verbs_devices(count);
    return r;
}

int sn_sysfs_enter(const struct sn_sysfs_nic *nics, uint32_t count, bool may_make_user_namespace, char *story,
                   size_t story_len)
{
    static const char means[] =
        "NCCL will attach the NICs to the first CPU, NVSHMEM will not find them; others need no sysfs";
    bool user_namespace;
    uint32_t real = 0;
    int r = unshare_mounts(may_make_user_namespace, &user_namespace);

    if (r) {
        snprintf(story, story_len, "no /sys/class/infiniband: a private mount namespace was refused (%s): %s",
                 strerror(-r), means);
        return r;
    }
    r = keep_to_ourselves();
    if (!r)
        r = populate(nics, count);
    if (r) {
        snprintf(story, story_len, "no /sys/class/infiniband: mounting one in a private namespace failed (%s): %s",
                 strerror(-r), means);
        return r;
    }
    for (uint32_t i = 0; i < count; i++)
        real += nics[i].slot.path[0] != '\0';
    snprintf(story, story_len, "private /sys/class/infiniband (%s namespace): %u of %u NICs on real PCI devices%s",
             user_namespace ? "user and mount" : "mount", real, count,
             count && nics[0].slot.near[0] ? " near the GPUs" : "");
    return 0;
}
