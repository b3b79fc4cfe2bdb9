/* SPDX-License-Identifier: Apache-2.0 */
#include "test/fused/nic.h"

#include <criterion/criterion.h>
#include <sched.h>
#include <string.h>

void nic_post(struct nic *nic, const struct nic_command *command)
{
    pthread_mutex_lock(&nic->lock);
    cr_assert_lt(nic->count, NIC_COMMANDS, "more commands than the model has room for");
    nic->commands[nic->count++] = *command;
    nic->puts += command->words != 0, nic->signals += command->words == 0, nic->words += command->words;
    pthread_mutex_unlock(&nic->lock);
}

static bool may_run(const struct nic *nic, uint32_t i)
{
    for (uint32_t k = 0; nic->commands[i].words == 0 && k < i; k++)
        if (nic->commands[k].words != 0 && nic->commands[k].peer == nic->commands[i].peer &&
            nic->commands[k].group == nic->commands[i].group)
            return false;
    return true;
}

/* One command, taken from anywhere in the queue. It stays there until it is done, as a real one is not complete before.
 */
static void run_one(struct nic *nic)
{
    struct nic_command c;
    uint32_t i;
    pthread_mutex_lock(&nic->lock);
    nic->random = nic->random * 1664525u + 1013904223u;
    i = nic->count == 0 ? 0 : (nic->random >> 8) % nic->count;
    if (nic->count == 0 || !may_run(nic, i)) {
        pthread_mutex_unlock(&nic->lock);
        sched_yield();
        return;
    }
    c = nic->commands[i];
    pthread_mutex_unlock(&nic->lock); /* others only add behind */
    if (c.words != 0)
        memcpy(c.to, c.from, c.words * sizeof(uint32_t));
    else
        watch_raise(c.to, c.value);
    watch_dawdle(&nic->random);
    pthread_mutex_lock(&nic->lock);
    memmove(&nic->commands[i], &nic->commands[i + 1], (--nic->count - i) * sizeof(c));
    pthread_mutex_unlock(&nic->lock);
}

static void *run(void *arg)
{
    struct nic *nic = arg;
    while (watch_load(&nic->stop) == 0)
        run_one(nic);
    return NULL;
}

void nic_open(struct nic *nic, struct watch *watch, uint32_t seed)
{
    nic->watch = watch;
    nic->random = seed;
    pthread_mutex_init(&nic->lock, NULL);
    cr_assert_eq(pthread_create(&nic->thread, NULL, run, nic), 0);
}

void nic_close(struct nic *nic)
{
    watch_raise(&nic->stop, 1);
    pthread_join(nic->thread, NULL);
    pthread_mutex_destroy(&nic->lock);
}

bool nic_quiet(struct nic *nic)
{
    for (;;) {
        bool idle;
        pthread_mutex_lock(&nic->lock);
        idle = nic->count == 0;
        pthread_mutex_unlock(&nic->lock);
        if (idle || watch_load(&nic->watch->failed) != 0)
            return idle;
        sched_yield();
    }
}
