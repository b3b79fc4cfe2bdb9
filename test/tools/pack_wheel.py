#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pack_wheel.py SOFTNIC_RUN SOFTNICCTL LIBDIR: tools/dev/pack_wheel.py makes a wheel of softnic that runs from where it
is unpacked, whose record is right, and refuses what needs a library that other systems lack."""
import base64
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools/dev"))
import pack_wheel  # noqa: E402
import wheel_tag  # noqa: E402

SKIP = 77


def prefix(folder, softnic_run, softnicctl, libdir):
    libraries = folder / libdir / "perseus/softnic"
    libraries.mkdir(parents=True)
    (folder / "bin").mkdir()
    for program in (softnic_run, softnicctl):
        shutil.copy(program, folder / "bin")
    for path in (pathlib.Path(softnic_run).parent / "lib").glob("*.so*"):
        if path.is_file() and not path.is_symlink():
            shutil.copy(path, libraries)
    return folder


def unpacked(wheel, folder):
    """As pip does it: .data/scripts goes to bin, .data/data to the environment."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            kind, _, below = info.filename.partition(".data/")[2].partition("/")
            if kind:
                path = folder / ("bin" if kind == "scripts" else "") / below
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(info))
                path.chmod(info.external_attr >> 16 & 0o777)
        record = archive.read(next(name for name in archive.namelist() if name.endswith("/RECORD"))).decode()
        listed = [line.rsplit(",", 2) for line in record.splitlines()]
        assert sorted(name for name, _, _ in listed) == sorted(archive.namelist()), record
        for name, digest, size in listed[:-1]:
            data = archive.read(name)
            want = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={want}", str(len(data))), name
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def nccl_gets_the_software_nic(environment):
    """NCCL opens libibverbs.so, which a wheel cannot have. With a CUDA driver softnic-run sets LD_AUDIT itself."""
    audit = next(environment.rglob("libsoftnic_audit.so"))
    names = """import ctypes
for name in "libibverbs.so.1", "libibverbs.so":
    ctypes.CDLL(name)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libibverbs" in line})"""
    done = subprocess.run([environment / "bin/softnic-run", "--quiet", "--", sys.executable, "-c", names],
                          capture_output=True, text=True, timeout=60, env={**os.environ, "LD_AUDIT": str(audit)})
    assert done.stdout.split() == [str(audit.with_name("libibverbs.so.1"))], done


def library(folder, source, *options):
    """A library of C; None where this linker cannot make it."""
    path = folder / "libx.so"
    done = subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path, *options], input=source, text=True,
                          capture_output=True)
    return path if done.returncode == 0 else None


def the_tag_is_of_what_the_loader_checks(folder):
    """A mark without a symbol of its own counts, and one that no system promises is refused."""
    relocated = "static int x; int *const pointers[] = {&x, &x, &x, &x, &x, &x, &x, &x}; int puts(const char *);" \
                "int f(void) { return puts(0); }"
    packed = library(folder, relocated, "-Wl,-z,pack-relative-relocs")
    marks = set(wheel_tag.versions(packed.read_bytes())) if packed else set()
    if "GLIBC_ABI_DT_RELR" in marks:  # binutils 2.38 and newer
        assert pack_wheel.platform_tag([packed]).startswith("manylinux_2_36_"), pack_wheel.platform_tag([packed])
    private = library(folder, "int __libc_alloca_cutoff(unsigned long);"
                              "int f(void) { return __libc_alloca_cutoff(1); }")
    if private:
        try:
            raise AssertionError(pack_wheel.platform_tag([private]))
        except ValueError as e:
            assert "GLIBC_PRIVATE" in str(e), e


def main(softnic_run, softnicctl, libdir):
    if not shutil.which("readelf"):
        print("skipped: readelf (binutils) is not installed")
        return SKIP
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tree = prefix(folder / "prefix", softnic_run, softnicctl, libdir)
        wheel = pack_wheel.softnic("1.2.3", tree, folder)
        assert wheel.name.startswith("perseus_softnic-1.2.3-py3-none-manylinux_2_"), wheel
        wheel_tag.main(str(wheel), "scripts/softnic-run", "licenses/LICENSE")
        the_tag_is_of_what_the_loader_checks(folder)
        unpacked(wheel, folder / "environment")
        bin_folder = folder / "environment/bin"
        done = subprocess.run([bin_folder / "softnic-run", "--quiet", "--", bin_folder / "softnicctl", "status"],
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "softnic0" in done.stdout, done
        nccl_gets_the_software_nic(folder / "environment")
        for path in tree.rglob("libibverbs.so*"):
            path.unlink()
        try:
            raise AssertionError(pack_wheel.softnic("1.2.3", tree, folder))
        except ValueError as e:
            assert "cannot need libibverbs.so.1" in str(e), e
        done = subprocess.run([sys.executable, pack_wheel.__file__, "1.2.3", folder / "nothing", folder],
                              capture_output=True, text=True)
        assert done.returncode == 1 and "nothing: a folder with what `meson install`" in done.stderr, done
        done = subprocess.run([sys.executable, pack_wheel.__file__, "--tag", folder / "nothing"],
                              capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith("pack_wheel.py: [Errno 2] No such file"), done
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
