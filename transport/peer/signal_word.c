/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/signal_word.h"

#include <errno.h>

#include "transport/peer/fail.h"
#include "transport/peer/peer.h"

int prs_signal_word_use(struct prs_peer *peer, const struct prs_record *record, prs_mr_use_fn *fn, void *arg)
{
    if (prs_mr_cache_use(&peer->link[0]->rail->domain->mrs, record->addr, sizeof(record->value), record->key, fn, arg))
        return 0;
    return prs_peer_fail(peer, -EREMOTEIO,
                         "the peer signals at %#llx with key %#x, which no region here has: the key is wrong or was "
                         "deregistered, or the address is outside its region",
                         (unsigned long long)record->addr, record->key);
}

static void take_key(void *arg, const struct prs_mr *mr)
{
    *(uint64_t *)arg = mr->registered.remote_key;
}

int prs_signal_word_key(struct prs_peer *peer, const struct prs_record *record, uint64_t *key)
{
    return prs_signal_word_use(peer, record, take_key, key);
}
