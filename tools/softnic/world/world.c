/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/world/world.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tools/softnic/world/lock.h"
#include "tools/softnic/world/proc.h"

#define RETRY_CAP_NS 1000000000ull /* one second: longer than a link flap, short enough for a test */

void sn_log(const char *format, ...)
{
    const char *level = getenv("SOFTNIC_LOG");
    char line[512];
    va_list args;
    int n;

    if (level && !strcmp(level, "none"))
        return;
    n = snprintf(line, sizeof(line), "softnic: ");
    va_start(args, format);
    vsnprintf(line + n, sizeof(line) - (size_t)n - 1, format, args);
    va_end(args);
    strcat(line, "\n");
    if (write(STDERR_FILENO, line, strlen(line)) < 0)
        return; /* even stderr fails, so the error cannot be reported */
}

uint64_t sn_now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void sn_config_default(struct sn_config *config)
{
    *config = (struct sn_config){
        .retry_cap_ns = RETRY_CAP_NS, .nics = 1, .nodes = 1, .seed = 1, .atomic_cap = IBV_ATOMIC_HCA};
}

void sn_world_path(char *path, size_t bytes)
{
    const char *named = getenv(SN_WORLD_ENV);

    if (named && *named)
        snprintf(path, bytes, "%s", named);
    else
        snprintf(path, bytes, "/dev/shm/softnic.%u.v%u", (unsigned)getuid(), (unsigned)SN_WORLD_VERSION);
}

/* Two containers may share /dev/shm, yet see each other's processes under other numbers or not at all. */
static uint64_t pid_namespace(void)
{
    struct stat st;

    return stat("/proc/self/ns/pid", &st) == 0 ? st.st_ino : 0;
}

static bool pids_are_ours(const struct sn_world *world)
{
    uint64_t mine = pid_namespace();

    /* Without /proc every other process would look dead. */
    return mine && (!world->pid_ns || mine == world->pid_ns);
}

static _Thread_local char refusal[240]; /* why sn_world_open returned -EPERM or -EPROTO */

static int refuse_owner(const struct stat *st)
{
    if (st->st_uid != geteuid())
        snprintf(
            refusal, sizeof(refusal),
            "it belongs to user %u, mode %03o; only that user may join it, and this is user %u: choose another name",
            (unsigned)st->st_uid, (unsigned)st->st_mode & 0777, (unsigned)geteuid());
    else
        snprintf(refusal, sizeof(refusal), "its mode %03o lets other users open it; a world has mode 600: is it one?",
                 (unsigned)st->st_mode & 0777);
    return -EPERM;
}

static int refuse_version(const struct stat *st, uint32_t version)
{
    snprintf(refusal, sizeof(refusal),
             "not a world of this version (version %u, want %u; size %lld, want %zu); remove it or name another in %s",
             version, (unsigned)SN_WORLD_VERSION, (long long)st->st_size,
             sizeof(struct sn_world) + (size_t)SN_ARENA_BYTES, SN_WORLD_ENV);
    return -EPROTO;
}

const char *sn_world_error(int r)
{
    switch (r) {
    case -EPERM:
    case -EPROTO:
        return refusal;
    case -ELOOP:
        return "it is a symbolic link, which is not followed";
    case -EXDEV:
        return "it is of another process namespace (a container that shares /dev/shm, but not its processes, or /proc "
               "is not mounted?)";
    default:
        return strerror(-r);
    }
}

/* A locally administered GUID and a 10.x address per device: distinct, stable, and recognisable in a dump. */
static void device_init(struct sn_world *world, uint32_t index)
{
    struct sn_dev *dev = &world->devs[index];
    uint8_t guid[8] = {0x02, 0x50, 0x52, 0xff, 0xfe, 0x53, 0x00, (uint8_t)(index + 1)};

    snprintf(dev->name, sizeof(dev->name), world->config.efa ? "efa_%u" : "softnic%u", index);
    dev->efa = world->config.efa;
    dev->atomic_cap = world->config.atomic_cap;
    memcpy(&dev->guid, guid, sizeof(guid));
    dev->lid = index + 1;
    dev->node = index / world->config.nics;
    dev->port_up = 1;
    dev->rate_bps = world->config.rate_bps;
    dev->latency_ns = world->config.latency_ns;
    dev->gid[0][0] = 0xfe;
    dev->gid[0][1] = 0x80;
    memcpy(dev->gid[0] + 8, guid, sizeof(guid));
    dev->gid[1][10] = 0xff;
    dev->gid[1][11] = 0xff;
    dev->gid[1][12] = 10;
    dev->gid[1][13] = (uint8_t)(dev->node + 1);
    dev->gid[1][14] = (uint8_t)(index % world->config.nics);
    dev->gid[1][15] = 1;
}

static void world_init(struct sn_world *world, const struct sn_config *config, bool ephemeral)
{
    struct timespec t;

    world->version = SN_WORLD_VERSION;
    world->ephemeral = ephemeral;
    world->bytes = sizeof(*world) + SN_ARENA_BYTES;
    if (getrandom(&world->id, sizeof(world->id), 0) != sizeof(world->id))
        world->id = sn_now_ns() ^ (uint64_t)getpid() << 32;
    world->creator_pid = (uint32_t)getpid();
    world->creator_start = sn_pid_start(world->creator_pid);
    clock_gettime(CLOCK_REALTIME, &t);
    world->created_ns = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
    world->pid_ns = pid_namespace();
    world->config = *config;
    world->dev_count = config->nics * config->nodes;
    for (uint32_t i = 0; i < world->dev_count; i++)
        device_init(world, i);
    world->wake_next = 1;
    world->arena_off = (sizeof(*world) + 4095) & ~4095ull;
    world->arena_next = world->arena_off;
    world->magic = SN_WORLD_MAGIC;
}

static int world_map(int fd, struct sn_world **out)
{
    size_t bytes = sizeof(struct sn_world) + SN_ARENA_BYTES;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);

    if (p == MAP_FAILED)
        return -errno;
    madvise(p, bytes, MADV_DONTDUMP);
    *out = p;
    return 0;
}

/* Plain words, which initiators read when they stamp a request (model.c). Nothing else depends on when they see
 * them. */
void sn_world_set_rate(struct sn_world *world, uint32_t dev, uint64_t rate_bps)
{
    __atomic_store_n(&world->devs[dev].rate_bps, rate_bps, __ATOMIC_RELAXED);
    __atomic_store_n(&world->config.cables_differ, 1, __ATOMIC_RELAXED);
}

void sn_world_set_latency(struct sn_world *world, uint32_t dev, uint64_t latency_ns)
{
    __atomic_store_n(&world->devs[dev].latency_ns, latency_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&world->config.cables_differ, 1, __ATOMIC_RELAXED);
}

void sn_world_set_loss(struct sn_world *world, uint32_t dev, uint32_t loss_ppb)
{
    __atomic_store_n(&world->devs[dev].loss_ppb, loss_ppb, __ATOMIC_RELAXED);
    __atomic_store_n(&world->config.cables_differ, 1, __ATOMIC_RELAXED);
}

int sn_world_create(const char *path, const struct sn_config *config, bool ephemeral, struct sn_world **out)
{
    char temp[300];
    struct stat st;
    int fd, r;

    if (config->nics == 0 || config->nodes == 0 || (uint64_t)config->nics * config->nodes > SN_MAX_DEVS)
        return -EINVAL;
    /* Create it under another name and then link it into place, so that no process can open an incomplete world. */
    snprintf(temp, sizeof(temp), "%s.new.%d", path, (int)getpid());
    unlink(temp);
    fd = open(temp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno == EEXIST) {
        sn_log("%s is in the way, and is not this user's", temp);
        return -EACCES;
    }
    if (fd < 0)
        return -errno;
    if (fchmod(fd, 0600) < 0 || fstat(fd, &st) < 0) { /* whatever the umask is */
        r = -errno;
        goto remove_temp;
    }
    if (ftruncate(fd, (off_t)(sizeof(struct sn_world) + SN_ARENA_BYTES)) < 0) {
        r = -errno;
        goto remove_temp;
    }
    r = world_map(fd, out);
    if (r < 0)
        goto remove_temp;
    r = sn_world_populate(*out, offsetof(struct sn_world, ctxs), "world");
    if (r < 0) {
        sn_world_close(*out);
        goto remove_temp;
    }
    world_init(*out, config, ephemeral);
    (*out)->file_dev = st.st_dev;
    (*out)->file_ino = st.st_ino;
    if (link(temp, path) < 0) {
        r = -errno;
        sn_world_close(*out);
    }
remove_temp:
    unlink(temp);
    close(fd);
    return r;
}

/* The name of a field that cannot be in a world, or NULL. Everything that processes use to find their way is checked:
 * here what stays as it is, and rings and objects where they are used (sn_ring_at, sn_qp_is_sound). */
static const char *damaged_field(const struct sn_world *world)
{
    const struct sn_config *c = &world->config;

    if (world->bytes != sizeof(*world) + SN_ARENA_BYTES)
        return "bytes";
    if (!c->nics || !c->nodes || (uint64_t)c->nics * c->nodes != world->dev_count || world->dev_count > SN_MAX_DEVS)
        return "number of devices";
    for (uint32_t i = 0; i < world->dev_count; i++)
        if (!memchr(world->devs[i].name, 0, sizeof(world->devs[i].name)) ||
            !memchr(world->devs[i].sysfs_device, 0, sizeof(world->devs[i].sysfs_device)))
            return "name of a device";
    if (world->arena_off != ((sizeof(*world) + 4095) & ~4095ull) || world->arena_next < world->arena_off ||
        world->arena_next > world->bytes || world->arena_next % 4096)
        return "place of the rings";
    if (world->ctx_slots.fresh > SN_MAX_CTXS || world->cq_slots.fresh > SN_MAX_CQS ||
        world->qp_slots.fresh > SN_MAX_QPS || world->srq_slots.fresh > SN_MAX_SRQS ||
        world->mr_slots.fresh > SN_MAX_MRS)
        return "length of a table";
    return NULL;
}

/* Check that a file, which may hold anything, has what programs of this version rely on. */
static int world_check(const struct sn_world *world, const struct stat *st)
{
    const char *damaged;

    if (world->magic != SN_WORLD_MAGIC || world->version != SN_WORLD_VERSION)
        return refuse_version(st, world->magic == SN_WORLD_MAGIC ? world->version : 0);
    damaged = damaged_field(world);
    if (damaged) {
        snprintf(refusal, sizeof(refusal), "it is damaged (%s); remove it", damaged);
        return -EPROTO;
    }
    return pids_are_ours(world) ? 0 : -EXDEV;
}

int sn_world_open(const char *path, struct sn_world **out)
{
    struct stat st;
    int fd, r;

    fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) {
        r = -errno;
        return r == -EACCES && lstat(path, &st) == 0 ? refuse_owner(&st) : r;
    }
    if (fstat(fd, &st) < 0)
        r = -errno;
    /* Anyone may make files in /dev/shm, under the name of any user's world. */
    else if (st.st_uid != geteuid() || st.st_mode & (S_IRWXG | S_IRWXO))
        r = refuse_owner(&st);
    else if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != sizeof(struct sn_world) + SN_ARENA_BYTES)
        r = refuse_version(&st, 0);
    else
        r = world_map(fd, out);
    close(fd);
    if (r)
        return r;
    r = world_check(*out, &st);
    if (r)
        sn_world_close(*out);
    return r;
}

void sn_world_close(struct sn_world *world)
{
    if (world)
        munmap(world, sizeof(*world) + SN_ARENA_BYTES);
}

bool sn_world_remove_locked(struct sn_world *world, const char *path)
{
    struct stat st;

    world->dead = 1;
    return lstat(path, &st) == 0 && st.st_dev == world->file_dev && st.st_ino == world->file_ino && unlink(path) == 0;
}
