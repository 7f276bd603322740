"""Hostile peers: mutated and random frames in every state of a connection, to a coordinator and to a node.

    python -m pytest tests/test_fuzz.py
    python tests/test_fuzz.py --side coordinator --frames 1000000 --seed 7     # the long run, with counts by outcome
    python tests/test_fuzz.py --side node --seed 7 --first 4711 --frames 1     # one connection of it again

A connection is led honestly into some state, then gets some good frames, one bad one and sometimes good ones after it.
Whatever it gets, it must end: with a BadFrame or cleanly, without any other exception, thread or open file left behind.
"""

import argparse
import collections
import contextlib
import copy
import logging
import os
import random
import resource
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import msgpack
import pytest
import torch
from cluster import TINY_CHAT

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the long run, which pytest does not start

from test_coordinator_links import DEVICES, Running
from test_node import CONFIG, ScriptedCoordinator, assignment, hidden, random_weights, reference_stage
from test_wire import changed, mutate_bytes, paths, random_value

import coordinator
import node
import qwen
import wire

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts open files as Linux shows them")
END_S = 60.0  # generous: a connection that has not ended by then hangs
HIDDEN_SIZE = 64  # of frames that fit no state anyway

# ----------------------------------------------------------------------------
# Frames
# ----------------------------------------------------------------------------


class Good:
    """A frame as an honest peer would send it now."""

    def __init__(self, type_: str, payload: dict, raw: bytes = b"", **ids):
        self.envelope = {"type": type_, "payload": payload, **ids, **({"raw_nbytes": len(raw)} if raw else {})}
        self.raw = raw

    def packed(self, seq: int, **changes) -> bytes:
        return framed(msgpack.packb({**self.envelope, "seq": seq, **changes})) + self.raw


def framed(data: bytes) -> bytes:
    return struct.pack(">Q", len(data)) + data


HUGE = (0, -1, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"))


def another_field(rng, good: Good, seq: int) -> bytes:
    envelope = {**copy.deepcopy(good.envelope), "seq": seq}
    path = rng.choice(list(paths(envelope)))
    return framed(msgpack.packb(changed(envelope, path, random_value(rng)))) + good.raw


def huge_field(rng, good: Good, seq: int) -> bytes:
    envelope = {**copy.deepcopy(good.envelope), "seq": seq}
    path = rng.choice(list(paths(envelope)))
    return framed(msgpack.packb(changed(envelope, path, rng.choice(HUGE)))) + good.raw


def no_field(rng, good: Good, seq: int) -> bytes:
    envelope = {**copy.deepcopy(good.envelope), "seq": seq}
    where = rng.choice([m for m in (envelope, envelope["payload"]) if m])
    del where[rng.choice(list(where))]
    return framed(msgpack.packb(envelope)) + good.raw


def flipped(rng, good: Good, seq: int) -> bytes:
    data = msgpack.packb({**good.envelope, "seq": seq})
    return framed(mutate_bytes(rng, data)) + good.raw


def flipped_anywhere(rng, good: Good, seq: int) -> bytes:
    return mutate_bytes(rng, good.packed(seq))


def other_seq(rng, good: Good, seq: int) -> bytes:
    return good.packed(rng.choice((0, 1, seq - 1, seq + 1, 2**63 - 1)))


def other_epoch(rng, good: Good, seq: int) -> bytes:
    epoch = good.envelope.get("epoch", 1)
    return good.packed(seq, epoch=rng.choice((0, epoch - 1, epoch + 1, 2**63 - 1)))


def other_request(rng, good: Good, seq: int) -> bytes:
    return good.packed(seq, request_id=rng.choice((0, 1, 2, 3, 999, 2**63 - 1)))


def other_raw_nbytes(rng, good: Good, seq: int) -> bytes:
    return good.packed(seq, raw_nbytes=rng.choice((1, len(good.raw) + 1, max(1, len(good.raw) - 1), 2**49)))


def truncated(rng, good: Good, seq: int) -> bytes:
    data = good.packed(seq)
    return data[: rng.randrange(1, len(data))]


def giant_length(rng, good: Good, seq: int) -> bytes:
    return struct.pack(">Q", rng.choice((2**63, 2**64 - 1, wire.MAX_MAP + 1, 0))) + good.packed(seq)[8:]


def deep(rng, good: Good, seq: int) -> bytes:
    depth = rng.choice((5, 500, 5000, 60_000))
    others = {key: value for key, value in good.envelope.items() if key != "payload"}
    inner = msgpack.packb({**others, "seq": seq, "payload": None})[:-1]
    return framed(inner + rng.choice((b"\x91", b"\x81\xa1a")) * depth + b"\xc0")


def twice(rng, good: Good, seq: int) -> bytes:
    return good.packed(seq) * 2


def again(rng, good: Good, seq: int) -> bytes:
    return good.packed(seq) + good.packed(seq + 1)


def noise(rng, good: Good, seq: int) -> bytes:
    data = rng.randbytes(rng.randint(1, 300))
    return rng.choice((data, framed(data), framed(msgpack.packb(random_value(rng)))))


def as_it_is(rng, good: Good, seq: int) -> bytes:
    """Right as such, but most often not in this state."""
    return good.packed(seq)


MUTATIONS = (
    another_field, another_field, huge_field, huge_field, no_field, flipped, flipped, flipped_anywhere, other_seq,
    other_epoch, other_request, other_raw_nbytes, truncated, giant_length, deep, twice, again, noise, as_it_is,
)  # fmt: skip


def batch(rng, frames: list[Good], harmless: list[Good], seq: int) -> tuple[bytes, int]:
    """Bytes that go out at once: good frames, one mutated, sometimes good ones again; and how many frames that is."""
    before, after = rng.randrange(40), rng.choice((0, 0, 1, 2))
    data = b"".join(rng.choice(harmless).packed(seq + i) for i in range(before))
    data += rng.choice(MUTATIONS)(rng, rng.choice(frames), seq + before)
    data += b"".join(rng.choice(harmless).packed(seq + before + 1 + i) for i in range(after))
    return data, before + 1 + after


def of_either_side(rng) -> list[Good]:
    """A frame of any type, of either direction, with ids that may or may not exist."""
    kinds = {**NODE_FRAMES, **COORDINATOR_FRAMES}
    type_ = rng.choice(list(kinds))
    payload, raw = kinds[type_]
    return [Good(type_, payload, raw, epoch=rng.randrange(4), request_id=rng.randrange(4))]


def hidden_state(rows: int, hidden_size: int) -> tuple[dict, bytes]:
    return {"shape": [1, rows, hidden_size], "dtype": "fp32", "compute_ms": 1.0}, bytes(rows * hidden_size * 4)


def run(rows: int, hidden_size: int) -> tuple[dict, bytes]:
    payload = {
        "slots": [0] * rows, "positions": list(range(rows)), "keep": 1, "shape": [1, rows, hidden_size],
        "dtype": "fp32",
    }  # fmt: skip
    return payload, bytes(rows * hidden_size * 4)


SIZES = {"weight_bytes": 1, "packed_bytes": 1, "cached_bytes": 0, "received_bytes": 1}
HELLO = {
    "protocol_version": wire.PROTOCOL_VERSION, "node_id": "fuzz", "instance": 1, "hostname": "fuzz",
    "python_version": "3", "torch_version": "2", "platform": "test", "devices": DEVICES, "selected_device": "cpu",
    "max_memory_bytes": None, "held_memory_bytes": 0, "nonce": bytes(32),
}  # fmt: skip
CHOICE = {"shape": [96, 32], "few": "a", "many": "b", "threshold": 8}
KERNELS = {"choices": [CHOICE], "with_copy": None, "threads": 1}
MEASURED = {"layer_ms": dict.fromkeys(("1", "4", "6", "8", "64", "256"), 1.0), "kernels": KERNELS}
NODE_FRAMES = {
    "HELLO": (HELLO, b""),
    "AUTH": ({"proof": None}, b""),
    "ERROR": ({"code": "any", "message": "plan:\nany"}, b""),
    "PING": ({}, b""),
    "PONG": ({"busy_ms": 0}, b""),
    "WEIGHTS_WANTED": ({"names": ["model.layers.0.input_layernorm.weight"]}, b""),
    "LOAD_COMPLETE": (SIZES, b""),
    "LOAD_FAILED": ({"reason": "too\nlittle", "need_bytes": 2, "have_bytes": 1}, b""),
    "MEASURED": (MEASURED, b""),
    "HIDDEN_STATE": hidden_state(1, HIDDEN_SIZE),
    "INFERENCE_ERROR": ({"code": "any", "message": "plan:\nany"}, b""),
}
CHUNK = {
    "tensor_name": "model.layers.0.input_layernorm.weight", "chunk_index": 0, "chunk_count": 1, "offset": 0,
    "sha256": bytes(32),
}  # fmt: skip
COORDINATOR_FRAMES = {
    "HELLO_ACK": (
        {"protocol_version": 1, "node_id": "fuzz", "heartbeat_s": 2.0, "nonce": bytes(32), "proof": None},
        b"",
    ),
    "ERROR": ({"code": "any", "message": "any"}, b""),
    "PING": ({}, b""),
    "PONG": ({"busy_ms": 0}, b""),
    "ASSIGNMENT": (assignment(0, 1), b""),
    "WEIGHT_CHUNK": (CHUNK, bytes(128)),
    "WEIGHTS_COMPLETE": ({"tensor_count": 1, "total_weight_bytes": 1}, b""),
    "MEASURE": ({"config": CONFIG.to_wire(), "quant": "fp16", "group_size": 64, "compute_dtype": "fp32",
                 "kernels": None}, b""),
    "RUN_PREFILL": run(2, 32),
    "RUN_DECODE": ({"slots": [0], "positions": [0], "keep": 1, "shape": [1, 1, 32], "dtype": "fp32"}, bytes(128)),
    "CLEAR_CACHE": ({"slots": [0]}, b""),
    "COPY_CACHE": ({"from_slot": 0, "to_slot": 1, "length": 1}, b""),
}  # fmt: skip
PING, PONG = Good("PING", {}), Good("PONG", {"busy_ms": 1})


def odd_hello(rng) -> dict:
    """Fields of HELLO that pass every check and that no real node sends."""
    amounts = (None, 0, 1, 10**6, wire.MAX_BYTES)
    device = {
        "id": rng.choice(("cpu", "cuda", "mps:7", '"}\'<b>', "x" * 64)), "type": rng.choice(("cpu", "cuda", "mps")),
        "name": "%s{}", "total_memory": rng.choice(amounts), "free_memory": rng.choice(amounts),
    }  # fmt: skip
    devices = [device] * rng.choice((1, 2, 64))
    memory = {"max_memory_bytes": rng.choice(amounts), "held_memory_bytes": rng.choice((0, wire.MAX_BYTES))}
    return {"devices": devices, "selected_device": device["id"], **memory}


def odd_measured(rng) -> dict:
    choice = {
        "shape": rng.choice(([96, 32], [1, 2**20])), "few": rng.choice(("a", "%s{}" * 9, "plan:")), "many": "%s{}" * 9,
        "threshold": rng.choice((0, 2**31 - 1)),
    }  # fmt: skip
    choices = [choice] * rng.choice((1, 16))
    kernels = {"choices": choices, "with_copy": rng.choice((None, choices)), "threads": rng.choice((1, 1024))}
    return {"layer_ms": {rows: rng.choice((0, 1e-300, 1, 1e9)) for rows in MEASURED["layer_ms"]}, "kernels": kernels}


# ----------------------------------------------------------------------------
# The coordinator under attack
# ----------------------------------------------------------------------------


class CoordinatorUnderAttack:
    """A controller and an engine; every connection plays a node."""

    def __init__(self):
        self.outcomes = collections.Counter()
        self.checkpoint = coordinator.Checkpoint(TINY_CHAT)
        self.running = Running(self.checkpoint, self.checkpoint.ends(qwen.WeightFormat("fp16", 64, "fp32")), 1)
        self.controller = self.running.controller
        self.hidden_size = self.checkpoint.config.hidden_size
        self.right = self._good_answer()
        lose = self.controller._lose

        def lose_and_count(lost, why):
            self.outcomes["ended cleanly" if why.endswith("the connection is closed") else "BadFrame"] += 1
            assert why != "its reader failed", "an exception of another kind ended a reader"
            lose(lost, why)

        self.controller._lose = lose_and_count
        self.controller._refusals.add = lambda *_: self.outcomes.update(["refused in the handshake"])

    def serve_a_good_peer(self) -> None:
        assert self._good_answer() == self.right

    def _good_answer(self) -> list[int]:
        session = self.running.join(f"good-{time.monotonic()}")
        self.running.wait_ready()
        answer = self.running.generate()
        session.connection.close()
        assert self.controller.wait_until(lambda state: not state.nodes, END_S)
        return answer

    def attack(self, rng, index: int) -> int:
        """One connection; returns how many frames it sent once it was in its state."""
        ours, theirs = socket.socketpair()
        ours.settimeout(END_S)
        self.controller.welcome(theirs, f"fuzz-{index}", "10.0.0.1")
        link = wire.Connection(ours, f"coordinator, connection {index}", "node")
        link.silence_limit_s = END_S
        generations = []
        try:
            depth = rng.choices(range(6), (3, 2, 8, 2, 2, 3))[0]
            frames, harmless = self._lead(rng, link, depth, index, generations)
            data, count = batch(
                rng, of_either_side(rng) if rng.random() < 0.3 else frames, harmless, link._sent_seq + 1
            )
            finish(ours, data)
        finally:
            for generation in generations:
                generation.close()
            link.close()
        self.outcomes["connections"] += 1
        return count

    def _lead(self, rng, link, depth: int, index: int, generations: list) -> tuple[list[Good], list[Good]]:
        """Brings a connection into a state; returns the frames that may come next, and those that always may."""
        hello = {**HELLO, "node_id": f"fuzz-{index}", "hostname": f"fuzz-{index}", "instance": index + 1}
        if depth == 0:
            return [Good("HELLO", hello)], [Good("HELLO", hello)]
        if depth == 1:
            link.send("HELLO", hello)
            return [Good("AUTH", {"proof": None})], [Good("AUTH", {"proof": None})]
        is_odd = depth == 2 and rng.random() < 0.3
        if is_odd:
            hello |= odd_hello(rng)
        wire.node_handshake(link, {k: v for k, v in hello.items() if k not in ("protocol_version", "nonce")}, None)
        if is_odd:
            receive(link, "MEASURE")
            link.send("MEASURED", odd_measured(rng))
        if depth == 2:
            return [Good(type_, *NODE_FRAMES[type_], epoch=1, request_id=1) for type_ in NODE_FRAMES], [PING, PONG]
        receive(link, "MEASURE")
        link.send("MEASURED", MEASURED)
        epoch = receive(link, "ASSIGNMENT").epoch
        old = Good("WEIGHTS_WANTED", {"names": []}, epoch=epoch - 1)
        harmless = [PING, PONG, old]
        if depth == 3:
            names = [t.name for t in qwen.stored_tensors(self.checkpoint.config, 0, 1, self.controller.model.weights)]
            wanted = Good("WEIGHTS_WANTED", {"names": names[:2]}, epoch=epoch)
            failed = Good("LOAD_FAILED", NODE_FRAMES["LOAD_FAILED"][0], epoch=epoch)
            return [wanted, wanted, failed, Good("LOAD_COMPLETE", SIZES, epoch=epoch)], harmless
        link.send("WEIGHTS_WANTED", {"names": []}, epoch=epoch)
        receive(link, "WEIGHTS_COMPLETE")
        if depth == 4:
            return [Good("LOAD_COMPLETE", SIZES, epoch=epoch)], harmless
        link.send("LOAD_COMPLETE", SIZES, epoch=epoch)
        self.running.wait_ready()
        sampling = coordinator.SamplingParams(temperature=0.0, ignore_eos=True)
        generations.append(self.running.engine.submit(coordinator.GenerationRequest([[1, 2, 3]], 1, 4, sampling)))
        request = receive(link, "RUN_PREFILL")
        payload, raw = hidden_state(1, self.hidden_size)
        ids = {"epoch": epoch, "request_id": request.request_id}
        answer = Good("HIDDEN_STATE", payload, raw, **ids)
        stale = Good("HIDDEN_STATE", payload, raw, epoch=epoch - 1, request_id=1)
        error = Good("INFERENCE_ERROR", {"code": "any", "message": "any"}, **ids)
        return [answer, answer, answer, error], [PING, PONG, old, stale]

    def close(self) -> None:
        self.running.close()


# ----------------------------------------------------------------------------
# The node under attack
# ----------------------------------------------------------------------------


class NodeUnderAttack:
    """One worker for all connections, as in node.py; every connection plays a coordinator."""

    EPOCH = 5

    def __init__(self):
        self.outcomes = collections.Counter()
        self.worker = node.Worker(torch.device("cpu"))
        self.worker.start()
        self.weights = random_weights(0, 2)

    def serve_a_good_peer(self) -> None:
        """A load and a pass; what comes back must be what the stage alone computes."""
        peer = ScriptedCoordinator(worker=self.worker)
        peer.load()
        x = hidden(5)
        peer.run(x, [0] * 5, list(range(5)), keep=2)
        got = wire.unpack_hidden_states(peer.receive("HIDDEN_STATE").raw, 2, CONFIG.hidden_size, "fp32")
        with torch.inference_mode():
            torch.testing.assert_close(got, reference_stage(0, 2, self.weights).run(x, [0] * 5, list(range(5)), 2))
        peer.link.close()
        peer.ended.get(timeout=END_S)

    def attack(self, rng, index: int) -> int:
        """One connection; returns how many frames it sent once it was in its state."""
        depth = rng.choices(range(5), (3, 6, 2, 2, 3))[0]
        if depth == 0:
            return self._attack_handshake(rng)
        peer = ScriptedCoordinator(worker=self.worker)
        peer.link.silence_limit_s = END_S
        self.worker.jobs.put(self.worker.free_all)  # layers that it kept would not be asked for
        try:
            frames, harmless = self._lead(peer, depth)
            frames = of_either_side(rng) if rng.random() < 0.3 else frames
            data, count = batch(rng, frames, harmless, peer.link._sent_seq + 1)
            finish(peer.link._sock, data)
        finally:
            peer.link.close()
        self._count(peer.ended.get(timeout=END_S))
        return count

    def _attack_handshake(self, rng) -> int:
        ours, theirs = socket.socketpair()
        ours.settimeout(END_S)
        hello = {k: v for k, v in HELLO.items() if k not in ("protocol_version", "nonce")}
        ended = []

        def greet():
            link = wire.Connection(theirs, "coordinator under test", "node")
            try:
                wire.node_handshake(link, hello, None)
                link.recv()
            except (wire.BadFrame, wire.PeerClosed, wire.PeerSilent, wire.Refused) as error:
                ended.append(error)
            finally:
                link.close()

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        ack = Good("HELLO_ACK", COORDINATOR_FRAMES["HELLO_ACK"][0])
        error = Good("ERROR", {"code": "token", "message": "no"})
        data, count = batch(rng, [ack, ack, error] if rng.random() < 0.7 else of_either_side(rng), [ack], 1)
        if rng.random() < 0.5:
            data = ack.packed(1) + Good("PING", {}).packed(2) + data
        finish(ours, data)
        ours.close()
        thread.join(END_S)
        assert ended, "the node's handshake hangs, or ended in another exception"
        self._count(ended[0])
        return count

    def _lead(self, peer: ScriptedCoordinator, depth: int) -> tuple[list[Good], list[Good]]:
        """Brings a connection into a state; returns the frames that may come next, and those that always may."""
        epoch = self.EPOCH
        if depth == 1:
            frames = [
                Good(type_, *COORDINATOR_FRAMES[type_], epoch=epoch, request_id=1) for type_ in COORDINATOR_FRAMES
            ]
            return frames, [PING, PONG]
        stale = Good("WEIGHT_CHUNK", CHUNK, bytes(128), epoch=epoch - 1)
        harmless = [PING, PONG, stale]
        if depth == 4:
            peer.load(epoch)
            clear, copy_ = Good("CLEAR_CACHE", {"slots": [1]}, epoch=epoch), COORDINATOR_FRAMES["COPY_CACHE"][0]
            prefill = Good("RUN_PREFILL", *run(3, CONFIG.hidden_size), epoch=epoch, request_id=7)
            decode = Good("RUN_DECODE", *COORDINATOR_FRAMES["RUN_DECODE"], epoch=epoch, request_id=8)
            copied = Good("COPY_CACHE", copy_, epoch=epoch)
            return [prefill, prefill, decode, clear, copied], [*harmless, prefill, decode, clear, copied]
        names = peer.assign(epoch)
        sent = 0 if depth == 2 else 3
        for name in names[:sent]:
            peer.send_tensor(name, wire.tensor_buffer(self.weights[name]), epoch)
        data = bytes(wire.tensor_buffer(self.weights[names[sent]]))
        chunk = Good("WEIGHT_CHUNK", {**CHUNK, "tensor_name": names[sent]}, data, epoch=epoch)
        complete = Good("WEIGHTS_COMPLETE", {"tensor_count": 1, "total_weight_bytes": 1}, epoch=epoch)
        return [chunk, chunk, complete, Good("ASSIGNMENT", assignment(1, 3), epoch=epoch + 1)], harmless

    def _count(self, end: Exception) -> None:
        clean = isinstance(end, (wire.PeerClosed, wire.Refused))
        self.outcomes["ended cleanly" if clean else type(end).__name__] += 1
        self.outcomes["connections"] += 1

    def close(self) -> None:
        return


# ----------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------


def receive(link: wire.Connection, type_: str) -> wire.Frame:
    """The next frame of a type; a PING is answered, others are dropped."""
    while True:
        frame = link.recv(lambda frame, nbytes: None)
        if frame.type == type_:
            return frame
        if frame.type == "PING":
            link.send("PONG", {"busy_ms": 0})


def finish(sock: socket.socket, data: bytes) -> None:
    """Sends what is left to send and reads until the other side has closed; it may do so before it has read all."""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        return
    except OSError as error:
        raise AssertionError(f"the connection does not end: {error}") from None


class Bugs(logging.Handler):
    """What must not happen: exceptions that end threads, and those that are caught only to be logged."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def emit(self, record):
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    def escaped(self, args):
        self.found.append(f"{args.thread.name}: {args.exc_value!r}")

    @contextlib.contextmanager
    def watching(self):
        hook, threading.excepthook = threading.excepthook, self.escaped
        logs = [coordinator.log, logging.getLogger("node")]
        before = [(log.propagate, log.level) for log in logs]
        for log in logs:
            log.addHandler(self)
            log.propagate = False
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            threading.excepthook = hook
            for log, (propagate, level) in zip(logs, before, strict=True):
                log.removeHandler(self)
                log.propagate = propagate
                log.setLevel(level)


def left_open(pid: int | None = None) -> tuple[int, int]:
    """(threads, open files) of a process; None: this one, without the threads that torch keeps."""
    threads = threading.active_count() if pid is None else len(os.listdir(f"/proc/{pid}/task"))
    return threads, len(os.listdir(f"/proc/{pid or 'self'}/fd"))


def wait_until_closed(count, before: tuple[int, int], spare: int = 0) -> None:
    """Waits until there are no more threads and open files than before, but for a few that come and go."""
    deadline = time.monotonic() + END_S
    while any(now > then + spare for now, then in zip(count(), before, strict=True)):
        assert time.monotonic() < deadline, f"threads or open files are left behind: {before} before, {count()} now"
        time.sleep(0.02)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SIDES = {"coordinator": CoordinatorUnderAttack, "node": NodeUnderAttack}


def fuzz(side: str, seed: int, frames: int, first: int = 0) -> collections.Counter:
    """Sends so many frames over connections of one seed, from connection number `first` on; returns what happened."""
    bugs = Bugs()
    with bugs.watching(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "MEASURE_SECONDS", 0.0)  # nobody looks at the figures
        target = SIDES[side]()
        sent, index, base, memory = 0, first, None, 0
        while sent < frames:
            where = f"{side} under attack: --side {side} --seed {seed} --first {index} --frames 1"
            try:
                sent += target.attack(random.Random(f"{seed}:{index}"), index)
            except Exception as error:
                raise AssertionError(f"{where}: {error!r}; {bugs.found}") from error
            assert not bugs.found, f"{where}: {bugs.found}"
            index += 1
            if index == first + 50:  # caches of msgpack, torch and the like are filled by now
                base, memory = left_open(), resident_bytes()
        if base is not None:
            wait_until_closed(left_open, base)
            assert resident_bytes() - memory < 100e6, "memory grows with bad frames"
        target.serve_a_good_peer()
        target.close()
        assert not bugs.found, bugs.found
    target.outcomes["frames"] = sent
    return target.outcomes


@pytest.mark.parametrize("side", SIDES)
def test_no_frame_harms_either_side(side):
    seed = 20251130
    print(f"seed {seed}")
    outcomes = fuzz(side, seed, 20_000)
    print(dict(outcomes))
    assert outcomes["BadFrame"] > outcomes["connections"] / 4 and outcomes["ended cleanly"]


# ----------------------------------------------------------------------------
# The node port of a running coordinator, while its nodes work
# ----------------------------------------------------------------------------

SILENT = 1000


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, SILENT + 500)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def greet(sock: socket.socket, data: bytes) -> None:
    """Says something that is no HELLO and waits for the other side to close."""
    sock.settimeout(END_S)
    finish(sock, data)


def drip(sock: socket.socket, data: bytes) -> int:
    """Sends a byte at a time, never long apart, until the other side closes; how many it took."""
    sock.settimeout(0.2)
    for i in range(len(data)):
        try:
            sock.sendall(data[i : i + 1])
            if not sock.recv(1):
                return i
        except TimeoutError:
            continue
        except OSError:
            return i
    return len(data)


def test_strangers_neither_keep_nodes_out_nor_disturb_them(fp16_cluster, many_files):
    cluster, port = fp16_cluster, fp16_cluster.node_port
    pid = cluster.coordinator.process.pid
    question = "What is 12 + 30?"
    answer = cluster.chat_text(question)
    before, seen = left_open(pid), len(cluster.coordinator.lines)
    hello = Good("HELLO", HELLO).packed(1)
    with contextlib.ExitStack() as stack:

        def connect(source: str = "127.0.0.1") -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", port), source_address=(source, 0), timeout=END_S)
            return stack.enter_context(sock)

        for data in (
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
            b"\xff" * 64,
        ):
            greet(connect(), data)
        cluster.coordinator.wait_for(
            f"this looks like HTTP; this is the node port, the HTTP API is on port {cluster.api_port}", after=seen
        )
        cluster.coordinator.wait_for("this looks like TLS", after=seen)
        loris = connect("127.0.0.2")
        taken: list[int] = []
        dripping = threading.Thread(target=lambda: taken.append(drip(loris, hello)), daemon=True)
        dripping.start()
        silent = [connect() for _ in range(SILENT)]
        link = wire.Connection(connect(), "coordinator", "node")
        newcomer = {k: v for k, v in HELLO.items() if k not in ("protocol_version", "nonce")}
        assert wire.node_handshake(link, {**newcomer, "node_id": "newcomer"}, None)["node_id"] == "newcomer"
        assert cluster.chat_text(question) == answer
        link.close()
        for sock in silent:
            sock.settimeout(END_S)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        dripping.join(END_S)
        assert taken and taken[0] < len(hello)
    wait_until_closed(lambda: left_open(pid), before, spare=2)
    assert cluster.chat_text(question) == answer
    lines = [line for line in cluster.coordinator.lines[seen:] if "did not become" in line]
    assert len(lines) < 50, "every stranger has its line"


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutated and random frames to one side of a connection.")
    parser.add_argument("--side", choices=list(SIDES), default="coordinator", help="the side that is attacked")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first connection")
    args = parser.parse_args()
    started = time.monotonic()
    outcomes = fuzz(args.side, args.seed, args.frames, args.first)
    print(f"{args.side}, seed {args.seed}, {time.monotonic() - started:.0f} s: {dict(outcomes)}")


if __name__ == "__main__":
    main()
