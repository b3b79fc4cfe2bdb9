/* SPDX-License-Identifier: Apache-2.0 */
/* softnic-run: make a world of software NICs, run a command in it, clean up. */
#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/softnic/cli/launcher_copier.h"
#include "tools/softnic/cli/launcher_options.h"
#include "tools/softnic/cli/namespaces.h"
#include "tools/softnic/cli/sweep.h"
#include "tools/softnic/cli/sysfs.h"
#include "tools/softnic/world/proc.h"
#include "tools/softnic/world/world.h"

enum { STATUS_FAILED = 125, STATUS_CANNOT_RUN = 126, STATUS_NOT_FOUND = 127, STATUS_SIGNAL = 128 };

struct run {
    struct sn_launcher_options options;
    char path[PATH_MAX]; /* path of the world's file */
    struct sn_world *world;
    bool joined;               /* another process made the world and will remove it */
    bool in_makers_namespaces; /* the child, after it joined */
    char libdir[PATH_MAX];
    pid_t copier; /* 0: none */
};

static bool holds_library(const char *dir)
{
    char path[PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/libibverbs.so.1", dir);
    return access(path, R_OK) == 0;
}

/* The library lies beside this program in a build tree, and below the prefix when installed (even if the whole prefix
 * moved). */
static int find_libdir(char *dir, size_t bytes)
{
    char exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    if (n < 0) {
        int error = errno;

        fprintf(stderr, "softnic-run: /proc/self/exe: %s: is /proc mounted?\n", strerror(error));
        return -error;
    }
    exe[n] = '\0';
    *strrchr(exe, '/') = '\0';
    snprintf(dir, bytes, "%s/lib", exe);
    if (!holds_library(dir))
        snprintf(dir, bytes, "%s/../%s", exe, SN_LIBDIR);
    if (holds_library(dir)) {
        if (!strpbrk(dir, ":;"))
            return 0;
        fprintf(
            stderr,
            "softnic-run: %s: LD_LIBRARY_PATH cannot hold a folder with ':' or ';' in its name: move or rename it\n",
            dir);
        return -EINVAL;
    }
    fprintf(stderr, "softnic-run: no libibverbs.so.1 in %s/lib or %s: is the software NIC built or installed?\n", exe,
            dir);
    return -ENOENT;
}

static void config_from_options(struct sn_config *config, const struct sn_launcher_options *o)
{
    sn_config_default(config);
    config->rate_bps = o->rate_bps.value[0];
    config->latency_ns = o->latency_ns.value[0];
    config->wr_cost_ns = o->wr_cost_ns;
    config->doorbell_cost_ns = o->doorbell_cost_ns;
    config->fence_cost_ns = o->fence_cost_ns;
    config->jitter_ns = o->jitter_ns;
    if (o->retry_cap_ns)
        config->retry_cap_ns = o->retry_cap_ns;
    config->seed = o->seed;
    config->fence_meaning = o->fence_strict ? SN_FENCE_STRICT : SN_FENCE_SPEC;
    config->atomic_cap = o->atomic_cap;
    config->copier = o->copier;
    config->odd_empty = o->odd_empty;
    config->efa = o->efa;
    config->nics = (uint32_t)o->nics;
    config->nodes = (uint32_t)o->nodes;
}

/* Join the world that already has this name. Its creator chose the model. */
static int join_world(struct run *run)
{
    int r = sn_world_open(run->path, &run->world);
    if (r) {
        fprintf(stderr, "softnic-run: cannot join the world %s: %s\n", run->path, sn_world_error(r));
        return r;
    }
    run->joined = true;
    if (run->options.model_given) {
        fprintf(stderr, "softnic-run: world %s exists already, so its NICs and model cannot be chosen here\n",
                run->path);
        return -EEXIST;
    }
    return 0;
}

/* Set the rates, latencies and losses of cables that differ from the configuration. */
static void set_differing_cables(struct sn_world *world, const struct sn_launcher_options *o)
{
    for (uint32_t i = 0; i < world->dev_count; i++) {
        uint32_t nic = i % world->config.nics;

        if (o->rate_bps.value[nic] != world->config.rate_bps)
            sn_world_set_rate(world, i, o->rate_bps.value[nic]);
        if (o->latency_ns.value[nic] != world->config.latency_ns)
            sn_world_set_latency(world, i, o->latency_ns.value[nic]);
        if (o->loss_ppb.value[nic])
            sn_world_set_loss(world, i, (uint32_t)o->loss_ppb.value[nic]);
    }
}

static int make_world(struct run *run)
{
    char id[32];
    struct sn_config config;

    /* Not "softnic.<number>...", because the default worlds of users have such names. */
    snprintf(id, sizeof(id), "run.%d", getpid());
    sn_sweep_path(run->options.name ? run->options.name : id, run->path, sizeof(run->path));
    config_from_options(&config, &run->options);
    if (config.nics * config.nodes > SN_MAX_DEVS) {
        fprintf(stderr, "softnic-run: --nics %u and --nodes %u: more than %d devices in all\n", config.nics,
                config.nodes, SN_MAX_DEVS);
        return -EINVAL;
    }
    int r = sn_world_create(run->path, &config, false, &run->world);
    if (r == -EEXIST && run->options.name)
        return join_world(run);
    if (r)
        fprintf(stderr, "softnic-run: cannot create the world %s: %s\n", run->path, strerror(-r));
    else
        set_differing_cables(run->world, &run->options);
    return r;
}

/* Runs in the child: make its own sysfs, with each NIC on a PCI device. */
static void enter_sysfs(struct run *run)
{
    uint32_t count = run->world->dev_count;
    struct sn_sysfs_nic *nics = calloc(count, sizeof(*nics));
    struct sn_pci_slot *slots = calloc(count, sizeof(*slots));
    char story[512] = "/sys/class/infiniband: out of memory";
    int failed = -ENOMEM;

    if (nics && slots) {
        sn_pci_choose(slots, count);
        for (uint32_t i = 0; i < count; i++) {
            struct sn_dev *dev = &run->world->devs[i];
            snprintf(nics[i].name, sizeof(nics[i].name), "%s", dev->name);
            nics[i].guid = be64toh(dev->guid);
            memcpy(nics[i].gid, dev->gid, sizeof(nics[i].gid));
            nics[i].rate_bps = dev->rate_bps;
            nics[i].efa = dev->efa;
            nics[i].slot = slots[i];
            if (!run->joined)
                snprintf(dev->sysfs_device, sizeof(dev->sysfs_device), "%s", slots[i].path);
        }
        failed = sn_sysfs_enter(nics, count, !run->joined, story, sizeof(story));
    }
    /* Most programs need no sysfs, so a failure stops nothing, but it is always reported. */
    if (failed || !run->options.quiet)
        fprintf(stderr, "softnic-run: %s\n", story);
    free(slots);
    free(nics);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
/* The command may be built with ThreadSanitizer too, and such programs do not start with LD_AUDIT. */
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* Makes CUDA calls of the command that may wait for a kernel wait before they take the driver's lock, which the NIC's
 * copies need (doc/softnic.md, "What a copy may wait for"). Does nothing on a host without a CUDA driver, or with the
 * copier, whose copies need no lock of the command. */
static int set_audit(const struct run *run)
{
    const char *old = getenv("LD_AUDIT");
    void *driver;
    char *audit;

    if (SANITIZED || run->options.plain_cuda || run->world->config.copier)
        return 0;
    driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!driver)
        return 0;
    dlclose(driver);
    if (asprintf(&audit, "%s%s%s/libsoftnic_audit.so", old ? old : "", old && *old ? ":" : "", run->libdir) < 0)
        return -ENOMEM;
    int r = setenv("LD_AUDIT", audit, 1) ? -errno : 0;
    free(audit);
    return r;
}

static int set_environment(const void *arg)
{
    const struct run *run = arg;
    const char *old = getenv("LD_LIBRARY_PATH");
    char *joined;
    if (asprintf(&joined, "%s%s%s", run->libdir, old && *old ? ":" : "", old ? old : "") < 0)
        return -ENOMEM;
    /* Streams share the driver's 8 hardware queues. A stream of the application that waits there for a kernel stops the
     * streams after it, the NIC's copies among them. The kernel may be waiting for just these copies. 32 is the
     * driver's maximum. */
    int r = setenv("LD_LIBRARY_PATH", joined, 1) || setenv(SN_WORLD_ENV, run->path, 1) ||
                    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0)
                ? -errno
                : 0;
    free(joined);
    return r ? r : set_audit(run);
}

/* Runs in the child: enter the namespaces of the command of the world's maker, so that each can reach the other's
 * memory. */
static bool enter_makers_namespaces(struct run *run)
{
    uint32_t pid;
    int r = sn_namespaces_enter(run->world, !run->options.no_sysfs, &pid);

    if (r >= 0) {
        run->in_makers_namespaces = r;
        if (r && !run->options.quiet)
            fprintf(stderr, "softnic-run: in the user%s namespace of pid %u, the command that world %s was made for\n",
                    run->options.no_sysfs ? "" : " and mount", pid, run->path);
        return true;
    }
    if (r == -ESRCH)
        fprintf(stderr, "softnic-run: cannot join the world %s: the command that it was made for has ended\n",
                run->path);
    else
        fprintf(stderr,
                "softnic-run: cannot join the world %s: the namespaces of pid %u, the command that it was made for, "
                "cannot be entered (%s), and without them neither could reach the other's memory\n",
                run->path, pid, strerror(-r));
    return false;
}

static _Noreturn void run_child(struct run *run, pid_t parent, const sigset_t *old_mask)
{
    if (run->joined && !enter_makers_namespaces(run))
        _exit(STATUS_FAILED);
    if (!run->options.no_sysfs && !run->in_makers_namespaces)
        enter_sysfs(run);
    if (!run->joined)
        __atomic_store_n(&run->world->command_pid, (uint32_t)getpid(), __ATOMIC_RELEASE);
    sigprocmask(SIG_SETMASK, old_mask, NULL);
    /* The command must not outlive its world. Set this after the user namespace, whose change of credentials would
     * reset it. */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(STATUS_FAILED);
    if (set_environment(run)) {
        perror("softnic-run: environment");
        _exit(STATUS_FAILED);
    }
    execvp(run->options.command[0], run->options.command);
    fprintf(stderr, "softnic-run: cannot run %s: %s\n", run->options.command[0], strerror(errno));
    _exit(errno == ENOENT ? STATUS_NOT_FOUND : STATUS_CANNOT_RUN);
}

/* Pass signals on until the command ends; return its status as a shell would. */
static int supervise(struct run *run, pid_t child, const sigset_t *mask)
{
    for (;;) {
        siginfo_t info;
        int status, signal = sigwaitinfo(mask, &info);
        if (signal < 0)
            continue;
        /* The terminal sends its signals to the whole foreground group, which includes the command. */
        if (signal != SIGCHLD && info.si_code != SI_KERNEL)
            kill(child, signal);
        if (signal == SIGCHLD && run->copier && waitpid(run->copier, &status, WNOHANG) == run->copier) {
            fprintf(stderr,
                    "softnic-run: the copier, pid %d, has ended (%s %d): device memory is not copied any more\n",
                    run->copier, WIFSIGNALED(status) ? "signal" : "status",
                    WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
            run->copier = 0;
        }
        if (signal != SIGCHLD || waitpid(child, &status, WNOHANG) != child)
            continue;
        return WIFSIGNALED(status) ? STATUS_SIGNAL + WTERMSIG(status) : WEXITSTATUS(status);
    }
}

static int run_command(struct run *run)
{
    static const int passed_on[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT};
    sigset_t mask, old_mask;
    pid_t parent = getpid();

    sigemptyset(&mask);
    for (size_t i = 0; i < sizeof(passed_on) / sizeof(passed_on[0]); i++)
        sigaddset(&mask, passed_on[i]);
    signal(SIGCHLD, SIG_DFL); /* an inherited "ignore" would lose the exit status */
    sigprocmask(SIG_BLOCK, &mask, &old_mask);
    if (run->options.copier) {
        run->copier = sn_launcher_copier_start(run->libdir, set_environment, run);
        if (run->copier < 0)
            return STATUS_FAILED;
    }
    fflush(NULL);
    pid_t child = fork();
    if (child < 0)
        fprintf(stderr, "softnic-run: fork: %s\n", strerror(errno));
    if (!child)
        run_child(run, parent, &old_mask);
    int status = child < 0 ? STATUS_FAILED : supervise(run, child, &mask);
    sn_launcher_copier_stop(run->copier);
    return status;
}

/* Print one value, or one for each NIC of a node if they differ. Print nothing if all are zero. */
static size_t describe_list(const char *name, const double *value, uint32_t count, const char *unit, char *text,
                            size_t bytes)
{
    uint32_t last = count - 1;
    size_t used = 0;

    while (last > 0 && value[last] == value[last - 1])
        last--;
    if (last == 0 && value[0] == 0)
        return 0;
    for (uint32_t i = 0; i <= last && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%s%g%s", i ? "," : " ", i ? "" : name, value[i], unit);
    return used < bytes ? used : bytes - 1;
}

static size_t describe_cables(const struct sn_world *world, char *text, size_t bytes)
{
    double rate[SN_NICS_MOST], latency[SN_NICS_MOST], loss[SN_NICS_MOST];
    uint32_t count = world->config.nics < SN_NICS_MOST ? world->config.nics : SN_NICS_MOST;
    size_t used;

    for (uint32_t i = 0; i < count; i++) {
        rate[i] = (double)world->devs[i].rate_bps / 1e9;
        latency[i] = (double)world->devs[i].latency_ns / 1e3;
        loss[i] = (double)world->devs[i].loss_ppb / 1e7;
    }
    used = describe_list("rate ", rate, count, "G", text, bytes);
    used += describe_list("latency ", latency, count, "us", text + used, bytes - used);
    return used + describe_list("loss ", loss, count, "%", text + used, bytes - used);
}

/* Print the parts of the model that are on, as the options that turn them on. */
static void describe_model(const struct sn_world *world, char *text, size_t bytes)
{
    const struct sn_config *c = &world->config;
    const struct {
        const char *name;
        uint64_t ns;
    } times[] = {{"wr-cost", c->wr_cost_ns},
                 {"doorbell-cost", c->doorbell_cost_ns},
                 {"fence-cost", c->fence_cost_ns},
                 {"jitter", c->jitter_ns}};
    size_t used = (size_t)snprintf(text, bytes, "%s", sn_model_on(c) ? "model" : "model off");
    used += describe_cables(world, text + used, bytes - used);
    for (size_t i = 0; i < sizeof(times) / sizeof(times[0]) && used < bytes; i++)
        if (times[i].ns)
            used += (size_t)snprintf(text + used, bytes - used, " %s %gus", times[i].name, (double)times[i].ns / 1e3);
}

static void print_world(const struct run *run)
{
    const struct sn_config *c = &run->world->config;
    char model[1024];
    describe_model(run->world, model, sizeof(model));
    fprintf(stderr, "softnic-run: world %s%s: nodes %u, NICs of each %u%s, %s\n", run->path,
            run->joined ? " (joined)" : "", c->nodes, c->nics, c->efa ? " (EFA)" : "", model);
}

int main(int argc, char **argv)
{
    static struct run run;
    int r = sn_launcher_options_parse(&run.options, argc, argv);
    if (r > 0)
        return r - 1;
    if (find_libdir(run.libdir, sizeof(run.libdir)))
        return STATUS_FAILED;
    unsigned swept = sn_sweep_all();
    if (swept && !run.options.quiet)
        fprintf(stderr, "softnic-run: removed %u abandoned world%s\n", swept, swept > 1 ? "s" : "");
    if (make_world(&run))
        return STATUS_FAILED;
    if (!run.options.quiet)
        print_world(&run);
    int status = run_command(&run);
    if (!run.joined)
        sn_world_remove(run.world, run.path, true);
    sn_world_close(run.world);
    return status;
}
