/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_SOFTNIC_PROCESS_VM_H
#define TEST_SOFTNIC_PROCESS_VM_H

#include <stdbool.h>

/* From now on this process and its children have no process_vm_readv() and process_vm_writev(), as under qemu-user or
 * in a kernel that was built without them. Return false: no filter of system calls can be set. */
bool take_process_vm_away(void);

#endif
