#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The fused kernels on a GPU host: what has not been measured yet, and what only a GPU can check.
#
#   GPUS=4 test/gpu/fused.sh [BUILD] [STEP ...]   OUT (default .) gets one file of JSON lines a step; COMMIT goes into the rows
# STEP picks steps (default: all, the most valuable first); the limits add up to about 34 minutes.
# Each step is bounded; one that fails is reported and the next one runs. Exit status: how many failed.
set -u
cd "$(dirname "$0")/../.." || exit 1
prefix=fused-
. test/gpu/steps.sh
gpus=${GPUS:-4}
nccl=${NCCL_LIB:-$(python3 -c "import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], 'lib', 'libnccl.so.2'))" 2>/dev/null)}
lt=$(python3 -c "import nvidia.cublas, os; print(os.path.join(list(nvidia.cublas.__path__)[0], 'lib'))" 2>/dev/null)
[ -n "$nccl" ] && export LD_LIBRARY_PATH=$(dirname "$nccl"):${lt:+$lt:}${LD_LIBRARY_PATH:-}

shapes() { # of M x N x K
    for s in "$@"; do printf -- '--shape %s ' "$s"; done
}

bench="$build/tools/perseus-fused-bench --json --commit $commit --gpus $gpus"
softnic="$build/tools/softnic/softnic-run --quiet --nics 2 --nodes 2 --rate 400G --latency 2us"

# Wanted: 95, 400, 2980 us. As the plan chooses, with ranks as threads and as processes; pushed by the CTAs, copied; tuned.
gather_shapes="$(shapes 4096x$((4096 / gpus))x4096 8192x$((8192 / gpus))x8192 16384x$((16384 / gpus))x16384)"
step gather 60 $bench --kernel allgather --iterations 12 $gather_shapes
step gather_processes 60 mpirun --allow-run-as-root -np "$gpus" $build/tools/perseus-fused-bench --json --commit "$commit" --kernel allgather --no-baselines \
    --iterations 12 $gather_shapes
step gather_ctas 60 $bench --kernel allgather --no-baselines --copies-by-ctas --iterations 12 $gather_shapes
step gather_copies 60 $bench --kernel allgather --no-baselines --copy-engine --iterations 12 $gather_shapes
step autotune_gather 100 $bench --kernel allgather --autotune $gather_shapes

# One element of what a timed launch wrote is changed: the check must find it, for an earlier launch and for the last.
step corrupt 60 bash -c "finds $bench --kernel all --iterations 5 --corrupt 5 --shape 1024x1024x512 && finds $bench --kernel all --iterations 5 --corrupt 2 --shape 1024x1024x512"

# A process dies while the others wait for it.
step lost_rank 40 $bench --kernel reduce_scatter --kill-rank-after 500 --timeout-ms 2000 --shape 8192x8192x$((8192 / gpus))
step lost_rank_far 40 $softnic -- $bench --nodes 2 --kernel reduce_scatter --kill-rank-after 500 --timeout-ms 2000 --shape 8192x8192x$((8192 / gpus))

# Two nodes over the software NIC, at 400G. First correctness, then beside NCCL over this plugin, and over NCCL's own IB.
far="--nodes 2 --kernel reduce_scatter --kernel allreduce"
step nodes_check 60 $softnic -- $bench --nodes 2 --kernel all --no-baselines --iterations 0 $(shapes 1024x1024x512 4000x1384x264)
nodes_shapes=$(shapes 4096x4096x$((4096 / gpus)) 8192x8192x$((8192 / gpus)) 16384x16384x$((16384 / gpus)))
step nodes_perseus 120 env NCCL_NET_PLUGIN="$build/plugin/libnccl-net-perseus.so" NCCL_NET_GDR_LEVEL=SYS $softnic -- $bench $far --iterations 8 $nodes_shapes
step nodes_ib 90 env NCCL_NET_PLUGIN=none NCCL_NET_GDR_LEVEL=SYS $softnic -- $bench $far --iterations 5 --shape 8192x8192x$((8192 / gpus))
step nodes_gather 90 env NCCL_NET_PLUGIN="$build/plugin/libnccl-net-perseus.so" NCCL_NET_GDR_LEVEL=SYS $softnic -- $bench --nodes 2 --kernel allgather --iterations 8 \
    $(shapes 4096x$((4096 / gpus))x4096 8192x$((8192 / gpus))x8192 16384x$((16384 / gpus))x16384)
# What a signal for 1, 8, 64 tiles, or a whole band, costs and saves; ordered by the NIC, and by counting.
step nodes_group 90 bash -c "set -eo pipefail; for order in in_order counted nic_fence drain; do for group in 1 8 64 4096; do
    PERSEUS_ORDER=\$order $softnic -- $bench --nodes 2 --kernel reduce_scatter --no-baselines --iterations 5 --group \$group --shape 8192x8192x$((8192 / gpus)) |
        sed \"s/^{/{\\\"order\\\":\\\"\$order\\\",/\"; done; done"

# The unfused path between nodes: n or k odd, ranks that do not divide m (all-reduce); and a graph of it, replayed, with the same bits each time.
odd="$softnic -- $bench --nodes 2 --no-baselines --soak 100 --replay 20 --iterations 3"
step nodes_odd 40 bash -c "set -e; $odd --kernel all $(shapes 1000x1003x264 4000x1384x261); $odd --kernel allreduce $(shapes 1003x1000x264 4001x2749x1032)"

# FP8 between nodes, with each kind of scale: launches with random delays and graphs on both paths, every one compared.
# A k of 640: each launch copies the scales of blocks of B for cuBLASLt.
fp8="$softnic -- $bench --nodes 2 --dtype e4m3 --layout nk --no-baselines --soak 100 --replay 20 --iterations 3"
step nodes_fp8 200 bash -c "set -e; for scaling in tensor rows blocks; do
    $fp8 --scaling \$scaling --kernel allgather --kernel reduce_scatter --kernel allreduce --fused $(shapes 1024x1024x512 4000x1384x1152)
    $fp8 --scaling \$scaling --kernel allgather --kernel reduce_scatter --kernel allreduce --unfused $(shapes 512x1024x512 1000x384x640); done"

# fp16 beside bf16: right within one rounding of fp16, and as fast.
step fp16 60 bash -c "set -e; for type in bf16 fp16 bf16 fp16 \"bf16 --c-dtype fp32\"; do $bench --dtype \$type --kernel all --iterations 8 \
    $(shapes 4096x4096x$((4096 / gpus)) 8192x8192x$((8192 / gpus))); done"

# torch's symmetric memory, and this library through ctypes, in one process group.
step symm_mem 120 torchrun --nproc-per-node "$gpus" tools/fused/symm_mem_peers.py --library "$build/fused/libperseus-fused.so" --commit "$commit" \
    --sizes 4096,8192,16384

# Shapes of language models (m 8192, n or k split by the ranks), few rows, odd ones, and beyond 2^31 bytes.
step llm 100 bash -c "set -e; $bench --kernel allgather --iterations 8 $(shapes 8192x2752x4096 8192x3584x4096 8192x7168x8192 8192x13312x16384 8192x7392x8192);
    $bench --kernel reduce_scatter --iterations 8 $(shapes 8192x4096x2752 8192x4096x3584 8192x3584x3584 8192x4608x9216 8192x8192x7168 4096x49152x3072)"
step small 60 bash -c "set -e; $bench --kernel allgather --iterations 20 $(shapes 32x3584x4096 128x3584x4096 512x3584x4096 1024x3584x4096);
    $bench --kernel reduce_scatter --kernel allreduce --iterations 20 $(shapes 32x4096x3584 128x4096x3584 512x4096x3584 1024x4096x3584)"
# Products that also apply bias, activation, gate and residual, beside the product alone; and the gathered A as a second result.
finish="--kernel allgather --kernel reduce_scatter --kernel allreduce --iterations 8 $(shapes 4096x$((8192 / gpus))x4096 8192x$((16384 / gpus))x8192)"
step finished 120 bash -c "set -e; $bench $finish --no-baselines; $bench $finish --activation gelu-tanh --bias --residual;
    $bench $finish --activation silu --gated; $bench $finish --activation silu --gated --bias --residual; $bench $finish --no-baselines --keep-gathered"
step odd 60 $bench --kernel all --layout both --iterations 3 $(shapes 4000x2752x4104 1000x1000x1000 4004x1380x260)
# cuBLASLt's choices for rows that are not aligned: within one rounding of the result, as everything else.
step odd_rows 60 $bench --kernel all --layout both --no-baselines --iterations 3 $(shapes 1000x999x333 4000x1384x4101 512x4097x4096)
step large 100 bash -c "set -e; $bench --kernel reduce_scatter --no-baselines --iterations 3 --shape 49152x49152x$((49152 / gpus));
    $bench --kernel allreduce --no-baselines --iterations 2 --shape 49152x49152x$((49152 / gpus));
    $bench --kernel allgather --no-baselines --iterations 2 --shape 49152x$((49152 / gpus))x49152"

step soak_far 100 $softnic -- $bench --nodes 2 --kernel all --no-baselines --iterations 0 --soak 2000 --replay 200 --shape 1024x1024x512

# By copy engines also where the plan would not choose them.
step soak_copies 60 $bench --kernel allgather --copy-engine --no-baselines --iterations 0 --soak 10000 --replay 1000 --shape 1024x1024x512

# Small shapes: every access is checked, ten to a hundred times slower. Where the driver refuses (gVisor), the step says so.
sanitize="compute-sanitizer --error-exitcode 9 --print-limit 5"
step memcheck 120 $sanitize --tool memcheck $build/tools/perseus-fused-bench --json --commit "$commit" --gpus 2 --kernel all --layout both --no-baselines \
    --iterations 0 --timeout-ms 60000 $(shapes 512x512x192 1040x264x72)
step memcheck_copies 120 $sanitize --tool memcheck $build/tools/perseus-fused-bench --json --commit "$commit" --gpus 2 --kernel allgather --copy-engine --layout both \
    --no-baselines --iterations 0 --timeout-ms 60000 $(shapes 512x512x192 1040x264x72)
step racecheck_copies 120 $sanitize --tool racecheck $build/tools/perseus-fused-bench --json --commit "$commit" --gpus 2 --kernel allgather --copy-engine --no-baselines \
    --iterations 0 --timeout-ms 60000 --shape 512x512x192
step racecheck 120 $sanitize --tool racecheck $build/tools/perseus-fused-bench --json --commit "$commit" --gpus 2 --kernel all --no-baselines \
    --iterations 0 --timeout-ms 60000 --shape 512x512x192
steps_end
