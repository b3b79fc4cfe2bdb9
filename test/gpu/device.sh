#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The device path on a GPU host: command ring, put+signal from a persistent kernel over the software NIC, GIN.
#
#   test/gpu/device.sh [BUILD] [STEP ...]     BUILD: a build folder (default build); it is configured and built when it is not there.
# OUT (default .) gets one JSON file a step. NCCL_TESTS=DIR: nccl-tests binaries with the device API; NCCL_LIB=DIR: libnccl.so.2.
# Steps are bounded; a step that fails is reported and the next one runs. Exit status: how many failed.
set -u
cd "$(dirname "$0")/../.."
. test/gpu/steps.sh

if [ ! -x "$build/tools/perseus-perf" ]; then
    meson setup "$build" -Dtests=disabled >/dev/null && ninja -C "$build" || { echo "device.sh: cannot build"; exit 1; }
fi
if [ ! -x "$build/test/gpu/ring_gpu" ]; then
    mkdir -p "$build/test/gpu"
    nvcc -std=c++17 -O2 -gencode=arch=compute_90a,code=sm_90a -I. -Iinclude -Xcompiler -D_GNU_SOURCE -o "$build/test/gpu/ring_gpu" \
        test/gpu/ring_gpu.cu transport/gpu/ring.c transport/util/error.c transport/util/log.c || { echo "device.sh: cannot build ring_gpu"; exit 1; }
fi

softnic="$build/tools/softnic/softnic-run --quiet"
perf="$build/tools/perseus-perf"
step ring 60 "$build/test/gpu/ring_gpu" "${COMMANDS:-100000000}"
step hardware_queues 130 "$build/test/gpu/hardware_queues"
step latency_off 30 $softnic -- $perf latency --gpu --json --policy in_order --bytes 8,4K --iterations 2000 --timeout 25
step msgrate_off 30 $softnic -- $perf msgrate --gpu --json --policy in_order --bytes 8 --concurrency 1,32,96 --iterations 3 --timeout 25
step putsignal_2 60 $softnic --latency 5us --rate 400G --fence strict -- \
    $perf putsignal --gpu --json --peers 1 --concurrency 8,32,96 --bytes 4K,64K --timeout 55
step putsignal_8 90 $softnic --latency 5us --rate 400G --fence strict -- \
    $perf putsignal --gpu --json --peers 7 --concurrency 96 --bytes 4K --timeout 80
step putsignal_8_slow 60 $softnic --latency 50us --rate 10G --fence strict -- \
    $perf putsignal --gpu --json --peers 7 --concurrency 96 --bytes 4K --timeout 55
step host_8_slow 60 $softnic --latency 50us --rate 10G --fence strict -- \
    $perf putsignal --json --peers 7 --concurrency 8,16,32,64,96,128 --bytes 4K --timeout 55
[ ! -s "$out/host_8_slow.json" ] || python3 tools/plot.py "$out/host_8_slow.json" -o "$out/efficiency.svg"

if [ -n "${NCCL_TESTS:-}" ]; then
    export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_GID_INDEX=1 NCCL_GIN_TYPE=2 NCCL_DEBUG=WARN
    export LD_LIBRARY_PATH="${NCCL_LIB:+$NCCL_LIB:}$build/plugin:${LD_LIBRARY_PATH:-}"
    for device in 3 4; do
        step "gin_perseus_D$device" 90 env NCCL_NET_PLUGIN=perseus $softnic --nics 2 -- \
            "$NCCL_TESTS/alltoall_perf" -b 8 -e 1M -f 8 -g 2 -R 2 -D $device
        step "gin_nccl_ib_D$device" 90 env NCCL_NET_PLUGIN=none $softnic --nics 2 -- \
            "$NCCL_TESTS/alltoall_perf" -b 8 -e 1M -f 8 -g 2 -R 2 -D $device
    done
fi
steps_end
