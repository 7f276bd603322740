"""Benchmarks. Prints tables and, as the last line, one JSON object with every figure.

    python tests/bench.py --model DIR                # STANDARD below, on clusters of 1, 2 and 3 nodes on this machine
    python tests/bench.py --model DIR --only decode,prefill --quant fp16 --nodes 1,2 --pairs 5
    python tests/bench.py --model DIR --only network,speculation,loading     # FURTHER below, each on its own clusters
    python tests/bench.py --model DIR --quality      # how far int8 and int4 are from fp32, on real text
    python tests/bench.py --sampler                  # milliseconds per sampled token at a vocabulary of 152k

Machines are noisy, and one that is fast now may be slow in a minute. So what is compared is up at the same time and
measured in turn, `--pairs` times, and a ratio is the median of the ratios of the turns. Compare figures of one run with
one another, not with another day's. Everything is timed at a client of the HTTP API; requests are greedy, do not end
before their length, and have prompts that no cache has seen. Memory and processor figures need Linux.

Quality is the mean Kullback-Leibler divergence of the next-token distribution from the fp32 model's, in nats per token,
through the same kernels that nodes use, for prefill in one pass and for decode one token at a time. The text is the
language reference that CPython carries (pydoc_data.topics).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import gc
import http.client
import inspect
import itertools
import json
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster import ROOT, TINY_CHAT, Cluster, Program

import coordinator
import quant
import qwen

WINDOW = 512  # tokens that see one another in the quality measurement
DECODED = 64  # tokens of each window that are also run one at a time
REFERENCE_TEXT = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))


def cell_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def table(header: tuple, rows: list[tuple]) -> str:
    cells = [tuple(map(cell_text, row)) for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells)


# ----------------------------------------------------------------------------
# Quality
# ----------------------------------------------------------------------------


def load_whole(checkpoint: coordinator.Checkpoint, weights: qwen.WeightFormat) -> tuple[qwen.Ends, qwen.Stage]:
    """The whole model in this process, in its stored form and with measured kernels, as nodes would hold it."""
    config = checkpoint.config
    shapes = list(qwen.merged_linear_shapes(config).values())
    kernels = quant.choose_kernels(shapes, weights.quant, weights.group_size, weights.dtype, "cpu")
    stage = qwen.Stage(config, 0, config.num_hidden_layers, weights, 1, WINDOW, "cpu")
    places = {name: place for layer in stage.layers.values() for name, place in layer.destinations.items()}
    stored = qwen.stored_tensors(config, 0, config.num_hidden_layers, weights)
    for entry, tensor in checkpoint.stored_parts(stored, weights):
        places[entry.name].copy_(tensor)
    for layer in stage.layers.values():
        layer.prepare(kernels)
    return checkpoint.ends(weights), stage


def window_logprobs(ends: qwen.Ends, stage: qwen.Stage, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of every next token in one prefill [T, V], and of the last ones decoded one by one [D, V]."""
    hidden_states = ends.embed(ids)
    positions = list(range(len(ids)))
    prefill = ends.logits(stage.run(hidden_states, [0] * len(ids), positions, len(ids))).log_softmax(-1)
    last = range(len(ids) - DECODED, len(ids))
    decode = [ends.logits(stage.run(hidden_states[i : i + 1], [0], [i], 1)) for i in last]
    return prefill, torch.cat(decode).log_softmax(-1)


def divergence(reference: torch.Tensor, other: torch.Tensor) -> list[float]:
    """KL(reference || other) of each row, in nats."""
    return (reference.exp() * (reference - other)).sum(-1).tolist()


def bits_per_weight(config: qwen.Config, weights: qwen.WeightFormat) -> float:
    """Stored bits per weight of the decoder layers' linears, scales and zeros counted."""
    stored = [t for t in qwen.stored_tensors(config, 0, 1, weights) if ".weight" in t.name and "norm" not in t.name]
    return 8 * sum(t.nbytes for t in stored) / sum(n * k for n, k in qwen.linear_shapes(config).values())


@torch.inference_mode()
def quality(args: argparse.Namespace) -> dict:
    checkpoint = coordinator.Checkpoint(args.model)
    tokenizer = coordinator.Tokenizer(args.model, checkpoint.raw_config)
    ids = tokenizer.encode(REFERENCE_TEXT[: 8 * args.tokens], parse_special=False)[: args.tokens]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    formats = {"fp16": ("fp16", 64, "fp16"), "bf16": ("fp16", 64, "bf16"), "int8": ("int8", 64, "fp16")}
    formats |= {f"int4 g{group}": ("int4", group, "fp16") for group in (32, 64, 128)}
    ends, stage = load_whole(checkpoint, qwen.WeightFormat("fp16", 64, "fp32"))
    reference = [window_logprobs(ends, stage, window) for window in windows]
    rows, figures = [], {}
    for name, parts in formats.items():
        del ends, stage
        gc.collect()
        weights = qwen.WeightFormat(*parts)
        if weights.quant == "int4":
            checkpoint.calibrate(tokenizer.encode(coordinator.CALIBRATION_TEXT, parse_special=False))
        ends, stage = load_whole(checkpoint, weights)
        prefill_kl, last_kl, decode_kl = [], [], []
        for window, (prefill, decode) in zip(windows, reference):
            got_prefill, got_decode = window_logprobs(ends, stage, window)
            prefill_kl += divergence(prefill, got_prefill)
            decode_kl += divergence(decode, got_decode)
            last_kl += divergence(prefill[-DECODED:], got_prefill[-DECODED:])
        figures[name] = {
            "bits_per_weight": bits_per_weight(checkpoint.config, weights),
            "kl_prefill": statistics.fmean(prefill_kl),
            "kl_prefill_last": statistics.fmean(last_kl),
            "kl_decode_last": statistics.fmean(decode_kl),
        }
        rows.append((name, *(f"{figure:.5f}" for figure in figures[name].values())))
        print(f"{name} done", file=sys.stderr)
    print(f"{len(windows)} windows of {WINDOW} tokens; the last {DECODED} of each are also decoded one by one")
    print(table(("format", "bits/weight", "KL, prefill", "KL of the last, prefill", "the same, decode"), rows))
    return figures


# ----------------------------------------------------------------------------
# Sampler
# ----------------------------------------------------------------------------

VOCABULARY = 151_936
SAMPLER_SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7, top_p 0.8, top_k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "the same, penalties": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "frequency_penalty": 0.5},
    "temperature 0.7, top_p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "greedy, 5 logprobs": {"temperature": 0.0, "top_logprobs": 5},
}


def sampler(args: argparse.Namespace) -> dict:
    """Median milliseconds of Sampler.sample on logits as peaked as a model's, and on flat ones (the worst case)."""
    torch.manual_seed(0)
    flat = torch.randn(VOCABULARY)
    peaked = flat * 2 + 12 * torch.rand(VOCABULARY) ** 400  # a few hundred tokens stand out
    mask = np.ones(VOCABULARY, dtype=bool)
    figures, rows = {}, []
    for name, fields in SAMPLER_SETTINGS.items():
        figures[name] = {}
        for kind, logits in (("peaked", peaked), ("flat", flat)):
            one = coordinator.Sampler(coordinator.SamplingParams(seed=1, **fields), mask, list(range(1000)))
            seconds = []
            for _ in range(100):
                begin = time.perf_counter()
                one.sample(logits)
                seconds.append(time.perf_counter() - begin)
            figures[name][kind] = 1e3 * statistics.median(seconds)
        rows.append((name, f"{figures[name]['peaked']:.3f}", f"{figures[name]['flat']:.3f}"))
    print(table(("settings", "peaked logits, ms", "flat logits, ms"), rows))
    return figures


# ----------------------------------------------------------------------------
# Requests, timed at the client
# ----------------------------------------------------------------------------


class Answer(NamedTuple):
    """A streamed answer: tokens[i] of its tokens were there at times[i] (seconds, perf_counter)."""

    asked_at: float
    times: list[float]
    tokens: list[int]
    text: str
    usage: dict

    @property
    def first_s(self) -> float:
        """Time to first token, in seconds."""
        return self.times[0] - self.asked_at

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (self.tokens[-1] - self.tokens[0]) / (self.times[-1] - self.times[0])


def ask(cluster: Cluster, enough: threading.Event | None = None, **fields) -> Answer:
    """Streams a chat ("messages") or a completion ("prompt"), greedy, without drafts, and max_tokens long unless fields
    say otherwise: prompts of random ids make models repeat themselves, which prompt lookup would make look quick.

    Ends early when `enough` is set. Raises RuntimeError with the server's words when it refuses or fails.
    """
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"temperature": 0, "ignore_eos": True, "prompt_lookup": False, "stream": True, "stream_options": options}
    body |= fields
    connection = http.client.HTTPConnection("127.0.0.1", cluster.api_port, timeout=600)
    with contextlib.closing(connection):
        asked_at = time.perf_counter()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {response.read().decode()}")
        return _timed(response, asked_at, enough)


def _timed(response: http.client.HTTPResponse, asked_at: float, enough: threading.Event | None) -> Answer:
    answer = Answer(asked_at, [], [0], "", {})
    for line in response:
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len("data: ") :])
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        for choice in event["choices"]:
            text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            answer = answer._replace(text=answer.text + text)
        if event["usage"]["completion_tokens"] > answer.tokens[-1]:
            answer.times.append(now)
            answer.tokens.append(event["usage"]["completion_tokens"])
        answer = answer._replace(usage=event["usage"])
        if enough is not None and enough.is_set():
            break
    return answer._replace(tokens=answer.tokens[1:])


class Prompts:
    """Token ids and text that are new each time, so that no cache can help."""

    STEP = 7919  # tokens from one start to the next; prime, so that starts do not come again soon

    def __init__(self, tokenizer: coordinator.Tokenizer):
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(REFERENCE_TEXT, parse_special=False)
        self._start = 0

    def ids(self, count: int) -> list[int]:
        self._start = (self._start + self.STEP) % (len(self._ids) - count)
        return self._ids[self._start : self._start + count]

    def text(self, count: int) -> str:
        """Text of about `count` tokens."""
        return self._tokenizer.decode(self.ids(count))


def alternate(measures: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Calls all measures in turn: what the machine does to one it does to the others."""
    runs = {name: [] for name in measures}
    for _ in range(turns):
        for name, measure in measures.items():
            runs[name].append(measure())
    return runs


def medians(runs: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in runs.items()}


def ratio(runs: dict[str, list[float]], one: str, other: str) -> float:
    """The median over the turns of `one` / `other`."""
    return statistics.median(a / b for a, b in zip(runs[one], runs[other]))


def compare(ratios: dict, name: str, value: float, at_least: float | None = None, at_most: float | None = None) -> None:
    """Notes a ratio and prints it beside its target."""
    ratios[name] = value
    target = ""
    if at_least is not None or at_most is not None:
        met = value >= at_least if at_least is not None else value <= at_most
        limit = f">= {at_least}" if at_least is not None else f"<= {at_most}"
        target = f"  (target {limit}: {'met' if met else 'MISSED'})"
    print(f"  {name}: {value:.3f}{target}", flush=True)


# ----------------------------------------------------------------------------
# Systems: clusters of real processes, Transformers in this one, the machine
# ----------------------------------------------------------------------------


class Network(NamedTuple):
    """What lies between coordinator and nodes. They share the coordinator's line: each gets its part of mbit."""

    delay_ms: float = 0.0  # one way
    mbit: float = 0.0  # 0: no limit


@dataclass
class Running:
    """A cluster that is ready, and how it became so."""

    cluster: Cluster
    quant: str
    load_s: float  # from ASSIGNMENT to the last LOAD_COMPLETE
    joined_to_ready_s: float  # from the last node's HELLO
    sent_bytes: int
    busy_cores: dict[str, float]  # processor seconds per second while loading, by process


def process_ids(cluster: Cluster) -> dict[str, int]:
    nodes = {f"node {i}": node.process.pid for i, node in enumerate(cluster.nodes, 1)}
    return {"coordinator": cluster.coordinator.process.pid, **nodes}


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> tuple[int, int]:
    """(anonymous, file-backed) resident bytes of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["Anonymous"], sizes["Rss"] - sizes["Anonymous"]


@contextlib.contextmanager
def relay(node_port: int, network: Network, nodes: int) -> Iterator[int]:
    """The port of a relay to the coordinator, a process of its own; node_port when the network has no limits."""
    if network == Network():
        yield node_port
        return
    command = [sys.executable, str(ROOT / "tests" / "relay.py"), "--to", f"127.0.0.1:{node_port}"]
    command += ["--delay-ms", str(network.delay_ms)]
    command += ["--mbit", str(network.mbit / nodes)] if network.mbit else []
    program = Program(command)
    try:
        yield int(program.wait_for(r"relay on .* port (\d+)")[1])
    finally:
        program.kill()


@contextlib.contextmanager
def running(
    bench: Bench,
    mode: str,
    nodes: int,
    *,
    flags: tuple = (),
    node_flags: tuple = (),
    network: Network | None = None,
    cores: tuple[int, ...] = (),
    work_dir: Path | None = None,
    on_start: Callable[[Cluster], None] = lambda cluster: None,
) -> Iterator[Running]:
    """A ready cluster that has answered once. cores[i]: the only one that node i may use; on_start is called before
    there are nodes."""
    network = bench.network if network is None else network
    flags = ("--quant", mode, "--max-nodes", nodes, "--max-context", bench.max_context, *flags)
    with contextlib.ExitStack() as stack:
        work_dir = work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(Cluster(bench.args.model, 0, flags, node_flags, work_dir, threads=None))
        on_start(cluster)
        for i in range(nodes):
            port = stack.enter_context(relay(cluster.node_port, network, nodes))
            node = cluster.add_node("--node-id", f"bench{i}", port=port)
            if cores:
                os.sched_setaffinity(node.process.pid, {cores[i]})  # long before torch counts its cores
        for i in range(nodes):
            cluster.coordinator.wait_for(f"node bench{i}: joined from")
        result = timed_load(cluster, mode)
        ask(cluster, prompt=bench.prompts.ids(64), max_tokens=8)
        yield result


def timed_load(cluster: Cluster, mode: str) -> Running:
    """Waits until a cluster whose nodes have all joined is ready."""

    def busy() -> dict[str, float]:
        return {name: processor_seconds(pid) for name, pid in process_ids(cluster).items()}

    joined_at = time.perf_counter()
    cluster.nodes[0].wait_for(r"epoch \d+: layers")
    before, began_at = busy(), time.perf_counter()
    cluster.coordinator.wait_for("ready to generate over")
    ended_at = time.perf_counter()
    load_s = ended_at - began_at
    cores = {name: (seconds - before[name]) / load_s for name, seconds in busy().items()}
    sent = sum(node["bytes_sent"] for node in cluster.status()["nodes"])
    return Running(cluster, mode, load_s, ended_at - joined_at, sent, cores)


class Reference:
    """Transformers in this process, the same checkpoint in several dtypes."""

    DTYPES = ("fp32", "fp16", "bf16")

    def __init__(self, folder: Path):
        self._folder = folder

    @functools.lru_cache  # noqa: B019 (one instance for the whole run)
    def model(self, dtype: str):
        import transformers

        transformers.utils.logging.disable_progress_bar()
        kwargs = {"dtype": qwen.TORCH_DTYPES[dtype]}
        return transformers.AutoModelForCausalLM.from_pretrained(self._folder, **kwargs).eval()

    @torch.inference_mode()
    def decode(self, dtype: str, prompt: list[int], count: int) -> float:
        """Tokens per second, greedy, after the first."""
        model = self.model(dtype)
        out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        begin = time.perf_counter()
        for _ in range(count):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        return count / (time.perf_counter() - begin)

    @torch.inference_mode()
    def prefill_s(self, dtype: str, prompt: list[int]) -> float:
        """Seconds."""
        begin = time.perf_counter()
        self.model(dtype)(torch.tensor([prompt]), logits_to_keep=1)
        return time.perf_counter() - begin


def read_bandwidth() -> float:
    """Bytes per second at which all cores read many tensors in turn, together much larger than caches."""
    tensors = [torch.ones(1 << 22, dtype=torch.int64) for _ in range(32)]  # 1 GiB
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        for tensor in tensors:
            tensor.sum()
        seconds.append(time.perf_counter() - begin)
    return sum(tensor.nbytes for tensor in tensors) / statistics.median(seconds[1:])


class Bench:
    """What all scenarios share."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.network = Network(args.relay_ms or 0.0, args.relay_mbit or 0.0)
        self.checkpoint = coordinator.Checkpoint(args.model)
        self.max_context = min(4096, self.checkpoint.config.max_position_embeddings)
        self.lengths = [length for length in args.prompts if length < self.max_context]
        self.long = min(2048, self.max_context - 64)
        self.prompts = Prompts(coordinator.Tokenizer(args.model, self.checkpoint.raw_config))
        self.reference = Reference(args.model)

    def ends_bytes(self, mode: str) -> tuple[int, int]:
        """Bytes of (embedding, head) as the coordinator stores them."""
        config = self.checkpoint.config
        head = quant.Spec(config.vocab_size, config.hidden_size, mode if mode == "fp16" else "int8", 64, "fp16", "cpu")
        return self.checkpoint.tensor("model.embed_tokens.weight").nbytes, head.stored_nbytes


# ----------------------------------------------------------------------------
# Standard scenarios: clusters of one mode and several sizes, side by side
# ----------------------------------------------------------------------------

SHORT = 32  # tokens of a prompt whose prefill hardly matters
DECODE_TARGETS = {"fp16": 1.3, "int8": 1.4, "int4": 2.0}  # 2 nodes, over Transformers in fp16
PREFILL_TARGETS = {"fp16": 1.0, "int8": 0.65, "int4": 0.65}  # 512 tokens, over Transformers' best dtype

Group = dict[int, Running]  # by number of nodes


def cluster_name(running: Running) -> str:
    nodes = len(running.cluster.nodes)
    return f"{running.quant}, {nodes} node{'s' if nodes > 1 else ''}"


def decode_rate(bench: Bench, one: Running) -> float:
    """Tokens per second of one stream, after its first token."""
    return ask(one.cluster, prompt=bench.prompts.ids(SHORT), max_tokens=bench.args.decoded + 1).rate


def first_token_s(bench: Bench, one: Running, length: int) -> float:
    """Time to first token, in seconds, with a prompt of `length` tokens."""
    return ask(one.cluster, prompt=bench.prompts.ids(length), max_tokens=1).first_s


def decode(bench: Bench, group: Group) -> dict:
    """One stream, tokens per second, and what that reads of the weights."""
    for dtype in Reference.DTYPES:
        bench.reference.decode(dtype, bench.prompts.ids(SHORT), 2)
    measures = {cluster_name(one): partial(decode_rate, bench, one) for one in group.values()}
    for dtype in Reference.DTYPES:
        prompt = bench.prompts.ids(SHORT)
        measures[f"Transformers {dtype}"] = partial(bench.reference.decode, dtype, prompt, bench.args.decoded)
    bandwidth = read_bandwidth()
    runs = alternate(measures, bench.args.pairs)
    rates = medians(runs)
    mode, weight_bytes = weights_read(bench, group)
    read = {name: rate * weight_bytes for name, rate in rates.items() if name.startswith(mode)}
    print(f"the machine reads {bandwidth / 1e9:.1f} GB/s; a token reads {weight_bytes / 1e6:.0f} MB of {mode} weights")
    shares = {name: (value / 1e9, value / bandwidth) for name, value in read.items()}
    rows = [(name, rate, *shares.get(name, ("", ""))) for name, rate in rates.items()]
    print(table(("system", "decode, tokens/s", "weights read, GB/s", "of the machine's"), rows))
    ratios = {}
    for nodes, one in group.items():
        value = ratio(runs, cluster_name(one), "Transformers fp16")
        compare(ratios, f"{cluster_name(one)} / Transformers fp16", value, DECODE_TARGETS[mode] if nodes == 2 else None)
    if 1 in group and 2 in group:
        value = ratio(runs, cluster_name(group[2]), cluster_name(group[1]))
        compare(ratios, f"{mode}, 2 nodes / 1 node", value, 0.95)
    return {"tokens_per_s": runs, "ratios": ratios, "read_bandwidth": bandwidth, "weight_bytes": weight_bytes}


def weights_read(bench: Bench, group: Group) -> tuple[str, int]:
    """(mode, bytes of weights, in their stored form, that one token needs: all layers and the head)."""
    one = next(iter(group.values()))
    layers = sum(node["weight_bytes"] for node in one.cluster.status()["nodes"])
    return one.quant, layers + bench.ends_bytes(one.quant)[1]


def prefill(bench: Bench, group: Group) -> dict:
    """Prompt tokens per second up to the first token, for several lengths."""
    rates = transformers_short_prefill(bench)
    fast = [dtype for dtype, rate in rates.items() if rate > max(rates.values()) / 2]
    figures = {"first_token_s": {}, "transformers_64_tokens_per_s": rates, "ratios": {}}
    print("Transformers, prefill of 64: " + ", ".join(f"{dtype} {rate:.1f} tokens/s" for dtype, rate in rates.items()))
    print("(longer prompts only in the dtypes that reach half of the best of these: others would take minutes)")
    for length in (SHORT, *bench.lengths):
        measures = {cluster_name(one): partial(first_token_s, bench, one, length) for one in group.values()}
        for dtype in fast:
            measures[f"Transformers {dtype}"] = partial(bench.reference.prefill_s, dtype, bench.prompts.ids(length))
        runs = alternate(measures, bench.args.pairs)
        figures["first_token_s"][length] = runs
        rows = [(name, length / seconds, seconds) for name, seconds in medians(runs).items()]
        print(table((f"prompt of {length} tokens", "tokens/s", "first token, s"), rows), flush=True)
        if length != SHORT:
            compare_prefill(figures["ratios"], group, runs, length)
    return figures


def transformers_short_prefill(bench: Bench) -> dict[str, float]:
    """Tokens per second of a prompt of 64, by dtype."""
    rates = {}
    for dtype in Reference.DTYPES:
        bench.reference.prefill_s(dtype, bench.prompts.ids(8))
        rates[dtype] = 64 / bench.reference.prefill_s(dtype, bench.prompts.ids(64))
    return rates


def compare_prefill(ratios: dict, group: Group, runs: dict[str, list[float]], length: int) -> None:
    seconds = medians(runs)
    best = min((name for name in seconds if name.startswith("Transformers")), key=seconds.get)
    for one in group.values():
        target = PREFILL_TARGETS[one.quant] if length == 512 else None
        value = ratio(runs, best, cluster_name(one))
        compare(ratios, f"prefill of {length}, {cluster_name(one)} / {best}", value, target)


def concurrent_rate(bench: Bench, cluster: Cluster, count: int) -> float:
    """Tokens per second of `count` requests at once, all told, from the first request to the last token."""
    prompts = [bench.prompts.ids(16) for _ in range(count)]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda ids: ask(cluster, prompt=ids, max_tokens=bench.args.decoded), prompts))
    seconds = max(a.times[-1] for a in answers) - min(a.asked_at for a in answers)
    return sum(a.tokens[-1] for a in answers) / seconds


def concurrency(bench: Bench, group: Group) -> dict:
    """Aggregate tokens per second at 1, 2, 4 and 8 requests at once."""
    counts, figures, ratios = ("1", "2", "4", "8"), {}, {}
    for one in group.values():
        measures = {count: partial(concurrent_rate, bench, one.cluster, int(count)) for count in counts}
        figures[cluster_name(one)] = alternate(measures, bench.args.pairs)
    rows = [(name, *medians(runs).values()) for name, runs in figures.items()]
    print(table(("tokens/s of so many requests at once", *counts), rows))
    for name, runs in figures.items():
        target = 3.5 if name == "fp16, 2 nodes" else None
        compare(ratios, f"{name}, 8 at once / 1", ratio(runs, "8", "1"), target)
    return {"tokens_per_s": figures, "ratios": ratios}


LOAD_HEADER = ("MB sent", "load, s", "MB/s", "joined to ready, s", "cores busy while loading")


def load_row(one: Running) -> tuple:
    cores = ", ".join(f"{name} {busy:.2f}" for name, busy in one.busy_cores.items())
    return one.sent_bytes / 1e6, one.load_s, one.sent_bytes / one.load_s / 1e6, one.joined_to_ready_s, cores


def load(bench: Bench, group: Group) -> dict:
    """From ASSIGNMENT to LOAD_COMPLETE; every cluster once, one after the other."""
    rows = {cluster_name(one): load_row(one) for one in group.values()}
    print(table(("cluster", *LOAD_HEADER), [(name, *row) for name, row in rows.items()]))
    return rows


def memory(bench: Bench, group: Group) -> dict:
    """Resident memory of every process after a prompt of the greatest length."""
    rows, figures = [], {}
    for one in group.values():
        ask(one.cluster, prompt=bench.prompts.ids(max(bench.lengths)), max_tokens=4)
        weights = [node["weight_bytes"] for node in one.cluster.status()["nodes"]]
        stored = dict(zip(process_ids(one.cluster), [sum(bench.ends_bytes(one.quant)), *weights]))
        for process, pid in process_ids(one.cluster).items():
            anonymous, mapped = memory_bytes(pid)
            figures[f"{cluster_name(one)}, {process}"] = {"anonymous": anonymous, "file_backed": mapped}
            rows.append((cluster_name(one), process, *(round(n / 1e6) for n in (anonymous, mapped, stored[process]))))
    print(table(("cluster", "process", "anonymous MB", "file-backed MB", "its weights as stored, MB"), rows))
    return figures


def reuse(bench: Bench, group: Group) -> dict:
    """Time to first token of a conversation of 2,000 tokens, and of its next turn."""
    rows, figures, ratios = [], {}, {}
    for one in group.values():
        turns = [two_turns(bench, one.cluster) for _ in range(bench.args.pairs)]
        figures[cluster_name(one)] = runs = {
            "first": [first.first_s for first, _ in turns],
            "next": [second.first_s for _, second in turns],
        }
        usage = turns[-1][1].usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        rows.append((cluster_name(one), *medians(runs).values(), cached, usage["prompt_tokens"]))
    print(table(("cluster", "first turn, s", "next turn, s", "cached tokens", "of"), rows))
    for name, runs in figures.items():
        compare(ratios, f"{name}, next turn / first", ratio(runs, "next", "first"), at_most=0.15)
    return {"first_token_s": figures, "table": rows, "ratios": ratios}


def two_turns(bench: Bench, cluster: Cluster) -> tuple[Answer, Answer]:
    """The answers to a new long message, and to a short one after it."""
    messages = [{"role": "user", "content": bench.prompts.text(bench.long - 128)}]
    first = ask(cluster, messages=messages, max_tokens=16)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Please go on."}]
    return first, ask(cluster, messages=messages, max_tokens=1)


# ----------------------------------------------------------------------------
# Further scenarios: each starts the clusters it needs, of the first of --quant
# ----------------------------------------------------------------------------


def chunk_rows(cluster: Cluster, tokens: int) -> int:
    """Rows of the chunks in which a cluster's coordinator begins to send a prompt of so many tokens."""
    stages = []
    for node in cluster.status()["nodes"]:
        layers = node["layers"][1] - node["layers"][0]
        times = {rows: layers * milliseconds for rows, milliseconds in node["layer_ms"].items()}
        stages.append(coordinator.StageForecast(times, 0.0, node["node_id"]))
    return coordinator.prefill_chunk(tokens, stages)


def pipeline(bench: Bench) -> dict:
    """Chunks of a prefill on two nodes of one core each at the same time; and what another stream feels of them."""
    mode, length, ratios = bench.args.quant[0], bench.long, {}
    one_core = {"node_flags": ("--threads", "1")}
    with (
        running(bench, mode, 2, cores=(0, 1), **one_core) as two,
        running(bench, mode, 1, cores=(0,), **one_core) as one,
    ):
        clusters = {"1 node": one, "2 nodes": two}
        runs = alternate(
            {name: partial(first_token_s, bench, c, length) for name, c in clusters.items()}, bench.args.pairs
        )
        gaps = [longest_gap(bench, two.cluster, length) for _ in range(bench.args.pairs)]
        chunk = chunk_rows(two.cluster, length)
        chunk_alone_s = statistics.median(first_token_s(bench, two, chunk) for _ in gaps)
    chunk_s = statistics.median(runs["2 nodes"]) / (length / chunk)
    rows = [(name, length / seconds, seconds) for name, seconds in medians(runs).items()]
    print(table((f"{mode}, one core a node", f"prefill of {length}, tokens/s", "s"), rows))
    print(f"a chunk of {chunk} tokens every {chunk_s:.2f} s, one alone takes {chunk_alone_s:.2f} s")
    print("longest gaps of another stream: " + ", ".join(f"{gap:.2f} s" for gap in gaps))
    compare(ratios, "2 nodes / 1 node", ratio(runs, "1 node", "2 nodes"), 1.6)
    compare(ratios, "longest gap / time between chunks", statistics.median(gaps) / chunk_s, at_most=3.0)
    compare(ratios, "longest gap / a chunk alone", statistics.median(gaps) / chunk_alone_s)
    return {
        "first_token_s": runs,
        "chunk_rows": chunk,
        "chunk_s": chunk_s,
        "chunk_alone_s": chunk_alone_s,
        "longest_gaps_s": gaps,
        "ratios": ratios,
    }


def longest_gap(bench: Bench, cluster: Cluster, length: int) -> float:
    """The longest time (s) between tokens of a stream while another request's prompt is read."""
    enough = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        tokens = bench.max_context - 2 * SHORT
        # min_tokens: EOS tokens show no text, so none may be drawn; what has no text has no time at the client
        fields = {"prompt": bench.prompts.ids(SHORT), "max_tokens": tokens, "min_tokens": tokens}
        stream = pool.submit(ask, cluster, enough, **fields)
        time.sleep(2.0)  # some tokens before
        long = ask(cluster, prompt=bench.prompts.ids(length), max_tokens=1)
        enough.set()
        times = stream.result().times
    if not times[0] < long.asked_at < long.times[0] <= times[-1]:
        raise RuntimeError("the other stream did not run all the while that the long prompt was read")
    return max(b - a for a, b in itertools.pairwise(times) if b > long.asked_at and a < long.times[0])


def network(bench: Bench) -> dict:
    """Decode over links of 1 ms each way (or --relay-ms, --relay-mbit) beside the same over loopback."""
    mode, ratios = bench.args.quant[0], {}
    slow = Network(bench.args.relay_ms or 1.0, bench.args.relay_mbit or 0.0)
    with running(bench, mode, 2, network=Network()) as near, running(bench, mode, 2, network=slow) as far:
        clusters = {"loopback": near, "relay": far}
        runs = alternate({name: partial(decode_rate, bench, c) for name, c in clusters.items()}, bench.args.pairs)
    rows = [(name, rate) for name, rate in medians(runs).items()]
    print(table((f"{mode}, 2 nodes; relay: {slow.delay_ms} ms each way", "decode, tokens/s"), rows))
    compare(ratios, "relay / loopback", ratio(runs, "relay", "loopback"), 0.8)
    return {"tokens_per_s": medians(runs), "ratios": ratios}


EDIT = "Output this file again, the whole of it, with `lines` renamed to `printed`. Output only the code.\n\n"
REPEATING = [{"role": "user", "content": f"{EDIT}```python\n{inspect.getsource(Program)}```"}]
STORY = [{"role": "user", "content": "Tell me a story about a lighthouse that nobody has heard before."}]


def speculation(bench: Bench) -> dict:
    """Prompt lookup on and off: a text that repeats its prompt over a slow network, one that does not on loopback."""
    command = [sys.executable, str(ROOT / "coordinator.py"), "--help"]
    if "--prompt-lookup" not in subprocess.run(command, check=True, capture_output=True, text=True).stdout:
        print("prompt lookup is not there")
        return {"there": False}
    slow = Network(bench.args.relay_ms or 5.0, bench.args.relay_mbit or 0.0)
    repeating = {"messages": REPEATING, "max_tokens": 256}
    story = {"messages": STORY, "max_tokens": 96, "temperature": 1.0, "seed": 1}
    ratios, runs = {}, {}
    for kind, between, fields, target in (
        ("repeats its prompt", slow, repeating, 2.0), ("does not", Network(), story, 0.95)
    ):  # fmt: skip
        with running(bench, bench.args.quant[0], 2, flags=("--prompt-lookup", "on"), network=between) as one:
            runs[kind] = on_and_off(one.cluster, fields, bench.args.pairs)
        compare(ratios, f"text that {kind}, on / off", ratio(runs[kind], "on", "off"), target)
    rows = [(kind, name, rate) for kind, both in runs.items() for name, rate in medians(both).items()]
    print(table(("text", "prompt lookup", "tokens/s"), rows))
    return {"there": True, "tokens_per_s": runs, "ratios": ratios}


def on_and_off(cluster: Cluster, fields: dict, turns: int) -> dict[str, list[float]]:
    """Tokens per second with prompt lookup and without. Says so when the texts differ."""
    answers: dict[str, list[Answer]] = {"on": [], "off": []}
    for _ in range(turns):
        for name, kept in answers.items():
            kept.append(ask(cluster, **fields, prompt_lookup=name == "on"))
    if len({answer.text for kept in answers.values() for answer in kept}) > 1:
        print("  the texts differ between on and off (fp16: the last bits depend on the batch size)")
    return {name: [answer.rate for answer in kept] for name, kept in answers.items()}


def loading(bench: Bench) -> dict:
    """Weights over a line of 1 Gbit/s that all nodes share, cold and from the nodes' caches, and over loopback."""
    line = Network(bench.args.relay_ms or 0.0, bench.args.relay_mbit or 1000.0)
    loads = {mode: starts_of(bench, mode, line) for mode in bench.args.quant}
    rows = [(mode, kind, *load_row(one)) for mode, kinds in loads.items() for kind, one in kinds.items()]
    print(table(("mode", "start", *LOAD_HEADER), rows))
    ratios = {}
    for mode, kinds in loads.items():
        cold, warm = kinds["cold"], kinds["warm"]
        share = 8 * cold.sent_bytes / cold.load_s / (line.mbit * 1e6)
        compare(ratios, f"{mode}, share of the line", share, 0.9 if mode == "fp16" else None)
        compare(ratios, f"{mode}, seconds of warm / cold", warm.load_s / cold.load_s, at_most=0.333)
        compare(ratios, f"{mode}, bytes of warm / cold", warm.sent_bytes / cold.sent_bytes)
        if mode != "fp16" and "fp16" in loads:
            compare(ratios, f"{mode} / fp16, seconds", cold.load_s / loads["fp16"]["cold"].load_s)
    if "int4" in loads:
        seconds = loads["int4"]["loopback"].joined_to_ready_s
        compare(ratios, "int4, seconds from the last node's joining to ready, loopback", seconds, at_most=20.0)
    return {"starts": rows, "ratios": ratios}


def starts_of(bench: Bench, mode: str, line: Network) -> dict[str, Running]:
    """The start with the median load time of each kind."""
    starts: dict[str, list[Running]] = {"cold": [], "warm": [], "loopback": []}
    for _ in range(bench.args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            for kind, network in (("cold", line), ("warm", line), ("loopback", Network())):
                work_dir = None if kind == "loopback" else Path(folder)
                with running(bench, mode, 2, network=network, work_dir=work_dir) as one:
                    starts[kind].append(one)
    return {kind: sorted(ones, key=lambda one: one.load_s)[len(ones) // 2] for kind, ones in starts.items()}


class MemoryPeak:
    """Samples the anonymous memory of a process in a thread; bytes[phase] is the highest of each phase."""

    def __init__(self, pid: int):
        self.phase = "load"
        self.bytes: dict[str, int] = {}
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes[self.phase] = max(self.bytes.get(self.phase, 0), memory_bytes(self._pid)[0])

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def coordinator_memory(bench: Bench) -> dict:
    """The coordinator's peak of anonymous memory through its load, a long prefill and 1,000 prompt logprobs."""
    mode, ratios, peaks = bench.args.quant[0], {}, []
    with running(bench, mode, 2, on_start=lambda c: peaks.append(MemoryPeak(c.coordinator.process.pid))) as one:
        peak = peaks[0]
        peak.phase = f"prefill of {bench.long} tokens"
        ask(one.cluster, prompt=bench.prompts.ids(bench.long), max_tokens=1)
        peak.phase = "echo and logprobs of 1000 tokens"
        one.cluster.complete(bench.prompts.ids(1000), max_tokens=1, echo=True, logprobs=1)
        peak.stop()
    embedding, head = bench.ends_bytes(mode)
    rows = [(phase, value / 1e6) for phase, value in peak.bytes.items()]
    print(table((f"{mode}, coordinator", "peak of anonymous memory, MB"), rows))
    print(f"stored: embedding {embedding / 1e6:.0f} MB, head {head / 1e6:.0f} MB; allowed: 700 MB more")
    highest = max(peak.bytes.values())
    compare(ratios, f"{mode}, peak / allowed", highest / (embedding + head + 700e6), at_most=1.0)
    return {"peak_bytes": peak.bytes, "embedding_bytes": embedding, "head_bytes": head, "ratios": ratios}


# ----------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------

STANDARD = {one.__name__: one for one in (load, decode, prefill, concurrency, reuse, memory)}
FURTHER = {one.__name__.replace("_", "-"): one for one in (pipeline, network, speculation, loading, coordinator_memory)}


def standard(bench: Bench, names: list[str]) -> dict:
    """The named scenarios for each mode, with its clusters of all sizes up side by side."""
    figures = {}
    for mode in bench.args.quant if names else ():
        with contextlib.ExitStack() as stack:
            group = {n: stack.enter_context(running(bench, mode, n, flags=("--slots", 8))) for n in bench.args.nodes}
            for name in names:
                print(f"\n{mode}, {name}: {STANDARD[name].__doc__}", flush=True)
                figures.setdefault(name, {})[mode] = STANDARD[name](bench, group)
    return figures


def names_of(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - {*STANDARD, *FURTHER})
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join([*STANDARD, *FURTHER])}")
    return names


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_CHAT, help="a folder (the bundled model)")
    parser.add_argument("--only", type=names_of, default=[*STANDARD], help=",".join([*STANDARD, *FURTHER]))
    parser.add_argument("--quant", type=lambda text: text.split(","), default=["fp16", "int8", "int4"])
    parser.add_argument("--nodes", type=numbers, default=[1, 2, 3], help="cluster sizes (1,2,3)")
    parser.add_argument("--pairs", type=int, default=3, help="turns that the systems under comparison take (3)")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="tokens of prompts (512,2048)")
    parser.add_argument("--decoded", type=int, default=48, help="tokens of answers (48)")
    parser.add_argument("--relay-ms", type=float, help="put a network of this delay, one way, before every node")
    parser.add_argument("--relay-mbit", type=float, help="let all nodes share a line of this rate")
    parser.add_argument("--quality", action="store_true", help="measure only the quality of the formats")
    parser.add_argument("--sampler", action="store_true", help="measure only the sampler")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text for --quality (4096)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    figures = {"model": args.model.name, "threads": torch.get_num_threads()}
    if args.quality:
        figures["quality"] = quality(args)
    if args.sampler:
        figures["sampler"] = sampler(args)
    if not args.quality and not args.sampler:
        bench = Bench(args)
        figures |= standard(bench, [name for name in args.only if name in STANDARD])
        for name in [name for name in args.only if name in FURTHER]:
            print(f"\n{name}: {FURTHER[name].__doc__}", flush=True)
            figures[name] = FURTHER[name](bench)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
