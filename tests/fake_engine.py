"""An engine without a model, for tests of the HTTP layer: tokens come from a script, and a gate can hold them back.

service = FakeService(answer="Hello")            # every choice says the same, then EOS
service = FakeService()                          # pseudo-random tokens that depend on the prompt and the choice
service.engine.gate.hold(); ...; service.engine.gate.allow(3)   # let three more events out
"""

import json
import math
import random
import threading
import time

from cluster import TINY_CHAT

from coordinator import (
    ApiError,
    ChatTemplate,
    FinishEvent,
    GenerationRequest,
    PromptEvent,
    TokenEvent,
    Tokenizer,
    TokenLogprob,
)


def tiny_tokenizer() -> Tokenizer:
    """The bundled model's tokenizer, with 64 rows in the embedding that have no token."""
    spec = json.loads((TINY_CHAT / "tokenizer.json").read_text(encoding="utf-8"))
    highest = max([*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"])])
    return Tokenizer(TINY_CHAT, {"vocab_size": highest + 65})


class Gate:
    """Open, or closed but for a number of events."""

    def __init__(self):
        self._changed = threading.Condition()
        self._left = math.inf

    def hold(self) -> None:
        with self._changed:
            self._left = 0

    def allow(self, events: float = math.inf) -> None:
        with self._changed:
            self._left += events
            self._changed.notify_all()

    def pass_one(self, timeout_s: float) -> bool:
        with self._changed:
            passed = self._changed.wait_for(lambda: self._left > 0, timeout_s)
            self._left -= passed
            return passed


class FakeGeneration:
    DONE = object()

    def __init__(self, engine: "FakeEngine", request: GenerationRequest, events: list):
        self.request = request
        self.closed = threading.Event()
        self.stopped_choices = set()
        self._engine = engine
        self._events = iter(events)

    def next_event(self, timeout_s: float):
        assert not self.closed.is_set(), "next_event after close"
        if not self._engine.gate.pass_one(timeout_s):
            return None
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            if getattr(event, "index", None) not in self.stopped_choices:
                return event
        return self.DONE

    def finish_choice(self, index: int) -> None:
        self.stopped_choices.add(index)

    def close(self) -> None:
        self.closed.set()


class FakeEngine:
    """answer: text or ids that every choice gives before EOS, or None for pseudo-random ones.

    failure: an exception, raised after `fail_after` events. refusal: an ApiError, raised by submit.
    """

    def __init__(self, tokenizer: Tokenizer, max_context: int, answer: str | list[int] | None = None):
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.answer = tokenizer.encode(answer, parse_special=True) if isinstance(answer, str) else answer
        self.gate = Gate()
        self.failure: Exception | None = None
        self.fail_after = 0
        self.refusal: ApiError | None = None
        self.cached_tokens = 0
        self.generations: list[FakeGeneration] = []

    @property
    def active(self) -> int:
        return sum(not generation.closed.is_set() for generation in self.generations)

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.refusal is not None:
            raise self.refusal
        events = self._events(request)
        if self.failure is not None:
            events = [*events[: self.fail_after], self.failure]
        generation = FakeGeneration(self, request, events)
        self.generations.append(generation)
        return generation

    def _events(self, request: GenerationRequest) -> list:
        """Prompts in order, then one token of every choice in turn, as a batching engine would."""
        events = [self._prompt_event(request, index) for index in range(len(request.prompts))]
        choices = [self._choice_events(request, index) for index in range(len(request.prompts) * request.n)]
        for step in range(max(map(len, choices))):
            events += [choice[step] for choice in choices if step < len(choice)]
        return events

    def _prompt_event(self, request: GenerationRequest, index: int) -> PromptEvent:
        logprobs = None
        if request.sampling.prompt_logprobs:
            logprobs = [None] + [self._logprob(request, token_id) for token_id in request.prompts[index][1:]]
        return PromptEvent(index, min(self.cached_tokens, len(request.prompts[index]) - 1), logprobs)

    def _choice_events(self, request: GenerationRequest, index: int) -> list:
        prompt = request.prompts[index // request.n]
        limit = min(request.max_tokens, self.max_context - len(prompt))
        ids = self._token_ids(request, prompt, index % request.n)
        events = []
        for token_id in ids[:limit]:
            logprob = None if request.sampling.top_logprobs is None else self._logprob(request, token_id)
            events.append(TokenEvent(index, token_id, logprob))
            if token_id in request.sampling.end_ids:
                return [*events, FinishEvent(index, "stop")]
        return [*events, FinishEvent(index, "length")]

    def _token_ids(self, request: GenerationRequest, prompt: list[int], choice: int) -> list[int]:
        eos = request.sampling.eos_ids[0]
        if self.answer is not None:
            return [*self.answer, *[eos] * self.max_context] if request.sampling.ignore_eos else [*self.answer, eos]
        rng = random.Random(f"{prompt} {choice} {request.sampling.seed}")
        usual = [i for i in range(self.tokenizer.vocab_size) if self.tokenizer.has_token(i)]
        ids = [rng.choice(usual) for _ in range(self.max_context)]
        ids[rng.randrange(1, 40)] = eos
        return ids

    def _logprob(self, request: GenerationRequest, token_id: int) -> TokenLogprob:
        count = request.sampling.top_logprobs
        top = [(token_id, -0.25)] + [(other, -1.0 - other) for other in range(21) if other != token_id]
        return TokenLogprob(token_id, -0.25, top[:count])


class FakeService:
    """A Service (part "HTTP") around a FakeEngine."""

    def __init__(self, answer: str | list[int] | None = None, max_context: int = 256):
        self.model_id = "tiny/chat"
        self.created = int(time.time())
        self.max_context = max_context
        self.system_fingerprint = "fp_fake"
        self.tokenizer = tiny_tokenizer()
        self.template = ChatTemplate(TINY_CHAT, self.tokenizer)
        self.engine = FakeEngine(self.tokenizer, max_context, answer)
        self.not_ready: ApiError | None = None

    def readiness(self) -> ApiError | None:
        return self.not_ready

    def health(self) -> tuple[int, dict]:
        return (200, {"status": "ok"}) if self.not_ready is None else (503, self.not_ready.body())

    def status(self) -> dict:
        return {"state": "ready"}

    def gauges(self) -> list:
        return [("truecluster_nodes", "Nodes by state.", {"state": "READY"}, 2)]
