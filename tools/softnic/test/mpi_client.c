/* SPDX-License-Identifier: Apache-2.0 */
/* What an MPI library does with the NIC: messages of all protocols, a reduction, and one-sided access. Prints "right"
 * from rank 0, or ends with status 1 and the first wrong word. Built with mpicc by programs.py. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define WORDS (1 << 17) /* 512 KiB, a rendezvous in every library */

static int rank, ranks;

static void check(const char *what, int at, uint32_t got, uint32_t want)
{
    if (got == want)
        return;
    fprintf(stderr, "rank %d of %d: %s: word %d is %u, want %u\n", rank, ranks, what, at, got, want);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static uint32_t word(int from, int at)
{
    return (uint32_t)from * 1000003u + (uint32_t)at;
}

/* Each rank sends to the next one. */
static void messages(uint32_t *out, uint32_t *in)
{
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;

    for (int words = 1; words <= WORDS; words *= 4) {
        for (int i = 0; i < words; i++)
            out[i] = word(rank, i + words), in[i] = 0;
        MPI_Sendrecv(out, words, MPI_UINT32_T, next, 7, in, words, MPI_UINT32_T, previous, 7, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
        for (int i = 0; i < words; i++)
            check("message", i, in[i], word(previous, i + words));
    }
}

static void reductions(uint32_t *out, uint32_t *in)
{
    for (int words = 1; words <= WORDS; words *= 8) {
        for (int i = 0; i < words; i++)
            out[i] = word(rank, i);
        MPI_Allreduce(out, in, words, MPI_UINT32_T, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < words; i++) {
            uint32_t want = 0;
            for (int r = 0; r < ranks; r++)
                want += word(r, i);
            check("sum", i, in[i], want);
        }
    }
}

/* Put to the next rank, get it back, and count at rank 0. */
static void windows(uint32_t *out, uint32_t *in)
{
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    uint32_t *memory = calloc(WORDS + 1, sizeof(*memory)), one = 1, before = 0;
    MPI_Win window; /* not MPI_Win_allocate: MPICH would take shared memory */

    if (!memory)
        MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Win_create(memory, (WORDS + 1) * sizeof(*memory), sizeof(*memory), MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    for (int i = 0; i < WORDS; i++)
        out[i] = word(rank, 3 * i), in[i] = 0;
    MPI_Win_fence(0, window);
    MPI_Put(out, WORDS, MPI_UINT32_T, next, 0, WORDS, MPI_UINT32_T, window);
    MPI_Win_fence(0, window);
    for (int i = 0; i < WORDS; i++)
        check("put", i, memory[i], word(previous, 3 * i));
    MPI_Win_fence(0, window);
    MPI_Get(in, WORDS, MPI_UINT32_T, next, 0, WORDS, MPI_UINT32_T, window);
    MPI_Win_fence(0, window);
    for (int i = 0; i < WORDS; i++)
        check("get", i, in[i], out[i]);

    MPI_Win_lock_all(0, window);
    for (int i = 0; i < 100; i++) {
        MPI_Fetch_and_op(&one, &before, MPI_UINT32_T, 0, WORDS, MPI_SUM, window);
        MPI_Win_flush(0, window);
    }
    MPI_Win_unlock_all(window);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        uint32_t count = 0;
        MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
        MPI_Get(&count, 1, MPI_UINT32_T, 0, WORDS, 1, MPI_UINT32_T, window);
        MPI_Win_unlock(0, window);
        check("count", 0, count, 100u * (uint32_t)ranks);
    }
    MPI_Win_free(&window);
    free(memory);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    uint32_t *out = malloc(WORDS * sizeof(*out)), *in = malloc(WORDS * sizeof(*in));
    if (!out || !in)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (int round = 0; round < 3; round++) {
        messages(out, in);
        reductions(out, in);
        windows(out, in);
    }
    if (rank == 0) {
        char library[MPI_MAX_LIBRARY_VERSION_STRING];
        int length;
        MPI_Get_library_version(library, &length);
        printf("right, %d ranks, %.40s\n", ranks, library);
    }
    free(out);
    free(in);
    MPI_Finalize();
    return 0;
}
