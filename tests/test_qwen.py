"""The model: against Transformers' Qwen2ForCausalLM on tiny random models, and on a real one when there is one.

Run: python -m pytest tests/test_qwen.py
With TRUECLUSTER_TEST_MODEL=<folder of a Qwen2 checkpoint> the real model is compared too (some minutes).
"""

import itertools
import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

import quant
import qwen

FP32 = qwen.WeightFormat("fp16", 64, "fp32")  # not quantized, stored in fp32
TOKENS = 29
VOCAB = 113
MAX_CONTEXT = 64

# Head counts, group sizes of attention (heads per key/value head: 1, 2, 3, 6, 7), head dims that are and are not
# hidden_size / heads, odd sizes, RoPE bases.
MODELS = {
    "mha": {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48},
    "gqa 2": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80},
    "gqa 3": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 65},
    "mqa": {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 1, "intermediate_size": 40},
    "gqa 7 (0.5B)": {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 96},
    "one head": {"hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 24},
    "odd hidden size": {
        "hidden_size": 37, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 51,
    },
    "wide heads": {
        "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 33,
    },
}  # fmt: skip


def raw_config(name="gqa 2", tied=False, layers=3, rope_theta=1e6, **more) -> dict:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        **MODELS[name],
        **more,
    }


def random_tensors(config: qwen.Config, seed=0) -> dict[str, torch.Tensor]:
    """Weights under which every part matters: scores spread by several units, so that attention is peaked and a wrong
    angle, scale, mask or order of heads shows; biases as large as what they are added to; norms far from 1."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(qwen.ends_tensor_shapes(config))
    for i in range(config.num_hidden_layers):
        shapes.update(qwen.layer_tensor_shapes(config, i))
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values.clamp(-2, 2)
        elif name.endswith(".bias"):
            values *= 1.0
        elif "embed_tokens" not in name:
            values *= {"q_proj": 1.7, "k_proj": 1.7}.get(name.split(".")[-2], 1.0) / shape[1] ** 0.5
        tensors[name] = values
    return tensors


def oracle(raw: dict, tensors: dict[str, torch.Tensor]) -> Qwen2ForCausalLM:
    """Transformers' model in fp32 with these weights."""
    model = Qwen2ForCausalLM._from_config(Qwen2Config(**raw), attn_implementation="eager").float().eval()
    result = model.load_state_dict(tensors, strict=False)
    assert result.unexpected_keys == []
    assert set(result.missing_keys) <= ({"lm_head.weight"} if raw["tie_word_embeddings"] else set())
    return model


class OurModel:
    """Ends and stages in one process, filled from checkpoint tensors; `splits` are the first layers of the stages."""

    def __init__(
        self, raw, tensors, weights=FP32, splits=(0,), slots=3, max_context=MAX_CONTEXT, device="cpu", measured=False
    ):
        self.config = config = qwen.Config.from_checkpoint(raw)
        bounds = [*splits, config.num_hidden_layers]
        self.stages = [
            qwen.Stage(config, start, end, weights, slots, max_context, device)
            for start, end in itertools.pairwise(bounds)
        ]
        choice = kernels(qwen.merged_linear_shapes(config).values(), weights.quant, weights, device, measured)
        for stage in self.stages:
            fill(stage, tensors, weights, choice)
        head_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        head_quant = "fp16" if weights.quant == "fp16" else "int8"
        head = linear(tensors[head_name], head_quant, weights, measured)
        embed_tokens, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
        self.ends = qwen.Ends(config, weights, embed_tokens, norm, head)

    def run(self, ids, slots, positions, keep) -> torch.Tensor:
        """Logits [K, V] of the last `keep` rows of each segment."""
        x = self.ends.embed(ids)
        for stage in self.stages:
            x = stage.run(x, slots, positions, keep if stage is self.stages[-1] else len(slots))
        return self.ends.logits(x)

    def prefill(self, ids, slot=0, position=0) -> torch.Tensor:
        """Logits [len(ids), V] of a segment."""
        positions = list(range(position, position + len(ids)))
        return self.run(ids, [slot] * len(ids), positions, len(ids))


def kernels(shapes, quant_mode: str, weights: qwen.WeightFormat, device, measured: bool) -> quant.LayerKernels:
    """The reference formula for everything, or what measuring chooses."""
    form = (quant_mode, weights.group_size, weights.dtype)
    if measured:
        return quant.choose_kernels(list(shapes), *form, device)
    reference = quant.KernelChoice("dequantize", "dequantize", quant.ANY_NUMBER, *form, torch.device(device).type)
    return quant.LayerKernels(dict.fromkeys(shapes, reference))


def linear(weight: torch.Tensor, quant_mode: str, weights: qwen.WeightFormat, measured=False) -> quant.Linear:
    """A prepared linear on the CPU: what the coordinator makes for the head."""
    storage = quant.Weight(*weight.shape, quant_mode, weights.group_size, weights.dtype, "cpu")
    for suffix, part in quant.quantize(weight, quant_mode, weights.group_size, weights.dtype).items():
        storage.parts[suffix].copy_(part)
    made = quant.Linear(storage, None)
    shape = tuple(weight.shape)
    made.prepare(kernels([shape], quant_mode, weights, "cpu", measured).choices[shape])
    return made


def fill(stage: qwen.Stage, tensors, weights: qwen.WeightFormat, choice: quant.LayerKernels) -> None:
    """What a node does: every tensor of the list, and no other, goes to its destination; then the layers are packed."""
    destinations = {name: place for layer in stage.layers.values() for name, place in layer.destinations.items()}
    stored = qwen.stored_tensors(stage.config, stage.start, stage.end, weights)
    assert sorted(destinations) == sorted(entry.name for entry in stored)
    for place in destinations.values():
        place.fill_(77)  # whatever is not written would show
    for entry in stored:
        source = tensors[entry.source]
        if source.dim() == 2:
            source = quant.quantize(source, weights.quant, weights.group_size, weights.dtype)[entry.suffix]
        place = destinations[entry.name]
        assert (tuple(place.shape), place.dtype) == (entry.shape, qwen.TORCH_DTYPES[entry.dtype])
        assert entry.nbytes == place.nbytes
        place.copy_(source)
    for layer in stage.layers.values():
        layer.prepare(choice)


def random_ids(count=TOKENS, seed=1) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(actual, expected, tolerance=1e-4):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= tolerance


@pytest.fixture(autouse=True)
def _one_thread_and_no_gradients():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models: more threads only wait for each other
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


# ----------------------------------------------------------------------------------------------------------------------
# Against Transformers
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers(name, tied):
    """fp32, within 1e-4: one prefill, decode steps with the cache, a prefill in uneven chunks."""
    raw = raw_config(name, tied=tied, rope_theta=10000.0 if tied else 1e6)
    tensors = random_tensors(qwen.Config.from_checkpoint(raw), seed=len(name))
    ids = random_ids()
    theirs = oracle(raw, tensors)
    expected = theirs(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.5  # logits that mean something
    ours = OurModel(raw, tensors, splits=(0, 1))

    assert_close(ours.prefill(ids), expected)

    past = theirs(torch.tensor([ids[:20]]), use_cache=True).past_key_values
    ours.prefill(ids[:20], slot=1)
    for position in range(20, TOKENS):
        step = theirs(torch.tensor([[ids[position]]]), past_key_values=past, use_cache=True)
        past = step.past_key_values
        assert_close(ours.run([ids[position]], [1], [position], 1), step.logits[0])

    start, pieces = 0, []
    for size in (1, 5, 2, 13, 8):
        pieces.append(ours.prefill(ids[start : start + size], slot=2, position=start))
        start += size
    assert_close(torch.cat(pieces), expected)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e4, 1e15])
def test_the_norm_is_its_formula(size):
    generator = torch.Generator().manual_seed(0)
    x = size * torch.randn(5, 96, generator=generator)
    x[2] = 0
    weight = 1 + torch.randn(96, generator=generator) / 4
    got = qwen.RMSNorm(weight, 1e-6)(x)
    wide = x.double()
    expected = wide / (wide.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (96,), weight, 1e-6), rtol=4e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["gqa 3", "odd hidden size"])
def test_every_split_equals_the_whole(name):
    """Bit for bit: a split model is the same code on the same numbers, in a prefill and in decode steps."""
    raw = raw_config(name, layers=4)
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    ids = random_ids()
    whole = OurModel(raw, tensors)
    expected = [whole.prefill(ids), *(whole.run([token], [0], [TOKENS + i], 1) for i, token in enumerate((3, 5, 8)))]
    for count in (1, 2, 3):
        for cuts in itertools.combinations(range(1, 4), count):
            split = OurModel(raw, tensors, splits=(0, *cuts))
            actual = [split.prefill(ids), *(split.run([t], [0], [TOKENS + i], 1) for i, t in enumerate((3, 5, 8)))]
            assert all(torch.equal(a, e) for a, e in zip(actual, expected)), cuts


def test_rows_of_several_slots_in_one_pass():
    """A prefill chunk, a decode and a verification of drafts share a pass; `keep` picks the last rows of each."""
    raw = raw_config("gqa 3")
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    theirs = oracle(raw, tensors)
    a, b, c = random_ids(12, 1), random_ids(17, 2), random_ids(9, 3)
    expected = [theirs(torch.tensor([ids])).logits[0] for ids in (a, b, c)]
    ours = OurModel(raw, tensors, splits=(0, 2))
    ours.prefill(b[:16], slot=1)
    ours.prefill(c[:5], slot=2)
    ids = [*a, b[16], *c[5:]]
    slots = [0] * 12 + [1] + [2] * 4
    positions = [*range(12), 16, *range(5, 9)]
    kept = ours.run(ids, slots, positions, 3)
    assert_close(kept, torch.cat((expected[0][-3:], expected[1][-1:], expected[2][-3:])))
    assert ours.run(ids, slots, positions, 0).shape == (0, VOCAB)
    assert_close(ours.run(ids, slots, positions, 99), torch.cat((expected[0], expected[1][-1:], expected[2][5:])))


def test_positions_are_the_whole_protocol():
    """Going back to a position undoes what came after it: rejected drafts, another ending of a common prefix."""
    raw = raw_config("gqa 2")
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    theirs = oracle(raw, tensors)
    ids, other = random_ids(20, 4), random_ids(20, 5)
    ours = OurModel(raw, tensors, splits=(0, 1))
    ours.prefill(ids)
    mixed = ids[:7] + other[7:]
    expected = theirs(torch.tensor([mixed])).logits[0]
    assert_close(ours.prefill(mixed[7:], position=7), expected[7:])
    assert [stage.length(0) for stage in ours.stages] == [20, 20]
    assert_close(ours.run([mixed[3]], [0], [3], 1), expected[3:4])
    assert [stage.length(0) for stage in ours.stages] == [4, 4]


def test_copied_and_cleared_caches():
    raw = raw_config("gqa 2")
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    ids = random_ids(20)
    expected = oracle(raw, tensors)(torch.tensor([ids])).logits[0]
    ours = OurModel(raw, tensors)
    (stage,) = ours.stages
    ours.prefill(ids)
    ours.prefill(random_ids(30, 9), slot=2)
    stage.copy(0, 2, 11)
    assert stage.length(2) == 11
    ours.prefill(random_ids(5, 3), slot=0, position=2)  # the copy is a copy
    assert_close(ours.prefill(ids[11:], slot=2, position=11), expected[11:])
    stage.copy(2, 2, 5)
    assert stage.length(2) == 20
    with pytest.raises(qwen.InvalidPass, match="length 21 is past the cache's end"):
        stage.copy(2, 1, 21)
    assert stage.length(1) == 0
    stage.clear([0, 2])
    assert (stage.length(0), stage.length(2), stage.cache_nbytes) == (0, 0, 0)
    assert_close(ours.prefill(ids, slot=2), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Other number formats
# ----------------------------------------------------------------------------------------------------------------------


def rounded(tensors, weights: qwen.WeightFormat) -> dict[str, torch.Tensor]:
    """What the stored forms stand for: the linears by the reference formula, norms and biases as they are."""
    tied = "lm_head.weight" not in tensors
    values = {}
    for name, tensor in tensors.items():
        mode = weights.quant
        if "embed_tokens" in name or name == "lm_head.weight":
            mode = "fp16" if mode == "fp16" else "int8"
        if tensor.dim() == 2 and ("embed_tokens" not in name or tied or mode == "int8"):
            parts = quant.quantize(tensor, mode, weights.group_size, weights.dtype)
            tensor = quant.dequantize(parts, mode, weights.group_size, tensor.shape[1])
        values[name] = tensor
    return values


FORMATS = {
    "fp16": qwen.WeightFormat("fp16", 64, "fp16"),
    "bf16": qwen.WeightFormat("fp16", 64, "bf16"),
    "int8": qwen.WeightFormat("int8", 64, "fp16"),
    "int4": qwen.WeightFormat("int4", 32, "bf16"),
}


@pytest.mark.parametrize("name", ["gqa 3", "odd hidden size"])
@pytest.mark.parametrize("stored", FORMATS)
def test_stored_forms_mean_what_the_reference_formula_says(stored, name):
    """Transformers in fp32, given the rounded weights, has the same logits within 1e-4: on CPU activations are fp32."""
    weights = FORMATS[stored]
    raw = raw_config(name)
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    ids = random_ids()
    actual = OurModel(raw, tensors, weights, splits=(0, 2)).prefill(ids)
    assert_close(actual, oracle(raw, rounded(tensors, weights))(torch.tensor([ids])).logits[0])


def relative_error(actual, expected) -> float:
    return ((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


@pytest.mark.parametrize("stored", ["fp16", "bf16"])
def test_half_precision_is_as_far_off_as_its_rounding_explains(stored):
    """Weights rounded to 11 (fp16) or 8 (bf16) significant bits, and perhaps a measured kernel whose activations are
    too: each of some 20 roundings on the way adds a relative error of at most eps / 2 and the peaked attention
    multiplies what reaches it. 20 x eps bounds that; a lost bias or a wrong angle gives an error near 1.
    """
    weights = FORMATS[stored]
    raw = raw_config("gqa 7 (0.5B)")
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    ids = random_ids()
    expected = oracle(raw, tensors)(torch.tensor([ids])).logits[0]
    actual = OurModel(raw, tensors, weights, splits=(0, 2), measured=True).prefill(ids)
    assert relative_error(actual, expected) <= 20 * torch.finfo(qwen.TORCH_DTYPES[weights.dtype]).eps


@pytest.mark.parametrize("device", ["cuda", "mps"])
@pytest.mark.parametrize("stored", ["fp32", "fp16", "bf16"])
def test_accelerators_match_transformers(device, stored):
    """Activations in the compute dtype: the tolerance is the one above."""
    if not (torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()):
        pytest.skip(f"no {device} here")
    weights = qwen.WeightFormat("fp16", 64, stored)
    raw = raw_config("gqa 7 (0.5B)")
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    ids = random_ids()
    expected = oracle(raw, tensors)(torch.tensor([ids])).logits[0]
    ours = OurModel(raw, tensors, weights, splits=(0, 2), device=device, measured=True)
    pieces = [ours.prefill(ids[:9]), ours.prefill(ids[9:28], position=9), ours.prefill(ids[28:], position=28)]
    allowed = 1e-5 if stored == "fp32" else 20 * torch.finfo(qwen.TORCH_DTYPES[stored]).eps
    assert relative_error(torch.cat(pieces), expected) <= allowed


def test_scores_that_overflow_fp16_unless_queries_are_scaled_first():
    """Larger Qwen2 models reach q.k beyond 65504. Both paths: one row, and several behind a cache."""
    generator = torch.Generator().manual_seed(0)
    q = 70 * torch.randn(5, 4, 64, generator=generator).sign()  # q.k is up to 313,600, scaled 39,200
    keys, values = q[:, :2].transpose(0, 1).repeat(1, 2, 1), torch.randn(2, 10, 64, generator=generator)
    q = q / 8
    expected = qwen.attention(q, keys, values)
    for rows in (1, 5):
        actual = qwen.attention(q[5 - rows :].half(), keys.half(), values.half())
        assert_close(actual.float(), expected[5 - rows :], 2e-3)


def test_swiglu_products_beyond_fp16():
    """down_proj takes fp16 on accelerators; its input may pass 65504 where gate and up are large."""
    config = qwen.Config.from_checkpoint(raw_config())
    layer = qwen.DecoderLayer(config, 0, FP32, torch.device("cpu"))
    weight = torch.randn(config.hidden_size, config.intermediate_size, generator=torch.Generator().manual_seed(0)) / 1e3
    layer.linears["down_proj"] = lambda x: (x.float() @ weight.T).to(x.dtype)
    x = torch.randn(3, config.intermediate_size, generator=torch.Generator().manual_seed(1))
    x *= torch.tensor([[1.0], [3e4], [1e6]])
    layer.dtype = torch.float16
    actual = layer._down(x)
    for row, expected in zip(actual, x @ weight.T):
        assert relative_error(row, expected) < 1e-3


# ----------------------------------------------------------------------------------------------------------------------
# Rows that cannot be run
# ----------------------------------------------------------------------------------------------------------------------

# (slots, positions, what the message says), for a stage of 3 slots of 16 tokens: slot 0 holds 5 and slot 1 holds 3.
INVALID = {
    "gap after the cache": ([0], [6], "position 6 is past the cache's end"),
    "gap in an empty slot": ([2], [1], "position 1 is past the cache's end"),
    "gap in a segment": ([0, 0], [2, 4], "position 4 does not follow 2"),
    "backwards": ([0, 0], [2, 1], "position 1 does not follow 2"),
    "negative position": ([0], [-1], "position -1 is negative"),
    "slot twice": ([0, 1, 0], [4, 2, 5], "stand together"),
    "no such slot": ([3], [0], "slot 3 does not exist"),
    "negative slot": ([-1], [0], "slot -1 does not exist"),
    "too long": ([0] * 12, list(range(5, 17)), "17 tokens do not fit into max_context 16"),
    "second segment is wrong": ([0, 1], [2, 4], "slot 1: position 4"),
    "no rows": ([], [], "at least one row"),
    "lengths differ": ([0, 0], [1], "2 slots and 1 positions"),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_pass_raises_and_changes_nothing(case):
    slots, positions, message = INVALID[case]
    raw = raw_config("one head")
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    ours = OurModel(raw, tensors, max_context=16)
    (stage,) = ours.stages
    ids = random_ids(6)
    ours.prefill(ids[:5])
    ours.prefill(ids[:3], slot=1)
    with pytest.raises(qwen.InvalidPass, match=message):
        stage.run(torch.zeros(len(slots), 16), slots, positions, 1)
    assert [stage.length(slot) for slot in range(3)] == [5, 3, 0]
    expected = oracle(raw, tensors)(torch.tensor([ids])).logits[0]
    assert_close(ours.run(ids[5:], [0], [5], 1), expected[5:])


def test_a_pass_that_failed_halfway_can_be_repeated(monkeypatch):
    """Out of memory in the second layer: the first has the rows already, the slot has them only when all layers do."""
    raw = raw_config("one head")
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    ours = OurModel(raw, tensors)
    (stage,) = ours.stages
    ids = random_ids(9)
    ours.prefill(ids[:5])
    with monkeypatch.context() as patch:
        patch.setattr(stage.layers[1], "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            ours.prefill(ids[5:], position=5)
    assert stage.length(0) == 5
    with pytest.raises(qwen.InvalidPass, match="length 9 is past"):
        stage.copy(0, 1, 9)
    with pytest.raises(qwen.InvalidPass, match="position 9 is past"):
        ours.run([1], [0], [9], 1)
    assert_close(ours.prefill(ids[5:], position=5), oracle(raw, tensors)(torch.tensor([ids])).logits[0, 5:])


def test_hidden_states_of_another_shape_are_refused():
    raw = raw_config("one head")
    ours = OurModel(raw, random_tensors(qwen.Config.from_checkpoint(raw)))
    with pytest.raises(qwen.InvalidPass, match=r"hidden states \[2, 16\] for 1 rows"):
        ours.stages[0].run(torch.zeros(2, 16), [0], [0], 1)


def test_a_stage_has_layers_of_the_model():
    config = qwen.Config.from_checkpoint(raw_config(layers=3))
    for start, end in ((0, 4), (2, 2), (-1, 2), (2, 1)):
        with pytest.raises(qwen.UnsupportedModel, match="of a model with 3 layers"):
            qwen.Stage(config, start, end, FP32, 1, 8, "cpu")


# ----------------------------------------------------------------------------------------------------------------------
# Caches and sizes
# ----------------------------------------------------------------------------------------------------------------------


def test_caches_grow_by_doubling_up_to_max_context():
    cache = qwen.KVCache(2, 4, 300, torch.float32, "cpu")
    token = 2 * 2 * 4 * 4  # bytes: keys and values, 2 heads of 4 fp32
    grown = []
    for i in range(300):
        keys, values = cache.append(torch.full((2, 2, 1, 4), float(i)))
        grown.append(cache.nbytes // token)
    assert sorted(set(grown)) == [128, 256, 300]
    assert keys.shape == values.shape == (2, 300, 4)
    assert torch.equal(keys[1, :, 0], torch.arange(300.0))
    assert torch.equal(values[0, :, 3], torch.arange(300.0))
    with pytest.raises(qwen.InvalidPass, match="301 tokens do not fit into max_context 300"):
        cache.append(torch.zeros(2, 2, 1, 4))
    assert (cache.length, cache.floor(299), cache.floor(301)) == (300, 299, 300)
    cache.cut(7)
    assert (cache.length, cache.nbytes // token) == (7, 300)
    with pytest.raises(qwen.InvalidPass, match="position 8 is past the cache's end"):
        cache.cut(8)


@pytest.mark.parametrize("stored", ["fp32", *FORMATS])
def test_planned_bytes_hold_what_a_stage_takes(stored):
    """The planner counts with these before anything is measured: enough for whichever kernel is chosen."""
    weights = {"fp32": FP32, **FORMATS}[stored]
    raw = raw_config("gqa 3", layers=2)
    config = qwen.Config.from_checkpoint(raw)
    tensors = random_tensors(config)
    planned = sum(qwen.layer_weight_bytes(config, i, weights, "cpu") for i in range(2))
    for kernel in quant.KERNELS:
        stage = qwen.Stage(config, 0, 2, weights, 1, MAX_CONTEXT, "cpu")
        if kernel.second_copy:
            continue  # only where it was planned for
        form = (weights.quant, weights.group_size, weights.dtype)
        choice = quant.KernelChoice(kernel.name, kernel.name, quant.ANY_NUMBER, *form, "cpu")
        shapes = qwen.merged_linear_shapes(config).values()
        fill(stage, tensors, weights, quant.LayerKernels(dict.fromkeys(shapes, choice)))
        assert stage.weight_nbytes <= planned, kernel.name
    stage.run(torch.zeros(MAX_CONTEXT, config.hidden_size), [0] * MAX_CONTEXT, list(range(MAX_CONTEXT)), 1)
    assert stage.cache_nbytes == sum(qwen.layer_cache_bytes(config, i, MAX_CONTEXT, weights, "cpu") for i in range(2))


def test_cache_bytes_by_hand():
    config = qwen.Config.from_checkpoint(raw_config("gqa 3"))  # 2 key/value heads of 8
    assert qwen.layer_cache_bytes(config, 0, 100, FP32, "cpu") == 100 * 2 * 2 * 8 * 4
    assert qwen.layer_cache_bytes(config, 0, 100, FORMATS["bf16"], "cpu") == 100 * 2 * 2 * 8 * 4
    assert qwen.layer_cache_bytes(config, 0, 100, FORMATS["bf16"], "cuda") == 100 * 2 * 2 * 8 * 2


@pytest.mark.parametrize("stored", FORMATS)
def test_stored_tensors_cover_the_checkpoint_once_and_in_order(stored):
    weights = FORMATS[stored]
    raw = raw_config("odd hidden size", layers=3)
    config = qwen.Config.from_checkpoint(raw)
    names = set(oracle(raw, random_tensors(config)).state_dict())
    in_layers = {name for name in names if name.startswith("model.layers.")}
    listed = qwen.stored_tensors(config, 0, 3, weights)
    assert {entry.source for entry in listed} == in_layers
    assert set(qwen.ends_tensor_shapes(config)) == names - in_layers
    assert len({entry.name for entry in listed}) == len(listed)
    assert listed == qwen.stored_tensors(config, 0, 1, weights) + qwen.stored_tensors(config, 1, 3, weights)


def test_embeddings_have_the_values_of_their_stored_form():
    raw = raw_config("odd hidden size", tied=True)
    tensors = random_tensors(qwen.Config.from_checkpoint(raw))
    embedding = tensors["model.embed_tokens.weight"]
    ids = [5, 0, VOCAB - 1, 5]
    assert torch.equal(OurModel(raw, tensors).ends.embed(ids), embedding[ids])
    scale = embedding.abs().amax(dim=1, keepdim=True) / 127
    assert_close(
        OurModel(raw, tensors, FORMATS["int4"]).ends.embed(ids), ((embedding / scale).round() * scale)[ids], 1e-6
    )


# ----------------------------------------------------------------------------------------------------------------------
# Config
# ----------------------------------------------------------------------------------------------------------------------


def test_both_spellings_of_a_config_are_one():
    old = {**raw_config(), "torch_dtype": "bfloat16", "rope_scaling": None}
    new = {**raw_config(), "dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    del new["rope_theta"]
    new["layer_types"] = ["full_attention"] * 3
    assert qwen.Config.from_checkpoint(old) == qwen.Config.from_checkpoint(new)
    new["rope_parameters"]["rope_theta"] = 5e5
    assert qwen.Config.from_checkpoint(new).rope_theta == 5e5
    assert qwen.Config.from_checkpoint({**new, "rope_theta": 7.0}).rope_theta == 5e5  # as Transformers has it


def test_what_transformers_writes_is_read():
    theirs = Qwen2Config(**raw_config("gqa 3", rope_theta=12345.0))
    ours = qwen.Config.from_checkpoint(json.loads(theirs.to_json_string(use_diff=False)) | {"architectures": None})
    assert ours == qwen.Config.from_checkpoint(raw_config("gqa 3", rope_theta=12345.0))


def test_defaults_are_those_of_transformers():
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {"model_type": "qwen2", **{key: raw_config()[key] for key in required}}
    ours, theirs = qwen.Config.from_checkpoint(raw), Qwen2Config(**raw, num_key_value_heads=None)
    for name in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.rope_theta, ours.head_dim) == (10000.0, 16)


def test_a_window_that_no_layer_uses_is_fine():
    plain = qwen.Config.from_checkpoint(raw_config())
    for unused in (
        {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"sliding_window": 4096},
    ):
        assert qwen.Config.from_checkpoint(raw_config(**unused)) == plain


# what config.json says -> what the message must name
REFUSED = {
    "another architecture": ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
    "hybrid": (
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
        r"Qwen3_5ForConditionalGeneration \(model_type qwen3_5\) is not supported; supported: Qwen2ForCausalLM",
    ),
    "MoE": ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, "Qwen2MoeForCausalLM"),
    "classifier": ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
    "no architecture": ({"architectures": None, "model_type": None}, "architecture none"),
    "sliding window": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "sliding_attention"),
    "layer types": ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
    "too few layer types": ({"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
    "rope scaling": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
    "rope scaling, newer": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic'"),
    "rope parameters": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
    "rope per layer type": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer type"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "rope is a list": ({"rope_scaling": [1]}, "must be JSON objects"),
    "theta is text": ({"rope_theta": "1e6"}, "rope_theta must be a number"),
    "theta is infinite": ({"rope_theta": float("inf")}, "rope_theta must be a positive number"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, r"already quantized \(gptq\)"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    "heads": ({"num_attention_heads": 4, "num_key_value_heads": 3}, "not a multiple"),
    "odd head_dim": ({"head_dim": 15}, "head_dim 15 is odd"),
    "no heads": ({"num_attention_heads": 0}, "config"),
    "text for a number": ({"hidden_size": "64"}, "config"),
    "fraction": ({"vocab_size": 100.5}, "vocab_size must be a positive integer"),
    "boolean for a number": ({"vocab_size": True}, "vocab_size must be a positive integer"),
    "negative": ({"intermediate_size": -1}, "intermediate_size must be a positive integer"),
    "endless": ({"num_hidden_layers": 10**12}, "num_hidden_layers must be 1 to 1024"),
    "huge epsilon": ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
    "NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
    "tied is text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case):
    change, message = REFUSED[case]
    with pytest.raises(qwen.UnsupportedModel, match=message):
        qwen.Config.from_checkpoint({**raw_config(), **change})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_field_is_named(key):
    raw = raw_config()
    del raw[key]
    with pytest.raises(qwen.UnsupportedModel, match=f"config.json has no {key}"):
        qwen.Config.from_checkpoint(raw)


def test_a_config_that_is_no_object():
    with pytest.raises(qwen.UnsupportedModel, match="must hold a JSON object"):
        qwen.Config.from_checkpoint([])


def test_config_over_the_wire():
    config = qwen.Config.from_checkpoint(raw_config("odd hidden size"))
    payload = json.loads(json.dumps(config.to_wire()))
    assert qwen.Config.from_wire(payload) == config
    for change in (
        {"more": 1}, {b"more": 1, "else": 2}, {"layer_types": "full"}, {"layer_types": []}, {"hidden_size": -1},
        {"num_hidden_layers": 2**40}, {"rope_theta": "x"}, {"layer_types": [[], {}, 1]},
    ):  # fmt: skip
        with pytest.raises(qwen.UnsupportedModel):
            qwen.Config.from_wire({**payload, **change})
    del payload["head_dim"]
    with pytest.raises(qwen.UnsupportedModel, match="head_dim"):
        qwen.Config.from_wire(payload)


# ----------------------------------------------------------------------------------------------------------------------
# A real model
# ----------------------------------------------------------------------------------------------------------------------

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Es war einmal ein Konig, der hatte",
)
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def real(real_model):
    """(config, tensors, {prompt ids: Transformers' greedy continuation in fp32})."""
    raw = json.loads((real_model / "config.json").read_text())
    theirs = Qwen2ForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None  # all 64, whatever they are
    tokenizer = Tokenizer.from_file(str(real_model / "tokenizer.json"))
    expected = {}
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
                repetition_penalty=1.0, pad_token_id=0,
            )  # fmt: skip
            expected[tuple(ids[0].tolist())] = out[0, ids.shape[1] :].tolist()
    return raw, dict(theirs.state_dict()), expected


@pytest.mark.parametrize("stages", [1, 3])
def test_real_model_generates_what_transformers_does(real, stages):
    raw, tensors, expected = real
    layers = raw["num_hidden_layers"]
    splits = [layers * i // stages for i in range(stages)]
    ours = OurModel(raw, tensors, splits=splits, slots=1, max_context=256)
    for ids, continuation in expected.items():
        generated = [ours.run(list(ids), [0] * len(ids), list(range(len(ids))), 1).argmax().item()]
        while len(generated) < NEW_TOKENS:
            position = len(ids) + len(generated) - 1
            generated.append(ours.run(generated[-1:], [0], [position], 1).argmax().item())
        assert generated == continuation
