"""The wire between coordinator and nodes: frames, the message catalogue, packed tensors, authentication, Connection.

    link = wire.Connection(sock, peer="192.168.1.7:50312", role="coordinator")
    hello = wire.coordinator_handshake(link, key, heartbeat_s=2.0, admit=cluster.admit)
    link.send("PING", {})
    frame = link.recv(place)            # place(frame, nbytes) says where the frame's raw bytes belong

A frame:

    8 bytes      length of the map, unsigned, big-endian
    map          msgpack {type, request_id?, seq, epoch?, payload, raw_nbytes?}
    raw          raw_nbytes bytes, received straight into the memory they belong to
    32 bytes     HMAC-SHA256 over seq, map and raw, once the two sides have proven that they hold one token

A connection's life:

    node                        coordinator
    HELLO {nonce, ...}    ->                          anything else, more than 64 KiB or more than 5 s: closed
                          <-    HELLO_ACK {nonce, proof}
    AUTH {proof}          ->                          the coordinator proves first, then the node
                          <-    PING                  the node is admitted: both sides are open from here on
    ...then what MESSAGES calls OPEN. ERROR may come at any time and says why the sender closes.

Trust. Nothing that arrives is believed before it is checked: lengths before memory is taken, every field against
MESSAGES, seq (1, 2, 3, ... in each direction) against what must come next. What does not fit is a BadFrame that names
the peer; the link closes and nothing else is harmed. Only data travels: no pickle, no code, no names of functions. With
a token both sides prove that they know it, and every later frame is authenticated, but nothing is encrypted: whoever
can read the network can read the frames. A peer with the token is trusted to compute honestly, not to send sane frames.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import reprlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgpack
import torch

PROTOCOL_VERSION = 1
NO_PASS = 0  # request_id of an INFERENCE_ERROR about CLEAR_CACHE or COPY_CACHE; passes count from 1

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}

MAX_HANDSHAKE_MAP = 64 * 1024  # bytes of a map before the peer is accepted
MAX_MAP = 4 * 1024 * 1024  # and after
MAX_CHUNK = 1024 * 1024  # raw bytes of one WEIGHT_CHUNK
HANDSHAKE_S = 5.0  # a stranger's time, all its frames together, before it is accepted
SILENCE_LIMIT_S = 10.0  # a link with no byte received, or none taken by the peer, for this long is dead

MAX_BYTES = 1 << 50  # no size, offset or amount of memory is larger
MAX_NUMBER = (1 << 63) - 1  # request_id, seq, epoch
MAX_DIM = 1 << 24  # hidden size, context length, a tensor's dimension
MAX_ROWS = 16384  # rows of one pass
MAX_SLOTS = 1024
MAX_LAYERS = 1024
MAX_TENSORS = 65536  # entries of a manifest
MAX_CONTAINERS = 2 * MAX_TENSORS + 4096  # lists and maps in one frame; a manifest's entry has two
MAX_WORDS = 4096  # characters of an error message

# ----------------------------------------------------------------------------
# Checks: what a field must be. A check raises ValueError with what it wanted.
# Types are exact (a bool is not an integer), sizes are bounded.
# ----------------------------------------------------------------------------

Check = Callable[[object], None]


class OtherVersion(Exception):
    """A HELLO or HELLO_ACK of another protocol version; its other fields were not looked at."""

    def __init__(self, version: int):
        super().__init__(f"protocol version {version}")
        self.version = version


def _rule(wanted: str, holds: Callable[[object], bool]) -> Check:
    def check(value):
        if not holds(value):
            raise ValueError(f"{wanted} expected, not {reprlib.repr(value)}")

    return check


def integer(low: int, high: int) -> Check:
    return _rule(f"an integer from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def boolean(value: object) -> None:
    if type(value) is not bool:
        raise ValueError(f"true or false expected, not {reprlib.repr(value)}")


def number(low: float, high: float) -> Check:
    return _rule(f"a number from {low} to {high}", lambda v: type(v) in (int, float) and low <= v <= high)


def text(most: int) -> Check:
    return _rule(
        f"1 to {most} printable characters", lambda v: type(v) is str and 1 <= len(v) <= most and v.isprintable()
    )


def words(most: int) -> Check:
    return _rule(f"at most {most} characters", lambda v: type(v) is str and len(v) <= most)


def octets(count: int) -> Check:
    return _rule(f"{count} bytes", lambda v: type(v) is bytes and len(v) == count)


def hex_digits(count: int) -> Check:
    digits = frozenset("0123456789abcdef")
    return _rule(f"{count} hex digits", lambda v: type(v) is str and len(v) == count and digits.issuperset(v))


def one_of(*values: str) -> Check:
    return _rule("one of " + ", ".join(values), lambda v: type(v) is str and v in values)


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def integers(low: int, high: int, least: int, most: int) -> Check:
    """Like list_of(integer(low, high), least, most), without a call for every row of a pass."""
    return _rule(
        f"a list of {least} to {most} integers from {low} to {high}",
        lambda v: (
            type(v) is list
            and least <= len(v) <= most
            and (not v or (set(map(type, v)) == {int} and low <= min(v) and max(v) <= high))
        ),
    )


def list_of(check: Check, least: int, most: int) -> Check:
    is_list = _rule(f"a list of {least} to {most} items", lambda v: type(v) is list and least <= len(v) <= most)

    def check_list(value):
        is_list(value)
        for index, item in enumerate(value):
            _at(f"[{index}]", check, item)

    return check_list


def map_of(check: Check, most: int) -> Check:
    is_map = _rule(f"a map of at most {most} entries", lambda v: type(v) is dict and len(v) <= most)
    is_key = text(128)

    def check_map(value):
        is_map(value)
        for key, item in value.items():
            _at("key", is_key, key)
            _at(f".{key}", check, item)

    return check_map


def record(fields: dict[str, Check], extra_fields: bool = False) -> Check:
    """A map with exactly these fields, checked in this order; extra_fields: others may be there and are ignored."""

    def check_record(value):
        if type(value) is not dict:
            raise ValueError(f"a map expected, not {reprlib.repr(value)}")
        for name, check in fields.items():
            if name not in value:
                raise ValueError(f"field {name} is missing")
            _at(f".{name}", check, value[name])
        if len(value) > len(fields) and not extra_fields:
            raise ValueError(f"unknown field {reprlib.repr(min(value.keys() - fields.keys(), key=str))}")

    return check_record


def json_value(depth: int) -> Check:
    """A JSON scalar, or a list or map of such values at most `depth` deep."""
    scalar = _rule(
        "a JSON value",
        lambda v: (
            v is None
            or type(v) is bool
            or (type(v) is str and len(v) <= MAX_WORDS)
            or (type(v) in (int, float) and abs(v) <= MAX_NUMBER)
        ),
    )

    def check_value(value):
        if depth and type(value) is list:
            list_of(json_value(depth - 1), 0, MAX_LAYERS)(value)
        elif depth and type(value) is dict:
            map_of(json_value(depth - 1), 256)(value)
        else:
            scalar(value)

    return check_value


def this_version(value) -> None:
    integer(0, 1 << 31)(value)
    if value != PROTOCOL_VERSION:
        raise OtherVersion(value)


def _at(where: str, check: Check, value) -> None:
    try:
        check(value)
    except ValueError as error:
        reason = str(error)
        raise ValueError(where + ("" if reason.startswith((".", "[")) else ": ") + reason) from None


# ----------------------------------------------------------------------------
# The message catalogue: the whole protocol on one screen
# ----------------------------------------------------------------------------

NODE, COORDINATOR, BOTH = "node", "coordinator", "both"
OTHER_SIDE = {NODE: COORDINATOR, COORDINATOR: NODE}
HANDSHAKE, OPEN, ALWAYS = "handshake", "open", "always"


@dataclass(frozen=True)
class Message:
    """One row of MESSAGES. adds_up(payload, raw_nbytes) raises ValueError when fields contradict one another or raw."""

    sender: str  # NODE, COORDINATOR or BOTH
    phase: str  # HANDSHAKE, OPEN or ALWAYS
    needs: tuple[str, ...]  # request_id and epoch, where they must be there; elsewhere they may be
    fields: dict[str, Check]
    raw: bool = False  # raw bytes follow the map
    adds_up: Callable[[dict, int], None] | None = None
    extra_fields: bool = False
    authenticated_raw: bool = True  # False: the MAC leaves raw out, its digest is in an authenticated map


def _hello_adds_up(payload: dict, raw_nbytes: int) -> None:
    if payload["selected_device"] not in [device["id"] for device in payload["devices"]]:
        raise ValueError("selected_device is none of the devices")


def _assignment_adds_up(payload: dict, raw_nbytes: int) -> None:
    manifest = payload["manifest"]
    if payload["layer_start"] >= payload["layer_end_exclusive"]:
        raise ValueError("layer_end_exclusive must be above layer_start")
    if len({entry["tensor_name"] for entry in manifest}) != len(manifest):
        raise ValueError("a tensor is twice in the manifest")
    for entry in manifest:
        nbytes = DTYPES[entry["dtype"]].itemsize
        for size in entry["shape"]:
            nbytes *= size
        if entry["nbytes"] != nbytes:
            raise ValueError(f"{entry['tensor_name']} has {nbytes} bytes by its shape, not {entry['nbytes']}")
    if payload["tensor_count"] != len(manifest):
        raise ValueError(f"tensor_count is {payload['tensor_count']}, the manifest has {len(manifest)} entries")
    if payload["total_weight_bytes"] != sum(entry["nbytes"] for entry in manifest):
        raise ValueError("total_weight_bytes is not the sum of the manifest")


def _chunk_adds_up(payload: dict, raw_nbytes: int) -> None:
    index, count, offset = payload["chunk_index"], payload["chunk_count"], payload["offset"]
    if not 1 <= raw_nbytes <= MAX_CHUNK:
        raise ValueError(f"a chunk has 1 to {MAX_CHUNK} raw bytes, not {raw_nbytes}")
    if index >= count:
        raise ValueError(f"chunk_index {index} of {count} chunks")
    if not index <= offset <= index * MAX_CHUNK:
        raise ValueError(f"chunk {index} cannot start at offset {offset}")
    if (payload["sha256"] is not None) != (index == count - 1):
        raise ValueError("sha256 belongs to the last chunk and to no other")


def _wanted_adds_up(payload: dict, raw_nbytes: int) -> None:
    if len(set(payload["names"])) != len(payload["names"]):
        raise ValueError("a name is there twice")


def _prefill_adds_up(payload: dict, raw_nbytes: int) -> None:
    _run_adds_up(payload, raw_nbytes, [1, len(payload["slots"])])


def _decode_adds_up(payload: dict, raw_nbytes: int) -> None:
    _run_adds_up(payload, raw_nbytes, [len(payload["slots"]), 1])


def _run_adds_up(payload: dict, raw_nbytes: int, rows_shape: list[int]) -> None:
    rows = len(payload["slots"])
    if len(payload["positions"]) != rows:
        raise ValueError(f"{rows} slots but {len(payload['positions'])} positions")
    if payload["shape"][:2] != rows_shape:
        raise ValueError(f"shape {payload['shape']} does not hold {rows} rows as {rows_shape}")
    if payload["keep"] > rows:
        raise ValueError(f"keep is {payload['keep']} of {rows} rows")
    _raw_holds(rows, payload, raw_nbytes)


def _hidden_adds_up(payload: dict, raw_nbytes: int) -> None:
    batch, length, hidden_size = payload["shape"]
    if (batch != 1 and length != 1) or hidden_size == 0:
        raise ValueError(f"shape {payload['shape']} is neither [1, N, H] nor [R, 1, H]")
    _raw_holds(batch * length, payload, raw_nbytes)


def _raw_holds(rows: int, payload: dict, raw_nbytes: int) -> None:
    wanted = hidden_states_nbytes(rows, payload["shape"][2], payload["dtype"])
    if raw_nbytes != wanted:
        raise ValueError(f"{payload['dtype']} {payload['shape']} takes {wanted} raw bytes, not {raw_nbytes}")


_SLOT = integer(0, MAX_SLOTS - 1)
_NBYTES = integer(0, MAX_BYTES)
_TENSOR_NAME = text(256)
_WIRE_DTYPE = one_of("fp32", "fp16", "bf16")

_DEVICE = {
    "id": text(64),
    "type": one_of("cuda", "mps", "cpu"),
    "name": text(256),
    "total_memory": optional(_NBYTES),
    "free_memory": optional(_NBYTES),
}

_TENSOR = {
    "tensor_name": _TENSOR_NAME,
    "dtype": one_of(*DTYPES),
    "shape": integers(1, MAX_DIM, 1, 4),
    "nbytes": integer(1, MAX_BYTES),
    "key": hex_digits(64),
}

_HELLO = {
    "protocol_version": this_version,  # the first field: another version is told so, whatever its other fields are
    "node_id": text(128),
    "instance": integer(0, MAX_NUMBER),
    "hostname": text(256),
    "python_version": text(128),
    "torch_version": text(128),
    "platform": text(256),
    "devices": list_of(record(_DEVICE), 1, 64),
    "selected_device": text(64),
    "max_memory_bytes": optional(_NBYTES),
    "held_memory_bytes": _NBYTES,  # what of the device's free_memory its layers of an earlier plan still hold
    "nonce": octets(32),
}

_HELLO_ACK = {
    "protocol_version": this_version,
    "node_id": text(128),
    "heartbeat_s": number(0.001, 3600),
    "nonce": octets(32),
    "proof": optional(octets(32)),
}

_ASSIGNMENT = {
    "model_id": text(256),
    "architecture": text(128),
    "quant": one_of("fp16", "int8", "int4"),
    "group_size": integer(1, 4096),
    "compute_dtype": _WIRE_DTYPE,
    "wire_dtype": _WIRE_DTYPE,
    "layer_start": integer(0, MAX_LAYERS),
    "layer_end_exclusive": integer(1, MAX_LAYERS),
    "config": map_of(json_value(depth=3), 256),
    "slots": integer(1, MAX_SLOTS),
    "max_context": integer(1, MAX_DIM),
    "manifest": list_of(record(_TENSOR), 1, MAX_TENSORS),
    "tensor_count": integer(1, MAX_TENSORS),
    "total_weight_bytes": _NBYTES,
    "second_copy": boolean,  # there is room for one beside what the manifest needs
}

_CHUNK = {
    "tensor_name": _TENSOR_NAME,
    "chunk_index": integer(0, MAX_NUMBER),
    "chunk_count": integer(1, MAX_NUMBER),
    "offset": _NBYTES,
    "sha256": optional(octets(32)),
}

_LOADED = dict.fromkeys(("weight_bytes", "packed_bytes", "cached_bytes", "received_bytes"), _NBYTES)
_LOAD_FAILED = {"reason": words(MAX_WORDS), "need_bytes": optional(_NBYTES), "have_bytes": optional(_NBYTES)}
_CHOICE = {
    "shape": integers(1, MAX_DIM, 2, 2),  # of a linear: [outputs, inputs]
    "few": text(128),  # the kernel for up to `threshold` rows
    "many": text(128),
    "threshold": integer(0, MAX_NUMBER),
}
_CHOICES = list_of(record(_CHOICE), 1, 16)
_KERNELS = {
    "choices": _CHOICES,
    "with_copy": optional(_CHOICES),  # what a second copy of the weights would make quicker
    "threads": integer(1, 65536),
}
_MEASURE = {
    "config": map_of(json_value(depth=3), 256),
    "quant": one_of("fp16", "int8", "int4"),
    "group_size": integer(1, 4096),
    "compute_dtype": _WIRE_DTYPE,
    "kernels": optional(record(_KERNELS)),  # what a neighbour on the same machine has chosen
}
MEASURED_ROWS = (1, 4, 6, 8, 64, 256)  # torch's int4 kernel takes rows in fours, FBGEMM's for AVX2 in sixes
_MEASURED = {
    "layer_ms": record({str(rows): number(0, 1e9) for rows in MEASURED_ROWS}),
    "kernels": record(_KERNELS),
}

_RUN = {
    "slots": integers(0, MAX_SLOTS - 1, 1, MAX_ROWS),
    "positions": integers(0, MAX_DIM, 1, MAX_ROWS),
    "keep": integer(0, MAX_ROWS),
    "shape": integers(1, MAX_DIM, 3, 3),
    "dtype": _WIRE_DTYPE,
}

_HIDDEN = {"shape": integers(0, MAX_DIM, 3, 3), "dtype": _WIRE_DTYPE, "compute_ms": number(0, 1e12)}
_ERROR = {"code": text(64), "message": words(MAX_WORDS)}

_PLAN = ("epoch",)
_PASS = ("epoch", "request_id")

# fmt: off
MESSAGES = {
    #                           sender       phase      needs  payload
    "HELLO":            Message(NODE,        HANDSHAKE, (),    _HELLO, adds_up=_hello_adds_up, extra_fields=True),
    "HELLO_ACK":        Message(COORDINATOR, HANDSHAKE, (),    _HELLO_ACK),
    "AUTH":             Message(NODE,        HANDSHAKE, (),    {"proof": optional(octets(32))}),
    "ERROR":            Message(BOTH,        ALWAYS,    (),    _ERROR),
    "PING":             Message(BOTH,        OPEN,      (),    {}),
    "PONG":             Message(BOTH,        OPEN,      (),    {"busy_ms": number(0, 1e12)}),
    "ASSIGNMENT":       Message(COORDINATOR, OPEN,      _PLAN, _ASSIGNMENT, adds_up=_assignment_adds_up),
    "WEIGHTS_WANTED":   Message(NODE,        OPEN,      _PLAN, {"names": list_of(_TENSOR_NAME, 0, MAX_TENSORS)},
                                adds_up=_wanted_adds_up),
    "WEIGHT_CHUNK":     Message(COORDINATOR, OPEN,      _PLAN, _CHUNK, raw=True, adds_up=_chunk_adds_up,
                                authenticated_raw=False),
    "WEIGHTS_COMPLETE": Message(COORDINATOR, OPEN,      _PLAN, {"tensor_count": integer(0, MAX_TENSORS),
                                                                "total_weight_bytes": _NBYTES}),
    "LOAD_COMPLETE":    Message(NODE,        OPEN,      _PLAN, _LOADED),
    "LOAD_FAILED":      Message(NODE,        OPEN,      _PLAN, _LOAD_FAILED),
    "MEASURE":          Message(COORDINATOR, OPEN,      (),    _MEASURE),
    "MEASURED":         Message(NODE,        OPEN,      (),    _MEASURED),
    "RUN_PREFILL":      Message(COORDINATOR, OPEN,      _PASS, _RUN, raw=True, adds_up=_prefill_adds_up),
    "RUN_DECODE":       Message(COORDINATOR, OPEN,      _PASS, _RUN, raw=True, adds_up=_decode_adds_up),
    "HIDDEN_STATE":     Message(NODE,        OPEN,      _PASS, _HIDDEN, raw=True, adds_up=_hidden_adds_up),
    "CLEAR_CACHE":      Message(COORDINATOR, OPEN,      _PLAN, {"slots": integers(0, MAX_SLOTS - 1, 0, MAX_SLOTS)}),
    "COPY_CACHE":       Message(COORDINATOR, OPEN,      _PLAN, {"from_slot": _SLOT, "to_slot": _SLOT,
                                                                "length": integer(0, MAX_DIM)}),
    "INFERENCE_ERROR":  Message(NODE,        OPEN,      _PASS, _ERROR),
}
# fmt: on

_PAYLOAD_CHECKS = {name: record(message.fields, message.extra_fields) for name, message in MESSAGES.items()}

_ENVELOPE = {
    "type": _rule("a message type", lambda v: type(v) is str and v in MESSAGES),
    "seq": integer(1, MAX_NUMBER),
    "request_id": integer(0, MAX_NUMBER),
    "epoch": integer(0, MAX_NUMBER),
    "raw_nbytes": integer(1, MAX_BYTES),
}


def check_message(envelope: dict) -> Message:
    """Checks a whole map {type, seq, payload, request_id?, epoch?, raw_nbytes?} and returns its row of MESSAGES.

    Raises ValueError that names type and field, or OtherVersion. The payload comes first, so that a HELLO of
    another version is told so even where that version has another envelope.
    """
    _at("type", _ENVELOPE["type"], envelope.get("type"))
    name = envelope["type"]
    message = MESSAGES[name]
    _at(name, _PAYLOAD_CHECKS[name], envelope.get("payload"))
    for key in ("seq", *message.needs):
        if key not in envelope:
            raise ValueError(f"{name}: {key} is missing")
    for key, value in envelope.items():
        if key in _ENVELOPE:
            _at(f"{name}: {key}", _ENVELOPE[key], value)
        elif key != "payload" and not message.extra_fields:
            raise ValueError(f"{name}: unknown key {reprlib.repr(key)}")
    raw_nbytes = envelope.get("raw_nbytes", 0)
    if raw_nbytes and not message.raw:
        raise ValueError(f"{name}: no raw bytes belong to it")
    if message.adds_up is not None:
        _at(name, lambda payload: message.adds_up(payload, raw_nbytes), envelope["payload"])
    return message


# ----------------------------------------------------------------------------
# Maps: msgpack of hostile origin
# ----------------------------------------------------------------------------


def decode_map(data: bytes | bytearray) -> dict:
    """Unpacks one msgpack map with text keys; whatever else `data` is raises ValueError.

    The first walk builds nothing. After it every announced item is known to be there, so that what the second one
    allocates is bounded by len(data), not by the numbers in it.
    """
    build = _Builder()
    try:
        walk = msgpack.Unpacker(max_buffer_size=max(1, len(data)))
        walk.feed(data)
        walk.skip()
        if walk.tell() != len(data):
            raise ValueError("bytes follow the map")
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_ext_len=0,  # no time stamps either, which ext_hook would not see
            ext_hook=build.no_extension,
            list_hook=build.a_list,
            object_pairs_hook=build.a_map,
        )
    except msgpack.OutOfData:
        raise ValueError("the map ends too early") from None
    except msgpack.UnpackException as error:
        raise ValueError(f"not msgpack: {error!r}") from None
    if type(value) is not dict:
        raise ValueError(f"a map expected, not {type(value).__name__}")
    return value


class _Builder:
    """msgpack's hooks. They count, because an empty list takes one byte on the wire and 64 in memory."""

    def __init__(self):
        self.containers = 0

    def a_list(self, items: list) -> list:
        self._count()
        return items

    def a_map(self, pairs: list[tuple]) -> dict:
        self._count()
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key is there twice")
        if not all(type(key) is str for key in value):
            raise ValueError("a key is not text")
        return value

    def no_extension(self, code: int, data: bytes) -> None:
        raise ValueError(f"extension type {code}")

    def _count(self) -> None:
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} lists and maps")


# ----------------------------------------------------------------------------
# Tensors
# ----------------------------------------------------------------------------

_FP16_MAX = 65504.0
_POWERS = torch.tensor([2.0**e for e in range(-128, 128)])  # exact, unlike torch.pow; 2**e at e + 128


def tensor_buffer(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype: writable, sharing its memory. ValueError for others."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("a contiguous CPU tensor expected")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def largest_magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value; NaN if one of them is, 0.0 for an empty tensor."""
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


def hidden_states_nbytes(rows: int, hidden_size: int, wire_dtype: str) -> int:
    """Bytes of [rows, hidden_size] hidden states on the wire; fp16 has one exponent byte per row before the data."""
    exponents = rows if wire_dtype == "fp16" else 0
    return exponents + rows * hidden_size * DTYPES[wire_dtype].itemsize


def pack_hidden_states(hidden_states: torch.Tensor, wire_dtype: str) -> list[memoryview]:
    """[R, H] floats on the CPU -> buffers to send one after the other (of one dtype they may share its memory).

    fp16 sends R int8 exponents, then R x H fp16: value = fp16 * 2**exponent. The exponent is 0 where the row fits
    fp16, so that such a row is rounded as .to(float16) rounds it; NaN and infinity stay what they are.
    """
    if wire_dtype != "fp16":
        return [tensor_buffer(hidden_states.to(DTYPES[wire_dtype]).contiguous())]
    x = hidden_states.float()
    if largest_magnitude(x) <= _FP16_MAX:  # nearly always: no row needs an exponent
        return [memoryview(bytes(len(x))), tensor_buffer(x.to(torch.float16).contiguous())]
    largest = torch.where(x.isfinite(), x.abs(), 0.0).amax(dim=1)  # [R]
    exponents = torch.where(largest > _FP16_MAX, torch.frexp(largest).exponent - 15, 0)  # largest -> 2**14 .. 2**15
    scaled = x * _POWERS[128 - exponents.long(), None]
    return [tensor_buffer(exponents.to(torch.int8)), tensor_buffer(scaled.to(torch.float16).contiguous())]


def unpack_hidden_states(buffer, rows: int, hidden_size: int, wire_dtype: str) -> torch.Tensor:
    """Bytes as pack_hidden_states made them -> fp32 [rows, hidden_size], which may share the buffer's memory.

    Raises ValueError when the buffer has another size.
    """
    view = memoryview(buffer).cast("B")
    if len(view) != hidden_states_nbytes(rows, hidden_size, wire_dtype):
        raise ValueError(f"{len(view)} bytes are not {wire_dtype} [{rows}, {hidden_size}]")
    if rows == 0:
        return torch.empty(0, hidden_size)
    if wire_dtype != "fp16":
        data = bytearray(view) if view.readonly else view
        return torch.frombuffer(data, dtype=DTYPES[wire_dtype]).view(rows, hidden_size).float()
    # a copy: behind an odd number of exponents the values are not aligned
    values = torch.frombuffer(bytearray(view[rows:]), dtype=torch.float16).view(rows, hidden_size).float()
    exponents = bytearray(view[:rows])
    if not any(exponents):
        return values
    return values * _POWERS[128 + torch.frombuffer(exponents, dtype=torch.int8).long(), None]


# ----------------------------------------------------------------------------
# Connection
# ----------------------------------------------------------------------------

_LENGTH_NBYTES = 8
_MAC_NBYTES = 32
_READ_AHEAD_NBYTES = 16 * 1024  # a token's hidden state fits, with its map
_SCRATCH_NBYTES = 64 * 1024  # dropped raw bytes pass through this much memory; small frames are joined up to it
_MAX_BUFFERS = 512  # buffers of one sendmsg; IOV_MAX is 1024 on Linux and macOS


class BadFrame(Exception):
    """The peer sent what it must not; the message starts with the peer's name. The connection is of no more use."""


class VersionMismatch(BadFrame):
    """The peer speaks another protocol version; reason says both and which side to update."""

    def __init__(self, peer: str, reason: str):
        super().__init__(f"{peer}: {reason}")
        self.reason = reason


class OtherProtocol(BadFrame):
    """The peer speaks something else, which the message names: HTTP, TLS or SSH."""


class PeerClosed(Exception):
    """The connection ended between two frames, or broke; the message starts with the peer's name and says how."""


class PeerSilent(Exception):
    """The peer sent nothing, or took nothing, for too long; the message starts with its name and has the seconds."""


@dataclass
class Frame:
    """One received frame. Its payload has passed the checks of MESSAGES; raw is None when absent or dropped."""

    type: str
    payload: dict
    request_id: int | None
    seq: int
    epoch: int | None
    raw: memoryview | None = None


Place = Callable[[Frame, int], "memoryview | None"]

# Read as a length, each of these is far above every limit.
_HTTP = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"PATCH ", b"DELETE ", b"OPTIONS ", b"CONNECT ", b"PRI * ", b"HTTP/")
_FIRST_BYTES = {"HTTP": _HTTP, "TLS": (b"\x16\x03",), "SSH": (b"SSH-",)}


class Connection:
    """One side of a connected stream socket, which it owns from now on.

    peer names the other side in every error and may be replaced once a better name is known; role is my own,
    "coordinator" or "node". One thread may receive while others send; close() may come from any thread and wakes them.
    """

    def __init__(self, sock: socket.socket, peer: str, role: str):
        self.peer = peer
        self.role = role
        self.last_received = time.monotonic()
        self.bytes_received = self.bytes_sent = 0
        self._sock = sock
        self._accepted = False
        self._closed = False
        self._calls_lock = threading.Lock()
        self._calls = 0  # system calls that use the socket now
        self._why_closed = "the connection is closed"
        self._send_lock = threading.Lock()
        self._send_key = self._receive_key = None
        self._deadline = None  # of the frame being received: (monotonic end, seconds)
        self._read_ahead = memoryview(bytearray(_READ_AHEAD_NBYTES))
        self._unread = self._read_ahead[:0]  # received, and not yet asked for
        self._sent_seq = self._received_seq = 0
        self._send_broken = self._receive_broken = False  # a frame was begun and not ended
        self.silence_limit_s = SILENCE_LIMIT_S
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # macOS refuses when the peer has gone already; recv will say so
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def silence_limit_s(self) -> float:
        """Seconds without one byte received (or, while sending, taken by the peer) that end the connection."""
        return self._silence_limit_s

    @silence_limit_s.setter
    def silence_limit_s(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError("silence_limit_s must be positive")
        self._silence_limit_s = seconds
        self._set_timeout(seconds)

    def _set_timeout(self, seconds: float) -> None:
        with contextlib.suppress(OSError), self._socket() as sock:  # closed: whoever uses it next says so
            sock.settimeout(seconds)

    def accepted(self) -> None:
        """The peer is accepted: frames of the open phase may come, with maps up to MAX_MAP."""
        self._accepted = True

    def protect(self, send_key: bytes, receive_key: bytes) -> None:
        """From now on every frame in both directions ends in a MAC."""
        self._send_key, self._receive_key = send_key, receive_key

    def bad_frame(self, reason: object) -> BadFrame:
        """A BadFrame that names the peer, for place() and for checks that only the user of a frame can make."""
        return BadFrame(f"{self.peer}: {reason}")

    def _peer_closed(self, error: OSError | None = None) -> PeerClosed:
        return PeerClosed(f"{self.peer}: {self._why_closed if self._closed or error is None else error}")

    def close(self, why: str | None = None) -> None:
        """Ends the connection and wakes threads that wait in it, with `why` in their PeerClosed. May be called again,
        from any thread."""
        with self._calls_lock:
            if self._closed:
                return
            self._closed = True
            self._why_closed = why or self._why_closed
            with contextlib.suppress(OSError):  # the peer may have ended it already
                self._sock.shutdown(socket.SHUT_RDWR)
            if self._calls == 0:
                self._sock.close()

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        """The socket for one system call; raises OSError when it is closed.

        The last call under way at a close() gives the descriptor back: it may become another connection's at once, and
        a thread that was just about to send would send there.
        """
        with self._calls_lock:
            if self._closed:
                raise OSError(errno.EBADF, self._why_closed)
            self._calls += 1
        try:
            yield self._sock
        finally:
            with self._calls_lock:
                self._calls -= 1
                if self._closed and self._calls == 0:
                    self._sock.close()

    # Sending

    def send(self, type: str, payload: dict, *, raw=None, request_id: int | None = None, epoch: int | None = None):
        """Sends one frame; thread safe. raw: a buffer or a list of buffers, unchanged until this returns.

        Raises ValueError, with nothing sent, for what the peer would refuse; PeerSilent when the peer takes no byte
        for silence_limit_s (a slow link that moves at all is none); PeerClosed when the connection is broken.
        """
        self._send(type, payload, raw, request_id, epoch)

    def _send(self, type: str, payload: dict, raw=None, request_id=None, epoch=None) -> bytes:
        """send, returning the map as it was sent."""
        buffers = _byte_views(raw)
        envelope = {"type": type, "request_id": request_id, "seq": 1, "epoch": epoch, "payload": payload}
        envelope["raw_nbytes"] = sum(map(len, buffers)) or None
        envelope = {key: value for key, value in envelope.items() if value is not None}
        message = check_message(envelope)
        if message.sender == OTHER_SIDE[self.role]:
            raise ValueError(f"{type} is not sent by a {self.role}")
        with self._send_lock:
            if self._closed or self._send_broken:
                raise self._peer_closed()
            envelope["seq"] = self._sent_seq + 1
            data = msgpack.packb(envelope)
            if len(data) > self._map_limit():
                raise ValueError(f"{type}: a map of {len(data)} bytes is over the limit of {self._map_limit()}")
            frame = [len(data).to_bytes(_LENGTH_NBYTES, "big") + data, *buffers]
            if self._send_key is not None:
                frame.append(_mac(self._send_key, envelope["seq"], data, buffers if message.authenticated_raw else []))
            self._sent_seq += 1
            self._send_broken = True
            self._write(frame)
            self._send_broken = False
        return data

    def _write(self, buffers: list) -> None:
        views = [memoryview(buffer) for buffer in buffers]
        while views:
            try:
                sent = self._send_some(views)
            except TimeoutError:
                raise PeerSilent(f"{self.peer}: took no byte for {self._silence_limit_s:g} s") from None
            except OSError as error:
                raise self._peer_closed(error) from None
            self.bytes_sent += sent
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]

    def _send_some(self, views: list[memoryview]) -> int:
        """Sends as much as the socket takes now; waits, at most silence_limit_s, until it takes something."""
        with self._socket() as sock:
            if hasattr(sock, "sendmsg"):
                return sock.sendmsg(views[:_MAX_BUFFERS])
            return sock.send(self._first_of(views))

    @staticmethod
    def _first_of(views: list[memoryview]) -> memoryview | bytearray:
        """What to send first where there is no gathered send (Windows): small buffers are joined, so that a small frame
        is still one packet."""
        if len(views[0]) >= _SCRATCH_NBYTES:
            return views[0]
        joined = bytearray()
        for view in views:
            joined += view[: _SCRATCH_NBYTES - len(joined)]
            if len(joined) == _SCRATCH_NBYTES:
                break
        return joined

    # Receiving

    def recv(self, place: Place | None = None, deadline: float | None = None) -> Frame:
        """Receives and checks one frame.

        place(frame, nbytes) is called for a frame with raw bytes, when its map has passed the checks and before
        memory is taken. It returns a writable memoryview of nbytes, or None: the bytes are read and dropped. It may
        raise BadFrame. With a MAC, what place wrote to is valid only when recv returns: place must do no more than
        find memory. Without place, raw bytes are a BadFrame. deadline: seconds for the whole frame, however its bytes
        drip (not while another thread sends: the socket has one time-out).

        Raises BadFrame, PeerClosed or PeerSilent; the stream cannot be used after any of them.
        """
        return self._recv(place, deadline)[0]

    def _recv(self, place: Place | None, deadline: float | None) -> tuple[Frame, bytearray]:
        """recv, returning also the map as it was received."""
        if self._receive_broken:
            raise PeerClosed(f"{self.peer}: the stream was left inside a frame")
        self._receive_broken = True
        self._deadline = None if deadline is None else (time.monotonic() + deadline, deadline)
        data = self._receive_map()
        frame, raw_nbytes = self._checked(data)
        self._receive_rest(frame, raw_nbytes, data, place)
        self._received_seq = frame.seq
        self._receive_broken = False
        if deadline is not None:
            self._set_timeout(self._silence_limit_s)
        return frame, data

    def _map_limit(self) -> int:
        return MAX_MAP if self._accepted else MAX_HANDSHAKE_MAP

    def _receive_map(self) -> bytearray:
        length = bytearray(_LENGTH_NBYTES)
        self._receive_into(memoryview(length), between_frames=True)
        nbytes = int.from_bytes(length, "big")
        if not 1 <= nbytes <= self._map_limit():
            for protocol, beginnings in _FIRST_BYTES.items():
                if length.startswith(beginnings):
                    raise OtherProtocol(f"{self.peer}: this looks like {protocol}")
            raise self.bad_frame(f"a map of {nbytes} bytes; the limit is {self._map_limit()}")
        data = bytearray(nbytes)
        self._receive_into(memoryview(data))
        return data

    def _checked(self, data: bytearray) -> tuple[Frame, int]:
        """The map as a Frame without its raw bytes, and their number."""
        try:
            envelope = decode_map(data)
            message = check_message(envelope)
        except OtherVersion as other:
            raise VersionMismatch(self.peer, self._version_message(other.version)) from None
        except ValueError as error:
            raise self.bad_frame(error) from None
        payload = {name: envelope["payload"][name] for name in message.fields}  # without HELLO's extra fields
        frame = Frame(envelope["type"], payload, envelope.get("request_id"), envelope["seq"], envelope.get("epoch"))
        if message.sender == self.role:
            raise self.bad_frame(f"{frame.type} is not for a {self.role}")
        if message.phase == (HANDSHAKE if self._accepted else OPEN):
            raise self.bad_frame(f"{frame.type} {'after' if self._accepted else 'before'} the handshake's end")
        if frame.seq != self._received_seq + 1:
            raise self.bad_frame(f"{frame.type} with seq {frame.seq} after seq {self._received_seq}")
        return frame, envelope.get("raw_nbytes", 0)

    def _version_message(self, theirs: int) -> str:
        versions = {self.role: PROTOCOL_VERSION, OTHER_SIDE[self.role]: theirs}
        older = min(versions, key=versions.get)
        return (
            f"the node speaks protocol version {versions[NODE]}, the coordinator {versions[COORDINATOR]}: "
            f"update the {older}'s files"
        )

    def _receive_rest(self, frame: Frame, raw_nbytes: int, data: bytearray, place: Place | None) -> None:
        """Receives raw bytes and MAC; the frame gets its raw bytes when the MAC is right."""
        mac = None
        if self._receive_key is not None:
            mac = _new_mac(self._receive_key, frame.seq, data)
        raw_mac = mac if MESSAGES[frame.type].authenticated_raw else None
        raw = self._receive_raw(frame, raw_nbytes, place, raw_mac) if raw_nbytes else None
        if mac is not None:
            received = bytearray(_MAC_NBYTES)
            self._receive_into(memoryview(received))
            if not hmac.compare_digest(received, mac.digest()):
                raise self.bad_frame(f"{frame.type} is not authentic: it was changed, or the keys differ")
        frame.raw = raw

    def _receive_raw(self, frame: Frame, nbytes: int, place: Place | None, mac) -> memoryview | None:
        if place is None:
            raise self.bad_frame(f"{frame.type} with {nbytes} raw bytes, which nobody waits for")
        raw = place(frame, nbytes)
        if raw is not None:
            raw = raw.cast("B")
            if len(raw) != nbytes:
                raise ValueError(f"place gave {len(raw)} bytes of memory for {nbytes}")
            self._receive_into(raw)
            if mac is not None:
                mac.update(raw)
            return raw
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_NBYTES)))
        while nbytes:
            piece = scratch[: min(nbytes, len(scratch))]
            self._receive_into(piece)
            if mac is not None:
                mac.update(piece)
            nbytes -= len(piece)
        return None

    def _receive_into(self, view: memoryview, between_frames: bool = False) -> None:
        """Fills view. Less than _READ_AHEAD_NBYTES is read together with what follows: one call for a small frame."""
        while view:
            if not self._unread and len(view) >= _READ_AHEAD_NBYTES:
                count = self._receive_some(view, between_frames)
            else:
                if not self._unread:
                    self._unread = self._read_ahead[: self._receive_some(self._read_ahead, between_frames)]
                count = min(len(view), len(self._unread))
                view[:count] = self._unread[:count]
                self._unread = self._unread[count:]
            view = view[count:]
            between_frames = False

    def _receive_some(self, view: memoryview, between_frames: bool) -> int:
        """The end of the stream is a PeerClosed before the first byte of a frame, else a BadFrame."""
        try:
            if self._deadline is not None:
                self._set_timeout(min(self._time_left(), self._silence_limit_s))
            with self._socket() as sock:
                count = sock.recv_into(view)
        except TimeoutError:
            if self._deadline is not None:
                self._time_left()  # the deadline has the better message
            raise PeerSilent(f"{self.peer}: sent nothing for {self._silence_limit_s:g} s") from None
        except OSError as error:
            raise self._peer_closed(error) from None
        if count == 0:
            at_an_end = between_frames or self._closed
            raise self._peer_closed() if at_an_end else self.bad_frame("the stream ended inside a frame")
        self.last_received = time.monotonic()
        self.bytes_received += count
        return count

    def _time_left(self) -> float:
        end, seconds = self._deadline
        left = end - time.monotonic()
        if left <= 0:
            raise PeerSilent(f"{self.peer}: did not send a whole frame in {seconds:g} s")
        return left


def _byte_views(raw) -> list[memoryview]:
    if raw is None:
        return []
    views = [memoryview(buffer).cast("B") for buffer in (raw if isinstance(raw, (list, tuple)) else [raw])]
    return [view for view in views if len(view)]


def _new_mac(key: bytes, seq: int, data: bytes | bytearray) -> hmac.HMAC:
    mac = hmac.new(key, seq.to_bytes(8, "big"), hashlib.sha256)
    mac.update(data)  # self-delimiting: msgpack that must end where the map ends
    return mac


def _mac(key: bytes, seq: int, data: bytes, buffers: list[memoryview]) -> bytes:
    mac = _new_mac(key, seq, data)
    for buffer in buffers:
        mac.update(buffer)
    return mac.digest()


# ----------------------------------------------------------------------------
# Writer
# ----------------------------------------------------------------------------

_MAX_WAITING_BYTES = 8 * 1024 * 1024  # raw bytes that may wait before put(wait=True) blocks
_MAX_WAITING_FRAMES = 8192  # frames that may wait before the connection ends; put(wait=True) blocks at half of it


class Writer(threading.Thread):
    """Sends one connection's frames from a queue, in order, urgent ones (PING, PONG, ERROR) first.

    After heartbeat_s without anything to send it sends a PING. When sending fails it closes the connection, which ends
    the connection's reader; what is put after that is dropped, since the reader reports the loss.
    """

    def __init__(self, connection: Connection, heartbeat_s: float):
        super().__init__(name=f"writer {connection.peer}", daemon=True)
        self._connection = connection
        self._heartbeat_s = heartbeat_s
        self._changed = threading.Condition()
        self._urgent: deque = deque()
        self._frames: deque = deque()
        self._waiting_bytes = 0
        self._closed = False

    def put(self, type: str, payload: dict, *, raw=None, request_id=None, epoch=None, urgent=False, wait=False) -> None:
        """Queues a frame; raw must stay unchanged until it is sent.

        wait: block while too much waits already (for weights); raises PeerClosed when the connection ends meanwhile.
        Without it this never blocks, so that a reader can hand frames to another link; but a peer that asks and asks
        and does not take the answers loses its connection.
        """
        buffers = _byte_views(raw)
        nbytes = sum(map(len, buffers))
        with self._changed:
            queue = self._urgent if urgent else self._frames
            if wait:
                self._changed.wait_for(lambda: self._closed or self._has_room(queue))
                if self._closed:
                    raise PeerClosed(f"{self._connection.peer}: the connection is closed")
            if self._closed:
                return
            if len(queue) >= _MAX_WAITING_FRAMES:
                self._connection.close(f"{len(queue)} frames wait, and it does not take them")
                return
            queue.append((type, payload, buffers, request_id, epoch, nbytes))
            self._waiting_bytes += nbytes
            self._changed.notify_all()

    def _has_room(self, queue: deque) -> bool:
        return self._waiting_bytes < _MAX_WAITING_BYTES and len(queue) < _MAX_WAITING_FRAMES // 2

    def close(self) -> None:
        """Ends the thread; frames that wait are dropped."""
        with self._changed:
            self._closed = True
            self._urgent.clear()
            self._frames.clear()
            self._changed.notify_all()

    def run(self) -> None:
        try:
            while True:
                frame = self._next()
                if frame is None:
                    return
                type, payload, buffers, request_id, epoch, nbytes = frame
                self._connection.send(type, payload, raw=buffers, request_id=request_id, epoch=epoch)
                with self._changed:
                    self._waiting_bytes -= nbytes
                    self._changed.notify_all()
        except (PeerClosed, PeerSilent):
            pass  # the reader of the same connection sees it too, and says so
        finally:
            self.close()
            self._connection.close()

    def _next(self):
        """The next frame to send; a PING when there was none for heartbeat_s; None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._urgent or self._frames, self._heartbeat_s)
            if self._closed:
                return None
            queue = self._urgent or self._frames
            return queue.popleft() if queue else ("PING", {}, [], None, None, 0)


# ----------------------------------------------------------------------------
# Handshake
# ----------------------------------------------------------------------------


class Refused(Exception):
    """One side does not want the other. code: "version", "token", "duplicate_node_id" or "not_admitted"."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


def token_key(token: str) -> bytes:
    """The key K that both sides derive from the cluster's token; slow on purpose, so call it once."""
    if not token:
        raise ValueError("the token is empty")
    return hashlib.scrypt(token.encode(), salt=b"TrueCluster wire", n=1 << 14, r=8, p=1, dklen=32)


def node_handshake(conn: Connection, hello: dict, key: bytes | None) -> dict:
    """Introduces this node: hello is HELLO's payload without protocol_version and nonce. Returns HELLO_ACK's payload.

    Raises Refused when the coordinator refuses this node, or does not prove that it holds the token (then it was told
    nothing but HELLO). Raises BadFrame, PeerClosed and PeerSilent like recv.
    """
    hello = {"protocol_version": PROTOCOL_VERSION, **hello, "nonce": os.urandom(32)}
    hello_map = conn._send("HELLO", hello)
    ack = _expect(conn, "HELLO_ACK", SILENCE_LIMIT_S)[0].payload
    transcript = _transcript(hello_map, ack)
    _check_proof(conn, key, COORDINATOR, transcript, ack["proof"])
    conn.send("AUTH", {"proof": _proof(key, NODE, transcript)})
    _open(conn, key, transcript)
    _expect(conn, "PING", SILENCE_LIMIT_S)
    return ack


def coordinator_handshake(
    conn: Connection, key: bytes | None, heartbeat_s: float, admit: Callable[[dict], None]
) -> dict:
    """Accepts a node within HANDSHAKE_S, or not. Returns HELLO's payload.

    admit(hello) is asked once the node has proven itself; it may raise Refused, and must send nothing on conn: the
    node waits for the PING that follows. A refusal is sent as an ERROR, conn is closed, Refused is raised here too.
    Raises BadFrame, PeerClosed and PeerSilent like recv; the caller closes conn then.
    """
    started = time.monotonic()
    hello, hello_map = _expect(conn, "HELLO", HANDSHAKE_S)
    ack = {
        "protocol_version": PROTOCOL_VERSION,
        "node_id": hello.payload["node_id"],
        "heartbeat_s": heartbeat_s,
        "nonce": os.urandom(32),
        "proof": None,
    }
    transcript = _transcript(hello_map, ack)
    conn.send("HELLO_ACK", {**ack, "proof": _proof(key, COORDINATOR, transcript)})
    auth, _ = _expect(conn, "AUTH", started + HANDSHAKE_S - time.monotonic())
    _check_proof(conn, key, NODE, transcript, auth.payload["proof"])
    _open(conn, key, transcript)
    try:
        admit(hello.payload)
    except Refused as refused:
        raise _refuse(conn, refused.code, refused.message) from None
    conn.send("PING", {})
    return hello.payload


def _expect(conn: Connection, wanted: str, deadline: float) -> tuple[Frame, bytearray]:
    """The next frame, which must be of the wanted type, and its map as it was sent."""
    try:
        frame, data = conn._recv(None, deadline)
    except VersionMismatch as mismatch:
        raise _refuse(conn, "version", mismatch.reason) from None
    if frame.type == "ERROR":
        raise Refused(frame.payload["code"], frame.payload["message"])
    if frame.type != wanted:
        raise conn.bad_frame(f"{frame.type} where {wanted} must come")
    return frame, data


def _open(conn: Connection, key: bytes | None, transcript: bytes) -> None:
    """Starts the open phase; with a token every later frame carries a MAC under its direction's own key."""
    if key is not None:
        from_role = {role: _hmac(key, f"frames from {role}", transcript) for role in (NODE, COORDINATOR)}
        conn.protect(from_role[conn.role], from_role[OTHER_SIDE[conn.role]])
    conn.accepted()


def _check_proof(conn: Connection, key: bytes | None, prover: str, transcript: bytes, proof: bytes | None) -> None:
    if key is None and proof is None:
        return
    if key is None:
        raise _refuse(
            conn, "token", f"the {prover} has a token, the {conn.role} has none: start it with the same --token-file"
        )
    if proof is None:
        raise _refuse(
            conn, "token", f"the {conn.role} has a token, the {prover} has none: start it with the same --token-file"
        )
    if not hmac.compare_digest(proof, _proof(key, prover, transcript)):
        raise _refuse(
            conn, "token", "node and coordinator have different tokens: start both with the same --token-file"
        )


def _refuse(conn: Connection, code: str, message: str) -> Refused:
    """Tells the peer why, if it still listens, and closes."""
    with contextlib.suppress(PeerClosed, PeerSilent):
        conn.send("ERROR", {"code": code, "message": message})
    conn.close()
    return Refused(code, message)


def _transcript(hello_map: bytes | bytearray, ack: dict) -> bytes:
    """T: what both sides have said, so that a proof is good for this one connection and these exact words."""
    ack_map = msgpack.packb({"type": "HELLO_ACK", "seq": 1, "payload": {**ack, "proof": None}})
    return hashlib.sha256(len(hello_map).to_bytes(8, "big") + hello_map + ack_map).digest()


def _proof(key: bytes | None, prover: str, transcript: bytes) -> bytes | None:
    return None if key is None else _hmac(key, f"proof of {prover}", transcript)


def _hmac(key: bytes, label: str, transcript: bytes) -> bytes:
    return hmac.new(key, label.encode() + transcript, hashlib.sha256).digest()
