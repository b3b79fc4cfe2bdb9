#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# MoE dispatch + grouped product on a host with 4 Hopper GPUs: first correctness, then times, then tuning, then long runs.
#
#   test/gpu/moe.sh [BUILD] [STEP ...]     BUILD: a build folder (default build); STEP: only these
# OUT (default .) gets one JSON file a step. Steps are bounded; a step that fails is reported and the next one runs. Exit status: how many
# failed. GPUS (default 4).
set -u
cd "$(dirname "$0")/../.."
prefix=moe_
. test/gpu/steps.sh
gpus=${GPUS:-4}

bench="$build/tools/perseus-fused-bench --kernel moe --json --commit $commit"
small="--preset 512x384x16x3 --preset 7168x264x8x2 --tokens 700 --layout both --iterations 0"
target="--preset deepseek-v3 --tokens 512 --tokens 2048 --tokens 8192 --layout nk --iterations 12"

# Correctness: one GPU playing alone, four ranks on one GPU, four GPUs; then with numbers of tokens that differ.
step one_gpu 60 $bench --gpus 1 $small
step one_device 60 $bench --gpus "$gpus" --one-device --ctas 24 $small
step right 60 $bench --gpus "$gpus" $small --ragged --zipf 0 --zipf 1.5
# One element of what a timed launch wrote is changed: the check must find it.
step corrupt 60 bash -c "finds $bench --gpus $gpus --preset 512x384x16x3 --tokens 700 --iterations 5 --corrupt 5 && finds $bench --gpus $gpus --preset 512x384x16x3 --tokens 700 --iterations 5 --corrupt 2"
# The figures that are wanted, with the baselines in the same run.
step peers 240 torchrun --nproc-per-node "$gpus" tools/fused/moe_peers.py --library "$build/fused/libperseus-fused.so" --commit "$commit"
# Tuning: rows shared by two SMs or not, the other layout of the weights, routing CTAs.
step share_1 90 $bench --gpus "$gpus" $target --share 1
step share_2 90 $bench --gpus "$gpus" $target --share 2
step layout_kn 90 $bench --gpus "$gpus" --preset deepseek-v3 --tokens 512 --tokens 8192 --layout kn --iterations 12
for n in 16 32 64 128; do
    step route_$n 60 $bench --gpus "$gpus" --preset deepseek-v3 --tokens 512 --tokens 8192 --layout nk --iterations 12 --route-ctas $n
done
for s in 20 40; do
    step spread_$s 60 $bench --gpus "$gpus" --preset deepseek-v3 --tokens 2048 --tokens 8192 --layout nk --iterations 12 --row-spread $s
done
# Without other ranks: routing, placing and the product, but no NVLink; the difference to `peers` is what the links cost.
step alone 60 $bench --gpus 1 --preset 7168x2048x64x2 --tokens 2048 --tokens 8192 --tokens 32768 --layout nk --iterations 12
# Skew and the other models.
step zipf 120 $bench --gpus "$gpus" --preset deepseek-v3 --tokens 2048 --layout nk --iterations 12 --zipf 0 --zipf 0.5 --zipf 1 --zipf 1.5
step presets 120 $bench --gpus "$gpus" --preset qwen3-30b --preset gpt-oss-120b --tokens 512 --tokens 8192 --layout nk --iterations 12
# Long runs: random delays, other tokens and choices each launch; a graph of three launches.
step soak 200 $bench --gpus "$gpus" --preset 1024x512x32x4 --tokens 600 --zipf 0.7 --layout nk --iterations 0 --soak 10000 --replay 1000
# Two emulated nodes of two GPUs over the software NIC: correctness; then one signal a destination, part of it, or eight rows; then the ordering
# policies, which is the paper's comparison on real kernels; then beside NCCL on the same NICs.
softnic="$build/tools/softnic/softnic-run --quiet --nics 2 --nodes 2 --rate 400G --latency 2us --fence strict --"
step nodes_right 60 $softnic $bench --gpus 4 --nodes 2 $small --zipf 0 --zipf 1.5
for g in 8 64 512 100000; do
    step nodes_group_$g 60 $softnic $bench --gpus 4 --nodes 2 --preset deepseek-v3 --tokens 512 --tokens 8192 --layout nk --iterations 8 --group $g
done
for n in 8 16 32 64 128; do
    step nodes_put_$n 60 $softnic $bench --gpus 4 --nodes 2 --preset deepseek-v3 --tokens 512 --tokens 2048 --tokens 8192 --layout nk --iterations 8 --put-rows $n
done
for n in 1 2; do
    step nodes_passes_$n 60 $softnic $bench --gpus 4 --nodes 2 --preset deepseek-v3 --tokens 512 --tokens 2048 --tokens 8192 --layout nk --iterations 8 --passes $n
done
for policy in drain nic_fence in_order counted; do
    PERSEUS_ORDER=$policy step nodes_$policy 60 $softnic $bench --gpus 4 --nodes 2 --preset deepseek-v3 --tokens 512 --tokens 2048 --layout nk \
        --iterations 8 --group 8
done
step nodes_peers 240 env NCCL_NET_PLUGIN="$build/plugin/libnccl-net-perseus.so" NCCL_NET_GDR_LEVEL=SYS $softnic torchrun --nproc-per-node 4 tools/fused/moe_peers.py --nodes 2 --library "$build/fused/libperseus-fused.so" \
    --commit "$commit"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        step $tool 240 compute-sanitizer --tool $tool --error-exitcode 9 $bench --gpus 1 --preset 256x264x8x2 --tokens 300 --layout both \
            --iterations 0
    done
fi
steps_end
