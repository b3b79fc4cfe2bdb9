/* SPDX-License-Identifier: Apache-2.0 */
/* What is measured and tried over a link. Both sides call the same trial; every wait has a limit. */
#ifndef HWCHECK_TRIAL_H
#define HWCHECK_TRIAL_H

#include "tools/hwcheck/link.h"

struct outcome {
    double value; /* latency: microseconds, one way, the median; bandwidth: GB/s; else microseconds a pair */
    /* Data that came after its signal; data that never became right, notifications with a wrong size, or adds lost. */
    uint64_t late, wrong;
};

/* Call it before the sides agree to start. */
void trial_prepare(struct link *link);
/* For the side that asked; fills in value. Return 0 or -errno. */
int trial_send(struct link *link, enum trial_kind kind, uint32_t count, struct outcome *outcome);
/* For the other side; fills in late and wrong. */
int trial_receive(struct link *link, enum trial_kind kind, uint32_t count, struct outcome *outcome);

#endif
