"""Nodes that die, freeze, sleep, fail and come back; cables that are cut; signals. Real processes (tests/warm.py).

What takes long (a peer may be silent for 10 s) runs beside the other tests: see `beside`.
"""

import concurrent.futures
import contextlib
import os
import re
import signal
import socket
import subprocess

import pytest
import soak
from cluster import WarmCluster, wait_until
from relay import Relay
from soak import LONG, SHORT, Rig

import coordinator
import wire

FP32 = ("--dtype", "fp32")
SHORT_GRACE = ("setting", "coordinator.RECOVERY_GRACE_S", 0.3)
SHORT_OUTAGE = ("setting", "coordinator.OUTAGE_LIMIT_S", 1.0)
QUESTION = {"prompt": "Once", "max_tokens": 150}


def text_of(chunks) -> str:
    """The text of a stream; AssertionError when it ends with an error."""
    text = ""
    for chunk in chunks:
        assert "error" not in chunk, chunk
        text += "".join(choice["text"] for choice in chunk["choices"])
    return text


def ids(count: int) -> list[int]:
    return [7 * i % 250 for i in range(count)]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What QUESTION is answered when nothing happens."""
    with WarmCluster(nodes=1, flags=FP32) as cluster:
        return text_of(cluster.stream(**QUESTION))


# ----------------------------------------------------------------------------
# Kills
# ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rig():
    with Rig(seed=11) as running:
        running.learn(SHORT + LONG)
        running.before = soak.holdings(running.cluster)
        yield running


@pytest.mark.parametrize("point", soak.POINTS)
def test_a_killed_node_changes_no_answer_and_leaves_nothing_behind(rig, point):
    for _ in range(4):
        soak.kill_at(rig, point)
    rig.settle()
    assert soak.no_leaks(rig, rig.before)[0] == []
    assert "Traceback" not in rig.cluster.coordinator.output


def test_the_nodes_that_are_left_take_over_and_the_plan_grows_when_the_node_is_back(undisturbed):
    with WarmCluster(nodes=2, flags=FP32, faults=(SHORT_GRACE,)) as cluster:
        chunks = cluster.stream(**QUESTION)
        text = text_of([next(chunks) for _ in range(20)])
        victim, survivor = cluster.nodes
        victim.kill()
        cluster.coordinator.wait_for("ready -> lost", timeout=wire.SILENCE_LIMIT_S / 2)  # at once, not by its silence
        assert text + text_of(chunks) == undisturbed
        assert len(cluster.status()["plan"]) == 1
        assert float(survivor.wait_for(r"epoch 2: loaded, .*; kept ([\d.]+) MB")[1]) > 0
        cluster.add_node()
        wait_until(lambda: len(cluster.status()["plan"]) == 2 and cluster.status()["state"] == "ready")
        assert text_of(cluster.stream(**QUESTION)) == undisturbed


def test_without_enough_nodes_requests_end_with_an_error_and_work_again_later(undisturbed):
    little = ("--max-memory-gb", "0.025")  # room for half of the layers
    flags = ("--max-nodes", 2, *FP32)
    with WarmCluster(nodes=0, flags=flags, node_flags=little, faults=(SHORT_GRACE, SHORT_OUTAGE)) as cluster:
        victim, survivor = (cluster.add_node("--node-id", name) for name in "ab")
        cluster.wait_ready()
        chunks = cluster.stream(**QUESTION)
        begun = [next(chunks) for _ in range(20)]
        victim.kill()
        *more, last = chunks
        assert undisturbed.startswith(text_of(begun + more))
        assert last["error"]["type"] == "cluster_not_ready"
        assert last["error"]["message"] == "Model is not ready. Required nodes: 2, connected ready nodes: 0"
        assert cluster.request("/v1/completions", QUESTION)[0] == 503
        assert "does not fit" in cluster.status()["why_not_ready"]
        cluster.add_node()
        wait_until(lambda: cluster.request("/health")[0] == 200)
        assert text_of(cluster.stream(**QUESTION)) == undisturbed
        # the new node has the first stage, as the lost one had: the other keeps what it has
        survivor.wait_for(r"epoch 2: loaded, .* from the cache 0.0 MB, over the network 0.0 MB")


def test_a_request_that_kills_every_node_is_given_up_and_the_others_are_answered(undisturbed):
    """As a prompt does that takes more memory than there is: it must not be tried for ever."""
    deadly = (("deadly_pass", 77),)
    with WarmCluster(nodes=0, flags=("--max-nodes", 1, *FP32), faults=(SHORT_GRACE,)) as cluster:
        running = {name: cluster.add_node("--node-id", name, faults=deadly) for name in "ab"}
        cluster.wait_ready()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(cluster.request, "/v1/completions", {"prompt": ids(77), "max_tokens": 4})
            while not answer.done():
                for name in [name for name, program in running.items() if program.process.poll() is not None]:
                    running[name] = cluster.add_node("--node-id", name, faults=deadly)
                concurrent.futures.wait([answer], timeout=0.02)
        status, error = answer.result()
        assert status == 500 and re.search(r"lost .* times in a row", error["error"]["message"]), error
        wait_until(lambda: cluster.request("/health")[0] == 200)
        assert text_of(cluster.stream(**QUESTION)) == undisturbed


# ----------------------------------------------------------------------------
# Silence: 10 s each, beside one another and beside the other tests
# ----------------------------------------------------------------------------


def a_node_that_slept_comes_back_and_is_used(undisturbed):
    with WarmCluster(nodes=2, flags=FP32, faults=(SHORT_GRACE,)) as cluster:
        chunks = cluster.stream(**QUESTION)
        begun = [next(chunks) for _ in range(20)]
        sleeper = cluster.nodes[1]
        sleeper.signal(signal.SIGSTOP)
        assert text_of([*begun, *chunks]) == undisturbed
        cluster.coordinator.wait_for("sent nothing for 10 s")
        assert len(cluster.status()["plan"]) == 1
        sleeper.signal(signal.SIGCONT)
        wait_until(lambda: len(cluster.status()["plan"]) == 2 and cluster.status()["state"] == "ready")
        assert text_of(cluster.stream(**QUESTION)) == undisturbed
        assert sleeper.process.poll() is None


def a_coordinator_that_slept_finds_its_nodes_again(undisturbed):
    with WarmCluster(nodes=2, flags=FP32) as cluster:
        chunks = cluster.stream(**QUESTION)
        begun = [next(chunks) for _ in range(20)]
        cluster.coordinator.signal(signal.SIGSTOP)
        for node in cluster.nodes:
            node.wait_for("nothing for 10 s")
        cluster.coordinator.signal(signal.SIGCONT)
        assert text_of([*begun, *chunks]) == undisturbed


def a_slow_pass_is_not_a_dead_node_and_a_frozen_one_is(_):
    """While nothing but heartbeats travels."""
    with WarmCluster(nodes=0, flags=("--max-nodes", 1, *FP32)) as cluster:
        cluster.add_node(faults=(("slow_pass", 37, 11.5),))
        cluster.wait_ready()
        spare = cluster.add_node("--node-id", "spare")
        cluster.coordinator.wait_for("node spare: .* ms per layer")
        spare.signal(signal.SIGSTOP)
        assert cluster.complete(ids(37), max_tokens=4)["usage"]["completion_tokens"] >= 1
        cluster.coordinator.wait_for("node spare: joined -> lost .*sent nothing for 10 s")
        assert cluster.status()["epoch"] == 1


def a_node_that_freezes_while_it_loads(undisturbed):
    """Whoever sends its weights does not wait for it; a spare takes its place."""
    with (
        WarmCluster(nodes=0, flags=("--max-nodes", 1, *FP32)) as cluster,
        Relay("127.0.0.1", cluster.node_port, mbit=4.0) as relay,
    ):
        far = cluster.add_node("--node-id", "far", port=relay.port)
        far.wait_for(r"loading layers 0\.\.7: +\d+ %  .* MB/s +\d+ s left")
        far.signal(signal.SIGSTOP)
        cluster.add_node("--node-id", "spare")
        cluster.wait_ready()
        assert [stage["node_id"] for stage in cluster.status()["plan"]] == ["spare"]
        assert text_of(cluster.stream(**QUESTION)) == undisturbed
        far.signal(signal.SIGCONT)
        wait_until(lambda: len(cluster.status()["nodes"]) == 2)


def a_cable_that_is_cut_in_a_prefill(_):
    question = {"prompt": ids(900), "max_tokens": 12}
    with (
        WarmCluster(nodes=0, flags=("--max-nodes", 1, *FP32)) as cluster,
        Relay("127.0.0.1", cluster.node_port) as relay,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        far = cluster.add_node("--node-id", "far", port=relay.port, faults=(("slow_layers", 0.1),))
        cluster.wait_ready()
        cluster.add_node("--node-id", "spare")
        cluster.coordinator.wait_for("node spare: .* ms per layer")
        answer = pool.submit(lambda: text_of(cluster.stream(**question)))
        wait_until(lambda: cluster.status()["active_slots"] == 1)
        relay.stall()
        assert cluster.status()["generated_tokens"] == 0
        assert answer.result() == text_of(cluster.stream(**question))
        assert [stage["node_id"] for stage in cluster.status()["plan"]] == ["spare"]
        assert far.process.poll() is None


def a_cable_that_is_cut(undisturbed, way):
    """A spare takes over; once the cable is whole again the node behind it is back."""
    with (
        WarmCluster(nodes=0, flags=("--max-nodes", 1, *FP32)) as cluster,
        Relay("127.0.0.1", cluster.node_port) as relay,
    ):
        cluster.add_node("--node-id", "far", port=relay.port)
        cluster.wait_ready()
        cluster.add_node("--node-id", "spare")
        cluster.coordinator.wait_for("node spare: .* ms per layer")
        chunks = cluster.stream(**QUESTION)
        begun = [next(chunks) for _ in range(20)]
        relay.stall(way)
        assert text_of([*begun, *chunks]) == undisturbed
        assert [stage["node_id"] for stage in cluster.status()["plan"]] == ["spare"]
        relay.resume()
        wait_until(lambda: len(cluster.status()["nodes"]) == 2)


def a_restarted_node_takes_the_place_of_its_half_open_link(undisturbed):
    with (
        WarmCluster(nodes=0, flags=("--max-nodes", 1, *FP32)) as cluster,
        Relay("127.0.0.1", cluster.node_port) as relay,
    ):
        cluster.add_node("--node-id", "a", port=relay.port)
        cluster.wait_ready()
        relay.stall()
        seen = len(cluster.coordinator.lines)
        cluster.add_node("--node-id", "a")
        cluster.coordinator.wait_for("ready -> lost .replaced by a new connection of the same node", after=seen)
        cluster.wait_ready(after=seen)
        assert text_of(cluster.stream(**QUESTION)) == undisturbed
        cluster.complete("Count", max_tokens=20, ignore_eos=True, prompt_lookup=False)
        cluster.coordinator.wait_for(r"epoch 2, after \d+ tokens, plan:$")
        assert cluster.coordinator.output.count("try it:") == 1  # the second plan is like the first


SCENARIOS = {
    "a node that slept": a_node_that_slept_comes_back_and_is_used,
    "a coordinator that slept": a_coordinator_that_slept_finds_its_nodes_again,
    "a node that froze while it loaded": a_node_that_freezes_while_it_loads,
    "a slow pass and a frozen spare": a_slow_pass_is_not_a_dead_node_and_a_frozen_one_is,
    "a cable cut towards the coordinator": lambda text: a_cable_that_is_cut(text, "to_target"),
    "a cable cut towards the node": lambda text: a_cable_that_is_cut(text, "to_client"),
    "a cable cut both ways in a prefill": a_cable_that_is_cut_in_a_prefill,
    "a half-open link": a_restarted_node_takes_the_place_of_its_half_open_link,
}


@pytest.fixture(scope="module", autouse=True)
def beside(undisturbed):
    """The scenarios, each in a thread of its own from the module's first test on."""
    with concurrent.futures.ThreadPoolExecutor(len(SCENARIOS)) as pool:
        yield {name: pool.submit(scenario, undisturbed) for name, scenario in SCENARIOS.items()}


# ----------------------------------------------------------------------------
# Errors on a node
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, says",
    [
        ("RuntimeError", "compute_failed: RuntimeError: expected a tensor of another size"),
        ("ValueError", "compute_failed: ValueError: not what it was yesterday"),
        ("out of memory", "out_of_memory: .*you tried 12 GiB.*free: "),
    ],
)
def test_an_exception_in_a_layer_fails_its_request_in_words_and_the_node_lives(error, says):
    with WarmCluster(nodes=0, flags=("--max-nodes", 2, *FP32)) as cluster:
        cluster.add_node("--node-id", "good")
        cluster.add_node("--node-id", "bad", faults=(("failing_pass", 33, error),))
        cluster.wait_ready()
        status, answer = cluster.request("/v1/completions", {"prompt": ids(33)})
        assert status == 500 and answer["error"]["type"] == "server_error"
        assert re.search(f"Inference failed on node bad: {says}", answer["error"]["message"])
        # a node that runs out of memory gets fewer layers
        epoch, layers = (2, 3) if error == "out of memory" else (1, 4)
        wait_until(lambda: (cluster.status()["epoch"], cluster.status()["state"]) == (epoch, "ready"))
        assert cluster.complete(ids(34))["usage"]["prompt_tokens"] == 34
        bad = next(node for node in cluster.status()["nodes"] if node["node_id"] == "bad")
        assert bad["layers"][1] - bad["layers"][0] == layers and cluster.status()["epoch"] == epoch


def test_a_node_without_the_memory_that_it_promised_gets_fewer_layers():
    flags = ("--max-nodes", 2, "--slots", 1, "--max-context", 64, *FP32)
    with WarmCluster(nodes=0, flags=flags) as cluster:
        cluster.add_node("--node-id", "small", faults=(("room_for_layers", 3),))
        cluster.add_node("--node-id", "large")
        cluster.wait_ready()
        layers = {node["node_id"]: node["layers"][1] - node["layers"][0] for node in cluster.status()["nodes"]}
        assert layers["small"] <= 3 and layers["large"] == 8 - layers["small"]
        failure = cluster.coordinator.wait_for("node small could not load: (.*)")[1]
        assert re.search(r"not enough memory on cpu: need \d+\.\d\d GiB .*have \d+\.\d\d GiB", failure)
        assert cluster.coordinator.output.count("could not load") <= 4
        assert cluster.complete("12 + 13 =", max_tokens=4)["usage"]["completion_tokens"] >= 1


def test_a_node_whose_disk_is_full_serves_without_a_cache(undisturbed, tmp_path):
    with WarmCluster(nodes=0, flags=("--max-nodes", 1, *FP32), work_dir=tmp_path) as cluster:
        node = cluster.add_node(faults=(("full_disk", 10_000),))
        cluster.wait_ready()
        node.wait_for("weight cache in .*: it cannot be written .File too large.*will be sent again next time")
        assert text_of(cluster.stream(**QUESTION)) == undisturbed
        assert not list(tmp_path.glob("weights/*.part"))


def test_the_second_node_of_an_id_is_refused_with_the_reason(rig):
    rig.settle()
    second = rig.cluster.add_node("--node-id", "a")
    second.wait_for(
        "refused for now: a node with the id a is connected from 127.0.0.1; give this one another --node-id"
    )
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
    rig.cluster.nodes.remove(second)
    rig.check(SHORT[0])
    assert rig.nodes["a"].process.poll() is None


# ----------------------------------------------------------------------------
# Signals
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_streams_with_an_error_frame_and_the_coordinator_with_0(number):
    with WarmCluster(nodes=2, flags=FP32) as cluster:
        streams = [cluster.stream("Once", max_tokens=900) for _ in range(8)]  # four of them wait for a slot
        for chunks in streams[:4]:
            next(chunks)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            endings = [pool.submit(lambda chunks: [*chunks][-1], chunks) for chunks in streams]
            wait_until(lambda: cluster.status()["waiting_requests"] == 4)
            cluster.coordinator.signal(number)
            for ending in endings:
                assert ending.result()["error"]["message"] == "the coordinator is shutting down"
        assert cluster.coordinator.wait() == 0
        last_words = cluster.coordinator.output.partition("ending; once more ends at once\n")[2].splitlines()
        assert len(last_words) == 8 and all('"POST /v1/completions"' in line for line in last_words), last_words
        for node in cluster.nodes:  # they wait for the next coordinator, until they are told to end
            assert node.process.poll() is None
            node.signal(number)
            assert node.wait() == 0


def test_a_second_signal_ends_the_coordinator_at_once():
    patient = ("setting", "coordinator.LAST_WORDS_S", 600.0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(WarmCluster(nodes=0, flags=("--max-nodes", 1), faults=(patient,)))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", cluster.api_port)))
        client.sendall(head)  # a request that is under way, and stays so
        assert b"100 Continue" in client.recv(100)
        cluster.coordinator.signal(signal.SIGINT)
        cluster.coordinator.wait_for("once more ends at once")
        assert cluster.coordinator.process.poll() is None
        cluster.coordinator.signal(signal.SIGINT)
        assert cluster.coordinator.wait() == coordinator.EXIT_INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_coordinator_that_is_still_starting(number):
    slow = ("slow_checkpoint", 2.0)  # each of about a hundred tensors
    with WarmCluster(nodes=0, flags=("--max-nodes", 1), faults=(slow,)) as cluster:
        cluster.coordinator.signal(number)
        assert cluster.coordinator.wait(15.0) == coordinator.EXIT_INTERRUPTED
        assert "Traceback" not in cluster.coordinator.output


def test_a_local_node_that_ends_is_started_again(tmp_path, monkeypatch, caplog):
    (tmp_path / "node.py").write_text("import sys; sys.stdin.read()")
    monkeypatch.setattr(coordinator, "HERE", tmp_path)
    monkeypatch.setattr(coordinator.LocalNodes, "RESTART_S", 0.0)
    local = coordinator.LocalNodes(1, 7001, coordinator.parse_args([]))
    (first,) = local._processes
    first.kill()
    first.wait()
    with caplog.at_level("WARNING", logger="coordinator"):
        local.restart_ended()
    (second,) = local._processes
    assert second is not first and second.poll() is None
    assert "a local node ended with exit code -9; starting it again" in caplog.text
    local.stop()
    assert second.returncode == 0


def test_sigterm_ends_local_nodes_too_and_ctrl_c_is_the_coordinators():
    with WarmCluster(nodes=0, flags=("--local-nodes", 1)) as cluster:
        cluster.wait_ready()
        pid = cluster.coordinator.process.pid
        ps = ["ps", "-o", "pid=", "--ppid", str(pid)]
        node = int(subprocess.run(ps, capture_output=True, text=True, check=True).stdout)
        assert os.getpgid(node) not in (os.getpgid(pid), os.getpgid(0))
        cluster.coordinator.signal(signal.SIGTERM)
        assert cluster.coordinator.wait() == 0  # comes when all that write to its output have ended: its nodes too
        assert cluster.coordinator.lines[-1].endswith("ending; once more ends at once")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_node_in_the_middle_of_a_pass(number):
    with WarmCluster(nodes=0, flags=("--max-nodes", 1, *FP32)) as cluster:
        node = cluster.add_node(faults=(("slow_pass", 37, 600.0),))
        cluster.wait_ready()
        chunks = cluster.stream(ids(37), max_tokens=4)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: [*chunks])
            wait_until(lambda: cluster.status()["active_slots"] == 1)
            node.signal(number)
            assert node.wait() == 0
            assert "Traceback" not in node.output
            cluster.close()


# ----------------------------------------------------------------------------
# The ends of what ran beside
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_silence(beside, name):
    beside[name].result(120.0)
