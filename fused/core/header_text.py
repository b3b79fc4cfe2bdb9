#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""header_text.py HEADER OUTPUT.c: write a C source with prs_fused_header(), which returns the text of the header."""
import pathlib
import sys

header, output = map(pathlib.Path, sys.argv[1:])
lines = ",\n".join("    " + ", ".join(map(str, line)) for line in (header.read_bytes() + b"\0").splitlines(keepends=True))
output.write_text(f"/* Written by fused/core/header_text.py from {header.name}. */\n#include <perseus/fused.h>\n\n"
                  f"const char *prs_fused_header(void)\n{{\n    static const char text[] = {{\n{lines}}};\n    return text;\n}}\n")
