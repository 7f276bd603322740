"""Nodes that die, stall and come back under load, for as long as one likes; answers stay those of an undisturbed run.

    python tests/soak.py --kills 200          # one kill after another, each at a random point of a stream's life
    python tests/soak.py --minutes 20         # mixed requests from several clients, with every kind of trouble
    python tests/soak.py --kills 3 --model DIR

Prints a table and, as the last line, one JSON object; the exit code is 1 when an answer was wrong, a request failed
that should not have, or the second half of the run has left threads, files, slots or memory in use in the coordinator.
(What is taken once, and early, is no leak.) Runs with one --seed do the same things, but not at the same instants. With
a real model most of the time is arithmetic: Qwen2.5-0.5B in fp32 on 2 cores takes about 60 s to start and 10 s for each
kill.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import random
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from cluster import TINY_CHAT, WarmCluster, wait_until
from relay import Relay

NAMES = ("a", "b", "c")
STAGES = 2  # so that one of the three is a spare
POINTS = ("idle", "hello", "load", "prefill", "token")
CLIENTS = 4
ANSWER_S = 120.0
MEMORY_SLACK = 24 << 20  # what a coordinator's anonymous memory differs by from one quiet moment to another


@dataclass(frozen=True)
class Question:
    """A completion that is asked again and again."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    fields: tuple = ()  # of the request, as pairs

    def body(self) -> dict:
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return {"prompt": prompt, "max_tokens": self.max_tokens, **dict(self.fields)}


def long_prompt(seed: int, tokens: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(250) for _ in range(tokens))


SHORT = [
    Question("Once", 40),
    Question("Tell me something about 漢字 and 😊", 60),
    Question("12 + 13 =", 90),
    Question("The quick brown fox jumps over the lazy dog. " * 3, 50),
]
LONG = [Question(long_prompt(seed, tokens), 12) for seed, tokens in ((1, 300), (2, 600), (3, 950))]
FAMILY = [Question("You are a helpful person. Be brief. " * 4 + last, 16) for last in ("Yes?", "No?", "Why?", "Who?")]
CHOICES = [Question("Once upon a time", 20, (("n", 3), ("temperature", 1.3), ("seed", seed))) for seed in (5, 6)]


class WrongAnswer(Exception):
    """An answer that differs from the undisturbed one."""


class RequestFailed(Exception):
    """A request that ended with an error; the message is its type and words."""


class Rig:
    """A coordinator, two stages and a spare, all of them with names; nodes that are killed are started again."""

    def __init__(self, model: Path | str = TINY_CHAT, seed: int = 0, flags: tuple = (), relayed: tuple = ()):
        self.rng = random.Random(seed)
        self.cluster = WarmCluster(model, 0, ("--max-nodes", STAGES, "--dtype", "fp32", *flags))
        self.nodes = {}
        self.kills = 0
        self.relay: Relay | None = None
        self._relayed = relayed  # names of the nodes whose cable is a Relay
        self._lock = threading.Lock()
        self._undisturbed: dict[Question, list[str]] = {}

    def __enter__(self):
        self.cluster.__enter__()
        self.relay = Relay("127.0.0.1", self.cluster.node_port).start()
        for name in NAMES:
            self.start(name)
        self.settle()
        return self

    def __exit__(self, *_) -> None:
        self.cluster.close()
        self.relay.stop()

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        port = self.relay.port if name in self._relayed else None
        self.nodes[name] = self.cluster.add_node("--node-id", name, port=port)

    def kill(self, name: str, again: bool = True) -> None:
        with self._lock:
            self.kills += 1
            self.nodes[name].kill()
            self.cluster.nodes.remove(self.nodes[name])
            if again:
                self.start(name)

    def planned(self) -> list[str]:
        """The nodes that hold layers now."""
        return [stage["node_id"] for stage in self.cluster.status()["plan"]]

    def a_planned_node(self) -> str:
        return self.rng.choice(self.planned() or NAMES)

    def wait_ready(self) -> None:
        wait_until(lambda: self.cluster.status()["state"] == "ready", ANSWER_S)

    def settle(self) -> None:
        """Waits until requests can be served and every node has been measured."""
        wait_until(self._is_settled, ANSWER_S)

    def _is_settled(self) -> bool:
        status = self.cluster.status()
        measured = [node["node_id"] for node in status["nodes"] if node["layer_ms"]]
        return status["state"] == "ready" and sorted(measured) == sorted(NAMES)

    # -- requests ------------------------------------------------------------------------------------------------------

    def learn(self, questions: list[Question]) -> None:
        """Asks each question undisturbed; what comes back is what all later answers must be."""
        for question in questions:
            self._undisturbed[question] = self.ask(question)

    def ask(self, question: Question, at_token=None) -> list[str]:
        """The texts of all choices, streamed; at_token(i) is called after each chunk. Raises RequestFailed."""
        texts = collections.defaultdict(str)
        reasons = {}
        for i, chunk in enumerate(self.cluster.stream(**question.body(), timeout=ANSWER_S)):
            if "error" in chunk:
                raise RequestFailed(f"{chunk['error']['type']}: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"]
            if at_token is not None:
                at_token(i)
        if set(reasons.values()) != {"length"}:
            raise RequestFailed(f"finish reasons {reasons}")
        return [texts[index] for index in sorted(texts)]

    def check(self, question: Question, at_token=None) -> None:
        """Asks, and raises WrongAnswer unless the answer is the undisturbed one."""
        answer = self.ask(question, at_token)
        if answer != self._undisturbed[question]:
            raise WrongAnswer(f"{question}: {answer!r} is not {self._undisturbed[question]!r}")


# ----------------------------------------------------------------------------
# One kill at a chosen point of a request's life
# ----------------------------------------------------------------------------


def kill_at(rig: Rig, point: str) -> None:
    """Kills a node at one of POINTS and checks the answer that was under way, or the next one."""
    rig.wait_ready()
    KILLERS[point](rig)


def _kill_while_idle(rig: Rig) -> None:
    rig.kill(rig.rng.choice(NAMES))
    rig.wait_ready()
    rig.check(rig.rng.choice(SHORT))


def _kill_at_a_token(rig: Rig) -> None:
    question = rig.rng.choice(SHORT)
    at, victim = rig.rng.randrange(question.max_tokens // 2), rig.a_planned_node()
    rig.check(question, lambda i: rig.kill(victim) if i == at else None)


def _kill_in_prefill(rig: Rig) -> None:
    question, victim = rig.rng.choice(LONG), rig.a_planned_node()
    with _under_way(rig, question):
        wait_until(lambda: rig.cluster.status()["active_slots"] > 0, ANSWER_S)
        time.sleep(rig.rng.uniform(0, 0.1))
        rig.kill(victim)


def _kill_while_loading(rig: Rig) -> None:
    with _under_way(rig, rig.rng.choice(SHORT), first_token=True):
        seen = len(rig.cluster.coordinator.lines)
        rig.kill(rig.a_planned_node())
        loading = rig.cluster.coordinator.wait_for(r"node (\w+): \w+ -> loading", after=seen)[1]
        time.sleep(rig.rng.uniform(0, 0.02))
        rig.kill(loading)


def _kill_in_hello(rig: Rig) -> None:
    with _under_way(rig, rig.rng.choice(SHORT), first_token=True):
        victim = rig.a_planned_node()
        rig.kill(victim)
        rig.nodes[victim].wait_for("looking for the coordinator")
        time.sleep(rig.rng.uniform(0, 0.03))
        rig.kill(victim)


@contextlib.contextmanager
def _under_way(rig: Rig, question: Question, first_token: bool = False):
    """Asks a question beside the body of the with statement; its answer is checked at the end."""
    begun = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(rig.check, question, lambda i: begun.set())
        if first_token:
            wait_until(lambda: begun.is_set() or answer.done(), ANSWER_S)
        yield
        answer.result(ANSWER_S)


KILLERS = dict(zip(POINTS, (_kill_while_idle, _kill_in_hello, _kill_while_loading, _kill_in_prefill, _kill_at_a_token)))


# ----------------------------------------------------------------------------
# What a coordinator holds
# ----------------------------------------------------------------------------


@dataclass
class Holdings:
    """Threads, open files, sockets and anonymous memory of a process; slots and requests of its engine."""

    threads: int
    files: int
    sockets: int
    memory_bytes: int
    active_slots: int
    waiting_requests: int


def holdings(cluster: WarmCluster) -> Holdings:
    """Of a cluster's coordinator, from /proc, /status and /metrics."""
    process = Path(f"/proc/{cluster.coordinator.process.pid}")
    fields = dict(re.findall(r"^(\w+):\s+(\d+)", (process / "status").read_text(), re.MULTILINE))
    targets = []
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(str(link.readlink()))
    status = cluster.status()
    return Holdings(
        int(fields["Threads"]),
        len(targets),
        sum(target.startswith("socket:") for target in targets),
        int(fields["RssAnon"]) * 1024,  # the mapped checkpoint is not ours to give back
        status["active_slots"],
        status["waiting_requests"],
    )


def leaks(before: Holdings, after: Holdings) -> list[str]:
    """What the coordinator kept, in words. Both were taken with all nodes settled and no request running."""
    kept = [
        f"{after_count - before_count} {name}"
        for name in ("threads", "files", "sockets")
        if (after_count := getattr(after, name)) > (before_count := getattr(before, name))
    ]
    kept += [f"{name}: {getattr(after, name)}" for name in ("active_slots", "waiting_requests") if getattr(after, name)]
    if after.memory_bytes > before.memory_bytes + MEMORY_SLACK:
        kept.append(f"{(after.memory_bytes - before.memory_bytes) / 1e6:.0f} MB of memory")
    return kept


def no_leaks(rig: Rig, before: Holdings) -> tuple[list[str], Holdings]:
    """leaks, once what is ending has ended, or after a while all the same; and what is held then."""
    end = time.monotonic() + 20.0
    while leaks(before, after := holdings(rig.cluster)) and time.monotonic() < end:
        time.sleep(0.05)
    return leaks(before, after), after


# ----------------------------------------------------------------------------
# Kills in a row
# ----------------------------------------------------------------------------


@dataclass
class Tally:
    """What happened, by kind."""

    requests: collections.Counter = field(default_factory=collections.Counter)
    troubles: collections.Counter = field(default_factory=collections.Counter)
    errors: collections.Counter = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, counter: str, kind: str) -> None:
        with self.lock:
            getattr(self, counter)[kind] += 1

    @contextlib.contextmanager
    def request(self, kind: str):
        """Counts what becomes of a request. A refusal before its start, for want of nodes, is no fault."""
        self.count("requests", kind)
        try:
            yield
        except RequestFailed as failure:
            self.count("errors", str(failure)[:160])
            time.sleep(0.1)  # as a client does before it tries again
        except WrongAnswer as wrong:
            with self.lock:
                self.wrong.append(str(wrong))


def kill_many(rig: Rig, count: int, tally: Tally) -> None:
    """So many kills at random points, as fast as answers come; now and then while nodes are away from the last."""
    end = rig.kills + count
    while rig.kills < end:
        point = rig.rng.choice(POINTS)
        tally.count("troubles", f"kill: {point}")
        with tally.request(f"beside a kill: {point}"):
            kill_at(rig, point)
        if rig.rng.random() < 0.75:
            rig.settle()


# ----------------------------------------------------------------------------
# Mixed load
# ----------------------------------------------------------------------------


def ask_for_ever(rig: Rig, seed: int, tally: Tally, end: float) -> None:
    """One client: random questions until the end, some of them given up in the middle."""
    rng = random.Random(seed)
    kinds = {
        "short": SHORT,
        "long prompt": LONG,
        "shared prefix": FAMILY,
        "3 choices": CHOICES,
        "cancelled": SHORT + LONG,
    }
    while time.monotonic() < end:
        kind = rng.choice(list(kinds))
        question = rng.choice(kinds[kind])
        with tally.request(kind):
            if kind == "cancelled":
                _give_up_in_the_middle(rig, question, rng)
            else:
                rig.check(question)


def _give_up_in_the_middle(rig: Rig, question: Question, rng: random.Random) -> None:
    chunks = rig.cluster.stream(**question.body(), timeout=ANSWER_S)
    with contextlib.closing(chunks):
        for chunk in itertools.islice(chunks, rng.randrange(1, question.max_tokens)):
            if "error" in chunk:
                raise RequestFailed(f"{chunk['error']['type']}: {chunk['error']['message']}")


def _kill_one(rig: Rig) -> None:
    rig.kill(rig.rng.choice(NAMES))


def _kill_two(rig: Rig) -> None:
    for name in rig.rng.sample(NAMES, 2):
        rig.kill(name)


def _pause(rig: Rig) -> None:
    _stop_for(rig, rig.rng.uniform(0.2, 3.0))


def _sleep_long(rig: Rig) -> None:
    _stop_for(rig, rig.rng.uniform(11.0, 14.0))


def _stop_for(rig: Rig, seconds: float) -> None:
    node = rig.nodes[rig.rng.choice(NAMES)]
    node.signal(signal.SIGSTOP)
    time.sleep(seconds)
    node.signal(signal.SIGCONT)


def _stall_the_cable(rig: Rig) -> None:
    rig.relay.stall(*rig.rng.choice(((), ("to_target",), ("to_client",))))
    time.sleep(rig.rng.choice((0.5, 2.0, 12.0)))
    rig.relay.resume()


def _cut_the_cable(rig: Rig) -> None:
    rig.relay.cut()


# (what it is called, how it is done, how often among the others)
TROUBLES = (
    ("kill of one", _kill_one, 8),
    ("kill of two", _kill_two, 3),
    ("pause below 10 s", _pause, 3),
    ("sleep above 10 s", _sleep_long, 1),
    ("stalled cable", _stall_the_cable, 2),
    ("cut cable", _cut_the_cable, 3),
)


def make_trouble(rig: Rig, tally: Tally, end: float) -> None:
    """Something goes wrong every few seconds; each trouble ends, and the cluster settles, before the next but a few."""
    names, makers, weights = zip(*TROUBLES)
    while time.monotonic() < end:
        time.sleep(rig.rng.uniform(0.2, 3.0))
        (number,) = rig.rng.choices(range(len(TROUBLES)), weights)
        tally.count("troubles", names[number])
        makers[number](rig)
        if rig.rng.random() < 0.8:
            rig.settle()


def mix(rig: Rig, minutes: float, tally: Tally) -> None:
    """Several clients and a trouble-maker, until the time is over."""
    end = time.monotonic() + 60 * minutes
    with concurrent.futures.ThreadPoolExecutor(CLIENTS + 1) as pool:
        work = [pool.submit(make_trouble, rig, tally, end)]
        work += [pool.submit(ask_for_ever, rig, rig.rng.random(), tally, end) for _ in range(CLIENTS)]
        for each in concurrent.futures.as_completed(work):
            each.result()


# ----------------------------------------------------------------------------
# The program
# ----------------------------------------------------------------------------


def trouble(rig: Rig, kills: int, minutes: float, tally: Tally) -> None:
    """So many kills, or mixed load for so long, and until all nodes are back."""
    if kills:
        kill_many(rig, kills, tally)
    if minutes:
        mix(rig, minutes, tally)
    rig.settle()


def is_fault(error: str) -> bool:
    """Being refused while too few nodes are there is what the API promises; anything else is a fault."""
    return not error.startswith("cluster_not_ready: Model is not ready")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--model", default=str(TINY_CHAT))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tally = Tally()
    flags = ("--max-context", 1024)
    with Rig(args.model, args.seed, flags, relayed=("c",) if args.minutes else ()) as rig:
        questions = SHORT + LONG + (FAMILY + CHOICES if args.minutes else [])
        rig.learn(questions)
        if args.minutes:  # as many at once as later: then memory is as it will be
            with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
                list(pool.map(rig.check, questions))
        before, began = holdings(rig.cluster), time.monotonic()
        trouble(rig, args.kills // 2, args.minutes / 2, tally)
        _, halfway = no_leaks(rig, before)
        trouble(rig, args.kills - args.kills // 2, args.minutes / 2, tally)
        kept, after = no_leaks(rig, halfway)
        seconds = time.monotonic() - began
        faults = [f"wrong answer: {wrong}" for wrong in tally.wrong]
        faults += [f"{count} times: {error}" for error, count in tally.errors.items() if is_fault(error)]
        faults += [f"the coordinator kept {what}" for what in kept]
        if "Traceback" in rig.cluster.coordinator.output:
            faults.append("a traceback in the coordinator's log:\n" + rig.cluster.coordinator.output[-20000:])
    for title, counter in (("requests", tally.requests), ("troubles", tally.troubles), ("errors", tally.errors)):
        for kind, count in sorted(counter.items()):
            print(f"{title:10}{count:6}  {kind}")
    for name in vars(before):
        counts = (getattr(at, name) for at in (before, halfway, after))
        print("before{:12}  halfway{:12}  after{:12}  {}".format(*counts, name))
    print("\n".join(faults) or "nothing wrong")
    figures = {
        "seconds": round(seconds, 1),
        "requests": tally.requests.total(),
        "kills": rig.kills,
        "wrong_answers": len(tally.wrong),
        "errors": dict(tally.errors),
        "memory_start": before.memory_bytes,
        "memory_halfway": halfway.memory_bytes,
        "memory_end": after.memory_bytes,
        "faults": len(faults),
    }
    print(json.dumps(figures))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
