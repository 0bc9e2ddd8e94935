"""Greyhound's kernels in NVIDIA's CuTe Python DSL. Never imports torch or greyhound.

Glossary of tensor names in kernels (first letters, then the tensor):

=========  ===================================================================
mX mG      whole tensor in device memory
gX gG      the row or slice of it that threads work on, element by element
tXgX tXgG  one thread's part of that, in vectors, under a layout of `layouts`
sX tXsX    the same row or slice of X in shared memory, likewise
rX rG      registers of one thread; rEnd, rEnds: elements of ragged ends
sTotals    what warps exchange of a row, (max, sum) first, in shared memory; sPartials sums there
=========  ===================================================================

with X for logits, G for the gradient of the logits. `B` is rows, `V` columns, everywhere.
"""
