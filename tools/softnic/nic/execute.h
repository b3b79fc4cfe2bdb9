/* SPDX-License-Identifier: Apache-2.0 */
/* Execute one request, on the initiator's side: the checks of a responder, the data, and the target's completion. */
#ifndef SOFTNIC_EXECUTE_H
#define SOFTNIC_EXECUTE_H

#include "tools/softnic/nic/queue_pair.h"

enum {
    SN_EXEC_BUSY = 1,        /* an asynchronous copy is under way: call again */
    SN_EXEC_UNREACHABLE = 2, /* the target did not answer: retry until the timeout */
    SN_EXEC_RNR = 3,         /* the target has no receive posted: retry after its timer */
    SN_EXEC_CROWDED = 5,     /* too many initiators are at the target: call again soon */
    SN_EXEC_UNKNOWN = 6,     /* SRD: the target's NIC knows no such queue pair. 4 is SN_EXEC_WORD_KNOWN (pipeline.h) */
    SN_EXEC_DROPPED = 7,     /* not acknowledged: the target could not take the message, which is counted already */
};

/* Execute w at the target. Return 0 (w->status: the outcome) or one of the above. The caller is the runner. */
int sn_execute(struct sn_qp *qp, struct sn_wqe *w);

/* Execute the due short writes at the head of [first, end) together if they go to another process. Return how many
 * succeeded; execute the others with sn_execute. The caller is the runner. */
unsigned sn_execute_writes(struct sn_qp *qp, uint32_t first, uint32_t end);

/* Copy the result of a read or atomic, which waited for its due time, into local memory. Return 0 or SN_EXEC_BUSY. */
int sn_execute_finish(struct sn_qp *qp, struct sn_wqe *w);

/* The target's RNR timer, in ns. */
uint64_t sn_rnr_ns(uint32_t code);

#endif
