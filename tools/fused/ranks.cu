/* SPDX-License-Identifier: Apache-2.0 */
/* The barrier of the bench's ranks, in memory that they share. It has a name when each rank is a process (torchrun,
 * mpirun or this program started it), and is private when the ranks are threads. */
#include "tools/fused/bench.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/common/rank_processes.h"

enum { MEETING_BYTES = 4096 };

struct bench_meeting {
    uint32_t ready;
    pthread_barrier_t barrier;
    uint8_t slot[PRS_MAX_LOCAL_RANKS][MEETING_BYTES];
};

struct member {
    struct bench_rank rank;
    bench_rank_fn *fn;
    void *user;
    int result;
    pthread_t thread;
};

void bench_meet(struct bench_rank *rank)
{
    pthread_barrier_wait(&rank->meeting->barrier);
}

int bench_allgather(void *user, const void *mine, void *all, size_t bytes)
{
    struct bench_rank *rank = (struct bench_rank *)user;
    struct bench_meeting *m = rank->meeting;
    if (bytes > MEETING_BYTES)
        return -22;
    memcpy(m->slot[rank->rank], mine, bytes);
    pthread_barrier_wait(&m->barrier);
    for (uint32_t r = 0; r < rank->world; r++)
        memcpy((uint8_t *)all + r * bytes, m->slot[r], bytes);
    pthread_barrier_wait(&m->barrier); /* no rank writes its next contribution before all have read this one */
    return 0;
}

struct prs_fused_config bench_config(struct bench_rank *rank, const struct bench_options *o)
{
    struct prs_fused_config c = {};
    c.rank = rank->rank, c.world = rank->world, c.device = rank->device, c.timeout_ms = o->timeout_ms;
    c.allgather = bench_allgather, c.user = rank, c.node = rank->node + 1;
    return c;
}

double bench_max(struct bench_rank *rank, double mine)
{
    double all[PRS_MAX_LOCAL_RANKS], most = mine;
    bench_allgather(rank, &mine, all, sizeof(mine));
    for (uint32_t r = 0; r < rank->world; r++)
        most = all[r] > most ? all[r] : most;
    return most;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double bench_median(double *v, uint32_t count)
{
    qsort(v, count, sizeof(*v), by_value);
    return v[count / 2];
}

static void *run_member(void *arg)
{
    struct member *m = (struct member *)arg;
    cudaError_t e = cudaSetDevice(m->rank.device);
    if (e != cudaSuccess) {
        fprintf(stderr, "perseus-fused-bench: no usable GPU %d for rank %u: %s\n", m->rank.device, m->rank.rank,
                cudaGetErrorString(e));
        bench_quit();
    }
    m->result = m->fn(&m->rank, m->user);
    return NULL;
}

static void init_barrier(struct bench_meeting *m, uint32_t world)
{
    pthread_barrierattr_t attr;
    pthread_barrierattr_init(&attr);
    pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&m->barrier, &attr, world);
    __atomic_store_n(&m->ready, 1, __ATOMIC_RELEASE);
}

static const char *either(const char *a, const char *b)
{
    const char *v = getenv(a);
    return v ? v : getenv(b);
}

/* One rank per process: rank 0 makes the shared memory, the others wait for it. */
static int run_launched(uint32_t rank, uint32_t world, const struct bench_options *o, int device, bench_rank_fn *fn,
                        void *user)
{
    struct member me;
    char name[64];
    const char *port = either("MASTER_PORT", "OMPI_MCA_ess_base_jobid");
    int fd = -1;
    snprintf(name, sizeof(name), "/perseus-fused-bench-%u-%s", (unsigned)getuid(), port ? port : "0");
    if (rank == 0) {
        shm_unlink(name);
        fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
        if (fd < 0 || ftruncate(fd, sizeof(struct bench_meeting)) != 0)
            return -5;
    }
    for (int i = 0; fd < 0 && i < 3000; i++) {
        struct stat st;
        usleep(10000);
        fd = shm_open(name, O_RDWR, 0600);
        if (fd >= 0 && (fstat(fd, &st) != 0 || (size_t)st.st_size < sizeof(struct bench_meeting))) {
            close(fd);
            fd = -1;
        }
    }
    if (fd < 0) {
        fprintf(stderr, "perseus-fused-bench: rank %u waited 30 s for rank 0's shared memory %s\n", rank, name);
        return -110;
    }
    me.rank.meeting =
        (struct bench_meeting *)mmap(NULL, sizeof(struct bench_meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (rank == 0)
        init_barrier(me.rank.meeting, world);
    while (__atomic_load_n(&me.rank.meeting->ready, __ATOMIC_ACQUIRE) == 0)
        usleep(1000);
    me.rank.threads = false;
    me.rank.nodes = o->nodes;
    me.rank.node = rank / (world / o->nodes);
    if (o->nodes > 1) {
        rank_setenv("NCCL_HOSTID", me.rank.node + 1);
        rank_setenv("SOFTNIC_NODE", me.rank.node);
    }
    me.rank.rank = rank, me.rank.world = world, me.rank.device = device, me.fn = fn, me.user = user;
    bench_meet(&me.rank);
    if (rank == 0)
        shm_unlink(name);
    run_member(&me);
    return me.result;
}

struct forked {
    const struct bench_options *o;
    bench_rank_fn *fn;
    void *user;
};

static int be_rank(uint32_t rank, void *user)
{
    const struct forked *f = (const struct forked *)user;
    return run_launched(rank, f->o->world, f->o, f->o->one_device ? 0 : (int)rank, f->fn, f->user) != 0;
}

/* Call it before any call of CUDA, whose state does not survive a fork. */
static int run_forked(const struct bench_options *o, bench_rank_fn *fn, void *user)
{
    struct forked forked = {o, fn, user};
    struct rank_processes ranks = {"perseus-fused-bench", o->world, be_rank};
    ranks.user = &forked;
    ranks.may_die = o->kill_after ? o->world : 0;
    rank_setenv("MASTER_PORT", (uint32_t)getpid()); /* names the shared memory of their barrier */
    return rank_processes_run(&ranks);
}

static int run_threads(const struct bench_options *o, bench_rank_fn *fn, void *user)
{
    struct member *m = (struct member *)calloc(o->world, sizeof(*m));
    struct bench_meeting *meeting = (struct bench_meeting *)calloc(1, sizeof(*meeting));
    int worst = 0;
    init_barrier(meeting, o->world);
    for (uint32_t r = 0; r < o->world; r++) {
        m[r].rank.threads = true;
        m[r].rank.rank = r, m[r].rank.world = o->world, m[r].rank.device = o->one_device ? 0 : (int)r,
        m[r].rank.meeting = meeting, m[r].rank.nodes = 1;
        m[r].fn = fn, m[r].user = user;
        pthread_create(&m[r].thread, NULL, run_member, &m[r]);
    }
    for (uint32_t r = 0; r < o->world; r++) {
        pthread_join(m[r].thread, NULL);
        worst = m[r].result != 0 ? m[r].result : worst;
    }
    free(meeting);
    free(m);
    return worst;
}

int bench_ranks_run(const struct bench_options *o, bench_rank_fn *fn, void *user)
{
    const char *rank = either("RANK", "OMPI_COMM_WORLD_RANK"), *size = either("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE");
    const char *local = either("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK");
    uint32_t world = rank && size && local ? (uint32_t)atoi(size) : 1;
    if ((world > 1 ? world : o->world) % o->nodes != 0) {
        fprintf(stderr, "perseus-fused-bench: --nodes %u: the number of ranks must be a multiple of it\n", o->nodes);
        return 1;
    }
    if (world > 1)
        return run_launched((uint32_t)atoi(rank), world, o, o->one_device ? 0 : atoi(local), fn, user);
    if (o->nodes > 1 || o->kill_after)
        return run_forked(o, fn, user);
    return run_threads(o, fn, user);
}
