/* SPDX-License-Identifier: Apache-2.0 */
/* Exported functions that <infiniband/verbs.h> does not declare. */
#ifndef SOFTNIC_SYMBOLS_H
#define SOFTNIC_SYMBOLS_H

#include <infiniband/verbs.h>

int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, unsigned int *type);
const char *ibv_get_sysfs_path(void);
int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size);
int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

#endif
