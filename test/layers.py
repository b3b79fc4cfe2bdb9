#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fail on an include that reaches into a layer the including folder must not know (ARCHITECTURE.md, "The map").

A quoted include must be rooted at the repository ("transport/order/order.h"); the table says which roots a folder may
name and which system headers betray knowledge it must not have.
"""
import pathlib
import re
import subprocess
import sys

SN, SN_THREAD = "tools/softnic/", "transport/util/thread"
T, T_FORBIDDEN = "transport/", ("nccl", "cuda_runtime")
# efadv.h of rdma-core before 43 lacks what softnic has
SN_FORBIDDEN = ("nccl", "cuda_runtime", "perseus/", "infiniband/efadv")
ALLOWED = {  # folder: (rooted includes it may use, angle-bracket prefixes that are forbidden)
    "include": ({"include"}, ("infiniband/", "nccl")),
    T + "util": ({T + "util"}, ("infiniband/", "nccl", "cuda", "perseus/")),
    # The order engine is a pure state machine: no verbs, no clock, no thread.
    T + "order": ({T + "order", T + "util"},
                  T_FORBIDDEN + ("infiniband/", "pthread", "time.h", "sys/time", "sched", "unistd")),
    T + "host": ({T + "host", T + "order", T + "util"}, T_FORBIDDEN + ("infiniband/",)),
    T + "nic": ({T + "nic", T + "host", T + "order", T + "util"}, T_FORBIDDEN + ("infiniband/", "rdma/")),
    T + "nic/verbs": ({T + "nic", T + "host", T + "order", T + "util"}, T_FORBIDDEN + ("rdma/",)),
    T + "nic/ofi": ({T + "nic", T + "host", T + "order", T + "util"}, T_FORBIDDEN + ("infiniband/",)),
    T + "peer": ({T + "peer", T + "nic", T + "host", T + "order", T + "util"}, T_FORBIDDEN + ("infiniband/",)),
    T + "connect": ({T + "connect", T + "peer", T + "nic", T + "host", T + "order", T + "util"},
                    T_FORBIDDEN + ("infiniband/",)),
    T + "gpu": ({T + "gpu", T + "connect", T + "peer", T + "nic", T + "host", T + "order", T + "util"},
              T_FORBIDDEN + ("infiniband/",)),
    "plugin": ({"plugin", "transport/util"}, ("infiniband/", "nccl", "cuda")),
    "fused/core": ({"fused/core", "transport/host/fd_pass", "transport/util"}, ("infiniband/", "nccl")),
    "fused/gemm": ({"fused/gemm", "fused/core", "transport/util"}, ("infiniband/", "nccl")),
    "fused/moe": ({"fused/moe", "fused/core", "transport/util"}, ("infiniband/", "nccl")),
    "fused/quantise": ({"fused/quantise", "fused/core", "transport/util"}, ("infiniband/", "nccl")),
    "fused/attention": ({"fused/attention", "fused/core", "transport/util"}, ("infiniband/", "nccl")),
    "tools/hopper": ({"tools/hopper", "fused/core/element", "fused/core/launch", "fused/gemm/unfused/lt"},
                     ("infiniband/", "nccl")),
    "tools/softnic/world": ({SN + "world", SN_THREAD}, SN_FORBIDDEN),
    "tools/softnic/memory": ({SN + "memory", SN + "world", SN_THREAD}, SN_FORBIDDEN + ("infiniband/",)),
    "tools/softnic/nic": ({SN + "nic", SN + "memory", SN + "world", SN_THREAD}, SN_FORBIDDEN),
    "tools/softnic/verbs": ({SN + "verbs", SN + "nic", SN + "memory", SN + "world", SN_THREAD}, SN_FORBIDDEN),
    "tools/softnic/cm": ({SN + "cm", SN + "verbs/cm_world", SN + "world/world", SN + "stub/stub"},
                         SN_FORBIDDEN + ("rdma/",)),
    "tools/softnic/cli": ({SN + "cli", SN + "world", SN_THREAD, "tools/common/stdout_check"},
                          SN_FORBIDDEN + ("infiniband/",)),
    "tools/softnic/cuda": ({SN + "cuda", SN + "memory/cuda_api"}, SN_FORBIDDEN + ("infiniband/",)),
    "tools/softnic/stub": ({SN + "stub"}, SN_FORBIDDEN),
    "tools/softnic": (set(), ()),
    "tools/sim": ({"tools/sim", "tools/common", "transport", "fused"}, ("nccl", "cuda_runtime", "infiniband/")),
    SN + "test": (None, ()),
    "tools/hopper/test": (None, ()),
    "tools/sim/test": (None, ()),
    "tools": ({"tools", "transport/util", "plugin/abi"}, ()),
    "test": (None, ()),
}
# The folders of NIC back ends. One file of the rest knows that they exist.
BACK_ENDS, REGISTRY = (T + "nic/verbs/", T + "nic/ofi/"), T + "nic/backends.c"
# What all families of kernels share names none of them.
SHARED, FAMILY = "fused/core/", re.compile(r"\bprs_(?:gemm|moe|attention)", re.I)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def folder_rule(path):
    """The most specific table row for a repository-relative path."""
    for folder in sorted(ALLOWED, key=len, reverse=True):
        if path.as_posix().startswith(folder + "/"):
            return ALLOWED[folder]
    return None


def violations(root):
    names = subprocess.run(["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"],
                           capture_output=True, text=True).stdout.split()
    if not names:  # an unpacked archive has no git
        names = [p.relative_to(root).as_posix() for p in pathlib.Path(root).rglob("*") if p.is_file()]
    for name in names:
        path = pathlib.Path(name)
        full = pathlib.Path(root) / path
        rule = folder_rule(path)
        if path.suffix not in (".c", ".cpp", ".h", ".cu", ".cuh") or rule is None or not full.exists():
            continue
        roots, forbidden = rule
        for number, line in enumerate(full.read_text(errors="replace").splitlines(), 1):
            if name.startswith(SHARED) and FAMILY.search(line):
                yield f"{name}:{number}: {SHARED} names a family of kernels: {FAMILY.search(line).group()}"
            match = INCLUDE.match(line)
            if not match:
                continue
            bracket, target = match.groups()
            if bracket == "<" and target.startswith(forbidden):
                yield f"{name}:{number}: this layer must not know <{target}>"
            if (bracket == '"' and roots is not None
                and not any(target.startswith(r + "/") or target.startswith(r + ".") for r in roots)):
                yield f'{name}:{number}: "{target}" is not among the layers it may see ({", ".join(sorted(roots))})'
            if bracket == '"' and roots is not None and name != REGISTRY and target.startswith(BACK_ENDS):
                if not any(target.startswith(b) and name.startswith(b) for b in BACK_ENDS):
                    yield f'{name}:{number}: only {REGISTRY} may name a back end: "{target}"'


def main():
    found = list(violations(sys.argv[1]))
    print("\n".join(found) or "layers: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
