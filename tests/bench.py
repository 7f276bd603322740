"""Benchmarks. Prints tables and, as the last line, one JSON object with every figure.

    python tests/bench.py --quality --model DIR     # how far int8 and int4 are from fp32, on real text
    python tests/bench.py --speed --model DIR       # decode and prefill of running clusters, Transformers beside them
    python tests/bench.py --sampler                 # milliseconds per sampled token at a vocabulary of 152k

Machines are noisy: compare figures of one run with one another, not with another day's.

Quality is the mean Kullback-Leibler divergence of the next-token distribution from the fp32 model's, in nats per token,
through the same kernels that nodes use, for prefill in one pass and for decode one token at a time. The text is the
language reference that CPython carries (pydoc_data.topics).
"""

from __future__ import annotations

import argparse
import gc
import json
import pydoc_data.topics
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster import TINY_CHAT, Cluster

import coordinator
import quant
import qwen

WINDOW = 512  # tokens that see one another in the quality measurement
DECODED = 64  # tokens of each window that are also run one at a time


def table(header: tuple, rows: list[tuple]) -> str:
    cells = [tuple(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells)


# ----------------------------------------------------------------------------
# Quality
# ----------------------------------------------------------------------------


def load_whole(checkpoint: coordinator.Checkpoint, weights: qwen.WeightFormat) -> tuple[qwen.Ends, qwen.Stage]:
    """The whole model in this process, in its stored form and with measured kernels, as nodes would hold it."""
    config = checkpoint.config
    shapes = list(qwen.merged_linear_shapes(config).values())
    choice = quant.choose_kernels(shapes, weights.quant, weights.group_size, weights.dtype, "cpu")
    stage = qwen.Stage(config, 0, config.num_hidden_layers, weights, 1, WINDOW, "cpu")
    places = {name: place for layer in stage.layers.values() for name, place in layer.destinations.items()}
    stored = qwen.stored_tensors(config, 0, config.num_hidden_layers, weights)
    for entry, tensor in checkpoint.stored_parts(stored, weights):
        places[entry.name].copy_(tensor)
    for layer in stage.layers.values():
        layer.prepare(choice)
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
    text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    ids = tokenizer.encode(text[: 8 * args.tokens], parse_special=False)[: args.tokens]
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
# Speed
# ----------------------------------------------------------------------------


def cluster_speed(cluster: Cluster, prompt_tokens: int, decoded: int) -> tuple[float, float]:
    """(prefill, decode) tokens per second of one request; the prompt is new each time, so nothing is reused."""
    cluster_speed.calls += 1
    prompt = [1000 + (cluster_speed.calls * 7919 + 31 * i) % 5000 for i in range(prompt_tokens)]
    begin = time.perf_counter()
    cluster.complete(prompt, max_tokens=1, ignore_eos=True)
    prefill = prompt_tokens / (time.perf_counter() - begin)
    begin = time.perf_counter()
    cluster.complete(prompt[:16], max_tokens=1, ignore_eos=True)
    short = time.perf_counter() - begin
    begin = time.perf_counter()
    cluster.complete(prompt[:16], max_tokens=decoded + 1, ignore_eos=True)
    return prefill, decoded / (time.perf_counter() - begin - short)


cluster_speed.calls = 0


@torch.inference_mode()
def transformers_speed(model, prompt_tokens: int, decoded: int) -> tuple[float, float]:
    """(prefill, decode) tokens per second of Transformers in this process."""
    prompt = torch.randint(1000, 6000, (1, prompt_tokens))
    begin = time.perf_counter()
    model(prompt, logits_to_keep=1)
    prefill = prompt_tokens / (time.perf_counter() - begin)
    out = model(prompt[:, :16], use_cache=True)
    begin = time.perf_counter()
    for _ in range(decoded):
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
    return prefill, decoded / (time.perf_counter() - begin)


def speed(args: argparse.Namespace) -> dict:
    import transformers

    figures, rows = {}, []
    measured = {}
    for dtype in ("fp32", "bf16", "fp16"):
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=qwen.TORCH_DTYPES[dtype]).eval()
        prompt_tokens = (
            64 if dtype == "fp16" else args.prompt
        )  # fp16 prefill is emulated on most CPUs and takes minutes
        measured[f"transformers {dtype}"] = [
            transformers_speed(model, prompt_tokens, args.decoded) for _ in range(args.runs)
        ]
        del model
    for mode in args.quant.split(","):
        for nodes in map(int, args.nodes.split(",")):
            flags = ("--quant", mode, "--max-context", str(args.prompt + args.decoded + 64))
            with Cluster(args.model, nodes=nodes, flags=flags, threads=None) as cluster:
                cluster_speed(cluster, 16, 4)
                measured[f"{mode} {nodes} node(s)"] = [
                    cluster_speed(cluster, args.prompt, args.decoded) for _ in range(args.runs)
                ]
    for name, runs in measured.items():
        prefill, decode = (statistics.median(column) for column in zip(*runs))
        figures[name] = {"prefill": prefill, "decode": decode}
        rows.append((name, f"{prefill:.1f}", f"{decode:.1f}"))
    print(table(("system", f"prefill of {args.prompt}, tokens/s", "decode, tokens/s"), rows))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_CHAT)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--sampler", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text for --quality")
    parser.add_argument("--quant", default="fp16,int8,int4")
    parser.add_argument("--nodes", default="1,2,3")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt for --speed")
    parser.add_argument("--decoded", type=int, default=48, help="tokens to decode for --speed")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if not (args.quality or args.speed or args.sampler):
        parser.error("give --quality, --speed or --sampler")
    figures = {"model": args.model.name, "threads": torch.get_num_threads()}
    if args.quality:
        figures["quality"] = quality(args)
    if args.speed:
        figures["speed"] = speed(args)
    if args.sampler:
        figures["sampler"] = sampler(args)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
