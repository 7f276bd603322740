"""node.py's weight cache, and layers that stay in memory: what is not sent again, and that what is kept is right."""

import errno
import gc
import hashlib
import os
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from test_node import CONFIG, ScriptedCoordinator, assignment, hidden, key, random_weights, reference_stage

import node
import qwen
import wire

KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(6)]
DATA = bytes(range(256)) * 10
LONG_AGO = time.time() - 1e6


def keep(cache: node.WeightCache, key: str, data: bytes = DATA, used_at: float | None = None) -> None:
    """Writes a tensor; used_at: when it was used last."""
    cache.write(key, memoryview(data), hashlib.sha256(data).digest())
    if used_at is not None:
        os.utime(cache.path(key), (used_at, used_at))


def read(cache: node.WeightCache, key: str, nbytes: int = len(DATA)) -> bytes | None:
    buffer = bytearray(nbytes)
    return bytes(buffer) if cache.read(key, memoryview(buffer)) else None


def held(cache: node.WeightCache) -> set[str]:
    return {key for key in KEYS if cache.path(key).exists()}


@pytest.fixture
def cache(tmp_path, caplog):
    caplog.set_level("WARNING", logger="node")
    return node.WeightCache(tmp_path / "weights", limit_bytes=1 << 20)


# ----------------------------------------------------------------------------
# The files
# ----------------------------------------------------------------------------


def test_what_was_written_is_there_and_nothing_else(cache):
    assert cache.begin_load({KEYS[0]: len(DATA)}) == set()
    keep(cache, KEYS[0])
    sizes = {KEYS[0]: len(DATA), KEYS[1]: len(DATA)}
    assert cache.begin_load(sizes) == {KEYS[0]} and read(cache, KEYS[0]) == DATA
    assert cache.begin_load({KEYS[0]: len(DATA) + 1}) == set()  # of another size: not that tensor


def test_a_coordinator_with_a_token_gets_nothing_that_one_without_it_has_sent(cache):
    keep(cache, KEYS[0])
    assert node.WeightCache(cache.folder, 1 << 20, scope=b"secret").begin_load({KEYS[0]: len(DATA)}) == set()


def _flip_a_bit_of(position):
    def change(path):
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)

    return change


DAMAGE = {
    "a bit of the data": _flip_a_bit_of(-1),
    "a bit of the digest": _flip_a_bit_of(node.CACHE_HEADER_NBYTES - 1),
    "a bit of the mark": _flip_a_bit_of(0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "only the header": lambda path: os.truncate(path, node.CACHE_HEADER_NBYTES),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_noticed_deleted_and_written_again(cache, caplog, change):
    keep(cache, KEYS[0])
    change(cache.path(KEYS[0]))
    assert read(cache, KEYS[0]) is None
    assert "is damaged" in caplog.text and not cache.path(KEYS[0]).exists()
    keep(cache, KEYS[0])
    assert read(cache, KEYS[0]) == DATA


def test_what_a_killed_node_left_half_written_is_no_tensor_and_goes_when_it_is_old(cache):
    keep(cache, KEYS[0])
    name = cache.path(KEYS[1]).stem
    old, fresh = (cache.folder / f"{name}.{digit * 32}.part" for digit in "01")
    for part in (old, fresh):
        part.write_bytes(DATA)
    os.utime(old, (LONG_AGO, LONG_AGO))
    assert cache.begin_load({KEYS[0]: len(DATA), KEYS[1]: len(DATA)}) == {KEYS[0]}
    assert not old.exists() and fresh.exists()  # the fresh one may be a neighbour's


def test_nodes_that_share_a_folder_never_read_a_wrong_byte(cache):
    neighbour = node.WeightCache(cache.folder, cache.limit_bytes)
    keep(cache, KEYS[0])
    wrong, stop = [], threading.Event()

    def write():
        while not stop.is_set():
            keep(neighbour, KEYS[0])

    def forget():
        while not stop.is_set():
            neighbour.forget()

    threads = [threading.Thread(target=work) for work in (write, write, forget)]
    for thread in threads:
        thread.start()
    found = 0
    for _ in range(300):
        cache.begin_load({KEYS[0]: len(DATA)})
        data = read(cache, KEYS[0])
        found += data is not None
        if data not in (None, DATA):
            wrong.append(data)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and found and not neighbour.trouble


FILE_BYTES = node.CACHE_HEADER_NBYTES + len(DATA)


def test_the_least_recently_used_files_go_first_and_never_those_of_this_load(tmp_path):
    cache = node.WeightCache(tmp_path, limit_bytes=4 * FILE_BYTES)
    for i, age in enumerate([3, 4, 2, 1]):
        keep(cache, KEYS[i], used_at=LONG_AGO - age)
    cache.begin_load({KEYS[1]: len(DATA), KEYS[4]: len(DATA), KEYS[5]: len(DATA)})  # uses the oldest
    keep(cache, KEYS[4])
    assert held(cache) == {KEYS[1], KEYS[2], KEYS[3], KEYS[4]}
    keep(cache, KEYS[5])
    assert held(cache) == {KEYS[1], KEYS[3], KEYS[4], KEYS[5]}


def test_a_load_that_is_larger_than_the_limit_keeps_what_fits_and_says_so_once(tmp_path, caplog):
    cache = node.WeightCache(tmp_path, limit_bytes=3 * FILE_BYTES)
    keep(cache, KEYS[0], used_at=LONG_AGO)
    cache.begin_load(dict.fromkeys(KEYS[1:], len(DATA)))
    for name in KEYS[1:]:
        keep(cache, name)
    assert held(cache) == {KEYS[1], KEYS[2], KEYS[3]}
    assert caplog.text.count("--cache-gb") == 1


def _no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_means_no_cache_and_one_line(cache, caplog, monkeypatch):
    keep(cache, KEYS[0])
    with monkeypatch.context() as patch:
        patch.setattr(node.os, "replace", _no_space)
        keep(cache, KEYS[1])
        keep(cache, KEYS[2])
    assert caplog.text.count("No space left on device") == 1
    assert [path.name for path in cache.folder.iterdir()] == [cache.path(KEYS[0]).name]  # no half file stays
    cache.begin_load({})
    keep(cache, KEYS[1])  # the next load tries again
    assert read(cache, KEYS[1]) == DATA and read(cache, KEYS[0]) == DATA


def test_the_cache_does_not_take_the_last_of_the_disk(cache, caplog, monkeypatch):
    usage = SimpleNamespace(free=node.DISK_RESERVE_BYTES + FILE_BYTES - 1)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda path: usage)
    keep(cache, KEYS[0])
    assert not held(cache) and caplog.text.count("left on the disk") == 1


def test_a_folder_that_cannot_be_used_means_no_cache(tmp_path, caplog):
    (tmp_path / "file").touch()
    cache = node.WeightCache(tmp_path / "file" / "weights", 1 << 20)
    assert cache.begin_load({KEYS[0]: len(DATA)}) == set()
    keep(cache, KEYS[0])
    assert caplog.text.count("Not a directory") == 1


def test_forget_deletes_the_caches_files_and_no_others(tmp_path, capsys):
    cache = node.weight_cache(str(tmp_path), 1.0)
    keep(cache, KEYS[0])
    keep(cache, KEYS[1])
    part = cache.folder / f"{'a' * 64}.{'b' * 32}.part"
    part.write_bytes(DATA)
    foreign = [cache.folder / name for name in ("notes.txt", f"{'a' * 63}.weight", f"x{'a' * 64}.weight", "model.part")]
    foreign.append(tmp_path / "box-0.lock")
    for path in foreign:
        path.write_text("mine")
    unused, held = tmp_path / "box-1.lock", node.claim_node_id(tmp_path, "my-box")
    unused.touch()
    assert node.main(["--forget", "--work-dir", str(tmp_path)]) == node.EXIT_OK
    assert not unused.exists() and node.claim_node_id(tmp_path, "my-box")[0] == "my-box-1" != held[0]
    freed = (2 * FILE_BYTES + len(DATA)) / 1e6
    assert f"3 cached tensors deleted from {cache.folder}, {freed:.1f} MB freed" in capsys.readouterr().out
    assert sorted(cache.folder.iterdir()) == sorted(foreign[:-1]) and all(path.exists() for path in foreign)
    assert node.main(["--forget", "--work-dir", str(tmp_path / "nowhere")]) == node.EXIT_OK


def test_a_slow_disk_holds_nothing_up(cache):
    writer = node.CacheWriter(cache)
    writer.MOST_WAITING_BYTES = 2 * len(DATA)
    for name in KEYS[:4]:  # the writer does not run yet: as slow as a disk can be
        writer.put(name, memoryview(DATA), hashlib.sha256(DATA).digest())
    assert writer.take_skipped() == 2 and writer.take_skipped() == 0
    writer.start()
    assert writer.wait_idle(30) and held(cache) == set(KEYS[:2])


# ----------------------------------------------------------------------------
# Sessions
# ----------------------------------------------------------------------------


@pytest.fixture
def sessions(tmp_path):
    """sessions(): a session of the same node process, with a cache; sessions(cache=False): without one."""
    worker = node.Worker(torch.device("cpu"))
    worker.start()
    writer = node.CacheWriter(node.WeightCache(tmp_path / "weights", 1 << 30))
    writer.start()
    opened = []

    def open_session(cache=True, fresh=False):
        opened.append(ScriptedCoordinator(cache_writer=writer if cache else None, worker=None if fresh else worker))
        return opened[-1]

    open_session.writer = writer
    yield open_session
    for peer in opened:
        peer.link.close()


def names_of(*layers: int) -> set[str]:
    return {
        t.name
        for i in layers
        for t in qwen.stored_tensors(CONFIG, i, i + 1, node.qwen.WeightFormat("fp16", 64, "fp32"))
    }


def assert_computes(peer, start: int, end: int, epoch: int, seed: int = 0) -> None:
    """The session's stage computes what a stage with these weights does, from empty caches."""
    x, positions = hidden(3), [0, 1, 2]
    peer.run(x, [0] * 3, positions, keep=3, epoch=epoch)
    got = wire.unpack_hidden_states(peer.receive("HIDDEN_STATE").raw, 3, 32, "fp32")
    with torch.inference_mode():
        expected = reference_stage(start, end, random_weights(start, end, seed)).run(x, [0] * 3, positions, 3)
    torch.testing.assert_close(got, expected)


def load_into_cache(sessions, start: int = 0, end: int = 2) -> None:
    peer = sessions(fresh=True)
    assert set(peer.assign(1, start, end)) == names_of(*range(start, end))
    peer.send_all(list(names_of(*range(start, end))), random_weights(start, end))
    peer.receive("LOAD_COMPLETE")
    peer.link.close()
    assert sessions.writer.wait_idle(30)


def test_a_second_start_asks_for_nothing(sessions):
    load_into_cache(sessions)
    peer = sessions(fresh=True)
    assert peer.assign() == []
    peer.send_all([], {})
    sizes = peer.receive("LOAD_COMPLETE").payload
    assert (sizes["cached_bytes"], sizes["received_bytes"]) == (sizes["weight_bytes"], 0)
    assert_computes(peer, 0, 2, epoch=1)


def test_only_what_the_cache_lacks_is_asked_for(sessions):
    load_into_cache(sessions)
    peer = sessions(fresh=True)
    wanted = peer.assign(start=1, end=3)
    assert set(wanted) == names_of(2)
    peer.send_all(wanted, random_weights(1, 3))
    peer.receive("LOAD_COMPLETE")
    assert_computes(peer, 1, 3, epoch=1)


def test_a_damaged_tensor_is_asked_for_again_while_loading(sessions):
    load_into_cache(sessions)
    name = "model.layers.1.mlp.up_proj.weight"
    DAMAGE["a bit of the data"](sessions.writer.cache.path(key(name, 0)))
    peer = sessions(fresh=True)
    assert peer.assign() == []
    peer.send_all([], {})
    assert peer.receive("WEIGHTS_WANTED").payload["names"] == [name]
    peer.send_all([name], random_weights(0, 2))
    peer.receive("LOAD_COMPLETE")
    assert_computes(peer, 0, 2, epoch=1)


def test_a_cache_that_cannot_be_written_does_not_fail_a_load(sessions, monkeypatch, caplog):
    monkeypatch.setattr(node.os, "replace", _no_space)
    peer = sessions()
    peer.load()
    assert sessions.writer.wait_idle(30) and "No space left on device" in caplog.text
    assert_computes(peer, 0, 2, epoch=1)


def test_a_survivor_asks_only_for_the_layers_that_it_lacks(sessions):
    peer = sessions(cache=False)
    peer.load(epoch=1, start=0, end=2)
    assert_computes(peer, 0, 2, epoch=1)
    gone, stays = (weakref.ref(peer.worker.stage.layers[i]) for i in (0, 1))
    wanted = peer.assign(epoch=2, start=1, end=3)
    assert set(wanted) == names_of(2)
    gc.collect()
    assert gone() is None and stays() is not None  # freed before new weights come
    peer.send_all(wanted, random_weights(1, 3), epoch=2)
    sizes = peer.receive("LOAD_COMPLETE").payload
    assert sizes["received_bytes"] == sizes["weight_bytes"] // 2
    assert_computes(peer, 1, 3, epoch=2)


def test_a_layer_with_one_other_tensor_is_loaded_again(sessions):
    peer = sessions(cache=False)
    peer.load(epoch=1)
    payload = assignment(0, 2)
    payload["manifest"][-1]["key"] = "0" * 64
    peer.link.send("ASSIGNMENT", payload, epoch=2)
    assert set(peer.receive("WEIGHTS_WANTED").payload["names"]) == names_of(1)


def test_the_same_keys_with_another_config_are_another_layer(sessions):
    peer = sessions(cache=False)
    peer.load(epoch=1)
    wanted = peer.assign(epoch=2, config={**CONFIG.to_wire(), "rms_norm_eps": 1e-5})
    assert set(wanted) == names_of(0, 1)


def test_an_interrupted_load_leaves_only_whole_layers(sessions):
    peer = sessions(cache=False)
    weights = random_weights(0, 2)
    names = peer.assign(epoch=1)
    for name in names[:-1]:  # the second layer is short of one tensor
        peer.send_tensor(name, wire.tensor_buffer(weights[name]))
    wanted = peer.assign(epoch=2)
    assert set(wanted) == names_of(1)
    peer.send_all(wanted, weights, epoch=2)
    peer.receive("LOAD_COMPLETE")
    assert_computes(peer, 0, 2, epoch=2)


def test_after_a_failed_load_nothing_counts_as_kept(sessions, monkeypatch):
    peer = sessions(cache=False)
    packed = []

    def pack_one(layer, choice):
        packed.append(layer)
        layer.destinations = {}
        if len(packed) == 2:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(qwen.DecoderLayer, "prepare", pack_one)
        peer.send_all(peer.assign(epoch=1), random_weights(0, 2))
        assert "not enough memory" in peer.receive("LOAD_FAILED").payload["reason"]
    assert set(peer.assign(epoch=2)) == names_of(0, 1)


@pytest.mark.parametrize("fails", [False, True], ids=["the plan changes", "loading fails"])
def test_a_load_that_is_over_is_read_no_further_and_holds_no_memory(sessions, monkeypatch, fails):
    load_into_cache(sessions)
    peer = sessions(fresh=True)
    reading, read_keys, readers = threading.Event(), [], []

    def read_slowly(cache, key, buffer):
        read_keys.append(key)
        reading.set()
        time.sleep(0.1)  # a disk
        return True

    def note_readers(device):
        readers.append([thread for thread in threading.enumerate() if thread.name == "cache reader"])

    monkeypatch.setattr(node.WeightCache, "read", read_slowly)
    peer.assign(epoch=1)
    assert reading.wait(30)
    if fails:
        loading = peer.session.assignment
        peer.session.submit(lambda: peer.session._load_failed(loading, MemoryError()))
        peer.receive("LOAD_FAILED")
    monkeypatch.setattr(node, "free_memory_bytes", note_readers)
    peer.assign(epoch=2, start=2, end=3)
    assert readers == [[]] and len(read_keys) == 1


def test_layers_stay_for_the_next_connection_with_empty_caches(sessions):
    first = sessions(cache=False)
    first.load(epoch=7)
    assert_computes(first, 0, 2, epoch=7)
    first.link.close()
    first.ended.get(timeout=30)
    again = sessions(cache=False)  # as after a restart of the coordinator: its epochs begin at 1
    assert again.worker.held_bytes > 0
    assert again.assign(epoch=1) == []
    again.send_all([], {})
    assert again.receive("LOAD_COMPLETE").payload["received_bytes"] == 0
    again.run(hidden(1), [0], [3], keep=1)
    assert again.receive("INFERENCE_ERROR").payload["code"] == "invalid_pass"
    assert_computes(again, 0, 2, epoch=1)


@pytest.fixture
def alone(tmp_path):
    """A node with one layer in memory and no coordinator."""
    args = node.parse_args(["--host", "127.0.0.1", "--device", "cpu", "--work-dir", str(tmp_path), "--cache-gb", "0"])
    alone = node.Node(args)
    alone.worker.loaded = {0: (None, SimpleNamespace(nbytes=1 << 50))}
    yield alone
    alone.id_lock.close()


def test_what_a_node_holds_counts_as_free_for_the_next_plan(alone):
    hello = alone.hello()
    assert hello["held_memory_bytes"] == 1 << 50
    assert [device["free_memory"] > 1 << 50 for device in hello["devices"] if device["id"] == "cpu"] == [True]


def test_a_node_without_a_coordinator_frees_its_layers_in_the_end(alone, monkeypatch):
    monkeypatch.setattr(node, "KEEP_LAYERS_S", 0.05)
    monkeypatch.setattr(node, "FIRST_RETRY_S", 0.01)
    tries = []

    def serve_once():
        tries.append(len(alone.worker.loaded))
        raise ConnectionRefusedError if tries[-1] else wire.Refused("token", "ends run()")

    monkeypatch.setattr(alone, "serve_once", serve_once)
    assert alone.run() == node.EXIT_REFUSED
    assert len(tries) > 1 and alone.cache_writer is None
