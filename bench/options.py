"""What each option of `cross_entropy` costs: its time beside that of the plain loss, in one process.

    python -m bench.options [--shapes 8192x128256] [--dtypes bf16] [--out DIR] [--commit HASH]

Modes `fwd` and `fwd+bwd` of `greyhound.nn.functional.cross_entropy` with one option at a time; without a reduction also
quack's. Before it is timed the gradient of a few rows is compared with the portable code's on the CPU. The plain loss
is timed again just before each, since a GPU's clock drifts by more than some options cost. Rows go to DIR/<gpu>.json as
in `bench.results`, their `op` naming the option; `copy_ms` is that time of the plain loss in the same mode, `of_copy`
that over the option's, and `times_plain`, which is printed, one over it. In the plain loss's own rows they are the
copy's.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.cases import DTYPES, SEED, Shape, dtype_name, parse_dtypes, parse_shapes
from bench.check import Mismatch
from bench.measure import OP, first_line, free
from bench.memory import peak_mib
from bench.provenance import Provenance, provenance
from bench.results import FOLDER, ResultFile, Row
from bench.timer import DEFAULT_BUDGET_S, Timer
from greyhound.nn.functional import cross_entropy

OUT = FOLDER / "options"
CHECKED_ROWS = 4
QUACK = "quack"

Call = Callable[[torch.Tensor, torch.Tensor], Any]


def options_for(vocab: int, rows: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the arguments of every option, by name; "plain" has none and comes first."""
    generator = torch.Generator().manual_seed(SEED)
    weight, row_weight = (torch.rand(size, generator=generator).to(device) for size in (vocab, rows))
    return {
        "plain": {},
        "z_loss": {"z_loss_multiplier": 1e-4},
        "logit_scale": {"logit_scale": 0.5},
        "row_weight": {"row_weight": row_weight},
        "normalizer": {"normalizer": torch.tensor(1000.0, device=device)},
        "return_lse": {"return_lse": True},
        "return_z_loss": {"z_loss_multiplier": 1e-4, "return_z_loss": True},
        "weight": {"weight": weight},
        "label_smoothing": {"label_smoothing": 0.1},
        "softcap": {"softcap": 30.0},
        "return_token_accuracy": {"return_token_accuracy": True},
        "return_predicted_tokens": {"return_predicted_tokens": True},
        "return_entropy": {"return_entropy": True},
        "softcap, label_smoothing": {"softcap": 30.0, "label_smoothing": 0.1},
        "weight, label_smoothing": {"weight": weight, "label_smoothing": 0.1},
        "reduction none": {"reduction": "none"},
        "reduction none, inplace_backward": {"reduction": "none", "inplace_backward": True},
        "inplace": {"inplace": True},
    }


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of what `cross_entropy` returns."""
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def gradient(call: Call, logits: torch.Tensor, target: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    """Run forward and backward on logits that are no leaf, so that they may be overwritten; return their gradient."""
    consumed: torch.Tensor = _NoLeaf.apply(logits)  # type: ignore[no-untyped-call]
    loss = loss_of(call(consumed, target))
    (grad,) = torch.autograd.grad(loss, consumed, incoming[: loss.numel()].reshape(loss.shape))
    return grad


class _NoLeaf(torch.autograd.Function):
    """The logits' own memory, as something that was computed; nothing is moved."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def verify(call: Call, name: str, arguments: dict[str, Any], logits: torch.Tensor, target: torch.Tensor) -> None:
    """Compare the gradient of a few rows with the portable code's on the CPU.

    Raises:
        Mismatch: it is off by more than two roundings.
    """
    few: dict[str, Any] = {
        key: value[:CHECKED_ROWS] if key == "row_weight" else value for key, value in arguments.items()
    }
    rows, labels = logits.detach()[:CHECKED_ROWS].clone().requires_grad_(), target[:CHECKED_ROWS]
    incoming = torch.linspace(0.5, 2.0, CHECKED_ROWS, device=logits.device)

    def with_few(x: torch.Tensor, t: torch.Tensor) -> Any:
        return call(x, t) if name == QUACK else cross_entropy(x, t, **few)

    on_cpu: dict[str, Any] = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in few.items()}

    def portable(x: torch.Tensor, t: torch.Tensor) -> Any:
        return cross_entropy(x, t, **on_cpu)

    expected = gradient(portable, rows.detach().cpu().float().requires_grad_(), labels.cpu(), incoming.cpu())
    got = gradient(with_few, rows, labels, incoming).cpu().float()
    slack = 2.0 * torch.finfo(logits.dtype).eps * expected.abs() + 1e-7 + 3e-6 * expected.abs().max()
    if not bool(((got - expected).abs() <= slack).all()):
        raise Mismatch(f"a gradient is off by {float((got - expected).abs().max()):.3g}")


def quack_without_reduction() -> Call:
    """Return quack's loss of each row."""
    from quack.cross_entropy import cross_entropy as quack_cross_entropy

    return lambda x, t: quack_cross_entropy(x, t, reduction="none")


def measure(shape: Shape, dtype: torch.dtype, timer: Timer, about: Provenance, out: ResultFile) -> int:
    """Measure every option on one shape, print a line for each, put its rows into `out`, and return how many failed.

    A peer that is not there has not failed.
    """
    failed = 0
    device = timer.device
    generator = torch.Generator(device).manual_seed(SEED)
    logits = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
    target = torch.randint(0, shape.vocab, (shape.rows,), device=device, generator=generator)
    target[::17] = -100
    kept = logits.clone()
    logits.requires_grad_()
    incoming = torch.ones(shape.rows, device=device)
    copy_ms = timer.measure(lambda: kept.copy_(logits.detach())).ms
    plain = _with({})
    calls = [("greyhound", name, arguments) for name, arguments in options_for(shape.vocab, shape.rows, device).items()]
    calls.append((QUACK, "reduction none", {"reduction": "none"}))
    for provider, name, arguments in calls:
        free(device)
        try:
            call = quack_without_reduction() if provider == QUACK else _with(arguments)
            verify(call, provider, arguments, logits, target)
            overwrites = "inplace" in name
            restore = (lambda: logits.detach().copy_(kept)) if overwrites else None
            for mode, run, run_plain in (
                ("fwd", lambda call=call: _forward(call, logits, target), lambda: _forward(plain, logits, target)),
                (
                    "fwd+bwd",
                    lambda call=call: gradient(call, logits, target, incoming),
                    lambda: gradient(plain, logits, target, incoming),
                ),
            ):
                if mode == "fwd" and (overwrites or provider == QUACK):
                    continue
                run()
                if restore is not None:
                    restore()
                peak = peak_mib(run, device)
                before_ms = copy_ms if name == "plain" else timer.measure(run_plain).ms
                timing = timer.measure(run, restore)
                out.put(
                    Row(
                        op=f"{OP}, {name}",
                        provider=provider,
                        mode=mode,
                        rows=shape.rows,
                        vocab=shape.vocab,
                        dtype=dtype_name(dtype),
                        ms=round(timing.ms, 5),
                        ms_low=round(timing.ms_low, 5),
                        ms_high=round(timing.ms_high, 5),
                        copy_ms=round(before_ms, 5),
                        of_copy=float(f"{before_ms / timing.ms:.4g}"),
                        peak_mib=None if peak is None else round(peak, 1),
                        host_us=None,
                        graph=None,
                        date=about.today(),
                        **about._asdict(),
                    )
                )
                extra = "" if peak is None else f", {peak:.1f} MiB"
                times_plain = 1.0 if name == "plain" else timing.ms / before_ms
                print(
                    f"{shape} {dtype_name(dtype)} {provider:9} {name:34} {mode:8} {timing.ms:8.4f} ms"
                    f"  times_plain {times_plain:.3f}  of_copy {copy_ms / timing.ms:.3f}{extra}",
                    flush=True,
                )
        except Exception as error:
            failed += not isinstance(error, ImportError)
            print(f"{shape} {dtype_name(dtype)} {provider:9} {name:34} failed: {first_line(error)}", flush=True)
    return failed


def _with(arguments: dict[str, Any]) -> Call:
    return lambda x, t: cross_entropy(x, t, **arguments)


def _forward(call: Call, logits: torch.Tensor, target: torch.Tensor) -> Any:
    with torch.no_grad():
        return call(logits, target)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.options", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", type=parse_shapes, default="8192x128256", help="ROWSxVOCAB[,...]")
    parser.add_argument("--dtypes", type=parse_dtypes, default="bf16", help=f"out of {', '.join(DTYPES)}")
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds for each measurement")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--commit", help="of the source measured, where git cannot tell")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    timer = Timer(device, options.budget)
    about = provenance(device, options.commit)
    out = ResultFile(options.out, about.gpu)
    failed = sum(measure(shape, dtype, timer, about, out) for shape in options.shapes for dtype in options.dtypes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
