#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""commands.py ROOT BUILD: the commands that documents, examples and --help texts quote exist as they are quoted.

An option of a program of this build is in its --help, one of a script in the script or in what it imports beside it.
The first word after one of FIRST_WORD is in its --help. A file of tools/, test/ or fused/ is
there. An option of Meson exists and takes the value, and a target of ninja exists. Programs and targets that this build
was not asked for are left out; what no build has is an error."""
import json
import pathlib
import re
import shlex
import subprocess
import sys

OPTION = re.compile(r"--[a-z][a-z0-9-]*")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
PROGRAM = re.compile(r"(?:\S*/)?(perseus-[a-z]+(?:-[a-z]+)*|softnic-run|softnicctl)")
PACKAGES = {"perseus-softnic", "perseus-fused", "perseus-plugin", "perseus-tools"}
SCRIPT = re.compile(r"(?:tools|test|fused/python)/[\w./-]*\w")
MODULE = re.compile(r"perseus(?:\.\w+)+")
ENDS = (";", "|", "||", "&", "&&", "(", ")")
FIRST_WORD = ("perseus-perf", "perseus-sim", "softnicctl", "tools/dev/release")
BAD = {  # what must be found in each, or this test finds nothing
    "softnic-run --nics 2 --bits 3 -- true": "softnic-run has no option --bits",
    "build/tools/softnic/softnic-run -- perseus-perf put --nics 2": "perseus-perf has no option --nics",
    "x | sh -c 'cd /; softnicctl stats --json'": "softnicctl has no stats",
    "A=b tools/dev/release --with try": "tools/dev/release has no option --with",
    "python3 -m perseus.info --loud": "perseus.info has no option --loud",
    "python3 -m perseus.inform": "there is no perseus.inform",
    "perseus-infos": "there is no perseus-infos",
    "tools/hopper/run x": "there is no tools/hopper/run",
    "meson setup b -Dpart=tools": "Meson has no option part",
    "meson setup b -Dparts=tools,nic": "-Dparts does not take tools,nic",
    "ninja -C build all emulators": "ninja has no target emulators",
}


def tracked(root):
    done = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True)
    if done.returncode == 0:
        return [name for name in done.stdout.splitlines() if (root / name).is_file()]
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]  # of an unpacked archive
    return [name for name in names if not name.startswith("build")]


def lines_of(text):
    """Commands of a text, one each: lines that end in a backslash go on, and comments are cut off."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip(" *$")
        if line:
            yield line


def quoted(name, text):
    if name.endswith("--help"):
        return [line for line in lines_of(text) if PROGRAM.match(line)]
    if not name.endswith(".md"):
        return lines_of(text)
    spans = [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text))]
    return [line for block in FENCE.findall(text) for line in lines_of(block)] + spans


def words_of(command):
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=";|&()")
        lexer.whitespace_split, lexer.commenters = True, ""
        return list(lexer)
    except ValueError:  # a quotation mark without its other end: prose, or a part of a command
        return command.split()


class Commands:
    def __init__(self, root, build):
        self.root, self.names = root, set(tracked(root))
        self.programs = {path.name: path for folder in ("tools", "tools/softnic") for path in (build / folder).iterdir()
                         if path.is_file() and PROGRAM.fullmatch(path.name)}
        self.helps = {name: self.help_of(path) for name, path in self.programs.items()}
        sources = "".join((root / name).read_text() for name in self.names if name.endswith("meson.build"))
        self.known = set(re.findall(r"'(?:\w+/)*(perseus-[a-z-]+|softnic-run|softnicctl)'", sources)) | PACKAGES
        listed = subprocess.run(["ninja", "-C", build, "-t", "targets", "all"], capture_output=True, text=True)
        self.targets = {line.rpartition(": ")[0] for line in listed.stdout.splitlines()}
        options = json.loads((build / "meson-info/intro-buildoptions.json").read_text())
        self.options = {option["name"]: option.get("choices") for option in options}
        self.whole = "fused/libperseus-fused.so" in self.targets

    @staticmethod
    def help_of(path):
        done = subprocess.run([path, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        if done.returncode or not done.stdout:
            sys.exit(f"{path} --help: exit {done.returncode}: {done.stderr}")
        return done.stdout

    def script_text(self, name):
        """Of a script, and of the modules beside it that it imports."""
        text = (self.root / name).read_text()
        beside = re.findall(r"^\s*(?:from|import) (\w+)", text, re.M)
        folder = pathlib.PurePath(name).parent
        return text + "".join((self.root / folder / f"{module}.py").read_text() for module in beside
                              if f"{folder / module}.py" in self.names)

    def told(self, word, before):
        """(name, text) of the program or script of ours that the word starts; None: another program."""
        program = PROGRAM.fullmatch(word)
        if program and program[1] in self.helps:
            return program[1], self.helps[program[1]]
        if SCRIPT.fullmatch(word) and word in self.names:
            return word, self.script_text(word)
        module = f"fused/python/{word.replace('.', '/')}.py"
        if before == "-m" and module in self.names:
            return word, self.script_text(module)
        return None

    def wrong(self, command):
        """What of the command there is not."""
        ours, before = None, ""
        for word in words_of(command):
            if " " in word:
                yield from self.wrong(word)
            elif word in ENDS or word == "--":
                ours = None
            elif word.startswith("-"):
                option = OPTION.match(word)
                if ours and option and not re.search(rf"{option[0]}(?![\w-])", ours[1] + "--help"):
                    yield f"{ours[0]} has no option {option[0]}"
            elif self.told(word, before):
                ours = self.told(word, before)
            elif ours and before.endswith(ours[0]) and ours[0] in FIRST_WORD and re.fullmatch(r"[a-z-]+", word):
                if not re.search(rf"\b{word}\b", ours[1]):
                    yield f"{ours[0]} has no {word}"
            before = word

    def absent(self, command, folder):
        """Programs, modules and files of ours that no build and no folder has."""
        words = words_of(command)
        for before, word in zip(["", *words], words):
            program = PROGRAM.fullmatch(word)
            if program and program[1] not in self.known | set(self.helps):
                yield f"there is no {program[1]}"
            if before == "-m" and MODULE.fullmatch(word) and not self.told(word, before):
                yield f"there is no {word}"
            there = word in self.targets or (self.root / word).exists() or (folder / word).exists()
            if SCRIPT.fullmatch(word) and not there:
                yield f"there is no {word}"

    def found(self, command, folder):
        return [*self.wrong(command), *self.absent(command, folder), *self.built(command)]

    def built(self, command):
        """Options of Meson and targets of ninja that there are not."""
        for name, value in re.findall(r"(?:^|\s)-D(\w+)=([\w,$./-]*)", command):
            choices = self.options.get(name)
            if name not in self.options:
                yield f"Meson has no option {name}"
            elif choices and not set(value.split(",")) <= set(choices):
                yield f"-D{name} does not take {value}"
        for targets in re.findall(r"\bninja -C \S+((?: [\w./-]+)*)", command):
            for target in targets.split() if self.whole else ():
                if not target.startswith("-") and target not in self.targets:
                    yield f"ninja has no target {target}"


def main(root, build):
    commands = Commands(root, build)
    texts = {name: (root / name).read_text() for name in sorted(commands.names)
             if name.endswith(".md") and not name.startswith(("doc/results/", "CHANGELOG")) or
             name.startswith("doc/examples/")}
    texts.update((f"{name} --help", text) for name, text in commands.helps.items())
    wrong, count = [f"not found: {what}: {command}" for command, what in BAD.items()
                    if commands.found(command, root) != [what] and (commands.whole or not what.startswith("ninja"))], 0
    for name, text in texts.items():
        for command in quoted(name, text):
            count += 1
            wrong += [f"{name}: {command}: {what}" for what in commands.found(command, (root / name).parent)]
    print("\n".join(wrong) or f"{count} texts of {len(texts)} pages, {len(commands.helps)} programs")
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: commands.py ROOT BUILD")
    sys.exit(main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
