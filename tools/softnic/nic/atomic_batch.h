/* SPDX-License-Identifier: Apache-2.0 */
/* Atomics on device memory that share their copies: the words of all that are ready are read together and changed here
 * in the order of the requests. They are written after everything posted before them. All this is done in the copy
 * queue of their queue pair. The world's locks of the words are held from the read until all is written. */
#ifndef SOFTNIC_ATOMIC_BATCH_H
#define SOFTNIC_ATOMIC_BATCH_H

#include "tools/softnic/nic/queue_pair.h"

/* Is the value known of the word that the atomic at this position names, and has the batch room for it and `before`
 * others? The value must have been read after the atomic was posted: another process may have changed the word before
 * that, and told the poster. */
bool sn_batch_knows(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at, unsigned before);

/* Start reading the words of the atomics in [at, end), from the first up to one that is refused, or whose lock is
 * taken, or that is too many. Other requests in between are not touched. Return false if that cannot be done now; else
 * the first atomic is in the pipeline, and nothing may follow it (sn_batch_waits). */
bool sn_batch_read(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at, uint32_t end);

/* Carry out the atomics among the requests [at, end), whose words are known, and queue the new values. */
void sn_batch_change(struct sn_qp *qp, const struct sn_qp_shm *target, uint32_t at, uint32_t end);

/* True while only sn_batch_done may use the copy queue. */
bool sn_batch_waits(const struct sn_qp *qp);

/* Does a word of the batch lie in this memory? Then it must not be written while the batch is open: the known value
 * would be wrong. */
bool sn_batch_covers(const struct sn_qp *qp, uint32_t proc, const struct sn_span *span);

/* Is this atomic, the oldest in the pipeline, done? ask: as queued_done in device_mem.h. Return 0, SN_EXEC_BUSY,
 * SN_EXEC_WORD_KNOWN (its word is known now, and it can be carried out), or -errno. */
int sn_batch_done(struct sn_qp *qp, const struct sn_wqe *w, bool ask);

/* An atomic has left the pipeline. The last one gives the locks back, unless it continues: it is carried out next. */
void sn_batch_leave(struct sn_qp *qp, bool goes_on);

/* Give the locks back if no atomic is in the pipeline. */
void sn_batch_close(struct sn_qp *qp);

#endif
