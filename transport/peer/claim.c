/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/peer/claim.h"

#include <pthread.h>
#include <unistd.h>

#include "transport/util/fork.h"

static pthread_mutex_t claim_lock = PTHREAD_MUTEX_INITIALIZER; /* protects the list */
static struct prs_claim *claims;
PRS_RENEW_IN_CHILD(claim, claim_lock)

bool prs_claim_take(struct prs_claim *claim, uint64_t word)
{
    struct prs_claim *other;

    claim->owner = getpid();
    pthread_mutex_lock(&claim_lock);
    for (other = claims; other && (other->word != word || other->owner != claim->owner); other = other->next)
        ;
    if (!other) {
        claim->held = true;
        claim->word = word;
        claim->next = claims;
        claims = claim;
    }
    pthread_mutex_unlock(&claim_lock);
    return !other;
}

void prs_claim_drop(struct prs_claim *claim)
{
    struct prs_claim **at = &claims;

    if (!claim->held)
        return;
    pthread_mutex_lock(&claim_lock);
    while (*at && *at != claim)
        at = &(*at)->next;
    if (*at)
        *at = claim->next;
    pthread_mutex_unlock(&claim_lock);
    claim->held = false;
}
