"""GET /metrics of real clusters, read with Prometheus' own parser: every figure is there, and moves by what was asked.

pytest tests/test_coordinator_metrics.py -q
"""

import json
import math
import socket
import time
import urllib.request

import pytest
from cluster import WarmCluster

from coordinator import COUNTERS, HISTOGRAMS, Metrics

parser = pytest.importorskip("prometheus_client.parser")

PROMPT_TOKENS, CACHED_TOKENS = "truecluster_prompt_tokens_total", "truecluster_cached_prompt_tokens_total"
COMPLETION_TOKENS = "truecluster_completion_tokens_total"
FIRST, PER_TOKEN = "truecluster_time_to_first_token_seconds", "truecluster_time_per_token_seconds"
REQUESTS, LINK_BYTES = "truecluster_http_requests_total", "truecluster_link_bytes_total"


class Scrape:
    """One answer of /metrics, parsed: `types` by family, and samples by name and labels."""

    def __init__(self, text: str):
        self.types, self.samples = {}, {}
        for family in parser.text_string_to_metric_families(text):
            assert family.name not in self.types and family.documentation
            self.types[family.name] = family.type
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in self.samples
                self.samples[key] = sample.value

    def value(self, name: str, **labels) -> float:
        return self.samples[name, tuple(sorted((key, str(value)) for key, value in labels.items()))]

    def labels(self, name: str) -> list[dict]:
        return [dict(labels) for sample, labels in self.samples if sample == name]

    def moved_since(self, before: "Scrape", name: str, **labels) -> float:
        key = (name, tuple(sorted((key, str(value)) for key, value in labels.items())))
        return self.samples[key] - before.samples.get(key, 0)

    def check_histogram(self, name: str) -> None:
        """Its buckets only grow, and the last one is the count."""
        bounds = sorted(float(labels["le"]) for labels in self.labels(f"{name}_bucket"))
        by_bound = {
            float(labels["le"]): self.value(f"{name}_bucket", **labels) for labels in self.labels(f"{name}_bucket")
        }
        counts = [by_bound[bound] for bound in bounds]
        assert bounds[-1] == math.inf and counts == sorted(counts)
        assert counts[-1] == self.value(f"{name}_count") and self.value(f"{name}_sum") >= 0


def scrape(cluster: WarmCluster) -> Scrape:
    with urllib.request.urlopen(cluster.url + "/metrics", timeout=60) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return Scrape(response.read().decode())


def wait_for_value(cluster: WarmCluster, name: str, value: float) -> Scrape:
    """The first scrape in which a figure has this value."""
    deadline = time.monotonic() + 60
    while (now := scrape(cluster)).value(name) != value:
        assert time.monotonic() < deadline, (name, now.value(name))
        time.sleep(0.02)
    return now


def idle(cluster: WarmCluster) -> Scrape:
    """A scrape after the slots of earlier tests' requests are free."""
    return wait_for_value(cluster, "truecluster_active_slots", 0)


def test_every_figure_has_its_type(fp16_cluster):
    now = idle(fp16_cluster)
    gauges = ("truecluster_ready", "truecluster_active_slots", "truecluster_waiting_requests", "truecluster_nodes")
    families = [name.removesuffix("_total") for name in (*COUNTERS, LINK_BYTES)]
    wanted = (
        dict.fromkeys(families, "counter") | dict.fromkeys(HISTOGRAMS, "histogram") | dict.fromkeys(gauges, "gauge")
    )
    assert now.types == wanted  # the parser takes _total off a counter's name
    for name in HISTOGRAMS:
        now.check_histogram(name)
    states = {labels["state"]: now.value("truecluster_nodes", **labels) for labels in now.labels("truecluster_nodes")}
    assert states == {"joined": 0, "loading": 0, "ready": 2, "lost": 0}
    assert now.value("truecluster_ready") == 1
    nodes = {node["node_id"] for node in fp16_cluster.status()["nodes"]}
    links = {(labels["node"], labels["direction"]) for labels in now.labels(LINK_BYTES)}
    assert links == {(node, direction) for node in nodes for direction in ("sent", "received")}
    assert all(now.value(LINK_BYTES, **labels) > 0 for labels in now.labels(LINK_BYTES))


def test_counters_move_by_exactly_what_was_asked(fp16_cluster):
    before = idle(fp16_cluster)
    usages = [
        fp16_cluster.chat("What is 12 + 30?")["usage"],
        fp16_cluster.complete("Once upon a time", max_tokens=5, ignore_eos=True)["usage"],
        fp16_cluster.complete(["One day", "The cat sat"], n=2, max_tokens=3, ignore_eos=True)["usage"],
    ]
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    post = urllib.request.Request(
        fp16_cluster.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(post, timeout=120) as response:
        frames = [line.removeprefix(b"data: ") for line in response.read().split(b"\n\n") if line]
    usages.append(json.loads(frames[-2])["usage"])
    assert [usage["completion_tokens"] for usage in usages[1:]] == [5, 12, 4]
    assert fp16_cluster.request("/v1/completions", {"prompt": ""})[0] == 400
    assert fp16_cluster.request("/health")[0] == 200
    assert fp16_cluster.request("/nowhere/at/all")[0] == 404
    after = scrape(fp16_cluster)

    asked = [("/v1/chat/completions", 200, 2), ("/v1/completions", 200, 2), ("/v1/completions", 400, 1)]
    asked += [("/health", 200, 1), ("none", 404, 1), ("/metrics", 200, 1)]  # a scrape counts itself when it is over
    for route, status, times in asked:
        assert after.moved_since(before, REQUESTS, route=route, status=status) == times, (route, status)
    total = sum(after.moved_since(before, REQUESTS, **labels) for labels in after.labels(REQUESTS))
    assert total == sum(times for *_, times in asked)

    completion = sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert after.moved_since(before, PROMPT_TOKENS) == sum(usage["prompt_tokens"] for usage in usages)
    assert after.moved_since(before, CACHED_TOKENS) == cached
    assert after.moved_since(before, COMPLETION_TOKENS) == completion
    choices = 1 + 1 + 4 + 1
    assert after.moved_since(before, f"{FIRST}_count") == len(usages)  # once per request
    assert after.moved_since(before, f"{PER_TOKEN}_count") == completion - choices  # from each token to the next
    for name in (FIRST, PER_TOKEN):
        after.check_histogram(name)
        assert after.moved_since(before, f"{name}_sum") > 0
    assert all(after.moved_since(before, LINK_BYTES, **labels) > 0 for labels in after.labels(LINK_BYTES))


def test_busy_slots_and_the_queue_are_seen(fp16_cluster):
    before = idle(fp16_cluster)
    slots = fp16_cluster.status()["slots"]
    body = json.dumps({"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
    post = urllib.request.Request(fp16_cluster.url + "/v1/completions", body, {"Content-Type": "application/json"})
    streams = []
    try:
        for _ in range(slots):
            streams.append(urllib.request.urlopen(post, timeout=60))  # answered with its first token, so it has a slot
        assert scrape(fp16_cluster).value("truecluster_active_slots") == slots
        request = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        with socket.create_connection(("127.0.0.1", fp16_cluster.api_port)) as one_more:
            one_more.sendall(request)
            seen = wait_for_value(fp16_cluster, "truecluster_waiting_requests", 1)
            assert seen.value("truecluster_active_slots") == slots
        # That client is gone, and its place with it, while the others go on.
        seen = wait_for_value(fp16_cluster, "truecluster_waiting_requests", 0)
        assert seen.value("truecluster_active_slots") == slots
        assert seen.moved_since(before, "truecluster_http_cancelled_total") == 1
    finally:
        for stream in streams:
            stream.close()
    idle(fp16_cluster)


def test_before_nodes_come_all_counters_stand_at_zero():
    with WarmCluster(nodes=0, flags=("--max-nodes", "2")) as cluster:
        now = scrape(cluster)
        assert now.value("truecluster_ready") == now.value("truecluster_waiting_requests") == 0
        assert all(now.value("truecluster_nodes", **labels) == 0 for labels in now.labels("truecluster_nodes"))
        for name in COUNTERS.keys() - {REQUESTS}:
            assert now.value(name) == 0, name
        assert now.labels(REQUESTS) == [] and now.labels(LINK_BYTES) == []
        cluster.request("/v1/completions", {"prompt": "hi"})
        assert scrape(cluster).value(REQUESTS, route="/v1/completions", status=503) == 1


def test_names_of_others_cannot_break_the_format():
    hostile = 'a"b\\n{c="d"}\r\u2028 9\n# TYPE x counter\nx_total 1'
    text = Metrics().render([("truecluster_link_bytes_total", "Help.", {"node": hostile, "direction": "sent"}, 7)])
    now = Scrape(text)
    assert now.value(LINK_BYTES, node=hostile, direction="sent") == 7 and "x" not in now.types
