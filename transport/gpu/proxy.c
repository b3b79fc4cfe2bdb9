/* SPDX-License-Identifier: Apache-2.0 */
#include <perseus/proxy.h>

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/connect/team_loss.h"
#include "transport/host/cuda.h"
#include "transport/gpu/dispatch.h"
#include "transport/host/affinity.h"
#include "transport/gpu/ring.h"
#include "transport/gpu/window.h"
#include "transport/util/error.h"
#include "transport/util/log.h"
#include "transport/util/patience.h"
#include "transport/util/thread.h"

enum {
    DEFAULT_SLOTS = 1024,
    CLOSE_MS = 1000,   /* limit for requests in flight at close or after an error: far more than a round trip takes */
    IDLE_SPINS = 2000, /* rounds without work after which the thread yields */
    THREAD_MS = 5000,  /* limit for one round of the thread, which never blocks but may be kept off its core */
    THREAD_NAP_NS = 20000,
    LOOK_NS = 10000000, /* of these times; see prs_patience_begin() */
};

struct prs_proxy {
    struct prs_proxy_options options;
    struct prs_ring ring;
    struct prs_windows windows;
    struct prs_dispatch dispatch;
    struct prs_device device;
    struct prs_ring_local *local; /* in host memory, or in that of the device */
    uint64_t *map; /* [PRS_PROXY_WINDOWS][world], then [PRS_PROXY_WINDOWS] sizes: device->map and device->bytes */
    uint64_t *device_map; /* the device's copy; map itself without CUDA */
    pthread_t thread;
    bool running;
    bool told;                  /* after an error: the other ranks know of a lost one */
    uint64_t tell_until_ns;     /* they are told at this time at the latest; 0: no error yet */
    int ended;                  /* atomic: the thread has left its loop */
    uint32_t dropping;          /* atomic: index of the window that the thread shall drop, plus one; 0: none */
    uint32_t asked;             /* atomic: number of the last prs_proxy_settle() */
    uint32_t answered;          /* atomic: number of the last one that is answered */
    int stop;                   /* atomic: asks the thread to end */
    pthread_mutex_t error_lock; /* held to set the error */
    int error;                  /* atomic: sticky; written after text */
    char text[512];
};

/* ---- errors ---- */

/* From any thread. */
static int set_error(struct prs_proxy *proxy, int error, const char *text)
{
    pthread_mutex_lock(&proxy->error_lock);
    if (__atomic_load_n(&proxy->error, __ATOMIC_RELAXED) == 0) {
        snprintf(proxy->text, sizeof(proxy->text), "%s", text);
        /* [proxy-error] The text is complete before the error is seen. Pairs with prs_proxy_check() and
         * prs_proxy_error(). */
        __atomic_store_n(&proxy->error, error, __ATOMIC_RELEASE);
        /* [proxy-failed] Stored before the ring's error: a thread that reads the error in the ring finds this too.
         * Pairs with the fence in give_up_network(), fused/core/network.cuh. */
        if (proxy->options.failed)
            __atomic_store_n(proxy->options.failed, 1, __ATOMIC_RELEASE);
        prs_ring_abort(&proxy->ring, error);
    }
    pthread_mutex_unlock(&proxy->error_lock);
    return error;
}

/* Make the report of a device that failed, if there is one, the error of the proxy. Return 0 or the error. */
static int take_report(struct prs_proxy *proxy)
{
    const struct prs_ring_control *control = proxy->ring.control;
    struct prs_device_report report;
    char text[384], what[256];
    int error;

    if (!prs_ring_report(&proxy->ring, &report))
        return 0;
    prs_ring_report_text(&report, what, sizeof(what));
    snprintf(text, sizeof(text), "%s; of its commands %" PRIu64 " were taken and %" PRIu64 " finished", what,
             prs_load_relaxed(&control->credit), prs_load_relaxed(&control->done));
    error = report.code == PRS_DEVICE_TIMEOUT ? -ETIMEDOUT : report.code == PRS_DEVICE_ABORTED ? -ECANCELED : -EINVAL;
    return set_error(proxy, prs_fail(error, "rank %u: %s", proxy->device.rank, text), text);
}

int prs_proxy_check(struct prs_proxy *proxy)
{
    int error = __atomic_load_n(&proxy->error, __ATOMIC_ACQUIRE); /* [proxy-error] */

    /* The thread reads the report a round after the device wrote it, perhaps after the kernel has ended. */
    return error ? prs_error_repeat(error, proxy->text) : take_report(proxy);
}

const char *prs_proxy_error(struct prs_proxy *proxy)
{
    return __atomic_load_n(&proxy->error, __ATOMIC_ACQUIRE) ? proxy->text : ""; /* [proxy-error] */
}

/* ---- the loop ---- */

/* After an error: if a rank was lost, the others would wait for what this one does not send any more. */
static void tell_ranks(struct prs_proxy *proxy, bool now)
{
    uint64_t now_ns = prs_now_ns();

    if (proxy->told)
        return;
    if (!proxy->tell_until_ns)
        proxy->tell_until_ns = now_ns + 1000000ull * CLOSE_MS;
    proxy->told =
        prs_team_tell_loss(proxy->options.team, proxy->options.context_id, now || now_ns >= proxy->tell_until_ns) == 0;
}

int prs_proxy_step(struct prs_proxy *proxy)
{
    int r = __atomic_load_n(&proxy->error, __ATOMIC_ACQUIRE); /* [proxy-error] */

    if (r) {
        tell_ranks(proxy, false);
        return prs_error_repeat(r, proxy->text);
    }
    r = prs_dispatch_step(&proxy->dispatch);
    if (r < 0)
        return set_error(proxy, r, prs_error_text());
    if (!r)
        r = take_report(proxy); /* read only when there is nothing else to do */
    return r;
}

/* Drop the window that another thread asked to drop. Between two rounds nothing of it is in use. Commands that name it
 * may still wait; they are refused afterwards. */
static void drop_asked(struct prs_proxy *proxy)
{
    uint32_t asked = __atomic_load_n(&proxy->dropping, __ATOMIC_ACQUIRE); /* [window-drop] the window is whole */

    if (asked) {
        prs_windows_drop(&proxy->windows, asked - 1);
        __atomic_store_n(&proxy->dropping, 0, __ATOMIC_RELEASE); /* [window-dropped] Pairs with await_drop(). */
    }
}

/* Answer prs_proxy_settle(). This too happens between two rounds, because only this thread may use the peers. */
static void settle_asked(struct prs_proxy *proxy)
{
    uint32_t asked = __atomic_load_n(&proxy->asked, __ATOMIC_RELAXED);
    int r;

    if (asked == proxy->answered)
        return;
    r = prs_team_settle(proxy->options.team, proxy->options.context_id);
    if (r < 0)
        set_error(proxy, r, prs_error_text());
    if (r != PRS_AGAIN)
        __atomic_store_n(&proxy->answered, asked, __ATOMIC_RELEASE); /* [proxy-settled] Pairs with settled(). */
}

static void *run(void *argument)
{
    struct prs_proxy *proxy = argument;
    bool at_work = prs_work_begin();
    unsigned idle = 0;

    prs_affinity_set_node(proxy->options.numa_node);
    while (at_work && !prs_exiting() && !__atomic_load_n(&proxy->stop, __ATOMIC_RELAXED)) {
        int r;

        drop_asked(proxy);
        settle_asked(proxy);
        r = prs_proxy_step(proxy);
        if (r < 0 && proxy->told)
            break;
        idle = r > 0 ? 0 : idle + 1;
        if (idle > IDLE_SPINS)
            sched_yield();
    }
    if (at_work)
        prs_work_end();
    __atomic_store_n(&proxy->ended, 1, __ATOMIC_RELEASE); /* [proxy-ended] Pairs with await_drop(), settled(). */
    return NULL;
}

/* ---- life ---- */

/* Give each proxy of this process its own epoch, never 0: it tells commands of a kernel that outlived its proxy. */
static uint32_t next_epoch(void)
{
    static uint32_t last;

    return __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED) % (PRS_CMD_EPOCHS - 1) + 1;
}

static int make_memory(struct prs_proxy *proxy)
{
    int r;

    if (!proxy->options.cuda) {
        proxy->local = calloc(1, sizeof(*proxy->local));
        return proxy->local ? 0 : prs_fail(-ENOMEM, "proxy: no memory for the ring's counters");
    }
    r = prs_cuda_alloc((void **)&proxy->local, sizeof(*proxy->local));
    if (r < 0)
        return r;
    return prs_cuda_map_host(proxy->ring.control, proxy->ring.map_bytes);
}

int prs_proxy_open(const struct prs_proxy_options *options, struct prs_proxy **out)
{
    struct prs_proxy *proxy;
    int r = prs_check_reserved(options, "struct prs_proxy_options");

    if (r)
        return r;
    proxy = calloc(1, sizeof(*proxy));
    if (!proxy)
        return prs_fail(-ENOMEM, "proxy: no memory");
    pthread_mutex_init(&proxy->error_lock, NULL);
    if (prs_team_world(options->team) > PRS_CMD_PEERS) {
        r = prs_fail(-EINVAL, "proxy: a team of %u ranks, and a command can name %u", prs_team_world(options->team),
                     PRS_CMD_PEERS);
        goto free_proxy;
    }
    proxy->options = *options;
    proxy->device.epoch = next_epoch();
    proxy->device.rank = prs_team_rank(options->team);
    proxy->device.world = prs_team_world(options->team);
    proxy->device.timeout_ns = 1000000ull * (options->timeout_ms ? options->timeout_ms : PRS_KERNEL_TIMEOUT_MS);
    r = prs_ring_init(&proxy->ring, options->ring_slots ? options->ring_slots : DEFAULT_SLOTS);
    if (r < 0)
        goto free_proxy;
    r = prs_windows_init(&proxy->windows, proxy->device.world, proxy->device.epoch, PRS_PROXY_WINDOWS);
    if (r < 0)
        goto fini_ring;
    r = prs_dispatch_init(&proxy->dispatch, &proxy->ring, &proxy->windows, options->team, options->context_id);
    if (r < 0)
        goto fini_windows;
    r = make_memory(proxy);
    if (r < 0)
        goto fini_dispatch;
    *out = proxy;
    return 0;

fini_dispatch:
    prs_dispatch_fini(&proxy->dispatch);
    if (proxy->options.cuda)
        prs_cuda_free(proxy->local);
fini_windows:
    prs_windows_fini(&proxy->windows);
fini_ring:
    prs_ring_fini(&proxy->ring);
free_proxy:
    pthread_mutex_destroy(&proxy->error_lock);
    free(proxy);
    return r;
}

/* Fill in a window's part of the tables that the device reads. No kernel may be using it. */
static void map_window(struct prs_proxy *proxy, uint32_t w, const struct prs_window *window)
{
    uint32_t world = proxy->device.world;

    for (uint32_t rank = 0; rank < world; rank++)
        proxy->map[w * world + rank] = window->remotes ? window->remotes[rank].mapped : 0;
    proxy->map[w * world + proxy->device.rank] = window->base;
    proxy->map[PRS_PROXY_WINDOWS * world + w] = window->bytes;
}

static int publish_window(struct prs_proxy *proxy, uint32_t w, const struct prs_window *window)
{
    size_t row = (size_t)w * proxy->device.world, size = (size_t)PRS_PROXY_WINDOWS * proxy->device.world + w;
    int r;

    map_window(proxy, w, window);
    if (proxy->device_map == proxy->map)
        return 0;
    r = prs_cuda_copy(proxy->device_map + row, proxy->map + row, proxy->device.world * sizeof(uint64_t));
    return r < 0 ? r : prs_cuda_copy(proxy->device_map + size, proxy->map + size, sizeof(uint64_t));
}

/* Refuse a window that is mapped where others are not: a store to a mapped signal word would overtake puts that only
 * the NIC carries. */
static int check_mapping(const struct prs_proxy *proxy, const struct prs_window_options *options)
{
    for (uint32_t w = 0; w < proxy->windows.count; w++) {
        const struct prs_window_remote *other = proxy->windows.window[w].remotes;

        for (uint32_t rank = 0; other && rank < proxy->device.world; rank++)
            if (rank != proxy->device.rank && !other[rank].mapped != !options->remotes[rank].mapped)
                return prs_fail(-EINVAL,
                                "proxy of rank %u: of rank %u window %u is %s and the new one is not: a signal in one "
                                "would overtake puts to the other",
                                proxy->device.rank, rank, w, other[rank].mapped ? "mapped" : "the NIC's alone");
    }
    return 0;
}

/* Wait until the thread has dropped the window that it was asked to drop, within a round or two. After -ETIMEDOUT the
 * request stands: the next caller waits for it first. */
static int await_drop(struct prs_proxy *proxy)
{
    struct prs_patience patience = prs_patience_begin(LOOK_NS);
    struct timespec nap = {0, THREAD_NAP_NS};
    uint32_t asked;

    /* [window-dropped], [proxy-ended] The thread no longer uses the window. Pairs with drop_asked() and run(). */
    while ((asked = __atomic_load_n(&proxy->dropping, __ATOMIC_ACQUIRE)) != 0) {
        if (__atomic_load_n(&proxy->ended, __ATOMIC_ACQUIRE)) {
            drop_asked(proxy);
            break;
        }
        if (prs_patience_is_over(&patience, THREAD_MS))
            return prs_fail(-ETIMEDOUT,
                            "proxy of rank %u did not give up window %u within %d ms: is its thread stopped?",
                            proxy->device.rank, asked - 1, THREAD_MS);
        nanosleep(&nap, NULL);
    }
    return 0;
}

int prs_proxy_window(struct prs_proxy *proxy, const struct prs_window_options *options)
{
    int index, r = await_drop(proxy);

    if (!r)
        r = check_mapping(proxy, options);
    if (r < 0)
        return r;
    index = prs_windows_add(&proxy->windows, options);
    if (index < 0 || !proxy->map)
        return index;
    r = publish_window(proxy, (uint32_t)index, &proxy->windows.window[index]);
    if (r < 0)
        prs_windows_drop(&proxy->windows, (uint32_t)index);
    return r < 0 ? r : index;
}

int prs_proxy_window_drop(struct prs_proxy *proxy, uint32_t index)
{
    static const struct prs_window none;
    uint32_t late = __atomic_load_n(&proxy->dropping, __ATOMIC_RELAXED);
    int r = await_drop(proxy);

    if (r < 0 || late == index + 1)
        return r;
    if (index >= proxy->windows.count || !proxy->windows.window[index].remotes)
        return prs_fail(-EINVAL, "proxy of rank %u has no window %u to drop", proxy->device.rank, index);
    /* First for the device, so that no later kernel names the window even if the thread is late. */
    r = proxy->map ? publish_window(proxy, index, &none) : 0;
    if (r < 0)
        return r;
    if (!proxy->running) {
        prs_windows_drop(&proxy->windows, index);
        return 0;
    }
    __atomic_store_n(&proxy->dropping, index + 1, __ATOMIC_RELEASE); /* [window-drop] Pairs with drop_asked(). */
    return await_drop(proxy);
}

/* Is the last prs_proxy_settle() answered? Return 0, PRS_AGAIN or -errno. */
static int settled(struct prs_proxy *proxy)
{
    bool ended = __atomic_load_n(&proxy->ended, __ATOMIC_ACQUIRE); /* [proxy-ended] */

    if (!proxy->running || ended) { /* then no thread answers */
        int r = prs_proxy_step(proxy);

        if (r < 0)
            return r;
        settle_asked(proxy);
    }
    /* [proxy-settled] Pairs with settle_asked(). */
    return __atomic_load_n(&proxy->answered, __ATOMIC_ACQUIRE) == proxy->asked ? prs_proxy_check(proxy) : PRS_AGAIN;
}

int prs_proxy_settle(struct prs_proxy *proxy, uint32_t timeout_ms)
{
    uint64_t give_up_ns = prs_now_ns() + 1000000ull * timeout_ms;
    struct timespec nap = {0, THREAD_NAP_NS};
    int r;

    __atomic_store_n(&proxy->asked, proxy->asked + 1, __ATOMIC_RELAXED);
    while ((r = settled(proxy)) == PRS_AGAIN) {
        if (prs_now_ns() > give_up_ns)
            return prs_fail(-ETIMEDOUT,
                            "proxy of rank %u: its peers did not take all that it has sent within %u ms: has one of "
                            "them stopped?",
                            proxy->device.rank, timeout_ms);
        nanosleep(&nap, NULL);
    }
    return r;
}

/* Make the tables that the device reads, with room for later windows: where each window is mapped, and its size. */
static int make_map(struct prs_proxy *proxy)
{
    uint32_t world = proxy->device.world;
    size_t words = (size_t)PRS_PROXY_WINDOWS * (world + 1);
    int r;

    proxy->map = calloc(words, sizeof(uint64_t));
    if (!proxy->map)
        return prs_fail(-ENOMEM, "proxy: no memory for %d windows of %u ranks", PRS_PROXY_WINDOWS, world);
    for (uint32_t w = 0; w < proxy->windows.count; w++)
        map_window(proxy, w, &proxy->windows.window[w]);
    proxy->device_map = proxy->map;
    if (proxy->options.cuda) {
        r = prs_cuda_alloc((void **)&proxy->device_map, words * sizeof(uint64_t));
        if (!r)
            r = prs_cuda_copy(proxy->device_map, proxy->map, words * sizeof(uint64_t));
        if (r < 0)
            return r;
    }
    return 0;
}

int prs_proxy_start(struct prs_proxy *proxy, struct prs_device *out)
{
    struct prs_device *device = &proxy->device;
    int r = make_map(proxy);

    if (r < 0)
        return r;
    device->slots = proxy->ring.slots;
    device->control = proxy->ring.control;
    device->local = proxy->local;
    device->map = proxy->device_map;
    device->bytes = proxy->device_map + (size_t)PRS_PROXY_WINDOWS * device->world;
    device->slot_count = proxy->ring.slot_count;
    device->windows = PRS_PROXY_WINDOWS; /* a window that does not exist has 0 bytes */
    *out = *device;
    if (proxy->options.stepped)
        return 0;
    r = prs_thread_start(&proxy->thread, "prs-proxy", run, proxy);
    if (r)
        return prs_fail(-r, "proxy of rank %u: cannot start its thread: %s", device->rank, strerror(r));
    proxy->running = true;
    return 0;
}

/* Wait until the commands that were taken are complete, for at most CLOSE_MS and only while nothing has failed. Cancel
 * the rest. */
static void end_commands(struct prs_proxy *proxy)
{
    struct prs_patience patience = prs_patience_begin(LOOK_NS);
    int r = __atomic_load_n(&proxy->error, __ATOMIC_RELAXED);

    while (r >= 0 && !prs_dispatch_idle(&proxy->dispatch) && !prs_patience_is_over(&patience, CLOSE_MS)) {
        r = prs_dispatch_finish(&proxy->dispatch);
        if (!r)
            sched_yield();
    }
    prs_dispatch_cancel(&proxy->dispatch);
}

void prs_proxy_close(struct prs_proxy *proxy)
{
    if (!proxy)
        return;
    prs_ring_abort(&proxy->ring, -ECANCELED);
    __atomic_store_n(&proxy->stop, 1, __ATOMIC_RELAXED);
    if (proxy->running)
        pthread_join(proxy->thread, NULL); /* its loop never blocks, so this takes one round at most */
    if (__atomic_load_n(&proxy->error, __ATOMIC_RELAXED))
        tell_ranks(proxy, true);
    end_commands(proxy);
    if (proxy->options.cuda) {
        prs_cuda_unmap_host(proxy->ring.control);
        prs_cuda_free(proxy->local);
        if (proxy->device_map != proxy->map)
            prs_cuda_free(proxy->device_map);
    } else {
        free(proxy->local);
    }
    free(proxy->map);
    prs_dispatch_fini(&proxy->dispatch);
    prs_windows_fini(&proxy->windows);
    prs_ring_fini(&proxy->ring);
    pthread_mutex_destroy(&proxy->error_lock);
    free(proxy);
}

void prs_proxy_stats(const struct prs_proxy *proxy, struct prs_proxy_stats *out)
{
    *out = proxy->dispatch.stats;
}
