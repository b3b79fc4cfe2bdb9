#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""parts.py SOURCE CC [NVCC_ROOT]: each part of -Dparts configures alone, without a warning of Meson, and installs only
its own files. The kernels, asked for by name, are refused where there is no nvcc or no g++. MESON names another Meson
to try, such as the oldest that is supported."""
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

PARTS = {  # what a part installs in addition to documents: all of these, and nothing that matches none
    "plugin": ["libnccl-net-perseus.so"],
    "softnic": ["softnic-run", "softnicctl", "libibverbs.so.1", r"(softnic-run|softnicctl)\.1",
                r"lib(mlx5|rdmacm|efa|ibverbs).*", r"libsoftnic_(audit|driver_calls)\.so"],
    "transport": [r"libperseus\.so.*", r"perseus\.pc", r".*\.h", r"device\.cuh"],
    "fused": [r"libperseus-fused\.so.*", r"perseus-fused\.pc", r".*\.h", r"device\.cuh"],
    "tools": ["perseus-info", "perseus-perf", r"perseus-.*", r".*\.cluster", r"libperseus\.so.*", r"perseus\.pc",
              r".*\.h", r"device\.cuh", r"libperseus-perf-gpu\.so"],
}
WARNING = re.compile(r"WARNING|DEPRECATION|NOTICE|deprecated", re.IGNORECASE)


def run(command, env):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def configure(meson, source, folder, options, env):
    text = run([*meson, "setup", str(folder), source, *options], env)
    return [f"{' '.join(options)}: {line}" for line in text.splitlines() if WARNING.search(line)]


def without(meson, source, folder, option, env, said):
    """-Dparts=fused asks for the kernels: where they cannot be built, meson setup must fail, and say why."""
    command = [*meson, "setup", str(folder), source, "-Dparts=fused", *option]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    text = done.stdout + done.stderr
    refused = done.returncode != 0 and re.search(said, text)
    return [] if refused else [f"{shlex.join(command)}: exit {done.returncode}, and not '{said}' in {text}"]


def installed(folder):
    plan = json.loads((folder / "meson-info/intro-installed.json").read_text())
    return [pathlib.Path(name).name for name in plan.values() if "/share/doc/" not in name]


def check(meson, source, options, root, env):
    wrong = configure(meson, source, root / "all", options, env)
    wrong += without(meson, source, root / "no-nvcc", [f"-Dnvcc_root={root}"], env, "ERROR:.*-Dnvcc_root=FOLDER")
    has_cuda = any(name.startswith("libperseus-fused") for name in installed(root / "all"))
    if has_cuda:
        wrong += without(meson, source, root / "no-g++", options, dict(env, CXX="/nonexistent/g++"),
                         r"ERROR: Unknown compiler.*/nonexistent/g\+\+")
    for part, patterns in PARTS.items():
        if part == "fused" and not has_cuda:
            continue
        folder = root / part
        wrong += configure(meson, source, folder, [*options, f"-Dparts={part}"], env)
        names = installed(folder)
        wrong += [f"-Dparts={part} installs {name}"
                  for name in names if not any(re.fullmatch(p, name) for p in patterns)]
        wrong += [f"-Dparts={part} installs no {p}"
                  for p in patterns if not any(re.fullmatch(p, name) for name in names)
                  and not (p.startswith("libperseus-perf") and not has_cuda)]
    return wrong


def main(source, compiler, nvcc_root=""):
    env = dict(os.environ, CC=compiler)
    meson = shlex.split(os.environ.get("MESON", "meson"))
    with tempfile.TemporaryDirectory(prefix="perseus-parts-") as name:
        options = [f"-Dnvcc_root={nvcc_root}"] if nvcc_root else []
        root = pathlib.Path(name)
        wrong = check(meson, source, options, root, env)
    print("\n".join(wrong) or "each part configures alone, without a warning")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
