"""Every error of the library: what provokes it, and that it says what was expected and what came.

The table is complete: each `raise` of `greyhound` is reached by a row, or stands in a list with who tests it. Tests of
the modules look at single arguments more closely.
"""

import ast
import functools
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import greyhound
import greyhound.__main__ as job
from dsl_kernels.cross_entropy import plan
from greyhound import _artifacts
from greyhound.distributed import vocab_parallel_cross_entropy
from greyhound.kernels.cross_entropy import cross_entropy_with_grad_kernel
from greyhound.nn import CrossEntropyLoss, LinearCrossEntropyLoss
from greyhound.nn.functional import (
    autograd_loss_and_logits_grad,
    chunked_linear_cross_entropy,
    chunked_linear_loss,
    cross_entropy,
    entropy,
    selective_log_softmax,
)

PACKAGE = Path(greyhound.__file__).parent
TESTS = Path(__file__).parent

LOGITS, LABELS = torch.arange(40.0).view(4, 10), torch.tensor([1, -100, 3, 9])
LEAF = LOGITS.clone().requires_grad_()
INPUTS, WEIGHT = torch.arange(12.0).view(4, 3), torch.arange(30.0).view(10, 3)
ONE_LOGIT, ONE_LABEL = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
TOO_MANY = 2**31


class Sharded(torch.Tensor):
    """What makes a DTensor one to the library: it offers the whole tensor."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def sharded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Sharded)


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(tensor)


def on_another_kind_of_device() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, labels, inputs and a weight on a device that is neither a CPU nor a CUDA GPU."""
    with FakeTensorMode():
        logits, inputs, weight = (torch.empty(shape, device="xla") for shape in ((4, 10), (4, 3), (10, 3)))
        return logits, torch.empty(4, dtype=torch.int64, device="xla"), inputs, weight


XLA = on_another_kind_of_device()

# What a row calls where an error needs more than arguments.


def with_a_tangent(function: Callable[..., Any], logits: torch.Tensor, target: torch.Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        function(torch.autograd.forward_ad.make_dual(logits, torch.ones_like(logits)), target)


def inside_a_transform(logits: torch.Tensor, target: torch.Tensor) -> None:
    torch.func.grad(lambda x: cross_entropy(x, target))(logits)


def differentiate_lse_in_place(logits: torch.Tensor, target: torch.Tensor) -> None:
    cross_entropy(logits * 1, target, inplace=True, return_lse=True).lse.sum().backward()


def differentiate_twice_in_place(logits: torch.Tensor, target: torch.Tensor) -> None:
    loss = cross_entropy(logits * 1, target, inplace=True)
    torch.autograd.grad(loss, logits, retain_graph=True)


def differentiate_a_batch_in_place(logits: torch.Tensor, target: torch.Tensor) -> None:
    loss = cross_entropy(logits * 1, target, inplace=True)
    torch.autograd.grad(loss, logits, torch.ones(2), is_grads_batched=True)


def use_twice_in_place(logits: torch.Tensor, target: torch.Tensor) -> None:
    again = logits * 1
    (cross_entropy(again, target, inplace=True) + again.sum()).backward()


def overwriting(view: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor, target: torch.Tensor) -> None:
    """Overwrite a view of what is no leaf."""
    logits = view(logits * 1)
    cross_entropy(logits, target[: logits.shape[0]], inplace=True)


class Row(NamedTuple):
    """A call, and what its error must say."""

    call: "partial[Any]"
    error: type[BaseException]
    argument: str
    """The message begins with it."""
    expected: str
    came: str
    step: str = ""
    """What to do, where that is not plain from the rest."""
    environment: tuple[str, str] = ("", "")


def numbers(name: str, call: "partial[Any]", expected: str, wrong: float) -> list[Row]:
    """Return the rows of a number: of another type, and out of its range."""
    return [
        Row(partial(call, **{name: "1"}), TypeError, name, expected, "got str"),
        Row(partial(call, **{name: wrong}), ValueError, name, expected, f"got {wrong}"),
    ]


raw = cross_entropy_with_grad_kernel
loss = partial(cross_entropy, LOGITS, LABELS)
in_shards = partial(vocab_parallel_cross_entropy, LOGITS, LABELS)
linear = partial(chunked_linear_cross_entropy, INPUTS, WEIGHT, LABELS)
own_loss = partial(chunked_linear_loss, INPUTS, WEIGHT)
PLAIN = "expected a plain tensor"
TENSOR, DTYPES = "expected a torch.Tensor", "expected dtype float16, bfloat16, float32"
POSITIVE = "a finite fp32 number above 0"
DTENSOR = "pass its full_tensor()"

ROWS = [
    # The raw helper.
    Row(partial(raw, [1.0], LABELS), TypeError, "logits", TENSOR, "got list"),
    Row(partial(raw, LOGITS, [1]), TypeError, "labels", TENSOR, "got list"),
    Row(partial(raw, sharded(LOGITS), LABELS), TypeError, "logits", PLAIN, "got a DTensor", DTENSOR),
    Row(partial(raw, LOGITS, sharded(LABELS)), TypeError, "labels", PLAIN, "got a DTensor", DTENSOR),
    Row(partial(raw, fake(LOGITS), fake(LABELS)), TypeError, "logits", PLAIN, "got FakeTensor"),
    Row(partial(raw, LOGITS.double(), LABELS), TypeError, "logits", DTYPES, "got torch.float64"),
    Row(partial(raw, LOGITS, LABELS.int()), TypeError, "labels", "expected dtype int64", "got torch.int32"),
    Row(partial(raw, LOGITS, LABELS, "1"), TypeError, "z_loss_multiplier", "expected a float", "got str"),
    Row(partial(raw, LOGITS, LABELS, 0.0, 1.5), TypeError, "ignore_index", "expected an int", "got float"),
    Row(partial(raw, LOGITS, LABELS, 0.0, 2**63), ValueError, "ignore_index", "expected an int64", f"got {2**63}"),
    Row(
        partial(raw, LOGITS.to_sparse(), LABELS),
        TypeError,
        "logits, labels",
        "expected dense tensors",
        "got torch.sparse_coo, torch.strided",
    ),
    Row(
        partial(raw, LOGITS.view(2, 2, 10), LABELS),
        ValueError,
        "logits",
        "expected shape (B, V)",
        "got (2, 2, 10)",
        "flatten(0, -2)",
    ),
    Row(partial(raw, LOGITS, LABELS[:3]), ValueError, "labels", "expected shape (4,), one per row", "got (3,)"),
    Row(partial(raw, LOGITS, LABELS.to("meta")), ValueError, "labels", "expected device cpu", "got meta"),
    Row(partial(raw, *XLA[:2]), ValueError, "logits", "expected a CUDA or CPU tensor", "got device xla"),
    Row(partial(raw, LOGITS[:, :0], LABELS), ValueError, "logits", "expected 1 to 2147483647 columns", "got 0"),
    Row(
        partial(raw, ONE_LOGIT.expand(TOO_MANY, 1), ONE_LABEL.expand(TOO_MANY)),
        ValueError,
        "logits",
        "expected at most 2147352576 rows",
        f"got {TOO_MANY}",
    ),
    Row(
        partial(raw, torch.zeros(10, 4).t(), LABELS),
        ValueError,
        "logits",
        "expected the last stride to be 1",
        "got strides (1, 4)",
    ),
    Row(
        partial(raw, torch.zeros(40).as_strided((4, 10), (9, 1)), LABELS),
        ValueError,
        "logits",
        "expected rows that do not overlap (row stride at least 10)",
        "got strides (9, 1)",
    ),
    Row(
        partial(raw, LEAF, LABELS),
        ValueError,
        "logits",
        "expected a tensor that may be overwritten",
        "got a leaf that requires grad",
        "torch.no_grad()",
    ),
    Row(
        partial(raw, LOGITS, torch.tensor([0, 10, 0, 0])),
        IndexError,
        "labels",
        "expected 0 to 9 or ignore_index=-100",
        "got 10 in row 1",
    ),
    # The loss.
    Row(partial(loss, reduction="avg"), ValueError, "reduction", "expected one of 'mean', 'sum', 'none'", "got 'avg'"),
    Row(partial(CrossEntropyLoss, reduction="avg"), ValueError, "reduction", "expected one of 'mean'", "got 'avg'"),
    Row(
        partial(cross_entropy, LOGITS, LABELS[:3]),
        ValueError,
        "target",
        "expected shape (4,), that of logits without V",
        "got (3,)",
    ),
    Row(
        partial(cross_entropy, LOGITS[0], LABELS[0], shift=True),
        ValueError,
        "shift",
        "expected logits with a dimension of positions",
        "got shape (10,)",
    ),
    Row(
        partial(cross_entropy, LOGITS, LABELS.short()),
        TypeError,
        "target",
        "expected dtype int64 or int32",
        "got torch.int16",
    ),
    Row(
        partial(cross_entropy, LOGITS, torch.full((4,), -1)), IndexError, "target", "expected 0 to 9", "got -1 in row 0"
    ),
    Row(
        partial(selective_log_softmax, LOGITS, torch.full((4,), 10)), IndexError, "target", "expected 0 to 9", "got 10"
    ),
    Row(partial(entropy, [0.0]), TypeError, "logits", TENSOR, "got list"),
    *numbers("label_smoothing", loss, "expected a number from 0 to 1", 1.5),
    *numbers("softcap", loss, f"expected None or {POSITIVE}", -1.0),
    *numbers("logit_scale", loss, f"expected {POSITIVE}", 0.0),
    *numbers("normalizer", loss, f"expected {POSITIVE} or a tensor", 0.0),
    Row(partial(loss, valid_vocab=5.0), TypeError, "valid_vocab", "expected an int", "got float"),
    Row(partial(loss, valid_vocab=11), ValueError, "valid_vocab", "expected 1 to 10, the columns of logits", "got 11"),
    Row(partial(loss, weight=[1.0] * 10), TypeError, "weight", TENSOR, "got list"),
    Row(partial(loss, weight=sharded(torch.ones(10))), TypeError, "weight", PLAIN, "got a DTensor", DTENSOR),
    Row(
        partial(loss, weight=torch.ones(10, dtype=torch.int64)),
        TypeError,
        "weight",
        "expected a floating-point dtype",
        "got torch.int64",
    ),
    Row(
        partial(loss, row_weight=torch.ones(4, requires_grad=True)),
        ValueError,
        "row_weight",
        "expected a tensor that requires no grad",
        "got one that does",
        "detach it",
    ),
    Row(partial(loss, row_weight=torch.ones(3)), ValueError, "row_weight", "expected shape (4,)", "got (3,)"),
    Row(partial(loss, weight=torch.ones(10).to("meta")), ValueError, "weight", "expected device cpu", "got meta"),
    Row(
        partial(loss, normalizer=3.0, reduction="sum"),
        ValueError,
        "normalizer",
        "expected reduction 'mean'",
        "got 'sum'",
    ),
    Row(
        partial(loss, normalizer=torch.ones(2)),
        ValueError,
        "normalizer",
        "expected a tensor with one element",
        "got shape (2,)",
    ),
    Row(
        partial(loss, normalizer=torch.tensor(True)),
        TypeError,
        "normalizer",
        "expected an integer or floating-point dtype",
        "got torch.bool",
    ),
    Row(
        partial(loss, normalizer=torch.ones((), requires_grad=True)),
        ValueError,
        "normalizer",
        "expected a tensor that requires no grad",
        "got one that does",
        "detach it",
    ),
    Row(
        partial(with_a_tangent, cross_entropy, LOGITS, LABELS),
        NotImplementedError,
        "logits",
        "expected a tensor without a tangent",
        "got a dual tensor",
    ),
    Row(
        partial(inside_a_transform, LOGITS, LABELS),
        NotImplementedError,
        "logits",
        "expected a call outside torch.func transforms",
        "got one inside",
        "torch.autograd.grad",
    ),
    # Logits that are to be overwritten.
    Row(
        partial(loss, inplace=True, reduction="none"),
        ValueError,
        "inplace",
        "expected reduction 'mean' or 'sum'",
        "got 'none'",
        "inplace_backward",
    ),
    Row(
        partial(cross_entropy, LEAF, LABELS, inplace=True),
        ValueError,
        "inplace",
        "expected logits that are not a leaf",
        "got a leaf",
        "leave inplace out",
    ),
    Row(
        partial(cross_entropy, LEAF[:, :5], LABELS[:1].expand(4), inplace_backward=True),
        ValueError,
        "inplace_backward",
        "expected logits that are not a leaf, nor a view of one",
        "got a view of one",
        "leave inplace_backward out",
    ),
    Row(
        partial(overwriting, lambda y: y.t()[:4], LEAF, LABELS[:1].expand(4)),
        ValueError,
        "inplace",
        "expected logits that can be seen as (B, V) with last stride 1",
        "got (1, 10)",
    ),
    Row(
        partial(overwriting, lambda y: y[:1].expand(4, 10), LEAF, LABELS),
        ValueError,
        "inplace",
        "expected rows that do not overlap",
        "got strides (0, 1)",
    ),
    Row(
        partial(overwriting, lambda y: y[:2], LEAF, LABELS),
        ValueError,
        "inplace",
        "expected logits that are all of their storage",
        "got 20 of 40",
    ),
    Row(
        partial(overwriting, lambda y: y[:], LEAF, LABELS),
        ValueError,
        "inplace",
        "expected logits that are a reshape of the tensor",
        "got SliceBackward0",
    ),
    Row(
        partial(differentiate_lse_in_place, LEAF, LABELS),
        RuntimeError,
        "greyhound: with inplace=True",
        "the logits are gone",
        "the gradient of lse and entropy",
        "detach these, or leave inplace out",
    ),
    Row(
        partial(differentiate_twice_in_place, LEAF, LABELS),
        RuntimeError,
        "greyhound: with inplace=True",
        "there is one backward pass",
        "no graph is kept",
    ),
    Row(
        partial(differentiate_a_batch_in_place, LEAF, LABELS),
        RuntimeError,
        "greyhound: with inplace=True",
        "expects one gradient",
        "got a batch of them",
        "leave inplace out",
    ),
    Row(
        partial(use_twice_in_place, LEAF, LABELS),
        RuntimeError,
        "greyhound: logits were overwritten (inplace=True)",
        "their gradient is not that of the loss alone",
        "something else used them too",
        "leave inplace out",
    ),
    # The linear form.
    Row(partial(chunked_linear_cross_entropy, [1.0], WEIGHT, LABELS), TypeError, "inputs", TENSOR, "got list"),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS, sharded(WEIGHT), LABELS),
        TypeError,
        "weight",
        PLAIN,
        "got a DTensor",
        DTENSOR,
    ),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS.to_sparse(), WEIGHT, LABELS),
        TypeError,
        "inputs",
        "expected a dense tensor",
        "got torch.sparse_coo",
    ),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS, WEIGHT.double(), LABELS),
        TypeError,
        "weight",
        DTYPES,
        "got torch.float64",
    ),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS, WEIGHT.half(), LABELS),
        TypeError,
        "weight",
        "expected torch.float32, that of inputs",
        "got torch.float16",
        "torch.autocast",
    ),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS[:, :0], WEIGHT, LABELS),
        ValueError,
        "inputs",
        "expected shape (..., H) with H at least 1",
        "got (4, 0)",
    ),
    Row(
        partial(chunked_linear_cross_entropy, *XLA[2:], XLA[1]),
        ValueError,
        "inputs",
        "expected a CUDA or CPU tensor",
        "got device xla",
    ),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS, WEIGHT[:0], LABELS),
        ValueError,
        "weight",
        "expected shape (V, 3)",
        "got (0, 3)",
        "gather it around the call",
    ),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS, WEIGHT.t(), LABELS),
        ValueError,
        "weight",
        "expected shape (V, 3)",
        "got (3, 10)",
    ),
    Row(partial(linear, bias=torch.ones(9)), ValueError, "bias", "expected shape (10,)", "got (9,)"),
    Row(
        partial(linear, bias=torch.ones(10).to("meta")),
        ValueError,
        "bias",
        "expected device cpu, that of inputs",
        "got meta",
    ),
    Row(partial(chunked_linear_cross_entropy, INPUTS, WEIGHT, [1]), TypeError, "target", TENSOR, "got list"),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS, WEIGHT, sharded(LABELS)),
        TypeError,
        "target",
        PLAIN,
        "got a DTensor",
        DTENSOR,
    ),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS, WEIGHT, LABELS.to("meta")),
        ValueError,
        "target",
        "expected device cpu, that of inputs",
        "got meta",
    ),
    Row(
        partial(chunked_linear_cross_entropy, INPUTS, WEIGHT, LABELS[:3]),
        ValueError,
        "target",
        "expected shape (4,), that of inputs without H",
        "got (3,)",
    ),
    Row(
        partial(linear, grad_weight_accum_dtype="bf16"),
        ValueError,
        "grad_weight_accum_dtype",
        "expected 'fp32' or 'weight'",
        "got 'bf16'",
    ),
    Row(partial(linear, chunk_size=2.0), TypeError, "chunk_size", "expected None or an int", "got float"),
    Row(partial(linear, chunk_size=0), ValueError, "chunk_size", "expected at least 1", "got 0"),
    Row(partial(LinearCrossEntropyLoss, 3, 10, chunk_size=0), ValueError, "chunk_size", "expected at least 1", "got 0"),
    Row(
        partial(LinearCrossEntropyLoss.from_head, WEIGHT),
        TypeError,
        "head",
        "expected a layer with a weight, like torch.nn.Linear",
        "got Tensor",
    ),
    Row(
        partial(LinearCrossEntropyLoss.from_head, torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 10))),
        TypeError,
        "head",
        "expected a weight that is a parameter",
        "got Tensor",
    ),
    Row(
        partial(LinearCrossEntropyLoss.from_head, torch.nn.Linear(3, 10), bias=True),
        TypeError,
        "bias",
        "expected none, since the head has its own",
        "got one",
        "leave it out",
    ),
    # A loss of the caller's own.
    Row(partial(own_loss, 3), TypeError, "loss_and_grad_fn", "expected a function", "got int"),
    Row(
        partial(own_loss, lambda x: x.sum()),
        TypeError,
        "loss function",
        "expected to return (loss, grad_logits)",
        "got Tensor",
        "autograd_loss_and_logits_grad",
    ),
    Row(
        partial(own_loss, autograd_loss_and_logits_grad(lambda x: 1.0)),
        TypeError,
        "loss function",
        "expected to return a torch.Tensor",
        "got float",
    ),
    Row(
        partial(own_loss, lambda x: (x.sum(1), x)),
        ValueError,
        "loss function",
        "expected to return a scalar tensor",
        "got shape (4,)",
    ),
    Row(
        partial(own_loss, lambda x: (x.sum(), None)),
        TypeError,
        "loss function",
        "expected to return a torch.Tensor as gradient",
        "got NoneType",
    ),
    Row(
        partial(own_loss, lambda x: (x.sum(), x[:, 1:])),
        ValueError,
        "loss function",
        "expected to return a gradient of shape (4, 10)",
        "got (4, 9)",
    ),
    # The command line, where the argument is named by its parser.
    Row(partial(job.main, ["--steps", "x"]), SystemExit, "argument --steps", "expected a whole number", "got 'x'"),
    Row(partial(job.main, ["--steps", "0"]), SystemExit, "argument --steps", "expected at least 1", "got 0"),
    Row(
        partial(job.main, ["--device", "?"]), SystemExit, "argument --device", "expected cpu, cuda or cuda:N", "got '?'"
    ),
    Row(
        partial(job.main, ["--device", "meta"]),
        SystemExit,
        "argument --device",
        "expected cpu, cuda or cuda:N",
        "got 'meta'",
    ),
    # Logits in shards.
    Row(partial(vocab_parallel_cross_entropy, 3, LABELS), TypeError, "local_logits", "a torch.Tensor", "got int"),
    Row(
        partial(vocab_parallel_cross_entropy, sharded(LOGITS), LABELS),
        TypeError,
        "local_logits",
        "a plain tensor",
        "got a DTensor",
        "to_local()",
    ),
    Row(
        partial(vocab_parallel_cross_entropy, LOGITS.to("meta"), LABELS.to("meta")),
        ValueError,
        "local_logits",
        "a CUDA or CPU tensor",
        "got device meta",
    ),
    Row(partial(in_shards, vocab_start="0"), TypeError, "vocab_start", "None or an int", "got str"),
    Row(partial(in_shards, vocab_size=0), ValueError, "vocab_size", "1 to 2147483647", "got 0"),
    Row(
        partial(in_shards, vocab_size=2**31),
        ValueError,
        "vocab_size",
        "1 to 2147483647",
        "got 2147483648",
    ),
    Row(in_shards, ValueError, "group", "a process group", "got none", "init_process_group"),
    Row(
        partial(cross_entropy, sharded(LOGITS), LABELS, return_lse=True),
        ValueError,
        "return_lse",
        "it only with plain logits",
        "got a DTensor",
        "full_tensor()",
    ),
    # The environment.
    Row(
        partial(_artifacts.load, "sm_90a", plan.SPECS[0]),
        _artifacts.ArtifactError,
        str(TESTS),
        "expected kernels there, as GREYHOUND_ARTIFACTS says",
        "got no manifest.json",
        "unset GREYHOUND_ARTIFACTS",
        environment=("GREYHOUND_ARTIFACTS", str(TESTS)),
    ),
]

ELSEWHERE = {
    "nn.sharded.vocab_parallel_cross_entropy": ["check_wrong_arguments_are_named"],
    "nn.sharded._checked_group": [
        "check_wrong_arguments_are_named",
        "check_a_group_of_other_ranks_is_refused_and_its_own_is_right",
    ],
    "nn.sharded._layout": ["check_a_shape_that_has_not_been_met_is_refused_in_a_capture"],
    "nn.sharded._agreed": [
        *["check_what_does_not_fit_raises_on_every_rank"] * 3,
        "check_wrong_arguments_are_named",
        "check_a_vocab_size_that_is_not_that_of_all_ranks_is_refused",
    ],
    "nn.sharded._all_alike": ["check_what_does_not_fit_raises_on_every_rank"],
    "nn.sharded.global_normalizer": ["check_wrong_arguments_are_named"] * 2,
    "nn.sharded.dtensor_cross_entropy": ["check_other_dtensors_are_refused_by_name"],
    "nn.sharded._placed": ["check_other_dtensors_are_refused_by_name"],
    "nn.sharded._beside": ["check_other_dtensors_are_refused_by_name"] * 3,
    "__main__._device": ["test_a_gpu_that_is_not_there_is_refused"] * 2,
    "__main__._plot_path": [
        *["test_a_plot_that_cannot_be_written_is_refused"] * 3,
        "test_a_plot_without_matplotlib_is_refused",
    ],
    "_artifacts.cache_folder": ["test_without_a_home_folder_the_variable_for_the_cache_is_named"],
    "_artifacts.load": ["test_without_the_compiler_a_missing_kernel_is_named_with_the_command_that_builds_it"],
    "_artifacts._describe_cache": ["test_a_home_folder_that_cannot_be_searched_is_named_and_no_traceback"],
    "_artifacts._checked_manifest": [
        "test_what_is_no_manifest_of_this_format_is_refused_by_name",
        "test_kernels_of_another_source_or_version_are_refused_saying_what_was_expected_and_what_came",
        "test_a_manifest_that_names_another_file_than_the_arch_s_own_is_refused_by_name",
    ],
    "_artifacts._check_dsl_is_of_one_version": [
        "test_libraries_of_the_dsl_in_several_versions_are_refused_by_name_with_what_to_do"
    ],
    "_artifacts._check_object": [
        "test_a_shared_object_that_is_gone_is_named",
        "test_an_altered_shared_object_is_refused_by_name_before_it_is_loaded",
    ],
    "_artifacts._load_module": ["test_a_file_that_the_dynamic_loader_refuses_is_named"],
    "_artifacts._load_cached": [
        "test_a_cache_that_is_a_file_is_refused_by_name",
        "test_a_build_that_leaves_no_kernel_is_not_trusted",
    ],
    "_artifacts._check_private": [
        "test_a_link_of_another_user_is_refused_wherever_it_leads",
        "test_a_cache_that_others_may_write_is_refused_before_anything_is_loaded_or_compiled",
    ],
    "_artifacts._compile_into": [
        "test_a_failing_compile_says_what_was_run_and_what_it_printed_and_can_be_tried_again",
    ],
}
"""Errors that need files, modules, users or GPUs of their own: for each `raise` of a function, who tests it."""

NEVER = {"_artifacts.<module>": 1}
"""What only a change of the source can raise, and then in every import."""


class Raise(NamedTuple):
    """A statement that raises something new."""

    function: str
    """Module and function."""
    path: Path
    lines: range


def raises_of(path: Path) -> Iterator[Raise]:
    """Yield the statements of a file that raise something new."""
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)

    def inside(node: ast.AST, function: str) -> Iterator[Raise]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Raise) and child.exc is not None:
                yield Raise(f"{module}.{function}", path, range(child.lineno, (child.end_lineno or 0) + 1))
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from inside(child, child.name if is_function else function)

    yield from inside(ast.parse(path.read_text(encoding="utf-8")), "<module>")


def lines_of(error: BaseException | None) -> set[tuple[Path, int]]:
    """Return the lines that an error, and those that it came from, passed through."""
    found = set()
    while error is not None:
        trace: types.TracebackType | None = error.__traceback__
        while trace is not None:
            found.add((Path(trace.tb_frame.f_code.co_filename), trace.tb_lineno))
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return found


def given_tensors(call: "partial[Any]") -> list[torch.Tensor]:
    """Return the tensors of a call whose values can be looked at."""
    return [
        each
        for each in (*call.args, *call.keywords.values())
        if type(each) is torch.Tensor
        and each.layout is torch.strided
        and each.device.type == "cpu"
        and each.numel() < 99
    ]


def provoked(row: Row) -> BaseException:
    """Return the error that a row's call raises."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GREYHOUND_ARTIFACTS", raising=False)
        if row.environment[0]:
            patch.setenv(*row.environment)
        with pytest.raises(row.error) as raised:
            row.call()
    return raised.value


def named(row: Row) -> str:
    """Return the id of a row."""
    return re.sub(r"\W+", "_", f"{row.argument} {row.expected} {row.came}" if not row.environment[0] else "environment")


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_an_error_names_the_argument_what_was_expected_and_what_came_and_nothing_is_changed(
    row: Row, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = given_tensors(row.call)
    before = [(each.detach().clone(), each._version) for each in tensors]
    error = provoked(row)
    assert type(error) is row.error
    message = str(error)
    if isinstance(error, SystemExit):
        assert error.code == 2
        message = capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]
    assert message.startswith(row.argument)
    for part in (row.expected, row.came, row.step):
        assert part in message
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), values)
        assert tensor._version == version
    assert LEAF.grad is None


def test_every_raise_of_the_library_is_in_the_table_or_tested_elsewhere() -> None:
    lines = functools.reduce(set.union, (lines_of(provoked(row)) for row in ROWS))
    statements = [each for path in sorted(PACKAGE.rglob("*.py")) for each in raises_of(path)]
    unreached = [each for each in statements if not any((each.path, line) in lines for line in each.lines)]
    expected = Counter({function: len(tests) for function, tests in ELSEWHERE.items()}) + Counter(NEVER)
    where = [f"{each.path.relative_to(PACKAGE)}:{each.lines.start}" for each in unreached]
    assert Counter(each.function for each in unreached) == expected, where


@pytest.mark.parametrize("function", ELSEWHERE)
def test_who_is_said_to_test_an_error_exists(function: str) -> None:
    file = {"__main__": "greyhound/test_main.py", "_artifacts": "greyhound/test_artifacts.py", "nn": "ranks.py"}
    source = (TESTS / file[function.partition(".")[0]]).read_text(encoding="utf-8")
    for test in ELSEWHERE[function]:
        assert f"def {test}(" in source
