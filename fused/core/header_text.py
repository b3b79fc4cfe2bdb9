#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""header_text.py HEADER... OUTPUT.c: write a C source with prs_fused_header(), which returns the text of the headers."""
import pathlib
import sys

*headers, output = map(pathlib.Path, sys.argv[1:])
text = b"".join(header.read_bytes() for header in headers) + b"\0"
lines = ",\n".join("    " + ", ".join(map(str, line)) for line in text.splitlines(keepends=True))
names = ", ".join(header.name for header in headers)
output.write_text(f"/* Written by fused/core/header_text.py from {names}. */\n#include <perseus/fused.h>\n\n"
                  f"const char *prs_fused_header(void)\n{{\n    static const char text[] = {{\n{lines}}};\n    return text;\n}}\n")
