#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""own_file.py VARIABLE COMMAND...: run a command with VARIABLE set to the path of a file that no other run has, and
remove it afterwards. What a run that was killed leaves behind is then met by no other."""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile


def main(variable, *command):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="softnic-test-") as folder:
        with subprocess.Popen(command, env={**os.environ, variable: str(pathlib.Path(folder, "file"))}) as process:
            try:
                return process.wait()
            finally:
                process.terminate()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
