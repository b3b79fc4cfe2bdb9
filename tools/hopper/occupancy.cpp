/* SPDX-License-Identifier: Apache-2.0 */
/* How many devices and SMs there are, and which CTAs fit on them. A launch that does not fit waits, as on a GPU:
 * kernels that must run at the same time and do not fit together deadlock here too. */
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <time.h>

#include "tools/hopper/scheduler.h"
#include "tools/hopper/hopper.h"
#include "tools/hopper/launch.h"

namespace hopper
{

enum : uint32_t { DEFAULT_DEVICES = 8, DEFAULT_SMS = 8, MOST_DEVICES = 64 };

struct sm {
    uint32_t ctas, threads, shared;
};

static struct {
    std::once_flag once;
    uint32_t devices, sms;
    uint64_t seed;
} setup;
static std::vector<sm> *sms_of = new std::vector<sm>[MOST_DEVICES]; /* by device; on the scheduler's thread only */
static std::atomic<uint32_t> busy[MOST_DEVICES];

static uint64_t number_from_environment(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable);
    return text && *text != 0 ? strtoull(text, NULL, 0) : otherwise;
}

static void set_up(uint32_t devices, uint32_t sms, uint64_t seed)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    setup.devices = devices == 0 || devices > MOST_DEVICES ? (uint32_t)DEFAULT_DEVICES : devices;
    setup.sms = (uint32_t)number_from_environment("HOPPER_SMS", sms == 0 ? (uint32_t)DEFAULT_SMS : sms);
    setup.seed = number_from_environment("HOPPER_SEED", seed == 0 ? (uint64_t)now.tv_nsec / 1000 + 1 : seed);
}

static uint32_t shared_of(uint32_t bytes)
{
    return (bytes + CTA_RESERVED_BYTES + 127) / 128 * 128;
}

uint32_t device_max_clusters(uint32_t threads, uint32_t shared_bytes, uint32_t cluster)
{
    uint32_t by_threads = SM_THREADS / threads, by_shared = SM_SHARED_BYTES / shared_of(shared_bytes);
    uint32_t each = by_threads < by_shared ? by_threads : by_shared;
    return hopper_sms() * (each < 32 ? each : 32) / cluster;
}

static std::atomic<uint32_t> cluster_limit;

bool sms_reserve(struct launch *l, struct cluster *c)
{
    std::vector<sm> &sms = sms_of[l->device];
    uint32_t threads = l->block.x * l->block.y * l->block.z, shared = shared_of(l->shared_bytes);
    std::vector<uint32_t> chosen;
    uint32_t limit = cluster_limit;
    if (limit != 0 && l->running.size() >= limit)
        return false;
    sms.resize(hopper_sms());
    for (uint32_t i = 0, from = (uint32_t)scheduler_random(); i < sms.size() && chosen.size() < c->ctas.size(); i++) {
        uint32_t at = (uint32_t)((from + i) % sms.size());
        while (chosen.size() < c->ctas.size() && sms[at].threads + threads <= SM_THREADS &&
               sms[at].shared + shared <= SM_SHARED_BYTES) {
            sms[at].threads += threads;
            sms[at].shared += shared;
            chosen.push_back(at);
        }
    }
    for (uint32_t i = 0; i < chosen.size(); i++) {
        if (chosen.size() == c->ctas.size()) {
            c->ctas[i]->sm = (int)chosen[i];
            busy[l->device] += sms[chosen[i]].ctas++ == 0;
            continue;
        }
        sms[chosen[i]].threads -= threads;
        sms[chosen[i]].shared -= shared;
    }
    return chosen.size() == c->ctas.size();
}

void sms_release(struct cta *c)
{
    struct sm *s = &sms_of[c->of->device][(size_t)c->sm];
    s->threads -= (uint32_t)c->threads.size();
    s->shared -= shared_of(c->of->shared_bytes);
    busy[c->of->device] -= --s->ctas == 0;
}

} // namespace hopper

extern "C" uint32_t hopper_busy_sms(int device)
{
    return hopper::busy[device];
}

extern "C" void hopper_setup(uint32_t devices, uint32_t sms, uint64_t seed)
{
    std::call_once(hopper::setup.once, hopper::set_up, devices, sms, seed);
}

extern "C" void hopper_limit_clusters(uint32_t clusters)
{
    hopper::cluster_limit = clusters;
}

extern "C" uint64_t hopper_seed(void)
{
    hopper_setup(0, 0, 0);
    return hopper::setup.seed;
}

extern "C" uint32_t hopper_devices(void)
{
    hopper_setup(0, 0, 0);
    return hopper::setup.devices;
}

extern "C" uint32_t hopper_sms(void)
{
    hopper_setup(0, 0, 0);
    return hopper::setup.sms;
}
