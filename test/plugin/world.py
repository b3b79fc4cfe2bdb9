# SPDX-License-Identifier: Apache-2.0
"""A running world of the software NIC, which the tests of the plugin read and change."""
import json
import subprocess
import time

LIMIT_S = 120


class World:
    def __init__(self, softnicctl, name):
        self.softnicctl, self.name = softnicctl, name

    def control(self, *words):
        return subprocess.run([self.softnicctl, "--world", self.name, "--json", *words], capture_output=True, text=True,
                              timeout=LIMIT_S, check=True).stdout

    def sent(self):
        """Bytes that have left each device."""
        return [device["bytes_tx"] for device in json.loads(self.control("counters"))["devices"]]

    def wait_for_traffic(self, process, more_than):
        """Wait until the first device has sent more than `more_than` bytes, which must be more than connecting
        takes."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < deadline, "no traffic"
            assert process.poll() is None, "the process ended before there was traffic"
            try:
                if self.sent()[0] > more_than:
                    return
            except subprocess.CalledProcessError:
                pass  # the world does not exist yet
            time.sleep(0.02)
