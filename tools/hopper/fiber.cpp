/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/fiber.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector>

/* Saves the registers that a callee must keep by the System V ABI. The compiler saves the others around the call. */
#if defined(__x86_64__)
asm(R"(
    .text
    .globl hopper_fiber_switch
    .type hopper_fiber_switch, @function
hopper_fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size hopper_fiber_switch, .-hopper_fiber_switch
)");
#else
#    error "the emulator's context switch is written for x86-64 only"
#endif

namespace hopper
{

enum : uint64_t { CANARY = 0x5ca1ab1e0ddba11ull };
enum : size_t { STACKS_PER_CHUNK = 1024, COLOUR_STEP = 832, HUGE_PAGE = 2 << 20 };

static std::vector<uint8_t *> &pool = *new std::vector<uint8_t *>();

/* Thousands of stacks are used in turn. In huge pages, a switch to a stack seldom misses the TLB. */
static void make_stacks(void)
{
    size_t bytes = STACK_BYTES * STACKS_PER_CHUNK;
    void *mapped =
        mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        fprintf(stderr, "hopper: no memory for stacks\n");
        abort();
    }
    uint8_t *chunk = (uint8_t *)mapped + (-(uintptr_t)mapped & (HUGE_PAGE - 1));
    (void)madvise(chunk, bytes, MADV_HUGEPAGE); /* without, it is only slower */
    for (size_t i = STACKS_PER_CHUNK; i-- > 0;) /* stacks that are taken first lie together */
        pool.push_back(chunk + i * STACK_BYTES);
}

uint8_t *fiber_stack_take(void)
{
    uint8_t *stack;
    if (pool.empty())
        make_stacks();
    stack = pool.back();
    pool.pop_back();
    memcpy(stack, &(const uint64_t &)CANARY, sizeof(uint64_t));
    return stack;
}

void fiber_stack_return(uint8_t *stack)
{
    pool.push_back(stack);
}

bool fiber_stack_intact(const uint8_t *stack)
{
    uint64_t found;
    memcpy(&found, stack, sizeof(found));
    return found == CANARY;
}

void *fiber_prepare(uint8_t *stack, void (*entry)(void))
{
    /* Stacks start at different cache sets, so that fibers do not compete for the same ones. */
    size_t colour = ((uintptr_t)stack / STACK_BYTES * COLOUR_STEP % 4096) & ~(size_t)63;
    uint64_t *top = (uint64_t *)(stack + STACK_BYTES - 64 - colour);
    *--top = 0;                          /* where entry() would return to: unwinders stop here */
    *--top = (uint64_t)(uintptr_t)entry; /* popped by the ret of the first switch */
    for (int i = 0; i < 6; i++)
        *--top = 0;
    return top;
}

} // namespace hopper
