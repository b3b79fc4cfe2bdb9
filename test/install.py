#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""install.py SOURCE BUILD MESON...: install into a scratch folder, check that it has all that users need, uninstall, and check that nothing is left.
What a part installs is checked where the part is built: see CLAIMS."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

SKIP = 77


def run(command, env=None):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Installed:
    def __init__(self, source, build, meson, root):
        self.source, self.build, self.root = map(pathlib.Path, (source, build, root))
        self.meson = meson
        self.options = {o["name"]: o["value"] for o in self.introspect("--buildoptions")}
        self.prefix = pathlib.Path(self.options["prefix"])
        self.plan = self.introspect("--installed")
        self.built = {pathlib.Path(name).name for name in self.plan}

    def introspect(self, what):
        return json.loads(run([*self.meson, "introspect", str(self.build), what]))

    def at(self, option, *below):
        """Where a path below the folder of a Meson option (libdir, includedir ...) lies in the scratch folder."""
        folder = self.prefix / self.options[option]
        return self.root.joinpath(folder.relative_to("/"), *below)

    def files(self):
        return [path for path in self.root.rglob("*") if path.is_symlink() or not path.is_dir()]


def everything_planned_is_there(it):
    for built, installed in it.plan.items():
        path = it.root / pathlib.Path(installed).relative_to("/")
        if not path.exists() or (path.is_file() and path.stat().st_size == 0):
            yield f"{built} was to be installed as {installed}: missing or empty"


def every_public_header_is_there(it):
    headers = [path for pattern in ("*.h", "*.cuh") for path in (it.source / "include/perseus").glob(pattern)]
    for header in headers:
        if not it.at("includedir", "perseus", header.name).exists():
            yield f"include/perseus/{header.name} is not installed"


def pkg_config_leads_to_the_library(it):
    if not shutil.which("pkg-config"):
        return
    env = dict(os.environ, PKG_CONFIG_PATH=str(it.at("libdir", "pkgconfig")), PKG_CONFIG_SYSROOT_DIR=str(it.root))
    if not it.at("libdir", "pkgconfig", "perseus.pc").exists():
        yield "perseus.pc is not installed"
        return
    flags = run(["pkg-config", "--cflags", "--libs", "perseus"], env).split()
    if "-lperseus" not in flags:
        yield f"perseus.pc does not link to libperseus: {flags}"
    program = it.root / "uses.c"
    program.write_text("#include <perseus/perseus.h>\nint main(void) { return 0; }\n")
    compiled = subprocess.run(["cc", "-std=c11", "-Wall", "-Werror", "-fsyntax-only", str(program),
                               *[flag for flag in flags if flag.startswith("-I")]], capture_output=True, text=True)
    program.unlink()
    if compiled.returncode != 0:
        yield f"a C11 program with perseus.pc's flags does not compile:\n{compiled.stderr}"


def nccl_finds_the_plugin_by_both_names(it):
    link = it.at("libdir", "libnccl-net.so")
    if not link.is_symlink():
        yield "libnccl-net.so, the name that NCCL tries by itself, is not there as a symbolic link"
    elif os.path.isabs(os.readlink(link)) or link.resolve() != it.at("libdir", "libnccl-net-perseus.so").resolve():
        yield f"libnccl-net.so points to {os.readlink(link)}, not to libnccl-net-perseus.so beside it"


CLAIMS = [  # (checked when this is built; "" = always, what)
    ("", everything_planned_is_there),
    ("libperseus.so", every_public_header_is_there),
    ("libperseus.so", pkg_config_leads_to_the_library),
    ("libnccl-net-perseus.so", nccl_finds_the_plugin_by_both_names),
]


def is_built(name, built):
    return not name or any(other == name or other.startswith(name + ".") for other in built)


def check(source, build, meson, root):
    it = Installed(source, build, meson, root)
    if not it.plan:
        print("nothing is installed by this build")
        return SKIP
    env = dict(os.environ, DESTDIR=str(root))
    run([*meson, "install", "-C", str(build), "--no-rebuild", "--quiet"], env)
    wrong = [text for name, claim in CLAIMS if is_built(name, it.built) for text in claim(it)]
    count = len(it.files())
    run([shutil.which("ninja") or "ninja-build", "-C", str(build), "uninstall"], env)
    wrong += [f"uninstall left {path.relative_to(root)}" for path in it.files()]
    print("\n".join(wrong) or f"{count} files installed and uninstalled")
    return 1 if wrong else 0


def main(source, build, meson):
    log = pathlib.Path(build) / "meson-logs/install-log.txt"
    kept = log.read_bytes() if log.exists() else None
    with tempfile.TemporaryDirectory(prefix="perseus-install-") as root:
        try:
            return check(source, build, meson, pathlib.Path(root))
        finally:  # uninstall reads this file: it must still list what the user installed before
            if kept is not None:
                log.write_bytes(kept)
            else:
                log.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
