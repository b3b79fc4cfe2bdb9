/* SPDX-License-Identifier: Apache-2.0 */
/* The pipeline of a queue pair: requests whose copies are in its copy queue, completed in order when the copies are
 * done. Only writes to device memory and atomics on it (atomic_batch.h) are pipelined. Any other request waits until
 * the pipeline is empty, and is executed alone (execute.h). */
#ifndef SOFTNIC_PIPELINE_H
#define SOFTNIC_PIPELINE_H

#include "tools/softnic/nic/queue_pair.h"

enum { SN_EXEC_WORD_KNOWN = 4 }; /* continues the values in execute.h */

/* May w be pipelined, as far as its keys tell? For any thread that may read w. */
bool sn_pipeline_suits(const struct sn_wqe *w);

/* Start as many requests up to tail as may follow those in the pipeline. Return whether any started. The caller is the
 * runner. */
bool sn_pipeline_start(struct sn_qp *qp, uint32_t tail);

/* Complete w, the oldest in the pipeline, if its copy is done: w->status is the outcome, the target has its
 * completion, and w has left the pipeline. ask: as queued_done in device_mem.h. Return 0, SN_EXEC_BUSY, SN_EXEC_RNR
 * (done but for a receive: w stays until there is one or w->status says that it failed), or SN_EXEC_WORD_KNOWN (an
 * atomic has left the pipeline because the word that it waited for is known; it can start at once). The caller is the
 * runner. */
int sn_pipeline_retire(struct sn_qp *qp, struct sn_wqe *w, bool ask);

#endif
