/* SPDX-License-Identifier: Apache-2.0 */
/* What softnicctl prints: tables for people, one JSON document for programs. */
#ifndef SOFTNIC_CTL_REPORT_H
#define SOFTNIC_CTL_REPORT_H

#include <stdbool.h>

#include "tools/softnic/world/world.h"

void sn_report_status(const char *path, struct sn_world *world, bool json);
void sn_report_counters(const struct sn_world *world, bool json);
void sn_report_worlds(bool json);

#endif
