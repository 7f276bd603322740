"""The HTTP layer on real sockets with a scripted engine: routes, answers, streams, hostile input, lost clients.

pytest tests/test_coordinator_http.py -q
"""

import asyncio
import contextlib
import gc
import hmac
import http.client
import json
import logging
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from cluster import wait_until
from fake_engine import FakeService

import coordinator
from coordinator import (
    AccessRules,
    ApiError,
    HttpLimits,
    HttpServer,
    Incoming,
    Metrics,
    RequestHead,
    StartupError,
    printable,
    read_head,
)

WAIT_S = 20  # how long a test waits for something that must happen; nothing depends on the value
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@contextlib.contextmanager
def serving(service=None, host="127.0.0.1", limits=None, **options):
    """A running server; the service hangs on it as server.service."""
    limits = limits or HttpLimits(poll_s=0.02, linger_s=0.3)
    server = HttpServer(host, 0, service or FakeService(answer="Hello world"), limits=limits, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_unexpected(caplog):
    """No test leaves an internal error in the log, but those that provoke one (they clear it)."""
    caplog.set_level(logging.DEBUG, "coordinator")
    yield
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors


# --- talking to it ---


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
        return error

    @property
    def chunks(self):
        """The data of a stream, which must be framed exactly and end with [DONE]."""
        assert self.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = self.body.decode("ascii").split("\n\n")
        assert events.pop() == ""
        data = [event for event in events if not event.startswith(":")]
        assert all(event.startswith("data: ") and "\n" not in event for event in data)
        assert data.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in data]


def ask(server, method, path, body=None, headers=None, raw=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    try:
        return ask_on(connection, method, path, body, headers, raw)
    finally:
        connection.close()


def ask_on(connection, method, path, body=None, headers=None, raw=None):
    data = raw if raw is not None else None if body is None else json.dumps(body)
    headers = ({"Content-Type": "application/json"} if data is not None else {}) | (headers or {})
    connection.request(method, path, data, headers)
    response = connection.getresponse()
    return Reply(response.status, response.headers, response.read())


def get(server, path, **options):
    return ask(server, "GET", path, **options)


def complete(server, prompt="ab", headers=None, **fields):
    return ask(server, "POST", COMPLETIONS, {"prompt": prompt} | fields, headers)


def chat(server, messages=(USER,), headers=None, **fields):
    return ask(server, "POST", CHAT, {"messages": list(messages)} | fields, headers)


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)


def read_replies(sock):
    """Every response until the server closes; each must be complete."""
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    replies = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        assert re.fullmatch(r"HTTP/1\.1 [1-5]\d\d [A-Za-z -]+", status_line)
        headers = http.client.HTTPMessage()
        for line in lines:
            headers.add_header(*line.split(": ", 1))
        body = b""
        if "Content-Length" in headers:
            length = int(headers["Content-Length"])
            body, data = data[:length], data[length:]
            assert len(body) == length
        elif headers.get("Transfer-Encoding") == "chunked":
            body, data = dechunk(data)
        elif "text/event-stream" in headers.get("Content-Type", ""):
            body, data = data, b""
        replies.append(Reply(int(status_line[9:12]), headers, body))
    return replies


def dechunk(data):
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body += data[:length]
        assert data[length : length + 2] == b"\r\n"
        data = data[length + 2 :]
        if length == 0:
            return body, data


def exchange_raw(server, data, half_close=False):
    """Send bytes, read all responses. The last thing sent must make the server close."""
    with connect(server) as sock:
        sock.sendall(data)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        return read_replies(sock)


def request_bytes(method, path, body=b"", *headers, version="1.1"):
    length = [f"Content-Length: {len(body)}"] if body else []
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", *length, *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


CLOSING_GET = request_bytes("GET", "/health", b"", "Connection: close")
PROMPT = json.dumps({"prompt": "ab"}).encode()


# --- routes ---


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/", "/models?x=1", "http://localhost/v1/models"])
def test_models(server, path):
    reply = get(server, path)
    assert reply.status == 200 and reply.headers["Content-Type"] == "application/json"
    (model,) = reply.json["data"]
    assert reply.json["object"] == "list" and model["object"] == "model" and model["id"] == "tiny/chat"
    assert isinstance(model["created"], int) and isinstance(model["owned_by"], str)


@pytest.mark.parametrize("path", ["/v1/models/tiny/chat", "/models/tiny%2Fchat/", "/v1/models/tiny%2fchat?a=b"])
def test_single_model(server, path):
    assert get(server, path).json == get(server, "/v1/models").json["data"][0]


@pytest.mark.parametrize(
    "path",
    ["/v1/models/x", "/v1/models/..%2f..%2fetc", "/v1/models/../x", "/nope", "/v1", "/v1/health", "/%00", "/%ff"]
    + ["/v1/models/%00", "/v1/models/%c3%28", "/v1/models/tiny%2Fchat%0a", "//v1/models"],
)
def test_unknown_paths_are_404_json(server, path):
    reply = get(server, path)
    assert reply.status == 404 and reply.error["type"] == "invalid_request_error"
    assert reply.error["code"] == ("model_not_found" if "Invalid URL" not in reply.error["message"] else None)


@pytest.mark.parametrize("path", ["/", "/health", "/status", "/metrics", "/v1/models", "/v1/models/tiny/chat"])
def test_head_is_get_without_a_body(server, path):
    reply, with_body = ask(server, "HEAD", path), get(server, path)
    assert reply.status == with_body.status and reply.body == b""
    assert reply.headers["Content-Type"] == with_body.headers["Content-Type"]
    if path != "/metrics":
        assert reply.headers["Content-Length"] == with_body.headers["Content-Length"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST, OPTIONS"),
        ("GET", "/completions", "POST, OPTIONS"),
        ("HEAD", COMPLETIONS, "POST, OPTIONS"),
        ("PUT", COMPLETIONS, "POST, OPTIONS"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/tiny/chat", "GET, HEAD, OPTIONS"),
    ],
)
def test_wrong_method(server, method, path, allowed):
    reply = ask(server, method, path, {} if method in ("PUT", "POST") else None)
    assert reply.status == 405 and reply.headers["Allow"] == allowed
    if method != "HEAD":
        assert "Not allowed to" in reply.error["message"]


def test_options_and_every_response_rule(server):
    assert ask(server, "OPTIONS", "/anything").status == 204
    replies = [get(server, "/health"), get(server, "/nope"), complete(server), complete(server, stream=True)]
    assert len({reply.headers["x-request-id"] for reply in replies}) == len(replies)
    for reply in replies:
        assert reply.headers["Date"].endswith("GMT") and reply.headers["Server"] == "truecluster"
        assert "Access-Control-Allow-Origin" not in reply.headers


def test_root_names_the_routes(server):
    reply = get(server, "/")
    assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert b"POST /v1/chat/completions" in reply.body and b"GET  /v1/models" in reply.body


def test_health_status_and_metrics():
    with serving() as server:
        assert get(server, "/health").json == {"status": "ok"}
        assert get(server, "/status").json == {"state": "ready"}
        complete(server, max_tokens=3)
        get(server, "/nope")
        reply = get(server, "/metrics")
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = reply.body.decode().splitlines()
        assert 'truecluster_http_requests_total{route="/v1/completions",status="200"} 1' in lines
        assert 'truecluster_http_requests_total{route="none",status="404"} 1' in lines
        assert "truecluster_completion_tokens_total 3" in lines
        assert "truecluster_time_to_first_token_seconds_count 1" in lines
        assert "truecluster_time_per_token_seconds_count 2" in lines
        assert 'truecluster_nodes{state="READY"} 2' in lines
        server.service.not_ready = ApiError.not_ready("Model is not ready.")
        reply = get(server, "/health")
        assert reply.status == 503 and reply.headers["Retry-After"] == "5"


def test_metrics_text_format():
    metrics = Metrics()
    metrics.observe("truecluster_time_per_token_seconds", 0.02)
    metrics.observe("truecluster_time_per_token_seconds", 99)
    text = metrics.render([("g", "Help.", {"a": 'x"\\\n'}, 1.5), ("g", "Help.", {"a": "y"}, 2)])
    assert text.endswith('# HELP g Help.\n# TYPE g gauge\ng{a="x\\"\\\\\\n"} 1.5\ng{a="y"} 2\n')
    assert 'truecluster_time_per_token_seconds_bucket{le="0.01"} 0\n' in text
    assert 'truecluster_time_per_token_seconds_bucket{le="0.025"} 1\n' in text
    assert 'truecluster_time_per_token_seconds_bucket{le="+Inf"} 2\n' in text


# --- answers ---


def test_completion_object(server):
    body = complete(server, max_tokens=50).json
    assert body.keys() == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert type(body["created"]) is int and body["model"] == "tiny/chat"
    assert body["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}]
    tokens = len(server.service.tokenizer.encode("Hello world", False)) + 1  # the EOS counts
    prompt = len(server.service.tokenizer.encode("ab", False))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_object(server):
    body = chat(server).json
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "Hello world"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == len(server.service.template.prompt_ids([USER]))


def test_chat_stream_frame_by_frame(server):
    reply = chat(server, stream=True, n=2, stream_options={"include_usage": True})
    assert reply.headers["Cache-Control"] == "no-cache" and reply.headers["X-Accel-Buffering"] == "no"
    assert reply.headers["Transfer-Encoding"] == "chunked" and "Content-Length" not in reply.headers
    *chunks, usage = reply.chunks
    assert {(c["id"], c["created"], c["object"], c["system_fingerprint"]) for c in [*chunks, usage]} == {
        (usage["id"], usage["created"], "chat.completion.chunk", "fp_fake")
    }
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(c["index"], c["delta"]) for c in choices[:2]] == [
        (index, {"role": "assistant", "content": ""}) for index in (0, 1)
    ]
    for index in (0, 1):
        own = [choice for choice in choices[2:] if choice["index"] == index]
        assert own.pop() == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert all(choice["delta"].keys() == {"content"} and choice["finish_reason"] is None for choice in own)
        assert "".join(choice["delta"]["content"] for choice in own) == "Hello world"


def test_no_usage_unless_asked(server):
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": None}}):
        for reply in (chat(server, stream=True, **options), complete(server, stream=True, **options)):
            assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in reply.chunks)


def test_continuous_usage(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in chat(server, stream=True, stream_options=options).chunks]
    assert counts == sorted(counts) and counts[-1] > 1


@pytest.mark.parametrize(
    ("fields", "text", "reason", "tokens"),
    [
        ({"max_tokens": 1}, None, "length", 1),
        ({"max_tokens": 0}, "", "length", 0),
        ({"max_tokens": 0, "echo": True}, "ab", "length", 0),
        ({"stop": "o w"}, "Hell", "stop", None),
        ({"stop": "Hello"}, "", "stop", None),
        ({"stop": ["xyz", "ld"]}, "Hello wor", "stop", None),
        ({"stop": "o w", "include_stop_str_in_output": True}, "Hello w", "stop", None),
        ({"stop": "o w", "echo": True, "prompt": "o w"}, "o wHell", "stop", None),
        ({"stop": "world and more"}, "Hello world", "stop", None),
        ({"ignore_eos": True, "max_tokens": 40}, "Hello world", "length", 40),
        ({"echo": True}, "abHello world", "stop", None),
    ],
)
def test_text_and_reason(server, fields, text, reason, tokens):
    fields = {"max_tokens": 50} | fields
    body = complete(server, **fields).json
    (choice,) = body["choices"]
    assert choice["finish_reason"] == reason
    assert text is None or choice["text"] == text
    assert tokens is None or body["usage"]["completion_tokens"] == tokens


def test_stop_token_ids_and_stops_that_are_control_tokens(server):
    tokenizer = server.service.tokenizer
    last = tokenizer.encode("Hello world", False)[-1]
    assert complete(server, stop_token_ids=[last]).json["choices"][0]["text"] in "Hello world"
    complete(server, stop="<|endoftext|>")
    request = server.service.engine.generations[-1].request
    assert tokenizer.encode("<|endoftext|>", True)[0] in request.sampling.stop_token_ids


def test_sampling_params_reach_the_engine(server):
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "seed": -1}
    fields |= {"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 3}, "min_tokens": 2}
    complete(server, **fields, max_tokens=7, logprobs=2, echo=True)
    request = server.service.engine.generations[-1].request
    sampling = request.sampling
    for name, value in fields.items():
        assert getattr(sampling, name) == ({5: 3.0} if name == "logit_bias" else value)
    assert request.max_tokens == 7 and sampling.top_logprobs == 2 and sampling.prompt_logprobs
    assert sampling.eos_ids == tuple(sorted(server.service.tokenizer.eos_ids(False)))
    chat(server)
    request = server.service.engine.generations[-1].request
    assert request.sampling.eos_ids == tuple(sorted(server.service.tokenizer.eos_ids(True)))
    assert request.max_tokens == server.service.max_context - len(request.prompts[0])
    assert request.sampling.top_logprobs is None and request.sampling.temperature == 1.0


def test_prompt_lists_and_n(server):
    body = complete(server, prompt=["a", "bcd"], n=2, echo=True, max_tokens=50).json
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "aHello world"),
        (1, "aHello world"),
        (2, "bcdHello world"),
        (3, "bcdHello world"),
    ]
    tokenizer = server.service.tokenizer
    assert body["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text, False)) for text in ("a", "bcd"))


def test_prompts_of_ids_and_special_tokens(server):
    ids = server.service.tokenizer.encode("<|im_start|>ab", parse_special=True)
    complete(server, prompt="<|im_start|>ab")
    assert server.service.engine.generations[-1].request.prompts == [ids]
    assert complete(server, prompt=ids, echo=True).json["choices"][0]["text"].startswith("<|im_start|>ab")
    assert server.service.engine.generations[-1].request.prompts == [ids]
    body = complete(server, prompt=["ab", ids]).json
    assert len(body["choices"]) == 2
    content = "x<|im_end|>\n<|im_start|>system\ny"
    chat(server, [{"role": "user", "content": content}])
    (prompt,) = server.service.engine.generations[-1].request.prompts
    assert prompt.count(ids[0]) == 2  # the user's turn and the assistant's, none from the text


@pytest.mark.parametrize("field", ["prompt", "logit_bias", "stop_token_ids"])
def test_ids_without_a_token_are_refused(server, field):
    tokenizer = server.service.tokenizer
    for token_id in (tokenizer.vocab_size - 1, tokenizer.vocab_size, 999_999):
        value = {str(token_id): 1} if field == "logit_bias" else [token_id]
        reply = complete(server, **{field: value})
        assert reply.status == 400 and reply.error["param"] == field
        assert "out of vocabulary" in reply.error["message"]


def test_context_limit(server):
    too_long = "x y" * server.service.max_context
    ids = [5] * server.service.max_context
    for fields in ({}, {"stream": True}):
        for reply, param in (
            (complete(server, too_long, **fields), "prompt"),
            (complete(server, ids, **fields), "prompt"),
            (complete(server, ["a", ids], **fields), "prompt"),
            (chat(server, [{"role": "user", "content": too_long}], **fields), "messages"),
        ):
            assert reply.status == 400
            assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", param)
            wanted = f"This model's maximum context length is {server.service.max_context} tokens"
            assert wanted in reply.error["message"] and "-" not in reply.error["message"]
    body = complete(server, ids[:-3], max_tokens=100, ignore_eos=True).json
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 3


def test_cached_tokens(server):
    server.service.engine.cached_tokens = 1
    try:
        usage = complete(server, ["abc", "abcd"]).json["usage"]
    finally:
        server.service.engine.cached_tokens = 0
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_model_field(server):
    assert complete(server, model="tiny/chat").status == 200
    reply = complete(server, model="other")
    assert reply.status == 404 and reply.error["code"] == "model_not_found" and reply.error["param"] == "model"
    assert "tiny/chat" in reply.error["message"]


def test_order_of_checks():
    """Key, route, body, fields, model, readiness: the first that fails is the one reported."""
    with serving(api_key="k") as server:
        server.service.not_ready = ApiError.not_ready("Model is not ready.")
        key = {"Authorization": "Bearer k"}
        bad = b"{"
        steps = [
            (ask(server, "POST", "/nope", raw=bad), 401),
            (ask(server, "POST", "/nope", raw=bad, headers=key), 404),
            (ask(server, "POST", COMPLETIONS, raw=bad, headers=key), 400),
            (complete(server, model="x", n=0, headers=key), 400),
            (complete(server, model="x", headers=key), 404),
            (complete(server, headers=key), 503),
        ]
        assert [reply.status for reply, _ in steps] == [status for _, status in steps]
        reply = steps[-1][0]
        assert reply.error == {
            "message": "Model is not ready.",
            "type": "cluster_not_ready",
            "param": None,
            "code": None,
        }
        assert int(reply.headers["Retry-After"]) <= 120
        server.service.not_ready = None
        server.service.engine.refusal = ApiError.overloaded("Too many waiting requests.")
        reply = complete(server, stream=True, headers=key)
        assert reply.status == 503 and reply.error["type"] == "server_overloaded" and reply.headers["Retry-After"]


def test_no_chat_template(server, monkeypatch):
    monkeypatch.setattr(server.service.template, "available", False)
    reply = chat(server)
    assert reply.status == 400 and reply.error["code"] == "no_chat_template"
    assert complete(server).status == 200


# --- logprobs ---


def test_completion_logprobs_with_echo(server):
    """As lm-eval asks: ids, echo, logprobs 1, max_tokens 1."""
    ids = server.service.tokenizer.encode("Some text é", False)
    (choice,) = complete(server, prompt=[ids], max_tokens=1, logprobs=1, echo=True).json["choices"]
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(ids) + 1}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    columns = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, value, top in list(columns)[1:]:
        assert top[token] == value == max(top.values())
    text = choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset : offset + len(token)] == token


@pytest.mark.parametrize(("count", "sizes"), [(0, {1}), (1, {1}), (5, {5, 6})])
def test_completion_logprobs_counts(server, count, sizes):
    logprobs = complete(server, max_tokens=50, logprobs=count).json["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "Hello world"  # the EOS is not among them
    assert {len(top) for top in logprobs["top_logprobs"]} <= sizes
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


@pytest.mark.parametrize("count", [None, 0, 1, 20])
def test_chat_logprobs(server, count):
    logprobs = chat(server, logprobs=True, top_logprobs=count).json["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert b"".join(bytes(entry["bytes"]) for entry in logprobs["content"]) == b"Hello world"
    for entry in logprobs["content"]:
        assert len(entry["top_logprobs"]) == (count or 0) and entry["logprob"] <= 0


def test_logprobs_bytes_of_split_characters():
    with serving(FakeService(answer="é🥹!")) as server:
        (choice,) = chat(server, logprobs=True, top_logprobs=1).json["choices"]
        data = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert choice["message"]["content"] == "é🥹!" == data.decode()


# --- tools ---

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}é</tool_call>"}}\n</tool_call>'


def fold_chunks(chunks):
    """What a client makes of a chat or completions stream: index -> text, reason, logprobs entries, tool calls."""
    choices = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            own = choices.setdefault(choice["index"], {"text": "", "reason": None, "logprobs": [], "calls": []})
            delta = choice.get("delta", {})
            own["text"] += choice.get("text", "") + (delta.get("content") or "")
            if choice["finish_reason"] is not None:
                assert own["reason"] is None
                own["reason"] = choice["finish_reason"]
            own["logprobs"] += logprob_rows(choice["logprobs"])
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["function"]["arguments"] == "" and piece["type"] == "function"
                    own["calls"].append([piece["function"]["name"], ""])
                own["calls"][piece["index"]][1] += piece["function"]["arguments"]
    return choices


def fold_whole(body):
    """The same of an answer that was not streamed."""
    choices = {}
    for choice in body["choices"]:
        message = choice.get("message", {"content": choice.get("text")})
        choices[choice["index"]] = {
            "text": message["content"] or "",
            "reason": choice["finish_reason"],
            "logprobs": logprob_rows(choice["logprobs"]),
            "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())],
        }
    return choices


def logprob_rows(logprobs):
    if logprobs is None:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    return [list(row) for row in zip(*(logprobs[column] for column in sorted(logprobs)), strict=True)]


@pytest.mark.parametrize(
    ("answer", "content", "calls", "reason"),
    [
        (CALL, None, 1, "tool_calls"),
        ("Let me see.\n" + CALL, "Let me see.", 1, "tool_calls"),
        (CALL + "\n" + CALL, None, 2, "tool_calls"),
        ("<tool_call>\n{bad}\n</tool_call>", "<tool_call>\n{bad}\n</tool_call>", 0, "stop"),
        ("plain < text", "plain < text", 0, "stop"),
    ],
)
def test_tool_calls(answer, content, calls, reason):
    with serving(FakeService(answer=answer, max_context=2048)) as server:
        (choice,) = chat(server, tools=[TOOL]).json["choices"]
        assert choice["finish_reason"] == reason and choice["message"]["content"] == content
        found = choice["message"].get("tool_calls", [])
        assert len({call["id"] for call in found}) == len(found) == calls
        for call in found:
            assert call["type"] == "function"
            assert call["function"] == {"name": "f", "arguments": '{"a": "}é</tool_call>"}'}
        chunks = chat(server, tools=[TOOL], stream=True).chunks
        streamed = fold_chunks(chunks)[0]
        assert streamed["text"] == (content or "") and streamed["reason"] == reason
        assert streamed["calls"] == [["f", call["function"]["arguments"]] for call in found]
        # without tools, and with tool_choice none, it is text
        for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            assert chat(server, **fields).json["choices"][0]["message"]["content"] == answer


def test_tool_call_cut_by_max_tokens_is_no_call():
    with serving(FakeService(answer=CALL, max_context=2048)) as server:
        (choice,) = chat(server, tools=[TOOL], max_tokens=8).json["choices"]
        assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


# --- a stream and a plain answer agree ---


def random_request(rng):
    fields = {"n": rng.choice([1, 1, 2, 3]), "seed": rng.randrange(100), "max_tokens": rng.choice([0, 1, 5, 30, 60])}
    if rng.random() < 0.5:
        fields["stop"] = rng.sample([" ", "e", "th", "\n", "é", "a", "<|im_start|>", "ing "], rng.randint(1, 4))
    for name in ("include_stop_str_in_output", "ignore_eos"):
        fields[name] = rng.random() < 0.3
    fields["skip_special_tokens"] = rng.random() < 0.7
    if rng.random() < 0.5:
        fields["messages"] = [{"role": "user", "content": rng.choice(["hi", "é🥹", ""])}]
        if rng.random() < 0.6:
            fields |= {"logprobs": True, "top_logprobs": rng.choice([0, 1, 4])}
        elif rng.random() < 0.5:
            fields["tools"] = [TOOL]
        return CHAT, fields
    prompts = ["ab", "é<|im_end|>x", [3, 250, 7], "🥹"]
    fields["prompt"] = rng.sample(prompts, rng.randint(1, 3)) if rng.random() < 0.5 else rng.choice(prompts)
    fields["echo"] = rng.random() < 0.5
    fields["logprobs"] = rng.choice([None, 0, 2, 5])
    return COMPLETIONS, fields


def test_stream_and_plain_answer_agree():
    rng = random.Random(7)
    with serving(FakeService(max_context=1024)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        for _ in range(150):
            path, fields = random_request(rng)
            plain = ask_on(connection, "POST", path, fields).json
            stream = fields | {"stream": True, "stream_options": {"include_usage": True}}
            *chunks, last = ask_on(connection, "POST", path, stream).chunks
            assert fold_chunks(chunks) == fold_whole(plain), fields
            assert last["usage"] == plain["usage"] and last["choices"] == []
            if path == COMPLETIONS:
                check_text_offsets(plain)
        connection.close()


def check_text_offsets(body):
    for choice in body["choices"]:
        if choice["logprobs"] is not None:
            rows = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
            for token, offset in rows:
                assert 0 <= offset <= len(choice["text"])
                shown = choice["text"][offset:]  # shorter than the token where a stop string cut it
                # a control token, listed with `echo`, shows no text
                assert token.startswith(("bytes:", "<|", shown)) or shown.startswith(token)


def test_echo_lists_every_token(server):
    """lm-eval drops the last entry, taking it for the generated token: EOS and half characters must have theirs."""
    fields = {"prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 50}
    body = ask(server, "POST", COMPLETIONS, fields).json
    assert body["choices"][0]["finish_reason"] == "stop"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["total_tokens"]


# --- OpenAI's client ---


def client_options(server):
    return {"base_url": f"http://127.0.0.1:{server.port}/v1", "api_key": "x", "timeout": WAIT_S, "max_retries": 0}


def test_openai_client(server):
    with openai.OpenAI(**client_options(server)) as client:
        assert [model.id for model in client.models.list()] == ["tiny/chat"]
        answer = client.chat.completions.create(model="tiny/chat", messages=[USER], n=2)
        assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
        stream = client.chat.completions.create(model="tiny/chat", messages=[USER], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello world"
        stream = client.completions.create(model="tiny/chat", prompt="a", stream=True, max_tokens=50)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello world"
        with client.chat.completions.stream(model="tiny/chat", messages=[USER], n=3) as events:
            final = events.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["Hello world"] * 3
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="other", messages=[USER])
        assert caught.value.code == "model_not_found" and caught.value.request_id.startswith("req_")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny/chat", messages=[USER], temperature=3)
        assert caught.value.param == "temperature"


def test_openai_client_with_tools():
    with (
        serving(FakeService(answer=CALL, max_context=2048)) as server,
        openai.OpenAI(**client_options(server)) as client,
        client.chat.completions.stream(model="tiny/chat", messages=[USER], tools=[TOOL]) as events,
    ):
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == "f" and json.loads(call.function.arguments) == {"a": "}é</tool_call>"}


def test_openai_async_client(server):
    async def many():
        async with openai.AsyncOpenAI(**client_options(server)) as client:

            async def one(number):
                if number % 2:
                    answer = await client.completions.create(model="tiny/chat", prompt="a", max_tokens=50)
                    return answer.choices[0].text
                stream = await client.chat.completions.create(model="tiny/chat", messages=[USER], stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(24)))

    assert asyncio.run(many()) == ["Hello world"] * 24


# --- when the engine fails ---


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (ApiError.not_ready("The cluster lost a node."), 503, "cluster_not_ready"),
        (ValueError("secret prompt text"), 500, "server_error"),
    ],
)
def test_engine_failure(failure, status, kind, caplog):
    with serving() as server:
        engine = server.service.engine
        for engine.failure, engine.fail_after, stream in ((failure, 0, False), (failure, 3, False), (failure, 0, True)):
            reply = chat(server, stream=stream)
            assert reply.status == status and reply.error["type"] == kind
            assert "secret" not in reply.body.decode() and "Traceback" not in reply.body.decode()
            assert (reply.headers.get("x-should-retry") == "false") == (status == 500)
            assert (reply.headers.get("Retry-After") is not None) == (status == 503)
        engine.fail_after = 3
        *chunks, error = chat(server, stream=True).chunks
        assert chunks and error["error"]["type"] == kind and error.keys() == {"error"}
        wait_until(lambda: engine.active == 0)
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == (4 if status == 500 else 0)
        assert all(re.match("req_.* internal error: ValueError in ", record.getMessage()) for record in errors)
        caplog.clear()
        engine.failure = None
        assert chat(server).status == 200


def test_bugs_anywhere_become_a_500(caplog):
    with serving() as server:
        server.service.status = lambda: {"x": float("nan")}
        server.service.health = lambda: 1 / 0
        for path in ("/status", "/health"):
            reply = get(server, path)
            assert reply.status == 500 and reply.error["type"] == "server_error"
            assert reply.headers["x-should-retry"] == "false"
        caplog.clear()
        assert get(server, "/v1/models").status == 200


def test_stream_waits_for_the_first_token_then_sends_comments():
    limits = HttpLimits(poll_s=0.01, keepalive_s=0.05)
    with serving(limits=limits) as server:
        gate = server.service.engine.gate
        gate.hold()
        with connect(server) as sock:
            body = json.dumps({"messages": [USER], "stream": True}).encode()
            sock.sendall(request_bytes("POST", CHAT, body, "Connection: close"))
            data = b""
            while data.count(b": keepalive\n\n") < 2:
                data += sock.recv(4096)
            assert data.startswith(b"HTTP/1.1 200 ")
            gate.allow()
            (reply,) = read_replies(PrependedSocket(data, sock))
        assert fold_chunks(reply.chunks)[0]["text"] == "Hello world"
        # an error that comes after the comments is a frame
        server.service.engine.failure = ApiError.not_ready("gone")
        gate.hold()
        threading.Timer(0.2, gate.allow).start()
        *_, error = chat(server, stream=True).chunks
        assert error["error"]["type"] == "cluster_not_ready"


def test_comments_also_while_tokens_come_without_text():
    limits = HttpLimits(poll_s=0.01, keepalive_s=0.0)
    with serving(FakeService(answer=CALL, max_context=2048), limits=limits) as server:
        reply = chat(server, tools=[TOOL], stream=True)
        assert reply.body.count(b": keepalive\n\n") > 10 and fold_chunks(reply.chunks)[0]["reason"] == "tool_calls"


class PrependedSocket:
    """A socket with bytes already read put back in front."""

    def __init__(self, data, sock):
        self.data, self.sock = data, sock

    def recv(self, size):
        data, self.data = self.data, b""
        return data or self.sock.recv(size)


# --- clients that go away ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("events", [0, 1, 4], ids=["queued", "prefilled", "decoding"])
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_a_lost_client_cancels_its_generation(server, stream, events, how):
    engine = server.service.engine
    engine.gate.hold()
    try:
        known = len(engine.generations)
        with connect(server) as sock:
            body = json.dumps({"messages": [USER], "stream": stream}).encode()
            sock.sendall(request_bytes("POST", CHAT, body))
            wait_until(lambda: len(engine.generations) > known)
            engine.gate.allow(events)
            if how == "half-close":
                sock.shutdown(socket.SHUT_WR)
            elif how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if how != "half-close":
                sock.close()
            assert engine.generations[known].closed.wait(WAIT_S)
    finally:
        engine.gate.allow()
    assert chat(server).json["choices"][0]["message"]["content"] == "Hello world"
    assert engine.active == 0


def test_many_lost_clients_then_one_that_stays(server):
    engine = server.service.engine
    engine.gate.hold()
    known = len(engine.generations)
    socks = [connect(server) for _ in range(60)]
    for sock in socks:
        sock.sendall(request_bytes("POST", COMPLETIONS, PROMPT))
    wait_until(lambda: len(engine.generations) == known + 60)
    for sock in socks:
        sock.close()
    wait_until(lambda: engine.active == 0)
    engine.gate.allow()
    assert complete(server).status == 200


def test_pipelined_bytes_do_not_hide_that_a_client_left(server):
    engine = server.service.engine
    engine.gate.hold()
    known = len(engine.generations)
    with connect(server) as sock:
        sock.sendall(request_bytes("POST", COMPLETIONS, PROMPT) + CLOSING_GET)
        wait_until(lambda: len(engine.generations) > known)
    assert engine.generations[known].closed.wait(WAIT_S)
    engine.gate.allow()


def test_slow_reader_is_cut_off():
    limits = HttpLimits(poll_s=0.02, write_s=0.2, linger_s=0.1)
    service = FakeService(answer="Hello world " * 4000, max_context=200_000)
    with serving(service, limits=limits) as server, connect(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"messages": [USER], "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        sock.sendall(request_bytes("POST", CHAT, body))
        wait_until(lambda: service.engine.generations and service.engine.active == 0)
        assert get(server, "/health").status == 200
        assert server.metrics.value("truecluster_http_cancelled_total") == 1


# --- the wire ---

H = b"Host: localhost\r\n"
CHUNKED_POST = b"POST /v1/completions HTTP/1.1\r\n" + H + b"Transfer-Encoding: chunked\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + H

WIRE_ERRORS = {
    "json instead of a request": (b'{"a":1}\r\n\r\n', 400),
    "json line": (b'{"a":1}\n', 400),
    "tls hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "http/0.9": (b"GET /\r\n", 400),
    "http/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "http/3.0": (b"GET / HTTP/3.0\r\n" + H + b"\r\n", 505),
    "bad version": (b"GET / HTTP/1.1x\r\n" + H + b"\r\n", 400),
    "two spaces": (b"GET  / HTTP/1.1\r\n" + H + b"\r\n", 400),
    "control character in target": (b"GET /\x01 HTTP/1.1\r\n" + H + b"\r\n", 400),
    "lf only": (b"GET /health HTTP/1.1\nHost: localhost\n\n", 400),
    "lf in headers": (b"GET /health HTTP/1.1\r\n" + H + b"A: b\nC: d\r\n\r\n", 400),
    "cr in header": (b"GET /health HTTP/1.1\r\n" + H + b"A: b\rC: d\r\n\r\n", 400),
    "nul in header": (b"GET /health HTTP/1.1\r\n" + H + b"A: b\0\r\n\r\n", 400),
    "folded header": (b"GET /health HTTP/1.1\r\n" + H + b"A: b\r\n c\r\n\r\n", 400),
    "space before colon": (b"GET /health HTTP/1.1\r\n" + H + b"A : b\r\n\r\n", 400),
    "header without colon": (b"GET /health HTTP/1.1\r\n" + H + b"nonsense\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /health HTTP/1.1\r\n" + H + H + b"\r\n", 400),
    "malformed host": (b"GET /health HTTP/1.1\r\nHost: a b\r\nConnection: close\r\n\r\n", 400),
    "long target": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + H + b"\r\n", 414),
    "long header": (b"GET /health HTTP/1.1\r\n" + H + b"A: " + b"b" * 70_000 + b"\r\n\r\n", 431),
    "many headers": (b"GET /health HTTP/1.1\r\n" + H + b"A: b\r\n" * 101 + b"\r\n", 431),
    "large headers": (b"GET /health HTTP/1.1\r\n" + H + (b"A: " + b"b" * 9000 + b"\r\n") * 9 + b"\r\n", 431),
    "head cut off": (b"GET /health HTTP/1.1\r\nHos", 400),
    "negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "length in words": (POST + b"Content-Length: abc\r\n\r\n", 400),
    "length with sign": (POST + b"Content-Length: +5\r\n\r\nhello", 400),
    "length twice": (POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
    "length list": (POST + b"Content-Length: 2, 2\r\n\r\n{}", 400),
    "length in other digits": (POST + "Content-Length: ²\r\n\r\n".encode("latin-1"), 400),
    "length huge": (POST + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n", 400),
    "length too large": (POST + b"Content-Length: 99999999\r\n\r\n", 413),
    "length and chunked": (CHUNKED_POST + b"Content-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "gzip, chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "xchunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 501),
    "chunked twice": (CHUNKED_POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    "chunked in 1.0": (CHUNKED_POST.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n", 400),
    "chunk size with 0x": (CHUNKED_POST + b"\r\n0x2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size with sign": (CHUNKED_POST + b"\r\n+2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size empty": (CHUNKED_POST + b"\r\n\r\n", 400),
    "chunk size negative": (CHUNKED_POST + b"\r\n-1\r\n", 400),
    "chunk longer than said": (CHUNKED_POST + b"\r\n1\r\n{}\r\n0\r\n\r\n", 400),
    "chunk with lf": (CHUNKED_POST + b"\r\n2\n{}\n0\n\n", 400),
    "chunk too large": (CHUNKED_POST + b"\r\nffffffff\r\n", 413),
    "chunk size endless": (CHUNKED_POST + b"\r\n" + b"1" * 5000, 400),
    "too many trailers": (CHUNKED_POST + b"\r\n2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 50 + b"\r\n", 431),
    "chunks cut off": (CHUNKED_POST + b"\r\n2\r\n{}\r\n", 400),
    "body cut off": (POST + b"Content-Length: 50\r\n\r\n{}", 400),
    "unknown expectation": (POST + b"Content-Length: 2\r\nExpect: tea\r\nConnection: close\r\n\r\n{}", 417),
    "gzip body": (POST + b"Content-Length: 2\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n{}", 415),
    "text body": (POST + b"Content-Length: 2\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n{}", 415),
    "no length": (POST + b"Connection: close\r\n\r\n", 411),
    "no length in 1.0": (POST.replace(b"1.1", b"1.0") + b"\r\n", 411),
}


@pytest.mark.parametrize("name", WIRE_ERRORS)
def test_bad_requests_get_one_json_error_and_the_end(server, name):
    data, status = WIRE_ERRORS[name]
    (reply,) = exchange_raw(server, data, half_close="cut off" in name)
    assert reply.status == status and reply.headers["Connection"] == "close"
    assert reply.error["type"] == "invalid_request_error"
    assert (reply.headers.get("x-should-retry") == "false") == (status >= 500)
    assert b"Traceback" not in reply.body
    assert get(server, "/health").status == 200


WIRE_GOOD = {
    "chunked": CHUNKED_POST
    + b"Connection: close\r\n\r\n5\r\n"
    + PROMPT[:5]
    + b"\r\n%x\r\n" % len(PROMPT[5:])
    + PROMPT[5:]
    + b"\r\n0\r\n\r\n",
    "chunked with extensions and trailers": CHUNKED_POST
    + b"Connection: close\r\n\r\n%X;a=b\r\n" % len(PROMPT)
    + PROMPT
    + b"\r\n000;c\r\nA: b\r\n\r\n",
    "chunked in capitals": CHUNKED_POST.replace(b": chunked", b": Chunked")
    + b"Connection: close\r\n\r\n%x\r\n" % len(PROMPT)
    + PROMPT
    + b"\r\n0\r\n\r\n",
    "http/1.0": request_bytes("POST", COMPLETIONS, PROMPT, version="1.0"),
    "http/1.0 without host": request_bytes("POST", COMPLETIONS, PROMPT, version="1.0").replace(H, b""),
    "empty lines in front": b"\r\n\r\n" + request_bytes("POST", COMPLETIONS, PROMPT, "Connection: close"),
    "curl's form type": request_bytes(
        "POST", COMPLETIONS, PROMPT, "Connection: close", "Content-Type: application/x-www-form-urlencoded"
    ),
    "no type": request_bytes("POST", COMPLETIONS, PROMPT, "Connection: close"),
    "charset": request_bytes(
        "POST", COMPLETIONS, PROMPT, "Connection: close", "Content-Type: Application/JSON; charset=utf-8"
    ),
}


@pytest.mark.parametrize("name", WIRE_GOOD)
def test_unusual_but_correct_requests(server, name):
    (reply,) = exchange_raw(server, WIRE_GOOD[name])
    assert reply.status == 200 and reply.json["choices"][0]["text"].startswith("Hello")


def test_empty_lines_before_a_request_do_not_pile_up():
    ours, theirs = socket.socketpair()
    kept = []

    class Watched(Incoming):
        def fill(self, deadline):
            more = super().fill(deadline)
            kept.append(len(self.buffer))
            return more

    def send():
        ours.sendall(b"\r\n" * 500_000 + CLOSING_GET)

    with ours, theirs:
        thread = threading.Thread(target=send)
        thread.start()
        assert read_head(Watched(theirs), HttpLimits()).path == "/health"
        thread.join()
    assert max(kept) <= Incoming.READ_BYTES


def test_pipelined_requests_are_answered_in_order(server):
    first = request_bytes("GET", "/v1/models")
    nope = request_bytes("POST", "/nope", b'{"a": 1}')
    bad = request_bytes("POST", COMPLETIONS, b'{"a": 1')
    good = request_bytes("POST", COMPLETIONS, PROMPT)
    replies = exchange_raw(server, first + nope + bad + good + CLOSING_GET)
    assert [reply.status for reply in replies] == [200, 404, 400, 200, 200]
    assert "Connection" not in replies[0].headers and replies[-1].headers["Connection"] == "close"


def test_a_get_with_a_body_does_not_become_a_request(server):
    smuggled = request_bytes("GET", "/nope")
    replies = exchange_raw(server, request_bytes("GET", "/health", smuggled) + CLOSING_GET)
    assert [reply.status for reply in replies] == [200, 200]
    chunked = b"GET /health HTTP/1.1\r\n" + H + b"Transfer-Encoding: chunked\r\n\r\n" + smuggled
    (reply,) = exchange_raw(server, chunked)
    assert reply.status == 200 and reply.headers["Connection"] == "close"


def test_large_bodies_of_refused_requests_do_not_hide_the_answer(server):
    body = b"x" * 3_000_000
    for path, status in (("/nope", 404), ("/health", 405)):
        assert ask(server, "POST", path, raw=body).status == status
    with connect(server) as sock:  # announced too large, then sent all the same
        sock.sendall(POST + b"Content-Length: 30000000\r\n\r\n")
        with contextlib.suppress(OSError):
            sock.sendall(b"x" * 30_000_000)
        (reply,) = read_replies(sock)
    assert reply.status == 413 and "Payload Too Large" in reply.error["message"]


def test_body_limit_counts_chunked_bytes():
    with serving(limits=HttpLimits(body_bytes=1000, linger_s=0.3)) as server:
        chunk = b"64\r\n" + b" " * 100 + b"\r\n"
        (reply,) = exchange_raw(server, CHUNKED_POST + b"\r\n" + chunk * 11)
        assert reply.status == 413
        assert ask(server, "POST", COMPLETIONS, raw=b" " * 1000).status == 400
        assert ask(server, "POST", COMPLETIONS, raw=b" " * 1001).status == 413


def padded_post(nbytes, sent=None, chunked=False):
    """A good request whose body has so many bytes, or the first `sent` bytes of it, with its head."""
    body = b'{"prompt": "ab", "user": "' + b"x" * (nbytes - 28) + b'"}'
    assert len(body) == nbytes
    if chunked:
        head = request_bytes("POST", COMPLETIONS, b"", "Transfer-Encoding: chunked", "Connection: close")
        return head + b"%x\r\n" % nbytes + body[:sent]
    return request_bytes("POST", COMPLETIONS, body, "Connection: close")[:-nbytes] + body[:sent]


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_have_so_much_memory_together_and_small_ones_need_none(chunked):
    limits = HttpLimits(small_body_bytes=1000, bodies_bytes=50_000, linger_s=WAIT_S, poll_s=0.02)
    with serving(limits=limits) as server:

        def status_of_another():
            (reply,) = exchange_raw(server, padded_post(20_000))
            assert reply.status == 200 or (reply.error["type"] == "server_overloaded" and reply.headers["Retry-After"])
            return reply.status

        for _ in range(4):  # each gives back what it has taken
            assert status_of_another() == 200
            wait_until(lambda: server.bodies.held_bytes == 0)
        with connect(server) as sock:
            sock.sendall(padded_post(45_000, 40_000, chunked))
            wait_until(lambda: server.bodies.held_bytes == 45_000)
            assert status_of_another() == 503
            assert complete(server).status == 200
            rest = padded_post(45_000, None, chunked)[len(padded_post(45_000, 40_000, chunked)) :]
            sock.sendall(rest + (b"\r\n0\r\n\r\n" if chunked else b""))
            assert read_replies(sock)[0].status == 200
        wait_until(lambda: server.bodies.held_bytes == 0)
        assert status_of_another() == 200
        with connect(server) as sock:  # a client that goes away in the middle keeps nothing
            sock.sendall(padded_post(45_000, 40_000, chunked))
            wait_until(lambda: server.bodies.held_bytes == 45_000)
            assert status_of_another() == 503
        wait_until(lambda: server.bodies.held_bytes == 0)
        assert status_of_another() == 200


@pytest.mark.parametrize("nbytes, at_once", [(20_000, 1), (500, 3)])
def test_few_bodies_are_parsed_at_once(monkeypatch, nbytes, at_once):
    monkeypatch.setattr(coordinator.RequestBodies, "SMALL_AT_ONCE", 3)
    parsing, most, collecting, parse = [], [], [], coordinator.parse_body

    def slow_parse(raw):
        parsing.append(raw)
        most.append(len(parsing))
        collecting.append(gc.isenabled())
        time.sleep(0.05)
        parsing.pop()
        return parse(raw)

    monkeypatch.setattr(coordinator, "parse_body", slow_parse)
    limits = HttpLimits(small_body_bytes=1000, linger_s=WAIT_S, poll_s=0.02)
    with serving(limits=limits) as server, ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: exchange_raw(server, padded_post(nbytes))[0], range(6)))
    assert [reply.status for reply in replies] == [200] * 6 and max(most) <= at_once
    assert any(collecting) == (at_once > 1) and gc.isenabled()


@pytest.mark.parametrize("path, field", [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_encoded(server, monkeypatch, path, field):
    """Encoding 16 MB of text took 4 GB of memory and half a minute."""
    monkeypatch.setattr(coordinator.Tokenizer, "encode_pieces", lambda *_: pytest.fail("the text was encoded"))
    text = "e\u0301 " * 5000  # two characters that are one
    body = {field: text if field == "prompt" else [{"role": "user", "content": text}]}
    reply = ask(server, "POST", path, body)
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
    assert "your prompt has at least" in reply.error["message"]


def test_a_node_that_comes_to_the_api_port_has_one_line(caplog):
    with serving() as server:
        server.node_port = 7001
        for _ in range(3):
            (reply,) = exchange_raw(server, b"\0\0\0\0\0\0\1\x50\x84\xa4type\xa5HELLO", half_close=True)
            assert reply.status == 400 and "nodes connect to the node port" in reply.error["message"]
        wait_until(lambda: not server.under_way)
    lines = [record.getMessage() for record in caplog.records if '"POST ' not in record.getMessage()]
    assert lines == ["a node at 127.0.0.1 connects to the HTTP API; start it with --port 7001"]


def test_expect_100_continue():
    with serving(api_key="k") as server:
        key = "Authorization: Bearer k"
        with connect(server) as sock:
            sock.sendall(request_bytes("POST", COMPLETIONS, b"", key, "Expect: 100-continue", "Connection: close")[:-2])
            sock.sendall(b"Content-Length: %d\r\n\r\n" % len(PROMPT))
            assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            sock.sendall(PROMPT)
            (reply,) = read_replies(sock)
            assert reply.status == 200
        for headers, status in (("", 401), (key, 413)):
            head = f"{headers}\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n".lstrip("\r\n").encode()
            (reply,) = exchange_raw(server, POST + head)
            assert reply.status == status and reply.headers["Connection"] == "close"


def test_keep_alive_through_all_kinds_of_answers(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.connect()
    sock = connection.sock
    for _ in range(10):
        assert ask_on(connection, "GET", "/health").status == 200
        assert ask_on(connection, "POST", COMPLETIONS, {"prompt": 5}).status == 400
        assert ask_on(connection, "POST", "/nope", {"a": 1}).status == 404
        assert ask_on(connection, "POST", CHAT, {"messages": [USER], "stream": True}).chunks
        assert ask_on(connection, "OPTIONS", "/").status == 204
        assert ask_on(connection, "HEAD", "/v1/models").status == 200
        assert connection.sock is sock
    connection.close()


def test_http_1_0_is_never_chunked(server):
    body = json.dumps({"messages": [USER], "stream": True}).encode()
    (reply,) = exchange_raw(server, request_bytes("POST", CHAT, body, "Connection: keep-alive", version="1.0"))
    assert "Transfer-Encoding" not in reply.headers and fold_chunks(reply.chunks)[0]["text"] == "Hello world"
    two = request_bytes("GET", "/health", b"", "Connection: keep-alive", version="1.0") + request_bytes(
        "GET", "/health", version="1.0"
    )
    assert [reply.headers["Connection"] for reply in exchange_raw(server, two)] == ["keep-alive", "close"]


def test_streams_end_with_the_zero_chunk_also_after_an_error():
    with serving() as server:
        server.service.engine.failure, server.service.engine.fail_after = ApiError.not_ready("gone"), 3
        body = json.dumps({"messages": [USER], "stream": True}).encode()
        (reply,) = exchange_raw(server, request_bytes("POST", CHAT, body, "Connection: close"))
        assert "error" in reply.chunks[-1]


def test_slow_clients_are_timed_out_and_hold_up_nobody():
    limits = HttpLimits(idle_s=0.3, head_s=0.3, body_s=0.3, linger_s=0.1, poll_s=0.02)
    with (
        serving(limits=limits) as server,
        connect(server) as idle,
        connect(server) as head,
        connect(server) as drip,
        connect(server) as body,
    ):
        head.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        body.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        done = threading.Event()

        def drip_feed():
            with contextlib.suppress(OSError):
                while not done.wait(0.03):
                    drip.sendall(b"G")

        thread = threading.Thread(target=drip_feed)
        thread.start()
        assert complete(server).status == 200
        for sock in (head, drip, body):
            (reply,) = read_replies(sock)
            assert reply.status == 408 and reply.headers["Connection"] == "close"
        assert read_replies(idle) == []
        done.set()
        thread.join()


def test_many_idle_connections_do_not_disturb(server):
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(connect(server))
        assert complete(server).status == 200
    assert complete(server).status == 200


def test_connections_beyond_the_thread_limit_get_a_503():
    limits = HttpLimits(threads=3, linger_s=0.1, poll_s=0.02)
    with serving(limits=limits) as server:
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(connect(server)) for _ in range(3)]
            for sock in held:
                sock.sendall(request_bytes("GET", "/health"))
                assert sock.recv(12) == b"HTTP/1.1 200"
            threads = threading.active_count()
            for _ in range(5):
                (reply,) = exchange_raw(server, request_bytes("GET", "/health"))
                assert reply.status == 503 and reply.error["type"] == "server_overloaded"
                assert int(reply.headers["Retry-After"]) > 0
            assert threading.active_count() <= threads
        wait_until(lambda: get(server, "/health").status == 200)


def test_random_bytes_never_hurt(server):
    rng = random.Random(3)
    pieces = [b"GET ", b"POST ", b"/health", b" HTTP/1.1\r\n", H, b"\r\n", b"\n", b"Content-Length: 3\r\n", b"{}"]
    pieces += [b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"\0", b"\xff", b": ", b"5\r\n", PROMPT]
    for _ in range(150):
        data = b"".join(rng.choices(pieces, k=rng.randint(1, 12)))
        for reply in exchange_raw(server, data, half_close=True):
            assert reply.status in (200, 400, 404, 405, 408, 411, 415, 431, 501, 505)
    assert get(server, "/health").status == 200


def test_any_value_in_any_field_over_http(server):
    values = ["null", "true", '""', "[]", "{}", "-1", "1.5", "1e999", "NaN", '"\\ud800"', "1" + "0" * 400]
    names = ["model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"]
    names += ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "stream", "user"]
    names += ["ignore_eos", "stop_token_ids", "min_tokens", "skip_special_tokens", "include_stop_str_in_output"]
    names += ["add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "tool_choice"]
    names += ["logprobs", "top_logprobs", "echo", "best_of", "suffix", "response_format", "stream_options", "prompt"]
    names += ["messages", "chat_template"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    for path, first in ((COMPLETIONS, '"prompt": "a"'), (CHAT, '"messages": [{"role": "user", "content": "a"}]')):
        for name in names:
            for value in values:
                body = f'{{{first}, "{name}": {value}}}'.encode()
                reply = ask_on(connection, "POST", path, raw=body)
                assert reply.status in (200, 400, 404), (path, name, value)
    assert ask_on(connection, "GET", "/health").status == 200
    connection.close()


# --- who may ask ---


def head_of(method="POST", path="/v1/completions", **headers):
    headers = {"host": "localhost:8000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestHead(method, path, 1, {name: [value] for name, value in headers.items() if value is not None})


LOOPBACK = AccessRules("127.0.0.1")
ANY = AccessRules("0.0.0.0", own_names=frozenset({"localhost", "mybox"}))
KEYED = AccessRules("127.0.0.1", api_key="secret-é")
ORIGIN = AccessRules("0.0.0.0", allowed_origins=frozenset({"https://app.example"}))
STAR = AccessRules("0.0.0.0", allowed_origins=frozenset({"*"}))


@pytest.mark.parametrize(
    ("rules", "head", "status"),
    [
        (LOOPBACK, head_of(), None),
        (LOOPBACK, head_of(host="127.0.0.1"), None),
        (LOOPBACK, head_of(host="[::1]:8000"), None),
        (LOOPBACK, head_of(host="LOCALHOST."), None),
        (LOOPBACK, head_of(host="evil.example"), 403),
        (LOOPBACK, head_of(host="evil.example:8000"), 403),
        (LOOPBACK, head_of(host="localhost.evil.example"), 403),
        (LOOPBACK, head_of(host="127.0.0.1.evil.example"), 403),
        (LOOPBACK, head_of(host="user@localhost"), 400),
        (LOOPBACK, head_of(host="localhost:80:80"), 400),
        (LOOPBACK, head_of(host=None), None),  # HTTP/1.0, no browser
        (LOOPBACK, head_of(path="http://evil.example/health", method="GET"), 403),
        (KEYED, head_of(host="evil.example", authorization="Bearer secret-Ã©"), None),
        (ANY, head_of(host="evil.example"), None),  # a proxy or a name of this machine; no browser is involved
        (ANY, head_of(host="evil.example", origin="http://evil.example"), 403),
        (ANY, head_of(host="evil.example", sec_fetch_site="same-origin"), 403),
        (ANY, head_of(host="10.0.0.5:8000", origin="http://10.0.0.5:8000"), None),
        (ANY, head_of(host="mybox:8000", origin="http://mybox:8000"), None),
        (ANY, head_of(host="mybox:8000", origin="http://mybox:9000"), 403),
        (ANY, head_of(host="10.0.0.5", origin="http://10.0.0.5:80"), None),
        (ANY, head_of(host="10.0.0.5", origin="https://evil.example"), 403),
        (ANY, head_of(host="10.0.0.5", origin="null"), 403),
        (ANY, head_of(host="10.0.0.5", origin=""), 403),
        (ANY, head_of(host="10.0.0.5", sec_fetch_site="cross-site"), 403),
        (ANY, head_of(method="GET", host="10.0.0.5", sec_fetch_site="cross-site"), None),  # a link that was followed
        (ANY, head_of(host="10.0.0.5", sec_fetch_site="none"), None),
        (ORIGIN, head_of(host="10.0.0.5", origin="https://app.example"), None),
        (ORIGIN, head_of(host="app.example", origin="https://app.example"), None),
        (ORIGIN, head_of(host="10.0.0.5", origin="https://app.example.evil"), 403),
        (ORIGIN, head_of(host="10.0.0.5", origin="http://app.example"), 403),
        (STAR, head_of(host="evil.example", origin="https://evil.example"), None),
        (KEYED, head_of(), 401),
        (KEYED, head_of(authorization="Bearer wrong"), 401),
        (KEYED, head_of(authorization="Basic secret-Ã©"), 401),
        (KEYED, head_of(authorization="secret-Ã©"), 401),
        (KEYED, head_of(authorization="Bearer secret-Ã©, Bearer secret-Ã©"), 401),
        (KEYED, head_of(authorization="bearer  secret-Ã©"), None),
        (KEYED, head_of(method="GET", path="/health"), None),
        (KEYED, head_of(method="OPTIONS"), None),
        (KEYED, head_of(method="GET", path="/v1/models"), 401),
        (KEYED, head_of(method="GET", path="/"), 401),
        (KEYED, head_of(origin="https://evil.example"), 403),
    ],
)
def test_access_rules(rules, head, status):
    if status is None:
        rules.check(head)
    else:
        with pytest.raises(ApiError) as caught:
            rules.check(head)
        assert caught.value.status == status


def test_cors_over_http():
    with serving(allowed_origins=["https://App.example/"]) as server:
        allowed = {"Origin": "https://app.example"}
        preflight = allowed | {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, x-stainless-os, x-evil",
            "Access-Control-Request-Private-Network": "true",
        }
        reply = ask(server, "OPTIONS", CHAT, headers=preflight)
        assert reply.status == 204 and reply.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization, content-type, x-stainless-os"
        assert reply.headers["Access-Control-Allow-Methods"] == "GET, POST, OPTIONS"
        assert "Access-Control-Allow-Private-Network" not in reply.headers
        assert "Access-Control-Allow-Credentials" not in reply.headers
        for reply in (complete(server, headers=allowed), complete(server, headers=allowed, n=0)):
            assert reply.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert reply.headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Origin" not in complete(server).headers
        reply = complete(server, headers={"Origin": "https://evil.example"})
        assert reply.status == 403 and "Access-Control-Allow-Origin" not in reply.headers
        form = allowed | {"Content-Type": "text/json"}
        assert complete(server, headers=form).status == 415  # from a page only application/json
    with serving(allowed_origins=["*"]) as server:
        assert complete(server, headers=allowed).headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("equal", [False, True])
def test_api_keys_are_compared_in_constant_time(monkeypatch, equal):
    """The decision is compare_digest's alone: when it says no nothing passes, when it says yes everything does."""
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: equal)
    for key in ("secret-Ã©", "wrong"):
        test_access_rules(KEYED, head_of(authorization=f"Bearer {key}"), None if equal else 401)


def test_api_key_over_http():
    with serving(api_key="k") as server:
        reply = complete(server)
        assert reply.status == 401 and reply.headers["WWW-Authenticate"] == "Bearer"
        assert (reply.error["type"], reply.error["code"]) == ("authentication_error", "invalid_api_key")
        assert complete(server, headers={"Authorization": "Bearer k"}).status == 200
        assert get(server, "/health").status == 200 and ask(server, "OPTIONS", CHAT).status == 204


# --- logs and the server itself ---


def test_log_lines_cannot_be_forged_and_hold_no_prompt(server, caplog):
    for target in ("/x%0aforged", "/\x7fx", "/é\x85"):
        data = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode("latin-1")
        exchange_raw(server, data)
    complete(server, prompt="very private")
    wait_until(lambda: '"POST /v1/completions" 200' in caplog.text)
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.isascii() and line.isprintable() for line in lines)
    assert all(re.match(r'req_[0-9a-f]{16} 127\.0\.0\.1 "', line) for line in lines)
    assert "private" not in caplog.text


def test_log_lines_say_what_a_status_does_not_tell(caplog):
    with serving() as server:
        exchange_raw(server, POST + b"Content-Length: 50\r\n\r\n{}", half_close=True)
        server.service.engine.failure, server.service.engine.fail_after = ApiError.not_ready("It ends."), 3
        assert chat(server, stream=True).status == 200
        wait_until(lambda: not server.under_way)
    assert re.search('"POST .*" 400, client went away within its request [0-9]+ ms', caplog.text)
    assert re.search('"POST .*" 200, cut off [0-9]+ ms', caplog.text)


def test_printable():
    assert printable("a\r\nb\x1b[0mé\u2028") == "a\\r\\nb\\x1b[0m\\xe9\\u2028"
    assert len(printable("x" * 1000)) == 200


def test_ipv6():
    try:
        server = HttpServer("::1", 0, FakeService())
    except StartupError:
        pytest.skip("no IPv6 here")
    server.start()
    with socket.create_connection(("::1", server.port), timeout=WAIT_S) as sock:
        sock.sendall(CLOSING_GET)
        assert read_replies(sock)[0].status == 200
    server.stop()


def test_an_address_in_use_is_one_readable_line(server):
    with pytest.raises(StartupError) as caught:
        HttpServer("127.0.0.1", server.port, server.service)
    assert str(server.port) in str(caught.value) and "\n" not in str(caught.value)
    for host, port in (("256.1.1.1", 0), ("127.0.0.1", 70_000)):
        with pytest.raises(StartupError):
            HttpServer(host, port, server.service)


def test_stop_of_a_server_that_never_started():
    HttpServer("127.0.0.1", 0, FakeService()).stop()


def test_stop_ends_open_connections():
    with serving() as server:
        sock = connect(server)
        sock.sendall(request_bytes("GET", "/health"))
        assert sock.recv(12) == b"HTTP/1.1 200"
        server.service.engine.gate.hold()
        body = json.dumps({"messages": [USER]}).encode()
        busy = connect(server)
        busy.sendall(request_bytes("POST", CHAT, body))
        wait_until(lambda: server.service.engine.active == 1)
    with sock, busy:
        while sock.recv(4096):
            pass
        assert server.service.engine.generations[0].closed.wait(WAIT_S)
