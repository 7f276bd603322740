"""Links, controller and engine against nodes that live in this process, some of which misbehave on purpose."""

import concurrent.futures
import functools
import itertools
import random
import socket
import threading
import types

import pytest
import torch
from cluster import TINY_CHAT, wait_until

import coordinator
import node
import qwen
import wire

MIXED_REQUESTS = 10
DEVICES = [{"id": "cpu", "type": "cpu", "name": "cpu", "total_memory": 1 << 34, "free_memory": 1 << 34}]


@pytest.fixture(autouse=True, scope="module")
def _measure_quickly():
    """Nobody looks at the figures here, and every node that joins is measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "MEASURE_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def checkpoint():
    return coordinator.Checkpoint(TINY_CHAT)


@pytest.fixture(scope="module")
def ends(checkpoint):
    return checkpoint.ends(qwen.WeightFormat("fp16", 64, "fp32"))


class Running:
    """A controller and an engine on a free port, and the nodes that a test gives them."""

    def __init__(self, checkpoint, ends, required, slots=2, max_context=128):
        weights = qwen.WeightFormat("fp16", 64, "fp32")
        needs = coordinator.ModelNeeds(checkpoint.config, weights, slots, max_context)
        state = coordinator.ClusterState(needs, "even", required, None, None)
        model = coordinator.ModelOnWire("tiny", weights, "fp32")
        self.controller = coordinator.Controller(checkpoint, model, state, None)
        self.tokenizer = coordinator.Tokenizer(TINY_CHAT, checkpoint.raw_config)
        self.engine = coordinator.Engine(self.controller, self.tokenizer.token_mask, slots, max_context)
        self.model_id, self.system_fingerprint, self.max_context = "tiny", "", max_context  # as of a Service
        self.port = self.controller.listen("127.0.0.1", 0)
        self.controller.start()
        self.controller.allow_measuring()
        self.engine.start(ends)
        self.links = []
        self.workers = []

    @staticmethod
    def hello(node_id: str, instance: int = 1, devices: list = DEVICES, hostname: str | None = None) -> dict:
        return {
            "node_id": node_id, "instance": instance, "hostname": hostname or node_id, "python_version": "3",
            "torch_version": "2", "platform": "test", "devices": devices, "selected_device": "cpu",
            "max_memory_bytes": None, "held_memory_bytes": 0,
        }  # fmt: skip

    def join(
        self, node_id: str, instance: int = 1, devices: list = DEVICES, hostname: str | None = None, **methods
    ) -> node.Session:
        """Connects a real node.Session; `methods` replace some of its own: {name: function(session, ...)}."""
        sock = socket.create_connection(("127.0.0.1", self.port))
        link = wire.Connection(sock, "coordinator", "node")
        try:
            wire.node_handshake(link, self.hello(node_id, instance, devices, hostname), None)
        except BaseException:
            link.close()
            raise
        worker = node.Worker(torch.device("cpu"))
        worker.start()
        session = node.Session(link, worker, 2.0, None)
        for name, function in methods.items():
            bound = types.MethodType(function, session)
            setattr(session, name, bound)
            for frame_type, handler in session.handlers.items():
                if getattr(handler, "__name__", "") == name:
                    session.handlers[frame_type] = bound
        threading.Thread(target=self._serve, args=(session,), daemon=True).start()
        self.links.append(link)
        self.workers.append(worker)
        return session

    @staticmethod
    def _serve(session):
        try:
            session.serve()
        except (wire.PeerClosed, wire.PeerSilent, wire.BadFrame):
            return

    def wait_ready(self):
        assert self.controller.wait_until(lambda state: state.is_ready, 60)

    def generate(self, count: int = 6, prompt_lookup: bool = False, prompt: tuple = (1, 2, 3, 4)) -> list[int]:
        sampling = coordinator.SamplingParams(temperature=0.0, ignore_eos=True)
        generation = self.engine.submit(
            coordinator.GenerationRequest([list(prompt)], 1, count, sampling, prompt_lookup)
        )
        events = iter(lambda: generation.next_event(60), generation.DONE)
        return [event.token_id for event in events if isinstance(event, coordinator.TokenEvent)]

    def complete(self, body: dict, leave_after: int | None = None) -> dict:
        """The answer to a completion's body; leave_after: what has come of it when so many deltas have."""
        job = coordinator.prepare_job(coordinator.parse_request(body, chat=False), self)
        generation = self.engine.submit(job.request)
        try:
            meter = coordinator.TokenMeter(coordinator.Metrics(), 0.0)
            deltas = coordinator.answer_deltas(job, generation, meter, 60)
            return coordinator.fold_answer(job, itertools.islice(deltas, leave_after))
        finally:
            generation.close()

    def close(self):
        self.engine.stop("the test is over")
        self.controller.stop()
        for link in self.links:
            link.close()
        for worker in self.workers:  # a thread that is in a kernel when the tests end would abort the interpreter
            idle = threading.Event()
            worker.jobs.put(idle.set)
            idle.wait(10)


@pytest.fixture
def running(checkpoint, ends):
    made = []

    def make(required, **limits):
        made.append(Running(checkpoint, ends, required, **limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def right(checkpoint, ends):
    """What an undisturbed cluster of one node answers."""
    cluster = Running(checkpoint, ends, 1)
    cluster.join("alone")
    cluster.wait_ready()
    answer = cluster.generate()
    cluster.close()
    return answer


def test_two_nodes_answer_like_one(running, right):
    cluster = running(2)
    cluster.join("a")
    cluster.join("b")
    cluster.wait_ready()
    assert cluster.generate() == right


@pytest.mark.parametrize("handler, owed", [("on_measure", "MEASURED"), ("on_assignment", "WEIGHTS_WANTED")])
def test_a_node_that_stops_answering_is_given_up_and_the_others_serve(running, right, monkeypatch, handler, owed):
    monkeypatch.setitem(coordinator.ANSWER_LIMIT_S, owed, 0.5)
    cluster = running(1)
    deaf = cluster.join("deaf", **{handler: lambda session, frame: None})
    assert cluster.controller.wait_until(lambda state: "deaf" in state.nodes, 30)
    assert deaf.closed.wait(30)
    cluster.join("good")
    cluster.wait_ready()
    assert cluster.generate() == right


def test_a_pass_that_never_returns_loses_its_stage_and_goes_on_elsewhere(running, right, monkeypatch):
    cluster = running(1)
    stuck = cluster.join("stuck", _run=lambda session, *args: None)
    cluster.wait_ready()
    cluster.join("spare")
    assert cluster.controller.wait_until(lambda state: len(state.nodes) == 2, 30)
    monkeypatch.setitem(coordinator.ANSWER_LIMIT_S, "HIDDEN_STATE", 0.5)
    assert cluster.generate() == right
    assert stuck.closed.is_set()


def test_a_pass_is_late_after_120_s_or_20_times_its_forecast():
    link = types.SimpleNamespace(answered_at=0.0)
    pipeline = coordinator.Pipeline(1, [link], 64, "fp32", lambda *result: None)
    pipeline.forecasts = [coordinator.StageForecast({"1": 1000.0, "8": 8000.0}, 0.0, "machine")]
    for rows, limit_s in ((1, 120), (6, 120), (8, 160), (16, 320)):
        request = coordinator.Pass(1, "RUN_PREFILL", [0] * rows, list(range(rows)), 1, 1, None, sent_at=1000.0)
        pipeline._passes = {1: request}
        assert pipeline.late_links(1000.0 + limit_s - 1) == []
        assert pipeline.late_links(1000.0 + limit_s + 1) == [link]


def test_a_loader_that_was_overtaken_by_the_next_plan_asks_for_nothing(running, right):
    cluster = running(1)
    cluster.join("a")
    cluster.wait_ready()
    (stage,) = cluster.controller.cluster.plan.stages
    link = cluster.controller.cluster.nodes["a"].link
    cluster.controller._load(link, 0, stage, [], 1)
    assert link.awaited is None
    assert cluster.generate() == right and cluster.controller.cluster.epoch == 1


def test_weights_that_cannot_be_sent_end_the_link_and_not_the_plans_to_come(running, right, monkeypatch):
    convert, failed = coordinator.Checkpoint.stored_parts, []

    def fail_once(*args):
        if not failed:
            failed.append(args)
            raise MemoryError
        return convert(*args)

    monkeypatch.setattr(coordinator.Checkpoint, "stored_parts", fail_once)
    cluster = running(1)
    assert cluster.join("first").closed.wait(30)
    cluster.join("second")
    cluster.wait_ready()
    assert cluster.generate() == right


def test_a_copied_prefix_waits_for_the_stages_that_do_not_hold_it_yet(running):
    cluster = running(2)
    sessions = {name: cluster.join(name) for name in ("a", "b")}
    cluster.wait_ready()
    sampling = coordinator.SamplingParams(temperature=0.0, ignore_eos=True)

    def submit(*prompts):
        return cluster.engine.submit(coordinator.GenerationRequest(list(prompts), 1, 8, sampling))

    def tokens(generation):
        events = iter(lambda: generation.next_event(60), generation.DONE)
        return [event.token_id for event in events if isinstance(event, coordinator.TokenEvent)]

    old, new = [(7 * i) % 250 for i in range(100)], [(11 * i) % 250 + 1 for i in range(60)]
    tokens(submit([1, *old], [2, *old]))  # both slots hold other, longer conversations
    first_stage = sessions[cluster.controller.cluster.plan.node_ids[0]]
    release = threading.Event()
    first_stage.submit(release.wait)
    generations = []
    for _ in range(2):
        generations.append(submit(new))
        while cluster.engine.describe()["active_slots"] < len(generations):
            generations[0].next_event(0.01)
    release.set()
    answers = [tokens(generation) for generation in generations]
    tokens(submit([1, *old], [2, *old]))
    assert answers == [tokens(submit(new))] * 2


def answer(session, frame, rows=None, dtype="fp32", value=0.0, request_id=None, epoch=None):
    rows = len(frame.payload["slots"]) if rows is None else rows
    hidden_size = frame.payload["shape"][2]
    raw = wire.pack_hidden_states(torch.full((rows, hidden_size), value), dtype) if rows else None
    shape = [1, rows, hidden_size] if frame.type == "RUN_PREFILL" else [rows, 1, hidden_size]
    ids = {"request_id": request_id or frame.request_id, "epoch": epoch or frame.epoch}
    session.writer.put("HIDDEN_STATE", {"shape": shape, "dtype": dtype, "compute_ms": 1.0}, raw=raw, **ids)


SIZES = {"weight_bytes": 0, "packed_bytes": 0, "cached_bytes": 0, "received_bytes": 0}
CHOICE = {"shape": [64, 64], "few": "plan:", "many": "b", "threshold": 8}
KERNELS = {"choices": [CHOICE], "with_copy": None, "threads": 1}
MEASURED = {"layer_ms": dict.fromkeys(("1", "4", "6", "8", "64", "256"), 0.0), "kernels": KERNELS}


def error(session, frame, request_id):
    payload = {"code": "any", "message": "any"}
    session.writer.put("INFERENCE_ERROR", payload, request_id=request_id, epoch=frame.epoch)


LIES = {
    "too many rows": lambda session, frame: answer(session, frame, rows=3),
    "another dtype": lambda session, frame: answer(session, frame, rows=1, dtype="bf16"),
    "another pass": lambda session, frame: answer(session, frame, rows=1, request_id=999),
    "a later epoch": lambda session, frame: answer(session, frame, rows=1, epoch=99),
    "twice": lambda session, frame: [answer(session, frame, rows=1, value=float("nan")) for _ in range(2)],
    "loaded again": lambda session, frame: session.writer.put("LOAD_COMPLETE", SIZES, epoch=frame.epoch),
    "measured again": lambda session, frame: session.writer.put("MEASURED", MEASURED),
    "wants weights again": lambda session, frame: session.writer.put(
        "WEIGHTS_WANTED", {"names": []}, epoch=frame.epoch
    ),
    "an error of no pass": lambda session, frame: error(session, frame, 0),
    "an error of another pass": lambda session, frame: error(session, frame, 999),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_node_that_lies_is_closed_and_the_request_goes_on_elsewhere(running, right, lie):
    cluster = running(1)
    liar = cluster.join("liar", on_run=LIES[lie])
    cluster.wait_ready()
    cluster.join("honest")
    assert cluster.controller.wait_until(lambda state: len(state.nodes) == 2, 30)
    if lie == "twice":  # the first answer is taken, and is not a number: that request fails, the second answer closes
        with pytest.raises(coordinator.ApiError, match="not finite"):
            cluster.generate()
    else:
        assert cluster.generate() == right
    assert liar.closed.wait(30)
    cluster.wait_ready()
    assert cluster.generate() == right


@pytest.mark.parametrize("hot", ["first", "second"])
def test_hidden_states_that_are_not_numbers_fail_the_request_and_name_the_stage(running, hot):
    def nan(session, frame):
        rows = 1 if hot == "second" else None
        answer(session, frame, rows=rows, value=float("nan"))

    cluster = running(2)
    for name in ("first", "second"):
        cluster.join(name, **({"on_run": nan} if name == hot else {}))
        assert cluster.controller.wait_until(lambda state, name=name: name in state.nodes, 30)
    cluster.wait_ready()
    assert cluster.controller.cluster.plan.node_ids == ("first", "second")
    for _ in range(2):
        with pytest.raises(coordinator.ApiError, match=f"not finite.*node {hot} sent"):
            cluster.generate()


def test_a_node_that_says_it_is_loaded_before_it_has_its_weights_is_closed(running, right):
    def at_once(session, frame):
        session.writer.put("WEIGHTS_WANTED", {"names": []}, epoch=frame.epoch)
        session.writer.put("LOAD_COMPLETE", SIZES, epoch=frame.epoch)
        session.writer.put("LOAD_COMPLETE", SIZES, epoch=frame.epoch)

    cluster = running(1)
    liar = cluster.join("liar", on_assignment=at_once)
    assert liar.closed.wait(30)
    cluster.join("honest")
    cluster.wait_ready()
    assert cluster.generate() == right


def test_a_node_that_asks_for_its_weights_again_and_again_is_closed_with_the_reason(running, right, caplog):
    name, asked = "model.layers.0.input_layernorm.weight", []

    def ask(session, frame):
        asked.append(frame.type)
        session.assignment = types.SimpleNamespace(epoch=frame.epoch)
        session.writer.put("WEIGHTS_WANTED", {"names": [name]}, epoch=frame.epoch)

    cluster = running(1)
    greedy = cluster.join(
        "greedy",
        on_assignment=ask,
        on_weights_complete=ask,
        on_weight_chunk=lambda session, frame: None,
        place=lambda session, frame, nbytes: None,
    )
    assert greedy.closed.wait(30)
    assert asked == ["ASSIGNMENT"] + ["WEIGHTS_COMPLETE"] * coordinator.MAX_ASKS
    assert "greedy (" in caplog.text and "asks for weights again and again, 4 times in one load" in caplog.text
    cluster.join("honest")
    cluster.wait_ready()
    assert cluster.generate() == right


def test_a_node_that_never_answers_measure_keeps_neither_others_nor_the_plan_waiting(running, right, monkeypatch):
    """Not even one of the same machine."""
    monkeypatch.setattr(coordinator, "MEASURE_PATIENCE_S", 0.5)
    cluster, asked = running(1), threading.Event()
    deaf = cluster.join("deaf", hostname="box", on_measure=lambda session, frame: asked.set())
    assert asked.wait(30)
    cluster.join("good", hostname="box")
    cluster.wait_ready()
    assert cluster.generate() == right
    assert not deaf.closed.is_set()
    status = {node["node_id"]: node for node in cluster.controller.describe()["nodes"]}
    assert status["deaf"]["state"] == "joined" and "silent while measuring" in status["deaf"]["last_error"]


def test_another_machines_name_holds_up_no_measurement(running, monkeypatch):
    monkeypatch.setattr(coordinator, "MEASURE_PATIENCE_S", 3600.0)
    cluster = running(1)
    theirs, ours = socket.socketpair()
    cluster.controller.welcome(theirs, "elsewhere", "10.0.0.9")
    link = wire.Connection(ours, "coordinator", "node")
    cluster.links.append(link)
    wire.node_handshake(link, cluster.hello("deaf", hostname="box"), None)
    while link.recv().type != "MEASURE":
        continue
    cluster.join("good", hostname="box")
    assert cluster.controller.wait_until(lambda state: "good" in state.nodes and state.nodes["good"].measured, 30)


def test_weights_go_to_all_nodes_at_once(running, right):
    """Each node takes its first bytes only when the other's are there too."""
    together = threading.Barrier(2)

    def first_chunk_together(session, frame):
        if not session.assignment.loading.received_bytes:
            together.wait(30)
        node.Session.on_weight_chunk(session, frame)

    cluster = running(2)
    for name in ("a", "b"):
        cluster.join(name, on_weight_chunk=first_chunk_together)
    cluster.wait_ready()
    assert cluster.generate() == right


def test_a_claim_of_absurd_memory_fails_at_loading_and_an_honest_node_serves(running, right):
    def cannot(session, frame):
        failed = {"reason": "no such memory", "need_bytes": 2, "have_bytes": 1}
        session.writer.put("LOAD_FAILED", failed, epoch=frame.epoch)

    cluster = running(1)
    cluster.join("boaster", devices=[{**DEVICES[0], "free_memory": wire.MAX_BYTES}], on_assignment=cannot)
    assert cluster.controller.wait_until(
        lambda state: "boaster" in state.nodes and state.nodes["boaster"].load_error, 30
    )
    cluster.join("honest")
    cluster.wait_ready()
    assert cluster.generate() == right


def test_frames_of_an_older_plan_are_dropped_and_counted(running, right):
    cluster = running(1)
    first = cluster.join("first")
    cluster.wait_ready()
    first.connection.close()
    assert cluster.controller.wait_until(lambda state: not state.nodes, 30)
    second = cluster.join("second")
    cluster.wait_ready()
    old = {"epoch": cluster.controller.cluster.epoch - 1, "request_id": 1}
    hidden_states = wire.pack_hidden_states(torch.zeros(1, 8), "fp32")
    second.writer.put("WEIGHTS_WANTED", {"names": []}, epoch=old["epoch"])
    second.writer.put(
        "HIDDEN_STATE", {"shape": [1, 1, 8], "dtype": "fp32", "compute_ms": 0.0}, raw=hidden_states, **old
    )
    assert cluster.generate() == right
    assert cluster.controller.describe()["nodes"][0]["dropped_frames"] == 2


def test_short_prompts_share_a_pass_and_each_gets_its_own_answer(running):
    cluster = running(2)
    cluster.join("first")
    cluster.join("second")
    cluster.wait_ready()
    sampling = coordinator.SamplingParams(temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3, 4], [9, 8, 7], [5] * 40, [6, 7], [11, 12, 13, 14, 15]]

    def answer(*requests):
        """{prompt index: ids} of requests that are all there before the engine looks."""
        generations = [
            coordinator.Generation(coordinator.GenerationRequest([p], 1, 5, sampling), cluster.engine) for p in requests
        ]
        cluster.engine._inbox.put(lambda: [cluster.engine._on_submit(generation) for generation in generations])
        answers = []
        for generation in generations:
            events = iter(functools.partial(generation.next_event, 60), generation.DONE)
            answers.append([event.token_id for event in events if isinstance(event, coordinator.TokenEvent)])
        return answers

    alone = [answer(prompt)[0] for prompt in prompts]
    sent, send = [], cluster.controller.pipeline.send

    def noted(kind, hidden_states, slots, *rest):
        sent.append((kind, len(set(slots))))
        return send(kind, hidden_states, slots, *rest)

    cluster.controller.pipeline.send = noted
    for slot in cluster.engine.slots:
        slot.tokens, slot.settled = [], 0
    assert answer(*prompts) == alone
    assert ("RUN_PREFILL", 2) in sent


def two_stages(running, machines: tuple[str, str], slots: int = 2, **rows_cost: float):
    """A cluster whose two stages are on these machines and whose rows cost the same in any number, or so many
    milliseconds; and, in a list that grows, (kind, slots, passes of its kind in flight beside it) of every pass."""
    cluster = running(2, slots=slots)
    cluster.join("first")
    cluster.join("second")
    cluster.wait_ready()
    rows_cost = rows_cost or {"1": 1.0, "8": 8.0, "64": 64.0, "256": 256.0}
    pipeline = cluster.controller.pipeline
    pipeline.forecasts = [coordinator.StageForecast(rows_cost, 0.0, machine) for machine in machines]
    sent, send = [], pipeline.send

    def noted(kind, hidden_states, slots, *rest):
        sent.append((kind, slots, list(cluster.engine.in_flight.values()).count(kind)))
        return send(kind, hidden_states, slots, *rest)

    pipeline.send = noted
    return cluster, sent


def test_sequences_are_decoded_in_groups_where_that_is_quicker(running, right):
    cluster, sent = two_stages(running, ("one", "other"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        together = list(pool.map(cluster.generate, (40, 40)))
    assert together[0] == together[1] and together[0][: len(right)] == right
    decodes = [(len(slots), others) for kind, slots, others in sent if kind == "RUN_DECODE"]
    assert (1, 1) in decodes and all(rows == 1 for rows, _ in decodes)


def test_sequences_take_turns_where_passes_of_fewer_rows_bring_more(running, right):
    cluster, sent = two_stages(running, ("one", "one"), slots=3, **{"1": 10.0, "2": 11.0, "3": 40.0})
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        together = list(pool.map(cluster.generate, (60, 60, 60)))
    assert together[0] == together[1] == together[2] and together[0][: len(right)] == right
    decodes = [slots for kind, slots, _ in sent if kind == "RUN_DECODE"]
    assert max(map(len, decodes)) == 2
    turns = [[i for i, slots in enumerate(decodes) if slot in slots] for slot in range(3)]
    all_three = decodes[max(first for first, *_ in turns) : min(last for *_, last in turns)]
    assert len(all_three) > 20
    assert all(set(one + next_one) == {0, 1, 2} for one, next_one in itertools.pairwise(all_three))
    counts = [sum(slot in slots for slots in all_three) for slot in range(3)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("machines, most", [(("one", "one"), 1), (("one", "other"), 2)])
def test_chunks_of_a_prompt_are_at_work_at_once_only_on_machines_of_their_own(running, monkeypatch, machines, most):
    cluster, sent = two_stages(running, machines)
    prompt = tuple(range(1, 41))
    expected = cluster.generate(1, prompt=prompt)
    for slot in cluster.engine.slots:
        slot.tokens, slot.settled = [], 0
    sent.clear()
    monkeypatch.setattr(coordinator, "PREFILL_CHUNKS", (4,))
    assert cluster.generate(1, prompt=prompt) == expected
    in_flight = [1 + others for kind, _, others in sent if kind == "RUN_PREFILL"]
    assert len(in_flight) == 10 and max(in_flight) == most


def test_a_node_that_asks_and_never_reads_is_closed_and_the_memory_is_bounded(running, right, monkeypatch):
    monkeypatch.setattr(wire, "_MAX_WAITING_FRAMES", 100)
    cluster = running(1)
    deaf = cluster.join("deaf")
    cluster.wait_ready()
    release = threading.Event()
    deaf.handlers["PING"] = lambda frame: None
    deaf.handlers["PONG"] = lambda frame: release.wait(30)  # its reader reads no more
    with pytest.raises(wire.PeerClosed):
        for _ in range(1_000_000):
            deaf.connection.send("PING", {})
    release.set()
    cluster.join("good")
    cluster.wait_ready()
    assert cluster.generate() == right


def test_refused_connections_do_not_flood_the_log(caplog):
    refusals = coordinator.RefusalLog()
    with caplog.at_level("WARNING", logger="coordinator"):
        for i in range(219):
            refusals.add("10.0.0.9:1", "no", 100.0 + i / 100)
        refusals.flush(109.9)
        refusals.flush(110.0)
        refusals.add("10.0.0.9:1", "no", 300.0)
        refusals.flush(400.0)
    lines = [record.getMessage() for record in caplog.records]
    one = "a connection from 10.0.0.9:1 did not become a node: no"
    assert lines == [one] * 5 + ["and 214 more connections did not become nodes in the last 10 s", one]


def test_a_peer_cannot_forge_log_lines(capsys):
    coordinator.set_up_logging("info")
    coordinator.log.error("node x: %s", "plan:\nforged")
    coordinator.log.info("epoch 1, plan:\n%s", "a table", extra={"own_lines": True})
    assert capsys.readouterr().err.splitlines()[0].endswith(r"plan:\nforged")


def test_a_connection_from_an_address_with_few_is_not_the_one_to_go(running):
    cluster = running(1)
    controller = cluster.controller
    quiet = [socket.socketpair() for _ in range(coordinator.MAX_STRANGERS + 10)]
    for i, (_, theirs) in enumerate(quiet):
        controller.welcome(theirs, f"quiet {i}", "10.0.0.2" if i == 0 else "10.0.0.1")
    for i, (ours, _) in enumerate(quiet):
        ours.settimeout(30 if 1 <= i <= 10 else 0)
        if 1 <= i <= 10:
            assert ours.recv(1) == b""  # the oldest of the address that has most
        else:
            with pytest.raises(BlockingIOError):
                ours.recv(1)
    cluster.join("good")
    cluster.wait_ready()
    assert cluster.generate()
    for ours, _ in quiet:
        ours.close()


def test_a_failed_pass_fails_its_request_only(running, right):
    cluster = running(1)
    session = cluster.join("weak")
    cluster.wait_ready()
    run, calls = session._run, []

    def fail_once(assignment, kind, request_id, payload, raw):
        calls.append(kind)
        if len(calls) == 1:
            session._inference_error(assignment, request_id, "out_of_memory", "need 2 GiB, have 1 GiB")
        else:
            run(assignment, kind, request_id, payload, raw)

    session._run = fail_once
    with pytest.raises(coordinator.ApiError, match="node weak: out_of_memory: need 2 GiB"):
        cluster.generate()
    assert cluster.generate() == right


def test_a_second_live_node_of_one_id_is_refused_and_a_dead_one_replaced(running, right):
    cluster = running(1)
    first = cluster.join("twin", instance=1)
    cluster.wait_ready()
    with pytest.raises(wire.Refused, match="another --node-id"):
        cluster.join("twin", instance=2)
    assert cluster.generate() == right
    cluster.join("twin", instance=1)  # the same process again: its old connection is dead, whatever it looks like
    assert first.closed.wait(30)
    cluster.wait_ready()
    assert cluster.generate() == right


def test_a_request_that_a_larger_plan_interrupts_has_lost_no_plan(running, right, monkeypatch):
    monkeypatch.setattr(coordinator, "MAX_LOST_PLANS", 1)  # the first would end it
    monkeypatch.setattr(coordinator, "RECOVERY_GRACE_S", 0.0)
    monkeypatch.setattr(coordinator, "GROW_LIMIT_S", 0.0)  # it grows while something is generated too
    cluster = running(2)
    stays, goes = cluster.join("a"), cluster.join("b")
    cluster.wait_ready()
    goes.connection.close()
    assert cluster.controller.wait_until(lambda state: state.epoch == 2 and state.is_ready, 30)
    release = threading.Event()
    stays.submit(release.wait)  # its worker is busy until the plan has grown
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cluster.generate)
        wait_until(lambda: cluster.engine.describe()["active_slots"] == 1)
        cluster.join("b")
        assert cluster.controller.wait_until(lambda state: state.epoch == 3, 30)
        release.set()
        assert answer.result(60) == right


def test_a_request_that_came_just_before_the_first_plan_was_lost_ends_too(running, monkeypatch):
    """The engine hears of such a plan only when it is gone."""
    monkeypatch.setattr(coordinator, "OUTAGE_LIMIT_S", 0.1)
    engine = running(1).engine
    request = coordinator.GenerationRequest([[1, 2, 3]], 1, 4, coordinator.SamplingParams())
    generation = coordinator.Generation(request, engine)
    engine._inbox.put(lambda: engine._on_submit(generation))
    with pytest.raises(coordinator.ApiError, match="not ready"):
        generation.next_event(30)


def test_requests_beyond_the_waiting_places_are_refused(running, monkeypatch):
    monkeypatch.setattr(coordinator, "MAX_WAITING_REQUESTS", 3)
    cluster = running(1)
    release = threading.Event()
    session = cluster.join("slow")
    cluster.wait_ready()
    session.submit(release.wait)  # the worker is busy until the test says so
    sampling = coordinator.SamplingParams(temperature=0.0)
    request = coordinator.GenerationRequest([[1, 2, 3]], 1, 4, sampling)
    generations = [cluster.engine.submit(request) for _ in range(2)]
    while cluster.engine.describe()["active_slots"] < 2:
        generations[0].next_event(0.01)
    generations += [cluster.engine.submit(request) for _ in range(3)]
    with pytest.raises(coordinator.ApiError) as error:
        cluster.engine.submit(request)
    assert (error.value.status, error.value.type) == (503, "server_overloaded") and error.value.headers["Retry-After"]
    for generation in generations:
        generation.close()
    release.set()
    assert cluster.generate()
    assert cluster.engine.describe()["waiting_requests"] == 0


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 64, b"\x00" * 7 + b"\x05hello"])
def test_strangers_on_the_node_port_are_closed_and_change_nothing(running, data):
    cluster = running(1)
    with socket.create_connection(("127.0.0.1", cluster.port)) as sock:
        sock.sendall(data)
        sock.settimeout(30)
        while sock.recv(4096):
            pass
    cluster.join("good")
    cluster.wait_ready()
    assert cluster.generate()


def test_drafts_make_no_pass_larger_than_nodes_take(running, monkeypatch):
    monkeypatch.setattr(coordinator.DecodeTimes, "estimate", lambda times, rows, now: 1.0)  # drafts cost nothing
    engine = running(1, slots=6, max_context=40).engine
    request = coordinator.GenerationRequest([[1, 2] * 5], 6, 30, coordinator.SamplingParams())
    generation = coordinator.Generation(request, engine)
    sequences = [coordinator.Sequence(generation, i, 0, request.prompts[0], None) for i in range(request.n)]
    for sequence in sequences:
        sequence.lookup = coordinator.PromptLookup(sequence.ids)
    drafts = engine._drafts(sequences)
    assert any(drafts) and sum(1 + len(ids) for ids in drafts) <= engine.max_context


# ----------------------------------------------------------------------------
# Any mix of requests at once
# ----------------------------------------------------------------------------

TEXTS = (
    "the cat sat on the mat, " * 4,
    "12 + 30 = 42; 12 + 30 = 42; 12 + 31 =",
    "Once upon a time",
    "a b c d a b c d a b c d a b c",
)
STOPS = (None, None, " ", "the", ["c d a", "42"], "\n")


def random_body(rng: random.Random, max_context: int) -> dict:
    """A completion that repeats itself, shares its beginning with others, stops anywhere, or fills the context."""
    ids = list(rng.choice(TEXTS).encode()) * rng.choice([1, 1, 2])  # tiny-chat's first 256 ids are bytes
    ids = ids[: rng.choice([max_context - 1, max_context - 2, *(rng.randrange(1, max_context) for _ in range(4))])]
    return {
        "prompt": ids,
        "max_tokens": rng.choice([1, 2, 5, 17, 40, max_context]),
        "temperature": rng.choice([0, 0, 0.3, 1.0]),
        "seed": rng.randrange(1000),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "stop": rng.choice(STOPS),
        "logprobs": rng.choice([None, None, 2]),
        "ignore_eos": rng.random() < 0.7,
        "echo": rng.random() < 0.1,
        "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
    }


def of_choices(answer: dict) -> list[tuple]:
    """What must not depend on drafts or neighbours: text, tokens, why it ended."""
    return [(c["text"], (c["logprobs"] or {}).get("tokens"), c["finish_reason"]) for c in answer["choices"]]


@pytest.mark.parametrize("slots, max_context", [(3, 96), (6, 40)])
def test_any_mix_of_requests_is_answered_as_each_alone_without_drafts(running, monkeypatch, slots, max_context):
    rng, sizes = random.Random(slots), random.Random(slots)
    # drafts of any size, whatever they are worth: right ones and wrong ones
    monkeypatch.setattr(
        coordinator, "draft_sizes", lambda guesses, _: [sizes.randrange(min(n, 3) + 1) for _, n in guesses]
    )
    drafts, count = coordinator.Engine._drafts, itertools.count()

    def every_second_ends_wrong(engine, sequences):
        found = drafts(engine, sequences)
        for ids in filter(None, found):
            ids[-1] = (ids[-1] + next(count) % 2) % 256
        return found

    monkeypatch.setattr(coordinator.Engine, "_drafts", every_second_ends_wrong)
    cluster = running(2, slots=slots, max_context=max_context)
    sessions = [cluster.join(name) for name in ("a", "b")]
    cluster.wait_ready()
    bodies = [random_body(rng, max_context) for _ in range(MIXED_REQUESTS)]
    alone = [cluster.complete(body | {"prompt_lookup": False}) for body in bodies]
    leaves = [rng.choice([None, None, rng.randrange(1, 20)]) for _ in bodies]
    with concurrent.futures.ThreadPoolExecutor(2 * slots) as pool:
        together = list(pool.map(cluster.complete, bodies, leaves))
    for body, leave, mine, single in zip(bodies, leaves, together, alone):
        if leave is None:
            assert of_choices(mine) == of_choices(single), body
            assert mine["usage"]["completion_tokens"] == single["usage"]["completion_tokens"], body
        else:
            assert all(s["text"].startswith(m["text"]) for m, s in zip(mine["choices"], single["choices"])), body
    assert cluster.engine.accepted_drafts and cluster.engine.drafted_tokens > cluster.engine.accepted_drafts
    assert not any(session.closed.is_set() for session in sessions)
