/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/util/light_lock.h"

#include <criterion/criterion.h>

enum { TURNS = 20000 };

static struct prs_light_lock lock;
static int shared;

static void *try_it(void *got)
{
    *(bool *)got = prs_light_lock_try(&lock);
    if (*(bool *)got)
        prs_light_lock_give(&lock);
    return NULL;
}

/* Whether another thread can have the lock. */
static bool is_free(void)
{
    pthread_t thread;
    bool got = false;

    cr_assert_eq(pthread_create(&thread, NULL, try_it, &got), 0);
    pthread_join(thread, NULL);
    return got;
}

Test(light_lock, its_holder_takes_it_again_and_others_wait_for_the_last_give)
{
    prs_light_lock_take(&lock);
    prs_light_lock_take(&lock);
    cr_assert(prs_light_lock_try(&lock));
    for (int gives = 0; gives < 3; gives++) {
        cr_assert(!is_free(), "free after %d of 3 gives", gives);
        prs_light_lock_give(&lock);
    }
    cr_assert(is_free());
}

static void *count(void *none)
{
    for (int i = 0; i < TURNS; i++) {
        prs_light_lock_take(&lock);
        prs_light_lock_take(&lock);
        shared++;
        prs_light_lock_give(&lock);
        prs_light_lock_give(&lock);
    }
    return none;
}

Test(light_lock, one_thread_at_a_time)
{
    pthread_t thread;

    cr_assert_eq(pthread_create(&thread, NULL, count, NULL), 0);
    count(NULL);
    pthread_join(thread, NULL);
    cr_assert_eq(shared, 2 * TURNS);
}
