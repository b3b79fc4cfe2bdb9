/* SPDX-License-Identifier: Apache-2.0 */
/* Stacks, and switching between them in user space. Nothing here depends on CUDA. */
#ifndef TOOLS_HOPPER_FIBER_H
#define TOOLS_HOPPER_FIBER_H

#include <stddef.h>
#include <stdint.h>

namespace hopper
{

/* The largest frame of a kernel has 9 KB. Unused bytes cost time, too, because a huge page is cleared as a whole. */
enum : size_t { STACK_BYTES = 20 << 10 };

/* A stack from a pool that only grows; fiber_stack_return() gives it back to the pool. */
uint8_t *fiber_stack_take(void);
void fiber_stack_return(uint8_t *stack);
/* False: something has written below the end of this stack. */
bool fiber_stack_intact(const uint8_t *stack);

/* The stack pointer with which the first switch to `stack` calls entry(), which must not return. */
void *fiber_prepare(uint8_t *stack, void (*entry)(void));

/* Saves the running stack in *save and continues where `load` was saved. Returns when *save is loaded. */
extern "C" void hopper_fiber_switch(void **save, void *load);

} // namespace hopper

#endif
