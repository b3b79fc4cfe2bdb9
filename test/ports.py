# SPDX-License-Identifier: Apache-2.0
"""Ports for tests that must know a port before the program that listens on it."""
import os
import socket


def free_port():
    """A port that nobody has, below those that the system hands out (32768 and up), so that no program that asks for
    any port takes it first. Tests that run at the same time begin at different ports."""
    first = 10000 + os.getpid() * 16 % 22000
    for port in (*range(first, 32000), *range(10000, first)):
        with socket.socket() as one:
            try:
                one.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port from 10000 to 32000 is free")
