/* SPDX-License-Identifier: Apache-2.0 */
/* Reports of what a kernel did wrong. */
#ifndef TOOLS_HOPPER_VIOLATION_H
#define TOOLS_HOPPER_VIOLATION_H

#include <stdint.h>
#include <string>

namespace hopper
{

struct cta;
struct fiber;
struct launch;

/* Thrown on the scheduler's own stack, to leave whatever it was doing. */
struct violation_raised {
};

/* Ends everything that runs, with this text. Called by a CUDA thread, it adds the lines of the kernel. */
[[noreturn]] void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* As violation(); the name of f comes before the text. */
[[noreturn]] void violation_of(const struct fiber *f, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* "kernel <name>, device 0, CTA 3 (rank 1 of its cluster), thread 37 (warp 1 lane 5)" */
std::string fiber_name(const struct fiber *f);
std::string cta_name(const struct cta *c);
/* Function and line of a code address, innermost first. */
std::string code_location(void *address);
std::string kernel_name(const void *kernel);

/* Prints the violation, and ends the process unless hopper_tolerate() was called. On the scheduler's own stack. */
void violation_report(void);

extern bool violation_tolerated, late_writes_forgiven;
/* The text of the first violation; "" if there was none. */
const char *violation_text(void);
void violation_set(const std::string &text);

} // namespace hopper

#endif
