#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fail if the emulator's ptx.cuh lacks a function of fused/core/ptx.cuh or wgmma.cuh, or declares it with other
parameters. The same for perseus/sync.h.

usage: check_instructions.py ROOT
"""
import pathlib
import re
import sys

PAIRS = (("fused/core/ptx.cuh", "tools/hopper/include/fused/core/ptx.cuh"),
         ("fused/core/wgmma.cuh", "tools/hopper/include/fused/core/ptx.cuh"),
         ("include/perseus/sync.h", "tools/hopper/include/perseus/sync.h"))
FUNCTION = re.compile(r"(?m)^(template\s*<[^>]*>\s*)?PRS_(?:DEVICE|HD)\s+([\w\s*]+?)(\w+)\(([^{;]*)\)\s*\{")


def functions(path):
    found = {}
    for template, result, name, parameters in FUNCTION.findall(path.read_text()):
        found[name] = " ".join(f"{template} {result} {name}({parameters})".split()).replace("* ", "*")
    return found


def main():
    root = pathlib.Path(sys.argv[1])
    wrong = []
    for original, replacement in PAIRS:
        real, shadow = functions(root / original), functions(root / replacement)
        if len(real) < 10:
            wrong.append(f"{original}: only {len(real)} functions found")
        wrong += [f"{name}: not in {replacement}" for name in real if name not in shadow]
        wrong += [f"{name}:\n  {original}: {real[name]}\n  emulator: {shadow[name]}" for name in real
                  if name in shadow and real[name] != shadow[name]]
    print("\n".join(wrong) or "every function is there")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
