# SPDX-License-Identifier: Apache-2.0
"""Write an initramfs: a cpio archive ("newc", see the kernel's early-userspace/buffer-format) of files and of programs
with the shared libraries they need. The kernel unpacks several archives in one file, so a payload can be appended to a
base."""
import os
import pathlib
import stat
import subprocess

LIBRARY_FOLDER = "usr/lib/x86_64-linux-gnu"  # the loader's default on Debian, so the guest needs no ld.so.cache


def shared_libraries(program):
    """Host paths of all libraries that the loader would map for a program or library; a script needs none."""
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    ldd = subprocess.run(["ldd", program], capture_output=True, text=True, env=environment)  # without softnic
    if ldd.returncode != 0:
        return []
    missing = [line.split()[0] for line in ldd.stdout.splitlines() if "not found" in line]
    if missing:
        raise RuntimeError(f"{program}: the loader does not find {', '.join(missing)}")
    words = [word for line in ldd.stdout.splitlines() for word in line.split()]
    return [word for word in words if word.startswith("/")]


class Archive:
    def __init__(self, out):
        self.out = out
        self.names = set()

    def _entry(self, name, mode, data=b""):
        if name in self.names:
            return
        self.names.add(name)
        parent = str(pathlib.PurePosixPath(name).parent)
        if parent != ".":
            self.folder(parent)
        raw = name.encode() + b"\0"
        fields = [len(self.names), mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0]
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        self.out.write(header + raw + bytes(-(len(header) + len(raw)) % 4))
        self.out.write(data + bytes(-len(data) % 4))

    def folder(self, name):
        self._entry(name, stat.S_IFDIR | 0o755)

    def link(self, name, target):
        self._entry(name, stat.S_IFLNK | 0o777, target.encode())

    def bytes(self, name, data, mode=0o644):
        self._entry(name, stat.S_IFREG | mode, data)

    def file(self, name, source):
        source = pathlib.Path(source)
        self.bytes(name, source.read_bytes(), stat.S_IMODE(source.stat().st_mode) | 0o444)

    def program(self, source, folder="usr/bin", library_folder=LIBRARY_FOLDER):
        """Add a program or library, under its own name, and the libraries that it needs."""
        self.file(f"{folder}/{pathlib.Path(source).name}", source)
        for library in shared_libraries(source):
            if pathlib.Path(library).name.startswith("ld-linux"):  # its path is written into every program
                self.file("lib64/" + pathlib.Path(library).name, library)
            else:
                self.file(f"{library_folder}/{pathlib.Path(library).name}", library)

    def close(self):
        self._entry("TRAILER!!!", 0)
        # The kernel wants the next archive to begin at a multiple of four, and skips zeros between them.
        self.out.write(bytes(-self.out.tell() % 512))
