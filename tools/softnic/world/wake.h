/* SPDX-License-Identifier: Apache-2.0 */
/* Waking a file descriptor of another process: each completion channel and each opened device is a datagram socket. Its
 * abstract name consists of the world's id and a number, so any process of the world can make it readable. A datagram
 * is only a token. The event itself is in shared memory, so nothing is lost when a token finds the socket full. */
#ifndef SOFTNIC_WAKE_H
#define SOFTNIC_WAKE_H

#include "tools/softnic/world/world.h"

/* Open a socket of this process, and give it a number in the world. Return the descriptor or -errno. */
int sn_wake_open(struct sn_world *world, uint32_t *wake_id);

/* Make the socket readable. Never blocks; a socket that is gone is not an error. */
void sn_wake_send(struct sn_world *world, uint32_t wake_id);

/* Take a token: 0, or -EAGAIN when the descriptor is non-blocking and there is none, -EINTR after a signal whose
 * handler does not restart calls, or another -errno. */
int sn_wake_take(int fd);

/* Bring the socket in line with what is left to read: readable if anything is left, else not, even if tokens were
 * dropped or are left over. Readers of one socket must not call it at the same time. */
void sn_wake_settle(struct sn_world *world, int fd, uint32_t wake_id, bool (*is_left)(const void *of), const void *of);

/* Put an asynchronous event into an opened device's ring, and wake its reader. */
void sn_async_raise(struct sn_world *world, uint32_t ctx, uint32_t type, uint32_t element);

/* Pull a port's cable or plug it in, and notify every process that has the device open. Return 0 or -EINVAL. */
int sn_cable_set(struct sn_world *world, uint32_t dev, bool up);
/* Let a NIC die, as one whose PCIe link or firmware fails: it says so (IBV_EVENT_DEVICE_FATAL) to every process that
 * has it open, takes no command any more (EIO), reaches nobody, and completes and flushes nothing. For good. Return 0
 * or -EINVAL. */
int sn_device_kill(struct sn_world *world, uint32_t dev);

/* Forget the sending socket, which a forked child must not share. */
void sn_wake_forget(void);

#endif
