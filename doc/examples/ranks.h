/* SPDX-License-Identifier: Apache-2.0 */
/* What the examples share: ranks, one GPU each, and numbers that every rank can recompute. Ranks are threads of one
 * process or, with -DWITH_MPI, processes that mpirun or srun starts (mpicc -DWITH_MPI ..., mpirun -np 2 ...). */
#ifndef EXAMPLES_RANKS_H
#define EXAMPLES_RANKS_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call, text)                                                                                              \
    do {                                                                                                               \
        int check_result = (int)(call);                                                                                \
        if (check_result != 0) {                                                                                       \
            fprintf(stderr, "%s:%d: %s: %d, %s\n", __FILE__, __LINE__, #call, check_result, text);                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define CHECK_CUDA(call) CHECK(call, cudaGetErrorString(cudaGetLastError()))

enum { RANKS = 2 };

/* ---- ranks ---- */

struct rank {
    uint32_t index;
    int device; /* its GPU */
    void (*body)(struct rank *);
};

#ifdef WITH_MPI
#    include <mpi.h>

/* The allgather that the library asks for: all[r] = what rank r gave. */
static int allgather(void *user, const void *mine, void *all, size_t bytes)
{
    (void)user;
    return MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD) == MPI_SUCCESS ? 0 : -5;
}

static void run_ranks(void (*body)(struct rank *))
{
    struct rank rank = {0};
    int size, index;
    MPI_Comm node;

    CHECK(MPI_Init(NULL, NULL), "MPI_Init");
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &index);
    CHECK(size - RANKS, "run it with 2 ranks: mpirun -np 2");
    rank.index = (uint32_t)index;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &rank.device); /* the first rank of a node takes GPU 0, and so on */
    CHECK_CUDA(cudaSetDevice(rank.device));
    body(&rank);
    MPI_Finalize();
}
#else
static pthread_barrier_t barrier;
static const void *given[RANKS];

/* The allgather that the library asks for: all[r] = what rank r gave. user: its struct rank. */
static int allgather(void *user, const void *mine, void *all, size_t bytes)
{
    given[((struct rank *)user)->index] = mine;
    pthread_barrier_wait(&barrier);
    for (uint32_t r = 0; r < RANKS; r++)
        memcpy((char *)all + r * bytes, given[r], bytes);
    pthread_barrier_wait(&barrier);
    return 0;
}

static void *rank_thread(void *argument)
{
    struct rank *rank = (struct rank *)argument;

    CHECK_CUDA(cudaSetDevice(rank->device));
    rank->body(rank);
    return NULL;
}

static void run_ranks(void (*body)(struct rank *))
{
    struct rank ranks[RANKS];
    pthread_t threads[RANKS];

    pthread_barrier_init(&barrier, NULL, RANKS);
    for (uint32_t r = 0; r < RANKS; r++) {
        ranks[r].index = r;
        ranks[r].device = (int)r;
        ranks[r].body = body;
        CHECK(pthread_create(&threads[r], NULL, rank_thread, &ranks[r]), "no thread");
    }
    for (uint32_t r = 0; r < RANKS; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&barrier);
}
#endif

/* ---- numbers ---- */

/* One of the 65 multiples of 1/32 from -1 to 1, which bf16 holds exactly. key: which matrix. */
static inline float number(uint32_t key, uint64_t at)
{
    uint64_t x = (at + 1) * 0x9e3779b97f4a7c15ull + key * 0xbf58476d1ce4e5b9ull;

    x ^= x >> 31;
    x *= 0x94d049bb133111ebull;
    return (float)((int)((x >> 40) % 65) - 32) / 32;
}

static inline float from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof(value));
    return value;
}

/* Device memory with the first `count` numbers of a key, as bf16. */
static inline void *upload(uint32_t key, uint64_t count)
{
    uint16_t *host = (uint16_t *)malloc(count * 2);
    void *device;

    for (uint64_t i = 0; i < count; i++) {
        float value = number(key, i);
        uint32_t wide;

        memcpy(&wide, &value, sizeof(wide));
        host[i] = (uint16_t)(wide >> 16);
    }
    CHECK_CUDA(cudaMalloc(&device, count * 2));
    CHECK_CUDA(cudaMemcpy(device, host, count * 2, cudaMemcpyHostToDevice));
    free(host);
    return device;
}

/* Host memory with a copy of device memory. */
static inline void *download(const void *device, uint64_t bytes)
{
    void *host = malloc(bytes);

    CHECK_CUDA(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
    return host;
}

/* Ends the program unless the value is right to the last bit of bf16 or so. */
static inline void compare(const char *what, uint32_t rank, uint64_t row, uint64_t column, float have, double want)
{
    if (fabs(have - want) <= fabs(want) / 64 + 0.03)
        return;
    fprintf(stderr, "%s: rank %u, row %llu, column %llu: %g, should be %g\n", what, rank, (unsigned long long)row,
            (unsigned long long)column, have, want);
    exit(1);
}

#endif
