#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# NCCL's all-reduce over networks as clusters have them, over Perseus and NCCL's IB transport in turn, on the software NIC: two rails as
# one device, of which one may be slow, late deliveries, and several queues. The model of the NIC sets the times, so memory is the host's.
#
#   RANKS=2 NCCL_LIB=FILE test/gpu/fabrics.sh [BUILD] [STEP ...]      OUT (default .) gets one file of JSON lines a step
# NCCL_LIB: libnccl.so.2 (default: the one of the nvidia-nccl wheel). ROUNDS (3) of each transport. Exit status: how many steps failed.
set -u
cd "$(dirname "$0")/../.."
ranks=${RANKS:-2}
suffix=-fabric
. test/gpu/steps.sh
nccl=${NCCL_LIB:-$(python3 -c "import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], 'lib', 'libnccl.so.2'))")}
export LD_LIBRARY_PATH=$(dirname "$nccl"):${LD_LIBRARY_PATH:-}

show() {
    test/gpu/nccl_table.py "$1"
}

bench=("$build/tools/perseus-nccl" --own --host-staged --ranks "$ranks" --nccl "$nccl" --transports perseus,ib --ops all_reduce --rounds "${ROUNDS:-3}" --timeout 60 --json)
large=(--sizes 1M:64M:x8 --iters 20 --warmup 5)
small=(--sizes 8:32K:x8 --iters 300 --warmup 20)
merged=(--env NCCL_NET_FORCE_MERGE=softnic0,softnic1)

step equal_rails 120 "${bench[@]}" "${large[@]}" "${merged[@]}" --softnic "--nics 2 --quiet --rate 16G"
step slow_rail 120 "${bench[@]}" "${large[@]}" "${merged[@]}" --softnic "--nics 2 --quiet --rate 16G,8G"
step slow_rail_4_queues 120 "${bench[@]}" "${large[@]}" "${merged[@]}" --softnic "--nics 2 --quiet --rate 16G,8G" --env NCCL_IB_QPS_PER_CONNECTION=4
step very_slow_rail 120 "${bench[@]}" "${large[@]}" "${merged[@]}" --softnic "--nics 2 --quiet --rate 16G,4G"
step slow_rail_apart 120 "${bench[@]}" "${large[@]}" --softnic "--nics 2 --quiet --rate 16G,8G"
step jitter 90 "${bench[@]}" "${small[@]}" --softnic "--nics 1 --quiet --rate 100G --latency 5us --jitter 20us"
step jitter_rails 90 "${bench[@]}" "${large[@]}" "${merged[@]}" --softnic "--nics 2 --quiet --rate 16G --latency 5us --jitter 50us"
step queues_4 90 "${bench[@]}" "${small[@]}" --softnic "--nics 1 --quiet" --env NCCL_IB_QPS_PER_CONNECTION=4
step queues_4_modelled 90 "${bench[@]}" "${small[@]}" --softnic "--nics 1 --quiet --rate 100G --latency 5us --wr-cost 50ns --doorbell-cost 200ns" --env NCCL_IB_QPS_PER_CONNECTION=4
steps_end
