/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/connect/bootstrap.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/util/error.h"

int prs_bootstrap_gather(const struct prs_bootstrap *bootstrap, const void *mine, void *all, size_t bytes,
                         const char *what)
{
    int r = bootstrap->allgather(bootstrap->user, mine, all, bytes);

    if (r > 0) /* an error code of MPI or another library, not an errno */
        return prs_fail(-EIO, "%s: the caller's allgather failed: it returned %d, expected 0 or a negative errno", what,
                        r);
    return r < 0 ? prs_fail(r, "%s: the caller's allgather failed: %s", what, strerror(-r)) : 0;
}

int prs_bootstrap_agree(const struct prs_bootstrap *bootstrap, int result, const char *what)
{
    int32_t mine = result;
    int32_t *all = calloc(bootstrap->world, sizeof(*all));
    int r;

    if (!all)
        return prs_fail(-ENOMEM, "%s: no memory for %u ranks", what, bootstrap->world);
    r = prs_bootstrap_gather(bootstrap, &mine, all, sizeof(mine), what);
    for (uint32_t rank = 0; !r && rank < bootstrap->world; rank++)
        if (all[rank] < 0)
            r = rank == bootstrap->rank
                    ? result
                    : prs_fail(all[rank], "%s: rank %u failed: %s", what, rank, strerror(-all[rank]));
    free(all);
    return r;
}

int prs_bootstrap_team(const struct prs_bootstrap *bootstrap, const struct prs_team_options *options,
                       struct prs_team **out)
{
    struct prs_team_options full = *options;
    struct prs_handle mine;
    struct prs_handle *handles = calloc(bootstrap->world, sizeof(*handles));
    struct prs_team *team = NULL;
    int result, r;

    if (!handles)
        return prs_fail(-ENOMEM, "team: no memory for %u handles", bootstrap->world);
    memset(&mine, 0, sizeof(mine));
    full.listener = NULL;
    result = prs_listen(options->fabric, options->rails, &mine, &full.listener);
    full.handles = handles;
    full.rank = bootstrap->rank;
    full.world = bootstrap->world;
    r = prs_bootstrap_agree(bootstrap, result, "team: listening");
    if (!r) {
        r = prs_bootstrap_gather(bootstrap, &mine, handles, sizeof(mine), "team");
        if (!r)
            r = prs_team_open(&full, &team);
        r = prs_bootstrap_agree(bootstrap, r, "team: opening");
    }
    if (r < 0 && team)
        prs_team_close(team); /* closes the listener too */
    else if (r < 0)
        prs_listener_close(full.listener);
    else
        *out = team;
    free(handles);
    return r;
}
