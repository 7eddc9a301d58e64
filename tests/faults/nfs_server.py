"""A file system that behaves as one NFS client: a mount of a folder, served by this process through /dev/fuse.

Several such mounts of one folder are several machines. Each one's kernel remembers names, their absence, attributes and
listings for a while, so what another one did is seen late. A file that is deleted while it is open here stays as
`.nfsXXXX` in its folder until it is closed; one that another client deletes gives ESTALE. There are no locks, or locks
that only this client knows; no exchange of two names and no O_TMPFILE; times are those of another clock; and now and
then the answer to a change is lost, so that the change is done and its repetition fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import select
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tests.faults import children

_IN, _OUT, _ENTRY, _ATTR = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ"), struct.Struct("<QQQQII"), "<6Q10I"
_BUFFER_BYTES, _MAX_WRITE = 1 << 20, 1 << 17
_FLOCK_LOCKS, _BIG_WRITES, _ATOMIC_O_TRUNC, _MAX_PAGES = 1 << 10, 1 << 5, 1 << 3, 1 << 22
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _ATIME_NOW, _MTIME_NOW = (1 << bit for bit in (0, 1, 2, 3, 4, 5, 7, 8))
_OPENING = ~(os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL)
_ROOT = 1
_NEW_MOUNTS, _NEW_USERS, _PRIVATE, _DETACH = 0x00020000, 0x10000000, (1 << 18) | (1 << 14), 2
_LOOK_S = 0.5
_REPEATED = {"rename": errno.ENOENT, "link": errno.EEXIST, "mkdir": errno.EEXIST, "unlink": errno.ENOENT}
"""What the repetition of a change answers whose first answer was lost."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """How a client behaves.

    late_s: how long it believes what it knows. lock_error: what flock answers; 0: locks are of this client alone.
    clock_s: how far the server's clock is ahead. lost: the share of changes whose answer is lost. seed: of that.
    """

    late_s: float = 3.0
    lock_error: int = errno.ENOLCK
    clock_s: int = 0
    lost: float = 0.0
    seed: int = 0


class _Node:
    """A file or folder of which a client has a handle."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.lookups, self.num_open = descriptor, 0, 0
        self.listed: tuple[float, list[tuple[str, int, int]]] | None = None

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.descriptor}"

    def stat(self) -> os.stat_result:
        found = os.fstat(self.descriptor)
        if not found.st_nlink:
            raise OSError(errno.ESTALE, "stale")
        return found


class Server:
    """Answers the kernel's requests for one mount."""

    def __init__(self, device: int, folder: str, client: Client, *, host: int) -> None:
        """host: the process that this one ends with."""
        self.device, self.client, self.host = device, client, host
        self.chance = random.Random(client.seed)
        root = _Node(os.open(folder, os.O_PATH | os.O_DIRECTORY))
        self.nodes = {_ROOT: root}
        self.ids = {self._identity(root): _ROOT}
        self.next_id = _ROOT + 1
        self.files: dict[int, tuple[int, int, int]] = {}
        """By handle: descriptor, node, and the listing's or silly name's folder."""
        self.silly: dict[int, tuple[int, str]] = {}
        """By node: where the name is that is removed when the last handle of it is closed."""
        self.next_handle = 1

    def serve(self) -> None:
        """Answers until the mount or the host is gone."""
        buffer, poll = bytearray(_BUFFER_BYTES), select.poll()
        poll.register(self.device, select.POLLIN)
        while True:
            if not poll.poll(_LOOK_S * 1000):
                if not Path(f"/proc/{self.host}").exists():
                    return
                continue
            try:
                size = os.readv(self.device, [buffer])
            except OSError as err:
                if err.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return
            self.answer(bytes(buffer[:size]))

    def answer(self, request: bytes) -> None:
        """Does what is asked for, and says what came of it."""
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        data = request[_IN.size :]
        if opcode in (2, 42):
            self.forget(opcode, node, data)
            return
        if opcode == 36:  # interrupt: every request is short
            return
        operation = _OPERATIONS.get(opcode)
        try:
            if operation is None:
                raise OSError(errno.ENOSYS, str(opcode))
            code, reply = 0, operation(self, node, data)
        except OSError as err:
            code, reply = -(err.errno or errno.EIO), b""
        with contextlib.suppress(FileNotFoundError):  # the process that asked is gone
            os.write(self.device, _OUT.pack(_OUT.size + len(reply), code, unique) + reply)

    def _identity(self, node: _Node) -> tuple[int, int]:
        found = os.fstat(node.descriptor)
        return found.st_dev, found.st_ino

    def node(self, number: int) -> _Node:
        """Returns a node that is not stale."""
        self.nodes[number].stat()
        return self.nodes[number]

    def changed(self, *folders: int) -> None:
        """This client changes a folder, and so looks anew."""
        for folder in folders:
            self.nodes[folder].listed = None

    def maybe_lost(self, what: str) -> None:
        if self.chance.random() < self.client.lost:
            raise OSError(_REPEATED[what], "the answer was lost")

    def init(self, _node: int, data: bytes) -> bytes:
        _, minor, ahead, flags = struct.unpack_from("<4I", data)
        wanted = _BIG_WRITES | _ATOMIC_O_TRUNC | _MAX_PAGES | (_FLOCK_LOCKS if self.client.lock_error else 0)
        pages = _MAX_WRITE // 4096
        return struct.pack(
            "<4I2H2I2H8I", 7, min(minor, 31), ahead, flags & wanted, 16, 12, _MAX_WRITE, 1, pages, 0, *[0] * 8
        )

    def attributes(self, found: os.stat_result) -> bytes:
        later = self.client.clock_s
        times = [ns + later * 10**9 for ns in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
        return struct.pack(
            _ATTR,
            found.st_ino,
            found.st_size,
            found.st_blocks,
            *(ns // 10**9 for ns in times),
            *(ns % 10**9 for ns in times),
            found.st_mode,
            found.st_nlink,
            found.st_uid,
            found.st_gid,
            0,
            4096,
            0,
        )

    def late(self) -> tuple[int, int]:
        return int(self.client.late_s), int(self.client.late_s % 1 * 1e9)

    def entry(self, parent: int, name: str) -> bytes:
        """Returns what a name is now; the kernel then believes it for a while."""
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.node(parent).descriptor)
        node = _Node(descriptor)
        number = self.ids.get(self._identity(node))
        if number is None:
            number, self.next_id = self.next_id, self.next_id + 1
            self.nodes[number] = node
            self.ids[self._identity(node)] = number
        else:
            os.close(descriptor)
        self.nodes[number].lookups += 1
        found = os.fstat(self.nodes[number].descriptor)
        seconds, ns = self.late()
        return _ENTRY.pack(number, 0, seconds, seconds, ns, ns) + self.attributes(found)

    def lookup(self, parent: int, data: bytes) -> bytes:
        try:
            return self.entry(parent, _name(data))
        except FileNotFoundError:
            seconds, ns = self.late()
            return _ENTRY.pack(0, 0, seconds, 0, ns, 0) + bytes(88)

    def forget(self, opcode: int, node: int, data: bytes) -> None:
        pairs = [(node, struct.unpack_from("<Q", data)[0])]
        if opcode == 42:
            count = struct.unpack_from("<I", data)[0]
            pairs = [struct.unpack_from("<2Q", data, 8 + 16 * index) for index in range(count)]
        for number, times in pairs:
            known = self.nodes.get(number)
            if known is None or number == _ROOT:
                continue
            known.lookups -= times
            if known.lookups <= 0 and not known.num_open:
                self.ids.pop(self._identity(known), None)
                os.close(self.nodes.pop(number).descriptor)

    def getattr(self, number: int, data: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", data)
        found = os.fstat(self.files[handle][0]) if flags & 1 else self.node(number).stat()
        if not found.st_nlink:
            raise OSError(errno.ESTALE, "stale")
        return struct.pack("<QII", *self.late(), 0) + self.attributes(found)

    def setattr(self, number: int, data: bytes) -> bytes:
        valid, _, _, size, _, *times, mode, _, uid, gid, _ = struct.unpack_from("<IIQQQ3Q3IIIIII", data)
        node = self.node(number)
        if valid & _MODE:
            os.chmod(node.path, stat.S_IMODE(mode))
        if valid & (_UID | _GID):
            os.chown(node.path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & _SIZE:
            os.truncate(node.path, size)
        if valid & (_ATIME | _MTIME):
            now, found = time.time_ns(), node.stat()
            later = self.client.clock_s * 10**9
            given = [times[place] * 10**9 + times[place + 3] - later for place in (0, 1)]
            atime = now if valid & _ATIME_NOW else given[0] if valid & _ATIME else found.st_atime_ns
            mtime = now if valid & _MTIME_NOW else given[1] if valid & _MTIME else found.st_mtime_ns
            os.utime(node.path, ns=(atime, mtime))
        return struct.pack("<QII", *self.late(), 0) + self.attributes(node.stat())

    def mkdir(self, parent: int, data: bytes) -> bytes:
        name = _name(data[8:])
        os.mkdir(name, struct.unpack_from("<I", data)[0], dir_fd=self.node(parent).descriptor)
        self.changed(parent)
        self.maybe_lost("mkdir")
        return self.entry(parent, name)

    def _put_aside(self, parent: int, name: str) -> bool:
        """Gives an open file that is to go another name, until it is closed."""
        found = os.stat(name, dir_fd=self.node(parent).descriptor, follow_symlinks=False)
        number = self.ids.get((found.st_dev, found.st_ino))
        if number is None or not self.nodes[number].num_open or number in self.silly or found.st_nlink > 1:
            return False
        silly = f".nfs{found.st_ino:016x}{self.next_handle:08x}"
        folder = self.nodes[parent].descriptor
        os.rename(name, silly, src_dir_fd=folder, dst_dir_fd=folder)
        self.silly[number] = parent, silly
        return True

    def unlink(self, parent: int, data: bytes) -> bytes:
        name = _name(data)
        if name.startswith(".nfs"):
            raise OSError(errno.EBUSY, name)
        if not self._put_aside(parent, name):
            os.unlink(name, dir_fd=self.node(parent).descriptor)
        self.changed(parent)
        self.maybe_lost("unlink")
        return b""

    def rmdir(self, parent: int, data: bytes) -> bytes:
        os.rmdir(_name(data), dir_fd=self.node(parent).descriptor)
        self.changed(parent)
        self.maybe_lost("unlink")
        return b""

    def rename(self, parent: int, data: bytes) -> bytes:
        target = struct.unpack_from("<Q", data)[0]
        old, new = (os.fsdecode(part) for part in data[8:].split(b"\0")[:2])
        source, place = self.node(parent).descriptor, self.node(target).descriptor
        try:
            if not os.path.samestat(os.stat(old, dir_fd=source), os.stat(new, dir_fd=place)):
                self._put_aside(target, new)
        except FileNotFoundError:
            pass
        os.rename(old, new, src_dir_fd=source, dst_dir_fd=place)
        self.changed(parent, target)
        self.maybe_lost("rename")
        return b""

    def link(self, parent: int, data: bytes) -> bytes:
        name = _name(data[8:])
        source = self.node(struct.unpack_from("<Q", data)[0])
        os.link(source.path, name, dst_dir_fd=self.node(parent).descriptor)
        self.changed(parent)
        self.maybe_lost("link")
        return self.entry(parent, name)

    def _handle(self, number: int, descriptor: int) -> int:
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.files[handle] = descriptor, number, 0
        self.nodes[number].num_open += 1
        return handle

    def open(self, number: int, data: bytes) -> bytes:
        node = self.node(number)
        descriptor = os.open(node.path, struct.unpack_from("<I", data)[0] & _OPENING)
        # Close to open: what is opened is what it is now.
        message = struct.pack("<Qqq", number, -1, 0)
        os.write(self.device, _OUT.pack(_OUT.size + len(message), 2, 0) + message)
        return struct.pack("<QII", self._handle(number, descriptor), 0, 0)

    def create(self, parent: int, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<2I", data)
        name = _name(data[16:])
        descriptor = os.open(name, flags & ~os.O_NOFOLLOW, mode, dir_fd=self.node(parent).descriptor)
        self.changed(parent)
        entry = self.entry(parent, name)
        number = struct.unpack_from("<Q", entry)[0]
        return entry + struct.pack("<QII", self._handle(number, descriptor), 0, 0)

    def _opened(self, handle: int) -> int:
        descriptor = self.files[handle][0]
        if not os.fstat(descriptor).st_nlink:
            raise OSError(errno.ESTALE, "stale")
        return descriptor

    def read(self, _: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        return os.pread(self._opened(handle), size, offset)

    def write(self, _: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        return struct.pack("<II", os.pwrite(self._opened(handle), data[40 : 40 + size], offset), 0)

    def fsync(self, _: int, data: bytes) -> bytes:
        os.fstat(self._opened(struct.unpack_from("<Q", data)[0]))
        return b""

    def release(self, _: int, data: bytes) -> bytes:
        descriptor, number, _ = self.files.pop(struct.unpack_from("<Q", data)[0])
        os.close(descriptor)
        node = self.nodes[number]
        node.num_open -= 1
        if not node.num_open and number in self.silly:
            parent, name = self.silly.pop(number)
            try:
                os.unlink(name, dir_fd=self.nodes[parent].descriptor)
                self.changed(parent)
            except (OSError, KeyError):
                pass
        return b""

    def opendir(self, number: int, _: bytes) -> bytes:
        node = self.node(number)
        return struct.pack("<QII", self._handle(number, os.open(node.path, os.O_RDONLY | os.O_DIRECTORY)), 0, 0)

    def readdir(self, number: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        node = self.node(number)
        if offset == 0 and (node.listed is None or time.monotonic() - node.listed[0] > self.client.late_s):
            names = [(".", stat.S_IFDIR), ("..", stat.S_IFDIR)]
            with os.scandir(node.path) as entries:
                names += [(e.name, e.stat(follow_symlinks=False).st_mode) for e in entries if _is_there(e)]
            node.listed = time.monotonic(), [(name, 1, stat.S_IFMT(mode) >> 12) for name, mode in names]
        listed = [] if node.listed is None else node.listed[1]
        reply = b""
        for place, (name, ino, kind) in enumerate(listed[offset:], offset + 1):
            encoded = os.fsencode(name)
            record = struct.pack("<QQII", ino, place, len(encoded), kind) + encoded
            record += bytes(-len(record) % 8)
            if len(reply) + len(record) > size:
                break
            reply += record
        return reply

    def statfs(self, _: int, __: bytes) -> bytes:
        found = os.statvfs(self.nodes[_ROOT].path)
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q10I", *counts, found.f_bsize, 255, found.f_frsize, *[0] * 7)

    def setlk(self, _: int, __: bytes) -> bytes:
        raise OSError(self.client.lock_error, "no locks")

    def nothing(self, _: int, __: bytes) -> bytes:
        return b""

    def readlink(self, number: int, _: bytes) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self.node(number).descriptor))

    def symlink(self, parent: int, data: bytes) -> bytes:
        name, target = (os.fsdecode(part) for part in data.split(b"\0")[:2])
        os.symlink(target, name, dir_fd=self.node(parent).descriptor)
        self.changed(parent)
        return self.entry(parent, name)


def _is_there(entry: os.DirEntry[str]) -> bool:
    try:
        entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _name(data: bytes) -> str:
    return os.fsdecode(data.split(b"\0", 1)[0])


_OPERATIONS: dict[int, Callable[[Server, int, bytes], bytes]] = {
    1: Server.lookup,
    3: Server.getattr,
    4: Server.setattr,
    5: Server.readlink,
    6: Server.symlink,
    9: Server.mkdir,
    10: Server.unlink,
    11: Server.rmdir,
    12: Server.rename,
    13: Server.link,
    14: Server.open,
    15: Server.read,
    16: Server.write,
    17: Server.statfs,
    18: Server.release,
    20: Server.fsync,
    25: Server.nothing,
    26: Server.init,
    27: Server.opendir,
    28: Server.readdir,
    29: Server.release,
    30: Server.nothing,
    32: Server.setlk,
    33: Server.setlk,
    34: Server.nothing,
    35: Server.create,
    38: Server.nothing,
}
"""By the kernel's numbers; what is not here, such as an exchange of names, is ENOSYS."""


def mount(folder: Path, place: Path, client: Client) -> None:
    """Mounts a folder as a client sees it. A process of its own serves it until it is unmounted, or the host ends."""
    libc, host = ctypes.CDLL(None, use_errno=True), os.getppid()
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40755,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if libc.mount(b"nfs", os.fsencode(place), b"fuse.nfs", 0, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(place))
    if not os.fork():
        try:
            os.setsid()
            for name in os.listdir("/proc/self/fd"):
                if int(name) not in (1, 2, device):
                    with contextlib.suppress(OSError):
                        os.close(int(name))
            Server(device, os.fspath(folder), client, host=host).serve()
        finally:
            os._exit(0)
    os.close(device)


def unmount(*places: Path) -> None:
    """Takes mounts away, also those that somebody still uses."""
    libc = ctypes.CDLL(None)
    for place in places:
        libc.umount2(os.fsencode(place), _DETACH)


def own_mounts() -> None:
    """Gives this process mounts that no other process sees. Raises OSError where that is not permitted."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS | (_NEW_USERS if user else 0)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    if libc.mount(b"none", b"/", None, _PRIVATE, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "/")


def refused(folder: Path) -> str:
    """Returns why no such mount can be made here; empty where it can."""
    command = [sys.executable, "-m", "tests.faults.nfs_server", "check", str(folder)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    return "" if ended.returncode == 0 else ended.stderr.strip().rpartition("\n")[2] or "no FUSE"


def _check(folder: Path) -> None:
    disk, place = folder / "disk", folder / "client"
    for made in (disk, place):
        made.mkdir(parents=True)
    mount(disk, place, Client())
    (place / "file").write_text("seen")
    unmount(place)
    assert (disk / "file").read_text() == "seen"


if __name__ == "__main__":
    own_mounts()
    if sys.argv[1] == "check":
        _check(Path(sys.argv[2]))
    else:
        children.load(*sys.argv[2:])
        children.serve(Connection(int(sys.argv[1])))
