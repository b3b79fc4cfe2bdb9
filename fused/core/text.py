#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""text.py FUNCTION HEADER OUTPUT.c INPUT...: write a C source with FUNCTION(), which HEADER declares, and which returns
the text of the inputs."""
import pathlib
import sys

function, header = sys.argv[1:3]
output, *sources = map(pathlib.Path, sys.argv[3:])
text = b"".join(source.read_bytes() for source in sources) + b"\0"
lines = ",\n".join("    " + ", ".join(map(str, line)) for line in text.splitlines(keepends=True))
names = ", ".join(source.name for source in sources)
output.write_text(f"/* Written by fused/core/text.py from {names}. */\n#include {header}\n\n"
                  f"const char *{function}(void)\n{{\n    static const char text[] = {{\n{lines}}};\n"
                  "    return text;\n}\n")
