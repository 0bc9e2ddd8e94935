"""Thread/value layouts: which thread of a block holds which element.

Every pass in whole vectors over a row, or over a block's slice of one, uses `slice_layout`. Its T threads are a block's
for wide rows, the 32 lanes of a warp for narrow ones, the lanes that share a row for those held in registers. The slice
is a row of 16-byte vectors of E elements (E = 8 for fp16 and bf16, 4 for fp32). The threads take one vector each per
step, S steps make a chunk, and chunks follow one another:

    element(thread, value, step, chunk) = ((chunk * S + step) * T + thread) * E + value

    shape  (T, E, S,   chunks)
    stride (E, 1, T*E, T*E*S)

For T = 4, E = 2, S = 2 (elements in order; each cell is thread.value):

    chunk 0, step 0   0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1     elements  0..7
    chunk 0, step 1   0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1     elements  8..15
    chunk 1, step 0   0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1     elements 16..23
    ...

Why: the 32 threads of a warp touch 512 contiguous bytes of device memory in one instruction (whole 128-byte lines)
and, in shared memory, each quarter-warp touches all 32 banks once. Each warp's partial maximum and sum therefore cover
32 vectors out of every T; which warp holds a column depends on nothing but the column's place in its slice, so the
order of every sum is fixed.
"""

import cutlass.cute as cute


def slice_layout(threads: int, vector_elements: int, steps: int, chunks: int) -> cute.Layout:
    """Return the layout (thread, value, step, chunk) -> element of the slice."""
    step_elements = threads * vector_elements
    return cute.make_layout(
        (threads, vector_elements, steps, chunks),
        stride=(vector_elements, 1, step_elements, steps * step_elements),
    )
