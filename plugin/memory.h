/* SPDX-License-Identifier: Apache-2.0 */
/* Registrations. NCCL's service thread calls these while its progress thread uses others of the same comm. */
#ifndef PERSEUS_PLUGIN_MEMORY_H
#define PERSEUS_PLUGIN_MEMORY_H

#include "plugin/abi.h"

net_result memory_register(void *comm, void *data, size_t size, int type, void **mhandle);
net_result memory_register_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                  void **mhandle);
net_result memory_release(void *comm, void *mhandle);

#endif
