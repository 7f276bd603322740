"""Hostile HTTP: malformed requests of every kind among good ones, over several connections at once.

    python -m pytest tests/test_hostile_http.py
    python tests/test_hostile_http.py --requests 10000 --seed 7              # the long run, with counts by outcome
    python tests/test_hostile_http.py --seed 7 --first 4711 --requests 1     # one connection of it again

A connection carries some good requests, one hostile one and, where the server can know where that ends, a good one
after it. Every good request gets the answer it gets on a quiet server, every hostile one the status it deserves with an
error as OpenAI shapes them, and nothing is left behind: no thread, no open file, no error in the log.
"""

import argparse
import collections
import contextlib
import copy
import itertools
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the long run, which pytest does not start

from cluster import wait_until
from fake_engine import FakeService
from test_coordinator_http import (
    CHAT,
    COMPLETIONS,
    TOOL,
    WAIT_S,
    WIRE_ERRORS,
    ask,
    connect,
    fold_chunks,
    fold_whole,
    read_replies,
    request_bytes,
    serving,
)
from test_fuzz import Bugs, left_open, wait_until_closed

from coordinator import HttpLimits

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts open files as Linux shows them")
CONNECTIONS = 8  # at once
CLOSE = "Connection: close"


# ----------------------------------------------------------------------------
# Good requests
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A request for an answer that is the same every time, streamed or not."""

    path: str
    text: str
    stream: bool

    @property
    def body(self) -> bytes:
        asked = {"prompt": self.text} if self.path == COMPLETIONS else {"messages": [user(self.text)]}
        return json.dumps(asked | {"max_tokens": 12, "seed": 1, "stream": self.stream}, ensure_ascii=False).encode()


def user(text: str) -> dict:
    return {"role": "user", "content": text}


TEXTS = ("a", "what is it?", "Grüße", "🥹" * 20, "\u2028\0\n", "<|im_end|>", '{"a": [1]}', "GET / HTTP/1.1\r\n\r\n")
QUESTIONS = [Question(path, text, stream) for path in (COMPLETIONS, CHAT) for text in TEXTS for stream in (False, True)]
HARMLESS_HEADERS = (
    "Range: bytes=0-3",
    "If-None-Match: *",
    "If-Modified-Since: Mon, 01 Jan 2035 00:00:00 GMT",
    "If-Range: \"x\"",
    "Upgrade: h2c",
    "HTTP2-Settings: AAMAAABkAAQAAP__",
    "TE: trailers, deflate",
    "Accept: */*;q=0",
    "Accept-Encoding: gzip, br, zstd",
    "Content-Encoding: identity",
    "X-Forwarded-For: 127.0.0.1, ::1",
    "X-HTTP-Method-Override: DELETE",
    "X-Empty:",
    "X-Latin: \xe9\xff",
    "X-Long: " + "x" * 20_000,
    "Cookie: " + "a=b; " * 300,
    "Trailer: Host",
    "Via: 1.1 proxy",
)  # fmt: skip


def good_request(rng, question: Question, *headers: str, version: str = "1.1") -> tuple[bytes, Question]:
    """A completions or chat request in one of the spellings that HTTP allows, and its question."""
    body = rng.choice((b"", b"", b"\xef\xbb\xbf", b" \r\n\t")) + question.body
    headers = (*headers, *rng.sample(HARMLESS_HEADERS, rng.randrange(4)), *["X-Many: x"] * rng.choice((0, 0, 80)))
    path = question.path
    path = rng.choice((path, path.removeprefix("/v1"), f"{path}/?x=1", f"http://localhost{path}"))
    if version == "1.1" and rng.random() < 0.1:
        headers = (*headers, rng.choice(("Expect: 100-continue", "expect:100-Continue")))
    if version == "1.1" and rng.random() < 0.3:
        head = request_bytes("POST", path, b"", *headers, "Transfer-Encoding: chunked")
        return head + b"".join(chunks(rng, body)), question
    return rng.choice((b"", b"", b"\r\n")) + request_bytes("POST", path, body, *headers, version=version), question


def chunks(rng, body: bytes) -> list[bytes]:
    """A body in chunked coding: pieces of random sizes, extensions, trailers. The last item ends it."""
    cuts = sorted(rng.choices(range(1, len(body)), k=rng.randrange(6)))
    pieces = [body[a:b] for a, b in itertools.pairwise([0, *cuts, len(body)]) if a < b]
    extensions = (b"", b";a", b' ; a="b"')
    sizes = [rng.choice((b"%x", b"%X", b"000%x")) % len(piece) + rng.choice(extensions) for piece in pieces]
    coded = [size + b"\r\n" + piece + b"\r\n" for size, piece in zip(sizes, pieces, strict=True)]
    return [*coded, rng.choice((b"0\r\n\r\n", b"000;x\r\n\r\n", b"0\r\nA: b\r\nTransfer-Encoding: gzip\r\n\r\n"))]


# ----------------------------------------------------------------------------
# Hostile requests
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Hostile:
    """Bytes in place of one request, and what may come back."""

    data: bytes
    statuses: tuple[int, ...] = ()  # of its only answer; none: no answer is waited for
    param: str | None = None  # the field that its error names
    stays: bool = False  # the connection serves on: it is certain where this request ends
    cut: bool = False  # the client says no more after it


ANY_ERROR = (400, 403, 404, 405, 408, 411, 413, 414, 415, 417, 431, 501, 505)


def whole(rng, *headers: str) -> bytes:
    """A plain good request as raw material."""
    question = rng.choice(QUESTIONS)
    return request_bytes("POST", question.path, question.body, *headers)


def known_error(rng) -> Hostile:
    name = rng.choice(list(WIRE_ERRORS))
    data, status = WIRE_ERRORS[name]
    return Hostile(data, (status,), cut="cut off" in name)


def bad_request_line(rng) -> Hostile:
    method, target, version = "POST", COMPLETIONS, "HTTP/1.1"
    space, end, status = " ", "\r\n", 400
    case = rng.randrange(8)
    if case == 0:
        method = rng.choice(("PO\0ST", "PO ST", "P\xd6ST", "POST\t", "", "PO/ST", "G\x00" * 50))
    elif case == 1:
        target = rng.choice(("", "/\0", "/ /", "/\x7f", "/\t", "/\x1b[2J"))
    elif case == 2:
        version = rng.choice(
            ("", "HTTP", "http/1.1", "HTTP/1", "HTTP/11", "HTTP/1.1 ", "HTTP/1.10", "HTTP/-1.1", "RTSP/1.0")
        )
    elif case == 3:
        version, status = rng.choice(("HTTP/0.9", "HTTP/2.0", "HTTP/3.0", "HTTP/9.9")), 505
    elif case == 4:
        target, status = "/" + "a" * rng.choice((16_400, 70_000)), 414
    elif case == 5:
        space = rng.choice(("  ", "\t", "\x0b", "\xa0"))
    elif case == 6:
        end = rng.choice(("\n", "\r\r\n", "\0\r\n"))
    else:
        method = method.lower() + rng.choice(("\r", "\n", "\0"))
    line = f"{method}{space}{target}{space}{version}{end}".encode("latin-1")
    return Hostile(line + whole(rng).partition(b"\r\n")[2], (status,))


BAD_HEADERS = (
    b" folded", b"\tfolded", b"no colon", b": no name", b"A b: c", b"A : b", b"A\t: b", b"A\0: b", b"A: \0", b"A: \x01",
    b"A: b\rC: d", b"A: b\r", b"A: \x7f", b"\xe9: b", b"(A): b", b"A: b\nC: d", b"\xff" * 99, b"Host: localhost",
    b"Host:", b"Content-Length: -1", b"Content-Length: 1_0", b"Content-Length: 0x10", b"Content-Length: 1e3",
    b"Content-Length:", b"Content-Length: 10, 10", b"Content-Length: \xb2", b"Content-Length: " + b"9" * 30,
    b"Content-Length: 0", b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity",
    b"transfer-encoding:\tchunked", b"Transfer-Encoding:",
)  # fmt: skip


def bad_header(rng) -> Hostile:
    """One more line somewhere in the head of a good request. Any second length is a line too much."""
    first, *lines = whole(rng).partition(b"\r\n\r\n")[0].split(b"\r\n")
    lines.insert(rng.randrange(len(lines) + 1), rng.choice((*BAD_HEADERS, lines[1])))  # that is its length, again
    return Hostile(b"\r\n".join([first, *lines]) + b"\r\n\r\n{}", (400,))


def too_many_headers(rng) -> Hostile:
    lines = rng.choice(([b"A: b"] * rng.randint(101, 400), [b"A: " + b"b" * 70_000], [b"A: " + b"b" * 6_000] * 12))
    return Hostile(whole(rng).replace(b"\r\n", b"\r\n" + b"\r\n".join(lines) + b"\r\n", 1), (431,))


def giant_body(rng) -> Hostile:
    length = rng.choice((2**24 + 1, 2**31, 10**17))
    expect = rng.choice(((), ("Expect: 100-continue",)))
    return Hostile(request_bytes("POST", COMPLETIONS, b"", f"Content-Length: {length}", *expect) + b"{" * 1000, (413,))


def bad_chunks(rng) -> Hostile:
    question = rng.choice(QUESTIONS)
    *coded, last = chunks(rng, question.body)
    line, _, rest = coded.pop().partition(b"\r\n")
    size, status = line.partition(b";")[0].strip(), 400
    case = rng.randrange(5)
    if case == 0:
        signed = (b"0x" + size, b"-" + size, b"+" + size, b" " + size)
        wrong = rng.choice((b"", b"g", b"1" * 17, size + b" a", size + b"\0", size + b";\n", *signed))
        coded.append(wrong + b"\r\n" + rest)
    elif case == 1:  # longer or shorter than it says
        coded = [b"%x\r\n%b\r\n" % (len(question.body) + rng.choice((-1, 1, 2)), question.body)]
    elif case == 2:
        coded.append(line + b"\r\n" + rest[:-2] + rng.choice((b"\n", b"\r", b"\0\0")) + b"zz")
    elif case == 3:
        coded.append(rng.choice((b"fffffff", b"f" * 16, b"7fffffffffffffff")) + b"\r\n" + rest)
        status = 413
    else:
        coded.append(line + b"\r\n" + rest)
        last = b"0\r\n" + rng.choice((b"A: b\r\n" * 33, b"A: " + b"b" * 2000 + b"\r\n")) + b"\r\n"
        status = 431
    head = request_bytes("POST", question.path, b"", "Transfer-Encoding: chunked")
    return Hostile(head + b"".join(coded) + last, (status,))


def cut_off(rng) -> Hostile:
    data = good_request(rng, rng.choice(QUESTIONS))[0].lstrip()
    return Hostile(data[: rng.randrange(1, len(data))], (400,), cut=True)


NOT_JSON = (
    b"", b" ", b"{", b'{"prompt": "a"', b'{"prompt": "a"}}', b'{"prompt": "a"} {}', b"{'prompt': 'a'}", b"prompt=a",
    b"{}\0", b"[]", b"null", b"5", b'"x"', b"true", b'{"prompt": NaN}', b'{"n": Infinity}', b'{"n": -Infinity}',
    b'{"temperature": 1e999}', b'{"n": ' + b"9" * 5000 + b"}", b'{"n": 01}', b'{"n": 0x1}', b'{"n": 1.}',
    b'{"prompt": "\n"}', b'{"prompt": "\xff"}', b'{"prompt": "\xc3"}', b'{"prompt": "\xed\xa0\x80"}', b'{"\xff": 1}',
    b'{"prompt": "\xc0\x80"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"x\\ud800": 1}',
    b'{"prompt": "\\u12"}', b'{"prompt": "\\x41"}', '{"prompt": "a"}'.encode("utf-16"),
    '{"prompt": "a"}'.encode("utf-32"), b"\xef\xbb\xbf\xef\xbb\xbf{}", b"\x1f\x8b\x08\0", b"[" * 200_000,
    b'{"a":' * 30_000, b'{"prompt": ' + b"[" * 129 + b"]" * 129 + b"}", b'{"a": ' * 500 + b"1" + b"}" * 500,
)  # fmt: skip


def bad_json(rng) -> Hostile:
    body, path = rng.choice(NOT_JSON), rng.choice((COMPLETIONS, CHAT))
    length = () if body else ("Content-Length: 0",)  # request_bytes leaves that one out
    return Hostile(request_bytes("POST", path, body, *length), (400,), stays=True)


ODD = (
    None, True, False, 0, 1, -1, 1.5, 5.0, 1e308, -5e-324, 2**31, -(2**63) - 1, 10**400, "", "1",
    "é\0", [], {}, [[]], {"": 0},
)  # fmt: skip
BOOLEANS, BOTH = ["x", 0, 1, 1.0, [], {}], (COMPLETIONS, CHAT)
COUNTS = [True, "5", 1.5, -2, 2**63, 10**400, 1e308, [], {}, [1]]


def named(name, **more) -> dict:
    return {"type": "function", "function": {"name": name, **more}}


CALL = named("f", arguments='{"a": 1}')
WRONG_MESSAGES = [
    [message] for message in (
        {"role": "user"}, {"role": 5}, {"role": [], "content": ""}, {"role": "x", "content": "x"},
        {"role": "USER", "content": ""},
        user(5), user([1]), user({}), user([{"type": "image_url"}]), user([{"type": "text", "text": None}]), user([[]]),
        user("x") | {"name": 5}, {"role": "tool", "content": "", "tool_call_id": []},
        {"role": "assistant", "content": 5},
        {"role": "assistant", "tool_calls": [5]}, {"role": "assistant", "tool_calls": [CALL | {"function": 5}]},
        {"role": "assistant", "tool_calls": [named("f", arguments=5)]}, {"role": "assistant", "tool_calls": "x"},
    )
]  # fmt: skip
# field -> (routes, values that must be refused). From API.md, section 2.
WRONG_VALUES = {
    "model": (BOTH, [True, 5, 1.5, "", [], {}]),
    "max_tokens": (BOTH, COUNTS),
    "max_completion_tokens": ((CHAT,), COUNTS),
    "min_tokens": (BOTH, COUNTS),
    "n": (BOTH, [*COUNTS, 0, 17]),
    "temperature": (BOTH, [True, "0.7", -0.1, 2.0001, 10**400, [], {}]),
    "top_p": (BOTH, [True, "1", -0.1, 1.01, [], {}]),
    "min_p": (BOTH, [False, "1", -5e-324, 1.01, [], {}]),
    "top_k": (BOTH, [True, "1", -2, 0.5, [], {}]),
    "repetition_penalty": (BOTH, [True, 0, -1, "1", [], {}]),
    "presence_penalty": (BOTH, [True, -2.1, 2.1, "1", []]),
    "frequency_penalty": (BOTH, [True, -2.1, 2.1, "1", []]),
    "logit_bias": (BOTH, [5, "x", [], {"a": 1}, {"-1": 1}, {"1": "x"}, {"1": 101}, {"1": None}, {"99999": 1},
                          {"²": 1}]),
    "seed": (BOTH, [True, "1", 0.5, 2**63, -(2**63) - 1, []]),
    "stop": (BOTH, ["", [""], [1], [None], {"a": 1}, 5, True, ["a"] * 5, [["a"]]]),
    "stop_token_ids": (BOTH, [5, "1", ["1"], [True], [-1], [10**9], [1.5], {}, [0] * 65]),
    "stream": (BOTH, BOOLEANS),
    "stream_options": (BOTH, ["x", 5, True, [], {"include_usage": "yes"}, {"include_usage": 1}]),
    "ignore_eos": (BOTH, BOOLEANS),
    "skip_special_tokens": (BOTH, BOOLEANS),
    "include_stop_str_in_output": (BOTH, BOOLEANS),
    "response_format": (BOTH, ["json", 5, [], {}, {"type": 5}, {"type": "json_object"}, {"type": "json_schema"},
                               {"type": []}]),
    "prompt": ((COMPLETIONS,), [None, True, 5, {}, "", [], [[]], [""], [True], [1.5], [1, "a"], [-1], [[-1]], [10**9],
                                [[[1]]], ["a"] * 65, [None], [{}]]),
    "echo": ((COMPLETIONS,), BOOLEANS),
    "best_of": ((COMPLETIONS,), [*COUNTS, 0, 2]),
    "logprobs": ((COMPLETIONS,), [True, "1", -1, 6, 1.5, [], {}]),
    "suffix": ((COMPLETIONS,), ["", "x", 5, []]),
    "messages": ((CHAT,), [None, True, 5, "hi", {}, [], [5], [None], ["x"], [[]], [{}], [user("a"), {}],
                           *WRONG_MESSAGES]),
    "top_logprobs": ((CHAT,), [True, "1", -1, 21, 1.5, [], {}, 3]),
    "tools": ((CHAT,), [5, "x", {}, [5], [None], [{}], [{"type": "function"}], [TOOL] * 129, [named(5)],
                        [named("f", parameters=[])], [named("f", description=5)]]),
    "tool_choice": ((CHAT,), [5, "x", [], {}, {"type": "function"}, "auto", "required", named("g")]),
    "continue_final_message": ((CHAT,), [*BOOLEANS, True]),
    "chat_template": (BOTH, ["x", 5, ["x"], {"a": 1}]),
    "chat_template_kwargs": ((CHAT,), [5, "x", [], {"messages": 1}, {"a": []}, {"a": {}}, {"_a": 1}, {"a b": 1},
                                       {"": 1}, {"eos_token": "x"}, {"tools": 1}]),
}  # fmt: skip


def wrong_field(rng) -> Hostile:
    name = rng.choice(list(WRONG_VALUES))
    routes, values = WRONG_VALUES[name]
    path, value = rng.choice(routes), rng.choice(values)
    body = {"stream": rng.random() < 0.5, ("prompt" if path == COMPLETIONS else "messages"): [user("a")]}
    if path == COMPLETIONS:
        body["prompt"] = "a"
    data = json.dumps(body | {name: value}).encode()
    return Hostile(request_bytes("POST", path, data), (400,), param=name, stays=True)


def odd_field(rng) -> Hostile:
    """Any value in any place of a rich request: right or wrong, but never a fault of the server."""
    path = rng.choice((COMPLETIONS, CHAT))
    history = [user([{"type": "text", "text": "a"}]), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    ones = ("n", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
    rich = {
        "messages": [*history, {"role": "tool", "content": "x", "tool_call_id": "c"}, user("b")],
        "prompt": [[1, 2], "a"],
        "tools": [named("f", parameters={"type": "object"})], "tool_choice": "auto", "stop": ["x"], "max_tokens": 3,
        "logit_bias": {"1": 1}, "stream": True, "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"a": 1},
        "response_format": {"type": "text"}, **dict.fromkeys(ones, 1),
    }  # fmt: skip
    rich = copy.deepcopy(rich)  # CALL is shared
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, key = rich, None
        while key is None or (isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.8):
            place = rich if key is None else place[key]
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        place[key] = copy.deepcopy(rng.choice(ODD))  # the next round may put something into it
    return Hostile(request_bytes("POST", path, json.dumps(rich).encode()), (200, 400, 404), stays=True)


def wrong_route(rng) -> Hostile:
    known, unknown = rng.choice((COMPLETIONS, "/health", "/v1/models")), rng.choice(UNKNOWN_PATHS)
    method = rng.choice(("PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "BREW", "post", "get", "M-SEARCH", "A" * 500))
    body = rng.choice((b"", b"{}", b"x" * 5000))
    path, status = (known, 405) if rng.random() < 0.5 else (unknown, 404)
    return Hostile(request_bytes(method, path, body), (status,), stays=True)


UNKNOWN_PATHS = (
    "/nope", "*", "//v1/models", "/v1", "/%00", "/%ff%fe", "/..%2f..%2fetc/passwd", "/v1/models/%0d%0aX:%20y",
    "localhost:80", "ftp://localhost/", "/\xe9", "/v1/completions%20", "/v1/models/%c3%28", "/" + "%41" * 5000,
)  # fmt: skip


def refused_media(rng) -> Hostile:
    header, status = rng.choice((
        ("Content-Type: text/plain", 415), ("Content-Type: multipart/form-data; boundary=x", 415),
        ("Content-Type: application/json, text/html", 415), ("Content-Encoding: gzip", 415),
        ("Content-Encoding: gzip, br", 415), ("Expect: tea", 417), ("Expect: 100-continue, tea", 417),
    ))  # fmt: skip
    return Hostile(whole(rng, header), (status,), stays=True)


def refused_browser(rng) -> Hostile:
    data = whole(rng)
    host, status = rng.choice((
        ("evil.example", 403), ("evil.example:80", 403), ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("a b", 400), ("localhost:x", 400), ("[::1", 400), ("user@localhost", 400), ("localhost, evil.example", 400),
        ("localhost\r\nOrigin: https://evil.example", 403), ("localhost\r\nOrigin: null", 403),
        ("localhost\r\nOrigin:", 403), ("localhost\r\nSec-Fetch-Site: cross-site", 403),
        ("localhost\r\nOrigin: http://localhost\r\nOrigin: http://localhost", 403),
    ))  # fmt: skip
    return Hostile(data.replace(b"Host: localhost", f"Host: {host}".encode(), 1), (status,), stays=True)


def flipped(rng) -> Hostile:
    """Some bytes of a good request are others; what it means now nobody knows.

    None asks for a stream: the client's last word would cut it short where the server happens to notice.
    """
    question = rng.choice([question for question in QUESTIONS if not question.stream])
    data = bytearray(request_bytes("POST", question.path, question.body))
    for _ in range(rng.choice((1, 1, 2, 5))):
        data[rng.randrange(len(data))] = rng.choice((rng.randrange(256), 0, 10, 13, 32, 58))
    return Hostile(bytes(data), (200, *ANY_ERROR), cut=True)


def noise(rng) -> Hostile:
    pieces = (b"GET ", b"POST ", b"/", COMPLETIONS.encode(), b" HTTP/1.1\r\n", b"Host: a\r\n", b"\r\n", b"\n", b"\0",
              b"{}", b": ", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n",
              b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff")  # fmt: skip
    data = rng.choice((rng.randbytes(rng.randint(1, 2000)), b"".join(rng.choices(pieces, k=rng.randint(1, 15)))))
    return Hostile(data, (200, *ANY_ERROR), cut=True)


def vanished(rng) -> Hostile:
    data = whole(rng)
    return Hostile(data[: rng.choice((0, rng.randrange(len(data)), len(data)))])


KINDS: tuple[Callable[[random.Random], Hostile], ...] = (
    known_error, known_error, bad_request_line, bad_header, bad_header, too_many_headers, giant_body, bad_chunks,
    bad_chunks, cut_off, bad_json, bad_json, wrong_field, wrong_field, wrong_field, odd_field, odd_field, wrong_route,
    refused_media, refused_browser, flipped, flipped, noise, vanished, vanished,
)  # fmt: skip


# ----------------------------------------------------------------------------
# One connection
# ----------------------------------------------------------------------------

LOOKS = ("/v1/models", "/models?a=%zz", "/health", "/", "/metrics", "/v1/models/tiny%2Fchat")


class Attack:
    """A server, what it answers when it is left alone, and what came of everything that was sent to it.

    impatient: the same with short deadlines, for requests that never come to an end.
    """

    def __init__(self, server, impatient):
        self.server = server
        self.impatient = impatient
        self.outcomes = collections.Counter()
        self._lock = threading.Lock()
        self._answers = {q: fold_whole(ask(server, "POST", q.path, raw=q.body).json) for q in QUESTIONS if not q.stream}
        self._looks = {path: ask(server, "GET", path).body for path in LOOKS if path != "/metrics"}

    def connection(self, rng) -> None:
        """Good requests, a hostile one, and a good one where that is possible; or one that never comes to its end."""
        if rng.random() < 0.02:
            self._stalled(rng)
            return
        kind = rng.choice(KINDS)
        hostile = kind(rng)
        # A client that has said its last word counts as gone: what it asked for before need not be answered.
        before = [] if hostile.cut else [self._good(rng) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        after = [self._good(rng, CLOSE)] if hostile.stays else []
        with connect(self.server) as sock:
            send(rng, sock, b"".join([*(data for data, _ in before), hostile.data, *(data for data, _ in after)]))
            if hostile.cut:
                sock.shutdown(socket.SHUT_WR)
            if not hostile.statuses:
                vanish(rng, sock)
                replies = []
            else:
                replies = [reply for reply in read_replies(sock) if reply.status != 100]
        self._count(len(before) + 1 + len(after), kind.__name__, *(reply.status for reply in replies))
        if hostile.statuses:
            self._check(before, hostile, after, replies)

    def _good(self, rng, *headers: str) -> tuple[bytes, Question | str]:
        """A good request and what was asked."""
        if rng.random() < 0.2:
            path = rng.choice(LOOKS)
            return request_bytes("GET", path, b"", *headers, *rng.sample(HARMLESS_HEADERS, rng.randrange(4))), path
        version = rng.choice(("1.1", "1.1", "1.0")) if headers else "1.1"
        return good_request(rng, rng.choice(QUESTIONS), *headers, version=version)

    def _check(self, before: list, hostile: Hostile, after: list, replies: list) -> None:
        statuses = [reply.status for reply in replies]
        if hostile.cut:  # a request less or more than was meant, or none
            assert hostile.statuses != (400,) or statuses == [400], f"{statuses} instead of one 400"
            for reply in replies:
                check_hostile(hostile, reply)
            return
        assert len(replies) == len(before) + 1 + len(after), (
            f"{statuses} for {len(before)}, 1 and {len(after)} requests"
        )
        for (_, asked), reply in zip(
            [*before, *after], replies[: len(before)] + replies[len(before) + 1 :], strict=True
        ):
            self._check_good(asked, reply)
        check_hostile(hostile, replies[len(before)])

    def _check_good(self, asked: Question | str, reply) -> None:
        assert reply.status == 200, f"{reply.status} for the good request {asked}: {reply.body[:200]}"
        if isinstance(asked, str):
            assert asked == "/metrics" or reply.body == self._looks[asked]
            return
        answer = fold_chunks(reply.chunks) if asked.stream else fold_whole(reply.json)
        assert answer == self._answers[Question(asked.path, asked.text, False)], f"a wrong answer to {asked}"

    def _stalled(self, rng) -> None:
        data = good_request(rng, rng.choice(QUESTIONS))[0].lstrip()
        with connect(self.impatient) as sock:
            sock.sendall(data[: rng.randrange(1, len(data))])
            statuses = [reply.status for reply in read_replies(sock) if reply.status != 100]
        assert statuses == [408], f"{statuses} for a request that never ends"
        self._count(1, "stalled", 408)

    def _count(self, requests: int, kind: str, *statuses: int) -> None:
        with self._lock:
            self.outcomes.update([kind, *statuses])
            self.outcomes["requests"] += requests


def check_hostile(hostile: Hostile, reply) -> None:
    assert reply.status in hostile.statuses, f"{reply.status} instead of {hostile.statuses}: {reply.body[:200]}"
    if reply.status != 200:
        assert reply.error["type"] == "invalid_request_error"
        param = reply.error["param"]
        assert hostile.param is None or param.partition(".")[0] == hostile.param, f"{param} is not {hostile.param}"
    elif "event-stream" in reply.headers["Content-Type"]:
        assert reply.chunks is not None


def send(rng, sock: socket.socket, data: bytes) -> None:
    """All at once, or in pieces with moments between them."""
    cuts = sorted(rng.choices(range(len(data) + 1), k=rng.choice((0, 0, 1, 3, 20))))
    for start, end in itertools.pairwise([0, *cuts, len(data)]):
        sock.sendall(data[start:end])
        time.sleep(0.001 if cuts else 0)


def vanish(rng, sock: socket.socket) -> None:
    """Goes away, perhaps after the first bytes of an answer, perhaps with a reset."""
    if rng.random() < 0.3:
        sock.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            sock.recv(rng.choice((1, 100, 1000)))
    if rng.random() < 0.5:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# ----------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------


class Errors(Bugs):
    """Every line at error level is one too many here: none of these requests may find a fault of ours."""

    def emit(self, record):
        self.found.append(record.getMessage())


def attack(seed: int, requests: int, first: int = 0) -> collections.Counter:
    """Sends about so many requests over connections of one seed, from connection number `first` on."""
    errors = Errors()
    patient = HttpLimits(poll_s=0.02, linger_s=WAIT_S)
    impatient = HttpLimits(poll_s=0.02, linger_s=0.2, head_s=0.2, body_s=0.2)
    with errors.watching(), serving(FakeService(), limits=patient) as server, serving(limits=impatient) as other:
        before = left_open()
        target, numbers = Attack(server, other), itertools.count(first)

        def client(_) -> None:
            while target.outcomes["requests"] < requests:
                index = next(numbers)
                where = f"--seed {seed} --first {index} --requests 1"
                try:
                    target.connection(random.Random(f"{seed}:{index}"))
                except Exception as error:
                    raise AssertionError(f"{where}: {error!r}; {errors.found}") from error

        with ThreadPoolExecutor(min(CONNECTIONS, requests)) as clients:
            list(clients.map(client, range(CONNECTIONS)))
        wait_until(lambda: server.service.engine.active == 0)
        wait_until_closed(left_open, before)
        assert ask(server, "GET", "/health").status == 200
    assert not errors.found, errors.found
    return target.outcomes


def test_no_request_harms_the_server():
    seed = 20251130
    outcomes = attack(seed, 1000)
    print(f"seed {seed}: {dict(outcomes)}")
    assert outcomes[200] > 100 and outcomes[400] > 100


def main() -> None:
    parser = argparse.ArgumentParser(description="Malformed requests of every kind among good ones.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first connection")
    args = parser.parse_args()
    started = time.monotonic()
    outcomes = attack(args.seed, args.requests, args.first)
    print(f"seed {args.seed}, {time.monotonic() - started:.0f} s: {dict(outcomes)}")


if __name__ == "__main__":
    main()
