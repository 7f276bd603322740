"""Planner against brute force, and cluster state by plain calls: no socket, no thread, no clock.

Run: python -m pytest tests/test_coordinator_planner.py
"""

import itertools
import math
import random
from types import SimpleNamespace

import pytest

import qwen
from coordinator import (
    FAILED_LOAD_PAUSE_S,
    FOUND_MEMORY_S,
    GIB,
    HEADROOM,
    MEASURE_PATIENCE_S,
    PREFILL_CHUNKS,
    RECOVERY_GRACE_S,
    ClusterState,
    MeasuredTimes,
    ModelNeeds,
    NodeOffer,
    NodeRecord,
    NodeState,
    NoPlan,
    StageForecast,
    decode_passes,
    estimate_required,
    in_places,
    make_plan,
    plan_advice,
    plan_table,
    plans_in_words,
    possible_plans,
    prefill_chunk,
    share_memory,
)


class FakeNeeds:
    """A model of any layers: sizes in bytes (twice as large on "cuda") and relative times per layer."""

    def __init__(self, weights, caches=None, times=None, working=0, quant="fp16", slots=4):
        self._weights = weights
        self._caches = caches or [0] * len(weights)
        self._times = times or [1.0] * len(weights)
        self._working = working
        self.layers, self.slots, self.max_context = len(weights), slots, 1000
        self.weights = qwen.WeightFormat(quant, 64, "fp16")

    def weight_bytes(self, i, device_type, second_copy=False):
        return self._weights[i] * (2 if device_type == "cuda" else 1) * (2 if second_copy else 1)

    def cache_bytes(self, i, device_type):
        return self._caches[i]

    def relative_time(self, i):
        return self._times[i]

    def working_bytes(self):
        return self._working

    def stage_bytes(self, start, end, device_type="cpu"):
        return sum(self.weight_bytes(i, device_type) + self.cache_bytes(i, device_type) for i in range(start, end))


def offers(*memories, layer_ms=1.0, link_ms=0.0):
    return [NodeOffer(f"n{i}", "cpu", memory, layer_ms, link_ms) for i, memory in enumerate(memories)]


def assert_tiles(plan, layers):
    """Stages cover [0, layers) in order, each with a layer, each on a node of its own."""
    position = 0
    for stage in plan.stages:
        assert stage.start == position < stage.end
        position = stage.end
    assert position == layers
    assert len(set(plan.node_ids)) == len(plan.node_ids)


# ----------------------------------------------------------------------------------------------------------------------
# Planner
# ----------------------------------------------------------------------------------------------------------------------


def splits_by_brute_force(needs, nodes, stages):
    """Every way to put all layers on exactly `stages` of the nodes, in their order: lists of (node, start, end)."""
    for chosen in itertools.combinations(nodes, stages):
        for cuts in itertools.combinations(range(1, needs.layers), stages - 1):
            bounds = [0, *cuts, needs.layers]
            split = list(zip(chosen, bounds, bounds[1:]))
            if all(
                node.memory_bytes is None
                or int((needs.stage_bytes(a, b, node.device_type) + needs.working_bytes()) * 1.1) <= node.memory_bytes
                for node, a, b in split
            ):
                yield split


def cost_of(needs, split, cost):
    if cost == "even":
        return max(needs.stage_bytes(a, b, node.device_type) for node, a, b in split)
    times = [sum(needs.relative_time(i) for i in range(a, b)) * node.layer_ms + node.link_ms for node, a, b in split]
    return max(times) if cost == "throughput" else sum(times)


def random_case(seed):
    chance = random.Random(seed)
    layers = chance.randint(1, 7)
    needs = FakeNeeds(
        [chance.randint(1, 9) for _ in range(layers)],
        [chance.randint(0, 4) for _ in range(layers)],
        [chance.choice([0.5, 1.0, 2.5]) for _ in range(layers)],
        working=chance.randint(0, 3),
    )
    total = needs.stage_bytes(0, layers)
    nodes = [
        NodeOffer(
            f"n{i}",
            chance.choice(["cpu", "cuda"]),
            chance.choice([None, chance.randint(1, total + 6), chance.randint(1, 2 * total + 6)]),
            chance.choice([0.3, 1.0, 4.0]),
            chance.choice([0.0, 0.5, 6.0]),
        )
        for i in range(chance.randint(1, 4))
    ]
    return needs, nodes


@pytest.mark.parametrize("cost", ["even", "throughput", "latency"])
def test_costs_against_brute_force(cost):
    """400 small models of unlike layers, on unlike nodes: the cost is the best one; nothing fits: NoPlan."""
    fitted = 0
    for seed in range(400):
        needs, nodes = random_case(seed)
        for required in range(1, len(nodes) + 1):
            stages = min(required, needs.layers)
            costs = [cost_of(needs, split, cost) for split in splits_by_brute_force(needs, nodes, stages)]
            if not costs:
                with pytest.raises(NoPlan):
                    make_plan(needs, nodes, cost, required, 1)
                continue
            fitted += 1
            plan = make_plan(needs, nodes, cost, required, 1)
            assert_tiles(plan, needs.layers)
            by_id = {node.node_id: node for node in nodes}
            split = [(by_id[stage.node_id], stage.start, stage.end) for stage in plan.stages]
            assert len(split) == stages
            assert split in list(splits_by_brute_force(needs, nodes, len(split)))
            assert cost_of(needs, split, cost) == pytest.approx(min(costs)), (seed, required)
    assert fitted > 300


def test_latency_takes_any_number_of_nodes_unless_one_is_required():
    """Against brute force over all subsets; with at_least, once so many are there, but not on so many."""
    left_out = 0
    for seed in range(300):
        needs, nodes = random_case(seed)
        counts = range(1, len(nodes) + 1)
        costs = [cost_of(needs, s, "latency") for n in counts for s in splits_by_brute_force(needs, nodes, n)]
        if not costs:
            continue
        for at_least in counts:
            plan = make_plan(needs, nodes, "latency", None, 1, at_least)
            assert_tiles(plan, needs.layers)
            assert plan.token_ms == pytest.approx(min(costs)), (seed, at_least)
            left_out += len(plan.stages) < min(at_least, needs.layers)
        with pytest.raises(NoPlan, match="nodes are required"):
            make_plan(FakeNeeds([1] * 9), nodes, "latency", None, 1, len(nodes) + 1)
    assert left_out > 50


@pytest.mark.parametrize("cost", ["even", "throughput"])
def test_without_a_required_number_the_fewest_nodes_that_fit(cost):
    for seed in range(300):
        needs, nodes = random_case(seed)
        possible = [n for n in range(1, len(nodes) + 1) if any(splits_by_brute_force(needs, nodes, n))]
        if not possible:
            with pytest.raises(NoPlan):
                make_plan(needs, nodes, cost, None, 1)
            continue
        plan = make_plan(needs, nodes, cost, None, 1)
        assert len(plan.stages) == min(possible)
        costs = [cost_of(needs, split, cost) for split in splits_by_brute_force(needs, nodes, min(possible))]
        by_id = {node.node_id: node for node in nodes}
        split = [(by_id[stage.node_id], stage.start, stage.end) for stage in plan.stages]
        assert cost_of(needs, split, cost) == pytest.approx(min(costs))


def test_even_splits_are_even():
    """No float fractions, nobody without layers: sizes of 24 layers over 1..24 nodes differ by at most one."""
    for nodes in range(1, 25):
        plan = make_plan(FakeNeeds([10] * 24), offers(*[None] * nodes), "even", nodes, 1)
        assert_tiles(plan, 24)
        sizes = [stage.layers for stage in plan.stages]
        assert max(sizes) - min(sizes) <= 1


def test_memory_moves_layers_to_where_they_fit():
    """A node with room for two layers gets two, whatever "even" would like."""
    needs = FakeNeeds([100] * 8, working=10)
    room_for_two = int((2 * 100 + 10) * HEADROOM)
    plan = make_plan(needs, offers(room_for_two, 10_000, 10_000), "even", 3, 1)
    assert [stage.layers for stage in plan.stages] == [2, 3, 3]
    plan = make_plan(needs, offers(room_for_two - 1, 10_000, 10_000), "even", 3, 1)
    assert sorted(stage.layers for stage in plan.stages[1:]) == [3, 4]


def test_more_nodes_are_used_when_fewer_do_not_hold_it():
    needs = FakeNeeds([100] * 6)
    half = int(3 * 100 * HEADROOM)
    assert len(make_plan(needs, offers(10_000, half, half), "even", None, 1).stages) == 1
    assert make_plan(needs, offers(half, half, 10_000), "even", None, 1).node_ids == ("n2",)
    assert len(make_plan(needs, offers(half, half, half), "even", None, 1).stages) == 2
    assert len(make_plan(needs, offers(half - 1, half - 1, half - 1), "even", None, 1).stages) == 3
    assert len(make_plan(needs, offers(10_000, half, half), "even", None, 1, at_least=2).stages) == 2


def test_too_little_memory_says_what_is_needed_and_what_is_there():
    needs = FakeNeeds([GIB] * 8, working=GIB // 2)
    with pytest.raises(NoPlan) as error:
        make_plan(needs, offers(2 * GIB, 3 * GIB), "even", 2, 1)
    message = str(error.value)
    assert "\n" not in message
    assert "does not fit on 2 node(s): 8 layers, 4 slots of 1000 tokens" in message
    assert "n0: have 2.00 GiB, need 4.95 GiB for 4 layers, room for 1" in message  # (4 + 0.5) * 1.1
    assert "n1: have 3.00 GiB, need 4.95 GiB for 4 layers, room for 2" in message
    assert message.endswith(
        "Add nodes (--max-nodes must allow them), lower --max-context or --slots, "
        "raise a node's --max-memory-gb if it has one, or use --quant int8 or int4"
    )


@pytest.mark.parametrize("quant, smaller", [("int8", ", or use --quant int4"), ("int4", "")])
def test_advice_on_what_does_not_fit_leaves_out_what_is_done_already(quant, smaller):
    """Two nodes are there, one may be used."""
    with pytest.raises(NoPlan) as error:
        make_plan(FakeNeeds([GIB] * 8, quant=quant, slots=1), offers(5 * GIB, 5 * GIB), "even", 1, 1)
    assert str(error.value).endswith(
        "Raise --max-nodes (more nodes are there), lower --max-context, "
        f"raise a node's --max-memory-gb if it has one{smaller}"
    )


def test_more_nodes_than_layers():
    """Every stage has a layer; the nodes beyond are spares."""
    plan = make_plan(FakeNeeds([1] * 3), offers(*[None] * 5), "even", 5, 7)
    assert_tiles(plan, 3)
    assert (len(plan.stages), plan.epoch) == (3, 7)
    assert len(make_plan(FakeNeeds([1] * 3), offers(*[None] * 5), "latency", 5, 7).stages) == 3


def test_throughput_gives_the_slow_node_less():
    fast, slow = NodeOffer("fast", "cpu", None, 1.0), NodeOffer("slow", "cpu", None, 3.0)
    plan = make_plan(FakeNeeds([1] * 12), [slow, fast], "throughput", 2, 1)
    assert [(s.node_id, s.layers, s.predicted_ms) for s in plan.stages] == [("slow", 3, 9.0), ("fast", 9, 9.0)]


def test_latency_leaves_out_a_node_that_is_far_away():
    near, far = NodeOffer("near", "cpu", None, 1.0, 0.1), NodeOffer("far", "cpu", None, 0.9, 50.0)
    assert make_plan(FakeNeeds([1] * 12), [near, far], "latency", None, 1).node_ids == ("near",)
    required = make_plan(FakeNeeds([1] * 12), [near, far], "latency", 2, 1)  # each with at least one layer
    assert [(stage.node_id, stage.layers) for stage in required.stages] == [("near", 1), ("far", 11)]
    room = [NodeOffer("near", "cpu", 77, 1.0, 0.1), NodeOffer("far", "cpu", 121, 0.9, 50.0)]  # for 7 and for 11 layers
    plan = make_plan(FakeNeeds([10] * 12), room, "latency", None, 1)
    assert [stage.layers for stage in plan.stages] == [1, 11]  # both are needed, and far is quicker per layer


def test_layers_that_take_longer_count_as_that():
    plan = make_plan(FakeNeeds([1] * 4, times=[3.0, 1.0, 1.0, 1.0]), offers(None, None), "throughput", 2, 1)
    assert [(stage.layers, stage.predicted_ms) for stage in plan.stages] == [(1, 3.0), (3, 3.0)]


@pytest.mark.parametrize("cost", ["throughput", "latency"])
def test_times_are_needed_for_the_costs_in_time(cost):
    with pytest.raises(NoPlan, match=f"--plan {cost} needs measured times, and node n0 has none"):
        make_plan(FakeNeeds([1]), offers(None, layer_ms=None), cost, 1, 1)
    assert make_plan(FakeNeeds([1]), offers(None, layer_ms=None), "even", 1, 1).stages[0].predicted_ms is None


def test_no_nodes():
    with pytest.raises(NoPlan, match="1 nodes are required, 0 can be used"):
        make_plan(FakeNeeds([1]), [], "even", None, 1)
    with pytest.raises(NoPlan, match="3 nodes are required, 1 can be used"):
        make_plan(FakeNeeds([1] * 4), offers(None), "even", 3, 1)


def real_needs(slots=4, max_context=4096, quant="fp16"):
    """Qwen2.5-0.5B."""
    config = qwen.Config.from_checkpoint(
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        }
    )
    return ModelNeeds(config, qwen.WeightFormat(quant, 64, "fp16"), slots, max_context)


def test_keys_and_values_of_all_slots_are_counted():
    """By hand: 2 x 2 heads x 64 x fp32 per token and layer on a CPU, half of it in fp16 on a GPU."""
    needs = real_needs(slots=3, max_context=1000)
    assert needs.cache_bytes(0, "cpu") == 3 * 1000 * 2 * 2 * 64 * 4
    assert needs.cache_bytes(0, "cuda") == 3 * 1000 * 2 * 2 * 64 * 2
    weights = needs.weight_bytes(5, "cpu")
    linears = 896 * (896 + 2 * 128) + 896 * 896 + 3 * 896 * 4864
    assert 2 * linears < weights < 2.4 * linears
    one = make_plan(needs, offers(None), "even", 1, 1).stages[0]
    assert (one.weight_bytes, one.cache_bytes) == (24 * weights, 24 * needs.cache_bytes(0, "cpu"))

    memory = int((12 * weights + 12 * needs.cache_bytes(0, "cpu") + needs.working_bytes()) * HEADROOM) + 1
    assert len(make_plan(needs, offers(memory, memory, memory), "even", None, 1).stages) == 2
    more_slots = real_needs(slots=12, max_context=1000)
    assert len(make_plan(more_slots, offers(memory, memory, memory), "even", None, 1).stages) == 3


def test_working_memory_holds_a_prefill_chunk():
    """Hidden states, SwiGLU products and attention scores of 512 rows, or of max_context if that is less."""
    assert real_needs(max_context=4096).working_bytes() >= 512 * 4 * (2 * 4864 + 14 * 4096)
    assert real_needs(max_context=8).working_bytes() < real_needs(max_context=4096).working_bytes()


def test_a_second_copy_of_the_weights_is_granted_where_there_is_room():
    """By hand, Qwen2.5-0.5B in fp16: the linears of a layer once more in bf16; the split stays as it was."""
    needs = real_needs(slots=1, max_context=100)
    linears = 2 * (896 * (896 + 2 * 128) + 896 * 896 + 3 * 896 * 4864)
    once = needs.weight_bytes(0, "cpu")
    need_twice = int((24 * (once + linears + needs.cache_bytes(0, "cpu")) + needs.working_bytes()) * HEADROOM)
    for memory, pays, granted in (
        (need_twice, True, True),
        (need_twice - 1, True, False),
        (need_twice, False, False),
        (None, True, False),  # unknown
    ):
        offer = NodeOffer("n", "cpu", memory, second_copy=pays)
        stage = make_plan(needs, [offer], "even", 1, 1).stages[0]
        assert (stage.second_copy, stage.weight_bytes) == (granted, 24 * (once + linears * granted))


def test_estimate_of_required_nodes():
    needs = FakeNeeds([100] * 10, working=10)  # 1000 in all
    assert estimate_required(needs, []) == 1
    assert estimate_required(needs, offers(None)) == 1
    assert estimate_required(needs, offers(10_000)) == 1
    assert estimate_required(needs, offers(700, 700)) == 2
    assert estimate_required(needs, offers(int(260 * HEADROOM) + 1)) == 4  # 250 each beside the working memory
    assert estimate_required(needs, offers(0)) == 10
    room = int(260 * HEADROOM)  # for two and a half layers: two nodes have the bytes of five layers, but not the room
    assert estimate_required(FakeNeeds([100] * 5, working=10), offers(room, room)) == 3
    assert estimate_required(FakeNeeds([100, 1]), offers(60, 60, 60)) == 2


def test_planning_a_large_cluster_is_quick_enough_to_be_asked_for_in_a_status():
    """80 layers, 16 nodes: the number of splits would be 10^15. This is here to finish."""
    needs = FakeNeeds([100 + i % 3 for i in range(80)])
    assert_tiles(make_plan(needs, offers(*[700] * 16), "even", 16, 1), 80)


def test_plan_table():
    needs = FakeNeeds([10**6] * 4, [5 * 10**5] * 4)
    plan = make_plan(needs, offers(10**7, None, layer_ms=1.5, link_ms=0.25), "even", 2, 1)
    lines = plan_table(plan, {"n0": "cuda:0"}).splitlines()
    header = "node device layers weights MB KV MB of memory ms/token measured link ms measured"
    assert " ".join(lines[0].split()) == header
    assert lines[1].split() == ["n0", "cuda:0", "0-1", "(2)", "2.0", "1.0", "30", "%", "3.00", "-", "0.25", "-"]
    assert lines[2].split() == ["n1", "?", "2-3", "(2)", "2.0", "1.0", "unknown", "3.00", "-", "0.25", "-"]
    assert lines[3] == "one token through all stages: 6.50 ms predicted, - ms measured"
    measured = MeasuredTimes({"n0": 3.5, "n1": 2.5}, {"n0": 0.5, "n1": 1.0}, 7.6, 20)
    lines = plan_table(plan, {"n0": "cuda:0"}, measured).splitlines()
    assert lines[1].split()[-4:] == ["3.00", "3.50", "0.25", "0.50"]
    assert lines[2].split()[-4:] == ["3.00", "2.50", "0.25", "1.00"]
    assert lines[3] == "one token through all stages: 6.50 ms predicted, 7.60 ms measured"
    assert "-" in plan_table(make_plan(needs, offers(None, layer_ms=None), "even", 1, 1), {}).splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------------------
# What the other costs would give, and advice
# ----------------------------------------------------------------------------------------------------------------------

QUICK, SLOW, FAR = (
    NodeOffer("quick", "cpu", None, 1.0, 0.2),
    NodeOffer("slow", "cpu", None, 5.0, 0.2),
    NodeOffer("far", "cpu", None, 1.0, 30.0),
)


def advice_for(nodes, cost="even", required=None, needs=None, local=False):
    needs = needs or FakeNeeds([10**6] * 12)
    plan = make_plan(needs, nodes, cost, required, 1)
    return plan_advice(needs, nodes, plan, possible_plans(needs, nodes, required, 1), local)


def test_the_other_plans_side_by_side():
    """By hand: 12 layers of 1 MB, 1 and 5 ms each."""
    plans = possible_plans(FakeNeeds([10**6] * 12), [QUICK, SLOW], 2, 1)
    assert plans_in_words(plans) == (
        "--plan even: 6 layers on quick + 6 layers on slow, largest stage 6.0 MB; "
        "--plan throughput: 10 layers on quick + 2 layers on slow, slowest stage 10.20 ms; "
        "--plan latency: 11 layers on quick + 1 layer on slow, one token 16.40 ms"
    )
    even = plans["even"]
    assert (even.largest_bytes, even.slowest_ms, even.token_ms) == (6 * 10**6, pytest.approx(30.2), pytest.approx(36.4))
    assert list(possible_plans(FakeNeeds([1] * 4), offers(None, layer_ms=None), None, 1)) == ["even"]
    assert possible_plans(FakeNeeds([1] * 4), offers(1, 1), 2, 1) == {}


def test_advice_names_the_node_that_slows_the_cluster_down_and_the_option():
    fewer = advice_for([QUICK, SLOW], required=2)
    assert "one token takes 36.4 ms, and 12.2 ms without slow" in fewer and "12 layers on quick" in fewer
    assert fewer.endswith("--plan latency with --min-nodes 2, and no --max-nodes") and "\n" not in fewer
    assert advice_for([QUICK, SLOW], required=2, local=True).endswith("Start the coordinator with --local-nodes 1")

    crowded = [NodeOffer("quick", "cpu", 9 * 1_200_000, 1.0, 0.2), SLOW]  # the model does not fit without the slow one
    uneven = advice_for(crowded, required=2)
    assert "slow is slow (30.0 ms for 6 layers" in uneven and "--plan latency, as 9 layers on quick" in uneven

    no_choice = [NodeOffer("a", "cpu", 7 * 1_200_000, 1.0, 0.2), NodeOffer("b", "cpu", 7 * 1_200_000, 1.0, 30.0)]
    link = advice_for(no_choice, required=2)
    assert "the link to b is slow: 30.0 of the 42.2 ms" in link and "cable" in link
    assert advice_for(no_choice, required=2, local=True) is None


def test_advice_is_given_only_where_it_matters():
    assert advice_for([QUICK, NodeOffer("other", "cpu", None, 1.1, 0.2)], required=2) is None
    assert advice_for([QUICK, SLOW, FAR], cost="latency") is None
    assert advice_for([QUICK]) is None
    assert advice_for(offers(None, None, layer_ms=None), required=2) is None


def test_nodes_too_small_for_a_layer_that_latency_leaves_out_need_no_other_plan():
    """Three nodes must be there; no plan over three of them exists, but the quickest needs only one."""
    needs, nodes = FakeNeeds([10] * 4), offers(1000, 1000, 5)
    plans = possible_plans(needs, nodes, None, 3)
    assert list(plans) == ["latency"]
    assert plan_advice(needs, nodes, make_plan(needs, nodes, "latency", None, 1, at_least=3), plans) is None


# ----------------------------------------------------------------------------------------------------------------------
# Cluster state
# ----------------------------------------------------------------------------------------------------------------------


MEASURED = {"layer_ms": {"1": 1.0, "8": 2.0}, "kernels": {"with_copy": None}}


def node(node_id, free=10_000, limit=None, host="h", device="cpu", measured=True, rtt_ms=0.0, held=0):
    hello = {
        "selected_device": device,
        "hostname": host,
        "max_memory_bytes": limit,
        "held_memory_bytes": held,
        "devices": [{"id": "other", "free_memory": 1}, {"id": device, "free_memory": free}],
    }
    record = NodeRecord(node_id, hello, "10.0.0.1", SimpleNamespace(rtt_ms=rtt_ms))
    if measured:
        record.measured = MEASURED
    return record


def test_nodes_that_hold_layers_of_an_earlier_plan_share_what_they_shared_before():
    shares = share_memory([node("a", free=4_400, held=3_600), node("b", free=4_400, held=3_600)])
    assert shares == {"a": 4_000, "b": 4_000}  # 800 that nobody uses and twice 3,600
    # b joined when nothing was loaded; a came back with 3,600 of the 8,000, when both had loaded
    shares = share_memory([node("a", free=4_400, held=3_600), node("b", free=8_000)])
    assert shares == {"a": 4_000, "b": 4_000}


def cluster_of(*nodes, layers=4, required=None, minimum=None, default_memory=None, cost="even"):
    cluster = ClusterState(FakeNeeds([100] * layers), cost, required, minimum, default_memory)
    for record in nodes:
        cluster.join(record)
    return cluster


def plan_and_adopt(cluster, now=0.0):
    plan = cluster.next_plan(now)
    cluster.adopt(plan)
    return plan


def load(cluster, now=0.0):
    """Plans and loads everything; returns the plan."""
    plan = plan_and_adopt(cluster, now)
    for node_id in plan.node_ids:
        cluster.move(cluster.nodes[node_id], NodeState.READY, "loaded")
    return plan


MOVES = ["joined>loading", "loading>ready", "loading>loading", "ready>loading", "loading>joined", "ready>joined"]
MOVES += ["joined>lost", "loading>lost", "ready>lost"]


@pytest.mark.parametrize("before, after", list(itertools.product(NodeState, NodeState)))
def test_only_the_moves_of_the_table_exist(before, after):
    a = node("a")
    cluster = cluster_of(a)
    a.state = before
    if f"{before.value}>{after.value}" in MOVES:
        cluster.move(a, after, "test")
        assert a.state is after
    else:
        with pytest.raises(RuntimeError, match=f"node a: no move from {before.value} to {after.value} \\(test\\)"):
            cluster.move(a, after, "test")
        assert a.state is before
        assert cluster.nodes == {"a": a}


def test_a_node_is_lost_once():
    a = node("a")
    cluster = cluster_of(a, node("b", host="g"), required=2)
    load(cluster)
    cluster.lose(a, "closed", 1.0)
    plan, since = cluster.plan, cluster.incomplete_since
    with pytest.raises(RuntimeError):
        cluster.lose(a, "closed again", 2.0)
    assert (cluster.plan, cluster.incomplete_since, list(cluster.nodes)) == (plan, since, ["b"])


def test_a_second_node_of_the_same_id_is_refused_and_changes_nothing():
    first = node("a")
    cluster = cluster_of(first)
    with pytest.raises(ValueError, match="node a has joined already, from 10.0.0.1"):
        cluster.join(node("a"))
    assert cluster.nodes == {"a": first}


def test_readiness_follows_from_the_nodes():
    a, b = node("a", host="h1"), node("b", host="h2")
    cluster = cluster_of(a, b, required=2)
    assert not cluster.is_ready
    cluster.adopt(cluster.next_plan(0.0))
    assert (a.state, b.state, cluster.is_ready, cluster.ready_count) == (NodeState.LOADING, NodeState.LOADING, False, 0)
    cluster.move(a, NodeState.READY, "loaded")
    assert (cluster.is_ready, cluster.ready_count) == (False, 1)
    cluster.move(b, NodeState.READY, "loaded")
    assert (cluster.is_ready, cluster.ready_count, cluster.not_ready_error()) == (True, 2, None)
    assert cluster.next_plan(0.0) is None
    cluster.lose(b, "closed", 1.0)
    assert (cluster.is_ready, cluster.plan, a.state) == (False, None, NodeState.JOINED)


def test_losing_a_spare_harms_nothing():
    a, spare = node("a", free=10_000), node("b", free=1, host="g")
    cluster = cluster_of(a, spare)
    plan = load(cluster)
    assert plan.node_ids == ("a",)
    cluster.lose(spare, "closed", 1.0)
    assert cluster.is_ready and cluster.plan is plan


def test_a_plan_is_adopted_whole_or_not_at_all():
    a, b = node("a", host="h1"), node("b", host="h2")
    cluster = cluster_of(a, b, required=2)
    plan = cluster.next_plan(0.0)
    cluster.lose(b, "closed", 0.0)
    with pytest.raises(KeyError):
        cluster.adopt(plan)
    assert (cluster.plan, cluster.epoch, a.state) == (None, 0, NodeState.JOINED)


def test_a_newer_plan_sets_free_the_nodes_that_it_leaves_out():
    a, b = node("a", host="h1"), node("b", host="h2")
    cluster = cluster_of(a, b, required=2)
    load(cluster)
    cluster.adopt(make_plan(cluster.needs, [NodeOffer("b", "cpu", None)], "even", 1, 2))
    assert (a.state, b.state, cluster.epoch) == (NodeState.JOINED, NodeState.LOADING, 2)


def test_epochs_count_plans():
    cluster = cluster_of(node("a"))
    for epoch in (1, 2, 3):
        assert load(cluster).epoch == epoch == cluster.epoch
        cluster.void_plan("test", 0.0)
    cluster.void_plan("again", 5.0)
    assert cluster.incomplete_since == 0.0  # there was no plan to void


# (nodes that have joined, of which measured, required, what the 503 says)
NOT_READY = [
    (0, 0, 3, "Required nodes: 3, connected ready nodes: 0"),
    (1, 1, 3, "Required nodes: 3, connected ready nodes: 0"),
    (0, 0, 9, "Required nodes: 4, connected ready nodes: 0"),  # 4 layers
    (0, 0, None, "Required nodes: 1, connected ready nodes: 0"),
    (1, 0, None, "Required nodes: 1, connected ready nodes: 0"),
    (1, 1, None, "Required nodes: 3, connected ready nodes: 0"),  # 400 bytes in all, 165 per node: 150 usable
    (2, 2, None, "Required nodes: 3, connected ready nodes: 0"),
]


@pytest.mark.parametrize("joined, measured, required, counts", NOT_READY)
def test_the_503_has_the_counts(joined, measured, required, counts):
    nodes = [node(str(i), free=165, host=str(i), measured=i < measured) for i in range(joined)]
    error = cluster_of(*nodes, required=required).not_ready_error()
    assert (error.status, error.type, error.param, error.code) == (503, "cluster_not_ready", None, None)
    assert error.message == f"Model is not ready. {counts}"
    assert int(error.headers["Retry-After"]) > 0


def test_the_503_while_loading():
    a, b = node("a", host="h1"), node("b", host="h2")
    cluster = cluster_of(a, b, node("c", host="h3"), required=2)
    cluster.adopt(cluster.next_plan(0.0))
    cluster.move(a, NodeState.READY, "loaded")
    assert cluster.not_ready_error().message == "Model is not ready. Required nodes: 2, connected ready nodes: 1"


def test_max_nodes_are_waited_for():
    cluster = cluster_of(required=3)
    assert cluster.next_plan(0.0) is None
    for i in range(2):
        cluster.join(node(str(i), host=str(i)))
        with pytest.raises(NoPlan, match=f"3 nodes are required, {i + 1} can be used"):
            cluster.next_plan(1e9)  # for ever
    cluster.join(node("2", host="2"))
    cluster.join(node("3", host="3"))
    assert len(cluster.next_plan(0.0).stages) == 3


def test_max_nodes_above_the_layers():
    cluster = cluster_of(*(node(str(i), host=str(i)) for i in range(4)), layers=4, required=9, minimum=7)
    assert (cluster.required_count, len(cluster.next_plan(0.0).stages)) == (4, 4)


def test_min_nodes_let_it_start_with_fewer():
    cluster = cluster_of(node("0", free=165, host="0"), required=4, minimum=2)
    with pytest.raises(NoPlan, match="4 nodes are required, 1 can be used"):
        cluster.next_plan(0.0)
    cluster.join(node("1", free=165, host="1"))
    with pytest.raises(NoPlan, match="does not fit on 2"):
        cluster.next_plan(0.0)
    cluster.join(node("2", free=265, host="2"))
    assert len(cluster.next_plan(0.0).stages) == 3


def test_min_nodes_alone_are_the_fewest_that_are_used():
    cluster = cluster_of(node("0", host="0"), minimum=2)
    assert cluster.required_count == 2
    with pytest.raises(NoPlan, match="2 nodes are required, 1 can be used"):
        cluster.next_plan(0.0)
    cluster.join(node("1", host="1"))
    cluster.join(node("2", host="2"))
    assert len(cluster.next_plan(0.0).stages) == 2


def test_a_spare_takes_over_at_once():
    a, b, spare = (node(x, host=x) for x in "abc")
    cluster = cluster_of(a, b, spare, required=2)
    assert load(cluster).node_ids == ("a", "b")
    cluster.lose(a, "closed", 100.0)
    assert load(cluster, 100.0).node_ids == ("c", "b")


def test_a_spare_takes_over_while_another_node_is_still_measured():
    nodes = [node(name, host=name) for name in "abc"]
    cluster = cluster_of(*nodes, required=2)
    load(cluster, 0.0)
    cluster.join(node("d", host="d", measured=False))
    cluster.lose(nodes[0], "closed", 10.0)
    assert cluster.next_plan(10.0).node_ids == ("c", "b")


def test_without_a_spare_a_restarting_node_has_a_grace():
    a, b, c = (node(x, host=x) for x in "abc")
    cluster = cluster_of(a, b, c, required=3)
    load(cluster)
    cluster.lose(b, "closed", 100.0)
    with pytest.raises(NoPlan):
        cluster.next_plan(100.0 + RECOVERY_GRACE_S - 0.01)
    smaller = cluster.next_plan(100.0 + RECOVERY_GRACE_S)
    assert (smaller.node_ids, smaller.epoch) == (("a", "c"), 2)
    cluster.join(node("b", host="b"))
    assert len(cluster.next_plan(104.0).stages) == 3


def test_a_smaller_plan_grows_when_the_nodes_are_back():
    a, b = (node(x, host=x) for x in "ab")
    cluster = cluster_of(a, b, required=2)
    load(cluster)
    assert cluster.larger_plan(50.0) is None  # nothing is missing
    cluster.lose(b, "closed", 100.0)
    load(cluster, 100.0 + RECOVERY_GRACE_S)
    assert cluster.larger_plan(106.0) is None  # the other node is not there
    back = node("b", host="b", measured=False)
    cluster.join(back)
    assert cluster.larger_plan(107.0) is None  # not measured yet
    back.measured = {"layer_ms": {"1": 1.0}, "kernels": {"with_copy": None}}
    larger = cluster.larger_plan(108.0)
    assert (larger.node_ids, larger.epoch) == (("a", "b"), 3)
    cluster.adopt(larger)
    assert {n.state for n in (a, back)} == {NodeState.LOADING}


@pytest.mark.parametrize(
    "places, usable, expected",
    [
        ("", "ba", "ba"),
        ("ab", "ba", "ab"),
        ("ab", "b", "ab"),  # a is away: its place stays
        ("ab", "bc", "cb"),
        ("abc", "bcd", "dbc"),
        ("abc", "de", "dec"),
        ("ab", "abc", "abc"),
    ],
)
def test_places_change_as_little_as_can_be(places, usable, expected):
    assert in_places(list(places), list(usable)) == list(expected)


def test_whoever_comes_for_a_lost_node_takes_its_layers():
    a, b = (node(x, host=x) for x in "ab")
    cluster = cluster_of(b, a, required=2)
    assert load(cluster).node_ids == ("a", "b")  # whoever joined first: so it is the same when all come back
    cluster.lose(a, "closed", 0.0)
    cluster.join(node("c", host="c"))
    assert load(cluster).node_ids == ("c", "b")
    cluster.lose(b, "closed", 0.0)
    cluster.join(node("a", host="a"))
    assert load(cluster).node_ids == ("c", "a")


def test_the_grace_starts_again_when_a_node_comes_back():
    a, b, c = (node(x, host=x) for x in "abc")
    cluster = cluster_of(a, b, c, required=3)
    load(cluster)
    for lost in (a, b, c):
        cluster.lose(lost, "closed", 100.0)
    cluster.next_plan(101.0)
    cluster.join(node("a", host="a"))
    for now in (200.0, 200.0 + RECOVERY_GRACE_S - 0.01):  # the others may be on their way too
        with pytest.raises(NoPlan, match="3 nodes are required, 1 can be used"):
            cluster.next_plan(now)
    assert cluster.next_plan(200.0 + RECOVERY_GRACE_S).node_ids == ("a",)


def test_recovery_over_the_nodes_that_are_left_only_if_the_model_fits():
    a, b = (node(x, free=265, host=x) for x in "ab")
    cluster = cluster_of(a, b, required=2)
    load(cluster)
    cluster.lose(b, "closed", 0.0)
    with pytest.raises(NoPlan, match=r"does not fit on 1 node\(s\).*a: have"):
        cluster.next_plan(RECOVERY_GRACE_S)


def test_nodes_wait_for_measurement():
    """A plan made before a neighbour was measured would be made again a second later."""
    a, b = node("a", host="h1"), node("b", host="h2", measured=False)
    cluster = cluster_of(a, b)
    assert cluster.to_measure(0.0) == [b]
    assert cluster.next_plan(0.0) is None
    b.measured = {"layer_ms": {"1": 1.0}, "kernels": {"with_copy": None}}
    assert cluster.to_measure(0.0) == []
    assert cluster.next_plan(0.0).node_ids == ("a",)


def test_nodes_that_stay_silent_while_measuring_hold_up_a_plan_for_a_short_time_only(caplog):
    a, b = (node(x, host=x, measured=False) for x in "ab")
    silent, waits = (node(x, host=x, measured=False) for x in ("silent", "waits"))
    cluster = cluster_of(silent, a, b, required=2)
    silent.asked_at = a.asked_at = b.asked_at = 10.0
    a.measured, a.asked_at = MEASURED, None
    assert cluster.next_plan(1e6) is None  # however long it takes: one measured node is not enough
    b.measured, b.asked_at = MEASURED, None
    assert cluster.next_plan(100.0) is None
    cluster.join(waits)  # a newcomer does not start the time anew
    waits.asked_at = 100.0 + MEASURE_PATIENCE_S - 1.0
    assert cluster.next_plan(100.0 + MEASURE_PATIENCE_S - 0.01) is None
    with caplog.at_level("WARNING", logger="coordinator"):
        assert cluster.next_plan(100.0 + MEASURE_PATIENCE_S).node_ids == ("a", "b")
    assert "node silent: silent while measuring for 105 s" in caplog.text and "node waits: silent" not in caplog.text
    assert silent.load_error.startswith("silent while measuring") and silent.state is NodeState.JOINED


def test_a_plan_that_became_impossible_waits_anew():
    a, b, late = (node(x, host=x, measured=x != "late") for x in ("a", "b", "late"))
    cluster = cluster_of(a, b, late, required=2)
    assert cluster.next_plan(0.0) is None
    cluster.lose(b, "closed", 1.0)
    assert cluster.next_plan(2.0) is None
    cluster.join(node("b", host="b"))
    assert cluster.next_plan(MEASURE_PATIENCE_S + 1.0) is None
    assert cluster.next_plan(2 * MEASURE_PATIENCE_S + 1.0).node_ids == ("a", "b")


def test_a_smaller_plan_grows_though_another_node_stays_silent():
    a, b = (node(x, host=x) for x in "ab")
    cluster = cluster_of(a, b, required=2)
    load(cluster)
    cluster.lose(b, "closed", 100.0)
    load(cluster, 100.0 + RECOVERY_GRACE_S)
    cluster.join(node("silent", host="c", measured=False))
    cluster.join(node("b", host="b"))
    assert cluster.larger_plan(108.0).node_ids == ("a", "b")


def memories(*nodes, default_memory=None):
    return [offer.memory_bytes for offer in cluster_of(*nodes, default_memory=default_memory).offers()]


def test_memory_figures():
    assert memories(node("a", free=1000)) == [1000]
    assert memories(node("a", free=1000, limit=300)) == [300]
    assert memories(node("a", free=1000, limit=3000)) == [1000]
    assert memories(node("a", free=None, limit=300), default_memory=50) == [300]
    assert memories(node("a", free=None), default_memory=50) == [50]
    assert memories(node("a", free=None)) == [None]


def test_nodes_of_one_host_share_its_memory():
    assert memories(node("a", free=1000), node("b", free=1000)) == [500, 500]
    assert memories(node("a", free=1000, host="x"), node("b", free=1000, host="y")) == [1000, 1000]
    # An Apple GPU has the host's memory; NVIDIA's have their own, but not one for each of two nodes.
    assert memories(node("a", free=900, device="mps"), node("b", free=1000)) == [500, 500]
    assert memories(node("a", free=800, device="cuda:0"), node("b", free=1000)) == [800, 1000]
    assert memories(node("a", free=800, device="cuda:0"), node("b", free=700, device="cuda:1")) == [800, 700]
    assert memories(node("a", free=800, device="cuda:0"), node("b", free=800, device="cuda:0")) == [400, 400]


def test_limits_are_met_first_and_the_others_share_the_rest():
    assert memories(node("a", free=1000, limit=200), node("b", free=1000), node("c", free=1000)) == [200, 400, 400]
    assert memories(node("a", free=1000), node("b", free=1000, limit=200)) == [800, 200]
    assert memories(node("a", free=1000, limit=900), node("b", free=1000, limit=300)) == [700, 300]
    assert memories(node("a", free=1000, limit=900), node("b", free=1000, limit=900)) == [500, 500]
    # b joined after a had loaded 600: it is not planned with more than it has seen
    assert memories(node("a", free=1000), node("b", free=400)) == [500, 400]


def test_shares_never_exceed_the_host():
    chance = random.Random(0)
    for _ in range(300):
        free = chance.randint(0, 1000)
        limits = [chance.choice([None, chance.randint(0, 1200)]) for _ in range(chance.randint(1, 5))]
        got = memories(*(node(str(i), free=free, limit=limit) for i, limit in enumerate(limits)))
        assert sum(got) <= free
        assert all(limit is None or memory <= limit for memory, limit in zip(got, limits))
        if None in limits:
            assert free - sum(got) < len(limits)  # nothing is left unused but what does not divide


def test_offers_are_in_order_with_times_and_links():
    cluster = cluster_of(node("b", host="1", rtt_ms=3.0), node("a", host="2"))
    assert [(o.node_id, o.device_type, o.layer_ms, o.link_ms) for o in cluster.offers()] == [
        ("a", "cpu", 1.0, 0.0),
        ("b", "cpu", 1.0, 3.0),
    ]


# -- loads that fail ---------------------------------------------------------------------------------------------------


def test_a_refused_model_is_not_planned_again():
    cluster = cluster_of(node("a"))
    cluster.adopt(cluster.next_plan(0.0))
    cluster.void_plan("bad weight", 0.0)
    cluster.refuse("model.layers.0.mlp.up_proj.weight: has NaN")
    for now in (0.0, 1e9):
        with pytest.raises(NoPlan, match="model.layers.0.mlp.up_proj.weight: has NaN"):
            cluster.next_plan(now)
    cluster.join(node("b", host="g"))
    with pytest.raises(NoPlan, match="has NaN"):
        cluster.next_plan(1e9)
    assert not cluster.is_ready


def test_a_node_that_could_not_load_is_left_alone_for_a_while():
    a, b = node("a", host="h1"), node("b", host="h2")
    cluster = cluster_of(a, b, required=1)
    cluster.adopt(cluster.next_plan(0.0))
    cluster.load_failed(a, "RuntimeError: kernel", None, 50.0)
    assert (cluster.plan, a.state, a.load_error) == (None, NodeState.JOINED, "RuntimeError: kernel")
    assert cluster.next_plan(50.0).node_ids == ("b",)
    cluster.lose(b, "closed", 50.0)
    for now in (50.0, 50.0 + FAILED_LOAD_PAUSE_S - 0.01):
        with pytest.raises(NoPlan, match="a could not load: RuntimeError: kernel"):
            cluster.next_plan(now)
    assert cluster.next_plan(50.0 + FAILED_LOAD_PAUSE_S).node_ids == ("a",)


def test_less_memory_than_promised_is_planned_with_at_once():
    a, b = node("a", free=1000, host="h1"), node("b", free=1000, host="h2")
    cluster = cluster_of(a, b, required=2)
    assert [stage.layers for stage in plan_and_adopt(cluster).stages] == [2, 2]
    cluster.load_failed(a, "not enough memory", 150, 1.0)
    plan = cluster.next_plan(1.0)
    assert [(stage.node_id, stage.layers) for stage in plan.stages] == [("a", 1), ("b", 3)]
    cluster.adopt(plan)
    cluster.load_failed(a, "not enough memory", 150, 2.0)  # nothing new: trying again at once would only repeat it
    with pytest.raises(NoPlan, match="2 nodes are required, 1 can be used; a could not load: not enough memory"):
        cluster.next_plan(2.0)


def test_a_pass_without_memory_gives_its_node_fewer_layers_where_the_others_can_hold_them():
    a, b = node("a", free=1000, host="h1"), node("b", free=1000, host="h2")
    cluster = cluster_of(a, b, required=2)
    plan_and_adopt(cluster)
    cluster.ran_out_of_memory(a, "can't allocate", 1.0)
    assert cluster.plan is None and a.load_error == "can't allocate"
    assert [(stage.node_id, stage.layers) for stage in cluster.next_plan(1.0).stages] == [("a", 1), ("b", 3)]


def test_a_pass_without_memory_leaves_the_plan_when_there_is_no_other():
    cluster = cluster_of(node("a", free=1000))
    plan = plan_and_adopt(cluster)
    cluster.ran_out_of_memory(cluster.nodes["a"], "can't allocate", 1.0)
    assert cluster.plan is plan and cluster.nodes["a"].found_memory_bytes is None


def test_what_a_failed_load_found_is_forgotten_after_a_while():
    cluster = cluster_of(node("a", free=1000))
    plan_and_adopt(cluster)
    cluster.load_failed(cluster.nodes["a"], "not enough memory", 150, 1000.0)
    with pytest.raises(NoPlan, match="does not fit on 1"):
        cluster.next_plan(1000.0 + FOUND_MEMORY_S)
    assert cluster.next_plan(1000.1 + FOUND_MEMORY_S).node_ids == ("a",)


def test_a_failure_that_a_smaller_stage_would_not_mend_is_not_repeated_at_once():
    """Free memory is never twice the same: a little less of it than before explains nothing."""
    cluster = cluster_of(node("a", free=1000))
    plan_and_adopt(cluster)
    cluster.load_failed(cluster.nodes["a"], "RuntimeError: no kernel", 999, 1.0)
    with pytest.raises(NoPlan, match="a could not load: RuntimeError: no kernel"):
        cluster.next_plan(1.0)


def test_an_unknown_memory_becomes_known_by_failing():
    a = node("a", free=None)
    cluster = cluster_of(a)
    cluster.adopt(cluster.next_plan(0.0))
    cluster.load_failed(a, "not enough memory", 150, 1.0)
    with pytest.raises(NoPlan, match="does not fit on 1"):
        cluster.next_plan(1.0)
    assert cluster.required_count == 3  # 400 bytes, 136 usable on each


def test_a_node_that_cannot_measure_does_not_stop_the_others():
    a, b = node("a", host="h1"), node("b", host="h2", measured=False)
    cluster = cluster_of(a, b)
    cluster.load_failed(b, "RuntimeError: no kernel", None, 5.0)
    assert (b.state, cluster.to_measure(5.0)) == (NodeState.JOINED, [])
    assert load(cluster, 5.0).node_ids == ("a",)
    assert cluster.to_measure(5.0 + FAILED_LOAD_PAUSE_S) == [b]
    cluster.load_failed(b, "RuntimeError: no kernel", None, 20.0)
    assert cluster.is_ready  # the plan does not need it


# ----------------------------------------------------------------------------------------------------------------------
# How passes are cut
# ----------------------------------------------------------------------------------------------------------------------


def forecast(fixed: float, per_row: float, link_ms: float = 0.0, machine: object = None) -> StageForecast:
    times = {str(rows): fixed + per_row * rows for rows in (1, 8, 64, 256)}
    return StageForecast(times, link_ms, object() if machine is None else machine)


def simulated_ms(passes: list[list[float]], links: list[float], machines: list[object]) -> float:
    """When the last of the passes is back, sent one after another: [pass][stage] ms; stages of a machine take turns."""
    free_at = dict.fromkeys(machines, 0.0)
    back = 0.0
    for stages in passes:
        here = 0.0
        for ms, link, machine in zip(stages, links, machines):
            here = free_at[machine] = max(here + link / 2, free_at[machine]) + ms
            here += link / 2
        back = max(back, here)
    return back


def test_times_lie_on_the_lines_between_the_measured_ones():
    times = StageForecast({"1": 10.0, "8": 17.0, "64": 73.0, "256": 169.0}, 0.0, "m")
    assert [times.ms(rows) for rows in (1, 2, 8, 36, 64, 160, 256, 512)] == [10, 11, 17, 45, 73, 121, 169, 297]


@pytest.mark.parametrize("seed", range(30))
def test_prompts_are_cut_into_the_chunks_that_are_through_all_stages_soonest(seed):
    rng = random.Random(seed)
    machine = "one" if rng.random() < 0.3 else None
    stages = [
        forecast(rng.choice((0.0, 1.0, 30.0, 200.0)), rng.uniform(0.1, 2.0), machine=machine)
        for _ in range(rng.randrange(1, 5))
    ]
    tokens = rng.choice((1, 100, 600, 2048, 8000))
    machines = [stage.machine for stage in stages]

    def soonest(rows):
        sizes = [min(rows, tokens - start) for start in range(0, tokens, rows)]
        return simulated_ms([[stage.ms(size) for stage in stages] for size in sizes], [0.0] * len(stages), machines)

    # the last chunk may be shorter, and stages may differ: near the best, not always at it
    assert soonest(prefill_chunk(tokens, stages)) <= 1.15 * min(map(soonest, PREFILL_CHUNKS))


def test_one_stage_or_cheap_rows_take_the_largest_chunks():
    assert prefill_chunk(2048, [forecast(0, 1)]) == 512
    assert prefill_chunk(2048, [forecast(100, 0.01), forecast(100, 0.01)]) == 512
    assert prefill_chunk(2048, [forecast(1, 1), forecast(1, 1)]) == 128


def test_stages_of_one_machine_gain_nothing_from_small_chunks_but_the_patience_of_others():
    shared = [forecast(100, 1, machine="one"), forecast(100, 1, machine="one")]
    assert prefill_chunk(2048, shared) == 512
    assert prefill_chunk(2048, [forecast(0, 1, machine="one")] * 2) == 128  # 512 would take as long
    assert prefill_chunk(2048, [forecast(100, 1), forecast(100, 1)]) == 256


@pytest.mark.parametrize("seed", range(60))
def test_decodes_are_divided_so_that_tokens_come_soonest(seed):
    rng = random.Random(seed)
    machine, link_ms = ("one", (0.0,)) if rng.random() < 0.3 else (None, (0.0, 2.0, 60.0))
    stages = []
    for _ in range(rng.randrange(1, 5)):
        fixed, per_row = rng.choice((0.0, 5.0, 40.0)), rng.uniform(0.1, 5.0)
        at_once = rng.choice((1, 6))  # rows that the kernel takes in the time of one
        layers_ms = {str(rows): fixed + per_row * math.ceil(rows / at_once) * at_once for rows in (1, 4, 6, 8, 64)}
        stages.append(StageForecast(layers_ms, rng.choice(link_ms), machine or object()))
    sequences = rng.randrange(1, 13)
    links, machines = [stage.link_ms for stage in stages], [stage.machine for stage in stages]

    def token_ms(passes, rows):  # of many passes, each sent again as soon as it is back
        stage_ms = [stage.ms(rows) for stage in stages]
        alone = simulated_ms([stage_ms], links, machines)
        together = simulated_ms([stage_ms] * passes * 50, links, machines) / 50
        return max(alone, together - alone / 50) / min(sequences, passes * rows)

    passes, rows = decode_passes(sequences, stages)
    most = min(sequences, len(set(machines)))
    options = [(p, r) for p in range(1, most + 1) for r in range(1, -(-sequences // p) + 1)]
    assert (passes, rows) in options
    assert token_ms(passes, rows) <= 1.15 * min(token_ms(*option) for option in options)


def test_sequences_take_turns_where_fewer_rows_are_through_in_much_less_time():
    def one_machine(*few):  # milliseconds for 4, 6 and 8 rows
        return [StageForecast({"1": 30, **dict(zip("468", few)), "64": 500}, 1.0, "one")] * 2

    assert decode_passes(8, one_machine(40, 44, 68)) == (1, 6)  # FBGEMM's fp16 on AVX2, measured
    assert decode_passes(6, one_machine(40, 44, 68)) == (1, 6)
    assert decode_passes(5, one_machine(40, 44, 68)) == (1, 5)
    assert decode_passes(8, one_machine(40, 44, 55)) == (1, 8)
    assert decode_passes(8, one_machine(20, 44, 68)) == (1, 4)


def test_decodes_are_divided_only_over_machines_that_can_work_at_once():
    assert decode_passes(8, [forecast(5, 5), forecast(5, 5)]) == (2, 4)
    assert decode_passes(8, [forecast(5, 5, machine="one"), forecast(5, 5, machine="one")]) == (1, 8)
    assert decode_passes(1, [forecast(5, 5), forecast(5, 5)]) == (1, 1)
    assert decode_passes(8, [forecast(5, 5)]) == (1, 8)
    assert decode_passes(8, [forecast(20, 0.01), forecast(20, 0.01)]) == (1, 8)  # rows that cost nothing go together
    assert decode_passes(8, [forecast(0, 0), forecast(0, 0)]) == (1, 8)
