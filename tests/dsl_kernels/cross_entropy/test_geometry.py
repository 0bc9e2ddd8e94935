"""The slicing of a row: every column is owned once, nothing else is touched, and no 32-bit number overflows."""

import itertools
import re

import numpy as np
import pytest

from dsl_kernels.cross_entropy import geometry, plan
from dsl_kernels.cross_entropy.spec import ARCHS, DTYPE_NAMES, ITEM_BYTES

VECTORS = (4, 8)
"""Elements of a 16-byte vector: fp32; fp16 and bf16."""

CLUSTERS = range(1, plan.MAX_CLUSTER + 1)
LANES = sorted({geometry.LANES, *(spec.lanes for spec in plan.SPECS)})
"""Lanes that look after a row's ragged ends: a warp, and where several rows share one, fewer."""

CHUNK_VECTORS = plan.STEPS * plan.THREADS


def every_row(cluster, vector_elements, lines=3):
    """Return all leads and all V up to a few lines more than the cluster has blocks, as two flat arrays."""
    line = geometry.LINE_VECTORS * vector_elements
    V = np.arange(1, (cluster + lines) * line)
    lead = np.arange(line)
    return np.repeat(lead, V.size), np.tile(V, lead.size)


def slices(lead, V, cluster, vector_elements):
    """Return the slice of every block, over arrays of `lead` and `V`."""
    return [
        geometry.row_slice(lead, V, cluster, rank, vector_elements, np.minimum, np.maximum) for rank in range(cluster)
    ]


def ragged_ends(part, lead, V, vector_elements, lanes):
    """Return the elements [begin, end) of the head and of the tail that lanes look after, each by one lane."""
    ends = []
    for half in (range(lanes // 2), range(lanes // 2, lanes)):
        owned = 0
        for lane in half:
            begin, end = geometry.ragged_range(part, lead, V, lane, vector_elements, np.minimum, lanes)
            element = geometry.ragged_element(part, lead, lane, vector_elements, np.minimum, lanes)
            if lane == half[0]:
                first, range_of_half = element, (begin, end)
            # One element a lane, one range a half: no two lanes meet.
            assert (element == first + (lane - half[0])).all()
            assert (begin == range_of_half[0]).all()
            assert (end == range_of_half[1]).all()
            owned = owned + ((element >= begin) & (element < end))
        begin, end = range_of_half
        assert (owned == np.maximum(end - begin, 0)).all()  # and none is left over
        ends.append((begin, np.maximum(begin, end)))
    return ends


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("vector_elements", VECTORS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_column_of_every_row_is_owned_exactly_once(cluster, vector_elements, lanes):
    lead, V = every_row(cluster, vector_elements)
    covered = np.zeros_like(V)  # columns 0..covered - 1 have an owner
    for part in slices(lead, V, cluster, vector_elements):
        head, tail = ragged_ends(part, lead, V, vector_elements, lanes)
        whole = part.whole_begin * vector_elements, part.whole_end * vector_elements
        for begin, end in (head, whole, tail):
            nonempty = end > begin
            assert (begin >= 0)[nonempty].all()
            assert (end <= part.vectors * vector_elements)[nonempty].all()
            assert (part.first_column + begin == covered)[nonempty].all()
            covered = np.where(nonempty, part.first_column + end, covered)
    wrong = covered != V
    assert not wrong.any(), (lead[wrong][:5], V[wrong][:5])


@pytest.mark.parametrize("vector_elements", VECTORS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_slices_follow_one_another_in_whole_lines_and_cover_the_vectors_that_the_row_touches(cluster, vector_elements):
    lead, V = every_row(cluster, vector_elements)
    total = (lead + V + vector_elements - 1) // vector_elements
    assert (geometry.row_vectors(lead, V, vector_elements) == total).all()
    longest = geometry.slice_vectors(V, cluster, vector_elements, lead)
    assert (longest % geometry.LINE_VECTORS == 0).all()
    assert (longest >= 1).all()
    worst = geometry.worst_lead(vector_elements)
    assert (longest <= geometry.slice_vectors(V, cluster, vector_elements, worst)).all()
    end = np.zeros_like(V)
    for part in slices(lead, V, cluster, vector_elements):
        assert (part.first_vector % geometry.LINE_VECTORS == 0).all()
        assert ((part.first_vector == end) | (part.vectors == 0)).all()
        assert ((part.vectors == longest) | (end + part.vectors == total)).all()  # all but the last are full
        assert ((part.vectors >= 0) & (part.vectors <= longest)).all()
        assert (part.first_column == part.first_vector * vector_elements - lead).all()
        assert ((part.whole_begin >= 0) & (part.whole_begin <= part.whole_end) & (part.whole_end <= part.vectors)).all()
        end = end + part.vectors
    assert (end == total).all()


@pytest.mark.parametrize("vector_elements", VECTORS)
def test_the_worst_lead_is_the_last_before_the_next_line_and_no_lead_makes_a_longer_slice(vector_elements):
    line = geometry.LINE_VECTORS * vector_elements
    worst = geometry.worst_lead(vector_elements)
    assert worst == line - 1
    for V, cluster in itertools.product((1, line - 1, line, line + 1, 1000, 50257), CLUSTERS):
        longest = [geometry.slice_vectors(V, cluster, vector_elements, lead) for lead in range(line)]
        assert longest[worst] == max(longest)
    assert geometry.row_vectors(worst, 2, vector_elements) > geometry.row_vectors(worst - 1, 2, vector_elements)


@pytest.mark.parametrize("chunk_vectors", [1, 2, 3, 8, 24])  # less, as many and more vectors than a line has
@pytest.mark.parametrize("vector_elements", VECTORS)
@pytest.mark.parametrize("cluster", [1, 2, 3, 6, 8, 16])
def test_the_chunks_of_a_slice_are_its_whole_vectors_once_and_nothing_else(cluster, vector_elements, chunk_vectors):
    lead, V = every_row(cluster, vector_elements)
    # As many chunks as the longest slice at any lead has: where rows differ in alignment they all go through as many.
    chunks = geometry.ceil_div(
        geometry.slice_vectors(int(V.max()), cluster, vector_elements, geometry.worst_lead(vector_elements)),
        chunk_vectors,
    )
    for part in slices(lead, V, cluster, vector_elements):
        covered = part.whole_begin
        for chunk in range(chunks):
            begin, end = geometry.chunk_range(part, chunk, chunk_vectors, np.minimum, np.maximum)
            assert ((end >= begin) & (end - begin <= chunk_vectors)).all()
            nonempty = end > begin
            assert (begin == covered)[nonempty].all()
            # Where the chunk's place in shared memory is.
            assert ((begin >= chunk * chunk_vectors) & (end <= (chunk + 1) * chunk_vectors))[nonempty].all()
            covered = np.where(nonempty, end, covered)
        assert (covered == part.whole_end).all()


@pytest.mark.parametrize("vector_elements", VECTORS)
@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
def test_as_many_chunks_as_the_longest_slice_at_the_rows_own_lead_needs_are_enough(cluster, vector_elements):
    for V in (1, 1000, 4097, 32000, 50257, 128256):
        for lead in range(geometry.LINE_VECTORS * vector_elements):
            chunks = geometry.ceil_div(geometry.slice_vectors(V, cluster, vector_elements, lead), CHUNK_VECTORS)
            for rank in range(cluster):
                part = geometry.row_slice(lead, V, cluster, rank, vector_elements)
                moved = [geometry.chunk_range(part, chunk, CHUNK_VECTORS) for chunk in range(chunks)]
                assert sum(end - begin for begin, end in moved) == part.whole_end - part.whole_begin, (V, lead, rank)


def owned(lead, V, cluster, vector_elements):
    """Return the [begin, end) column ranges that the blocks own, whole vectors and ragged ends, for plain ints."""
    ranges = []
    for rank in range(cluster):
        part = geometry.row_slice(lead, V, cluster, rank, vector_elements)
        at = part.first_column
        ranges.append((at + part.whole_begin * vector_elements, at + part.whole_end * vector_elements))
        for lane in range(geometry.LANES):
            first, last = geometry.ragged_range(part, lead, V, lane, vector_elements)
            element = geometry.ragged_element(part, lead, lane, vector_elements)
            if first <= element < last:
                ranges.append((at + element, at + element + 1))
    return sorted(r for r in ranges if r[0] < r[1])


@pytest.mark.parametrize("vector_elements", VECTORS)
@pytest.mark.parametrize("cluster", [1, 2, 3, 6, 8, 16])
def test_large_rows_are_covered_without_gap_or_overlap(cluster, vector_elements):
    for V in (1000, 4097, 32000, 50257, 65537, 128256, 2**20 + 1, 2**28 - 3, 2**31 - 2, 2**31 - 1):
        for lead in range(geometry.LINE_VECTORS * vector_elements):
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
    """Yield the distinct (vector elements, blocks that share a row, lanes) of the launches that serve V elements."""
    found = set()
    for arch, dtype, grad in itertools.product(ARCHS, DTYPE_NAMES, (True, False)):
        spec, launch = plan.select_fused(arch, dtype, V, grad, 1, 132)
        found.add((spec.vector_elements, getattr(launch, "cluster", 1), spec.lanes))
    return sorted(found)


NEAR_2_31 = [2**31 - d for d in (1, 2, 7, 8, 9, 63, 64, 65)]  # on both sides of a vector and of a line


@pytest.mark.parametrize("V", [*NEAR_2_31, 2**30, 2**30 + 1, 1, 2, 128256])
def test_no_number_leaves_32_bits_in_any_slice_of_the_launches_that_serve_a_row(V):
    for vector_elements, cluster, lanes in plans(V):
        worst = geometry.worst_lead(vector_elements)
        for lead in sorted({*range(vector_elements + 1), worst - 1, worst}):
            L, columns, blocks = Int32(lead), Int32(V), Int32(cluster)
            longest = geometry.slice_vectors(columns, blocks, vector_elements, Int32(worst))
            chunks = geometry.ceil_div(longest, CHUNK_VECTORS)
            covered = 0
            for rank in range(cluster):
                part = geometry.row_slice(L, columns, blocks, Int32(rank), vector_elements)
                # What the kernels make of a slice: its elements one by one, a step past the last, its chunks.
                elements = part.vectors * vector_elements
                assert type(elements) is Int32
                assert type(part.whole_end * vector_elements + plan.THREADS) is Int32
                for chunk in (0, int(chunks) - 1):
                    begin, end = geometry.chunk_range(part, Int32(chunk), CHUNK_VECTORS)
                    assert begin <= end
                covered += int(part.whole_end - part.whole_begin) * vector_elements
                for lane in range(lanes):
                    first, last = geometry.ragged_range(part, L, columns, Int32(lane), vector_elements, min, lanes)
                    element = geometry.ragged_element(part, L, Int32(lane), vector_elements, min, lanes)
                    covered += int(first <= element < last)
            assert covered == V


def test_a_division_rounds_up():
    assert [geometry.ceil_div(a, 4) for a in range(10)] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_line_is_128_bytes(dtype):
    vector_elements = plan.select_fused(ARCHS[0], dtype, 1, True, 1, 1)[0].vector_elements
    assert geometry.LINE_VECTORS * vector_elements * ITEM_BYTES[dtype] == 128


def test_the_lanes_of_each_half_are_as_many_as_a_ragged_end_can_have_elements():
    assert min(LANES) // 2 >= max(VECTORS) - 1


def test_the_docstrings_picture_is_what_the_functions_give():
    lead = int(re.search(r"\^ lead = (\d+)", geometry.__doc__)[1])
    (cells,) = re.findall(r"^ +element +(.+)$", geometry.__doc__, re.MULTILINE)
    drawn = [cell.split() for cell in cells.split("|")]
    last = drawn[-1]
    assert drawn[-2] == ["..."]
    E = len(drawn[0])
    own = sum(text != "." for text in last)
    V = next(V for V in range(90, 90 + E) if (lead + V) % E == own)  # any whose last vector is filled as drawn
    part = geometry.row_slice(lead, V, 1, 0, E)
    assert part.first_column == -lead

    def label(vector, place):
        column = vector * E + place - lead
        return str(column) if 0 <= column < V else "."

    first = drawn[:-2]
    assert first == [[label(vector, place) for place in range(E)] for vector in range(len(first))]
    columns = [part.vectors * E - E + place - lead for place in range(E)]
    assert last == [f"V-{V - column}" if column < V else "." for column in columns]
    # The drawn vectors that are shared with a neighbouring row are the ragged ones.
    shared = [vector for vector, cell in enumerate(first) if "." in cell and set(cell) != {"."}]
    assert part.whole_begin == shared[0] + 1
    assert part.whole_end == part.vectors - 1
    taken = sorted(
        geometry.ragged_element(part, lead, lane, E) - lead
        for lane in range(geometry.LANES)
        if (bounds := geometry.ragged_range(part, lead, V, lane, E))[0]
        <= geometry.ragged_element(part, lead, lane, E)
        < bounds[1]
    )
    assert taken == [*range(E * 2 - lead), *(V - own + i for i in range(own))]
