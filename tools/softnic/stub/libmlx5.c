/* SPDX-License-Identifier: Apache-2.0 */
/* libmlx5.so.1 without mlx5: every call answers "not this hardware". The list contains what Debian's perftest is linked
 * against, and what NCCL, NVSHMEM and UCX look up at run time to find out whether a device is mlx5. */
#include <stdbool.h>

#include "tools/softnic/stub/stub.h"

bool mlx5dv_is_supported(void *device);
bool mlx5dv_is_supported(void *device)
{
    (void)device;
    return false;
}

STUB_ERRNO(mlx5dv_query_device)
STUB_ERRNO(mlx5dv_init_obj)
STUB_ERRNO(mlx5dv_set_context_attr)
STUB_PTR(mlx5dv_create_cq)
STUB_PTR(mlx5dv_create_qp)
STUB_PTR(mlx5dv_open_device)
STUB_PTR(mlx5dv_devx_alloc_uar)
STUB_VOID(mlx5dv_devx_free_uar)
STUB_ERRNO(mlx5dv_devx_general_cmd)
STUB_PTR(mlx5dv_devx_obj_create)
STUB_ERRNO(mlx5dv_devx_obj_destroy)
STUB_ERRNO(mlx5dv_devx_obj_modify)
STUB_ERRNO(mlx5dv_devx_obj_query)
STUB_ERRNO(mlx5dv_devx_query_eqn)
STUB_PTR(mlx5dv_devx_umem_reg)
STUB_PTR(mlx5dv_devx_umem_reg_ex)
STUB_ERRNO(mlx5dv_devx_umem_dereg)
STUB_PTR(mlx5dv_create_mkey)
STUB_ERRNO(mlx5dv_destroy_mkey)
STUB_PTR(mlx5dv_qp_ex_from_ibv_qp_ex)
STUB_PTR(mlx5dv_devx_create_event_channel)
STUB_VOID(mlx5dv_devx_destroy_event_channel)
STUB_ERRNO(mlx5dv_devx_subscribe_devx_event)
STUB_ERRNO(mlx5dv_query_qp_lag_port)
STUB_ERRNO(mlx5dv_modify_qp_lag_port)
STUB_ERRNO(mlx5dv_crypto_login)
STUB_PTR(mlx5dv_dek_create)
STUB_ERRNO(mlx5dv_dek_destroy)
STUB_ERRNO(mlx5dv_get_data_direct_sysfs_path)
STUB_PTR(mlx5dv_reg_dmabuf_mr)
