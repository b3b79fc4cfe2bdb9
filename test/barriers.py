#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""barriers.py ROOT: doc/barriers.md has each label of an ordered access of the host's code, and no other."""
import pathlib
import re
import sys

LABEL = re.compile(r"\[([a-z]+(?:-[a-z]+)*)\]")
ORDERED = re.compile(r"__ATOMIC_(ACQUIRE|RELEASE|ACQ_REL|SEQ_CST)|prs_(load|store|add)\w*_(acquire|release)|dmb")
FOLDERS = ("transport", "plugin", "include", "fused/core")


def labels(root):
    """The labels in the comments right before or in a line with an ordered access, and where each was seen."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.[ch]")):
            comment = []
            for line in path.read_text().split("\n"):
                text = line.strip()
                for label in LABEL.findall(line) if "/*" in line or text.startswith("*") else []:
                    comment.append(label)
                if ORDERED.search(line):
                    for label in comment:
                        found.setdefault(label, path.relative_to(root))
                if text and not text.startswith(("/*", "*")):
                    comment = []
    return found


def main(root):
    root = pathlib.Path(root)
    found = labels(root)
    page = (root / "doc/barriers.md").read_text()
    rows = [line.split("|")[1] for line in page.split("\n") if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    sources = "".join(path.read_text() for folder in (*FOLDERS, "tools/softnic")
                      for path in sorted((root / folder).rglob("*.[ch]")))
    wrong = [f"{where}: [{label}] is not in doc/barriers.md" for label, where in found.items() if label not in named]
    wrong += [f"doc/barriers.md: no code has [{name}]" for name in sorted(named - set(found))
              if f"[{name}]" not in sources]
    print("\n".join(wrong) or f"barriers: {len(found)} labels")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
