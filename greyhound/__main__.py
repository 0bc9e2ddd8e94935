"""`python -m greyhound`: says what works on this machine, then trains twice and compares the losses.

The same next-word model is trained from the same seed on the same batches, once with PyTorch's cross entropy and once
with Greyhound's. The text is the documentation inside Python's standard library (`pydoc_data.topics`), so nothing is
downloaded. Both losses answer the same question in fp32, so their curves may differ by rounding only: the exit code is
1 where they differ by more than `TOLERANCE`, or where one of them is not a number.

The model is chosen so that a run repeats bit for bit on a GPU too: embedding, linear and tanh have backward passes
without floating-point atomics, so what separates the two curves is the loss alone.
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import importlib.util
import itertools
import math
import os
import platform
import re
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

import greyhound
from greyhound import _artifacts
from greyhound.kernels.cross_entropy import implementation
from greyhound.nn.functional import cross_entropy

TOLERANCE = 1e-4
"""Largest difference, at any step, between two curves that agree. Losses here run from about 8 down to 4."""

DEFAULT_STEPS = 200
SEED = 0
IGNORE_INDEX = -100

MIN_COUNT = 2
"""Words seen fewer times than this are outside the vocabulary: unknown as context, ignored as target."""
CONTEXT_WORDS = 4
BATCH_ROWS = 512
EMBEDDING_WIDTH = 64
HIDDEN_WIDTH = 256
LEARNING_RATE = 0.2
MOMENTUM = 0.9
"""SGD, since Adam divides a wrong factor of the gradient out again and its curves would not show it. At this rate
rounding is not amplified: 1e-6 apart after 1000 steps on a CPU, where a rate of 0.5 ended 1e-2 apart after 2500."""

TABLE_ROWS = 11
BAR_WIDTH = 24

_WORD = re.compile(r"\w+|([^\w\s])\1*")
"""A word, or a run of one punctuation mark: an underline of 40 signs is one token, not 40 easy ones."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """The checked command line."""

    steps: int
    device: torch.device
    plot: Path | None


@dataclass(frozen=True)
class Corpus:
    """A text as word numbers, the most frequent word first; `vocabulary` itself stands for every rare word."""

    words: torch.Tensor  # (n_words,) int64, 0 to vocabulary
    vocabulary: int


@dataclass(frozen=True)
class Curve:
    """What one training run gave, one entry per step."""

    name: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def step_ms(self) -> float:
        """Median time of a step: the first ones load libraries and fill caches."""
        return statistics.median(self.seconds) * 1e3


@dataclass(frozen=True)
class Comparison:
    """Two curves, step by step."""

    expected: Curve
    actual: Curve

    @property
    def differences(self) -> tuple[float, ...]:
        """Absolute difference per step; NaN where either loss is NaN or both are infinite."""
        return tuple(abs(a - b) for a, b in zip(self.expected.losses, self.actual.losses, strict=True))

    @property
    def worst_step(self) -> int:
        """Step of the largest difference, counted from 0; a NaN is larger than any number."""
        differences = self.differences
        return max(range(len(differences)), key=lambda step: _nan_last(differences[step]))

    @property
    def largest(self) -> float:
        """The largest difference."""
        return self.differences[self.worst_step]

    @property
    def agree(self) -> bool:
        """Whether every step is within `TOLERANCE`."""
        return self.largest <= TOLERANCE


class Progress:
    """One line on a terminal, redrawn in place; on anything else a line per quarter of the work."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        """Draw nothing yet: the first `advance` does."""
        self._label, self._total, self._stream = label, total, stream
        self._done = 0
        self._drawn_at = -math.inf
        self._terminal = stream.isatty()

    def advance(self, note: str) -> None:
        """Count one step; `note` says how it went."""
        self._done += 1
        last = self._done == self._total
        if self._terminal:
            now = time.monotonic()
            if last or now - self._drawn_at >= 0.1:
                self._drawn_at = now
                width = shutil.get_terminal_size().columns - 1
                self._stream.write("\r" + self._line(note)[:width].ljust(width))
        elif last or self._done * 4 // self._total > (self._done - 1) * 4 // self._total:
            self._stream.write(f"{self._label} {self._done}/{self._total} {note}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the terminal's line, also after an interrupted run."""
        if self._terminal and self._done:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, note: str) -> str:
        bar = ("#" * (self._done * BAR_WIDTH // self._total)).ljust(BAR_WIDTH, ".")
        return f"{self._label:<10}{self._done:>{len(str(self._total))}}/{self._total} {note} [{bar}]"


class NextWord(torch.nn.Module):
    """Predicts a word from the `CONTEXT_WORDS` before it: embedding, one hidden layer, logits."""

    def __init__(self, vocabulary: int) -> None:
        """Make the weights from PyTorch's global generator; the extra embedding is the unknown word's."""
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary + 1, EMBEDDING_WIDTH)
        self.hidden = torch.nn.Linear(CONTEXT_WORDS * EMBEDDING_WIDTH, HIDDEN_WIDTH)
        self.logits = torch.nn.Linear(HIDDEN_WIDTH, vocabulary)

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """`(B, CONTEXT_WORDS)` int64 word numbers to `(B, V)` fp32 logits."""
        logits: torch.Tensor = self.logits(torch.tanh(self.hidden(self.embedding(contexts).flatten(1))))
        return logits


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 where the curves agree, 1 where they part, 2 where there is nothing to compare."""
    options = parse(argv)
    print("\n".join(machine_report(options.device)))
    corpus = read_corpus(standard_library_text())
    print("\n".join(job_report(corpus, options.steps)), flush=True)
    try:
        comparison = Comparison(
            train("pytorch", pytorch_cross_entropy, corpus, options.steps, options.device, sys.stderr),
            train("greyhound", greyhound_cross_entropy, corpus, options.steps, options.device, sys.stderr),
        )
    except _artifacts.ArtifactError as error:
        print(f"python -m greyhound: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(comparison_report(comparison)))
    if options.plot is not None:
        plot(comparison, options.device, options.plot)
        print(f"\nwrote {options.plot}")
    return 0 if comparison.agree else 1


def parse(argv: Sequence[str] | None) -> Options:
    """Read and check the command line; anything that cannot work ends here with argparse's exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m greyhound",
        description="Say what works on this machine, then train a small next-word model with PyTorch's loss and with "
        "Greyhound's and compare the loss curves.",
        epilog=f"Exit code 1 where the curves differ by more than {TOLERANCE:g} at any step, 2 where nothing could be "
        "compared.",
    )
    parser.add_argument("--steps", type=_steps, default=DEFAULT_STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--device", type=_device, help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--plot", type=_plot_path, metavar="FILE.png", help="draw both curves (needs matplotlib)")
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("pydoc_data") is None:
        parser.error("this Python comes without pydoc_data, the part of its standard library that holds the text")
    device = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Options(arguments.steps, device, arguments.plot)


def _steps(text: str) -> int:
    try:
        steps = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if steps < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {steps}")
    return steps


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise argparse.ArgumentTypeError(f"{text}: PyTorch {torch.__version__} finds no usable GPU here")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise argparse.ArgumentTypeError(f"{text}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def _plot_path(text: str) -> Path:
    path = Path(text)
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed: python -m pip install matplotlib")
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"expected a name that ends in .png, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written")
    return path


def machine_report(device: torch.device) -> list[str]:
    """Versions, GPUs, artifacts, and which implementation serves `device` and why."""
    rows = [
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {_cuda_of_torch()}"),
        *((package, _version(package)) for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi")),
        *_labelled("GPU", _gpus()),
        *_labelled("artifacts", _artifacts.describe()),
        ("device", f"{device}: {_device_name(device)}"),
        ("runs", _implementation(device)),
    ]
    return [f"Greyhound {greyhound.__version__}", *(f"  {label:<20}{text}" for label, text in rows)]


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Rows of a report, the label on the first only."""
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]


def _cuda_of_torch() -> str:
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> list[str]:
    """One line per GPU that PyTorch can use."""
    if not torch.cuda.is_available():
        return ["none that PyTorch can use"]
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = _artifacts.arch_for_capability(properties.major, properties.minor) or "no compiled kernel"
        memory_gib = properties.total_memory / 2**30
        capability = f"compute capability {properties.major}.{properties.minor}"
        lines.append(f"cuda:{index} {properties.name}, {memory_gib:.0f} GiB, {capability}: {arch}")
    return lines


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def _implementation(device: torch.device) -> str:
    arch, reason = implementation(device)
    return f"{f'the kernel compiled for {arch}' if arch else 'portable PyTorch implementation'}: {reason}"


def standard_library_text() -> str:
    """The documentation topics that ship with Python, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_corpus(text: str) -> Corpus:
    """Number the words of a text; its words seen less than `MIN_COUNT` times share one number."""
    words = [match.group() for match in _WORD.finditer(text)]
    kept = [word for word, count in Counter(words).most_common() if count >= MIN_COUNT]
    number = {word: index for index, word in enumerate(kept)}
    return Corpus(torch.tensor([number.get(word, len(kept)) for word in words]), len(kept))


def job_report(corpus: Corpus, steps: int) -> list[str]:
    """What is about to be trained."""
    ignored = (corpus.words == corpus.vocabulary).double().mean().item()
    return [
        "",
        "Next-word model on pydoc_data.topics",
        f"  {len(corpus.words):,} words; vocabulary {corpus.vocabulary:,}; {ignored:.1%} rare words, ignored",
        f"  {steps} steps of {BATCH_ROWS} x {corpus.vocabulary:,} fp32 logits, twice from seed {SEED}",
    ]


def batches(corpus: Corpus, seed: int) -> Iterator[Batch]:
    """Yield `(contexts, targets)`, `(BATCH_ROWS, CONTEXT_WORDS)` and `(BATCH_ROWS,)` int64 on the CPU, without end."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.arange(-CONTEXT_WORDS, 0)
    while True:
        at = torch.randint(CONTEXT_WORDS, len(corpus.words), (BATCH_ROWS,), generator=generator)
        targets = corpus.words[at]
        yield corpus.words[at[:, None] + before], targets.masked_fill(targets == corpus.vocabulary, IGNORE_INDEX)


def pytorch_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """PyTorch's mean cross entropy."""
    return torch.nn.functional.cross_entropy(logits, target, ignore_index=IGNORE_INDEX)


def greyhound_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Greyhound's mean cross entropy."""
    return cross_entropy(logits, target, ignore_index=IGNORE_INDEX)


def train(name: str, loss: Loss, corpus: Corpus, steps: int, device: torch.device, progress_to: TextIO) -> Curve:
    """Train a fresh model for `steps` steps; the same seed and loss give the same curve."""
    model = new_model(corpus.vocabulary, SEED).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses, seconds = [], []
    progress = Progress(name, steps, progress_to)
    with full_precision_products(), contextlib.closing(progress):
        for contexts, targets in itertools.islice(batches(corpus, SEED), steps):
            contexts, targets = contexts.to(device), targets.to(device)
            _wait(device)
            start = time.perf_counter()
            optimizer.zero_grad()
            value = loss(model(contexts), targets)
            torch.autograd.backward(value)
            optimizer.step()
            _wait(device)
            seconds.append(time.perf_counter() - start)
            losses.append(value.item())
            progress.advance(f"loss {losses[-1]:.4f}")
    return Curve(name, tuple(losses), tuple(seconds))


def new_model(vocabulary: int, seed: int) -> NextWord:
    """A model whose weights depend on `seed` alone, made on the CPU; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NextWord(vocabulary)


@contextlib.contextmanager
def full_precision_products() -> Iterator[None]:
    """Matrix products in fp32, whatever the process chose: TF32 would round away what is compared here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _nan_last(value: float) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(value) else (False, value)


def comparison_report(comparison: Comparison) -> list[str]:
    """The curves as a table, then what they amount to."""
    expected, actual, differences = comparison.expected, comparison.actual, comparison.differences
    steps = len(differences)
    top = max((loss for loss in expected.losses if math.isfinite(loss)), default=1.0)
    lines = ["", f"{'step':>8} {expected.name:>11} {actual.name:>11} {'difference':>11}"]
    for step in shown_steps(steps):
        a, b = expected.losses[step], actual.losses[step]
        lines.append(f"{step + 1:>8} {a:>11.6f} {b:>11.6f} {differences[step]:>11.1e}  {_bar(b, top)}".rstrip())
    verdict = "the curves agree" if comparison.agree else "THE CURVES PART"
    worst = f"{comparison.largest:.1e} at step {comparison.worst_step + 1} of {steps}"
    times = f"{expected.name} {expected.step_ms:.2f} ms, {actual.name} {actual.step_ms:.2f} ms"
    return [
        *lines,
        "",
        f"final loss          {expected.name} {expected.losses[-1]:.6f}, {actual.name} {actual.losses[-1]:.6f}",
        f"time per step       {times} (median; forward, backward and optimizer)",
        f"largest difference  {worst} (tolerance {TOLERANCE:.0e}): {verdict}",
    ]


def shown_steps(steps: int) -> list[int]:
    """At most `TABLE_ROWS` steps, evenly spread, the first and the last among them."""
    rows = min(TABLE_ROWS, steps)
    return [round(row * (steps - 1) / max(rows - 1, 1)) for row in range(rows)]


def _bar(loss: float, top: float) -> str:
    if not math.isfinite(loss) or top <= 0:
        return ""
    return "#" * min(BAR_WIDTH, max(0, round(loss / top * BAR_WIDTH)))


def plot_title(device: torch.device) -> str:
    """Device, versions and date: what a reader of the picture alone must know."""
    versions = f"Greyhound {greyhound.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    return f"{_device_name(device)} ({device})\n{versions}, {datetime.date.today().isoformat()}"


def plot(comparison: Comparison, device: torch.device, path: Path) -> None:
    """Draw both curves, and under them their difference, into a PNG."""
    # By name: matplotlib is an extra, and neither importing this module nor type-checking it may need it.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 6), layout="constrained")
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(comparison.differences) + 1)
    for curve, style in ((comparison.expected, "-"), (comparison.actual, "--")):
        curves.plot(steps, curve.losses, style, label=f"{curve.name}, {curve.step_ms:.2f} ms per step")
    curves.set_ylabel("loss (nats per word)")
    curves.legend()
    differences.plot(steps, comparison.differences, ".", markersize=3)
    differences.axhline(TOLERANCE, color="red", linewidth=1, label=f"tolerance {TOLERANCE:g}")
    differences.set_yscale("symlog", linthresh=1e-7)  # a difference of 0 has a place too
    differences.set_ylim(bottom=-2e-8)  # the points at 0 whole
    differences.set_ylabel("difference")
    differences.set_xlabel("step")
    differences.xaxis.get_major_locator().set_params(integer=True)
    differences.legend(loc="upper right", bbox_to_anchor=(1, 0.9))
    figure.suptitle(plot_title(device))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
