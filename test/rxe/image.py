#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the machine that the rxe tests boot: Debian's kernel 6.12 (unpacked from its package, not installed), busybox
and the verbs tools, as WORK/base-<key>/{vmlinux,initramfs}. The key is made of package versions and the files in this
folder, so a second call costs nothing, and a newer kernel or an edit makes a new image. Exit 77 with a reason where it
cannot be made."""
import contextlib
import fcntl
import gzip
import hashlib
import lzma
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

import initramfs

HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = {  # programs that the host needs: their package
    "qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "depmod": "kmod", "rdma": "iproute2",
    "ip": "iproute2", "ibv_rc_pingpong": "ibverbs-utils", "strip": "binutils", "apt-get": "apt", "dpkg-deb": "dpkg",
}
PROVIDERS = pathlib.Path("/usr/lib/x86_64-linux-gnu/libibverbs")
GUEST_PROGRAMS = ["ip", "rdma", "ibv_devices", "ibv_devinfo", "ibv_rc_pingpong"]
# crc32_generic: rdma_rxe asks the crypto layer for "crc32" by name; the module dependencies do not list it.
MODULES = ["crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm", "veth", "af_packet"]
# not -cloud-, which has no rxe; 6.1 rarely honours a fence
KERNEL = re.compile(r"linux-image-6\.12\.\d+\+deb\d+-amd64")
APT_OPTIONS = ["-q", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=120"]
UNAVAILABLE_S = 600  # after a failed fetch, other tests do not wait for the network again


class Unavailable(Exception):
    """The image cannot be made on this machine: the tests are skipped, and do not fail."""


def have(program):
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def quiet(*command, **options):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        # apt-get fails where there is no network or no such package. Anything else is a mistake here, and must fail.
        error = Unavailable if command[0] == "apt-get" else RuntimeError
        raise error(f"{' '.join(map(str, command[:3]))}: {tail[0]}")
    return done.stdout


def install_missing():
    missing = sorted({package for program, package in PROGRAMS.items() if not have(program)})
    if not list(PROVIDERS.glob("librxe-rdmav*.so")):
        missing.append("ibverbs-providers")
    if not missing:
        return
    if os.geteuid() != 0 or not have("apt-get"):
        raise Unavailable(f"needs the packages {' '.join(missing)} (tools/setup.sh installs them, as root)")
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    quiet("apt-get", "update", *APT_OPTIONS, env=environment)
    quiet("apt-get", "install", "-y", "--no-install-recommends", *APT_OPTIONS, *missing, env=environment)


def newest_kernel():
    names = KERNEL.findall(quiet("apt-cache", "pkgnames", "linux-image-6.12"))
    return max(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)], default=None)


def find_kernel():
    package = newest_kernel()
    if package is None and os.geteuid() == 0:  # a machine that never ran apt-get update
        quiet("apt-get", "update", *APT_OPTIONS)
        package = newest_kernel()
    if package is None:
        raise Unavailable("apt offers no linux-image-6.12.*-amd64 (Debian 12 security or Debian 13 have it)")
    return package


def image_key(package):
    """Everything that the image is made of."""
    digest = hashlib.sha256(quiet("apt-cache", "show", "--no-all-versions", package).encode())
    digest.update(quiet("dpkg-query", "-W", "libibverbs1", "ibverbs-providers", "ibverbs-utils", "busybox-static",
                        "iproute2", "libc6").encode())
    for name in ("image.py", "initramfs.py", "guest-init"):
        digest.update((HERE / name).read_bytes())
    return package.removeprefix("linux-image-") + "-" + digest.hexdigest()[:12]


def unpack_kernel(package, folder):
    try:
        quiet("apt-get", "download", *APT_OPTIONS, package, cwd=folder)
    except Unavailable:  # the list may name a version that the mirror has replaced
        quiet("apt-get", "update", *APT_OPTIONS)
        quiet("apt-get", "download", *APT_OPTIONS, find_kernel(), cwd=folder)
    deb = next(folder.glob("linux-image-*.deb"))
    quiet("dpkg-deb", "-x", str(deb), str(folder))
    deb.unlink()
    return next(folder.glob("lib/modules/*")).name


def decompress(data):
    for magic, open_ in ((b"\xfd7zXZ", lzma.decompress), (b"\x1f\x8b", gzip.decompress), (b"\x28\xb5\x2f\xfd", unzstd)):
        if data.startswith(magic):
            return open_(data)
    return data


def unzstd(data):
    return subprocess.run(["zstd", "-qdc"], input=data, stdout=subprocess.PIPE, check=True).stdout


def vmlinux(bzimage):
    """The ELF kernel inside a bzImage (see the x86 boot protocol). To unpack it under emulation would cost seconds."""
    sectors, offset, length = bzimage[0x1F1], *struct.unpack_from("<II", bzimage, 0x248)
    start = (sectors + 1) * 512 + offset
    packed = bzimage[start:start + length]
    if packed.startswith(b"\xfd7zXZ"):  # the kernel appends the unpacked size, which does not belong to the stream
        elf = lzma.LZMADecompressor().decompress(packed)
    else:
        elf = decompress(packed[:-4])
    if not elf.startswith(b"\x7fELF"):
        raise RuntimeError("the kernel image holds no ELF file")
    return elf


def modules_in_order(tree, release):
    """Paths of MODULES and of the modules that they need, each module after those."""
    quiet(have("depmod"), "-b", str(tree), release)
    folder = tree / "lib/modules" / release
    needs, by_name = {}, {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        by_name[pathlib.Path(path).name.split(".")[0].replace("-", "_")] = path
    order = []
    for name in MODULES:
        if name not in by_name:  # built in, or missing: if rxe is missing, the guest's start reports it
            continue
        for path in [*reversed(needs[by_name[name]]), by_name[name]]:
            if path not in order:
                order.append(path)
    return [folder / path for path in order]


def add_modules(archive, tree, release, scratch):
    names = []
    for path in modules_in_order(tree, release):
        name = path.name.split(".ko")[0] + ".ko"
        (scratch / name).write_bytes(decompress(path.read_bytes()))
        quiet("strip", "--strip-debug", str(scratch / name))
        archive.file(f"lib/modules/{name}", scratch / name)
        names.append(name)
    archive.bytes("lib/modules/order", "".join(name + "\n" for name in names).encode())


def write_initramfs(out, tree, release, scratch):
    archive = initramfs.Archive(out)
    for folder in ("bin", "dev", "proc", "sys", "tmp", "run", "root", "payload"):
        archive.folder(folder)
    archive.link("lib/x86_64-linux-gnu", "../" + initramfs.LIBRARY_FOLDER)
    archive.file("init", HERE / "guest-init")
    archive.file("bin/busybox", have("busybox"))
    for applet in quiet(have("busybox"), "--list").split():
        if applet not in ("busybox", "ip"):
            archive.link(f"bin/{applet}", "busybox")
    add_modules(archive, tree, release, scratch)
    for program in GUEST_PROGRAMS:
        archive.program(have(program))
    for provider in PROVIDERS.glob("librxe-rdmav*.so"):
        archive.program(provider, str(PROVIDERS).lstrip("/"))
    # The tested programs open libibverbs by name, so ldd does not list it.
    archive.program("/usr/lib/x86_64-linux-gnu/libibverbs.so.1", initramfs.LIBRARY_FOLDER)
    archive.file("etc/libibverbs.d/rxe.driver", "/etc/libibverbs.d/rxe.driver")
    archive.bytes("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
    archive.bytes("etc/hosts", b"127.0.0.1 localhost\n")
    archive.close()


def build(package, image):
    with tempfile.TemporaryDirectory(dir=image.parent) as name:
        scratch = pathlib.Path(name)
        (scratch / "kernel").mkdir()
        (scratch / "modules").mkdir()
        (scratch / "image").mkdir()
        release = unpack_kernel(package, scratch / "kernel")
        bzimage = (scratch / "kernel/boot" / f"vmlinuz-{release}").read_bytes()
        (scratch / "image/vmlinux").write_bytes(vmlinux(bzimage))
        with open(scratch / "image/initramfs", "wb") as out:
            write_initramfs(out, scratch / "kernel", release, scratch / "modules")
        for old in image.parent.glob("base-*"):
            shutil.rmtree(old)
        (scratch / "image").rename(image)  # last, so that a broken build leaves no image


def ensure(work):
    """Return the image's folder; make it if it does not exist. Raises Unavailable."""
    work = pathlib.Path(work)
    work.mkdir(parents=True, exist_ok=True)
    reason = work / "unavailable"
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - reason.stat().st_mtime < UNAVAILABLE_S:
                raise Unavailable(reason.read_text())
        try:
            install_missing()
            package = find_kernel()
            image = work / f"base-{image_key(package)}"
            if not image.exists():
                build(package, image)
            return image
        except Unavailable as error:
            reason.write_text(str(error))
            raise


if __name__ == "__main__":
    try:
        print(ensure(sys.argv[1]))
    except Unavailable as error:
        print("skipped:", error)
        sys.exit(77)
