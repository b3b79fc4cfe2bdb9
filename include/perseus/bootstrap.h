/* SPDX-License-Identifier: Apache-2.0 */
/**
 * How ranks find each other. There is no launcher here: the caller supplies an allgather, over MPI, an ncclComm_t, a
 * store, or whatever started the ranks. */
#ifndef PERSEUS_BOOTSTRAP_H
#define PERSEUS_BOOTSTRAP_H

#include <perseus/common.h>
#include <perseus/perseus.h>
#include <perseus/team.h>

#ifdef __cplusplus
extern "C" {
#endif

/** How a rank exchanges data with the others. Later versions do not change this structure. The calls below run the
 * allgather on the calling thread. */
struct prs_bootstrap {
    prs_allgather_fn *allgather;
    void *user;
    uint32_t rank;
    uint32_t world; /* the number of ranks */
};

/**
 * Collective: exchange results. Return 0 if all ranks passed 0. Otherwise return this rank's own result if it is an
 * error, else that of the first rank that failed; the error text names that rank and `what` it was doing. */
PRS_API int prs_bootstrap_agree(const struct prs_bootstrap *bootstrap, int result, const char *what);

/**
 * Collective: listen, exchange handles and open a team. This function fills in the options' listener, handles, rank and
 * world. Return 0 or -errno; when one rank fails, all do. */
PRS_API int prs_bootstrap_team(const struct prs_bootstrap *bootstrap, const struct prs_team_options *options,
                               struct prs_team **out);

#ifdef __cplusplus
}
#endif
#endif
