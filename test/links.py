#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""links.py ROOT: each relative link of a document leads to a file, each result that a document names is in doc/results,
and each result there is named by a document: it is a claim, or it goes."""
import pathlib
import re
import sys

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
RESULT = re.compile(r"`([A-Za-z0-9-]+(?:-\*)?[A-Za-z0-9*-]*\.json)`")
SKIP = ("build", ".git", "node_modules")


def documents(root):
    for path in sorted(root.rglob("*.md")):
        if not any(part.startswith(SKIP) for part in path.relative_to(root).parts) and "figures" not in path.parts:
            yield path


def main(root):
    root = pathlib.Path(root)
    results = {path.name for path in (root / "doc/results").glob("*.json")}
    wrong, named = [], set()
    for path in documents(root):
        text = path.read_text()
        for target in LINK.findall(text):
            if "://" not in target and not (path.parent / target).exists():
                wrong.append(f"{path.relative_to(root)}: links to {target}, which is not there")
        for name in RESULT.findall(text):
            fitting = {result for result in results if pathlib.PurePath(result).match(name)}
            if not fitting:
                wrong.append(f"{path.relative_to(root)}: names {name}, which is not in doc/results")
            if "*" not in name:
                named |= fitting
    wrong += [f"doc/results/{name}: no document names it" for name in sorted(results - named)]
    print("\n".join(wrong) or f"{len(results)} results")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
