/* SPDX-License-Identifier: Apache-2.0 */
/* The process of a rank dies while kernels run: every other rank must report, within its limit, what it waited for. */
#include "tools/fused/bench.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tools/common/json.h"
#include "transport/util/clock.h"

enum { LAUNCHES_AT_ONCE = 4, LIMITS = 4 /* the report may take so many times timeout_ms */ };

static double now_ms(void)
{
    return (double)prs_clock_ns() * 1e-6;
}

static void report(const struct bench_rank *rank, const struct bench_options *o, const struct prs_fused_error *error,
                   double late_ms)
{
    if (o->json)
        json_print(stdout,
                   "{lost_rank:%u,reported_by:%u,of_rank:%u,flag:%u,want:%u,have:%u,after_ms:%.0f,limit_ms:%u,nodes:%u,"
                   "text:%s,commit:%s}\n",
                   rank->world - 1, rank->rank, error->from_rank, error->flag, error->want, error->seen, late_ms,
                   o->timeout_ms, rank->nodes, error->text, o->commit);
    else
        printf("rank %u, %.0f ms after rank %u died: %s\n", rank->rank, late_ms, rank->world - 1, error->text);
    fflush(stdout);
}

void bench_lose_rank(struct bench_rank *rank, const struct bench_options *o, struct prs_fused *ctx,
                     void (*launch)(void *run), void *run, cudaStream_t stream)
{
    double from = now_ms(), end = from + o->kill_after + (double)o->timeout_ms * LIMITS;
    bench_meet(rank); /* the last barrier: a dead rank never arrives */
    while (now_ms() < end) {
        struct prs_fused_error error;
        cudaError_t e;
        if (rank->rank == rank->world - 1 && now_ms() > from + o->kill_after)
            kill(getpid(), SIGKILL);
        for (int i = 0; i < LAUNCHES_AT_ONCE; i++)
            launch(run);
        e = cudaStreamSynchronize(stream);
        if (prs_fused_poll_error(ctx, &error) != 0) {
            report(rank, o, &error, now_ms() - from - o->kill_after);
            _exit(0); /* plans would have to be closed first, and are not known here */
        }
        if (e != cudaSuccess) {
            fprintf(stderr, "perseus-fused-bench: rank %u: %s, without a report of what it waited for\n", rank->rank,
                    cudaGetErrorString(e));
            _exit(1);
        }
    }
    fprintf(stderr, "perseus-fused-bench: rank %u noticed nothing\n", rank->rank);
    _exit(1);
}
