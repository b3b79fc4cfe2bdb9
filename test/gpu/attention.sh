#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Ring attention on a host with 4 Hopper GPUs: first correctness, then the core alone, then the ring, then tuning, then long runs.
#
#   test/gpu/attention.sh [BUILD] [STEP ...]     BUILD: a build folder (default build); STEP: only these
# OUT (default .) gets one JSON file a step. Steps are bounded; a step that fails is reported and the next one runs. Exit status: how many
# failed. GPUS (default 4). All but `memcheck`, `soak` and `training` together take about three minutes.
set -u
cd "$(dirname "$0")/../.."
prefix=attention_
. test/gpu/steps.sh
gpus=${GPUS:-4}

bench="$build/tools/perseus-fused-bench --kernel attention --json --no-baselines --commit $commit"
peers="tools/fused/attention_peers.py --library $build/fused/libperseus-fused.so --commit $commit"
ring="torchrun --nproc-per-node $gpus $peers"
small="--shape 2x6x2x2048x128 --shape 1x4x4x1600x64 --shape 1x3x1x1040x128 --iterations 0"
total="--shape 4x16x16x8192x128 --shape 4x16x16x16384x128 --shape 4x16x16x32768x128 --shape 4x16x16x65536x128"
# Every kernel that is compiled: keys a step:overlap.
variants="--variant 176:3 --variant 176:7 --variant 128:7 --variant 128:3"

# Correctness: one GPU, four ranks on one GPU, four GPUs; resident and ring; causal.
step one_gpu 60 bash -c "$bench --gpus 1 $small && $bench --gpus 1 $small --causal --heads-first"
step one_device 60 bash -c "$bench --gpus $gpus --one-device --attention-ctas 32 $small && $bench --gpus $gpus --one-device --attention-ctas 32 $small --causal"
step right 60 bash -c "$bench --gpus $gpus $small && $bench --gpus $gpus $small --causal --heads-first && $bench --gpus $gpus $small --mode 3 --group 1 --causal"
# One element of what a timed launch wrote is changed: the check must find it.
step corrupt 60 bash -c "finds $bench --gpus $gpus --shape 2x6x2x2048x128 --iterations 5 --corrupt 5 && finds $bench --gpus $gpus --shape 2x6x2x2048x128 --iterations 5 --corrupt 2"
# The core against cuDNN and FA2, one GPU: 95 % of cuDNN is wanted, 1.2 times its error is allowed.
step core 150 python3 $peers --alone --rounds 8 $variants --shape 4x16x16x2048x128 --shape 4x16x16x8192x128 --shape 4x16x16x16384x128 --shape 1x16x16x32768x128 \
    --shape 1x8x8x65536x128
step core_causal 100 python3 $peers --alone --rounds 8 --causal $variants --shape 4x16x16x2048x128 --shape 4x16x16x8192x128 --shape 1x16x16x32768x128
step core_64 60 python3 $peers --alone --rounds 8 --variant 128:3 --variant 128:7 --shape 4x32x32x4096x64 --shape 4x32x8x16384x64
# Goals: 1090, 3700, 13800, 58500 us, 1.9 times the NCCL ring; causal within 1.15 of half.
step ring 150 $ring --rounds 6 $total
step ring_causal 120 $ring --rounds 6 --causal $total
# Tuning: keys:overlap:group:slab rows:spread:mode:copy engine. Bursts or even pace, sizes of groups and of slabs, two buffers.
step spread 60 $ring --rounds 8 --variant 0:0:0:0:1 --variant 0:0:0:0:30 --variant 0:0:0:0:60 --variant 0:0:0:0:85 --shape 4x16x16x8192x128 --shape 4x16x16x16384x128
step grain 60 $ring --rounds 8 --variant 0:0:1 --variant 0:0:4 --variant 0:0:9 --variant 0:0:64 --variant 0:0:0:128 --variant 0:0:0:2048 --shape 4x16x16x8192x128
step two_buffers 60 $ring --rounds 6 --variant 0:0:0:0:0:2 --variant 0:0:0:0:0:3 --shape 4x16x16x8192x128 --shape 4x16x16x32768x128
# Everything without NVLink: the difference to `ring` is what the links cost; to `core`, what the roles cost.
step loopback 60 $bench --loopback "$gpus" --iterations 8 --shape 4x16x16x8192x128 --shape 4x16x16x16384x128
# Models: Llama-3-8B and -70B heads, long and short.
step models 60 $ring --rounds 6 --causal --shape 1x32x8x32768x128 --shape 1x64x8x131072x128 --shape 8x32x8x4096x128
# Backward: right, a change is found, then a training step beside torch's context parallel and one GPU's step divided by the ranks. Goals:
# 7700, 30300, 59500 us.
step backward 60 bash -c "$bench --backward --gpus 1 $small && $bench --backward --gpus $gpus $small && $bench --backward --gpus $gpus $small --causal --heads-first && \
    $bench --backward --gpus $gpus $small --causal --mode 3 --group 1"
step backward_corrupt 60 bash -c "finds $bench --backward --gpus $gpus --shape 2x6x2x2048x128 --iterations 5 --corrupt 2"
step training 300 torchrun --nproc-per-node $gpus tools/fused/attention_step_peers.py --library $build/fused/libperseus-fused.so --commit $commit \
    --shape 4x16x16x16384x128 --shape 4x16x16x32768x128 --shape 4x16x16x65536x128
# Long runs: random delays, other tensors each launch; a graph of three launches.
step soak 150 bash -c "$bench --gpus $gpus --iterations 0 --soak 10000 --replay 1000 --shape 1x8x4x2048x128 && \
    $bench --gpus $gpus --iterations 0 --soak 3000 --replay 300 --causal --mode 3 --group 1 --shape 1x6x6x2048x64"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        step $tool 200 compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 $build/tools/perseus-fused-bench --kernel attention --no-baselines \
            --iterations 0 --timeout-ms 60000 --gpus 2 --shape 1x2x2x600x128 --shape 1x2x1x530x64
    done
fi
steps_end
