#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# In the guest: each.sh COMMAND... runs every command, a line of a shell, also after one that failed. Fails if one did.
failed=''
for command in "$@"; do
    echo "-- $command"
    sh -c "$command" || failed="$failed [$command: exit $?]"
done
[ -z "$failed" ] || { echo "failed:$failed" && exit 1; }
