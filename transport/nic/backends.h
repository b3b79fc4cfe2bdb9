/* SPDX-License-Identifier: Apache-2.0 */
/* The list of all back ends. */
#ifndef TRANSPORT_BACKENDS_H
#define TRANSPORT_BACKENDS_H

#include "transport/nic/nic.h"

/* The back ends that have devices(); NULL after the last. */
extern const struct prs_nic_ops *const prs_backends[];

#endif
