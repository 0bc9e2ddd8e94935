"""The polynomial for 2^x: the traced function itself, run on numpy arrays that behave like the GPU's fp32 registers."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs the DSL")

from dsl_kernels import vector
from dsl_kernels.reduce import LOG2E, LOWEST

NAN_BITS = 0x7FFFFFFF
"""What every fp32 operation of the GPU returns for NaN, whatever the bits of its operands."""

ULPS = float(re.search(r"to ([\d.]+) ulp", vector.exp2_polynomial.__doc__)[1])


class F32:
    """fp32 numbers; each operation rounds once and forgets the bits of a NaN."""

    def __init__(self, values):
        self.values = np.atleast_1d(np.asarray(values, dtype=np.float32))

    @classmethod
    def rounded(cls, exact):
        """Round float64, in which a product of fp32 numbers is exact and a sum nearly so."""
        with np.errstate(over="ignore", invalid="ignore"):
            bits = np.asarray(exact, dtype=np.float64).astype(np.float32).view(np.uint32)
        return cls(np.where(np.isnan(exact), np.uint32(NAN_BITS), bits).astype(np.uint32).view(np.float32))

    @property
    def exact(self):
        with np.errstate(invalid="ignore"):  # signalling NaN
            return self.values.astype(np.float64)

    def __add__(self, other):
        return F32.rounded(self.exact + as_f32(other).exact)

    def __sub__(self, other):
        return F32.rounded(self.exact - as_f32(other).exact)

    def __mul__(self, other):
        return F32.rounded(self.exact * as_f32(other).exact)

    def __neg__(self):
        return F32(-self.values)

    def bitcast(self, to):
        return to(self.values.view(np.uint32))


class I32:
    """32-bit integers that wrap around."""

    def __init__(self, bits):
        self.bits = np.atleast_1d(np.asarray(bits)).astype(np.uint32)

    def __add__(self, other):
        return I32(self.bits + (other.bits if isinstance(other, I32) else np.uint32(other % 2**32)))

    __radd__ = __add__

    def __lshift__(self, places):
        return I32(self.bits << np.uint32(places))

    def bitcast(self, to):
        return to(self.bits.view(np.float32))


def as_f32(x):
    return x if isinstance(x, F32) else F32(x)


def fmax(a, b, *, nan=False):
    """The larger one; NaN counts where `nan` says so, and is passed over otherwise."""
    return F32.rounded((np.maximum if nan else np.fmax)(as_f32(a).exact, as_f32(b).exact))


def fma(a, b, c):
    return F32.rounded(as_f32(a).exact * as_f32(b).exact + as_f32(c).exact)


def in_pairs(operation):
    """An operation on two numbers at once."""
    return lambda *operands: tuple(operation(*each) for each in zip(*operands, strict=True))


@pytest.fixture
def on_arrays(monkeypatch):
    """Let `dsl_kernels.vector` compute on arrays instead of writing instructions."""
    arch = SimpleNamespace(
        fmax=fmax,
        add_packed_f32x2=in_pairs(lambda a, b: as_f32(a) + b),
        sub_packed_f32x2=in_pairs(lambda a, b: as_f32(a) - b),
        mul_packed_f32x2=in_pairs(lambda a, b: as_f32(a) * b),
        fma_packed_f32x2=in_pairs(fma),
    )
    math = SimpleNamespace(exp2=lambda x, fastmath: F32.rounded(np.exp2(x.exact)))
    monkeypatch.setattr(vector, "cute", SimpleNamespace(arch=arch, math=math))
    monkeypatch.setattr(vector, "Float32", as_f32)
    monkeypatch.setattr(vector, "Int32", I32)


@pytest.fixture(params=[True, False], ids=["pairs", "single"])
def exp2(request, on_arrays):
    """2^x of an array by the polynomial, in packed arithmetic (products and sums fused) or without (two roundings)."""

    def evaluate(x):
        first, second = vector.exp2_polynomial([F32(x), F32(np.asarray(x)[::-1])], pairs=request.param)
        # The second of a pair is computed as the first is.
        np.testing.assert_array_equal(second.values[::-1].view(np.uint32), first.values.view(np.uint32))
        return first.values

    return evaluate


def exponents():
    """Exponents from -126 to 0: evenly, and close to where the rounding changes from one integer to the next."""
    even = np.linspace(-126.0, 0.0, 2_000_001)
    edges = np.arange(-125.5, 0.0)[:, None] + np.linspace(-1e-4, 1e-4, 2001)
    small = -np.exp2(np.linspace(-149.0, 0.0, 10_001))
    x = np.concatenate([even, edges.ravel(), small]).astype(np.float32)
    return np.unique(x[(x >= -126) & (x <= 0)])


def test_the_polynomial_is_as_exact_as_its_docstring_says(exp2):
    x = exponents()
    exact = np.exp2(x.astype(np.float64))
    got = exp2(x).astype(np.float64)
    ulp = np.exp2(np.floor(np.log2(exact)) - 23)
    worst = np.abs(got - exact) / ulp
    assert worst.max() < ULPS + 0.5, (worst.max(), x[worst.argmax()])  # a bound that is given in whole ulp
    assert worst.max() > 0.5  # no better than it can be: the comparison sees an error


def test_integers_are_exact_and_so_is_the_maximum_of_a_row(exp2):
    x = np.arange(-126.0, 1.0)
    assert (exp2(x).astype(np.float64) == np.exp2(x)).all()
    assert exp2([0.0, -0.0]).tolist() == [1.0, 1.0]


def test_a_larger_exponent_never_gives_less_by_more_than_one_rounding(exp2):
    values = exp2(exponents()).astype(np.float64)
    assert (values[1:] >= values[:-1] * (1 - 2.0**-23)).all()
    assert (values <= 1).all()


def test_below_the_normal_numbers_it_is_tiny_and_of_minus_infinity_nothing(exp2):
    tiny = exp2([-126.25, -126.5, -126.75, -127.0, -1000.0, LOWEST])
    assert ((tiny >= 0) & (tiny <= 2.0**-126)).all()
    assert (exp2([-np.inf, -np.inf]) == 0).all()  # a masked logit has no gradient, however coarse its dtype


def test_nan_stays_nan(exp2):
    x = np.array([NAN_BITS, 0x7FC00000, 0xFFC00000, 0x7F800001], dtype=np.uint32).view(np.float32)
    assert np.isnan(exp2(x)).all()


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("polynomial", [0, 2, 4, 8])
def test_of_every_eight_exponentials_so_many_are_polynomials_and_all_are_close(
    on_arrays, monkeypatch, pairs, polynomial
):
    taken = []
    exact = vector.exp2_polynomial

    def counted(values, **options):
        taken.append(len(values))
        return exact(values, **options)

    monkeypatch.setattr(vector, "exp2_polynomial", counted)
    x = np.linspace(-60.0, 3.0, 16).astype(np.float32)
    got = vector.exp_shifted([F32(each) for each in x], F32(3.0), pairs=pairs, polynomial=polynomial)
    assert sum(taken) == 2 * polynomial
    expected = np.exp(x.astype(np.float64) - 3.0)
    # The exponent's rounding is relative to its size: up to 64 * log2(e) * 2^-24.
    np.testing.assert_allclose(np.concatenate([each.values for each in got]), expected, rtol=63 * LOG2E * 2.0**-23)
