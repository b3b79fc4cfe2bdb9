#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# NCCL's collectives on a GPU host, over Perseus, NCCL's IB transport and sockets in turn; the first two over the software NIC.
#
#   RANKS=2|4 NCCL_TESTS=DIR NCCL_LIB=FILE test/gpu/nccl.sh [BUILD] [STEP ...]      OUT (default .) gets one file of JSON lines a step
# NCCL_TESTS: nccl-tests binaries, MPI build; NCCL_LIB: libnccl.so.2 (default: the one of the nvidia-nccl wheel). STEP picks steps.
# SOFTNIC: more options of softnic-run, such as --copier.
# ROUNDS (1): of gpu and host; one takes 45 and 100 s. Steps are bounded; a step that fails is reported and the next one runs. Exit status: how many failed.
set -u
cd "$(dirname "$0")/../.."
ranks=${RANKS:-2}
suffix=-$ranks
. test/gpu/steps.sh
nccl=${NCCL_LIB:-$(python3 -c "import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], 'lib', 'libnccl.so.2'))")}
export LD_LIBRARY_PATH=$(dirname "$nccl"):${LD_LIBRARY_PATH:-}

show() {
    test/gpu/nccl_table.py "$1"
}

bench=("$build/tools/perseus-nccl" --ranks "$ranks" --nccl "$nccl" --nccl-tests "$NCCL_TESTS" --softnic "--nics 1 --quiet ${SOFTNIC:-}" --timeout 100 --json)
small=(--ops all_reduce,all_gather,reduce_scatter,alltoall,sendrecv --sizes 8:1M:x8 --iters 50 --rounds 3 --transports perseus,ib)
whole=(--ops all_reduce,all_gather,reduce_scatter,alltoall,sendrecv --sizes 8:1G:x8 --iters 10 --warmup 3 --rounds ${ROUNDS:-1})

step cuda_rw 60 "$build/tools/softnic/softnic-run" --quiet -- "$build/tools/softnic/test/cuda_rw" --least 20
step cuda_rw_copier 60 "$build/tools/softnic/softnic-run" --quiet --copier -- "$build/tools/softnic/test/cuda_rw" --least 20
step ddp 100 test/gpu/ddp_losses.py --ranks "$ranks" --softnic "--nics 1 ${SOFTNIC:-}"
step gpu_small 120 "${bench[@]}" --env NCCL_NET_GDR_LEVEL=SYS "${small[@]}"
step host_small 120 "${bench[@]}" --host-staged "${small[@]}"
step gpu 240 "${bench[@]}" --env NCCL_NET_GDR_LEVEL=SYS "${whole[@]}" --transports perseus,ib
step host 400 "${bench[@]}" --host-staged "${whole[@]}"
steps_end
