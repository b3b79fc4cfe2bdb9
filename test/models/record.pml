/* SPDX-License-Identifier: Apache-2.0 */
/* A signal record (policy counted; transport/peer/records.c, raise.c) between a NIC that keeps no order, the CPU that
 * counts, and a reader of the signal word, on processors that reorder (see ring.pml).
 *
 * The other side puts two pieces of data and a record that says so, then another record into the same slot once it has
 * credit. Only the bytes of a write precede its own completion.
 * MUTANT takes one rule away:
 *   1  [nic-completion] the CPU reads the record before it has seen the completion
 *   2  [raise] the reader loads the word without acquire
 *   3  [record-credit] the credit may leave before the record has been read
 *   4  the tally: the CPU raises though a put of the group has not arrived
 *
 * That the word is stored with release has no mutant: that store depends on loads of completions, and Arm does no store
 * before the loads that it depends on. C, and the reader's GPU, ask for the release. */
#ifndef MUTANT
#define MUTANT 0
#endif

byte data[2];             /* 1: written */
byte slot;                /* number of the record that is in it; 0: none */
bool come[2], recorded[3]; /* completions */
bool credit;
bool word;                /* the signal */

/* Two writes are under way at once, each its bytes first and then its completion. */
active proctype put_first() { data[0] = 1; come[0] = true }
active proctype put_second() { data[1] = 1; come[1] = true }
active proctype put_records()
{
    slot = 1;
    recorded[1] = true;
    (credit);
    slot = 2;
    recorded[2] = true
}

active proctype cpu()
{
    byte record, done;
    bool early;

    /* what this CPU reads of the slot is what it uses later */
    if
    :: MUTANT == 1 -> atomic { record = slot; early = true }
    :: MUTANT != 1 -> skip
    fi;
    (recorded[1]);
    (MUTANT == 4 || (come[0] && come[1]));
    do
    :: !(done & 1) -> atomic { record = (early -> record : slot); done = done | 1 }
    :: !(done & 2) && done & 1 -> atomic { word = true; done = done | 2 }
    :: !(done & 4) && (MUTANT == 3 || done & 1) -> atomic { credit = true; done = done | 4 }
    :: done == 7 -> break
    od;
    assert(record == 1)
}

active proctype reader()
{
    byte first, second;
    bool early;

    if
    :: MUTANT == 2 -> atomic { first = data[0]; second = data[1]; early = true }
    :: MUTANT != 2 -> skip
    fi;
    (word);
    if
    :: early -> skip
    :: !early -> first = data[0]; second = data[1]
    fi;
    assert(first == 1 && second == 1)
}
