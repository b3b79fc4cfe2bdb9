/* SPDX-License-Identifier: Apache-2.0 */
/* Atomics on device memory that share their copies: the words of those that are ready are read together, changed here,
 * in the order of the requests, and written behind what was posted before them, all in the lane of their queue pair.
 * From the read until all is written the world's locks of the words are held. */
#ifndef SOFTNIC_ATOMIC_BATCH_H
#define SOFTNIC_ATOMIC_BATCH_H

#include "tools/softnic/nic/queue_pair.h"

/** Is the value of the word known that the atomic there names? Read after it was posted: somebody may have changed it
 * before, and told whoever posted it. */
bool sn_batch_knows(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at);

/** Have the words of the atomics in [at, end) read, from the first up to one that is refused, or whose lock is taken,
 * or that is too many. Other requests in between stay what they are. Return false if that cannot be done now; else the
 * first is in flight, and nothing may follow it (sn_batch_waits). */
bool sn_batch_read(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at, uint32_t end);

/** Make those of the atomics [at, end) whose words are known, and give the new values to the lane. Return how many are
 * in flight now. */
unsigned sn_batch_change(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at, uint32_t end);

/** True while nothing may be given to the lane but by sn_batch_done. */
bool sn_batch_waits(const struct sn_qp *qp);

/** May memory be written that a word of the batch lies in? Not while it is open: what is known of it would be wrong. */
bool sn_batch_covers(const struct sn_qp *qp, uint32_t proc, const struct sn_span *span);

/** Of an atomic in flight, the oldest: is it done? ask: as place.h's queued_done. Return 0, SN_EXEC_BUSY, SN_EXEC_WORD_KNOWN
 * (its word is known now: it is to be made), or -errno. */
int sn_batch_done(struct sn_qp *qp, const struct sn_wqe *w, bool ask);

/** One atomic less is in flight. The last one gives the locks back, unless it goes on to be made. */
void sn_batch_leave(struct sn_qp *qp, bool goes_on);

/** Give back what is held, if none is in flight. */
void sn_batch_close(struct sn_qp *qp);

#endif
