/* SPDX-License-Identifier: Apache-2.0 */
/* The network tables, one for each ABI version. gin_export.c has the other symbols that the plugin exports. */
#include "plugin/compat.h"
#include "plugin/connect.h"
#include "plugin/device.h"
#include "plugin/memory.h"
#include "plugin/request.h"

#define EXPORT __attribute__((visibility("default")))

/* NCCL_NET selects the plugin by this name, before init. */
#define PLUGIN_NAME "Perseus"

extern const struct net_v7 ncclNetPlugin_v7;
extern const struct net_v8 ncclNetPlugin_v8;
extern const struct net_v9 ncclNetPlugin_v9;
extern const struct net_v10 ncclNetPlugin_v10;
extern const struct net_v11 ncclNetPlugin_v11;
extern const struct net_v12 ncclNetPlugin_v12;

/* Members that are the same in all versions. device_mr and consumed stay NULL: they are for plugins that a GPU
 * drives. */
#define SAME_IN_ALL                                                                                                    \
    .name = PLUGIN_NAME, .devices = device_count, .reg_dmabuf = memory_register_dmabuf, .dereg = memory_release,       \
    .iflush = request_iflush, .test = request_test, .close_send = connect_close_send,                                  \
    .close_recv = connect_close_recv, .close_listen = connect_close_listen

EXPORT const struct net_v12 ncclNetPlugin_v12 = {
    SAME_IN_ALL,
    .init = device_init,
    .properties = device_properties,
    .listen = connect_listen,
    .connect = connect_connect,
    .accept = connect_accept,
    .reg = memory_register,
    .isend = request_isend,
    .irecv = request_irecv,
    .make_vdevice = device_make_virtual,
    .finalize = connect_finalize,
    .set_attributes = device_set_attributes,
};

EXPORT const struct net_v11 ncclNetPlugin_v11 = {
    SAME_IN_ALL,
    .init = device_init,
    .properties = compat_properties_v11,
    .listen = connect_listen,
    .connect = connect_connect,
    .accept = connect_accept,
    .reg = memory_register,
    .isend = request_isend,
    .irecv = request_irecv,
    .make_vdevice = compat_make_vdevice_v9,
    .finalize = connect_finalize,
    .set_attributes = device_set_attributes,
};

EXPORT const struct net_v10 ncclNetPlugin_v10 = {
    SAME_IN_ALL,
    .init = compat_init_v10,
    .properties = compat_properties_v9,
    .listen = compat_listen_v6,
    .connect = compat_connect_v10,
    .accept = connect_accept,
    .reg = memory_register,
    .isend = request_isend,
    .irecv = request_irecv,
    .make_vdevice = compat_make_vdevice_v9,
};

EXPORT const struct net_v9 ncclNetPlugin_v9 = {
    SAME_IN_ALL,
    .init = compat_init_v6,
    .properties = compat_properties_v9,
    .listen = compat_listen_v6,
    .connect = compat_connect_v7,
    .accept = connect_accept,
    .reg = memory_register,
    .isend = compat_isend_v9,
    .irecv = compat_irecv_v9,
    .make_vdevice = compat_make_vdevice_v9,
};

EXPORT const struct net_v8 ncclNetPlugin_v8 = {
    SAME_IN_ALL,
    .init = compat_init_v6,
    .properties = compat_properties_v8,
    .listen = compat_listen_v6,
    .connect = compat_connect_v7,
    .accept = connect_accept,
    .reg = memory_register,
    .isend = request_isend_narrow,
    .irecv = request_irecv_narrow,
};

EXPORT const struct net_v7 ncclNetPlugin_v7 = {
    SAME_IN_ALL,
    .init = compat_init_v6,
    .properties = compat_properties_v7,
    .listen = compat_listen_v6,
    .connect = compat_connect_v7,
    .accept = connect_accept,
    .reg = compat_reg_v6,
    .isend = request_isend_narrow,
    .irecv = request_irecv_narrow,
};
