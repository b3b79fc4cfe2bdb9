/* SPDX-License-Identifier: Apache-2.0 */
/* The other exports of libibverbs: fork support (not needed here), sysfs helpers, unsupported calls, and the entry
 * points for provider drivers. So a real libmlx5 or libefa finds every symbol, but no device of its own. */
#include "tools/softnic/verbs/symbols.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "tools/softnic/world/world.h"

int ibv_fork_init(void)
{
    return 0;
}

enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return IBV_FORK_UNNEEDED; /* no page is pinned, so copy-on-write takes no page from the NIC */
}

int ibv_dontfork_range(void *base, size_t size)
{
    return 0;
}

int ibv_dofork_range(void *base, size_t size)
{
    return 0;
}

const char *ibv_get_sysfs_path(void)
{
    return "/sys";
}

int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size)
{
    char path[512];
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "%s/%s", dir, file);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    n = read(fd, buf, size);
    close(fd);
    if (n > 0 && buf[n - 1] == '\n')
        buf[--n] = 0;
    else if (n >= 0 && (size_t)n < size)
        buf[n] = 0;
    return (int)n;
}

/* ibv_query_device says that there are no multicast groups. */
int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
    sn_log("attach_mcast of queue pair %u: the software NIC has no multicast groups", qp->qp_num);
    return EOPNOTSUPP;
}

int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
    return EOPNOTSUPP;
}

/* Providers call these when one of their devices is opened, which never happens here. */
#define REFUSED(name)                                                                                                  \
    int name(void);                                                                                                    \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        sn_log(#name ": not supported: this is the software NIC, it has no kernel driver");                            \
        return EOPNOTSUPP;                                                                                             \
    }

/* Providers call these when they are loaded. */
#define IGNORED(name)                                                                                                  \
    int name(void);                                                                                                    \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return 0;                                                                                                      \
    }

IGNORED(verbs_register_driver_34)
IGNORED(__verbs_log)
IGNORED(ibv_copy_ah_attr_from_kern)
IGNORED(ibv_copy_path_rec_from_kern)
IGNORED(ibv_copy_path_rec_to_kern)
IGNORED(ibv_copy_qp_attr_from_kern)
REFUSED(__ioctl_final_num_attrs)
REFUSED(_verbs_init_and_alloc_context)
REFUSED(execute_ioctl)
REFUSED(ibv_cmd_advise_mr)
REFUSED(ibv_cmd_alloc_dm)
REFUSED(ibv_cmd_alloc_mw)
REFUSED(ibv_cmd_alloc_pd)
REFUSED(ibv_cmd_attach_mcast)
REFUSED(ibv_cmd_close_xrcd)
REFUSED(ibv_cmd_create_ah)
REFUSED(ibv_cmd_create_counters)
REFUSED(ibv_cmd_create_cq)
REFUSED(ibv_cmd_create_cq_ex)
REFUSED(ibv_cmd_create_flow)
REFUSED(ibv_cmd_create_flow_action_esp)
REFUSED(ibv_cmd_create_qp)
REFUSED(ibv_cmd_create_qp_ex)
REFUSED(ibv_cmd_create_qp_ex2)
REFUSED(ibv_cmd_create_rwq_ind_table)
REFUSED(ibv_cmd_create_srq)
REFUSED(ibv_cmd_create_srq_ex)
REFUSED(ibv_cmd_create_wq)
REFUSED(ibv_cmd_dealloc_mw)
REFUSED(ibv_cmd_dealloc_pd)
REFUSED(ibv_cmd_dereg_mr)
REFUSED(ibv_cmd_destroy_ah)
REFUSED(ibv_cmd_destroy_counters)
REFUSED(ibv_cmd_destroy_cq)
REFUSED(ibv_cmd_destroy_flow)
REFUSED(ibv_cmd_destroy_flow_action)
REFUSED(ibv_cmd_destroy_qp)
REFUSED(ibv_cmd_destroy_rwq_ind_table)
REFUSED(ibv_cmd_destroy_srq)
REFUSED(ibv_cmd_destroy_wq)
REFUSED(ibv_cmd_detach_mcast)
REFUSED(ibv_cmd_free_dm)
REFUSED(ibv_cmd_get_context)
REFUSED(ibv_cmd_modify_cq)
REFUSED(ibv_cmd_modify_flow_action_esp)
REFUSED(ibv_cmd_modify_qp)
REFUSED(ibv_cmd_modify_qp_ex)
REFUSED(ibv_cmd_modify_srq)
REFUSED(ibv_cmd_modify_wq)
REFUSED(ibv_cmd_open_qp)
REFUSED(ibv_cmd_open_xrcd)
REFUSED(ibv_cmd_poll_cq)
REFUSED(ibv_cmd_post_recv)
REFUSED(ibv_cmd_post_send)
REFUSED(ibv_cmd_post_srq_recv)
REFUSED(ibv_cmd_query_context)
REFUSED(ibv_cmd_query_device_any)
REFUSED(ibv_cmd_query_mr)
REFUSED(ibv_cmd_query_port)
REFUSED(ibv_cmd_query_qp)
REFUSED(ibv_cmd_query_srq)
REFUSED(ibv_cmd_read_counters)
REFUSED(ibv_cmd_reg_dm_mr)
REFUSED(ibv_cmd_reg_dmabuf_mr)
REFUSED(ibv_cmd_reg_mr)
REFUSED(ibv_cmd_req_notify_cq)
REFUSED(ibv_cmd_rereg_mr)
REFUSED(ibv_cmd_resize_cq)
REFUSED(ibv_read_ibdev_sysfs_file)
REFUSED(verbs_allow_disassociate_destroy)
REFUSED(verbs_init_cq)
REFUSED(verbs_open_device)
REFUSED(verbs_set_ops)
REFUSED(verbs_uninit_context)
