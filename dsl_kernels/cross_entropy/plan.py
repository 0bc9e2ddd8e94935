"""The launch numbers of each kernel, and which spec serves a call. Standard library only.

A plan of the fused kernel is a block size (compiled in), a cluster size and the bytes of shared memory (both run-time
numbers): each block holds 1/cluster of the row, to the vector, so no plan wastes memory on a slice that does not fill it.
"""

from typing import NamedTuple

from dsl_kernels.cross_entropy import geometry
from dsl_kernels.cross_entropy.spec import ARCHS, DTYPE_NAMES, ITEM_BYTES, MAX_COLUMNS, VECTOR_BYTES, Spec

STEPS = 2
"""16-byte vectors a thread takes per chunk, in flight together; 1 and 4 are correct too."""

MAX_CHUNKS = 32
"""mbarriers of a block; the lanes of one warp arm them and start the copies, so no more than 32."""

MAX_CLUSTER = 16
"""Largest cluster of sm_90 and sm_100, above the 8 that every GPU grants."""

SMEM_LIMIT_BYTES = {"sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "sm_103a": 227 * 1024, "sm_120a": 99 * 1024}
"""Shared memory one block may ask for (CUDA programming guide, table of compute capabilities)."""

CLUSTER_LIMIT = {"sm_90a": 16, "sm_100a": 16, "sm_103a": 16, "sm_120a": 8}

SLICE_TARGET_BYTES = {128: 4 * 1024, 256: 32 * 1024, 512: 64 * 1024}
"""Threads of a block -> the largest slice it is given while a larger cluster is to be had."""

STREAM_THREADS = 512
STREAM_CLUSTER = 8
"""Rows wider than a cluster holds are read twice by this many blocks; 8 is what every GPU grants."""

SUM_THREADS = 1024
SUM_CLUSTER = 8
SUM_CLUSTER_ROWS = 4096
"""From this many rows on the row losses are added by `SUM_CLUSTER` blocks instead of one."""

SCALE_THREADS = 256
SCALE_BLOCKS_PER_MULTIPROCESSOR = 8

BARRIER_BYTES = 8 * (MAX_CHUNKS + 1)


class FusedLaunch(NamedTuple):
    """Run-time numbers of the fused kernel."""

    cluster: int
    """Blocks that share a row."""
    smem_bytes: int
    """Dynamic shared memory of a block."""


class ScaleLaunch(NamedTuple):
    """Run-time numbers of the scaling kernel."""

    blocks: int
    """Blocks of the grid; each strides over the tensor."""


def slice_offset_bytes(threads: int) -> int:
    """Return where in a block's shared memory the row's slice starts: after the mbarriers and the (max, sum) pairs."""
    pairs_bytes = 2 * 4 * (threads // 32) * MAX_CLUSTER
    return geometry.ceil_div(BARRIER_BYTES + pairs_bytes, 128) * 128


def fused_launch(spec: Spec, V: int, cluster: int) -> FusedLaunch:
    """Return the numbers for rows of V elements at any alignment, dealt to `cluster` blocks."""
    if spec.streamed:
        return FusedLaunch(cluster, slice_offset_bytes(spec.threads))
    vectors = geometry.ceil_div(
        geometry.row_vectors(spec.vector_elements - 1, V, spec.vector_elements), cluster
    )
    return FusedLaunch(cluster, slice_offset_bytes(spec.threads) + vectors * VECTOR_BYTES)


def fits(arch: str, spec: Spec, launch: FusedLaunch) -> bool:
    """Return whether a block's shared memory and mbarriers hold its slice."""
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
    row_bytes = V * ITEM_BYTES[dtype]
    for threads, target_bytes in SLICE_TARGET_BYTES.items():
        spec = Spec("fused", dtype, threads, grad)
        cluster = 1
        while cluster * target_bytes < row_bytes and cluster < CLUSTER_LIMIT[arch]:
            cluster *= 2
        if cluster * target_bytes >= row_bytes and (cluster == 1 or threads == max(SLICE_TARGET_BYTES)):
            return spec, fused_launch(spec, V, cluster)
    launch = fused_launch(spec, V, CLUSTER_LIMIT[arch])
    if fits(arch, spec, launch):
        return spec, launch
    spec = Spec("fused", dtype, STREAM_THREADS, grad, streamed=True)
    return spec, fused_launch(spec, V, STREAM_CLUSTER)


def select_scale(dtype: str, multiprocessors: int) -> tuple[Spec, ScaleLaunch]:
    """Return the spec and launch numbers that multiply a gradient of `dtype` by a device scalar."""
    return Spec("scale", dtype, SCALE_THREADS), ScaleLaunch(SCALE_BLOCKS_PER_MULTIPROCESSOR * multiprocessors)


SPECS = tuple(
    Spec("fused", dtype, threads, grad, streamed)
    for dtype in DTYPE_NAMES
    for grad in (True, False)
    for threads, streamed in [*((t, False) for t in SLICE_TARGET_BYTES), (STREAM_THREADS, True)]
) + tuple(Spec("scale", dtype, SCALE_THREADS) for dtype in DTYPE_NAMES)
"""Every kernel that exists, for every arch."""
