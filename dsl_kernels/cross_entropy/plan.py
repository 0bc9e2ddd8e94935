"""The launch numbers of each kernel, and which spec serves a call. Standard library only.

A plan of the fused kernel is a block size (compiled in), a cluster size, the bytes of shared memory and how many rows a
cluster takes one after the other (run-time numbers). Each block holds 1/cluster of the row, to the vector, so no plan
wastes memory on a slice that does not fill it.
"""

from typing import NamedTuple

from dsl_kernels.cross_entropy import geometry
from dsl_kernels.cross_entropy.spec import ARCHS, DTYPE_NAMES, ITEM_BYTES, MAX_BLOCKS, MAX_COLUMNS, VECTOR_BYTES, Spec

STEPS = 2
"""16-byte vectors a thread takes per chunk, in flight together. 1 and 4 are correct too: both 1 to 5 points of the
copy slower at 8192 x 128256 and 4096 x 200064, bf16, H200, 2026-11-30."""

MAX_CHUNKS = 32
"""mbarriers of a block that say a chunk has landed; the lanes of one warp start the first copies, so no more than
32."""

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
    (10 << 10, (Blocks(96, 1, 8),)),
    (20 << 10, (Blocks(96, 1, 4),)),
    (40 << 10, (Blocks(128, 1, 2),)),
    (72 << 10, (Blocks(128, 2, 2),)),
    (112 << 10, (Blocks(160, 2, 1), Blocks(128, 4, 3))),
    (150 << 10, (Blocks(128, 4, 2),)),
    (220 << 10, (Blocks(128, 7, 3),)),
    (280 << 10, (Blocks(128, 8, 2), Blocks(128, 6, 3))),
    (340 << 10, (Blocks(128, 8, 3), Blocks(128, 7, 3))),
    (450 << 10, (Blocks(256, 6, 3),)),
    (640 << 10, (Blocks(256, 8, 3),)),
    (1 << 40, (Blocks(256, 16, 3),)),
)
"""(largest row in bytes, blocks to choose from), narrowest first; the blocks whose last chunk is fullest are taken.

Share of the copy, in place, bf16 where not said, H200, 2026-11-30; threads x cluster x rows, the one in use first.
Every other choice is correct too; 192 threads are left out because on sm_100a they spill at the registers that 5 of
their blocks may take:

    32768 x 4096         96 x 1 x 8   0.763    96 x 1 x 1   0.633   128 x 1 x 8  0.658
    16384 x 8192         96 x 1 x 4   0.871   128 x 1 x 4   0.849    64 x 1 x 4  0.816
    16384 x 16384       128 x 1 x 2   0.944   160 x 1 x 2   0.942    96 x 2 x 4  0.929
    8192 x 32000        128 x 2 x 2   0.950   224 x 1 x 2   0.941    96 x 2 x 2  0.935
    8192 x 50257        160 x 2 x 1   0.918   128 x 4 x 3   0.914   256 x 2 x 2  0.909
    8192 x 65536        128 x 4 x 2   0.948   224 x 2 x 2   0.944   192 x 2 x 2  0.938
    8192 x 65536 fp16   128 x 4 x 2   0.962   192 x 4 x 2   0.963   128 x 3 x 3  0.920
    8192 x 100352       128 x 7 x 3   0.953   192 x 4 x 3   0.947   256 x 4 x 2  0.944
    8192 x 128256       128 x 8 x 2   0.955   192 x 6 x 2   0.958   128 x 6 x 3  0.954
    8192 x 65536 fp32   128 x 8 x 2   0.959   192 x 8 x 2   0.960   192 x 6 x 2  0.915
    4096 x 151936       128 x 8 x 3   0.935   128 x 7 x 3   0.927   192 x 8 x 3  0.924
    4096 x 200064       256 x 6 x 3   0.941   224 x 8 x 2   0.938   192 x 8 x 3  0.933
    4096 x 262144       256 x 8 x 3   0.930    96 x 16 x 3  0.903   256 x 8 x 2  0.908
    2048 x 600001       256 x 16 x 3  0.761   256 x 15 x 3  0.744   320 x 16 x 3 0.734
"""

RESIDENT_BLOCKS = {96: 8, 128: 6, 160: 5, 256: 4}
"""Threads -> blocks that a multiprocessor's registers must hold; the compiler keeps to it. As many as the shared memory
of the shapes above allows; without it the compiler guesses, and spilled on sm_100a and sm_103a."""

STREAM_RESIDENT_BLOCKS = 3
"""The same for `STREAM`, whose loads are ordinary ones and wait in registers."""

MULTIPROCESSOR_REGISTERS = 65536

TURNS_MIN_BLOCKS = 40
"""A cluster takes several rows only where each multiprocessor still gets this many blocks in all: the hardware's
scheduler evens out fast and slow multiprocessors, a fixed share of rows does not (one wave of persistent clusters:
0.85 at 8192 x 128256, H200, 2026-11-30). Any number is correct."""

STREAM = Blocks(256, 8, 1)
"""Rows wider than a cluster holds are read twice by this shape; a cluster of 8 is what every GPU grants. Not tuned: 512
threads spilled a register on sm_90a, and such rows (above 1.8 M bf16 columns) were not timed."""

SUM_THREADS = 1024
SUM_CLUSTER = 8
SUM_CLUSTER_ROWS = 4096
"""From this many rows on the row losses are added by `SUM_CLUSTER` blocks instead of one: 4.4 us for 8192 rows on an
H200, 2026-11-30; one block of 1024 threads took 7 us."""

SCALE_THREADS = 256
SCALE_BLOCKS_PER_MULTIPROCESSOR = 8
"""A grid that fills a multiprocessor's 2048 threads once and strides over the gradient. Not tuned."""

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
            most = MAX_BLOCKS // self.cluster * rows
            raise ValueError(f"logits: expected at most {most} rows of this width, got {B}")
        return clusters


def resident_blocks(spec: Spec) -> int:
    """Return how many blocks of the fused kernel a multiprocessor's registers must hold."""
    return STREAM_RESIDENT_BLOCKS if spec.streamed else RESIDENT_BLOCKS[spec.threads]


def max_registers(spec: Spec) -> int:
    """Return the registers a thread of the fused kernel may take: computing threads and one warp that copies."""
    return MULTIPROCESSOR_REGISTERS // (resident_blocks(spec) * (spec.threads + 32)) // 8 * 8


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
    slice_vectors = geometry.slice_vectors(V, cluster, spec.vector_elements, spec.vector_elements - 1)
    slice_bytes = 0 if spec.streamed else slice_vectors * VECTOR_BYTES
    return FusedLaunch(cluster, rows, slice_offset_bytes(spec.threads) + slice_bytes)


def chunk_waste(blocks: Blocks, row_bytes: int) -> float:
    """Return the vectors of all chunks of a block over those of its slice: above 1 by what the last chunk lacks."""
    vectors = -(-row_bytes // (VECTOR_BYTES * blocks.cluster))
    chunk_vectors = STEPS * blocks.threads
    return -(-vectors // chunk_vectors) * chunk_vectors / vectors


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
    for row_bytes, choice in SHAPES:
        if V * ITEM_BYTES[dtype] <= row_bytes:
            for blocks in sorted(choice, key=lambda each: chunk_waste(each, V * ITEM_BYTES[dtype])):
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
    for threads, streamed in [
        *((t, False) for t in sorted({b.threads for _, choice in SHAPES for b in choice})),
        (STREAM.threads, True),
    ]
) + tuple(Spec("scale", dtype, SCALE_THREADS) for dtype in DTYPE_NAMES)
"""Every kernel that exists, for every arch."""
