/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <string.h>

#include "test/fused/nic.h"

void nic_post(struct nic *nic, const struct nic_command *command)
{
    pthread_mutex_lock(&nic->lock);
    cr_assert_lt(nic->count, NIC_COMMANDS, "more commands than the model has room for");
    nic->commands[nic->count++] = *command;
    __atomic_fetch_add(&nic->watch->under_way, 1, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&nic->changed);
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

/* Takes one command from anywhere in the queue. It stays there until it is done. */
static void run_one(struct nic *nic)
{
    struct nic_command c;
    uint32_t i;
    do {
        nic->random = nic->random * 1664525u + 1013904223u;
        i = (nic->random >> 8) % nic->count;
    } while (!may_run(nic, i)); /* the oldest may */
    c = nic->commands[i];
    pthread_mutex_unlock(&nic->lock); /* other threads only add at the end */
    if (c.words != 0)
        memcpy(c.to, c.from, c.words * sizeof(uint32_t));
    else
        watch_raise(c.to, c.value);
    watch_dawdle(&nic->random);
    pthread_mutex_lock(&nic->lock);
    memmove(&nic->commands[i], &nic->commands[i + 1], (--nic->count - i) * sizeof(c));
    /* Release: pairs with the acquire in watch.c, which checks whether any command is not done. */
    __atomic_fetch_sub(&nic->watch->under_way, 1, __ATOMIC_RELEASE);
    if (nic->count == 0)
        pthread_cond_broadcast(&nic->changed);
}

static void *run(void *arg)
{
    struct nic *nic = arg;
    pthread_mutex_lock(&nic->lock);
    while (!nic->stop)
        if (nic->count != 0)
            run_one(nic);
        else
            pthread_cond_wait(&nic->changed, &nic->lock);
    pthread_mutex_unlock(&nic->lock);
    return NULL;
}

void nic_open(struct nic *nic, struct watch *watch, uint32_t seed)
{
    nic->watch = watch;
    nic->random = seed;
    pthread_mutex_init(&nic->lock, NULL);
    pthread_cond_init(&nic->changed, NULL);
    cr_assert_eq(pthread_create(&nic->thread, NULL, run, nic), 0);
}

void nic_close(struct nic *nic)
{
    pthread_mutex_lock(&nic->lock);
    nic->stop = true;
    pthread_cond_broadcast(&nic->changed);
    pthread_mutex_unlock(&nic->lock);
    pthread_join(nic->thread, NULL);
    pthread_cond_destroy(&nic->changed);
    pthread_mutex_destroy(&nic->lock);
}

/* Wait until the NIC is idle. It runs until it is closed, so this wait ends. */
bool nic_quiet(struct nic *nic)
{
    pthread_mutex_lock(&nic->lock);
    while (nic->count != 0)
        pthread_cond_wait(&nic->changed, &nic->lock);
    pthread_mutex_unlock(&nic->lock);
    return watch_load(&nic->watch->failed) == 0;
}
