#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""evidence.py ROOT [FOLDER]: whether each measurement of FOLDER (doc/results) could be made again from this repository.

Each commit of a file and of its rows is one that HEAD comes from. "rebased" names those of branches that were rebased,
and for each the commit of main that brought the rows. What the command names in tools/ and test/ is there, each option
of a program of ours is in a source, and each step of test/gpu in its script. Where today's tools refuse the command, or
do something else, "today" says what. Skipped (77) without the history, or with another one."""
import json
import pathlib
import re
import subprocess
import sys

SKIP = 77
HASH = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b")
OURS = re.compile(r"(?:\S*/)?(?:perseus-[a-z-]+|softnic-run|softnicctl)|(?:build/)?(?:tools|test|fused/python)/\S+")
OPTION = re.compile(r"--[a-z][a-z0-9-]*")
SOURCES = (".c", ".h", ".py", ".sh", ".cu", ".cuh")


def git(root, *arguments):
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)


def known_words(root, names):
    """What an option may be called: every --word and "word" of the tools, tests and examples."""
    words = set()
    for name in names:
        path = root / name
        if not name.startswith(("tools/", "test/", "fused/python/")) or not path.is_file() or name.endswith(".md"):
            continue
        if path.suffix in SOURCES or not path.suffix:
            text = path.read_text(errors="replace")
            words |= set(OPTION.findall(text)) | {f"--{word}" for word in re.findall(r'"([a-z][a-z0-9-]*)"', text)}
    return words


def refused(command, words, names):
    """What of the command today's tools do not have."""
    wrong, ours = [], False
    for token in re.findall(r"[^\s;()|,\]\[]+|[;()|]", command):
        if token in ("--", ";", "|", "(", ")", "&&"):
            ours = ours and token in "()"
        elif OURS.fullmatch(token):
            ours = True
            built = token.startswith("build/") or not pathlib.PurePath(token).suffix
            if not built and token not in names:
                wrong.append(f"there is no {token}")
        elif ours and OPTION.fullmatch(token) and token not in words:
            wrong.append(f"no tool has the option {token}")
    return wrong


def check(path, words, names, commits):
    """What is wrong with one file."""
    data = json.loads(path.read_text())
    rebased = data.get("rebased", {})
    wrong = [] if data.get("today") else refused(data.get("command", ""), words, names)
    said = {str(row["commit"]) for row in data.get("rows", []) if "commit" in row}
    hashes = set(HASH.findall(data.get("commit", ""))) | set(rebased.values())
    hashes |= {hash_ for text in said for hash_ in HASH.findall(text) or [text]}
    if not HASH.search(data.get("commit", "")):
        wrong.append(f"its commit is \"{data.get('commit', '')}\"")
    return wrong + [f"commit {hash_} is not one that HEAD comes from" for hash_ in sorted(hashes - set(rebased))
                    if not any(commit.startswith(hash_) for commit in commits)]


def main(root, folder=None):
    root = pathlib.Path(root)
    history = git(root, "rev-list", "HEAD")
    if history.returncode or git(root, "rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        print("skipped: needs a clone with its history")
        return SKIP
    names = set(git(root, "ls-files", "-co", "--exclude-standard").stdout.split("\n"))
    words, commits = known_words(root, names), history.stdout.split()
    measured = "".join(path.read_text() for path in (root / "doc/results").glob("*.json"))
    if not any(commit.startswith(hash_) for hash_ in set(HASH.findall(measured)) for commit in commits):
        print("skipped: the history is not that of the repository in which the results were committed")
        return SKIP
    files = sorted(pathlib.Path(folder or root / "doc/results").glob("*.json"))
    wrong = [f"{path.name}: {text}" for path in files for text in check(path, words, names, commits)]
    print("\n".join(wrong) or f"{len(files)} files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
