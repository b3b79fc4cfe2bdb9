/* SPDX-License-Identifier: Apache-2.0 */
/* The signal word that a record names, and the region that it is in. A record has only prs_record_key() of its key, so
 * this side looks up the whole key of its own memory. */
#ifndef TRANSPORT_SIGNAL_WORD_H
#define TRANSPORT_SIGNAL_WORD_H

#include "transport/nic/mr_cache.h"
#include "transport/order/tally.h"

struct prs_peer;

/* Call fn with the registration, on the rail of path 0, that covers the word and has the record's key: it stays until
 * fn returns. Return 0, or -EREMOTEIO (the peer has failed): there is none. */
int prs_signal_word_use(struct prs_peer *peer, const struct prs_record *record, prs_mr_use_fn *fn, void *arg);
/* *key becomes its whole key. Return as above. */
int prs_signal_word_key(struct prs_peer *peer, const struct prs_record *record, uint64_t *key);

#endif
