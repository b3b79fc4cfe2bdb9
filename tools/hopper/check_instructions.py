#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fail if the emulator's ptx.cuh lacks a function of fused/core/ptx.cuh, or declares it with other parameters.

usage: check_instructions.py ROOT
"""
import pathlib
import re
import sys

FUNCTION = re.compile(r"(?m)^(template\s*<[^>]*>\s*)?PRS_DEVICE\s+([\w\s*]+?)(\w+)\(([^{;]*)\)\s*\{")


def functions(path):
    found = {}
    for template, result, name, parameters in FUNCTION.findall(path.read_text()):
        found[name] = " ".join(f"{template} {result} {name}({parameters})".split()).replace("* ", "*")
    return found


def main():
    root = pathlib.Path(sys.argv[1])
    real = functions(root / "fused/core/ptx.cuh")
    shadow = functions(root / "tools/hopper/include/fused/core/ptx.cuh")
    wrong = [f"{name}: not in tools/hopper/include/fused/core/ptx.cuh" for name in real if name not in shadow]
    wrong += [f"{name}:\n  ptx.cuh:  {real[name]}\n  emulator: {shadow[name]}" for name in real
              if name in shadow and real[name] != shadow[name]]
    print("\n".join(wrong) or f"names: {len(real)} functions, ok")
    return 1 if wrong or len(real) < 10 else 0


if __name__ == "__main__":
    sys.exit(main())
