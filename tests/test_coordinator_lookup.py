"""Tests of coordinator.py's prompt lookup: what is guessed, how many guesses are sent, and what they cost."""

import random

import pytest

from coordinator import DECODE_TIME_LIFE_S, DRAFT_SIZES, NGRAM, DecodeTimes, PromptLookup, draft_sizes


def brute_force_guess(ids: list[int], source: int | None) -> int | None:
    """Where the next id would be repeated from: the place followed so far, else after the latest same n-gram before."""
    if source is not None:
        return source
    for end in range(len(ids) - 1, 0, -1):
        if ids[max(0, end - NGRAM) : end] == ids[-NGRAM:] and end >= min(NGRAM, len(ids)):
            return end
    return None


def test_guesses_are_what_followed_the_same_ids_before():
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert lookup.draft(2) == [4, 5]
    lookup.append(4)
    assert lookup.draft(3) == [5, 6, 9]
    lookup.append(7)  # wrong: nothing is known to follow 3 4 7
    assert lookup.draft(3) == []


def test_a_guess_that_reaches_its_own_start_goes_on_in_a_circle():
    assert PromptLookup([8, 1, 2, 1, 2, 1, 2]).draft(5) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("seed", range(20))
def test_guesses_equal_a_search_through_the_whole_text(seed):
    rng = random.Random(seed)
    ids = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
    lookup, source = PromptLookup(ids), brute_force_guess(ids, None)
    for _ in range(60):
        expected = [] if source is None else (ids[source:] * 9)[:4]
        assert lookup.draft(4) == expected
        token_id = rng.randrange(3)
        if source is not None:
            source = source + 1 if ids[source] == token_id else None
        ids = [*ids, token_id]
        source = brute_force_guess(ids, source)
        lookup.append(token_id)


def test_the_hit_rate_follows_the_text_whether_or_not_drafts_were_sent():
    repeated = list(range(40))
    lookup = PromptLookup([*repeated, 0, 1, 2])
    for token_id in repeated[3:]:
        lookup.append(token_id)
    assert lookup.hit_rate > 0.95
    for token_id in range(100, 140):  # nothing of it stood there before: nothing is guessed, nothing is missed
        lookup.append(token_id)
    assert lookup.hit_rate > 0.7
    for _ in range(20):  # the same three ids, each time with something else after them
        for token_id in (100, 101, 102, random.randrange(200, 10**9)):
            lookup.append(token_id)
    assert lookup.hit_rate < 0.5


def test_passes_that_cost_nothing_more_take_all_the_drafts_that_are_worth_a_chance():
    assert draft_sizes([(0.9, 15)], lambda rows: 1.0) == [15]
    assert draft_sizes([(0.9, 5)], lambda rows: 1.0) == [5]
    assert draft_sizes([(0.9, 0)], lambda rows: 1.0) == [0]


def test_passes_that_cost_as_much_as_their_rows_take_no_drafts():
    assert draft_sizes([(0.99, 15), (0.5, 15)], lambda rows: float(rows)) == [0, 0]


@pytest.mark.parametrize("hit_rate", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
def test_one_sequence_gets_the_size_with_the_most_tokens_per_second(hit_rate, slope):
    def seconds(rows):
        return 1 + slope * (rows - 1)

    def tokens_per_second(k):
        return sum(hit_rate**j for j in range(k + 1)) / seconds(1 + k)

    (size,) = draft_sizes([(hit_rate, 15)], seconds)
    assert tokens_per_second(size) == pytest.approx(max(tokens_per_second(k) for k in (0, *DRAFT_SIZES)))


def test_in_a_batch_those_that_hit_are_drafted_and_the_others_are_not():
    sizes = draft_sizes([(0.05, 15), (0.95, 15), (0.0, 0)], lambda rows: 1 + 0.1 * rows)
    assert sizes[0] == 0 and sizes[1] >= 7 and sizes[2] == 0


def test_decode_times_are_learnt_and_forgotten():
    times = DecodeTimes()
    assert times.estimate(1, 0) < times.estimate(2, 0) < times.estimate(16, 0)
    times.add(1, 0.050, 0.0)
    assert times.estimate(1, 1) == 0.050
    assert 0.050 < times.estimate(2, 1) < 0.100
    times.add(4, 0.060, 1.0)
    assert times.estimate(4, 1) == 0.060
    times.add(4, 0.600, 2.0)  # something else was running: not believed at once
    assert 0.060 < times.estimate(4, 2) < 0.300
    times.add(4, 0.055, 3.0)
    assert times.estimate(4, 3) == 0.055
    later = 1 + DECODE_TIME_LIFE_S
    assert times.estimate(1, later) < times.estimate(4, later) == 0.055


def test_six_rows_are_not_taken_to_cost_what_seven_do():
    times = DecodeTimes()
    times.add(6, 0.070, 0.0)
    times.add(7, 0.110, 1.0)
    times.add(16, 0.180, 1.0)
    assert [times.estimate(rows, 1) for rows in (6, 7, 12, 16)] == [0.070, 0.110, 0.180, 0.180]
