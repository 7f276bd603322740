"""GET / in a browser: what is served to whom, and what a real Chromium shows. Without Chromium those tests skip.

pytest tests/test_coordinator_page.py -q
"""

import base64
import contextlib
import hashlib
import http.client
import re

import pytest
from browser import CHROMIUM, Browser
from fake_engine import FakeService

from coordinator import PAGE, ApiError, HttpLimits, HttpServer

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
BROWSER_ACCEPT = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
HOSTILE = "<img src=x onerror=alert(1)>"
KEY = "secret-é"


def node(node_id: str, state: str = "ready", layers: list | None = None, **facts) -> dict:
    """A node as /status shows it."""
    sizes = {"weight_bytes": 1 << 30, "cache_bytes": 1 << 28, "memory_bytes": 1 << 33} if layers else {}
    return (
        {"node_id": node_id, "state": state, "device": "cuda:0", "layers": layers, "layer_ms": {"1": 0.5}}
        | sizes
        | facts
    )


class FakeCluster(FakeService):
    """A FakeService with a /status as the cluster's is."""

    def __init__(self, nodes: list[dict], answer: str = "Hello"):
        super().__init__(answer)
        self.nodes = nodes

    def status(self) -> dict:
        planned = [n for n in self.nodes if n["layers"]]
        ready = sum(n["state"] == "ready" for n in self.nodes)
        plan = [
            {"node_id": n["node_id"], "layer_start": n["layers"][0], "layer_end_exclusive": n["layers"][1]}
            for n in planned
        ]
        return {
            "model": self.model_id,
            "quant": "int8",
            "max_context": self.max_context,
            "state": "ready" if self.not_ready is None else "waiting for nodes",
            "required_nodes": 2,
            "ready_nodes": ready,
            "why_not_ready": "" if self.not_ready is None else "2 nodes are required, 1 can be used",
            "plan": plan,
            "nodes": self.nodes,
            "slots": 4,
            "active_slots": self.engine.active,
            "waiting_requests": 0,
            "tokens_per_second": 12.34,
        }


TWO_NODES = [node("desk", layers=[0, 10], measured_ms=3.21), node("attic", layers=[10, 24], predicted_ms=7.0)]


@contextlib.contextmanager
def serving(service, **options):
    server = HttpServer("127.0.0.1", 0, service, limits=HttpLimits(poll_s=0.02, linger_s=0.3), **options)
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()


def ask(url: str, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, dict, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read().decode()
    finally:
        connection.close()


# --- what is served ---


def test_browsers_get_the_page_and_others_the_routes():
    with serving(FakeService()) as url:
        status, headers, body = ask(url, Accept=BROWSER_ACCEPT)
        assert (status, body, headers["Content-Type"]) == (200, PAGE, "text/html; charset=utf-8")
        status, head_headers, body = ask(url, "HEAD", Accept=BROWSER_ACCEPT)
        assert (status, body, head_headers["Content-Length"]) == (200, "", headers["Content-Length"])
        for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
            status, headers, body = ask(url, **accept)
            assert status == 200 and headers["Content-Type"] == "text/plain; charset=utf-8"
            assert "POST /v1/chat/completions" in body
        assert ask(url, path="/status", Accept=BROWSER_ACCEPT)[1]["Content-Type"] == "application/json"


def test_the_page_may_load_nothing_but_itself():
    with serving(FakeService()) as url:
        _, headers, body = ask(url, Accept=BROWSER_ACCEPT)
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(directive) == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "require-trusted-types-for": "'script'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(| on\w+=", body)


def test_with_a_key_the_page_is_served_without_one_and_holds_no_data():
    with serving(FakeService(), api_key=KEY) as url:
        status, _, body = ask(url, Accept=BROWSER_ACCEPT)
        assert (status, body) == (200, PAGE)  # a constant: the same for every model and cluster
        assert ask(url)[0] == 401  # the routes' text names the model
        assert ask(url, "POST", Accept=BROWSER_ACCEPT)[0] == 401
        for path in ("/status", "/metrics", "/v1/models", "/nope"):
            assert ask(url, path=path, Accept=BROWSER_ACCEPT)[0] == 401
        assert ask(url, Accept=BROWSER_ACCEPT, Host="evil.example", **{"Sec-Fetch-Site": "none"})[0] == 403


# --- what Chromium shows ---


@contextlib.contextmanager
def browsing(url: str, **options):
    with Browser(**options) as page:
        page.open(url)
        yield page


def boxes(page: Browser, where: str = "#plan") -> list[str]:
    return page.evaluate(f"[...document.querySelectorAll('{where} .box')].map(box => box.innerText)")


def chat(page: Browser, text: str) -> str:
    """Types a message, waits for the end of its answer and returns it."""
    count = page.evaluate("document.querySelectorAll('#log .assistant > p').length")
    page.type("#text", text)
    page.wait_for(f"document.querySelectorAll('#log .assistant > p').length > {count}")
    pieces = "[...[...document.querySelectorAll('#log .assistant')].pop().childNodes].slice(0, -1)"
    return page.evaluate(f"{pieces}.map(piece => piece.data).join('')")


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_a_real_clusters_plan_and_a_chat(fp16_cluster, width):
    with browsing(fp16_cluster.url, width=width) as page:
        page.wait_for("document.querySelectorAll('#plan .box').length === 2")
        for text, stage in zip(boxes(page), fp16_cluster.status()["plan"], strict=True):
            assert text.startswith(stage["node_id"] + "\n")
            layers = f"{stage['layer_start']}\u2013{stage['layer_end_exclusive'] - 1}"
            assert {"ready", "cpu", layers, "MiB", "ms"} <= set(text.split())
        assert page.text("#model") == "tiny-chat"
        page.evaluate("document.querySelector('#temperature').value = 0")
        assert chat(page, "What is 12 + 30?") == "42"
        page.wait_for("Number(document.querySelector('#rate').textContent) > 0")
        assert chat(page, "What is 20 + 3?")  # with the first turn as history
        assert page.evaluate("turns.map(turn => turn.role).join()") == "user,assistant,user,assistant"
        page.click("#new")
        assert page.text("#log") == "" and page.evaluate("turns.length") == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.console == []


@needs_chromium
def test_what_others_wrote_is_text():
    nodes = [node(HOSTILE, layers=[0, 24], device=HOSTILE), node("spare", "lost", last_error=HOSTILE)]
    with serving(FakeCluster(nodes, answer=HOSTILE)) as url, browsing(url) as page:
        page.wait_for("document.querySelector('#plan .box')")
        assert boxes(page)[0].startswith(HOSTILE) and boxes(page, "#others")[0].endswith(HOSTILE)
        assert chat(page, HOSTILE) == HOSTILE
        assert page.text("#log .user") == HOSTILE
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.console == []


@needs_chromium
def test_the_page_asks_for_the_key():
    with serving(FakeCluster(TWO_NODES), api_key=KEY) as url, browsing(url) as page:
        page.wait_for("!document.querySelector('#login').hidden")
        assert "asks for an API key" in page.text() and "desk" not in page.text()
        page.type("#key", "wrong")
        page.wait_for("document.querySelector('#why').textContent.includes('refused')")
        page.type("#key", KEY)
        page.wait_for("document.querySelectorAll('#plan .box').length === 2")
        assert page.evaluate("document.querySelector('#login').hidden")
        assert chat(page, "hi") == "Hello"
        page.open(url + "/?again")  # the tab still knows it
        page.wait_for("document.querySelectorAll('#plan .box').length === 2")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


@needs_chromium
def test_a_cluster_that_is_not_ready_yet():
    service = FakeCluster([node("desk")])
    service.not_ready = ApiError.not_ready("Model is not ready. Required nodes: 2, connected ready nodes: 1")
    with serving(service) as url, browsing(url) as page:
        page.wait_for("!document.querySelector('#notice').hidden")
        assert page.text("#notice") == "Waiting for nodes: 1 of 2 ready. 2 nodes are required, 1 can be used"
        assert boxes(page) == [] and boxes(page, "#others")[0].startswith("desk")
        page.type("#text", "hi")
        page.wait_for("document.querySelector('#log .error')")
        assert "connected ready nodes: 1" in page.text("#log .error")
        assert page.evaluate("[turns.length, document.querySelector('#text').value]") == [0, "hi"]
        service.not_ready, service.nodes = None, TWO_NODES
        page.wait_for("document.querySelector('#notice').hidden")
        assert [text.split()[0] for text in boxes(page)] == ["desk", "attic"]
        assert "3.2 ms" in boxes(page)[0] and "about 7.0 ms" in boxes(page)[1] and "1.3 GiB / 8.0 GiB" in boxes(page)[0]


@needs_chromium
def test_stop_and_errors_in_the_middle():
    service = FakeCluster(TWO_NODES, answer="Hello world, hello moon")
    with serving(service) as url, browsing(url) as page:
        page.wait_for("document.querySelector('#plan .box')")
        service.engine.gate.hold()
        page.type("#text", "hi")
        service.engine.gate.allow(3)  # the prompt and two tokens
        shown = page.wait_for("document.querySelector('#log .assistant')?.textContent")
        assert "Hello world, hello moon".startswith(shown)
        page.click("#stop")
        page.wait_for("document.querySelector('#log .assistant > p')?.textContent === 'stopped'")
        page.wait_for("document.querySelector('#stop').hidden")
        assert service.engine.generations[0].closed.wait(20)
        service.engine.gate.allow()
        service.engine.failure, service.engine.fail_after = ApiError(503, "A node is lost.", "server_error"), 3
        page.type("#text", "again")
        page.wait_for("document.querySelector('#log .error')")
        assert page.text("#log .error") == "A node is lost."
        service.engine.failure = None
        assert chat(page, "and now") == "Hello world, hello moon"


@needs_chromium
def test_a_coordinator_that_is_gone():
    with serving(FakeCluster(TWO_NODES)) as url, browsing(url) as page:
        page.wait_for("document.querySelector('#plan .box')")
        page.evaluate("real = fetch; fetch = () => Promise.reject(new TypeError('Failed to fetch')); 0")
        page.wait_for("document.querySelector('#notice').textContent.startsWith('No news from the coordinator')")
        page.type("#text", "hi")
        page.wait_for("document.querySelector('#log .error')?.textContent === 'Failed to fetch'")
        page.evaluate("fetch = real; 0")
        page.wait_for("document.querySelector('#notice').hidden")
        assert page.evaluate("document.querySelector('#text').value") == "hi"
