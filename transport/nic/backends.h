/* SPDX-License-Identifier: Apache-2.0 */
/* The back ends that there are. */
#ifndef TRANSPORT_BACKENDS_H
#define TRANSPORT_BACKENDS_H

#include "transport/nic/nic.h"

/* Those whose devices() finds devices; NULL after the last. */
extern const struct prs_nic_ops *const prs_backends[];

#endif
