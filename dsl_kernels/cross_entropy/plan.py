"""The launch numbers of each kernel, and which spec serves a call. Standard library only.

A plan of the fused kernel is a block size (compiled in), a cluster size, the bytes of shared memory and how many rows a
cluster takes one after the other (run-time numbers). Each block holds 1/cluster of the row, to the vector, so no plan wastes
memory on a slice that does not fill it.
"""

from typing import NamedTuple

from dsl_kernels.cross_entropy import geometry
from dsl_kernels.cross_entropy.spec import ARCHS, DTYPE_NAMES, ITEM_BYTES, MAX_BLOCKS, MAX_COLUMNS, VECTOR_BYTES, Spec

STEPS = 2
"""16-byte vectors a thread takes per chunk, in flight together. 1 and 4 are correct too: both 1 to 5 points of the copy slower
at 8192 x 128256 and 4096 x 200064, bf16, H200, 2026-11-30."""

MAX_CHUNKS = 32
"""mbarriers of a block that say a chunk has landed; the lanes of one warp start the first copies, so no more than 32."""

MAX_CLUSTER = 16
"""Largest cluster of sm_90 and sm_100, above the 8 that every GPU grants."""

SMEM_LIMIT_BYTES = {"sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "sm_103a": 227 * 1024, "sm_120a": 99 * 1024}
"""Shared memory one block may ask for (CUDA programming guide, table of compute capabilities)."""

CLUSTER_LIMIT = {"sm_90a": 16, "sm_100a": 16, "sm_103a": 16, "sm_120a": 8}
"""Largest cluster of an arch; 16 needs the launcher's leave, which the DSL gives."""


class Blocks(NamedTuple):
    """A block size, a cluster size and the rows a cluster takes in turn."""

    threads: int
    cluster: int
    rows: int


SHAPES = (
    (32 * 1024, Blocks(128, 1, 4)),
    (66 * 1024, Blocks(128, 2, 1)),
    (132 * 1024, Blocks(128, 3, 3)),
    (300 * 1024, Blocks(192, 6, 2)),
    (450 * 1024, Blocks(256, 6, 3)),
    (640 * 1024, Blocks(256, 8, 3)),
    (1 << 40, Blocks(256, 16, 2)),
)
"""(largest row in bytes, shape), narrowest first. H200, bf16, 2026-11-30, share of the copy (every other shape is correct too):

    16384 x 8192     128 x 1 x 4  0.85    1 row a cluster 0.77, 96 threads 0.85
    8192 x 32000     128 x 2 x 1  0.944   2 rows 0.940, 256 x 1 x 2 0.933, 96 x 2 x 2 0.921
    8192 x 50257     128 x 3 x 3  0.910   256 x 2 x 2 0.909, 128 x 2 x 2 0.906, 256 x 1 x 2 0.898
    8192 x 128256    192 x 6 x 2  0.958   128 x 6 x 3 0.952, 128 x 8 x 2 0.951, 256 x 4 x 2 0.949, 192 x 6 x 1 0.920
    4096 x 200064    256 x 6 x 3  0.940   256 x 8 x 3 0.928, 128 x 8 x 4 0.923, 256 x 4 x 4 0.917, 256 x 6 x 6 0.927
"""

TURNS_MIN_BLOCKS = 40
"""A cluster takes several rows only where each multiprocessor still gets this many blocks in all: the hardware's scheduler evens
out fast and slow multiprocessors, a fixed share of rows does not (one wave of persistent clusters: 0.85 at 8192 x 128256)."""

STREAM = Blocks(512, 8, 1)
"""Rows wider than a cluster holds are read twice by this shape; a cluster of 8 is what every GPU grants."""

SUM_THREADS = 1024
SUM_CLUSTER = 8
SUM_CLUSTER_ROWS = 4096
"""From this many rows on the row losses are added by `SUM_CLUSTER` blocks instead of one."""

SCALE_THREADS = 256
SCALE_BLOCKS_PER_MULTIPROCESSOR = 8

BARRIER_BYTES = 8 * (2 * MAX_CHUNKS + 2)
"""Two mbarriers a chunk (landed, released) and one for each buffer of pairs."""


class FusedLaunch(NamedTuple):
    """Run-time numbers of the fused kernel."""

    cluster: int
    """Blocks that share a row."""
    rows: int
    """Rows a cluster takes in turn where there are many."""
    smem_bytes: int
    """Dynamic shared memory of a block."""

    def clusters(self, B: int, multiprocessors: int) -> int:
        """Return how many clusters share B rows.

        Raises:
            ValueError: the rows are more than a grid holds.
        """
        rows = max(1, min(self.rows, B * self.cluster // (TURNS_MIN_BLOCKS * multiprocessors)))
        clusters = -(-B // rows)
        if clusters * self.cluster > MAX_BLOCKS:
            raise ValueError(f"logits: expected at most {MAX_BLOCKS // self.cluster} rows of this width, got {B}")
        return clusters


class ScaleLaunch(NamedTuple):
    """Run-time numbers of the scaling kernel."""

    blocks: int
    """Blocks of the grid; each strides over the tensor."""


def pairs_bytes(threads: int) -> int:
    """Return the size of one buffer of (max, sum) pairs, one pair for every warp of the largest cluster."""
    return 2 * 4 * (threads // 32) * MAX_CLUSTER


def slice_offset_bytes(threads: int) -> int:
    """Return where in a block's shared memory the row's slice starts: after the mbarriers and two buffers of pairs."""
    return -(-(BARRIER_BYTES + 2 * pairs_bytes(threads)) // 128) * 128


def fused_launch(spec: Spec, V: int, cluster: int, rows: int) -> FusedLaunch:
    """Return the numbers for rows of V elements at any alignment, dealt to `cluster` blocks."""
    slice_vectors = geometry.slice_vectors(V, cluster, spec.vector_elements)
    slice_bytes = 0 if spec.streamed else slice_vectors * VECTOR_BYTES
    return FusedLaunch(cluster, rows, slice_offset_bytes(spec.threads) + slice_bytes)


def fits(arch: str, spec: Spec, launch: FusedLaunch) -> bool:
    """Return whether a block's shared memory and mbarriers hold its slice and the arch grants the cluster."""
    slice_bytes = launch.smem_bytes - slice_offset_bytes(spec.threads)
    return (
        launch.cluster <= CLUSTER_LIMIT[arch]
        and launch.smem_bytes <= SMEM_LIMIT_BYTES[arch]
        and slice_bytes <= MAX_CHUNKS * STEPS * spec.threads * VECTOR_BYTES
    )


def select_fused(arch: str, dtype: str, V: int, grad: bool) -> tuple[Spec, FusedLaunch]:
    """Return the spec and launch numbers that serve rows of V elements.

    Raises:
        ValueError: no kernel serves this arch, dtype or size.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch: expected one of {', '.join(ARCHS)}, got {arch}")
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPE_NAMES)}, got {dtype}")
    if not 1 <= V <= MAX_COLUMNS:
        raise ValueError(f"V: expected 1 to {MAX_COLUMNS}, got {V}")
    for row_bytes, blocks in SHAPES:
        if V * ITEM_BYTES[dtype] <= row_bytes:
            spec = Spec("fused", dtype, blocks.threads, grad)
            launch = fused_launch(spec, V, min(blocks.cluster, CLUSTER_LIMIT[arch]), blocks.rows)
            if fits(arch, spec, launch):
                return spec, launch
    spec = Spec("fused", dtype, STREAM.threads, grad, streamed=True)
    return spec, fused_launch(spec, V, STREAM.cluster, STREAM.rows)


def select_scale(dtype: str, multiprocessors: int) -> tuple[Spec, ScaleLaunch]:
    """Return the spec and launch numbers that multiply a gradient of `dtype` by a device scalar."""
    return Spec("scale", dtype, SCALE_THREADS), ScaleLaunch(SCALE_BLOCKS_PER_MULTIPROCESSOR * multiprocessors)


SPECS = tuple(
    Spec("fused", dtype, threads, grad, streamed)
    for dtype in DTYPE_NAMES
    for grad in (True, False)
    for threads, streamed in [*((t, False) for t in sorted({s.threads for _, s in SHAPES})), (STREAM.threads, True)]
) + tuple(Spec("scale", dtype, SCALE_THREADS) for dtype in DTYPE_NAMES)
"""Every kernel that exists, for every arch."""
