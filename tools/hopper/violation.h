/* SPDX-License-Identifier: Apache-2.0 */
/* Saying what a kernel did wrong. */
#ifndef TOOLS_HOPPER_VIOLATION_H
#define TOOLS_HOPPER_VIOLATION_H

#include <stdint.h>
#include <string>

namespace hopper
{

struct cta;
struct fiber;
struct launch;

/* Thrown on the engine's own stack to leave whatever it was doing. */
struct violation_raised {
};

/* Ends everything that runs. On a fiber the text is completed with the kernel, the CTA, the thread and where in the
 * kernel it was. */
[[noreturn]] void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same about another thread's doing, from the engine. */
[[noreturn]] void violation_of(const struct fiber *f, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* "kernel <name> device 0, CTA 3 of cluster 1, thread 37 (warp 1 lane 5)" */
std::string fiber_name(const struct fiber *f);
std::string cta_name(const struct cta *c);
/* Function and line of a code address, innermost first. */
std::string code_place(void *address);
std::string kernel_name(const void *kernel);

/* The engine's half: says it, and ends the process unless the test asked to see it. */
void violation_report(void);

extern bool violation_tolerated, late_writes_forgiven;
/* "" until something went wrong. */
const char *violation_text(void);
void violation_set(const std::string &text);

} // namespace hopper

#endif
