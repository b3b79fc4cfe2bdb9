/* SPDX-License-Identifier: Apache-2.0 */
/* The side that asks: it runs all trials with a host that serves, and prints the report. */
#ifndef HWCHECK_CHECK_H
#define HWCHECK_CHECK_H

#include "tools/hwcheck/control.h"

struct check_options {
    const char *host, *cookie;
    uint32_t pairs;  /* transfers of each trial of order */
    uint32_t queues; /* of a rail at once; 1: not several */
    bool all_pairs, json;
};

/* Return the program's exit status. */
int check(struct prs_fabric *fabric, int control, const struct check_options *options);

#endif
