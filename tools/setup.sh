#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what building and testing needs and this machine lacks: Debian packages (as root, or by sudo without a password), and a
# CUDA compiler from pip's wheels where there is none. tools/check and tools/demo source this file; run it to do only this.
# What cannot be installed is reported and left out; setup_all fails only when nothing could be built.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# What must exist, and the package that has it. A path is a file, anything else a program. tools/demo needs the first list only,
# tools/check the second too, tools/check --all the third.
setup_needed='meson:meson ninja:ninja-build pkg-config:pkg-config gcc:gcc g++:g++ git:git python3:python3
/usr/include/infiniband/verbs.h:libibverbs-dev'
setup_tests='clang-format:clang-format /usr/include/criterion/criterion.h:libcriterion-dev
valgrind:valgrind spin:spin doxygen:doxygen abidiff:abigail-tools
ibv_rc_pingpong:ibverbs-utils ib_write_bw:perftest /usr/lib/python3/dist-packages/pyverbs:python3-pyverbs fi_pingpong:libfabric-bin /usr/include/rdma/fabric.h:libfabric-dev rping:rdmacm-utils /usr/include/rdma/rdma_cma.h:librdmacm-dev ucx_perftest:ucx-utils setpriv:util-linux ip:iproute2'
setup_machines='/etc/libibverbs.d/rxe.driver:ibverbs-providers qemu-system-x86_64:qemu-system-x86 busybox:busybox-static depmod:kmod strip:binutils zstd:zstd
aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu qemu-aarch64:qemu-user
mpicc.openmpi:libopenmpi-dev mpirun.openmpi:openmpi-bin mpicc.mpich:libmpich-dev mpirun.mpich:mpich'
setup_torch_version=2.11.0 # that of the GPU host
setup_cuda_version=13.0 # the toolkit of the GPU host: its driver need not know what a newer one emits

setup_say() { echo "setup: $*"; }

setup_exists() {
    case $1 in
    /*) [ -e "$1" ] ;;
    *) PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null ;;
    esac
}

setup_missing() { # the packages of a list that this machine lacks
    local row
    for row in $1; do
        setup_exists "${row%:*}" || echo "${row##*:}"
    done
}

setup_apt() {
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || return 1
        as_root=(sudo -n)
    fi
    command -v apt-get >/dev/null || return 1
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 900 apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 \
        "$@" </dev/null >>"$setup_log" 2>&1
}

setup_packages() { # lists
    local missing package
    read -ra missing <<<"$(setup_missing "$*" | sort -u | tr '\n' ' ')"
    [ ${#missing[@]} = 0 ] && return 0
    setup_say "installing ${missing[*]}"
    setup_apt update || setup_say "apt-get update failed (see $setup_log); going on with the lists there are"
    if ! setup_apt install -y --no-install-recommends "${missing[@]}"; then
        for package in "${missing[@]}"; do # one that is not to be had must not keep the others away
            setup_apt install -y --no-install-recommends "$package" || setup_say "cannot install $package"
        done
    fi
    read -ra missing <<<"$(setup_missing "$setup_needed" | sort -u | tr '\n' ' ')"
    [ ${#missing[@]} = 0 ] && return 0
    setup_say "cannot build without ${missing[*]}: install them and try again (log: $setup_log)"
    return 1
}

# rdma-core's own tests, which python3-pyverbs holds as documentation; many containers leave documentation out. Nothing to do
# without that package.
setup_pyverbs() {
    local folder=$root/build/pyverbs
    [ -d /usr/lib/python3/dist-packages/pyverbs ] || return 0
    [ -d /usr/share/doc/rdma-core/tests ] || [ -d "$folder/usr/share/doc/rdma-core/tests" ] && return 0
    setup_say "unpacking rdma-core's tests into build/pyverbs"
    mkdir -p "$folder"
    (cd "$folder" && apt-get -q download python3-pyverbs && dpkg-deb -x python3-pyverbs_*.deb . && rm -f python3-pyverbs_*.deb) \
        </dev/null >>"$setup_log" 2>&1 || setup_say "skipped: rdma-core's own tests, which cannot be fetched (log: $setup_log)"
    return 0
}

# The compiler as wheels. They are pinned together: each would otherwise install the newest of those that it needs.
setup_cuda_wheels() { printf "nvidia-%s==$setup_cuda_version.* " cuda-nvcc cuda-crt cuda-runtime cuda-cccl nvvm; }

setup_wheel_nvcc() { compgen -G "$root/build/cuda/lib/python3*/site-packages/nvidia/cu*/bin/nvcc" | head -1; }

# Set setup_nvcc_root for Meson's option nvcc_root: empty where Meson finds the compiler by itself, or there is none.
setup_cuda() {
    local venv=$root/build/cuda
    setup_nvcc_root= setup_have_cuda=1
    command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] && return 0
    if [ -z "$(setup_wheel_nvcc)" ]; then
        setup_say "no nvcc: fetching CUDA $setup_cuda_version's compiler as wheels into build/cuda"
        setup_exists /usr/lib/python3/dist-packages/pip || setup_apt install -y --no-install-recommends python3-venv
        rm -rf "$venv"
        mkdir -p "$root/build"
        if ! { python3 -m venv "$venv" && "$venv/bin/python" -m pip install -q --disable-pip-version-check \
            $(setup_cuda_wheels); } \
            </dev/null >>"$setup_log" 2>&1; then
            setup_say "skipped: the CUDA part, for want of a compiler (log: $setup_log)"
            rm -rf "$venv"
            setup_have_cuda=0
            return 0
        fi
    fi
    setup_nvcc_root=$(dirname "$(dirname "$(setup_wheel_nvcc)")")
    [ -e "$setup_nvcc_root/lib64" ] || ln -s lib "$setup_nvcc_root/lib64" # where nvcc looks; the wheels have lib/
}

# A Python with torch for test/python, in build/torch-env. torch's own wheels need CUDA's libraries, 2 GB more: the toolkit's serve, with three
# small wheels that it lacks. Nothing is fetched where there is no toolkit; the tests are then skipped.
setup_torch() {
    local venv=$root/build/torch-env
    local libraries=/usr/local/cuda/lib64
    LD_LIBRARY_PATH=$libraries "$venv/bin/python" -c 'from torch import Tensor' 2>/dev/null && return 0
    python3 -c 'from torch import Tensor' 2>/dev/null && return 0
    if [ ! -e "$libraries/libcudnn.so.9" ] || [ ! -e "$libraries/libcublasLt.so.13" ]; then
        setup_say "skipped: tests of the Python package, which need torch: install it into a virtual environment $venv"
        return 0
    fi
    setup_say "no torch: fetching $setup_torch_version into build/torch-env"
    setup_exists /usr/lib/python3/dist-packages/pip || setup_apt install -y --no-install-recommends python3-venv
    rm -rf "$venv"
    if ! { python3 -m venv "$venv" && "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps \
        torch=="$setup_torch_version" nvidia-cufile==1.15.1.6 nvidia-cusparselt-cu13==0.8.0 nvidia-nvshmem-cu13==3.4.5 &&
        "$venv/bin/python" -m pip install -q --disable-pip-version-check numpy typing_extensions sympy networkx jinja2 fsspec filelock \
            setuptools wheel; } </dev/null >>"$setup_log" 2>&1; then
        setup_say "skipped: tests of the Python package, for want of torch (log: $setup_log)"
        rm -rf "$venv"
    fi
}

# The frameworks of test/python, in build/frameworks, for the Python that has torch. Nothing is fetched where none has.
setup_frameworks() {
    local lists=$root/test/python folder=$root/build/frameworks python found= wanted
    for python in "$root/build/torch-env/bin/python" python3; do
        if LD_LIBRARY_PATH=/usr/local/cuda/lib64 "$python" -c 'from torch import Tensor' 2>/dev/null; then
            found=$python
            break
        fi
    done
    [ -n "$found" ] || return 0
    wanted=$(cat "$lists/frameworks.txt" "$lists/unpacked.txt")
    [ "$wanted" = "$(cat "$folder/wanted.txt" 2>/dev/null)" ] && return 0
    setup_say "fetching transformers, vLLM, SGLang and others into build/frameworks"
    rm -rf "$folder"
    if ! "$found" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" -r "$lists/frameworks.txt" \
        </dev/null >>"$setup_log" 2>&1; then
        setup_say "skipped: tests of frameworks, which cannot be fetched (log: $setup_log)"
        rm -rf "$folder"
        return 0
    fi
    if ! "$found" "$lists/unpack.py" "$lists/unpacked.txt" "$folder" </dev/null >>"$setup_log" 2>&1; then
        setup_say "skipped: tests of servers, which cannot be fetched (log: $setup_log)"
        return 0
    fi
    echo "$wanted" >"$folder/wanted.txt"
}

# setup_configure FOLDER OPTION...: a build folder with these options, new or not.
setup_configure() {
    local folder=$1
    shift
    if [ -e "$folder/build.ninja" ] && meson setup --reconfigure "$folder" "$@" </dev/null >"$setup_log" 2>&1; then
        return 0
    fi
    rm -rf "$folder/meson-private" "$folder/meson-info" "$folder/build.ninja" # of another Meson, or of a setup that was cut short
    meson setup "$folder" "$@" </dev/null >"$setup_log" 2>&1
}

setup_all() { # demo, check or all
    local lists=$setup_needed
    [ "$1" != demo ] && lists+=" $setup_tests"
    [ "$1" = all ] && lists+=" $setup_machines"
    mkdir -p "$root/build" || return 1
    setup_log=$root/build/setup.log
    : >"$setup_log"
    setup_packages "$lists" || return 1
    [ "$1" = demo ] || setup_pyverbs
    setup_cuda
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -u
    setup_all "${1:-all}" && setup_torch && setup_frameworks && setup_say ok
fi
