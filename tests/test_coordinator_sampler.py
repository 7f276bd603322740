"""Sampler: against a plain reference that is written out below, in distribution and number by number.

Run: python -m pytest tests/test_coordinator_sampler.py
"""

import math
import time
import tracemalloc

import numpy as np
import pytest
import torch

from coordinator import COMMON_FIELDS, LOGPROB_FLOOR, Sampler, SamplingParams, logprob_rows, read_fields

VOCAB = 151936  # Qwen2.5's embedding; 151665 of its rows have a token
TOKENS = 151665


def target_distribution(logits, params, prompt_ids=(), generated=()):
    """What should be drawn, in fp64 and without any cleverness. Raw logits [V] -> probabilities [V]."""
    scores = logits.double().numpy().copy()
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    for token_id in {*prompt_ids, *generated}:
        divide = scores[token_id] > 0
        scores[token_id] *= 1 / params.repetition_penalty if divide else params.repetition_penalty
    for token_id in set(generated):
        scores[token_id] -= params.frequency_penalty * list(generated).count(token_id) + params.presence_penalty
    if len(generated) < params.min_tokens:
        scores[[*params.eos_ids, *params.stop_token_ids]] = -np.inf
    scores = (scores - scores.max()) / params.temperature
    best_first = np.argsort(-scores, kind="stable")
    kept = best_first[: params.top_k or len(scores)]
    weights = np.exp(scores[kept])
    reached = np.searchsorted(weights.cumsum() / weights.sum(), params.top_p) + 1
    kept = kept[: reached if params.top_p < 1 else len(kept)]
    kept = kept[np.exp(scores[kept]) >= params.min_p]
    probabilities = np.zeros(len(scores))
    probabilities[kept] = np.exp(scores[kept])
    return probabilities / probabilities.sum()


def make(vocab_size=50, tokens=None, prompt_ids=(), choice_index=0, **params):
    mask = np.arange(vocab_size) < (tokens or vocab_size)
    return Sampler(SamplingParams(**params), mask, list(prompt_ids), choice_index)


def random_logits(vocab_size, scale=3.0, seed=0):
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draw_many(sampler, logits, count):
    return [sampler.sample(logits)[0] for _ in range(count)]


def assert_distributed(draws, probabilities):
    """Chi-square. Rare tokens share a bin; the bound is passed by chance once in 10,000 (Wilson-Hilferty, z = 3.72)."""
    observed = np.bincount(draws, minlength=len(probabilities))
    assert observed[probabilities == 0].sum() == 0
    expected = probabilities * len(draws)
    rare = expected < 8
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom:
        bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
        assert ((observed - expected) ** 2 / expected).sum() < bound


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 7},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    {"logit_bias": {3: 5.0, 4: -100.0, 49: 2.5}, "top_k": 10},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_draws_follow_the_reference_distribution(params):
    logits = random_logits(50, scale=1.5)
    draws = draw_many(make(seed=1, **params), logits, 4000)
    assert_distributed(draws, target_distribution(logits, SamplingParams(**params)))


def test_a_nucleus_of_thousands_follows_the_reference_distribution():
    logits = random_logits(6000, scale=0.5)
    probabilities = target_distribution(logits, SamplingParams(top_p=0.7))
    draws = np.array(draw_many(make(6000, seed=2, top_p=0.7), logits, 4000))
    assert (probabilities > 0).sum() > 1000 and probabilities[draws].all()
    group = np.random.default_rng(0).permutation(6000) % 40
    assert_distributed(group[draws], np.bincount(group, weights=probabilities))


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 5000, VOCAB])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_every_draw_is_the_references_inverse_at_the_uniform_number(vocab_size, scale):
    """The same numbers drawn by hand, all settings: exact agreement, except where rounding decides."""
    logits = random_logits(vocab_size, scale)
    for settings in SETTINGS:
        params = SamplingParams(seed=-7, **{k: v for k, v in settings.items() if k != "logit_bias"})
        cumulative = target_distribution(logits, params).cumsum()
        uniforms = np.random.Generator(np.random.Philox(key=np.array([2**64 - 7, 3], dtype=np.uint64))).random(5)
        sampler = Sampler(params, np.ones(vocab_size, dtype=bool), [], 3)
        for uniform in uniforms:
            token_id, _ = sampler.sample(logits)
            below, above = cumulative[token_id - 1] if token_id else 0, cumulative[token_id]
            assert below - 1e-5 <= uniform <= above + 1e-5 and above > below, settings


def test_ties_at_the_edges_keep_the_lowest_ids():
    flat = torch.zeros(1024)
    assert max(draw_many(make(1024, seed=0, top_p=0.5), flat, 500)) < 512
    assert max(draw_many(make(1024, seed=0, top_p=0.125), flat, 500)) < 128
    assert set(draw_many(make(1024, seed=0, top_k=3), flat, 100)) == {0, 1, 2}


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 9e-6}, {"temperature": 0, "top_k": 5}], ids=str
)
def test_greedy_takes_the_best_and_of_equals_the_lowest_id(params):
    logits = random_logits(1000)
    assert make(1000, **params).sample(logits)[0] == int(logits.argmax())
    logits[[700, 300, 500]] = 100.0
    assert make(1000, **params).sample(logits)[0] == 300


@pytest.mark.parametrize("params", [{"temperature": 1e-5}, {"top_p": 0.0}, {"top_p": 1e-6}, {"top_k": 1}], ids=str)
def test_tiny_temperature_and_top_p_act_as_greedy(params):
    logits = random_logits(VOCAB)
    assert set(draw_many(make(VOCAB, seed=0, **params), logits, 5)) == {int(logits.argmax())}


def test_huge_logits_and_temperature_2_stay_finite():
    for logits in (torch.tensor([3e38, -3e38, 0.0]), torch.tensor([0.0, -math.inf, -math.inf])):
        for temperature in (1e-5, 1.0, 2.0):
            assert draw_many(make(3, temperature=temperature), logits, 10) == [0] * 10


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 400}, {"top_p": 0.999}, {"min_p": 1e-9}], ids=str)
def test_ids_without_a_token_are_never_drawn(params):
    logits = torch.zeros(VOCAB)
    logits[TOKENS:] = 50.0
    logits[TOKENS + 3] = math.nan  # nobody cares what the padded rows say
    sampler = make(VOCAB, TOKENS, seed=0, top_logprobs=5, **params)
    for _ in range(20):
        token_id, logprob = sampler.sample(logits)
        assert token_id < TOKENS and all(i < TOKENS for i, _ in logprob.top)
        assert logprob.logprob == pytest.approx(-math.log(TOKENS))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 5, "top_p": 0.5}], ids=str)
def test_logits_that_are_not_finite_raise(bad, params):
    logits = torch.zeros(100)
    logits[50] = bad
    with pytest.raises(FloatingPointError):
        make(100, **params).sample(logits)
    with pytest.raises(FloatingPointError):
        make(100, **params).sample(torch.full((100,), -math.inf))


def test_logits_are_left_as_they_are():
    logits = random_logits(200)
    before = logits.clone()
    draw_many(
        make(200, 150, prompt_ids=[1, 2], repetition_penalty=2.0, logit_bias={5: 9.0}, min_tokens=3, eos_ids=(7,)),
        logits,
        3,
    )
    assert torch.equal(logits, before)


# Random numbers


def test_a_seed_repeats_and_choices_and_seeds_differ():
    logits = random_logits(1000, scale=1.0)

    def draws(seed, choice_index=0):
        return draw_many(make(1000, seed=seed, choice_index=choice_index), logits, 12)

    assert draws(42) == draws(42)
    different = [draws(seed) for seed in (0, 1, -1, 2**63 - 1, -(2**63))] + [draws(42, choice) for choice in range(3)]
    different += [draws(None), draws(None)]
    assert len(set(map(tuple, different))) == len(different)


def test_draws_do_not_depend_on_other_samplers_or_global_generators():
    logits = random_logits(1000, scale=1.0)
    alone = draw_many(make(1000, seed=5), logits, 20)
    one, other = make(1000, seed=5), make(1000, seed=6, top_k=4)
    together = []
    for step in range(20):
        torch.manual_seed(step)
        np.random.seed(step)
        other.sample(logits)
        together.append(one.sample(logits)[0])
    assert together == alone


def test_a_draw_depends_only_on_its_number():
    """What speculation needs: the n-th draw uses the n-th random number, whatever was drawn before."""
    flat, peaked = torch.zeros(1000), torch.zeros(1000)
    peaked[17] = 50.0
    one, other = make(1000, seed=9), make(1000, seed=9)
    draw_many(one, flat, 3)
    draw_many(other, peaked, 3)
    assert draw_many(one, flat, 5) == draw_many(other, flat, 5)


# Penalties, bias, min_tokens

PENALTIES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.3, "logit_bias": {2: 1.5, 8: -3.0}},
]


@pytest.mark.parametrize("params", PENALTIES, ids=str)
def test_penalties_and_bias_match_the_reference_at_every_step(params):
    logits = random_logits(30, scale=2.0)
    prompt_ids = [2, 2, 5, 29]
    sampler = make(30, prompt_ids=prompt_ids, seed=3, **params)
    uniforms = np.random.Generator(np.random.Philox(key=np.array([3, 0], dtype=np.uint64))).random(60)
    generated = []
    for uniform in uniforms:
        cumulative = target_distribution(logits, sampler.params, prompt_ids, generated).cumsum()
        assert np.abs(cumulative - uniform).min() > 1e-6  # the seed leaves nothing to rounding
        token_id, _ = sampler.sample(logits)
        assert token_id == np.searchsorted(cumulative, uniform)
        generated.append(token_id)


def test_penalties_change_greedy_answers():
    logits = torch.tensor([2.0, 1.9, 1.8, -5.0])
    assert draw_many(make(4, temperature=0, presence_penalty=0.15), logits, 3) == [0, 1, 0]
    assert draw_many(make(4, temperature=0, frequency_penalty=0.15), logits, 4) == [0, 1, 0, 2]
    assert draw_many(make(4, temperature=0, repetition_penalty=1.2, prompt_ids=[0]), logits, 1) == [1]
    assert draw_many(make(4, temperature=0, presence_penalty=1.0, prompt_ids=[0]), logits, 1) == [0]


def test_the_extremes_that_requests_may_ask_for_still_draw():
    logits = random_logits(40, scale=1000.0)
    fields = [{"repetition_penalty": 1e-6}, {"repetition_penalty": 1e6}, {"temperature": 5e-324}, {"temperature": 2}]
    fields += [{"top_p": 5e-324}, {"top_p": 0}, {"min_p": 5e-324}, {"min_p": 1}, {"top_k": 2**31 - 1}, {"top_k": 1}]
    fields += [{"presence_penalty": 5e-324}, {"logit_bias": {str(i): -100 for i in range(40)}}]
    for asked in fields:
        values = read_fields(asked, COMMON_FIELDS)
        sampler = make(40, prompt_ids=range(40), seed=0, **{name: values[name] for name in asked})
        assert len(draw_many(sampler, logits, 5)) == 5


def test_choices_that_wait_take_no_room():
    """One request may have 1,024 choices, and 64 requests may wait: half a megabyte each would be 34 GB."""
    prompt_ids, bias = list(range(8000)), {i: -1.0 for i in range(20_000)}
    params = SamplingParams(repetition_penalty=1.1, logit_bias=bias)
    mask = np.ones(VOCAB, dtype=bool)
    tracemalloc.start()
    waiting = [Sampler(params, mask, prompt_ids, i) for i in range(50)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / len(waiting) < 10_000


def test_bias_of_100_forces_and_of_minus_100_bans():
    logits = random_logits(40)
    assert set(draw_many(make(40, seed=0, logit_bias={7: 100.0}), logits, 50)) == {7}
    banned = make(40, seed=0, temperature=2.0, logit_bias={i: -100.0 for i in range(20)})
    assert min(draw_many(banned, logits, 200)) >= 20


def test_min_tokens_holds_end_ids_back():
    logits = torch.zeros(10)
    logits[[4, 6]] = 30.0
    sampler = make(10, seed=0, min_tokens=5, eos_ids=(4,), stop_token_ids=(6,))
    draws = draw_many(sampler, logits, 8)
    assert not {4, 6} & set(draws[:5]) and set(draws[5:]) <= {4, 6}
    with pytest.raises(FloatingPointError):
        make(1, min_tokens=1, eos_ids=(0,)).sample(torch.zeros(1))


def test_ignore_eos_still_ends_at_requested_stop_ids():
    assert SamplingParams(eos_ids=(1, 2), stop_token_ids=(5,)).end_ids == {1, 2, 5}
    assert SamplingParams(eos_ids=(1, 2), stop_token_ids=(5,), ignore_eos=True).end_ids == {5}


# Logprobs


@pytest.mark.parametrize("vocab_size", [50, 1000, VOCAB])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(vocab_size):
    logits = random_logits(vocab_size)
    expected = torch.log_softmax(logits.double(), 0)
    best = torch.topk(expected, 20)
    for params in ({"temperature": 0}, {"temperature": 0.1}, {"temperature": 1.5, "top_k": 9, "presence_penalty": 2.0}):
        token_id, logprob = make(vocab_size, seed=0, top_logprobs=20, **params).sample(logits)
        assert logprob.token_id == token_id
        assert logprob.logprob == pytest.approx(expected[token_id].item(), abs=2e-6)
        assert [i for i, _ in logprob.top] == best.indices.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=2e-6)


def test_the_drawn_token_has_the_same_float_among_the_best():
    logits = random_logits(300)
    _, logprob = make(300, temperature=0, top_logprobs=1).sample(logits)
    assert logprob.top == [(logprob.token_id, logprob.logprob)]


def test_none_zero_and_k_logprobs():
    logits = random_logits(300)
    assert make(300).sample(logits)[1] is None
    assert make(300, top_logprobs=0).sample(logits)[1].top == []
    assert len(make(300, top_logprobs=7).sample(logits)[1].top) == 7


def test_logprobs_are_finite_and_not_positive():
    logits = torch.full((200,), -math.inf)
    logits[3] = 5.0
    logits[9] = -3e38
    rows = logprob_rows(logits.repeat(3, 1), [3, 9, 50], 2, np.ones(200, dtype=bool))
    assert [row.logprob for row in rows] == [0.0, LOGPROB_FLOOR, LOGPROB_FLOOR]


def test_rows_of_an_echoed_prompt_have_the_samplers_floats():
    logits = torch.stack([random_logits(500, seed=seed) for seed in range(4)])
    mask = np.arange(500) < 480
    samples = [make(500, 480, seed=0, top_logprobs=3).sample(row)[1] for row in logits]
    assert logprob_rows(logits, [sample.token_id for sample in samples], 3, mask) == samples


# Cost


@pytest.mark.parametrize("params", [{"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temperature": 0}, {}], ids=str)
def test_a_draw_is_far_cheaper_than_sorting_the_vocabulary(params):
    """Relative, so that slow machines pass too. The absolute figure is in README (under 1 ms)."""
    logits = random_logits(VOCAB)
    sampler = make(VOCAB, TOKENS, seed=0, **params)

    def best_time(action):
        times = []
        for _ in range(12):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return min(times)

    assert best_time(lambda: sampler.sample(logits)) * 3 < best_time(lambda: torch.sort(logits))
