#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""readme.py SOURCE: the commands of README.md's starts, as they stand, in a copy of the tree.

A block runs whole, in bash -e. Lines that need a GPU, minutes of nvcc, or an installation of torch are left out: ROWS
names them, and test/install.py, test/python and test/hopper try what they do. A line that no row names and no block has
is an error, so that a new command of the README is tried too."""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SKIP = 77
LIMIT_S = 550
JOB = """#!/usr/bin/env python3
import ctypes, os
assert os.environ["NCCL_NET"] == "Perseus" and ctypes.CDLL(os.environ["NCCL_NET_PLUGIN"]).ncclNetPlugin_v8
print("host:1:1 [0] NCCL INFO Using network Perseus")
"""
# Start: (what the output must have, beginnings of lines that are left out)
ROWS = {
    "1. An NCCL job": (r"Using network Perseus", []),
    "2. A PyTorch trainer": (None, ["meson setup build-fused", "PERSEUS_BUILD=build-fused pip install",
                                    "PERSEUS_FUSED_LIBRARY=emulated python ", "torchrun"]),
    "3. A server of MoE models": (None, ["torchrun"]),
    "4. A C program": (r"^0\.\d+\.\d+$", []),
    "5. An RDMA program without a NIC": (r"(?s)softnic0.*^ *65536 ", []),
}


def blocks(text):
    """{start: its first block of commands}."""
    sections = re.split(r"^### ", text[text.index("## Start"):text.index("## The parts")], flags=re.M)[1:]
    return {section.partition("\n")[0]: re.search(r"^```\n(.*?)^```", section, re.M | re.S)[1] for section in sections}


def copy_tree(source, folder):
    names = subprocess.run(["git", "-C", source, "ls-files", "-z", "-co",
                            "--exclude-standard"], capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (source / name).is_file() and not name.startswith("doc/results/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, folder / name)


def own_network():
    """Words before a command: perftest's port may be taken by another test of this host."""
    words = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    works = shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True).returncode == 0
    return words if works else []


def main(source):
    source = pathlib.Path(source)
    starts = blocks((source / "README.md").read_text())
    assert list(starts) == list(ROWS), f"README.md has the starts {list(starts)}"
    needed = ("meson", "ninja", "ib_write_bw", "ibv_devinfo", "pkg-config")
    missing = [name for name in needed if not shutil.which(name)]
    if missing or not (source / ".git").exists():
        print(f"skipped: needs a checkout, and {', '.join(missing) or 'nothing else'}")
        return SKIP
    wrong = []
    with tempfile.TemporaryDirectory(prefix="perseus-readme-") as name:
        folder = pathlib.Path(name)
        copy_tree(source, folder)
        (folder / "your_job").write_text(JOB)
        (folder / "your_job").chmod(0o755)
        for start, (said, left_out) in ROWS.items():
            lines = starts[start].splitlines()
            for beginning in left_out:
                if not any(line.startswith(beginning) for line in lines):
                    wrong.append(f"{start}: no line begins with {beginning!r}")
            kept = [line for line in lines if not line.startswith(tuple(left_out))] if left_out else lines
            if not said:
                wrong += [f"{start}: {line!r} is not tried" for line in kept]
                continue
            done = subprocess.run([*own_network(), "bash", "-euo", "pipefail", "-c", "\n".join(kept)],
                                  cwd=folder, text=True, stdin=subprocess.DEVNULL, capture_output=True,
                                  timeout=LIMIT_S)
            if done.returncode != 0 or not re.search(said, done.stdout, re.M):
                wrong.append(f"{start}: exit {done.returncode}, {said} is not in the output:\n"
                             f"{done.stdout[-3000:]}{done.stderr[-3000:]}")
    print("\n".join(wrong) or f"{len(ROWS)} starts")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
