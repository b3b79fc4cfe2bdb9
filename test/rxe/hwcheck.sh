#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# In the guest: perseus-hwcheck between the two devices. Soft-RoCE keeps the order of a queue, so every trial must run and hold.
set -u
export NCCL_SOCKET_IFNAME=lo
NCCL_IB_HCA=rxe0 perseus-hwcheck --listen --cookie rxe >/tmp/server 2>&1 &
server=$!
tries=0
until grep -q listening /tmp/server || [ $tries -ge 600 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
NCCL_IB_HCA=rxe1 timeout 480 perseus-hwcheck --cookie rxe --pairs 300 --queues 2 --json 127.0.0.1 >/tmp/report
status=$?
cat /tmp/report
if [ $status != 0 ] || ! wait $server; then
    echo "perseus-hwcheck: exit $status; the other side said:"
    cat /tmp/server
    exit 1
fi
# Of both devices, by one queue and by two at once, in each of the four policies, by a write and by an atomic; the
# notification, writes of no bytes, and adds beside those of the CPU. Two queues also add to one word.
for want in '"device":"rxe0:1"' '"device":"rxe1:1"' '"good":true' '"chosen":"in_order ' '"atomics":"nic"'; do
    grep -q "$want" /tmp/report || { echo "the report lacks $want" && exit 1; }
done
trials=$(grep -o '"ran":true' /tmp/report | wc -l)
[ "$trials" = 23 ] || { echo "$trials of 23 trials ran" && exit 1; }
