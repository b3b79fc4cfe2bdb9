#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# In the guest: [NETBENCH_OPTIONS=...] netbench.sh RANKS API... runs every collective over both devices (a rank's
# traffic goes from its own to the other's), with odd sizes and size 0. Fails on the first wrong byte. The times mean
# nothing here.
set -eu
ranks=$1
shift
export NCCL_SOCKET_IFNAME=lo PERSEUS_REQUIRED=1
for api in "$@"; do
    for op in sendrecv allreduce allgather reducescatter alltoall; do
        echo "-- $api $op, $ranks ranks"
        # Sizes: 0, 1, 64, 4096 and 262144 bytes, and each plus and minus one; so at least 12 rows, all without errors.
        # shellcheck disable=SC2086,SC2015 # the options are several words; cat does not fail
        perseus-netbench --plugin /payload/lib/libnccl-net-perseus.so --api "$api" --op $op --ranks "$ranks" \
            --sizes 0:256K:x64 --odd --iters 2 --warmup 1 --check --timeout 120 --json ${NETBENCH_OPTIONS:-} >/tmp/rows &&
            right=$(grep -c '"errors": *0[,}]' /tmp/rows) && [ "$right" -ge 12 ] && [ "$right" = "$(grep -c . /tmp/rows)" ] ||
            { cat /tmp/rows && exit 1; }
    done
done
