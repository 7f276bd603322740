"""node.py: one machine of a TrueCluster. It holds some decoder layers, and their caches, of whatever model it is given.

    python node.py --host 192.168.1.10 --port 7001

Needs this file, qwen.py, quant.py, wire.py and `pip install torch msgpack numpy`; no model files. The node connects to
the coordinator, says what it has (HELLO), measures its kernels when asked (MEASURE), takes a range of layers
(ASSIGNMENT), receives their weights straight into place (WEIGHT_CHUNK), and then turns hidden states into hidden
states. Weights that it still has, in memory or in its cache on disk, are not sent again. When the coordinator goes away
it keeps trying to come back, for ever.

    python node.py --forget         deletes the cached weights

Threads, and what each owns:
    main            connects, reads frames, answers PING, checks everything that arrives (Session)
    worker          the device, the stage, its caches: every torch call on the device is made here (Worker)
    writer          sends, control frames first (wire.Writer)
    cache reader    reads cached weights into place while others arrive; one per load (Session._read_cache)
    cache writer    writes what has arrived to the cache (CacheWriter)
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import hashlib
import logging
import os
import platform
import queue
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# An idle stage must not burn the cores that a neighbour on the same machine computes on: OpenMP's default is to spin
# for long. Read once when torch loads its OpenMP, hence before the import; the user's own setting wins.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("KMP_BLOCKTIME", "0")
# Large tensors in huge pages, where the system offers them: touching new memory page by page took a quarter of packing.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

try:
    import torch

    import quant
    import qwen
    import wire
except ImportError as missing:
    if missing.name in ("quant", "qwen", "wire"):
        sys.exit(
            f"node.py: {missing.name}.py is not beside it; copy node.py, qwen.py, quant.py and wire.py to one folder"
        )
    sys.exit(f"node.py: {missing}; run: pip install torch msgpack numpy")
except KeyboardInterrupt:  # importing torch takes seconds
    sys.exit(130)

log = logging.getLogger("node")

EXIT_OK, EXIT_USAGE, EXIT_REFUSED = 0, 1, 2
CONNECT_TIMEOUT_S = 10.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 10.0
REMIND_S = 60.0  # how often a failure that stays the same is logged again
MEASURE_ROUNDS, MEASURE_SECONDS = 20, 0.25  # per number of rows: at most so often, and for so long
MAX_WAITING_PASSES = 256
KEEP_LAYERS_S = 300.0  # a node without a coordinator keeps its layers in memory for so long
MAX_WAITING_JOBS = wire.MAX_TENSORS + 4096  # all tensors of an assignment may have arrived at once
GIB = 1 << 30


def gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.2f} GiB"


class OneLineFormatter(logging.Formatter):
    """Log records as single lines; control characters from peers cannot forge others."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# ----------------------------------------------------------------------------------------------------------------------
# What this machine is
# ----------------------------------------------------------------------------------------------------------------------


class UsageError(Exception):
    """Something on the command line or on this machine that the user has to change; one readable line."""


def choose_device(name: str) -> torch.device:
    """auto, cuda, cuda:N, mps or cpu -> a device that is really there; raises UsageError naming what is."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda", 0) if cuda else torch.device("mps") if mps else torch.device("cpu")
    available = ["cpu"] + (["mps"] if mps else [])
    if cuda:
        available += ["cuda"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name not in available:
        raise UsageError(f"--device {name} is not available here; available: auto, {', '.join(available)}")
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def available_ram_bytes() -> int | None:
    """RAM that a new process may take now, containers' limits counted; None where this system does not tell."""
    figures = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                figures.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            figures.append(max(0, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text())))
    except OSError:
        log.debug("no /proc/meminfo or no cgroup limit on this system")
    if figures:
        return min(figures)
    if sys.platform == "win32":
        return _windows_available_ram()
    try:  # macOS has no figure for "available" without a subprocess; half of the RAM is a safe start
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return None


def _windows_available_ram() -> int:
    import ctypes

    class MemoryStatus(ctypes.Structure):  # MEMORYSTATUSEX of sysinfoapi.h
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong)
            for name in ("total", "available", "total_page", "free_page", "total_virtual", "free_virtual", "extended")
        ]

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status.available


def free_memory_bytes(device: torch.device) -> int | None:
    """What new tensors may take on a device; None when unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":  # the allocator would take 1.7 times this; macOS slows to a crawl long before
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return available_ram_bytes()


def total_memory_bytes(device: torch.device) -> int | None:
    """The size of a device's memory; None when unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def describe_devices() -> list[dict]:
    """Every device of this machine, as HELLO carries it."""
    found = [(torch.device("cpu"), platform.processor() or platform.machine() or "cpu")]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            found.append((torch.device("cuda", i), torch.cuda.get_device_name(i)))
    if torch.backends.mps.is_available():
        found.append((torch.device("mps"), "Apple GPU"))
    return [
        {
            "id": str(device),
            "type": device.type,
            "name": name[:128],
            "total_memory": total_memory_bytes(device),
            "free_memory": free_memory_bytes(device),
        }
        for device, name in found
    ]


def lock_file(path: Path):
    """Opens and locks a file until the process ends; None when another process holds it."""
    handle = path.open("a+")
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        return None
    return handle


LOCK_FILE = re.compile(r".+-\d+\.lock")  # as claim_node_id names them


def delete_free_locks(work_dir: Path) -> None:
    """Deletes the lock files that no running node holds. They are empty; others of such a name are not ours."""
    for path in work_dir.glob("*.lock"):
        with contextlib.suppress(OSError):  # of another user, or deleted meanwhile: it stays
            if not LOCK_FILE.fullmatch(path.name) or path.lstat().st_size:
                continue
            lock = lock_file(path)
            if lock is not None:
                lock.close()  # first, since Windows deletes no open file
                path.unlink()


def claim_node_id(work_dir: Path, hostname: str):
    """<hostname>-<lowest index that no running node here holds>; returns (id, lock to keep open).

    So a node that restarts gets its id back, and two on one machine differ.
    """
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        for index in range(1024):
            node_id = f"{hostname}-{index}"
            lock = lock_file(work_dir / f"{node_id}.lock")
            if lock is not None:
                return node_id, lock
    except OSError as error:
        raise UsageError(f"--work-dir {work_dir} is not writable ({error.strerror}); give another folder") from None
    raise UsageError(f"1024 nodes already run with --work-dir {work_dir}")


# ----------------------------------------------------------------------------------------------------------------------
# Weight cache: tensors that have arrived once, as files
# ----------------------------------------------------------------------------------------------------------------------

CACHE_MAGIC = b"TCWEIGHT"
CACHE_HEADER_NBYTES = len(CACHE_MAGIC) + hashlib.sha256().digest_size
CACHE_FILE = re.compile(r"[0-9a-f]{64}\.weight")  # the only names that are ever deleted, with those of CACHE_PART
CACHE_PART = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.part")
PART_LIFETIME_S = 600.0  # a file that nobody has written to for so long was left behind by a node that was killed
READ_BYTES = 1 << 20  # read and hashed at a time, so that it is hashed while it is in the processor's cache
DISK_RESERVE_BYTES = GIB  # the cache leaves at least this much of the disk free
CLOCK_SLACK_S = 1.0  # file times are a little behind the clock


@dataclass(frozen=True)
class CachedFile:
    """One file of the cache's folder."""

    path: Path
    nbytes: int
    used_at: float  # seconds since 1970: written, or last used by a load

    @property
    def is_part(self) -> bool:
        return CACHE_PART.fullmatch(self.path.name) is not None


class WeightCache:
    """Stored tensors in a folder, by their content's key: a node that starts again asks only for what is not here.

    A file is CACHE_MAGIC, the SHA-256 of the bytes, the bytes. It is written under another name and renamed when it is
    whole, so nodes may share the folder and be killed at any moment; what is read is held to its SHA-256. The files
    that were used longest ago go first. Nothing here raises when the disk is full or the folder forbidden: there is
    less of a cache then, and a line in the log for each load.
    """

    def __init__(self, folder: Path, limit_bytes: int, scope: bytes = b""):
        """scope goes into the names: what came from a coordinator without the token is never taken for what comes from
        one that has it."""
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.scope = scope
        self.trouble: str | None = None  # why this load writes no more
        self._load_began = 0.0
        self._used_bytes = 0

    def path(self, key: str) -> Path:
        return self.folder / (hashlib.sha256(self.scope + bytes.fromhex(key)).hexdigest() + ".weight")

    def begin_load(self, sizes: dict[str, int]) -> set[str]:
        """The keys, of {key: bytes}, that are here in the right size, marked as used now; tidies the folder."""
        self.trouble = None
        now = time.time()
        self._load_began = now - CLOCK_SLACK_S
        try:
            for file in self._files():
                if file.is_part and file.used_at < now - PART_LIFETIME_S:
                    self._delete(file.path)
            files = {file.path: file for file in self._files()}
            self._used_bytes = sum(file.nbytes for file in files.values())
            held = set()
            for key, nbytes in sizes.items():
                file = files.get(self.path(key))
                if file is not None and file.nbytes == CACHE_HEADER_NBYTES + nbytes:
                    held.add(key)
                    self._mark_used(file.path, now)
            return held
        except OSError as error:
            self._give_up(f"it cannot be read ({error.strerror or error})")
            return set()

    def read(self, key: str, buffer: memoryview) -> bool:
        """Fills buffer with a tensor's bytes. False when they are not there as they were written; a damaged file is
        deleted."""
        path = self.path(key)
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(CACHE_HEADER_NBYTES)
                digest, filled = hashlib.sha256(), 0
                while filled < buffer.nbytes:
                    piece = buffer[filled : filled + READ_BYTES]
                    count = file.readinto(piece)
                    if not count:
                        break
                    digest.update(piece[:count])
                    filled += count
                whole = filled == buffer.nbytes and not file.read(1)
        except OSError as error:
            log.warning("weight cache: %s cannot be read (%s); asking for it again", path, error.strerror or error)
            return False
        if whole and header == CACHE_MAGIC + digest.digest():
            return True
        log.warning("weight cache: %s is damaged; deleted, asking for it again", path)
        self._delete(path)
        return False

    def write(self, key: str, data: memoryview, digest: bytes) -> None:
        """Keeps a tensor's bytes, whose SHA-256 is digest, if there is room or older files can make some."""
        if self.trouble:
            return
        path = self.path(key)
        part = path.with_suffix(f".{uuid.uuid4().hex}.part")
        nbytes = CACHE_HEADER_NBYTES + data.nbytes
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(nbytes):
                return
            with part.open("xb") as file:
                file.write(CACHE_MAGIC + digest)
                file.write(data)
            os.replace(part, path)
            self._used_bytes += nbytes
        except FileNotFoundError:
            log.debug("weight cache: %s was deleted while it was written (node.py --forget)", part)
        except OSError as error:
            self._delete(part)
            self._give_up(f"it cannot be written ({error.strerror or error})")

    def forget(self) -> tuple[int, int, int]:
        """Deletes all files of the cache and nothing else: (files deleted, their bytes, files that could not be)."""
        files = list(self._files())
        deleted = [file for file in files if self._delete(file.path)]
        return len(deleted), sum(file.nbytes for file in deleted), len(files) - len(deleted)

    def _files(self) -> Iterator[CachedFile]:
        """The cache's own files; other things in the folder are not looked at."""
        try:
            entries = list(os.scandir(self.folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if CACHE_FILE.fullmatch(entry.name) or CACHE_PART.fullmatch(entry.name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted by a neighbour
                    continue
                yield CachedFile(Path(entry.path), status.st_size, status.st_mtime)

    def _make_room(self, nbytes: int) -> bool:
        """Whether so many bytes fit, once the least recently used files are gone; never one that this load uses."""
        free = shutil.disk_usage(self.folder).free - DISK_RESERVE_BYTES
        excess = max(self._used_bytes + nbytes - self.limit_bytes, nbytes - free)
        if excess <= 0:
            return True
        files = list(self._files())  # neighbours write and delete too
        self._used_bytes = sum(file.nbytes for file in files)
        excess = max(self._used_bytes + nbytes - self.limit_bytes, nbytes - free)
        old = [file for file in files if not file.is_part and file.used_at < self._load_began]
        if sum(file.nbytes for file in old) < excess:
            self._give_up(
                f"less than {gib(DISK_RESERVE_BYTES)} would be left on the disk" if nbytes > free
                else f"these layers need more than --cache-gb allows ({gib(self.limit_bytes)})"
            )  # fmt: skip
            return False
        for file in sorted(old, key=lambda file: file.used_at):
            if excess <= 0:
                break
            if self._delete(file.path):
                excess -= file.nbytes
                self._used_bytes -= file.nbytes
        return excess <= 0

    def _mark_used(self, path: Path, now: float) -> None:
        try:
            os.utime(path, (now, now))
        except OSError as error:  # of another user, or just deleted: it is read all the same, or asked for
            log.debug("weight cache: %s keeps its old time (%s)", path, error.strerror or error)

    def _delete(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
            return True
        except OSError as error:
            log.debug("weight cache: %s cannot be deleted (%s)", path, error.strerror or error)
            return False

    def _give_up(self, why: str) -> None:
        self.trouble = why
        log.warning("weight cache in %s: %s; weights that are not in it will be sent again next time", self.folder, why)


class CacheWriter(threading.Thread):
    """Writes tensors to a cache beside everything else. What finds the queue full is not cached: a slow disk holds
    nothing up, and memory stays bounded."""

    MOST_WAITING_BYTES = 24 << 20  # a single larger tensor may wait too

    def __init__(self, cache: WeightCache):
        super().__init__(name="cache writer", daemon=True)
        self.cache = cache
        self._skipped = 0
        self._waiting: deque[tuple[str, memoryview, bytes]] = deque()
        self._waiting_bytes = 0  # with those of the tensor that is being written
        self._changed = threading.Condition()

    def put(self, key: str, data: memoryview, digest: bytes) -> None:
        """Has data, which must not change any more, written soon."""
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + data.nbytes > self.MOST_WAITING_BYTES:
                self._skipped += 1
                return
            self._waiting.append((key, data, digest))
            self._waiting_bytes += data.nbytes
            self._changed.notify_all()

    def take_skipped(self) -> int:
        """How many tensors were not cached since the last call, because the queue was full."""
        with self._changed:
            skipped, self._skipped = self._skipped, 0
            return skipped

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until everything is written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting_bytes, timeout_s)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                key, data, digest = self._waiting.popleft()
            self.cache.write(key, data, digest)
            with self._changed:
                self._waiting_bytes -= data.nbytes
                self._changed.notify_all()
            del data  # the memory of a tensor; the next wait may be long


# ----------------------------------------------------------------------------------------------------------------------
# Assignment: what the coordinator asks this node to hold, and the tensors on their way in
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Arrival:
    """One tensor that is being received. `buffer` is where its bytes go."""

    buffer: memoryview
    staging: torch.Tensor | None  # set when the tensor's place is on a device that a socket cannot write to
    digest: object = field(default_factory=hashlib.sha256)
    received: int = 0
    chunks: int = 0


@dataclass
class Loading:
    """How far the weights of an assignment are.

    The worker makes it and starts its two sources, the network and the cache. The main thread alone changes `arrivals`
    and `received_bytes` from then on, the cache reader `cached_bytes` and `damaged`; the rest is the worker's.
    """

    arrivals: dict[str, Arrival] = field(default_factory=dict)  # tensors that were asked for and are not complete
    missing: dict[int, int] = field(default_factory=dict)  # layer -> its tensors that are still to come
    load_bytes: int = 0  # what does not stand in memory already
    received_bytes: int = 0
    cached_bytes: int = 0
    damaged: dict[str, Arrival] = field(default_factory=dict)  # what the cache could not give after all
    open_sources: set[str] = field(default_factory=set)  # NETWORK and CACHE, until they have given what they have
    began_at: float = field(default_factory=time.monotonic)


NETWORK, CACHE = "network", "cache"

LayerIdentity = tuple[qwen.Config, qwen.WeightFormat, bool, tuple[str, ...]]


def layer_index(tensor_name: str) -> int:
    """model.layers.<i>.... -> i"""
    return int(tensor_name.split(".")[2])


class Assignment:
    """A checked ASSIGNMENT: the stage's place in the model, and the state of its loading."""

    def __init__(self, payload: dict, epoch: int):
        """Raises ValueError when the manifest is not exactly what these layers need."""
        self.epoch = epoch
        self.model_id = payload["model_id"]
        self.config = qwen.Config.from_wire(payload["config"])
        self.weights = qwen.WeightFormat(payload["quant"], payload["group_size"], payload["compute_dtype"])
        self.wire_dtype = payload["wire_dtype"]
        self.start, self.end = payload["layer_start"], payload["layer_end_exclusive"]
        self.slots, self.max_context = payload["slots"], payload["max_context"]
        self.second_copy = payload["second_copy"]
        if not 0 <= self.start < self.end <= self.config.num_hidden_layers:
            raise ValueError(f"layers [{self.start}, {self.end}) of {self.config.num_hidden_layers}")
        expected = qwen.stored_tensors(self.config, self.start, self.end, self.weights)
        wanted = [(t.name, t.dtype, list(t.shape), t.nbytes) for t in expected]
        offered = [(e["tensor_name"], e["dtype"], e["shape"], e["nbytes"]) for e in payload["manifest"]]
        if wanted != offered:
            different = [f"{w} is not {o}" for w, o in zip(wanted, offered) if w != o]
            raise ValueError(
                f"the manifest has {len(offered)} tensors, these layers need {len(wanted)}"
                + (f"; first difference: {different[0]}" if different else "")
            )
        self.have_bytes: int | None = None  # what was free when its loading began
        self.tensors = {t.name: t for t in expected}
        self.keys = {e["tensor_name"]: e["key"] for e in payload["manifest"]}
        self.loading = Loading()
        self.total_bytes = sum(t.nbytes for t in expected)
        if (payload["tensor_count"], payload["total_weight_bytes"]) != (len(expected), self.total_bytes):
            raise ValueError("tensor_count or total_weight_bytes does not match the manifest")

    @property
    def need_bytes(self) -> int:
        """Weights as stored; the caches come on top, as conversations grow."""
        return self.total_bytes

    def layer_identity(self, i: int) -> LayerIdentity:
        """Equal for layers that are the same in memory. (A process has one choice of kernels for config and format.)"""
        keys = tuple(key for name, key in self.keys.items() if layer_index(name) == i)
        return self.config, self.weights, self.second_copy, keys


# ----------------------------------------------------------------------------------------------------------------------
# Worker: the one thread that touches the device
# ----------------------------------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """Runs jobs one after another. A job is a function of no arguments; the worker owns `stage` and the device.

    `loaded` has the layers that are complete and packed. It outlives stages and connections, so that the next
    assignment can take over those that it needs as they are.

    `busy_since` lets the reader say in a PONG for how long the present job has been running.
    """

    def __init__(self, device: torch.device):
        super().__init__(name="worker", daemon=True)
        self.device = device
        self.jobs: queue.Queue = queue.Queue()
        self.busy_since: float | None = None
        self.stage: qwen.Stage | None = None
        self.cache_reader: threading.Thread | None = None  # holds tensors of the stage while it fills them
        self.loaded: dict[int, tuple[LayerIdentity, qwen.DecoderLayer]] = {}
        self.known_kernels: dict[tuple, tuple[quant.LayerKernels, quant.LayerKernels | None]] = {}

    def run(self) -> None:
        with torch.inference_mode():
            while True:
                job = self.jobs.get()
                self.busy_since = time.monotonic()
                job()
                self.busy_since = None
                del job  # it holds tensors; the next get() may wait for long

    def wait_until_idle(self) -> None:
        """Returns when all jobs that wait now are done, among them the one that lets go of a lost session's stage."""
        idle = threading.Event()
        self.jobs.put(idle.set)
        idle.wait()

    @property
    def busy_ms(self) -> int:
        since = self.busy_since
        return 0 if since is None else int((time.monotonic() - since) * 1000)

    @property
    def held_bytes(self) -> int:
        """What the loaded layers take. Any thread may ask."""
        return sum(layer.nbytes for _, layer in tuple(self.loaded.values()))

    def keep_layers(self, assignment: Assignment) -> dict[int, qwen.DecoderLayer]:
        """Frees the stage, its caches and every layer that an assignment does not need as it is; returns the others."""
        self.loaded = {
            i: (identity, layer)
            for i, (identity, layer) in self.loaded.items()
            if assignment.start <= i < assignment.end and identity == assignment.layer_identity(i)
        }
        self.leave_stage()
        return {i: layer for i, (_, layer) in self.loaded.items()}

    def leave_stage(self) -> None:
        """Frees the stage's caches and what it has not loaded; loaded layers stay. Its load must be abandoned."""
        self.stage = None
        if self.cache_reader is not None:
            self.cache_reader.join()
            self.cache_reader = None
        quant.release_freed_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()

    def free_all(self) -> None:
        """Frees the stage and all layers."""
        self.loaded = {}
        self.leave_stage()

    def kernels(
        self, config: qwen.Config, weights: qwen.WeightFormat, neighbours: dict | None = None
    ) -> tuple[quant.LayerKernels, quant.LayerKernels | None]:
        """The kernels for a model's shapes on this device, and those with a second copy of the weights if that pays.

        Measured once per process, then remembered. neighbours: what a node on the same machine has chosen; it need only
        be checked, if that has as many threads.
        """
        shapes = tuple(qwen.merged_linear_shapes(config).values())
        key = (shapes, weights)
        if key not in self.known_kernels:
            kind = (weights.quant, weights.group_size, weights.dtype, self.device)
            kernels = None
            if neighbours is not None and neighbours["threads"] == torch.get_num_threads():
                kernels = neighbours_kernels(shapes, kind, neighbours)
            if kernels is None:
                kernels = quant.choose_kernels_with_copy(list(shapes), *kind)
            chosen = kernels[1] or kernels[0]
            for line in chosen.measured:
                log.debug("kernels: %s", line)
            for line in chosen.decisions:
                log.info("kernels: %s", line)
            self.known_kernels[key] = kernels
        return self.known_kernels[key]

    def measure(self, config: qwen.Config, weights: qwen.WeightFormat, neighbours: dict | None) -> dict:
        """Milliseconds for one decoder layer at several numbers of rows, with the kernels that will serve."""
        kernels, with_copy = self.kernels(config, weights, neighbours)
        layer = qwen.DecoderLayer(config, 0, weights, self.device)
        for tensor in layer.destinations.values():
            if tensor.dtype.is_floating_point:
                tensor.fill_(0.01)
            else:
                tensor.random_(0, 100)
        layer.prepare(kernels)
        rope = qwen.Rope(config, self.device)
        layer_ms = {}
        for rows in wire.MEASURED_ROWS:
            hidden_states = torch.randn(rows, config.hidden_size, device=self.device)
            cos, sin = rope.angles(torch.arange(rows, device=self.device))
            segments = [qwen.Segment(0, 0, 0, rows)]
            cache = layer.new_cache(rows)
            best, end = float("inf"), time.perf_counter() + MEASURE_SECONDS
            for _ in range(MEASURE_ROUNDS):
                cache.cut(0)
                begin = time.perf_counter()
                layer.forward(hidden_states, segments, [cache], cos, sin).cpu()  # .cpu() waits for the device
                best = min(best, time.perf_counter() - begin)
                if time.perf_counter() > end:
                    break
            layer_ms[str(rows)] = best * 1e3
        chosen = {
            "choices": choices_to_wire(kernels),
            "with_copy": with_copy and choices_to_wire(with_copy),
            "threads": torch.get_num_threads(),
        }
        quant.release_freed_memory()
        return {"layer_ms": layer_ms, "kernels": chosen}


def choices_to_wire(kernels: quant.LayerKernels) -> list[dict]:
    return [
        {"shape": list(shape), "few": choice.few, "many": choice.many, "threshold": choice.threshold}
        for shape, choice in kernels.choices.items()
    ]


def neighbours_kernels(
    shapes: tuple, kind: tuple, neighbours: dict
) -> tuple[quant.LayerKernels, quant.LayerKernels | None] | None:
    """MEASURED's kernels of a node on the same machine as this node's; None when something in them is wrong here."""
    found = []
    for choices in (neighbours["choices"], neighbours["with_copy"]):
        if choices is None:
            found.append(None)
            continue
        by_shape = {tuple(c["shape"]): (c["few"], c["many"], c["threshold"]) for c in choices}
        if set(by_shape) != set(shapes):
            return None
        kernels = quant.neighbours_choice(by_shape, *kind)
        if kernels is None:
            return None
        found.append(kernels)
    return tuple(found)


def measuring_bytes(config: qwen.Config, weights: qwen.WeightFormat, device_type: str) -> int:
    """What one layer and the largest pass that it is measured with take at least."""
    values_per_row = sum(
        out_features + in_features for out_features, in_features in qwen.linear_shapes(config).values()
    )
    activations = 4 * max(wire.MEASURED_ROWS) * values_per_row
    return qwen.layer_weight_bytes(config, 0, weights, device_type) + activations


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has an exception of its own; MPS and the CPU allocator raise RuntimeError with a text."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


# ----------------------------------------------------------------------------------------------------------------------
# Session: one connection to the coordinator
# ----------------------------------------------------------------------------------------------------------------------


class Session:
    """Everything that lives exactly as long as one connection.

    The main thread reads and checks frames here and hands work to the worker; the worker's jobs answer through
    `writer`. A frame of an older epoch is read and dropped; a newer one than assigned is a BadFrame.
    """

    READ_AHEAD_LAYERS = 2  # from the cache, while the worker packs: more would only take memory

    def __init__(
        self,
        connection: wire.Connection,
        worker: Worker,
        heartbeat_s: float,
        max_memory_bytes: int | None,
        cache_writer: CacheWriter | None = None,
    ):
        """cache_writer: None means no cache."""
        self.connection = connection
        self.worker = worker
        self.max_memory_bytes = max_memory_bytes
        self.cache_writer = cache_writer
        self.writer = wire.Writer(connection, heartbeat_s)
        self.assignment: Assignment | None = None
        self.dropped_frames = 0
        self.waiting_passes = 0
        self.closed = threading.Event()
        self.handlers = {
            "PING": self.on_ping,
            "PONG": lambda frame: None,
            "ERROR": self.on_error,
            "MEASURE": self.on_measure,
            "ASSIGNMENT": self.on_assignment,
            "WEIGHT_CHUNK": self.on_weight_chunk,
            "WEIGHTS_COMPLETE": self.on_weights_complete,
            "RUN_PREFILL": self.on_run,
            "RUN_DECODE": self.on_run,
            "CLEAR_CACHE": self.on_clear_cache,
            "COPY_CACHE": self.on_copy_cache,
        }

    def serve(self) -> None:
        """Reads until the connection ends; raises what ended it (PeerClosed, PeerSilent, BadFrame)."""
        self.writer.start()
        try:
            while True:
                frame = self.connection.recv(self.place)
                if self._is_current(frame):
                    self.handlers[frame.type](frame)
                else:
                    self.dropped_frames += 1
        finally:
            self.closed.set()
            self.writer.close()
            self.connection.close()
            self.worker.jobs.put(self.worker.leave_stage)

    def submit(self, job: Callable[[], None]) -> None:
        """Has the worker run a job, unless the connection has ended by then. A bug in a job ends the connection, not
        the worker: the node joins again. BadFrame when too many jobs wait."""
        if self.worker.jobs.qsize() >= MAX_WAITING_JOBS:
            raise self.bad(f"more than {MAX_WAITING_JOBS} requests are waiting")

        def guarded():
            if self.closed.is_set():
                return
            try:
                job()
            except Exception:
                log.exception("the worker failed; leaving the cluster to join it again")
                self.connection.close()

        self.worker.jobs.put(guarded)

    # -- epochs and places ---------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.assignment.epoch if self.assignment else 0

    def _is_current(self, frame: wire.Frame) -> bool:
        if frame.epoch is None:
            return True
        if frame.type == "ASSIGNMENT":  # a loader of the coordinator may have been overtaken by the next plan's
            return frame.epoch >= self.epoch
        if frame.epoch > self.epoch:
            raise self.bad(f"{frame.type} of epoch {frame.epoch}, but epoch {self.epoch} is assigned")
        return frame.epoch == self.epoch

    def bad(self, what: str) -> wire.BadFrame:
        return wire.BadFrame(f"{self.connection.peer}: {what}")

    def place(self, frame: wire.Frame, nbytes: int) -> memoryview | None:
        """Where the raw bytes of a frame go: a tensor that is being loaded, or a buffer for hidden states."""
        if not self._is_current(frame):
            return None
        assignment = self.assignment
        if assignment is None:
            raise self.bad(f"{frame.type} before any ASSIGNMENT")
        if frame.type == "WEIGHT_CHUNK":
            return self._place_chunk(frame.payload, nbytes)
        rows, hidden_size = len(frame.payload["slots"]), frame.payload["shape"][2]
        if hidden_size != assignment.config.hidden_size or frame.payload["dtype"] != assignment.wire_dtype:
            raise self.bad(
                f"hidden states of size {hidden_size} in {frame.payload['dtype']}; "
                f"assigned: {assignment.config.hidden_size} in {assignment.wire_dtype}"
            )
        if rows > max(assignment.max_context, assignment.slots):
            raise self.bad(f"{rows} rows in one pass; max_context is {assignment.max_context}")
        try:
            return memoryview(bytearray(nbytes))
        except MemoryError:  # of an assignment that could not be loaded either
            raise self.bad(f"no memory for {nbytes} bytes of hidden states") from None

    def _place_chunk(self, payload: dict, nbytes: int) -> memoryview:
        name = payload["tensor_name"]
        arrival = self.assignment.loading.arrivals.get(name)
        if arrival is None:
            raise self.bad(f"tensor {name!r} is not expected")
        total = arrival.buffer.nbytes
        last = payload["chunk_index"] == payload["chunk_count"] - 1
        in_order = payload["chunk_index"] == arrival.chunks and payload["offset"] == arrival.received
        if not in_order or arrival.received + nbytes > total or last != (arrival.received + nbytes == total):
            raise self.bad(f"tensor {name!r}: chunk {payload['chunk_index']} does not follow what came before")
        return arrival.buffer[arrival.received : arrival.received + nbytes]

    # -- frames, in the order of a connection's life -------------------------------------------------------------------

    def on_ping(self, frame: wire.Frame) -> None:
        self.writer.put("PONG", {"busy_ms": self.worker.busy_ms}, urgent=True)

    def on_error(self, frame: wire.Frame) -> None:
        raise self.bad(f"it gives up: {frame.payload['code']}: {frame.payload['message']}")

    def on_measure(self, frame: wire.Frame) -> None:
        payload = frame.payload
        weights = qwen.WeightFormat(payload["quant"], payload["group_size"], payload["compute_dtype"])
        try:
            config = qwen.Config.from_wire(payload["config"])
            need = measuring_bytes(config, weights, self.worker.device.type)
        except ValueError as error:
            raise self.bad(f"MEASURE: {error}") from None

        def measure():
            device = self.worker.device
            have = free_memory_bytes(device)
            if have is not None and need > have and self.worker.stage is None:
                self.worker.free_all()  # layers of an earlier plan: before the next one is made, this must be known
                have = free_memory_bytes(device)
            try:
                if have is not None and need > have:  # some systems promise any amount and kill who uses it
                    raise MemoryError(f"one layer needs {gib(need)}, {device} has {gib(have)}")
                self.writer.put("MEASURED", self.worker.measure(config, weights, payload["kernels"]))
            except (RuntimeError, MemoryError) as error:
                log.error("measuring failed: %s", error)
                self.writer.put("ERROR", {"code": "measure_failed", "message": str(error)[:1000]}, urgent=True)

        self.submit(measure)

    def on_assignment(self, frame: wire.Frame) -> None:
        if frame.epoch is None or frame.epoch == self.epoch:
            raise self.bad(f"ASSIGNMENT of epoch {frame.epoch} after epoch {self.epoch}")
        try:
            assignment = Assignment(frame.payload, frame.epoch)
        except ValueError as error:
            raise self.bad(f"ASSIGNMENT: {error}") from None
        self.assignment = assignment
        log.info(
            "epoch %d: layers %d..%d of %s, %s",
            assignment.epoch, assignment.start, assignment.end - 1, assignment.model_id, gib(assignment.total_bytes),
        )  # fmt: skip
        self.submit(lambda: self._allocate(assignment))

    def _allocate(self, assignment: Assignment) -> None:
        """(worker) Makes the stage, with what is left of the one before, and starts to load what it lacks."""
        if self._is_stale(assignment):
            return
        kept = self.worker.keep_layers(assignment)
        have = free_memory_bytes(self.worker.device)
        if have is not None:
            have += sum(layer.nbytes for layer in kept.values())
        if self.max_memory_bytes is not None:
            have = self.max_memory_bytes if have is None else min(have, self.max_memory_bytes)
        assignment.have_bytes = have
        if have is not None and assignment.need_bytes > have:
            self._load_failed(assignment, None)
            return
        try:
            self.worker.kernels(assignment.config, assignment.weights)
            stage = qwen.Stage(
                assignment.config, assignment.start, assignment.end, assignment.weights,
                assignment.slots, assignment.max_context, self.worker.device, kept,
            )  # fmt: skip
            arrivals = {
                name: self._arrival(place)
                for layer in stage.layers.values()
                for name, place in layer.destinations.items()
            }
        except (RuntimeError, MemoryError) as error:
            self._load_failed(assignment, error)
            return
        if self._is_stale(assignment):  # a newer one came meanwhile; its own _allocate follows
            return
        self.worker.stage = stage
        self._start_sources(assignment, arrivals)

    def _start_sources(self, assignment: Assignment, arrivals: dict[str, Arrival]) -> None:
        """(worker) Reads from the cache what is there, and asks for the rest."""
        loading = assignment.loading
        for name in arrivals:
            loading.missing[layer_index(name)] = loading.missing.get(layer_index(name), 0) + 1
        loading.load_bytes = sum(arrival.buffer.nbytes for arrival in arrivals.values())
        sizes = {assignment.keys[name]: tensor.nbytes for name, tensor in assignment.tensors.items()}
        held = self.cache_writer.cache.begin_load(sizes) if self.cache_writer else set()
        cached = {name: arrival for name, arrival in arrivals.items() if assignment.keys[name] in held}
        log.info(
            "%d of %d tensors are still in memory, %d in the cache",
            len(assignment.tensors) - len(arrivals), len(assignment.tensors), len(cached),
        )  # fmt: skip
        absent = {name: arrival for name, arrival in arrivals.items() if name not in cached}
        loading.open_sources = {NETWORK, CACHE} if cached else {NETWORK}
        self._ask_for(assignment, absent)
        if cached:
            self.worker.cache_reader = threading.Thread(
                target=self._read_cache, args=(assignment, cached), name="cache reader", daemon=True
            )
            self.worker.cache_reader.start()

    def _ask_for(self, assignment: Assignment, arrivals: dict[str, Arrival]) -> None:
        """(worker) Has the coordinator send tensors."""
        assignment.loading.arrivals = arrivals
        self.writer.put("WEIGHTS_WANTED", {"names": list(arrivals)}, epoch=assignment.epoch)

    def _read_cache(self, assignment: Assignment, cached: dict[str, Arrival]) -> None:
        """(cache reader) Fills tensors from the cache and hands them to the worker, layer by layer."""
        ahead = threading.Semaphore(self.READ_AHEAD_LAYERS)
        layers: dict[int, dict[str, Arrival]] = {}
        for name, arrival in cached.items():
            layers.setdefault(layer_index(name), {})[name] = arrival
        cached.clear()  # what the worker has packed must not be held here: the thread holds its arguments

        def hand_over(arrivals: dict[str, Arrival]) -> None:
            self._tensors_arrived(assignment, arrivals)
            ahead.release()

        for i in list(layers):
            while not ahead.acquire(timeout=0.2):
                if self._is_abandoned(assignment):
                    return
            self.submit(functools.partial(hand_over, self._read_tensors(assignment, layers.pop(i))))
        self.submit(lambda: self._source_ended(assignment, CACHE))

    def _read_tensors(self, assignment: Assignment, cached: dict[str, Arrival]) -> dict[str, Arrival]:
        """(cache reader) Fills tensors from the cache; returns those that are whole, notes the others as damaged."""
        loading, whole = assignment.loading, {}
        for name, arrival in cached.items():
            if self._is_abandoned(assignment):
                break
            if self.cache_writer.cache.read(assignment.keys[name], arrival.buffer):
                loading.cached_bytes += arrival.buffer.nbytes
                whole[name] = arrival
            else:
                loading.damaged[name] = arrival
        return whole

    def _arrival(self, place: torch.Tensor) -> Arrival:
        if place.device.type == "cpu":
            return Arrival(wire.tensor_buffer(place), None)
        staging = torch.empty(place.shape, dtype=place.dtype)
        return Arrival(wire.tensor_buffer(staging), staging)

    def on_weight_chunk(self, frame: wire.Frame) -> None:
        payload = frame.payload
        name = payload["tensor_name"]
        assignment = self.assignment
        loading = assignment.loading
        arrival = loading.arrivals[name]  # place() has checked that it is there and that this chunk is the next one
        arrival.digest.update(frame.raw)
        arrival.chunks += 1
        arrival.received += frame.raw.nbytes
        loading.received_bytes += frame.raw.nbytes
        if arrival.chunks < payload["chunk_count"]:
            return
        if payload["sha256"] != arrival.digest.digest():
            raise self.bad(f"tensor {name!r} arrived damaged: its SHA-256 differs")
        del loading.arrivals[name]
        if self.cache_writer:
            self.cache_writer.put(assignment.keys[name], arrival.buffer, payload["sha256"])
        self.submit(lambda: self._tensors_arrived(assignment, {name: arrival}))

    def _tensors_arrived(self, assignment: Assignment, arrivals: dict[str, Arrival]) -> None:
        """(worker) Moves staged tensors to the device; packs a layer as soon as it is complete."""
        stage, loading = self.worker.stage, assignment.loading
        if self._is_stale(assignment) or stage is None:  # None: loading has failed, which was reported
            return
        try:
            for name, arrival in arrivals.items():
                i = layer_index(name)
                layer = stage.layers[i]
                if arrival.staging is not None:
                    layer.destinations[name].copy_(arrival.staging)
                loading.missing[i] -= 1
                if loading.missing[i] == 0:
                    kernels, with_copy = self.worker.kernels(assignment.config, assignment.weights)
                    layer.prepare(with_copy if with_copy and assignment.second_copy else kernels)
                    self.worker.loaded[i] = assignment.layer_identity(i), layer
                    quant.release_freed_memory(done=False)
        except (RuntimeError, MemoryError) as error:
            self._load_failed(assignment, error)

    def on_weights_complete(self, frame: wire.Frame) -> None:
        assignment = self.assignment
        if assignment is None:
            raise self.bad("WEIGHTS_COMPLETE before any ASSIGNMENT")
        if assignment.loading.arrivals:
            raise self.bad(f"WEIGHTS_COMPLETE, but {len(assignment.loading.arrivals)} tensors have not arrived")
        self.submit(lambda: self._source_ended(assignment, NETWORK))

    def _source_ended(self, assignment: Assignment, source: str) -> None:
        """(worker) The network or the cache has given what it has; when both have, the stage is loaded, or what was
        damaged in the cache is asked for."""
        stage, loading = self.worker.stage, assignment.loading
        if self._is_stale(assignment) or stage is None or source not in loading.open_sources:
            return
        loading.open_sources.remove(source)
        if loading.open_sources:
            return
        if loading.damaged:
            damaged, loading.damaged = loading.damaged, {}
            loading.open_sources = {NETWORK}
            self._ask_for(assignment, damaged)
            return
        if any(loading.missing.values()):  # the coordinator has ended before this node had said what it wants
            self._load_failed(assignment, ValueError("WEIGHTS_COMPLETE came before the weights"))
            return
        self._report_loaded(assignment, stage)

    def _report_loaded(self, assignment: Assignment, stage: qwen.Stage) -> None:
        """(worker) Answers LOAD_COMPLETE."""
        quant.release_freed_memory()
        loading = assignment.loading
        kept_bytes = assignment.total_bytes - loading.load_bytes
        log.info(
            "epoch %d: loaded, %s in memory; kept %.1f MB, from the cache %.1f MB, over the network %.1f MB; %.1f s",
            assignment.epoch, gib(stage.weight_nbytes), kept_bytes / 1e6, loading.cached_bytes / 1e6,
            loading.received_bytes / 1e6, time.monotonic() - loading.began_at,
        )  # fmt: skip
        if self.cache_writer and self.cache_writer.take_skipped():
            log.info("the disk was too slow to cache everything that arrived; the rest will be sent again next time")
        sizes = {
            "weight_bytes": assignment.total_bytes,
            "packed_bytes": stage.weight_nbytes,
            "cached_bytes": loading.cached_bytes,
            "received_bytes": loading.received_bytes,
        }
        self.writer.put("LOAD_COMPLETE", sizes, epoch=assignment.epoch)

    def on_run(self, frame: wire.Frame) -> None:
        assignment, payload = self.assignment, frame.payload
        if assignment is None:
            raise self.bad(f"{frame.type} before any ASSIGNMENT")
        self.waiting_passes += 1
        if self.waiting_passes > MAX_WAITING_PASSES:
            raise self.bad(f"more than {MAX_WAITING_PASSES} passes are waiting")

        def run():
            self.waiting_passes -= 1
            if not self._is_stale(assignment):
                self._run(assignment, frame.type, frame.request_id, payload, frame.raw)

        self.submit(run)

    def _run(self, assignment: Assignment, kind: str, request_id: int, payload: dict, raw) -> None:
        """(worker) One pass through the stage; answers HIDDEN_STATE or INFERENCE_ERROR."""
        hidden_size = assignment.config.hidden_size
        begin = time.perf_counter()
        try:
            stage = self.worker.stage
            if stage is None or any(layer.destinations for layer in stage.layers.values()):
                raise qwen.InvalidPass("the weights are not loaded")
            rows = len(payload["slots"])
            hidden_states = wire.unpack_hidden_states(raw, rows, hidden_size, assignment.wire_dtype)
            output = stage.run(hidden_states, payload["slots"], payload["positions"], payload["keep"])
        except qwen.InvalidPass as error:
            self._inference_error(assignment, request_id, "invalid_pass", str(error))
            return
        except Exception as error:  # leaving the cluster would not help: the request would only fail again elsewhere
            log.exception("pass %s failed", request_id)
            code = "out_of_memory" if is_out_of_memory(error) else "compute_failed"
            have = gib(free_memory_bytes(self.worker.device))
            self._inference_error(assignment, request_id, code, f"{type(error).__name__}: {error} (free: {have})")
            return
        rows = output.shape[0]
        shape = [rows, 1, hidden_size] if kind == "RUN_DECODE" else [1, rows, hidden_size]
        raw = wire.pack_hidden_states(output, assignment.wire_dtype) if rows else None
        compute_ms = (time.perf_counter() - begin) * 1e3
        answer = {"shape": shape, "dtype": assignment.wire_dtype, "compute_ms": compute_ms}
        self.writer.put("HIDDEN_STATE", answer, raw=raw, request_id=request_id, epoch=assignment.epoch)

    def on_clear_cache(self, frame: wire.Frame) -> None:
        self._on_stage(lambda stage: stage.clear(frame.payload["slots"]))

    def on_copy_cache(self, frame: wire.Frame) -> None:
        payload = frame.payload

        def copy(stage: qwen.Stage) -> None:
            try:
                stage.copy(payload["from_slot"], payload["to_slot"], payload["length"])
            except (qwen.InvalidPass, RuntimeError, MemoryError):
                stage.clear([payload["to_slot"]])  # what was there before must not be taken for the copy
                raise

        self._on_stage(copy)

    def _on_stage(self, change: Callable[[qwen.Stage], None]) -> None:
        assignment = self.assignment

        def apply():
            if self._is_stale(assignment) or self.worker.stage is None:
                return
            try:
                change(self.worker.stage)
            except (qwen.InvalidPass, RuntimeError, MemoryError) as error:
                self._inference_error(assignment, wire.NO_PASS, "cache", str(error))

        self.submit(apply)

    def _is_abandoned(self, assignment: Assignment) -> bool:
        """(cache reader) Nobody needs more of the cache: the connection or the plan is gone, or loading failed."""
        return self.closed.is_set() or self._is_stale(assignment) or CACHE not in assignment.loading.open_sources

    # -- (worker) ends -------------------------------------------------------------------------------------------------

    def _is_stale(self, assignment: Assignment | None) -> bool:
        return assignment is not self.assignment

    def _inference_error(self, assignment: Assignment, request_id: int, code: str, message: str) -> None:
        log.error("pass %s: %s: %s", request_id, code, message)
        payload = {"code": code, "message": message[:1000]}
        self.writer.put("INFERENCE_ERROR", payload, request_id=request_id, epoch=assignment.epoch)

    def _load_failed(self, assignment: Assignment, error: BaseException | None) -> None:
        """(worker) error None: it was seen beforehand that the memory does not suffice."""
        need, have = assignment.need_bytes, assignment.have_bytes
        if error is None or is_out_of_memory(error):
            reason = f"not enough memory on {self.worker.device}: need {gib(need)} for weights, have {gib(have)}"
            if error is not None:  # what is free on paper could not be had, so it is less than was asked for
                reason += f", which could not be had: {error}"
                have = need if have is None else min(have, need)
        else:
            reason = f"{type(error).__name__}: {error}"
            have = None
        log.error("%s", reason)
        assignment.loading.open_sources = set()
        self.worker.free_all()
        payload = {"reason": reason[:1000], "need_bytes": need, "have_bytes": have}
        self.writer.put("LOAD_FAILED", payload, epoch=assignment.epoch)


class ProgressLine:
    """Shows loading progress of the present session, one line a second while weights arrive."""

    def __init__(self):
        self.session: Session | None = None
        threading.Thread(target=self._run, name="progress", daemon=True).start()

    def _run(self) -> None:
        last = (None, 0)
        while True:
            time.sleep(1.0)
            session = self.session
            assignment = session.assignment if session else None
            if assignment is None or not assignment.loading.open_sources:
                last = (None, 0)
                continue
            loading = assignment.loading
            done = loading.received_bytes + loading.cached_bytes
            rate = done / (time.monotonic() - loading.began_at)
            left_bytes = loading.load_bytes - done
            if left_bytes == 0 and last == (assignment, done):
                continue  # said already
            last = (assignment, done)
            left = f"{rate / 1e6:.1f} MB/s  {left_bytes / rate:.0f} s left" if left_bytes and rate else ""
            log.info(
                "loading layers %d..%d: %3.0f %%  %.1f of %.1f MB  %s",
                assignment.start, assignment.end - 1, 100 * done / max(1, loading.load_bytes),
                done / 1e6, loading.load_bytes / 1e6, left if left_bytes else "all here, being packed",
            )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Staying connected
# ----------------------------------------------------------------------------------------------------------------------

# What to check, by the errno name of a failed connect.
CONNECT_HINTS = {
    "ECONNREFUSED": "nothing listens there: is the coordinator running, and is --port its --node-port?",
    "ETIMEDOUT": "no answer: wrong address, or a firewall drops the packets (allow the node port on the coordinator)",
    "EHOSTUNREACH": "no route: same network? On macOS allow Local Network access for the terminal in System Settings > "
    "Privacy; on WSL use the Windows machine's address",
    "ENETUNREACH": "this machine has no route to that network",
}


def connect_hint(error: OSError) -> str:
    """One line on why a connection could not be made and what to check."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror}): check --host"
    if isinstance(error, TimeoutError):
        return CONNECT_HINTS["ETIMEDOUT"]
    # not errno.errorcode: Windows has two names for one number there
    hints = (hint for name, hint in CONNECT_HINTS.items() if getattr(errno, name) == error.errno)
    return next(hints, error.strerror or str(error))


def weight_cache(work_dir: str, cache_gb: float, key: bytes | None = None) -> WeightCache:
    """The cache under --work-dir; key is what the token makes (wire.token_key)."""
    return WeightCache(Path(work_dir).expanduser() / "weights", int(cache_gb * GIB), key or b"")


def handshake_hint(error: Exception) -> str:
    """What to check when something took the connection and did not speak as a coordinator does."""
    if isinstance(error, wire.OtherProtocol):
        return "; --port must be the coordinator's --node-port, not the port of its HTTP API or of another program"
    if isinstance(error, wire.PeerSilent):
        return "; something listens there and does not answer: is --port the coordinator's --node-port?"
    return ""


class Node:
    """The node's life: connect, serve, and start again when the connection ends."""

    def __init__(self, args: argparse.Namespace):
        self.host, self.port = args.host, args.port
        self.device = choose_device(args.device)
        self.work_dir = Path(args.work_dir).expanduser()
        hostname = (socket.gethostname() or "node").split(".")[0]
        self.hostname = hostname
        if args.node_id:
            self.node_id, self.id_lock = args.node_id, None
        else:
            # The lock holds as long as its file stays open.
            self.node_id, self.id_lock = claim_node_id(self.work_dir, hostname)
        for handler in log.handlers:  # several nodes of one machine may share a terminal
            form = f"%(asctime)s {self.node_id.replace('%', '%%')} %(levelname)s %(message)s"
            handler.setFormatter(OneLineFormatter(form, "%H:%M:%S"))
        self.instance = uuid.uuid4().int >> 65  # 63 bits: tells this process from an earlier one of the same id
        self.max_memory_bytes = None if args.max_memory_gb is None else int(args.max_memory_gb * GIB)
        self.key = wire.token_key(args.token) if args.token else None
        self.worker = Worker(self.device)
        self.cache_writer = None
        if args.cache_gb:
            self.cache_writer = CacheWriter(weight_cache(args.work_dir, args.cache_gb, self.key))
        self.joined_at: float | None = None
        self.progress = ProgressLine()

    def hello(self) -> dict:
        """The payload of HELLO, without the nonce and version that the handshake adds."""
        devices, held = describe_devices(), self.worker.held_bytes
        for device in devices:
            if device["id"] == str(self.device) and device["free_memory"] is not None:
                device["free_memory"] += held  # the next plan may have it, for these layers or for others
        return {
            "node_id": self.node_id,
            "instance": self.instance,
            "hostname": self.hostname,
            "python_version": platform.python_version(),
            "torch_version": str(torch.__version__),
            "platform": platform.platform(),
            "devices": devices,
            "selected_device": str(self.device),
            "max_memory_bytes": self.max_memory_bytes,
            "held_memory_bytes": held,
        }

    def run(self) -> int:
        """Serves for ever; returns an exit code only when the coordinator refuses this node for good."""
        self.worker.start()
        if self.cache_writer:
            self.cache_writer.start()
            cache = self.cache_writer.cache
            log.info("weights are cached in %s, at most %s (--cache-gb)", cache.folder, gib(cache.limit_bytes))
        place = f"{self.host} port {self.port}"
        log.info("node %s on %s, looking for the coordinator at %s", self.node_id, self.device, place)
        delay, reported, reported_at = FIRST_RETRY_S, "", 0.0
        left_at = time.monotonic()
        while True:
            try:
                self.serve_once()
            except wire.Refused as refusal:
                if refusal.code in ("token", "version"):
                    log.error("refused by the coordinator: %s", refusal.message)
                    return EXIT_REFUSED
                what = f"refused for now: {refusal.message}"
            except (wire.PeerClosed, wire.PeerSilent, wire.BadFrame) as error:
                what = f"{error}{'' if self.joined_at else handshake_hint(error)}"
            except OSError as error:
                what = f"cannot reach {self.host} port {self.port}: {connect_hint(error)}"
            now = time.monotonic()
            if self.joined_at is not None:
                left_at = now
                if now - self.joined_at > LONGEST_RETRY_S:
                    delay = FIRST_RETRY_S  # it worked for a while, so this is a new trouble
            elif now - left_at > KEEP_LAYERS_S and self.worker.loaded:
                self.worker.jobs.put(self.worker.free_all)
            if what != reported or now - reported_at > REMIND_S:
                log.warning("%s; trying again until it works", what)
                reported, reported_at = what, now
            time.sleep(delay * random.uniform(0.7, 1.0))
            delay = min(LONGEST_RETRY_S, delay * 2)

    def serve_once(self) -> None:
        """One connection from connect to end; raises what ended it."""
        self.joined_at = None
        if self.worker.busy_ms:
            log.info("the work for the connection that ended comes to its end first")
        self.worker.wait_until_idle()  # till then this node could do nothing, and its memory is not free
        sock = socket.create_connection((self.host, self.port), timeout=CONNECT_TIMEOUT_S)
        connection = wire.Connection(sock, f"coordinator {self.host}:{self.port}", "node")
        try:
            ack = wire.node_handshake(connection, self.hello(), self.key)
        except BaseException:
            connection.close()
            raise
        self.joined_at = time.monotonic()
        log.info("joined the cluster at %s port %d as %s", self.host, self.port, self.node_id)
        session = Session(connection, self.worker, ack["heartbeat_s"], self.max_memory_bytes, self.cache_writer)
        self.progress.session = session
        session.serve()


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def read_token(token: str | None, token_file: str | None) -> str | None:
    """--token, else --token-file, else the environment's TRUECLUSTER_TOKEN; None means no token."""
    if token and token_file:
        raise UsageError("give --token or --token-file, not both")
    if token == "":  # of a shell variable that is not set
        raise UsageError("--token is empty")
    if token_file:
        try:
            token = Path(token_file).read_text().strip()
        except OSError as error:
            raise UsageError(f"--token-file {token_file}: cannot be read ({error.strerror or error})") from None
        except UnicodeDecodeError:
            raise UsageError(f"--token-file {token_file}: is not a text file") from None
        if not token:
            raise UsageError(f"--token-file {token_file}: is empty")
    return token or os.environ.get("TRUECLUSTER_TOKEN") or None


def check_host(host: str) -> None:
    """Raises UsageError for a URL, an address with its port, or one in brackets: they could never be resolved."""
    if "/" in host:
        raise UsageError(f"--host {host}: only a name or an address, like --host 192.168.1.10 --port 7001")
    # name:port, [IPv6]:port or [IPv6]; an address with several colons and no brackets is IPv6 as it stands
    slip = re.fullmatch(r"(?P<name>[^:\[\]]+):(?P<port>\d*)|\[(?P<ipv6>[^\]]*)\](:(?P<ipv6_port>\d*))?", host)
    if slip:
        name, port = slip["name"] or slip["ipv6"], slip["port"] or slip["ipv6_port"]
        raise UsageError(f"--host {host}: give --host {name}{f' --port {port}' if port else ''}")


class FlagParser(argparse.ArgumentParser):
    """argparse, but a wrong flag is a UsageError: its exit code must not be the one of a refused token."""

    def error(self, message: str):
        raise UsageError(f"{message} (see --help)")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = FlagParser(
        description="A TrueCluster node: connects to a coordinator and computes the layers it is given.",
        allow_abbrev=False,
    )
    parser.add_argument("--host", "--cluster-host", help="the coordinator's name or address")
    parser.add_argument("--port", "--cluster-port", type=int, default=7001, help="the coordinator's --node-port (7001)")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:0, mps or cpu (auto: the fastest here)")
    parser.add_argument("--node-id", help="default: the host name and a number")
    parser.add_argument(
        "--work-dir", default="~/.cache/truecluster", help="its lock file and cached weights (~/.cache/truecluster)"
    )
    parser.add_argument(
        "--cache-gb", type=float, default=20.0, help="cache so many GiB of weights on disk (20; 0: none)"
    )
    parser.add_argument("--forget", action="store_true", help="delete the weights cached under --work-dir, and end")
    parser.add_argument("--max-memory-gb", type=float, help="use at most so many GiB (default: what is free)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--token",
        help="the cluster's secret; other users of this machine can read it there, so better in TRUECLUSTER_TOKEN or "
        "--token-file",
    )
    parser.add_argument("--token-file", help="a file that holds the cluster's secret")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)  # set by --local-nodes
    args = parser.parse_args(argv)
    if args.host is not None:
        check_host(args.host)
    if args.host is None and not args.forget:
        parser.error("--host is required: the coordinator's name or address")
    if not 0 < args.port < 65536:
        raise UsageError(f"--port {args.port}: a port is between 1 and 65535")
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads {args.threads}: at least 1")
    if args.max_memory_gb is not None and not 0 < args.max_memory_gb < float("inf"):
        raise UsageError(f"--max-memory-gb {args.max_memory_gb}: must be above 0")
    if not 0 <= args.cache_gb < float("inf"):
        raise UsageError(f"--cache-gb {args.cache_gb}: 0 (no cache) or more")
    if args.node_id is not None and not (0 < len(args.node_id) <= 128 and args.node_id.isprintable()):
        raise UsageError("--node-id: 1 to 128 printable characters")
    args.token = read_token(args.token, args.token_file)
    return args


def forget(work_dir: str) -> int:
    """node.py --forget: deletes the cached weights and unused lock files; returns the exit code."""
    cache = weight_cache(work_dir, 0)
    try:
        files, nbytes, left = cache.forget()
    except OSError as error:
        raise UsageError(f"{cache.folder} cannot be read ({error.strerror})") from None
    delete_free_locks(Path(work_dir).expanduser())
    print(f"{files} cached tensors deleted from {cache.folder}, {nbytes / 1e6:.1f} MB freed")
    if left:
        raise UsageError(f"{left} files in {cache.folder} could not be deleted: in use, or of another user")
    return EXIT_OK


def end_with_stdin() -> None:
    """Ends this process when the parent does, however it ends: its end of our standard input closes."""

    def watch():
        while sys.stdin.buffer.read(1):
            pass
        os._exit(EXIT_OK)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(argv: list[str] | None = None) -> int:
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter("%(asctime)s node %(levelname)s %(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    try:
        args = parse_args(argv)
        log.setLevel(args.log_level.upper())
        if args.forget:
            return forget(args.work_dir)
        if args.threads:
            torch.set_num_threads(args.threads)
        if args.end_with_stdin:
            end_with_stdin()
        if hasattr(signal, "SIGTERM"):
            signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_OK))
        return Node(args).run()
    except UsageError as error:
        print(f"node.py: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        log.info("ended by the user")
        return EXIT_OK


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # the worker may be deep in a kernel; nothing is left to save
