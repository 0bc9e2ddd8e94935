"""Arithmetic on a thread's 16-byte vectors: widening to fp32, the maximum, exponentials, rounding. Knows no rows.

The functions build straight-line code while a kernel is traced: a list of Float32 holds values in registers. What is
written here is what the inner loops issue, so each choice is about instructions:

    widen     bf16: a shift or a mask per element, where the compiler's own conversion takes three for two elements
    maximum   on packed pairs of 16-bit elements before they are widened: half the instructions of fp32
    exp       one fused multiply-add and the hardware's 2^x (2 ulp), or for a share of the elements a polynomial on the
              FMA pipe
    tanh      polynomials on the FMA pipe where all of a thread's arguments are small, which they mostly are; two
              special-function operations else, since the hardware's own tanh is right to 11 bits only
    pairs     Blackwell adds and multiplies two fp32 numbers in one instruction
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32, const_expr

from dsl_kernels.reduce import LOG2E

LARGEST_MAGNITUDE = {
    Float16: "max.xorsign.abs.f16x2",
    BFloat16: "max.xorsign.abs.bf16x2",
    Float32: "max.xorsign.abs.f32",
}
"""The larger magnitude, with a sign that means nothing."""

LOW = {Float16: -65504.0, BFloat16: -(2.0**120), Float32: -(2.0**120)}
"""Not `is_ordinary`, and yet finite where it is multiplied."""

PACKED_MAX = {Float16: "max.f16x2", BFloat16: "max.bf16x2"}

ORDINARY = 2.0**16
"""Exponents as large as this are not computed from a `reference`."""

EXP2_POLYNOMIAL = (1.0, 0.69314700365, 0.24022242427, 0.05550733581, 0.00967151299, 0.00132647273)
"""2^f on [-0.5, 0.5], lowest power first, the first held at 1 so that 2^0 is exact: 2 ulp off at most."""

TANH_POLYNOMIALS = (
    (0.3, (1.0, -0.33333060145378113, 0.13314831256866455, -0.05036619305610657)),
    (
        0.9,
        (
            1.0,
            -0.3333321213722229,
            0.13330360352993011,
            -0.05372147262096405,
            0.02090408094227314,
            -0.006860006600618362,
            0.001303939614444971,
        ),
    ),
)
"""(largest |x|, tanh(x) / x by powers of x^2, lowest first): a relative error of 1.1e-7 at most."""


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


def reference(m: Float32, unit: Any) -> Float32:
    """Return c = m * unit for `exponents`; the same number wherever it is computed."""
    return product(m, unit)


def without_infinity(elements: cute.Tensor) -> cute.Tensor:
    """Return a register tensor's elements with the very low ones, -inf among them, raised to `LOW`; NaN stays."""
    dtype = elements.element_type
    raised = cute.make_rmem_tensor((cute.size(elements),), dtype)
    if dtype is Float32:
        for i in range(cute.size(elements)):
            raised[i] = cute.arch.fmax(elements[i], Float32(LOW[dtype]), nan=True)
        return raised
    lows = cute.make_rmem_tensor((2,), dtype)
    lows.fill(LOW[dtype])
    low = cute.recast_tensor(lows, Uint32)[0]
    words, raised_words = cute.recast_tensor(elements, Uint32), cute.recast_tensor(raised, Uint32)
    operation = PACKED_MAX[dtype].replace("max.", "max.NaN.")
    for i in range(cute.size(words)):
        raised_words[i] = cute.arch.inline_ptx(
            operation + " {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[words[i], low]
        )
    return raised


def exponents(values: Sequence[Float32], c: Float32, unit: Any, *, pairs: bool) -> list[Float32]:
    """Return x * unit - c of each of an even number of values, rounded once.

    With c = `reference(m, unit)` that is (x - m) * unit in one instruction instead of two, but for `excess(m, unit)`,
    which all of them have in common.
    """
    factor = Float32(unit)
    if not pairs:
        return [cute.math.fma(x, factor, -c) for x in values]
    results: list[Float32] = []
    for i in range(0, len(values), 2):
        results += cute.arch.fma_packed_f32x2((values[i], values[i + 1]), (factor, factor), (-c, -c))
    return results


@cute.jit
def excess(m: Float32, unit):
    """What `exponents` have too much: m * unit less its rounded value. Below 2^-8 where `is_ordinary`."""
    return cute.math.fma(m, Float32(unit), -reference(m, unit))


@cute.jit
def is_ordinary(m: Float32, unit):
    """Whether m is so near 0 that `excess` is small; not for infinities and NaN."""
    return cute.math.absf(m * unit) < ORDINARY


def exp2(values: Sequence[Float32], *, pairs: bool, polynomial: int = 0) -> list[Float32]:
    """Return 2^x of each of an even number of values, none much above 0.

    Args:
        values: the exponents.
        pairs: whether the arch has packed fp32 arithmetic.
        polynomial: of every 8 values, how many take the polynomial instead of the special-function unit; even.
    """
    powers: list[Float32] = []
    for i in range(0, len(values), 2):
        if i % 8 < polynomial:
            powers += exp2_polynomial(values[i : i + 2], pairs=pairs)
        else:
            powers += [cute.math.exp2(x, fastmath=True) for x in values[i : i + 2]]
    return powers


def exp_shifted(values: Sequence[Float32], shift: Float32, *, pairs: bool, polynomial: int = 0) -> list[Float32]:
    """Return exp(x - shift) of each of an even number of values x <= shift or NaN, as `reduce.exp_shifted`."""
    scaled: list[Float32] = []
    for i in range(0, len(values), 2):
        scaled += _multiply(_subtract(values[i : i + 2], shift, pairs), Float32(LOG2E), pairs)
    return exp2(scaled, pairs=pairs, polynomial=polynomial)


def exp2_polynomial(values: Sequence[Float32], *, pairs: bool) -> list[Float32]:
    """2^x of two values, none much above 0, on the FMA pipe, to 2 ulp: 2^n * 2^f with n = round(x), f in [-0.5, 0.5].

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


def largest_magnitude(elements: cute.Tensor) -> Float32:
    """Return the largest absolute value of a register tensor's elements; NaN is passed over."""
    dtype = elements.element_type
    operation = LARGEST_MAGNITUDE[dtype]
    words = cute.recast_tensor(elements, Uint32)

    def larger(a: Uint32, b: Uint32) -> Any:
        return cute.arch.inline_ptx(
            operation + " {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
        )

    best = _tree(larger, [words[i] for i in range(cute.size(words))])
    if dtype is Float32:
        return (best & Uint32(0x7FFFFFFF)).bitcast(Float32)
    halves = cute.make_rmem_tensor((2,), dtype)
    cute.recast_tensor(halves, Uint32)[0] = best & Uint32(0x7FFF7FFF)
    return cute.arch.fmax(*widen(halves))


@cute.jit
def tanh(values, largest: Float32, pairs: cutlass.Constexpr):
    """Tanh of each of a list of an even number of values, of which `largest` is the largest magnitude.

    Every step is rounded as it is written: a compiler that fused a last product with what the caller does would give
    the same number differently in different places.
    """
    n = const_expr(len(values))
    results = cute.make_rmem_tensor((n,), Float32)
    if largest <= TANH_POLYNOMIALS[0][0]:
        polynomial_tanh(values, results, TANH_POLYNOMIALS[0][1], pairs)
    else:
        polynomial_tanh(values, results, TANH_POLYNOMIALS[1][1], pairs)
        if not (largest <= TANH_POLYNOMIALS[1][0]):
            for i in cutlass.range_constexpr(n):
                # 1 and -1 of infinities; NaN, which `largest` passes over, stays NaN in the polynomials.
                power = cute.math.exp2(product(values[i], 2.0 * LOG2E), fastmath=True)
                far = cute.math.fma(cute.arch.rcp_approx(power + 1.0), Float32(-2.0), Float32(1.0))
                if cute.math.absf(values[i]) > TANH_POLYNOMIALS[1][0]:
                    results[i] = far
    return [results[i] for i in range(n)]


def product(x: Float32, y: Any) -> Float32:
    """Return x * y, rounded, never part of a fused multiply-add."""
    return cute.math.mul(x, Float32(y), rounding=cute.math.RoundingMode.NEAREST_EVEN)


def polynomial_tanh(
    values: Sequence[Float32], results: cute.Tensor, coefficients: Sequence[float], pairs: bool
) -> None:
    """Fill `results` with x * P(x^2) of each value x."""
    for i in range(0, len(values), 2):
        x = (values[i], values[i + 1])
        if pairs:
            square = cute.arch.mul_packed_f32x2(x, x)
        else:
            square = (product(x[0], x[0]), product(x[1], x[1]))
        powers = (Float32(coefficients[-1]),) * 2
        for coefficient in coefficients[-2::-1]:
            c = Float32(coefficient)
            if pairs:
                powers = cute.arch.fma_packed_f32x2(powers, square, (c, c))
            else:
                powers = (cute.math.fma(powers[0], square[0], c), cute.math.fma(powers[1], square[1], c))
        if pairs:
            powers = cute.arch.mul_packed_f32x2(powers, x)
        else:
            powers = (product(powers[0], x[0]), product(powers[1], x[1]))
        results[i], results[i + 1] = powers


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
