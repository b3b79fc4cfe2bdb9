#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The Python package on a GPU host that has torch. One line a claim.
#
#   GPUS=2 test/gpu/python.sh [BUILD] [STEP ...]   OUT (default .) gets one file of JSON lines a step
# Steps, the most telling first; about 15 minutes in all. Exit status: how many failed.
set -u
cd "$(dirname "$0")/../.." || exit 1
prefix=python-
. test/gpu/steps.sh
gpus=${GPUS:-2}
export GPUS=$gpus PERSEUS_FUSED_LIBRARY=$build/fused/libperseus-fused.so PYTHONPATH=$PWD/fused/python:$PWD/fused/python/examples PYTHONDONTWRITEBYTECODE=1
claim() { # name, seconds
    step "$1" "$2" python3 test/gpu/python.py "$1"
}
many="torchrun --nproc-per-node $gpus"

step info 60 python3 -m perseus.info --json
claim ops_are_right 120
claim norms_are_right 120
step host_cost 90 python3 -m perseus.bench --host-cost --json
claim gradients_are_right 240
claim gradients_of_attention_are_right 120
claim attention_of_any_head 200
claim striped_attention_is_right 200
claim packed_step_beside_one_gpu 200
claim smaller_launches 200
step train 300 $many fused/python/examples/train.py --steps 200 --compile
claim moe_training 240
step moe_block 200 $many fused/python/examples/moe_block.py --tokens 2048 --rounds 5
claim any_stream 100
claim any_number_of_rows 200
claim memory_does_not_grow 200
claim sixty_seven_sizes 120
claim few_rows 150
claim a_killed_rank_is_named 100
claim maps_of_experts 200
claim quantised_results 200
[ "$gpus" = 1 ] && claim paths_of_one_rank 120
claim a_group_sleeps 120
claim memory_of_torch_is_imported 60
claim abort_ends_waits 60
step bench 180 $many -m perseus.bench --json
step bench_graphs 180 $many -m perseus.bench --json --graphs
claim a_step_beside_torchs 280
step package 60 bash -c 'set -e; t=$(mktemp -d); PERSEUS_BUILD='"$build"' pip wheel -q --no-deps --no-build-isolation --no-index -w $t ./fused/python; ls $t; rm -rf $t fused/python/build'
steps_end
