#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# three_interfaces.sh COMMAND...: run it in a network namespace with three interfaces, prs0 to prs2, which reach only
# this host. Exit status 77: no such namespace can be made here.
if [ "$1" != --inside ]; then
    unshare -Urn true 2>/dev/null || { echo "skipped: no network namespaces for this user"; exit 77; }
    exec unshare -Urn "$0" --inside "$@"
fi
shift
ip link set lo up
for i in 0 1 2; do
    { ip link add prs$i type dummy || ip link add prs$i type bridge || ip tuntap add dev prs$i mode tap; } 2>/dev/null &&
        ip addr add 10.77.$i.1/24 dev prs$i && ip link set prs$i up ||
        { echo "skipped: no interface can be made in a namespace"; exit 77; }
done
exec "$@"
