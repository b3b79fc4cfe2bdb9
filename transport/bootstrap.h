/* SPDX-License-Identifier: Apache-2.0 */
/* The allgather that a caller gave (include/perseus/bootstrap.h). */
#ifndef TRANSPORT_BOOTSTRAP_H
#define TRANSPORT_BOOTSTRAP_H

#include <perseus/bootstrap.h>

/* Run it. Return 0 or -errno, whatever it returned; the text names what it was for. */
int prs_bootstrap_gather(const struct prs_bootstrap *bootstrap, const void *mine, void *all, size_t bytes,
                         const char *what);

#endif
