"""coordinator.py: the machine that knows the model. It spreads the layers over nodes and serves an OpenAI API.

    python coordinator.py --model Qwen/Qwen2.5-1.5B-Instruct        # then, on other machines: python node.py --host ...
    python coordinator.py --local-nodes 2                           # the bundled model on this machine alone

A request's path:

    HTTP            a thread per connection reads and checks it            (Exchange, answer_generation)
    requests, text  fields -> ParsedRequest, messages -> token ids         (parse_request, ChatTemplate, prepare_job)
    engine          a slot, prefill in chunks, decode in batches, sampling (Engine._admit, _send, _use_rows)
    links           embedding -> node 1 -> node 2 -> ... -> head           (Pipeline.send, on_hidden_state)
    text, HTTP      token ids -> text deltas -> JSON or server-sent events (TextStream, answer_deltas, stream_answer)

A node's path: JOINED -> LOADING -> READY, any -> LOST (NODE_MOVES). Plans are counted by epochs; what belongs to an
older epoch is dropped.

Threads. The engine thread owns slots and sequences; everybody else talks to it through its inbox. The controller's lock
guards the cluster's state. Each link has a reader and a writer; a reader never waits for another link. Each HTTP
connection has its thread, which reads its Generation's queue.

Sections, each using only what stands above it:

    pure            Errors, Request parsing, Tokenizer, Chat template, Generation requests and events, Text stream,
                    Tool calls in the answer, Sampler, Planner, Cluster state
    files           Checkpoint
    threads         Links, Engine
    HTTP            metrics, from request to pieces of the answer, response objects, reading requests, who may ask,
                    one request and its answer, the page, routes, the server
    program         Command line, Putting it together
"""

from __future__ import annotations

import argparse
import base64
import codecs
import concurrent.futures
import contextlib
import datetime
import enum
import errno
import gc
import hashlib
import hmac
import importlib.metadata
import ipaddress
import json
import logging
import math
import operator
import os
import queue
import re
import resource
import secrets
import signal
import socket
import socketserver
import statistics
import subprocess
import sys
import threading
import time
import traceback
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote_to_bytes

# Threads that wait for the next layer must not burn the cores that local nodes compute on (see node.py). Read when
# torch loads its OpenMP, hence before the import; the user's own setting wins.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large tensors in huge pages, where the system offers them

try:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import numpy as np
    import tokenizers
    import torch
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import tqdm
    from safetensors import SafetensorError, safe_open

    import quant
    import qwen
    import wire
except ImportError as missing:
    sys.exit(f"coordinator.py: {missing}; run: pip install -r requirements.txt")
except KeyboardInterrupt:  # importing torch takes seconds
    sys.exit(130)

# ------------------------------------------------------------------------------
# Errors
# ------------------------------------------------------------------------------
# Two exceptions leave this program. ApiError is what an HTTP client sees, wherever it was raised: the HTTP section
# turns it into a response (or into an error frame of an open stream) in one place. StartupError ends the process
# with one readable line. What clients sent is `printable` in messages and in the log.

log = logging.getLogger("coordinator")

RETRY_AFTER_S = 5  # OpenAI's SDKs ignore a Retry-After above 120 s and then do not retry at all


class StartupError(Exception):
    """Something on the command line or in the model folder is wrong; str(error) is the one line the user reads."""


class ApiError(Exception):
    """An answer other than 200, in OpenAI's error shape. Messages hold no prompt text, no paths and no tracebacks."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict:
        """The JSON body, the same for a response and for an error frame inside a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @classmethod
    def invalid(cls, message: str, param: str | None = None, code: str | None = None) -> ApiError:
        """400: the request is wrong and `param` names the field."""
        return cls(400, message, param=param, code=code)

    @classmethod
    def unsupported(cls, message: str, param: str) -> ApiError:
        """400: a field that would change the answer, and that is not implemented (never ignored)."""
        return cls(400, message, param=param, code="unsupported_parameter")

    @classmethod
    def context_length(cls, prompt_tokens: int, max_context: int, param: str, least: bool = False) -> ApiError:
        """400: the prompt alone fills the context. litellm and Aider look for the first sentence's wording.

        least: it may have more tokens than that.
        """
        message = (
            f"This model's maximum context length is {max_context} tokens. However, your prompt has "
            f"{'at least ' if least else ''}{prompt_tokens} tokens. Please reduce the length of the {param}."
        )
        return cls(400, message, param=param, code="context_length_exceeded")

    @classmethod
    def model_not_found(cls, requested: str, served: str) -> ApiError:
        """404: another model than the served one was asked for."""
        message = f"The model `{requested}` does not exist or you do not have access to it. This server has `{served}`."
        return cls(404, message, param="model", code="model_not_found")

    @classmethod
    def unauthorized(cls) -> ApiError:
        """401: the API key is missing or wrong."""
        message = "Incorrect API key provided. Send it as 'Authorization: Bearer KEY'."
        return cls(401, message, "authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    @classmethod
    def not_ready(cls, message: str) -> ApiError:
        """503: loading, nodes missing, or shutting down; the client may try again."""
        return cls(503, message, "cluster_not_ready", headers={"Retry-After": str(RETRY_AFTER_S)})

    @classmethod
    def overloaded(cls, message: str) -> ApiError:
        """503: every waiting place (or handler thread) is taken."""
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return cls(503, message, "server_overloaded", code="server_overloaded", headers=headers)

    @classmethod
    def internal(cls) -> ApiError:
        """500: a fault of ours. It would fail again, so OpenAI's SDKs are told not to retry."""
        message = "Internal error; the coordinator's log has the details."
        return cls(500, message, "server_error", headers={"x-should-retry": "false"})


def printable(text: str, limit: int = 200) -> str:
    """Client-controlled text for a log line or a message: one line of ASCII, no control characters, bounded."""
    return text[:limit].encode("unicode_escape").decode("ascii")


# ------------------------------------------------------------------------------
# Request parsing
# ------------------------------------------------------------------------------
# Bytes -> JSON object -> ParsedRequest, or ApiError 400. Pure: no socket, tokenizer or clock. A field is a row of
# COMMON_FIELDS, CHAT_FIELDS or COMPLETION_FIELDS, a rule between fields a row of CROSS_CHECKS. Null is the same as
# absent, and unknown fields are ignored; fields that would change the answer and are not implemented are refused.


MAX_JSON_DEPTH = 128
MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 4
MAX_STOP_TOKEN_IDS = 64
MAX_MESSAGES = 16_384
MAX_TOOLS = 128
MAX_TEMPLATE_KWARGS = 32
MAX_COUNT = 2**31 - 1  # token counts and token ids; the context and the vocabulary set the real limits later
DEFAULT_COMPLETION_TOKENS = 16

# --- JSON ---

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEPTH_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def json_depth(raw: bytes) -> int:
    """How deep lists and objects nest in JSON text, found without parsing it (parsers recurse, and limits differ)."""
    without_escapes = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(without_escapes.split(b'"')[::2])
    brackets = outside_strings.translate(None, delete=_NOT_BRACKETS)
    return max(accumulate(map(_DEPTH_STEP.__getitem__, brackets)), default=0)


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _no_constant(text: str):
    raise ValueError(f"{text} is not JSON")


def strict_json(text: str) -> object:
    """Parse JSON without NaN, Infinity, numbers that overflow, deep nesting or lone surrogates; ValueError if any."""
    if json_depth(text.encode()) > MAX_JSON_DEPTH:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} levels deep")
    value = json.loads(text, parse_float=_finite_float, parse_constant=_no_constant)
    if _SURROGATE_ESCAPE.search(text):  # a pair is a character, half a pair cannot be encoded
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_body(raw: bytes) -> dict:
    """The JSON object of a request body. A UTF-8 byte order mark is skipped. ApiError 400 for anything else."""
    try:
        body = strict_json(raw.decode("utf-8-sig"))
    except UnicodeError:
        raise ApiError.invalid("The JSON body of your request is not valid UTF-8.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}: {error.msg}"
        raise ApiError.invalid(f"We could not parse the JSON body of your request ({where}).") from None
    except (ValueError, RecursionError) as error:
        # Python's own text about huge integers speaks of its interpreter settings
        reason = "a number has too many digits" if "digits" in str(error) else str(error)
        raise ApiError.invalid(f"We could not parse the JSON body of your request ({reason}).") from None
    if not isinstance(body, dict):
        raise ApiError.invalid("The JSON body of your request must be an object.")
    return body


# --- kinds of fields: check(value, name) -> the value as it is used, or ApiError ---

FieldCheck = Callable[[object, str], object]


def _wrong_field(name: str, wanted: str) -> ApiError:
    return ApiError.invalid(f"`{name}` must be {wanted}.", name)


def _as_integer(value: object) -> int | None:
    """The integer, also from a float such as 5.0; None for anything else. A bool is no number here."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _true_or_false(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong_field(name, "true or false")
    return value


def _nonempty(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong_field(name, "a non-empty string")
    return value


def _integer_in(low: int, high: int) -> FieldCheck:
    def check(value: object, name: str) -> int:
        number = _as_integer(value)
        if number is None or not low <= number <= high:
            raise _wrong_field(name, f"an integer from {low} to {high}")
        return number

    return check


def _number_in(low: float, high: float) -> FieldCheck:
    def check(value: object, name: str) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # NaN is in no range
            raise _wrong_field(name, f"a number from {low:g} to {high:g}")
        return float(value)

    return check


def _top_k(value: object, name: str) -> int:
    return max(_integer_in(-1, MAX_COUNT)(value, name), 0)  # -1 and 0 both mean off


def _logit_bias(value: object, name: str) -> dict[int, float]:
    wanted = "an object of token ids (as strings) to numbers from -100 to 100"
    if not isinstance(value, dict):
        raise _wrong_field(name, wanted)
    bias = {}
    for key, number in value.items():
        if not re.fullmatch("[0-9]{1,9}", key):
            raise _wrong_field(name, wanted)
        try:
            bias[int(key)] = _number_in(-100, 100)(number, name)
        except ApiError:
            raise _wrong_field(name, wanted) from None
    return bias


def _stop_strings(value: object, name: str) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _wrong_field(name, "a non-empty string or a list of non-empty strings")
    if len(stops) > MAX_STOPS:
        raise _wrong_field(name, f"a list of at most {MAX_STOPS} strings")
    return stops


def _token_ids(value: object, name: str) -> tuple[int, ...]:
    ids = [_as_integer(item) for item in value] if isinstance(value, list) else [None]
    if len(ids) > MAX_STOP_TOKEN_IDS or any(number is None or not 0 <= number <= MAX_COUNT for number in ids):
        raise _wrong_field(name, f"a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return tuple(ids)


def _stream_options(value: object, name: str) -> dict:
    if not isinstance(value, dict):
        raise _wrong_field(name, "an object")
    for key in ("include_usage", "continuous_usage_stats"):
        if value.get(key) is not None:
            _true_or_false(value[key], f"{name}.{key}")
    return value


def _response_format(value: object, name: str) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in ("text", "json_object", "json_schema"):
        raise _wrong_field(name, 'an object whose `type` is "text"')
    if kind == "json_schema" and not isinstance(value.get("json_schema"), dict):
        raise _wrong_field(name, "an object whose `json_schema` is an object, for that type")
    if kind != "text":
        raise ApiError.unsupported(f'`{name}` of type "{kind}" is not supported by this server, only "text".', name)


def _template_kwargs(value: object, name: str) -> dict:
    """Variables for the chat template: plain values only, and none that would replace what the template works on."""
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise _wrong_field(name, f"an object of at most {MAX_TEMPLATE_KWARGS} entries")
    for key, item in value.items():
        if key in REFUSED_TEMPLATE_KWARGS or key.endswith(("_token", "_tokens")):
            raise ApiError.unsupported(f"`{name}` may not set `{key[:64]}`.", name)
        if not key.isidentifier() or key.startswith("_") or not (item is None or isinstance(item, (str, int, float))):
            raise _wrong_field(name, "an object of names to strings, numbers, booleans or null")
    return value


REFUSED_TEMPLATE_KWARGS = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "raise_exception",
    "strftime_now",
    "namespace",
    "dict",
    "range",
}

# --- prompts, messages, tools ---


def _prompts(value: object, name: str) -> list[str | list[int]]:
    """Every prompt of a completions request, each text or token ids. One list of ids is one prompt."""
    wanted = "a non-empty string, a list of strings, a list of token ids, or a list of such lists"
    if isinstance(value, list) and value and not any(isinstance(item, (str, list)) for item in value):
        value = [value]
    prompts = value if isinstance(value, list) else [value]
    if not prompts:
        raise _wrong_field(name, wanted)
    if len(prompts) > MAX_PROMPTS:
        raise _wrong_field(name, f"a list of at most {MAX_PROMPTS} prompts")
    return [_one_prompt(prompt, name, wanted) for prompt in prompts]


def _one_prompt(value: object, name: str, wanted: str) -> str | list[int]:
    if not isinstance(value, (str, list)):
        raise _wrong_field(name, wanted)
    if not value:
        raise ApiError.invalid(f"`{name}` must not be empty: there is no token to start from.", name)
    if isinstance(value, str):
        return value
    ids = [_as_integer(item) for item in value]
    if any(number is None or not 0 <= number <= MAX_COUNT for number in ids):
        raise _wrong_field(name, wanted)
    return ids


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ROLES_WITHOUT_CONTENT = ("assistant", "tool")  # null or missing content means "" there


def _message_list(value: object, name: str) -> list[dict]:
    if not isinstance(value, list):
        raise _wrong_field(name, "a list of messages")
    if not value:
        raise ApiError.invalid(f"`{name}` must hold at least one message.", name, code="empty_array")
    if len(value) > MAX_MESSAGES:
        raise _wrong_field(name, f"a list of at most {MAX_MESSAGES} messages")
    return [normal_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def normal_message(message: object, where: str) -> dict:
    """A message as chat templates expect it: known role, content a string, tool arguments parsed.

    Of the other keys only name, tool_call_id and tool_calls are kept. Raises ApiError 400 with param `messages`.
    """
    if not isinstance(message, dict):
        raise ApiError.invalid(f"`{where}` must be an object.", "messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError.invalid(f"`{where}.role` must be one of {', '.join(ROLES)}.", "messages")
    normal = {"role": ROLES[role], "content": _message_content(message.get("content"), role, where)}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise ApiError.invalid(f"`{where}.{key}` must be a string.", "messages")
            normal[key] = message[key]
    calls = message.get("tool_calls")
    if calls and role == "assistant":
        if not isinstance(calls, list):
            raise ApiError.invalid(f"`{where}.tool_calls` must be a list.", "messages")
        normal["tool_calls"] = [_history_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return normal


def _message_content(content: object, role: str, where: str) -> str:
    if content is None and role in ROLES_WITHOUT_CONTENT:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError.invalid(f"`{where}.content` must be a string or a list of text parts.", "messages")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            message = (
                f'`{where}.content[{index}]` must be {{"type": "text", "text": "..."}}: this model reads only text.'
            )
            raise ApiError.invalid(message, "messages")
        texts.append(part["text"])
    return "".join(texts)


def _history_call(call: object, where: str) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError.invalid(f"`{where}.function.name` must be a string.", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments)
        except (ValueError, RecursionError):
            pass  # what the model once wrote need not be JSON: the template gets the string
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        raise ApiError.invalid(f"`{where}.function.arguments` must be a string of JSON.", "messages")
    normal = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        normal["id"] = call["id"]
    return normal


def _tool_list(value: object, name: str) -> list[dict]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise _wrong_field(name, f"a list of at most {MAX_TOOLS} tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            wanted = 'must be {"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise ApiError.invalid(f"`{name}[{index}]` {wanted}.", name)
        for key, kind in (("description", str), ("parameters", dict)):
            if function.get(key) is not None and not isinstance(function[key], kind):
                wanted = "a string" if kind is str else "an object"
                raise ApiError.invalid(f"`{name}[{index}].function.{key}` must be {wanted}.", name)
    return value


def _tool_choice(value: object, name: str) -> str | dict:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong_field(name, '"none" or "auto"')
    return value


# --- the tables ---


@dataclass(frozen=True)
class RequestField:
    """One row: how the value is checked, and what stands for null or absent (None: no value)."""

    check: FieldCheck
    default: object = None
    required: bool = False


COMMON_FIELDS = {
    "model": RequestField(_nonempty),
    "stream": RequestField(_true_or_false, False),
    "stream_options": RequestField(_stream_options),
    "max_tokens": RequestField(_integer_in(0, MAX_COUNT)),
    "n": RequestField(_integer_in(1, MAX_CHOICES), 1),
    "temperature": RequestField(_number_in(0, 2), 1.0),
    "top_p": RequestField(_number_in(0, 1), 1.0),
    "top_k": RequestField(_top_k, 0),
    "min_p": RequestField(_number_in(0, 1), 0.0),
    "repetition_penalty": RequestField(_number_in(1e-6, 1e6), 1.0),  # divides logits: fp32 has to hold the result
    "presence_penalty": RequestField(_number_in(-2, 2), 0.0),
    "frequency_penalty": RequestField(_number_in(-2, 2), 0.0),
    "logit_bias": RequestField(_logit_bias, {}),
    "seed": RequestField(_integer_in(-(2**63), 2**63 - 1)),
    "stop": RequestField(_stop_strings, []),
    "stop_token_ids": RequestField(_token_ids, ()),
    "ignore_eos": RequestField(_true_or_false, False),
    "min_tokens": RequestField(_integer_in(0, MAX_COUNT), 0),
    "skip_special_tokens": RequestField(_true_or_false, True),
    "include_stop_str_in_output": RequestField(_true_or_false, False),
    "prompt_lookup": RequestField(_true_or_false, True),
    "response_format": RequestField(_response_format),
}
COMPLETION_FIELDS = COMMON_FIELDS | {
    "prompt": RequestField(_prompts, required=True),
    "echo": RequestField(_true_or_false, False),
    "best_of": RequestField(_integer_in(1, MAX_COUNT)),
    "logprobs": RequestField(_integer_in(0, 5)),
}
CHAT_FIELDS = COMMON_FIELDS | {
    "messages": RequestField(_message_list, required=True),
    "max_completion_tokens": RequestField(_integer_in(0, MAX_COUNT)),
    "logprobs": RequestField(_true_or_false, False),
    "top_logprobs": RequestField(_integer_in(0, 20), 0),
    "tools": RequestField(_tool_list, []),
    "tool_choice": RequestField(_tool_choice),
    "add_generation_prompt": RequestField(_true_or_false),
    "continue_final_message": RequestField(_true_or_false, False),
    "chat_template_kwargs": RequestField(_template_kwargs, {}),
}

# Refused unless null, false or empty: they would change the answer. (`suffix` even when empty: it asks for infilling.)
REFUSED_FIELDS = {
    "chat_template",
    "functions",
    "prompt_embeds",
    "use_beam_search",
    "grammar",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
}


def _names_tool(values: dict) -> str | None:
    choice = values.get("tool_choice")
    return choice["function"]["name"] if isinstance(choice, dict) else None


def _tool_names(values: dict) -> list[str]:
    return [tool["function"]["name"] for tool in values.get("tools") or []]


# (wrong when true, param, message, code). Values are checked fields; those of the other route are missing.
CROSS_CHECKS = (
    (
        lambda v: v["stream_options"] is not None and not v["stream"],
        "stream_options",
        "`stream_options` is only allowed when `stream` is true.",
        None,
    ),
    (
        lambda v: v.get("top_logprobs") and v["logprobs"] is not True,
        "top_logprobs",
        "`top_logprobs` needs `logprobs` to be true.",
        None,
    ),
    (
        lambda v: v.get("best_of") is not None and v["best_of"] < v["n"],
        "best_of",
        "`best_of` must not be less than `n`.",
        None,
    ),
    (
        lambda v: (v.get("best_of") or 0) > v["n"],
        "best_of",
        "`best_of` greater than `n` is not supported by this server.",
        "unsupported_parameter",
    ),
    (
        lambda v: (v.get("best_of") or 0) > 1 and v["stream"],
        "best_of",
        "`best_of` greater than 1 cannot be streamed.",
        None,
    ),
    (
        lambda v: v["max_tokens"] is not None and v["min_tokens"] > v["max_tokens"],
        "min_tokens",
        "`min_tokens` must not be greater than `max_tokens`.",
        None,
    ),
    (
        lambda v: v.get("add_generation_prompt") and v["continue_final_message"],
        "continue_final_message",
        "`continue_final_message` and `add_generation_prompt` must not both be true.",
        None,
    ),
    (
        lambda v: v.get("continue_final_message") and v["messages"][-1]["role"] != "assistant",
        "continue_final_message",
        "`continue_final_message` needs the last message to be the assistant's.",
        None,
    ),
    (
        lambda v: v.get("tool_choice") not in (None, "none") and not v["tools"],
        "tool_choice",
        "`tool_choice` is only allowed when `tools` are given.",
        None,
    ),
    (
        lambda v: _names_tool(v) is not None and _names_tool(v) not in _tool_names(v),
        "tool_choice",
        "`tool_choice` names a function that is not in `tools`.",
        None,
    ),
    (
        lambda v: v.get("tool_choice") not in (None, "none", "auto"),
        "tool_choice",
        '`tool_choice` other than "none" and "auto" is not supported by this server.',
        "unsupported_parameter",
    ),
)

# --- the result ---


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request of either route, still in text: nothing here has met the tokenizer or the model.

    Attributes carry the names of the request's fields, except where the comment says more.
    """

    chat: bool
    model: str | None = None
    prompts: list[str | list[int]] = field(default_factory=list)  # completions: `prompt`
    messages: list[dict] = field(default_factory=list)  # chat
    tools: list[dict] = field(default_factory=list)  # empty also when tool_choice is "none"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict = field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False  # `stream_options`
    continuous_usage: bool = False  # `stream_options`, usage in every chunk
    max_tokens: int | None = None  # None: the rest of the context
    min_tokens: int = 0
    n: int = 1
    echo: bool = False
    top_logprobs: int | None = None  # None: no logprobs; from `logprobs`, and in chat `top_logprobs`
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_lookup: bool = True  # an extension: false turns drafting off for this request; the text is the same


def read_fields(body: dict, fields: dict[str, RequestField]) -> dict:
    """Name -> checked value for every field of a route's table."""
    values = {}
    for name, row in fields.items():
        value = body.get(name)
        if value is None and row.required:
            raise ApiError.invalid(f"You must provide `{name}`.", name)
        values[name] = row.default if value is None else row.check(value, name)
    return values


def parse_request(body: dict, chat: bool) -> ParsedRequest:
    """FieldCheck one body of /v1/chat/completions (chat) or /v1/completions. Raises ApiError 400 naming the field."""
    for name in REFUSED_FIELDS & body.keys():
        if body[name]:
            raise ApiError.unsupported(f"`{name}` is not supported by this server.", name)
    if not chat and body.get("suffix") is not None:
        raise ApiError.unsupported("`suffix` is not supported by this server.", "suffix")
    values = read_fields(body, CHAT_FIELDS if chat else COMPLETION_FIELDS)
    limit = values.pop("max_completion_tokens", None)
    if limit is not None:
        values["max_tokens"] = limit
    elif not chat and values["max_tokens"] is None:
        values["max_tokens"] = DEFAULT_COMPLETION_TOKENS
    for is_wrong, param, message, code in CROSS_CHECKS:
        if is_wrong(values):
            raise ApiError.invalid(message, param, code)
    return ParsedRequest(chat=chat, **(_chat_values(values) if chat else _completion_values(values)))


def _shared_values(values: dict) -> dict:
    options = values.pop("stream_options") or {}
    values["include_usage"] = bool(options.get("include_usage"))
    values["continuous_usage"] = values["include_usage"] and bool(options.get("continuous_usage_stats"))
    values.pop("response_format")
    return values


def _completion_values(values: dict) -> dict:
    values = _shared_values(values)
    values["prompts"] = values.pop("prompt")
    values["top_logprobs"] = values.pop("logprobs")
    values.pop("best_of")
    return values


def _chat_values(values: dict) -> dict:
    values = _shared_values(values)
    if not values.pop("logprobs"):
        values["top_logprobs"] = None
    if values.pop("tool_choice") == "none":
        values["tools"] = []
    if values["add_generation_prompt"] is None:
        values["add_generation_prompt"] = not values["continue_final_message"]
    return values


# ------------------------------------------------------------------------------
# Tokenizer
# ------------------------------------------------------------------------------
# Text <-> token ids, from tokenizer.json or from vocab.json + merges.txt, for the byte-level BPE of the Qwen2 family.
# There are two backends and nothing is switched at run time: one knows the added tokens, one does not, for text that
# users typed.

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED_TOKEN_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
CHATML_END_TOKENS = ("<|im_end|>", "<|endoftext|>")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for every byte. 68 bytes are not printable and use U+0100 and on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """The tokenizer of a model folder. `config`: parsed config.json. Raises StartupError for folders it cannot serve.

    vocab_size: rows of the embedding; ids without a token (Qwen pads the embedding) are below it too.
    token_mask: numpy bool [vocab_size], True where an id has a token.
    added: content -> id of the added tokens, special ("<|im_end|>") or not ("<tool_call>").
    added_flags: id -> the token's flags (ADDED_TOKEN_FLAGS).
    special_strings: what templates may call by name, {"eos_token": "<|im_end|>", ...}; only those that are set.
    """

    def __init__(self, folder: Path, config: dict):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        settings = _model_json(folder, "tokenizer_config.json") or {}
        spec = _tokenizer_spec(folder)
        try:
            added_tokens = _added_tokens(folder, settings, spec)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StartupError(f"the list of added tokens in the tokenizer's files is malformed: {error!r}") from None
        self._with_added = _backend(spec, added_tokens)
        self._without_added = _backend_without_added_tokens(self._with_added)
        self.vocab_size = config["vocab_size"]
        self.added = {token["content"]: token["id"] for token in added_tokens}
        self.added_flags = {token["id"]: {flag: token[flag] for flag in ADDED_TOKEN_FLAGS} for token in added_tokens}
        self._added_bytes = {token["id"]: token["content"].encode() for token in added_tokens}
        self.token_mask = self._existing_ids()
        self.special_strings = _special_strings(folder, settings)
        self._eos_ids = self._all_eos_ids(folder, config)
        self._check_added()
        self._longest_token_bytes = self._token_size_limit(spec)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Token ids; nothing is added in front or behind. With parse_special "<|im_end|>" is that token, else text.

        Raises ApiError 400 for text that is not Unicode (half a surrogate pair).
        """
        return self.encode_pieces([text], parse_special)[0]

    def encode_pieces(self, texts: list[str], parse_special: bool) -> list[list[int]]:
        """`encode` of each text. A batch, even of one, runs without the GIL: other threads go on streaming."""
        backend = self._with_added if parse_special else self._without_added
        try:
            return [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError):
            raise ApiError(400, "The text is not valid Unicode (half a surrogate pair?).") from None

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, by its length: a long one need not be encoded to be refused."""
        if self._longest_token_bytes is None or len(text) < self._longest_token_bytes:
            return 0
        return len(unicodedata.normalize("NFC", text).encode("utf-8", "replace")) // self._longest_token_bytes

    def decode(self, ids: list[int]) -> str:
        """The text of all the ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, often part of a character; b"" for an id without a token."""
        if token_id in self._added_bytes:
            return self._added_bytes[token_id]
        token = self._without_added.id_to_token(token_id) if self.has_token(token_id) else ""
        try:
            return bytes(BYTE_OF_CHAR[char] for char in token)
        except KeyError:
            return token.encode()  # not written in the byte alphabet: taken as it is, like the backend's own decoder

    def token_text(self, token_id: int) -> str:
        """The token as text; OpenAI's spelling "bytes:\\xe2\\x80" when its bytes are not UTF-8 by themselves."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def has_token(self, token_id: int) -> bool:
        """False for negative ids, ids beyond the embedding and its padded rows."""
        return 0 <= token_id < self.vocab_size and bool(self.token_mask[token_id])

    def is_special(self, token_id: int) -> bool:
        """True for tokens that are left out of answers ("<|im_end|>"; not "<tool_call>")."""
        return token_id in self.added_flags and self.added_flags[token_id]["special"]

    def eos_ids(self, chat: bool) -> frozenset[int]:
        """Ids that end an answer: those of every file; on chat routes of a ChatML model also both its end tokens."""
        if chat and "<|im_start|>" in self.added:
            return self._eos_ids | {self.added[token] for token in CHATML_END_TOKENS if token in self.added}
        return self._eos_ids

    def stop_token_ids(self, stops: list[str]) -> tuple[int, ...]:
        """Ids of the stop strings that are added tokens: their text may never appear, so the id itself must stop."""
        return tuple(self.added[stop] for stop in stops if stop in self.added)

    def _existing_ids(self) -> np.ndarray:
        ids = list(self._with_added.get_vocab(with_added_tokens=True).values())
        if max(ids) >= self.vocab_size:
            raise StartupError(f"tokenizer: token id {max(ids)} is beyond the model's vocab_size {self.vocab_size}")
        mask = np.zeros(self.vocab_size, dtype=bool)
        mask[ids] = True
        return mask

    def _token_size_limit(self, spec: dict) -> int | None:
        """The most bytes of NFC text that one token stands for; None where that is not known.

        Some added tokens take any amount of white space along, and normalizers other than NFC drop what they like.
        """
        takes_space = any(flags["lstrip"] or flags["rstrip"] for flags in self.added_flags.values())
        if takes_space or (spec.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
            return None
        return max(len(self.token_bytes(int(i))) for i in np.flatnonzero(self.token_mask))

    def _all_eos_ids(self, folder: Path, config: dict) -> frozenset[int]:
        """The union of all sources: each alone is wrong or missing in some published model."""
        generation_config = _model_json(folder, "generation_config.json") or {}
        ids = set()
        for name, source in (("config.json", config), ("generation_config.json", generation_config)):
            value = source.get("eos_token_id")
            for token_id in value if isinstance(value, list) else [] if value is None else [value]:
                if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                    raise StartupError(f"{name}: eos_token_id must be a token id or a list of them, not {value!r}")
                ids.add(token_id)
        if "eos_token" in self.special_strings:
            token_id = self._with_added.token_to_id(self.special_strings["eos_token"])
            if token_id is None:
                raise StartupError(
                    f"tokenizer_config.json: no token is {self.special_strings['eos_token']!r} (eos_token)"
                )
            ids.add(token_id)
        if not ids:
            raise StartupError("no file of the model names an end-of-sequence token (eos_token_id, eos_token)")
        return frozenset(ids)

    def _check_added(self) -> None:
        """Added tokens have the ids that the files say, and never come out of text that users typed."""
        for content, token_id in self.added.items():
            found = self._with_added.token_to_id(content)
            if found != token_id:
                raise StartupError(f"tokenizer: the added token {content!r} should have id {token_id}, but has {found}")
            if not content.isspace() and token_id in self.encode(content, parse_special=False):
                raise StartupError(f"tokenizer: ordinary text turns into the control token {content!r}")


def _model_json(folder: Path, name: str) -> dict | None:
    """The JSON object in a file of the model folder, None when there is no such file."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise StartupError(f"{name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{name} is not a JSON object")
    return value


def _tokenizer_spec(folder: Path) -> dict:
    """The content of tokenizer.json, or the same made from vocab.json and merges.txt."""
    spec = _model_json(folder, "tokenizer.json")
    if spec is None:
        return _spec_from_merges(folder)
    kinds = [(spec.get(part) or {}).get("type") for part in ("model", "decoder")]
    if kinds != ["BPE", "ByteLevel"]:
        raise StartupError(f"tokenizer.json: only byte-level BPE is supported, this has model and decoder {kinds}")
    return spec


def _spec_from_merges(folder: Path) -> dict:
    vocab = _model_json(folder, "vocab.json")
    merges_file = folder / "merges.txt"
    if vocab is None or not merges_file.exists():
        raise StartupError("the model folder has neither tokenizer.json nor vocab.json and merges.txt")
    lines = merges_file.read_text(encoding="utf-8").split("\n")
    # Only the first line can be a comment: merges may begin with "#" too.
    lines = lines[1:] if lines[0].startswith("#version") else lines
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    words = {"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": [line.rstrip("\r").split(" ") for line in lines if line.strip()],
    }
    return {
        "version": "1.0",
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": bpe,
    }


def _added_tokens(folder: Path, settings: dict, spec: dict) -> list[dict]:
    """Added tokens by ascending id, in tokenizer.json's form. added_tokens_decoder is the authority; the older
    added_tokens.json (content -> id) counts where there is none."""
    tokens = {token["id"]: token for token in spec.get("added_tokens") or []}
    if "added_tokens_decoder" in settings:
        tokens |= {int(token_id): token for token_id, token in settings["added_tokens_decoder"].items()}
    elif not tokens:
        special = set(_special_strings(folder, settings).values())
        legacy = _model_json(folder, "added_tokens.json") or {}
        tokens = {i: {"content": content, "special": content in special} for content, i in legacy.items()}
    return [
        {"id": token_id, "content": token["content"]} | {flag: token.get(flag, False) for flag in ADDED_TOKEN_FLAGS}
        for token_id, token in sorted(tokens.items())
    ]


def _special_strings(folder: Path, settings: dict) -> dict[str, str]:
    """Every "*_token" that is set, as text: the files hold a string or an object with `content`."""
    strings = {}
    for source in (_model_json(folder, "special_tokens_map.json") or {}, settings):
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                strings[name] = text
    return strings


def _backend(spec: dict, added_tokens: list[dict]) -> tokenizers.Tokenizer:
    """Without truncation and padding, which some tokenizer.json carry and which would change prompts silently."""
    spec = spec | {"truncation": None, "padding": None, "added_tokens": added_tokens}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # noqa: BLE001  the library raises nothing more precise
        raise StartupError(f"the tokenizer cannot be built: {error}") from None


def _backend_without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same in all else. It shares the vocabulary and merges with the other."""
    plain = tokenizers.Tokenizer(backend.model)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = backend.pre_tokenizer
    return plain


# ------------------------------------------------------------------------------
# Chat template
# ------------------------------------------------------------------------------
# Messages -> prompt ids by the model's own jinja2 template, in a sandbox, with the variables, filters and tags that
# transformers gives it. Control tokens that users typed stay text: they are marked before rendering (_UserTextMarks).

JINJA2_AT_LEAST = (3, 1, 6)  # older sandboxes can be left (CVE-2024-56326, CVE-2025-27516)
RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The model folder's chat templates. Raises StartupError for templates that do not compile and an old jinja2.

    available: False when the model has none; then prompt_ids raises ApiError 400 `no_chat_template`.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        _check_jinja2_version(importlib.metadata.version("jinja2"))
        environment = _template_environment()
        self._tokenizer = tokenizer
        self._templates = {}
        for name, source in _template_sources(folder).items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise StartupError(f'the chat template "{name}" does not compile: {error}') from None
        if self._templates and "default" not in self._templates:
            raise StartupError(f"none of the chat templates {sorted(self._templates)} is the default one")
        self.available = bool(self._templates)
        self._control_tokens = _ControlTokens(tokenizer)

    def prompt_ids(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict | None = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> list[int]:
        """The prompt's token ids, equal to transformers' apply_chat_template for text without control tokens.

        kwargs are further template variables (chat_template_kwargs); check may refuse the text before it is encoded.
        Raises ApiError 400 when the template refuses the messages or fails on them in any way.
        """
        marks = _UserTextMarks(self._control_tokens)
        prompt = self._render(marks, messages, tools, add_generation_prompt, continue_final_message, kwargs)
        check(marks.removed(prompt) if marks.used else prompt)
        if not marks.used:
            return self._tokenizer.encode(prompt, parse_special=True)
        return self._encode_marked(marks, prompt)

    def render(self, messages: list[dict], tools: list[dict] | None = None, **options) -> str:
        """The prompt as text, for logs and tests; arguments as for prompt_ids."""
        marks = _UserTextMarks(self._control_tokens)
        options = {"add_generation_prompt": True, "continue_final_message": False, "kwargs": None} | options
        return marks.removed(self._render(marks, messages, tools, **options))

    def _render(
        self,
        marks: _UserTextMarks,
        messages: list[dict],
        tools: list[dict] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict | None,
    ) -> str:
        if not self.available:
            raise ApiError(400, "This model has no chat template; use /v1/completions.", code="no_chat_template")
        if not messages:
            raise ApiError(400, "`messages` must not be empty.", param="messages", code="empty_array")
        self._check_kwargs(kwargs or {})
        if continue_final_message and add_generation_prompt:
            message = "`continue_final_message` and `add_generation_prompt` cannot both be true."
            raise ApiError(400, message, param="continue_final_message")
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        with _template_failures(marks):
            variables = self._tokenizer.special_strings | {
                "messages": [_template_message(message) for message in marks.mark(messages)],
                "tools": marks.mark(tools) or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **marks.mark(kwargs or {}),
            }
            return _render_open_end(template, variables) if continue_final_message else template.render(variables)

    def _check_kwargs(self, kwargs: dict) -> None:
        for name, value in kwargs.items():
            if name in RESERVED_TEMPLATE_NAMES or name in self._tokenizer.special_strings:
                raise ApiError(400, f"`chat_template_kwargs` may not set `{name}`.", param="chat_template_kwargs")
            if value is not None and not isinstance(value, (str, int, float)):
                message = f"`chat_template_kwargs.{name}` must be a string, a number, true, false or null."
                raise ApiError(400, message, param="chat_template_kwargs")

    def _encode_marked(self, marks: _UserTextMarks, prompt: str) -> list[int]:
        """Ids of a prompt with marks. It is cut at the template's control tokens only, as the tokenizer does itself:
        text does not encode the same in pieces."""
        texts, parts, control_ids, position = [], [], [], 0
        for match in marks.pattern().finditer(prompt):
            parts += [prompt[position : match.start()], match["user_text"] or ""]
            position = match.end()
            if match["control"]:
                control_id = self._tokenizer.added[match["control"]]
                text, position = self._swallow_space(control_id, "".join(parts), prompt, position)
                texts.append(text)
                control_ids.append(control_id)
                parts = []
        *pieces, last = self._tokenizer.encode_pieces([*texts, "".join(parts) + prompt[position:]], parse_special=False)
        return [i for piece, control_id in zip(pieces, control_ids, strict=True) for i in (*piece, control_id)] + last

    def _swallow_space(self, control_id: int, text: str, prompt: str, position: int) -> tuple[str, int]:
        """Some control tokens take the white space before or behind them along (not Qwen's)."""
        flags = self._tokenizer.added_flags[control_id]
        if flags["rstrip"]:
            position = re.compile(r"\s*").match(prompt, position).end()
        return text.rstrip() if flags["lstrip"] else text, position


class _ControlTokens:
    """The added tokens as search patterns. Tokens of mere white space are left to the tokenizer: text is full of it."""

    def __init__(self, tokenizer: Tokenizer):
        longest_first = sorted((content for content in tokenizer.added if not content.isspace()), key=len, reverse=True)
        self.pattern = "|".join(map(re.escape, longest_first)) or "(?!)"  # (?!) never matches
        self._search = re.compile(self.pattern)
        self._heads = frozenset(content[:n] for content in longest_first for n in range(1, len(content)))
        self._tails = frozenset(content[n:] for content in longest_first for n in range(1, len(content)))
        self._longest = max(map(len, longest_first), default=0)

    def wrapped(self, text: str, start: str, end: str) -> str:
        """The text with start and end around each control token, and one where its edge could become half of one."""
        text = self._search.sub(lambda match: start + match.group() + end, text)
        lengths = range(1, min(self._longest, len(text) + 1))
        head = start if any(text[:n] in self._tails for n in lengths) else ""
        tail = end if any(text[-n:] in self._heads for n in lengths) else ""
        return head + text + tail


class _UserTextMarks:
    """Keeps control tokens in one request's strings apart from those that the template writes.

    Control tokens in the user's strings get a mark on either side. After rendering, a control token between its two
    marks is text, a lone mark is dropped, and an unmarked control token is the template's. Marks are random for every
    request, so nobody can type one, and are digits only, because those survive tojson and the case filters unchanged.
    """

    def __init__(self, control_tokens: _ControlTokens):
        self._control_tokens = control_tokens
        self.start, self.end = _random_digits(), _random_digits()
        self.used = False

    def mark(self, value):
        """A copy of plain JSON data with every string in it marked, keys too."""
        if isinstance(value, str):
            marked = self._control_tokens.wrapped(value, self.start, self.end)
            self.used = self.used or len(marked) != len(value)
            return marked
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def removed(self, text: str) -> str:
        return text.replace(self.start, "").replace(self.end, "")

    def pattern(self) -> re.Pattern:
        """Finds, in a rendered prompt: `user_text`, a control token that is text; lone marks; `control`, a real one."""
        tokens = self._control_tokens.pattern
        return re.compile(
            f"{self.start}(?P<user_text>{tokens}){self.end}|{self.start}|{self.end}|(?P<control>{tokens})"
        )


@contextlib.contextmanager
def _template_failures(marks: _UserTextMarks) -> Iterator[None]:
    """Whatever goes wrong inside a template is the request's fault, as seen from here: ApiError 400."""
    try:
        yield
        return
    except ApiError:
        raise
    except jinja2.TemplateError as error:  # raise_exception, the sandbox, undefined variables: texts made for reading
        reason = marks.removed(str(error))
    except Exception as error:  # noqa: BLE001  whatever the template's expressions raise
        reason = type(error).__name__
    raise ApiError(400, f"The model's chat template does not accept these messages: {reason}", param="messages")


def _render_open_end(template: jinja2.Template, variables: dict) -> str:
    """Renders so that the prompt ends inside the last message: at a tag appended to it, as transformers does.

    The tag ends in a space. When the template trimmed that, it trims contents, so the message's own end goes too.
    """
    final_message = variables["messages"][-1]
    tag = _random_digits()
    if not isinstance(final_message.get("content"), str):
        raise ApiError(400, "The last message has no text to continue.", param="messages")
    final_message["content"] += tag + " "
    before, found, after = template.render(variables).rpartition(tag)
    if not found:
        raise ApiError(400, "The model's chat template leaves the last message out.", param="messages")
    return before if after.startswith(" ") else before.rstrip()


def _random_digits() -> str:
    return str(10**39 + secrets.randbelow(9 * 10**39))


def _template_message(message: dict) -> dict:
    """Without the keys that are None (templates print "None"), and with reasoning under the names templates use."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _template_sources(folder: Path) -> dict[str, str]:
    """Template name -> source. Later places win: chat_template.json, tokenizer_config.json, then files of their own."""
    sources = {}
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = (_model_json(folder, name) or {}).get("chat_template") or {}
        try:
            sources |= {"default": value} if isinstance(value, str) else {e["name"]: e["template"] for e in value}
        except (KeyError, TypeError):
            raise StartupError(f"{name}: chat_template must be a string or a list of name and template") from None
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    return sources | {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def _check_jinja2_version(version: str) -> None:
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < JINJA2_AT_LEAST:
        raise StartupError(f"jinja2 {version} has known sandbox escapes: pip install -U 'jinja2>=3.1.6'")


def _template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What transformers offers to templates, so that the same template makes the same prompt."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _template_tojson
    environment.globals |= {
        "raise_exception": _template_raise,
        "strftime_now": lambda text: datetime.datetime.now().strftime(text),
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's text for training; here it renders its body."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller) -> str:
        return caller()


def _template_tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """jinja2's own sorts keys and escapes <, >, & and ': not what models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _template_raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _TemplateDict:
    """`dict` for templates: the constructor only, not the class with all that hangs on it."""

    def __call__(self, *args, **kwargs) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args) -> dict:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` for templates, without names that begin with an underscore."""

    def __init__(*args, **kwargs):  # no named parameters, so that namespace(self=...) works as in jinja2
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_namespace_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name, value):
        _check_namespace_name(name)
        super().__setitem__(name, value)


def _check_namespace_name(name) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")


# ------------------------------------------------------------------------------
# Generation requests and events
# ------------------------------------------------------------------------------
# What the HTTP part asks of the engine, and what the engine answers. Plain data, token ids only: text lives in "Text
# stream". A choice has the index prompt_index * n + choice_index.


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a choice are picked and when it ends. The defaults are OpenAI's."""

    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer only
    frequency_penalty: float = 0.0  # over the answer only
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: fresh entropy for every choice
    ignore_eos: bool = False
    min_tokens: int = 0  # eos_ids and stop_token_ids cannot be drawn before
    eos_ids: tuple[int, ...] = ()  # from Tokenizer.eos_ids(chat)
    stop_token_ids: tuple[int, ...] = ()  # end the answer even with ignore_eos
    top_logprobs: int | None = None  # None: no logprobs; 0: the drawn token's only
    prompt_logprobs: bool = False

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a choice with the reason "stop"."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(self.eos_ids))


@dataclass(frozen=True)
class GenerationRequest:
    """`n` choices for each prompt. `max_tokens` is already clamped to the context."""

    prompts: list[list[int]]
    n: int
    max_tokens: int
    sampling: SamplingParams
    prompt_lookup: bool = True  # whether tokens may be drafted from the text so far; never changes the answer


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms from the raw logits. `top` holds exactly the k best (id, logprob), best first; the token
    itself is among them only when it is one of the k, then with the same float."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class PromptEvent:
    """Once per prompt, after its prefill. With prompt_logprobs: an entry per prompt token, None for the first."""

    index_of_prompt: int
    cached_tokens: int
    logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True)
class TokenEvent:
    """One drawn token of the choice `index`, the token that ends it included."""

    index: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class FinishEvent:
    """The engine ended the choice: "stop" at an id of `end_ids`, "length" at max_tokens."""

    index: int
    reason: str


# ------------------------------------------------------------------------------
# Text stream
# ------------------------------------------------------------------------------
# Token ids of one choice -> pieces of text that are final: never half a character, never the beginning of a stop
# string that may still be completed. Tokens travel with the piece that holds their first character, so that logprobs
# stay beside their text whether or not the answer is streamed.


@dataclass(frozen=True)
class EmittedToken:
    """A token whose text was (at least begun to be) sent. text_offset counts characters from the answer's start."""

    token_id: int
    data: bytes
    text_offset: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of the answer, and the tokens that begin in it."""

    text: str = ""
    tokens: list[EmittedToken] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text)


class TextStream:
    """One choice's text. Feed it every token in order with `push`, then call `finish` once.

    stops: strings that end the answer; `stopped` turns True when one is complete, its text is cut off.
    hidden_ids: ids that never show and have no logprobs: EOS ids (also with ignore_eos) and requested stop ids.
    skip_special_tokens: special tokens do not show and have no logprobs.
    include_stop: the stop string stays in the text.
    text_offset: where the answer begins in the returned text (the length of an echoed prompt).
    every_token: tokens that show no text (EOS, half a character at the end) are passed on too, for their logprobs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: list[str] | tuple[str, ...] = (),
        hidden_ids: frozenset[int] = frozenset(),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        text_offset: int = 0,
        every_token: bool = False,
    ):
        self.stopped = False
        self._every_token = every_token
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._hidden_ids = hidden_ids
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop
        self._decoder = _ByteDecoder(text_offset)
        self._outbox = _Outbox(text_offset)

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Delta:
        """The text that became final with this token; empty after a stop."""
        hidden = token_id in self._hidden_ids or (self._skip_special_tokens and self._tokenizer.is_special(token_id))
        data = b"" if hidden else self._tokenizer.token_bytes(token_id)
        if self._every_token and not data and not self.stopped:
            self._outbox.add("", [EmittedToken(token_id, b"", self._decoder.offset, logprob)])
        if self.stopped or not data:
            return Delta()
        text, offset = self._decoder.decode(data)
        self._outbox.add(text, [EmittedToken(token_id, data, offset, logprob)])
        cut = self._end_of_answer(self._outbox.text)
        if cut is not None:
            self.stopped = True
            return self._outbox.take(cut)
        return self._outbox.take(len(self._outbox.text) - _begun_length(self._outbox.text, self._stops))

    def finish(self) -> Delta:
        """At EOS or max_tokens: what was held back for a stop that never came. Half a character at the end is lost."""
        return Delta() if self.stopped else self._outbox.take(len(self._outbox.text), self._every_token)

    def _end_of_answer(self, text: str) -> int | None:
        """Where to cut for the stop that is complete first; of two that end together, the first in the list."""
        ends = [(text.find(stop) + len(stop), order, stop) for order, stop in enumerate(self._stops) if stop in text]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end if self._include_stop else end - len(stop)


class _ByteDecoder:
    """Bytes of tokens -> characters, as soon as they are complete; bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, offset: int = 0):
        self.offset = offset  # of the next character
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, data: bytes) -> tuple[str, int]:
        """The characters that a token's bytes complete, and the offset of the character that its first byte is in."""
        begun = bool(self._decoder.getstate()[0])
        first = self._decoder.decode(data[:1])
        # A character that was begun and is not continued became one U+FFFD, and this token starts after it.
        broken = begun and (data[0] & 0xC0 != 0x80 or len(first) == 2)
        offset = self.offset + broken
        text = first + self._decoder.decode(data[1:])
        self.offset += len(text)
        return text, offset


class _Outbox:
    """Text that waits to be sent, with the tokens in it."""

    def __init__(self, sent: int = 0):
        self.text = ""
        self.sent = sent  # characters taken so far
        self._tokens = deque()

    def add(self, text: str, tokens: list[EmittedToken]) -> None:
        self.text += text
        self._tokens.extend(tokens)

    def take(self, length: int, every_token: bool = False) -> Delta:
        """The first `length` characters and the tokens that begin in them, or all tokens."""
        text, self.text = self.text[:length], self.text[length:]
        self.sent += length
        tokens = []
        while self._tokens and (every_token or self._tokens[0].text_offset < self.sent):
            tokens.append(self._tokens.popleft())
        return Delta(text, tokens)


def _begun_length(text: str, patterns: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is the beginning, but not the whole, of one of the patterns."""
    longest = max((len(pattern) - 1 for pattern in patterns), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(pattern) > length and pattern.startswith(end) for pattern in patterns):
            return length
    return 0


def echoed_tokens(tokenizer: Tokenizer, ids: list[int], logprobs: list[TokenLogprob | None]) -> list[EmittedToken]:
    """Every token of an echoed prompt, special ones too, with its offset in tokenizer.decode(ids)."""
    decoder = _ByteDecoder()
    tokens = []
    for token_id, logprob in zip(ids, logprobs, strict=True):
        data = tokenizer.token_bytes(token_id)
        _, offset = decoder.decode(data) if data else ("", decoder.offset)
        tokens.append(EmittedToken(token_id, data, offset, logprob))
    return tokens


# ------------------------------------------------------------------------------
# Tool calls in the answer
# ------------------------------------------------------------------------------
# Qwen2.5 writes a call as <tool_call>, one JSON object {"name", "arguments"}, </tool_call>. Text before the first tag
# is streamed; from there on everything waits for the end, when complete calls are taken out and the rest stays text.

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """arguments: a JSON object as text, exactly as the model wrote it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))


class ToolCallFilter:
    """Stands behind a TextStream when the request has tools: give it every Delta, send what it returns."""

    def __init__(self):
        self._outbox = _Outbox()
        self._in_call = False

    def push(self, delta: Delta) -> Delta:
        """The part that is surely not a call. White space before a tag is not sent: it belongs to no one."""
        self._outbox.add(delta.text, delta.tokens)
        if self._in_call:
            return Delta()
        text, found, _ = self._outbox.text.partition(TOOL_CALL_START)
        self._in_call = bool(found)
        if not found:
            text = text[: len(text) - _begun_length(text, (TOOL_CALL_START,))]
        return self._outbox.take(len(text.rstrip()))

    def finish(self) -> tuple[Delta, list[ToolCall]]:
        """At the end: the rest of the text and the calls. Blocks that are cut off or not JSON stay in the text."""
        calls, rest = _split_calls(self._outbox.text)
        if not calls:
            return self._outbox.take(len(self._outbox.text)), []
        return Delta(rest.rstrip()), calls


def _split_calls(text: str) -> tuple[list[ToolCall], str]:
    """The complete calls in the text, and the text without them."""
    calls, rest, position = [], "", 0
    while (start := text.find(TOOL_CALL_START, position)) >= 0:
        rest += text[position:start]
        try:
            call, position = _parse_call(text, start + len(TOOL_CALL_START))
            calls.append(call)
        except (ValueError, RecursionError):
            position = start + len(TOOL_CALL_START)
            rest += TOOL_CALL_START
    return calls, rest + text[position:]


def _parse_call(text: str, position: int) -> tuple[ToolCall, int]:
    """The call whose opening tag ends at `position`, and the end of its closing tag. ValueError if there is none.

    The closing tag counts only behind the object: arguments may contain the same text.
    """
    members, position = _json_members(text, position)
    position = _skip_space(text, position)
    if not text.startswith(TOOL_CALL_END, position):
        raise ValueError("no closing tag behind the object")
    name, _ = members.get("name", (None, ""))
    value, arguments = members.get("arguments", ({}, "{}"))
    if isinstance(value, str):  # some models write the object as a string, like OpenAI's format
        value, arguments = _JSON.decode(value), value
    if not (isinstance(name, str) and name and isinstance(value, dict)):
        raise ValueError("not a call")
    return ToolCall(name, arguments), position + len(TOOL_CALL_END)


def _json_members(text: str, position: int) -> tuple[dict[str, tuple[object, str]], int]:
    """key -> (value, its source text) of the JSON object at `position`, and where the object ends."""
    members = {}
    position = _expect(text, position, "{")
    while not text.startswith("}", position):
        if members:
            position = _expect(text, position, ",")
        key, position = _JSON.raw_decode(text, position)
        position = _expect(text, position, ":")
        value, end = _JSON.raw_decode(text, position)
        members[key] = (value, text[position:end])
        position = _skip_space(text, end)
    return members, position + 1


def _expect(text: str, position: int, char: str) -> int:
    """The position of what follows `char`, white space on both sides skipped. ValueError when it is not there."""
    position = _skip_space(text, position)
    if not text.startswith(char, position):
        raise ValueError(f"{char!r} expected")
    return _skip_space(text, position + 1)


def _skip_space(text: str, position: int) -> int:
    return re.compile(r"[ \t\n\r]*").match(text, position).end()


def _refuse_constant(text: str):
    raise ValueError(f"{text} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


# ------------------------------------------------------------------------------
# Sampler
# ------------------------------------------------------------------------------
# One Sampler per choice: logits in, token id out. Order: logit_bias, penalties, min_tokens, temperature, top_k, top_p,
# min_p, draw. At 152k tokens a sort takes 15 ms and a pass over everything 20 to 200 us, so passes are counted: the
# best tokens are found through the maxima of groups of scores, and sorting all is the last resort of a flat top_p.
# Numpy, because torch's threads make passes as short as these slower whenever another process has a core; in memory
# that is kept, because the page faults of fresh memory cost more than the arithmetic.

GREEDY_BELOW = 1e-5  # temperatures below act as 0
LOGPROB_FLOOR = -9999.0  # stands for -inf, which JSON cannot say
BLOCK = 64
NUCLEUS_GUESS = 256  # a nucleus nearly always sits in this many best tokens


class Sampler:
    """Draws the tokens of one choice and remembers what penalties and min_tokens need.

    token_mask: Tokenizer.token_mask, numpy bool [vocab_size]; where it is False nothing is ever drawn.
    choice_index: the choice's number within its prompt, so that a prompt gives the same answers alone and in a list.

    Each `sample` at a temperature takes one uniform number from a generator keyed by (seed, choice_index). A token
    depends only on the logits, the tokens before it, the key and the number of draws so far, never on the batch.
    """

    def __init__(self, params: SamplingParams, token_mask: np.ndarray, prompt_ids: list[int], choice_index: int = 0):
        self.params = params
        self.generated = 0
        self._token_mask = token_mask
        self._scores = None  # with all else that takes room, made by the first sample
        self._greedy = params.temperature < GREEDY_BELOW
        self._random = _random_generator(params.seed, choice_index)
        self._suppressed_ids = np.array(sorted({*params.eos_ids, *params.stop_token_ids}), dtype=np.int64)
        self._penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self._prompt_ids = prompt_ids

    def _begin(self) -> None:
        """Megabytes with a large vocabulary, long prompt or many biases, and a request's thousand choices may wait."""
        self._scores = _Scores(self._token_mask)
        self._bias_ids = np.array(list(self.params.logit_bias.keys()), dtype=np.int64)
        self._bias = np.array(list(self.params.logit_bias.values()), dtype=np.float32)
        # Ids seen so far, each once, with how often it was generated: the only ones that penalties touch.
        self._seen_ids = np.unique(np.array(self._prompt_ids if self._penalized else [], dtype=np.int64))
        self._seen_counts = np.zeros(len(self._seen_ids), dtype=np.float32)
        self._seen_row = {int(token_id): row for row, token_id in enumerate(self._seen_ids)}

    def sample(self, logits: torch.Tensor) -> tuple[int, TokenLogprob | None]:
        """The next token for fp32 CPU logits [vocab_size], which are left as they are.

        Raises FloatingPointError when a logit is NaN or +inf, or when no token is left to draw.
        """
        if self._scores is None:
            self._begin()
        self._scores.load(logits.numpy())
        scores = self._scores.work
        self._adjust(scores)
        token_id = int(scores.argmax()) if self._greedy else self._draw(scores)
        top = self.params.top_logprobs
        logprob = None if top is None else self._scores.logprob(token_id, top)
        self._remember(token_id)
        return token_id, logprob

    def _adjust(self, scores: np.ndarray) -> None:
        """Applies logit_bias, penalties and min_tokens."""
        scores[self._bias_ids] += self._bias
        if self._penalized:
            scores[self._seen_ids] = self._penalize(scores[self._seen_ids])
        if self.generated < self.params.min_tokens and len(self._suppressed_ids):
            scores[self._suppressed_ids] = -np.inf
            if scores.max() == -np.inf:
                raise FloatingPointError("no token is left to draw: all are suppressed")

    def _penalize(self, values: np.ndarray) -> np.ndarray:
        """Scores of the seen ids after the penalties. Repetition makes a score worse on either side of zero."""
        params, counts = self.params, self._seen_counts
        repetition = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / repetition, values * repetition)
        return values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    def _remember(self, token_id: int) -> None:
        self.generated += 1
        if not self._penalized:
            return
        if token_id not in self._seen_row:
            self._seen_row[token_id] = len(self._seen_ids)
            self._seen_ids = np.append(self._seen_ids, token_id)
            self._seen_counts = np.append(self._seen_counts, np.float32(0))
        self._seen_counts[self._seen_row[token_id]] += 1

    def _draw(self, scores: np.ndarray) -> int:
        """Turns the scores into weights in place, of all tokens or of the candidates only: the best token weighs 1."""
        params = self.params
        uniform = self._random.random()
        _scale(scores, params.temperature)
        if 0 < params.top_k < len(scores):
            ids = _best_ids(scores, params.top_k)
            weights = np.exp(scores[ids])
            kept = _top_p_count(weights, params.top_p, weights.sum(dtype=np.float64))
            ids, weights = ids[:kept], weights[:kept]
        elif params.top_p < 1:
            ids, weights = _nucleus(scores, params.top_p)
        elif params.min_p > 0:
            ids = np.flatnonzero(scores >= math.log(params.min_p))
            weights = np.exp(scores[ids])
        else:
            return _crossed_in_blocks(np.exp(scores, out=scores), uniform)
        ids, weights = ids[weights >= params.min_p], weights[weights >= params.min_p]
        # In order of ids: a last-bit change of two close scores cannot swap them and change the draw.
        order = np.argsort(ids, kind="stable")
        cumulative = weights[order].cumsum(dtype=np.float64)
        return int(ids[order[_crossed(cumulative, uniform * cumulative[-1])]])


def logprob_rows(logits: torch.Tensor, next_ids: list[int], k: int, token_mask: np.ndarray) -> list[TokenLogprob]:
    """For fp32 CPU logits [R, vocab_size]: the logprob of next_ids[i] by row i, with the k best. For echoed prompts.

    The same figures that Sampler.sample gives. Raises FloatingPointError when a logit is NaN or +inf.
    """
    scores = _Scores(token_mask)
    rows = []
    for row, token_id in zip(logits.numpy(), next_ids, strict=True):
        scores.load(row)
        rows.append(scores.logprob(token_id, k))
    return rows


class _Scores:
    """One row of logits, filled up with -inf to whole blocks: `raw`, and `work`, a copy to be changed in place."""

    def __init__(self, token_mask: np.ndarray):
        self._vocab_size = len(token_mask)
        self._no_token_ids = np.flatnonzero(~token_mask)
        self.raw = np.full(-(-len(token_mask) // BLOCK) * BLOCK, -np.inf, dtype=np.float32)
        self.work = self.raw.copy()

    def load(self, logits: np.ndarray) -> None:
        """Takes new logits [vocab_size]. FloatingPointError when one of a token is NaN or +inf, or all are -inf."""
        self.raw[: self._vocab_size] = logits
        self.raw[self._no_token_ids] = -np.inf
        if not math.isfinite(self.raw.max()):  # the maximum of anything with a NaN is NaN
            raise FloatingPointError("the model's logits are not finite")
        np.copyto(self.work, self.raw)

    def logprob(self, token_id: int, k: int) -> TokenLogprob:
        """Log-softmax of the token and of the k best, from `raw`. Overwrites `work`."""
        np.copyto(self.work, self.raw)
        _scale(self.work)
        log_total = float(self.raw.max()) + math.log(_block_sums(np.exp(self.work, out=self.work))[-1])

        def logprob(i: int) -> float:
            return max(min(float(self.raw[i]) - log_total, 0.0), LOGPROB_FLOOR)

        best = _best_ids(self.raw, k) if k else []
        return TokenLogprob(token_id, logprob(token_id), [(int(i), logprob(i)) for i in best])


def _random_generator(seed: int | None, choice_index: int) -> np.random.Generator:
    """Counter-based, keyed by both numbers: choices of one seed are independent, negative seeds are seeds."""
    if seed is None:
        return np.random.Generator(np.random.Philox())
    return np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, choice_index], dtype=np.uint64)))


def _scale(scores: np.ndarray, temperature: float = 1.0) -> None:
    """In place: relative to the best, over the temperature. At most 0, so that no exponential overflows."""
    with np.errstate(over="ignore"):  # to -inf, which is right
        scores -= scores.max()
        scores /= np.float32(temperature)


def _best_ids(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k highest scores, best first, equal ones by lowest id; fewer when fewer are above -inf."""
    k = min(k, len(scores))
    # When k of the groups have a maximum of at least `bound`, so have the k best scores.
    groups = scores.reshape(BLOCK, -1).max(0) if k * 4 < len(scores) // BLOCK else scores
    bound = np.partition(groups, -k)[-k]
    ids = np.flatnonzero(scores >= bound) if bound > -np.inf else np.flatnonzero(scores > bound)
    return ids[np.argsort(-scores[ids], kind="stable")[:k]]


def _top_p_count(weights: np.ndarray, top_p: float, total: float) -> int:
    """How many of the weights, best first, reach top_p of the total: the one that crosses it included, at least one,
    len(weights) + 1 when all together do not reach it."""
    return int(np.searchsorted(weights.cumsum(dtype=np.float64), top_p * total)) + 1


def _nucleus(scores: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of the nucleus of all tokens, in any order. Turns all scores into weights in place."""
    ids = _best_ids(scores, NUCLEUS_GUESS)
    weights = np.exp(scores, out=scores)
    count = _top_p_count(weights[ids], top_p, _block_sums(weights)[-1])
    if count <= len(ids):
        return ids[:count], weights[ids[:count]]
    # A flat distribution. Sorting the values alone takes a tenth of sorting ids by value.
    descending = np.sort(weights)[::-1]
    last = _crossed_in_blocks(descending, top_p, "left")
    ids = np.flatnonzero(weights >= descending[last])
    surplus = len(ids) - (last + 1)  # more ids than wanted share the smallest weight: the lowest of them stay
    if surplus:
        ids = np.delete(ids, np.flatnonzero(weights[ids] == descending[last])[-surplus:])
    return ids, weights[ids]


def _crossed(cumulative: np.ndarray, target: float, side: str = "right") -> int:
    """The first index whose cumulative weight exceeds the target (side "left": reaches it). Rounding can never choose
    an index of weight zero: the target stays below the total."""
    return int(np.searchsorted(cumulative, min(target, np.nextafter(cumulative[-1], 0)), side))


def _crossed_in_blocks(weights: np.ndarray, fraction: float, side: str = "right") -> int:
    """`_crossed` at `fraction` of the total over all tokens: first the block by its sum, then the place within."""
    sums = _block_sums(weights)
    target = fraction * sums[-1]
    block = _crossed(sums, target, side)
    inside = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    return block * BLOCK + _crossed(inside, target - (sums[block - 1] if block else 0.0), side)


def _block_sums(weights: np.ndarray) -> np.ndarray:
    """Cumulative sums of the blocks: fp32 within a block of 64, fp64 across them, 20 times quicker than all in fp64."""
    return np.einsum("ij->i", weights.reshape(-1, BLOCK)).cumsum(dtype=np.float64)


# ------------------------------------------------------------------------------
# Planner
# ------------------------------------------------------------------------------
# Which node holds which layers. Pure: what a model needs and what the nodes have go in, a Plan comes out.

GIB = 1 << 30
PREFILL_CHUNK = 512  # most rows of one prefill pass; a stage's working memory is sized for it
PREFILL_CHUNKS = (128, 256, PREFILL_CHUNK)
HEADROOM = 1.10  # allocator slack and what nobody thought of
PLAN_COSTS = ("even", "throughput", "latency")


@dataclass(frozen=True)
class NodeOffer:
    """What the planner knows of a node. Times are None until it has measured."""

    node_id: str
    device_type: str
    memory_bytes: int | None  # None: unknown, taken as unlimited
    layer_ms: float | None = None  # one token through one layer
    link_ms: float = 0.0  # one message to the node and back
    second_copy: bool = False  # it would be quicker with its weights in memory a second time, in another dtype


@dataclass(frozen=True)
class StagePlan:
    """Layers [start, end) on one node, with what they take there."""

    node_id: str
    start: int
    end: int
    weight_bytes: int
    cache_bytes: int
    memory_bytes: int | None
    predicted_ms: float | None  # one token through these layers
    link_ms: float = 0.0  # and there and back
    second_copy: bool = False  # of the weights, counted in weight_bytes

    @property
    def layers(self) -> int:
        return self.end - self.start

    @property
    def total_ms(self) -> float | None:
        """One token there, through the layers, and back."""
        return None if self.predicted_ms is None else self.predicted_ms + self.link_ms


@dataclass(frozen=True)
class Plan:
    """A complete assignment of the model. Epochs count plans; stages tile [0, L) in order."""

    epoch: int
    stages: tuple[StagePlan, ...]

    @property
    def node_ids(self) -> tuple[str, ...]:
        return tuple(stage.node_id for stage in self.stages)

    @property
    def largest_bytes(self) -> int:
        """Weights and caches of the largest stage: what "even" makes small, before second copies are granted."""
        return max(stage.weight_bytes + stage.cache_bytes for stage in self.stages)

    @property
    def slowest_ms(self) -> float | None:
        """The slowest stage's time for one token, what "throughput" makes small; None: not all nodes are measured."""
        return None if self.token_ms is None else max(stage.total_ms for stage in self.stages)

    @property
    def token_ms(self) -> float | None:
        """One token through all stages and links, what "latency" makes small; None: not all nodes are measured."""
        times = [stage.total_ms for stage in self.stages]
        return None if None in times else sum(times)


class NoPlan(Exception):
    """The model does not fit; the message says per node what is needed and what is there."""


@dataclass(frozen=True)
class ModelNeeds:
    """What a model's layers take, per layer and kind of device."""

    config: qwen.Config
    weights: qwen.WeightFormat
    slots: int
    max_context: int

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    def weight_bytes(self, i: int, device_type: str, second_copy: bool = False) -> int:
        return qwen.layer_weight_bytes(self.config, i, self.weights, device_type, second_copy)

    def cache_bytes(self, i: int, device_type: str) -> int:
        """Keys and values of layer i for all slots at max_context."""
        return self.slots * qwen.layer_cache_bytes(self.config, i, self.max_context, self.weights, device_type)

    def relative_time(self, i: int) -> float:
        """How long layer i takes, in units of the layer that nodes measure."""
        return 1.0

    def working_bytes(self) -> int:
        """The largest moment beside weights and caches: one prefill chunk, or one linear while it is being packed."""
        config = self.config
        rows = min(PREFILL_CHUNK, self.max_context)
        row_floats = 6 * config.hidden_size + 4 * config.intermediate_size
        scores = config.num_attention_heads * self.max_context  # the portable attention keeps them for all rows
        packing = max(n * k for n, k in qwen.merged_linear_shapes(config).values())
        return 4 * max(rows * (row_floats + scores), 2 * packing)


class _Costs:
    """Prefix sums over the layers for one node, so that any stage's bytes and time are two look-ups."""

    def __init__(self, needs: ModelNeeds, offer: NodeOffer):
        self.needs = needs
        self.offer = offer
        self.weights, self.caches, self.times = [0], [0], [0.0]
        for i in range(needs.layers):
            self.weights.append(self.weights[-1] + needs.weight_bytes(i, offer.device_type))
            self.caches.append(self.caches[-1] + needs.cache_bytes(i, offer.device_type))
            self.times.append(self.times[-1] + needs.relative_time(i))
        self.working = needs.working_bytes()

    def stage_bytes(self, start: int, end: int) -> int:
        return self.weights[end] - self.weights[start] + self.caches[end] - self.caches[start]

    def need_bytes(self, start: int, end: int) -> int:
        return int((self.stage_bytes(start, end) + self.working) * HEADROOM)

    def fits(self, start: int, end: int) -> bool:
        return self.offer.memory_bytes is None or self.need_bytes(start, end) <= self.offer.memory_bytes

    def milliseconds(self, start: int, end: int) -> float | None:
        return None if self.offer.layer_ms is None else (self.times[end] - self.times[start]) * self.offer.layer_ms

    def stage(self, start: int, end: int) -> StagePlan:
        """The stage as it is planned; a second copy of the weights is granted where the memory has room for it."""
        offer, weights = self.offer, self.weights[end] - self.weights[start]
        caches = self.caches[end] - self.caches[start]
        second_copy = False
        if offer.second_copy and offer.memory_bytes is not None:
            twice = sum(self.needs.weight_bytes(i, offer.device_type, second_copy=True) for i in range(start, end))
            second_copy = int((twice + caches + self.working) * HEADROOM) <= offer.memory_bytes
            weights = twice if second_copy else weights
        milliseconds = self.milliseconds(start, end)
        return StagePlan(
            offer.node_id, start, end, weights, caches, offer.memory_bytes, milliseconds, offer.link_ms, second_copy
        )


def _stage_cost(cost: str, costs: _Costs, start: int, end: int) -> float:
    """What one stage adds to a plan's cost; "even" and "throughput" take the largest, "latency" the sum."""
    if cost == "even":
        return costs.stage_bytes(start, end)
    milliseconds = costs.milliseconds(start, end)
    if milliseconds is None:
        raise NoPlan(f"--plan {cost} needs measured times, and node {costs.offer.node_id} has none yet")
    return milliseconds + costs.offer.link_ms


def _best_splits(needs: ModelNeeds, all_costs: list[_Costs], cost: str, most: int) -> list[tuple | None]:
    """[s]: the best split of all layers over exactly s nodes, as ((node index, start, end), ...); None when none fits.

    Dynamic programme: best[used][i] = the cheapest way to put layers [0, i) on `used` of the nodes seen so far, as
    (cost, tie-break, stages). Ties go to the more even split.
    """
    combine = operator.add if cost == "latency" else max
    best: list[dict[int, tuple]] = [{0: (0, 0, ())}] + [{} for _ in range(most)]
    for node, costs in enumerate(all_costs):
        for used in range(min(node, most - 1), -1, -1):  # downwards, so that a node is used once
            for start, (before, uneven, stages) in best[used].items():
                for end in range(start + 1, needs.layers + 1):
                    if not costs.fits(start, end):
                        break
                    stage_cost = _stage_cost(cost, costs, start, end)
                    candidate = (combine(before, stage_cost), uneven + stage_cost**2, (*stages, (node, start, end)))
                    if end not in best[used + 1] or candidate[:2] < best[used + 1][end][:2]:
                        best[used + 1][end] = candidate
    return [by_end.get(needs.layers) for by_end in best]


def make_plan(
    needs: ModelNeeds, offers: list[NodeOffer], cost: str, required: int | None, epoch: int, at_least: int = 1
) -> Plan:
    """The best plan over the nodes that are there, stages in the order in which they are offered; raises NoPlan.

    required: exactly min(required, layers) stages. None: the fewest nodes that hold the model, but at_least so many;
    "latency" then takes any number of nodes, whichever is quickest, once at_least so many are there.
    """
    wanted = min(at_least if required is None else required, needs.layers)
    if not offers or wanted > len(offers):
        raise NoPlan(f"{wanted} nodes are required, {len(offers)} can be used")
    may_leave_out = cost == "latency" and required is None
    fewest = 1 if may_leave_out else wanted
    most = wanted if required is not None else min(len(offers), needs.layers)
    all_costs = [_Costs(needs, offer) for offer in offers]
    splits = [split for split in _best_splits(needs, all_costs, cost, most)[fewest:] if split]
    if not splits:
        raise NoPlan(_what_is_missing(needs, all_costs, most))
    # All of them have the right number of stages; those with fewer come first.
    split = min(splits, key=lambda split: split[0]) if may_leave_out else splits[0]
    return Plan(epoch, tuple(all_costs[node].stage(start, end) for node, start, end in split[2]))


def possible_plans(needs: ModelNeeds, offers: list[NodeOffer], required: int | None, at_least: int) -> dict[str, Plan]:
    """{cost: the plan that it would give}, of all costs for which there is one."""
    plans = {}
    for cost in PLAN_COSTS:
        try:
            plans[cost] = make_plan(needs, offers, cost, required, 0, at_least)
        except NoPlan:
            continue  # not measured, or, for want of memory, none is possible
    return plans


@dataclass(frozen=True)
class StageForecast:
    """What a pass will take in one stage, by its rows: from its node's MEASURED, so before the plan was first used.
    Passes are cut to suit it, and one that takes far longer loses its stage.
    """

    layers_ms: dict[str, float]  # {rows: milliseconds in all its layers}
    link_ms: float  # there and back
    machine: object  # stages of one machine take turns on it

    def ms(self, rows: int) -> float:
        """In its layers: on the line between measured numbers of rows, beyond the last as between the last two."""
        known = sorted((int(count), milliseconds) for count, milliseconds in self.layers_ms.items())
        for (low, low_ms), (high, high_ms) in pairwise(known):
            if rows <= high:
                break
        return max(0.0, low_ms + (rows - low) * (high_ms - low_ms) / (high - low))


def busiest_ms(stages: list[StageForecast], stage_ms: list[float]) -> float:
    """What a pass takes of the time of the machine that it keeps busy the longest."""
    of_machines: dict[object, float] = {}
    for stage, ms in zip(stages, stage_ms):
        of_machines[stage.machine] = of_machines.get(stage.machine, 0.0) + ms
    return max(of_machines.values())


def passes_at_once(stages: list[StageForecast]) -> int:
    """How many passes are worth having in flight: one for each machine. On one machine two stages that work at once get
    in each other's way, and were 13 % slower than in turns."""
    return len({stage.machine for stage in stages})


def prefill_chunk(tokens: int, stages: list[StageForecast]) -> int:
    """Rows of the passes in which a prompt of so many tokens is through all stages soonest.

    Large chunks waste least; small ones let the stages begin, and end, together: the first chunk passes all of them,
    then the busiest machine lets one through at a time. Of about equal ones the smallest: other requests wait for it.
    """
    if len(stages) == 1:
        return PREFILL_CHUNK
    total_ms = {}
    for rows in PREFILL_CHUNKS:
        stage_ms = [stage.ms(min(rows, tokens)) for stage in stages]
        total_ms[rows] = sum(stage_ms) + (math.ceil(tokens / rows) - 1) * busiest_ms(stages, stage_ms)
    enough = 1.05 * min(total_ms.values())
    return min(rows for rows, ms in total_ms.items() if ms <= enough)


def decode_passes(sequences: int, stages: list[StageForecast]) -> tuple[int, int]:
    """(passes in flight at once, sequences in each) that bring the next tokens of so many sequences soonest.

    One pass reads the weights once for all, but only one stage works at a time: with several passes all work, each on
    other rows. And kernels take rows in fours or sixes, so that 6 of 8 sequences in turns can be quicker than all 8.
    Anything but one pass for all is worth it from a twentieth less time a token on.
    """
    options = [(1, sequences)]
    for passes in range(1, min(sequences, passes_at_once(stages)) + 1):
        share = math.ceil(sequences / passes)
        measured = {int(rows) for stage in stages for rows in stage.layers_ms}  # between them times lie on lines
        options += [(passes, rows) for rows in sorted({share, *measured}, reverse=True) if rows <= share]

    def token_ms(option: tuple[int, int]) -> float:
        passes, rows = option
        stage_ms = [stage.ms(rows) for stage in stages]
        there_and_back = sum(stage_ms) + sum(stage.link_ms for stage in stages)
        return max(there_and_back, passes * busiest_ms(stages, stage_ms)) / min(sequences, passes * rows)

    best = min(options, key=token_ms)
    return best if token_ms(best) < 0.95 * token_ms(options[0]) else options[0]


def estimate_required(needs: ModelNeeds, offers: list[NodeOffer]) -> int:
    """How many nodes like those that have joined it takes to hold the model; 1 while nothing is known of any."""
    if not offers:
        return 1
    try:
        return len(make_plan(needs, offers, "even", None, 0).stages)
    except NoPlan:
        pass  # more than there are, then
    known = [offer.memory_bytes for offer in offers if offer.memory_bytes is not None]
    costs = _Costs(needs, offers[0])
    usable = max(1, int(sum(known) / len(known) / HEADROOM) - costs.working)
    return min(needs.layers, max(len(offers) + 1, -(-costs.stage_bytes(0, needs.layers) // usable)))


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.2f} GiB"


def _what_is_missing(needs: ModelNeeds, all_costs: list[_Costs], stages: int) -> str:
    share = -(-needs.layers // stages)
    size = f"{needs.layers} layers, {needs.slots} slots of {needs.max_context} tokens"
    lines = [f"the model does not fit on {stages} node(s): {size}"]
    for costs in all_costs:
        largest = 0
        while largest < needs.layers and costs.fits(0, largest + 1):
            largest += 1
        lines.append(
            f"{costs.offer.node_id}: have {_gib(costs.offer.memory_bytes)}, need {_gib(costs.need_bytes(0, share))} "
            f"for {share} layers, room for {largest}"
        )
    return "; ".join(lines) + ". " + _ways_to_fit(needs, stages < min(len(all_costs), needs.layers))


def _ways_to_fit(needs: ModelNeeds, has_spares: bool) -> str:
    """What to do when a model does not fit; has_spares: nodes are there that an option keeps from being used."""
    add = "Raise --max-nodes (more nodes are there)" if has_spares else "Add nodes (--max-nodes must allow them)"
    lower = "--max-context or --slots" if needs.slots > 1 else "--max-context"
    smaller = {"fp16": ", or use --quant int8 or int4", "int8": ", or use --quant int4", "int4": ""}
    return f"{add}, lower {lower}, raise a node's --max-memory-gb if it has one{smaller[needs.weights.quant]}"


@dataclass(frozen=True)
class MeasuredTimes:
    """What one token has really taken in the plan in use (TokenTimer), to be shown beside what was predicted.

    Milliseconds: {node id: in its layers}, {node id: there and back}, through all of them.
    """

    stage_ms: dict[str, float]
    link_ms: dict[str, float]
    token_ms: float | None
    passes: int


NOT_MEASURED = MeasuredTimes({}, {}, None, 0)


def plan_table(plan: Plan, devices: dict[str, str], measured: MeasuredTimes = NOT_MEASURED) -> str:
    """The plan as a table, and how long one token takes, predicted and measured. devices: node id -> device."""
    header = ("node", "device", "layers", "weights MB", "KV MB", "of memory", "ms/token", "measured")
    rows = [(*header, "link ms", "measured")]
    for stage in plan.stages:
        used = stage.weight_bytes + stage.cache_bytes
        rows.append(
            (
                stage.node_id,
                devices.get(stage.node_id, "?"),
                f"{stage.start}-{stage.end - 1} ({stage.layers})",
                f"{stage.weight_bytes / 1e6:.1f}",
                f"{stage.cache_bytes / 1e6:.1f}",
                "unknown" if stage.memory_bytes is None else f"{100 * used / stage.memory_bytes:.0f} %",
                _ms(stage.predicted_ms),
                _ms(measured.stage_ms.get(stage.node_id)),
                _ms(stage.link_ms),
                _ms(measured.link_ms.get(stage.node_id)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    total = f"one token through all stages: {_ms(plan.token_ms)} ms predicted, {_ms(measured.token_ms)} ms measured"
    return "\n".join([*lines, total])


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.2f}"


def plans_in_words(plans: dict[str, Plan]) -> str:
    """One line: per cost its split, and the figure that it makes small."""
    goals = {
        "even": lambda plan: f"largest stage {plan.largest_bytes / 1e6:.1f} MB",
        "throughput": lambda plan: f"slowest stage {_ms(plan.slowest_ms)} ms",
        "latency": lambda plan: f"one token {_ms(plan.token_ms)} ms",
    }
    return "; ".join(f"--plan {cost}: {_split_in_words(plan)}, {goals[cost](plan)}" for cost, plan in plans.items())


def _split_in_words(plan: Plan) -> str:
    return " + ".join(f"{_layers_in_words(stage)} on {stage.node_id}" for stage in plan.stages)


def _layers_in_words(stage: StagePlan) -> str:
    return f"{stage.layers} layer{'s' if stage.layers > 1 else ''}"


WORTH_SAYING = 1.25  # advice is given when something takes so many times as long as it could


def plan_advice(
    needs: ModelNeeds, offers: list[NodeOffer], plan: Plan, plans: dict[str, Plan], local: bool = False
) -> str | None:
    """One line when fewer nodes would be faster, or one node or link makes the cluster slow; None when all is well.

    plans: what the costs would give under the same rules (possible_plans). local: the nodes are those of --local-nodes.
    """
    if plan.token_ms is None or "latency" not in plans:
        return None
    quickest = make_plan(needs, offers, "latency", None, 0)
    if len(quickest.stages) < len(plan.stages) and plan.token_ms > WORTH_SAYING * quickest.token_ms:
        slow = max((s for s in plan.stages if s.node_id not in quickest.node_ids), key=lambda s: s.total_ms)
        option = f"--plan latency with --min-nodes {len(plan.stages)}, and no --max-nodes"
        if local:
            option = f"--local-nodes {len(quickest.stages)}"
        return (
            f"fewer nodes would be faster: one token takes {plan.token_ms:.1f} ms, and {quickest.token_ms:.1f} ms "
            f"without {slow.node_id} ({_why_slow(slow)}), as {_split_in_words(quickest)}. Start the coordinator with "
            f"{option}"
        )
    if len(plan.stages) == 1:
        return None
    slowest = max(plan.stages, key=lambda stage: stage.total_ms)
    for cost, what in (("latency", "token_ms"), ("throughput", "slowest_ms")):
        if cost not in plans:  # nodes that only "latency" may leave out have no room for a layer
            continue
        now, then = getattr(plan, what), getattr(plans[cost], what)
        if now > WORTH_SAYING * then:
            name = "one token" if cost == "latency" else "the slowest stage"
            return (
                f"{slowest.node_id} is slow ({_why_slow(slowest)}): {name} takes {now:.1f} ms, and {then:.1f} ms with "
                f"--plan {cost}, as {_split_in_words(plans[cost])}"
            )
    far = max(plan.stages, key=lambda stage: stage.link_ms)
    if not local and plan.token_ms > WORTH_SAYING * (plan.token_ms - far.link_ms):  # no cable would help those
        return (
            f"the link to {far.node_id} is slow: {far.link_ms:.1f} of the {plan.token_ms:.1f} ms of one token. Use a "
            "cable or a nearer machine, or let the others hold the model: fewer nodes, --quant int8 or int4"
        )
    return None


def _why_slow(stage: StagePlan) -> str:
    return f"{stage.predicted_ms:.1f} ms for {_layers_in_words(stage)}, {stage.link_ms:.1f} ms there and back"


# ------------------------------------------------------------------------------
# Cluster state
# ------------------------------------------------------------------------------
# What is known of the nodes, and what to do next. No socket, thread or clock in here: the links report what happened
# and when, and `next_plan` says what should be loaded. Readiness is derived, never stored.


class NodeState(enum.Enum):
    JOINED = "joined"  # connected, holds nothing for the present plan (a spare, or waiting for the others)
    LOADING = "loading"
    READY = "ready"
    LOST = "lost"


# The moves that exist. Anything else is a bug of ours, and raises.
NODE_MOVES = {
    (NodeState.JOINED, NodeState.LOADING),  # the plan gives it layers
    (NodeState.LOADING, NodeState.READY),  # LOAD_COMPLETE
    (NodeState.LOADING, NodeState.LOADING),  # a newer plan while it loads
    (NodeState.READY, NodeState.LOADING),  # a newer plan
    (NodeState.LOADING, NodeState.JOINED),  # LOAD_FAILED, or the newer plan leaves it out
    (NodeState.READY, NodeState.JOINED),  # the newer plan leaves it out
    (NodeState.JOINED, NodeState.LOST),
    (NodeState.LOADING, NodeState.LOST),
    (NodeState.READY, NodeState.LOST),
}

RECOVERY_GRACE_S = 5.0  # a node that restarts is back within this; only then its layers go to others
FAILED_LOAD_PAUSE_S = 10.0  # a node that could not load is left alone for so long, then tried again
MEASURE_PATIENCE_S = 15.0  # so long a plan that could be made waits for nodes that are still measured
FOUND_MEMORY_S = 300.0  # what a failed load found counts for so long; then the node may have what it promised again


@dataclass(eq=False)
class NodeRecord:
    """One node that has joined. `link` is the connection's owner, opaque here."""

    node_id: str
    hello: dict
    host: str
    link: object
    state: NodeState = NodeState.JOINED
    measured: dict | None = None  # MEASURED's payload
    asked_at: float | None = None  # when it was asked to measure; None: it has not been, or has answered
    load_error: str | None = None  # why the last load (or measurement) failed
    found_memory_bytes: int | None = None  # what a failed load found there, when that was too little
    found_at: float = 0.0
    paused_until: float = 0.0  # no plan and no measurement before this time

    @property
    def device_type(self) -> str:
        return self.hello["selected_device"].split(":")[0]

    def is_silent(self, now: float) -> bool:
        """Whether it takes longer to measure than others should have to wait for."""
        return self.asked_at is not None and now - self.asked_at >= MEASURE_PATIENCE_S

    @property
    def limit_bytes(self) -> int | None:
        """What the node's owner allows it (--max-memory-gb), or what a failed load found to be there, if less."""
        limits = [f for f in (self.hello["max_memory_bytes"], self.found_memory_bytes) if f is not None]
        return min(limits, default=None)

    @property
    def free_bytes(self) -> int | None:
        """What its device had free when it joined; None: unknown."""
        free = [d["free_memory"] for d in self.hello["devices"] if d["id"] == self.hello["selected_device"]]
        return free[0] if free else None

    @property
    def held_bytes(self) -> int:
        """What of free_bytes its layers of an earlier plan held then: it gives them up for others when it has to."""
        return self.hello["held_memory_bytes"]

    @property
    def own_memory_bytes(self) -> int | None:
        """What the node itself says that it may use, not counting its neighbours."""
        return min((f for f in (self.limit_bytes, self.free_bytes) if f is not None), default=None)

    @property
    def memory_pool(self) -> tuple[str, str]:
        """Nodes of one pool take their memory from the same place: a GPU, or a host's RAM (Apple's GPUs share it)."""
        return self.hello["hostname"], self.hello["selected_device"] if self.device_type == "cuda" else "ram"

    def is_like(self, other: NodeRecord) -> bool:
        """The same machine, torch and kind of device: what one has measured of its kernels holds for the other."""
        return self._likeness == other._likeness

    @property
    def _likeness(self) -> tuple:
        hello = self.hello
        names = [d["name"] for d in hello["devices"] if d["id"] == hello["selected_device"]]
        return hello["hostname"], hello["platform"], hello["torch_version"], self.device_type, names


def share_memory(nodes: list[NodeRecord]) -> dict[str, int | None]:
    """{node id: bytes} for the nodes of one pool; None where nothing is known.

    Nodes with a limit get it first, as far as the pool goes; the others share the rest equally. Nobody gets more than
    it says that it has: a node that joined after its neighbours had loaded sees less free memory than they did. Where
    all have joined with layers of an earlier plan, the pool is what none of them held and what each of them did.
    """
    known = [node for node in nodes if node.free_bytes is not None]
    figures = [node.free_bytes for node in known]
    if known:
        unused = min(node.free_bytes - node.held_bytes for node in known)
        figures.append(max(0, unused) + sum(node.held_bytes for node in known))
    left = max(figures, default=None)
    shares = {}
    waiting = sorted(nodes, key=lambda n: (n.limit_bytes is None, n.limit_bytes or 0))
    limited = sum(node.limit_bytes is not None for node in nodes)
    for i, node in enumerate(waiting):
        # The smallest limit comes first, so that what it does not need is there for the next.
        sharers = (limited if i < limited else len(nodes)) - i
        figures = [f for f in (node.own_memory_bytes, None if left is None else left // sharers) if f is not None]
        shares[node.node_id] = min(figures, default=None)
        if left is not None:
            left -= shares[node.node_id]
    return shares


def in_places(places: list[str], node_ids: list[str]) -> list[str]:
    """Node ids in the order of their layers, which changes as little as can be: nodes keep what they have loaded.

    A node that had a place keeps it, though it was away. Others take the places of those that are away, then the end.
    """
    newcomers = [node_id for node_id in node_ids if node_id not in places]
    taken = [node_id if node_id in node_ids or not newcomers else newcomers.pop(0) for node_id in places]
    return taken + newcomers


class ClusterState:
    """All nodes and the present plan. Not thread safe: its owner (the controller) holds a lock around every call."""

    def __init__(
        self,
        needs: ModelNeeds,
        cost: str,
        required: int | None,
        minimum: int | None,
        default_memory: int | None,
        local: bool = False,
    ):
        """required, minimum: numbers of nodes; default_memory: bytes; local: required is --local-nodes."""
        self.needs = needs
        self.cost = cost
        self.required = None if required is None else min(required, needs.layers)
        self.minimum = None if minimum is None else min(minimum, needs.layers)
        self.default_memory = default_memory
        self.local = local
        self.nodes: dict[str, NodeRecord] = {}
        self.plan: Plan | None = None
        self.places: list[str] = []  # node ids in the order of their layers, those that are away included
        self.epoch = 0
        self.incomplete_since: float | None = None  # when a plan that was in use became void
        self.available, self.available_since = 0, float("-inf")  # nodes that could be used; when their number last grew
        self.possible_since: float | None = None  # when a plan became possible that only waits for measurements
        self.refused: str | None = None  # why no plan can ever work
        self.plans: dict[str, Plan] = {}  # what each cost would have given when the present plan was made
        self.advice: str | None = None  # what would make the present plan clearly faster

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def move(self, node: NodeRecord, state: NodeState, why: str) -> None:
        """The only place where a node's state changes."""
        if (node.state, state) not in NODE_MOVES:
            raise RuntimeError(f"node {node.node_id}: no move from {node.state.value} to {state.value} ({why})")
        log.info("node %s: %s -> %s (%s)", node.node_id, node.state.value, state.value, why)
        node.state = state

    def join(self, node: NodeRecord) -> None:
        """Adds a node. One of the same id must have been lost before."""
        if node.node_id in self.nodes:
            raise ValueError(f"node {node.node_id} has joined already, from {self.nodes[node.node_id].host}")
        self.nodes[node.node_id] = node
        log.info("node %s: joined from %s with %s", node.node_id, node.host, node.hello["selected_device"])

    def lose(self, node: NodeRecord, why: str, now: float) -> None:
        """Forgets a node whose connection is gone. The plan that needs it is void."""
        self.move(node, NodeState.LOST, why)
        del self.nodes[node.node_id]
        if self.plan and node.node_id in self.plan.node_ids:
            self.void_plan(f"node {node.node_id} is lost", now)

    def load_failed(self, node: NodeRecord, why: str, have_bytes: int | None, now: float) -> None:
        """A node could not load its layers, or not measure. When its memory cannot even hold the weights of its stage,
        the next plan counts on that much and gives it less; otherwise the same plan would only fail again, so the node
        is left out for FAILED_LOAD_PAUSE_S.
        """
        node.load_error = why
        stage = self.stage_of(node)
        if stage and have_bytes is not None and have_bytes <= stage.weight_bytes:
            node.found_memory_bytes, node.found_at = have_bytes, now
        else:
            node.paused_until = now + FAILED_LOAD_PAUSE_S
        if stage:
            self.void_plan(f"node {node.node_id} could not load: {why}", now)

    def ran_out_of_memory(self, node: NodeRecord, why: str, now: float) -> None:
        """A node has loaded its layers, and then a pass did not fit beside them: it has less than it said. If the model
        can be held with fewer layers there, the plan is void and the next one counts on too little for as many as now.
        """
        node.load_error = why
        stage = self.stage_of(node)
        if stage is None:
            return
        before = node.found_memory_bytes, node.found_at
        offer = NodeOffer(node.node_id, node.device_type, None)
        node.found_memory_bytes = _Costs(self.needs, offer).need_bytes(stage.start, stage.end) - 1
        node.found_at = now
        try:
            make_plan(self.needs, self.offers(now), self.cost, len(self.plan.stages), self.epoch + 1)
        except NoPlan:
            node.found_memory_bytes, node.found_at = before  # there is no other way: shorter requests still work
        else:
            self.void_plan(f"node {node.node_id} ran out of memory: {why}", now)

    def stage_of(self, node: NodeRecord) -> StagePlan | None:
        """The node's part of the present plan."""
        stages = self.plan.stages if self.plan else ()
        return next((stage for stage in stages if stage.node_id == node.node_id), None)

    def refuse(self, why: str) -> None:
        """No plan can work, whatever nodes join: the model's weights cannot be brought into the form asked for."""
        log.error("the model cannot be served: %s", why)
        self.refused = why

    def void_plan(self, why: str, now: float) -> None:
        """Takes the plan out of use; nodes that hold layers of it wait for the next one."""
        if self.plan is None:
            return
        log.warning("epoch %d: the plan is void: %s", self.epoch, why)
        self.plan, self.incomplete_since = None, now
        self.plans, self.advice = {}, None
        for node in self.nodes.values():
            if node.state in (NodeState.LOADING, NodeState.READY):
                self.move(node, NodeState.JOINED, "its plan is void")

    # -- readiness -----------------------------------------------------------------------------------------------------

    @property
    def ready_count(self) -> int:
        return sum(node.state is NodeState.READY for node in self.nodes.values())

    @property
    def is_ready(self) -> bool:
        """Every stage of the plan is loaded on a node that is there."""
        return self.plan is not None and all(
            node_id in self.nodes and self.nodes[node_id].state is NodeState.READY for node_id in self.plan.node_ids
        )

    @property
    def can_grow(self) -> bool:
        """The plan in use has fewer stages than wanted (nodes were lost), and enough nodes are there again."""
        if self.required is None or not self.is_ready:
            return False
        return len(self.plan.stages) < self.required <= len(self.nodes)

    @property
    def required_count(self) -> int:
        """How many ready nodes it takes, as far as is known now."""
        if self.plan is not None:
            return len(self.plan.stages)
        if self.required is not None:
            return self.required
        return max(estimate_required(self.needs, self.offers()), self.minimum or 1)

    def not_ready_error(self) -> ApiError | None:
        """None when requests can be served."""
        if self.is_ready:
            return None
        return ApiError.not_ready(
            f"Model is not ready. Required nodes: {self.required_count}, connected ready nodes: {self.ready_count}"
        )

    # -- plans ---------------------------------------------------------------------------------------------------------

    def offers(self, now: float | None = None) -> list[NodeOffer]:
        """What the measured nodes offer, in the order of their places; with `now`, without those paused then."""
        usable = {i: n for i, n in self.nodes.items() if n.measured and (now is None or n.paused_until <= now)}
        nodes = [usable[node_id] for node_id in in_places(self.places, sorted(usable)) if node_id in usable]
        pools: dict[tuple, list[NodeRecord]] = {}
        for node in nodes:
            pools.setdefault(node.memory_pool, []).append(node)
        shares = {}
        for pool in pools.values():
            shares.update(share_memory(pool))
        offers = []
        for node in nodes:
            memory = shares[node.node_id] if shares[node.node_id] is not None else self.default_memory
            layer_ms = node.measured["layer_ms"].get("1")
            copy_pays = node.measured["kernels"]["with_copy"] is not None
            offers.append(NodeOffer(node.node_id, node.device_type, memory, layer_ms, node.link.rtt_ms, copy_pays))
        return offers

    def to_measure(self, now: float) -> list[NodeRecord]:
        """Nodes that must be measured before the next plan."""
        return [node for node in self.nodes.values() if node.measured is None and node.paused_until <= now]

    def known_kernels(self, node: NodeRecord) -> dict | None:
        """The kernels that a neighbour on the same machine has chosen for the same kind of device, if one has."""
        return next((n.measured["kernels"] for n in self.nodes.values() if n.measured and n.is_like(node)), None)

    def next_plan(self, now: float) -> Plan | None:
        """A new plan when one is needed and possible now; raises NoPlan when the nodes cannot hold the model."""
        if self.refused is not None:
            raise NoPlan(self.refused)
        if self.plan is not None:
            return None
        for node in self.nodes.values():
            if now - node.found_at > FOUND_MEMORY_S:
                node.found_memory_bytes = None
        offers = self.offers(now)
        if len(offers) > self.available:
            self.available_since = now  # one has come back: the others may be on their way too
        self.available = len(offers)
        if not self.nodes or (self.to_measure(now) and not self._goes_on_unmeasured(offers, now)):
            return None
        return self._plan_over(offers, now)

    def _goes_on_unmeasured(self, offers: list[NodeOffer], now: float) -> bool:
        """Whether the next plan is made without the nodes that are still to be measured, which become spares. So nobody
        keeps a cluster from serving by joining it and saying nothing."""
        # Requests wait while a plan is void: then nobody is waited for who is not needed, nor takes long to measure.
        enough = self.required is not None and len(offers) >= self.required
        recovering = self.incomplete_since is not None and (
            enough or now - self.incomplete_since >= 2 * RECOVERY_GRACE_S
        )
        if recovering and offers:
            return True
        try:
            self._plan_over(offers, now)
        except NoPlan:
            self.possible_since = None
            return False
        if self.possible_since is None:
            self.possible_since = now
        if now - self.possible_since < MEASURE_PATIENCE_S:
            return False
        for node in self.to_measure(now):
            if node.is_silent(now):
                node.load_error = f"silent while measuring for {now - node.asked_at:.0f} s"
                log.warning("node %s: %s; the plan goes on without it, as a spare", node.node_id, node.load_error)
        return True

    def _plan_over(self, offers: list[NodeOffer], now: float) -> Plan:
        """The next plan over these offers; raises NoPlan, with the loads that have failed."""
        try:
            required = self._stages_now(len(offers), now)
            return make_plan(self.needs, offers, self.cost, required, self.epoch + 1, at_least=self.minimum or 1)
        except NoPlan as error:
            paused = [
                f"; {n.node_id} could not load: {n.load_error}" for n in self.nodes.values() if n.paused_until > now
            ]
            raise NoPlan(str(error) + "".join(paused)) from None

    def larger_plan(self, now: float) -> Plan | None:
        """The plan over all required nodes, when the present one is smaller and they can be used; else None."""
        offers = self.offers(now)
        if not self.can_grow or len(offers) < self.required:
            return None
        try:
            return make_plan(self.needs, offers, self.cost, self.required, self.epoch + 1)
        except NoPlan:
            return None

    def _stages_now(self, available: int, now: float) -> int | None:
        """How many stages the next plan has; raises NoPlan while too few nodes are there."""
        if self.required is None:
            return None
        if available >= self.required:
            return self.required
        changed_at = max(self.incomplete_since or 0.0, self.available_since)
        if self.incomplete_since is not None and now - changed_at >= RECOVERY_GRACE_S:
            return available  # after a loss: whoever is left, if the model fits
        if self.minimum is not None and available >= self.minimum:
            return available
        raise NoPlan(f"{self.required} nodes are required, {available} can be used")

    def adopt(self, plan: Plan) -> None:
        """Puts a plan into use: its nodes load, the others are spares."""
        chosen = [self.nodes[node_id] for node_id in plan.node_ids]
        self.plan, self.epoch, self.incomplete_since, self.possible_since = plan, plan.epoch, None, None
        self.places = in_places(self.places, list(plan.node_ids))
        for node in chosen:
            self.move(node, NodeState.LOADING, f"epoch {plan.epoch}")
        for node in self.nodes.values():
            if node not in chosen and node.state is not NodeState.JOINED:
                self.move(node, NodeState.JOINED, f"epoch {plan.epoch} leaves it out")


# ------------------------------------------------------------------------------
# Checkpoint
# ------------------------------------------------------------------------------
# The model folder: config.json, tokenizer files, safetensors. Weights stay in the memory-mapped files; one tensor at a
# time is converted to its stored form and sent.

HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model"]
HUB_IGNORED = ["*/*"]  # other formats and adapters live in folders
HUB_ANSWER_S = 10.0  # huggingface_hub itself waits for ever where a firewall drops what it sends
CHECKPOINT_DTYPES = {"F32", "F16", "BF16"}
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # derived tables that old checkpoints carry
LISTED_NAMES = 8  # how many missing or unexpected tensors a message names


def resolve_model(model: str, revision: str | None, hf_cache_dir: str | None) -> Path:
    """A local folder, or a hub id whose needed files are downloaded; raises StartupError."""
    folder = os.path.expanduser(model)
    if os.path.isdir(folder):
        return Path(folder)
    looks_like_path = model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1
    if os.path.exists(folder) or looks_like_path:
        advice = "give a folder with config.json, or a hub id like Qwen/Qwen2.5-0.5B-Instruct"
        raise StartupError(f"--model {model}: no such folder; {advice}")
    return _download(model, revision, hf_cache_dir)


def _download(model: str, revision: str | None, hf_cache_dir: str | None) -> Path:
    """The needed files from the hub; from the cache when the hub does not answer. Raises StartupError."""
    unreachable = None
    # What comes out of huggingface_hub has no common root (its own, its HTTP client's, the xet downloader's): whatever
    # it is, it is told in one line.
    try:
        HfApi().model_info(model, revision=revision, timeout=HUB_ANSWER_S)
    except HFValidationError:
        raise StartupError(f"--model {model}: neither a folder here nor a hub id (owner/name)") from None
    except Exception as error:  # noqa: BLE001
        unreachable = error
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=hf_cache_dir,
                allow_patterns=HUB_PATTERNS,
                ignore_patterns=HUB_IGNORED,
                local_files_only=unreachable is not None,
            )
        )
    except Exception as error:  # noqa: BLE001
        cause = unreachable or error
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        raise StartupError(
            f"--model {model}: cannot be downloaded from the hub, and is not in its cache ({reason}). Without network, "
            "give the path of a local folder with config.json, tokenizer.json and *.safetensors"
        ) from None


def read_json(path: Path) -> dict:
    """A JSON object from a file of the model folder; raises StartupError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path}: must hold a JSON object")
    return value


class Checkpoint:
    """The tensors of a model folder, memory-mapped. Opening checks every name, shape and dtype; raises StartupError."""

    def __init__(self, folder: Path):
        if not (folder / "config.json").is_file():
            raise StartupError(f"{folder}: has no config.json; give the folder of a Hugging Face model")
        self.folder = folder
        self.raw_config = read_json(folder / "config.json")
        try:
            self.config = qwen.Config.from_checkpoint(self.raw_config)
        except qwen.UnsupportedModel as error:
            raise StartupError(f"{folder / 'config.json'}: {error}") from None
        self._file_of: dict[str, _TensorFile] = {}
        for name in self._file_names():
            file = _TensorFile(folder / name)
            self._file_of.update(dict.fromkeys(file.tensors.keys(), file))
        self._check()
        self._lock = threading.Lock()
        self._digests: dict[str, bytes] = {}
        self._calibration_ids: list[int] | None = None  # the text that int4 is still to be calibrated on
        self._calibrating = threading.Lock()
        self._importance: dict[str, torch.Tensor] = {}  # of a linear's weight: how much each of its inputs counts
        self._importance_key = ""

    def _file_names(self) -> list[str]:
        if (self.folder / "model.safetensors").is_file():  # comes before an index, as in Transformers
            return ["model.safetensors"]
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            others = sorted(p.name for kind in ("*.bin", "*.gguf", "*.pth") for p in self.folder.glob(kind))
            raise StartupError(
                f"{self.folder}: has neither model.safetensors nor model.safetensors.index.json"
                + (f"; {others[0]} is not supported, only safetensors are" if others else "")
            )
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise StartupError(f"{index}: has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise StartupError(f"{index}: {name!r} is not a file name")
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise StartupError(f"{self.folder}: of {len(names)} shards, missing are {_listed(missing)}")
        return names

    def _check(self) -> None:
        expected = dict(qwen.ends_tensor_shapes(self.config))
        for i in range(self.config.num_hidden_layers):
            expected.update(qwen.layer_tensor_shapes(self.config, i))
        missing = [name for name in expected if name not in self._file_of]
        # A tied checkpoint may carry a copy of the embedding as lm_head.weight: harmless, and not used.
        redundant = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        unexpected = [
            name
            for name in self._file_of
            if name not in expected and name not in redundant and not name.endswith(IGNORED_SUFFIXES)
        ]
        if missing or unexpected:
            raise StartupError(
                f"{self.folder}: the tensors do not fit config.json; "
                f"missing: {_listed(missing)}; unexpected: {_listed(unexpected)}"
            )
        for name, shape in expected.items():
            entry = self._file_of[name].tensors.get_slice(name)
            if tuple(entry.get_shape()) != tuple(shape) or entry.get_dtype() not in CHECKPOINT_DTYPES:
                raise StartupError(
                    f"{self.folder}: {name} is {entry.get_dtype()} {list(entry.get_shape())}, "
                    f"config.json asks for {list(shape)} in {', '.join(sorted(CHECKPOINT_DTYPES))}"
                )

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in the checkpoint's dtype, a view of the mapped file. Raises FileShrunk."""
        file = self._file_of[name]
        file.check()
        return file.tensors.get_tensor(name)

    def key(self, stored: qwen.StoredTensor, weights: qwen.WeightFormat) -> str:
        """SHA-256 over a tensor's source bytes and the recipe that makes its stored form: its name in nodes' caches.

        64 hex digits, the same for the same bytes wherever they stand.
        """
        digest = self._digest(stored.source)
        recipe = (stored.suffix, stored.dtype, list(stored.shape), weights.quant, weights.group_size, weights.dtype)
        recipe_text = json.dumps([*recipe, quant.ALGORITHM_VERSION, self._importance_key])
        return hashlib.sha256(digest + recipe_text.encode()).hexdigest()

    def _digest(self, name: str) -> bytes:
        with self._lock:
            digest = self._digests.get(name)
        if digest is None:
            tensor = self.tensor(name)
            hashed = hashlib.sha256(str(tensor.dtype).encode())  # the same bytes are other numbers in another dtype
            hashed.update(wire.tensor_buffer(tensor))
            digest = hashed.digest()
            with self._lock:
                self._digests[name] = digest
        return digest

    def hash_tensors(self) -> None:
        """Hashes all tensors now, several at a time, so that no node waits for the keys of its layers."""
        with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(self._digest, self._file_of))

    def calibrate(self, token_ids: list[int]) -> None:
        """Has int4 err where it matters least on a short text.

        Keys cover the text and the whole model from now on, because what a layer's inputs are like depends on all
        layers before it. The measuring itself waits for the first tensor that is converted: often none is.
        """
        digests = b"".join(self._digest(name) for name in sorted(self._file_of))
        self._importance_key = hashlib.sha256(json.dumps(token_ids).encode() + digests).hexdigest()
        self._calibration_ids = token_ids

    def finish_calibration(self) -> None:
        """Measures what `calibrate` has put off, unless that is done: a conversion to int4 waits for it."""
        with self._calibrating:
            if self._calibration_ids is not None:
                log.info("finding out which inputs of the layers matter most (int4)")
                self._measure_importance(self._calibration_ids)
                self._calibration_ids = None

    @torch.inference_mode()
    def _measure_importance(self, token_ids: list[int]) -> None:
        """importance[k] = mean square of input k of each linear on a text: the squared error of an output is then the
        error of its weights, weighed by it. Runs the unquantized layers one after another, in blocks from the mapped
        files."""
        unquantized = qwen.WeightFormat("fp16", 64, "fp32")
        rows = len(token_ids)
        segments = [qwen.Segment(0, 0, 0, rows)]
        cos, sin = qwen.Rope(self.config, "cpu").angles(torch.arange(rows))
        hidden_states = self.tensor("model.embed_tokens.weight")[torch.tensor(token_ids)].float()
        for i in range(self.config.num_hidden_layers):
            layer = qwen.DecoderLayer(self.config, i, unquantized, torch.device("cpu"))
            prefix = f"model.layers.{i}."
            for name, norm in layer.norms.items():
                norm.weight.copy_(self.tensor(f"{prefix}{name}.weight"))
            for merged, parts in qwen.LINEARS.items():
                weights = [self.tensor(f"{prefix}{part}.weight") for part in parts]
                biases = [self.tensor(f"{prefix}{part}.bias") for part in parts if part in qwen.BIASED]
                layer.linears[merged] = _CalibratedLinear(weights, biases)
            caches = [layer.new_cache(rows)]
            hidden_states = layer.forward(hidden_states, segments, caches, cos, sin)
            for merged, parts in qwen.LINEARS.items():
                for part in parts:
                    self._importance[f"{prefix}{part}.weight"] = layer.linears[merged].importance

    def stored_parts(
        self, stored: list[qwen.StoredTensor], weights: qwen.WeightFormat
    ) -> Iterator[tuple[qwen.StoredTensor, torch.Tensor]]:
        """The tensors in their stored form, converted one checkpoint tensor at a time, in the order given.

        Raises ValueError, naming the tensor, when one has values that its stored form cannot hold.
        """
        source, parts = None, {}
        for entry in stored:
            if entry.source != source:
                parts = self._convert(entry.source, weights)
                source = entry.source
            yield entry, parts[entry.suffix].contiguous()

    def _convert(self, name: str, weights: qwen.WeightFormat) -> dict[str, torch.Tensor]:
        tensor = self.tensor(name)
        if tensor.dim() == 2:
            if weights.quant == "int4":
                self.finish_calibration()
            try:
                return quant.quantize(
                    tensor, weights.quant, weights.group_size, weights.dtype, self._importance.get(name)
                )
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name}: has NaN or infinite values")
        return {"": tensor.float()}

    def ends(self, weights: qwen.WeightFormat) -> qwen.Ends:
        """Embedding (mapped), final norm and head; in the quantized modes the head is int8 per row.

        Raises StartupError when the head has values that its stored form cannot hold.
        """
        config = self.config
        head_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        head_quant = "fp16" if weights.quant == "fp16" else "int8"
        device = torch.device("cpu")
        try:
            parts = self._convert(head_name, qwen.WeightFormat(head_quant, weights.group_size, weights.dtype))
        except ValueError as error:
            raise StartupError(f"{self.folder}: {error}") from None
        shape = (config.vocab_size, config.hidden_size)
        weight = quant.Weight(*shape, head_quant, weights.group_size, weights.dtype, device)
        for suffix, destination in weight.parts.items():
            destination.copy_(parts.pop(suffix))
        head = quant.Linear(weight, None)
        kernels = quant.choose_kernels([shape], head_quant, weights.group_size, weights.dtype, device)
        head.prepare(kernels.choices[shape])
        quant.release_freed_memory()
        embed_tokens = _MappedRows(self._file_of["model.embed_tokens.weight"], "model.embed_tokens.weight")
        return qwen.Ends(config, weights, embed_tokens, self.tensor("model.norm.weight").clone(), head)


class _CalibratedLinear:
    """Stands in for a quant.Linear: multiplies by mapped checkpoint tensors and notes the mean square of its inputs."""

    ROWS = 1024  # of a weight that are fp32 at a time

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor]):
        self.weights = weights
        self.bias = torch.cat(biases).float() if biases else None
        self.importance: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.square().mean(dim=0)
        self.importance = mean_square + 1e-6 * mean_square.max() + 1e-30  # never 0: no input may be free to err
        blocks = [x @ block.float().T for weight in self.weights for block in weight.split(self.ROWS)]
        y = torch.cat(blocks, dim=1)
        return y if self.bias is None else y + self.bias


class FileShrunk(ValueError):
    """A file of the model has become shorter since it was opened; the message names it and says what to do."""


class _TensorFile:
    """A memory-mapped safetensors file (`tensors`) and how long it was when its header was checked."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = path.open("rb")  # the mapped file itself, whatever its name stands for later
            self._nbytes = os.fstat(self._file.fileno()).st_size
            self.tensors = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{path}: not a complete safetensors file ({error}); download it again") from None

    def check(self) -> None:
        """To be called before the file is read: whoever reads mapped bytes that are gone is ended by a SIGBUS."""
        nbytes = os.fstat(self._file.fileno()).st_size
        if nbytes < self._nbytes:
            raise FileShrunk(
                f"{self.path}: had {self._nbytes} bytes and has {nbytes} now, while it is in use; "
                "put the whole file there and start the coordinator again"
            )


class _MappedRows:
    """A tensor whose rows are read from the mapped file whenever they are asked for."""

    def __init__(self, file: _TensorFile, name: str):
        self._file = file
        self.tensor = file.tensors.get_tensor(name)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        self._file.check()
        return self.tensor[rows]


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return f"{len(names)} ({', '.join(names[:LISTED_NAMES])}{more})"


# ------------------------------------------------------------------------------
# Links
# ------------------------------------------------------------------------------
# One NodeLink per connected node (a reader thread and a writer thread), one Pipeline per plan (which stage follows
# which), one Controller (accepts nodes, makes plans, sends weights). Readers never wait for another link's socket: they
# put frames into its writer's queue.

HEARTBEAT_S = 2.0
OLD_LINK_ANSWER_S = 2.0  # how long a link may stay silent before a newcomer of the same id replaces it
GROW_LIMIT_S = 60.0  # how long a plan that lost nodes waits for an idle moment to spread over those that are back
MAX_STRANGERS = 64  # connections that are no nodes yet
REFUSALS_LOGGED, REFUSALS_PERIOD_S = 5, 10.0  # so many refused connections have a line of their own in such a time
LINK_PINGS = 5  # of a node that has just measured and is idle; their median is the link's time in a plan
TIMED_PASSES = 64  # the measured times are medians over so many of the last passes
# A node that still answers PING but not what it was asked is given up, and may join again.
ANSWER_LIMIT_S = {"MEASURED": 60.0, "WEIGHTS_WANTED": 120.0, "LOAD_COMPLETE": 300.0, "HIDDEN_STATE": 120.0}
SLOWEST_CACHE = 20e6  # bytes per second at which a node reads its cached weights, at least
MAX_ASKS = 3  # WEIGHTS_WANTED of one load: what the node lacks, and what it has found damaged in its cache


class RefusalLog:
    """Says why connections did not become nodes: the first of a period one by one, the others as their number."""

    def __init__(self):
        self._lock = threading.Lock()
        self._period_start = float("-inf")
        self._count = 0

    def add(self, peer: str, why: str, now: float) -> None:
        """One more refused connection at `now` (seconds of time.monotonic)."""
        with self._lock:
            self._end_period(now)
            self._count += 1
            if self._count <= REFUSALS_LOGGED:
                log.warning("a connection from %s did not become a node: %s", peer, why)

    def flush(self, now: float) -> None:
        """To be called now and then, so that the number is told even when nobody comes any more."""
        with self._lock:
            self._end_period(now)

    def _end_period(self, now: float) -> None:
        seconds = now - self._period_start
        if seconds < REFUSALS_PERIOD_S:
            return
        if self._count > REFUSALS_LOGGED:
            more = self._count - REFUSALS_LOGGED
            log.warning("and %d more connections did not become nodes in the last %.0f s", more, seconds)
        self._period_start, self._count = now, 0


class NodeLink:
    """One accepted connection to a node: its writer, what it was asked, and when it last answered."""

    def __init__(self, connection: wire.Connection, node_id: str):
        self.connection = connection
        self.node_id = node_id
        self.writer = wire.Writer(connection, HEARTBEAT_S)
        # (epoch, names) from WEIGHTS_WANTED, (epoch, None) when the stage is loaded, None when the link is gone
        self.wanted: queue.Queue = queue.Queue()
        self.dropped_frames = 0  # of plans that are gone
        self.cache_changes = 0  # CLEAR_CACHE and COPY_CACHE sent, of which it has not said that they failed
        self.rtt_ms = 0.0  # of a PING, the median of the last ones
        self.pinged_at: float | None = None
        self._pings_left = 0
        self._round_trips: deque[float] = deque(maxlen=LINK_PINGS)
        self.answered_at = 0.0  # when its last HIDDEN_STATE came
        self.measured: dict | None = None  # MEASURED's payload, until the link has been measured too
        # The message that must come next, when it is late, and of which epoch it is (None: of none).
        self.awaited: tuple[str, float, int | None] | None = None

    @property
    def measuring(self) -> bool:
        return self.awaited is not None and self.awaited[0] == "MEASURED"

    def expect(self, type: str, epoch: int | None = None, extra_s: float = 0.0) -> None:
        """Notes what the node owes from now on: ANSWER_LIMIT_S and extra_s later it is given up."""
        self.awaited = (type, time.monotonic() + ANSWER_LIMIT_S[type] + extra_s, epoch)

    def ping(self, times: int = 1) -> None:
        """Sends a PING, and after its answer the next, so many times."""
        self._pings_left = times - 1
        self.pinged_at = time.monotonic()
        self.writer.put("PING", {}, urgent=True)

    def on_pong(self) -> bool:
        """Notes how long a PING of ours took; returns whether it was the last of its series."""
        if self.pinged_at is None:
            return False  # the answer to a heartbeat of the writer's
        self._round_trips.append((time.monotonic() - self.pinged_at) * 1e3)
        self.rtt_ms = statistics.median(self._round_trips)
        self.pinged_at = None
        if self._pings_left:
            self.ping(self._pings_left)
            return False
        return True

    def close(self) -> None:
        self.wanted.put(None)
        self.writer.close()
        self.connection.close()


@dataclass
class Pass:
    """Rows on their way through all stages. `owner` is the engine's: what the rows mean."""

    request_id: int
    kind: str  # RUN_PREFILL or RUN_DECODE
    slots: list[int]
    positions: list[int]
    keep: int
    kept_rows: int  # what the last stage returns
    owner: object
    stage: int = 0
    sent_at: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.monotonic)
    # One token that has found every stage so far idle: what it takes can be compared with what was predicted.
    is_timed: bool = True
    not_finite: str | None = None  # the first node whose hidden states were no finite numbers


class TokenTimer:
    """Times one token in each stage of a plan, on its link and in all: medians over the last passes of one token that
    had to wait for no other. They are only shown (MeasuredTimes).

    Readers add, each for its own stage; anyone may ask.
    """

    def __init__(self, stages: int):
        self._compute = [deque(maxlen=TIMED_PASSES) for _ in range(stages)]
        self._link = [deque(maxlen=TIMED_PASSES) for _ in range(stages)]
        self._token = deque(maxlen=TIMED_PASSES)

    def add_stage(self, stage: int, round_trip_ms: float, compute_ms: float) -> None:
        """One stage's time, of which compute_ms were the node's own."""
        self._compute[stage].append(compute_ms)
        self._link[stage].append(max(0.0, round_trip_ms - compute_ms))

    def add_token(self, milliseconds: float) -> None:
        """The time through all stages, whose own have been added before."""
        self._token.append(milliseconds)

    def medians(self, node_ids: tuple[str, ...]) -> MeasuredTimes:
        """node_ids: of the stages, in order."""
        passes = list(self._token)
        if not passes:
            return NOT_MEASURED
        stage_ms, link_ms = (
            {node_id: statistics.median(list(times)) for node_id, times in zip(node_ids, all_times)}
            for all_times in (self._compute, self._link)
        )
        return MeasuredTimes(stage_ms, link_ms, statistics.median(passes), len(passes))


class Pipeline:
    """The links of one plan in order, and the passes in flight between them.

    deliver(pass, hidden_states or None, error or None) is called, in a reader's thread, when a pass is over.
    """

    def __init__(self, epoch: int, links: list[NodeLink], hidden_size: int, wire_dtype: str, deliver: Callable):
        self.epoch = epoch
        self.links = links
        self.hidden_size = hidden_size
        self.wire_dtype = wire_dtype
        self.timer = TokenTimer(len(links))
        self.forecasts: list[StageForecast] = []  # of the stages, known before the first pass
        self._deliver = deliver
        self._lock = threading.Lock()
        self._passes: dict[int, Pass] = {}
        self._next_id = 1

    def send(self, kind, hidden_states: torch.Tensor, slots, positions, keep: int, kept_rows: int, owner) -> Pass:
        """Starts a pass with [R, H] fp32; its result comes through `deliver`."""
        with self._lock:
            request = Pass(self._next_id, kind, slots, positions, keep, kept_rows, owner)
            self._next_id += 1
            self._passes[request.request_id] = request
        self._run(request, wire.pack_hidden_states(hidden_states, self.wire_dtype))
        return request

    def late_links(self, now: float) -> list[NodeLink]:
        """Links that have not answered a pass for too long."""
        with self._lock:
            passes = list(self._passes.values())

        def is_late(request: Pass) -> bool:  # stages answer in order, so a pass counts from the answer before it
            link = self.links[request.stage]
            forecast_s = self.forecasts[request.stage].ms(len(request.slots)) / 1e3
            limit = max(ANSWER_LIMIT_S["HIDDEN_STATE"], 20 * forecast_s)
            return now - max(request.sent_at, link.answered_at) > limit

        late_stages = {request.stage for request in passes if is_late(request)}
        return [self.links[stage] for stage in sorted(late_stages)]

    def control(self, type: str, payload: dict) -> None:
        """CLEAR_CACHE or COPY_CACHE to all stages, in order with the passes."""
        for link in self.links:
            with self._lock:
                link.cache_changes += 1
            link.writer.put(type, payload, epoch=self.epoch)

    def _run(self, request: Pass, raw) -> None:
        rows = len(request.slots)
        last = request.stage == len(self.links) - 1
        payload = {
            "slots": request.slots,
            "positions": request.positions,
            "keep": request.keep if last else rows,
            "shape": self._shape(request.kind, rows),
            "dtype": self.wire_dtype,
        }
        with self._lock:
            is_alone = sum(other.stage == request.stage for other in self._passes.values()) == 1
        request.is_timed = request.is_timed and is_alone and request.kind == "RUN_DECODE" and rows == 1
        request.sent_at = time.monotonic()
        writer = self.links[request.stage].writer
        writer.put(request.kind, payload, raw=raw, request_id=request.request_id, epoch=self.epoch)

    def _shape(self, kind: str, rows: int) -> list[int]:
        return [rows, 1, self.hidden_size] if kind == "RUN_DECODE" else [1, rows, self.hidden_size]

    def expected(self, link: NodeLink, frame: wire.Frame) -> Pass:
        """The pass that a HIDDEN_STATE answers; raises BadFrame when it answers none, or with another shape."""
        request = self._passes.get(frame.request_id)
        if request is None or self.links[request.stage] is not link:
            raise link.connection.bad_frame(f"HIDDEN_STATE for pass {frame.request_id}, which it was not asked for")
        last = request.stage == len(self.links) - 1
        shape = self._shape(request.kind, request.kept_rows if last else len(request.slots))
        if frame.payload["shape"] != shape or frame.payload["dtype"] != self.wire_dtype:
            raise link.connection.bad_frame(
                f"HIDDEN_STATE {frame.payload['shape']} in {frame.payload['dtype']}, "
                f"expected {shape} in {self.wire_dtype}"
            )
        return request

    def on_hidden_state(self, link: NodeLink, frame: wire.Frame) -> None:
        """Hands a stage's output to the next stage, or the last one's to the engine."""
        request = self.expected(link, frame)
        link.answered_at = time.monotonic()
        if request.is_timed:
            round_trip_ms = (link.answered_at - request.sent_at) * 1e3
            self.timer.add_stage(request.stage, round_trip_ms, frame.payload["compute_ms"])
        last = request.stage == len(self.links) - 1
        raw = b"" if frame.raw is None else frame.raw
        rows = request.kept_rows if last else len(request.slots)
        hidden_states = wire.unpack_hidden_states(raw, rows, self.hidden_size, self.wire_dtype)
        if request.not_finite is None and not math.isfinite(wire.largest_magnitude(hidden_states)):
            request.not_finite = link.node_id
        if not last:
            request.stage += 1
            self._run(request, frame.raw)
            return
        if request.is_timed:
            self.timer.add_token((link.answered_at - request.started_at) * 1e3)
        with self._lock:
            del self._passes[request.request_id]
        self._deliver(request, hidden_states, None)

    def on_inference_error(self, link: NodeLink, frame: wire.Frame) -> None:
        with self._lock:
            request = self._passes.get(frame.request_id)
            of_cache = request is None and frame.request_id == wire.NO_PASS and link.cache_changes > 0
            if not of_cache and (request is None or self.links[request.stage] is not link):
                raise link.connection.bad_frame(f"INFERENCE_ERROR for pass {frame.request_id}, which it does not hold")
            link.cache_changes -= of_cache
            self._passes.pop(frame.request_id, None)
        reason = f"node {link.node_id}: {frame.payload['code']}: {frame.payload['message']}"
        log.error("%s", reason)
        if request is not None:
            self._deliver(request, None, reason)


@contextlib.contextmanager
def share_of_cores(cores: int, threads: int) -> Iterator[None]:
    """Gives torch's calls in this thread their share of the cores, when so many threads compute at once.

    Threads that each use all cores wait for one another at every step: quantizing for two stages took a third longer.
    """
    torch.set_num_threads(max(1, cores // threads))
    try:
        yield
    finally:
        torch.set_num_threads(cores)


@dataclass(frozen=True)
class ModelOnWire:
    """What ASSIGNMENT says about the model, the same for every node."""

    model_id: str
    weights: qwen.WeightFormat
    wire_dtype: str


class Controller:
    """Keeps the cluster: accepts nodes, has them measure, makes plans, sends weights, and tells the engine.

    Thread rule: `_changed` (a Condition) guards `cluster`, `pipeline` and `_strangers`. Readers, loaders and the
    planning thread take it for moments only; nothing is sent or computed while it is held.
    """

    def __init__(self, checkpoint: Checkpoint, model: ModelOnWire, cluster: ClusterState, key: bytes | None):
        self.checkpoint = checkpoint
        self.model = model
        self.cluster = cluster
        self.key = key
        self.pipeline: Pipeline | None = None
        self.on_ready: Callable[[Pipeline, Plan], None] = lambda pipeline, plan: None
        self.on_lost: Callable[[int, str], None] = lambda epoch, why: None  # these two with `_changed` held
        self.on_replaced: Callable[[int, str], None] = lambda epoch, why: None
        self.deliver: Callable = lambda request, hidden_states, error: None
        self.is_idle: Callable[[], bool] = lambda: True
        self.why_no_plan = ""
        self.api_port: int | None = None  # for whoever mistakes the node port for it
        self._may_measure = False
        self._cores = torch.get_num_threads()
        self._could_grow_since: float | None = None
        self._changed = threading.Condition()
        self._strangers: dict[wire.Connection, str] = {}  # connections that are no nodes yet, oldest first, and whence
        self._refusals = RefusalLog()
        self._stopping = False
        self._server: socket.socket | None = None
        self._bar = None

    # -- life ----------------------------------------------------------------------------------------------------------

    def listen(self, host: str, port: int) -> int:
        """Opens the node port; returns the port (0 picks a free one). Nodes wait until `start`. Raises StartupError."""
        try:
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            # In a full backlog a good node's packet is dropped too, and its system tries again only after a second.
            self._server = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            reason = str(error.strerror or error).partition(" (while attempting")[0]  # Python names the address again
            raise StartupError(f"cannot listen on {host} port {port} (--node-host, --node-port): {reason}") from None
        return self._server.getsockname()[1]

    def start(self) -> None:
        """Accepts nodes and makes plans from now on."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        threading.Thread(target=self._plan_forever, name="planner", daemon=True).start()

    def allow_measuring(self) -> None:
        """Nodes may measure from now on: this machine's own start-up work is done and does not spoil their figures."""
        with self._changed:
            self._may_measure = True
            self._changed.notify_all()

    def begin_to_stop(self) -> None:
        """Closes the node port; nodes that end from now on are not missed."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._server is not None:
            self._server.close()

    def stop(self) -> None:
        """Closes the node port and all links."""
        self.begin_to_stop()
        with self._changed:
            links = [node.link for node in self.cluster.nodes.values()]
        for link in links:
            link.close()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, address = self._server.accept()
            except OSError as error:
                if self._stopping:
                    return
                self._refusals.add("somewhere", f"it could not be accepted: {error}", time.monotonic())
                time.sleep(0.1)  # out of file descriptors, most likely: let some connections end
                continue
            peer = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
            self.welcome(sock, peer, address[0])

    # -- one connection (its own thread) -------------------------------------------------------------------------------

    def welcome(self, sock: socket.socket, peer: str, host: str) -> None:
        """Takes a new connection, which becomes a node or is refused, in a thread of its own.

        Nobody can keep nodes out by connecting and saying nothing: above MAX_STRANGERS the oldest connection of the
        address that has most has to go.
        """
        connection = wire.Connection(sock, peer, "coordinator")
        with self._changed:
            evicted = self._evicted_stranger()
            self._strangers[connection] = host
        if evicted is not None:
            evicted.close("it has not become a node yet and made room for a newer connection")
        try:
            args = (connection, peer, host)
            threading.Thread(target=self._serve_link, args=args, name=f"link {peer}", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads; the accepting one must not end with it
            log.error("%s: no thread to serve this connection: %s", peer, error)
            self._no_stranger(connection)
            connection.close()

    def _evicted_stranger(self) -> wire.Connection | None:
        """(`_changed` held) Takes one out when there is no room for another."""
        if len(self._strangers) < MAX_STRANGERS:
            return None
        hosts = list(self._strangers.values())
        busiest = max(hosts, key=hosts.count)
        oldest = next(connection for connection, host in self._strangers.items() if host == busiest)
        del self._strangers[oldest]
        return oldest

    def _no_stranger(self, connection: wire.Connection) -> None:
        with self._changed:
            self._strangers.pop(connection, None)

    def _serve_link(self, connection: wire.Connection, peer: str, host: str) -> None:
        try:
            hello = wire.coordinator_handshake(connection, self.key, HEARTBEAT_S, self._admit)
        except (wire.BadFrame, wire.PeerClosed, wire.PeerSilent, wire.Refused) as error:
            hint = ""
            if isinstance(error, wire.OtherProtocol) and self.api_port is not None:
                hint = f"; this is the node port, the HTTP API is on port {self.api_port}"
            self._refusals.add(peer, f"{error}{hint}", time.monotonic())
            connection.close()
            return
        finally:
            self._no_stranger(connection)
        connection.peer = f"{hello['node_id']} ({peer})"
        link = NodeLink(connection, hello["node_id"])
        node = NodeRecord(hello["node_id"], hello, host, link)
        link.writer.start()
        try:
            with self._changed:
                self.cluster.join(node)
                self._changed.notify_all()
        except ValueError as error:  # another connection of the same id was quicker
            log.warning("%s: %s", peer, error)
            link.close()
            return
        self._read_until_it_ends(link, node)

    def _read_until_it_ends(self, link: NodeLink, node: NodeRecord) -> None:
        handlers = {
            "PING": lambda frame: link.writer.put("PONG", {"busy_ms": 0}, urgent=True),
            "PONG": lambda frame: self._on_pong(node),
            "ERROR": lambda frame: self._on_error(link, frame),
            "MEASURED": lambda frame: self._on_measured(node, frame),
            "WEIGHTS_WANTED": lambda frame: self._on_weights_wanted(link, frame),
            "LOAD_COMPLETE": lambda frame: self._on_load_complete(node, frame),
            "LOAD_FAILED": lambda frame: self._on_load_failed(node, frame),
            "HIDDEN_STATE": lambda frame: self._on_hidden_state(link, frame),
            "INFERENCE_ERROR": lambda frame: self._on_inference_error(node, frame),
        }
        why = "its reader failed"  # stays so only for a bug of ours, whose traceback is in the log
        try:
            link.ping()
            while True:
                frame = link.connection.recv(lambda frame, nbytes: self._place(link, frame, nbytes))
                if self._is_current(link, frame):
                    handlers[frame.type](frame)
                else:
                    link.dropped_frames += 1
        except (wire.BadFrame, wire.PeerClosed, wire.PeerSilent) as error:
            why = str(error)
        finally:
            link.close()
            self._lose(node, why)

    def _is_current(self, link: NodeLink, frame: wire.Frame) -> bool:
        if frame.epoch is None or frame.type == "MEASURED":
            return True
        if frame.epoch > self.cluster.epoch:
            raise link.connection.bad_frame(f"{frame.type} of epoch {frame.epoch}; the plan is {self.cluster.epoch}")
        return frame.epoch == self.cluster.epoch and self.cluster.plan is not None

    def _place(self, link: NodeLink, frame: wire.Frame, nbytes: int) -> memoryview | None:
        pipeline = self.pipeline
        if not self._is_current(link, frame) or pipeline is None or frame.epoch != pipeline.epoch:
            return None
        pipeline.expected(link, frame)
        return memoryview(bytearray(nbytes))

    def _admit(self, hello: dict) -> None:
        """Refuses a second live node of the same id; replaces a link that is closed, silent or of the same process."""
        with self._changed:
            if self._stopping:
                raise wire.Refused("not_admitted", "the coordinator is shutting down")
            old = self.cluster.nodes.get(hello["node_id"])
        if old is None:
            return
        asked_at = time.monotonic()
        if old.hello["instance"] != hello["instance"]:
            old.link.ping()
            while time.monotonic() - asked_at < OLD_LINK_ANSWER_S:
                if old.link.connection.last_received > asked_at:
                    raise wire.Refused(
                        "duplicate_node_id",
                        f"a node with the id {hello['node_id']} is connected from {old.host}; "
                        "give this one another --node-id",
                    )
                if old.state is NodeState.LOST:
                    return
                time.sleep(0.02)
        self._lose(old, "replaced by a new connection of the same node")  # first: its reader will only see it closed
        old.link.close()

    # -- what nodes report ---------------------------------------------------------------------------------------------

    def _on_error(self, link: NodeLink, frame: wire.Frame) -> None:
        raise link.connection.bad_frame(f"it gives up: {frame.payload['code']}: {frame.payload['message']}")

    def _take_answer(self, link: NodeLink, frame: wire.Frame, or_of: str | None = None) -> bool:
        """(`_changed` held) Notes that what a node owed has come; False: its plan is gone. BadFrame: it was not asked.

        or_of: another message that this one may come in place of.
        """
        if not self._is_current(link, frame):
            return False
        if (
            link.awaited is None
            or link.awaited[0] not in (frame.type, or_of)
            or link.awaited[2] not in (None, frame.epoch)
        ):
            raise link.connection.bad_frame(f"{frame.type}, which it was not asked for")
        link.awaited = None
        return True

    def _on_measured(self, node: NodeRecord, frame: wire.Frame) -> None:
        payload = frame.payload
        with self._changed:
            if not node.link.measuring or node.link.measured is not None:
                raise node.link.connection.bad_frame("MEASURED, which it was not asked for")
            node.link.measured = payload
        log.info(
            "node %s: %.2f ms per layer and token, kernels %s",
            node.node_id,
            payload["layer_ms"]["1"],
            kernels_in_words(payload["kernels"]),
        )
        node.link.ping(LINK_PINGS)  # now that it is idle: what a message there and back takes

    def _on_pong(self, node: NodeRecord) -> None:
        link = node.link
        if not link.on_pong() or link.measured is None:
            return
        with self._changed:
            node.measured, link.measured = link.measured, None
            node.asked_at = link.awaited = None
            self._changed.notify_all()

    def _on_weights_wanted(self, link: NodeLink, frame: wire.Frame) -> None:
        with self._changed:
            # again, instead of LOAD_COMPLETE, for what the node has found damaged in its cache
            if self._take_answer(link, frame, "LOAD_COMPLETE"):
                link.wanted.put((frame.epoch, frame.payload["names"]))

    def _on_load_complete(self, node: NodeRecord, frame: wire.Frame) -> None:
        with self._changed:
            if not self._take_answer(node.link, frame):
                return
            self.cluster.move(node, NodeState.READY, _loaded_in_words(frame.payload))
            node.link.wanted.put((frame.epoch, None))
            ready, pipeline, plan = self.cluster.is_ready, self.pipeline, self.cluster.plan
            self._changed.notify_all()
        if ready:
            self._close_bar()
            self.on_ready(pipeline, plan)
            quant.release_freed_memory()  # what converting left behind

    def _on_load_failed(self, node: NodeRecord, frame: wire.Frame) -> None:
        reason = frame.payload["reason"]
        with self._changed:
            if not self._is_current(node.link, frame):
                return
            if node.state is not NodeState.LOADING:
                raise node.link.connection.bad_frame("LOAD_FAILED, but it is not loading")
            node.link.awaited = None
            log.error("node %s could not load: %s", node.node_id, reason)
            self.cluster.load_failed(node, reason, frame.payload["have_bytes"], time.monotonic())
            self._after_trouble(f"node {node.node_id} could not load: {reason}")

    def _on_hidden_state(self, link: NodeLink, frame: wire.Frame) -> None:
        pipeline = self.pipeline
        if pipeline is not None and pipeline.epoch == frame.epoch:
            pipeline.on_hidden_state(link, frame)

    def _on_inference_error(self, node: NodeRecord, frame: wire.Frame) -> None:
        pipeline = self.pipeline
        if pipeline is None or pipeline.epoch != frame.epoch:
            return
        pipeline.on_inference_error(node.link, frame)
        if frame.payload["code"] == "out_of_memory":
            self._ran_out_of_memory(node, frame)

    def _ran_out_of_memory(self, node: NodeRecord, frame: wire.Frame) -> None:
        why = frame.payload["message"]
        with self._changed:
            if not self._is_current(node.link, frame) or self.cluster.plan is None:
                return
            self.cluster.ran_out_of_memory(node, why, time.monotonic())
            self._after_trouble(f"node {node.node_id} ran out of memory: {why}")

    def _lose(self, node: NodeRecord, why: str) -> None:
        with self._changed:
            if node.state is NodeState.LOST or self._stopping:
                return
            self.cluster.lose(node, why, time.monotonic())
            self._after_trouble(f"node {node.node_id} is lost: {why}")

    def _after_trouble(self, why: str) -> None:
        """(`_changed` held) If what has happened made the plan void: drops its pipeline, and tells the engine."""
        if self.cluster.plan is None:
            self.pipeline = None
            self.on_lost(self.cluster.epoch, why)
        self._changed.notify_all()

    # -- plans (the planning thread) -----------------------------------------------------------------------------------

    def _plan_forever(self) -> None:
        while not self._stopping:
            try:
                self._plan_once()
            except Exception:  # a bug of ours; without this thread no node would ever be used again
                log.exception("planning failed")
                time.sleep(1.0)

    def _plan_once(self) -> None:
        with self._changed:
            late = self._late_links(time.monotonic())
            to_measure = self._grant_measurements()
            planned = self._next_plan() or self._grown_plan(time.monotonic())
            if planned is None and not to_measure and not self._stopping:
                self._changed.wait(timeout=1.0)
        self._refusals.flush(time.monotonic())
        for link, what in late:
            log.error("node %s: no %s in time; its connection is closed", link.node_id, what)
            link.connection.close(f"no {what} in time")
        for node in to_measure:
            self._ask_to_measure(node)
        if planned is not None:
            self._start_loading(*planned)

    def _late_links(self, now: float) -> list[tuple[NodeLink, str]]:
        """Links that owe an answer for too long, with its name."""
        current = (None, self.cluster.epoch if self.cluster.plan is not None else None)
        late = []
        for node in self.cluster.nodes.values():
            awaited = node.link.awaited
            if awaited is not None and now > awaited[1] and awaited[2] in current:
                late.append((node.link, awaited[0]))
        if self.pipeline is not None:
            late += [(link, "HIDDEN_STATE") for link in self.pipeline.late_links(now)]
        return late

    def _grant_measurements(self) -> list[NodeRecord]:
        """Nodes that may measure now: one per host at a time, so that neighbours do not spoil each other's figures.

        A name alone makes no neighbour, and one that says nothing for long does not hold up the others.
        """
        if not self._may_measure:
            return []
        now = time.monotonic()
        measuring = [node for node in self.cluster.nodes.values() if node.link.measuring]
        busy = {(node.host, node.hello["hostname"]) for node in measuring if not node.is_silent(now)}
        granted = []
        for node in self.cluster.to_measure(now):
            host = node.host, node.hello["hostname"]
            if not node.link.measuring and host not in busy:
                node.link.expect("MEASURED")
                node.asked_at = now
                busy.add(host)
                granted.append(node)
        return granted

    def _ask_to_measure(self, node: NodeRecord) -> None:
        weights = self.model.weights
        payload = {
            "config": self.checkpoint.config.to_wire(),
            "quant": weights.quant,
            "group_size": weights.group_size,
            "compute_dtype": weights.dtype,
            "kernels": self.cluster.known_kernels(node),
        }
        node.link.writer.put("MEASURE", payload)

    def _next_plan(self) -> tuple[Plan, Pipeline] | None:
        """The next plan, adopted, and its pipeline; None when there is none to make. Logs why, once, when stuck."""
        try:
            plan = self.cluster.next_plan(time.monotonic())
        except NoPlan as error:
            if str(error) != self.why_no_plan:
                log.warning("no plan: %s", error)
            self.why_no_plan = str(error)
            return None
        self.why_no_plan = ""
        return None if plan is None else self._adopt(plan)

    def _grown_plan(self, now: float) -> tuple[Plan, Pipeline] | None:
        """A larger plan when nodes are back: at the next idle moment, at the latest after GROW_LIMIT_S."""
        plan = self.cluster.larger_plan(now)
        if plan is None:
            self._could_grow_since = None
            return None
        if self._could_grow_since is None:
            self._could_grow_since = now
        if not self.is_idle() and now - self._could_grow_since < GROW_LIMIT_S:
            return None
        self._could_grow_since = None
        self.on_replaced(self.cluster.epoch, "nodes are back, and the layers are spread over them again")
        return self._adopt(plan)

    def _adopt(self, plan: Plan) -> tuple[Plan, Pipeline]:
        self.cluster.adopt(plan)
        links = [self.cluster.nodes[node_id].link for node_id in plan.node_ids]
        config = self.checkpoint.config
        self.pipeline = Pipeline(plan.epoch, links, config.hidden_size, self.model.wire_dtype, self._deliver)
        self.pipeline.forecasts = [self._forecast(stage) for stage in plan.stages]
        return plan, self.pipeline

    def _forecast(self, stage: StagePlan) -> StageForecast:
        node = self.cluster.nodes[stage.node_id]
        layers_ms = {rows: stage.layers * ms for rows, ms in node.measured["layer_ms"].items()}
        # a node that has one thread has, as a rule, a core of its own
        machine = node.node_id if node.measured["kernels"]["threads"] == 1 else node.memory_pool
        return StageForecast(layers_ms, stage.link_ms, machine)

    def _deliver(self, request: Pass, hidden_states: torch.Tensor | None, error: str | None) -> None:
        self.deliver(request, hidden_states, error)

    def _start_loading(self, plan: Plan, pipeline: Pipeline) -> None:
        with self._changed:
            devices = {node.node_id: node.hello["selected_device"] for node in self.cluster.nodes.values()}
            offers = self.cluster.offers()
        log.info("epoch %d, plan:\n%s", plan.epoch, plan_table(plan, devices), extra={"own_lines": True})
        self._compare(plan, offers)
        self._close_bar()
        stored = [
            qwen.stored_tensors(self.checkpoint.config, stage.start, stage.end, self.model.weights)
            for stage in plan.stages
        ]
        for link, stage, tensors in zip(pipeline.links, plan.stages, stored):
            name = f"load {stage.node_id}"
            args = (link, plan.epoch, stage, tensors, len(plan.stages))
            threading.Thread(target=self._load, args=args, name=name, daemon=True).start()

    def _compare(self, plan: Plan, offers: list[NodeOffer]) -> None:
        """Finds out what the other costs would have given, and whether the user should know."""
        needs, cluster = self.cluster.needs, self.cluster
        required = None if cluster.required is None else len(plan.stages)
        plans = possible_plans(needs, offers, required, cluster.minimum or 1)
        advice = plan_advice(needs, offers, plan, plans, cluster.local)
        with self._changed:
            if cluster.plan is plan:  # else it is void by now, and there is nothing to compare
                cluster.plans, cluster.advice = plans, advice
        others = {cost: other for cost, other in plans.items() if cost != cluster.cost}
        log.info("epoch %d, by --plan %s; others would give: %s", plan.epoch, cluster.cost, plans_in_words(others))

    def _extend_bar(self, nbytes: int) -> None:
        """Counts bytes that are about to be sent into the progress bar, which begins with the first of them."""
        with self._changed:
            if self._bar is None and nbytes:
                self._bar = tqdm(total=0, unit="B", unit_scale=True, desc="sending weights", disable=None)
            if self._bar is not None:
                self._bar.total += nbytes
                self._bar.refresh()

    def _close_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    # -- sending weights (one thread per node) -------------------------------------------------------------------------

    def _load(self, link: NodeLink, epoch: int, stage: StagePlan, tensors: list[qwen.StoredTensor], loads: int) -> None:
        """Brings one stage to its node, while `loads` threads do so for theirs."""
        try:
            if not self._expect_of_plan(link, "WEIGHTS_WANTED", epoch):
                return
            link.writer.put("ASSIGNMENT", self._assignment(stage, tensors), epoch=epoch, wait=True)
            asks = 0
            while (wanted := self._wait_for_wanted(link, epoch)) is not None:
                asks += 1
                if asks > MAX_ASKS:
                    raise link.connection.bad_frame(
                        f"it asks for weights again and again, {asks} times in one load; if its disk or its memory "
                        "damages them, start it with --cache-gb 0"
                    )
                unknown = wanted - {tensor.name for tensor in tensors}
                if unknown:
                    raise link.connection.bad_frame(f"it wants {min(unknown)!r}, which is not its own")
                if wanted:
                    self.checkpoint.finish_calibration()  # with all cores, before the loads share them
                with share_of_cores(self._cores, loads):
                    sent = self._send_weights(link, epoch, [tensor for tensor in tensors if tensor.name in wanted])
                cached_s = (stage.weight_bytes - sent) / SLOWEST_CACHE
                if not self._expect_of_plan(link, "LOAD_COMPLETE", epoch, cached_s):
                    return
                complete = {"tensor_count": len(wanted), "total_weight_bytes": sent}
                link.writer.put("WEIGHTS_COMPLETE", complete, epoch=epoch, wait=True)
        except (wire.PeerClosed, wire.PeerSilent) as error:
            log.debug("loading %s stopped: %s", link.node_id, error)  # its reader reports the loss
        except wire.BadFrame as error:
            log.error("%s", error)
            link.connection.close("its WEIGHTS_WANTED is refused")
        except ValueError as error:  # a weight that its stored form cannot hold
            log.error("the weights for %s cannot be converted: %s", link.node_id, error)
            with self._changed:
                self.cluster.void_plan(str(error), time.monotonic())
                self.cluster.refuse(str(error))
                self._after_trouble(str(error))
        except Exception as error:  # a bug of ours, or no memory to convert in: the plan would wait for ever
            log.exception("loading %s failed", link.node_id)
            link.connection.close(f"its weights could not be sent: {error!r}")

    def _expect_of_plan(self, link: NodeLink, type: str, epoch: int, extra_s: float = 0.0) -> bool:
        """Notes what a node will owe; False when the plan is gone by now, so that nothing of it may be asked."""
        with self._changed:
            if self.cluster.epoch != epoch or self.cluster.plan is None:
                return False
            link.expect(type, epoch, extra_s)
            return True

    def _wait_for_wanted(self, link: NodeLink, epoch: int) -> set[str] | None:
        """The names that a node asks for; None when it asks for no more: it is loaded or gone, or the plan is."""
        while True:
            try:
                answer = link.wanted.get(timeout=1.0)
            except queue.Empty:
                if self.cluster.epoch != epoch or self.cluster.plan is None:
                    return None
                continue
            if answer is None or self.cluster.epoch != epoch:
                link.wanted.put(answer)  # the thread of a newer plan may be waiting for it
                return None
            if answer[0] == epoch:
                return None if answer[1] is None else set(answer[1])

    def _assignment(self, stage: StagePlan, tensors: list[qwen.StoredTensor]) -> dict:
        weights, needs = self.model.weights, self.cluster.needs
        manifest = [
            {
                "tensor_name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "nbytes": tensor.nbytes,
                "key": self.checkpoint.key(tensor, weights),
            }
            for tensor in tensors
        ]
        return {
            "model_id": self.model.model_id,
            "architecture": "Qwen2ForCausalLM",
            "quant": weights.quant,
            "group_size": weights.group_size,
            "compute_dtype": weights.dtype,
            "wire_dtype": self.model.wire_dtype,
            "layer_start": stage.start,
            "layer_end_exclusive": stage.end,
            "config": self.checkpoint.config.to_wire(),
            "slots": needs.slots,
            "max_context": needs.max_context,
            "manifest": manifest,
            "tensor_count": len(manifest),
            "total_weight_bytes": sum(tensor.nbytes for tensor in tensors),
            "second_copy": stage.second_copy,
        }

    def _send_weights(self, link: NodeLink, epoch: int, tensors: list[qwen.StoredTensor]) -> int:
        """Converts and sends tensors in chunks; stops when the plan has changed. Returns the bytes sent."""
        self._extend_bar(sum(tensor.nbytes for tensor in tensors))
        sent = 0
        for stored, tensor in self.checkpoint.stored_parts(tensors, self.model.weights):
            data = wire.tensor_buffer(tensor)
            digest = hashlib.sha256(data).digest()
            count = -(-len(data) // wire.MAX_CHUNK)
            for index in range(count):
                if self.cluster.epoch != epoch:
                    return sent
                offset = index * wire.MAX_CHUNK
                raw = data[offset : offset + wire.MAX_CHUNK]
                payload = {
                    "tensor_name": stored.name,
                    "chunk_index": index,
                    "chunk_count": count,
                    "offset": offset,
                    "sha256": digest if index == count - 1 else None,
                }
                link.writer.put("WEIGHT_CHUNK", payload, raw=raw, epoch=epoch, wait=True)
                sent += len(raw)
                bar = self._bar
                if bar is not None:
                    bar.update(len(raw))
        return sent

    # -- questions from other threads ----------------------------------------------------------------------------------

    def not_ready_error(self) -> ApiError | None:
        with self._changed:
            return self.cluster.not_ready_error()

    def wait_until(self, holds: Callable[[ClusterState], bool], timeout_s: float) -> bool:
        """Waits until a condition on the cluster holds (for the tests)."""
        with self._changed:
            return self._changed.wait_for(lambda: holds(self.cluster), timeout_s)

    def describe(self) -> dict:
        """The cluster's part of /status."""
        now = time.monotonic()
        with self._changed:
            cluster, plan = self.cluster, self.cluster.plan
            stages = {stage.node_id: stage for stage in plan.stages} if plan else {}
            measured = self._measured()
            nodes = [_describe_node(node, stages.get(node.node_id), measured, now) for node in cluster.nodes.values()]
            return {
                "state": "ready" if cluster.is_ready else "loading" if plan else "waiting for nodes",
                "epoch": cluster.epoch,
                "required_nodes": cluster.required_count,
                "ready_nodes": cluster.ready_count,
                "why_not_ready": self.why_no_plan,
                "plan": [
                    {"node_id": s.node_id, "layer_start": s.start, "layer_end_exclusive": s.end}
                    for s in stages.values()
                ],
                "token_ms": {
                    "predicted": plan.token_ms if plan else None,
                    "measured": measured.token_ms,
                    "passes": measured.passes,
                },
                "nodes_authenticated": self.key is not None,
                "plan_cost": cluster.cost,
                "plans": {cost: _describe_plan(other) for cost, other in cluster.plans.items()},
                "advice": cluster.advice,
                "nodes": nodes,
            }

    def _measured(self) -> MeasuredTimes:
        pipeline, plan = self.pipeline, self.cluster.plan
        return NOT_MEASURED if pipeline is None or plan is None else pipeline.timer.medians(plan.node_ids)

    def plan_table(self) -> str | None:
        """The present plan with what real passes have taken so far; None without a plan."""
        with self._changed:
            plan, measured = self.cluster.plan, self._measured()
            devices = {node.node_id: node.hello["selected_device"] for node in self.cluster.nodes.values()}
        return None if plan is None else plan_table(plan, devices, measured)


def kernels_in_words(kernels: dict) -> str:
    """MEASURED's kernels for one token and for many, by the shapes that they serve where these differ."""
    shapes: dict[str, list[str]] = {}
    for choice in kernels["choices"]:
        words = quant.split_in_words(choice["few"], choice["many"], choice["threshold"])
        shapes.setdefault(words, []).append("x".join(map(str, choice["shape"])))
    if len(shapes) == 1:
        return next(iter(shapes))
    return "; ".join(f"{', '.join(served)}: {words}" for words, served in shapes.items())


def _describe_plan(plan: Plan) -> dict:
    return {
        "layers": {stage.node_id: stage.layers for stage in plan.stages},
        "largest_stage_bytes": plan.largest_bytes,
        "slowest_stage_ms": plan.slowest_ms,
        "token_ms": plan.token_ms,
    }


def _loaded_in_words(sizes: dict) -> str:
    """LOAD_COMPLETE for the log: how much a node has loaded, and from where."""
    kept = sizes["weight_bytes"] - sizes["cached_bytes"] - sizes["received_bytes"]
    sources = [("sent", sizes["received_bytes"]), ("from its cache", sizes["cached_bytes"]), ("kept", kept)]
    parts = ", ".join(f"{nbytes / 1e6:.1f} {source}" for source, nbytes in sources if nbytes)
    return f"{sizes['packed_bytes'] / 1e6:.1f} MB loaded: {parts}"


def _describe_node(node: NodeRecord, stage: StagePlan | None, times: MeasuredTimes, now: float) -> dict:
    link, measured = node.link, node.measured or {}
    return {
        "node_id": node.node_id,
        "state": node.state.value,
        "host": node.host,
        "device": node.hello["selected_device"],
        "torch_version": node.hello["torch_version"],
        "layers": [stage.start, stage.end] if stage else None,
        "weight_bytes": stage.weight_bytes if stage else 0,
        "cache_bytes": stage.cache_bytes if stage else 0,
        "memory_bytes": stage.memory_bytes if stage else node.own_memory_bytes,
        "layer_ms": measured.get("layer_ms"),
        "kernels": measured.get("kernels"),
        "rtt_ms": link.rtt_ms,
        "predicted_ms": stage.predicted_ms if stage else None,
        "measured_ms": times.stage_ms.get(node.node_id),
        "link_predicted_ms": stage.link_ms if stage else None,
        "link_measured_ms": times.link_ms.get(node.node_id),
        "bytes_sent": link.connection.bytes_sent,
        "bytes_received": link.connection.bytes_received,
        "last_seen_s": now - link.connection.last_received,
        "dropped_frames": link.dropped_frames,
        "last_error": node.load_error,
    }


# ------------------------------------------------------------------------------
# Prompt lookup
# ------------------------------------------------------------------------------
# A decode pass costs a round trip through all nodes and reads all weights, whether it carries one row or several. So
# the next tokens are guessed from the text so far, sent along as drafts, and at each of their positions a token is
# drawn as always: while it equals the draft, the next position's hidden state is good as well. The text, and with a
# seed every draw, is what it would be without drafts. Method: prompt lookup decoding (A. Saxena, 2023); llama.cpp's
# "lookup".

NGRAM = 3  # ids that must have stood together before
FIRST_HIT_RATE, HIT_RATE_STEP = 0.5, 0.2
DRAFT_SIZES = (1, 3, 5, 7, 15)  # with the row that is not a draft 2 to 16, in numbers that kernels like
DECODE_TIME_LIFE_S = 30.0  # older measurements are forgotten: the machines may have something else to do now


class PromptLookup:
    """Guesses the next ids of one sequence: where its last NGRAM ids stood before, what followed them there.

    `hit_rate` is the share of right guesses, recent ones counting most, whether or not they were sent as drafts:
    finding out what guesses are worth costs nothing.
    """

    def __init__(self, ids: list[int]):
        self.hit_rate = FIRST_HIT_RATE
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # the ids of an n-gram -> where the id after its last place stands
        self._source: int | None = None  # where the next id is expected to be repeated from
        for token_id in ids:
            self._source = None
            self._add(token_id)

    def append(self, token_id: int) -> None:
        """Takes the next id of the sequence, and learns whether the guess was right."""
        if self._source is not None:
            is_hit = self._ids[self._source] == token_id
            self.hit_rate += HIT_RATE_STEP * (is_hit - self.hit_rate)
            self._source = self._source + 1 if is_hit else None
        self._add(token_id)

    def draft(self, count: int) -> list[int]:
        """The next `count` ids as guessed, [] without a guess; what reaches its own start goes on in a circle."""
        if self._source is None:
            return []
        period = len(self._ids) - self._source
        return [self._ids[self._source + i % period] for i in range(count)]

    def _add(self, token_id: int) -> None:
        self._ids.append(token_id)
        ngram = tuple(self._ids[-NGRAM:])
        if self._source is None:
            self._source = self._after.get(ngram)
        self._after[ngram] = len(self._ids)


class DecodeTimes:
    """How long whole decode passes take by their rows, links and head included, learnt from those that were run: what
    drafts cost. Unlike a StageForecast it follows the machines' present load.
    """

    def __init__(self):
        self._measured: dict[int, tuple[float, float]] = {}  # _size(rows) -> (seconds, when)

    def add(self, rows: int, seconds: float, now: float) -> None:
        """A pass took so long. Slower than known is believed slowly: something else may have been running."""
        size = self._size(rows)
        old, at = self._measured.get(size, (seconds, now))
        is_known = now - at < DECODE_TIME_LIFE_S
        self._measured[size] = (0.7 * old + 0.3 * seconds if is_known and seconds > old else seconds, now)

    def estimate(self, rows: int, now: float) -> float:
        """Seconds, or, while nothing was measured, any figure that grows with the rows.

        What was not measured is taken to grow with the root of the rows: enough hope to try twice as many, not more.
        """
        known = {n: seconds for n, (seconds, at) in self._measured.items() if now - at < DECODE_TIME_LIFE_S}
        size = self._size(rows)
        nearest = min(known, key=lambda n: max(n / size, size / n), default=None)
        return size**0.5 if nearest is None else known[nearest] * (size / nearest) ** 0.5

    @staticmethod
    def _size(rows: int) -> int:
        """Few rows as they are (a kernel may take 6 as quickly as 5, and 7 only in twice the time), more rounded up."""
        return rows if rows <= 8 else 1 << (rows - 1).bit_length()


def draft_sizes(guesses: list[tuple[float, int]], seconds: Callable[[int], float]) -> list[int]:
    """How many ids to draft for each sequence of one decode pass, so that the pass gives the most tokens per second.

    guesses: (hit rate, how many ids may be drafted) per sequence; seconds(rows): how long a pass takes.
    A sequence with k drafts gives 1 + p + ... + p**k tokens on average.
    """
    sizes = [0] * len(guesses)
    rows, tokens = len(guesses), float(len(guesses))
    for i in sorted(range(len(guesses)), key=lambda i: -guesses[i][0]):
        hit_rate, most = guesses[i]
        options = [0] + sorted({min(size, most) for size in DRAFT_SIZES if most})
        gains = {k: sum(hit_rate**j for j in range(1, k + 1)) for k in options}
        sizes[i] = max(options, key=lambda k: (tokens + gains[k]) / seconds(rows + k))
        rows, tokens = rows + sizes[i], tokens + gains[sizes[i]]
    return sizes


# ------------------------------------------------------------------------------
# Engine
# ------------------------------------------------------------------------------
# One thread owns generation: it admits sequences into slots, sends their prompts through the pipeline in chunks,
# decodes all that are ready in one pass, samples, and hands events to the requests' queues. Everything that happens
# elsewhere (a result, a new request, a lost node) arrives in its inbox.
#
# Positions are the whole KV protocol: a slot remembers the token ids that were sent to it in this epoch; whoever gets
# the slot starts its prefill at the first id that differs. After a new plan all slots are empty, and a sequence is
# simply admitted again with its prompt and the ids it has generated.

MAX_WAITING_REQUESTS = 64
OUTAGE_LIMIT_S = 60.0  # requests wait so long for a cluster that lost nodes
MAX_LOST_PLANS = 5  # in a row: a request that got no token in any of them may be what the nodes die of
COPY_WORTH_TOKENS = 16  # a longer prefix in another slot is copied when it saves at least so many tokens
LOGPROB_SLAB = 64  # prompt rows through the head at a time: 152k logits each


@dataclass
class Slot:
    """One conversation's place in every stage's caches.

    `tokens` are the ids sent to it in this epoch. The first `settled` of them are in all stages for certain: later ones
    may still be on their way to the last stages.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    settled: int = 0
    in_flight: int = 0  # passes that carry rows of this slot, also of a sequence that has left it
    sequence: Sequence | None = None
    used_at: float = 0.0


class Sequence:
    """One choice: its ids, how far they have been sent, and where its events go."""

    def __init__(self, generation: Generation, index: int, prompt_index: int, prompt_ids: list[int], sampler: Sampler):
        self.generation = generation
        self.index = index
        self.prompt_index = prompt_index
        self.prompt_ids = prompt_ids
        self.output_ids: list[int] = []
        self.sampler = sampler
        self.slot: Slot | None = None
        self.sent = 0  # ids of prompt + output on their way into the caches
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.in_flight = 0  # passes that carry rows of this sequence
        self.turn = 0  # when it last had rows in a pass, as a number of Engine.turns
        self.lookup: PromptLookup | None = None  # from its first generated token on, where it may draft
        self.lost_plans = 0  # that it was running in, since its last token

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_prefilling(self) -> bool:
        """More than one id is still to be sent: the prompt, or, after a lost node, the prompt and what followed."""
        return self.length - self.sent > 1 or not self.output_ids

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.generation.request.sampling.prompt_logprobs and not self.output_ids and self.index_in_prompt == 0

    @property
    def index_in_prompt(self) -> int:
        return self.index - self.prompt_index * self.generation.request.n


class Generation:
    """A request's answer as a stream of events, read by the thread that serves the request."""

    DONE = object()

    def __init__(self, request: GenerationRequest, engine: Engine):
        self.request = request
        self.created_at = time.monotonic()
        self._engine = engine
        self._events: queue.Queue = queue.Queue()
        self._open = set(range(len(request.prompts) * request.n))
        self._prompts_seen: set[int] = set()

    def next_event(self, timeout_s: float | None):
        """The next event; None when none came in time; DONE after the last. Raises ApiError when the cluster failed."""
        while self._open:
            try:
                event = self._events.get(timeout=timeout_s)
            except queue.Empty:
                return None
            if isinstance(event, ApiError):
                self._open.clear()
                raise event
            # A choice may be finished for its reader before the engine hears of it: what was drawn since is dropped.
            if isinstance(event, PromptEvent) or event.index in self._open:
                if isinstance(event, FinishEvent):
                    self._open.discard(event.index)
                return event
        return self.DONE

    def finish_choice(self, index: int) -> None:
        """The reader needs no more of this choice (its text met a stop string)."""
        self._open.discard(index)
        self._engine.cancel(self, index)

    def close(self) -> None:
        """Cancels what is still running; may be called from any thread, and again."""
        self._open.clear()
        self._engine.cancel(self, None)

    def put(self, event) -> None:
        """(engine) Hands an event to the reader; a prompt's event only once."""
        if isinstance(event, PromptEvent):
            if event.index_of_prompt in self._prompts_seen:
                return
            self._prompts_seen.add(event.index_of_prompt)
        self._events.put(event)


@dataclass
class Row:
    """What one segment of a pass means to the engine: `ids[start:stop]` of a sequence, then drafts."""

    sequence: Sequence
    start: int
    stop: int
    is_last: bool  # the logits of its last row, and those of the drafts, give the next tokens
    slot: Slot
    drafts: list[int] = field(default_factory=list)


@dataclass
class Step:
    """A pass as its engine knows it: what its rows mean, and whether it had the pipeline to itself."""

    pipeline: Pipeline
    rows: list[Row]
    sent_at: float
    is_alone: bool


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading ids two lists share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])


class Engine:
    """Owns slots, sequences and sampling. Other threads only call submit, cancel, stop, describe and on_..."""

    def __init__(
        self, controller: Controller, token_mask: np.ndarray, slots: int, max_context: int, prompt_lookup: bool = True
    ):
        self.controller = controller
        self.prompt_lookup = prompt_lookup
        self.ends: qwen.Ends | None = None  # comes with `start`
        self.token_mask = token_mask
        self.max_context = max_context
        self.most_rows = max(slots, min(PREFILL_CHUNK, max_context))  # nodes have planned memory for no larger pass
        self.slots = [Slot(i) for i in range(slots)]
        self.waiting: deque[Sequence] = deque()
        self.pipeline: Pipeline | None = None
        self.in_flight: dict[int, str] = {}  # request_id -> kind of the passes that have not come back
        self.passes_sent = 0
        self.turns = 0  # how often a sequence has had rows in a pass
        self.decode_times = DecodeTimes()
        self.generated_tokens = self.drafted_tokens = self.accepted_drafts = 0
        self.outage_since: float | None = time.monotonic()  # when there was last a plan to generate with; None: now
        self._inbox: queue.Queue = queue.Queue()
        self._waiting_requests: set[Generation] = set()  # submitted, no choice admitted yet
        self._lock = threading.Lock()  # guards _waiting_requests
        self._stop_reason: str | None = None
        self._rate = TokenRate()
        controller.is_idle = lambda: not self.waiting and not any(slot.sequence for slot in self.slots)
        controller.on_ready = lambda pipeline, plan: self._inbox.put(lambda: self._on_ready(pipeline, plan))
        controller.on_lost = lambda epoch, why: self._inbox.put(lambda: self._on_lost(epoch, why))
        controller.on_replaced = lambda epoch, why: self._inbox.put(lambda: self._on_replaced(epoch, why))
        controller.deliver = lambda *result: self._inbox.put(lambda: self._on_result(*result))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, ends: qwen.Ends) -> None:
        """Serves from now on; what was submitted before waits in the inbox."""
        self.ends = ends
        self._thread.start()

    # -- called by other threads ---------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> Generation:
        """Queues a request. Raises ApiError: 503 while the cluster is not ready, or when the queue is full."""
        if self._stop_reason is not None:
            raise ApiError.not_ready(self._stop_reason)
        error = self.controller.not_ready_error()
        if error is not None:
            raise error
        generation = Generation(request, self)
        with self._lock:
            if len(self._waiting_requests) >= MAX_WAITING_REQUESTS:
                raise ApiError.overloaded(f"{MAX_WAITING_REQUESTS} requests are waiting already; try again later")
            self._waiting_requests.add(generation)
        self._inbox.put(lambda: self._on_submit(generation))
        return generation

    def cancel(self, generation: Generation, index: int | None) -> None:
        """Ends one choice of a generation, or all (None), before the next step."""
        if index is None:
            self._no_longer_waiting(generation)  # at once: its place is free for the next request
        self._inbox.put(lambda: self._on_cancel(generation, index))

    def stop(self, reason: str) -> None:
        """Fails what is running and ends the thread."""
        self._inbox.put(lambda: self._on_stop(reason))
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def describe(self) -> dict:
        """The engine's part of /status."""
        active = [slot.sequence for slot in self.slots if slot.sequence]
        return {
            "slots": len(self.slots),
            "active_slots": len(active),
            "waiting_requests": len(self._waiting_requests),
            "generated_tokens": self.generated_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_drafts": self.accepted_drafts,
            "tokens_per_second": self._rate.per_second(time.monotonic()),
        }

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.get_num_threads()  # torch notes a thread's number at its first call: not while share_of_cores has set it
        with torch.inference_mode():
            while self._stop_reason is None:
                for arrived in self._arrivals():
                    self._guarded(arrived)
                self._guarded(self._give_up_after_outage)
                self._guarded(self._step)

    def _guarded(self, action: Callable[[], None]) -> None:
        """A bug of ours ends the requests that are running with an error; the thread goes on and serves the others."""
        try:
            action()
        except FileShrunk as error:
            log.error("%s", error)
            self._fail_running(ApiError(500, str(error), "server_error"))
        except Exception:
            log.exception("the engine failed")
            self._fail_running(ApiError.internal())

    def _arrivals(self) -> list:
        """Waits for something in the inbox; returns all of it, so that the next passes are chosen knowing it."""
        arrived = []
        try:
            arrived.append(self._inbox.get(timeout=1.0))
            while True:
                arrived.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        return arrived

    def _step(self) -> None:
        if self.pipeline is None:
            return
        self._admit()
        self._send_decodes()
        for _ in range(passes_at_once(self.pipeline.forecasts) - list(self.in_flight.values()).count("RUN_PREFILL")):
            self._send_prefill_chunk()

    # -- inbox ---------------------------------------------------------------------------------------------------------

    def _on_submit(self, generation: Generation) -> None:
        request = generation.request
        for prompt_index, prompt_ids in enumerate(request.prompts):
            for choice in range(request.n):
                sampler = Sampler(request.sampling, self.token_mask, prompt_ids, choice)
                index = prompt_index * request.n + choice
                self.waiting.append(Sequence(generation, index, prompt_index, prompt_ids, sampler))

    def _on_cancel(self, generation: Generation, index: int | None) -> None:
        def is_meant(sequence: Sequence) -> bool:
            return sequence.generation is generation and index in (None, sequence.index)

        for sequence in [s for s in self.waiting if is_meant(s)]:
            self.waiting.remove(sequence)
        for slot in self.slots:
            if slot.sequence is not None and is_meant(slot.sequence):
                self._release(slot.sequence)

    def _on_ready(self, pipeline: Pipeline, plan: Plan) -> None:
        if self.controller.pipeline is not pipeline:
            return  # lost again meanwhile
        log.info("epoch %d: ready to generate over %d stage(s)", plan.epoch, len(plan.stages))
        self.pipeline = pipeline
        self.outage_since = None

    def _on_lost(self, epoch: int, why: str) -> None:
        """A plan has failed: what was running when too many did may be the cause, and is ended."""
        running = self._requeue_running(epoch, why)
        for sequence in running:
            sequence.lost_plans += 1
        for sequence in running:
            if sequence.lost_plans >= MAX_LOST_PLANS:
                reason = f"Nodes were lost {MAX_LOST_PLANS} times in a row while this request was running; last: {why}"
                self._fail(sequence, ApiError(500, reason, "server_error"))

    def _on_replaced(self, epoch: int, why: str) -> None:
        """A plan makes way for a better one: what was running goes on with that."""
        self._requeue_running(epoch, why)

    def _requeue_running(self, epoch: int, why: str) -> list[Sequence]:
        """The caches of this epoch are gone: everything that was running goes back to the head of the queue, in its
        order. Returns it.
        """
        if self.pipeline is None or self.pipeline.epoch != epoch:
            return []
        self.pipeline = None
        self.in_flight.clear()
        self.outage_since = time.monotonic()
        running = sorted((s.sequence for s in self.slots if s.sequence), key=lambda s: s.generation.created_at)
        if running:
            log.warning("generation pauses: %s", why)
        for slot in self.slots:
            slot.sequence, slot.tokens, slot.settled, slot.in_flight = None, [], 0, 0
        for sequence in reversed(running):
            sequence.slot, sequence.sent, sequence.in_flight = None, 0, 0
            if not sequence.output_ids:
                sequence.prompt_logprobs = [None]
            self.waiting.appendleft(sequence)
        return running

    def _on_result(self, request: Pass, hidden_states: torch.Tensor | None, error: str | None) -> None:
        step: Step = request.owner
        rows = step.rows
        if step.pipeline is not self.pipeline:
            return  # a pass of a plan that is gone
        self.in_flight.pop(request.request_id, None)
        for row in rows:
            row.sequence.in_flight -= 1
            row.slot.in_flight -= 1
        if error is not None:
            for row in rows:
                row.slot.tokens, row.slot.settled = [], 0  # whatever the stages hold now, it is not relied on
                if row.slot.sequence is not None:  # also one that has the slot by now: it built on what was there
                    self._fail(row.slot.sequence, ApiError(500, f"Inference failed on {error}", "server_error"))
            return
        for row in rows:
            if row.slot.in_flight == 0:
                row.slot.settled = len(row.slot.tokens)
        self._use_rows(rows, hidden_states, request.not_finite)
        if step.is_alone and self.passes_sent == request.request_id and request.kind == "RUN_DECODE":
            now = time.monotonic()
            self.decode_times.add(len(request.slots), now - step.sent_at, now)

    def _on_stop(self, reason: str) -> None:
        self._stop_reason = reason
        for sequence in [*self.waiting, *(s.sequence for s in self.slots if s.sequence)]:
            sequence.generation.put(ApiError.not_ready(reason))
        self.waiting.clear()

    def _fail_running(self, error: ApiError) -> None:
        """Ends every request that is in a slot with an error. Passes on their way come back and are counted as ever."""
        for slot in self.slots:
            slot.tokens, slot.settled = [], 0
            if slot.sequence is not None:
                self._fail(slot.sequence, error)

    def _give_up_after_outage(self) -> None:
        if not self.waiting or self.outage_since is None or time.monotonic() - self.outage_since < OUTAGE_LIMIT_S:
            return
        error = self.controller.not_ready_error()
        if error is None:
            return
        for sequence in self.waiting:
            sequence.generation.put(error)
            self._no_longer_waiting(sequence.generation)
        self.waiting.clear()

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives free slots to waiting sequences in order of arrival."""
        while self.waiting:
            free = [slot for slot in self.slots if slot.sequence is None]
            sequence = self.waiting[0]
            if not free or self._sibling_is_prefilling(sequence):
                return
            self.waiting.popleft()
            self._no_longer_waiting(sequence.generation)
            self._place(sequence, free)

    def _sibling_is_prefilling(self, sequence: Sequence) -> bool:
        """Another choice of the same prompt is still sending it: its cache will be copied instead of computed again."""
        return any(
            slot.sequence is not None
            and slot.sequence.generation is sequence.generation
            and slot.sequence.prompt_index == sequence.prompt_index
            and slot.sequence.is_prefilling
            for slot in self.slots
        )

    def _place(self, sequence: Sequence, free: list[Slot]) -> None:
        """The free slot with the longest common prefix; a clearly longer prefix of another slot is copied into it."""
        ids = sequence.ids
        # The last id is always sent again: its hidden state gives the next token. Prompt logprobs need all of them.
        usable = 0 if sequence.wants_prompt_logprobs else len(ids) - 1
        prefixes = {slot.index: min(usable, common_prefix(slot.tokens, ids)) for slot in self.slots}
        slot = max(free, key=lambda s: (prefixes[s.index], -len(s.tokens), -s.used_at))
        # COPY_CACHE reaches the later stages before passes that are still in an earlier one. So it may copy only what
        # all stages hold, and only to where no such pass will write.
        settled = {s.index: min(prefixes[s.index], s.settled) for s in self.slots}
        source = max(self.slots, key=lambda s: settled[s.index])
        start = prefixes[slot.index]
        if slot.in_flight == 0 and settled[source.index] >= start + COPY_WORTH_TOKENS:
            start = settled[source.index]
            payload = {"from_slot": source.index, "to_slot": slot.index, "length": start}
            self.pipeline.control("COPY_CACHE", payload)
        slot.tokens, slot.settled = ids[:start], min(slot.settled, start)
        slot.sequence, slot.used_at = sequence, time.monotonic()
        sequence.slot, sequence.sent, sequence.in_flight = slot, start, 0
        if not sequence.output_ids:
            sequence.cached_tokens = start

    def _no_longer_waiting(self, generation: Generation) -> None:
        with self._lock:
            self._waiting_requests.discard(generation)

    # -- passes --------------------------------------------------------------------------------------------------------

    def _send_decodes(self) -> None:
        """Passes with the next token of every sequence whose last result is here."""
        decoding = [s.sequence for s in self.slots if s.sequence is not None and not s.sequence.is_prefilling]
        ready = [sequence for sequence in decoding if sequence.in_flight == 0]
        if not ready:
            return
        ready.sort(key=lambda sequence: sequence.turn)  # who has waited longest goes first, where not all go at once
        passes, size = decode_passes(len(decoding), self.pipeline.forecasts)
        room = passes - list(self.in_flight.values()).count("RUN_DECODE")
        for start in range(0, min(len(ready), room * size), size):
            group = ready[start : start + size]
            drafts = self._drafts(group)
            rows = [Row(s, s.length - 1, s.length, True, s.slot, ids) for s, ids in zip(group, drafts)]
            self._send("RUN_DECODE", rows)

    def _drafts(self, sequences: list[Sequence]) -> list[list[int]]:
        """Guesses to send along with the next token of each sequence, as many as are worth their time."""
        guesses = [
            sequence.lookup.draft(min(DRAFT_SIZES[-1], self._room_for_drafts(sequence))) if sequence.lookup else []
            for sequence in sequences
        ]
        if not any(guesses):
            return guesses
        now = time.monotonic()

        def seconds(rows: int) -> float:
            return self.decode_times.estimate(rows, now) if rows <= self.most_rows else math.inf

        worth = [(s.lookup.hit_rate if s.lookup else 0.0, len(ids)) for s, ids in zip(sequences, guesses)]
        sizes = draft_sizes(worth, seconds)
        return [ids[:size] for ids, size in zip(guesses, sizes)]

    def _room_for_drafts(self, sequence: Sequence) -> int:
        """Every draft has a position in the context, and a token beyond it that the request may have."""
        wanted = sequence.generation.request.max_tokens - len(sequence.output_ids) - 1
        return max(0, min(wanted, self.max_context - sequence.length))

    def _send_prefill_chunk(self) -> None:
        """The next chunk of what is still to be prefilled, first come first; chunks follow one another without waiting.

        Short prompts share a chunk. Alone are those that want the logprobs of their tokens, and those that were running
        when a node was lost: one of them may have been the cause.
        """
        prefilling = [s.sequence for s in self.slots if s.sequence is not None and s.sequence.is_prefilling]
        prefilling = sorted((s for s in prefilling if s.sent < s.length), key=lambda s: s.slot.used_at)
        if not prefilling:
            return
        left = [sequence.length - sequence.sent for sequence in prefilling]
        room = min(self.most_rows, prefill_chunk(sum(left), self.pipeline.forecasts))
        rows: list[Row] = []
        for sequence in prefilling:
            is_alone = sequence.wants_prompt_logprobs or sequence.lost_plans > 0
            if room == 0 or (rows and is_alone):
                break
            stop = min(sequence.length, sequence.sent + room)
            room -= stop - sequence.sent
            rows.append(Row(sequence, sequence.sent, stop, stop == sequence.length, sequence.slot))
            if is_alone:
                break
        self._send("RUN_PREFILL", rows)

    def _send(self, kind: str, rows: list[Row]) -> None:
        row_ids = [row.sequence.ids[row.start : row.stop] + row.drafts for row in rows]
        token_ids = [token_id for ids in row_ids for token_id in ids]
        embedded = self.ends.embed(token_ids)  # first, since it may fail
        slots, positions = [], []
        for row, ids in zip(rows, row_ids):
            slots += [row.sequence.slot.index] * len(ids)
            positions += range(row.start, row.start + len(ids))
            row.slot.tokens += ids
            row.slot.in_flight += 1
            row.sequence.sent = row.stop
            row.sequence.in_flight += 1
            row.sequence.turn = self.turns = self.turns + 1
        if rows[0].sequence.wants_prompt_logprobs:
            keep = kept_rows = len(token_ids)
        else:
            keep = 1 + max(len(row.drafts) for row in rows) if any(row.is_last for row in rows) else 0
            kept_rows = sum(1 + len(row.drafts) for row in rows) if keep else 0
        step = Step(self.pipeline, rows, time.monotonic(), not self.in_flight)
        request = self.pipeline.send(kind, embedded, slots, positions, keep, kept_rows, step)
        self.in_flight[request.request_id] = kind
        self.passes_sent = request.request_id

    # -- results -------------------------------------------------------------------------------------------------------

    def _use_rows(self, rows: list[Row], hidden_states: torch.Tensor, not_finite: str | None) -> None:
        """Samples the next token of every sequence in a pass that came back."""
        if all(row.sequence.slot is None for row in rows):
            return  # cancelled meanwhile
        if rows[0].sequence.wants_prompt_logprobs:
            try:
                self._collect_prompt_logprobs(rows[0], hidden_states)
            except FloatingPointError as error:
                self._fail_not_finite(rows[0].sequence, error, not_finite)
                return
            hidden_states = hidden_states[-1:]
        if not any(row.is_last for row in rows):
            return
        logits = self.ends.logits(hidden_states)
        start = 0
        for row in rows:
            stop = start + 1 + len(row.drafts)
            if row.is_last and row.sequence.slot is not None:
                self._use_logits(row, logits[start:stop], not_finite)
            start = stop

    def _use_logits(self, row: Row, logits: torch.Tensor, not_finite: str | None) -> None:
        """Draws the next token of a sequence, and one more after every draft that was right. logits [1 + drafts, V]."""
        sequence = row.sequence
        if not sequence.output_ids:
            self._prompt_done(sequence)
        if sequence.generation.request.max_tokens == 0:
            self._finish(sequence, "length")
            return
        self.drafted_tokens += len(row.drafts)
        for position_logits, draft in zip(logits, [*row.drafts, None]):
            try:
                token_id, logprob = sequence.sampler.sample(position_logits)
            except FloatingPointError as error:
                self._fail_not_finite(sequence, error, not_finite)
                return
            self._use_token(sequence, token_id, logprob)
            self.accepted_drafts += token_id == draft
            if sequence.slot is None:
                return  # that token was its last
            if token_id != draft:
                break
        sequence.sent = sequence.length - 1
        del row.slot.tokens[sequence.sent :]  # what wrong drafts have left there is written over
        row.slot.settled = min(row.slot.settled, sequence.sent)

    def _fail_not_finite(self, sequence: Sequence, error: FloatingPointError, node_id: str | None) -> None:
        sequence.slot.tokens, sequence.slot.settled = [], 0  # the caches may hold what made it so
        source = f"first seen in what node {node_id} sent" if node_id else "the nodes sent finite numbers"
        reason = f"The model's output is not finite ({error}); {source}"
        self._fail(sequence, ApiError(500, reason, "server_error"))

    def _use_token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        request = sequence.generation.request
        sequence.output_ids.append(token_id)
        if sequence.lookup is not None:
            sequence.lookup.append(token_id)
        elif self.prompt_lookup and request.prompt_lookup:
            sequence.lookup = PromptLookup(sequence.ids)
        sequence.lost_plans = 0
        self.generated_tokens += 1
        self._rate.add(time.monotonic())
        sequence.generation.put(TokenEvent(sequence.index, token_id, logprob))
        if token_id in request.sampling.end_ids:
            self._finish(sequence, "stop")
        elif len(sequence.output_ids) >= request.max_tokens or sequence.length >= self.max_context:
            self._finish(sequence, "length")

    def _collect_prompt_logprobs(self, row: Row, hidden_states: torch.Tensor) -> None:
        sequence = row.sequence
        next_ids = sequence.prompt_ids[row.start + 1 : row.stop + 1]
        top = sequence.generation.request.sampling.top_logprobs or 0
        for start in range(0, len(next_ids), LOGPROB_SLAB):
            slab_ids = next_ids[start : start + LOGPROB_SLAB]
            logits = self.ends.logits(hidden_states[start : start + len(slab_ids)])
            sequence.prompt_logprobs += logprob_rows(logits, slab_ids, top, self.token_mask)

    def _prompt_done(self, sequence: Sequence) -> None:
        wants = sequence.generation.request.sampling.prompt_logprobs
        if wants and sequence.index_in_prompt:
            return  # the first choice of the prompt reports them
        logprobs = sequence.prompt_logprobs if wants else None
        sequence.generation.put(PromptEvent(sequence.prompt_index, sequence.cached_tokens, logprobs))

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.generation.put(FinishEvent(sequence.index, reason))
        self._release(sequence)

    def _fail(self, sequence: Sequence, error: ApiError) -> None:
        """Ends the whole request of a sequence with an error."""
        sequence.generation.put(error)
        self._no_longer_waiting(sequence.generation)
        self._on_cancel(sequence.generation, None)

    def _release(self, sequence: Sequence) -> None:
        """Frees the slot; what was sent to it stays there for whoever shares its prefix."""
        if sequence.slot is not None:
            sequence.slot.sequence = None
            sequence.slot = None


class TokenRate:
    """Tokens per second over the last few seconds."""

    WINDOW_S = 5.0

    def __init__(self):
        self._times: deque[float] = deque()

    def add(self, now: float) -> None:
        self._times.append(now)
        while self._times and now - self._times[0] > self.WINDOW_S:
            self._times.popleft()

    def per_second(self, now: float) -> float:
        recent = [t for t in list(self._times) if now - t <= self.WINDOW_S]
        return len(recent) / self.WINDOW_S


# ------------------------------------------------------------------------------
# HTTP: metrics
# ------------------------------------------------------------------------------
# What the HTTP layer itself can count, as Prometheus text. Whoever owns other figures (the engine, the cluster) gives
# them through a callback at the moment of the scrape; those whose names end in _total only grow, the rest are gauges.


COUNTERS = {
    "truecluster_http_requests_total": "Answered HTTP requests by route and status.",
    "truecluster_http_refused_connections_total": "Connections refused because every handler thread was taken.",
    "truecluster_http_cancelled_total": "Requests whose client went away before the answer was complete.",
    "truecluster_prompt_tokens_total": "Prompt tokens of admitted requests.",
    "truecluster_cached_prompt_tokens_total": "Prompt tokens taken from a slot's cache.",
    "truecluster_completion_tokens_total": "Generated tokens.",
}
HISTOGRAMS = {
    "truecluster_time_to_first_token_seconds": (
        "From the request's arrival to its first token.",
        (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
    ),
    "truecluster_time_per_token_seconds": (
        "From one token of a choice to its next.",
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    ),
}
Sample = tuple[str, str, dict[str, str], float]  # name, help, labels, value


class Metrics:
    """Thread-safe counters and histograms; the names are the keys of COUNTERS and HISTOGRAMS."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: dict[str, dict[tuple, float]] = {name: {(): 0} for name in COUNTERS}  # labels -> count
        self._counts["truecluster_http_requests_total"].clear()  # the one with labels: they are not known before
        self._seconds = {name: [0] * (len(buckets) + 1) for name, (_, buckets) in HISTOGRAMS.items()}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def count(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add to a counter. Labels are part of the counter's identity."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._counts[name][key] = self._counts[name].get(key, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """Add one measurement to a histogram."""
        buckets = HISTOGRAMS[name][1]
        place = sum(seconds > bound for bound in buckets)
        with self._lock:
            self._seconds[name][place] += 1
            self._sums[name] += seconds

    def value(self, name: str, **labels: object) -> float:
        """The present value of one counter (0 when it never moved)."""
        with self._lock:
            return self._counts[name].get(tuple(sorted(labels.items())), 0)

    def render(self, gauges: Iterable[Sample] = ()) -> str:
        """Prometheus text format 0.0.4: our counters and histograms, then the caller's figures."""
        lines = []
        with self._lock:
            for name, text in COUNTERS.items():
                lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
                lines += [_sample_line(name, dict(key), value) for key, value in self._counts[name].items()]
            for name, (text, buckets) in HISTOGRAMS.items():
                lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
                total = 0
                for bound, count in zip((*buckets, "+Inf"), self._seconds[name], strict=True):
                    total += count
                    lines.append(_sample_line(f"{name}_bucket", {"le": bound}, total))
                lines += [_sample_line(f"{name}_sum", {}, self._sums[name]), _sample_line(f"{name}_count", {}, total)]
        described = set()
        for name, text, labels, value in sorted(gauges, key=lambda sample: sample[0]):
            if name not in described:
                described.add(name)
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines.append(_sample_line(name, labels, value))
        return "\n".join(lines) + "\n"


def _sample_line(name: str, labels: dict, value: float) -> str:
    def quoted(text: object) -> str:
        return str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    inside = ",".join(f'{key}="{quoted(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


# ------------------------------------------------------------------------------
# HTTP: from request to pieces of the answer
# ------------------------------------------------------------------------------
# ParsedRequest -> Job (tokenised, checked against model and context) -> the engine's events -> ChoiceDelta. One
# generator of deltas serves both modes: a stream writes each as chunks, a plain answer folds them, so they agree.


class Service(Protocol):
    """What the HTTP layer needs from the rest of the coordinator."""

    model_id: str
    created: int  # Unix time, constant for the process
    max_context: int
    system_fingerprint: str  # names quantization, dtype and plan
    tokenizer: Tokenizer
    template: ChatTemplate  # `available` is False when the model has none
    engine: Engine

    def readiness(self) -> ApiError | None:
        """None when requests can be admitted, else the 503 that says why not."""

    def health(self) -> tuple[int, dict]:
        """Status (200 or 503) and body of GET /health."""

    def status(self) -> dict:
        """Body of GET /status."""

    def gauges(self) -> list[Sample]:
        """Further figures for GET /metrics."""


@dataclass
class Usage:
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0

    def as_dict(self) -> dict:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Job:
    """One request ready for the engine, and what all parts of its answer share. `usage` grows while it runs."""

    parsed: ParsedRequest
    request: GenerationRequest
    tokenizer: Tokenizer
    echo_texts: list[str]  # per prompt: what its answers begin with
    usage: Usage
    answer_id: str
    created: int
    model: str
    system_fingerprint: str

    @property
    def choices(self) -> range:
        return range(len(self.request.prompts) * self.request.n)


@dataclass
class ChoiceDelta:
    """What one event adds to one choice. Added up, the deltas of a choice are its whole answer."""

    index: int
    text: str = ""
    tokens: list[EmittedToken] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, other: ChoiceDelta) -> None:
        self.text += other.text
        self.tokens += other.tokens
        self.tool_calls += other.tool_calls
        self.finish_reason = other.finish_reason or self.finish_reason


def prepare_job(parsed: ParsedRequest, service: Service) -> Job:
    """Model, tokens and context of a request. Raises ApiError 404 for another model, 400 for what cannot be run."""
    if parsed.model is not None and parsed.model != service.model_id:
        raise ApiError.model_not_found(printable(parsed.model), service.model_id)
    tokenizer = service.tokenizer
    prompts = _chat_prompt(parsed, service) if parsed.chat else _completion_prompts(parsed, service)
    _check_vocabulary(parsed, tokenizer)
    room = service.max_context - min(map(len, prompts))
    echo_texts = [""] * len(prompts)
    if parsed.echo:
        echo_texts = [
            prompt if isinstance(prompt, str) else tokenizer.decode(ids)
            for prompt, ids in zip(parsed.prompts, prompts, strict=True)
        ]
    return Job(
        parsed=parsed,
        request=GenerationRequest(
            prompts=prompts,
            n=parsed.n,
            max_tokens=room if parsed.max_tokens is None else min(parsed.max_tokens, room),
            sampling=_sampling_params(parsed, tokenizer),
            prompt_lookup=parsed.prompt_lookup,
        ),
        tokenizer=tokenizer,
        echo_texts=echo_texts,
        usage=Usage(sum(map(len, prompts))),
        answer_id=("chatcmpl-" if parsed.chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
        model=service.model_id,
        system_fingerprint=service.system_fingerprint,
    )


def _check_could_fit(text: str, service: Service, param: str) -> None:
    """ApiError 400 for a prompt that is too long whatever its tokens are: encoding takes 400 bytes for each of them."""
    least = service.tokenizer.least_tokens(text)
    if least >= service.max_context:
        raise ApiError.context_length(least, service.max_context, param, least=True)


def _chat_prompt(parsed: ParsedRequest, service: Service) -> list[list[int]]:
    ids = service.template.prompt_ids(
        parsed.messages,
        parsed.tools,
        parsed.add_generation_prompt,
        parsed.continue_final_message,
        parsed.chat_template_kwargs,
        check=lambda text: _check_could_fit(text, service, "messages"),
    )
    if not ids:
        raise ApiError.invalid("The chat template makes an empty prompt of these messages.", "messages")
    if len(ids) >= service.max_context:
        raise ApiError.context_length(len(ids), service.max_context, "messages")
    return [ids]


def _completion_prompts(parsed: ParsedRequest, service: Service) -> list[list[int]]:
    prompts = []
    for prompt in parsed.prompts:
        is_text = isinstance(prompt, str)
        if is_text:
            _check_could_fit(prompt, service, "prompt")
        ids = service.tokenizer.encode(prompt, parse_special=True) if is_text else prompt
        if not ids:
            raise ApiError.invalid("`prompt` has no tokens.", "prompt")
        if len(ids) >= service.max_context:
            raise ApiError.context_length(len(ids), service.max_context, "prompt")
        if not is_text and not all(map(service.tokenizer.has_token, ids)):
            raise ApiError.invalid("`prompt` has token ids that are out of vocabulary.", "prompt")
        prompts.append(ids)
    return prompts


def _check_vocabulary(parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
    for name in ("logit_bias", "stop_token_ids"):
        if not all(map(tokenizer.has_token, getattr(parsed, name))):
            raise ApiError.invalid(f"`{name}` has token ids that are out of vocabulary.", name)


def _sampling_params(parsed: ParsedRequest, tokenizer: Tokenizer) -> SamplingParams:
    return SamplingParams(
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        min_p=parsed.min_p,
        repetition_penalty=parsed.repetition_penalty,
        presence_penalty=parsed.presence_penalty,
        frequency_penalty=parsed.frequency_penalty,
        logit_bias=parsed.logit_bias,
        seed=parsed.seed,
        ignore_eos=parsed.ignore_eos,
        min_tokens=parsed.min_tokens,
        eos_ids=tuple(sorted(tokenizer.eos_ids(parsed.chat))),
        # A stop that is the text of a control token: that text never appears, so the token itself has to stop.
        stop_token_ids=(*parsed.stop_token_ids, *tokenizer.stop_token_ids(parsed.stop)),
        top_logprobs=parsed.top_logprobs,
        prompt_logprobs=parsed.echo and parsed.top_logprobs is not None,
    )


class ChoiceText:
    """The text of one choice while it is generated: detokenising, stop strings and, with tools, their calls."""

    def __init__(self, job: Job, index: int):
        parsed, sampling = job.parsed, job.request.sampling
        hidden = frozenset(sampling.eos_ids)
        if not parsed.include_stop_str_in_output:
            hidden |= frozenset(sampling.stop_token_ids)
        self.index = index
        self.finished = False
        self._stream = TextStream(
            job.tokenizer,
            parsed.stop,
            hidden,
            parsed.skip_special_tokens,
            parsed.include_stop_str_in_output,
            text_offset=len(job.echo_texts[index // parsed.n]),
            # Evaluation harnesses take the last entry for the one token they let be generated, whatever it is.
            every_token=sampling.prompt_logprobs,
        )
        self._filter = ToolCallFilter() if parsed.tools else None

    def push(self, event: TokenEvent) -> ChoiceDelta:
        """The text that became final; a finish_reason when a stop string is complete."""
        delta = self._visible(self._stream.push(event.token_id, event.logprob))
        if self._stream.stopped:
            delta.add(self.finish("stop"))
        return delta

    def finish(self, reason: str) -> ChoiceDelta:
        """The rest of the text, the tool calls, and why the choice ended."""
        self.finished = True
        last = self._visible(self._stream.finish())
        if self._filter is not None:
            rest, calls = self._filter.finish()
            last.add(ChoiceDelta(self.index, rest.text, list(rest.tokens), calls))
        last.finish_reason = "tool_calls" if last.tool_calls and reason == "stop" else reason
        return last

    def _visible(self, delta: Delta) -> ChoiceDelta:
        shown = delta if self._filter is None else self._filter.push(delta)
        return ChoiceDelta(self.index, shown.text, list(shown.tokens))


class TokenMeter:
    """Feeds the token counters and times of one request into the metrics."""

    def __init__(self, metrics: Metrics, arrived: float):
        self._metrics = metrics
        self._arrived = arrived
        self._last: dict[int, float] = {}  # choice index -> time of its latest token

    def prompt(self, tokens: int, cached_tokens: int) -> None:
        self._metrics.count("truecluster_prompt_tokens_total", tokens)
        self._metrics.count("truecluster_cached_prompt_tokens_total", cached_tokens)

    def token(self, index: int) -> None:
        now = time.monotonic()
        if not self._last:
            self._metrics.observe("truecluster_time_to_first_token_seconds", now - self._arrived)
        elif index in self._last:
            self._metrics.observe("truecluster_time_per_token_seconds", now - self._last[index])
        self._last[index] = now
        self._metrics.count("truecluster_completion_tokens_total")


def answer_deltas(job: Job, generation: Generation, meter: TokenMeter, poll_s: float) -> Iterator[ChoiceDelta | None]:
    """The answer piece by piece; None whenever nothing happened for poll_s seconds.

    There is a delta for every token, also when its text is held back. Ends when every choice has its finish_reason.
    """
    choices = [ChoiceText(job, index) for index in job.choices]
    unfinished = len(choices)
    while unfinished:
        event = generation.next_event(poll_s)
        if event is None:
            yield None
        elif event is generation.DONE:
            raise RuntimeError("the engine ended a request before all of its choices")
        elif isinstance(event, PromptEvent):
            job.usage.cached_tokens += event.cached_tokens
            meter.prompt(len(job.request.prompts[event.index_of_prompt]), event.cached_tokens)
            yield from _echo_deltas(job, event)
        elif not choices[event.index].finished:  # else: events that were under way when a stop string ended it
            choice = choices[event.index]
            if isinstance(event, FinishEvent):
                delta = choice.finish(event.reason)
            else:
                job.usage.completion_tokens += 1
                meter.token(event.index)
                delta = choice.push(event)
                if choice.finished:
                    generation.finish_choice(event.index)
            unfinished -= choice.finished
            yield delta


def _echo_deltas(job: Job, event: PromptEvent) -> Iterator[ChoiceDelta]:
    """With `echo`, the prompt as the beginning of each of its choices."""
    if not job.parsed.echo:
        return
    prompt_index, n = event.index_of_prompt, job.request.n
    tokens = []
    if event.logprobs is not None:
        tokens = echoed_tokens(job.tokenizer, job.request.prompts[prompt_index], event.logprobs)
    for index in range(prompt_index * n, (prompt_index + 1) * n):
        yield ChoiceDelta(index, job.echo_texts[prompt_index], list(tokens))


# ------------------------------------------------------------------------------
# HTTP: response objects
# ------------------------------------------------------------------------------
# Plain dicts in OpenAI's shapes, made from deltas; no socket here.


@dataclass
class Response:
    """A complete answer."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def to_json(value: object) -> str:
    """One line of ASCII; ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def json_response(status: int, body: dict, headers: dict[str, str] | None = None) -> Response:
    # The last newline is for people: a shell's prompt starts on a line of its own.
    return Response(status, to_json(body).encode("ascii") + b"\n", headers=dict(headers or {}))


def error_response(error: ApiError) -> Response:
    """OpenAI's SDKs repeat requests after any 5xx; those that do not pass by waiting are marked as final."""
    final = {"x-should-retry": "false"} if error.status >= 500 and error.status != 503 else {}
    return json_response(error.status, error.body(), final | error.headers)


def model_object(service: Service) -> dict:
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "truecluster",
        "max_model_len": service.max_context,
    }


def _answer_envelope(job: Job, kind: str, choices: list[dict]) -> dict:
    return {
        "id": job.answer_id,
        "object": kind,
        "created": job.created,
        "model": job.model,
        "system_fingerprint": job.system_fingerprint,
        "choices": choices,
    }


def fold_answer(job: Job, deltas: Iterable[ChoiceDelta | None]) -> dict:
    """The answer without streaming: all deltas added up."""
    choices = [ChoiceDelta(index) for index in job.choices]
    for delta in deltas:
        if delta is not None:
            choices[delta.index].add(delta)
    make, kind = (_chat_choice, "chat.completion") if job.parsed.chat else (_completion_choice, "text_completion")
    return _answer_envelope(job, kind, [make(job, choice) for choice in choices]) | {"usage": job.usage.as_dict()}


def _completion_choice(job: Job, choice: ChoiceDelta) -> dict:
    logprobs = None if job.parsed.top_logprobs is None else completion_logprobs(job.tokenizer, choice.tokens)
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _chat_choice(job: Job, choice: ChoiceDelta) -> dict:
    message = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [_tool_call_object(call) for call in choice.tool_calls]
    logprobs = None if job.parsed.top_logprobs is None else chat_logprobs(job.tokenizer, choice.tokens)
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _tool_call_object(call: ToolCall) -> dict:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def first_chunks(job: Job) -> list[dict]:
    """What a stream begins with: in chat, every choice's role, in order."""
    if not job.parsed.chat:
        return []
    return [_chat_chunk(job, index, {"role": "assistant", "content": ""}) for index in job.choices]


def delta_chunks(job: Job, delta: ChoiceDelta) -> list[dict]:
    """The chunks for one delta; none while its text is held back."""
    if job.parsed.chat:
        return _chat_chunks(job, delta)
    if not (delta.text or delta.tokens or delta.finish_reason):
        return []
    choice = _completion_choice(job, delta)
    if not delta.tokens:
        choice["logprobs"] = None
    return [_stream_chunk(job, "text_completion", [choice])]


def last_chunks(job: Job) -> list[dict]:
    """What a stream ends with: the usage, if it was asked for."""
    if not job.parsed.include_usage:
        return []
    kind = "chat.completion.chunk" if job.parsed.chat else "text_completion"
    return [_answer_envelope(job, kind, []) | {"usage": job.usage.as_dict()}]


def _stream_chunk(job: Job, kind: str, choices: list[dict]) -> dict:
    chunk = _answer_envelope(job, kind, choices)
    if job.parsed.include_usage:
        chunk["usage"] = job.usage.as_dict() if job.parsed.continuous_usage else None
    return chunk


def _chat_chunk(job: Job, index: int, delta: dict, logprobs: dict | None = None, reason: str | None = None) -> dict:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return _stream_chunk(job, "chat.completion.chunk", [choice])


def _chat_chunks(job: Job, delta: ChoiceDelta) -> list[dict]:
    chunks = []
    if delta.text or delta.tokens:
        logprobs = None
        if job.parsed.top_logprobs is not None and delta.tokens:
            logprobs = chat_logprobs(job.tokenizer, delta.tokens)
        chunks.append(_chat_chunk(job, delta.index, {"content": delta.text}, logprobs))
    for number, call in enumerate(delta.tool_calls):
        begin = {"index": number} | _tool_call_object(call)
        begin["function"] = {"name": call.name, "arguments": ""}
        rest = {"index": number, "function": {"arguments": call.arguments}}
        chunks += [_chat_chunk(job, delta.index, {"tool_calls": [entry]}) for entry in (begin, rest)]
    if delta.finish_reason is not None:
        chunks.append(_chat_chunk(job, delta.index, {}, reason=delta.finish_reason))
    return chunks


def finite_logprob(logprob: float) -> float:
    """Not above 0 (rounding) and not -inf (JSON has no such number; OpenAI's stand-in is -9999.0)."""
    return max(min(logprob, 0.0), LOGPROB_FLOOR)


def chat_logprobs(tokenizer: Tokenizer, tokens: list[EmittedToken]) -> dict:
    """Chat format. `bytes` are the token's own bytes, also when they are half a character."""

    def entry(token_id: int, logprob: float) -> dict:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite_logprob(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for token in tokens:
        logprob: TokenLogprob = token.logprob
        top = [entry(token_id, value) for token_id, value in logprob.top]
        content.append(entry(token.token_id, logprob.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: list[EmittedToken]) -> dict:
    """Legacy format: four lists of equal length. The first token of an echoed prompt has nulls."""
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in tokens],
        "token_logprobs": [None if t.logprob is None else finite_logprob(t.logprob.logprob) for t in tokens],
        "top_logprobs": [None if t.logprob is None else _top_dict(tokenizer, t.logprob) for t in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _top_dict(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, float]:
    """Token text -> logprob of the best tokens, and of the token itself. Of two with the same text the larger stays."""
    top: dict[str, float] = {}
    for token_id, value in [*logprob.top, (logprob.token_id, logprob.logprob)]:
        top.setdefault(tokenizer.token_text(token_id), finite_logprob(value))
    return top


# ------------------------------------------------------------------------------
# HTTP: reading requests
# ------------------------------------------------------------------------------
# Stricter than http.server, whose parser answers garbage without a status line, reads a chunked body as empty and
# hangs on a negative length. What cannot be read for certain is an error and the end of the connection, because the
# bytes after it could be taken for a request. parse_* functions are pure; Incoming owns the socket and the deadlines.


@dataclass(frozen=True)
class HttpLimits:
    """Sizes and times of the HTTP layer; tests use small ones. Times are seconds."""

    idle_s: float = 60.0  # a kept-alive connection with no request
    head_s: float = 20.0  # from the first byte of a request to the end of its headers
    body_s: float = 60.0  # the whole body
    write_s: float = 20.0  # one send to a client that does not read
    linger_s: float = 1.0  # how long unread request bytes are swallowed, so that a client gets to read its error
    keepalive_s: float = 5.0  # silence after which a stream sends its 200 and comments
    poll_s: float = 0.1  # how often a waiting request looks whether its client is still there
    request_line_bytes: int = 16 * 1024
    head_bytes: int = 64 * 1024
    headers: int = 100
    body_bytes: int = 16 * 1024 * 1024
    bodies_bytes: int = 256 * 1024 * 1024  # of all large bodies at once
    small_body_bytes: int = 64 * 1024  # up to here a body is not large
    threads: int = 1024


class LostNode(ApiError):
    """A node has connected here; it sees that this is HTTP and says so, too."""

    def __init__(self):
        super().__init__(400, "This is the HTTP API; nodes connect to the node port.")


class ClientGone(Exception):
    """The connection is of no more use: closed, reset, or the client stopped reading. Nobody is left to answer."""


class Incoming:
    """Bytes from a client, every read under a deadline (time.monotonic). Running out of time is ApiError 408."""

    READ_BYTES = 64 * 1024

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.buffer = bytearray()
        self.ended = False

    def fill(self, deadline: float) -> bool:
        """Wait for more bytes; False when the client has sent its last."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise ApiError(408, "The request was not complete in time.")
        try:
            self.sock.settimeout(left)
            chunk = self.sock.recv(self.READ_BYTES)
        except TimeoutError:
            raise ApiError(408, "The request was not complete in time.") from None
        except OSError as error:
            raise ClientGone(str(error)) from None
        self.buffer += chunk
        self.ended = not chunk
        return bool(chunk)

    def line(self, limit: int, deadline: float, too_long: ApiError) -> bytes:
        """One line without its CRLF. A line that ends in LF only is ApiError 400."""
        searched = 0
        while (end := self.buffer.find(b"\n", searched)) < 0:
            searched = len(self.buffer)
            if searched > limit:
                raise too_long
            if not self.fill(deadline):
                raise ApiError.invalid("The connection ended within the request.")
        if end > limit:
            raise too_long
        line = bytes(self.buffer[: end + 1])
        del self.buffer[: end + 1]
        if not line.endswith(b"\r\n"):
            raise ApiError.invalid("Lines of an HTTP request end in CR LF.")
        return line[:-2]

    def exactly(self, nbytes: int, deadline: float) -> bytes:
        """The next nbytes bytes."""
        while len(self.buffer) < nbytes:
            if not self.fill(deadline):
                raise ApiError.invalid("The connection ended within the request's body.")
        with memoryview(self.buffer) as view:
            data = bytes(view[:nbytes])
        del self.buffer[:nbytes]
        return data

    def is_gone(self) -> bool:
        """Whether the client has closed (or half-closed) the connection; what it has sent meanwhile is kept.

        Reads without waiting, which works wherever sockets do (no poll of a high file number, no MSG_DONTWAIT).
        """
        try:
            self.sock.settimeout(0)
            while not self.ended and len(self.buffer) < self.READ_BYTES:
                chunk = self.sock.recv(self.READ_BYTES)
                self.buffer += chunk
                self.ended = not chunk
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return self.ended


@dataclass(frozen=True)
class RequestHead:
    """Request line and headers. Header names are lower case; `path` is decoded and has no query or trailing slash.

    `path` is None when its percent escapes are not UTF-8 text without control characters: no route has such a name.
    """

    method: str
    target: str
    minor_version: int  # of HTTP/1.x
    headers: dict[str, list[str]]

    def header(self, name: str) -> str | None:
        values = self.headers.get(name)
        return ", ".join(values) if values else None

    @property
    def host(self) -> str | None:
        """The authority the client means: from an absolute target, else the Host header."""
        absolute = _ABSOLUTE_TARGET.match(self.target)
        return absolute[1] if absolute else self.header("host")

    @property
    def path(self) -> str | None:
        target = self.target.partition("?")[0]
        if absolute := _ABSOLUTE_TARGET.match(target):
            target = target[absolute.end() :] or "/"
        try:
            path = unquote_to_bytes(target).decode()
        except UnicodeDecodeError:
            return None
        return (path.rstrip("/") or "/") if path.isprintable() else None

    @property
    def wants_page(self) -> bool:
        """It asks for `/` as browsers do, which say that they take HTML."""
        takes_html = "text/html" in (self.header("accept") or "").lower()
        return takes_html and self.path == "/" and self.method in ("GET", "HEAD")

    @property
    def wants_keep_alive(self) -> bool:
        options = {option.strip().lower() for option in (self.header("connection") or "").split(",")}
        return "keep-alive" in options if self.minor_version == 0 else "close" not in options

    @property
    def expects_continue(self) -> bool:
        return self.minor_version > 0 and (self.header("expect") or "").lower() == "100-continue"


_ABSOLUTE_TARGET = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e\x80-\xff]+) HTTP/([0-9])\.([0-9])")
_HEADER_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_CHUNK_LINE = re.compile(rb"([0-9a-fA-F]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
MAX_CHUNK_LINE = 1024
MAX_TRAILER_LINES = 32
CHUNKED = "chunked"


def parse_request_line(line: bytes) -> tuple[str, str, int]:
    """(method, target, minor version). ApiError 400, or 505 for a version other than HTTP/1.x."""
    match = _REQUEST_LINE.fullmatch(line.decode("latin-1"))
    if match is None:
        raise ApiError.invalid("The request line is not HTTP/1.1.")
    method, target, major, minor = match.groups()
    if major != "1":
        raise ApiError(505, "This server speaks HTTP/1.0 and HTTP/1.1.")
    return method, target, min(int(minor), 1)


def parse_headers(lines: list[bytes]) -> dict[str, list[str]]:
    """Lower-case name -> values in order. Folded lines, control characters and bad names are ApiError 400."""
    headers: dict[str, list[str]] = {}
    for line in lines:
        match = _HEADER_LINE.fullmatch(line.decode("latin-1"))
        if match is None:
            raise ApiError.invalid("A header line of the request is malformed.")
        headers.setdefault(match[1].lower(), []).append(match[2].rstrip(" \t"))
    return headers


def body_framing(head: RequestHead) -> int | str | None:
    """How the body's end is found: its length, CHUNKED, or None without a body.

    Two answers to that question are how requests are smuggled past proxies, so only one of the headers may be there,
    once, in its plain form. ApiError 400, or 501 for a transfer coding other than chunked.
    """
    lengths, codings = head.headers.get("content-length"), head.header("transfer-encoding")
    if codings is not None:
        if lengths is not None or head.minor_version == 0:
            raise ApiError.invalid("Transfer-Encoding is not allowed with Content-Length or in HTTP/1.0.")
        if codings.lower() != "chunked":
            raise ApiError(501, "The only transfer coding this server reads is chunked.")
        return CHUNKED
    if lengths is None:
        return None
    if len(lengths) > 1 or not re.fullmatch("[0-9]{1,18}", lengths[0]):
        raise ApiError.invalid("Content-Length must be given once, as a plain number.")
    return int(lengths[0])


def read_head(incoming: Incoming, limits: HttpLimits) -> RequestHead | None:
    """The next request's head; None when the connection ends, or stays idle, before one begins."""
    idle_until = time.monotonic() + limits.idle_s
    while not incoming.buffer.lstrip(b"\r\n"):
        incoming.buffer.clear()  # empty lines in front of a request are allowed; however many come, none is kept
        try:
            if not incoming.fill(idle_until):
                return None
        except ApiError:
            return None
    incoming.buffer = incoming.buffer.lstrip(b"\r\n")
    if not incoming.buffer[:3].strip(b"\0"):  # a length of 8 bytes, as wire.py sends it first
        raise LostNode
    if not incoming.buffer[:1].isalpha():  # TLS, JSON: do not wait for a line end that may never come
        raise ApiError.invalid("This is not an HTTP request. The server speaks plain HTTP.")
    deadline = time.monotonic() + limits.head_s
    too_long = ApiError(414, f"The request line is longer than {limits.request_line_bytes} bytes.")
    method, target, minor_version = parse_request_line(incoming.line(limits.request_line_bytes, deadline, too_long))
    lines = _read_header_lines(incoming, limits.headers, limits.head_bytes, deadline)
    head = RequestHead(method, target, minor_version, parse_headers(lines))
    hosts = head.headers.get("host", [])
    if len(hosts) > 1 or (not hosts and minor_version > 0):
        raise ApiError.invalid("The request needs exactly one Host header.")
    return head


def _read_header_lines(incoming: Incoming, max_lines: int, max_bytes: int, deadline: float) -> list[bytes]:
    too_large = ApiError(431, f"The headers are more than {max_lines} lines or {max_bytes} bytes.")
    lines = []
    while line := incoming.line(max_bytes, deadline, too_large):
        max_bytes -= len(line)
        lines.append(line)
        if len(lines) > max_lines:
            raise too_large
    return lines


def read_chunked(incoming: Incoming, limit: int, deadline: float, hold: Callable[[int], None]) -> bytes:
    """A body in chunked coding, without its extensions and trailers. ApiError 400, or 413 above limit bytes.

    hold(bytes) is called before the body becomes so long, and may refuse that.
    """
    bad_chunk = ApiError.invalid("The chunked body is malformed.")
    body = bytearray()
    while True:
        match = _CHUNK_LINE.fullmatch(incoming.line(MAX_CHUNK_LINE, deadline, bad_chunk))
        if match is None:
            raise bad_chunk
        size = int(match[1], 16)
        if size == 0:
            _read_header_lines(incoming, MAX_TRAILER_LINES, MAX_CHUNK_LINE, deadline)
            return bytes(body)
        if size > limit - len(body):
            raise _body_too_large(limit)
        hold(len(body) + size)
        body += incoming.exactly(size, deadline)
        if incoming.exactly(2, deadline) != b"\r\n":
            raise bad_chunk


def _body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"Payload Too Large: the body of a request may have at most {limit} bytes.")


def check_media_type(head: RequestHead) -> None:
    """415 for a body that is not JSON as sent by API clients, curl or a page (which must say application/json)."""
    if (head.header("content-encoding") or "identity").lower() != "identity":
        raise ApiError(415, "Content-Encoding of a request is not supported.")
    media_type = (head.header("content-type") or "").partition(";")[0].strip().lower()
    allowed = ("application/json",) if head.header("origin") else JSON_MEDIA_TYPES
    if media_type not in allowed:
        raise ApiError(415, "The body must be JSON, with Content-Type: application/json.")


# No type and the form type are what curl users send without meaning anything by it.
JSON_MEDIA_TYPES = ("application/json", "text/json", "", "application/x-www-form-urlencoded")


# ------------------------------------------------------------------------------
# HTTP: who may ask
# ------------------------------------------------------------------------------
# Two dangers: someone without the key, and a page in the user's own browser that sends requests to this server,
# directly (Origin tells) or under a name of its own that it points at this machine (Host tells). Pure.


@dataclass(frozen=True)
class AccessRules:
    """Key, bind address and allowed origins of the server; what each request is held against."""

    bind_host: str = "127.0.0.1"
    api_key: str | None = None
    allowed_origins: frozenset[str] = frozenset()  # "https://app.example", or "*" for any
    own_names: frozenset[str] = frozenset({"localhost"})

    def check(self, head: RequestHead) -> None:
        """ApiError 400 or 403 by Host and Origin, then 401 by key. /health, OPTIONS and the page need no key."""
        self._check_browser(head)
        if self.api_key is None or head.method == "OPTIONS" or head.path == "/health" or head.wants_page:
            return
        scheme, _, key = (head.header("authorization") or "").partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        wanted = hashlib.sha256(self.api_key.encode()).digest()
        if not hmac.compare_digest(given, wanted) or scheme.lower() != "bearer":
            raise ApiError.unauthorized()

    def _check_browser(self, head: RequestHead) -> None:
        origin, fetch_site = head.header("origin"), head.header("sec-fetch-site")
        name = host_name(head.host) if head.host else None
        from_browser = origin is not None or fetch_site is not None
        open_loopback = self.api_key is None and is_loopback(self.bind_host)
        if name is not None and (from_browser or open_loopback) and not self._knows(name):
            raise ApiError(403, "This Host is not allowed. Use the server's IP address, localhost or --allowed-origin.")
        if origin is not None and not self._origin_allowed(origin, head.host):
            raise ApiError(403, "Requests from pages of this Origin are not allowed (see --allowed-origin).")
        if origin is None and fetch_site not in (None, "none", "same-origin") and head.method not in ("GET", "HEAD"):
            raise ApiError(403, "Requests from pages of other sites need an allowed Origin.")

    def _knows(self, name: str) -> bool:
        if "*" in self.allowed_origins or name in self.own_names or name == self.bind_host.lower():
            return True
        if any(name == host_name(origin.partition("://")[2]) for origin in self.allowed_origins if "://" in origin):
            return True
        return _is_ip(name)

    def _origin_allowed(self, origin: str, host: str | None) -> bool:
        if "*" in self.allowed_origins or origin.lower() in self.allowed_origins:
            return True
        scheme, _, authority = origin.lower().partition("://")
        default_port = {"http": ":80", "https": ":443"}.get(scheme)
        return (
            default_port is not None
            and host is not None
            and (authority.removesuffix(default_port) == host.lower().removesuffix(default_port))
        )

    def cors_headers(self, head: RequestHead) -> dict[str, str]:
        """Headers that let an allowed page read the answer; nothing unless --allowed-origin was given."""
        origin = head.header("origin")
        if not self.allowed_origins:
            return {}
        headers = {"Vary": "Origin"}
        if origin is None or not ({"*", origin.lower()} & self.allowed_origins):
            return headers
        headers["Access-Control-Allow-Origin"] = "*" if "*" in self.allowed_origins else origin
        headers["Access-Control-Expose-Headers"] = "x-request-id, retry-after"
        if head.method == "OPTIONS":
            asked = (head.header("access-control-request-headers") or "").lower().replace(" ", "").split(",")
            extra = [name for name in asked if re.fullmatch("(x-stainless|openai)-[a-z0-9-]{1,64}", name)]
            headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
            headers["Access-Control-Allow-Headers"] = ", ".join(["authorization", "content-type", *extra])
            headers["Access-Control-Max-Age"] = "600"
        return headers


def host_name(authority: str) -> str:
    """The lower-case name or address of `name`, `name:port`, `1.2.3.4:port` or `[::1]:port`; ApiError 400 for else."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/@\[\]\\?#,]+))(?::[0-9]{0,5})?", authority)
    if match is None:
        raise ApiError.invalid("The Host of the request is malformed.")
    return (match[1] or match[2]).lower().removesuffix(".")


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a bind address is reached from this machine only."""
    return host.lower() == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


# ------------------------------------------------------------------------------
# HTTP: one request and its answer
# ------------------------------------------------------------------------------
# An Exchange reads one request from a connection and sends one answer, whatever happens in between. A connection is
# kept only while it is certain where the next request begins.

SERVER_NAME = "truecluster"
CLIENT_CLOSED_STATUS = 499  # in the log and in the metrics only: nobody was there to be told


def response_head(status: int, headers: dict[str, str]) -> bytes:
    """Status line and headers."""
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "Unknown"
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class RequestBodies:
    """What request bodies may take of the memory, all connections together.

    Large ones share limit_bytes while they are held. And as Python objects and tokens a body takes up to 200 times its
    size: so a large one is parsed when no other large one is, and of small ones so many at once.
    """

    SMALL_AT_ONCE = 16

    def __init__(self, limit_bytes: int):
        self.small_turns = threading.BoundedSemaphore(self.SMALL_AT_ONCE)
        self._large_turn = threading.Lock()
        self._next_turn_at = float("-inf")
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def large_turn(self) -> Iterator[None]:
        """For one large body at a time.

        No other thread runs while the parser does: so the garbage collector must not go through its millions of objects
        again and again meanwhile, and the next body waits for as long as this one took.
        """
        with self._large_turn:
            time.sleep(max(0.0, self._next_turn_at - time.monotonic()))
            began = time.monotonic()
            gc.disable()
            try:
                yield
            finally:
                gc.enable()
                ended = time.monotonic()
                self._next_turn_at = ended + (ended - began)

    def take(self, nbytes: int) -> None:
        """Notes so many more of a large body; ApiError 503 when others hold them."""
        with self._lock:
            if self.held_bytes + nbytes > self._limit_bytes:
                raise ApiError.overloaded("Other large requests are being read. Please try again later.")
            self.held_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.held_bytes -= nbytes


class Shared(Protocol):
    """What all exchanges of a server have in common: the server itself."""

    service: Service
    limits: HttpLimits
    bodies: RequestBodies
    metrics: Metrics
    access: AccessRules
    under_way: set[Exchange]


class Exchange:
    """One request and one answer. The attributes are what a route needs; `run` is the whole life."""

    def __init__(self, server: Shared, incoming: Incoming, client: str):
        self.server = server
        self.service = server.service
        self.limits = server.limits
        self.incoming = incoming
        self.client = client
        self.request_id = f"req_{secrets.token_hex(8)}"
        self.arrived = time.monotonic()
        self.head: RequestHead | None = None
        self.framing: int | str | None = None  # of a body that is still to be read
        self.held_bytes = 0  # of RequestBodies, to the end of the exchange
        self.is_of_a_node = False
        self.route_name = "none"
        self.status = 0  # of the answer; 0 until it is sent
        self.outcome = ""  # for the log, where the status does not tell how it ended
        self.keep_alive = False

    def run(self, route: Callable[[Exchange], Response | None]) -> bool:
        """Serve one request. Whether the connection may carry another one. route(self): what its route answers."""
        try:
            response = self._answer(route)
        except ClientGone:
            self._log_gone()
            return False
        except ApiError as error:
            self.is_of_a_node = isinstance(error, LostNode)
            if self.incoming.ended:  # it may still listen
                self.outcome = ", client went away within its request"
            response = error_response(error)
        except Exception as error:  # noqa: BLE001  any bug of ours becomes one log line and a 500
            log_unexpected(self.request_id, error)
            response = error_response(ApiError.internal())
        if response is not None:
            try:
                self.send(response)
            except ClientGone:
                self._log_gone()
                return False
        if self.status:
            self._log()
        return self.keep_alive

    def _answer(self, route: Callable[[Exchange], Response | None]) -> Response | None:
        """The response; None when there was no request, or when a stream has been sent already."""
        head = self.head = read_head(self.incoming, self.limits)
        if head is None:
            return None
        self.arrived = time.monotonic()
        self.server.under_way.add(self)
        self.framing = body_framing(head)
        self.keep_alive = head.wants_keep_alive
        self.server.access.check(head)
        return route(self)

    # --- the body ---

    def read_body(self) -> bytes:
        """The whole body, after the checks that need only the head. The connection is lost if this fails midway."""
        head, framing, limit = self.head, self.framing, self.limits.body_bytes
        if framing is None:
            raise ApiError(411, "The request needs a body: a JSON object, with Content-Length or chunked.")
        check_media_type(head)
        if head.header("expect") and head.minor_version > 0 and not head.expects_continue:
            raise ApiError(417, "The only expectation this server meets is 100-continue.")
        if framing != CHUNKED and framing > limit:
            raise _body_too_large(limit)
        self.keep_alive = False
        if framing != CHUNKED:
            self._hold(framing)
        if head.expects_continue:
            self.transmit(b"HTTP/1.1 100 Continue\r\n\r\n")
        deadline = time.monotonic() + self.limits.body_s
        if framing == CHUNKED:
            body = read_chunked(self.incoming, limit, deadline, self._hold)
        else:
            body = self.incoming.exactly(framing, deadline)
        self.framing = None
        self.keep_alive = head.wants_keep_alive
        return body

    def _hold(self, nbytes: int) -> None:
        """Accounts for a body of so many bytes before they are read; small ones need not be."""
        if nbytes > max(self.held_bytes, self.limits.small_body_bytes):
            self.server.bodies.take(nbytes - self.held_bytes)
            self.held_bytes = nbytes

    def turn_to_parse(self) -> contextlib.AbstractContextManager:
        """Held while the body is parsed and encoded."""
        return self.server.bodies.large_turn() if self.held_bytes else self.server.bodies.small_turns

    def end(self) -> None:
        """Gives back what the body has taken."""
        held, self.held_bytes = self.held_bytes, 0
        self.server.bodies.give_back(held)

    def _pass_over_body(self) -> None:
        """An answer that comes before the body was read: swallow a small one, else give the connection up."""
        framing, self.framing = self.framing, None
        if not framing or not self.keep_alive:
            return
        self.keep_alive = False
        if framing == CHUNKED or framing > self.limits.small_body_bytes or self.head.expects_continue:
            return
        with contextlib.suppress(ApiError):
            self.incoming.exactly(framing, time.monotonic() + self.limits.linger_s)
            self.keep_alive = True

    # --- the answer ---

    def send(self, response: Response) -> None:
        """Send a complete response."""
        self._pass_over_body()
        headers = self._common_headers() | response.headers
        if response.status != 204:
            headers["Content-Type"] = response.content_type
            headers["Content-Length"] = str(len(response.body))
        is_head = self.head is not None and self.head.method == "HEAD"
        self._begin(response.status, headers, b"" if is_head else response.body)

    def open_stream(self) -> EventStream:
        """Send the 200 of a server-sent event stream."""
        headers = self._common_headers()
        headers["Content-Type"] = "text/event-stream; charset=utf-8"
        headers["Cache-Control"] = "no-cache"
        headers["X-Accel-Buffering"] = "no"
        chunked = self.head.minor_version > 0
        if chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            self.keep_alive = False
            headers["Connection"] = "close"
        self._begin(200, headers)
        return EventStream(self, chunked)

    def _common_headers(self) -> dict[str, str]:
        headers = {"Date": formatdate(usegmt=True), "Server": SERVER_NAME, "x-request-id": self.request_id}
        if not self.keep_alive:
            headers["Connection"] = "close"
        elif self.head.minor_version == 0:
            headers["Connection"] = "keep-alive"
        if self.head is not None:
            headers |= self.server.access.cors_headers(self.head)
        return headers

    def _begin(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.status = status
        self.server.metrics.count("truecluster_http_requests_total", route=self.route_name, status=status)
        self.transmit(response_head(status, headers) + body)

    def transmit(self, data: bytes) -> None:
        """Send bytes; ClientGone when the client is, or when it does not take them within write_s."""
        try:
            self.incoming.sock.settimeout(self.limits.write_s)  # for the whole of sendall, not for each part
            self.incoming.sock.sendall(data)
        except OSError as error:
            self.keep_alive = False
            raise ClientGone(str(error)) from None

    # --- the log ---

    def _log(self) -> None:
        if self.is_of_a_node:  # it tries again for ever
            self.server.note_lost_node(self.client)
            return
        method = self.head.method if self.head else "?"
        target = self.head.target.partition("?")[0] if self.head else "?"
        milliseconds = (time.monotonic() - self.arrived) * 1000
        level = logging.DEBUG if self.route_name in QUIET_ROUTES else logging.INFO
        line = f'{self.request_id} {self.client} "{printable(method, 20)} {printable(target)}" {self.status}'
        log.log(level, "%s%s %.0f ms", line, self.outcome, milliseconds)

    def _log_gone(self) -> None:
        if self.head is not None:
            self.server.metrics.count("truecluster_http_cancelled_total")
            self.status, self.outcome = CLIENT_CLOSED_STATUS, ", client went away"
            self._log()


QUIET_ROUTES = ("/health", "/metrics", "/status")


def log_unexpected(request_id: str, error: Exception) -> None:
    """One line at error level that says where, without the exception's text (it may hold the prompt)."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"
    log.error("%s internal error: %s in %s", request_id, type(error).__name__, place)
    log.debug(
        "%s %s", request_id, " < ".join(printable(line) for line in traceback.format_tb(error.__traceback__)[::-1])
    )


class EventStream:
    """Server-sent events of one answer, each write in a single send. Chunked coding on HTTP/1.1, plain on 1.0."""

    def __init__(self, exchange: Exchange, chunked: bool):
        self.exchange = exchange
        self.chunked = chunked

    def write(self, text: str) -> None:
        data = text.encode("ascii")
        self.exchange.transmit(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def end(self, text: str) -> None:
        """The last events and the end of the body."""
        data = text.encode("ascii")
        self.exchange.transmit(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if self.chunked else data)


# ------------------------------------------------------------------------------
# HTTP: the page
# ------------------------------------------------------------------------------
# What GET / shows in a browser: the plan, the speed, a chat. One constant without data, so that it needs no key: its
# script asks /status and /v1/chat/completions as any client does, with the key that the user types. Node ids, errors
# and answers are other people's text: they get into the page as text nodes only, and the policy forbids the rest.

PAGE_STYLE = r"""
:root { --paper: #f6f6f4; --card: #fff; --ink: #1d2125; --soft: #666e77; --line: #dcdcd8; --strong: #2457c5;
  --on-strong: #fff; --bubble: #e8eefb; --good: #2c8a4b; --busy: #a86a00; --bad: #c03434; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --card: #1d2125; --ink: #e4e7ea; --soft: #98a1ab;
  --line: #333a41; --strong: #7fa6f8; --on-strong: #10151d; --bubble: #27344d; --good: #5fc27f; --busy: #dba24a;
  --bad: #f07878; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0 auto; padding: 28px 20px; max-width: 1000px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; color-scheme: light dark; }
header, .figures, .bar { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 24px; }
header { justify-content: space-between; margin-bottom: 20px; }
h1 { margin: 0; font-size: 20px; overflow-wrap: anywhere; }
h2 { margin: 24px 0 8px; font-size: 13px; font-weight: 600; color: var(--soft); }
p { margin: 0; }
.soft { color: var(--soft); font-size: 13px; }
.figures b { font-size: 20px; font-variant-numeric: tabular-nums; }
.notice { padding: 10px 14px; margin-bottom: 20px; border-left: 3px solid var(--busy); background: var(--card); }
.boxes { display: flex; flex-wrap: wrap; gap: 14px 0; margin: 0; padding: 0; list-style: none; }
.boxes li { display: flex; align-items: center; min-width: 0; }
#plan li + li::before { content: "\2192"; width: 32px; text-align: center; font-size: 18px; color: var(--soft); }
#others { gap: 14px; }
.boxes:empty { display: none; }
.box, .chat, #login { border: 1px solid var(--line); border-radius: 10px; background: var(--card); }
.box { display: flex; flex-direction: column; align-self: stretch; width: 212px; padding: 12px 14px; }
#others .box { border-style: dashed; }
.box h3 { margin: 0 0 6px; font-size: 15px; overflow-wrap: anywhere; }
.box dl { display: flex; flex-wrap: wrap; gap: 1px 14px; margin: 0 0 6px; font-size: 13px; }
.box dl div { display: flex; justify-content: space-between; gap: 6px; width: 100%; }
.box dt { color: var(--soft); white-space: nowrap; }
.box dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.box meter { width: 100%; height: 7px; margin-top: auto; }
.ready { color: var(--good); } .loading, .joined { color: var(--busy); } .lost, .error { color: var(--bad); }
.chat { margin-top: 24px; padding: 14px; }
#log { display: flex; flex-direction: column; gap: 10px; max-height: 52vh; overflow-y: auto; }
#log:not(:empty) { margin-bottom: 14px; }
#log div { max-width: 85%; white-space: pre-wrap; overflow-wrap: anywhere; }
#log .user { align-self: flex-end; padding: 6px 12px; border-radius: 12px; background: var(--bubble); }
#log p { white-space: normal; }
textarea, input, button { padding: 8px 12px; border: 1px solid var(--line); border-radius: 8px; background: var(--card);
  color: inherit; font: inherit; }
textarea { display: block; width: 100%; resize: vertical; }
button { cursor: pointer; }
:focus-visible { outline: 2px solid var(--strong); outline-offset: -1px; }
button.main { border-color: var(--strong); background: var(--strong); color: var(--on-strong); }
.bar { align-items: center; gap: 8px; margin-top: 10px; }
.bar input { width: 72px; padding: 4px 8px; margin-right: auto; }
#login { display: grid; gap: 10px; max-width: 420px; padding: 18px; margin: 10vh auto 0; }
#login .bar { margin: 0; }
#login input { flex: 1; min-width: 0; padding: 8px 12px; margin: 0; }
@media (max-width: 560px) { body { padding: 18px 14px; } .boxes li { flex-direction: column; width: 100%; }
  #plan { gap: 0; } #plan li + li::before { content: "\2193"; } .box { width: 100%; } .box dl div { width: auto; }
  .figures { gap: 4px 16px; } .figures b { font-size: 17px; } #temperature { width: 58px; } }
"""

PAGE_SCRIPT = r"""
"use strict";
const $ = (id) => document.getElementById(id);
const turns = [];    // the conversation so far, as the API takes it
let running = null;  // the AbortController of the answer that is being written
let timer = 0;       // of the next poll
let shown = "";      // what the boxes were made from

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text ?? "";
  return made;
}

// --- asking the server ---

async function call(path, options) {
  const key = sessionStorage.getItem("key");
  const bytes = new TextEncoder().encode(key ?? "");  // a header carries bytes: one char each
  const bearer = key ? { Authorization: "Bearer " + String.fromCharCode(...bytes) } : {};
  const headers = { ...options.headers, ...bearer };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401) {
    $("why").textContent = key ? "The server refused this key." : "This server asks for an API key.";
    $("login").hidden = false;
    $("main").hidden = true;
    $("key").focus();
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The server answered ${response.status}.`);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The answer broke off.");
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame === "data: [DONE]") return;
      if (frame.startsWith("data: ")) yield JSON.parse(frame.slice(6));
    }
  }
}

// --- plan and speed ---

function size(bytes) {
  const gib = bytes / 2 ** 30;
  return gib < 1 ? `${Math.ceil(gib * 1024)} MiB` : `${gib.toFixed(1)} GiB`;
}

function box(node) {
  const item = element("li", "");
  const made = item.appendChild(element("div", "box"));
  const facts = element("dl", "");
  const fact = (name, text, className) =>
    facts.appendChild(element("div", "")).append(element("dt", "", name), element("dd", className ?? "", text));
  const used = (node.weight_bytes ?? 0) + (node.cache_bytes ?? 0), memory = node.memory_bytes;
  made.append(element("h3", "", node.node_id), facts);
  fact("state", node.state, node.state);
  fact("device", node.device);
  if (node.layers) fact("layers", `${node.layers[0]}\u2013${node.layers[1] - 1}`);
  if (used || memory) fact("memory", [used, memory].filter(Boolean).map(size).join(" / "));
  if (node.measured_ms != null) fact("per token", `${node.measured_ms.toFixed(1)} ms`);
  else if (node.predicted_ms != null) fact("per token", `about ${node.predicted_ms.toFixed(1)} ms`);
  if (used && memory) made.append(Object.assign(element("meter", ""), { value: used / memory, title: "memory used" }));
  if (node.last_error) made.append(element("p", "error soft", node.last_error));
  return item;
}

function show(status) {
  const nodes = status.nodes ?? [], ready = status.state === "ready";
  const stages = (status.plan ?? []).map((stage) => nodes.find((node) => node.node_id === stage.node_id) ??
    { node_id: stage.node_id, state: "lost", layers: [stage.layer_start, stage.layer_end_exclusive] });
  const others = nodes.filter((node) => !stages.includes(node));
  $("login").hidden = true;
  $("main").hidden = false;
  $("model").textContent = status.model ?? "TrueCluster";
  $("facts").textContent = `${status.quant}, ${status.max_context} tokens of context, ${status.state}`;
  $("rate").textContent = (status.tokens_per_second ?? 0).toFixed(1);
  $("active").textContent = `${status.active_slots ?? 0} of ${status.slots ?? 0}`;
  $("waiting").textContent = status.waiting_requests ?? 0;
  $("notice").hidden = ready;
  const what = status.state === "loading" ? "The nodes load their layers" : "Waiting for nodes";
  const counts = `${status.ready_nodes} of ${status.required_nodes} ready`;
  if (!ready) $("notice").textContent = `${what}: ${counts}. ${status.why_not_ready ?? ""}`;
  const now = JSON.stringify([stages, others], (name, value) => (name === "last_seen_s" ? 0 : value));
  if (now === shown) return;
  shown = now;
  $("plan").replaceChildren(...stages.map(box));
  $("others").replaceChildren(...others.map(box));
  $("others-title").hidden = !others.length;
  $("others-title").textContent = stages.length ? "Not in the plan" : "Nodes";
}

async function poll() {
  if (document.hidden) return;
  try {
    show(await (await call("/status", { signal: AbortSignal.timeout(8000) })).json());
  } catch (error) {
    $("main").hidden = !$("login").hidden;
    $("notice").hidden = false;
    $("notice").textContent = `No news from the coordinator (${error.message}). Trying again.`;
  }
  clearTimeout(timer);
  if ($("login").hidden) timer = setTimeout(poll, 1000);
}

// --- chat ---

function add(place, piece) {
  const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  place.append(piece);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function ask(text) {
  const answer = { role: "assistant", content: "" }, place = element("div", "assistant"), begun = performance.now();
  let first = 0, tokens = 0, note = [], failed = false;
  add($("log"), element("div", "user", text));
  add($("log"), place);
  turns.push({ role: "user", content: text });
  setRunning(new AbortController());
  try {
    const body = JSON.stringify({ messages: turns, temperature: $("temperature").valueAsNumber, stream: true,
      stream_options: { include_usage: true } });
    const headers = { "Content-Type": "application/json" };
    const response = await call("/v1/chat/completions", { method: "POST", headers, body, signal: running.signal });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      tokens = chunk.usage?.completion_tokens ?? tokens;
      if (chunk.choices[0]?.finish_reason === "length") note.push("cut off, no room left");
      const piece = chunk.choices[0]?.delta?.content;
      if (!piece) continue;
      first ||= performance.now();
      answer.content += piece;
      add(place, piece);
    }
    note.push(`${tokens} tokens`);
    if (first) note.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
    if (tokens > 9) note.push(`then ${((tokens - 1) * 1000 / (performance.now() - first)).toFixed(1)} tokens/s`);
  } catch (error) {
    failed = error.name !== "AbortError";
    note = [failed ? error.message : "stopped"];
  }
  add(place, element("p", failed ? "error" : "soft", note.join(", ")));
  if (answer.content || !failed) turns.push(answer);
  else if (turns.pop() && !$("text").value) $("text").value = text;  // as if it had not been asked
  setRunning(null);
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = $("new").hidden = running !== null;
  $("stop").hidden = running === null;
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  ask(text);
};
$("text").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
};
$("stop").onclick = () => running?.abort();
$("new").onclick = () => {
  turns.length = 0;
  $("log").replaceChildren();
  $("text").focus();
};
$("login").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  $("login").hidden = true;
  poll();
};
document.onvisibilitychange = poll;
poll();
"""

PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TrueCluster</title>
<style>{PAGE_STYLE}</style>
<form id="login" hidden>
  <p id="why"></p>
  <div class="bar">
    <input id="key" type="password" aria-label="API key" placeholder="API key" autocomplete="off" required>
    <button class="main">Continue</button>
  </div>
  <p class="soft">It stays in this tab.</p>
</form>
<main id="main" hidden>
  <header>
    <div><h1 id="model"></h1><p class="soft" id="facts"></p></div>
    <p class="figures">
      <span><b id="rate"></b> tokens/s</span>
      <span><b id="active"></b> slots busy</span>
      <span><b id="waiting"></b> waiting</span>
    </p>
  </header>
  <p class="notice" id="notice" role="status" hidden></p>
  <ol class="boxes" id="plan" aria-label="Plan"></ol>
  <h2 id="others-title" hidden></h2>
  <ul class="boxes" id="others" aria-labelledby="others-title"></ul>
  <section class="chat" aria-label="Chat">
    <div id="log" role="log"></div>
    <form id="ask">
      <textarea id="text" rows="2" aria-label="Message" placeholder="Ask the model"></textarea>
      <div class="bar">
        <label class="soft" for="temperature">Temperature</label>
        <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.7">
        <button type="button" id="new">New chat</button>
        <button type="button" class="main" id="stop" hidden>Stop</button>
        <button class="main" id="send">Send</button>
      </div>
    </form>
  </section>
</main>
<noscript>This page needs JavaScript.</noscript>
<script>{PAGE_SCRIPT}</script>
</html>
"""


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src {_csp_hash(PAGE_STYLE)}; "
    f"script-src {_csp_hash(PAGE_SCRIPT)}; connect-src 'self'; require-trusted-types-for 'script'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",  # the same address answers other clients with plain text
}


# ------------------------------------------------------------------------------
# HTTP: routes
# ------------------------------------------------------------------------------


def answer_root(exchange: Exchange, _: str) -> Response:
    """The page for browsers; for everybody else a line and the routes."""
    if exchange.head.wants_page:
        return Response(200, PAGE.encode(), "text/html; charset=utf-8", dict(PAGE_HEADERS))
    routes = "\n".join(f"{route.methods[0]:5}{route.name}" for route in dict.fromkeys(ROUTES.values()))
    text = f"TrueCluster serves {exchange.service.model_id} with the OpenAI API. Routes:\n\n{routes}\n"
    return Response(200, text.encode(), "text/plain; charset=utf-8", {"Cache-Control": "no-store"})


def answer_health(exchange: Exchange, _: str) -> Response:
    status, body = exchange.service.health()
    return json_response(status, body, {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None)


def answer_status(exchange: Exchange, _: str) -> Response:
    return json_response(200, exchange.service.status())


def answer_metrics(exchange: Exchange, _: str) -> Response:
    text = exchange.server.metrics.render(exchange.service.gauges())
    return Response(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")


def answer_models(exchange: Exchange, _: str) -> Response:
    return json_response(200, {"object": "list", "data": [model_object(exchange.service)]})


def answer_model(exchange: Exchange, model_id: str) -> Response:
    if model_id != exchange.service.model_id:
        raise ApiError.model_not_found(printable(model_id), exchange.service.model_id)
    return json_response(200, model_object(exchange.service))


def answer_completion(exchange: Exchange, _: str) -> Response | None:
    return answer_generation(exchange, chat=False)


def answer_chat(exchange: Exchange, _: str) -> Response | None:
    return answer_generation(exchange, chat=True)


def answer_generation(exchange: Exchange, chat: bool) -> Response | None:
    """Both generating routes. Checks come in the order body, fields, model, prompt, readiness; then the engine runs."""
    service = exchange.service
    body = exchange.read_body()
    with exchange.turn_to_parse():
        parsed = parse_request(parse_body(body), chat)
        job = prepare_job(parsed, service)
    del body  # not while the answer is made
    not_ready = service.readiness()
    if not_ready is not None:
        raise not_ready
    generation = service.engine.submit(job.request)
    try:
        meter = TokenMeter(exchange.server.metrics, exchange.arrived)
        deltas = watched(exchange, answer_deltas(job, generation, meter, exchange.limits.poll_s))
        if parsed.stream:
            return stream_answer(exchange, job, deltas)
        return json_response(200, fold_answer(job, deltas))
    finally:
        generation.close()


def watched(exchange: Exchange, deltas: Iterator[ChoiceDelta | None]) -> Iterator[ChoiceDelta | None]:
    """The same deltas, with a look at the client before each: ClientGone as soon as it has closed the connection."""
    for delta in deltas:
        if exchange.incoming.is_gone():
            raise ClientGone("the client closed the connection")
        yield delta


def stream_answer(exchange: Exchange, job: Job, deltas: Iterator[ChoiceDelta | None]) -> None:
    """Server-sent events. The 200 goes out with the first token, or after keepalive_s with a comment: an error before
    that is a real response, a later one is an error frame. However it ends, the stream ends with [DONE]."""
    stream = None
    last_write = exchange.arrived
    try:
        for delta in deltas:
            text = "" if delta is None else "".join(sse_frame(chunk) for chunk in delta_chunks(job, delta))
            if not text and time.monotonic() - last_write >= exchange.limits.keepalive_s:
                text = ": keepalive\n\n"
            if stream is None and (text or delta is not None):
                stream = exchange.open_stream()
                text = "".join(sse_frame(chunk) for chunk in first_chunks(job)) + text
            if text:
                stream.write(text)
                last_write = time.monotonic()
        stream = stream or exchange.open_stream()
        stream.end("".join(sse_frame(chunk) for chunk in last_chunks(job)) + "data: [DONE]\n\n")
    except ClientGone:
        raise
    except Exception as error:
        if stream is None:
            raise
        if not isinstance(error, ApiError):
            log_unexpected(exchange.request_id, error)
            error = ApiError.internal()
        exchange.outcome = ", cut off"
        stream.end(sse_frame(error.body()) + "data: [DONE]\n\n")
        exchange.keep_alive = False


def sse_frame(chunk: dict) -> str:
    """One event: a single line of ASCII, so that no client can split it inside a character or at U+2028."""
    return f"data: {to_json(chunk)}\n\n"


@dataclass(frozen=True)
class Route:
    """A path's canonical name (also the label in the metrics), its methods and what answers it."""

    name: str
    methods: tuple[str, ...]
    answer: Callable[[Exchange, str], Response | None]


GET_METHODS, POST_METHODS = ("GET", "HEAD"), ("POST",)
MODEL_ROUTE = Route("/v1/models/{id}", GET_METHODS, answer_model)
OPENAI_ROUTES = {
    "/models": Route("/v1/models", GET_METHODS, answer_models),
    "/completions": Route("/v1/completions", POST_METHODS, answer_completion),
    "/chat/completions": Route("/v1/chat/completions", POST_METHODS, answer_chat),
}
ROUTES = {
    "/": Route("/", GET_METHODS, answer_root),
    "/health": Route("/health", GET_METHODS, answer_health),
    "/status": Route("/status", GET_METHODS, answer_status),
    "/metrics": Route("/metrics", GET_METHODS, answer_metrics),
    **OPENAI_ROUTES,  # clients whose base_url lacks /v1
    **{f"/v1{path}": route for path, route in OPENAI_ROUTES.items()},
}


def find_route(head: RequestHead) -> tuple[Route, str]:
    """The route of a path and, for a single model, its id (which may hold slashes). ApiError 404."""
    path = head.path
    if path in ROUTES:
        return ROUTES[path], ""
    for prefix in ("/v1/models/", "/models/"):
        if path is not None and path.startswith(prefix):
            return MODEL_ROUTE, path.removeprefix(prefix)
    shown = printable(head.target.partition("?")[0])
    raise ApiError(404, f"Invalid URL ({printable(head.method, 20)} {shown})")


def method_not_allowed(head: RequestHead, route: Route) -> ApiError:
    """405 that names what the route does take, for those who open it in a browser."""
    allowed = ", ".join((*route.methods, "OPTIONS"))
    message = f"Not allowed to {printable(head.method, 20)} on {route.name}. This route takes {route.methods[0]}."
    return ApiError(405, message, headers={"Allow": allowed})


def dispatch(exchange: Exchange) -> Response | None:
    """What the route of a request's path answers; None when it has sent that itself. ApiError 404 or 405."""
    head = exchange.head
    if head.method == "OPTIONS":
        exchange.route_name = "OPTIONS"
        return Response(204)
    route, argument = find_route(head)
    exchange.route_name = route.name
    if head.method not in route.methods:
        raise method_not_allowed(head, route)
    return route.answer(exchange, argument)


# ------------------------------------------------------------------------------
# HTTP: the server
# ------------------------------------------------------------------------------
# A thread per connection, at most `limits.threads`; the connection above that is told so by the accepting thread,
# which never waits for anyone.


class ConnectionHandler(socketserver.BaseRequestHandler):
    """One connection in its own thread: exchanges one after another until either side ends it."""

    server: HttpServer

    def setup(self) -> None:
        with contextlib.suppress(OSError):
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.incoming = Incoming(self.request)

    def handle(self) -> None:
        client = self.client_address[0]
        with self.server.tracked(self.request):
            while self._serve_one(client):
                continue

    def _serve_one(self, client: str) -> bool:
        exchange = Exchange(self.server, self.incoming, client)
        try:
            return exchange.run(dispatch)
        finally:
            exchange.end()
            self.server.under_way.discard(exchange)

    def finish(self) -> None:
        """Swallow what the client still sends, for a moment: closing over unread bytes would reset the connection
        and take the answer away from a client that has not read it yet."""
        deadline = time.monotonic() + self.server.limits.linger_s
        self.incoming.buffer.clear()
        with contextlib.suppress(OSError, ClientGone, ApiError):
            self.request.shutdown(socket.SHUT_WR)
            while not self.incoming.ended and self.incoming.fill(deadline):
                self.incoming.buffer.clear()


SPARE_FILES = 512  # for everything else the process has open


def _allow_open_files(wanted: int) -> None:
    """Raise the process's soft limit of open files, where it may: 1,024 is a common one, and that many are clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class HttpServer(socketserver.ThreadingTCPServer):
    """The HTTP API on one address. `start` serves in a thread, `stop` ends it and every connection.

    service: what is served; access: who may ask; limits: sizes and times. Port 0 takes a free port, see `port`.
    Raises StartupError when the address cannot be used.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(
        self,
        host: str,
        port: int,
        service: Service,
        api_key: str | None = None,
        allowed_origins: Iterable[str] = (),
        limits: HttpLimits = HttpLimits(),
    ):
        self.service = service
        self.limits = limits
        self.metrics = Metrics()
        self.bodies = RequestBodies(limits.bodies_bytes)
        self.node_port: int | None = None  # for nodes that mistake this port for it
        self._lost_nodes: set[str] = set()  # addresses of nodes that did
        own_name = socket.gethostname().lower()
        self.access = AccessRules(
            bind_host=host,
            api_key=api_key,
            allowed_origins=frozenset(origin.lower().rstrip("/") for origin in allowed_origins),
            own_names=frozenset({"localhost", own_name, f"{own_name}.local"}),
        )
        _allow_open_files(limits.threads + SPARE_FILES)
        self._places = threading.BoundedSemaphore(limits.threads)
        self._refused: deque[tuple[float, socket.socket]] = deque()
        self._open: set[socket.socket] = set()
        self.under_way: set[Exchange] = set()  # requests that have come and are not answered to the end
        self._accepting: threading.Thread | None = None
        self._open_lock = threading.Lock()
        try:
            if not 0 <= port <= 65535:
                raise OverflowError("a port is a number from 0 to 65535")
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = family
            super().__init__(address[:2], ConnectionHandler)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StartupError(f"cannot listen on {host} port {port} (--api-host, --api-port): {reason}") from None

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            with contextlib.suppress(OSError, AttributeError):  # `::` serves IPv4 too where the system can
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def start(self) -> None:
        """Serve in a daemon thread."""
        self._accepting = threading.Thread(target=self.serve_forever, args=(0.1,), name="http-accept", daemon=True)
        self._accepting.start()

    def wait_for_answers(self, timeout_s: float) -> None:
        """Wait until every request is answered to the end: after the engine's, only their last words are to be sent."""
        deadline = time.monotonic() + timeout_s
        while self.under_way and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self) -> None:
        """End accepting, then every open connection; their threads end by themselves."""
        if self._accepting is not None:
            self.shutdown()
        self.server_close()
        with self._open_lock:
            for sock in [*self._open, *(sock for _, sock in self._refused)]:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def tracked(self, sock: socket.socket) -> Iterator[None]:
        """While inside, `stop` knows the connection."""
        with self._open_lock:
            self._open.add(sock)
        try:
            yield
        finally:
            with self._open_lock:
                self._open.discard(sock)

    MAX_LOST_NODES = 256

    def note_lost_node(self, host: str) -> None:
        """Says, once for each address, that a node has come to the wrong port."""
        with self._open_lock:
            if host in self._lost_nodes or len(self._lost_nodes) >= self.MAX_LOST_NODES:
                return
            self._lost_nodes.add(host)
        log.warning("a node at %s connects to the HTTP API; start it with --port %s", host, self.node_port)

    # --- accepting ---

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.05)  # the pending connection keeps the listener readable: do not spin
            raise

    def process_request(self, request: socket.socket, client_address: object) -> None:
        if not self._places.acquire(blocking=False):
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no more threads
            self._places.release()
            self._refuse(request)

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    MAX_REFUSED = 64

    def _refuse(self, sock: socket.socket) -> None:
        """503 without a thread. The socket is closed a little later (service_actions), so that the answer arrives."""
        response = error_response(ApiError.overloaded("Too many connections. Please try again later."))
        headers = response.headers | {
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "Connection": "close",
        }
        self.metrics.count("truecluster_http_refused_connections_total")
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(response_head(response.status, headers) + response.body)
            sock.shutdown(socket.SHUT_WR)
        self._refused.append((time.monotonic() + self.limits.linger_s, sock))

    def service_actions(self) -> None:
        while self._refused and (len(self._refused) > self.MAX_REFUSED or self._refused[0][0] <= time.monotonic()):
            _, sock = self._refused.popleft()
            with contextlib.suppress(OSError):
                sock.recv(Incoming.READ_BYTES)
            sock.close()

    def handle_error(self, request: socket.socket, client_address: object) -> None:
        """socketserver's hook for whatever a handler let through; never a traceback on the terminal."""
        log_unexpected("connection", sys.exc_info()[1])


# ------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------

# What int4 is calibrated on (Checkpoint.calibrate): a little of what models are asked to read and write.
CALIBRATION_TEXT = """The old harbour was quiet when Maria arrived, and only two boats, 14 and 27, were still tied up.
"You're late," said the captain; "we leave at 6:45, with or without you."
def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
Les mathematiques, die Musik und el tiempo: 3.14 * 2 = 6.28. Explain why the sky is blue in one sentence."""

HERE = Path(__file__).resolve().parent
BUNDLED_MODEL = HERE / "tests" / "tiny-chat"
DEFAULT_MAX_CONTEXT = 8192
COMPARED_PASSES = 16  # tokens after which predicted and measured times are logged side by side
EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 130


def parse_boolean(text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


# (flag, argparse keywords). Ranges that argparse cannot say are in LOWEST.
FLAGS = (
    ("--model", {"help": "hub id or local folder (default: the bundled tests/tiny-chat)"}),
    ("--revision", {"help": "branch, tag or commit on the hub"}),
    ("--served-model-name", {"help": "the model's name in the API (default: hub id or folder name)"}),
    ("--hf-cache-dir", {"help": "where downloads are kept (default: Hugging Face's)"}),
    ("--trust-remote-code", {"type": parse_boolean, "default": False, "help": "only false: remote code is never run"}),
    ("--node-host", {"default": "0.0.0.0", "help": "address that nodes connect to (0.0.0.0: all)"}),
    ("--node-port", {"type": int, "default": 7001, "help": "port that nodes connect to (7001; 0: any free)"}),
    ("--api-host", {"default": "0.0.0.0", "help": "address of the HTTP API (0.0.0.0: all)"}),
    ("--api-port", {"type": int, "default": 8000, "help": "port of the HTTP API (8000; 0: any free)"}),
    ("--max-nodes", {"type": int, "help": "use exactly so many nodes, and wait for them"}),
    ("--min-nodes", {"type": int, "help": "start already with so many, when the model fits them"}),
    ("--local-nodes", {"type": int, "help": "start so many nodes on this machine, instead of --max-nodes"}),
    (
        "--plan",
        {
            "choices": PLAN_COSTS,
            "default": "even",
            "help": "what is made small: even: the largest stage; throughput: the slowest stage; "
            "latency: one token's time",
        },
    ),
    ("--target-node-memory-gb", {"type": float, "help": "GiB to assume for a node that does not know its memory"}),
    (
        "--quant",
        {
            "choices": ("fp16", "int8", "int4"),
            "default": "fp16",
            "help": "fp16: not quantized, stored in --dtype (fp16)",
        },
    ),
    ("--group-size", {"type": int, "choices": (32, 64, 128), "help": "weights per scale, with --quant int4 (64)"}),
    (
        "--dtype",
        {
            "choices": ("fp16", "bf16", "fp32"),
            "default": "fp16",
            "help": "what unquantized weights are stored in (fp16)",
        },
    ),
    (
        "--wire-dtype",
        {
            "choices": ("auto", "fp32", "fp16", "bf16"),
            "default": "auto",
            "help": "hidden states between nodes (auto: fp16, fp32 with --dtype fp32)",
        },
    ),
    ("--slots", {"type": int, "default": 4, "help": "conversations that are generated at once (4)"}),
    ("--max-context", {"type": int, "help": f"tokens per conversation (the model's, at most {DEFAULT_MAX_CONTEXT})"}),
    (
        "--prompt-lookup",
        {
            "choices": ("on", "off"),
            "default": "on",
            "help": "guess text that repeats and have several tokens checked at once; the answers stay the same (on)",
        },
    ),
    (
        "--token",
        {
            "help": "secret that nodes must know; other users of this machine can read it there, so better in "
            "TRUECLUSTER_TOKEN or --token-file"
        },
    ),
    ("--token-file", {"help": "a file that holds the secret"}),
    (
        "--api-key",
        {
            "help": "key that HTTP clients must send; other users of this machine can read it there, so better in "
            "TRUECLUSTER_API_KEY"
        },
    ),
    (
        "--allowed-origin",
        {"action": "append", "default": [], "help": "web origin that may call the API; may be repeated"},
    ),
    ("--log-level", {"choices": ("debug", "info", "warning", "error"), "default": "info"}),
)

LOWEST = {
    "node_port": 0, "api_port": 0, "max_nodes": 1, "min_nodes": 1, "local_nodes": 1, "slots": 1, "max_context": 2,
    "target_node_memory_gb": 0.0,
}  # fmt: skip
HIGHEST = {"node_port": 65535, "api_port": 65535, "slots": 1024, "max_nodes": 1024, "local_nodes": 64}


class FlagParser(argparse.ArgumentParser):
    """argparse, but a wrong flag is a StartupError like everything else that is wrong at the start."""

    def error(self, message: str):
        raise StartupError(f"{message} (see --help)")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked; raises StartupError."""
    parser = FlagParser(
        description="TrueCluster's coordinator: reads a model, spreads its layers over nodes, serves an OpenAI API.",
        allow_abbrev=False,
    )
    for flag, keywords in FLAGS:
        parser.add_argument(flag, **keywords)
    args = parser.parse_args(argv)
    for name, low in LOWEST.items():
        value, high = getattr(args, name), HIGHEST.get(name)
        if value is not None and not (low <= value and (high is None or value <= high)):
            flag = "--" + name.replace("_", "-")
            raise StartupError(f"{flag} {value}: must be at least {low}" + (f" and at most {high}" if high else ""))
    if args.node_port == args.api_port != 0:
        raise StartupError(f"--node-port and --api-port are both {args.api_port}: nodes and the API need a port each")
    if args.group_size is not None and args.quant != "int4":
        raise StartupError(f"--group-size {args.group_size}: only --quant int4 has groups")
    args.group_size = args.group_size or 64
    if args.trust_remote_code:
        raise StartupError(
            "--trust-remote-code true: TrueCluster never runs code from a model folder; leave the flag out"
        )
    if args.local_nodes is not None and args.max_nodes is not None:
        raise StartupError("--local-nodes and --max-nodes: give one of them; both say how many nodes are used")
    required = args.local_nodes if args.local_nodes is not None else args.max_nodes
    if args.min_nodes is not None and required is not None and args.min_nodes > required:
        raise StartupError(f"--min-nodes {args.min_nodes} is more than the {required} nodes that are used")
    args.required_nodes = required
    args.token = read_secret(args.token, args.token_file, "TRUECLUSTER_TOKEN")
    if args.api_key == "":
        raise StartupError("--api-key: is empty")
    args.api_key = args.api_key or os.environ.get("TRUECLUSTER_API_KEY") or None
    return args


def read_secret(value: str | None, path: str | None, variable: str) -> str | None:
    """A flag's value, else a file's content, else an environment variable; None when there is none."""
    if value and path:
        raise StartupError("give --token or --token-file, not both")
    if value == "":  # of a shell variable that is not set: whoever wrote the flag wants no open port
        raise StartupError("--token: is empty")
    if path:
        try:
            value = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise StartupError(f"--token-file {path}: cannot be read ({error.strerror or error})") from None
        except UnicodeDecodeError:
            raise StartupError(f"--token-file {path}: is not a text file") from None
        if not value:
            raise StartupError(f"--token-file {path}: is empty")
    return value or os.environ.get(variable) or None


class OneLineFormatter(logging.Formatter):
    """Control characters are escaped, so that nothing a peer sends can forge a log line. Plans keep their lines:
    their record has the attribute `own_lines`."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")
        if record.exc_info is None and not hasattr(record, "own_lines"):
            lines = ["\\n".join(lines)]
        return "\n".join(
            "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in lines
        )


def set_up_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter("%(asctime)s coordinator %(levelname)s %(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.setLevel(level.upper())


class LocalNodes:
    """Node processes on this machine. Each watches the pipe that is its standard input, so it ends when this process
    does, however that happens, and not before: a terminal's Ctrl-C does not reach its session. One that ends by itself
    is started again."""

    RESTART_S = 2.0  # at most one restart of a node in this time

    def __init__(self, count: int, port: int, args: argparse.Namespace):
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(args.node_host, args.node_host)
        self._command = [sys.executable, str(HERE / "node.py"), "--host", host, "--port", str(port)]
        self._command += ["--end-with-stdin", "--log-level", args.log_level]
        self._environment = dict(os.environ)
        if args.token:
            self._environment["TRUECLUSTER_TOKEN"] = args.token  # a command line can be read by everybody
        self._processes = [self._start() for _ in range(count)]
        self._started_at = [time.monotonic()] * count

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True)

    def restart_ended(self) -> None:
        """Starts nodes again that have ended."""
        for i, process in enumerate(self._processes):
            code = process.poll()
            if code is not None and time.monotonic() - self._started_at[i] > self.RESTART_S:
                log.warning("a local node ended with exit code %d; starting it again", code)
                process.stdin.close()
                self._processes[i], self._started_at[i] = self._start(), time.monotonic()

    def stop(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# ------------------------------------------------------------------------------
# Putting it together
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What is known of the served model before any node has joined."""

    model_id: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: ChatTemplate
    max_context: int
    weights: qwen.WeightFormat
    wire_dtype: str


def load_model(args: argparse.Namespace) -> Model:
    """Opens and checks the model folder; raises StartupError."""
    folder = resolve_model(args.model or str(BUNDLED_MODEL), args.revision, args.hf_cache_dir)
    checkpoint = Checkpoint(folder)
    tokenizer = Tokenizer(folder, checkpoint.raw_config)
    limit = checkpoint.config.max_position_embeddings
    if args.max_context is not None and args.max_context > limit:
        raise StartupError(f"--max-context {args.max_context}: the model was made for at most {limit} tokens")
    model_id = args.served_model_name or _model_id(args.model, folder)
    wire_dtype = args.wire_dtype
    if wire_dtype == "auto":
        wire_dtype = "fp32" if args.dtype == "fp32" else "fp16"
    return Model(
        model_id,
        checkpoint,
        tokenizer,
        ChatTemplate(folder, tokenizer),
        args.max_context or min(limit, DEFAULT_MAX_CONTEXT),
        qwen.WeightFormat(args.quant, args.group_size, args.dtype),
        wire_dtype,
    )


def _model_id(model: str | None, folder: Path) -> str:
    """The hub id, or the folder's own name; never a path."""
    if model is not None and not Path(model).expanduser().is_dir():
        return model
    return folder.resolve().name


class ClusterService:
    """What the HTTP section serves: the model, the engine, and what is known of the cluster."""

    def __init__(self, model: Model, controller: Controller, engine: Engine):
        self.model_id = model.model_id
        self.created = int(time.time())
        self.max_context = model.max_context
        self.tokenizer = model.tokenizer
        self.template = model.template
        self.engine = engine
        self._model = model
        self._controller = controller

    @property
    def system_fingerprint(self) -> str:
        """Changes when answers may: quantization, dtype and the split of the layers."""
        weights, plan = self._model.weights, self._controller.cluster.plan
        layers = "-".join(str(stage.layers) for stage in plan.stages) if plan else "none"
        name = weights.quant if weights.quant != "fp16" else weights.dtype
        return f"tc_{name}_{self._model.wire_dtype}_{layers}"

    def readiness(self) -> ApiError | None:
        return self._controller.not_ready_error()

    def health(self) -> tuple[int, dict]:
        error = self.readiness()
        return (200, {"status": "ok"}) if error is None else (503, {"status": "not ready", **error.body()})

    def status(self) -> dict:
        """The body of GET /status."""
        weights = self._model.weights
        return {
            "model": self.model_id,
            "quant": weights.quant,
            "dtype": weights.dtype,
            "wire_dtype": self._model.wire_dtype,
            "max_context": self.max_context,
            **self._controller.describe(),
            **self.engine.describe(),
        }

    def gauges(self) -> list[Sample]:
        """Figures for GET /metrics that live outside the HTTP section."""
        status = self.status()
        samples = [
            ("truecluster_ready", "1 when requests can be served.", {}, int(status["state"] == "ready")),
            ("truecluster_active_slots", "Conversations being generated.", {}, status["active_slots"]),
            ("truecluster_waiting_requests", "Requests that wait for a slot.", {}, status["waiting_requests"]),
        ]
        states = [node["state"] for node in status["nodes"]]
        for state in NodeState:
            labels = {"state": state.value}
            samples.append(("truecluster_nodes", "Nodes by state.", labels, states.count(state.value)))
        for node in status["nodes"]:
            for direction in ("sent", "received"):
                labels = {"node": node["node_id"], "direction": direction}
                text = "Bytes between coordinator and node since it connected."
                samples.append(("truecluster_link_bytes_total", text, labels, node[f"bytes_{direction}"]))
        return samples


def machine_address() -> str:
    """This machine's address as others on the network see it; asks the routing table and sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: connecting a datagram socket only chooses a route
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()


def url_host(host: str) -> str:
    """A bind address as it stands in a URL that works on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def curl_command(args: argparse.Namespace, api_port: int) -> str:
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if args.api_key else ""
    body = '{"messages": [{"role": "user", "content": "What is 12 + 30?"}]}'
    url = f"http://{url_host(args.api_host)}:{api_port}/v1/chat/completions"
    return f"curl {url}{key} -H 'Content-Type: application/json' -d '{body}'"


LAST_WORDS_S = 2.0  # how long the end waits for streams to send their error frame


class Coordinator:
    """The running program: everything above, started in order and ended in reverse."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model = load_model(args)
        config = self.model.checkpoint.config
        needs = ModelNeeds(config, self.model.weights, args.slots, self.model.max_context)
        default_memory = args.target_node_memory_gb and int(args.target_node_memory_gb * GIB)
        self.cluster = ClusterState(
            needs, args.plan, args.required_nodes, args.min_nodes, default_memory, local=bool(args.local_nodes)
        )
        on_wire = ModelOnWire(self.model.model_id, self.model.weights, self.model.wire_dtype)
        key = wire.token_key(args.token) if args.token else None
        self.controller = Controller(self.model.checkpoint, on_wire, self.cluster, key)
        self.local_nodes: LocalNodes | None = None
        self.server: HttpServer | None = None
        self.engine: Engine | None = None
        self.started = self.stopping = False  # plain flags: a signal handler must take no lock, as Event.set() does

    def start(self) -> None:
        """Opens both ports and starts local nodes; packs the head while they start. Raises StartupError."""
        args, model = self.args, self.model
        node_port = self.controller.listen(args.node_host, args.node_port)
        if args.local_nodes:
            self.local_nodes = LocalNodes(args.local_nodes, node_port, args)  # they import torch meanwhile
        self.engine = Engine(
            self.controller, model.tokenizer.token_mask, args.slots, model.max_context, args.prompt_lookup == "on"
        )
        service = ClusterService(model, self.controller, self.engine)
        self.server = HttpServer(args.api_host, args.api_port, service, args.api_key, args.allowed_origin)
        self.controller.api_port, self.server.node_port = self.server.port, node_port
        self.controller.start()
        self.server.start()
        self._print_addresses(node_port)
        self.engine.start(model.checkpoint.ends(model.weights))
        try:
            model.checkpoint.hash_tensors()
            if args.quant == "int4":
                model.checkpoint.calibrate(model.tokenizer.encode(CALIBRATION_TEXT, parse_special=False))
        except FileShrunk as error:
            raise StartupError(str(error)) from None
        self.controller.allow_measuring()

    def _print_addresses(self, node_port: int) -> None:
        args, config = self.args, self.model.checkpoint.config
        print(f"model {self.model.model_id}: {config.num_hidden_layers} layers, max context {self.model.max_context}")
        print(f"HTTP API on {args.api_host} port {self.server.port}, node port {node_port} on {args.node_host}")
        if args.api_host in ("0.0.0.0", "::"):
            print(f"from other machines: http://{url_host(machine_address())}:{self.server.port}/v1")
        if not args.local_nodes:
            token = " --token-file FILE" if args.token else ""
            print(f"start nodes with: python node.py --host {machine_address()} --port {node_port}{token}")
        sys.stdout.flush()
        if not args.token:
            log.warning(
                "no --token: the node port is open to anyone who can reach it; give coordinator and nodes the same "
                "--token-file or TRUECLUSTER_TOKEN"
            )
        if not args.api_key and not is_loopback(args.api_host):
            log.warning("no --api-key: the HTTP API is open to anyone who can reach it; set TRUECLUSTER_API_KEY")

    def run(self) -> int:
        """Serves until a signal comes; a second one ends the process at once."""
        for name in ("SIGINT", "SIGTERM"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._on_signal)
        try:
            self.start()
            self.started = True
            announced, compared = None, 0
            while not self.stopping:
                if self.local_nodes is not None:
                    self.local_nodes.restart_ended()
                status = self.controller.describe()
                announced = self._announce(status, announced)
                compared = self._compare_times(status, compared)
                time.sleep(0.2)
            return EXIT_OK
        finally:
            self.stop()

    def _announce(self, status: dict, announced: tuple | None) -> tuple | None:
        """Prints plan and curl line when the cluster is ready with another plan than the one that was announced, and
        returns what is announced now."""
        news = status["plan"], status["advice"] is not None
        if status["state"] != "ready" or news == announced:
            return announced
        table = self.controller.plan_table()
        if table is None:  # void since
            return announced
        advice = f"\nnote: {status['advice']}" if status["advice"] else ""
        print(f"ready:\n{table}{advice}\ntry it:\n{curl_command(self.args, self.server.port)}", flush=True)
        return news

    def _compare_times(self, status: dict, compared: int) -> int:
        """Logs the plan once more when real tokens have shown how long its stages and links take; returns its epoch."""
        if status["token_ms"]["passes"] < COMPARED_PASSES or status["epoch"] == compared:
            return compared
        table = self.controller.plan_table()
        if table is None:  # void since
            return compared
        passes, own_lines = status["token_ms"]["passes"], {"own_lines": True}
        log.info("epoch %d, after %d tokens, plan:\n%s", status["epoch"], passes, table, extra=own_lines)
        return status["epoch"]

    def _on_signal(self, *_) -> None:
        if self.stopping:
            os._exit(EXIT_INTERRUPTED)
        self.stopping = True
        log.info("ending; once more ends at once")
        if not self.started:  # a large checkpoint is hashed for minutes, and nobody is served yet
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Ends requests with an error, then the API, nodes and links."""
        self.controller.begin_to_stop()
        if self.engine is not None:
            self.engine.stop("the coordinator is shutting down")
        if self.server is not None:
            self.server.wait_for_answers(LAST_WORDS_S)
            self.server.stop()
        if self.local_nodes is not None:
            self.local_nodes.stop()
        self.controller.stop()


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_args(argv)
        set_up_logging(args.log_level)
        quant.share_one_arena()  # every plan has loader threads of its own, which free many megabytes
        return Coordinator(args).run()
    except StartupError as error:
        print(f"coordinator.py: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # the end of the interpreter aborts when a thread is deep in a kernel; nothing is left to save
