# SPDX-License-Identifier: Apache-2.0
"""Remove a rule from the code and check that a test fails. Shared by unit/mutants.py, unit/mutants_peer.py,
transport/mutants.py, fused/mutants.py and hopper/mutate.py.

A rule is a marker above the statement that it changes:

    /* MUTANT(order) a put needs a free slot: delete */
    if (queue_full(queue))
        return PRS_BUSY;

The word in brackets says who runs the rule ("order": unit/mutants.py; "peer": unit/mutants_peer.py; "connect TEST":
transport/mutants.py; "model PROGRAM": fused/mutants.py; "emulator TEST": hopper/mutate.py). The edit is "delete", or
"s/old/new/" within that statement, with any delimiter; a blank in "old" matches any white space. Markers with the same
words before the colon are applied together.
"""
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import signal
import subprocess

MARKER = re.compile(r"/\* MUTANT\((\w+)(?: ([^)]+))?\)\s(?: *\* )?([^:]+):\s(?: *\* )?(delete|s([/#~@!]).*?\5.*?\5) "
                    r"\*/", re.S)
CRITERION = "test/support/criterion_start.c"  # in each program that is linked to Criterion
# Without the option the linker reads all libraries that Criterion's needs: two thirds of its time.
WITH_CRITERION = ["-Wl,--allow-shlib-undefined", "-lcriterion", "-lpthread"]
NOT_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


class Outdated(Exception):
    """A marker does not fit the statement below it."""


@dataclasses.dataclass
class Edit:
    file: str
    start: int  # of the statement in the file's text
    end: int
    how: str    # "delete" or "s/old/new/"


@dataclasses.dataclass
class Rule:
    name: str
    target: str  # the program or the test that must fail, or empty
    edits: list


def blanked(text):
    """The text with comments and strings as blanks, so that only code is left."""
    return NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)


def statement(code, at):
    """Start and end of the statement that begins at or after position at, with the else branches of an if."""
    start = at + re.match(r"\s*", code[at:]).end()
    depth, position = 0, start
    while position < len(code):
        character = code[position]
        depth += (character in "({[") - (character in ")}]")
        if depth < 0:
            return start, position
        position += 1
        if depth == 0 and (character in ";}" or code.startswith(",\n", position - 1)):
            rest = re.match(r"\s*(else\b|while\b[^;{]*;|[;,)])", code[position:])
            if not rest or (character != "}" and rest.group(1) != "else"):
                return start, position
            if rest.group(1) in (";", ","):
                return start, position + rest.end()
    return start, position


def rules(root, kind, files):
    """The rules of one kind in these files, in the order of their markers."""
    found = {}
    for file in files:
        text = (pathlib.Path(root) / file).read_text()
        code = None
        for match in MARKER.finditer(text):
            if match.group(1) != kind:
                continue
            code = code or blanked(text)
            name = " ".join(match.group(3).split())
            target = match.group(2) or ""
            rule = found.setdefault((target, name), Rule(name, target, []))
            rule.edits.append(Edit(str(file), *statement(code, match.end()), match.group(4)))
    return list(found.values())


def changed(text, edit):
    """The file's text with one edit made."""
    body = text[edit.start:edit.end]
    if edit.how == "delete":
        new = ""
    else:
        _, old, put, _ = edit.how.split(edit.how[1])
        if "\n" in put or "\\" in put:  # it is no regular expression
            raise Outdated(f"{edit.file}: what replaces '{old}' has more than one line, or a backslash")
        pattern = r"\s+".join(re.escape(word) for word in old.split())
        count = len(re.findall(pattern, body))
        if count != 1:
            raise Outdated(f"{edit.file}: '{old}' is {count} times in the statement below its marker")
        new = re.sub(pattern, lambda _: put, body)
    return text[:edit.start] + new + text[edit.end:]


def mutated(root, rule):
    """{file: its text without the rule}."""
    texts = {}
    for edit in sorted(rule.edits, key=lambda e: -e.start):  # the last first, so that positions stay true
        if edit.file not in texts:
            texts[edit.file] = (pathlib.Path(root) / edit.file).read_text()
        texts[edit.file] = changed(texts[edit.file], edit)
    return texts


def compile_or_exit(command, what, folder=None):
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{what}: {done.stderr}")


def compile_mutants(command, root, rule, folder):
    """Compile the sources that a rule changes, in a folder of their own: {source: its object}. The compiler gets names
    without the folder, which is new each time, so that ccache knows a mutant that it has seen."""
    os.mkdir(folder)
    objects = {}
    for source, text in mutated(root, rule).items():
        name = os.path.basename(source)
        pathlib.Path(folder, name).write_text(text)
        compile_or_exit([*command, name, "-o", name + ".o"], source, folder)
        objects[source] = os.path.join(folder, name + ".o")
    return objects


class Linker:
    """Compiles changed sources, and links them before archives that have all of the transport."""

    def __init__(self, root, cc, archives, work):
        root = os.path.abspath(root)  # the compiler runs in other folders
        self.root, self.work, self.archives, self.cc = root, work, archives, cc.split()
        # -O0: half of the time is the compiler's.
        self.compile = [*self.cc, "-std=gnu11", "-O0", "-D_GNU_SOURCE", "-DPRS_VERSION=\"test\"", "-I", root,
                        "-I", os.path.join(root, "include"), "-I/usr/include/libnl3", "-c"]
        self.start = self.object(CRITERION)

    def object(self, source):
        out = os.path.join(self.work, os.path.basename(source) + ".o")
        compile_or_exit([*self.compile, os.path.join(self.root, source), "-o", out], source)
        return out

    def mutant(self, number, rule):
        """The objects of the sources that a rule changes."""
        return list(compile_mutants(self.compile, self.root, rule, os.path.join(self.work, str(number))).values())

    def program(self, name, objects):
        path = os.path.join(self.work, name)
        compile_or_exit([*self.cc, "-fno-lto", "-o", path, *objects, self.start, *self.archives, *WITH_CRITERION,
                         "-ldl"], f"linking {name}")
        return path


def first_failure(text):
    """The name of the test that fails, as Criterion prints it."""
    found = (re.search(r"\[(?:FAIL|ERR |CRASH)[^\]]*\] ([a-z_]+::[A-Za-z0-9_]+)", text) or
             re.search(r"\[----\].*?([a-z_]+::[a-z0-9_]+)", text))
    return found.group(1) if found else "a test"


def run_bounded(command, limit_s, **environment):
    """Output and exit status; None when it does not end, and then nothing of it is left: Criterion runs tests in
    children."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          start_new_session=True, env={**os.environ, **environment}) as child:
        try:
            return child.communicate(timeout=limit_s)[0], child.returncode
        except subprocess.TimeoutExpired:
            return "does not end", None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)


def try_all(names, attempt, workers=1):
    """attempt(number of the rule) gives what failed without it, or None. Prints a line a rule; the exit status."""
    def caught(number):
        try:
            return True, attempt(number)
        except Outdated as outdated:
            return False, str(outdated)

    survivors, width = 0, max(map(len, names), default=0)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for name, (applied, failure) in zip(names, pool.map(caught, range(len(names)))):
            bad = not applied or failure is None
            survivors += bad
            print(f"{'FAILED' if bad else 'ok':6} {name:{width}} {failure or 'NO TEST FAILS'}", flush=True)
    print(f"{len(names) - survivors} of {len(names)} rules have a test that fails without them")
    return 1 if survivors else 0
