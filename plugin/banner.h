/* SPDX-License-Identifier: Apache-2.0 */
/* The one line of the log at start-up that says what was chosen and why. */
#ifndef PERSEUS_PLUGIN_BANNER_H
#define PERSEUS_PLUGIN_BANNER_H

#include <perseus/perseus.h>

void banner_log(const struct prs_fabric *fabric);

#endif
