"""qwen.py: the Qwen2 / Qwen2.5 decoder, in pieces that can live on different machines.

    token ids -> Ends.embed -> Stage(0, a) -> Stage(a, b) -> ... -> Ends.logits -> next token

The coordinator holds `Ends` (embedding, final norm, head). Every node holds one `Stage`: a contiguous range of decoder
layers and one cache per slot and layer. A model that is not split at all is the same code: `Ends` and `Stage(0, L)`.

Rows, not sequences. A stage's input is [R, hidden_size]; row r is the hidden state of one token, which goes into
`slots[r]` at `positions[r]`. Consecutive rows of one slot are a segment. A prefill chunk is one long segment, a batch
of decodes is many segments of one row, drafts to verify are a short segment: there is one path for all of them.

Numbers. The residual stream, norms, RoPE and softmax are fp32. On CPU all activations are fp32, whatever the weights
are stored in; on CUDA and MPS the linears and the attention run in the compute dtype.

Parameters carry the names of the checkpoint. Sources: transformers models/qwen2 (the oracle of the tests), RoPE
(arXiv:2104.09864), GQA (arXiv:2305.13245), SwiGLU (arXiv:2002.05202), RMSNorm (arXiv:1910.07467).
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F

import quant

SUPPORTED = "Qwen2ForCausalLM (the Qwen2 and Qwen2.5 dense text models)"
TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
FULL_ATTENTION = "full_attention"
MAX_LAYERS = 1024  # far above any model; a larger figure in a config must not fill the memory
# Caches start at this many tokens and double, so a short chat never pays for the longest one allowed.
FIRST_CACHE_LENGTH = 128
# fp16 ends at 65504; inputs of a linear beyond this are scaled by a power of two first (accelerators only).
FP16_SAFE = 32768.0


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that this program does not compute; the message names it."""


class InvalidPass(ValueError):
    """Rows that cannot be run: a slot that does not exist, a gap in the positions, a position past the cache's end."""


# ----------------------------------------------------------------------------------------------------------------------
# Config
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """What the layers need to know of config.json. Field names are the checkpoint's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or not 0 < value < 2**31):
                raise UnsupportedModel(f"config: {field.name} must be a positive integer, not {value!r}")
            if field.type == "float" and (type(value) not in (int, float) or not 0 < value < 1e30):
                raise UnsupportedModel(f"config: {field.name} must be a positive number, not {value!r}")
        if type(self.tie_word_embeddings) is not bool:
            raise UnsupportedModel("config: tie_word_embeddings must be true or false")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UnsupportedModel(
                f"config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"config: head_dim {self.head_dim} is odd; RoPE rotates pairs")
        if len(self.layer_types) != self.num_hidden_layers:
            raise UnsupportedModel(
                f"config: layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        other = sorted({str(t) for t in self.layer_types} - {FULL_ATTENTION})
        if other:
            hint = " (a sliding window is in use)" if "sliding_attention" in other else ""
            raise UnsupportedModel(f"layer type {', '.join(other)}{hint} is not supported; supported: {FULL_ATTENTION}")

    @classmethod
    def from_checkpoint(cls, raw: dict) -> Config:
        """Reads config.json (either spelling: rope_theta or rope_parameters); raises UnsupportedModel by name."""
        if not isinstance(raw, dict):
            raise UnsupportedModel("config.json must hold a JSON object")
        _refuse_unsupported(raw)
        rope_theta = _rope_theta(raw)
        try:
            hidden_size, heads = raw["hidden_size"], raw["num_attention_heads"]
            num_hidden_layers = raw["num_hidden_layers"]
            return cls(
                vocab_size=raw["vocab_size"],
                hidden_size=hidden_size,
                intermediate_size=raw["intermediate_size"],
                num_hidden_layers=num_hidden_layers,
                num_attention_heads=heads,
                num_key_value_heads=raw.get("num_key_value_heads") or heads,
                head_dim=raw.get("head_dim") or hidden_size // heads,
                rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope_theta=rope_theta,
                max_position_embeddings=raw.get("max_position_embeddings", 32768),
                tie_word_embeddings=raw.get("tie_word_embeddings", False),
                layer_types=_layer_types(raw, num_hidden_layers),
            )
        except KeyError as missing:
            raise UnsupportedModel(f"config.json has no {missing.args[0]}") from None
        except (TypeError, ZeroDivisionError) as error:
            raise UnsupportedModel(f"config.json has a value of the wrong type ({error})") from None

    def to_wire(self) -> dict:
        """The fields as plain JSON types, for ASSIGNMENT and MEASURE."""
        return {**asdict(self), "layer_types": list(self.layer_types)}

    @classmethod
    def from_wire(cls, payload: dict) -> Config:
        """The inverse of to_wire; raises UnsupportedModel for anything that is not a complete, sane config."""
        names = {field.name for field in fields(cls)}
        if set(payload) != names:
            raise UnsupportedModel(f"config fields differ: {sorted(str(name) for name in set(payload) ^ names)}")
        if type(payload["layer_types"]) is not list:
            raise UnsupportedModel("config: layer_types must be a list")
        return cls(**{**payload, "layer_types": tuple(payload["layer_types"])})


def _refuse_unsupported(raw: dict) -> None:
    architectures = raw.get("architectures") or []
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    model_type = raw.get("model_type")
    if named not in (None, "Qwen2ForCausalLM") or model_type not in (None, "qwen2") or not (named or model_type):
        raise UnsupportedModel(
            f"architecture {named or 'none'} (model_type {model_type or 'none'}) is not supported; "
            f"supported: {SUPPORTED}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise UnsupportedModel(
            f"the checkpoint is already quantized ({method}); use the original fp32, fp16 or bf16 checkpoint "
            "and --quant int8 or --quant int4"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported; supported: silu")


def _rope_theta(raw: dict) -> float:
    """The base of RoPE from either spelling; anything but plain RoPE over the whole head is refused."""
    sources = [raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}]
    if not all(isinstance(source, dict) for source in sources):
        raise UnsupportedModel("config: rope_scaling and rope_parameters must be JSON objects")
    rope = {**sources[0], **sources[1]}
    for source in sources:
        kind = source.get("rope_type", source.get("type", "default"))
        if kind != "default":
            raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: plain RoPE (rope_type default)")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel("rope_parameters that differ by layer type are not supported")
    for factor in (raw.get("partial_rotary_factor"), rope.get("partial_rotary_factor")):
        if factor not in (None, 1, 1.0):
            raise UnsupportedModel(f"partial_rotary_factor {factor!r} is not supported; supported: 1.0")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    if type(theta) not in (int, float):
        raise UnsupportedModel(f"config: rope_theta must be a number, not {theta!r}")
    return theta


def _layer_types(raw: dict, num_hidden_layers: int) -> tuple[str, ...]:
    """One entry per layer; a sliding window that is configured but used by no layer is fine."""
    if type(num_hidden_layers) is not int or not 0 < num_hidden_layers <= MAX_LAYERS:
        raise UnsupportedModel(f"config: num_hidden_layers must be 1 to {MAX_LAYERS}, not {num_hidden_layers!r}")
    if raw.get("layer_types"):
        return tuple(raw["layer_types"])
    windowed = raw.get("use_sliding_window") and raw.get("sliding_window")
    first_windowed = raw.get("max_window_layers", 28) if windowed else num_hidden_layers
    return tuple(FULL_ATTENTION if i < first_windowed else "sliding_attention" for i in range(num_hidden_layers))


# ----------------------------------------------------------------------------------------------------------------------
# Tensor names, shapes and stored forms
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored and sent: quant "fp16" means not quantized, stored in dtype ("fp32", "fp16", "bf16")."""

    quant: str
    group_size: int
    dtype: str


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it travels: a part of a checkpoint tensor in its stored form."""

    name: str  # <checkpoint name> or <checkpoint name>.q / .scale / .zero
    dtype: str
    shape: tuple[int, ...]
    source: str  # the checkpoint name
    suffix: str  # "" or ".q", ".scale", ".zero"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


# A layer's linears. Those that read the same input are stored, and multiplied, as one: {merged: (checkpoint parts)}.
LINEARS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
BIASED = frozenset(LINEARS["qkv_proj"])
NORMS = ("input_layernorm", "post_attention_layernorm")


def linear_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """{checkpoint part: (out_features, in_features)} of the linears of one decoder layer."""
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
    return {
        "self_attn.q_proj": (q_size, hidden_size),
        "self_attn.k_proj": (kv_size, hidden_size),
        "self_attn.v_proj": (kv_size, hidden_size),
        "self_attn.o_proj": (hidden_size, q_size),
        "mlp.gate_proj": (intermediate_size, hidden_size),
        "mlp.up_proj": (intermediate_size, hidden_size),
        "mlp.down_proj": (hidden_size, intermediate_size),
    }


def merged_linear_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """{merged linear: (out_features, in_features)} of one decoder layer, as they are multiplied."""
    shapes = linear_shapes(config)
    return {name: (sum(shapes[p][0] for p in parts), shapes[parts[0]][1]) for name, parts in LINEARS.items()}


def layer_tensor_shapes(config: Config, i: int) -> dict[str, tuple[int, ...]]:
    """{checkpoint name: shape} of decoder layer i."""
    prefix = f"model.layers.{i}."
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{norm}.weight": (config.hidden_size,) for norm in NORMS}
    for part, (out_features, in_features) in linear_shapes(config).items():
        shapes[f"{prefix}{part}.weight"] = (out_features, in_features)
        if part in BIASED:
            shapes[f"{prefix}{part}.bias"] = (out_features,)
    return shapes


def ends_tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """{checkpoint name: shape} of what the coordinator keeps."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def stored_tensors(config: Config, start: int, end: int, weights: WeightFormat) -> list[StoredTensor]:
    """Every tensor that a stage of layers [start, end) receives, in the order in which it is sent.

    Linears are in the stored form of quant.py. Norm weights and biases are few and stay fp32.
    """
    stored = []
    for i in range(start, end):
        for name, shape in layer_tensor_shapes(config, i).items():
            if len(shape) == 2:
                parts = quant.stored_parts(*shape, weights.quant, weights.group_size, weights.dtype)
            else:
                parts = {"": ("fp32", shape)}
            for suffix, (dtype, part_shape) in parts.items():
                stored.append(StoredTensor(name + suffix, dtype, tuple(part_shape), name, suffix))
    return stored


def activation_dtype(weights: WeightFormat, device_type: str) -> torch.dtype:
    """What the linears and the attention compute in, and what the caches hold: fp32 on CPU, else the compute dtype."""
    return torch.float32 if device_type == "cpu" else TORCH_DTYPES[weights.dtype]


def layer_weight_bytes(
    config: Config, i: int, weights: WeightFormat, device_type: str, second_copy: bool = False
) -> int:
    """Upper bound, in bytes, of what layer i's weights take on a device after its kernels have packed them."""
    linears = sum(
        quant.planned_nbytes(*shape, weights.quant, weights.group_size, weights.dtype, device_type, second_copy)
        for shape in merged_linear_shapes(config).values()
    )
    small = sum(4 * shape[0] for shape in layer_tensor_shapes(config, i).values() if len(shape) == 1)
    return linears + small


def layer_cache_bytes(config: Config, i: int, tokens: int, weights: WeightFormat, device_type: str) -> int:
    """Bytes of layer i's keys and values for so many tokens of one slot."""
    per_token = 2 * config.num_key_value_heads * config.head_dim
    return tokens * per_token * activation_dtype(weights, device_type).itemsize


# ----------------------------------------------------------------------------------------------------------------------
# Caches
# ----------------------------------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of one layer for one slot. It knows its own length; whoever appends first cuts.

    The interface that every kind of layer's cache has: length, floor(p), cut(p), copy_from(other, length), nbytes.
    """

    def __init__(self, num_key_value_heads: int, head_dim: int, max_context: int, dtype: torch.dtype, device):
        self.length = 0
        self.max_context = max_context
        shape = (2, num_key_value_heads, 0, head_dim)  # keys and values in one block
        self._data = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def floor(self, position: int) -> int:
        """The nearest position at or before `position` at which this cache can be cut."""
        return min(position, self.length)

    def cut(self, position: int) -> None:
        """Forgets everything from `position` on; the memory is kept for the next tokens."""
        if self.floor(position) != position:
            raise InvalidPass(f"position {position} is past the cache's end ({self.length})")
        self.length = position

    def append(self, keys_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds [2, KV, n, D] at the end; returns all keys and all values, each [KV, length, D] (views)."""
        end = self.length + keys_values.shape[2]
        self._reserve(end)
        self._data[:, :, self.length : end] = keys_values
        self.length = end
        return self._data[0, :, :end], self._data[1, :, :end]

    def copy_from(self, other: KVCache, length: int) -> None:
        """Becomes the first `length` tokens of another slot's cache of the same layer."""
        if other.floor(length) != length:
            raise InvalidPass(f"length {length} is past the end of the cache to copy ({other.length})")
        self.length = 0
        self._reserve(length)
        self._data[:, :, :length] = other._data[:, :, :length]
        self.length = length

    def _reserve(self, tokens: int) -> None:
        capacity = self._data.shape[2]
        if tokens <= capacity:
            return
        if tokens > self.max_context:
            raise InvalidPass(f"{tokens} tokens do not fit into max_context {self.max_context}")
        larger = min(self.max_context, max(tokens, 2 * capacity, FIRST_CACHE_LENGTH))
        data = self._data.new_empty((*self._data.shape[:2], larger, self._data.shape[3]))
        data[:, :, : self.length] = self._data[:, :, : self.length]
        self._data = data


# ----------------------------------------------------------------------------------------------------------------------
# Layers
# ----------------------------------------------------------------------------------------------------------------------


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, in fp32 (arXiv:1910.07467). `weight` [H] is filled before the first call."""

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight, self.eps = weight, eps

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, H]."""
        if hidden_states.device.type != "cpu":
            return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)
        # There F.rms_norm is eight small operators. These are four: sqrt(sum(x^2) + H eps) is a hypotenuse.
        length = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True)
        return (hidden_states * self._scaled_weight).div_(torch.hypot(length, self._least_length))

    @functools.cached_property
    def _scaled_weight(self) -> torch.Tensor:
        return self.weight * math.sqrt(len(self.weight))

    @functools.cached_property
    def _least_length(self) -> torch.Tensor:
        return torch.tensor(math.sqrt(len(self.weight) * self.eps))


class Rope:
    """Rotary position embedding (arXiv:2104.09864) in the half-split layout of the Hugging Face checkpoints.

    Its tables cover every head of the merged q, k, v projection, so that one rotation serves a whole layer: queries are
    scaled by 1/sqrt(D) as well (an unscaled fp16 q.k overflows in larger Qwen2 models), values are left as they are.
    """

    def __init__(self, config: Config, device):
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.inverse_frequencies = (1.0 / config.rope_theta**exponents).to(device)  # [D/2]
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)  # q, k, v
        of_each = torch.tensor([[config.head_dim**-0.5, 0.0], [1.0, 0.0], [0.0, 1.0]])
        # [H + 2 KV, 1] each: what a head is scaled by as it is rotated, and by as it is
        self.rotated, self.kept = of_each.repeat_interleave(torch.tensor(heads), dim=0).to(device).split(1, dim=1)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for the rows of one pass, each [R, H + 2 KV, D]: computed once, used by every layer."""
        angles = positions.float()[:, None, None] * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # [R, 1, D]
        return cos * self.rotated + self.kept, sin * self.rotated


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates [R, heads, D] by the tables of Rope.angles: (first, second) -> (f cos - s sin, s cos + f sin)."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


@dataclass(frozen=True)
class Segment:
    """Consecutive rows [start, stop) of one pass that extend one slot from `position` on."""

    slot: int
    position: int
    start: int
    stop: int


def split_into_segments(slots: list[int], positions: list[int]) -> list[Segment]:
    """Groups rows into segments; raises InvalidPass when a segment has a gap or a slot comes twice."""
    if not slots or len(slots) != len(positions):
        raise InvalidPass(
            f"{len(slots)} slots and {len(positions)} positions: a pass has at least one row, and both for it"
        )
    segments: list[Segment] = []
    start = 0
    for row in range(1, len(slots) + 1):
        if row < len(slots) and slots[row] == slots[start]:
            if positions[row] != positions[row - 1] + 1:
                raise InvalidPass(f"slot {slots[row]}: position {positions[row]} does not follow {positions[row - 1]}")
            continue
        segments.append(Segment(slots[start], positions[start], start, row))
        start = row
    if len({segment.slot for segment in segments}) != len(segments):
        raise InvalidPass("the rows of a slot must stand together")
    return segments


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention of the last n of L tokens.

    q [n, H, D], already scaled by 1/sqrt(D) (an unscaled fp16 q.k overflows in larger Qwen2 models);
    keys, values [KV, L, D]. Returns [n, H * D].
    """
    n, heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    if n == 1:  # the group's query heads as the rows of one small matrix: no mask, no copies of keys and values
        out = F.scaled_dot_product_attention(q.view(1, kv_heads, group, head_dim), keys[None], values[None], scale=1.0)
        return out.reshape(1, heads * head_dim)
    q = q.view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [KV, G, n, D]
    keys = keys[:, None].expand(kv_heads, group, length, head_dim)
    values = values[:, None].expand(kv_heads, group, length, head_dim)
    if q.device.type == "mps":  # strided inputs gave wrong results in several releases
        q, keys, values = q.contiguous(), keys.contiguous(), values.contiguous()
    if n == length:
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=1.0)
    else:
        rows = torch.arange(length - n, length, device=q.device)[:, None]
        visible = torch.arange(length, device=q.device) <= rows  # [n, L]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=1.0)
    return out.permute(2, 0, 1, 3).reshape(n, heads * head_dim)  # [n, KV, G, D] -> [n, H * D]


class DecoderLayer:
    """One decoder layer: its weights, and the arithmetic from hidden states to hidden states.

    Made empty: `destinations` are the places where received tensors go, then `prepare` packs them for the kernels.
    """

    def __init__(self, config: Config, i: int, weights: WeightFormat, device: torch.device):
        self.config = config
        self.device = device
        self.dtype = activation_dtype(weights, device.type)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.norms = {norm: RMSNorm(torch.empty(hidden_size, device=device), eps) for norm in NORMS}
        self.linears: dict[str, quant.Linear] = {}
        self.destinations: dict[str, torch.Tensor] = {}  # {stored tensor name: a view of where it goes}
        prefix = f"model.layers.{i}."
        for name, norm in self.norms.items():
            self.destinations[f"{prefix}{name}.weight"] = norm.weight
        shapes = linear_shapes(config)
        for merged, (out_features, in_features) in merged_linear_shapes(config).items():
            weight = quant.Weight(out_features, in_features, weights.quant, weights.group_size, weights.dtype, device)
            bias = torch.empty(out_features, device=device) if LINEARS[merged][0] in BIASED else None
            self.linears[merged] = quant.Linear(weight, bias)
            row = 0
            for part in LINEARS[merged]:
                rows = slice(row, row + shapes[part][0])
                for suffix, view in weight.rows(rows.start, rows.stop).items():
                    self.destinations[f"{prefix}{part}.weight{suffix}"] = view
                if bias is not None:
                    self.destinations[f"{prefix}{part}.bias"] = bias[rows]
                row = rows.stop

    def prepare(self, kernels: quant.LayerKernels) -> None:
        """Packs the linears for the kernels chosen; after this there is nothing left to receive."""
        self.destinations = {}
        for linear in self.linears.values():
            linear.prepare(kernels.choices[linear.shape])

    @property
    def nbytes(self) -> int:
        norms = sum(norm.weight.nbytes for norm in self.norms.values())
        return norms + sum(linear.nbytes for linear in self.linears.values())

    def new_cache(self, max_context: int) -> KVCache:
        """The cache that this kind of layer needs for one slot."""
        config = self.config
        return KVCache(config.num_key_value_heads, config.head_dim, max_context, self.dtype, self.device)

    def forward(self, hidden_states, segments: list[Segment], caches: list[KVCache], cos, sin) -> torch.Tensor:
        """[R, H] fp32 -> [R, H] fp32; caches[j] belongs to segments[j] and is already cut to its position."""
        config = self.config
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        rows = hidden_states.shape[0]

        x = self.norms["input_layernorm"](hidden_states)
        qkv = self.linears["qkv_proj"](x.to(self.dtype)).view(rows, heads + 2 * kv_heads, head_dim)
        qkv = rotate(qkv.float(), cos, sin).to(self.dtype)
        q = qkv[:, :heads]  # [R, H, D]
        kv = qkv[:, heads:].view(rows, 2, kv_heads, head_dim).permute(1, 2, 0, 3)  # [2, KV, R, D]
        attended = [
            attention(q[s.start : s.stop], *cache.append(kv[:, :, s.start : s.stop]))
            for s, cache in zip(segments, caches)
        ]
        attended = attended[0] if len(attended) == 1 else torch.cat(attended)  # [R, H * D]
        hidden_states = hidden_states + self.linears["o_proj"](attended).float()

        x = self.norms["post_attention_layernorm"](hidden_states)
        gate, up = self.linears["gate_up_proj"](x.to(self.dtype)).float().chunk(2, dim=-1)
        return hidden_states + self._down(F.silu(gate) * up)

    def _down(self, x: torch.Tensor) -> torch.Tensor:
        """down_proj of fp32 [R, I]. SwiGLU's product can pass fp16's largest number, so such rows are scaled first."""
        if self.dtype != torch.float16:
            return self.linears["down_proj"](x.to(self.dtype)).float()
        largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=FP16_SAFE)
        scale = torch.exp2(torch.ceil(torch.log2(largest / FP16_SAFE)))  # 1 for ordinary rows
        return self.linears["down_proj"]((x / scale).to(self.dtype)).float() * scale


# ----------------------------------------------------------------------------------------------------------------------
# The two halves of the model
# ----------------------------------------------------------------------------------------------------------------------


class Stage:
    """Decoder layers [start, end) of one model and their caches for `slots` conversations."""

    def __init__(
        self,
        config: Config,
        start: int,
        end: int,
        weights: WeightFormat,
        slots: int,
        max_context: int,
        device,
        kept: dict[int, DecoderLayer] | None = None,
    ):
        """Layers in `kept` are taken over as they are; the others are made empty."""
        if not 0 <= start < end <= config.num_hidden_layers:
            raise UnsupportedModel(f"layers [{start}, {end}) of a model with {config.num_hidden_layers} layers")
        self.config, self.start, self.end = config, start, end
        self.device = torch.device(device)
        kept = kept or {}
        self.layers = {i: kept.get(i) or DecoderLayer(config, i, weights, self.device) for i in range(start, end)}
        self.rope = Rope(config, self.device)
        self._caches = [[layer.new_cache(max_context) for layer in self.layers.values()] for _ in range(slots)]

    @property
    def weight_nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def cache_nbytes(self) -> int:
        return sum(cache.nbytes for caches in self._caches for cache in caches)

    def length(self, slot: int) -> int:
        """How many tokens a slot holds in all layers (a pass that failed halfway leaves more in the first ones)."""
        return min(cache.length for cache in self._slot(slot))

    def run(self, hidden_states: torch.Tensor, slots: list[int], positions: list[int], keep: int) -> torch.Tensor:
        """Runs rows [R, H] (fp32, CPU) through all layers, extending the slots' caches.

        Returns the last `keep` rows of each segment, [K, H] fp32 on CPU. Raises InvalidPass, and then no cache has
        changed, when the positions do not fit what the caches hold.
        """
        if tuple(hidden_states.shape) != (len(slots), self.config.hidden_size):
            raise InvalidPass(f"hidden states {list(hidden_states.shape)} for {len(slots)} rows")
        segments = split_into_segments(slots, positions)
        caches = [self._slot(segment.slot) for segment in segments]
        for segment, slot_caches in zip(segments, caches):
            self._check(segment, slot_caches)
        for segment, slot_caches in zip(segments, caches):
            for cache in slot_caches:
                cache.cut(segment.position)
        hidden_states = hidden_states.to(self.device)
        cos, sin = self.rope.angles(torch.tensor(positions, device=self.device))
        for depth, layer in enumerate(self.layers.values()):
            layer_caches = [slot_caches[depth] for slot_caches in caches]
            hidden_states = layer.forward(hidden_states, segments, layer_caches, cos, sin)
        rows = [row for s in segments for row in range(max(s.start, s.stop - keep), s.stop)]
        if len(rows) != hidden_states.shape[0]:
            hidden_states = hidden_states[rows]
        return hidden_states.contiguous().cpu()

    def clear(self, slots: list[int]) -> None:
        """Forgets what the slots hold and frees their memory."""
        for slot in slots:
            old = self._slot(slot)
            self._caches[slot] = [layer.new_cache(cache.max_context) for layer, cache in zip(self.layers.values(), old)]

    def copy(self, from_slot: int, to_slot: int, length: int) -> None:
        """Gives to_slot the first `length` tokens of from_slot; raises InvalidPass when it does not hold so many."""
        sources, targets = self._slot(from_slot), self._slot(to_slot)
        if not 0 <= length <= self.length(from_slot):
            raise InvalidPass(f"slot {from_slot}: length {length} is past the cache's end ({self.length(from_slot)})")
        for source, target in zip(sources, targets):
            if source is not target:
                target.copy_from(source, length)

    def _slot(self, slot: int) -> list[KVCache]:
        if not 0 <= slot < len(self._caches):
            raise InvalidPass(f"slot {slot} does not exist; this stage has {len(self._caches)}")
        return self._caches[slot]

    @staticmethod
    def _check(segment: Segment, caches: list[KVCache]) -> None:
        # Every layer is asked before any is cut: some later kind of layer may not be able to go back to any position.
        if segment.position < 0:
            raise InvalidPass(f"slot {segment.slot}: position {segment.position} is negative")
        for cache in caches:
            if cache.floor(segment.position) != segment.position:
                raise InvalidPass(
                    f"slot {segment.slot}: position {segment.position} is past the cache's end ({cache.length})"
                )
            end = segment.position + segment.stop - segment.start
            if end > cache.max_context:
                raise InvalidPass(f"slot {segment.slot}: {end} tokens do not fit into max_context {cache.max_context}")


class Ends:
    """What comes before the first layer and after the last: embedding, final norm, head. On the coordinator's CPU.

    `embed_tokens` [V, H] may be a view of the memory-mapped checkpoint: only the rows asked for are read.
    `lm_head` is a prepared quant.Linear of shape [V, H] (built from the embedding when the two are tied).
    """

    def __init__(self, config: Config, weights: WeightFormat, embed_tokens, norm: torch.Tensor, lm_head: quant.Linear):
        self.config = config
        self.weights = weights
        self.embed_tokens = embed_tokens
        self.norm = RMSNorm(norm.float(), config.rms_norm_eps)
        self.lm_head = lm_head

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        """[R] ids -> [R, H] fp32. In the quantized modes rows have the values of their int8 form."""
        rows = self.embed_tokens[torch.tensor(token_ids)].float()
        return rows if self.weights.quant == "fp16" else quant.int8_values(rows)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, H] after the last layer -> [R, V] fp32."""
        return self.lm_head(self.norm(hidden_states)).float()
