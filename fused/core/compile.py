#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile kernels, and refuse what nvcc makes of a wrong mixture of addresses.

    compile.py [--strict] OUTPUT.o NVCC [ARGUMENT ...]        or    compile.py --check FILE.ptx

A kernel's parameters are in an address space of their own. nvcc takes an address that may be that of a parameter or of
other memory, as in `a ? *(volatile int *)pointer : args.number`, for one of global memory and does not convert it:
every such load faults. No emulator of a GPU can see this, so the PTX is searched for it.

--strict (-Dwerror=true) also refuses kernels whose products ptxas serialises: they are right, but slow (a step of
attention took 1.4 times as long), and ptxas only mentions it. Another version of ptxas may do it elsewhere, so it is no
error for users.

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


def serialised(text):
    """The kernels of which ptxas says so."""
    return sorted(set(re.findall(r"wgmma\.mma_async instructions are serialized .*function '([^']+)'", text)))


def run(command, **settings):
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **settings)


def compiled(nvcc, arguments):
    """Runs nvcc; an object is kept only if its PTX is right."""
    if "-c" not in arguments:  # ccache asks for the preprocessed source
        return run([nvcc, *arguments])
    output = pathlib.Path(arguments[arguments.index("-o") + 1])
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        done = run([nvcc, *arguments, "--keep", "--keep-dir", folder])
        if done.returncode == 0:
            done.returncode = max((check(ptx) for ptx in pathlib.Path(folder).glob("*.ptx")), default=1)
    if done.returncode:
        output.unlink(missing_ok=True)
    return done


def cached(ccache, nvcc, arguments):
    """The same by ccache, to which this file is the compiler. Another nvcc or another check is another compiler."""
    real, script = pathlib.Path(shutil.which(nvcc) or nvcc).resolve(), pathlib.Path(__file__).resolve()
    identity = f"{real} {real.stat().st_mtime_ns} {hashlib.sha256(script.read_bytes()).hexdigest()}"
    settings = {"CCACHE_COMPILERTYPE": "nvcc", "CCACHE_COMPILERCHECK": f"string:{identity}",
                "CCACHE_BASEDIR": str(script.parents[2]), "CCACHE_NOHASHDIR": "1", INSIDE: nvcc}
    return run([ccache, str(script), *arguments], env={**os.environ, **settings})


def main():
    if nvcc := os.environ.get(INSIDE):
        done = compiled(nvcc, sys.argv[1:])
        sys.stderr.write(done.stderr)
        return done.returncode
    if sys.argv[1] == "--check":
        return check(pathlib.Path(sys.argv[2]))
    strict = sys.argv[1] == "--strict"
    output, nvcc, *arguments = sys.argv[2 if strict else 1:]
    arguments += ["-o", output]
    ccache = shutil.which("ccache")
    usable = ccache and os.access(__file__, os.X_OK)
    done = cached(ccache, nvcc, arguments) if usable else compiled(nvcc, arguments)
    sys.stderr.write(done.stderr)
    slow = serialised(done.stderr)
    for kernel in slow if strict else ():
        print(f"{output}: ptxas serialises the products of {kernel}: look for what touches accumulators between their "
              "issue and their wait", file=sys.stderr)
    if strict and slow and done.returncode == 0:
        pathlib.Path(output).unlink(missing_ok=True)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
