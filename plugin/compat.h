/* SPDX-License-Identifier: Apache-2.0 */
/* What older tables need: functions with older signatures, each of which calls the newest. export.c uses them. */
#ifndef PERSEUS_PLUGIN_COMPAT_H
#define PERSEUS_PLUGIN_COMPAT_H

#include "plugin/abi.h"

net_init_v6 compat_init_v6;
net_init_v10 compat_init_v10;
net_properties_v7_fn compat_properties_v7;
net_properties_v8_fn compat_properties_v8;
net_properties_v9_fn compat_properties_v9;
net_properties_v11_fn compat_properties_v11;
net_listen_v6 compat_listen_v6;
net_connect_v7 compat_connect_v7;
net_connect_v10 compat_connect_v10;
net_reg_v6 compat_reg_v6;
net_isend_v9 compat_isend_v9;
net_irecv_v9 compat_irecv_v9;
net_make_vdevice_v9 compat_make_vdevice_v9;

#endif
