# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts of this folder, in the root of the repository, with their arguments [BUILD] [STEP ...]: each step has a
# time limit, and after one that fails the next one runs.
# OUT (default .) gets one file of JSON lines a step; STEPS, or the arguments, name the steps to run (default: all).
build=$(realpath -m "${1:-build}")
[ $# -lt 2 ] || STEPS="${*:2}"
out=${OUT:-.}
commit=${COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}
failed=0
mkdir -p "$out" || exit 1
# NVLink multicast is never used on these hosts. Kernels are loaded at once, since none can be loaded while a persistent one runs.
export PERSEUS_LOG=${PERSEUS_LOG:-error} NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 CUDA_MODULE_LOADING=EAGER

show() { # file: print part of a step's output; a script may define its own
    cut -c1-420 "$1"
}

step() { # name, seconds, command...; files are $OUT/$prefix$name$suffix.{json,err}
    local name=$1 limit=$2 file=$out/${prefix:-}$1${suffix:-} status
    shift 2
    case " ${STEPS:-$name} " in *" $name "*) ;; *) return 0 ;; esac
    echo "== $name, at $SECONDS s"
    timeout "$limit" "$@" >"$file.json" 2>"$file.err"
    status=$?
    show "$file.json"
    if [ $status -ne 0 ]; then
        echo "FAILED $name: status $status"
        tail -5 "$file.err"
        failed=$((failed + 1))
    fi
}

# With --corrupt, a bench must find the change: it exits with 1 and prints rows, each with a difference. A bench that cannot run also exits
# with 1, but prints no row. For bash -c.
finds() {
    local rows status
    rows=$("$@")
    status=$?
    printf '%s\n' "$rows"
    [ $status = 1 ] && [ -n "$rows" ] && ! grep -qv '"differing_[a-z]*": \?[1-9]' <<<"$rows"
}
export -f finds

steps_end() { # exit status: how many failed
    echo "$(basename "$0"): $failed failed"
    exit $failed
}
