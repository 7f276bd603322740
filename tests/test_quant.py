"""Tests of quant.py. The oracles are plain numpy formulas and loops written here, not functions of quant.py."""

import concurrent.futures
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import quant

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel")

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
MPS = pytest.param("mps", marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no MPS device"))


def random_weight(rows, columns, seed=0, tails=False):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    if tails:  # a normal over the root of a chi-square: Student's t with 3 degrees of freedom
        chi = torch.randn(3, rows, columns, generator=generator).square().mean(dim=0)
        weight = weight / chi.sqrt()
    return weight


def numpy_dequantize(parts, columns, group_size):
    """The formulas of DESIGN.md section 7, one weight at a time where it matters."""
    if "" in parts:
        return parts[""].float().numpy()
    if ".zero" not in parts:
        return parts[".q"].numpy().astype(np.float32) * parts[".scale"].numpy()[:, None]
    packed = parts[".q"].numpy()
    scale, zero = parts[".scale"].float().numpy(), parts[".zero"].float().numpy()
    weight = np.empty((packed.shape[0], columns), dtype=np.float32)
    for column in range(columns):
        byte = packed[:, column // 2].astype(np.int32)
        q = byte % 16 if column % 2 == 0 else byte // 16  # low nibble first
        group = column // group_size
        weight[:, column] = (q - 8).astype(np.float32) * scale[:, group] + zero[:, group]
    return weight


def min_max_error(weight, group_size):
    """Squared error of plain min/max int4 with bf16 scale and zero, for whole groups."""
    groups = weight.reshape(-1, group_size)
    low, high = groups.min(dim=1, keepdim=True).values, groups.max(dim=1, keepdim=True).values
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    q = ((groups - zero) / scale).round().clamp(-8, 7)
    return (q * scale + zero - groups).square().sum().item()


def filled(rows, columns, kind, group_size=64, dtype="fp32", device="cpu", seed=0):
    """A Weight on the device with a random matrix in it."""
    weight = quant.Weight(rows, columns, kind, group_size, dtype, device)
    parts = quant.quantize(random_weight(rows, columns, seed), kind, group_size, dtype)
    for suffix, part in weight.rows(0, rows).items():
        part.copy_(parts[suffix])
    return weight


def expected_output(weight, x):
    """float64 x @ w.T by numpy."""
    parts = {suffix: part.cpu() for suffix, part in weight.parts.items()}
    w = numpy_dequantize(parts, weight.spec.in_features, weight.spec.group_size)
    with np.errstate(invalid="ignore"):  # infinity times 0
        return x.double().cpu().numpy() @ w.T.astype(np.float64)


def relative_error(y, expected):
    """Root mean square of the error over that of the expected values."""
    difference = y.double().cpu().numpy() - expected
    return math.sqrt((difference**2).mean() / (expected**2).mean())


def choice_of(few, many, threshold, spec):
    return quant.KernelChoice(few, many, threshold, spec.quant, spec.group_size, spec.dtype, spec.device_type)


# --- formats ---


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_unquantized_is_stored_in_the_compute_dtype(dtype):
    weight = random_weight(6, 10)
    assert quant.stored_parts(6, 10, "fp16", 64, dtype) == {"": (dtype, (6, 10))}
    parts = quant.quantize(weight, "fp16", 64, dtype)
    assert torch.equal(parts[""], weight.to(quant.FLOAT_DTYPES[dtype]))


@pytest.mark.parametrize(
    "group_size, columns, groups", [(32, 64, 2), (64, 64, 1), (64, 100, 2), (128, 100, 1), (32, 33, 2)]
)
def test_int4_parts_have_the_stated_shapes_and_dtypes(group_size, columns, groups):
    expected = {
        ".q": ("uint8", (5, groups * group_size // 2)),
        ".scale": ("bf16", (5, groups)),
        ".zero": ("bf16", (5, groups)),
    }
    assert quant.stored_parts(5, columns, "int4", group_size, "fp16") == expected
    parts = quant.quantize(random_weight(5, columns), "int4", group_size, "fp16")
    assert {s: (str(p.dtype), tuple(p.shape)) for s, p in parts.items()} == {
        ".q": ("torch.uint8", expected[".q"][1]),
        ".scale": ("torch.bfloat16", (5, groups)),
        ".zero": ("torch.bfloat16", (5, groups)),
    }


def test_int8_parts_have_the_stated_shapes_and_dtypes():
    assert quant.stored_parts(5, 30, "int8", 64, "bf16") == {".q": ("int8", (5, 30)), ".scale": ("fp32", (5,))}
    parts = quant.quantize(random_weight(5, 30), "int8", 64, "bf16")
    assert parts[".q"].dtype == torch.int8 and parts[".scale"].dtype == torch.float32


def test_int4_with_group_64_takes_four_and_a_half_bits_a_weight():
    assert filled(896, 896, "int4").nbytes * 8 / (896 * 896) == 4.5


@pytest.mark.parametrize("kind, group_size", [("int2", 64), ("int4", 48), ("fp32", 64)])
def test_unknown_formats_are_refused_by_name(kind, group_size):
    with pytest.raises(ValueError, match=kind):
        quant.stored_parts(4, 64, kind, group_size, "fp16")


# --- the reference formula ---


def test_dequantize_int4_by_hand():
    parts = {
        ".q": torch.tensor([[0xF0, 0x81] + [0x88] * 14 + [0x07] + [0x88] * 15], dtype=torch.uint8),
        ".scale": torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16),
        ".zero": torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16),
    }
    weight = quant.dequantize(parts, "int4", 32, 40)
    assert weight.shape == (1, 40) and weight.dtype == torch.float32
    # low nibble first: 0, 15, 1, 8; second group: 7, 0
    assert weight[0, :5].tolist() == [-3.0, 4.5, -2.5, 1.0, 1.0]
    assert weight[0, 32:35].tolist() == [-5.0, -19.0, -3.0]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("columns", [64, 100, 257])
def test_dequantize_is_the_formula(kind, group_size, columns):
    parts = quant.quantize(random_weight(7, columns), kind, group_size, "fp32")
    ours = quant.dequantize(parts, kind, group_size, columns).numpy()
    np.testing.assert_allclose(ours, numpy_dequantize(parts, columns, group_size), rtol=1e-6, atol=1e-9)


# --- how well quantize() does ---


def test_int8_is_round_to_nearest_of_the_rows_largest():
    weight = random_weight(9, 77, tails=True)
    parts = quant.quantize(weight, "int8", 64, "fp32")
    scale = np.abs(weight.numpy()).max(axis=1) / np.float32(127)
    np.testing.assert_allclose(parts[".scale"].numpy(), scale, rtol=1e-7)
    q = np.rint(weight.numpy() / parts[".scale"].numpy()[:, None])
    assert np.array_equal(parts[".q"].numpy(), q.astype(np.int8)) and np.abs(q).max() == 127


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("tails", [False, True])
def test_int4_beats_min_max(group_size, tails):
    weight = random_weight(64, 512, seed=group_size, tails=tails)
    parts = quant.quantize(weight, "int4", group_size, "fp16")
    error = (quant.dequantize(parts, "int4", group_size, 512) - weight).square().sum().item()
    # at least 5 % less squared error; heavy tails gain more
    assert error < 0.95 * min_max_error(weight, group_size)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_error_is_bounded_by_a_share_of_the_groups_range(group_size):
    weight = random_weight(32, 256, seed=3)
    parts = quant.quantize(weight, "int4", group_size, "fp16")
    error = (quant.dequantize(parts, "int4", group_size, 256) - weight).view(32, -1, group_size)
    span = weight.view(32, -1, group_size).amax(dim=-1) - weight.view(32, -1, group_size).amin(dim=-1)
    # min/max alone would have a root mean square of span / 15 / sqrt(12), that is 0.019 of the range
    assert (error.square().mean(dim=-1).sqrt() < 0.022 * span).all()
    assert (error.abs().amax(dim=-1) < 0.25 * span).all()


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_smaller_and_padded_groups_lose_nothing_to_the_padding(group_size):
    weight = random_weight(16, 2 * group_size + 6, seed=5) + 0.5  # far from zero, so that padding with zeros would show
    parts = quant.quantize(weight, "int4", group_size, "fp16")
    error = quant.dequantize(parts, "int4", group_size, weight.shape[1]) - weight
    # zero is about 0.5 and has 8 bits: its rounding is within the last group's own steps
    assert error[:, -6:].abs().max() < 0.02


def test_each_group_q_is_the_nearest_code_of_the_stored_scale_and_zero():
    weight = random_weight(8, 128, seed=8, tails=True)
    parts = quant.quantize(weight, "int4", 32, "fp16")
    scale, zero = (parts[s].float().repeat_interleave(32, dim=1) for s in (".scale", ".zero"))
    codes = torch.arange(16).view(16, 1, 1) - 8
    nearest = (codes * scale + zero - weight).abs().amin(dim=0)
    error = (quant.dequantize(parts, "int4", 32, 128) - weight).abs()
    torch.testing.assert_close(error, nearest, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.75, -1.0, 3e38, -3e38, 1e-38, 1e-44])
def test_constant_weights(value):
    weight = torch.full((3, 100), value)
    for kind, tolerance in (("int8", 1e-6), ("int4", 2**-8)):
        parts = quant.quantize(weight, kind, 64, "fp32")
        back = quant.dequantize(parts, kind, 64, 100)
        assert torch.isfinite(back).all()
        assert ((back - weight).abs() <= tolerance * abs(value) + 2e-40).all()


@pytest.mark.parametrize("size", [1e30, 1e15, 1e-15, 1e-30])
def test_quality_does_not_depend_on_the_size_of_the_weights(size):
    weight = random_weight(16, 128)
    for kind in ("int8", "int4"):
        error = []
        for factor in (1.0, size):
            parts = quant.quantize(weight * factor, kind, 64, "fp32")
            back = quant.dequantize(parts, kind, 64, 128) / factor
            error.append(((back - weight).norm() / weight.norm()).item())
        assert error[1] == pytest.approx(error[0], rel=0.05)


def test_zero_rows_and_groups_beside_others():
    weight = random_weight(4, 128)
    weight[1] = 0
    weight[2, 64:] = 0
    for kind in ("int8", "int4"):
        back = quant.dequantize(quant.quantize(weight, kind, 64, "fp32"), kind, 64, 128)
        assert (back[1] == 0).all()
        assert (back[2, 64:] == 0).all()
        assert (back[0] - weight[0]).abs().max() < 0.02


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["fp16", "int8", "int4"])
def test_weights_that_are_not_finite_are_refused(value, kind):
    weight = random_weight(300, 200)
    weight[299, 190] = value
    with pytest.raises(ValueError, match="NaN"):
        quant.quantize(weight, kind, 64, "bf16")


def test_weights_beyond_fp16_are_refused_in_fp16_only():
    weight = torch.full((2, 4), 70000.0)
    with pytest.raises(ValueError, match="float16"):
        quant.quantize(weight, "fp16", 64, "fp16")
    assert quant.quantize(weight, "fp16", 64, "fp32")[""][0, 0] == 70000


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_sixteen_bit_sources_and_views_are_left_as_they_were(source):
    weight = random_weight(40, 96).to(source)
    before = weight.clone()
    for kind in ("fp16", "int8", "int4"):
        whole = quant.quantize(weight, kind, 32, "fp16")
        strided = quant.quantize(torch.stack([weight, weight], dim=2)[..., 0], kind, 32, "fp16")
        assert all(torch.equal(part, strided[suffix]) for suffix, part in whole.items())
    assert torch.equal(weight, before)


@pytest.mark.parametrize("columns", [128, 100])
def test_important_inputs_get_the_smaller_errors(columns):
    weight = random_weight(64, columns)
    importance = torch.ones(columns)
    importance[::7] = 100.0
    errors = []
    for weights_of_inputs in (None, torch.ones(columns), importance, importance * 1e-3):
        parts = quant.quantize(weight, "int4", 64, "fp16", weights_of_inputs)
        errors.append((quant.dequantize(parts, "int4", 64, columns) - weight).square()[:, ::7].sum().item())
    assert errors[1] == pytest.approx(errors[0]) and errors[3] == pytest.approx(errors[2])
    assert errors[2] < 0.7 * errors[0]


def test_rows_are_quantized_independently_of_the_blocks_they_are_in():
    weight = random_weight(3000, 128)
    whole = quant.quantize(weight, "int4", 64, "fp16")
    alone = quant.quantize(weight[2500:2501], "int4", 64, "fp16")
    assert all(torch.equal(part[2500:2501], alone[suffix]) for suffix, part in whole.items())


# --- Weight ---


@pytest.mark.parametrize("kind", ["fp16", "int8", "int4"])
def test_merged_weights_are_filled_through_views_of_their_rows(kind):
    q, k = random_weight(24, 64, seed=1), random_weight(8, 64, seed=2)
    merged = quant.Weight(32, 64, kind, 32, "fp16")
    for start, weight in ((0, q), (24, k)):
        views = merged.rows(start, start + weight.shape[0])
        for suffix, part in quant.quantize(weight, kind, 32, "fp16").items():
            assert views[suffix].is_contiguous()  # bytes are received straight into it
            views[suffix].copy_(part)
    together = quant.quantize(torch.cat([q, k]), kind, 32, "fp16")
    assert merged.parts.keys() == together.keys()
    assert all(torch.equal(part, together[suffix]) for suffix, part in merged.parts.items())
    assert merged.nbytes == sum(part.nbytes for part in together.values())


# --- kernels ---

FORMATS = [("fp16", "fp32"), ("fp16", "fp16"), ("fp16", "bf16"), ("int8", "fp16"), ("int4", "fp16")]
SIZES = [(1152, 896), (64, 128), (96, 256), (80, 64), (101, 96), (48, 100), (7, 33), (16, 32), (1, 1)]


def kernel_cases():
    for kernel in quant.KERNELS:
        for kind, dtype in FORMATS:
            if any(kernel.serves(quant.Spec(n, k, kind, 32, dtype, "cpu")) for n, k in SIZES):
                yield pytest.param(kernel, kind, dtype, id=f"{kernel.name}-{kind}-{dtype}")


@pytest.mark.parametrize("kernel, kind, dtype", list(kernel_cases()))
@pytest.mark.parametrize("group_size", [32, 64])
def test_every_kernel_agrees_with_the_formula_or_is_gated_out(kernel, kind, dtype, group_size):
    if kind != "int4" and group_size != 32:
        pytest.skip("groups are of int4 only")
    generator = torch.Generator().manual_seed(1)
    for rows, columns in SIZES:
        weight = filled(rows, columns, kind, group_size, dtype)
        inputs = [torch.randn(count, columns, generator=generator) for count in (1, 2, 5, 16, 33)]
        expected = [expected_output(weight, x) for x in inputs]
        # one number may be the small difference of large ones: 4 times what is allowed for a row
        allowed = 4 * kernel.error if kernel.serves(weight.spec) else 1e-5
        linear = quant.Linear(weight)
        linear.prepare(choice_of(kernel.name, kernel.name, 0, weight.spec))
        for x, y in zip(inputs, expected):
            ours = linear(x)
            assert ours.dtype == x.dtype and ours.shape == y.shape
            assert relative_error(ours, y) <= allowed, (rows, columns, x.shape[0])


@pytest.mark.parametrize("kind, dtype", FORMATS)
def test_strided_and_offset_activations(kind, dtype):
    """The int8 kernel of torch crashes on a misaligned pointer: every kernel gets a proper copy."""
    for kernel in quant.KERNELS:
        weight = filled(64, 128, kind, 64, dtype)
        if kernel.serves(weight.spec):
            base = torch.randn(9 * 129 + 1)
            offset = base[1 : 1 + 8 * 128].view(8, 128)
            strided = base[: 8 * 129].view(8, 129)[:, 1:]
            expected = [expected_output(weight, x) for x in (offset, strided)]
            linear = quant.Linear(weight)
            linear.prepare(choice_of(kernel.name, kernel.name, 0, weight.spec))
            assert relative_error(linear(offset), expected[0]) <= 2 * kernel.error, kernel.name
            assert relative_error(linear(strided), expected[1]) <= 2 * kernel.error, kernel.name


@pytest.mark.parametrize("kind, dtype", FORMATS)
def test_extreme_activations(kind, dtype):
    """Zero rows give zero, large ones do not overflow, NaN and infinity do not come out as numbers."""
    for kernel in quant.KERNELS:
        weight = filled(64, 128, kind, 64, dtype)
        if not kernel.serves(weight.spec):
            continue
        linear = quant.Linear(weight)
        x = torch.randn(5, 128)
        x[0] = 0
        x[1] *= 1e6
        x[2] *= 1e-6
        x[3, 5], x[4, 5] = math.nan, math.inf
        expected = expected_output(weight, x)
        linear.prepare(choice_of(kernel.name, kernel.name, 0, weight.spec))
        y = linear(x)
        assert (y[0] == 0).all(), kernel.name
        assert relative_error(y[1:2], expected[1:2]) <= 2 * kernel.error, kernel.name
        assert relative_error(y[2:3], expected[2:3]) <= 2 * kernel.error, kernel.name
        assert not torch.isfinite(y[3:]).all(dim=1).any(), kernel.name


def test_freed_memory_can_be_released_everywhere(monkeypatch):
    quant.release_freed_memory()
    monkeypatch.setattr(quant.sys, "platform", "win32")
    quant.release_freed_memory()
    quant.share_one_arena()


def test_what_is_packed_one_after_the_other_is_converted_in_the_same_memory_until_it_is_released():
    torch.manual_seed(0)
    large, small = torch.randn(4, 8).half(), torch.randn(3, 2).half()
    with torch.inference_mode():
        copy = quant._scratch.copy_of(large)
        assert torch.equal(copy, large.float())
    again = quant._scratch.copy_of(small)
    assert torch.equal(again, small.float()) and again.data_ptr() == copy.data_ptr()
    larger = quant._scratch.copy_of(torch.cat([large, large]))
    assert torch.equal(larger, torch.cat([large, large]).float())
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        theirs = other.submit(quant._scratch.copy_of, small).result()
    assert theirs.data_ptr() != larger.data_ptr()
    quant.release_freed_memory(done=False)
    assert quant._scratch.memory is not None
    quant.release_freed_memory()
    assert quant._scratch.memory is None


FREEING_THREADS = r"""
import ctypes, re, threading
import quant

NBYTES, THREADS = 16 << 20, 4

def anonymous_bytes():
    return int(re.search(r"RssAnon:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024

def fill_and_free():
    for _ in range(2):  # glibc maps each block of a size of its own until it has seen one freed
        together.wait()
        block = libc.malloc(NBYTES)
        ctypes.memset(block, 1, NBYTES)
        together.wait()  # all have a block now: none has taken over what another had freed
        libc.free(block)

quant.share_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
together = threading.Barrier(THREADS)
before = anonymous_bytes()
threads = [threading.Thread(target=fill_and_free) for _ in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
quant.release_freed_memory()
print(anonymous_bytes() - before)
"""


@pytest.mark.skipif(quant._glibc("mallopt") is None, reason="needs Linux with glibc")
def test_what_several_threads_have_freed_is_released():
    command = [sys.executable, "-c", FREEING_THREADS]
    output = subprocess.run(command, cwd=Path(quant.__file__).parent, capture_output=True, text=True, check=True).stdout
    assert int(output) < 8 << 20  # of 64; each thread's own arena would have kept its block


def test_split_int8_keeps_what_8_bit_activations_lose():
    """One large activation: the others must keep more than the 7 bits that plain 8-bit activations would leave them."""
    kernel = next(kernel for kernel in quant.KERNELS if kernel.name == "fbgemm_int8")
    weight = filled(64, 256, "int8")
    if not kernel.serves(weight.spec):
        pytest.skip("no FBGEMM here")
    x = torch.randn(4, 256)
    x[:, 7] = 300.0
    expected = expected_output(weight, x)
    linear = quant.Linear(weight)
    linear.prepare(choice_of(kernel.name, kernel.name, 0, weight.spec))
    # the step is 300 / 63 / 126 = 0.038, an error of 0.011 at each of 256 activations of size 1
    w = torch.linalg.vector_norm(torch.from_numpy(expected), dim=1)
    assert ((linear(x).double() - torch.from_numpy(expected)).norm(dim=1) < 2e-3 * w).all()


def test_split_int8_rounds_as_written():
    """Just below a half: FBGEMM itself rounds x + 64, which is a half exactly there, to the other whole number."""
    kernel = next(kernel for kernel in quant.KERNELS if kernel.name == "fbgemm_int8")
    weight = filled(64, 64, "int8")
    if not kernel.serves(weight.spec):
        pytest.skip("no FBGEMM here")
    x = torch.arange(64.0).clamp_(max=62).add_(0.5).nextafter(torch.tensor(0.0))[None]
    x[0, 63] = 63.0
    expected = expected_output(weight, x)
    linear = quant.Linear(weight)
    linear.prepare(choice_of(kernel.name, kernel.name, 0, weight.spec))
    assert relative_error(linear(x), expected) <= kernel.error


@pytest.mark.parametrize("seed", range(3))
def test_int8_products_do_not_saturate(seed):
    """The largest weights and activations of one sign: sums of pairs of products must not be cut at 16 bits."""
    for kernel in quant.KERNELS:
        weight = filled(32, 128, "int8", seed=seed)
        if kernel.serves(weight.spec):
            weight.parts[".q"].fill_(127).mul_(1 if seed else -1)
            x = torch.full((3, 128), 5.0)
            expected = expected_output(weight, x)
            linear = quant.Linear(weight)
            linear.prepare(choice_of(kernel.name, kernel.name, 0, weight.spec))
            assert relative_error(linear(x), expected) <= 2 * kernel.error, kernel.name


def test_fbgemm_does_not_touch_the_stored_weight_and_refuses_what_fp16_cannot_hold():
    spec = quant.Spec(32, 64, "fp16", 64, "bf16", "cpu")
    kernel = next(kernel for kernel in quant.KERNELS if kernel.name == "fbgemm_fp16")
    if not kernel.serves(spec):
        pytest.skip("no FBGEMM here")
    for odd_value in (1e6, None):
        weight = filled(32, 64, "fp16", dtype="bf16")
        if odd_value:
            weight.parts[""][3, 4] = odd_value
        else:
            weight.parts[""][5] = 1e-9  # a whole row below fp16's smallest number
        before = weight.parts[""].clone()
        linear = quant.Linear(weight)
        x = torch.randn(3, 64)
        linear.prepare(choice_of("fbgemm_fp16", "fbgemm_fp16", 0, spec))
        assert torch.equal(weight.parts[""], before)  # still there: the reference serves
        torch.testing.assert_close(linear(x), x @ before.float().T)


# --- Linear ---


@pytest.mark.parametrize("kind, dtype", FORMATS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_prepared_equals_unprepared(kind, dtype, with_bias):
    shapes = [(192, 128), (128, 128)]
    kernels = quant.choose_kernels(shapes, kind, 64, dtype, "cpu")
    for rows, columns in shapes:
        weight = filled(rows, columns, kind, 64, dtype)
        linear = quant.Linear(weight, torch.randn(rows) if with_bias else None)
        inputs = [torch.randn(count, columns) for count in (1, 3, 8, 70, 300)]
        before = [linear(x) for x in inputs]
        linear.prepare(kernels.choices[rows, columns])
        for x, y in zip(inputs, before):
            assert relative_error(linear(x), y.double().numpy()) < 2 * quant.BF16_ERROR


def test_fp32_is_f_linear_for_any_number_of_rows():
    weight = filled(96, 64, "fp16", dtype="fp32")
    linear = quant.Linear(weight)
    choice = quant.choose_kernels([(96, 64)], "fp16", 64, "fp32", "cpu").choices[96, 64]
    assert (choice.few, choice.many) == ("dequantize", "dequantize")
    linear.prepare(choice)
    for count in (1, 7, 200):
        x = torch.randn(count, 64)
        assert torch.equal(linear(x), torch.nn.functional.linear(x, weight.parts[""]))


def test_few_and_many_rows_go_to_their_kernels(monkeypatch):
    """Kernels that answer with a constant show which one ran."""
    constant = {
        name: quant.Kernel(name, "parts", lambda s: True, lambda x, p, s, v=value: x.new_full((len(x), 64), v), 1.0)
        for name, value in (("one", 1.0), ("two", 2.0))
    }
    monkeypatch.setattr(quant, "KERNELS", [quant.REFERENCE, *constant.values()])
    weight = filled(64, 64, "int8")
    linear = quant.Linear(weight)
    linear.prepare(choice_of("one", "two", 8, weight.spec))
    assert [linear(torch.ones(count, 64))[0, 0].item() for count in (1, 8, 9, 100)] == [1, 1, 2, 2]


def test_wrong_inputs_are_refused_and_no_rows_give_no_rows():
    linear = quant.Linear(filled(32, 64, "int8"))
    with pytest.raises(ValueError, match="63 inputs"):
        linear(torch.ones(2, 63))
    assert linear(torch.ones(0, 64)).shape == (0, 32)


def test_a_choice_for_another_format_is_refused_and_packing_twice_too():
    weight = filled(32, 64, "int8")
    linear = quant.Linear(weight)
    with pytest.raises(ValueError, match="int4"):
        linear.prepare(quant.KernelChoice("int4pack", "int4pack", 0, "int4", 64, "fp32", "cpu"))
    weight.parts = {}
    with pytest.raises(ValueError, match="already"):
        linear.prepare(choice_of("dequantize", "dequantize", 0, weight.spec))


@pytest.mark.parametrize("kind, dtype", FORMATS)
def test_stored_parts_are_freed_unless_a_chosen_kernel_reads_them(kind, dtype):
    import weakref

    for kernel in quant.KERNELS:
        weight = filled(64, 128, kind, 64, dtype)
        if kernel.serves(weight.spec):
            parts = [weakref.ref(part) for part in weight.parts.values()]
            linear = quant.Linear(weight)
            linear.prepare(choice_of(kernel.name, kernel.name, 0, weight.spec))
            alive = [part() is not None for part in parts]
            assert alive == [kernel.form == "parts"] * len(parts), kernel.name


def test_memory_figures():
    for kind, dtype in FORMATS:
        for rows, columns in ((1152, 896), (64, 100), (7, 33)):
            planned = quant.planned_nbytes(rows, columns, kind, 64, dtype, "cpu")
            for kernel in quant.KERNELS:
                weight = filled(rows, columns, kind, 64, dtype)
                stored = weight.nbytes
                if kernel.many_only or not kernel.serves(weight.spec):
                    continue
                choice = choice_of(kernel.name, kernel.name, 0, weight.spec)
                linear = quant.Linear(weight, torch.zeros(rows))
                assert linear.nbytes == stored + 4 * rows
                linear.prepare(choice)
                assert linear.nbytes == choice.packed_nbytes(rows, columns) + 4 * rows
                assert stored <= choice.packed_nbytes(rows, columns) <= planned, kernel.name
    # int4 stays 4.5 bits when packed, int8 is never beside a 16-bit copy of itself
    assert quant.planned_nbytes(896, 896, "int4", 64, "fp16", "cpu") == 896 * 896 * 4.5 / 8
    assert quant.planned_nbytes(896, 1024, "int8", 64, "fp16", "cpu") < 1.05 * 896 * 1024
    room = quant.planned_nbytes(896, 896, "fp16", 64, "fp16", "cpu", second_copy=True)
    assert room == quant.planned_nbytes(896, 896, "fp16", 64, "fp16", "cpu") + 2 * 896 * 896


def test_large_weights_are_packed_in_slabs(monkeypatch):
    monkeypatch.setattr(quant, "SLAB_WEIGHTS", 64 * 128)
    for kind, dtype in FORMATS:
        for kernel in quant.KERNELS:
            weight = filled(200, 128, kind, 64, dtype)
            if kernel.serves(weight.spec):
                assert weight.spec.slabs() == [(0, 64), (64, 128), (128, 192), (192, 200)]
                x = torch.randn(3, 128)
                expected = expected_output(weight, x)
                linear = quant.Linear(weight)
                linear.prepare(choice_of(kernel.name, kernel.name, 0, weight.spec))
                assert relative_error(linear(x), expected) <= 2 * kernel.error, kernel.name


# --- choosing ---


def bad_kernel(name, run):
    return quant.Kernel(name, "parts", lambda spec: spec.quant == "int8", run, quant.BF16_ERROR)


def test_kernels_that_fail_or_answer_garbage_are_left_aside_with_the_reason(monkeypatch):
    def nan(x, parts, spec):
        return x.new_full((x.shape[0], spec.out_features), math.nan)

    def one_wrong_row_in_a_batch(x, parts, spec):
        y = quant.REFERENCE.run(x, parts, spec)
        if x.shape[0] > 1:
            y[-1, 0] += 1
        return y

    def missing(x, parts, spec):
        return torch.ops.aten.no_such_operator(x)

    bad = [bad_kernel("nan", nan), bad_kernel("wrong", one_wrong_row_in_a_batch), bad_kernel("missing", missing)]
    bad.append(bad_kernel("zeros", lambda x, parts, spec: x.new_zeros(x.shape[0], spec.out_features)))
    monkeypatch.setattr(quant, "KERNELS", [quant.REFERENCE, *bad])
    kernels = quant.choose_kernels([(64, 64), (64, 128)], "int8", 64, "fp16", "cpu")
    assert {choice.few for choice in kernels.choices.values()} == {"dequantize"}
    assert {choice.many for choice in kernels.choices.values()} == {"dequantize"}
    for kernel in bad:
        (line,) = [line for line in kernels.measured if line.startswith(kernel.name + ":")]
        assert "left aside" in line


SHAPE = (64, 1024)


def measurements(times):
    """{kernel: (seconds at 1, 8, 64, 256 tokens)} as what is measured of one shape."""
    return {name: {SHAPE: dict(zip((1, 8, 64, 256), seconds))} for name, seconds in times.items()}


def measured(monkeypatch, times, kernels):
    """The choice with made-up measurements {kernel: (seconds at 1, 8, 64, 256 tokens)}."""
    monkeypatch.setattr(quant, "KERNELS", kernels)
    monkeypatch.setattr(quant, "_measure", lambda candidates, layer, device: measurements(times))
    return quant.choose_kernels([SHAPE], "int8", 64, "fp16", "cpu").choices[SHAPE]


def copies(*names, form="parts"):
    return [quant.Kernel(name, form, lambda spec: True, quant.REFERENCE.run, 1.0) for name in names]


@pytest.mark.parametrize(
    "times, few, many",
    [
        ({"a": (0.95, 7.6, 61, 243)}, "dequantize", "dequantize"),  # 5 % quicker: not worth it
        ({"a": (0.8, 6.4, 75, 300)}, "a", "dequantize"),
        ({"a": (0.8, 6.4, 90, 250)}, "a", "a"),  # the reference is not 10 % quicker than a
        ({"a": (2, 16, 30, 120)}, "dequantize", "a"),
        ({"a": (0.5, 4, 70, 280), "b": (2, 16, 30, 120)}, "a", "b"),
        ({"a": (0.5, 4), "b": (0.6, 4, 30, 120)}, "a", "b"),  # a was hopeless at 8 tokens
    ],
)
def test_a_kernel_must_be_ten_percent_quicker(monkeypatch, times, few, many):
    times = {"dequantize": (1, 8, 64, 256), **times}
    choice = measured(monkeypatch, times, [quant.REFERENCE, *copies("a", "b")])
    assert (choice.few, choice.many) == (few, many)


def test_threshold_is_where_the_times_meet(monkeypatch):
    times = {"dequantize": (1, 5, 10, 20), "a": (0.5, 4, 18, 80)}
    choice = measured(monkeypatch, times, [quant.REFERENCE, *copies("a")])
    # gains of 1 at 8 tokens and -8 at 64: they meet a ninth of the way
    assert (choice.few, choice.many, choice.threshold) == ("a", "dequantize", 8 + 56 // 9)
    assert str(choice) == "a up to 14 tokens, dequantize beyond"


def test_every_shape_has_its_own_kernel(monkeypatch):
    shapes = [(64, 64), (128, 64)]
    quick = dict(zip((1, 8, 64, 256), (0.5, 4, 32, 128)))
    slow = dict(zip((1, 8, 64, 256), (1, 8, 64, 256)))
    table = {"dequantize": dict(zip(shapes, (quick, slow))), "a": dict(zip(shapes, (slow, quick)))}
    monkeypatch.setattr(quant, "KERNELS", [quant.REFERENCE, *copies("a")])
    monkeypatch.setattr(quant, "_measure", lambda candidates, layer, device: table)
    kernels = quant.choose_kernels(shapes, "int8", 64, "fp16", "cpu")
    assert [str(kernels.choices[shape]) for shape in shapes] == ["dequantize", "a"]
    assert [line.partition(":")[0] for line in kernels.measured] == ["dequantize", "a"]
    assert kernels.decisions == (
        "int8 (fp16) on cpu, 64 x 64: dequantize",
        "int8 (fp16) on cpu, 128 x 64: a",
    )
    table["a"] = {shape: dict(zip((1, 8, 64, 256), (0.2, 1, 8, 32))) for shape in shapes}
    assert quant.choose_kernels(shapes, "int8", 64, "fp16", "cpu").decisions == ("int8 (fp16) on cpu: a",)


def test_of_equals_for_few_tokens_the_one_that_is_quicker_for_many(monkeypatch):
    times = {"dequantize": (9, 9, 18, 50), "a": (1.00, 8, 60, 250), "b": (1.05, 8.2, 20, 35)}
    kernels = [quant.REFERENCE, *copies("a"), *copies("b", form="fbgemm_int8")]
    choice = measured(monkeypatch, times, kernels)
    assert (choice.few, choice.many) == ("b", "b")
    choice = measured(monkeypatch, {**times, "b": (1.2, 9.5, 20, 35)}, kernels)  # more than a tenth slower for few
    assert (choice.few, choice.many) == ("a", "dequantize")


def test_two_forms_of_one_weight_are_not_kept_side_by_side(monkeypatch):
    kernels = [quant.REFERENCE, *copies("packed", form="bf16_copy")]
    monkeypatch.setitem(
        quant.FORMS, "bf16_copy", quant.Form(lambda parts, spec: parts, quant.FORMS["bf16_copy"].nbytes)
    )
    times = {"dequantize": (1, 8, 64, 256), "packed": (4, 32, 32, 128)}
    choice = measured(monkeypatch, times, kernels)
    assert (choice.few, choice.many) == ("dequantize", "dequantize")


@pytest.mark.parametrize(
    "copy_times, pays",
    [((4, 32, 32, 128), True), ((4, 32, 62, 240), False), ((0.1, 0.8, 64, 256), False)],  # 7 % quicker; few tokens only
)
def test_a_second_copy_is_for_many_tokens_and_must_be_worth_its_memory(monkeypatch, copy_times, pays):
    second = next(kernel for kernel in quant.KERNELS if kernel.second_copy)
    monkeypatch.setattr(quant, "KERNELS", [quant.REFERENCE, second])
    table = measurements({"dequantize": (1, 8, 64, 256), second.name: copy_times})
    monkeypatch.setattr(quant, "_measure", lambda candidates, layer, device: {n: table[n] for n in candidates})
    kind = ("fp16", 64, "fp16", "cpu")
    kernels, with_copy = quant.choose_kernels_with_copy([SHAPE], *kind)
    assert str(kernels.choices[SHAPE]) == "dequantize" == str(quant.choose_kernels([SHAPE], *kind).choices[SHAPE])
    assert (with_copy is not None) == pays
    if pays:
        choice = with_copy.choices[SHAPE]
        assert (choice.few, choice.many, choice.threshold) == ("dequantize", "bf16_copy", 8 + 24)
        assert choice.packed_nbytes(*SHAPE) <= quant.planned_nbytes(*SHAPE, *kind, second_copy=True)
        route = (choice.few, choice.many, choice.threshold)
        assert quant.neighbours_choice({SHAPE: route}, *kind).choices == with_copy.choices
        assert quant.neighbours_choice({SHAPE: ("no such kernel", *route[1:])}, *kind) is None


@pytest.mark.parametrize("kind, dtype", FORMATS)
def test_choosing_for_shapes_that_no_fast_kernel_serves(kind, dtype):
    choice = quant.choose_kernels([(7, 33), (5, 20)], kind, 32, dtype, "cpu").choices[7, 33]
    weight = filled(7, 33, kind, 32, dtype)
    x = torch.randn(3, 33)
    expected = expected_output(weight, x)
    linear = quant.Linear(weight)
    linear.prepare(choice)
    assert relative_error(linear(x), expected) < 4 * quant.BF16_ERROR
    assert choice.packed_nbytes(7, 33) <= quant.planned_nbytes(7, 33, kind, 32, dtype, "cpu")


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    quant.choose_kernels([(64, 64)], "int4", 32, "fp16", "cpu")
    assert torch.equal(torch.rand(3), expected)


# --- other devices ---


@pytest.mark.parametrize("device", [CUDA, MPS])
@pytest.mark.parametrize(
    "kind, dtype", [*FORMATS, ("int8", "bf16"), ("int4", "bf16"), ("int8", "fp32"), ("int4", "fp32")]
)
def test_chosen_kernels_agree_on_the_device(device, kind, dtype):
    shapes = [(1152, 896), (896, 4864), (100, 96)]
    kernels = quant.choose_kernels(shapes, kind, 32, dtype, device)
    for rows, columns in shapes:
        weight = filled(rows, columns, kind, 32, dtype, device)
        linear = quant.Linear(weight)
        for count in (1, 16, 100):
            x = torch.randn(count, columns).to(quant.FLOAT_DTYPES[dtype]).to(device)
            expected = linear(x).float().cpu().double().numpy() if not weight.parts else expected_output(weight, x)
            assert relative_error(linear(x), expected) < 2 * quant.BF16_ERROR
        inputs = torch.randn(4, columns).to(quant.FLOAT_DTYPES[dtype]).to(device)
        expected = expected_output(weight, inputs)
        linear.prepare(kernels.choices[rows, columns])
        assert relative_error(linear(inputs), expected) < 2 * quant.BF16_ERROR


@pytest.mark.parametrize(
    "device_type, kind, rows, columns, name, served",
    [
        ("mps", "int8", 64, 64, "int8pack_fp32", True),
        ("mps", "int8", 64, 48, "int8pack_fp32", False),
        ("mps", "int8", 40, 64, "int8pack_fp32", False),
        ("cuda", "int8", 40, 48, "int8pack_fp32", True),
        ("mps", "int4", 64, 64, "int4_tiles", True),
        ("mps", "int4", 60, 64, "int4_tiles", False),
        ("mps", "int4", 64, 80, "int4_tiles", False),
        ("mps", "int4", 64, 64, "int4pack", False),
        ("cuda", "fp16", 64, 64, "fbgemm_fp16", False),
    ],
)
def test_gates_of_devices_that_are_not_here(device_type, kind, rows, columns, name, served):
    kernel = next(kernel for kernel in quant.KERNELS if kernel.name == name)
    assert kernel.serves(quant.Spec(rows, columns, kind, 32, "fp16", device_type)) is served


def test_int4_tiles_are_packed_with_the_even_input_in_the_high_nibble(monkeypatch):
    """The packing operator is replaced by one that shows its input, since no CPU build has it."""
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", lambda q, tiles: (q, tiles), raising=False)
    weight = filled(8, 128, "int4", 32)
    spec = quant.Spec(8, 128, "int4", 32, "fp16", "cuda")
    (q, tiles), scales = quant.FORMS["int4_tiles"].pack(weight.parts, spec)
    assert tiles == 8 and scales.dtype == torch.bfloat16 and scales.shape == (4, 8, 2)
    codes = torch.stack([q >> 4, q & 15], dim=2).view(8, 128).float().view(8, 4, 32)
    back = (codes - 8) * scales[:, :, 0].T[..., None] + scales[:, :, 1].T[..., None]
    np.testing.assert_allclose(back.view(8, 128).numpy(), numpy_dequantize(weight.parts, 128, 32), rtol=1e-6, atol=1e-8)
