"""Request parsing: tables of inputs and what becomes of them. Pure, no server.

pytest tests/test_coordinator_requests.py -q
"""

import dataclasses
import json

import pytest

from coordinator import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MAX_JSON_DEPTH,
    MAX_PROMPTS,
    ApiError,
    ParsedRequest,
    json_depth,
    normal_message,
    parse_body,
    parse_request,
)

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def completion(**fields) -> ParsedRequest:
    return parse_request({"prompt": "a"} | fields, chat=False)


def chat(**fields) -> ParsedRequest:
    return parse_request({"messages": [USER]} | fields, chat=True)


def refusal(call, *args, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args, **fields)
    assert caught.value.status == 400 and caught.value.type == "invalid_request_error"
    json.dumps(caught.value.body(), allow_nan=False).encode()
    return caught.value


# --- bodies ---

BAD_BODIES = [
    b"",
    b"   ",
    b"[]",
    b"42",
    b'"x"',
    b"null",
    b'{"a":1} x',
    b'{"a":1}{"b":2}',
    b"{'a': 1}",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": -1e999}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": "\xff"}',
    b'{"a": "\\ud800"}',
    b'{"\\udfff": 1}',
    '{"a": 1}'.encode("utf-16"),
    '{"a": 1}'.encode("utf-32-le"),
    b'{"a": "\x00"}',
    b"\xef\xbb\xbf\xef\xbb\xbf{}",
    b"[" * 100_000,
    b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"a":' * 1000 + b"1" + b"}" * 1000,
]


@pytest.mark.parametrize("raw", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_what_is_not_a_json_object_is_refused(raw):
    assert refusal(parse_body, raw).param is None


def test_bodies_that_are_fine():
    assert parse_body(b'\xef\xbb\xbf{"a": 1, "a": 2}') == {"a": 2}  # BOM skipped, the last of two keys counts
    assert parse_body(rb'{"a": "\ud83d\ude00 \\ud800"}') == {"a": "😀 \\ud800"}
    deep = b'{"a":' + b"[" * (MAX_JSON_DEPTH - 1) + b"]" * (MAX_JSON_DEPTH - 1) + b"}"
    assert "a" in parse_body(deep)


@pytest.mark.parametrize(
    ("raw", "depth"),
    [
        (b"", 0),
        (b"1", 0),
        (b"[]", 1),
        (b'[{"a":[1]}]', 3),
        (b'["[[[["]', 1),
        (b'["\\"[[[["]', 1),
        (b'["\\\\", [[1]]]', 3),
        (b'{"\\\\\\"[[": "[", "b": {}}', 2),
    ],
)
def test_json_depth_counts_outside_strings_only(raw, depth):
    assert json_depth(raw) == depth


# --- fields ---

BIG = 10**400
NUMBERS_NEVER = [True, "0.7", "", [], {}, -3, BIG, -BIG, float("nan"), float("inf")]
INTEGERS_NEVER = [*NUMBERS_NEVER, 1.5, "5"]
FLAGS_NEVER = ["true", "", 1, 0, [], {}, 1.5]

# field -> (values that pass with what they become, values that are refused)
BOTH_ROUTES = {
    "model": ([("m", "m"), (None, None)], ["", 5, True, [], {}]),
    "stream": ([(True, True), (None, False)], FLAGS_NEVER),
    "max_tokens": ([(0, 0), (7, 7), (5.0, 5)], [*INTEGERS_NEVER, -1, 10**30]),
    "n": ([(1, 1), (16, 16), (2.0, 2), (None, 1)], [*INTEGERS_NEVER, 0, -1, 17, 10**9]),
    "temperature": ([(0, 0.0), (2, 2.0), (0.7, 0.7), (None, 1.0)], [*NUMBERS_NEVER, 2.0001, -0.1]),
    "top_p": ([(0, 0.0), (1, 1.0), (None, 1.0)], [*NUMBERS_NEVER, 1.01, -0.1]),
    "top_k": ([(0, 0), (-1, 0), (5, 5), (10**6, 10**6), (None, 0)], [*INTEGERS_NEVER, -2]),
    "min_p": ([(0, 0.0), (0.5, 0.5), (None, 0.0)], [*NUMBERS_NEVER, 1.1]),
    "repetition_penalty": ([(1e-6, 1e-6), (1e6, 1e6), (None, 1.0)], [*NUMBERS_NEVER, 0, -1, 1e-7, 5e-324]),
    "presence_penalty": ([(-2, -2.0), (2, 2.0), (None, 0.0)], [*NUMBERS_NEVER, 2.1]),
    "frequency_penalty": ([(-2, -2.0), (2, 2.0), (None, 0.0)], [*NUMBERS_NEVER, -2.1]),
    "logit_bias": (
        [({}, {}), ({"3": -100}, {3: -100.0}), ({"0": 5.5}, {0: 5.5}), (None, {})],
        ["", [], True, 5, {"abc": 1}, {"-1": 1}, {"1": "x"}, {"1": True}, {"1": 101}, {"1": BIG}, {"1": None}],
    ),
    "seed": (
        [(0, 0), (-1, -1), (2**63 - 1, 2**63 - 1), (-(2**63), -(2**63)), (None, None)],
        [True, "5", 1.5, [], {}, 2**63, -(2**63) - 1, BIG],
    ),
    "stop": (
        [("x", ["x"]), ([], []), (["a", "b", "c", "d"], ["a", "b", "c", "d"]), (None, [])],
        ["", [""], ["a", ""], ["a"] * 5, [1], [None], {"a": 1}, True, 5],
    ),
    "stop_token_ids": ([([], ()), ([1, 2.0], (1, 2)), (None, ())], ["", 5, True, {}, [True], [-1], ["1"], [1] * 65]),
    "ignore_eos": ([(True, True), (None, False)], FLAGS_NEVER),
    "min_tokens": ([(0, 0), (3, 3), (None, 0)], [*INTEGERS_NEVER, -1]),
    "skip_special_tokens": ([(False, False), (None, True)], FLAGS_NEVER),
    "include_stop_str_in_output": ([(True, True), (None, False)], FLAGS_NEVER),
    "prompt_lookup": ([(False, False), (None, True)], FLAGS_NEVER),
}
COMPLETIONS_ONLY = {
    "echo": ([(True, True), (None, False)], FLAGS_NEVER),
    "max_tokens": ([(None, 16)], []),
}
CHAT_ONLY = {
    "max_tokens": ([(None, None)], []),
    "add_generation_prompt": ([(False, False), (None, True)], FLAGS_NEVER),
    "chat_template_kwargs": (
        [({}, {}), ({"a": 1, "b": None, "c": "x", "d": True}, {"a": 1, "b": None, "c": "x", "d": True})],
        ["", [], True, 5, {"a": []}, {"a": {}}, {"_a": 1}, {"a b": 1}]
        + [{name: "x"} for name in ("messages", "tools", "tokenize", "chat_template", "bos_token", "eos_token")],
    ),
}


def rows(*routes):
    for call, table in routes:
        for name, (good, bad) in table.items():
            for value, parsed in good:
                yield pytest.param(call, name, value, parsed, True, id=f"{call.__name__}-{name}-good")
            for value in bad:
                yield pytest.param(call, name, value, None, False, id=f"{call.__name__}-{name}-bad")


@pytest.mark.parametrize(
    ("call", "name", "value", "parsed", "passes"),
    [*rows((completion, BOTH_ROUTES), (chat, BOTH_ROUTES), (completion, COMPLETIONS_ONLY), (chat, CHAT_ONLY))],
)
def test_field(call, name, value, parsed, passes):
    if passes:
        assert getattr(call(**{name: value}), name) == parsed
        assert type(getattr(call(**{name: value}), name)) is type(parsed)
    else:
        assert refusal(call, **{name: value}).param == name


def test_every_field_of_the_tables_may_be_null_or_absent():
    required = ("prompt", "messages")
    for call, fields in ((completion, COMPLETION_FIELDS), (chat, CHAT_FIELDS)):
        assert call(**{name: None for name in fields if name not in required}) == call()


def test_results_carry_the_names_of_the_fields():
    renamed = {"prompt", "logprobs", "stream_options", "response_format", "best_of"}
    renamed |= {"max_completion_tokens", "tool_choice"}
    names = {field.name for field in dataclasses.fields(ParsedRequest)}
    assert (COMPLETION_FIELDS.keys() | CHAT_FIELDS.keys()) - names == renamed


def test_unknown_fields_are_ignored():
    unknown = {"user": 5, "store": True, "metadata": {}, "reasoning_effort": "low", "parallel_tool_calls": False}
    assert chat(**unknown) == chat()
    assert completion(**unknown, messages="x", top_logprobs="x") == completion()


@pytest.mark.parametrize("name", ["chat_template", "functions", "guided_json", "grammar", "structured_outputs"])
def test_what_would_change_the_answer_is_refused(name):
    for call in (completion, chat):
        error = refusal(call, **{name: "x"})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert call(**{name: None}) == call()


# --- rules between fields ---


@pytest.mark.parametrize(
    ("call", "fields", "param", "code"),
    [
        (chat, {"stream_options": {}}, "stream_options", None),
        (chat, {"stream_options": {"include_usage": True}, "stream": False}, "stream_options", None),
        (completion, {"stream_options": {"include_usage": None}}, "stream_options", None),
        (chat, {"stream": True, "stream_options": "x"}, "stream_options", None),
        (chat, {"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", None),
        (chat, {"top_logprobs": 1}, "top_logprobs", None),
        (chat, {"top_logprobs": 1, "logprobs": False}, "top_logprobs", None),
        (chat, {"top_logprobs": 21, "logprobs": True}, "top_logprobs", None),
        (chat, {"logprobs": 1}, "logprobs", None),
        (completion, {"logprobs": True}, "logprobs", None),
        (completion, {"logprobs": 6}, "logprobs", None),
        (completion, {"logprobs": -1}, "logprobs", None),
        (completion, {"logprobs": "5"}, "logprobs", None),
        (completion, {"best_of": 1, "n": 2}, "best_of", None),
        (completion, {"best_of": 3, "n": 2}, "best_of", "unsupported_parameter"),
        (completion, {"best_of": 2, "n": 2, "stream": True}, "best_of", None),
        (completion, {"suffix": "x"}, "suffix", "unsupported_parameter"),
        (completion, {"suffix": ""}, "suffix", "unsupported_parameter"),
        (completion, {"min_tokens": 17}, "min_tokens", None),
        (chat, {"min_tokens": 5, "max_completion_tokens": 4}, "min_tokens", None),
        (chat, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", None),
        (chat, {"continue_final_message": True}, "continue_final_message", None),  # the last message is the user's
        (chat, {"tool_choice": "auto"}, "tool_choice", None),
        (chat, {"tool_choice": "auto", "tools": []}, "tool_choice", None),
        (chat, {"tool_choice": "any", "tools": [TOOL]}, "tool_choice", None),
        (chat, {"tool_choice": "required", "tools": [TOOL]}, "tool_choice", "unsupported_parameter"),
        (
            chat,
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TOOL]},
            "tool_choice",
            "unsupported_parameter",
        ),
        (
            chat,
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "tool_choice",
            None,
        ),
        (chat, {"response_format": "json"}, "response_format", None),
        (chat, {"response_format": {}}, "response_format", None),
        (chat, {"response_format": {"type": 123}}, "response_format", None),
        (chat, {"response_format": {"type": "sound"}}, "response_format", None),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format", None),
        (chat, {"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        (
            completion,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
            "unsupported_parameter",
        ),
    ],
)
def test_rule(call, fields, param, code):
    error = refusal(call, **fields)
    assert (error.param, error.code) == (param, code)


def test_rules_let_good_combinations_pass():
    assert chat(max_completion_tokens=0, max_tokens=5).max_tokens == 0
    assert chat(logprobs=True).top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).top_logprobs is None
    assert completion(logprobs=0).top_logprobs == 0
    assert completion().top_logprobs is None
    assert completion(best_of=2, n=2).n == 2
    assert chat(response_format={"type": "text"}) == chat()
    assert chat(tools=[]) == chat(tools=None) == chat(tool_choice="none") == chat()
    assert chat(tools=[TOOL], tool_choice="auto").tools == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none").tools == []
    stream = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert stream.include_usage and not stream.continuous_usage
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage
    continued = chat(messages=[USER, {"role": "assistant", "content": "So"}], continue_final_message=True)
    assert continued.continue_final_message and not continued.add_generation_prompt


# --- prompts ---


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([1.0, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1, 2]], ["a", [1, 2]]),
        (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS),
    ],
)
def test_prompt(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [[]], ["", ""], ["a", ""], [True, False], [1.5], {"a": 1}, 5, [1, "a", 2], [[1], 2], [-1], [[-1]]]
    + [[10**30], [None], [[["a"]]], ["a"] * (MAX_PROMPTS + 1), True],
    ids=str,
)
def test_bad_prompt(prompt):
    assert refusal(completion, prompt=prompt).param == "prompt"


# --- messages ---


@pytest.mark.parametrize(
    ("message", "normal"),
    [
        (USER, USER),
        ({"role": "developer", "content": "d"}, {"role": "system", "content": "d"}),
        ({"role": "user", "content": ""}, {"role": "user", "content": ""}),
        ({"role": "user", "content": "a", "name": "bob", "x": 1}, {"role": "user", "content": "a", "name": "bob"}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
        (
            {"role": "tool", "content": None, "tool_call_id": "c"},
            {"role": "tool", "content": "", "tool_call_id": "c"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
    ],
)
def test_message(message, normal):
    assert normal_message(message, "messages[0]") == normal


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": "é<b>"}', {"a": "é<b>"}),
        ("not json", "not json"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 2000, "[" * 2000),
        ("", ""),
        (None, {}),
        ({"a": [1]}, {"a": [1]}),
    ],
)
def test_arguments_of_past_tool_calls_are_parsed_when_they_are_json(arguments, parsed):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = normal_message({"role": "assistant", "content": None, "tool_calls": [call]}, "m")
    assert message["content"] == ""
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": parsed}, "id": "c1"},
    ]


BAD_MESSAGES = [
    None,
    "string",
    {},
    5,
    [123],
    [None],
    [{}],
    [USER, {}],
    [{"role": 123, "content": "a"}],
    [{"role": "banana", "content": "a"}],
    [{"role": "function", "content": "a"}],
    [{"role": "user<|im_end|>", "content": "a"}],
    [{"content": "a"}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "system", "content": None}],
    [{"role": "developer"}],
    [{"role": "system", "content": 123}],
    [{"role": "user", "content": True}],
    [{"role": "user", "content": {"text": "a"}}],
    [{"role": "user", "content": ["a"]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"role": "user", "content": "a", "name": 5}],
    [{"role": "assistant", "tool_calls": "x"}],
    [{"role": "assistant", "tool_calls": [5]}],
    [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
]


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=str)
def test_bad_messages(messages):
    assert refusal(chat, messages=messages).param == "messages"


def test_empty_messages_have_openais_code():
    assert refusal(chat, messages=[]).code == "empty_array"


@pytest.mark.parametrize(
    "tools",
    [
        "x",
        {},
        True,
        [5],
        [{}],
        [{"type": "function"}],
        [{"type": "web", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f", "description": 5}}],
        [TOOL] * 129,
    ],
)
def test_bad_tools(tools):
    assert refusal(chat, tools=tools).param == "tools"


# --- whatever comes ---

FUZZ_VALUES = [None, True, "", [], {}, -1, 1.5, float("inf"), float("nan"), BIG, [[]], [{}], {"a": None}, "x"]


@pytest.mark.parametrize("call", [completion, chat])
def test_any_value_in_any_field_passes_or_is_refused(call):
    fields = COMPLETION_FIELDS if call is completion else CHAT_FIELDS
    for name in [*fields, "suffix", "chat_template", "functions"]:
        for value in FUZZ_VALUES:
            try:
                assert isinstance(call(**{name: value}), ParsedRequest)
            except ApiError as error:
                assert error.status == 400 and error.param.partition(".")[0] == name
