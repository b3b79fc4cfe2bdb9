/* SPDX-License-Identifier: Apache-2.0 */
#include "fused/core/left.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>

#include "fused/core/board.h"

static pthread_mutex_t left_lock = PTHREAD_MUTEX_INITIALIZER; /* protects left_list */
static struct prs_left *left_list;

void prs_left_free(struct prs_left *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        prs_span_drop(&l->memory[i]);
    (void)cudaFreeHost(l->host);
    prs_board_close(l->board);
    free(l);
}

/* Frees memory of this device only, because freeing waits for the kernels of a device, and kernels of another rank may
 * wait for this rank. */
void prs_left_sweep(int device)
{
    struct prs_left *done = NULL;
    pthread_mutex_lock(&left_lock);
    for (struct prs_left **link = &left_list; *link;) {
        struct prs_left *l = *link;
        if (l->device != device || (l->board && !prs_board_all_left(l->board))) {
            link = &l->next;
            continue;
        }
        *link = l->next;
        l->next = done;
        done = l;
    }
    pthread_mutex_unlock(&left_lock);
    while (done) {
        struct prs_left *l = done;
        done = l->next;
        prs_left_free(l);
    }
}

void prs_left_keep(struct prs_left *l)
{
    pthread_mutex_lock(&left_lock);
    l->next = left_list;
    left_list = l;
    pthread_mutex_unlock(&left_lock);
}
