/* SPDX-License-Identifier: Apache-2.0 */
/* What a check found, as text and as one JSON object. */
#ifndef HWCHECK_REPORT_H
#define HWCHECK_REPORT_H

#include "tools/hwcheck/trial.h"

enum { POLICIES = 4, RAILS_MAX = 16 };
enum { IN_ORDER, NIC_FENCE, COUNTED, DRAIN };

/* One trial; text is "" when it ran. */
struct attempt {
    bool tried;
    char text[256];
    struct outcome outcome;
};

struct policy_report {
    bool is_chosen; /* by auto */
    struct attempt set, add;
};

struct rail_report {
    char text[256]; /* why nothing could be tried; "" else */
    struct message here, there;
    char chosen[256]; /* policy, and why */
    bool adaptive_routing;
    struct attempt latency, bandwidth, notify;
    struct policy_report policy[POLICIES];
};

struct report {
    const char *host; /* as given */
    char other_version[32];
    uint32_t pairs, rail_count, rails_here, rails_there;
    struct rail_report rail[RAILS_MAX];
};

extern const char *const policy_names[POLICIES];

/* Did every trial run, and did every policy that Perseus would use keep its promise? */
bool report_is_good(const struct report *report);
void report_text(const struct report *report);
void report_json(const struct report *report);

#endif
