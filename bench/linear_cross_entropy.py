"""Cross entropy of a linear layer's outputs: time and memory of its loss and gradients, per provider and shape.

    python -m bench.linear_cross_entropy                                 six shapes, every provider that is installed
    python -m bench.linear_cross_entropy --shapes 8192x4096x128256 --providers products,greyhound,liger
    python -m bench.linear_cross_entropy --minutes 8 --resume            goes on with what an earlier run has left

A shape is TOKENSxHIDDENxVOCAB: inputs x `(N, H)` from randn, weight W `(V, H)` from randn / sqrt(H), both bf16, so that
logits are about normal, and uniform labels of which every 17th is ignored; the same for everyone. Mode `fwd+bwd` is the
mean loss and its gradients by inputs and weight, asked for with `torch.autograd.grad`, so that nothing is added to an
older gradient; `fwd` the loss alone, without gradients being recorded. `peak_mib` is what one call of that allocates at
the worst moment beyond what was allocated before it, its results included.

The floor, provider `products`, is what any way that makes the logits once computes at least:

    logits = x W^T,  grad_inputs = logits W,  grad_weight = logits^T x        2 N H V operations each

three `torch.mm` into buffers allocated beforehand, over all rows; in `fwd` the first one alone. A vocabulary that is no
multiple of 8, for which cuBLAS has slow kernels alone (81 ms against 14 at 32768 x 1024 x 50257), is padded to one
beforehand. It is timed on each shape before all others. In the rows here `copy_ms` is its time and `of_copy`, "of
products" in the table, that over the provider's.

Before anything is timed, it is checked in float64 from the same bf16 tensors: the loss; grad_inputs of some rows, and
zero for every ignored one; grad_weight of some columns of the vocabulary that are labels and some that are not, each
row by the norm of its error over its norm. `Bounds` says how far each may be off, and why.

Providers, beyond what their names say, all with their defaults where nothing else is said:

    greyhound, greyhound-weight   grad_weight_accum_dtype "fp32" and "weight"
    older                         greyhound-kernels 0.1.0, in a process of its own, accumulation in fp32
    torch, compile                F.cross_entropy(F.linear(x, W).float(), labels), the upcast as in training loops
    torch-linear                  torch.nn.functional.linear_cross_entropy, where this version of torch has it
    liger, liger-fp32             Liger's Triton kernel; accum_dtype None, which is the weight's, and torch.float32
    liger-cute                    Liger's CuTe DSL kernel for SM90, over all rows at once; called by its own name
    quack, quack-scaled           use_scaled_exp False and True; tuned=False, since tuning would compile dozens of GEMMs
                                  for each shape, so the former's own GEMMs may be short of their best; it must lie in
                                  a folder `site-packages`, or its cache's keys refuse what the DSL refers to
    cce, cce-exact                Apple's, without its autotuning, which is off by default; filter_eps "high", its
                                  default, and None

`cce` leaves out blocks of the gradient that lie below its filter. From these inputs the softmax is flat, nearly every
block without a label is left out, and it is as fast as it can be. quack, which changes the DSL it imports, and
liger-cute, which imports it too, have a process each. One that fails, or is wrong, gives a printed reason, no row, and
exit code 1 at the end. What a provider does not support is skipped, with the reason; likewise one whose package is not
there, unless --providers names it. Rows go to DIR/<gpu>.json as in `bench.results`, `op` naming H.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from bench.cases import SEED, dtype_name
from bench.check import GRADIENT_TOLERANCE, Mismatch
from bench.cross_entropy import by_reason, parse_names, skip
from bench.measure import Measured, first_line, free
from bench.memory import peak_mib
from bench.peers import OLDER_FOLDER, find_older_greyhound
from bench.provenance import ROOT, Provenance, provenance
from bench.providers import Unsupported
from bench.results import FOLDER, ResultFile, Row, row_from
from bench.timer import DEFAULT_BUDGET_S, Timer
from bench.worker import Worker, WorkerFailed

OUT = FOLDER / "linear"
DTYPE = torch.bfloat16
MODES = ("fwd", "fwd+bwd")
IGNORED = -100
IGNORED_STEP = 17
"""Every so many rows one is ignored."""

DEFAULT_SHAPES = "8192x4096x128256,4096x4096x128256,16384x2048x32000,8192x2304x256000,8192x5120x151936,32768x1024x50257"
PRODUCTS, GREYHOUND = "products", "greyhound"
COLUMNS_MULTIPLE = 8
"""Of the vocabulary of the floor's products: 16 bytes."""


SAMPLED_ROWS = 16
SAMPLED_COLUMNS = 32
"""Of the labels, and as many of the other columns."""

BLOCK_ELEMENTS = 1 << 27
"""Logits that the reference makes at a time: 1 GiB in float64."""

LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
"""Bound of the loss's error, relative where the loss exceeds 1, by its dtype; the logits are rounded to bf16 first."""

APART_TIMEOUT_S = 240.0
"""Seconds for one answer of a process, compiling included; a provider that takes longer is not asked again."""


class Shape(NamedTuple):
    """Size of the layer and its batch."""

    tokens: int
    hidden: int
    vocab: int

    def __str__(self) -> str:
        """Return it as it is written on the command line."""
        return f"{self.tokens}x{self.hidden}x{self.vocab}"

    @property
    def op(self) -> str:
        """Return the field `op` of its rows."""
        return f"linear_cross_entropy, H={self.hidden}"


class Inputs(NamedTuple):
    """Tensors that nobody may change."""

    inputs: torch.Tensor
    """(N, H)."""
    weight: torch.Tensor
    """(V, H)."""
    target: torch.Tensor
    """(N,) int64, 0 to V - 1 or `IGNORED`."""


class Outcome(NamedTuple):
    """What a provider computed, for the check."""

    loss: torch.Tensor
    """0-d."""
    grad_inputs: torch.Tensor | None
    """(N, H), or None where the mode computes no gradients, like the next."""
    grad_weight: torch.Tensor | None
    """(V, H)."""


class Bounds(NamedTuple):
    """How far a provider's gradients may be off; None where they are not judged. Norms are those of one row.

    A bound separates a right result from a wrong one: a chunk that is left out is an eighth of a row, a wrong
    divisor more.
    """

    inputs: float = 2e-2
    """Error's norm over that of a row of grad_inputs: a sum in fp32 of terms rounded to bf16, which costs up to 0.4 %.
    """
    softmax: float | None = 0.1
    """Error of n <grad_inputs_i, x_i>, n the number of rows not ignored. The part of grad_inputs that comes from the
    softmax is 1 / sqrt(H) of it, too little for its norm to show; in this number it counts about as much as the label.
    """
    labels: float = 4e-2
    """As the first, a row of grad_weight that is a label: added up in bf16, chunk after chunk, the softmax's part, up
    to 2 % of it, may be lost below the label's rounding step."""
    others: float | None = GRADIENT_TOLERANCE[DTYPE]
    """As the first, a row that is none, by the softmax alone; that bound says what it allows for."""


EXACT = Bounds()
SUMMED_IN_BF16 = Bounds(inputs=0.1, softmax=None, labels=0.1, others=0.1)
"""For one that also adds grad_inputs up in bf16, block after block of the vocabulary: hundreds of roundings, and what
is added after the label is lost below its step."""

FILTERED = Bounds(inputs=0.1, softmax=None, labels=0.1, others=None)
"""For one that leaves small parts of the softmax out, by design; of the other columns that is all."""

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From (inputs, weight, target) to the mean loss, with autograd."""


class Reference:
    """The float64 answer."""

    def __init__(self, inputs: Inputs) -> None:
        """Compute the loss, and the gradients of the sampled rows; `inputs` are not kept.

        Args:
            inputs: what the providers get; not every row is ignored.
        """
        x, weight, target = inputs
        columns, exact_weight = len(weight), weight.double()
        valid = target != IGNORED
        rows = valid.nonzero().squeeze(1)
        labels = target.clamp(min=0)
        lse, label_logit = torch.empty((2, len(x)), dtype=torch.float64, device=x.device)
        step = max(1, BLOCK_ELEMENTS // columns)
        for begin in range(0, len(x), step):
            logits = x[begin : begin + step].double() @ exact_weight.t()
            lse[begin : begin + step] = logits.logsumexp(1)
            label_logit[begin : begin + step] = logits.gather(1, labels[begin : begin + step, None]).squeeze(1)
            del logits
        self.shape = Shape(len(x), x.shape[1], columns)
        self.loss = float((lse - label_logit)[valid].mean())
        self.ignored = ~valid
        self.rows = _spread(rows, SAMPLED_ROWS)
        grad_logits = (x[self.rows].double() @ exact_weight.t() - lse[self.rows, None]).exp()
        grad_logits[torch.arange(len(self.rows), device=x.device), target[self.rows]] -= 1.0
        self.grad_inputs = grad_logits @ exact_weight / len(rows)
        self.directions = x[self.rows].double() * len(rows)
        is_label = torch.zeros(columns, dtype=torch.bool, device=x.device)
        is_label[target[rows]] = True
        self.labels = target[_spread(rows, SAMPLED_COLUMNS)].unique()
        self.others = _spread((~is_label).nonzero().squeeze(1), SAMPLED_COLUMNS)
        sampled = torch.cat((self.labels, self.others))
        grad_logits = (x.double() @ exact_weight[sampled].t() - lse[:, None]).exp()
        grad_logits -= (target[:, None] == sampled).double()
        grad_logits[self.ignored] = 0.0
        grad_weight = grad_logits.t() @ x.double() / len(rows)
        self.grad_labels, self.grad_others = grad_weight.split((len(self.labels), len(self.others)))

    def verify(self, outcome: Outcome, bounds: Bounds = EXACT) -> None:
        """Raise `Mismatch` unless `outcome` is this reference's answer; NaN never passes."""
        got = float(outcome.loss)
        error = abs(got - self.loss) / max(abs(self.loss), 1.0)
        if not error <= LOSS_TOLERANCE[outcome.loss.dtype]:
            raise Mismatch(f"loss: expected {self.loss:.8g}, got {got:.8g}")
        if outcome.grad_inputs is None or outcome.grad_weight is None:
            return
        tokens, hidden, vocab = self.shape
        for name, gradient, size in (
            ("grad_inputs", outcome.grad_inputs, (tokens, hidden)),
            ("grad_weight", outcome.grad_weight, (vocab, hidden)),
        ):
            if tuple(gradient.shape) != size or gradient.dtype != DTYPE:
                raise Mismatch(f"{name}: expected {DTYPE} {size}, got {gradient.dtype} {tuple(gradient.shape)}")
        if outcome.grad_inputs[self.ignored].count_nonzero():
            raise Mismatch("grad_inputs: not zero in an ignored row")
        got_inputs = outcome.grad_inputs[self.rows]
        compare("grad_inputs", got_inputs, self.grad_inputs, bounds.inputs)
        if bounds.softmax is not None:
            along = float(((got_inputs.double() - self.grad_inputs) * self.directions).sum(1).abs().amax())
            if not along <= bounds.softmax:
                raise Mismatch(f"grad_inputs: off by {along:.3g} along the inputs, allowed {bounds.softmax:.3g}")
        compare("grad_weight of labels", outcome.grad_weight[self.labels], self.grad_labels, bounds.labels)
        if bounds.others is not None and len(self.others):
            others = outcome.grad_weight[self.others]
            compare("grad_weight of other columns", others, self.grad_others, bounds.others)


def _spread(items: torch.Tensor, count: int) -> torch.Tensor:
    """Return up to `count` of the items, spread evenly, the first and the last among them."""
    places = torch.linspace(0, len(items) - 1, min(count, len(items)), device=items.device, dtype=torch.float64)
    return items[places.long()]


def compare(name: str, got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Raise `Mismatch` unless the norm of each row's error is within `bound` of that row's norm."""
    off = float(((got.double() - expected).norm(dim=1) / expected.norm(dim=1)).amax())
    if not off <= bound:
        raise Mismatch(f"{name}: off by {off:.3g} of a row's norm, allowed {bound:.3g}")


class Prepared(NamedTuple):
    """One provider, ready to be called on its inputs."""

    run: Callable[[], object]
    """The timed call."""
    verify: Callable[[Reference], None]
    """Calls `run`, and raises `Mismatch` where what it computed is wrong."""


def with_autograd(loss: Loss, inputs: Inputs, mode: str, bounds: Bounds) -> Prepared:
    """Return a mean loss with autograd in mode `fwd` or `fwd+bwd`."""
    x, weight = inputs.inputs.detach(), inputs.weight.detach()

    def forward() -> Outcome:
        with torch.no_grad():
            return Outcome(loss(x, weight, inputs.target), None, None)

    def forward_and_backward() -> Outcome:
        value = loss(x, weight, inputs.target)
        grad_inputs, grad_weight = torch.autograd.grad(value, (x, weight))
        return Outcome(value.detach(), grad_inputs, grad_weight)

    if mode == "fwd":
        return Prepared(forward, lambda reference: reference.verify(forward()))
    x.requires_grad_()
    weight = torch.nn.Parameter(weight)  # as in a model
    return Prepared(forward_and_backward, lambda reference: reference.verify(forward_and_backward(), bounds))


def products(inputs: Inputs, mode: str) -> Prepared:
    """Return the floor; the module's docstring has it."""
    x = inputs.inputs
    weight = torch.nn.functional.pad(inputs.weight, (0, 0, 0, -len(inputs.weight) % COLUMNS_MULTIPLE))
    logits = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    grad_inputs, grad_weight = (torch.empty_like(each) if mode == "fwd+bwd" else None for each in (x, weight))

    def run() -> None:
        torch.mm(x, weight.t(), out=logits)
        if grad_inputs is not None and grad_weight is not None:
            torch.mm(logits, weight, out=grad_inputs)
            torch.mm(logits.t(), x, out=grad_weight)

    def verify(reference: Reference) -> None:
        run()
        rows, columns = reference.rows, reference.labels
        compare("logits", logits[:, columns], x.double() @ weight[columns].double().t(), EXACT.inputs)
        if grad_inputs is not None and grad_weight is not None:
            compare("logits W", grad_inputs[rows], logits[rows].double() @ weight.double(), EXACT.inputs)
            compare("logits^T x", grad_weight[columns], logits[:, columns].double().t() @ x.double(), EXACT.inputs)

    return Prepared(run, verify)


@dataclass(frozen=True)
class Provider:
    """A way to compute the loss."""

    name: str
    loss: Callable[[Shape], Loss]
    """Imports its package and returns its loss; raises `Unsupported` where its limits rule a shape out."""
    bounds: Bounds = EXACT
    apart: bool = False
    """Whether it needs a process of its own."""

    def build(self, inputs: Inputs, mode: str) -> Prepared:
        """Return what is timed."""
        if self.name == PRODUCTS:
            return products(inputs, mode)
        x, weight = inputs.inputs, inputs.weight
        return with_autograd(self.loss(Shape(len(x), x.shape[1], len(weight))), inputs, mode, self.bounds)


PROVIDERS: dict[str, Provider] = {}


def provider(
    name: str, *, bounds: Bounds = EXACT, apart: bool = False
) -> Callable[[Callable[[Shape], Loss]], Callable[[Shape], Loss]]:
    """Register the decorated function under `name`; `Provider` says what the rest is."""

    def register(loss: Callable[[Shape], Loss]) -> Callable[[Shape], Loss]:
        PROVIDERS[name] = Provider(name, loss, bounds, apart)
        return loss

    return register


@provider(PRODUCTS)
def _products(shape: Shape) -> Loss:
    """No loss: `products` has the calls."""
    raise Unsupported("it computes no loss")


@provider(GREYHOUND)
def _greyhound(shape: Shape) -> Loss:
    """Accumulation in fp32, the default."""
    from greyhound.nn.functional import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy


@provider("greyhound-weight")
def _greyhound_weight(shape: Shape) -> Loss:
    """Accumulation in the weight's dtype."""
    from greyhound.nn.functional import chunked_linear_cross_entropy

    return lambda x, weight, target: chunked_linear_cross_entropy(x, weight, target, grad_weight_accum_dtype="weight")


@provider("older", apart=True)
def _older(shape: Shape) -> Loss:
    """The older public Greyhound, version 0.1.0, whose folder comes first on `sys.path`."""
    import greyhound

    if not str(getattr(greyhound, "VERSION", "")).startswith("0.1."):
        raise ImportError("the greyhound first on sys.path is not version 0.1")
    from greyhound.nn.functional import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy


def _eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(x, weight).float()
    return torch.nn.functional.cross_entropy(logits, target, ignore_index=IGNORED)


@provider("torch")
def _torch(shape: Shape) -> Loss:
    """Eager PyTorch."""
    return _eager


@provider("compile")
def _compile(shape: Shape) -> Loss:
    """The same under torch.compile, for each shape alone; the compiler is reset as in `bench.providers`."""
    torch.compiler.reset()
    compiled: Loss = torch.compile(_eager, fullgraph=True, dynamic=False)
    return compiled


@provider("torch-linear")
def _torch_linear(shape: Shape) -> Loss:
    """PyTorch's own chunked function, whose loss is bf16."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise Unsupported(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    return lambda x, weight, target: function(x, weight, target, ignore_index=IGNORED)


@provider("liger")
def _liger(shape: Shape) -> Loss:
    """Accumulation in the weight's dtype, the default."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda x, weight, target: liger_fused_linear_cross_entropy(x, weight, target, ignore_index=IGNORED)


@provider("liger-fp32")
def _liger_fp32(shape: Shape) -> Loss:
    """Accumulation in fp32."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda x, weight, target: liger_fused_linear_cross_entropy(
        x, weight, target, ignore_index=IGNORED, accum_dtype=torch.float32
    )


@provider("liger-cute", apart=True)
def _liger_cute(shape: Shape) -> Loss:
    """Not the function that Liger's switch between backends leads to, which is for SM100."""
    if shape.tokens % 128 or shape.vocab % 256:
        raise Unsupported("it needs tokens that are a multiple of 128 and a vocabulary that is one of 256")
    _only_on_sm90()
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    return lambda x, weight, target: liger_fused_linear_cross_entropy_sm90(x, weight, target, IGNORED, "mean")


@provider("quack", apart=True)
def _quack(shape: Shape) -> Loss:
    """Chunks of 4096 rows, its default."""
    if any(size % 8 for size in shape):
        raise Unsupported("it needs tokens, hidden size and vocabulary that are multiples of 8")
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda x, weight, target: chunked_linear_cross_entropy(
        x, weight, target, ignore_index=IGNORED, tuned=False, use_scaled_exp=False
    )


@provider("quack-scaled", apart=True)
def _quack_scaled(shape: Shape) -> Loss:
    """Its pipeline for SM90 that never writes the gradient of the logits."""
    if shape.vocab % 128 or shape.hidden % 8:
        raise Unsupported("it needs a vocabulary that is a multiple of 128 and a hidden size that is one of 8")
    _only_on_sm90()
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda x, weight, target: chunked_linear_cross_entropy(
        x, weight, target, ignore_index=IGNORED, tuned=False, use_scaled_exp=True
    )


@provider("cce", bounds=FILTERED)
def _cce(shape: Shape) -> Loss:
    """Gradients filtered, the default."""
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    return lambda x, weight, target: linear_cross_entropy(x, weight, target, ignore_index=IGNORED, impl="cce")


@provider("cce-exact", bounds=SUMMED_IN_BF16)
def _cce_exact(shape: Shape) -> Loss:
    """Gradients not filtered."""
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, weight, target: linear_cross_entropy(
        x, weight, target, ignore_index=IGNORED, impl="cce", filter_eps=None
    )


def _only_on_sm90() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise Unsupported("it needs a GPU of compute capability 9.0")


def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    """Return the tensors of a shape, the same for the same kind of device."""
    tokens, hidden, vocab = shape
    generator = torch.Generator(device=device).manual_seed(SEED)
    inputs = torch.empty(tokens, hidden, dtype=DTYPE, device=device).normal_(generator=generator)
    weight = torch.empty(vocab, hidden, dtype=DTYPE, device=device).normal_(generator=generator)
    weight *= hidden**-0.5
    target = torch.randint(vocab, (tokens,), generator=generator, device=device)
    target[::IGNORED_STEP] = IGNORED
    return Inputs(inputs, weight, target)


def parse_shapes(text: str) -> list[Shape]:
    """Return the shapes in text such as `8192x4096x128256,8192x2304x256000`."""
    shapes = []
    for part in text.split(","):
        sizes = part.strip().lower().split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise argparse.ArgumentTypeError(f"expected TOKENSxHIDDENxVOCAB[,...], got {part.strip()!r} in {text!r}")
        shapes.append(Shape(*map(int, sizes)))
    return shapes


def measure(
    which: Provider,
    modes: Sequence[str],
    inputs: Inputs,
    reference: Reference,
    timer: Timer,
    about: Provenance,
    floor_ms: dict[str, float],
) -> Measured:
    """Measure one provider in the given modes; what fails becomes a reason, and the other modes still run.

    Args:
        which: the provider.
        modes: those wanted.
        inputs: of one shape.
        reference: of these inputs.
        timer: on their device.
        about: fields of the rows.
        floor_ms: time of `products` by mode; not read for that itself.

    Raises:
        RuntimeError: a kernel has left the device unusable.
    """
    measured = Measured([], {}, {}, [])
    for mode in modes:
        prepared: Prepared | None = None
        try:
            prepared = which.build(inputs, mode)
            prepared.verify(reference)
            peak = peak_mib(prepared.run, timer.device)
            timing = timer.measure(prepared.run)
            floor = timing.ms if which.name == PRODUCTS else floor_ms[mode]
            measured.rows.append(
                Row(
                    op=reference.shape.op,
                    provider=which.name,
                    mode=mode,
                    rows=reference.shape.tokens,
                    vocab=reference.shape.vocab,
                    dtype=dtype_name(DTYPE),
                    ms=round(timing.ms, 5),
                    ms_low=round(timing.ms_low, 5),
                    ms_high=round(timing.ms_high, 5),
                    copy_ms=round(floor, 5),
                    of_copy=float(f"{floor / timing.ms:.4g}"),
                    peak_mib=None if peak is None else round(peak, 1),
                    host_us=None,
                    graph=None,
                    date=about.today(),
                    **about._asdict(),
                )
            )
        except Unsupported as reason:
            measured.unsupported[mode] = str(reason)
        except Exception as error:
            measured.failures[mode] = first_line(error)
            if isinstance(error, ImportError):
                measured.missing.append(mode)
        del prepared  # or its buffers would be there while the next are allocated
        free(timer.device)
        if timer.device.type == "cuda":
            torch.cuda.synchronize(timer.device)  # raises where the device is left unusable
    return measured


class Apart(Worker):
    """A process of one provider: this module with `--serve` in place of `bench.worker`.

    {"provider", "modes", "tokens", "hidden", "vocab", "device", "budget_s", "about", "floor_ms"}
        -> the fields of `bench.measure.Measured`
    """

    def _start(self) -> subprocess.Popen[str]:
        older = ["--older-greyhound", str(self.older_greyhound)] if self.older_greyhound else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.linear_cross_entropy", "--serve", *older],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self._process


def serve(older_greyhound: Path | None) -> int:
    """Answer the requests on stdin line by line; what packages print goes to stderr, and stdout holds answers alone.

    Args:
        older_greyhound: folder that comes first on `sys.path`.
    """
    if older_greyhound:
        sys.path.insert(0, str(older_greyhound))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    timer: Timer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        device = torch.device(request["device"])
        timer = timer or Timer(device, request["budget_s"])  # of one run, so always the same
        inputs = make_inputs(Shape(request["tokens"], request["hidden"], request["vocab"]), device)
        reference = Reference(inputs)
        free(device)
        which, about = PROVIDERS[request["provider"]], Provenance(**request["about"])
        measured = measure(which, request["modes"], inputs, reference, timer, about, request["floor_ms"])
        answers.write(json.dumps({**measured._asdict(), "rows": [vars(row) for row in measured.rows]}) + "\n")
        answers.flush()
        del inputs, reference
        free(device)
    return 0


@dataclass
class Run:
    """One run of the benchmark: what it measures with, and what came of it."""

    timer: Timer
    about: Provenance
    file: ResultFile
    named: bool
    """Whether the providers were named, so that a missing package is a failure."""
    older: Path | None
    """Folder of the older greyhound."""
    ends: float | None = None
    """On `time.monotonic`'s clock: when nothing further is begun."""
    shown: list[Row] = field(default_factory=list)
    """Rows for the table: those measured, and those found by `--resume`."""
    failures: list[str] = field(default_factory=list)
    given_up: set[str] = field(default_factory=set)
    """Providers whose package is not there, or whose process did not answer in time; not tried again."""
    left: int = 0
    """Providers on shapes for which the time was too short."""
    apart: dict[str, Apart] = field(default_factory=dict)

    def wanted(self, shape: Shape, names: list[str], modes: list[str], *, resume: bool) -> dict[str, list[str]]:
        """Return the modes of each provider that are to be measured; rows that are there already go to the table."""
        found: dict[str, list[str]] = {}
        for name in names:
            for mode in modes:
                key = (shape.op, name, mode, shape.tokens, shape.vocab, dtype_name(DTYPE), self.about.gpu)
                there = self.file.find(key, self.about.commit) if resume else None
                if there is None:
                    found.setdefault(name, []).append(mode)
                else:
                    self.shown.append(there)
        return found

    def measure_shape(self, shape: Shape, wanted: dict[str, list[str]], modes: list[str]) -> None:
        """Measure what is wanted on one shape, each row written as it comes.

        Raises:
            RuntimeError: a kernel has left the device unusable.
        """
        wanted = {name: wanted[name] for name in wanted if name not in self.given_up}
        if not wanted:
            return
        if self.time_is_up():
            self.left += len(wanted)
            return
        device = self.timer.device
        try:
            inputs = make_inputs(shape, device)
            reference = Reference(inputs)
        except torch.OutOfMemoryError as error:
            self.fail(f"{shape}: {first_line(error)}")
            return
        free(device)
        floor = measure(PROVIDERS[PRODUCTS], modes, inputs, reference, self.timer, self.about, {})
        floor_ms = {row.mode: row.ms for row in floor.rows}
        asked = wanted.pop(PRODUCTS, [])
        self.keep(PRODUCTS, shape, floor._replace(rows=[row for row in floor.rows if row.mode in asked]))
        for name, its_modes in wanted.items():
            which, with_floor = PROVIDERS[name], [mode for mode in its_modes if mode in floor_ms]
            if not with_floor:
                continue  # why is printed already
            if self.time_is_up():
                self.left += 1
            elif which.apart:
                self.keep(name, shape, self.measure_apart(name, with_floor, shape, floor_ms))
            else:
                measured = measure(which, with_floor, inputs, reference, self.timer, self.about, floor_ms)
                self.keep(name, shape, measured)

    def measure_apart(self, name: str, modes: list[str], shape: Shape, floor_ms: dict[str, float]) -> Measured:
        """Return what a process of its own measures."""
        older = self.older if name == "older" else None
        if name == "older" and older is None:
            reason = f"no folder {OLDER_FOLDER} on sys.path and no --older-greyhound"
            return Measured([], dict.fromkeys(modes, reason), {}, list(modes))
        worker = self.apart.setdefault(name, Apart(older, APART_TIMEOUT_S))
        request = {
            "provider": name,
            "modes": modes,
            **shape._asdict(),
            "device": str(self.timer.device),
            "budget_s": self.timer.budget_s,
            "about": self.about._asdict(),
            "floor_ms": floor_ms,
        }
        begin = time.monotonic()
        try:
            answer = worker.ask(request)
        except WorkerFailed as error:
            if time.monotonic() - begin >= worker.timeout_s:
                self.given_up.add(name)
            return Measured([], dict.fromkeys(modes, str(error)), {}, [])
        rows = [row_from(record) for record in answer["rows"]]
        return Measured(rows, answer["failures"], answer["unsupported"], answer["missing"])

    def keep(self, name: str, shape: Shape, measured: Measured) -> None:
        """Write the rows, and print them and what went wrong."""
        if measured.rows:
            self.file.put(*measured.rows)
        self.shown += measured.rows
        for row in measured.rows:
            peak = "" if row.peak_mib is None else f", {row.peak_mib:.1f} MiB"
            print(f"{name} {row.mode} {shape}: {row.ms:.4f} ms, {row.of_copy:.3f} of products{peak}", flush=True)
        for modes, reason in by_reason(measured.unsupported):
            skip(f"{name} {modes} {shape}: {reason}")
        for modes, reason in by_reason(measured.failures):
            if measured.missing and not self.named:
                skip(f"{name} {modes}: {reason}")
            else:
                self.fail(f"{name} {modes} {shape}: {reason}")
        if measured.missing:
            self.given_up.add(name)

    def time_is_up(self) -> bool:
        """Return whether nothing further is to be begun."""
        return self.ends is not None and time.monotonic() >= self.ends

    def fail(self, reason: str) -> None:
        """Note a failure, and print it now."""
        self.failures.append(reason)
        print(f"FAILED {reason}", flush=True)

    def close(self) -> None:
        """End the processes."""
        for worker in self.apart.values():
            worker.close()


def format_table(rows: Iterable[Row]) -> str:
    """Return the rows as text, grouped by shape and mode, each group fastest first."""
    rows = list(rows)
    header = (
        f"{'tokens x hidden x vocab':>23} {'mode':>7} {'provider':<16} {'of products':>11} {'ms':>9}"
        f" {'low..high':>19} {'peak MiB':>9} {'times of greyhound':>18}"
    )
    lines = [header, "-" * len(header)]
    greyhound = {(row.op, row.rows, row.vocab, row.mode): row.ms for row in rows if row.provider == GREYHOUND}
    group = None
    for row in sorted(rows, key=lambda row: (row.op, row.rows, row.vocab, row.mode, row.ms)):
        mine = (row.op, row.rows, row.vocab, row.mode)
        if group not in (None, mine):
            lines.append("")
        group = mine
        size = f"{row.rows} x {row.op.partition('=')[2]} x {row.vocab}"
        peak = "" if row.peak_mib is None else f"{row.peak_mib:.1f}"
        times = f"{row.ms / greyhound[mine]:.3f}" if mine in greyhound else ""
        lines.append(
            f"{size:>23} {row.mode:>7} {row.provider:<16} {row.of_copy:>11.3f} {row.ms:>9.4f}"
            f" {row.ms_low:>9.4f}..{row.ms_high:<8.4f} {peak:>9} {times:>18}"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "--shapes", type=parse_shapes, default=DEFAULT_SHAPES, help=f"TOKENSxHIDDENxVOCAB[,...]; {DEFAULT_SHAPES}"
    )
    parser.add_argument(
        "--providers", type=parse_names(PROVIDERS), help=f"{', '.join(PROVIDERS)}; default: all that are installed"
    )
    parser.add_argument("--modes", type=parse_names(MODES), default="fwd+bwd", help=", ".join(MODES))
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds for one measurement")
    parser.add_argument("--minutes", type=float, help="begin nothing further after this time, and exit with 0")
    parser.add_argument(
        "--older-greyhound",
        type=Path,
        metavar="DIR",
        help=f"unpacked wheel of greyhound-kernels 0.1.0; default: the first {OLDER_FOLDER} in a folder of sys.path",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the result files")
    parser.add_argument("--resume", action="store_true", help="skip rows that are there for this commit")
    parser.add_argument("--commit", help="the source's commit, where git cannot tell")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and return the exit code: 1 if a provider failed."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m bench.linear_cross_entropy", description=(__doc__ or "").split("\n")[0]
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.serve:
        return serve(options.older_greyhound)
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device")
        device = torch.device("cuda", torch.cuda.current_device())
    about = provenance(device, options.commit)
    if about.commit is None:
        print("commit unknown: rows are written without one; --commit names it", flush=True)
    file = ResultFile(options.out, about.gpu)
    older = find_older_greyhound(options.older_greyhound)
    ends = None if options.minutes is None else begin + options.minutes * 60
    run = Run(Timer(device, options.budget), about, file, options.providers is not None, older, ends)
    try:
        for shape in options.shapes:
            wanted = run.wanted(shape, options.providers or list(PROVIDERS), options.modes, resume=options.resume)
            run.measure_shape(shape, wanted, options.modes)
            free(device)
    except RuntimeError as error:
        run.failures.append(f"the device is unusable, the run ends here: {first_line(error)}")
    finally:
        run.close()
    print(f"\n{about.gpu}, driver {about.driver}, torch {about.torch}, dsl {about.dsl}, commit {about.commit}")
    print(format_table(run.shown))
    for failure in run.failures:
        print(f"FAILED {failure}")
    if run.left:
        print(f"time is up, {run.left} measurements left: --resume goes on with them")
    print(f"{len(run.shown)} rows in {file.path}, {len(run.failures)} failures, {time.monotonic() - begin:.0f} s")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
