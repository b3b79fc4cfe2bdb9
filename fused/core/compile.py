#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile kernels, and refuse what nvcc makes of a wrong mixture of addresses.

    compile.py OUTPUT.o NVCC [ARGUMENT ...]        or    compile.py --check FILE.ptx

A kernel's parameters are in an address space of their own. nvcc takes an address that may be that of a parameter or of
other memory, as in `a ? *(volatile int *)pointer : args.number`, for one of global memory and does not convert it:
every such load faults. No emulator of a GPU can see this, so the PTX is searched for it.

Where ccache is installed, what was compiled before is taken from there, as Meson does for C.
"""
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

INSIDE = "COMPILE_PY_NVCC"  # set where ccache calls this file: the nvcc

FUNCTION = re.compile(r"^\s*(?:\.visible |\.weak )*\.(?:entry|func)\b")
ADDRESS = re.compile(r"^\s*mov\.[bu]64\s+(%\w+), (\w+_param_\d+);")
COPY = re.compile(r"^\s*(?:@!?%\w+\s+)?(?:mov\.[bu]64|add\.s64|selp\.[bu]64)\s+(%\w+), (.*);")
ACCESS = re.compile(r"^\s*(?:@!?%\w+\s+)?((?:ld|st|atom|red|prefetchu?)\.(?!param)\S+)\s.*?\[(%\w+)")
LINE = re.compile(r"^\s*\.loc\s+(\d+) (\d+)")
FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]+)"')


def faults(lines):
    """For each place of the source that accesses memory other than parameters by an address that may be a parameter's:
    its file and line, the instruction and the line of PTX."""
    found, names = {}, {}
    addresses, where = set(), ("", "")
    for line in lines:
        if match := FILE.match(line):
            names[match[1]] = match[2]
    for number, line in enumerate(lines, 1):
        if FUNCTION.match(line):
            addresses = set()
        elif match := LINE.match(line):
            where = match.groups()
        elif match := ADDRESS.match(line):
            addresses.add(match[1])
        elif match := COPY.match(line):
            if addresses & set(re.findall(r"%\w+", match[2])):
                addresses.add(match[1])
        elif (match := ACCESS.match(line)) and match[2] in addresses:
            found.setdefault((names.get(where[0], "unknown source"), where[1]), (match[1], number))
    return found


def check(path):
    found = faults(path.read_text(encoding="utf-8").splitlines())
    for (source, line), (instruction, number) in found.items():
        print(f"{source}:{line}: {instruction} by an address that may be that of a kernel's parameter (line {number} "
              f"of {path.name}): write `if`, not `? :`, of a parameter and other memory", file=sys.stderr)
    return 1 if found else 0


def compiled(nvcc, arguments):
    """Runs nvcc; an object is kept only if its PTX is right."""
    if "-c" not in arguments:  # ccache asks for the preprocessed source
        return subprocess.run([nvcc, *arguments], check=False).returncode
    output = pathlib.Path(arguments[arguments.index("-o") + 1])
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        done = subprocess.run([nvcc, *arguments, "--keep", "--keep-dir", folder], check=False)
        status = done.returncode or max((check(ptx) for ptx in pathlib.Path(folder).glob("*.ptx")), default=1)
    if status:
        output.unlink(missing_ok=True)
    return status


def cached(ccache, nvcc, arguments):
    """The same by ccache, to which this file is the compiler. Another nvcc or another check is another compiler."""
    real, script = pathlib.Path(shutil.which(nvcc) or nvcc).resolve(), pathlib.Path(__file__).resolve()
    identity = f"{real} {real.stat().st_mtime_ns} {hashlib.sha256(script.read_bytes()).hexdigest()}"
    settings = {"CCACHE_COMPILERTYPE": "nvcc", "CCACHE_COMPILERCHECK": f"string:{identity}",
                "CCACHE_BASEDIR": str(script.parents[2]), "CCACHE_NOHASHDIR": "1", INSIDE: nvcc}
    return subprocess.run([ccache, str(script), *arguments], env={**os.environ, **settings}, check=False).returncode


def main():
    if nvcc := os.environ.get(INSIDE):
        return compiled(nvcc, sys.argv[1:])
    if sys.argv[1] == "--check":
        return check(pathlib.Path(sys.argv[2]))
    output, nvcc, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
    arguments += ["-o", output]
    ccache = shutil.which("ccache")
    usable = ccache and os.access(__file__, os.X_OK)
    return cached(ccache, nvcc, arguments) if usable else compiled(nvcc, arguments)


if __name__ == "__main__":
    sys.exit(main())
