#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a shell command in a machine with two soft-RoCE devices and return its exit status.

boot.py --work FOLDER --timeout SECONDS --command 'perseus-x rxe0 rxe1' [FILE...]

Each FILE goes to /payload/bin (a library: to /payload/lib) with the shared libraries it needs; both are on the guest's
paths. Exit 77: such a machine is not available here. 124: it did not end in time. 125: it ended without a verdict."""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import image
import initramfs

SKIP, TIMED_OUT, NO_VERDICT = 77, 124, 125
LIBRARY = re.compile(r".*\.so(\.\d+)*")
APPEND = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=reliable"


def write_payload(out, command, files):
    archive = initramfs.Archive(out)
    archive.bytes("payload/run.sh", f"#!/bin/sh\n{command}\n".encode(), 0o755)
    for name in files:
        folder = "payload/lib" if LIBRARY.fullmatch(name) else "payload/bin"
        archive.program(name, folder, "payload/lib")
    archive.close()


def run_machine(base, folder, timeout_s):
    """Run QEMU without KVM, with a thread for each CPU: one thread for both makes a ping-pong 30 times slower, and more
    than two CPUs are slower on two cores. Return whether it ended in time, and its output."""
    command = ["qemu-system-x86_64", "-M", "pc", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-smp",
               "2", "-m", "2G", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
               "-serial", f"file:{folder / 'verdict'}",
               "-kernel", str(base / "vmlinux"), "-initrd", str(folder / "initramfs"), "-append", APPEND]
    printed, late = [], threading.Event()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, errors="replace") as machine:
        def give_up():
            late.set()
            machine.kill()
        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        for line in machine.stdout:
            print(line, end="", flush=True)
            printed.append(line)
        machine.wait()
        timer.cancel()
    return not late.is_set(), "".join(printed)


def boot(base, folder, timeout_s):
    """The guest writes the verdict to its second serial port. Sometimes (once in some dozens of boots) QEMU runs an
    outdated translation of code that the guest's kernel patches (a static key), and the kernel dies of a breakpoint
    that it had removed: that is neither our fault nor rxe's. Only then boot again."""
    give_up = time.monotonic() + timeout_s
    while True:
        in_time, printed = run_machine(base, folder, give_up - time.monotonic())
        if not in_time:
            print(f"boot.py: not done after {timeout_s} s", flush=True)
            return TIMED_OUT
        said = (folder / "verdict").read_text().strip()
        if said == str(SKIP):  # the guest has all that a test needs, so a skip there is a failure
            print("boot.py: skipped in the guest, which counts as a failure", flush=True)
            return 1
        if said.isdigit():
            return int(said)
        print(f"boot.py: the guest ended without a verdict (it said {said!r})", flush=True)
        if "Oops: int3" not in printed:
            return NO_VERDICT


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True)
    parser.add_argument("--timeout", type=int, default=60)
    parser.add_argument("--command", required=True)
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    try:
        base = image.ensure(args.work)
    except image.Unavailable as error:
        print("skipped:", error)
        return SKIP
    with tempfile.TemporaryDirectory(prefix="perseus-rxe-") as name:
        folder = pathlib.Path(name)
        shutil.copyfile(base / "initramfs", folder / "initramfs")
        with open(folder / "initramfs", "ab") as out:
            write_payload(out, args.command, [os.path.abspath(file) for file in args.files])
        return boot(base, folder, args.timeout)


if __name__ == "__main__":
    sys.exit(main())
