"""node.py: one session against a scripted coordinator in this process, and the program as a process of its own."""

import concurrent.futures
import errno
import hashlib
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from cluster import ROOT, Program, WarmProgram, environment

import node
import qwen
import wire

CONFIG = qwen.Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
    tie_word_embeddings=True, layer_types=("full_attention",) * 3,
)  # fmt: skip
FP32 = qwen.WeightFormat("fp16", 64, "fp32")
PEER = "coordinator under test"


def key(name: str, seed: int) -> str:
    """The key of one tensor of random_weights(..., seed)."""
    return hashlib.sha256(f"{name} {seed}".encode()).hexdigest()


def assignment(start: int, end: int, seed: int = 0, **changes) -> dict:
    """A valid ASSIGNMENT for layers [start, end) of CONFIG in fp32, with the weights random_weights(..., seed)."""
    tensors = qwen.stored_tensors(CONFIG, start, end, FP32)
    manifest = [
        {"tensor_name": t.name, "dtype": t.dtype, "shape": list(t.shape), "nbytes": t.nbytes, "key": key(t.name, seed)}
        for t in tensors
    ]
    payload = {
        "model_id": "tiny", "architecture": "Qwen2ForCausalLM", "quant": "fp16", "group_size": 64,
        "compute_dtype": "fp32", "wire_dtype": "fp32", "layer_start": start, "layer_end_exclusive": end,
        "config": CONFIG.to_wire(), "slots": 2, "max_context": 16, "manifest": manifest,
        "tensor_count": len(manifest), "total_weight_bytes": sum(t.nbytes for t in tensors), "second_copy": False,
        **changes,
    }  # fmt: skip
    return payload


def random_weights(start: int, end: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """{name: values} of layers [start, end); a tensor's values depend on its name and the seed alone."""
    weights = {}
    for t in qwen.stored_tensors(CONFIG, start, end, FP32):
        generator = torch.Generator().manual_seed(int(key(t.name, seed)[:8], 16))
        weights[t.name] = torch.randn(t.shape, generator=generator) * 0.3
    return weights


def reference_stage(start: int, end: int, weights: dict[str, torch.Tensor]) -> qwen.Stage:
    stage = qwen.Stage(CONFIG, start, end, FP32, 2, 16, "cpu")
    for layer in stage.layers.values():
        for name, place in layer.destinations.items():
            place.copy_(weights[name])
        layer.prepare(
            node.quant.choose_kernels(list(qwen.merged_linear_shapes(CONFIG).values()), "fp16", 64, "fp32", "cpu")
        )
    return stage


class ScriptedCoordinator:
    """The coordinator's end of a connection whose other end is a node.Session."""

    def __init__(self, max_memory_bytes=None, cache_writer=None, worker=None):
        ours, theirs = socket.socketpair()
        self.link = wire.Connection(ours, "node under test", "coordinator")
        node_side = wire.Connection(theirs, PEER, "node")
        self.link.accepted()
        node_side.accepted()
        self.worker = worker or node.Worker(torch.device("cpu"))
        if worker is None:
            self.worker.start()
        self.session = node.Session(node_side, self.worker, 60.0, max_memory_bytes, cache_writer)
        self.ended: queue.Queue = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        try:
            self.session.serve()
        except (wire.BadFrame, wire.PeerClosed, wire.PeerSilent) as error:
            self.ended.put(error)

    def bad_frame(self) -> str:
        """The BadFrame that ended the session."""
        error = self.ended.get(timeout=30)
        assert isinstance(error, wire.BadFrame), error
        assert str(error).startswith(PEER)
        return str(error)

    def receive(self, type: str) -> wire.Frame:
        frame = self.link.recv(lambda frame, nbytes: memoryview(bytearray(nbytes)))
        assert frame.type == type, frame
        return frame

    def assign(self, epoch: int = 1, start: int = 0, end: int = 2, **changes) -> list[str]:
        self.link.send("ASSIGNMENT", assignment(start, end, **changes), epoch=epoch)
        return self.receive("WEIGHTS_WANTED").payload["names"]

    def send_tensor(self, name: str, data: memoryview, epoch: int = 1, **changes) -> None:
        payload = {
            "tensor_name": name, "chunk_index": 0, "chunk_count": 1, "offset": 0,
            "sha256": hashlib.sha256(data).digest(), **changes,
        }  # fmt: skip
        self.link.send("WEIGHT_CHUNK", payload, raw=data, epoch=epoch)

    def load(self, epoch: int = 1, start: int = 0, end: int = 2, seed: int = 0) -> wire.Frame:
        weights = random_weights(start, end, seed)
        self.send_all(self.assign(epoch, start, end, seed=seed), weights, epoch)
        return self.receive("LOAD_COMPLETE")

    def send_all(self, names: list[str], weights: dict[str, torch.Tensor], epoch: int = 1) -> None:
        """What the coordinator does when a node wants `names`."""
        for name in names:
            self.send_tensor(name, wire.tensor_buffer(weights[name]), epoch)
        total = sum(weights[name].nbytes for name in names)
        self.link.send("WEIGHTS_COMPLETE", {"tensor_count": len(names), "total_weight_bytes": total}, epoch=epoch)

    def run(self, hidden_states, slots, positions, keep, epoch=1, request_id=7, kind="RUN_PREFILL", **changes) -> None:
        rows, size = hidden_states.shape
        shape = [1, rows, size] if kind == "RUN_PREFILL" else [rows, 1, size]
        payload = {"slots": slots, "positions": positions, "keep": keep, "shape": shape, "dtype": "fp32", **changes}
        raw = wire.pack_hidden_states(hidden_states, "fp32")
        self.link.send(kind, payload, raw=raw, request_id=request_id, epoch=epoch)


@pytest.fixture
def peer():
    scripted = ScriptedCoordinator()
    yield scripted
    scripted.link.close()


def hidden(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


def test_a_session_loads_and_runs_what_the_stage_alone_computes(peer):
    loaded = peer.load(seed=3)
    assert loaded.payload["received_bytes"] == loaded.payload["weight_bytes"]
    stage = reference_stage(0, 2, random_weights(0, 2, seed=3))
    x = hidden(5)
    peer.run(x, [0] * 5, [0, 1, 2, 3, 4], keep=2)
    answer = peer.receive("HIDDEN_STATE")
    assert (answer.request_id, answer.epoch, answer.payload["shape"]) == (7, 1, [1, 2, 32])
    got = wire.unpack_hidden_states(answer.raw, 2, 32, "fp32")
    with torch.inference_mode():
        torch.testing.assert_close(got, stage.run(x, [0] * 5, [0, 1, 2, 3, 4], 2))
        peer.run(x[:2], [1, 0], [0, 5], keep=1, kind="RUN_DECODE", request_id=8)
        answer = peer.receive("HIDDEN_STATE")
        got = wire.unpack_hidden_states(answer.raw, 2, 32, "fp32")
        torch.testing.assert_close(got, stage.run(x[:2], [1, 0], [0, 5], 1))


def test_keep_0_is_acknowledged_without_data(peer):
    peer.load()
    peer.run(hidden(3), [0] * 3, [0, 1, 2], keep=0)
    answer = peer.receive("HIDDEN_STATE")
    assert answer.payload["shape"] == [1, 0, 32] and answer.raw is None


def test_a_position_past_the_end_is_an_error_and_the_next_pass_works(peer):
    peer.load()
    peer.run(hidden(1), [0], [3], keep=1)
    error = peer.receive("INFERENCE_ERROR")
    assert (
        error.request_id == 7 and error.payload["code"] == "invalid_pass" and "position 3" in error.payload["message"]
    )
    peer.run(hidden(1), [0], [0], keep=1, request_id=9)
    assert peer.receive("HIDDEN_STATE").request_id == 9


@pytest.mark.parametrize("slots, positions", [([0, 1, 0], [0, 0, 1]), ([0, 0, 0], [0, 2, 3]), ([5, 5, 5], [0, 1, 2])])
def test_rows_that_cannot_be_run_are_an_error(peer, slots, positions):
    peer.load()
    peer.run(hidden(3), slots, positions, keep=1)
    assert peer.receive("INFERENCE_ERROR").payload["code"] == "invalid_pass"


def test_the_cache_ends_at_max_context(peer):
    peer.load()
    peer.run(hidden(16), [0] * 16, list(range(16)), keep=1)
    peer.receive("HIDDEN_STATE")
    peer.run(hidden(1), [0], [16], keep=1)
    assert "max_context 16" in peer.receive("INFERENCE_ERROR").payload["message"]


def test_copied_and_cleared_caches(peer):
    peer.load()
    stage = reference_stage(0, 2, random_weights(0, 2))
    x = hidden(4)
    peer.run(x, [0] * 4, [0, 1, 2, 3], keep=0)
    peer.receive("HIDDEN_STATE")
    peer.link.send("COPY_CACHE", {"from_slot": 0, "to_slot": 1, "length": 3}, epoch=1)
    peer.run(x[3:], [1], [3], keep=1)
    got = wire.unpack_hidden_states(peer.receive("HIDDEN_STATE").raw, 1, 32, "fp32")
    with torch.inference_mode():
        torch.testing.assert_close(got, stage.run(x, [0] * 4, [0, 1, 2, 3], 1))
    peer.link.send("CLEAR_CACHE", {"slots": [1]}, epoch=1)
    peer.run(x[3:], [1], [3], keep=1)
    assert peer.receive("INFERENCE_ERROR").payload["code"] == "invalid_pass"
    peer.link.send("COPY_CACHE", {"from_slot": 1, "to_slot": 0, "length": 2}, epoch=1)
    assert peer.receive("INFERENCE_ERROR").payload["code"] == "cache"


def test_frames_of_an_older_epoch_are_dropped_and_the_new_plan_starts_empty(peer):
    peer.load(epoch=1)
    peer.run(hidden(2), [0, 0], [0, 1], keep=1)
    peer.receive("HIDDEN_STATE")
    peer.load(epoch=5, start=1, end=3, seed=9)
    peer.link.send("ASSIGNMENT", assignment(0, 2), epoch=4)  # overtaken by that of epoch 5
    peer.run(hidden(2), [0, 0], [0, 1], keep=1, epoch=1)  # read to its end, not answered
    peer.send_tensor("model.layers.0.input_layernorm.weight", memoryview(bytes(128)), epoch=1)
    peer.run(hidden(1), [0], [2], keep=1, epoch=5, request_id=11)
    error = peer.receive("INFERENCE_ERROR")  # the slot was emptied by the new ASSIGNMENT
    assert (error.request_id, error.payload["code"]) == (11, "invalid_pass")
    assert peer.session.dropped_frames == 3


def test_too_little_memory_is_reported_with_need_and_have():
    peer = ScriptedCoordinator(max_memory_bytes=1000)
    peer.link.send("ASSIGNMENT", assignment(0, 2), epoch=1)
    failed = peer.receive("LOAD_FAILED")
    assert failed.payload["have_bytes"] == 1000
    assert failed.payload["need_bytes"] == assignment(0, 2)["total_weight_bytes"]
    assert "not enough memory on cpu" in failed.payload["reason"]
    peer.link.close()


def test_measure_reports_times_and_kernels(peer):
    payload = {"config": CONFIG.to_wire(), "quant": "int8", "group_size": 64, "compute_dtype": "fp16", "kernels": None}
    peer.link.send("MEASURE", payload)
    measured = peer.receive("MEASURED").payload
    assert all(measured["layer_ms"][rows] > 0 for rows in ("1", "4", "6", "8", "64", "256"))
    names = {kernel.name for kernel in node.quant.KERNELS}
    choices = measured["kernels"]["choices"]
    assert {name for choice in choices for name in (choice["few"], choice["many"])} <= names
    assert {tuple(choice["shape"]) for choice in choices} == set(qwen.merged_linear_shapes(CONFIG).values())
    assert measured["kernels"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("granted", [False, True])
def test_the_second_copy_is_made_only_when_the_assignment_grants_it(peer, monkeypatch, granted):
    once, twice = (node.quant.LayerKernels({}, (report,)) for report in ("once", "twice"))
    monkeypatch.setattr(peer.worker, "kernels", lambda config, weights: (once, twice))
    prepared = []
    monkeypatch.setattr(qwen.DecoderLayer, "prepare", lambda layer, choice: prepared.append(choice))
    weights = random_weights(0, 2)
    for name in peer.assign(second_copy=granted):
        peer.send_tensor(name, wire.tensor_buffer(weights[name]))
    total = sum(t.nbytes for t in weights.values())
    peer.link.send("WEIGHTS_COMPLETE", {"tensor_count": len(weights), "total_weight_bytes": total}, epoch=1)
    peer.receive("LOAD_COMPLETE")
    assert prepared == [twice if granted else once] * 2


@pytest.mark.parametrize(
    "few, more_threads, linears, taken",
    [("dequantize", 0, 4, True), ("dequantize", 1, 4, False), ("no", 0, 4, False), ("dequantize", 0, 3, False)],
)
def test_a_neighbours_kernels_are_taken_over_when_they_exist_here_and_the_threads_are_as_many(
    peer, monkeypatch, few, more_threads, linears, taken
):
    """A choice that no measuring would make tells the one from the other."""
    shapes = list(dict.fromkeys(qwen.merged_linear_shapes(CONFIG).values()))[:linears]
    choices = [{"shape": list(shape), "few": few, "many": "dequantize", "threshold": 7} for shape in shapes]
    kernels = {"choices": choices, "with_copy": None, "threads": torch.get_num_threads() + more_threads}
    payload = {"config": CONFIG.to_wire(), "quant": "int8", "group_size": 64, "compute_dtype": "fp16", "kernels": None}
    monkeypatch.setattr(node.quant, "PATIENCE_S", 0.01)
    peer.link.send("MEASURE", {**payload, "kernels": kernels})
    measured = peer.receive("MEASURED").payload["kernels"]
    assert (measured == kernels) == taken


def test_ping_is_answered_while_the_worker_computes(peer):
    release = threading.Event()
    started = threading.Event()

    def long_job():
        started.set()
        release.wait(30)

    peer.session.submit(long_job)
    started.wait(30)
    peer.link.send("PING", {})
    assert peer.receive("PONG").payload["busy_ms"] >= 0
    assert not release.is_set()
    release.set()


def test_a_bug_in_a_job_ends_the_connection_and_not_the_worker(peer):
    peer.session.submit(lambda: 1 // 0)
    with pytest.raises(wire.PeerClosed):
        peer.link.recv()
    done = threading.Event()
    peer.worker.jobs.put(done.set)
    assert done.wait(30)


# What a hostile or broken coordinator may send. {name: (what to do, what the BadFrame says)}
def _manifest_without_a_tensor(peer):
    payload = assignment(0, 2)
    payload["total_weight_bytes"] -= payload["manifest"].pop()["nbytes"]
    payload["tensor_count"] -= 1
    peer.link.send("ASSIGNMENT", payload, epoch=1)


def _manifest_with_a_foreign_tensor(peer):
    payload = assignment(0, 2)
    payload["manifest"][0]["tensor_name"] = "../../etc/passwd"
    peer.link.send("ASSIGNMENT", payload, epoch=1)


def _config_of_another_kind(peer):
    peer.link.send("ASSIGNMENT", assignment(0, 2, config={"hidden_size": 32}), epoch=1)


def _layers_beyond_the_model(peer):
    peer.link.send("ASSIGNMENT", assignment(0, 2, layer_start=2, layer_end_exclusive=9), epoch=1)


def _chunk_outside_the_manifest(peer):
    peer.assign()
    peer.send_tensor("model.layers.2.input_layernorm.weight", memoryview(bytes(128)))


def _chunk_that_is_too_long(peer):
    peer.assign()
    peer.send_tensor("model.layers.0.input_layernorm.weight", memoryview(bytes(132)))


def _chunk_that_ends_too_early(peer):
    peer.assign()
    peer.send_tensor("model.layers.0.input_layernorm.weight", memoryview(bytes(64)))


def _chunk_twice(peer):
    peer.assign()
    for _ in range(2):
        peer.send_tensor("model.layers.0.input_layernorm.weight", memoryview(bytes(128)))


def _chunk_out_of_order(peer):
    peer.assign()
    changes = {"chunk_index": 1, "chunk_count": 2, "offset": 64}
    peer.send_tensor("model.layers.0.input_layernorm.weight", memoryview(bytes(64)), **changes)


def _damaged_chunk(peer):
    peer.assign()
    peer.send_tensor("model.layers.0.input_layernorm.weight", memoryview(bytes(128)), sha256=bytes(32))


def _complete_too_early(peer):
    peer.assign()
    peer.link.send("WEIGHTS_COMPLETE", {"tensor_count": 0, "total_weight_bytes": 0}, epoch=1)


def _run_before_assignment(peer):
    peer.run(hidden(1), [0], [0], keep=1, epoch=1)


def _run_of_a_newer_epoch(peer):
    peer.load()
    peer.run(hidden(1), [0], [0], keep=1, epoch=2)


def _run_with_another_hidden_size(peer):
    peer.load()
    peer.run(torch.zeros(1, 31), [0], [0], keep=1)


def _run_with_another_dtype(peer):
    peer.load()
    raw = wire.pack_hidden_states(hidden(1), "bf16")
    payload = {"slots": [0], "positions": [0], "keep": 1, "shape": [1, 1, 32], "dtype": "bf16"}
    peer.link.send("RUN_PREFILL", payload, raw=raw, request_id=1, epoch=1)


def _too_many_rows(peer):
    peer.load()
    peer.run(hidden(17), [0] * 17, list(range(17)), keep=1)


def _chunk_that_overlaps(peer):
    peer.assign()
    name, first = "model.layers.0.input_layernorm.weight", {"chunk_count": 2, "sha256": None}
    peer.send_tensor(name, memoryview(bytes(64)), **first)
    peer.send_tensor(name, memoryview(bytes(96)), chunk_index=1, chunk_count=2, offset=32)


def _chunk_left_out(peer):
    peer.assign()
    name, first = "model.layers.0.input_layernorm.weight", {"chunk_count": 3, "sha256": None}
    peer.send_tensor(name, memoryview(bytes(32)), **first)
    peer.send_tensor(name, memoryview(bytes(32)), chunk_index=2, chunk_count=3, offset=64)


def _tensor_of_another_shape(peer):
    payload = assignment(0, 2)
    payload["manifest"][0]["shape"] = [4, 8]
    peer.link.send("ASSIGNMENT", payload, epoch=1)


def _manifest_beyond_the_frame_limit(peer):
    peer.link._sock.sendall((wire.MAX_MAP + 1).to_bytes(8, "big"))


def _error_frame(peer):
    peer.link.send("ERROR", {"code": "shutdown", "message": "no more"})


def _assignment_of_the_same_epoch(peer):
    peer.load(epoch=2)
    peer.link.send("ASSIGNMENT", assignment(0, 2), epoch=2)


HOSTILE = {
    _manifest_without_a_tensor: "the manifest has",
    _manifest_with_a_foreign_tensor: "first difference",
    _config_of_another_kind: "config fields differ",
    _layers_beyond_the_model: r"layers \[2, 9\) of 3",
    _chunk_outside_the_manifest: "is not expected",
    _chunk_that_is_too_long: "does not follow",
    _chunk_that_ends_too_early: "does not follow",
    _chunk_twice: "is not expected",
    _chunk_out_of_order: "does not follow",
    _damaged_chunk: "arrived damaged",
    _complete_too_early: "have not arrived",
    _run_before_assignment: "before any ASSIGNMENT|epoch 1, but epoch 0",
    _run_of_a_newer_epoch: "epoch 2, but epoch 1",
    _run_with_another_hidden_size: "hidden states of size 31",
    _run_with_another_dtype: "in bf16",
    _chunk_that_overlaps: "does not follow|cannot start at offset",
    _chunk_left_out: "does not follow",
    _tensor_of_another_shape: "first difference",
    _manifest_beyond_the_frame_limit: "the limit is 4194304",
    _error_frame: "it gives up: shutdown: no more",
    _too_many_rows: "17 rows in one pass",
    _assignment_of_the_same_epoch: "after epoch 2",
}


@pytest.mark.parametrize("attack", HOSTILE, ids=lambda attack: attack.__name__.strip("_"))
def test_what_does_not_fit_the_assignment_is_a_bad_frame(peer, attack):
    attack(peer)
    message = peer.bad_frame()
    assert re.search(HOSTILE[attack], message), message


HOSTILE_CONFIGS = [
    {"hidden_size": -1}, {"hidden_size": 0}, {"hidden_size": 2**31}, {"head_dim": 0}, {"head_dim": 7},
    {"num_hidden_layers": 2**62}, {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 3},
    {"num_key_value_heads": 3}, {"num_attention_heads": True}, {"layer_types": ["recurrent"] * 3},
    {"layer_types": [["full_attention"]] * 3}, {"rope_theta": 0}, {"rms_norm_eps": "1e-6"}, {"vocab_size": None},
    {"tie_word_embeddings": 1}, {"__class__": "Config"},
]  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE_CONFIGS, ids=str)
@pytest.mark.parametrize("type_", ["ASSIGNMENT", "MEASURE"])
def test_a_config_that_no_model_has_is_a_bad_frame(peer, type_, changes):
    config = {**CONFIG.to_wire(), **changes}
    measure = {"config": config, "quant": "fp16", "group_size": 64, "compute_dtype": "fp32", "kernels": None}
    if type_ == "MEASURE":
        peer.link.send("MEASURE", measure)
    else:
        peer.link.send("ASSIGNMENT", assignment(0, 2, config=config), epoch=1)
    assert f"{type_}: " in peer.bad_frame()


def test_a_layer_larger_than_the_memory_is_not_measured(peer):
    config = {**CONFIG.to_wire(), "hidden_size": 2**24, "intermediate_size": 2**24}
    peer.link.send(
        "MEASURE", {"config": config, "quant": "int8", "group_size": 64, "compute_dtype": "fp32", "kernels": None}
    )
    assert re.search(r"one layer needs \d+\.\d\d GiB", peer.receive("ERROR").payload["message"])


def test_layers_of_an_earlier_plan_make_room_for_measuring(peer, monkeypatch):
    """A new coordinator asks first for this, and would be refused as long as the old one's layers stay."""
    peer.load()
    peer.worker.stage = None  # as when the connection of that plan has ended
    monkeypatch.setattr(node, "free_memory_bytes", lambda device: 0 if peer.worker.loaded else 1 << 40)
    measure = {"config": CONFIG.to_wire(), "quant": "fp16", "group_size": 64, "compute_dtype": "fp32", "kernels": None}
    peer.link.send("MEASURE", measure)
    assert peer.receive("MEASURED").payload["layer_ms"]["1"] > 0


def test_hidden_states_larger_than_the_memory_are_a_bad_frame(peer, monkeypatch):
    def no_memory(nbytes):
        raise MemoryError

    peer.load()
    monkeypatch.setattr(node, "bytearray", no_memory, raising=False)
    peer.run(hidden(1), [0], [0], keep=1)
    assert "no memory for 128 bytes" in peer.bad_frame()


@pytest.mark.parametrize("group_size", [1, 4096])
def test_a_group_size_that_does_not_exist_is_a_bad_frame(peer, group_size):
    payload = {
        "config": CONFIG.to_wire(),
        "quant": "int4",
        "group_size": group_size,
        "compute_dtype": "fp16",
        "kernels": None,
    }
    peer.link.send("MEASURE", payload)
    assert "group size" in peer.bad_frame()


def test_weights_complete_before_the_weights_is_a_failed_load(peer):
    release = threading.Event()
    peer.session.submit(release.wait)  # so that it comes before the node has said what it wants
    peer.link.send("ASSIGNMENT", assignment(0, 2), epoch=1)
    peer.link.send("WEIGHTS_COMPLETE", {"tensor_count": 0, "total_weight_bytes": 0}, epoch=1)
    peer.link.send("PING", {})
    peer.receive("PONG")  # the reader has handed both to the worker
    release.set()
    peer.receive("WEIGHTS_WANTED")
    assert "before the weights" in peer.receive("LOAD_FAILED").payload["reason"]


def test_requests_that_pile_up_end_the_connection(peer, monkeypatch):
    monkeypatch.setattr(node, "MAX_WAITING_JOBS", 10)
    release = threading.Event()
    peer.session.submit(release.wait)
    for _ in range(12):
        peer.link.send("CLEAR_CACHE", {"slots": []}, epoch=0)
    assert "requests are waiting" in peer.bad_frame()
    release.set()


# ----------------------------------------------------------------------------
# The program
# ----------------------------------------------------------------------------


def start_node(*flags: str, cwd=ROOT, **env: str) -> Program:
    return Program([sys.executable, str(cwd / "node.py"), *flags], env=environment(**env), cwd=cwd)


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--host", "127.0.0.1", "--device", "tpu"], "--device tpu is not available here; available: auto, cpu"),
        (["--host", "127.0.0.1", "--port", "70000"], "--port 70000"),
        (["--host", "127.0.0.1", "--threads", "0"], "--threads 0"),
        (["--host", "127.0.0.1", "--max-memory-gb", "-1"], "--max-memory-gb"),
        (["--host", "127.0.0.1", "--cache-gb", "-1"], "--cache-gb -1.0: 0 (no cache) or more"),
        (["--host", "127.0.0.1", "--token-file", "/nowhere"], "--token-file /nowhere: cannot be read (No such file"),
        (["--host", "127.0.0.1", "--token", ""], "--token is empty"),
        (["--host", "127.0.0.1", "--work-dir", "/proc/nowhere"], "--work-dir /proc/nowhere is not writable"),
        ([], "--host is required"),
        (["--host", "http://box:7001"], "only a name or an address"),
        (["--host", "127.0.0.1:7001"], "--host 127.0.0.1:7001: give --host 127.0.0.1 --port 7001"),
        (["--host", "[fe80::1%eth0]:7001"], "give --host fe80::1%eth0 --port 7001"),
        (["--host", "[::1]"], "--host [::1]: give --host ::1"),
        (["--host", "127.0.0.1", "--gpu"], "unrecognized arguments: --gpu"),
        (["--host", "127.0.0.1", "--max", "3"], "unrecognized arguments: --max 3"),
        (["--host", "127.0.0.1", "--port", "api"], "--port/--cluster-port: invalid int value: 'api'"),
    ],
)
def test_wrong_flags_end_in_one_line(flags, says, capsys, monkeypatch):
    monkeypatch.setattr(node.signal, "signal", lambda *_: None)  # this process's own signals stay as they are
    assert node.main(flags) == node.EXIT_USAGE
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("node.py: ") and says in lines[0]


@pytest.mark.parametrize("host", ["box", "192.168.1.10", "::1", "fe80::1%eth0", "2001:db8::7001"])
def test_a_name_or_an_address_of_either_kind_is_a_host(host):
    assert node.parse_args(["--host", host]).host == host


@pytest.mark.parametrize(
    "name, says",
    [
        ("ECONNREFUSED", "is the coordinator running, and is --port its --node-port"),
        ("ETIMEDOUT", "firewall"),
        ("EHOSTUNREACH", "On macOS allow Local Network access .* on WSL use the Windows machine's address"),
        ("ENETUNREACH", "no route to that network"),
    ],
)
def test_why_there_is_no_connection_and_what_to_check(name, says):
    number = getattr(errno, name)
    assert re.search(says, node.connect_hint(OSError(number, os.strerror(number))))
    assert "firewall" in node.connect_hint(TimeoutError("timed out"))  # of our own time-out, without a number
    assert node.connect_hint(OSError(errno.EACCES, "Permission denied")) == "Permission denied"


def test_a_node_tries_again_more_and_more_slowly_up_to_a_limit(tmp_path, monkeypatch):
    waits, sleep = [], time.sleep

    def note(seconds):
        if threading.current_thread() is not threading.main_thread():
            sleep(seconds)
            return
        waits.append(seconds)
        if len(waits) == 12:
            raise KeyboardInterrupt

    def refused():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    tries = node.Node(node.parse_args(["--host", "127.0.0.1", "--work-dir", str(tmp_path), "--cache-gb", "0"]))
    monkeypatch.setattr(tries, "serve_once", refused)
    monkeypatch.setattr(node.time, "sleep", note)
    with pytest.raises(KeyboardInterrupt):
        tries.run()
    for i, wait in enumerate(waits):
        longest = min(node.LONGEST_RETRY_S, node.FIRST_RETRY_S * 2**i)
        assert 0.7 * longest <= wait <= longest
    tries.id_lock.close()


def test_a_closed_port_is_named_with_what_to_check_and_tried_again(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    program = WarmProgram("node", ["--host", "127.0.0.1", "--port", str(port), "--work-dir", str(tmp_path)])
    program.wait_for(rf"cannot reach 127.0.0.1 port {port}: nothing listens there.*--node-port")
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(60)
        server.accept()[0].close()
    program.kill()


def test_a_wrong_host_is_named(tmp_path):
    program = WarmProgram("node", ["--host", "no-such-host.invalid", "--work-dir", str(tmp_path)])
    program.wait_for(r"cannot reach no-such-host.invalid port 7001: the name cannot be resolved.*check --host")
    program.kill()


class Once(node.Node):
    """A node that gives up when it would connect a second time."""

    tried = False

    def serve_once(self):
        if self.tried:
            raise wire.Refused("token", "enough")
        self.tried = True
        super().serve_once()


def words_of_a_node_that_connects_to(port: int, tmp_path, caplog) -> str:
    flags = ["--host", "127.0.0.1", "--port", str(port), "--work-dir", str(tmp_path)]
    with caplog.at_level("INFO", logger="node"):
        assert Once(node.parse_args(flags)).run() == node.EXIT_REFUSED
    return caplog.text


def test_the_api_port_by_mistake_is_named(tmp_path, caplog, fp16_cluster):
    words = words_of_a_node_that_connects_to(fp16_cluster.api_port, tmp_path, caplog)
    assert "this looks like HTTP; --port must be the coordinator's --node-port" in words


def test_something_that_never_answers_is_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(wire, "SILENCE_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = words_of_a_node_that_connects_to(server.getsockname()[1], tmp_path, caplog)
    assert "did not send a whole frame in 0.2 s; something listens there and does not answer" in words


def _answer_one_node(server: socket.socket, key: bytes | None) -> None:
    connection = wire.Connection(server.accept()[0], "node", "coordinator")
    with pytest.raises((wire.BadFrame, wire.PeerClosed, wire.Refused)):
        wire.coordinator_handshake(connection, key, 2.0, lambda hello: None)
    connection.close()


@pytest.mark.parametrize("ours, theirs", [("right", "wrong"), ("right", None), (None, "wrong")])
def test_a_wrong_token_ends_the_node(tmp_path, ours, theirs):
    with socket.create_server(("127.0.0.1", 0)) as server:
        flags = ["--host", "127.0.0.1", "--port", str(server.getsockname()[1]), "--work-dir", str(tmp_path)]
        program = WarmProgram("node", flags, (("variable", "TRUECLUSTER_TOKEN", theirs),) if theirs else ())
        _answer_one_node(server, wire.token_key(ours) if ours else None)
        assert program.wait(60) == node.EXIT_REFUSED
    assert "token" in program.lines[-1] and "Traceback" not in program.output
    shown = program.output.replace("wrong token", "").replace(str(tmp_path), "")
    assert "wrong" not in shown  # the token itself is never shown


def test_another_protocol_version_ends_the_node(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "PROTOCOL_VERSION", 99)
    with socket.create_server(("127.0.0.1", 0)) as server:
        flags = ["--host", "127.0.0.1", "--port", str(server.getsockname()[1]), "--work-dir", str(tmp_path)]
        program = start_node(*flags)
        _answer_one_node(server, None)
        assert program.wait(60) == node.EXIT_REFUSED
    assert "version 1" in program.output and "99" in program.output and "update" in program.output


def test_a_node_joins_again_only_when_its_worker_is_free():
    """Until then its memory is not, and the figures of its HELLO would be too small."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        flags = ["--host", "127.0.0.1", "--port", str(server.getsockname()[1]), "--device", "cpu", "--node-id", "busy"]
        busy = node.Node(node.parse_args(flags))
        busy.worker.start()
        pass_ends = threading.Event()
        busy.worker.jobs.put(pass_ends.wait)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            served = pool.submit(busy.serve_once)
            server.settimeout(0.2)
            with pytest.raises(TimeoutError):
                server.accept()
            pass_ends.set()
            server.settimeout(30.0)
            server.accept()[0].close()
            assert isinstance(served.exception(30.0), wire.PeerClosed)


def test_two_nodes_on_one_machine_get_different_ids_and_a_restart_gets_its_own_back(tmp_path):
    first, lock = node.claim_node_id(tmp_path, "box")
    second, other = node.claim_node_id(tmp_path, "box")
    assert (first, second) == ("box-0", "box-1")
    lock.close()
    assert node.claim_node_id(tmp_path, "box")[0] == "box-0"
    other.close()


NODE_FILES = ("node.py", "qwen.py", "quant.py", "wire.py")
COORDINATOR_ONLY = ("tokenizers", "jinja2", "huggingface_hub", "safetensors", "transformers")


def test_a_node_needs_its_four_files_and_three_packages(tmp_path, fp16_cluster):
    folder, blocked = tmp_path / "node", tmp_path / "blocked"
    folder.mkdir()
    for name in NODE_FILES:
        shutil.copy(ROOT / name, folder / name)
    for package in COORDINATOR_ONLY:
        (blocked / package).mkdir(parents=True)
        (blocked / package / "__init__.py").write_text("raise ImportError('not on a node')\n")
    check = subprocess.run(
        [sys.executable, "-c", "import tokenizers"],
        env=environment(PYTHONPATH=str(blocked)),
        capture_output=True,
        check=False,
    )
    assert check.returncode != 0, "the blocked packages can still be imported"
    seen = len(fp16_cluster.coordinator.lines)
    flags = ["--host", "127.0.0.1", "--port", str(fp16_cluster.node_port), "--work-dir", str(tmp_path / "work")]
    program = start_node(*flags, "--node-id", "bare", cwd=folder, PYTHONPATH=str(blocked))
    try:
        program.wait_for("joined the cluster")
        fp16_cluster.coordinator.wait_for(r"node bare: .* ms per layer and token", after=seen)
    finally:
        program.kill()
