"""Arithmetic on a thread's 16-byte vectors: widening to fp32, the maximum, exponentials, rounding. Knows no rows.

The functions build straight-line code while a kernel is traced: a list of Float32 holds values in registers. What is
written here is what the inner loops issue, so each choice is about instructions:

    widen     bf16: a shift or a mask per element, where the compiler's own conversion takes three for two elements
    maximum   on packed pairs of 16-bit elements before they are widened: half the instructions of fp32
    exp2      the hardware's (2 ulp), or for a share of the elements a polynomial on the FMA pipe
    pairs     Blackwell adds and multiplies two fp32 numbers in one instruction
"""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32

from dsl_kernels.reduce import LOG2E

PACKED_MAX = {Float16: "max.f16x2", BFloat16: "max.bf16x2"}

EXP2_POLYNOMIAL = (1.0, 0.69314700365, 0.24022242427, 0.05550733581, 0.00967151299, 0.00132647273)
"""2^f on [-0.5, 0.5], lowest power first, the first held at 1 so that 2^0 is exact: 2 ulp off at most."""


def widen(elements: cute.Tensor) -> list[Float32]:
    """Return the values of a register tensor of fp16, bf16 or fp32 elements, in order."""
    dtype = elements.element_type
    size = cute.size(elements)
    if dtype is not BFloat16:
        return [Float32(elements[i]) for i in range(size)]
    words = cute.recast_tensor(elements, Uint32)
    values = []
    for i in range(size // 2):
        values += [(words[i] << 16).bitcast(Float32), (words[i] & Uint32(0xFFFF0000)).bitcast(Float32)]
    return values


def maximum(elements: cute.Tensor, values: Sequence[Float32]) -> Float32:
    """Return the largest of a register tensor's elements, of which `values` are the widened; NaN is passed over."""
    operation = PACKED_MAX.get(elements.element_type)
    if operation is None:
        return _tree(cute.arch.fmax, values)
    words = cute.recast_tensor(elements, Uint32)

    def packed(a: Uint32, b: Uint32) -> Any:
        return cute.arch.inline_ptx(
            operation + " {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
        )

    best = _tree(packed, [words[i] for i in range(cute.size(elements) // 2)])
    halves = cute.make_rmem_tensor((2,), elements.element_type)
    cute.recast_tensor(halves, Uint32)[0] = best
    return cute.arch.fmax(*widen(halves))


def exp_shifted(values: Sequence[Float32], shift: Float32, *, pairs: bool, polynomial: int = 0) -> list[Float32]:
    """Return exp(x - shift) of each value, for x <= shift or NaN.

    Subtracted before it is scaled: x * log2(e) - shift * log2(e) would round the large products.

    Args:
        values: an even number of them.
        shift: the same for all.
        pairs: whether the arch has packed fp32 arithmetic.
        polynomial: of every 8 values, how many take the polynomial instead of the special-function unit; even.
    """
    exps: list[Float32] = []
    for i in range(0, len(values), 2):
        scaled = _multiply(_subtract(values[i : i + 2], shift, pairs), Float32(LOG2E), pairs)
        if i % 8 < polynomial:
            exps += exp2_polynomial(scaled, pairs=pairs)
        else:
            exps += [cute.math.exp2(x, fastmath=True) for x in scaled]
    return exps


def exp2_polynomial(values: Sequence[Float32], *, pairs: bool) -> list[Float32]:
    """2^x of two values x <= 0 on the FMA pipe, to 2 ulp: 2^x = 2^n * 2^f with n = round(x), f in [-0.5, 0.5].

    0 from -126.5 down, -inf included, where the hardware's reaches into denormal numbers; NaN stays NaN.
    """
    magic = Float32(12582912.0)  # 1.5 * 2^23: adding it leaves round(x) in the low bits
    x = [cute.arch.fmax(value, Float32(-127.0), nan=True) for value in values]
    shifted = _subtract(x, -magic, pairs)
    rounded = _subtract(shifted, magic, pairs)
    if pairs:
        f = cute.arch.sub_packed_f32x2((x[0], x[1]), (rounded[0], rounded[1]))
    else:
        f = [a - b for a, b in zip(x, rounded, strict=True)]
    powers = [Float32(EXP2_POLYNOMIAL[-1])] * 2
    for coefficient in EXP2_POLYNOMIAL[-2::-1]:
        c = Float32(coefficient)
        if pairs:
            powers = cute.arch.fma_packed_f32x2((powers[0], powers[1]), (f[0], f[1]), (c, c))
        else:
            powers = [p * each + c for p, each in zip(powers, f, strict=True)]
    # A product and not a sum of exponents, which would make a finite number of NaN; 2^-127 comes out as 0.
    scales = [((n.bitcast(Int32) << 23) + Int32(0x3F800000)).bitcast(Float32) for n in shifted]
    if pairs:
        return list(cute.arch.mul_packed_f32x2((powers[0], powers[1]), (scales[0], scales[1])))
    return [p * each for p, each in zip(powers, scales, strict=True)]


def add(values: Sequence[Float32], sums: tuple[Float32, Float32], *, pairs: bool) -> tuple[Float32, Float32]:
    """Return `sums` with the values of even places added to the first and those of odd places to the second."""
    even, odd = sums
    for a, b in zip(values[::2], values[1::2], strict=True):
        if pairs:
            even, odd = cute.arch.add_packed_f32x2((even, odd), (a, b))
        else:
            even, odd = even + a, odd + b
    return even, odd


def scale(values: Sequence[Float32], factor: Float32, *, pairs: bool) -> list[Float32]:
    """Return each value times the factor."""
    products: list[Float32] = []
    for i in range(0, len(values), 2):
        products += _multiply(values[i : i + 2], factor, pairs)
    return products


def round_to(values: Sequence[Float32], out: cute.Tensor) -> None:
    """Round fp32 values to the dtype of a register tensor of as many elements."""
    wide = cute.make_rmem_tensor((len(values),), Float32)
    for i, value in enumerate(values):
        wide[i] = value
    out.store(wide.load().to(out.element_type))


def _tree(combine: Any, values: Sequence[Any]) -> Any:
    """Combine values pairwise, so that the longest chain is the logarithm of their number."""
    while len(values) > 1:
        rest = [values[-1]] if len(values) % 2 else []
        values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)] + rest
    return values[0]


def _subtract(values: Sequence[Float32], x: Float32, pairs: bool) -> list[Float32]:
    """Subtract one number from two."""
    if pairs:
        return list(cute.arch.sub_packed_f32x2((values[0], values[1]), (x, x)))
    return [value - x for value in values]


def _multiply(values: Sequence[Float32], x: Float32, pairs: bool) -> list[Float32]:
    """Multiply two numbers by one."""
    if pairs:
        return list(cute.arch.mul_packed_f32x2((values[0], values[1]), (x, x)))
    return [value * x for value in values]
