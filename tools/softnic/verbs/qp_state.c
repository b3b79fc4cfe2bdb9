/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/softnic/verbs/qp_state.h"

#include <errno.h>

#include "tools/softnic/world/world.h"

#define ALWAYS (IBV_QP_STATE | IBV_QP_CUR_STATE)
#define ANY    IBV_QPS_UNKNOWN

#define RC  (1u << SN_TRANSPORT_RC)
#define SRD (1u << SN_TRANSPORT_SRD)
#define UC  (1u << SN_TRANSPORT_UC)
#define UD  (1u << SN_TRANSPORT_UD)

struct transition {
    uint32_t transports;
    enum ibv_qp_state from, to; /* from ANY: from every state */
    int required, optional;
};

/* From the specification; SRD: from EFA's kernel driver. */
static const struct transition transitions[] = {
    {RC | UC | UD | SRD, ANY, IBV_QPS_RESET, 0, 0},
    {RC | UC | UD | SRD, ANY, IBV_QPS_ERR, 0, 0},
    {RC | UC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {UD | SRD, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    {RC | UC, IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {UD | SRD, IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY},
    {RC, IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_ALT_PATH},
    {UC, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
     IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_ALT_PATH},
    {UD | SRD, IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {RC, IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {UC, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {UD, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_QKEY},
    {SRD, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_QKEY | IBV_QP_RNR_RETRY},
    {RC, IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {UC, IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {UD | SRD, IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_QKEY},
    {RC | UC | UD | SRD, IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {RC, IBV_QPS_SQD, IBV_QPS_RTS, 0,
     IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {UC, IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {UD | SRD, IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_QKEY},
    {RC, IBV_QPS_SQD, IBV_QPS_SQD, 0,
     IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_AV | IBV_QP_MIN_RNR_TIMER | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
         IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC},
    {UC, IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_AV},
    {UD | SRD, IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {RC, IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {UC, IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS},
    {UD | SRD, IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_QKEY},
};

int sn_qp_state_check(uint32_t qpn, uint32_t transport, enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
    for (unsigned i = 0; i < sizeof(transitions) / sizeof(transitions[0]); i++) {
        const struct transition *t = &transitions[i];

        if (!(t->transports & 1u << transport) || t->to != to || (t->from != from && t->from != ANY))
            continue;
        if ((mask & t->required) != t->required) {
            sn_log("modify_qp %u: state %d to %d lacks attributes 0x%x", qpn, from, to, t->required & ~mask);
            return EINVAL;
        }
        if (mask & ~(t->required | t->optional | ALWAYS)) {
            sn_log("modify_qp %u: state %d to %d does not take attributes 0x%x", qpn, from, to,
                   mask & ~(t->required | t->optional | ALWAYS));
            return EINVAL;
        }
        return 0;
    }
    sn_log("modify_qp %u: no transition from state %d to %d", qpn, from, to);
    return EINVAL;
}
