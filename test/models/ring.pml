/* SPDX-License-Identifier: Apache-2.0 */
/* The command ring (include/perseus/device.h, transport/gpu/ring.c) on processors that reorder, as Arm and GPUs do:
 * a thread may do each load and store as soon as no barrier orders it after an earlier one. Memory is one: what one
 * thread has seen, all can see (Arm promises that; PTX through the same barriers). Stores of one thread that nothing
 * orders are done in any order here, and loads too.
 *
 * One slot of two words, each with the lap in its lowest bit; a payload that the command of each position announces.
 * MUTANT takes one rule away:
 *   1  [ring-slot] the writer does not release: the payload may follow the words
 *   2  [ring-slot] the reader does not acquire: it may read the payload before the last word
 *   3  [ring-slot] the reader checks the lap in the last word only
 *   4  [ring-credit] the writer does not wait for credit
 *   5  [ring-credit] the reader does not release: the credit may come before it has read the slot */
#ifndef MUTANT
#define MUTANT 0
#endif
#define LAPS 3

byte word[2];       /* position << 1 | lap; 255: never written */
byte payload[LAPS]; /* of a position; 0: not written yet */
byte credit;        /* positions that may be written again */

#define LAP(position) (1 - (position & 1)) /* of a fresh slot: 1, so that zeros are no command */

active proctype writer()
{
    byte at, done;

    for (at : 0 .. LAPS - 1) {
        if
        :: MUTANT == 4 -> skip
        :: MUTANT != 4 -> (credit >= at)
        fi;
        done = 0;
        do
        :: !(done & 1) -> atomic { payload[at] = at + 1; done = done | 1 }
        :: !(done & 2) && (MUTANT == 1 || done & 1) -> atomic { word[0] = at << 1 | LAP(at); done = done | 2 }
        :: !(done & 4) && (MUTANT == 1 || done & 1) -> atomic { word[1] = at << 1 | LAP(at); done = done | 4 }
        :: done == 7 -> break
        od
    }
}

active proctype reader()
{
    byte at, done, last, first, value;
    bool early;

    for (at : 0 .. LAPS - 1) {
        early = false;
        do
        /* A load that nothing orders may have been done long ago. */
        :: MUTANT == 2 && !early -> atomic { value = payload[at]; early = true }
        :: atomic { (word[1] & 1) == LAP(at) -> last = word[1] };
            if
            :: MUTANT == 3 -> first = word[0]; break
            :: MUTANT != 3 && (word[0] & 1) == LAP(at) -> atomic { first = word[0]; break }
            :: MUTANT != 3 && (word[0] & 1) != LAP(at) -> skip /* again */
            fi
        od;
        if
        :: early -> skip
        :: !early -> value = payload[at]
        fi;
        done = 0;
        do /* with a release all that was read comes first; without it the credit may be seen before */
        :: !(done & 1) && (MUTANT == 5 || done & 2) -> atomic { credit = at + 1; done = done | 1 }
        :: !(done & 2) -> atomic { done = done | 2; first = (MUTANT == 5 -> word[0] : first) }
        :: done == 3 -> break
        od;
        assert(last >> 1 == at && first >> 1 == at); /* both words are of this command */
        assert(value == at + 1)                     /* and what it announces is there */
    }
}
