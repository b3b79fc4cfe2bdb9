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
    char text[512];
    struct outcome outcome;
};

struct policy_report {
    bool is_chosen; /* by auto */
    struct attempt set, add;
};

/* A rail here and a rail of the other side, connected by one queue or by several. Or all rails of both sides, for which
 * only the chosen policy is tried. */
struct pair_report {
    bool is_of_all;
    uint32_t queues; /* 0: nothing was tried */
    uint32_t rail_here, rail_there;
    char text[512]; /* why nothing could be tried; "" else */
    struct side here, there;
    char chosen[256]; /* policy, and why */
    char path[512];   /* the path of the chosen policy's connection, in words */
    bool adaptive_routing;
    struct attempt latency, bandwidth, notify, empty, beside;
    struct attempt shared; /* by several queues */
    struct policy_report policy[POLICIES];
};

/* Another pair of rails, of which only reachability was checked. */
struct reach {
    uint32_t rail_here, rail_there;
    struct attempt latency;
};

struct report {
    const char *host; /* as given */
    char other_version[32];
    uint32_t count; /* number of transfers in a trial */
    uint32_t rails_here, rails_there;
    uint32_t pairs;
    struct pair_report pair[RAILS_MAX];
    struct pair_report loaded[RAILS_MAX]; /* the same rails, by several queues */
    struct pair_report all;               /* tried if one side has several rails */
    uint32_t reaches;
    struct reach reach[RAILS_MAX * RAILS_MAX];
};

extern const char *const policy_names[POLICIES];

/* Did every trial run, and did every policy that Perseus would use keep its promise? */
bool report_is_good(const struct report *report);
void report_text(const struct report *report);
void report_json(const struct report *report);

#endif
