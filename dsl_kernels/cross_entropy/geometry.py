"""Which columns of a row a block owns: plain integer arithmetic that the kernels trace and the CPU tests call with
ints.

A row of V elements starts anywhere. It is cut on addresses, not on columns: into 16-byte vectors, each moved in one
access, counted from the 128-byte line that the row starts in. With 8 elements a vector, a row that starts 11 elements
after the beginning of a line lies like this:

    vector      0                 1                        2                               last
    element     . . . . . . . . | . . . 0 1 2 3 4 | 5 6 7 8 9 10 11 12 | ... | V-2 V-1 . . . . . .
                                  ^ lead = 11                                          ^ belongs to the row after
                                  belongs to the row before

The vectors are dealt to the blocks of the row's cluster in contiguous slices of whole lines, so that a warp's accesses
fill whole lines. In a slice, the vectors that hold only this row's columns are [whole_begin, whole_end); the row's
first and last vector, where they are shared with a neighbouring row, are its ragged ends and are done element by
element by the lanes of one warp.

The functions work on Python ints and on the DSL's integers alike; minimum and maximum come in as arguments, since the
builtins would compare traced values. No product exceeds 2^31 for any V up to 2^31 - 1 in a slice that holds columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

LINE_VECTORS = 8
"""Vectors of a 128-byte line."""

LANES = 32
"""Lanes at a row's ragged ends: the first half looks after the head vector, the second after the tail. As few as 16
will do for 8 elements a vector."""


class RowSlice(NamedTuple):
    """One block's share of a row; vectors and elements count from the slice's start."""

    first_vector: Any
    """Vectors of the row before this slice."""
    first_column: Any
    """Column of the slice's element 0; negative where the row's first vector starts in the row before."""
    vectors: Any
    """Vectors in the slice; 0 for the last blocks of a short row."""
    whole_begin: Any
    whole_end: Any


def ceil_div(a: Any, b: Any) -> Any:
    """Return a / b rounded up, for a >= 0."""
    return (a + b - 1) // b


def worst_lead(vector_elements: int) -> int:
    """Return the elements between a line's beginning and a row's that make the row touch the most vectors."""
    return LINE_VECTORS * vector_elements - 1


def row_vectors(lead: Any, V: Any, vector_elements: int) -> Any:
    """Return how many vectors a row of V elements reaches over from its first line's beginning; V is divided first, so
    nothing overflows.
    """
    return V // vector_elements + ceil_div(lead + V % vector_elements, vector_elements)


def slice_vectors(V: Any, cluster: Any, vector_elements: int, lead: Any) -> Any:
    """Return how many vectors the longest slice of a row may have, whole lines; `worst_lead` bounds it at any lead."""
    return ceil_div(row_vectors(lead, V, vector_elements), cluster * LINE_VECTORS) * LINE_VECTORS


def row_slice(
    lead: Any,
    V: Any,
    cluster: Any,
    rank: Any,
    vector_elements: int,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> RowSlice:
    """Return the slice of block `rank` of `cluster` in a row that starts `lead` elements after a line's beginning."""
    total = row_vectors(lead, V, vector_elements)
    share = slice_vectors(V, cluster, vector_elements, lead)
    first_vector = rank * share
    vectors = maximum(minimum(share, total - first_vector), 0)
    is_first = 1 - minimum(rank, 1)
    whole_begin = minimum(ceil_div(lead, vector_elements) * is_first, vectors)
    is_last = 1 - minimum(maximum(total - first_vector - vectors, 0), 1)
    has_tail = minimum((lead + V % vector_elements) % vector_elements, 1) * is_last
    whole_end = vectors - has_tail * minimum(vectors - whole_begin, 1)
    return RowSlice(first_vector, first_vector * vector_elements - lead, vectors, whole_begin, whole_end)


def chunk_range(
    part: RowSlice,
    chunk: Any,
    chunk_vectors: int,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> tuple[Any, Any]:
    """Return the whole vectors [begin, end) of a slice that its chunk moves; begin is end where there are none."""
    begin = maximum(chunk * chunk_vectors, part.whole_begin)
    return begin, maximum(minimum((chunk + 1) * chunk_vectors, part.whole_end), begin)


def ragged_element(
    part: RowSlice,
    lead: Any,
    lane: Any,
    vector_elements: int,
    minimum: Callable[[Any, Any], Any] = min,
    lanes: int = LANES,
) -> Any:
    """Return the element of the slice that `lane` of `lanes` looks after where it lies in `ragged_range`."""
    is_tail = minimum(lane // (lanes // 2), 1)
    return lane + lead + (part.whole_end * vector_elements - lanes // 2 - lead) * is_tail


def ragged_range(
    part: RowSlice,
    lead: Any,
    V: Any,
    lane: Any,
    vector_elements: int,
    minimum: Callable[[Any, Any], Any] = min,
    lanes: int = LANES,
) -> tuple[Any, Any]:
    """Return the elements [begin, end) that are the row's own in the ragged vector that `lane`'s half looks after.

    Empty where there is no such vector. A row inside one vector that does not start with it is all head.
    """
    head_end = minimum(lead + minimum(V, vector_elements), part.whole_begin * vector_elements)
    tail_begin = part.whole_end * vector_elements
    tail_elements = (lead + V % vector_elements) % vector_elements
    tail_end = tail_begin + tail_elements * minimum(part.vectors - part.whole_end, 1)
    is_tail = minimum(lane // (lanes // 2), 1)
    return lead + (tail_begin - lead) * is_tail, head_end + (tail_end - head_end) * is_tail
