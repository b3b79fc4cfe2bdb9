#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# In the guest: run Debian's ibv_rc_pingpong between the two devices, by polling and by events. It checks its data.
set -u
for options in "-n 200 -s 4096 -c" "-n 100 -s 65536 -c -e" "-n 100 -s 1"; do
    # shellcheck disable=SC2086 # the options are several words
    ibv_rc_pingpong -d rxe0 -g 1 -p 18515 $options >/tmp/server 2>&1 &
    server=$!
    tries=0
    until grep -qE ':4853 0+:0000 0A ' /proc/net/tcp* || [ $tries -ge 600 ]; do # port 18515: the server listens
        sleep 0.1
        tries=$((tries + 1))
    done
    # shellcheck disable=SC2086
    if ! timeout 120 ibv_rc_pingpong -d rxe1 -g 1 -p 18515 $options 127.0.0.1 || ! wait $server; then
        echo "ibv_rc_pingpong $options failed; its server said:"
        cat /tmp/server
        exit 1
    fi
done
