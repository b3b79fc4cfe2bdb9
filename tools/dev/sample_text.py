#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw comments with their code, and paragraphs of the documents, at random: reading them as a stranger shows whether
the English can be understood.

usage: tools/dev/sample_text.py [--seed N] [--comments 30] [--paragraphs 10]. The same seed draws the same places of the
same commit.
"""
import argparse
import pathlib
import random
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMENT = re.compile(r"/\*.*?\*/", re.S)
NOT_PROSE = ("SPDX", "MUTANT(", "/* ----")  # licence lines, mutation markers and section banners


def comments(path):
    """(line, comment, the four lines of code that follow) of each comment that has at least four words."""
    text = path.read_text()
    for match in COMMENT.finditer(text):
        if any(word in match.group(0) for word in NOT_PROSE) or len(match.group(0).split()) < 6:
            continue
        start = text.rfind("\n", 0, match.start()) + 1
        yield text.count("\n", 0, start) + 1, "\n".join(text[start:].split("\n")[:match.group(0).count("\n") + 5])


def paragraphs(path):
    """(line, text) of each paragraph of prose."""
    text = re.sub(r"```.*?```", lambda code: "\n" * code.group(0).count("\n"), path.read_text(), flags=re.S)
    for match in re.finditer(r"(?:^(?![#|<]|\s*$).+\n)+", text, re.M):
        if len(match.group(0).split()) >= 12:
            yield text.count("\n", 0, match.start()) + 1, match.group(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--comments", type=int, default=30)
    parser.add_argument("--paragraphs", type=int, default=10)
    options = parser.parse_args()
    if min(options.comments, options.paragraphs) < 0:
        parser.error(f"{min(options.comments, options.paragraphs)}: want no number below 0")
    names = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    code = [ROOT / n for n in names if n.endswith((".c", ".h", ".cu", ".cuh", ".cpp"))]
    prose = [ROOT / n for n in names if n.endswith(".md")]
    generator = random.Random(options.seed)
    for count, drawn in ((options.comments, [(p, *found) for p in code for found in comments(p)]),
                         (options.paragraphs, [(p, *found) for p in prose for found in paragraphs(p)])):
        for path, line, text in generator.sample(drawn, min(count, len(drawn))):
            print(f"== {path.relative_to(ROOT)}:{line}\n{text}\n")


if __name__ == "__main__":
    main()
