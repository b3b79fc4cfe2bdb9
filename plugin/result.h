/* SPDX-License-Identifier: Apache-2.0 */
/* Turns the transport's -errno into NCCL's results. The error was logged where it was detected. */
#ifndef PERSEUS_PLUGIN_RESULT_H
#define PERSEUS_PLUGIN_RESULT_H

#include "plugin/abi.h"

/* r: 0 or -errno. Errors of the peer, of this machine and of the caller have results of their own; others are bugs. */
net_result result_from_errno(int r);

#endif
