"""Greyhound's kernels in NVIDIA's CuTe Python DSL. Never imports torch or greyhound.

Glossary of tensor names in kernels (first letters, then the tensor):

=======  =====================================================================
mX       whole tensor in device memory
gX       the part of it that one block works on
sX       shared memory
rX       registers of one thread
tXgX     one thread's part of gX under the thread/value layout of `layouts`
tXsX     one thread's part of sX, likewise
=======  =====================================================================

with X for logits, G for the gradient of the logits. `B` is rows, `V` columns, everywhere.
"""
