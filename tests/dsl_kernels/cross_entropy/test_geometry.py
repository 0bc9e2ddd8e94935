"""The slicing of a row: every column is owned once, nothing else is touched, and no 32-bit number overflows."""

import itertools

import numpy as np
import pytest

from dsl_kernels.cross_entropy import geometry, plan
from dsl_kernels.cross_entropy.spec import ARCHS, DTYPE_NAMES

VECTORS = (4, 8)
"""Elements of a 16-byte vector: fp32; fp16 and bf16."""

CLUSTERS = range(1, plan.MAX_CLUSTER + 1)
LANES = 32


def slices(lead, V, cluster, vector_elements):
    """Return the slice of every block, over arrays of `lead` and `V`."""
    return [
        geometry.row_slice(lead, V, cluster, rank, vector_elements, np.minimum, np.maximum) for rank in range(cluster)
    ]


def every_row(cluster, vector_elements):
    """Return all leads and all V up to a few vectors for each block, as two flat arrays."""
    V = np.arange(1, (3 * cluster + 3) * vector_elements)
    lead = np.arange(vector_elements)
    return np.repeat(lead, V.size), np.tile(V, lead.size)


@pytest.mark.parametrize("vector_elements", VECTORS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_column_of_every_row_is_owned_exactly_once(cluster, vector_elements):
    lead, V = every_row(cluster, vector_elements)
    rows = np.arange(V.size)
    margin = 2 * vector_elements  # columns of the neighbouring rows, on either side
    owners = np.zeros((V.size, V.max() + 2 * margin), dtype=np.int32)
    for part in slices(lead, V, cluster, vector_elements):
        # Whole vectors: one more from their begin, one fewer from their end; added up below.
        changes = np.zeros_like(owners)
        begin = part.first_column + part.whole_begin * vector_elements
        end = part.first_column + part.whole_end * vector_elements
        has_whole = part.whole_end > part.whole_begin
        np.add.at(changes, (rows[has_whole], begin[has_whole] + margin), 1)
        np.add.at(changes, (rows[has_whole], end[has_whole] + margin), -1)
        owners += changes.cumsum(axis=1)
        for lane in range(LANES):
            first, last = geometry.ragged_range(part, lead, V, lane, vector_elements, np.minimum)
            element = geometry.ragged_element(part, lane, vector_elements, np.minimum)
            mine = (element >= first) & (element < last)
            np.add.at(owners, (rows[mine], (part.first_column + element)[mine] + margin), 1)
    column = np.arange(owners.shape[1]) - margin
    expected = (column >= 0) & (column < V[:, None])
    wrong = (owners != expected).any(axis=1)
    assert not wrong.any(), (lead[wrong][:5], V[wrong][:5])


@pytest.mark.parametrize("vector_elements", VECTORS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_slices_follow_one_another_and_cover_the_vectors_that_the_row_touches(cluster, vector_elements):
    lead, V = every_row(cluster, vector_elements)
    total = (lead + V + vector_elements - 1) // vector_elements
    assert (geometry.row_vectors(lead, V, vector_elements) == total).all()
    end = np.zeros_like(V)
    for part in slices(lead, V, cluster, vector_elements):
        assert ((part.first_vector == end) | (part.vectors == 0)).all()
        assert (part.vectors >= 0).all()
        longest = geometry.slice_vectors(V, cluster, vector_elements, lead)
        assert (part.vectors <= longest).all()
        assert (longest <= geometry.slice_vectors(V, cluster, vector_elements, vector_elements - 1)).all()
        assert (part.first_column == part.first_vector * vector_elements - lead).all()
        assert ((part.whole_begin >= 0) & (part.whole_begin <= part.whole_end) & (part.whole_end <= part.vectors)).all()
        end = end + part.vectors
    assert (end == total).all()


@pytest.mark.parametrize("vector_elements", VECTORS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_ragged_lanes_stay_inside_the_slice_and_one_lane_has_one_element(cluster, vector_elements):
    lead, V = every_row(cluster, vector_elements)
    for part in slices(lead, V, cluster, vector_elements):
        seen = np.zeros(V.size, dtype=np.int64)
        for lane in range(LANES):
            first, last = geometry.ragged_range(part, lead, V, lane, vector_elements, np.minimum)
            element = geometry.ragged_element(part, lane, vector_elements, np.minimum)
            mine = (element >= first) & (element < last)
            assert (element[mine] >= 0).all()
            assert (element[mine] < part.vectors[mine] * vector_elements).all()
            # Never in a vector that the block does as a whole.
            vector = element // vector_elements
            assert not (mine & (vector >= part.whole_begin) & (vector < part.whole_end)).any()
            seen += mine
        # All of them are in the first and the last vector.
        assert (seen <= 2 * vector_elements).all()


def owned(lead, V, cluster, vector_elements):
    """Return the [begin, end) column ranges that the blocks own, whole vectors and ragged ends, for plain ints."""
    ranges = []
    for rank in range(cluster):
        part = geometry.row_slice(lead, V, cluster, rank, vector_elements)
        at = part.first_column
        ranges.append((at + part.whole_begin * vector_elements, at + part.whole_end * vector_elements))
        for lane in range(LANES):
            first, last = geometry.ragged_range(part, lead, V, lane, vector_elements)
            element = geometry.ragged_element(part, lane, vector_elements)
            if first <= element < last:
                ranges.append((at + element, at + element + 1))
    return sorted(r for r in ranges if r[0] < r[1])


@pytest.mark.parametrize("vector_elements", VECTORS)
@pytest.mark.parametrize("cluster", [1, 2, 3, 6, 8, 16])
def test_large_rows_are_covered_without_gap_or_overlap(cluster, vector_elements):
    for V in (1000, 4097, 32000, 50257, 65537, 128256, 2**20 + 1, 2**28 - 3, 2**31 - 2, 2**31 - 1):
        for lead in range(vector_elements):
            ranges = owned(lead, V, cluster, vector_elements)
            assert ranges[0][0] == 0
            assert ranges[-1][1] == V
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)), (V, lead)


class Int32(int):
    """An integer that refuses what a 32-bit register cannot do, or does otherwise than Python."""

    def _checked(self, value):
        if not -(2**31) <= value < 2**31:
            raise OverflowError(value)
        return Int32(value)

    def __add__(self, other):
        return self._checked(int(self) + int(other))

    __radd__ = __add__

    def __sub__(self, other):
        return self._checked(int(self) - int(other))

    def __rsub__(self, other):
        return self._checked(int(other) - int(self))

    def __mul__(self, other):
        return self._checked(int(self) * int(other))

    __rmul__ = __mul__

    def __neg__(self):
        return self._checked(-int(self))

    def __floordiv__(self, other):
        return self._divided(other, int(self) // int(other))

    def __mod__(self, other):
        return self._divided(other, int(self) % int(other))

    def _divided(self, other, value):
        if self < 0 or other <= 0:
            raise ArithmeticError(f"{self} by {other}: rounded towards zero on the GPU, down in Python")
        return self._checked(value)


def test_the_checked_integer_notices_what_it_should():
    largest = Int32(2**31 - 1)
    for wrong in (lambda: largest + 1, lambda: 1 + largest, lambda: largest * 2, lambda: -2 - largest):
        with pytest.raises(OverflowError):
            wrong()
    with pytest.raises(ArithmeticError):
        Int32(-1) // 2
    assert type(Int32(7) // 2 + 1 - 3) is Int32


def plans(V):
    """Yield the distinct (vector elements, cluster) of the launches that serve rows of V elements."""
    found = set()
    for arch in ARCHS:
        for dtype in DTYPE_NAMES:
            spec, launch = plan.select_fused(arch, dtype, V, True)
            found.add((spec.vector_elements, launch.cluster))
    return sorted(found)


@pytest.mark.parametrize("V", [2**31 - 1, 2**31 - 2, 2**31 - 7, 2**31 - 8, 2**31 - 9, 2**30, 2**30 + 1, 1, 2, 128256])
def test_no_number_leaves_32_bits_in_any_slice_of_the_launches_that_serve_a_row(V):
    for vector_elements, cluster in plans(V):
        for lead in range(vector_elements):
            L, columns, blocks = Int32(lead), Int32(V), Int32(cluster)
            geometry.slice_vectors(columns, blocks, vector_elements, L)
            covered = 0
            for rank in range(cluster):
                part = geometry.row_slice(L, columns, blocks, Int32(rank), vector_elements)
                # What the kernel makes of a slice: its elements, one by one.
                elements = part.vectors * vector_elements
                assert type(elements) is Int32
                covered += part.whole_end * vector_elements - part.whole_begin * vector_elements
                for lane in range(LANES):
                    first, last = geometry.ragged_range(part, L, columns, Int32(lane), vector_elements)
                    element = geometry.ragged_element(part, Int32(lane), vector_elements)
                    covered += int(first <= element < last)
            assert covered == V


def test_a_division_rounds_up():
    assert [geometry.ceil_div(a, 4) for a in range(10)] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_the_docstrings_example_is_right():
    part = geometry.row_slice(3, 100, 1, 0, 8)
    assert part.first_column == -3
    assert (part.whole_begin, part.whole_end, part.vectors) == (
        1,
        12,
        13,
    )  # 3 + 100 elements: 12 vectors and 7 elements
    head = [geometry.ragged_element(part, lane, 8) - 3 for lane in range(16) if 3 <= lane < 8]
    assert head == [0, 1, 2, 3, 4]
