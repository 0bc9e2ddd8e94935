"""What a row's loss is made of, in the pieces that wide and narrow rows put together.

A loss goes through a row as follows; the geometry calls it, and knows of its numbers only how many there are.

    early           what `scale`, the factor of all gradients, takes of few labels, before a warp's first row, or ()
    peek, inputs    what is known of the row beforehand, loaded early
    begin           a thread's state before its first element
    accumulate      ... after some more vectors               single      ... of one element
    totals          the numbers that threads, warps and blocks combine: `combine`, `warp_combine`
    row             what pass two and the results need, from the totals of the row
    gradients       of vectors, of one element (`other_gradient`), of the target (`target_gradient`)

`PlainLoss` is the loss without options. `OptionsLoss` knows them all; which cost something at each element is settled
when it is traced (`spec.Pieces`), the others are numbers of the row. Its elements are softmaxed as y in units of its
own, u = unit * y: y = x with unit = logit_scale, or y = tanh(x * logit_scale / softcap) with unit = softcap. With the
row's weight a (incoming gradient times row weight, over the normalizer; the z-loss's own may differ), its class weight
w_t, smoothing s over V columns of class weight w_j (1 where there are none, W their sum):

    loss   = a * ((1 - s) * w_t * (lse - u_t) + s / V * (W * lse - sum_j w_j * u_j)) + a_z * z_loss_multiplier * lse^2
    dx_j   = (A * p_j - B * [j = t] - S * w_j - G * p_j * (log p_j + H)) * du_j/dx_j

with A, B, S and G numbers of the row, p the softmax and H its entropy, G the incoming gradient of that.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsl_kernels import reduce, vector
from dsl_kernels.cross_entropy import device, plan
from dsl_kernels.cross_entropy.device import IGNORED, NAN, OUT_OF_RANGE
from dsl_kernels.cross_entropy.spec import N_VALID, SHARD_SUMS, WEIGHT_SUM, Options, Outputs, Spec
from dsl_kernels.reduce import LN2

INFINITY = float("inf")
FLOOR = -(2.0**80)
"""Where a thread's maximum begins: finite with any factor, and far from what is ordinary."""

NO_COLUMN = 0x7FFFFFFF
FAR = 1e30
"""Exponents are held within this where they are multiplied: 0 * inf would be NaN."""


def loss_of(spec: Spec, arch: str) -> Any:
    """Return the loss that a kernel of rows computes."""
    return PlainLoss(spec, arch) if spec.pieces is None else OptionsLoss(spec, arch)


class PlainRequest(NamedTuple):
    """What the caller said of the loss, as for the launcher."""

    incoming: cute.Tensor
    ignore_index: Int64
    z_loss_multiplier: Float32
    grad_by_mean: Int32
    grad_by_incoming: Int32
    counted: Int32
    """1 where the kernel before counts the valid rows."""


class Places(NamedTuple):
    """Where a thread's elements lie: vector `step` of its tile `tile` is at element base + tile * tile_stride + step *
    step_stride of what is counted from `first_column`. The row's whole vectors are [begin, end) of that.
    """

    first_column: Int32
    base: Int32
    tile_stride: Int32
    step_stride: Int32
    begin: Int32
    end: Int32


class PlainRow(NamedTuple):
    """Numbers of a row."""

    m: Float32
    d: Float32
    lse: Float32
    z_factor: Float32
    factor: Float32
    scale: Float32
    wanted: Any
    """Whether the row's gradient is more than zeros."""


class PlainLoss:
    """Cross entropy and z-loss, summed or averaged.

    `vector.exponents`, one instruction an element less, lose here (H200, 2026-11-30): 8192 x 50257 0.943 of the copy
    instead of 0.987, 2048 x 8192 0.682 instead of 0.745; without a gradient, of the read rate, 8192 x 32000 0.891
    instead of 0.924.
    """

    words = 2
    """Numbers of the totals: (m, d), the maximum and the sum of exp(x - m)."""

    always_exact = True
    """Whether totals made of vectors are always right, and gradients."""

    def __init__(self, spec: Spec, arch: str) -> None:
        self.grad = spec.grad
        self.math = plan.arithmetic(arch, spec.dtype)

    @cute.jit
    def target_column(self, request, label: Int64, V: Int32):
        """The target's column, or what `device` has in place of one."""
        return device.target_column(label, request.ignore_index, V)

    @cute.jit
    def waits_for_count(self, request):
        """1 where the gradient takes a count that the kernel before may still be busy with, else 0."""
        return request.counted

    @cute.jit
    def early(self, labels: cute.Tensor, request):
        """A warp: what `scale` takes of the labels, loaded long before."""
        return (device.count_few(labels, request),)

    @cute.jit
    def scale(self, sums: cute.Tensor, request, V: Int32, early):
        """The factor of the whole gradient."""
        few_valid = early[0] if const_expr(early != ()) else Float32(0.0)
        return device.gradient_scale(sums, request, few_valid)

    @cute.jit
    def unscaled(self):
        """What stands for `scale` until it is known."""
        return Float32(1.0)

    @cute.jit
    def peek(self, mX: cute.Tensor, row: Int32):
        """What `inputs` takes of a row's logits, loaded long before."""
        return ()

    @cute.jit
    def inputs(self, request, row: Int32, column: Int32, peeked):
        """What is known of a row before its first pass."""
        return ()

    @cute.jit
    def begin(self):
        """A thread's state without an element."""
        return Float32(reduce.LOWEST), Float32(0.0), Float32(0.0)

    @cute.jit
    def accumulate(self, rX: cute.Tensor, state, inputs, places, tile: Int32, present):
        """The state with the vectors of rX, this thread's `tile`, in it.

        `present` says of each vector whether it is the row's, else it is filled with -inf; it is () where all are.
        """
        return device.accumulate(rX, *state, self.math.packed_fp32, self.math.polynomial)

    @cute.jit
    def totals(self, state, inputs):
        """The totals of a thread's state; right where they are `exact`."""
        m, even, odd = state
        return m, even + odd

    @cute.jit
    def exact(self, state, totals, inputs):
        """Whether they are; else `nothing` and every `single` must be combined."""
        return True

    @cute.jit
    def single(self, x: Float32, inputs, column: Int32):
        """The totals of one element."""
        return x, Float32(1.0)

    @cute.jit
    def combine(self, totals, others, inputs):
        """The totals of both."""
        return reduce.combine_pairs(*totals, *others)

    @cute.jit
    def warp_combine(self, totals, inputs):
        """The totals over a warp, in every lane."""
        return reduce.warp_combine_pairs(*totals)

    @cute.jit
    def row(self, totals, row: Int32, column: Int32, inputs, scale, request, V: Int32):
        """The numbers of a row."""
        m, d = totals
        lse, z_factor, factor = device.row_numbers(m, d, column, scale, request)
        return PlainRow(m, d, lse, z_factor, factor, scale, column != IGNORED)

    @cute.jit
    def contribution(self, numbers, column: Int32, target_logit: Float32, inputs, request, V: Int32):
        """What the row adds to its entry."""
        ce, z, n = cute.math.log(numbers.d) - (target_logit - numbers.m), numbers.lse * numbers.lse, Float32(1.0)
        if column == OUT_OF_RANGE:
            ce = Float32(NAN)
        if column == IGNORED:
            ce, z, n = Float32(0.0), Float32(0.0), Float32(0.0)
        return ce, z, n, Float32(0.0)

    @cute.jit
    def write_shard(self, request, row: Int32, column: Int32, target_logit: Float32, numbers, inputs, V: Int32):
        """One thread: write what is needed of these columns where they are a part of the row's."""

    @cute.jit
    def write_row(self, request, row: Int32, contribution, numbers):
        """One thread: write the row's own results."""

    @cute.jit
    def candidates(self, state, totals, exact, tiles: Int32):
        """(largest logit, first tile, last tile) of this thread: where `predict` may look."""
        return ()

    @cute.jit
    def predict(self, request, row, candidates, numbers, inputs, elements, places, ragged_logit, ragged_column):
        """A warp: note the row's largest logit, if it has it, for the predicted token."""

    @cute.jit
    def gradients(
        self, rX: cute.Tensor, rG: cute.Tensor, numbers, inputs, places, tile: Int32, step: cutlass.Constexpr
    ):
        """Fill rG with the gradients of the vectors of rX, from `step` of the thread's `tile` on, as if none of them
        were the target's, each rounded once.
        """
        device.gradients(rX, rG, numbers.m, numbers.factor, self.math.packed_fp32, self.math.polynomial)

    @cute.jit
    def other_gradient(self, x: Float32, numbers, inputs, column: Int32):
        """The gradient of a logit x that is not the target's, in fp32."""
        return device.other_gradient(x, numbers.m, numbers.factor, numbers.wanted)

    @cute.jit
    def target_gradient(self, x: Float32, numbers, inputs, column: Int32):
        """The gradient of the target's logit x, in fp32."""
        return device.target_gradient(x, numbers.m, numbers.d, numbers.z_factor, numbers.scale)


class OptionsRequest(NamedTuple):
    """What the caller said of the loss."""

    options: Options
    outputs: Outputs
    counted: Int32
    """1 where the rows' kernel is to wait for the count of the labels."""


class OptionsScale(NamedTuple):
    """Factors of all rows."""

    ce: Float32
    """One over the normalizer, or 1."""
    z: Float32
    """Likewise, of the z-loss."""
    spread: Float32
    """The smoothing over V."""


class RowInputs(NamedTuple):
    """What is known of a row before its first pass."""

    unit: Float32
    """u = unit * y."""
    exponent_unit: Float32
    """exp(u) = 2^(exponent_unit * y)."""
    inner: Float32
    """y = tanh(inner * x); 0: y = x."""
    reference: Float32
    """Near y of the row, so that the sum of all y keeps its fraction whatever they have in common."""
    class_weights: Int64
    """Address of all of them, 0 where there are none or only the target's counts."""


class RowWeights(NamedTuple):
    """What a row's loss and gradient are multiplied by."""

    row: Float32
    target: Float32
    """Class weight of the target."""
    classes: Float32
    """Sum of the class weights."""


class OptionsState(NamedTuple):
    """Of a thread."""

    m: Float32
    even: Float32
    odd: Float32
    best: tuple[Any, ...]
    """The largest logit and the first tile that holds it, or nothing."""
    rest: tuple[Float32, ...]
    """The totals behind the first two."""


class OptionsRow(NamedTuple):
    """Numbers of a row; those of the gradient times du/dx at 0. p stands for 2^t / d."""

    m: Float32
    d: Float32
    total: Float32
    """sum_j w_j * exponent_unit * (y_j - reference), with smoothing."""
    lse: Float32
    log_d: Float32
    """lse less unit * m."""
    entropy: Float32
    factor: Float32
    """A of the module over d: of each 2^t."""
    entropy_factor: Float32
    """G * log(2) over d: of each 2^t * t, taken away."""
    smoothing: Float32
    """S: of each class weight, taken away."""
    target: Float32
    """B: taken away at the target."""
    wanted: Any
    """Whether the row's gradient is more than zeros."""
    ordinary: Any
    """Whether `gradients` may be called."""
    reference: Float32
    """The `vector.reference` of m."""
    excess: Float32
    """The `vector.excess` of m."""
    weights: RowWeights


class OptionsLoss:
    """Cross entropy with every option.

    Vectors take `vector.exponents`: the one instruction an element that it saves is what options have to pay with.
    Where the numbers are too large for it everything is made one by one.

    Its totals are m and d = sum_j 2^t_j with t_j = exponent_unit * (y_j - m); with entropy sum_j 2^t_j * -t_j; with
    smoothing sum_j w_j * exponent_unit * (y_j - reference). Adding the latter up on the tensor core, an instruction for
    8 elements, takes 14.4 instead of 15.1 instructions an element, and yet 8192 x 128256 took 1.32 of the plain loss's
    time instead of 1.13 (H200, 2026-11-30).
    """

    always_exact = False

    def __init__(self, spec: Spec, arch: str) -> None:
        self.softcap, self.smoothing, self.entropy, self.entropy_gradient, self.together = spec.pieces or ()
        self.grad, self.dtype, self.vector_elements = spec.grad, device.cute_dtype(spec), spec.vector_elements
        self.math = plan.arithmetic(arch, spec.dtype)
        self.words = plan.total_words(spec)
        # Where the row is at hand afterwards, and m is the largest logit, it is cheaper to look for that.
        self.tracks = self.softcap or not spec.grad or spec.streamed

    @cute.jit
    def target_column(self, request, label: Int64, V: Int32):
        options = request.options
        return device.target_column_of_shard(label, options.ignore_index, V, options.vocab_start, options.vocab_size)

    @cute.jit
    def waits_for_count(self, request):
        return request.counted

    @cute.jit
    def unscaled(self):
        return OptionsScale(Float32(1.0), Float32(1.0), Float32(0.0))

    @cute.jit
    def early(self, labels: cute.Tensor, request):
        return ()

    @cute.jit
    def scale(self, sums: cute.Tensor, request, V: Int32, early):
        options = request.options
        ce, z = Float32(1.0), Float32(1.0)
        if options.mean != 0:
            if request.counted != 0:
                # Orders the count of the labels, which may still run, before its result is read.
                cute.arch.griddepcontrol_wait()
            ce, z = normalizers(options, sums[N_VALID], sums[WEIGHT_SUM])
            ce, z = 1.0 / ce, 1.0 / z
        return OptionsScale(ce, z, options.label_smoothing / whole_columns(options, V))

    @cute.jit
    def peek(self, mX: cute.Tensor, row: Int32):
        peeked = ()
        if const_expr(self.smoothing):
            # Read by every block of the cluster, a row ahead: that row's totals hold it, and no block writes the row
            # before it has the totals of all.
            peeked = (device.elements(self.dtype, device.row_address(mX, row))[0],)
        return peeked

    @cute.jit
    def inputs(self, request, row: Int32, column: Int32, peeked):
        options = request.options
        unit, inner = options.logit_scale, Float32(0.0)
        if const_expr(self.softcap):
            if options.softcap != Float32(0.0):
                unit, inner = options.softcap, options.logit_scale / options.softcap
        exponent_unit = device.held(unit * reduce.LOG2E)
        class_weights = Int64(0)
        if const_expr(self.together):
            if options.class_weight_sum != 0:
                class_weights = options.class_weight
        # Loaded after the first pass, when they have long come.
        prefetch_row_number(options.row_weight, options.row_weight_stride, row)
        prefetch_row_number(options.grad_loss, options.grad_loss_stride, row)
        prefetch_row_number(options.grad_lse, options.grad_lse_stride, row)
        prefetch_row_number(options.class_weight, Int64(1), cutlass.max(column, 0))
        inputs = RowInputs(unit, exponent_unit, inner, Float32(0.0), class_weights)
        if const_expr(self.smoothing):
            y = self.softmaxed_one(Float32(peeked[0]), inputs)
            reference = Float32(0.0)
            if y - y == Float32(0.0):
                reference = y
            inputs = RowInputs(unit, exponent_unit, inner, reference, class_weights)
        return inputs

    @cute.jit
    def row_weights(self, options, row: Int32, column: Int32, V: Int32):
        """The row's weights."""
        target, classes = Float32(1.0), whole_columns(options, V)
        if options.class_weight != 0:
            if column >= 0:
                target = number(options.class_weight, Int64(column))
            if const_expr(self.together):
                if options.class_weight_sum != 0:
                    classes = number(options.class_weight_sum, Int64(0))
        return RowWeights(row_number(options.row_weight, options.row_weight_stride, row, 1.0), target, classes)

    @cute.jit
    def begin(self):
        best = ()
        if const_expr(self.tracks):
            best = (Float32(-INFINITY), Int32(0))
        rest = tuple(Float32(0.0) for _ in range(self.words - 2))
        return OptionsState(Float32(FLOOR), Float32(0.0), Float32(0.0), best, rest)

    @cute.jit
    def softmaxed(self, values, largest: Float32, inputs):
        """Y of a list of values, of which `largest` is the largest magnitude."""
        y = values
        if const_expr(self.softcap):
            arguments = [vector.product(x, inputs.inner) for x in values]
            if const_expr(self.together):
                n = const_expr(len(values))
                chosen = cute.make_rmem_tensor((n,), Float32)
                for i in cutlass.range_constexpr(n):
                    chosen[i] = values[i]
                if inputs.inner != Float32(0.0):
                    capped = vector.tanh(arguments, largest * inputs.inner, self.math.packed_fp32)
                    for i in cutlass.range_constexpr(n):
                        chosen[i] = capped[i]
                y = [chosen[i] for i in range(n)]
            else:
                y = vector.tanh(arguments, largest * inputs.inner, self.math.packed_fp32)
        return y

    @cute.jit
    def softmaxed_one(self, x: Float32, inputs):
        """Y of one value."""
        return self.softmaxed([x, x], cute.arch.fmax(x, -x), inputs)[0]

    @cute.jit
    def accumulate(self, rX: cute.Tensor, state, inputs, places, tile: Int32, present):
        E = const_expr(self.vector_elements)
        pairs = const_expr(self.math.packed_fp32)
        if const_expr(self.entropy and not self.together):
            # 0 * -inf would be NaN. Where it matters how low a logit is the totals are made one by one.
            rX = vector.without_infinity(rX)
        values = vector.widen(rX)
        n = const_expr(len(values))
        top = vector.maximum(rX, values)
        y, y_top, best = values, top, ()
        if const_expr(self.tracks):
            largest, largest_tile = state.best
            if top > largest:
                largest, largest_tile = top, tile
            best = (largest, largest_tile)
        if const_expr(self.softcap):
            y = self.softmaxed(values, vector.largest_magnitude(rX), inputs)
            y_top = self.softmaxed_one(top, inputs)
            if const_expr(len(present) > 0):
                # A cap makes something finite of the -inf that stands for no element.
                y = [cutlass.select_(present[i // E], y[i], Float32(-INFINITY)) for i in range(n)]
        m = cute.arch.fmax(state.m, y_top)
        unit = inputs.exponent_unit
        c = vector.reference(m, unit)
        fall = vector.reference(state.m, unit) - c
        rescale = reduce.exp2(fall)
        exponents = vector.exponents(y, c, unit, pairs=pairs)
        exps = vector.exp2(exponents, pairs=pairs, polynomial=self.math.polynomial)
        even, odd = vector.add(exps, (state.even * rescale, state.odd * rescale), pairs=pairs)
        rest = ()
        if const_expr(self.entropy):
            moments = [moved_moment(state.rest[0], state.even + state.odd, fall, rescale), Float32(0.0)]
            for i in cutlass.range_constexpr(n):
                t = exponents[i]
                if const_expr(self.together):
                    t = cute.arch.fmax(t, Float32(-FAR))
                moments[i % 2] = cute.math.fma(exps[i], -t, moments[i % 2])
            rest = (moments[0] + moments[1],)
        if const_expr(self.smoothing):
            if const_expr(len(present) > 0):
                y = [cutlass.select_(present[i // E], y[i], inputs.reference) for i in range(n)]
            total = state.rest[-1]
            if const_expr(self.together):
                if inputs.class_weights != 0:
                    total = total + self.weighted(y, inputs, places, tile, present)
                else:
                    total = total + self.unweighted(y, inputs)
            else:
                total = total + self.unweighted(y, inputs)
            rest = (*rest, total)
        return OptionsState(m, even, odd, best, rest)

    @cute.jit
    def unweighted(self, y, inputs):
        """The sum of y - reference."""
        reference, common = inputs.reference, Float32(0.0)
        if const_expr(self.dtype is Float32 or self.softcap):
            y = [value - reference for value in y]
        else:
            # Afterwards: of numbers of so few digits that are near the reference even the sum has no error.
            common = Float32(len(y)) * reference
        even, odd = vector.add(y[2:], (y[0], y[1]), pairs=self.math.packed_fp32)
        return (even + odd) - common

    @cute.jit
    def weighted(self, y, inputs, places, tile: Int32, present):
        """The same with each times its class weight."""
        E = const_expr(self.vector_elements)
        total = Float32(0.0)
        for step in cutlass.range_constexpr(len(y) // E):
            vector_y = y[step * E : step * E + E]
            if const_expr(len(present) > 0):
                if present[step]:
                    total = total + self.weighted_vector(vector_y, inputs, places, tile, step)
            else:
                total = total + self.weighted_vector(vector_y, inputs, places, tile, step)
        return total

    @cute.jit
    def weighted_vector(self, y, inputs, places, tile: Int32, step: cutlass.Constexpr):
        total = Float32(0.0)
        column = column_of(places, tile, step)
        for e in cutlass.range_constexpr(len(y)):
            total = total + number(inputs.class_weights, Int64(column + e)) * (y[e] - inputs.reference)
        return total

    @cute.jit
    def totals(self, state, inputs):
        unit = inputs.exponent_unit
        excess = vector.excess(state.m, unit)
        factor = reduce.exp2(-excess)
        sums = state.even + state.odd
        rest = state.rest
        if const_expr(self.entropy):
            rest = ((rest[0] + excess * sums) * factor, *rest[1:])
        if const_expr(self.smoothing):
            rest = (*rest[:-1], rest[-1] * unit)
        return (state.m, sums * factor, *rest)

    @cute.jit
    def exact(self, state, totals, inputs):
        exact = vector.is_ordinary(state.m, inputs.exponent_unit) and totals[1] < INFINITY
        if const_expr(self.entropy and not self.together):
            # What -inf was raised to weighs nothing, and is finite.
            low = (Float32(vector.LOW[self.dtype]) - state.m) * inputs.exponent_unit
            exact = exact and low < Float32(-200.0) and low > Float32(reduce.LOWEST)
        return exact

    @cute.jit
    def nothing(self):
        return (Float32(reduce.LOWEST), *(Float32(0.0) for _ in range(self.words - 1)))

    @cute.jit
    def single(self, x: Float32, inputs, column: Int32):
        y = self.softmaxed_one(x, inputs)
        rest = ()
        if const_expr(self.entropy):
            rest = (Float32(0.0),)
        if const_expr(self.smoothing):
            total = from_reference(y, inputs)
            if const_expr(self.together):
                if inputs.class_weights != 0:
                    total = total * number(inputs.class_weights, Int64(column))
            rest = (*rest, total)
        return (y, Float32(1.0), *rest)

    @cute.jit
    def combine(self, totals, others, inputs):
        m = cute.arch.fmax(totals[0], others[0])
        moved, moved_others = moved_to(totals, m, inputs, self.entropy), moved_to(others, m, inputs, self.entropy)
        return (m, *(a + b for a, b in zip(moved, moved_others, strict=True)))

    @cute.jit
    def warp_combine(self, totals, inputs):
        m = cute.arch.warp_reduction(totals[0], cute.arch.fmax)
        return (m, *(reduce.warp_add(a) for a in moved_to(totals, m, inputs, self.entropy)))

    @cute.jit
    def row(self, totals, row: Int32, column: Int32, inputs, scale, request, V: Int32):
        options = request.options
        m, d = totals[0], totals[1]
        if options.row_sums != 0:
            m, d = number(options.row_sums, 2 * Int64(row)), number(options.row_sums, 2 * Int64(row) + 1)
        log_d = cute.math.log(d)
        lse = inputs.unit * m + log_d
        weights = self.row_weights(options, row, column, V)
        entropy, total = Float32(0.0), Float32(0.0)
        if const_expr(self.entropy):
            entropy = log_d + LN2 * totals[2] / d
        if const_expr(self.smoothing):
            total = totals[-1]
        factor, entropy_factor, smoothing, target = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
        wanted = cutlass.Boolean(False)
        if const_expr(self.grad):
            weight = weights.row * row_number(options.grad_loss, options.grad_loss_stride, row, 1.0)
            # A row without weight has a gradient of 0 even where it holds NaN.
            if column != IGNORED and weight != Float32(0.0):
                wanted = cutlass.Boolean(True)
                ce_weight = weight * scale.ce
                target = (1.0 - options.label_smoothing) * weights.target * ce_weight
                factor = target
                if const_expr(self.smoothing):
                    smoothing = scale.spread * ce_weight
                    factor = factor + smoothing * weights.classes
                if options.z_loss_multiplier != Float32(0.0):
                    factor = factor + 2.0 * options.z_loss_multiplier * lse * (weight * scale.z)
            grad_lse = row_number(options.grad_lse, options.grad_lse_stride, row, 0.0)
            if grad_lse != Float32(0.0):
                wanted = cutlass.Boolean(True)
                factor = factor + grad_lse
            if const_expr(self.entropy_gradient):
                grad_entropy = row_number(options.grad_entropy, options.grad_entropy_stride, row, 0.0)
                if grad_entropy != Float32(0.0):
                    wanted = cutlass.Boolean(True)
                    factor = factor - grad_entropy * (entropy - log_d)
                    entropy_factor = grad_entropy * LN2
            if column == OUT_OF_RANGE:
                wanted, factor = cutlass.Boolean(True), Float32(NAN)
        share = options.logit_scale / d
        factor, entropy_factor = factor * share, entropy_factor * share
        return OptionsRow(
            m,
            d,
            total,
            lse,
            log_d,
            entropy,
            factor,
            entropy_factor,
            options.logit_scale * smoothing,
            options.logit_scale * target,
            wanted,
            vector.is_ordinary(m, inputs.exponent_unit),
            vector.reference(m, inputs.exponent_unit),
            vector.excess(m, inputs.exponent_unit),
            weights,
        )

    @cute.jit
    def contribution(self, numbers, column: Int32, target_logit: Float32, inputs, request, V: Int32):
        options, weights = request.options, numbers.weights
        ce, z, n, w = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
        if column != IGNORED:
            n, w = Float32(1.0), weights.target
            if weights.row != Float32(0.0):
                y = self.softmaxed_one(target_logit, inputs)
                nll = numbers.log_d - inputs.unit * (y - numbers.m)
                ce = (1.0 - options.label_smoothing) * weights.target * nll
                if const_expr(self.smoothing):
                    if options.label_smoothing != Float32(0.0):
                        # sum_j w_j * (lse - u_j)
                        of_max = numbers.log_d + LN2 * from_reference(numbers.m, inputs)
                        total = weights.classes * of_max - LN2 * numbers.total
                        ce = ce + options.label_smoothing / Float32(V) * total
                ce, z = ce * weights.row, numbers.lse * numbers.lse * weights.row
            if column == OUT_OF_RANGE:
                ce, w = Float32(NAN), Float32(0.0)
        return ce, z, n, w

    @cute.jit
    def write_shard(self, request, row: Int32, column: Int32, target_logit: Float32, numbers, inputs, V: Int32):
        """One thread: write what this shard tells of a row."""
        address = request.outputs.shard_sums
        if address != 0:
            m, gap, fall = numbers.m, Float32(INFINITY), Float32(0.0)
            if column >= 0:
                gap = inputs.unit * (self.softmaxed_one(target_logit, inputs) - numbers.m)
            if const_expr(self.smoothing):
                fall = LN2 * (Float32(V) * from_reference(numbers.m, inputs) - numbers.total)
            if numbers.d == Float32(0.0):
                m, fall = Float32(-INFINITY), Float32(INFINITY)
            for place, value in enumerate((m, numbers.d, gap, fall)):
                device.elements(Float32, address + (Int64(row) * SHARD_SUMS + place) * (Float32.width // 8))[0] = value

    @cute.jit
    def write_row(self, request, row: Int32, contribution, numbers):
        ce, z, _, _ = contribution
        outputs = request.outputs
        z_loss = Float32(0.0)
        # Not 0 * z: that is NaN where z overflowed.
        if request.options.z_loss_multiplier != Float32(0.0):
            z_loss = request.options.z_loss_multiplier * z
        write_number(outputs.row_loss, row, ce + z_loss)
        write_number(outputs.row_z_loss, row, z_loss)
        write_number(outputs.lse, row, numbers.lse)
        write_number(outputs.entropy, row, numbers.entropy)
        if outputs.predicted != 0 and numbers.log_d != numbers.log_d:
            keep_largest(outputs.predicted, row, Int64(-1))

    @cute.jit
    def candidates(self, state, totals, exact, tiles: Int32):
        largest, first, last = totals[0], Int32(0), tiles
        if const_expr(self.tracks):
            if const_expr(self.softcap):
                largest = state.best[0]
            if exact:
                first, last = state.best[1], state.best[1] + 1
        return largest, first, last

    @cute.jit
    def predict(
        self,
        request,
        row: Int32,
        candidates,
        numbers,
        inputs,
        elements: cute.Tensor,
        places,
        ragged_logit: Float32,
        ragged_column: Int32,
    ):
        """A candidate for the predicted token becomes a 64-bit number, of which the row's is the largest: a maximum,
        unlike a sum, does not depend on the order. A smaller column is a larger number; above it, where m is not the
        largest logit itself, is the warp's largest, in the order of numbers.
        """
        outputs = request.outputs
        if outputs.predicted != 0:
            largest, first_tile, last_tile = candidates
            best, above, exists = numbers.m, Int64(0), largest > -INFINITY
            if const_expr(self.softcap):
                best = largest
                if ragged_column >= 0:
                    best = cute.arch.fmax(best, ragged_logit)
                best = cute.arch.warp_reduction(best, cute.arch.fmax)
                # + 0: -0 equals 0.
                bits = (best + 0.0).bitcast(Int32)
                above = Int64(bits ^ ((bits >> 31) | Int32(-0x80000000)))
                # A cap makes a softmax of -inf alone.
                exists = best > -INFINITY or inputs.inner != Float32(0.0)
            column = Int32(NO_COLUMN)
            if exists and largest == best:
                rX = cute.make_rmem_tensor((self.vector_elements,), self.dtype)
                for tile in cutlass.range(first_tile, last_tile, unroll=1):
                    for step in cutlass.range_constexpr(plan.STEPS):
                        element = places.base + tile * places.tile_stride + step * places.step_stride
                        if element >= places.begin and element < places.end:
                            address = elements.iterator + element
                            vectors = device.vectors(
                                self.dtype, address.toint(), address.memspace, cute.make_layout(self.vector_elements)
                            )
                            cute.autovec_copy(vectors, rX)
                            values = vector.widen(rX)
                            for e in cutlass.range_constexpr(self.vector_elements):
                                if values[e] == best:
                                    column = cutlass.min(column, places.first_column + element + e)
            if ragged_column >= 0 and ragged_logit == best and (ragged_logit > -INFINITY or exists):
                column = cutlass.min(column, ragged_column)
            column = cute.arch.warp_reduction(column, cutlass.min)
            if cute.arch.lane_idx() == 0 and column != NO_COLUMN:
                keep_largest(outputs.predicted, row, (above << 32) | Int64(NO_COLUMN - column))

    @cute.jit
    def gradients(
        self, rX: cute.Tensor, rG: cute.Tensor, numbers, inputs, places, tile: Int32, step: cutlass.Constexpr
    ):
        pairs = const_expr(self.math.packed_fp32)
        y = vector.widen(rX)
        if const_expr(self.softcap):
            y = self.softmaxed(y, vector.largest_magnitude(rX), inputs)
        exponents = vector.exponents(y, numbers.reference, inputs.exponent_unit, pairs=pairs)
        exps = vector.exp2(exponents, pairs=pairs, polynomial=self.math.polynomial)
        # What the exponents have too much is taken back.
        share = reduce.exp2(-numbers.excess)
        factor, entropy_factor = numbers.factor * share, numbers.entropy_factor * share
        if const_expr(self.entropy_gradient):
            factor = factor + entropy_factor * numbers.excess
        g = vector.scale(exps, factor, pairs=pairs)
        if const_expr(self.entropy_gradient):
            g = [
                a - e * (entropy_factor * cute.arch.fmax(t, Float32(-FAR)))
                for a, e, t in zip(g, exps, exponents, strict=True)
            ]
        if const_expr(self.smoothing):
            g = self.smoothed(g, numbers.smoothing, inputs, places, tile, step)
        if const_expr(self.softcap):
            if const_expr(self.together):
                capped = inputs.inner != Float32(0.0)
                g = [a * cutlass.select_(capped, 1.0 - b * b, Float32(1.0)) for a, b in zip(g, y, strict=True)]
            else:
                g = [a * (1.0 - b * b) for a, b in zip(g, y, strict=True)]
        vector.round_to(g, rG)

    @cute.jit
    def smoothed(self, g, smoothing: Float32, inputs, places, tile: Int32, step: cutlass.Constexpr):
        """The gradients less each column's part of the smoothing."""
        n, E = const_expr(len(g)), const_expr(self.vector_elements)
        if const_expr(self.together):
            parts = cute.make_rmem_tensor((n,), Float32)
            parts.fill(smoothing)
            if inputs.class_weights != 0:
                for i in cutlass.range_constexpr(n):
                    column = column_of(places, tile, step + i // E) + i % E
                    parts[i] = smoothing * number(inputs.class_weights, Int64(column))
            g = [g[i] - parts[i] for i in range(n)]
        else:
            g = [a - smoothing for a in g]
        return g

    @cute.jit
    def other_gradient(self, x: Float32, numbers, inputs, column: Int32):
        return self.one_gradient(x, numbers, inputs, column, Float32(0.0))

    @cute.jit
    def target_gradient(self, x: Float32, numbers, inputs, column: Int32):
        return self.one_gradient(x, numbers, inputs, column, numbers.target)

    @cute.jit
    def one_gradient(self, x: Float32, numbers, inputs, column: Int32, target: Float32):
        """The gradient of a logit x, in fp32, less `target`."""
        g = Float32(0.0)
        if numbers.wanted:
            y = self.softmaxed_one(x, inputs)
            t = (y - numbers.m) * inputs.exponent_unit
            e = reduce.exp2(t)
            g = e * numbers.factor
            if const_expr(self.entropy_gradient):
                g = g - e * (numbers.entropy_factor * cute.arch.fmax(t, Float32(-FAR)))
            smoothing = numbers.smoothing
            if const_expr(self.together):
                if inputs.class_weights != 0:
                    smoothing = smoothing * number(inputs.class_weights, Int64(column))
            g = g - target - smoothing
            if const_expr(self.softcap):
                if inputs.inner != Float32(0.0):
                    g = g * (1.0 - y * y)
        return g


@cute.jit
def moved_to(totals, m: Float32, inputs, entropy: cutlass.Constexpr):
    """The totals but the first, which becomes m."""
    fall = (totals[0] - m) * inputs.exponent_unit
    rescale = reduce.exp2(fall)
    rest = totals[2:]
    if const_expr(entropy):
        rest = (moved_moment(rest[0], totals[1], fall, rescale), *rest[1:])
    return (totals[1] * rescale, *rest)


@cute.jit
def from_reference(y: Float32, inputs):
    """exponent_unit * (y - reference)."""
    return (y - inputs.reference) * inputs.exponent_unit


@cute.jit
def moved_moment(moment: Float32, d: Float32, fall: Float32, rescale: Float32):
    """The total of the entropy where the maximum rises; nothing is left of what falls by much, even by inf."""
    return (moment + cute.arch.fmin(-fall, Float32(FAR)) * d) * rescale


@cute.jit
def normalizers(options, n_valid: Float32, weight_sum: Float32):
    """(of the cross entropy, of the z-loss) for "mean"."""
    ce, z = weight_sum, n_valid
    if options.class_weight == 0:
        ce = n_valid
    # No valid row, or none of any weight: nothing is divided.
    if ce == Float32(0.0):
        ce = Float32(1.0)
    z = cute.arch.fmax(z, Float32(1.0))
    if options.divisor != Float32(0.0):
        ce, z = options.divisor, options.divisor
    if options.normalizer != 0:
        ce = number(options.normalizer, Int64(0))
        z = ce
    return ce, z


@cute.jit
def whole_columns(options, V: Int32):
    """The columns of a whole row, as fp32."""
    columns = Float32(V)
    if options.vocab_size != 0:
        columns = Float32(options.vocab_size)
    return columns


@cute.jit
def column_of(places, tile: Int32, step: cutlass.Constexpr):
    """The column of the first element of a thread's vector."""
    return places.first_column + places.base + tile * places.tile_stride + step * places.step_stride


@cute.jit
def number(address: Int64, index: Int64):
    """An fp32 number of device memory."""
    return device.elements(Float32, address + index * (Float32.width // 8))[0]


@cute.jit
def row_number(address: Int64, stride: Int64, row: Int32, otherwise: cutlass.Constexpr):
    """A row's fp32 number, or another where there is no address."""
    value = Float32(otherwise)
    if address != 0:
        value = number(address, Int64(row) * stride)
    return value


@cute.jit
def prefetch_row_number(address: Int64, stride: Int64, row: Int32):
    """Begin to bring a row's fp32 number near, where there is an address."""
    if address != 0:
        cute.arch.inline_ptx(
            "prefetch.global.L1 [{$r0}];", read_only_args=[address + Int64(row) * stride * (Float32.width // 8)]
        )


@cute.jit
def write_number(address: Int64, row: Int32, value: Float32):
    """Write a row's fp32 number where there is an address."""
    if address != 0:
        device.elements(Float32, address + Int64(row) * (Float32.width // 8))[0] = value


@cute.jit
def keep_largest(address: Int64, row: Int32, key: Int64):
    """Leave the larger, as unsigned numbers, of a row's 64-bit number and `key`."""
    cute.arch.inline_ptx("red.global.max.u64 [{$r0}], {$r1};", read_only_args=[address + Int64(row) * 8, key])
