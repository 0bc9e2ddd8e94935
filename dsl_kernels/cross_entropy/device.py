"""What the device functions share: labels, ragged elements, copies, loss entries, the order between kernels."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsl_kernels import reduce, vector
from dsl_kernels.cross_entropy import geometry, plan
from dsl_kernels.cross_entropy.spec import ENTRY_ELEMENTS, N_VALID, SUMS_HEAD, VECTOR_BYTES, Spec

NAN = float("nan")
IGNORED, OUT_OF_RANGE, ELSEWHERE = -1, -2, -3
SUM_WARPS = plan.SUM_THREADS // reduce.WARP
LINE_BYTES = geometry.LINE_VECTORS * VECTOR_BYTES


class RowsKernel:
    """What every device function of rows takes from its spec and arch."""

    counts_few = True
    """Whether its warps count labels for themselves where they are few."""

    def __init__(self, spec: Spec, arch: str) -> None:
        self.dtype = cute_dtype(spec)
        self.threads, self.grad = spec.threads, spec.grad
        self.item_bytes = self.dtype.width // 8
        self.vector_elements = spec.vector_elements
        self.warps = spec.threads // reduce.WARP
        self.resident_blocks = plan.resident_blocks(arch, spec)
        self.math = plan.arithmetic(arch, spec.dtype)

    @cute.jit
    def totals_one_by_one(self, elements: cute.Tensor, tiles: Int32, inputs, places):
        """A thread's totals where those of its state are not right: near the largest floats, and where it has nothing.

        Args:
            elements: the row's elements where `places` counts from.
            tiles: tiles of a thread.
            inputs: of the row.
            places: of this thread.
        """
        totals = self.loss.nothing()
        for tile in cutlass.range(tiles, unroll=1):
            for step in cutlass.range(plan.STEPS, unroll=1):
                element = places.base + tile * places.tile_stride + step * places.step_stride
                if element >= places.begin and element < places.end:
                    for e in cutlass.range(self.vector_elements, unroll=1):
                        x = Float32(elements[element + e])
                        single = self.loss.single(x, inputs, places.first_column + element + e)
                        totals = self.loss.combine(totals, single, inputs)
        return totals


def held(number: Any) -> Any:
    """A number that stays in a register: the compiler else works it out again where it is used, from parameters,
    special registers and divisions, which in the inner loops takes more than the register that it saves.
    """
    operation = {Int32: "mov.b32", Int64: "mov.b64", Float32: "mov.f32"}[type(number)]
    return cute.arch.inline_ptx(operation + " {$w0}, {$r0};", write_only_types=[type(number)], read_only_args=[number])


@cute.jit
def read_policy():
    """The L2 cache policy of the logits' reads: evicted last.

    Lines on their way in are not displaced by the gradient's lines on their way out. In or out of place, 8192 x 128256
    bf16 takes 1.002 instead of 0.967 of the copy, 8192 x 32000 0.981 instead of 0.953, and a copy of other buffers that
    follows is not slower; evicted first takes 0.929 and 0.916 (H200, 2026-11-30).

    The gradient's stores have none. Evicted first, or streamed (`st.cs`), they take 0.925 instead of 0.962 at 65536 x
    2048 in place, and the same where rows are wide; evicted last 0.955 instead of 0.971 at 8192 x 32000 out of place
    (H200, 2026-12-01).

    A part of the lines stays in L2 until others are read like this. To give them up as they land (`applypriority`, a
    request for each line) takes 1.5 % at 8192 x 128256, and 17 % without a gradient.
    """
    return cute.arch.inline_ptx("createpolicy.fractional.L2::evict_last.b64 {$w0}, 1.0;", write_only_types=[Int64])


@cute.jit
def load_vector(address: Int64, r: cute.Tensor, policy: Int64):
    """Load 16 bytes of device memory into a register tensor."""
    words = cute.recast_tensor(r, Uint32)
    words[0], words[1], words[2], words[3] = cute.arch.inline_ptx(
        "ld.global.L1::no_allocate.L2::cache_hint.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}], {$r1};",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, policy],
    )


@cute.jit
def count_few(labels: cute.Tensor, request):
    """A warp, in every lane: the valid labels of a `losses.PlainRequest`, where it is the rows that count them."""
    n_valid = Float32(0.0)
    if request.grad_by_mean != 0 and request.counted == 0:
        n_valid = reduce.warp_add(valid_labels(labels, cute.arch.lane_idx(), Int32(reduce.WARP), request.ignore_index))
    return n_valid


@cute.jit
def gradient_scale(sums: cute.Tensor, request, n_valid: Float32):
    """The factor of the whole gradient of a `losses.PlainRequest`; `n_valid` as from `count_few`."""
    scale = Float32(1.0)
    if request.grad_by_incoming != 0:
        scale = request.incoming[()]
    if request.grad_by_mean != 0:
        if request.counted != 0:
            # Orders the count of the labels, which may still run, before its result is read.
            cute.arch.griddepcontrol_wait()
            n_valid = sums[N_VALID]
        scale = scale / cute.arch.fmax(n_valid, Float32(1.0))
    return scale


@cute.jit
def start_beside_neighbours(waits_for_count: Int32):
    """What the rows' kernel does first, launched while the one before it may still run."""
    if waits_for_count == 0:
        # Orders all that a stranger's kernel does, the logits it may still write among it, before what follows. Where
        # the labels are counted this kernel began after the count's blocks had waited for that stranger's end, and the
        # count itself is waited for where its result is wanted.
        cute.arch.griddepcontrol_wait()
    # The kernel that adds the losses may take its place as soon as the last of these blocks has taken its own. Not
    # before the wait: what comes after this kernel may count on the end of what comes before it.
    cute.arch.griddepcontrol_launch_dependents()


def entry(sums: cute.Tensor, index: Int32) -> cute.Tensor:
    """The workspace's entry (ce, z, n_valid, class weights): what a row, or a block of narrow rows, adds."""
    address = Int64(sums.iterator.toint()) + (Int64(index) * ENTRY_ELEMENTS + SUMS_HEAD) * (Float32.width // 8)
    return vectors(Float32, address, cute.AddressSpace.gmem, cute.make_layout(ENTRY_ELEMENTS))


@cute.jit
def write_entry(sums: cute.Tensor, index: Int32, ce: Float32, z: Float32, n_valid: Float32, weight: Float32):
    """One thread: fill an entry."""
    numbers = cute.make_rmem_tensor((ENTRY_ELEMENTS,), Float32)
    numbers[0], numbers[1], numbers[2], numbers[3] = ce, z, n_valid, weight
    cute.autovec_copy(numbers, entry(sums, index))


def cute_dtype(spec: Spec) -> Any:
    """The DSL's type of a spec's logits."""
    return {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}[spec.dtype]


def elements(dtype: Any, address: Int64) -> cute.Tensor:
    """Device memory from `address` on, element by element."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1 << 30))


def vectors(dtype: Any, address: Any, space: Any, layout: cute.Layout) -> cute.Tensor:
    """Memory from `address` on, which lies on a 16-byte boundary."""
    return cute.make_tensor(cute.make_ptr(dtype, address, space, assumed_align=VECTOR_BYTES), layout)


@cute.jit
def row_address(matrix: cute.Tensor, row: Int32):
    """The address of a row; the index is widened before it meets a stride: more than 2^31 elements are common."""
    return Int64((matrix.iterator + Int64(row) * Int64(matrix.stride[0])).toint())


@cute.jit
def row_lead(address: Int64, item_bytes: cutlass.Constexpr):
    """Elements between the beginning of the 128-byte line that a row starts in and the row."""
    return Int32(address & (LINE_BYTES - 1)) // item_bytes


@cute.jit
def target_column(label: Int64, ignore_index: Int64, V: Int32):
    """The target's column, IGNORED or OUT_OF_RANGE; compared as 64-bit numbers, before any narrowing."""
    column = Int32(OUT_OF_RANGE)
    if label >= 0 and label < Int64(V):
        column = Int32(label)
    if label == ignore_index:
        column = Int32(IGNORED)
    return column


@cute.jit
def target_column_of_shard(label: Int64, ignore_index: Int64, V: Int32, vocab_start: Int64, vocab_size: Int64):
    """`target_column` in a shard of V columns from `vocab_start` on, or ELSEWHERE: the target is in another one."""
    column = target_column(label - vocab_start, ignore_index - vocab_start, V)
    if vocab_size != 0 and column == OUT_OF_RANGE and label >= 0 and label < vocab_size:
        column = Int32(ELSEWHERE)
    return column


@cute.jit
def ragged_element(
    part, lead: Int32, V: Int32, vector_elements: cutlass.Constexpr, lanes: cutlass.Constexpr = geometry.LANES
):
    """The element of the slice's ragged ends that this lane, of `lanes` that share a row, looks after, or -1."""
    lane = cute.arch.lane_idx() % lanes
    begin, end = geometry.ragged_range(part, lead, V, lane, vector_elements, cutlass.min, lanes)
    element = geometry.ragged_element(part, lead, lane, vector_elements, cutlass.min, lanes)
    ragged = Int32(-1)
    if element >= begin and element < end:
        ragged = element
    return ragged


@cute.jit
def bulk_copy(smem: Int32, address: Int64, copy_bytes: Int32, barrier: Int32, policy: Int64):
    """One thread: start the copy of `copy_bytes` (perhaps 0) from device to shared memory, and expect it at `barrier`.

    All are numbers of bytes or addresses, the addresses and the size multiples of 16.
    """
    cute.arch.inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[barrier, copy_bytes]
    )
    if copy_bytes > 0:
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
            read_only_args=[smem, address, copy_bytes, barrier, policy],
        )


@cute.jit
def row_numbers(row_max: Float32, row_sum: Float32, column: Int32, scale: Float32, request):
    """(lse, z_factor, factor) of a row."""
    lse = row_max + cute.math.log2(row_sum, fastmath=True) * reduce.LN2
    z_factor = Float32(2.0) * request.z_loss_multiplier * lse
    factor = (Float32(1.0) + z_factor) * scale / row_sum
    if column == OUT_OF_RANGE:
        factor = Float32(NAN)
    return lse, z_factor, factor


@cute.jit
def target_gradient(x: Float32, row_max: Float32, row_sum: Float32, z_factor: Float32, scale: Float32):
    """The gradient of the target's logit x, in fp32."""
    p = reduce.exp_shifted(x, row_max) / row_sum
    return ((p - Float32(1.0)) + z_factor * p) * scale


@cute.jit
def other_gradient(x: Float32, row_max: Float32, factor: Float32, valid):
    """The gradient of a logit x that is not the target's, in fp32."""
    g = Float32(0.0)
    if valid:
        g = reduce.exp_shifted(x, row_max) * factor
    return g


@cute.jit
def accumulate(
    rX: cute.Tensor, m: Float32, even: Float32, odd: Float32, pairs: cutlass.Constexpr, poly: cutlass.Constexpr
):
    """The running maximum and the sums over even and odd places with the elements of a register tensor in them."""
    values = vector.widen(rX)
    m_new = cute.arch.fmax(m, vector.maximum(rX, values))
    rescale = reduce.exp_shifted(m, m_new)
    sums = (even * rescale, odd * rescale)
    even_new, odd_new = vector.add(vector.exp_shifted(values, m_new, pairs=pairs, polynomial=poly), sums, pairs=pairs)
    return m_new, even_new, odd_new


@cute.jit
def gradients(
    rX: cute.Tensor, rG: cute.Tensor, m: Float32, factor: Float32, pairs: cutlass.Constexpr, poly: cutlass.Constexpr
):
    """Fill rG with exp(x - m) * factor of the elements of rX, each rounded once."""
    exps = vector.exp_shifted(vector.widen(rX), m, pairs=pairs, polynomial=poly)
    vector.round_to(vector.scale(exps, factor, pairs=pairs), rG)


@cute.jit
def whole_row(matrix: cute.Tensor, row: Int32, vector_elements: cutlass.Constexpr):
    """A row that is not shared: (lead, part, address of the row's first line)."""
    address = row_address(matrix, row)
    item_bytes = VECTOR_BYTES // vector_elements
    lead = row_lead(address, item_bytes)
    part = geometry.row_slice(lead, matrix.shape[1], 1, 0, vector_elements, cutlass.min, cutlass.max)
    return lead, part, address - Int64(lead * item_bytes)


@cute.jit
def add_warps(sums: cute.Tensor, numbers, partials: cute.Tensor, warps: cutlass.Constexpr):
    """A block's entry: its threads' (ce_sum, z_sum, n_valid, class weights), added in a fixed order.

    partials: sPartials (4, warps) fp32.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    block, _, _ = cute.arch.block_idx()
    for q in cutlass.range_constexpr(ENTRY_ELEMENTS):
        number = reduce.warp_add(numbers[q])
        if lane == 0:
            partials[q, warp] = number
    # Orders the warps' sums before they are read.
    cute.arch.barrier()
    if warp == 0 and lane == 0:
        totals = [Float32(0.0) for _ in range(ENTRY_ELEMENTS)]
        for w in cutlass.range_constexpr(warps):
            totals = [total + partials[q, w] for q, total in enumerate(totals)]
        write_entry(sums, block, *totals)


@cute.jit
def sum_cluster(count: Int32):
    """The blocks that add `count` numbers."""
    return 1 + (plan.SUM_CLUSTER - 1) * cutlass.min(count // plan.SUM_CLUSTER_ENTRIES, 1)


def launch_sum(kernel: Any, cluster: Int32, stream: Any) -> None:
    """Launch a kernel that counts labels or adds entries in the `sum_cluster` blocks."""
    kernel.launch(
        grid=[cluster, 1, 1],
        block=[plan.SUM_THREADS, 1, 1],
        cluster=[cluster, 1, 1],
        min_blocks_per_mp=1,  # else the compiler takes 32 registers, too few for the loads in flight together
        stream=stream,
        use_pdl=True,
    )


def sum_places(n: int) -> tuple[cute.Tensor, Any]:
    """sPartials and the mbarrier of `reduce.cluster_add` for n sums."""
    smem = cutlass.memory.SmemAllocator()
    layout = cute.make_layout((n, SUM_WARPS * plan.SUM_CLUSTER))
    return smem.allocate_tensor(Float32, layout, byte_alignment=16), smem.allocate_array(Int64)


@cute.jit
def load_labels(labels: cute.Tensor, first: Int32, stride: Int32, otherwise: Int64):
    """The labels of rows first, first + stride, ..., in flight together; `otherwise` past the last one."""
    loaded = cute.make_rmem_tensor((plan.SUM_LABELS,), Int64)
    loaded.fill(otherwise)
    address = Int64((labels.iterator + Int64(first) * Int64(labels.stride[0])).toint())
    step_bytes = held(Int64(stride) * Int64(labels.stride[0]) * 8)
    for step in cutlass.range_constexpr(plan.SUM_LABELS):
        if first + step * stride < labels.shape[0]:
            loaded[step] = elements(Int64, address)[0]
        address = address + step_bytes
    return loaded


@cute.jit
def valid_labels(labels: cute.Tensor, first: Int32, stride: Int32, ignore_index: Int64):
    """A thread: how many labels of rows first, first + stride, ... are valid."""
    n_valid = Float32(0.0)
    for row in cutlass.range(first, labels.shape[0], stride * plan.SUM_LABELS, unroll=1):
        loaded = load_labels(labels, row, stride, ignore_index)
        for step in cutlass.range_constexpr(plan.SUM_LABELS):
            if loaded[step] != ignore_index:
                n_valid = n_valid + Float32(1.0)
    return n_valid


@cute.jit
def load_entries(sums: cute.Tensor, first: Int32, stride: Int32, count: Int32):
    """(ENTRY_ELEMENTS, SUM_ENTRIES): entries first, first + stride, ... of `count`, likewise; 0 past the last."""
    loaded = cute.make_rmem_tensor((ENTRY_ELEMENTS, plan.SUM_ENTRIES), Float32)
    loaded.fill(0.0)
    for step in cutlass.range_constexpr(plan.SUM_ENTRIES):
        if first + step * stride < count:
            cute.autovec_copy(entry(sums, first + step * stride), loaded[None, step])
    return loaded
