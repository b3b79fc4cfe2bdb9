/* SPDX-License-Identifier: Apache-2.0 */
/* Atomic operations on registered memory that this process can copy: take the world's lock for that word, read, change,
 * write. */
#ifndef SOFTNIC_ATOMIC_H
#define SOFTNIC_ATOMIC_H

#include "tools/softnic/memory/span.h"

/* An operation on 8 aligned bytes. cas: swap if equal to compare_add, else add. */
struct sn_atomic {
    bool cas; /* the caller fills in this and the next three members */
    uint64_t compare_add, swap, *found;
    struct sn_copy *target; /* the word is its dst */
    bool locked, copying, writing;
    uint32_t tries;
    uint64_t value;
    struct sn_copy word; /* between memory here and the target */
};

/* Which of the world's atomic_locks guards a word of that process. Locks are only tried: a thread that holds one never
 * waits for another. */
unsigned sn_atomic_lock_of(uint32_t proc, uint64_t addr);

/* Start, and advance, an operation on memory that this process can copy by itself. Call sn_atomic_step until it does
 * not return SN_COPY_BUSY. */
void sn_atomic_begin(struct sn_atomic *atomic, struct sn_copy *target);
int sn_atomic_step(struct sn_atomic *atomic);

#endif
