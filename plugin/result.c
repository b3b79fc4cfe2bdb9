/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/result.h"

#include <errno.h>

net_result result_from_errno(int r)
{
    switch (-r) {
    case 0:
        return NET_SUCCESS;
    case EREMOTEIO: /* the peer refused an access */
    case ETIMEDOUT:
    case ECONNRESET:
    case ECONNREFUSED:
    case ECONNABORTED:
    case EPIPE:
    case ENOTCONN:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EPROTO: /* the peer is not a Perseus of this version */
        return NET_REMOTE_ERROR;
    case EINVAL:
    case EFAULT:
    case EOPNOTSUPP:
        return NET_INVALID_ARGUMENT;
    case EIO: /* a device of this machine */
    case ENODEV:
    case ENOMEM:
    case ENOSYS:
    case EACCES:
    case EPERM:
    case EMFILE:
    case ENFILE:
    case EADDRNOTAVAIL:
    case EADDRINUSE:
        return NET_SYSTEM_ERROR;
    default:
        return NET_INTERNAL_ERROR;
    }
}
