/* SPDX-License-Identifier: Apache-2.0 */
/* The cores that this process may keep busy. SOFTNIC_CORES says another number than the kernel's, for who shares his
 * cores with other programs. */
#ifndef SOFTNIC_CORES_H
#define SOFTNIC_CORES_H

#include <stdbool.h>

unsigned sn_cores(void);

/** Whether they are fewer than a program's pollers and the NIC's threads beside them keep busy. */
bool sn_cores_are_few(void);

/** Let another thread have this core, for who waits in a loop. Where cores are few that is a short sleep: Linux takes a
 * time slice from who yields to anybody (since 6.6), and threads that yield to each other for a while are then kept off
 * by the first that computes, for as much as 5 s (measured with three on two cores). */
void sn_give_way(void);

#endif
