/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/hopper/violation.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <execinfo.h>
#include <map>
#include <unistd.h>

#include "tools/hopper/scheduler.h"
#include "tools/hopper/hopper.h"

namespace hopper
{

bool violation_tolerated, late_writes_forgiven;
static std::string &text = *new std::string();
static bool complete; /* set after text, which other OS threads may read then */
static void *trace[32];
static int traced;

/* By addr2line, because dladdr() knows neither inlined nor static functions. Slow, but runs only after a violation. */
static std::string address_lines(void *address, bool function_only)
{
    char command[512], line[512], self_path[256];
    Dl_info info;
    std::string all;
    ssize_t length = readlink("/proc/self/exe", self_path, sizeof(self_path) - 1);
    if (length <= 0 || dladdr(address, &info) == 0)
        return "?";
    self_path[length] = 0;
    snprintf(command, sizeof(command), "addr2line -%sfsCe '%s' %#lx 2>/dev/null", function_only ? "" : "ip", self_path,
             (unsigned long)((char *)address - (char *)info.dli_fbase));
    FILE *f = popen(command, "r");
    if (!f)
        return "?";
    while (fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = 0;
        if (!function_only || all.empty())
            all += (all.empty() ? "" : " ") + std::string(line);
    }
    (void)pclose(f);
    return all.empty() ? "?" : all;
}

std::string code_location(void *address)
{
    static std::map<void *, std::string> known;
    if (!address)
        return "?";
    std::string &location = known[address];
    if (location.empty())
        location = address_lines((char *)address - 1, false);
    return location;
}

std::string kernel_name(const void *kernel)
{
    std::string name = address_lines((void *)(uintptr_t)kernel, true);
    size_t arguments = name.find('(');
    return arguments == std::string::npos || arguments == 0 ? name : name.substr(0, arguments);
}

std::string cta_name(const struct cta *c)
{
    return "kernel " + kernel_name(c->of->kernel) + ", device " + std::to_string(c->of->device) + ", CTA " +
           std::to_string(c->index) + " (rank " + std::to_string(c->rank) + " of its cluster)";
}

std::string fiber_name(const struct fiber *f)
{
    return cta_name(f->block) + ", thread " + std::to_string(f->thread) + " (warp " + std::to_string(f->thread / WARP) +
           " lane " + std::to_string(f->lane) + ")";
}

const char *violation_text(void)
{
    return __atomic_load_n(&complete, __ATOMIC_ACQUIRE) ? text.c_str() : "";
}

void violation_set(const std::string &what)
{
    if (complete)
        return;
    text = what;
    __atomic_store_n(&complete, true, __ATOMIC_RELEASE);
}

/* On the heap: the stack of a thread is small. */
static std::string formatted(const char *format, va_list args)
{
    std::string out(8192, 0);
    vsnprintf(&out[0], out.size(), format, args);
    out.resize(strlen(out.c_str()));
    return out;
}

void violation(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    std::string what = formatted(format, args);
    va_end(args);
    if (!self) {
        violation_set(what);
        throw violation_raised();
    }
    traced = backtrace(trace, 32);
    violation_set(what);
    scheduler_abandon_fiber();
}

void violation_of(const struct fiber *f, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    std::string what = formatted(format, args);
    va_end(args);
    if (self)
        traced = backtrace(trace, 32);
    violation_set(fiber_name(f) + ": " + what);
    if (self)
        scheduler_abandon_fiber();
    throw violation_raised();
}

/* The frames of the trace that are not the emulator's own. */
static std::string where_in_kernel(void)
{
    std::string all;
    for (int i = 0; i < traced; i++) {
        std::string location = code_location(trace[i]);
        if (location.find("hopper::") == std::string::npos && location.find("std::") == std::string::npos)
            all += "\n  at " + location;
    }
    return all;
}

void violation_report(void)
{
    static bool reported;
    if (reported)
        return;
    reported = true;
    text += where_in_kernel() + "\n  HOPPER_SEED=" + std::to_string(hopper_seed()) +
            " HOPPER_SMS=" + std::to_string(hopper_sms());
    fprintf(stderr, "hopper: %s\n", text.c_str());
    if (!violation_tolerated)
        abort();
}

void thread_trap(void)
{
    violation("__trap()");
}

} // namespace hopper

extern "C" const char *hopper_violation(void)
{
    return hopper::violation_text();
}

extern "C" void hopper_forgive_late_writes(void)
{
    hopper::late_writes_forgiven = true;
}

extern "C" void hopper_tolerate(void)
{
    hopper::violation_tolerated = true;
}
