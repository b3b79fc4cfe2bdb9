/* SPDX-License-Identifier: Apache-2.0 */
/* Requests in flight: given to a copy engine one behind the other, and completed in that order when they are done. Only
 * writes to device memory and atomics on it (batch.h) are; all else waits until none is in flight, and is executed
 * alone (exec.h). */
#ifndef SOFTNIC_PIPELINE_H
#define SOFTNIC_PIPELINE_H

#include "tools/softnic/nic/queue_pair.h"

enum { SN_EXEC_WORD_KNOWN = 4 }; /* beside SN_EXEC_ */

/** May w go this way, as far as its keys tell? For any thread that may read w. */
bool sn_pipeline_suits(const struct sn_wqe *w);

/** Let as many requests as may follow those in flight, up to tail. Return whether any did. The caller is the runner. */
bool sn_pipeline_start(struct sn_qp *qp, uint32_t tail);

/** Has w, the oldest in flight, landed? Then w->status says how it went, its target knows, and it is in flight no more.
 * ask: as place.h's queued_done. Return 0 or SN_EXEC_BUSY; or SN_EXEC_RNR: it has landed, but for its
 * receive, and is in flight until there is one or w->status says that it has failed; or SN_EXEC_WORD_KNOWN: an atomic is
 * not in flight any more, but the word that it waited for is known, and it can start at once. The caller is the runner.
 */
int sn_pipeline_retire(struct sn_qp *qp, struct sn_wqe *w, bool ask);

#endif
