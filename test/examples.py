#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""examples.py slurm FOLDER | ci FOLDER SOFTNIC_RUN: run doc/examples/nccl_tests.sbatch with a Slurm that is a script,
or the test step of softnic-ci.yml."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SRUN = """#!/bin/bash
shift # --export=ALL
shift # env
for word; do case $word in *=*) export "$word";; esac; done
echo "$NCCL_NET_PLUGIN $NCCL_NET ${PERSEUS_REQUIRED:-}" >> runs
[ -z "${FAIL:-}" ] || exit "$FAIL"
[ "$NCCL_NET_PLUGIN" = none ] || echo "host:1:1 [0] NCCL INFO Using network ${NETWORK:-Perseus}"
echo '# size count type redop root time algbw busbw #wrong time algbw busbw #wrong'
echo "1024 256 float sum -1 10.0 0.1 0.2 0 10.0 0.1 0.2 0"
echo "1073741824 268435456 float sum -1 9000.0 119.3 123.5 ${WRONG:-0} 9000.0 119.3 123.5 0"
"""


def run_job(script, folder, **extra):
    plugin = folder / "libnccl-net-perseus.so"
    env = dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}", PLUGIN=str(plugin), PERF="all_reduce_perf",
               ROUNDS="2", **extra)
    return subprocess.run(["bash", str(script)], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def slurm(examples):
    script = pathlib.Path(examples) / "nccl_tests.sbatch"
    with tempfile.TemporaryDirectory(prefix="perseus-slurm-") as name:
        folder = pathlib.Path(name)
        done = run_job(script, folder)
        assert done.returncode == 2 and "not a file" in done.stderr, f"without a plugin: {done}"
        (folder / "libnccl-net-perseus.so").touch()
        (folder / "srun").write_text(SRUN)
        (folder / "srun").chmod(0o755)
        done = run_job(script, folder)
        assert done.returncode == 0 and done.stdout.count("perseus 123.5 GB/s, nccl 123.5 GB/s") == 2, done
        runs = (folder / "runs").read_text().splitlines()
        assert runs == [f"{folder}/libnccl-net-perseus.so Perseus 1", "none IB "] * 2, runs
        done = run_job(script, folder, NETWORK="IB")
        assert done.returncode == 1 and "NCCL did not take Perseus" in done.stderr, f"another network: {done}"
        assert "round" not in done.stdout, f"another network: {done}"
        done = run_job(script, folder, WRONG="3")
        assert done.returncode == 1 and "123.5" not in done.stdout, f"wrong elements: {done}"
        done = run_job(script, folder, FAIL="3")
        assert done.returncode == 1 and "round" not in done.stdout, f"srun failed: {done}"


def ci(examples, softnic_run):
    if not shutil.which("ibv_rc_pingpong"):
        print("skipped: ibv_rc_pingpong (ibverbs-utils) is not installed")
        return 77
    text = (pathlib.Path(examples) / "softnic-ci.yml").read_text()
    step = re.search(r"- name: test\n\s+run: \|\n((?:\s{10}.*\n)+)", text).group(1)
    env = dict(os.environ, PATH=f"{pathlib.Path(softnic_run).parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", step], env=env, capture_output=True, text=True, timeout=120)
    print(done.stdout, done.stderr)
    assert done.returncode == 0 and "softnic0" in done.stdout and done.stdout.count("100 iters") == 2
    return 0


if __name__ == "__main__":
    sys.exit({"slurm": slurm, "ci": ci}[sys.argv[1]](*sys.argv[2:]))
