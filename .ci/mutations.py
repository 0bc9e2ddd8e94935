"""Small faults put into the library, one at a time: which of them do the tests on the CPU not see?

    python .ci/mutations.py [NUMBER ...]

Each fault of `FAULTS` is made in a copy of the working tree and the tests that should see it are run until one fails.
Prints a line for each and returns 1 if one survived. It takes minutes, and is run by hand.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

LINEAR = (
    "tests/greyhound/nn/test_linear.py",
    "tests/greyhound/ops/test_linear.py",
    "tests/greyhound/nn/test_modules.py",
)
PRODUCTS = ("tests/greyhound/kernels/test_linear.py", *LINEAR)
LOSS = ("tests/greyhound/nn/test_functional.py", "tests/greyhound/nn/test_options.py", "tests/greyhound/ops")
RAW = (
    "tests/greyhound/kernels/test_cross_entropy.py",
    "tests/greyhound/kernels/test_portable.py",
    "tests/test_random.py",
    "tests/test_cases.py",
)
GEOMETRY = ("tests/dsl_kernels/cross_entropy/test_geometry.py", "tests/dsl_kernels/cross_entropy/test_plan.py")
SHARDS = ("tests/greyhound/test_distributed.py",)
ARTIFACTS = ("tests/greyhound/test_artifacts.py", "tests/dsl_kernels/test_manifest.py")


class Fault(NamedTuple):
    """A line that is changed, and who should see it."""

    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "greyhound/kernels/portable.py",
        "here = in_range & (labels >= start) & (labels < start + V)",
        "here = in_range & (labels >= start) & (labels <= start + V)",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "index = torch.where(here, labels - start, 0)",
        "index = torch.where(here, labels, 0).clamp(max=V - 1)",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "torch.where(here[rows] | wrong, -target, 0.0)",
        "torch.where(valid[rows], -target, 0.0)",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "row_max = row_sums[rows, :1]",
        "row_max = row_max",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "exps.sum(dim=1) if row_sums is None else row_sums[rows, 1]",
        "exps.sum(dim=1)",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "spread = smoothing / columns * ce_weight",
        "spread = smoothing / V * ce_weight",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "x - row_max.masked_fill(nothing.unsqueeze(1), 0.0)",
        "x - row_max",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "d += d_of[shard] * ((m_of[shard] - m) * unit).exp()",
        "d += d_of[shard]",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "unit * (m_of[shard] - m) + gap_of[shard], target",
        "gap_of[shard], target",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "more = heads[shard, 0] * (unit * (m - m_of[shard])) + fall_of[shard]",
        "more = fall_of[shard]",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "(valid & (owns.sum(dim=0) != 1)) | ~fits",
        "valid & (owns.sum(dim=0) != 1)",
        SHARDS,
    ),
    Fault(
        "greyhound/kernels/shards.py",
        'NOTHING = (-float("inf"), 0.0, float("inf"), 0.0)',
        'NOTHING = (-float("inf"), 0.0, 0.0, 0.0)',
        SHARDS,
    ),
    Fault(
        "greyhound/ops/shards.py",
        "overwrites = sharded.inplace and not wanted_again()",
        "overwrites = False",
        SHARDS,
    ),
    Fault(
        "greyhound/ops/shards.py",
        "                how.add(found[0])",
        "                pass",
        SHARDS,
    ),
    Fault(
        "greyhound/ops/shards.py",
        "loss = linear.with_normalizer(loss, labels)",
        "loss = loss",
        SHARDS,
    ),
    Fault(
        "greyhound/ops/shards.py",
        "return grad_loss, None",
        "return grad_loss * 2, None",
        SHARDS,
    ),
    Fault(
        "greyhound/nn/sharded.py",
        "starts = [sum(sizes[:each]) for each in range(len(sizes))]",
        "starts = [each * sizes[0] for each in range(len(sizes))]",
        SHARDS,
    ),
    Fault(
        "greyhound/nn/sharded.py",
        "if starts[each] != end and sizes[each]:",
        "if False:",
        SHARDS,
    ),
    Fault("greyhound/nn/sharded.py", "if numbers != layout.numbers:", "if False:", SHARDS),
    Fault(
        "greyhound/nn/sharded.py",
        "    # Not before the exchange, for which the others wait.\n",
        "    return result\n",
        SHARDS,
    ),
    Fault("greyhound/nn/sharded.py", "add(torch.full((), torch.nan, device=local.device))", "pass", SHARDS),
    Fault(
        "greyhound/nn/sharded.py",
        "min(each.chunk for each in told)",
        "chunk",
        SHARDS,
    ),
    Fault("greyhound/nn/sharded.py", "key = (len(rows), columns,", "key = (columns,", SHARDS),
    Fault(
        "greyhound/nn/sharded.py",
        "ranks = dist.get_world_size(group) if averaged else 1",
        "ranks = dist.get_world_size(group)",
        SHARDS,
    ),
    Fault(
        "greyhound/nn/sharded.py",
        'return ops.summed(loss, add) if batch and reduction != "none" else loss',
        "return loss",
        SHARDS,
    ),
    Fault(
        "greyhound/nn/sharded.py",
        'if batch and reduction == "mean" and normalizer is None:',
        "if False:",
        SHARDS,
    ),
    Fault("greyhound/kernels/linear.py", "add=start > 0", "add=False", LINEAR),
    Fault("greyhound/kernels/linear.py", "(target != loss.ignore_index).sum()", "(target == target).sum()", LINEAR),
    Fault(
        "greyhound/kernels/linear.py",
        "else each[start:end] for each in incoming",
        "else each[: end - start] for each in incoming",
        LINEAR,
    ),
    Fault("greyhound/kernels/linear.py", "self.grad_bias.add_(term)", "term", LINEAR),
    Fault(
        "greyhound/kernels/linear.py",
        "row_weight=loss.row_weight[start:end]",
        "row_weight=loss.row_weight[: end - start]",
        LINEAR,
    ),
    Fault(
        "greyhound/kernels/linear.py",
        "torch.float32 if fp32_accumulation and not one_term else",
        "weight.dtype if fp32_accumulation and not one_term else",
        LINEAR,
    ),
    Fault("greyhound/kernels/linear.py", "torch.cat([self.grad_inputs, term])", "term", LINEAR),
    Fault("greyhound/kernels/linear.py", "a.device.type, enabled=False", "a.device.type, enabled=True", LINEAR),
    Fault("greyhound/kernels/linear.py", "tile[:, self.vocab :].zero_()", "pass", PRODUCTS),
    Fault("greyhound/kernels/linear.py", "if not grad_logits.is_set_to(part):", "if False:", PRODUCTS),
    Fault("greyhound/kernels/linear.py", "copy[len(tensor) :] = 0", "copy[len(tensor) :] = torch.nan", PRODUCTS),
    Fault(
        "greyhound/kernels/linear.py",
        "row_bytes = padded_columns(vocab, dtype) * dtype.itemsize",
        "row_bytes = vocab * dtype.itemsize",
        PRODUCTS,
    ),
    Fault("greyhound/kernels/linear.py", "rows if generous and fits and", "rows if generous and", PRODUCTS),
    Fault("greyhound/kernels/linear.py", "rows if generous and fits and", "rows if fits and", PRODUCTS),
    Fault(
        "greyhound/kernels/linear.py", "<= accumulator + size * row_bytes else", "<= size * row_bytes else", PRODUCTS
    ),
    Fault("greyhound/kernels/linear.py", "max(TILE_BYTES, accumulator) if", "TILE_BYTES if", PRODUCTS),
    Fault("greyhound/kernels/linear.py", "tile = min(tile, limit)", "tile = tile", PRODUCTS),
    Fault("greyhound/kernels/linear.py", "(most // ROW_MULTIPLE * ROW_MULTIPLE)", "most", PRODUCTS),
    Fault("greyhound/kernels/linear.py", "max(tile // row_bytes, ROW_MULTIPLE)", "max(tile // row_bytes, 1)", PRODUCTS),
    Fault("greyhound/ops/linear.py", "or batched or wanted_again()", "or batched", LINEAR),
    Fault("greyhound/ops/linear.py", "not ctx.made or wanted & (LSE | ENTROPY)", "not ctx.made", LINEAR),
    Fault("greyhound/ops/linear.py", "and torch.float16 not in dtypes", "and True", LINEAR),
    Fault("greyhound/ops/linear.py", "ctx.made and grad_lse is None and grad_entropy is None", "ctx.made", LINEAR),
    Fault("greyhound/ops/linear.py", "& (target >= 0) & valid", "& (target >= 0)", LINEAR),
    Fault("greyhound/ops/linear.py", "* torch.is_grad_enabled()", "", LINEAR),
    Fault("greyhound/ops/linear_loss.py", "given.shape[0] == products.rows", "given.shape[0] >= products.rows", LINEAR),
    Fault("greyhound/ops/linear_loss.py", "total += loss.detach()", "total = loss.detach().float()", LINEAR),
    Fault("greyhound/ops/linear_loss.py", "batched or wanted_again() or", "batched or", LINEAR),
    Fault("greyhound/nn/functional.py", "checked_chunk_size(chunk_size) or 0", "0", LINEAR),
    Fault("greyhound/nn/modules.py", 'getattr(head, "bias", None)', "None", LINEAR),
    Fault(
        "greyhound/ops/cross_entropy.py", "if grad_loss is None or wanted_again() or", "if grad_loss is None or", LOSS
    ),
    Fault("greyhound/ops/cross_entropy.py", "type(tensor) not in _PLAIN", "False", LINEAR),
    Fault("greyhound/ops/cross_entropy.py", "return once_differentiable(gradient)", "return gradient", LOSS),
    Fault(
        "greyhound/ops/options.py",
        "one_pass = wants_gradient and reduced and logits.dtype is not torch.float16",
        "one_pass = wants_gradient and reduced",
        LOSS,
    ),
    Fault("greyhound/ops/options.py", "grad_logits[:, V:].zero_()", "pass", LOSS),
    Fault("greyhound/ops/options.py", "if gradient.data_ptr() != address", "if False", LOSS),
    Fault(
        "greyhound/ops/options.py",
        "if grad_loss is None or ctx.done or wanted_again()",
        "if grad_loss is None or wanted_again()",
        LOSS,
    ),
    Fault(
        "greyhound/nn/arguments.py", "shifted[..., :-1] = target[..., 1:]", "shifted[..., 1:] = target[..., :-1]", LOSS
    ),
    Fault("greyhound/nn/arguments.py", "if logits.is_leaf or", "if False or", LOSS),
    Fault("greyhound/nn/arguments.py", "if rows.stride(0) < rows.shape[1]", "if rows.stride(0) < 0", LOSS),
    Fault("greyhound/kernels/cross_entropy.py", "(labels < 0) | (labels >= V)", "(labels < 0) | (labels > V)", RAW),
    Fault(
        "greyhound/kernels/cross_entropy.py", "logits.stride(0) < logits.shape[1] and", "logits.stride(0) < 0 and", RAW
    ),
    Fault("greyhound/kernels/cross_entropy.py", "torch.autograd.graph.increment_version(logits)", "pass", RAW),
    Fault("greyhound/kernels/portable.py", "1.0 + 2.0 * z_loss_multiplier * lse", "1.0 + z_loss_multiplier * lse", RAW),
    Fault("greyhound/kernels/portable.py", "gradient.masked_fill_(~valid[rows].unsqueeze(1), 0.0)", "pass", RAW),
    Fault(
        "greyhound/kernels/portable.py", "total / n_valid.clamp(min=1.0) if mean", "total / len(labels) if mean", LOSS
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "log_sum - target_shifted, 0.0).masked_fill_(wrong, torch.nan)",
        "log_sum - target_shifted, 0.0)",
        RAW,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "float(columns) if loss.weight is None",
        "float(columns + 1) if loss.weight is None",
        LOSS,
    ),
    Fault(
        "greyhound/kernels/portable.py",
        "mean_z_loss = torch.where(some, mean_z_loss, 0.0)",
        "mean_z_loss = mean_z_loss",
        LOSS,
    ),
    Fault(
        "dsl_kernels/cross_entropy/geometry.py",
        "ceil_div(lead + V % vector_elements, vector_elements)",
        "ceil_div(V % vector_elements, vector_elements)",
        GEOMETRY,
    ),
    Fault("dsl_kernels/cross_entropy/geometry.py", "* is_first, vectors)", ", vectors)", GEOMETRY),
    Fault("greyhound/_artifacts.py", "if found != sha256:", "if False:", ARTIFACTS),
    Fault(
        "greyhound/_artifacts.py",
        "status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022",
        "status.st_uid != os.getuid()",
        ARTIFACTS,
    ),
    Fault("greyhound/_artifacts.py", "mode=0o700", "mode=0o777", ARTIFACTS),
    Fault("greyhound/_artifacts.py", '("source_hash", "source hash", manifest.source_hash()),', "", ARTIFACTS),
)


def survives(fault: Fault, tree: Path) -> bool:
    """Return whether every test passes with the fault in `tree`, which is left as it was."""
    path = tree / fault.path
    source = path.read_text(encoding="utf-8")
    if fault.right not in source:
        raise SystemExit(f"{fault.path}: nothing reads {fault.right!r} any more")
    path.write_text(source.replace(fault.right, fault.wrong, 1), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *fault.tests]
        return subprocess.run(command, cwd=tree, capture_output=True, check=False).returncode == 0
    finally:
        path.write_text(source, encoding="utf-8")


def main(numbers: list[str]) -> int:
    """Make the faults of these numbers, or all."""
    chosen = [int(number) for number in numbers] or range(len(FAULTS))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        kept = ("greyhound", "dsl_kernels", "tests", "bench", "pyproject.toml", "README.md", "CHANGELOG.md", "setup.py")
        tree.mkdir()
        for name in kept:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "artifacts", "results")
                )
            else:
                shutil.copy(source, tree / name)
        for number in chosen:
            fault = FAULTS[number]
            survived = survives(fault, tree)
            survivors += survived
            outcome = "SURVIVED" if survived else "seen"
            print(f"{number:3} {outcome:8} {fault.path}: {fault.right} -> {fault.wrong or 'nothing'}", flush=True)
    print(f"{survivors} of {len(chosen)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
