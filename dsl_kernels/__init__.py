"""Greyhound's kernels in NVIDIA's CuTe Python DSL. Never imports torch or greyhound.

Glossary of tensor names in kernels (first letters, then the tensor):

=========  ===================================================================
mX mG      whole tensor in device memory
gG         the part of it that one block works on, element by element
tXgG       one thread's part of gG, in vectors, under the layout of `layouts`
tXsX       one thread's part of the block's slice of X, likewise; in shared
           memory, or in device memory where the row is streamed
xs         the same slice, element by element
rX rG      registers of one thread
sPairs     (max, sum) pairs in shared memory, sPartials sums there
=========  ===================================================================

with X for logits, G for the gradient of the logits. `B` is rows, `V` columns, everywhere.
"""
