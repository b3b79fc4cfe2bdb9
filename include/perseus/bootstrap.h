/* SPDX-License-Identifier: Apache-2.0 */
/**
 * How ranks meet. There is no launcher here: the caller gives an allgather, over MPI, an ncclComm_t, a store, or
 * whatever started the ranks. */
#ifndef PERSEUS_BOOTSTRAP_H
#define PERSEUS_BOOTSTRAP_H

#include <perseus/perseus.h>
#include <perseus/team.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Collective: everyone gives `bytes` bytes, everyone gets those of every rank, in order of rank. Return 0 or -errno;
 * anything above 0 is taken for a failure.
 * Must not block for ever: a rank that died should make it fail. */
typedef int prs_allgather_fn(void *user, const void *mine, void *all, size_t bytes);

struct prs_bootstrap {
    prs_allgather_fn *allgather;
    void *user;
    uint32_t rank;
    uint32_t size;
};

/**
 * Collective: tell everyone how it went. Return 0 when all gave 0; else one's own error, or that of the first rank that
 * failed, with a text that names it and what was being done. */
PRS_API int prs_bootstrap_agree(const struct prs_bootstrap *bootstrap, int result, const char *what);

/**
 * Collective: listen, exchange handles and open a team. The options' listener, handles, rank and size are filled in
 * here. Return 0 or -errno; when one rank fails, all do. */
PRS_API int prs_bootstrap_team(const struct prs_bootstrap *bootstrap, const struct prs_team_options *options,
                               struct prs_team **out);

#ifdef __cplusplus
}
#endif
#endif
