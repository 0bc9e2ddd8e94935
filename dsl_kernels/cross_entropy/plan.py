"""The launch numbers of each kernel, and which spec serves a call. Standard library only.

What is compiled in is a block size and, for rows held in registers, how many vectors a lane holds. All else, cluster
size, shared memory, rows per cluster, is a run-time number that follows from the shape, so no new shape compiles.

    row              kernel   unit of work
    to 1024 x 16 bit held     16 or 32 lanes a row, in registers
    to 16 KiB        narrow   a warp a row, in shared memory; with a gradient to 15 KiB, and not where rows are few
    to 2 MiB         wide     a cluster of 1 to 16 blocks a row, in shared memory
    wider            wide     the same, the row read twice (streamed)

With options no row is held, those to 8 KiB are narrow, and wider ones wide; streamed rows have the kernel for any. That
is for fewer kernels, each of which exists for every kind of options; it was not tuned.

Shares of the copy below are medians of in-place bf16 calls on random data, where not said otherwise: H200, 2026-11-30
and, of fewer than 8192 rows, 2026-12-01. Calls of less than 20 us vary by 3 %. The timer then left in L2 a part of what
calls before had read (`bench.flush`): to 256 MB such calls have since measured up to 2.5 us faster by the plans here.
Every other number is correct too, where nothing else is said.
"""

from typing import NamedTuple

from dsl_kernels.cross_entropy import geometry
from dsl_kernels.cross_entropy.spec import (
    ARCHS,
    DTYPE_NAMES,
    ITEM_BYTES,
    MAX_BLOCKS,
    MAX_COLUMNS,
    OPTIONS,
    VECTOR_BYTES,
    Spec,
)

WARP = 32
THREADS = 128
"""Of a block of wide rows, which adds one warp that copies. 8192 x 128256, before the read policy: 128 threads
0.962, 96 and 160 within half a point, 256 0.93; with 512 threads phases stop overlapping and it is 0.79."""

STEPS = 2
"""16-byte vectors a thread takes per chunk of a wide row, and a lane of a narrow one, in flight together.
8192 x 128256: 1 0.926, 2 0.962, 4 0.858."""

CHUNK_BYTES = STEPS * THREADS * VECTOR_BYTES
"""Of a wide row, what a block's threads take together."""

MAX_CHUNKS = 32
"""mbarriers of a block that say a chunk has landed; the lanes of one warp start the first copies, so no more than
32."""

MAX_CLUSTER = 16
"""Largest cluster of sm_90 and sm_100, above the 8 that every GPU grants."""

SMEM_LIMIT_BYTES = {"sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "sm_103a": 227 * 1024, "sm_120a": 99 * 1024}
"""Shared memory one block may ask for (CUDA programming guide, table of compute capabilities)."""

BLOCK_RESERVED_BYTES = 1024
"""Shared memory that the system takes of each block."""

CLUSTER_LIMIT = {"sm_90a": 16, "sm_100a": 16, "sm_103a": 16, "sm_120a": 8}
"""Largest cluster of an arch; 16 needs the launcher's leave, which the DSL gives."""

POLYNOMIAL = {"sm_90a": 0, "sm_100a": 4, "sm_103a": 4, "sm_120a": 0}
"""Of every 8 exponentials of 16-bit logits, those computed on the FMA pipe instead of the special-function unit; even.

On the H200 it loses: 8192 x 128256, 0 0.962, 1 0.960, 2 0.909; 8192 x 50257, 0 0.953, 1 0.900, 2 0.832. On a B200 it is
worked out, not measured: at the copy's rate, 2.0e12 elements a second over 148 multiprocessors at 1.9 GHz, an element
may take 18 issued instructions and 1.1 special-function operations. Without it the two passes take 10.6 and 2.06,
which is 0.53 of the copy; with 4 of 8 16.1 and 1.06."""

HELD = ((2, 16, 128, 8), (4, 16, 128, 6), (3, 32, 256, 4), (4, 32, 256, 4))
"""(vectors a lane holds, lanes that share a row, threads, blocks that a multiprocessor's registers must hold),
narrowest first. 262144 x 512: 4 x 16 with 128 threads and 6 blocks 0.925, with 256 threads 0.891, with 8 blocks, which
spill, 0.853, 2 x 32 0.848; 131072 x 1000: 4 x 32 with 256 threads 0.925, 128 0.905, a warp a row through shared memory
0.86."""

HELD_TURNS = 2
"""Rows a group of lanes takes in turn where there are many: 262144 x 512, 1 0.897, 2 0.925, 4 0.907; 131072 x 1000, 1
0.894, 2 0.925, 4 0.871."""

NARROW = ((8 << 10, 4), (16 << 10, 2))
"""(longest row in bytes, warps of a block), a row a warp. 65536 x 2048: 2, 4 or 8 warps 0.953, 0.962, 0.959; 16384 x
8192: 0.951, 0.930 and, wide, 0.941; 16384 x 12288: narrow 0.949, wide 0.956. A warp that takes several rows is slower:
32768 x 4096, 1 row 0.957, 2 0.927."""

NARROW_GRAD_BYTES = 15 << 10
"""Longest narrow row that has a gradient. A row of 16 KiB is four full chunks of a block: 16384, 4096 and 2048 x 8192
narrow 0.942, 0.797, 0.682, wide 0.944, 0.814, 0.712; x 7680: narrow 0.941, 0.806, 0.733, wide 0.909, 0.789, 0.731.
Without a gradient narrow rows are the faster ones: 16384 x 8192 narrow 0.86, wide 0.81 of the read rate."""

NARROW_MIN_ROWS = 2
"""With a gradient rows are narrow only where there are more than this for each multiprocessor: the latency of a row is
then all there is, and a block's is shorter. 64, 256, 384 and 512 x 4096: narrow 0.467, 0.607, 0.671, 0.659, wide 0.528,
0.672, 0.655, 0.648; 256 x 6144 0.587 and 0.707."""

NARROW_RESIDENT_WARPS = 32
"""Warps that a multiprocessor's registers must hold. 65536 x 2048: 32 0.938, 48 0.847."""

NARROW_PARTIAL_BYTES = 64
"""The warps' partial sums at the beginning of a block's shared memory: an entry of each of at most 4 warps."""

RESIDENT_BLOCKS = 6
"""Blocks of wide rows that a multiprocessor's registers must hold, as many as its shared memory has room for; without
it the compiler guesses, and spilled on sm_100a and sm_103a. 8192 x 50257: 6 0.945, 8 0.843."""

OPTIONS_RESIDENT_BLOCKS = {
    "rows": (6, 6),
    "smoothing": (6, 4),
    "entropy": (6, 5),
    "entropy_backward": (6, 5),
    "softcap": (5, 4),
    "any": (4, 3),
    "streamed": (3, 3),
}
"""(on sm_90a, elsewhere) no more of wide and narrow rows with options, or of streamed ones: with one more they spill.
8192 x 128256 with a softcap: 4 1.85, 5 1.72 times as long as without options."""

SLICE_BYTES = 32 << 10
"""A cluster has as many blocks as make slices of at most this, up to `EVEN_CLUSTER`. 8192 x 65536: 3, 4 or 5 blocks
0.988, 0.994, 0.992; 8192 and 2048 x 50257: 3, 4 or 5 0.982, 0.986, 0.980 and 0.889, 0.893, 0.888; 1024 x 100352: 6, 7
or 8 0.917, 0.929, 0.915."""

FEW_BLOCKS, FEW_SLICE_BYTES = 16, 24 << 10
"""Where clusters as of many rows are fewer blocks for each multiprocessor than this, slices of rows that are shared are
at most so long: more blocks fill the last wave better, and one row's copies overlap another's gradient. 256 x 50257: 3,
4, 5, 8 blocks 0.685, 0.745, 0.789, 0.740; 512 x 50257: 3, 4, 5 0.742, 0.761, 0.810; 512 x 32000: 2, 3, 4 0.662, 0.731,
0.704; 256 x 100352: 6, 8 0.719, 0.773; 256 x 32000: 2, 3, 4 0.750, 0.732, 0.777."""

EVEN_CLUSTER, EVEN_CLUSTER_BYTES = 8, 340 << 10
"""Up to this row a cluster has 8 blocks at most: two fit a GPC's 16 multiprocessors, where 9 to 13 leave some idle.
4096 x 151936: 7, 8 or 10 blocks 0.989, 0.993, 0.976; 8192 x 128256: 8 0.999, 9 0.994, 10 0.920."""

LARGE_CLUSTERS = ((462 << 10, 14), (1 << 62, 16))
"""(longest row, blocks of a cluster) above that. 4096 x 200064: 8, 10 or 14 blocks 0.992, 0.979, 1.007; 4096 x 262144:
15 or 16 blocks 0.971, 1.001; 2048 x 600001: 16 0.853."""

FILL_BLOCKS = 1.9
"""Where there are few rows a cluster has twice as many blocks, again and again, until each multiprocessor has so many
or a block has but a chunk. 256 x 4096, 12288, 16384: 1 or 2 blocks 0.672 and 0.603, 0.694 and 0.635, 0.674 and 0.650;
64 x 16384: 4 or 8 0.604, 0.595. Without a gradient 64 x 16384 takes 8.7 us with 4, 9.3 us with 8 blocks, 256 x 16384
10.0 us with 1, 10.9 us with 2."""

TURNS = 2
LARGE_TURNS = 3
"""Rows that a cluster takes in turn, and one above `EVEN_CLUSTER` blocks. The hardware's scheduler evens out fast and
slow multiprocessors, a fixed share of rows does not: one wave of persistent clusters gave 0.85 at 8192 x 128256, but a
row's copies overlap the gradient of the row before. 8192 x 128256: 1 0.990, 2 0.999, 3 0.992; 256 x 128256: 1 0.73, 2
0.778, and one wave that shares all rows 0.778."""

TAIL_WAVES, LOSS_TAIL_WAVES = 0.5, 1.0
"""The clusters that come last take one row each, so that all end at about the same time: as many as the GPU holds at
once, times this. 16384 x 8192: 0 0.909, 1 0.918 (before the read policy); 0.5 and 1.5 differ by less than the noise."""

LOSS_PLACES = 4
LOSS_TURNS = 4
LOSS_SLICE_BYTES = 72 << 10
"""Without a gradient a slice streams through this many chunks of shared memory; a cluster takes this many rows, and has
one block up to this row, else two. Share of the read rate, 16384 x 16384: 4 places and 4 rows 0.942, 8 and 4 0.930, 8
and 1 0.912; 8192 x 50257: one block 0.984, two 0.990."""

STREAM_CLUSTER = 8
STREAM_PLACES = 8
"""Rows wider than a cluster holds are read twice, through as many chunks of shared memory; a cluster of 8 is what every
GPU grants. Such rows (above 2 MiB, 128 KiB a block, which is what `MAX_CHUNKS` hold) were not tuned."""

SUM_THREADS = 1024
SUM_ENTRIES, SUM_LABELS = 4, 8
"""Entries, or labels, that a thread has in flight together. One at a time, forward and backward took 150.4 us instead
of 143.2 at 131072 x 1000, 140.9 instead of 137.1 at 65536 x 2048. 16 labels are as fast as 8."""
FEW_LABELS = WARP * SUM_LABELS
"""Labels that each warp of wide and held rows counts for itself, all in flight together, instead of a kernel before."""
SUM_CLUSTER = 8
SUM_CLUSTER_ENTRIES = 1024
"""From this many entries on they are added by `SUM_CLUSTER` blocks instead of one; from 4097 on is as fast. Rows whose
losses are added take 1.4 us longer than rows alone, with 8192 entries and with few."""

SCALE_THREADS = 256
SCALE_STEPS = 4
SCALE_BLOCK_BYTES = 256 << 10
SCALE_MIN_BLOCKS = 8
"""A block for so many bytes, and at least so many for each multiprocessor. More blocks are dealt more evenly: 8192 x
128256 in place, 8 a multiprocessor 0.936, 64 0.953, 256 0.974; but a factor of 1, which moves nothing, then takes 4.7,
10 and 27 us."""

COMBINE_THREADS = 128
"""Rows of a block, where what shards tell is combined. Not tuned: it takes microseconds."""

BARRIER_BYTES = 8 * (2 * MAX_CHUNKS + 2)
"""Two mbarriers a chunk (landed, released) and one for each buffer of totals."""


class WideLaunch(NamedTuple):
    """Run-time numbers of wide rows."""

    cluster: int
    """Blocks that share a row."""
    turns: int
    """Rows a cluster takes in turn where there are many, but for the clusters that come last."""
    smem_bytes: int
    """Dynamic shared memory of a block."""
    resident: int
    """Blocks that a multiprocessor holds."""
    tail_waves: float
    """As `TAIL_WAVES`."""

    def numbers(self, B: int, multiprocessors: int) -> tuple[int, int, int, int, int, int]:
        """Return (cluster, clusters, long clusters, rows of those, rows of the others, bytes) for B rows.

        Raises:
            ValueError: the rows are more than a grid holds.
        """
        at_once = max(1, multiprocessors * self.resident // self.cluster)
        takes_turns = self.turns > 1 and at_once < B
        tail = int(self.tail_waves * at_once)
        long = max(0, B - tail) // self.turns if takes_turns else 0
        clusters = long + B - long * self.turns
        if clusters * self.cluster > MAX_BLOCKS:
            most = tail + (MAX_BLOCKS // self.cluster - tail - self.turns + 1) * self.turns
            raise ValueError(f"logits: expected at most {most} rows of this width, got {B}")
        return self.cluster, clusters, long, self.turns, 1, self.smem_bytes


class NarrowLaunch(NamedTuple):
    """Run-time numbers of narrow rows: a row a warp."""

    warps: int
    """Rows of a block."""
    slot_bytes: int
    """Shared memory of a row."""
    smem_bytes: int
    """Dynamic shared memory of a block."""

    def numbers(self, B: int, multiprocessors: int) -> tuple[int, int, int, int, int, int]:
        """Return (slots of a warp, blocks, bytes of a slot, rows of a warp, 0, bytes) for B rows."""
        return 1, -(-B // self.warps), self.slot_bytes, 1, 0, self.smem_bytes


class HeldLaunch(NamedTuple):
    """Run-time numbers of rows held in registers."""

    block_rows: int
    """Rows of a block at once."""
    resident: int
    """Blocks that a multiprocessor holds."""

    def numbers(self, B: int, multiprocessors: int) -> tuple[int, int, int, int, int, int]:
        """Return (turns, blocks, 0, 0, 0, 0) for B rows: a block takes `block_rows` rows in each turn."""
        turns = HELD_TURNS if HELD_TURNS * self.block_rows * self.resident * multiprocessors <= B else 1
        return turns, -(-B // (self.block_rows * turns)), 0, 0, 0, 0


Launch = WideLaunch | NarrowLaunch | HeldLaunch


class ScaleLaunch(NamedTuple):
    """Run-time numbers of the scaling kernel."""

    blocks: int
    """Blocks of the grid; each strides over the tensor."""


class Arithmetic(NamedTuple):
    """How the inner loops compute."""

    packed_fp32: bool
    """Whether two fp32 numbers are added or multiplied in one instruction."""
    polynomial: int
    """As `POLYNOMIAL`."""


def arithmetic(arch: str, dtype: str) -> Arithmetic:
    """Return how the inner loops compute on an arch."""
    return Arithmetic(arch in ("sm_100a", "sm_103a"), POLYNOMIAL[arch] if ITEM_BYTES[dtype] == 2 else 0)


def resident_blocks(arch: str, spec: Spec) -> int:
    """Return how many blocks of a fused kernel a multiprocessor's registers must hold."""
    if spec.held:
        blocks = next(blocks for held, lanes, _, blocks in HELD if held == spec.held and lanes == spec.lanes)
        # Pairs of fp32 numbers want adjacent registers: with as many blocks it spills there.
        return blocks * 3 // 4 if arithmetic(arch, spec.dtype).packed_fp32 else blocks
    blocks = NARROW_RESIDENT_WARPS * WARP // spec.threads if spec.narrow else RESIDENT_BLOCKS
    if not spec.options:
        return blocks
    most = OPTIONS_RESIDENT_BLOCKS["streamed" if spec.streamed else spec.options]
    return min(blocks, most[arch != "sm_90a"])


def total_words(spec: Spec) -> int:
    """Return how many numbers of a row the warps of a cluster exchange: (max, sum), and one for each piece that adds
    something up.
    """
    return 2 if spec.pieces is None else 2 + spec.pieces.smoothing + spec.pieces.entropy


def totals_bytes(words: int, threads: int) -> int:
    """Return the size of one buffer of totals, `words` numbers for every warp of the largest cluster."""
    return words * 4 * (threads // WARP) * MAX_CLUSTER


def slice_offset_bytes(spec: Spec) -> int:
    """Return where in a block's shared memory the places of chunks start: after the mbarriers and two buffers of
    totals.
    """
    return -(-(BARRIER_BYTES + 2 * totals_bytes(total_words(spec), spec.threads)) // 128) * 128


def narrow_slots_offset(warps: int, slots: int) -> int:
    """Return where in a block's shared memory the slots of narrow rows start."""
    return (NARROW_PARTIAL_BYTES + warps * slots * 8 + 127) // 128 * 128


def wide_launch(arch: str, spec: Spec, V: int, cluster: int, turns: int, places: int = 0) -> WideLaunch:
    """Return the numbers for rows of V elements at any alignment, dealt to `cluster` blocks.

    `places` is how many chunks a block's shared memory holds where it does not keep its slice.
    """
    vectors = places * STEPS * spec.threads
    if spec.grad and not spec.streamed:
        vectors = geometry.slice_vectors(V, cluster, spec.vector_elements, geometry.worst_lead(spec.vector_elements))
    smem_bytes = slice_offset_bytes(spec) + vectors * VECTOR_BYTES
    resident = min(resident_blocks(arch, spec), SMEM_LIMIT_BYTES[arch] // (smem_bytes + BLOCK_RESERVED_BYTES))
    return WideLaunch(cluster, turns, smem_bytes, max(resident, 1), TAIL_WAVES if spec.grad else LOSS_TAIL_WAVES)


def narrow_launch(spec: Spec, V: int) -> NarrowLaunch:
    """Return the numbers for rows of V elements, one to a warp."""
    warps = spec.threads // WARP
    slot_bytes = max(V // spec.vector_elements, 1) * VECTOR_BYTES
    return NarrowLaunch(warps, slot_bytes, narrow_slots_offset(warps, 1) + warps * slot_bytes)


def held_launch(arch: str, spec: Spec) -> HeldLaunch:
    """Return the numbers for rows that `spec.lanes` lanes hold."""
    return HeldLaunch(spec.threads // spec.lanes, resident_blocks(arch, spec))


def fits(arch: str, spec: Spec, launch: Launch) -> bool:
    """Return whether a block's shared memory and mbarriers hold what they must and the arch grants the cluster."""
    if isinstance(launch, HeldLaunch):
        return True
    if isinstance(launch, NarrowLaunch):
        return launch.smem_bytes <= SMEM_LIMIT_BYTES[arch]
    slice_bytes = launch.smem_bytes - slice_offset_bytes(spec)
    return (
        launch.cluster <= CLUSTER_LIMIT[arch]
        and launch.smem_bytes <= SMEM_LIMIT_BYTES[arch]
        and slice_bytes <= MAX_CHUNKS * STEPS * spec.threads * VECTOR_BYTES
    )


def narrow_warps(row_bytes: int, grad: bool, B: int, multiprocessors: int, options: str) -> int:
    """Return the warps of a block of narrow rows, 0 where rows are wide."""
    many = NARROW_MIN_ROWS * multiprocessors < B
    if grad and not options and (row_bytes > NARROW_GRAD_BYTES or not many):
        return 0
    return next((warps for longest, warps in (NARROW[:1] if options else NARROW) if row_bytes <= longest), 0)


def even_cluster(row_bytes: int, slice_bytes: int) -> int:
    """Return the blocks that make slices of at most `slice_bytes`, up to `EVEN_CLUSTER`."""
    return min(-(-row_bytes // slice_bytes), EVEN_CLUSTER)


def cluster_for(row_bytes: int, grad: bool) -> int:
    """Return the blocks of a cluster where there are many rows."""
    if not grad:
        return 1 if row_bytes <= LOSS_SLICE_BYTES else 2
    if row_bytes <= EVEN_CLUSTER_BYTES:
        return even_cluster(row_bytes, SLICE_BYTES)
    return next(cluster for longest, cluster in LARGE_CLUSTERS if row_bytes <= longest)


def select_fused(
    arch: str, dtype: str, V: int, grad: bool, B: int, multiprocessors: int, options: str = ""
) -> tuple[Spec, Launch]:
    """Return the spec and launch numbers that serve B rows of V elements, `options` as for `Spec`.

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
    if not options:
        for held, lanes, threads, _ in HELD:
            if row_bytes <= held * lanes * VECTOR_BYTES:
                spec = Spec("fused", dtype, threads, grad, held=held, lanes=lanes)
                return spec, held_launch(arch, spec)
    warps = narrow_warps(row_bytes, grad, B, multiprocessors, options)
    if warps:
        spec = Spec("fused", dtype, warps * WARP, grad, narrow=True, options=options)
        return spec, narrow_launch(spec, V)
    spec = Spec("fused", dtype, THREADS, grad, options=options)
    cluster = of_many = cluster_for(row_bytes, grad)
    most = min(MAX_CLUSTER, row_bytes // CHUNK_BYTES)
    while 2 * cluster <= most and B * cluster < FILL_BLOCKS * multiprocessors:
        cluster *= 2
    if grad and 1 < of_many < EVEN_CLUSTER and B * of_many < FEW_BLOCKS * multiprocessors:
        cluster = max(cluster, even_cluster(row_bytes, FEW_SLICE_BYTES))
    cluster = min(cluster, CLUSTER_LIMIT[arch])
    turns = LARGE_TURNS if cluster > EVEN_CLUSTER else TURNS
    launch = wide_launch(arch, spec, V, cluster, turns if grad else LOSS_TURNS, LOSS_PLACES)
    if not grad:
        # A cluster that takes more rows than there are waves is the last to end.
        waves = B * cluster // (launch.resident * multiprocessors)
        launch = launch._replace(turns=min(LOSS_TURNS, max(waves, 1)))
    if fits(arch, spec, launch):
        return spec, launch
    if not grad:
        raise ValueError(f"no plan without a gradient fits {arch}")  # it needs less than any arch has
    spec = Spec("fused", dtype, THREADS, streamed=True, options="any" if options else "")
    return spec, wide_launch(arch, spec, V, STREAM_CLUSTER, 1, STREAM_PLACES)


def select_scale(dtype: str, elements: int, multiprocessors: int) -> tuple[Spec, ScaleLaunch]:
    """Return the spec and launch numbers that multiply a gradient of `elements` by a device scalar."""
    blocks = max(elements * ITEM_BYTES[dtype] // SCALE_BLOCK_BYTES, SCALE_MIN_BLOCKS * multiprocessors)
    return Spec("scale", dtype, SCALE_THREADS), ScaleLaunch(min(blocks, MAX_BLOCKS))


COMBINE = Spec("combine", "float32", COMBINE_THREADS)
"""Whatever the dtype of the logits."""

SPECS = (
    COMBINE,
    *(
        spec
        for dtype in DTYPE_NAMES
        for spec in (
            *(Spec("fused", dtype, t, grad, held=h, lanes=lanes) for grad in (True, False) for h, lanes, t, _ in HELD),
            *(Spec("fused", dtype, w * WARP, grad, narrow=True) for grad in (True, False) for _, w in NARROW),
            *(Spec("fused", dtype, THREADS, grad) for grad in (True, False)),
            Spec("fused", dtype, THREADS, streamed=True),
            Spec("scale", dtype, SCALE_THREADS),
            *(
                Spec("fused", dtype, THREADS, grad, narrow=narrow, options=options)
                for options in OPTIONS
                if options
                for grad in (True, False)
                if grad or options != "entropy_backward"
                for narrow in (True, False)
            ),
            Spec("fused", dtype, THREADS, streamed=True, options="any"),
        )
    ),
)
"""Every kernel that exists, for every arch."""
