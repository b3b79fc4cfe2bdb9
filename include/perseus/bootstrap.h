/* SPDX-License-Identifier: Apache-2.0 */
/**
 * How ranks find each other. There is no launcher here: the caller supplies an allgather, over MPI, an ncclComm_t, a
 * store, or whatever started the ranks. */
#ifndef PERSEUS_BOOTSTRAP_H
#define PERSEUS_BOOTSTRAP_H

#include <perseus/perseus.h>
#include <perseus/team.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Collective: each rank contributes `bytes` bytes and receives those of all ranks, in order of rank. Return 0 or
 * -errno; a positive value counts as a failure. It must not block for ever: when a rank has died, it should fail. */
typedef int prs_allgather_fn(void *user, const void *mine, void *all, size_t bytes);

/** How a rank exchanges data with the others; it keeps its meaning in later versions. The calls below run the allgather
 * on the calling thread. */
struct prs_bootstrap {
    prs_allgather_fn *allgather;
    void *user;
    uint32_t rank;
    uint32_t size;
};

/**
 * Collective: exchange results. Return 0 when all ranks gave 0; else this rank's own error, or that of the first rank
 * that failed, with a text that names the rank and `what` it was doing. */
PRS_API int prs_bootstrap_agree(const struct prs_bootstrap *bootstrap, int result, const char *what);

/**
 * Collective: listen, exchange handles and open a team. This function fills in the options' listener, handles, rank and
 * size. Return 0 or -errno; when one rank fails, all do. */
PRS_API int prs_bootstrap_team(const struct prs_bootstrap *bootstrap, const struct prs_team_options *options,
                               struct prs_team **out);

#ifdef __cplusplus
}
#endif
#endif
