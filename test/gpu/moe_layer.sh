#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The MoE layer on a host with 2 Hopper GPUs: the emulator's claims on hardware, then times beside NCCL + torch._grouped_mm and symm_mem.
#
#   test/gpu/moe_layer.sh [BUILD] [STEP ...]     BUILD: a build folder (default build); STEP: only these
# OUT (default .) gets one JSON file a step. Exit status: how many steps failed. GPUS (default 2).
set -u
cd "$(dirname "$0")/../.."
prefix=moe_layer_
. test/gpu/steps.sh
gpus=${GPUS:-2}

layer="torchrun --nproc-per-node $gpus tools/fused/moe_layer_peers.py --library $build/fused/libperseus-fused.so --commit $commit"

# Few launches first: is it right at all? Then a changed element must be found.
step small 90 $layer --preset qwen3-30b --tokens 1 37 512 --rounds 3 --capacity 0
step corrupt 60 bash -c "finds $layer --preset qwen3-30b --tokens 512 --rounds 5 --corrupt 3"
# The figures that are wanted: 2900, 3000, 5100 and 11700 us on 2 GPUs.
step peers 240 $layer --preset deepseek-v3 --tokens 128 512 2048 8192
step models 120 $layer --preset qwen3-30b gpt-oss-120b --tokens 512 8192
step zipf 120 $layer --preset deepseek-v3 --tokens 2048 --zipf 0.5 1 1.5
for s in 10 20 40; do
    step spread_$s 90 $layer --preset deepseek-v3 --tokens 2048 8192 --spread $s
done
# One token a rank: what routing by fewer CTAs, and fewer CTAs in all, gain (doc/open.md).
for n in 1 2 4 16; do
    step few_route_$n 40 $layer --path 1 --preset qwen3-30b --tokens 1 8 --rounds 30 --route-ctas $n
done
for n in 32 64; do
    step few_ctas_$n 40 $layer --path 1 --preset qwen3-30b --tokens 1 8 --rounds 30 --ctas $n
done
# The layer as one kernel, which plans for few tokens choose, by turns with several kernels: is it right, and how long does it take?
step one_small 90 $layer --preset qwen3-30b --tokens 1 3 32 --rounds 3
step one 90 $layer --preset qwen3-30b --tokens 1 8 32 128 256 --rounds 30
step one_deepseek 200 $layer --preset deepseek-v3 --tokens 8 32 128 --rounds 20
step one_zipf 90 $layer --preset qwen3-30b --tokens 8 32 128 --zipf 1 2 --rounds 20
# One kernel by turns with several, whichever the plan takes: one rank's load of 4 on one GPU, then all GPUs.
for dtype in bf16 e4m3; do
    step paths_load_$dtype 150 torchrun --nproc-per-node 1 ${layer#torchrun --nproc-per-node $gpus} --preset qwen3-30b --experts 32 --dtype $dtype \
        --tokens 4 128 256 512 1024 2048 --rounds 16
    step paths_$dtype 150 $layer --preset qwen3-30b --dtype $dtype --tokens 4 128 256 512 1024 2048 --rounds 16
done
step paths_deepseek 200 $layer --preset deepseek-v3 --dtype e4m3 --tokens 4 128 256 512 1024 2048 --rounds 10
# Two emulated nodes of one GPU and one NIC each over the software NIC, under each policy of order, beside NCCL on the same NICs; then with a signal for
# each eight rows, where the policies differ.
softnic="$build/tools/softnic/softnic-run --quiet --nics $((gpus / 2)) --nodes 2 --rate 400G --latency 2us --fence strict --"
for policy in in_order nic_fence counted drain; do
    for group in 0 8; do
        PERSEUS_ORDER=$policy step nodes_${policy}_$group 60 env NCCL_NET_PLUGIN="$build/plugin/libnccl-net-perseus.so" NCCL_NET_GDR_LEVEL=SYS $softnic \
            $layer --preset deepseek-v3 --tokens 512 2048 --rounds 6 --nodes 2 --group $group
    done
done
for n in 1 2; do
    step share_$n 90 $layer --preset deepseek-v3 --tokens 512 8192 --share $n
done
steps_end
