# SPDX-License-Identifier: Apache-2.0
"""What the commands `python -m perseus.*` have in common."""
from __future__ import annotations

import argparse
import os
import sys
from typing import IO


class Parser(argparse.ArgumentParser):
    """argparse's, but output that cannot be written is an error."""

    def say(self, text: str) -> None:
        self._print_message(f"{text}\n", sys.stdout)

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        try:
            print(message, end="", file=file or sys.stderr, flush=True)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python does not try again at exit
            sys.exit(f"{self.prog}: cannot write all of the output: {error.strerror}")
