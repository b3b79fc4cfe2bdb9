/* SPDX-License-Identifier: Apache-2.0 */
/* The cores that this process may keep busy. SOFTNIC_CORES overrides the kernel's count on machines shared with other
 * programs. */
#ifndef SOFTNIC_CORES_H
#define SOFTNIC_CORES_H

#include <stdbool.h>

unsigned sn_cores(void);

/* Are there fewer cores than a program's pollers and the NIC's threads keep busy? */
bool sn_cores_are_few(void);

/* Let another thread have this core; for threads that wait in a loop. Where cores are few this is a short sleep, not a
 * yield: since Linux 6.6 a yield costs the thread a time slice. One thread that computes can then keep threads that
 * yield to each other off the cores for up to 5 s (measured with three threads on two cores). */
void sn_give_way(void);

#endif
