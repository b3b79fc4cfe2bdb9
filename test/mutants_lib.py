# SPDX-License-Identifier: Apache-2.0
"""Take a rule away and see that a test fails: what the lists of rules (unit/mutants.py, fused/mutants.py) have in common.

A rule is a piece of a source file and what replaces it. A rule whose text is no longer there is a failure too: the list follows the code.
"""
import concurrent.futures
import os
import signal
import subprocess


class Outdated(Exception):
    """The text of a rule is not there once."""


def mutated(root, file, old, new):
    """The file's text without the rule."""
    with open(os.path.join(root, file)) as f:
        text = f.read()
    if text.count(old) != 1:
        raise Outdated(f"its text is {text.count(old)} times in {file}: bring this list up to date")
    return text.replace(old, new)


def compile_or_exit(command, what):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what}: {done.stderr}")


def run_bounded(command, limit_s, **environment):
    """Output and exit status; None when it does not end, and then nothing of it is left: Criterion runs tests in children."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
                          env={**os.environ, **environment}) as child:
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
