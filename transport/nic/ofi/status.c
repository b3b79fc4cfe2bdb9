/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nic/ofi/status.h"

#include <errno.h>
#include <rdma/fi_errno.h>

#include "transport/nic/ofi/ofi.h"

int prs_ofi_errno(int error)
{
    switch (error) {
    case FI_ENOAV:
        return -EHOSTUNREACH;
    case FI_ENOKEY:
        return -EREMOTEIO;
    case FI_ECANCELED:
        return -ECONNRESET; /* flushed, as verbs says it */
    default:
        return error < FI_ERRNO_OFFSET ? -error : -EIO;
    }
}

/* As verbs has it: -ETIMEDOUT when the other side does not answer, -ECONNRESET when an earlier failure ended it. */
static int event_error(int error, const char **cause)
{
    switch (error) {
    case FI_ECANCELED:
        *cause = "the provider has ended the connection: the other side has closed it or died, or has refused a key or "
                 "an address";
        return -ECONNRESET;
    case ECONNRESET:
    case ECONNABORTED:
    case ENOTCONN:
    case EPIPE:
    case ESHUTDOWN:
        *cause = "the other side has closed its endpoint, or its process has ended";
        return -ETIMEDOUT;
    case ECONNREFUSED:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ETIMEDOUT:
    case FI_ENOAV:
        *cause = "the other side's endpoint does not answer; does a firewall stop the provider's connections?";
        return -ETIMEDOUT;
    case EACCES:
    case EINVAL:
    case EFAULT:
    case FI_ENOKEY:
        *cause = "the remote key is wrong or was deregistered, or the address is outside its region";
        return -EREMOTEIO;
    default:
        *cause = "FI_LOG_LEVEL=warn lets libfabric say more";
        return prs_ofi_errno(error);
    }
}

void prs_ofi_error_event(int error, int provider_error, uint32_t queue, struct prs_event *out)
{
    *out = (struct prs_event){.kind = PRS_EVENT_ERROR,
                              .queue = queue,
                              .status = error,
                              .vendor = (uint32_t)provider_error,
                              .text = prs_ofi.strerror(error)};
    out->error = event_error(error, &out->cause);
}
