"""Tests of wire.py over real socket pairs: what a peer may send, and what happens when it sends anything else.

python -m pytest tests/test_wire.py
"""

import concurrent.futures
import copy
import functools
import random
import socket
import struct
import threading
import time
import tracemalloc
from types import SimpleNamespace

import msgpack
import pytest
import torch

import wire
from wire import BadFrame, Connection, PeerClosed, PeerSilent, Refused

PEER = "node-7 (10.0.0.7:50312)"
KEY_A, KEY_B = b"a" * 32, b"b" * 32

HELLO = {
    "node_id": "box-0",
    "instance": 123456789,
    "hostname": "box",
    "python_version": "3.11.7",
    "torch_version": "2.13.0+cpu",
    "platform": "Linux-6.1-x86_64",
    "devices": [
        {"id": "cuda:0", "type": "cuda", "name": "H200", "total_memory": 140 << 30, "free_memory": 139 << 30},
        {"id": "cpu", "type": "cpu", "name": "Xeon", "total_memory": None, "free_memory": None},
    ],
    "selected_device": "cuda:0",
    "max_memory_bytes": None,
    "held_memory_bytes": 0,
}


def manifest_entry(name: str, dtype: str = "fp16", shape: tuple = (4, 6)) -> dict:
    nbytes = wire.DTYPES[dtype].itemsize
    for size in shape:
        nbytes *= size
    return {"tensor_name": name, "dtype": dtype, "shape": list(shape), "nbytes": nbytes, "key": "0f" * 32}


def assignment(entries: list[dict]) -> dict:
    return {
        "model_id": "Qwen/Qwen2.5-0.5B-Instruct",
        "architecture": "Qwen2ForCausalLM",
        "quant": "int4",
        "group_size": 64,
        "compute_dtype": "bf16",
        "wire_dtype": "fp16",
        "layer_start": 2,
        "layer_end_exclusive": 5,
        "config": {
            "hidden_size": 896,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 24,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
        "slots": 4,
        "max_context": 8192,
        "manifest": entries,
        "tensor_count": len(entries),
        "total_weight_bytes": sum(entry["nbytes"] for entry in entries),
        "second_copy": False,
    }


CHOICE = {"shape": [1152, 896], "few": "int4pack", "many": "bf16", "threshold": 58}
KERNELS = {"choices": [CHOICE], "with_copy": [CHOICE], "threads": 2}

# One good frame of every type: payload, number of raw bytes.
EXAMPLES = {
    "HELLO": ({"protocol_version": wire.PROTOCOL_VERSION, **HELLO, "nonce": bytes(range(32))}, 0),
    "HELLO_ACK": (
        {"protocol_version": 1, "node_id": "box-0", "heartbeat_s": 2.0, "nonce": b"n" * 32, "proof": b"p" * 32},
        0,
    ),
    "AUTH": ({"proof": None}, 0),
    "ERROR": ({"code": "token", "message": "no\nsuch token"}, 0),
    "PING": ({}, 0),
    "PONG": ({"busy_ms": 12.5}, 0),
    "ASSIGNMENT": (assignment([manifest_entry("a.q", "uint8"), manifest_entry("a.scale", "bf16", (4, 1))]), 0),
    "WEIGHTS_WANTED": ({"names": ["a.q", "a.scale"]}, 0),
    "WEIGHT_CHUNK": (
        {"tensor_name": "a.q", "chunk_index": 1, "chunk_count": 2, "offset": 48, "sha256": b"d" * 32},
        48,
    ),
    "WEIGHTS_COMPLETE": ({"tensor_count": 2, "total_weight_bytes": 32}, 0),
    "LOAD_COMPLETE": ({"weight_bytes": 32, "packed_bytes": 40, "cached_bytes": 0, "received_bytes": 32}, 0),
    "LOAD_FAILED": ({"reason": "too little memory", "need_bytes": 10, "have_bytes": None}, 0),
    "MEASURE": (
        {
            "config": {"hidden_size": 896},
            "quant": "int4",
            "group_size": 64,
            "compute_dtype": "bf16",
            "kernels": KERNELS,
        },
        0,
    ),
    "MEASURED": ({"layer_ms": {"1": 0.5, "4": 0.5, "6": 1, "8": 1, "64": 3.25, "256": 9}, "kernels": KERNELS}, 0),
    "RUN_PREFILL": ({"slots": [1] * 3, "positions": [0, 1, 2], "keep": 1, "shape": [1, 3, 8], "dtype": "fp16"}, 51),
    "RUN_DECODE": ({"slots": [0, 3], "positions": [700, 2], "keep": 1, "shape": [2, 1, 8], "dtype": "fp32"}, 64),
    "HIDDEN_STATE": ({"shape": [2, 1, 8], "dtype": "bf16", "compute_ms": 1.5}, 32),
    "CLEAR_CACHE": ({"slots": [0, 1]}, 0),
    "COPY_CACHE": ({"from_slot": 0, "to_slot": 2, "length": 17}, 0),
    "INFERENCE_ERROR": ({"code": "position", "message": "beyond the cache's end"}, 0),
}


def receiver_of(type_: str) -> str:
    return "node" if wire.MESSAGES[type_].sender == "coordinator" else "coordinator"


def raw_bytes(nbytes: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(nbytes))


def envelope_of(type_: str, seq: int = 1, **changes) -> dict:
    """A good map of this type; changes replace or (with None) remove its keys."""
    payload, raw_nbytes = EXAMPLES[type_]
    envelope = {"type": type_, "request_id": 9, "seq": seq, "epoch": 3, "payload": copy.deepcopy(payload)}
    if raw_nbytes:
        envelope["raw_nbytes"] = raw_nbytes
    envelope.update(changes)
    return {key: value for key, value in envelope.items() if value is not None}


def frame_bytes(envelope, raw: bytes | None = None) -> bytes:
    data = msgpack.packb(envelope)
    if raw is None:
        raw = raw_bytes(EXAMPLES[envelope["type"]][1])
    return struct.pack(">Q", len(data)) + data + raw


def new_memory(frame, nbytes):
    return memoryview(bytearray(nbytes))


def fits(frame, nbytes):
    """A place() as a careful user writes it: what the plan does not allow is a BadFrame."""
    if nbytes > 1 << 16:
        raise BadFrame(f"{PEER}: too large")
    return new_memory(frame, nbytes)


class Pair:
    """A Connection under test and the bare socket of its peer."""

    def __init__(self, role: str = "coordinator", accepted: bool = True):
        ours, self.peer = socket.socketpair()
        self.conn = Connection(ours, PEER, role)
        if accepted:
            self.conn.accepted()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.conn.close()
        self.peer.close()

    def give(self, data: bytes) -> "Pair":
        self.peer.sendall(data)
        return self

    def bad_frame(self, *words: str, place=fits) -> str:
        """Receives what must be a BadFrame that names the peer and has these words; the stream is dead after it."""
        with pytest.raises(BadFrame) as caught:
            self.conn.recv(place)
        message = str(caught.value)
        assert message.startswith(PEER + ": ")
        assert len(message) < 500 and message.isprintable()
        for word in words:
            assert word in message
        with pytest.raises(PeerClosed):
            self.conn.recv(place)
        return message


def linked(key: bytes | None = None) -> tuple[Connection, Connection]:
    """Node's and coordinator's connection, accepted, with MACs when there is a key."""
    a, b = socket.socketpair()
    node, coordinator = Connection(a, "coordinator", "node"), Connection(b, PEER, "coordinator")
    for conn in (node, coordinator):
        conn.accepted()
    if key:
        node.protect(KEY_A, KEY_B)
        coordinator.protect(KEY_B, KEY_A)
    return node, coordinator


def in_thread(function, *args) -> "threading.Thread":
    """Runs function in a thread; thread.outcome() joins it and returns what it returned or raised."""

    def run():
        try:
            thread.result = function(*args)
        except (BadFrame, PeerClosed, PeerSilent, Refused) as error:
            thread.result = error

    def outcome():
        thread.join(30)
        assert not thread.is_alive()
        return thread.result

    thread = threading.Thread(target=run, daemon=True)
    thread.outcome = outcome
    thread.start()
    return thread


# ----------------------------------------------------------------------------
# Good frames
# ----------------------------------------------------------------------------


def test_every_type_has_an_example():
    assert EXAMPLES.keys() == wire.MESSAGES.keys()


class CountingSocket(socket.socket):
    """Counts its receiving system calls."""

    calls = 0

    def recv_into(self, *arguments):
        self.calls += 1
        return super().recv_into(*arguments)


@pytest.mark.parametrize("key", [None, KEY_A], ids=["open", "mac"])
def test_one_call_receives_a_small_frame_and_a_large_one_goes_straight_to_its_place(key):
    a, b = socket.socketpair()
    counting = CountingSocket(fileno=b.detach())
    sender, receiver = Connection(a, "coordinator", "node"), Connection(counting, PEER, "coordinator")
    for conn, keys in ((sender, (KEY_A, KEY_B)), (receiver, (KEY_B, KEY_A))):
        conn.accepted()
        if key:
            conn.protect(*keys)
    small = {"shape": [1, 1, 1000], "dtype": "fp32", "compute_ms": 1.5}
    large = {"shape": [500, 1, 1000], "dtype": "fp32", "compute_ms": 1.5}
    sender.send("HIDDEN_STATE", small, raw=raw_bytes(4000), request_id=1, epoch=1)
    assert receiver.recv(new_memory).raw == raw_bytes(4000)
    assert counting.calls == 1
    raw = raw_bytes(2_000_000)
    sending = in_thread(lambda: sender.send("HIDDEN_STATE", large, raw=raw, request_id=1, epoch=1))
    place = memoryview(bytearray(len(raw)))
    frame = receiver.recv(lambda frame, nbytes: place)
    sending.outcome()
    assert place == raw and frame.raw.obj is place.obj


@pytest.mark.parametrize("key", [None, KEY_A], ids=["open", "mac"])
@pytest.mark.parametrize("type_", wire.MESSAGES)
def test_round_trip(type_, key):
    node, coordinator = linked(key)
    sender, receiver = (node, coordinator) if receiver_of(type_) == "coordinator" else (coordinator, node)
    if wire.MESSAGES[type_].phase == wire.HANDSHAKE:
        receiver._accepted = False
    payload, raw_nbytes = EXAMPLES[type_]
    raw = raw_bytes(raw_nbytes)
    for seq in (1, 2):
        sender.send(type_, payload, raw=raw or None, request_id=4, epoch=2)
        frame = receiver.recv(new_memory)
        assert (frame.type, frame.request_id, frame.seq, frame.epoch) == (type_, 4, seq, 2)
        assert frame.payload == payload
        assert (frame.raw is None and not raw) or bytes(frame.raw) == raw
    assert receiver.bytes_received == sender.bytes_sent > 0
    node.close(), coordinator.close()


def test_frame_layout_is_what_the_docstring_says():
    with Pair() as pair:
        pair.conn.send("PING", {})
        data = pair.peer.recv(1000)
        assert data[:8] == struct.pack(">Q", len(data) - 8)
        assert msgpack.unpackb(data[8:]) == {"type": "PING", "seq": 1, "payload": {}}


def test_raw_goes_straight_into_its_place():
    node, coordinator = linked()
    weights = torch.zeros(6, 8, dtype=torch.bfloat16)
    wanted = torch.randn(2, 8).to(torch.bfloat16)
    payload = {"tensor_name": "w", "chunk_index": 0, "chunk_count": 1, "offset": 0, "sha256": b"d" * 32}
    coordinator.send("WEIGHT_CHUNK", payload, raw=[wire.tensor_buffer(row) for row in wanted], epoch=1)
    seen = []

    def place(frame, nbytes):
        seen.append((frame.type, frame.payload["tensor_name"], frame.raw, nbytes))
        return wire.tensor_buffer(weights[2:4])

    node.recv(place)
    assert seen == [("WEIGHT_CHUNK", "w", None, 32)]
    assert torch.equal(weights[2:4], wanted) and weights.count_nonzero() == wanted.count_nonzero()


@pytest.mark.parametrize("key", [None, KEY_A], ids=["open", "mac"])
def test_dropped_raw_takes_no_memory_and_the_next_frame_follows(key):
    node, coordinator = linked(key)
    nbytes = wire.hidden_states_nbytes(1000, 1000, "fp32")
    raw = bytearray(nbytes)
    run = {"slots": [0] * 1000, "positions": list(range(1000)), "keep": 0, "shape": [1, 1000, 1000], "dtype": "fp32"}

    def send():
        coordinator.send("RUN_PREFILL", run, raw=raw, request_id=1, epoch=1)
        coordinator.send("PING", {})

    tracemalloc.start()
    thread = in_thread(send)
    frame = node.recv(lambda frame, n: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert frame.type == "RUN_PREFILL" and frame.raw is None and frame.epoch == 1
    assert peak < nbytes / 4
    assert node.recv().type == "PING"
    assert thread.outcome() is None


def test_hidden_state_without_rows_has_no_raw():
    node, coordinator = linked()
    for shape in ([1, 0, 896], [0, 1, 896]):
        node.send("HIDDEN_STATE", {"shape": shape, "dtype": "fp16", "compute_ms": 0}, raw=[], request_id=1, epoch=1)
        assert coordinator.recv().raw is None


def test_a_large_manifest_fits_and_comes_whole():
    names = [f"model.layers.{i % 80}.mlp.down_proj.{i}.weight.scale" for i in range(20_000)]
    payload = assignment([manifest_entry(name, "bf16", (8192, 128)) for name in names])
    node, coordinator = linked()
    thread = in_thread(functools.partial(coordinator.send, "ASSIGNMENT", payload, epoch=1))
    assert node.recv().payload == payload
    thread.outcome()
    thread = in_thread(functools.partial(node.send, "WEIGHTS_WANTED", {"names": names}, epoch=1))
    assert coordinator.recv().payload == {"names": names}
    thread.outcome()


def test_many_senders_share_one_connection():
    node, coordinator = linked(KEY_A)
    payload, raw_nbytes = EXAMPLES["HIDDEN_STATE"]
    raw = raw_bytes(raw_nbytes)

    def send(sender):
        for i in range(50):
            node.send("HIDDEN_STATE", payload, raw=raw, request_id=sender * 1000 + i, epoch=1)

    threads = [in_thread(send, sender) for sender in range(4)]
    frames = [coordinator.recv(new_memory) for _ in range(200)]
    assert [frame.seq for frame in frames] == list(range(1, 201))
    for sender in range(4):
        ids = [frame.request_id for frame in frames if frame.request_id // 1000 == sender]
        assert ids == [sender * 1000 + i for i in range(50)]
    assert [thread.outcome() for thread in threads] == [None] * 4


def test_tcp_connections_do_not_wait_to_join_packets():
    with socket.create_server(("127.0.0.1", 0)) as server:
        conn = Connection(socket.create_connection(server.getsockname()), PEER, "node")
        assert conn._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert conn._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        conn.close()


# ----------------------------------------------------------------------------
# Sending: partial sends, systems without sendmsg, slow and dead peers, mistakes of our own
# ----------------------------------------------------------------------------


class Wrapped:
    """A socket whose methods can be replaced, or taken away with None."""

    def __init__(self, sock, **methods):
        self._sock, self._methods = sock, methods

    def __getattr__(self, name):
        if name in self._methods:
            method = self._methods[name]
            if method is None:
                raise AttributeError(name)
            return functools.partial(method, self._sock)
        return getattr(self._sock, name)


def dribble(rng):
    """Methods of a socket that takes 1 to 7 bytes at a time."""

    def send(sock, data):
        return sock.send(memoryview(data)[: rng.randint(1, 7)])

    return {"send": send, "sendmsg": lambda sock, buffers: send(sock, b"".join(buffers)[:7])}


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("partial", [True, False])
def test_every_type_through_every_way_of_sending(gathered, partial):
    methods = dribble(random.Random(5)) if partial else {}
    if not gathered:
        methods["sendmsg"] = None
    for type_ in wire.MESSAGES:
        payload, raw_nbytes = EXAMPLES[type_]
        raw = raw_bytes(raw_nbytes)
        role = receiver_of(type_)
        with Pair(role, accepted=wire.MESSAGES[type_].phase != wire.HANDSHAKE) as pair:
            sender = Connection(Wrapped(pair.peer, **methods), "x", wire.OTHER_SIDE[role])
            sender.protect(KEY_A, KEY_B), pair.conn.protect(KEY_B, KEY_A)
            pieces = [raw[i : i + 5] for i in range(0, len(raw), 5)] + [b""]
            thread = in_thread(pair.conn.recv, new_memory)
            sender.send(type_, payload, raw=pieces, request_id=1, epoch=1)
            frame = thread.outcome()
            assert frame.payload == payload and bytes(frame.raw or b"") == raw


@pytest.mark.parametrize("methods", [{}, {"sendmsg": None}])
def test_large_raw_in_more_buffers_than_one_call_takes(methods):
    with Pair("node") as pair:
        sender = Connection(Wrapped(pair.peer, **methods), "x", "coordinator")
        rows = [raw_bytes(256)] * 2500 + [raw_bytes(300_000)]
        shape = [1, 1175, 200]
        raw = b"".join(rows)
        assert len(raw) == 940_000
        run = {"slots": [0] * 1175, "positions": list(range(1175)), "keep": 0, "shape": shape, "dtype": "fp32"}
        thread = in_thread(functools.partial(sender.send, "RUN_PREFILL", run, raw=rows, request_id=1, epoch=1))
        assert pair.conn.recv(new_memory).raw == raw
        assert thread.outcome() is None


def test_without_sendmsg_a_small_frame_is_one_send():
    sizes = []

    def send(sock, data):
        sizes.append(len(data))
        return sock.send(data)

    with Pair("node") as pair:
        sender = Connection(Wrapped(pair.peer, send=send, sendmsg=None), "x", "coordinator")
        payload, raw_nbytes = EXAMPLES["RUN_DECODE"]
        sender.send("RUN_DECODE", payload, raw=[raw_bytes(raw_nbytes)], request_id=1, epoch=1)
        assert pair.conn.recv(new_memory).type == "RUN_DECODE"
    assert len(sizes) == 1


def test_a_slow_link_is_not_a_dead_one():
    """The whole frame takes several silence limits; every byte taken starts the limit anew."""
    with Pair() as pair:
        pair.conn.silence_limit_s = 0.5
        pair.conn._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        words = "w" * 4000
        thread = in_thread(lambda: [pair.conn.send("ERROR", {"code": "c", "message": words}) for _ in range(6)])
        taken = 0
        while thread.is_alive() or taken < pair.conn.bytes_sent:
            taken += len(pair.peer.recv(1000))
            time.sleep(0.04)
        assert len(thread.outcome()) == 6 and taken == pair.conn.bytes_sent


def test_any_byte_counts_as_life():
    """The frame takes several silence limits; every byte received starts the limit anew."""
    with Pair() as pair:
        pair.conn.silence_limit_s = 0.5
        thread = in_thread(pair.conn.recv)
        began = time.monotonic()
        *most, last = frame_bytes(envelope_of("PONG"))
        pause = 2 * pair.conn.silence_limit_s / len(most)
        for byte in most:
            pair.peer.sendall(bytes([byte]))
            time.sleep(pause)
        assert time.monotonic() - began > pair.conn.silence_limit_s
        assert time.monotonic() - pair.conn.last_received < pair.conn.silence_limit_s
        pair.peer.sendall(bytes([last]))
        assert thread.outcome().type == "PONG"


def test_a_peer_that_takes_nothing_is_silent_and_the_stream_is_dead():
    with Pair("node") as pair:
        pair.conn.silence_limit_s = 0.05
        names = {"names": [f"{i}" * 40 for i in range(1000, 5000)]}
        with pytest.raises(PeerSilent, match=r"^node-7 .* 0\.05 s"):
            for _ in range(100):
                pair.conn.send("WEIGHTS_WANTED", names, epoch=1)
        with pytest.raises(PeerClosed, match="^node-7"):
            pair.conn.send("PING", {})


def test_what_the_peer_would_refuse_is_not_sent():
    node, coordinator = linked()
    wrong = [
        (node, "PONG", {"busy_ms": "3"}, {}, "PONG.busy_ms: a number"),
        (node, "PONG", {"busy_ms": 3, 4: 5}, {}, "unknown field"),
        (node, "NONSENSE", {}, {}, "message type"),
        (node, "RUN_DECODE", EXAMPLES["RUN_DECODE"][0], {"raw": b"x" * 64, "request_id": 1, "epoch": 1}, "a node"),
        (coordinator, "CLEAR_CACHE", {"slots": []}, {}, "epoch is missing"),
        (coordinator, "RUN_DECODE", EXAMPLES["RUN_DECODE"][0], {"request_id": 1, "epoch": 1}, "raw bytes"),
        (coordinator, "PING", {}, {"raw": b"x"}, "no raw bytes"),
    ]
    for conn, type_, payload, rest, message in wrong:
        with pytest.raises(ValueError, match=message):
            conn.send(type_, payload, **rest)
    coordinator._accepted = False
    names = [manifest_entry(f"tensor {i}") for i in range(2000)]
    with pytest.raises(ValueError, match="over the limit"):
        coordinator.send("ASSIGNMENT", assignment(names), epoch=1)
    node.send("PING", {}), coordinator.send("PING", {})
    coordinator._accepted = True
    assert node.recv().seq == coordinator.recv().seq == 1


def test_writer_sends_urgent_frames_first_and_pings_when_idle():
    node, coordinator = linked()
    writer = wire.Writer(coordinator, heartbeat_s=0.01)
    for slot in range(3):
        writer.put("CLEAR_CACHE", {"slots": [slot]}, epoch=1)
    writer.put("PONG", {"busy_ms": 0}, urgent=True)
    writer.start()
    frames = [node.recv() for _ in range(5)]
    assert [frame.type for frame in frames] == ["PONG"] + ["CLEAR_CACHE"] * 3 + ["PING"]
    assert [frame.payload["slots"] for frame in frames[1:4]] == [[0], [1], [2]]
    writer.close()
    writer.join(30)
    assert not writer.is_alive()
    with pytest.raises(PeerClosed):
        while True:
            node.recv()


def test_writer_that_cannot_send_closes_its_connection():
    node, coordinator = linked()
    writer = wire.Writer(coordinator, heartbeat_s=100)
    node.close()
    writer.start()
    writer.put("PING", {})
    writer.join(30)
    assert not writer.is_alive()
    with pytest.raises(PeerClosed):
        coordinator.recv()
    writer.put("PING", {})  # dropped
    with pytest.raises(PeerClosed):
        writer.put("PING", {}, wait=True)


def test_writer_gives_up_a_peer_that_asks_and_takes_no_answers(monkeypatch):
    monkeypatch.setattr(wire, "_MAX_WAITING_FRAMES", 10)
    with Pair() as pair:
        writer = wire.Writer(pair.conn, 60.0)  # not started: nothing is taken
        for _ in range(10):
            writer.put("PONG", {"busy_ms": 0}, urgent=True)
        writer.put("PING", {})  # another queue
        writer.put("PONG", {"busy_ms": 0}, urgent=True)
        with pytest.raises(PeerClosed, match="10 frames wait, and it does not take them"):
            pair.conn.recv()


def test_writer_holds_back_whoever_waits():
    node, coordinator = linked()
    writer = wire.Writer(coordinator, heartbeat_s=100)
    payload = {"tensor_name": "w", "chunk_index": 0, "chunk_count": 1, "offset": 0, "sha256": b"d" * 32}
    put = functools.partial(writer.put, "WEIGHT_CHUNK", payload, raw=bytes(wire.MAX_CHUNK), epoch=1, wait=True)
    thread = in_thread(lambda: [put() for _ in range(20)])
    writer.start()
    for _ in range(20):
        node.recv(lambda frame, nbytes: None)
        assert writer._waiting_bytes <= wire._MAX_WAITING_BYTES
    assert len(thread.outcome()) == 20
    writer.close()


# ----------------------------------------------------------------------------
# Receiving: ends, silence, deadlines
# ----------------------------------------------------------------------------


def test_the_end_between_frames_is_clean_and_inside_one_is_not():
    whole = frame_bytes(envelope_of("HIDDEN_STATE"))
    for length in range(len(whole)):
        with Pair() as pair:
            pair.give(whole[:length]).peer.close()
            if length:
                pair.bad_frame("ended inside a frame")
            else:
                with pytest.raises(PeerClosed, match="^node-7"):
                    pair.conn.recv(fits)


def test_a_reset_connection_is_closed_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as server:
        conn = Connection(socket.create_connection(server.getsockname()), PEER, "node")
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        with pytest.raises(PeerClosed, match=r"^node-7 .*reset"):
            conn.recv()
        conn.close()


def test_silence_names_peer_and_seconds():
    with Pair() as pair:
        pair.conn.silence_limit_s = 0.03
        with pytest.raises(PeerSilent, match=r"^node-7 .* nothing for 0\.03 s"):
            pair.conn.recv()
        with pytest.raises(ValueError):
            pair.conn.silence_limit_s = 0


def test_the_deadline_covers_the_whole_frame_though_bytes_drip(monkeypatch):
    """A byte comes every tenth of a second, so the peer is never silent; with a clock that the test turns."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: clock.now))
    bytes_read = []

    def drip(sock, view):
        clock.now += 0.1
        bytes_read.append(1)
        return sock.recv_into(view[:1])

    ours, peer = socket.socketpair()
    conn = Connection(Wrapped(ours, recv_into=drip), PEER, "coordinator")
    peer.sendall(frame_bytes(envelope_of("HELLO", request_id=None, epoch=None)))
    with pytest.raises(PeerSilent, match=r"^node-7 .* 5 s"):
        conn.recv(deadline=5.0)
    assert 45 <= len(bytes_read) <= 51
    with pytest.raises(PeerClosed):
        conn.recv()
    conn.close(), peer.close()


def test_a_dripping_stranger_is_left_in_real_time():
    with Pair(accepted=False) as pair:
        stop = threading.Event()

        def drip():
            for byte in frame_bytes(envelope_of("HELLO")):
                if stop.wait(0.02):
                    return "left"
                pair.peer.sendall(bytes([byte]))
            return "whole"

        thread = in_thread(drip)
        with pytest.raises(PeerSilent):
            pair.conn.recv(deadline=0.2)
        stop.set()
        assert thread.outcome() == "left"


def test_a_deadline_does_not_outlive_its_frame():
    with Pair(accepted=False) as pair:
        pair.give(frame_bytes(envelope_of("HELLO")))
        pair.conn.recv(deadline=0.5)
        assert pair.conn._sock.gettimeout() == pair.conn.silence_limit_s == wire.SILENCE_LIMIT_S


@pytest.mark.parametrize("begun", [b"", b"\0\0\0"])
def test_close_wakes_a_waiting_receiver(begun):
    with Pair() as pair:
        pair.give(begun)
        thread = in_thread(pair.conn.recv)
        while pair.conn.bytes_received < len(begun):
            time.sleep(0.001)
        pair.conn.close()
        assert isinstance(thread.outcome(), PeerClosed)
        pair.conn.close()
        with pytest.raises(PeerClosed):
            pair.conn.send("PING", {})


def test_closing_with_a_reason_tells_it_to_whoever_waits():
    with Pair() as pair:
        receiver = in_thread(pair.conn.recv)
        while receiver.is_alive() and not pair.conn._receive_broken:
            time.sleep(0.001)
        pair.conn.close("no MEASURED in time")
        pair.conn.close("another reason")
        assert str(receiver.outcome()) == f"{PEER}: no MEASURED in time"
        with pytest.raises(PeerClosed, match="no MEASURED in time"):
            pair.conn.send("PING", {})


def test_a_socket_that_takes_no_options_is_still_a_connection():
    """macOS refuses setsockopt when the peer has gone already; the thread that made the connection must live on."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:

        def refuse(*_):
            raise OSError(22, "Invalid argument")

        conn = Connection(Wrapped(server.accept()[0], setsockopt=refuse), PEER, "coordinator")
        peer.close()
        with pytest.raises(PeerClosed):
            conn.recv()
        conn.close()


def test_close_wakes_a_waiting_sender():
    with Pair("node") as pair:
        names = {"names": [f"{i}" * 40 for i in range(10_000)]}
        thread = in_thread(lambda: [pair.conn.send("WEIGHTS_WANTED", names, epoch=1) for _ in range(100)])
        while not pair.conn.bytes_sent:
            time.sleep(0.001)
        pair.conn.close()
        assert isinstance(thread.outcome(), PeerClosed)


# ----------------------------------------------------------------------------
# Bad frames
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("accepted, limit", [(False, wire.MAX_HANDSHAKE_MAP), (True, wire.MAX_MAP)])
def test_lengths_are_refused_before_memory_is_taken(accepted, limit):
    for length in (0, limit + 1, 1 << 32, 1 << 63, (1 << 64) - 1):
        with Pair(accepted=accepted) as pair:
            pair.give(struct.pack(">Q", length) + b"\x80" * 50_000)
            tracemalloc.start()
            pair.bad_frame(f"a map of {length} bytes")
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 50_000
            assert pair.conn.bytes_received <= wire._READ_AHEAD_NBYTES


OTHERS = {
    "HTTP": [
        b"GET / HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"PRI * HTTP/2.0\r\n",
    ],
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"],
    "SSH": [b"SSH-2.0-OpenSSH_9.6\r\n"],
}


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("protocol", OTHERS)
def test_other_protocols_are_named(protocol, accepted):
    for data in OTHERS[protocol]:
        with Pair(accepted=accepted) as pair, pytest.raises(wire.OtherProtocol, match=f"looks like {protocol}$"):
            pair.give(data).conn.recv()


def test_raw_is_refused_before_memory_is_taken():
    def refuse(frame, nbytes):
        raise BadFrame(f"{PEER}: {nbytes} bytes are not in the plan")

    for place, word in [(None, "nobody waits for"), (refuse, "not in the plan")]:
        with Pair("node") as pair:
            pair.give(frame_bytes(envelope_of("RUN_DECODE"), raw=b"")).bad_frame(word, place=place)


def test_memory_of_another_size_is_our_own_mistake():
    with Pair("node") as pair:
        pair.give(frame_bytes(envelope_of("RUN_DECODE")))
        with pytest.raises(ValueError, match="place gave 63 bytes of memory for 64"):
            pair.conn.recv(lambda frame, nbytes: memoryview(bytearray(nbytes - 1)))
        with pytest.raises(PeerClosed):
            pair.conn.recv(new_memory)


def test_seq_goes_up_by_one():
    for seqs in ([2], [1, 1], [1, 3], [1, 2, 1], [1, 2, 4], [(1 << 63) - 1]):
        with Pair() as pair:
            for seq in seqs:
                pair.give(frame_bytes(envelope_of("PONG", seq)))
            for _ in seqs[:-1]:
                pair.conn.recv()
            pair.bad_frame("PONG with seq")


def test_direction_and_phase():
    for type_, message in wire.MESSAGES.items():
        if message.sender != wire.BOTH:
            with Pair(message.sender, accepted=message.phase == wire.OPEN) as pair:
                pair.give(frame_bytes(envelope_of(type_))).bad_frame(f"{type_} is not for a {message.sender}")
        if message.phase != wire.ALWAYS:
            with Pair(receiver_of(type_), accepted=message.phase != wire.OPEN) as pair:
                pair.give(frame_bytes(envelope_of(type_))).bad_frame(type_, "the handshake's end")


def test_another_version_is_told_so_whatever_else_it_sends():
    for version, older in [(0, "node"), (2, "coordinator")]:
        hello = {"type": "HELLO", "seq": "one", "flags": 7, "payload": {"new": [], "protocol_version": version}}
        with Pair(accepted=False) as pair:
            pair.give(frame_bytes(hello, b""))
            message = pair.bad_frame(f"the node speaks protocol version {version}, the coordinator 1")
            assert message.endswith(f"update the {older}'s files")


def test_hello_may_have_more_fields_and_they_are_left_out():
    with Pair(accepted=False) as pair:
        hello = envelope_of("HELLO", later=1)
        hello["payload"]["later"] = {"x": 1}
        assert pair.give(frame_bytes(hello)).conn.recv().payload == EXAMPLES["HELLO"][0]


ODD_VALUES = [None, True, -1, 1 << 63, 1.5, 1e300, float("nan"), float("inf"), "", "x" * 5000, "a\nb", b"", b"x" * 40]
ODD_VALUES += [[], [[]], ["x"] * 70, [True, 1, 1], [1, 1], [-1, -1], {}, {"x": 1}]

# Odd values that are right where they stand; a config's inside is free, and bounded by CONTRADICTIONS.
RIGHT = {
    **dict.fromkeys(("max_memory_bytes", "total_memory", "free_memory", "need_bytes", "have_bytes", "proof"), (None,)),
    **dict.fromkeys(("heartbeat_s", "busy_ms", "compute_ms", "1", "4", "6", "8", "64", "256"), (1.5,)),
    **dict.fromkeys(("message", "reason"), ("", "a\nb")),
    "names": ([],),
    **dict.fromkeys(("kernels", "with_copy"), (None,)),
    "second_copy": (True,),
    "config": ({}, {"x": 1}),
    "slots": ([], [1, 1]),
    "positions": ([1, 1],),
    "shape": ([1, 1],),  # of a linear
}


def paths(value, path=()):
    """Paths of all values inside a payload."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


def changed(value, path, new):
    value = copy.deepcopy(value)
    inside = functools.reduce(lambda inner, key: inner[key], path[:-1], value)
    inside[path[-1]] = new
    return value


@pytest.mark.parametrize("type_", wire.MESSAGES)
def test_every_field_refuses_every_odd_value(type_):
    """Pure: check_message alone."""
    good = EXAMPLES[type_][0]
    for path in paths(good):
        if path[0] == "config" and len(path) > 1:
            continue
        for odd in ODD_VALUES:
            try:
                wire.check_message(envelope_of(type_, payload=changed(good, path, odd)))
            except ValueError as error:
                assert str(error).startswith(type_)
            else:
                assert odd in RIGHT.get(path[-1], ()), f"{type_}{path} took {odd!r}"


@pytest.mark.parametrize("type_", wire.MESSAGES)
def test_every_field_must_be_there_and_no_other(type_):
    good = EXAMPLES[type_][0]
    for name in good:
        with pytest.raises(ValueError, match=f"{type_}: field {name} is missing"):
            wire.check_message(envelope_of(type_, payload={key: good[key] for key in good if key != name}))
    if type_ != "HELLO":
        with pytest.raises(ValueError, match=f"{type_}: unknown field 'later'"):
            wire.check_message(envelope_of(type_, payload={**good, "later": 1}))


ENVELOPES = [
    ({"type": None}, "a message type"),
    ({"type": "NONSENSE"}, "a message type"),
    ({"type": 7}, "a message type"),
    ({"type": ["PONG"]}, "a message type"),
    ({"payload": None}, "a map expected"),
    ({"payload": [1]}, "a map expected"),
    ({"seq": None}, "seq is missing"),
    ({"seq": 0}, "PONG: seq"),
    ({"seq": True}, "PONG: seq"),
    ({"seq": 1.0}, "PONG: seq"),
    ({"seq": "1"}, "PONG: seq"),
    ({"epoch": -1}, "PONG: epoch"),
    ({"epoch": "1"}, "PONG: epoch"),
    ({"request_id": 1 << 63}, "PONG: request_id"),
    ({"request_id": []}, "PONG: request_id"),
    ({"raw_nbytes": 0}, "PONG: raw_nbytes"),
    ({"raw_nbytes": -5}, "PONG: raw_nbytes"),
    ({"raw_nbytes": 1 << 62}, "PONG: raw_nbytes"),
    ({"raw_nbytes": 5}, "no raw bytes"),
    ({"later": 5}, "unknown key 'later'"),
]


@pytest.mark.parametrize("changes, words", ENVELOPES)
def test_envelope(changes, words):
    with Pair() as pair:
        pair.give(frame_bytes(envelope_of("PONG", **changes), b"")).bad_frame(words)


CONTRADICTIONS = [
    ("HELLO", {"selected_device": "mps"}, "none of the devices"),
    ("HELLO", {"devices": []}, "devices: a list of 1 to 64"),
    ("HELLO", {"node_id": "n" * 129}, "node_id: 1 to 128"),
    ("HELLO", {"nonce": b"n" * 31}, "nonce: 32 bytes"),
    ("ASSIGNMENT", {"layer_start": 5}, "layer_end_exclusive"),
    ("ASSIGNMENT", {"tensor_count": 3}, "tensor_count is 3"),
    ("ASSIGNMENT", {"total_weight_bytes": 33}, "not the sum"),
    ("ASSIGNMENT", {"quant": "int5"}, "quant: one of fp16, int8, int4"),
    ("ASSIGNMENT", {"compute_dtype": "int8"}, "compute_dtype: one of"),
    ("ASSIGNMENT", {"manifest": [manifest_entry("a"), manifest_entry("a")]}, "twice"),
    ("ASSIGNMENT", {"manifest": [{**manifest_entry("a"), "nbytes": 47}]}, "48 bytes by its shape"),
    ("ASSIGNMENT", {"manifest": [{**manifest_entry("a"), "shape": [4, 6, 2]}]}, "96 bytes by its shape"),
    ("ASSIGNMENT", {"manifest": [{**manifest_entry("a"), "dtype": "fp32"}]}, "96 bytes by its shape"),
    ("ASSIGNMENT", {"manifest": [{**manifest_entry("a"), "dtype": "fp8"}]}, ".manifest[0].dtype: one of"),
    ("ASSIGNMENT", {"manifest": [{**manifest_entry("a"), "key": "0F" * 32}]}, ".manifest[0].key: 64 hex"),
    ("ASSIGNMENT", {"manifest": [manifest_entry("a"), {**manifest_entry("b"), "path": "/"}]}, "unknown field 'path'"),
    ("ASSIGNMENT", {"config": {"x": [[[[1]]]]}}, "a JSON value"),
    ("ASSIGNMENT", {"config": {"x": b"1"}}, ".config.x: a JSON value"),
    ("ASSIGNMENT", {"config": {"x": float("nan")}}, ".config.x: a JSON value"),
    ("ASSIGNMENT", {"config": {"a\nb": 1}}, "printable"),
    ("WEIGHTS_WANTED", {"names": ["a", "a"]}, "twice"),
    ("WEIGHT_CHUNK", {"chunk_index": 2}, "chunk_index 2 of 2"),
    ("WEIGHT_CHUNK", {"offset": 0}, "cannot start at offset 0"),
    ("WEIGHT_CHUNK", {"chunk_index": 0, "sha256": None}, "cannot start at offset 48"),
    ("WEIGHT_CHUNK", {"offset": wire.MAX_CHUNK + 1}, "cannot start"),
    ("WEIGHT_CHUNK", {"sha256": None}, "sha256 belongs"),
    ("WEIGHT_CHUNK", {"chunk_count": 3}, "sha256 belongs"),
    ("RUN_PREFILL", {"positions": [0, 1]}, "3 slots but 2 positions"),
    ("RUN_PREFILL", {"shape": [3, 1, 8]}, "does not hold 3 rows"),
    ("RUN_PREFILL", {"shape": [1, 3, 9]}, "takes 57 raw bytes, not 51"),
    ("RUN_PREFILL", {"dtype": "fp32"}, "takes 96 raw bytes"),
    ("RUN_PREFILL", {"dtype": "int8"}, "dtype: one of fp32, fp16, bf16"),
    ("RUN_PREFILL", {"keep": 4}, "keep is 4 of 3 rows"),
    ("RUN_PREFILL", {"keep": -1}, "keep: an integer"),
    ("RUN_DECODE", {"shape": [1, 2, 8]}, "does not hold 2 rows"),
    ("RUN_DECODE", {"slots": [0, True]}, "slots: a list"),
    ("RUN_DECODE", {"slots": [0, wire.MAX_SLOTS]}, "slots: a list"),
    ("RUN_DECODE", {"slots": [], "positions": [], "shape": [0, 1, 8]}, "slots: a list of 1"),
    ("HIDDEN_STATE", {"shape": [2, 2, 8]}, "neither"),
    ("HIDDEN_STATE", {"shape": [2, 1, 0]}, "neither"),
    ("HIDDEN_STATE", {"shape": [2, 1, 4]}, "takes 16 raw bytes, not 32"),
    ("HIDDEN_STATE", {"shape": [2, 1, 8, 1]}, "shape: a list of 3 to 3"),
    ("HIDDEN_STATE", {"shape": [0, 1, 8]}, "takes 0 raw bytes, not 32"),
    ("HIDDEN_STATE", {"dtype": "fp32"}, "takes 64 raw bytes"),
    ("MEASURED", {"layer_ms": {"1": 1, "4": 1, "6": 1, "8": 1, "256": 1}}, "field 64 is missing"),
    ("MEASURED", {"layer_ms": {"1": 1, "4": 1, "6": 1, "8": 1, "64": 1, "256": 1, "512": 1}}, "unknown field '512'"),
]


@pytest.mark.parametrize("type_, changes, words", CONTRADICTIONS)
def test_contradictions(type_, changes, words):
    envelope = envelope_of(type_)
    envelope["payload"].update(changes)
    with Pair(receiver_of(type_), accepted=wire.MESSAGES[type_].phase != wire.HANDSHAKE) as pair:
        pair.give(frame_bytes(envelope)).bad_frame(type_, words)


@pytest.mark.parametrize("raw_nbytes", [None, 1, wire.MAX_CHUNK + 1])
def test_raw_sizes_that_no_type_allows(raw_nbytes):
    for type_ in ("RUN_PREFILL", "RUN_DECODE", "HIDDEN_STATE"):
        with Pair(receiver_of(type_)) as pair:
            pair.give(frame_bytes(envelope_of(type_, raw_nbytes=raw_nbytes), b"")).bad_frame(type_, "raw bytes")
    if raw_nbytes != 1:
        with Pair("node") as pair:
            envelope = envelope_of("WEIGHT_CHUNK", raw_nbytes=raw_nbytes)
            pair.give(frame_bytes(envelope, b"")).bad_frame("1 to 1048576 raw bytes")


PONG = msgpack.packb(envelope_of("PONG"))
HOSTILE_MAPS = {
    "empty list": b"\x90",
    "number": b"\x01",
    "text": b"\xa3abc",
    "trailing byte": PONG + b"\x00",
    "second map": PONG + PONG,
    "cut": PONG[:-1],
    "reserved byte": b"\xc1",
    "invalid UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "surrogate": b"\x81\xa4type\xa3\xed\xa0\x80",
    "NaN key": b"\x81\xcb\x7f\xf8" + b"\x00" * 7,
    "integer key": b"\x81\x01\x01",
    "list key": b"\x81\x90\x01",
    "binary key": b"\x81\xc4\x04type\xa4PONG",
    "nil key": b"\x81\xc0\x01",
    "key twice": b"\x86" + PONG[1:] + b"\xa5epoch\x03",
    "extension": b"\x81\xa1a\xc7\x03\x05abc",
    "empty extension": b"\x81\xa1a\xc7\x00\x05",
    "fixed extension": b"\x81\xa1a\xd4\x05\x00",
    "time stamp 32": b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",
    "time stamp 64": b"\x81\xa1a\xd7\xff" + b"\x00" * 8,
    "time stamp 96": b"\x81\xa1a\xc7\x0c\xff" + b"\x00" * 12,
    "deep lists": b"\x81\xa1a" + b"\x91" * 60_000 + b"\x00",
    "deep maps": b"\x81\xa1a" * 20_000 + b"\x00",
    "long list without items": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "long list with few items": b"\x81\xa1a\xdd\x00\x3f\xff\xff" + b"\x00" * 60_000,
    "long lists inside one another": b"\x81\xa1a" + b"\xdd\x00\x00\xff\xff" * 900 + b"\x00" * 60_000,
    "long map": b"\x81\xa1a\xdf\xff\xff\xff\xff",
    "long text": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "long bytes": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "long extension": b"\x81\xa1a\xc9\xff\xff\xff\xff\x05",
}


@pytest.mark.parametrize("name", HOSTILE_MAPS)
def test_hostile_msgpack(name):
    data = HOSTILE_MAPS[name]
    with pytest.raises(ValueError):
        wire.decode_map(data)
    with Pair() as pair:
        pair.give(struct.pack(">Q", len(data)) + data)
        tracemalloc.start()
        pair.bad_frame()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1_000_000


def test_a_message_never_repeats_what_the_peer_sent_at_length():
    for data in (PONG + PONG * 1000, msgpack.packb({**envelope_of("PONG"), "payload": {"busy_ms": "x" * 60_000}})):
        with Pair() as pair:
            assert len(pair.give(struct.pack(">Q", len(data)) + data).bad_frame()) < 200


def test_a_map_of_empty_lists_takes_bounded_memory():
    """One byte on the wire is 64 in memory: counted, so that 4 MiB cannot become 256."""
    count = 4_000_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="lists and maps"):
        wire.decode_map(b"\x81\xa1a\xdd" + struct.pack(">I", count) + b"\x90" * count)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64_000_000


# ----------------------------------------------------------------------------
# Thousands of random frames: a good frame, a BadFrame with the peer's name or a clean end; never anything else
# ----------------------------------------------------------------------------


def random_value(rng, depth=3):
    kind = rng.randrange(10 if depth else 8)
    if kind == 8:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 9:
        return {rng.choice(("a", "seq", 5, 1.5)): random_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return rng.choice(
        (None, True, rng.randrange(-5, 5), rng.getrandbits(63), rng.random(), "x" * rng.randrange(9), b"x" * 32, "fp16")
    )


def mutate_bytes(rng, data: bytes) -> bytes:
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            del data[at : at + rng.randint(1, 8)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            data[at : at + 4] = b"\xff" * 4
        if not data:
            return b"\0"
    return bytes(data)


def mutate_fields(rng, envelope: dict) -> dict:
    for _ in range(rng.randint(1, 2)):
        path = rng.choice(list(paths(envelope)))
        envelope = changed(envelope, path, random_value(rng))
    return envelope


def random_stream(rng, type_: str) -> bytes:
    """Bytes of a hostile or broken peer, built on a good frame of this type."""
    good = envelope_of(type_)
    kind = rng.randrange(8)
    if kind == 0:
        return mutate_bytes(rng, frame_bytes(good))
    if kind == 1:  # the length is right, so that the map is looked at
        data = mutate_bytes(rng, msgpack.packb(good))
        return struct.pack(">Q", len(data)) + data + raw_bytes(EXAMPLES[type_][1])
    if kind == 2:
        data = msgpack.packb(mutate_fields(rng, good))
        return struct.pack(">Q", len(data)) + data + raw_bytes(EXAMPLES[type_][1])
    if kind == 3:
        data = rng.randbytes(rng.randint(1, 200))
        return struct.pack(">Q", len(data)) + data
    if kind == 4:
        data = msgpack.packb(random_value(rng))
        return struct.pack(">Q", len(data)) + data
    if kind == 5:
        return rng.randbytes(rng.randint(1, 200))
    if kind == 6:  # truncated, duplicated or out of sequence
        whole = frame_bytes(good)
        return rng.choice((whole[: rng.randrange(len(whole))], whole * 2, frame_bytes(envelope_of(type_, 5))))
    other = rng.choice(list(EXAMPLES))  # one type's payload under another's name, of either direction
    return frame_bytes({**good, "payload": copy.deepcopy(EXAMPLES[other][0])})


def receive_all(conn: Connection) -> Exception:
    """Receives until the stream is over; returns how it ended."""
    while True:
        try:
            frame = conn.recv(fits)
        except (BadFrame, PeerClosed) as end:
            return end
        assert frame.type in wire.MESSAGES and frame.payload.keys() == wire.MESSAGES[frame.type].fields.keys()


def fuzz(rng, rounds: int) -> int:
    bad = 0
    types = list(wire.MESSAGES)
    for i in range(rounds):
        type_ = types[i % len(types)]
        role = rng.choice(("node", "coordinator")) if rng.random() < 0.1 else receiver_of(type_)
        accepted = wire.MESSAGES[type_].phase != wire.HANDSHAKE or rng.random() < 0.1
        stream = random_stream(rng, type_)
        with Pair(role, accepted) as pair:
            if rng.random() < 0.1:
                pair.conn.protect(KEY_A, KEY_B)
            pair.give(stream).peer.close()
            end = receive_all(pair.conn)
            assert str(end).startswith(PEER + ": ") and len(str(end)) < 1000
            bad += isinstance(end, BadFrame)
    return bad


def test_fuzz():
    rng = random.Random(20240601)
    fuzz(rng, 200)  # caches of msgpack, reprlib and the like
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    assert fuzz(rng, 4000) > 3200
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000, "memory grows with bad frames"
    assert peak - before < 10_000_000


def test_one_bad_peer_does_not_disturb_another():
    good_node, good_coordinator = linked()
    rng = random.Random(3)
    for i in range(100):
        with Pair() as pair:
            pair.give(rng.randbytes(64)).peer.close()
            receive_all(pair.conn)
        good_node.send("PONG", {"busy_ms": i})
        assert good_coordinator.recv().payload == {"busy_ms": i}


# ----------------------------------------------------------------------------
# MACs: after protect() nothing that was changed, repeated, left out or reordered is accepted
# ----------------------------------------------------------------------------


def protected_stream(types: list[str]) -> list[bytes]:
    """Frames from a coordinator with MACs, as they pass on the wire."""
    with Pair("coordinator") as pair:
        pair.conn.protect(KEY_A, KEY_B)
        frames = []
        for type_ in types:
            payload, raw_nbytes = EXAMPLES[type_]
            pair.conn.send(type_, payload, raw=raw_bytes(raw_nbytes), request_id=1, epoch=1)
            frames.append(pair.peer.recv(100_000))
    return frames


def protected_node(stream: bytes) -> Pair:
    pair = Pair("node")
    pair.conn.protect(KEY_B, KEY_A)
    pair.give(stream).peer.shutdown(socket.SHUT_WR)
    return pair


def test_a_change_anywhere_is_seen():
    (frame,) = protected_stream(["RUN_DECODE"])
    for at in range(len(frame)):
        for bit in (0, 7):
            changed_frame = bytearray(frame)
            changed_frame[at] ^= 1 << bit
            with protected_node(changed_frame) as pair:
                pair.bad_frame()
    with protected_node(frame) as pair:
        assert pair.conn.recv(fits).type == "RUN_DECODE"


def test_order_repeats_and_gaps_are_seen():
    a, b, c = protected_stream(["MEASURE", "RUN_DECODE", "PING"])
    with protected_node(a + b + c) as pair:
        assert [pair.conn.recv(fits).seq for _ in range(3)] == [1, 2, 3]
    for stream, good in [(b + a, 0), (a + a, 1), (a + c, 1), (c, 0), (a + b + b, 2), (a + b + a, 2)]:
        with protected_node(stream) as pair:
            for _ in range(good):
                pair.conn.recv(fits)
            pair.bad_frame("seq")


def test_truncation_is_seen():
    (frame,) = protected_stream(["PING"])
    for length in range(1, len(frame)):
        with protected_node(frame[:length]) as pair:
            pair.bad_frame("ended inside a frame")


def test_frames_without_mac_or_of_the_other_direction_are_refused():
    (ping,) = protected_stream(["PING"])
    with protected_node(ping[:-32]) as pair:
        pair.bad_frame("ended inside")
    with protected_node(ping[:-32] + b"\0" * 32) as pair:
        pair.bad_frame("not authentic")
    with Pair("coordinator") as pair:  # the coordinator's own PING comes back to it
        pair.conn.protect(KEY_A, KEY_B)
        pair.give(ping).bad_frame("not authentic")


def test_a_chunk_is_held_to_its_digest_instead():
    (frame,) = protected_stream(["WEIGHT_CHUNK"])
    raw_at = len(frame) - 32 - 48
    in_raw, in_map = bytearray(frame), bytearray(frame)
    in_raw[raw_at] ^= 1
    in_map[frame.index(b"\xc4\x20" + b"d" * 32) + 2] ^= 1
    with protected_node(in_raw) as pair:
        assert pair.conn.recv(fits).payload == EXAMPLES["WEIGHT_CHUNK"][0]
    with protected_node(in_map) as pair:
        pair.bad_frame("WEIGHT_CHUNK is not authentic")


# ----------------------------------------------------------------------------
# The handshake, honest
# ----------------------------------------------------------------------------

KEY = wire.token_key("correct horse battery staple")
OTHER_KEY = wire.token_key("wrong horse battery staple")


def admit_all(hello: dict) -> None:
    pass


def refuse_nobody_knows(hello: dict) -> None:
    raise AssertionError("an unproven node was to be admitted")


class Handshake:
    """A node and a coordinator in threads; with relay, the test is the man in the middle and holds both far ends."""

    def __init__(self, node_key=KEY, coordinator_key=KEY, admit=admit_all, relay=False, hello=HELLO):
        node_sock, self.to_node = socket.socketpair()
        self.to_coordinator, coordinator_sock = socket.socketpair()
        if not relay:
            self.to_node.close(), self.to_coordinator.close()
            node_sock, coordinator_sock = socket.socketpair()
        self.node = Connection(node_sock, "coordinator:7001", "node")
        self.coordinator = Connection(coordinator_sock, PEER, "coordinator")
        self.node_thread = in_thread(wire.node_handshake, self.node, hello, node_key)
        self.coordinator_thread = in_thread(wire.coordinator_handshake, self.coordinator, coordinator_key, 2.0, admit)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for end in (self.node, self.coordinator, self.to_node, self.to_coordinator):
            end.close()
        self.node_thread.outcome(), self.coordinator_thread.outcome()

    def outcomes(self):
        """What the node's side returned or raised, and what the coordinator's did."""
        return self.node_thread.outcome(), self.coordinator_thread.outcome()


def read_frame(sock, mac: bool = False) -> bytes:
    """One whole frame without raw bytes."""
    length = sock.recv(8, socket.MSG_WAITALL)
    nbytes = struct.unpack(">Q", length)[0] + (32 if mac else 0)
    return length + sock.recv(nbytes, socket.MSG_WAITALL)


def rewrite(frame: bytes, **fields) -> bytes:
    """The frame with other payload fields."""
    envelope = msgpack.unpackb(frame[8:])
    envelope["payload"].update(fields)
    data = msgpack.packb(envelope)
    return struct.pack(">Q", len(data)) + data


def test_a_key_needs_a_token_and_is_the_same_every_time():
    assert wire.token_key("a") == wire.token_key("a") != wire.token_key("b")
    assert len(KEY) == 32
    with pytest.raises(ValueError):
        wire.token_key("")


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "token"])
def test_handshake(key):
    admitted = []
    with Handshake(key, key, admit=admitted.append) as handshake:
        ack, hello = handshake.outcomes()
        assert {name: hello[name] for name in HELLO} == HELLO
        assert admitted == [hello]
        assert ack["node_id"] == "box-0" and ack["heartbeat_s"] == 2.0
        assert (ack["proof"] is None) == (key is None)
        assert handshake.node._send_key == handshake.coordinator._receive_key
        assert handshake.node._receive_key == handshake.coordinator._send_key
        assert key is None or handshake.node._send_key != handshake.node._receive_key
        names = {"names": ["n" * 200 + str(i) for i in range(500)]}  # more than a stranger may send
        handshake.node.send("WEIGHTS_WANTED", names, epoch=1)
        assert handshake.coordinator.recv().payload == names
        handshake.coordinator.send("PING", {})
        assert handshake.node.recv().type == "PING"


TOKENS = [
    (OTHER_KEY, KEY, "node and coordinator have different tokens: start both with the same --token-file"),
    (None, KEY, "the coordinator has a token, the node has none: start it with the same --token-file"),
    (KEY, None, "the node has a token, the coordinator has none: start it with the same --token-file"),
]


@pytest.mark.parametrize(
    "node_key, coordinator_key, message", TOKENS, ids=["wrong", "node has none", "coordinator has none"]
)
def test_tokens_that_differ_are_refused_with_the_reason_on_both_sides(node_key, coordinator_key, message):
    with Handshake(node_key, coordinator_key, admit=refuse_nobody_knows) as handshake:
        for outcome in handshake.outcomes():
            assert isinstance(outcome, Refused)
            assert (outcome.code, outcome.message) == ("token", message)


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "token"])
def test_a_node_that_is_not_admitted_hears_why(key):
    def admit(hello):
        raise Refused("duplicate_node_id", f"{hello['node_id']} is here already")

    with Handshake(key, key, admit) as handshake:
        for outcome in handshake.outcomes():
            assert isinstance(outcome, Refused)
            assert (outcome.code, str(outcome)) == ("duplicate_node_id", "box-0 is here already")


@pytest.mark.parametrize("node_version, older", [(0, "node"), (2, "coordinator")])
def test_versions_that_differ_are_refused_with_the_reason_on_both_sides(node_version, older):
    hello = {**HELLO, "invented_later": [1, 2]}
    with Handshake(relay=True, admit=refuse_nobody_knows) as handshake:
        handshake.to_coordinator.sendall(rewrite(read_frame(handshake.to_node), protocol_version=node_version, **hello))
        handshake.to_node.sendall(read_frame(handshake.to_coordinator))
        for outcome in handshake.outcomes():
            assert isinstance(outcome, Refused) and outcome.code == "version"
            assert f"node speaks protocol version {node_version}, the coordinator 1" in outcome.message
            assert outcome.message.endswith(f"update the {older}'s files")


# ----------------------------------------------------------------------------
# The handshake, attacked: nothing after HELLO is accepted
# ----------------------------------------------------------------------------


def stranger(*frames, key=KEY, answers: int = 0):
    """Sends frames to a coordinator; returns how its handshake ends. A frame may be a function of its last answer."""
    ours, theirs = socket.socketpair()
    conn = Connection(theirs, PEER, "coordinator")
    thread = in_thread(wire.coordinator_handshake, conn, key, 2.0, refuse_nobody_knows)
    answer = b""
    for frame in frames:
        ours.sendall(frame(answer) if callable(frame) else frame)
        if answers:
            answer, answers = read_frame(ours), answers - 1
    ours.shutdown(socket.SHUT_WR)
    outcome = thread.outcome()
    ours.close(), conn.close()
    return outcome


def hello_frame(**fields) -> bytes:
    return rewrite(frame_bytes(envelope_of("HELLO", request_id=None, epoch=None)), **fields)


def auth_frame(proof: bytes | None, seq: int = 2) -> bytes:
    return frame_bytes({"type": "AUTH", "seq": seq, "payload": {"proof": proof}}, b"")


@pytest.mark.parametrize("type_", [type_ for type_ in wire.MESSAGES if type_ not in ("HELLO", "ERROR")])
def test_only_hello_may_be_first_and_only_auth_second(type_):
    assert isinstance(stranger(frame_bytes(envelope_of(type_))), BadFrame)
    if type_ != "AUTH":
        assert isinstance(stranger(hello_frame(), frame_bytes(envelope_of(type_, 2)), answers=1), BadFrame)


def test_a_second_hello_is_refused():
    assert isinstance(stranger(hello_frame(), rewrite_seq(hello_frame(), 2), answers=1), BadFrame)


def rewrite_seq(frame: bytes, seq: int) -> bytes:
    envelope = msgpack.unpackb(frame[8:])
    data = msgpack.packb({**envelope, "seq": seq})
    return struct.pack(">Q", len(data)) + data


@pytest.mark.parametrize("proof", [None, b"\0" * 32, b"\xff" * 32])
def test_a_made_up_proof_is_refused(proof):
    outcome = stranger(hello_frame(), auth_frame(proof), answers=1)
    assert isinstance(outcome, Refused) and outcome.code == "token"


def test_role_swap_the_coordinators_own_proof_is_refused():
    def own_proof(answer):
        return auth_frame(msgpack.unpackb(answer[8:])["payload"]["proof"])

    outcome = stranger(hello_frame(), own_proof, answers=1)
    assert isinstance(outcome, Refused) and outcome.code == "token"


def test_reflection_a_proof_from_a_second_connection_is_refused():
    """The stranger opens a second connection with the first one's words and uses its proof on the first."""
    proofs = []

    def first(answer):
        def second(answer):
            proofs.append(msgpack.unpackb(answer[8:])["payload"]["proof"])
            return auth_frame(None)

        nonce = msgpack.unpackb(answer[8:])["payload"]["nonce"]
        stranger(hello_frame(nonce=nonce), second, answers=1)
        return auth_frame(proofs[0])

    outcome = stranger(hello_frame(), first, answers=1)
    assert isinstance(outcome, Refused) and outcome.code == "token" and len(proofs) == 1


def test_reflection_to_a_node_its_own_frames_are_refused():
    with Handshake(relay=True) as handshake:
        handshake.to_node.sendall(read_frame(handshake.to_node))
        outcome, _ = handshake.node_thread.outcome(), handshake.to_coordinator.close()
        assert isinstance(outcome, BadFrame) and "HELLO is not for a node" in str(outcome)


def test_replay_of_a_whole_honest_session_is_refused():
    with Handshake(relay=True) as handshake:
        hello = read_frame(handshake.to_node)
        handshake.to_coordinator.sendall(hello)
        ack = read_frame(handshake.to_coordinator)
        handshake.to_node.sendall(ack)
        auth = read_frame(handshake.to_node)
        handshake.to_coordinator.sendall(auth)
        ping = read_frame(handshake.to_coordinator, mac=True)
        handshake.to_node.sendall(ping)
        assert not any(isinstance(outcome, Exception) for outcome in handshake.outcomes())
        handshake.node.send("PONG", {"busy_ms": 0})
        pong = read_frame(handshake.to_node, mac=True)
    outcome = stranger(hello, auth, answers=1)
    assert isinstance(outcome, Refused) and outcome.code == "token"
    assert isinstance(stranger(hello, pong, answers=1), BadFrame)
    with Handshake(relay=True) as handshake:  # and the coordinator's words, replayed to the node
        read_frame(handshake.to_node)
        handshake.to_node.sendall(ack + ping)
        outcome = handshake.node_thread.outcome()
        assert isinstance(outcome, Refused) and outcome.code == "token"


CHANGED_HELLO = [
    {"node_id": "box-1"},
    {"instance": 1},
    {"max_memory_bytes": 5},
    {"nonce": b"x" * 32},
    {"extra": "a later version's field"},
]


@pytest.mark.parametrize("fields", CHANGED_HELLO)
def test_a_changed_hello_is_refused_by_the_node(fields):
    with Handshake(relay=True, admit=refuse_nobody_knows) as handshake:
        handshake.to_coordinator.sendall(rewrite(read_frame(handshake.to_node), **fields))
        handshake.to_node.sendall(read_frame(handshake.to_coordinator))
        outcome = handshake.node_thread.outcome()
        assert isinstance(outcome, Refused) and outcome.code == "token"
        error = msgpack.unpackb(read_frame(handshake.to_node)[8:])
        assert error["type"] == "ERROR", "a node that was not convinced must not send its proof"


@pytest.mark.parametrize("fields", [{"heartbeat_s": 3.0}, {"node_id": "x"}, {"nonce": b"x" * 32}, {"proof": None}])
def test_a_changed_hello_ack_is_refused_by_the_node(fields):
    with Handshake(relay=True, admit=refuse_nobody_knows) as handshake:
        handshake.to_coordinator.sendall(read_frame(handshake.to_node))
        handshake.to_node.sendall(rewrite(read_frame(handshake.to_coordinator), **fields))
        outcome = handshake.node_thread.outcome()
        assert isinstance(outcome, Refused) and outcome.code == "token"


def test_version_downgrade_is_refused_in_both_directions():
    with Handshake(relay=True, admit=refuse_nobody_knows) as handshake:
        handshake.to_coordinator.sendall(rewrite(read_frame(handshake.to_node), protocol_version=0))
        outcome = handshake.coordinator_thread.outcome()
        assert isinstance(outcome, Refused) and outcome.code == "version"
    with Handshake(relay=True, admit=refuse_nobody_knows) as handshake:
        handshake.to_coordinator.sendall(read_frame(handshake.to_node))
        handshake.to_node.sendall(rewrite(read_frame(handshake.to_coordinator), protocol_version=0))
        outcome = handshake.node_thread.outcome()
        assert isinstance(outcome, Refused) and outcome.code == "version"


def test_a_node_with_a_token_is_not_talked_out_of_it():
    """A false coordinator without the token, and one that goes on as if there were none."""
    for proof in (None, b"\0" * 32):
        with Handshake(relay=True) as handshake:
            read_frame(handshake.to_node)
            ack = {**EXAMPLES["HELLO_ACK"][0], "proof": proof}
            ping = frame_bytes({"type": "PING", "seq": 2, "payload": {}}, b"")
            handshake.to_node.sendall(frame_bytes({"type": "HELLO_ACK", "seq": 1, "payload": ack}, b"") + ping)
            outcome = handshake.node_thread.outcome()
            assert isinstance(outcome, Refused) and outcome.code == "token"


def test_the_admission_itself_is_authentic():
    """The PING after AUTH is the coordinator's yes; one without its MAC is none."""
    with Handshake(relay=True) as handshake:
        handshake.to_coordinator.sendall(read_frame(handshake.to_node))
        handshake.to_node.sendall(read_frame(handshake.to_coordinator))
        read_frame(handshake.to_node)
        handshake.to_node.sendall(frame_bytes({"type": "PING", "seq": 2, "payload": {}}, b"") + b"\0" * 32)
        outcome = handshake.node_thread.outcome()
        assert isinstance(outcome, BadFrame) and "not authentic" in str(outcome)


def test_every_cut_of_the_handshake_ends_it():
    for cut in range(0, len(hello_frame()), 7):
        assert isinstance(stranger(hello_frame()[:cut]), BadFrame if cut else PeerClosed)
    auth = auth_frame(b"\0" * 32)
    for cut in range(len(auth)):
        assert isinstance(stranger(hello_frame(), auth[:cut], answers=1), BadFrame if cut else PeerClosed)


def test_a_stranger_has_five_seconds_for_all_its_frames(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def slow(sock, view):
        clock.now += 1.5
        return sock.recv_into(view)

    ours, theirs = socket.socketpair()
    conn = Connection(Wrapped(theirs, recv_into=slow), PEER, "coordinator")
    ours.sendall(hello_frame() + auth_frame(b"\0" * 32)[:40])
    with pytest.raises(PeerSilent, match="^node-7"):
        wire.coordinator_handshake(conn, KEY, 2.0, refuse_nobody_knows)
    assert clock.now - 100 <= wire.HANDSHAKE_S + 1.5
    ours.close(), conn.close()


@pytest.mark.parametrize("equal", [False, True])
def test_proofs_and_macs_are_compared_in_constant_time(monkeypatch, equal):
    """Every such decision is compare_digest's: when it says no nothing passes, when it says yes everything does."""
    calls = []
    monkeypatch.setattr(wire.hmac, "compare_digest", lambda a, b: (calls.append((bytes(a), bytes(b))), equal)[1])
    with Handshake(KEY, OTHER_KEY if equal else KEY) as handshake:
        outcomes = handshake.outcomes()
    assert [isinstance(outcome, Refused) for outcome in outcomes] == [not equal] * 2
    assert calls and all(len(a) == len(b) == 32 for a, b in calls)
    (frame,) = protected_stream(["PING"])
    with protected_node(frame[:-1] + bytes([frame[-1] ^ equal])) as pair:
        if equal:
            assert pair.conn.recv().type == "PING"
        else:
            pair.bad_frame("not authentic")


# ----------------------------------------------------------------------------
# Tensors
# ----------------------------------------------------------------------------


def packed(hidden_states: torch.Tensor, wire_dtype: str) -> torch.Tensor:
    """Through the wire format and back."""
    data = b"".join(wire.pack_hidden_states(hidden_states, wire_dtype))
    assert len(data) == wire.hidden_states_nbytes(*hidden_states.shape, wire_dtype)
    return wire.unpack_hidden_states(data, *hidden_states.shape, wire_dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.nan_to_num(nan=7e7), b.nan_to_num(nan=7e7))


@pytest.mark.parametrize("rows, hidden_size", [(1, 1), (1, 896), (2, 7), (3, 5), (17, 64), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ordinary_rows_are_rounded_as_torch_rounds_them(rows, hidden_size, dtype):
    torch.manual_seed(rows)
    x = (torch.randn(rows, hidden_size) * 2000).to(dtype)
    assert same(packed(x, "fp32"), x.float())
    assert same(packed(x, "bf16"), x.to(torch.bfloat16).float())
    assert same(packed(x, "fp16"), x.to(torch.float16).float())


def test_special_values_survive():
    specials = torch.tensor([[0.0, -0.0, 1.0], [float("nan"), 2.0, -3.0], [float("inf"), 4.0, -float("inf")]])
    tiny = torch.tensor([[1e-7, 6e-8, 1e-45], [65504.0, -65504.0, 6.1e-5]])
    for x in (specials, tiny):
        assert same(packed(x, "fp32"), x)
        assert same(packed(x, "bf16"), x.to(torch.bfloat16).float())
        assert same(packed(x, "fp16"), x.to(torch.float16).float())
    assert packed(specials, "fp16")[0].signbit().tolist() == [False, True, False]
    mixed = packed(torch.tensor([[float("nan"), 1e6, float("inf"), -float("inf"), 3.0]]), "fp16")[0]
    assert mixed[0].isnan() and mixed[1] == pytest.approx(1e6, rel=1e-3)
    assert mixed[2:4].tolist() == [float("inf"), -float("inf")]


@pytest.mark.parametrize("largest", [65504.0, 65505.0, 65519.0, 65520.0, 1e5, 131072.0, 1e8, 1e30, 3e38])
def test_huge_rows_keep_fp16_precision_and_do_not_touch_their_neighbours(largest):
    torch.manual_seed(1)
    x = torch.randn(3, 64)
    x[1] *= largest / x[1].abs().max()
    x[1, 5] = -largest
    back = packed(x, "fp16")
    assert same(back[::2], x[::2].to(torch.float16).float())
    assert back.isfinite().all()
    # Half a unit in the last place, and for the row's smallest values half a step of fp16's subnormals.
    bound = torch.maximum(x[1].abs() * 2**-11, torch.tensor(largest * 2**-38))
    assert ((back[1] - x[1]).abs() <= bound).all()
    assert same(packed(x, "fp32"), x)
    assert same(packed(x, "bf16"), x.to(torch.bfloat16).float())


def test_exponents_are_the_formula_of_the_docstring():
    x = torch.tensor([[3.0, -70000.0], [1.0, 2.0], [1e30, 0.0]])
    exponents, values = wire.pack_hidden_states(x, "fp16")
    exponents = torch.frombuffer(bytearray(exponents), dtype=torch.int8)
    values = torch.frombuffer(bytearray(values), dtype=torch.float16).view(3, 2)
    assert exponents[1] == 0 and exponents[0] > 0 and exponents[2] > 0
    assert same(packed(x, "fp16"), values.float() * 2.0 ** exponents.float()[:, None])


def test_unpacking_bytes_of_a_hostile_peer():
    rng = random.Random(8)
    for wire_dtype in ("fp32", "fp16", "bf16"):
        for _ in range(100):
            rows, hidden_size = rng.randint(1, 5), rng.randint(1, 9)
            data = rng.randbytes(wire.hidden_states_nbytes(rows, hidden_size, wire_dtype))
            assert wire.unpack_hidden_states(data, rows, hidden_size, wire_dtype).shape == (rows, hidden_size)
            with pytest.raises(ValueError):
                wire.unpack_hidden_states(data + b"x", rows, hidden_size, wire_dtype)


def test_views_are_packed_as_they_look():
    x = torch.randn(6, 8)
    for view in (x.t(), x[::2], x[:, 1:5], x[2:3]):
        for wire_dtype in ("fp32", "fp16", "bf16"):
            assert same(packed(view, wire_dtype), view.to(wire.DTYPES[wire_dtype]).float())


@pytest.mark.parametrize("dtype", wire.DTYPES.values())
def test_tensor_buffer_is_the_tensors_memory(dtype):
    tensor = torch.zeros(3, 4, dtype=dtype)
    buffer = wire.tensor_buffer(tensor)
    assert len(buffer) == tensor.nbytes and not buffer.readonly
    buffer[:] = wire.tensor_buffer(torch.ones(3, 4, dtype=dtype))
    assert torch.equal(tensor, torch.ones(3, 4, dtype=dtype))
    assert len(wire.tensor_buffer(torch.tensor(1.0, dtype=torch.float32))) == 4
    assert len(wire.tensor_buffer(torch.empty(0, 4, dtype=dtype))) == 0
    with pytest.raises(ValueError):
        wire.tensor_buffer(torch.zeros(3, 4, dtype=dtype).t())


# --- the socket's end ---


@pytest.mark.parametrize("call", ["recv_into", "sendmsg"])
def test_a_socket_that_is_in_use_is_not_given_back_before_that_ends(call):
    """Its number could belong to another connection by then, and what is sent would go there."""
    ours, theirs = socket.socketpair()
    begun, release = threading.Event(), threading.Event()

    def late(sock, *args):
        begun.set()
        release.wait(10)  # preempted between reading the number and using it
        return getattr(sock, call)(*args)

    conn = Connection(Wrapped(ours, **{call: late}), PEER, "coordinator")

    def use():
        with pytest.raises(PeerClosed):
            conn.recv() if call == "recv_into" else conn.send("ERROR", {"code": "any", "message": "any"})

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        used = pool.submit(use)
        assert begun.wait(10)
        conn.close()
        conn.close()
        assert ours.fileno() >= 0
        release.set()
        used.result(10)
    assert ours.fileno() == -1
    theirs.close()
