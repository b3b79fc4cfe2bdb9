# SPDX-License-Identifier: Apache-2.0
"""pip builds a wheel that has all modules and what is built, and the commands run from it."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

import ranks

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "fused/python"


def wheel(folder, build):
    """The names in the wheel, and its path."""
    copy = pathlib.Path(folder, "source")  # pip leaves files in the source
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
                           "--no-index", "-w", folder, str(copy)],
                          env=dict(os.environ, PERSEUS_BUILD=str(build)), capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    path, = pathlib.Path(folder).glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist()), path


def command(*arguments, path=None, **variables):
    env = dict(os.environ, **variables)
    env["PYTHONPATH"] = str(path) if path else env["PYTHONPATH"]
    return subprocess.run([sys.executable, "-m", *arguments], env=env, capture_output=True, text=True)


class Wheel(unittest.TestCase):
    def test_it_has_every_module_and_the_library_and_runs_from_where_it_is_unpacked(self):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as build:
            library = pathlib.Path(build, "fused/libperseus-fused.so")  # the emulated one stands for it: no GPU is here
            library.parent.mkdir()
            library.symlink_to(os.environ["PERSEUS_FUSED_LIBRARY"])
            names, path = wheel(folder, build)
            for module in (SOURCE / "perseus").rglob("*.py"):
                self.assertIn(str(module.relative_to(SOURCE)), names)
            self.assertIn("perseus/lib/libperseus-fused.so", names)
            self.assertIn("perseus/py.typed", names)
            self.assertIn("-py3-none-linux_", path.name)
            with zipfile.ZipFile(path) as archive:
                archive.extractall(pathlib.Path(folder, "unpacked"))
            done = command("perseus.info", "--json", path=pathlib.Path(folder, "unpacked"), PERSEUS_FUSED_LIBRARY="")
            self.assertEqual(json.loads(done.stdout)["library"],
                             str(pathlib.Path(folder, "unpacked/perseus/lib/libperseus-fused.so")))

    def test_without_a_library_it_is_pure_python(self):
        with tempfile.TemporaryDirectory() as folder:
            names, path = wheel(folder, folder)
            self.assertFalse([name for name in names if name.startswith("perseus/lib/")])
            self.assertIn("-py3-none-any", path.name)


class Commands(unittest.TestCase):
    def test_info_says_what_is_installed(self):
        done = command("perseus.info")
        self.assertIn("emulator of Hopper GPUs", done.stdout)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_info_says_what_is_missing(self):
        for library in ("/nowhere/libperseus-fused.so", "libc.so.6"):
            done = command("perseus.info", PERSEUS_FUSED_LIBRARY=library)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stdout, f"problem .*{library}")

    def test_the_host_cost_is_measured_without_a_gpu(self):
        done = command("perseus.bench", "--host-cost", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLessEqual({"empty", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"},
                             set(json.loads(done.stdout)["host_us"]))

    def test_bench_refuses_what_it_cannot_do(self):
        for arguments, said in ((["--shape", "3x4"], "wants MxNxK"), ([], "the emulator has no times")):
            done = command("perseus.bench", *arguments)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(said, done.stderr)


class Docs(unittest.TestCase):
    def test_each_op_has_a_docstring_with_an_example(self):
        import perseus
        for name, what in [(name, getattr(module, name)) for module in (perseus.ops, perseus.moe)
                           for name in module.__all__]:
            if callable(what) and not isinstance(what, type) and name not in ("moe_capacity", "moe_ends"):
                self.assertIn("Example::", what.__doc__ or "", name)


if __name__ == "__main__":
    ranks.main()
