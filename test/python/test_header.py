#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_header.py SOURCE BUILD: what perseus/_header.py reads from the headers agrees with what a C compiler says. Needs
no torch."""
import ctypes
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

SOURCE, BUILD = map(pathlib.Path, sys.argv[1:3])


def load(name):
    spec = importlib.util.spec_from_file_location(name, SOURCE / "fused/python/perseus" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(header):
    """Sizes, offsets and constants, by the names that the C program below gives them."""
    lines = ["#include <stdio.h>", "#include <perseus/attention.h>", "#include <perseus/gemm.h>",
             "#include <perseus/moe.h>", "#include <perseus/quantise.h>", "int main(void) {"]
    for name, kind in header.structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        for field, _ in kind._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));')
            lines.append(f'printf("{name}.{field}: %zu\\n", sizeof(((struct {name} *)0)->{field}));')
    lines += [f'printf("{name} %d\\n", (int){name});' for name in header.constants]
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "layouts.c"), pathlib.Path(folder, "layouts")
        source.write_text("\n".join([*lines, "return 0; }", ""]))
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", f"-I{SOURCE / 'include'}", str(source), "-o",
                        str(program)], check=True)
        return dict(line.rsplit(" ", 1)
                    for line in subprocess.run([str(program)], check=True, capture_output=True,
                                               text=True).stdout.splitlines())


def read(header):
    found = {}
    for name, kind in header.structs.items():
        found[name] = ctypes.sizeof(kind)
        for field, _ in kind._fields_:
            found[f"{name}.{field}"] = getattr(kind, field).offset
            found[f"{name}.{field}:"] = getattr(kind, field).size
    return {name: str(value) for name, value in {**found, **header.constants}.items()}


def main():
    module = load("_header")
    text = "".join((SOURCE / f"include/perseus/{name}.h").read_text()
                   for name in ("common", "fused", "gemm", "moe", "attention", "quantise"))
    header = module.Header(text)
    bad = [f"{name}: read {have}, compiled {want}"
           for (name, have), want in zip(read(header).items(), compiled(header).values()) if have != want]
    if len(header.structs) != text.count("\nstruct ") - sum(line.startswith("struct ") and line.endswith(";")
                                                            for line in text.splitlines()):
        bad.append(f"read {len(header.structs)} structs: the headers have others")
    if len(header.functions) != text.count("\nPRS_API "):
        bad.append(f"read {len(header.functions)} functions of {text.count(chr(10) + 'PRS_API ')}")
    library = ctypes.CDLL(str(BUILD / "tools/hopper/libperseus-fused-emulated.so"))
    library.prs_fused_header.restype = ctypes.c_char_p
    if library.prs_fused_header().decode() != text:
        bad.append("prs_fused_header() is not the text of the headers")
    bad += [f"the library has no {name}()" for name in header.functions if not hasattr(library, name)]
    for claim in ("struct a { wchar_t b; };", "struct a { uint32_t; };"):
        try:
            module.Header(claim)
            bad.append(f"accepted {claim!r}")
        except (KeyError, ValueError):
            pass
    print("\n".join(bad) or f"header: {len(header.structs)} structs, {len(header.functions)} functions, "
                            f"{len(header.constants)} constants agree")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
