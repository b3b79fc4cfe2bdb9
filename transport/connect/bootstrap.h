/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the caller's allgather (include/perseus/bootstrap.h). */
#ifndef TRANSPORT_BOOTSTRAP_H
#define TRANSPORT_BOOTSTRAP_H

#include <perseus/bootstrap.h>

/* Return 0 or -errno, whatever the allgather returned; the text says what it was for. */
int prs_bootstrap_gather(const struct prs_bootstrap *bootstrap, const void *mine, void *all, size_t bytes,
                         const char *what);

#endif
