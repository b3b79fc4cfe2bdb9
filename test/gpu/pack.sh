#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Copy what test/gpu/*.sh need into a folder, to take to a GPU host that has no build of this project.
#   test/gpu/pack.sh BUILD FOLDER; there: OUT=results FOLDER/test/gpu/device.sh FOLDER/build
set -eu
build=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
cd "$build"
for file in tools/perseus-perf tools/libperseus-perf-gpu.so tools/softnic/softnic-run tools/softnic/softnicctl \
        tools/softnic/lib/*.so* transport/libperseus.so* plugin/*.so* test/gpu/ring_gpu test/gpu/hardware_queues test/gpu/driver_lock tools/perseus-nccl tools/perseus-nccl-ranks \
        tools/perseus-fused-bench fused/libperseus-fused.so* tools/softnic/test/cuda_rw; do
    [ -d "$file" ] && continue # Meson's folders of objects
    mkdir -p "$folder/build/$(dirname "$file")"
    cp -a "$file" "$folder/build/$file"
done
cd - >/dev/null
cd "$(dirname "$0")"
mkdir -p "$folder/test/gpu"
cp ./*.sh ./*.py "$folder/test/gpu/"
mkdir -p "$folder/tools/fused"
cp ../../tools/fused/*.py "$folder/tools/fused/"
mkdir -p "$folder/fused" "$folder/include"
cp -r ../../fused/python "$folder/fused/"
cp -r ../../include/perseus "$folder/include/"
du -sh "$folder" | cut -f1
