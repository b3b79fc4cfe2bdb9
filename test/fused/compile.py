# SPDX-License-Identifier: Apache-2.0
"""compile.py COMPILE: fused/core/compile.py refuses PTX that loads from an address that may be that of a kernel's
parameter, names the place, and takes what does not. With --strict it refuses kernels whose products are serialised."""
import pathlib
import subprocess
import sys
import tempfile

BEGIN = """.entry kernel(
\t.param .align 64 .b8 kernel_param_0[64]
)
{
\tmov.b64 \t%rd1, kernel_param_0;
\tld.param.u64 \t%rd2, [%rd1+8];
\t.loc\t1 31 5
"""
END = '}\n.file\t1 "launch.cuh"\n'
# `pointer ? *(volatile uint32_t *)pointer : args.m`, as nvcc 13.0 made it: one load from either address
WRONG = """\tsetp.eq.s64 \t%p1, %rd2, 0;
\tadd.s64 \t%rd3, %rd1, 16;
\tselp.b64 \t%rd4, %rd3, %rd2, %p1;
\tld.volatile.u32 \t%r1, [%rd4];
"""
# two loads; a tensor map, whose address is converted; the same register in another function
RIGHT = """\t@%p1 ld.param.u32 \t%r1, [%rd1+16];
\t@!%p1 ld.volatile.global.u32 \t%r1, [%rd2];
\tadd.s64 \t%rd3, %rd1, 128;
\tcvta.param.u64 \t%rd4, %rd3;
\tprefetch.tensormap [%rd4];
}
.func other()
{
\tld.volatile.u32 \t%r1, [%rd1];
"""


def checked(program, body):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(BEGIN + body + END)
        file.flush()
        return subprocess.run([sys.executable, program, "--check", file.name], capture_output=True, text=True,
                              check=False)


# Stands for nvcc: makes an object, and PTX in the last argument's folder, and says what ptxas 13.0 does.
NVCC = """#!/bin/sh
for last; do :; done
: >kernels.o
: >"$last/kernels.ptx"
echo "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions defining accumulator registers of a wgmma in the function '_Z6kernelv'" >&2
"""


def compiled(program, *options):
    """A run, and whether it kept the object."""
    with tempfile.TemporaryDirectory() as folder:
        nvcc = pathlib.Path(folder, "nvcc")
        nvcc.write_text(NVCC)
        nvcc.chmod(0o755)
        done = subprocess.run([sys.executable, program, *options, "kernels.o", nvcc, "-c", "kernels.cu"], cwd=folder,
                              env={"PATH": folder}, capture_output=True, text=True, check=False)  # no ccache
        return done, pathlib.Path(folder, "kernels.o").exists()


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    strict, kept = compiled(program, "--strict")
    assert strict.returncode == 1 and not kept, strict
    assert "kernels.o: ptxas serialises the products of _Z6kernelv" in strict.stderr, strict
    usual, kept = compiled(program)
    assert usual.returncode == 0 and kept and "C7515" in usual.stderr, usual
    wrong, right = checked(program, WRONG), checked(program, RIGHT)
    assert wrong.returncode == 1 and "launch.cuh:31: ld.volatile.u32" in wrong.stderr, wrong
    assert right.returncode == 0 and not right.stderr, right


if __name__ == "__main__":
    main()
