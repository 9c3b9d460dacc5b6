# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Script that turns into a Python program. The program can only write to its folder, has no network, and has limits.

    python confined_process.py CPU_SECONDS MEGABYTES PROGRAM.py

The program must be the only file in its folder. A folder in memory replaces this folder. With `unconfined` after these
arguments, only processor time, memory and file sizes are limited. The script imports nothing of this package, so that
it starts fast.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000
"""CLONE_NEWUSER: needed for the other flags. CLONE_NEWPID: child processes end with the program. CLONE_NEWNET: no
network. CLONE_NEWNS: separate mounts. CLONE_NEWIPC: no access to the shared memory of other processes."""
MOST_FILE_BYTES = 1 << 20
MOST_FOLDER_BYTES = 32 << 20
MOST_FILES = 4096
MOST_OPEN_FILES = 256
MOST_TASKS = 64
"""Maximum number of processes and threads."""
OLDEST_KERNEL = (5, 14)
"""The first Linux release that counts the processes of a user namespace separately."""
UNCONFINED = "unconfined"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_NOBODY, _OWN_ID = 65534, 1000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = (
    *(0x1, 0x2, 0x4, 0x20, 0x1000, 0x2000, 0x4000),
    1 << 18,
)
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _NR_MOUNT_SETATTR = -100, 0x8000, 0x1, 442
_NR_IO_URING_SETUP = 425
# Numbers of the system calls `socket`, `socketpair`, `memfd_create` and `shmget`, and the audit code of the machine.
_MACHINES = {"x86_64": (41, 53, 319, 29, 0xC000003E), "aarch64": (198, 199, 279, 194, 0xC00000B7)}
_X32_BIT = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_KIND_OF_SOCKET = 0xF
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def run_confined(cpu_seconds: int, megabytes: int, program: str, *, unconfined: bool) -> None:
    """Set limits, give up network and files, and start the program in a grandchild process. The parent processes wait
    for its end."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the parent may be killed while the program runs
    if not unconfined:
        _enter_namespaces(libc, program)
    # The first child is process 1 of the new namespace. When it ends, the kernel kills all other processes there.
    for _ in range(2):
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = [
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MOST_OPEN_FILES),
    ]
    # Without a namespace, RLIMIT_NPROC would count all processes of the user.
    for limit, value in [*limits, *([] if unconfined else [(resource.RLIMIT_NPROC, MOST_TASKS)])]:
        resource.setrlimit(limit, (value, value))
    if not unconfined:
        _refuse_sockets_of_the_machine(libc)
    os.execv(sys.executable, [sys.executable, "-I", "-B", program])


def _enter_namespaces(libc: ctypes.CDLL, program: str) -> None:
    if tuple(map(int, platform.release().split(".")[:2])) < OLDEST_KERNEL:
        raise OSError(errno.ENOSYS, "Linux is older than 5.14: the number of processes cannot be limited")
    if os.getuid() == 0:
        # Root's number of processes cannot be limited. After this, the program can read root's files, but has none of
        # root's other rights.
        os.setresuid(_NOBODY, 0, 0)
    user, group = os.geteuid(), os.getegid()
    _require(libc.unshare(NEW_NAMESPACES), "cannot give up the network")
    # Files in memory need an owner in the namespace. The owner is not root, so that the program has no special rights.
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{_OWN_ID} {user} 1"),
        ("gid_map", f"{_OWN_ID} {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(line, "ascii")
    _mount(libc, None, "/", None, _MS_REC | _MS_PRIVATE, "cannot separate the file systems from those of the machine")
    _hide_files(libc, program)
    # /proc contains the environments of other processes, with the secrets of the run.
    _mount(libc, "tmpfs", "/proc", "tmpfs", _MS_RDONLY, "cannot hide the other processes")


def _hide_files(libc: ctypes.CDLL, program: str) -> None:
    """Make all files read-only except for the program's folder in memory, and hide all devices except for
    `_DEVICES`."""
    path = Path(program)
    folder, own_devices, text = path.parent, path.parent / "dev", path.read_bytes()
    # struct mount_attr: flags to set, flags to clear, propagation, user namespace.
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    set_flags = (_NR_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    _require(libc.syscall(*set_flags), "cannot make files read-only")
    size = f"size={MOST_FOLDER_BYTES},nr_inodes={MOST_FILES},mode=0700"
    _mount(libc, "tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "cannot make a folder in memory", size)
    path.write_bytes(text)
    own_devices.mkdir()
    _mount(libc, "tmpfs", own_devices, "tmpfs", _MS_NOSUID, "cannot hide devices", "mode=0755")
    for device in (Path("/dev", name) for name in _DEVICES):
        if device.is_char_device():
            target = own_devices / device.name
            target.touch()
            _mount(libc, device, target, None, _MS_BIND, "cannot hide devices")
    _mount(libc, None, own_devices, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, "cannot hide devices")
    _mount(libc, own_devices, Path("/dev"), None, _MS_MOVE, "cannot hide devices")
    own_devices.rmdir()
    os.chdir(folder)  # the former folder is hidden


def _refuse_sockets_of_the_machine(libc: ctypes.CDLL) -> None:
    """Refuse sockets other than IP sockets and stream pairs, and kinds of memory that no limit counts."""
    # Servers of the machine listen at sockets in the file system. Datagrams reach them even from a socket pair, so only
    # pairs of streams are allowed.
    machine = platform.machine()
    if machine not in _MACHINES or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, f"cannot refuse sockets on {machine}")
    one, pair, memory_file, shared_memory, name = _MACHINES[machine]
    refused = _RETURN, 0, 0, _FAIL | errno.EACCES
    program = [
        (_LOAD, 0, 0, 4),  # instruction set
        (_EQUAL, 1, 0, name),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # number of the call
        (_AT_LEAST, 9, 0, _X32_BIT),
        (_EQUAL, 8, 0, _NR_IO_URING_SETUP),
        (_EQUAL, 7, 0, memory_file),
        (_EQUAL, 6, 0, shared_memory),
        (_EQUAL, 2, 0, one),
        (_EQUAL, 5, 0, pair),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 16),  # first argument: the family
        (_EQUAL, 6, 0, int(socket.AF_INET)),
        (_EQUAL, 5, 0, int(socket.AF_INET6)),
        refused,
        (_LOAD, 0, 0, 24),  # second argument: the kind
        (_AND, 0, 0, _KIND_OF_SOCKET),
        (_EQUAL, 1, 0, int(socket.SOCK_STREAM)),
        refused,
        (_RETURN, 0, 0, _ALLOW),
    ]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(packed))
    _require(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "cannot give up rights")
    _require(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0), "cannot refuse sockets")


def _mount(
    libc: ctypes.CDLL,
    source: str | Path | None,
    target: str | Path,
    kind: str | None,
    flags: int,
    problem: str,
    options: str = "",
) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _require(libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None), problem)


def _require(result: int, problem: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{problem}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    run_confined(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], unconfined=UNCONFINED in sys.argv[4:])
