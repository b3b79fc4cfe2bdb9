/* SPDX-License-Identifier: Apache-2.0 */
/* For programs whose tests all have two connected ends: the ends, their addresses, and what opens them. */
#ifndef TEST_SOFTNIC_TWO_ENDS_H
#define TEST_SOFTNIC_TWO_ENDS_H

#include "tools/softnic/test/support.h"

static struct end a, b;
static struct address at, bt;

static inline struct sn_world *start(const struct sn_config *config)
{
    struct sn_world *world = test_world(config);

    pair_open(&a, &b);
    at = end_address(&a);
    bt = end_address(&b);
    return world;
}

/* Two devices; a test sets what it wants modelled. */
static inline struct sn_config model(void)
{
    struct sn_config config;

    sn_config_default(&config);
    config.nics = 2;
    return config;
}

#endif
