/* SPDX-License-Identifier: Apache-2.0 */
/* One request, executed by its initiator: the checks a responder makes, the data, the target's completion. */
#ifndef SOFTNIC_EXECUTE_H
#define SOFTNIC_EXECUTE_H

#include "tools/softnic/nic/queue_pair.h"

enum {
    SN_EXEC_BUSY = 1,        /* an asynchronous copy is under way: call again */
    SN_EXEC_UNREACHABLE = 2, /* nobody answered: retry until the timeout */
    SN_EXEC_RNR = 3,         /* the target has no receive posted: retry after its timer */
    SN_EXEC_CROWDED = 5,     /* others are at the target, as many as may be: call again soon */
    SN_EXEC_UNKNOWN = 6,     /* SRD: the target's NIC knows no such queue pair; beside SN_EXEC_WORD_KNOWN, flight.h */
};

/** Execute w at the target. Return 0 (w->status says how it went) or one of the above. The caller is the runner. */
int sn_execute(struct sn_qp *qp, struct sn_wqe *w);

/** Execute the due short writes at the head of [first, end) together, when they go to another process. Return how
 * many were, all with success; what is left goes through sn_execute. The caller is the runner. */
unsigned sn_execute_writes(struct sn_qp *qp, uint32_t first, uint32_t end);

/** The part of a read or atomic that waited for its due time: bring the result into local memory. 0 or SN_EXEC_BUSY. */
int sn_execute_finish(struct sn_qp *qp, struct sn_wqe *w);

/** The target's RNR timer, in ns. */
uint64_t sn_rnr_ns(uint32_t code);

#endif
