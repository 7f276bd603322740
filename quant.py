"""quant.py: stored weight formats (16/32-bit, int8, int4), the reference formula, fast kernels and how one is chosen.

Reading order: formats -> quantize / dequantize -> Weight (the stored parts of one linear) -> the kernel table ->
choose_kernels (measure on this device) -> Linear (a weight that has been prepared for the chosen kernels).

The contract is dequantize(): y = x @ dequantize(parts).T + bias. A fast kernel may serve only where it agrees with that
formula on the device at hand (see Kernel.error), and only when measuring shows that it is worth it.

int8   per output row:             w = q * scale               q in -127..127, scale fp32 [N]
int4   groups along the input:     w = (q - 8) * scale + zero  q in 0..15, two per byte, low nibble first,
       scale and zero bf16 [N, groups]; the last group is padded
N = out_features (rows), K = in_features, M = rows of activations (tokens).
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

# Part of a tensor's cache key: raise it whenever quantize() would give other bytes for the same weight.
ALGORITHM_VERSION = 2

FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PART_DTYPES = {**FLOAT_DTYPES, "int8": torch.int8, "uint8": torch.uint8}
GROUP_SIZES = (32, 64, 128)

# quantize(): fp32 bytes of one block, so that the passes over it stay in the cache. int4 makes more and smaller steps
# between its passes, which larger blocks make rarer: two threads would wait for one another at each of them.
BLOCK_BYTES = 1024 * 1024
INT4_BLOCK_BYTES = 2 * 1024 * 1024
INT4_BLOCK_ROWS = 512
RANGE_WIDTHS = (1.0, 0.9, 0.8)  # of the group's range; narrower ones cut its extremes off for finer steps elsewhere
LEAST_VARIANCE = 1e-4  # of the codes of a group; one of less is nothing but rounding: all that count are one code
SMALLEST_UNIT = 1e-36  # a group whose steps would be finer is constant: the inverse would overflow
BF16_MAX = torch.finfo(torch.bfloat16).max

Parts = dict[str, torch.Tensor]


# ----------------------------------------------------------------------------
# Formats
# ----------------------------------------------------------------------------


def stored_parts(out_features: int, in_features: int, quant: str, group_size: int, dtype: str) -> dict:
    """Suffix -> (dtype name, shape) of the tensors that an [out_features, in_features] weight is stored and sent as."""
    if quant == "fp16":
        return {"": (dtype, (out_features, in_features))}
    if quant == "int8":
        return {".q": ("int8", (out_features, in_features)), ".scale": ("fp32", (out_features,))}
    if quant == "int4" and group_size in GROUP_SIZES:
        groups = math.ceil(in_features / group_size)
        return {
            ".q": ("uint8", (out_features, groups * group_size // 2)),
            ".scale": ("bf16", (out_features, groups)),
            ".zero": ("bf16", (out_features, groups)),
        }
    raise ValueError(f"no weight format for quant {quant!r} with group size {group_size!r}")


def quantize(
    weight: torch.Tensor, quant: str, group_size: int, dtype: str, importance: torch.Tensor | None = None
) -> Parts:
    """A float weight [N, K] -> its stored parts (on the CPU). ValueError when a value is not finite in that format.

    importance [K], positive: int4 weighs the squared errors of each input's weights by it (1 without it).
    """
    rows, columns = weight.shape
    layout = stored_parts(rows, columns, quant, group_size, dtype)
    parts = {suffix: torch.empty(shape, dtype=PART_DTYPES[name]) for suffix, (name, shape) in layout.items()}
    if quant == "int4":
        _quantize_int4(weight, parts, group_size, importance)
        return parts
    step = max(1, BLOCK_BYTES // (4 * columns))
    for start in range(0, rows, step):
        block = weight[start : start + step].to(torch.float32)
        block_parts = _rows_of(parts, start, start + step)
        if quant == "int8":
            _int8_block(block, block_parts)
        else:
            _store_block(block, block_parts)
    return parts


def _store_block(block, parts):
    stored = parts[""].copy_(block)
    if not torch.isfinite(stored).all():
        raise ValueError(f"the weight has values that {stored.dtype} cannot hold (NaN, infinite or too large)")


def _int8_block(block, parts):
    q, scale = _int8_codes(block)
    _require_finite(scale)
    parts[".scale"].copy_(scale[:, 0])
    parts[".q"].copy_(q)


def _int8_codes(block):
    """fp32 [N, K] -> whole numbers in -127..127 (as fp32) and the scales [N, 1]."""
    scale = block.abs().amax(dim=1, keepdim=True).div_(127)
    return block.div(torch.where(scale == 0, 1.0, scale)).round_().clamp_(-127, 127), scale


def int8_values(weight: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K] -> what its int8 form stands for: dequantize(quantize(weight, "int8")), without storing it."""
    q, scale = _int8_codes(weight)
    return q.mul_(scale)


def _quantize_int4(weight, parts, group_size, importance):
    """Block by block, each turned so that its rows lie side by side: sums over a group are then vectorised."""
    rows, columns = weight.shape
    groups = parts[".scale"].shape[1]
    share = torch.ones(columns) if importance is None else importance.to(torch.float32)
    padding = groups * group_size - columns
    if padding:  # with the last input repeated, which leaves the range of its group as it is; it counts for nothing
        weight = torch.cat([weight, weight[:, -1:].expand(rows, padding)], dim=1)
        share = torch.cat([share, torch.zeros(padding)])
    share = share.view(groups, 1, group_size)
    share = share / share.sum(dim=2, keepdim=True)
    step = max(1, INT4_BLOCK_BYTES // (4 * INT4_BLOCK_ROWS * group_size))
    memory = torch.empty(3, step * group_size * min(rows, INT4_BLOCK_ROWS))
    for first in range(0, groups, step):
        some = slice(first, min(first + step, groups))
        inputs = slice(some.start * group_size, some.stop * group_size)
        for start in range(0, rows, INT4_BLOCK_ROWS):
            block = weight[start : start + INT4_BLOCK_ROWS, inputs]
            t, u, products = memory[:, : block.numel()].view(3, -1, group_size, len(block))
            t.view(block.T.shape).copy_(block.T)
            scale, zero = _fit_groups(t, u, products, share[some])
            block_parts = _rows_of(parts, start, start + INT4_BLOCK_ROWS)
            block_parts[".scale"][:, some].copy_(scale[:, 0].T)
            block_parts[".zero"][:, some].copy_(zero[:, 0].T)
            pairs = torch.add(u[:, 0::2], u[:, 1::2], alpha=16, out=products[:, : group_size // 2]).add_(8 + 8 * 16)
            pairs = pairs.to(torch.uint8).view(-1, len(block))
            block_parts[".q"][:, inputs.start // 2 : inputs.stop // 2].copy_(pairs.T)


def _fit_groups(t, u, products, share):
    """Weights t [groups, group_size, rows] -> scale and zero, bf16 values as fp32 [groups, 1, rows], of small squared
    error, and the codes u = q - 8 (as fp32, written into u).

    share [groups, 1, group_size]: how much each input's error counts, 1 in sum. t and products are overwritten. From
    ranges of different widths, one step of least squares: given the codes the best scale and zero have a closed form,
    given these the best codes are the nearest. The start with the least error takes another step, scale and zero are
    rounded to bf16, and the nearest codes taken once more. All in units of the full range's scale around its middle,
    so that no sum can overflow.
    """
    low, high = t.amin(dim=1, keepdim=True), t.amax(dim=1, keepdim=True)
    unit = high / 15 - low / 15
    _require_finite(unit)
    unit = torch.where(unit > SMALLEST_UNIT, unit, 0.0)
    per_unit = torch.where(unit > 0, 1 / unit, 0.0)
    middle = low / 2 + high / 2
    t.sub_(middle).mul_(per_unit)  # -7.5..7.5
    t_mean = torch.bmm(share, t)
    sums = t.new_empty(len(RANGE_WIDTHS), 3, *t_mean.shape)
    for width, sums_of_start in zip(RANGE_WIDTHS, sums):
        torch.mul(t, 1 / width, out=u).sub_(0.5).round_().clamp_(-8, 7)  # the middle of the range is code -0.5
        _weighted_sums(t, u, products, share, out=sums_of_start)
    starts = zip(*_least_squares(t_mean, torch.ones_like(unit), sums.transpose(0, 1)))
    scale, zero, gain = next(starts)
    for start_scale, start_zero, start_gain in starts:
        is_better = start_gain > gain
        scale, zero = torch.where(is_better, start_scale, scale), torch.where(is_better, start_zero, zero)
        gain = torch.maximum(gain, start_gain)
    _nearest_codes(t, scale, zero, out=u)
    _weighted_sums(t, u, products, share, out=sums[0])
    scale, zero, _ = _least_squares(t_mean, scale, sums[0])
    scale, zero = _to_bf16(unit * scale), _to_bf16(middle + unit * zero)
    _nearest_codes(t, torch.where(unit > 0, scale * per_unit, 1.0), (zero - middle) * per_unit, out=u)
    return scale, zero


def _weighted_sums(t, u, products, share, out):
    """The means of u, u^2 and u t over each group -> out [3, groups, 1, rows]; u is overwritten."""
    mean, mean_square, mean_product = out
    torch.bmm(share, u, out=mean)
    torch.bmm(share, torch.square(u, out=products), out=mean_square)
    torch.bmm(share, u.mul_(t), out=mean_product)


def _least_squares(t_mean, scale, sums):
    """(scale, zero, gain): the best ones for given codes u, and the variance of t that they explain. `scale` stays as
    it is where the codes do not differ. sums: of _weighted_sums."""
    u_mean, mean_square, mean_product = sums
    variance = torch.addcmul(mean_square, u_mean, u_mean, value=-1)
    covariance = torch.addcmul(mean_product, u_mean, t_mean, value=-1)
    scale = torch.where(variance > LEAST_VARIANCE, covariance / variance, scale)
    return scale, torch.addcmul(t_mean, scale, u_mean, value=-1), scale * covariance


def _nearest_codes(t, scale, zero, out):
    torch.addcmul(zero / -scale, t, 1 / scale, out=out).round_().clamp_(-8, 7)


def _to_bf16(values):
    """Rounded to bf16, as fp32; what would round to infinity becomes the largest number."""
    return values.clamp_(-BF16_MAX, BF16_MAX).to(torch.bfloat16).to(torch.float32)


def _require_finite(sizes):
    """sizes: none is negative. A maximum of anything with a NaN is NaN."""
    if not math.isfinite(sizes.amax()):
        raise ValueError("the weight has NaN or infinite values: it cannot be quantized")


def dequantize(parts: Parts, quant: str, group_size: int, in_features: int) -> torch.Tensor:
    """The reference formula, the contract of every kernel: stored parts -> fp32 [N, K] on the parts' device."""
    if quant == "fp16":
        return parts[""].float()
    if quant == "int8":
        return parts[".q"].float().mul_(parts[".scale"][:, None])
    q = parts[".q"]
    rows, groups = parts[".scale"].shape
    w = torch.empty(rows, q.shape[1], 2, dtype=torch.float32, device=q.device)
    w[..., 0] = q & 15
    w[..., 1] = q >> 4
    w = w.view(rows, groups, group_size)
    w.sub_(8).mul_(parts[".scale"].float()[..., None]).add_(parts[".zero"].float()[..., None])
    return w.view(rows, -1)[:, :in_features]


# ----------------------------------------------------------------------------
# Weight: empty storage that received tensors are written into
# ----------------------------------------------------------------------------


SLAB_WEIGHTS = 16 * 2**20  # weights that are packed at a time


@dataclass(frozen=True)
class Spec:
    """What one linear is: its sizes, its stored format, the kind of device it lives on."""

    out_features: int
    in_features: int
    quant: str
    group_size: int
    dtype: str
    device_type: str

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the stored parts: what is sent, cached and, before packing, kept."""
        layout = stored_parts(self.out_features, self.in_features, self.quant, self.group_size, self.dtype)
        return sum(math.prod(shape) * PART_DTYPES[name].itemsize for name, shape in layout.values())

    def slabs(self) -> list[tuple[int, int]]:
        """Row ranges that are packed one at a time, so that packing a head of 150,000 rows needs little extra."""
        step = max(64, SLAB_WEIGHTS // self.in_features // 64 * 64)
        return [(start, min(start + step, self.out_features)) for start in range(0, self.out_features, step)]


class Weight:
    """The stored parts of one [out_features, in_features] linear on its device, to be filled row range by row range."""

    def __init__(self, out_features: int, in_features: int, quant: str, group_size: int, dtype: str, device="cpu"):
        self.device = torch.device(device)
        self.spec = Spec(out_features, in_features, quant, group_size, dtype, self.device.type)
        layout = stored_parts(out_features, in_features, quant, group_size, dtype)
        self.parts: Parts = {
            suffix: torch.empty(shape, dtype=PART_DTYPES[name], device=self.device)
            for suffix, (name, shape) in layout.items()
        }

    def rows(self, start: int, stop: int) -> Parts:
        """Views of rows start..stop of every part: where q, k, v (or gate, up) of a merged linear are received."""
        return _rows_of(self.parts, start, stop)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored parts; 0 once Linear.prepare has replaced them by a packed form."""
        return sum(part.nbytes for part in self.parts.values())


def _rows_of(parts, start, stop):
    return {suffix: part[start:stop] for suffix, part in parts.items()}


# ----------------------------------------------------------------------------
# Forms: the stored parts, or what a kernel wants them packed as
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """pack(parts, spec) makes the packed weight or raises DoesNotFit; nbytes(spec) is an upper bound on its size."""

    pack: Callable[[Parts, Spec], Any]
    nbytes: Callable[[Spec], int]


class DoesNotFit(Exception):
    """These values would lose more in this form than the form's own rounding explains."""


class _Scratch(threading.local):
    """fp32 memory of the calling thread for what it packs, kept from one slab to the next: to get it anew for each
    takes three times as long as to fill it. release_freed_memory lets it go."""

    memory: torch.Tensor | None = None

    def copy_of(self, stored: torch.Tensor) -> torch.Tensor:
        if self.memory is None or self.memory.numel() < stored.numel():
            with torch.inference_mode(False):  # memory made in that mode could be written to in that mode only
                self.memory = torch.empty(stored.numel())
        return self.memory[: stored.numel()].view(stored.shape).copy_(stored)


_scratch = _Scratch()


def _pack_fbgemm_fp16(parts, spec):
    stored = parts[""]
    weight = _scratch.copy_of(stored)  # a copy even of fp32: FBGEMM clamps the tensor that it is given in place
    if stored.dtype != torch.float16:
        lost = weight.sub(weight.to(torch.float16)).abs_().amax(dim=1)
        if not (lost <= weight.abs().amax(dim=1) * 2**-17).all():
            raise DoesNotFit(f"{stored.dtype} values beyond the range of fp16")
    return torch.ops.quantized.linear_prepack_fp16(weight, None)


# FBGEMM takes int8 weights as a tensor type that torch means to remove one day: without it that kernel is left aside.
warnings.filterwarnings("ignore", message="torch.quantize_per_tensor, torch.quantize_per_channel")


def _pack_fbgemm_int8(parts, spec):
    scale = parts[".scale"].double()
    scale = torch.where(scale == 0, 1.0, scale)  # a row of zeros: FBGEMM refuses scale 0, and q is 0 there anyway
    zero = torch.zeros(spec.out_features, dtype=torch.int64)
    return torch.ops.quantized.linear_prepack(
        torch._make_per_channel_quantized_tensor(parts[".q"], scale, zero, 0), None
    )


def _pack_int4_cpu(parts, spec):
    q = parts[".q"]
    codes = torch.stack([q & 15, q >> 4], dim=2).view(spec.out_features, spec.in_features).to(torch.int32)
    return torch._convert_weight_to_int4pack_for_cpu(codes, 2), _interleaved_scales(parts, torch.bfloat16)


def _pack_int4_tiles(parts, spec):
    """CUDA and MPS: the even input goes into the high nibble; scales in the dtype that x will be cast to."""
    q = parts[".q"]
    packed = torch._convert_weight_to_int4pack((q << 4) | (q >> 4), _inner_k_tiles(spec))
    return packed, _interleaved_scales(parts, _int4_tiles_dtype(spec))


def _interleaved_scales(parts, dtype):
    """[groups, N, 2]: (scale, zero), as every int4pack kernel wants them."""
    return torch.stack([parts[".scale"].T, parts[".zero"].T], dim=2).to(dtype).contiguous()


def _inner_k_tiles(spec):
    return next((tiles for tiles in (8, 4, 2) if spec.in_features % (16 * tiles) == 0), 0)


def _int4_tiles_dtype(spec):
    """CUDA takes bf16 only. MPS takes any; bf16 scales in fp16 could be subnormal, so fp32 unless x is bf16."""
    return torch.bfloat16 if spec.device_type == "cuda" or spec.dtype == "bf16" else torch.float32


def _fbgemm_nbytes(spec, itemsize, per_row):
    rows = math.ceil(spec.out_features / 32) * 32
    columns = math.ceil(spec.in_features / 512) * 512  # FBGEMM pads the input to whole blocks of 512
    return rows * (columns * itemsize + per_row) + 1024 * len(spec.slabs())


def _int4_nbytes(spec, scale_itemsize):
    groups = math.ceil(spec.in_features / spec.group_size)
    return spec.out_features * groups * (spec.group_size // 2 + 2 * scale_itemsize)


FORMS = {
    "parts": Form(lambda parts, spec: parts, lambda spec: spec.stored_nbytes),
    "bf16_copy": Form(lambda parts, spec: parts[""].to(torch.bfloat16), lambda s: 2 * s.out_features * s.in_features),
    "fbgemm_fp16": Form(_pack_fbgemm_fp16, lambda spec: _fbgemm_nbytes(spec, itemsize=2, per_row=0)),
    "fbgemm_int8": Form(_pack_fbgemm_int8, lambda spec: _fbgemm_nbytes(spec, itemsize=1, per_row=24)),
    "int4pack": Form(_pack_int4_cpu, lambda spec: _int4_nbytes(spec, scale_itemsize=2)),
    "int4_tiles": Form(_pack_int4_tiles, lambda spec: _int4_nbytes(spec, _int4_tiles_dtype(spec).itemsize)),
}

# The packed form that may take the place of the stored parts (never kept beside them), for the planner's upper bound.
REPLACEMENTS = {
    ("cpu", "fp16"): "fbgemm_fp16",
    ("cpu", "int8"): "fbgemm_int8",
    ("cpu", "int4"): "int4pack",
    ("cuda", "int4"): "int4_tiles",
    ("mps", "int4"): "int4_tiles",
}


def planned_nbytes(
    out_features: int,
    in_features: int,
    quant: str,
    group_size: int,
    dtype: str,
    device_type: str,
    second_copy: bool = False,
) -> int:
    """Upper bound on what one weight keeps after Linear.prepare, known before anything was measured on the device.

    second_copy: the device has room for unquantized fp16 weights a second time, in bf16 for long prefills.
    """
    spec = Spec(out_features, in_features, quant, group_size, dtype, device_type)
    form = REPLACEMENTS.get((device_type, quant), "parts") if dtype != "fp32" or quant != "fp16" else "parts"
    extra = FORMS["bf16_copy"].nbytes(spec) if _wants_second_copy(spec) and second_copy else 0
    return max(spec.stored_nbytes, FORMS[form].nbytes(spec)) + extra


def _wants_second_copy(spec):
    return (spec.device_type, spec.quant, spec.dtype) == ("cpu", "fp16", "fp16")


# ----------------------------------------------------------------------------
# Kernels: y = x @ w.T from one form
# ----------------------------------------------------------------------------
# Kernels keep no state between calls. Two kernels of one form, one for few tokens and one for many, share its memory.


@dataclass(frozen=True)
class Kernel:
    """One way to multiply: run(x [M, K], packed, spec) -> [M, N] in x's dtype, where serves(spec) says that it can.

    error: what the kernel's own rounding explains, as the root mean square of a row's error relative to that of the
    row itself; choose_kernels refuses a kernel that is further from the reference formula.
    many_only: no candidate for few tokens. second_copy: keeps the 16-bit weight twice, where memory has room for it.
    """

    name: str
    form: str
    serves: Callable[[Spec], bool]
    run: Callable[[torch.Tensor, Any, Spec], torch.Tensor]
    error: float
    many_only: bool = False
    second_copy: bool = False


# fp32: only the order of summation differs (1e-7 was measured, sums of 4864 products may be worse).
# fp16, bf16: x, y (and a bf16 weight) are rounded to 11 or 8 bits: 0.0002 and 0.002 were measured; twice that.
# split: x is rounded to 2**-14 of the largest value of its row, 3e-5 to 1.3e-4 of the row's mean square here.
FP32_ERROR, FP16_ERROR, BF16_ERROR, SPLIT_ERROR = 2e-6, 5e-4, 5e-3, 3e-4
OUTPUT_ERROR = {torch.float32: FP32_ERROR, torch.float16: FP16_ERROR, torch.bfloat16: BF16_ERROR}


def _run_dequantize(x, parts, spec):
    """The reference formula, a block of rows at a time: the dequantized weight never exists as a whole."""
    plain = parts.get("")
    if plain is not None and plain.dtype == x.dtype:
        return F.linear(x, plain)
    step = _rows_per_block(spec)
    y = x.new_empty(x.shape[0], spec.out_features)
    for start in range(0, spec.out_features, step):
        rows = _rows_of(parts, start, start + step)
        block = dequantize(rows, spec.quant, spec.group_size, spec.in_features)
        y[:, start : start + step] = F.linear(x, block.to(x.dtype))
    return y


def _rows_per_block(spec):
    """Rows dequantized at a time: 4 MB of fp32 on a CPU (they stay in its cache until multiplied), 64 MB elsewhere."""
    budget = (4 if spec.device_type == "cpu" else 64) * 2**20
    return max(64, budget // (4 * spec.in_features) // 64 * 64)


def _in_bf16(run):
    """The same kernel with x (and so the dequantized weight and the sums' result) in bf16."""
    return lambda x, packed, spec: run(x.to(torch.bfloat16), packed, spec).to(x.dtype)


def _run_linear_fp16(x, parts, spec):
    scale = _row_scale(x)  # rows scaled to 1: neither x nor y can leave the range of fp16
    return F.linear(x.div(scale).to(torch.float16), parts[""]).to(x.dtype).mul_(scale)


def _row_scale(x):
    """[M, 1]: the largest magnitude of each row; zero rows stay zero when divided by it, NaN stays NaN."""
    return x.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30)


def _run_fbgemm_fp16(x, packed, spec):
    return torch.ops.quantized.linear_dynamic_fp16(x, packed)


ROWS_OF_ONE_CALL = 64  # of _run_fbgemm_int8


def _run_fbgemm_int8(x, packed, spec):
    """8 x 8-bit products without 8-bit activations: x / scale = high + low / 126, both whole numbers in -63..63.

    7 bits each, because FBGEMM without VNNI adds pairs of products in 16 bits, where 2 * 127 * 127 fits and
    2 * 255 * 127 does not. Integer sums are exact. One call for both halves reads the weight once; of many rows, the
    copy that puts the halves together would cost more than reading the weight again.
    """
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    count = x.shape[0]
    scale = _row_scale(x).div_(63)
    scaled = x / scale
    # rounded here: the kernel rounds after adding its zero point, where 3.4999998 + 64 is 67.5 in fp32
    high = scaled.round()
    low = scaled.sub_(high).mul_(126)
    if count <= ROWS_OF_ONE_CALL:
        y = multiply(torch.cat((high, low)), 1.0, 64, packed)
        y_high, y_low = y[:count], y[count:]
    else:
        y_high, y_low = multiply(high, 1.0, 64, packed), multiply(low, 1.0, 64, packed)
    return y_high.add_(y_low, alpha=1 / 126).mul_(scale)


def _run_int8pack_bf16(x, parts, spec):
    # scales of 1, the real ones applied in fp32 afterwards: the kernel would want them rounded to bf16
    y = torch._weight_int8pack_mm(_fresh(x, torch.bfloat16), parts[".q"], _ones(spec.out_features))
    return y.to(x.dtype).mul_(parts[".scale"])


@functools.cache
def _ones(count):
    return torch.ones(count, dtype=torch.bfloat16)


def _run_int8pack_fp32(x, parts, spec):
    return torch._weight_int8pack_mm(_fresh(x, torch.float32), parts[".q"], parts[".scale"]).to(x.dtype)


def _fresh(x, dtype):
    """A copy that is contiguous and aligned: the int8 and int4 kernels crash or read garbage on others."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _run_int4pack(x, packed, spec):
    weight, scales = packed
    y = torch._weight_int4pack_mm_for_cpu(_fresh(x, torch.bfloat16), weight, spec.group_size, scales)
    return y.to(x.dtype)


def _run_int4pack_dequantize(x, packed, spec):
    """Many tokens from the form of the few-token kernel: [N / block][K][block / 2] bytes, see _int4_layout."""
    weight, scales = packed
    block, halves = _int4_layout(spec)
    columns = spec.in_features
    step = _rows_per_block(spec)
    y = x.new_empty(x.shape[0], spec.out_features)
    for start in range(0, spec.out_features, step):
        rows = slice(start, min(start + step, spec.out_features))
        codes = weight[rows].view(-1, columns, block // 2).transpose(0, 1)  # [K, blocks, block / 2]
        w = torch.empty(columns, codes.shape[1], block)
        low, high = (w[..., : block // 2], w[..., block // 2 :]) if halves else (w[..., 0::2], w[..., 1::2])
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
        scale, zero = (scales[:, None, rows, i].float() for i in (0, 1))  # [groups, 1, rows], each contiguous
        w.view(-1, spec.group_size, w[0].numel()).sub_(8).mul_(scale).add_(zero)
        y[:, rows] = x @ w.view(columns, -1).to(x.dtype)
    return y


def _int4_layout(spec):
    return _int4_layout_of(spec.out_features if spec.out_features < 64 else 64 + spec.out_features % 64)


@functools.cache
def _int4_layout_of(rows):
    """(rows of a block, low nibbles are the block's first half) of this CPU's int4 packing, None when unknown.

    The packing is private to torch and differs between instruction sets: it is recognised by packing random codes.
    """
    codes = torch.randint(0, 16, (rows, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
    for block, halves in ((64, True), (32, True), (64, False), (32, False), (16, False)):
        if rows % block == 0:
            nibbles = packed.view(-1, 32, block // 2)
            nibbles = torch.stack([nibbles & 15, nibbles >> 4], dim=2 if halves else 3).view(-1, 32, block)
            if torch.equal(nibbles.transpose(1, 2).reshape(rows, 32).to(torch.int32), codes):
                return block, halves
    return None


def _run_int4_tiles(x, packed, spec):
    weight, scales = packed
    # x in the scales' dtype: the kernels do not check that they agree
    y = torch._weight_int4pack_mm(_fresh(x, scales.dtype), weight, spec.group_size, scales)
    return y.to(x.dtype)


# --- gates: what torch does not check itself, and would answer with garbage or a crash ---

IS_ARM = platform.machine().lower() in ("arm64", "aarch64")


def _cpu(quant, *dtypes):
    """Gate: this quant on a CPU; for quant "fp16", with one of these compute dtypes."""
    return lambda spec: spec.device_type == "cpu" and spec.quant == quant and (not dtypes or spec.dtype in dtypes)


def _reduced(spec):
    """Gate: anything but fp32 on a CPU."""
    return spec.device_type == "cpu" and (spec.quant != "fp16" or spec.dtype != "fp32")


def _fbgemm(gate):
    return lambda spec: gate(spec) and not IS_ARM and torch.backends.quantized.engine in ("x86", "fbgemm")


def _int8pack_bf16(spec):
    # on x86 only bf16 is vectorised, in steps of 16 inputs without a tail
    return _cpu("int8")(spec) and not IS_ARM and spec.in_features % 16 == 0


def _int8pack_fp32(spec):
    if spec.quant != "int8" or (spec.device_type == "cpu" and not IS_ARM):
        return False
    step = 32 if spec.device_type == "mps" else 8
    return spec.in_features % step == 0 and (spec.device_type != "mps" or spec.out_features % 32 == 0)


def _int4pack(spec):
    return _cpu("int4")(spec) and spec.out_features % 16 == 0 and spec.in_features % spec.group_size == 0


def _int4_tiles(spec):
    whole = spec.quant == "int4" and spec.out_features % 8 == 0 and spec.in_features % spec.group_size == 0
    if not whole or _inner_k_tiles(spec) == 0:
        return False
    return spec.device_type == "mps" or (spec.device_type == "cuda" and torch.cuda.get_device_capability() >= (8, 0))


REFERENCE = Kernel("dequantize", "parts", lambda spec: True, _run_dequantize, FP32_ERROR)

KERNELS = [
    REFERENCE,  # serves every shape on every device; with unquantized weights in x's dtype it is F.linear
    Kernel("dequantize_bf16", "parts", _reduced, _in_bf16(_run_dequantize), BF16_ERROR),
    Kernel("linear_fp16", "parts", _cpu("fp16", "fp16"), _run_linear_fp16, FP16_ERROR),
    Kernel("fbgemm_fp16", "fbgemm_fp16", _fbgemm(_cpu("fp16", "fp16", "bf16")), _run_fbgemm_fp16, FP32_ERROR),
    Kernel(
        "bf16_copy",
        "bf16_copy",
        _wants_second_copy,
        _in_bf16(lambda x, w, spec: F.linear(x, w)),
        BF16_ERROR,
        many_only=True,
        second_copy=True,
    ),
    Kernel("int8pack_bf16", "parts", _int8pack_bf16, _run_int8pack_bf16, BF16_ERROR),
    Kernel("int8pack_fp32", "parts", _int8pack_fp32, _run_int8pack_fp32, FP32_ERROR),
    Kernel("fbgemm_int8", "fbgemm_int8", _fbgemm(_cpu("int8")), _run_fbgemm_int8, SPLIT_ERROR),
    Kernel("int4pack", "int4pack", _int4pack, _run_int4pack, BF16_ERROR),
    Kernel(
        "int4pack_dequantize",
        "int4pack",
        lambda spec: _int4pack(spec) and _int4_layout(spec) is not None,
        _run_int4pack_dequantize,
        FP32_ERROR,
    ),
    Kernel(
        "int4pack_dequantize_bf16",
        "int4pack",
        lambda spec: _int4pack(spec) and _int4_layout(spec) is not None,
        _in_bf16(_run_int4pack_dequantize),
        BF16_ERROR,
    ),
    # one matrix-vector product per row on MPS, fp32 sums and bf16 weights on CUDA
    Kernel("int4_tiles", "int4_tiles", _int4_tiles, _run_int4_tiles, BF16_ERROR),
]


# ----------------------------------------------------------------------------
# Choosing: check against the reference, then measure
# ----------------------------------------------------------------------------

CHECK_ROWS = (1, 16)  # tokens at which a kernel is held to the reference formula
FEW_ROWS, MANY_ROWS = (1, 8), (64, 256)  # tokens that are measured; the last of them stands for a prefill
# what an operator raises that this build of torch or this device does not have; ours when a kernel disagrees
KERNEL_FAILURES = (RuntimeError, AttributeError, TypeError, ValueError, DoesNotFit)
ROUNDS, PATIENCE_S = 12, 0.12  # so often is each kernel tried per number of tokens, or for so long; the quickest counts
WORTH_SWITCHING = 0.9  # another kernel must take at most this share of the time
HOPELESS = {
    1: math.inf,
    8: 12,
    64: 3,
    256: math.inf,
}  # this many times slower than the best: not tried with more tokens
# Of larger shapes one slab is measured; of less, what a call costs would count too much.
MEASURED_WEIGHTS = SLAB_WEIGHTS
CACHE_BYTES = 64 * 2**20  # read between measurements, so that weights come from memory as they do in a whole model
ANY_NUMBER = 2**31 - 1  # threshold of a choice with one kernel for everything
FITS_CACHE_BYTES = 4 * 2**20  # layers this small: a model of them stays in the cache, and so does the measured one


@dataclass(frozen=True)
class KernelChoice:
    """Which kernel serves up to `threshold` tokens (few) and which serves more (many), for weights of one shape."""

    few: str
    many: str
    threshold: int
    quant: str
    group_size: int
    dtype: str
    device_type: str

    def spec(self, out_features: int, in_features: int) -> Spec:
        return Spec(out_features, in_features, self.quant, self.group_size, self.dtype, self.device_type)

    def kernels(self, spec: Spec) -> tuple[Kernel, Kernel]:
        """(few, many) for this shape: the reference formula in place of a kernel that does not serve it."""
        return _serving(_kernel(self.few), spec), _serving(_kernel(self.many), spec)

    def packed_nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes (upper bound) that Linear.prepare keeps for one weight."""
        spec = self.spec(out_features, in_features)
        return _kept_nbytes(self.kernels(spec), spec)

    def __str__(self) -> str:
        return split_in_words(self.few, self.many, self.threshold)


def split_in_words(few: str, many: str, threshold: int) -> str:
    """Which kernel serves how many tokens."""
    return few if few == many else f"{few} up to {threshold} tokens, {many} beyond"


@dataclass(frozen=True)
class LayerKernels:
    """The choice for every (N, K) shape of one layer (or of a head), and how it came about."""

    choices: dict[tuple[int, int], KernelChoice]
    measured: tuple[str, ...] = ()  # a line per candidate
    decisions: tuple[str, ...] = ()  # a line per shape, or one for all


def _kernel(name):
    return next(kernel for kernel in KERNELS if kernel.name == name)


def _serving(kernel, spec):
    return kernel if kernel.serves(spec) else REFERENCE


def _kept_nbytes(kernels, spec):
    return sum(FORMS[form].nbytes(spec) for form in {kernel.form for kernel in kernels})


def choose_kernels(
    shapes: list[tuple[int, int]], quant: str, group_size: int, dtype: str, device: str | torch.device
) -> LayerKernels:
    """Check and measure the candidates on this device for the (N, K) shapes of one layer (or a head).

    Weights are random, since neither speed nor rounding depends on their values. The reference formula stays unless
    another kernel takes 10 % less time. Kernels whose forms together would exceed planned_nbytes are not paired.
    """
    return _choose(shapes, quant, group_size, dtype, device, second_copy=False)[0]


def choose_kernels_with_copy(
    shapes: list[tuple[int, int]], quant: str, group_size: int, dtype: str, device: str | torch.device
) -> tuple[LayerKernels, LayerKernels | None]:
    """choose_kernels, and what would serve with a second copy of the weights; None when it is not worth its memory."""
    return _choose(shapes, quant, group_size, dtype, device, second_copy=True)


def _choose(shapes, quant, group_size, dtype, device, second_copy):
    device = torch.device(device)
    layer = {shape: _Sample(shape, quant, group_size, dtype, device) for shape in shapes}
    candidates, measured = {}, []
    for kernel in KERNELS:
        if not any(kernel.serves(sample.spec) for sample in layer.values()) or (kernel.second_copy and not second_copy):
            continue
        try:
            candidates[kernel.name] = {shape: _checked_run(kernel, sample) for shape, sample in layer.items()}
        except KERNEL_FAILURES as error:
            if kernel is REFERENCE:
                raise
            reason = (str(error).splitlines() or [""])[0][:100]
            measured.append(f"{kernel.name}: left aside, {type(error).__name__}: {reason}")
    kind, place = (quant, group_size, dtype, device.type), f"{quant} ({dtype}) on {device}"
    if len(candidates) == 1:
        only = KernelChoice(REFERENCE.name, REFERENCE.name, ANY_NUMBER, *kind)
        decision = f"{place}: {REFERENCE.name}, the only kernel here"
        return LayerKernels(dict.fromkeys(layer, only), tuple(measured), (decision,)), None
    seconds = _measure(candidates, layer, device)
    measured += [f"{name}: {_in_words(by_shape)}" for name, by_shape in seconds.items()]
    once, twice = {}, {}
    for shape, sample in layer.items():
        times = {name: by_shape[shape] for name, by_shape in seconds.items()}
        few, many = _pick(times, sample.spec, second_copy=False)
        once[shape] = KernelChoice(few.name, many.name, _threshold(times[few.name], times[many.name]), *kind)
        if second_copy:
            many = _pick(times, sample.spec, second_copy=True)[1]
            twice[shape] = replace(once[shape], many=many.name, threshold=_threshold(times[few.name], times[many.name]))
    kernels = LayerKernels(once, tuple(measured), _decisions(place, once))
    if not second_copy or _prefill_s(seconds, twice) >= WORTH_SWITCHING * _prefill_s(seconds, once):
        return kernels, None
    decisions = kernels.decisions + _decisions("with a second copy", twice)
    return kernels, LayerKernels(twice, kernels.measured, decisions)


def _decisions(place, choices):
    """What was chosen, a line per shape; one line when it is the same for all."""
    if len({str(choice) for choice in choices.values()}) == 1:
        return (f"{place}: {next(iter(choices.values()))}",)
    return tuple(f"{place}, {rows} x {columns}: {choice}" for (rows, columns), choice in choices.items())


def _prefill_s(seconds, choices):
    """Seconds for many tokens through all shapes of a layer."""
    return sum(seconds[choice.many][shape].get(MANY_ROWS[-1], math.inf) for shape, choice in choices.items())


def neighbours_choice(
    choices: dict[tuple[int, int], tuple[str, str, int]],
    quant: str,
    group_size: int,
    dtype: str,
    device: str | torch.device,
) -> LayerKernels | None:
    """What another process on this machine has chosen, {shape: (few, many, threshold)}, checked but not measured again.

    None when one of the kernels does not exist, fails, or disagrees with the reference here.
    """
    device = torch.device(device)
    known = {kernel.name: kernel for kernel in KERNELS}
    try:
        for shape, (few, many, _) in choices.items():
            sample = _Sample(shape, quant, group_size, dtype, device)
            for name in {few, many}:
                _checked_run(known[name], sample)
    except (KeyError, *KERNEL_FAILURES):
        return None
    kind = (quant, group_size, dtype, device.type)
    made = {shape: KernelChoice(*route, *kind) for shape, route in choices.items()}
    return LayerKernels(made, decisions=_decisions(f"{quant} ({dtype}) on {device}, as a neighbour has measured", made))


class _Sample:
    """A random weight of one shape (its rows cut to MEASURED_WEIGHTS) and activations for it."""

    def __init__(self, shape, quant, group_size, dtype, device):
        rows, columns = shape
        rows = min(rows, max(64, MEASURED_WEIGHTS // columns // 64 * 64))
        weight = Weight(rows, columns, quant, group_size, dtype, device)
        self.spec, self.parts, self.generator = weight.spec, weight.parts, torch.Generator().manual_seed(rows + columns)
        for suffix, part in self.parts.items():
            part.copy_(self._random(part.shape, suffix))
        self.x_dtype = torch.float32 if device.type == "cpu" else FLOAT_DTYPES[dtype]
        self.device = device

    def _random(self, shape, suffix):
        if suffix == ".q":
            low, high = (-127, 128) if self.spec.quant == "int8" else (0, 256)
            return torch.randint(low, high, shape, generator=self.generator)
        values = torch.randn(shape, generator=self.generator)
        return values.abs_().add_(0.1).mul_(1e-3) if suffix == ".scale" else values.mul_(1e-2)

    def activations(self, count):
        x = torch.randn(count, self.spec.in_features, generator=self.generator)
        return x.to(self.x_dtype).to(self.device)


def _checked_run(kernel, sample):
    """(run, packed, spec) of a kernel for one sample; raises when it fails or disagrees with the reference."""
    serving = _serving(kernel, sample.spec)
    packed = FORMS[serving.form].pack(sample.parts, sample.spec)
    for count in CHECK_ROWS if serving is not REFERENCE else ():
        _require_agreement(serving, packed, sample, count)
    return serving.run, packed, sample.spec


def _require_agreement(kernel, packed, sample, count):
    x = sample.activations(count)
    y = kernel.run(x, packed, sample.spec).float()
    spec = sample.spec
    w = dequantize(sample.parts, spec.quant, spec.group_size, spec.in_features)
    expected = F.linear(x.float(), w)
    error = (y - expected).square().mean(dim=1).sqrt() / expected.square().mean(dim=1).sqrt()
    allowed = max(kernel.error, OUTPUT_ERROR[sample.x_dtype])
    if not (error <= allowed).all():  # also when it is NaN
        raise ValueError(f"{spec.out_features} x {spec.in_features} is off by {error.max():.1e}, allowed {allowed:.0e}")


def _measure(candidates, layer, device):
    """Kernel name -> shape -> {tokens: seconds}. Candidates take turns, so that a busy moment hits them all."""
    seconds = {name: {shape: {} for shape in layer} for name in candidates}
    in_memory = device.type == "cpu" and sum(s.spec.stored_nbytes for s in layer.values()) > FITS_CACHE_BYTES
    flush = torch.zeros(CACHE_BYTES // 8 if in_memory else 0, dtype=torch.int64)
    running = list(candidates)
    for count in FEW_ROWS + MANY_ROWS:
        inputs = {shape: sample.activations(count) for shape, sample in layer.items()}
        times, spent = dict.fromkeys(running, math.inf), dict.fromkeys(running, 0.0)
        for _ in range(ROUNDS):
            for name in running:
                out_of_race = times[name] > 2 * min(times.values())
                if spent[name] < (PATIENCE_S / 4 if out_of_race else PATIENCE_S):
                    flush.sum()
                    elapsed = _seconds_by_shape(candidates[name], inputs, device)
                    for shape, quickest in seconds[name].items():
                        quickest[count] = min(quickest.get(count, math.inf), elapsed[shape])
                    times[name] = sum(quickest[count] for quickest in seconds[name].values())
                    spent[name] += sum(elapsed.values())
        running = [name for name in running if times[name] < HOPELESS[count] * min(times.values())]
    return seconds


def _seconds_by_shape(runs, inputs, device):
    """{shape: seconds} of one kernel; all shapes of the layer in turn, as in a pass."""
    seconds = {}
    for shape, (run, packed, spec) in runs.items():
        _synchronize(device)
        start = time.perf_counter()
        run(inputs[shape], packed, spec)
        _synchronize(device)
        seconds[shape] = time.perf_counter() - start
    return seconds


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _pick(seconds, spec, second_copy):
    """(few, many) for one shape, from {kernel name: {tokens: seconds}}.

    Few tokens first (decoding is what users wait for), then the best for many of what may be kept beside it.

    Of kernels that serve few tokens about equally well, the one whose partner is the quickest for many.
    """

    def per_token(kernel, rows):
        times = seconds.get(kernel.name, {})
        return sum(times.get(count, math.inf) / count for count in rows)

    def best(candidates, rows, default):
        quickest = min(candidates, key=lambda kernel: per_token(kernel, rows), default=default)
        worth_it = per_token(quickest, rows) < WORTH_SWITCHING * per_token(default, rows)
        return quickest if worth_it else default

    def may_be_kept(kernels):
        kept = _kept_nbytes([_serving(kernel, spec) for kernel in kernels], spec)
        return kept <= planned_nbytes(*astuple(spec), second_copy=second_copy)

    def partner(few):
        return best([kernel for kernel in KERNELS if may_be_kept([few, kernel])], MANY_ROWS[-1:], few)

    candidates = [kernel for kernel in KERNELS if not kernel.many_only]
    few = best(candidates, FEW_ROWS, REFERENCE)
    enough = per_token(few, FEW_ROWS) / WORTH_SWITCHING
    equals = [few] + [kernel for kernel in candidates if per_token(kernel, FEW_ROWS) <= enough]
    pairs = [(kernel, partner(kernel)) for kernel in equals]
    times = [per_token(many, MANY_ROWS[-1:]) for _, many in pairs]
    return pairs[0] if min(times) > WORTH_SWITCHING * times[0] else pairs[times.index(min(times))]


def _threshold(few, many):
    """The number of tokens up to which `few` is as quick as `many` ({tokens: seconds}), between the measured ones."""
    if few is many:
        return ANY_NUMBER
    last, last_gain = 0, 0.0
    for count in sorted(few):
        gain = many[count] - few[count]
        if gain < 0:
            return int(last + (count - last) * last_gain / (last_gain - gain))
        last, last_gain = count, gain
    return last


def _in_words(by_shape):
    """Milliseconds of all shapes together, by the number of tokens."""
    counts = list(next(iter(by_shape.values())))
    total = {count: 1000 * sum(seconds[count] for seconds in by_shape.values()) for count in counts}
    return f"{'/'.join(f'{ms:.3g}' for ms in total.values())} ms for {'/'.join(map(str, counts))} tokens"


# ----------------------------------------------------------------------------
# Linear
# ----------------------------------------------------------------------------


class Linear:
    """y = x @ w.T + bias. Works by the reference formula until prepare() has packed the weight for chosen kernels."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None):
        self.weight, self.bias = weight, bias
        self._threshold = ANY_NUMBER
        self._few = self._many = [(REFERENCE, weight.parts, weight.spec)]
        self._packed_nbytes = weight.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.weight.spec.out_features, self.weight.spec.in_features

    def prepare(self, choice: KernelChoice) -> None:
        """Pack the filled weight for the chosen kernels and let go of the stored parts unless one of them reads these.

        Values that a chosen form cannot hold leave this linear with the reference formula.
        """
        spec, parts = self.weight.spec, self.weight.parts
        if choice.spec(spec.out_features, spec.in_features) != spec:
            raise ValueError(f"the kernels were chosen for {choice.quant} {choice.dtype}, the weight is {spec}")
        if not parts:
            raise ValueError("this weight is packed already")
        few, many = choice.kernels(spec)
        try:
            packed = {form: _pack_slabs(form, parts, spec) for form in {few.form, many.form}}
        except DoesNotFit:
            return
        self._threshold = choice.threshold
        self._few = [(few, *slab) for slab in packed[few.form]]
        self._many = [(many, *slab) for slab in packed[many.form]]
        self._packed_nbytes = _kept_nbytes((few, many), spec)
        if "parts" not in packed:
            self.weight.parts = {}

    @property
    def nbytes(self) -> int:
        """Bytes kept for weight and bias (of packed forms an upper bound)."""
        return self._packed_nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] (fp32 on a CPU, else the compute dtype) -> [M, N] in x's dtype."""
        count, columns = x.shape
        if columns != self.weight.spec.in_features:
            raise ValueError(f"{columns} inputs for a weight of {self.weight.spec.in_features}")
        if count == 0:
            return x.new_empty(0, self.weight.spec.out_features)
        slabs = self._few if count <= self._threshold else self._many
        outputs = [kernel.run(x, packed, spec) for kernel, packed, spec in slabs]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return y if self.bias is None else y.add_(self.bias)


def _pack_slabs(form, parts, spec):
    """[(packed, spec)] of the slabs of a weight; the stored parts need no slabs."""
    if form == "parts":
        return [(parts, spec)]
    slabs = []
    for start, stop in spec.slabs():
        slab = replace(spec, out_features=stop - start)
        slabs.append((FORMS[form].pack(_rows_of(parts, start, stop), slab), slab))
    return slabs


M_ARENA_MAX = -8  # of glibc's malloc.h


def share_one_arena() -> None:
    """Have all threads of this process allocate in one arena, which release_freed_memory can empty.

    glibc gives further threads arenas of their own, up to 8 for each core, and never gives back the free end of those:
    up to 64 MB that a thread has freed, each. To be called before other threads are started. Elsewhere than on Linux
    with glibc it does nothing.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def release_freed_memory(done: bool = True) -> None:
    """Give the memory that packing has freed back to the system: glibc keeps it, and as much again as the model.

    To be called after every layer, before the next one needs as much. done: this thread packs no more for now.
    What was freed is given back only on Linux with glibc.
    """
    if done:
        _scratch.memory = None
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name):
    """A C function that only glibc has; None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
