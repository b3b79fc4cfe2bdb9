/* SPDX-License-Identifier: Apache-2.0 */
/* The thread of an opened device that does what the posting thread did not do at once: large transfers, waiting
 * requests, and modelled delays. */
#ifndef SOFTNIC_ENGINE_H
#define SOFTNIC_ENGINE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct sn_qp;

struct sn_engine {
    pthread_mutex_t mutex; /* protects everything here but next_at; taken after qp->mutex */
    pthread_cond_t cond;
    pthread_t thread;
    bool started, stop, realtime;

    /* queue pairs that wait for something */
    struct sn_qp **heap; /* sorted by wake_at, earliest first */
    uint32_t count, room;
    uint32_t heavy;    /* how many queue pairs are not light: only the engine runs these */
    uint64_t next_at;  /* wake_at of the earliest, a hint read without the mutex; UINT64_MAX: none */
    uint64_t last_due; /* wake_at of the queue pair that was pushed last */
    uint64_t copy_at;  /* the same for the last queue pair that waits for a device copy; read without the mutex */
    int poster_cpu;    /* the CPU on which the last queue pair was pushed */

    /* sleeping and spinning */
    bool asleep;
    bool spun;           /* it has spun since it slept */
    uint64_t spin_ns;    /* how long before a due time to stop sleeping */
    uint64_t rest_until; /* while asleep: when it wakes by itself; UINT64_MAX: never */

    /* which thread does short due work: engine.c */
    int trust;                      /* more than 0: threads that poll are trusted to do it */
    uint32_t taken;                 /* light pieces of work so far */
    uint32_t probe_at, probe_every; /* without trust: the piece that is left to pollers next, and the interval */
    uint32_t looks;                 /* without trust: how often a thread has looked at the pipeline */
};

/* realtime: ask for a real-time priority, so that busy programs do not make the model late. */
int sn_engine_init(struct sn_engine *engine, bool realtime);
void sn_engine_fini(struct sn_engine *engine);

/* Push a queue pair, to be run at wake_at (monotonic ns). The caller has set qp->queued under qp->mutex. */
int sn_engine_push(struct sn_engine *engine, struct sn_qp *qp, uint64_t wake_at);

/* Take a queue pair back. True when it was in the heap, false when the thread is running it. */
bool sn_engine_remove(struct sn_engine *engine, struct sn_qp *qp);

/* Do one piece of due work, if there is any: a thread whose poll finds nothing helps instead of waiting to be
 * preempted. */
void sn_engine_help(struct sn_engine *engine);

#endif
