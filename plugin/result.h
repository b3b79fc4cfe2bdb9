/* SPDX-License-Identifier: Apache-2.0 */
/* The transport's -errno in NCCL's words. Whoever detected the error has logged it already. */
#ifndef PERSEUS_PLUGIN_RESULT_H
#define PERSEUS_PLUGIN_RESULT_H

#include "plugin/abi.h"

/* r is -errno; the peer's fault, this machine's or the caller's. Anything else would be a bug of ours. */
net_result result_from_errno(int r);

#endif
