"""The grid of kernels: names, sizes, and that a spec holds what is compiled in and nothing of a call."""

import dataclasses
import re

import pytest

from dsl_kernels.cross_entropy.plan import SPECS
from dsl_kernels.cross_entropy.spec import (
    ARCHS,
    CE_SUM,
    DTYPE_NAMES,
    ENTRY_ELEMENTS,
    ITEM_BYTES,
    LOSS,
    MAX_ROWS,
    N_VALID,
    OPTIONS,
    SUMS_HEAD,
    VECTOR_BYTES,
    WEIGHT_SUM,
    Z_SUM,
    Spec,
    options_kind,
    sums_elements,
)


def test_every_kernel_has_its_own_name_which_is_a_c_symbol():
    names = [spec.name for spec in SPECS]
    assert len(set(names)) == len(names)
    assert len(set(SPECS)) == len(SPECS)
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", name) for name in names)


def test_every_field_shows_in_the_name():
    spec = Spec("fused", "bfloat16", 256, held=2)
    others = {
        "op": Spec("scale", "bfloat16", 256),
        "dtype": Spec("fused", "float16", 256, held=2),
        "threads": Spec("fused", "bfloat16", 512, held=2),
        "grad": Spec("fused", "bfloat16", 256, grad=False, held=2),
        "narrow": Spec("fused", "bfloat16", 256, narrow=True),
        "held": Spec("fused", "bfloat16", 256, held=4),
        "lanes": Spec("fused", "bfloat16", 256, held=2, lanes=16),
        "streamed": Spec("fused", "bfloat16", 256, streamed=True),
        "options": Spec("fused", "bfloat16", 256, options="softcap"),
        "none of them": Spec("fused", "bfloat16", 256),
    }
    assert {field.name for field in dataclasses.fields(Spec)} == set(others) - {"none of them"}
    assert len({spec.name, *(other.name for other in others.values())}) == len(others) + 1


def test_the_example_in_the_docstring_is_a_name():
    (example,) = re.findall(r"e\.g\. `(\w+)`", Spec.name.__doc__)
    assert example in {spec.name for spec in SPECS}


@pytest.mark.parametrize("B", [0, 1, 2, 1000, MAX_ROWS])
def test_a_workspace_holds_the_totals_and_an_aligned_entry_for_each_row(B):
    assert sums_elements(B) == SUMS_HEAD + ENTRY_ELEMENTS * B
    assert {CE_SUM, Z_SUM, N_VALID, LOSS, WEIGHT_SUM} == set(range(5))
    assert SUMS_HEAD >= 5
    # fp32: an entry is one 16-byte access, from an aligned base.
    assert ENTRY_ELEMENTS * 4 == VECTOR_BYTES
    assert SUMS_HEAD * 4 % VECTOR_BYTES == 0


def test_a_block_is_whole_warps_that_a_gpu_accepts():
    for spec in SPECS:
        assert spec.threads % 32 == 0
        assert 32 <= spec.threads <= 1024


def test_a_kernel_is_of_one_kind_and_rows_are_shared_by_whole_parts_of_a_warp():
    for spec in SPECS:
        assert spec.narrow + (spec.held > 0) + spec.streamed <= 1
        assert not (spec.streamed and not spec.grad)
        assert 32 % spec.lanes == 0
        assert spec.held or spec.lanes == 32
        if spec.op == "scale":
            assert spec == Spec("scale", spec.dtype, spec.threads)


def test_every_dtype_has_every_kernel():
    of_logits = [spec for spec in SPECS if spec.op != "combine"]  # that has none
    kinds = {dtype: {dataclasses.replace(s, dtype="") for s in of_logits if s.dtype == dtype} for dtype in DTYPE_NAMES}
    # A row of so many bytes has one kernel; how many elements that is differs.
    assert len(set(map(frozenset, kinds.values()))) == 1
    assert {spec.dtype for spec in SPECS} == set(DTYPE_NAMES) == set(ITEM_BYTES)


@pytest.mark.parametrize(("dtype", "elements"), [("float16", 8), ("bfloat16", 8), ("float32", 4)])
def test_a_vector_is_16_bytes(dtype, elements):
    assert VECTOR_BYTES == 16
    assert Spec("fused", dtype, 128).vector_elements == elements


def test_a_spec_cannot_be_changed_and_can_be_a_key():
    spec = Spec("fused", "bfloat16", 256)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.threads = 512
    assert {spec: 1}[Spec("fused", "bfloat16", 256)] == 1


def test_nothing_of_a_call_is_compiled_in():
    fields = {field.name for field in dataclasses.fields(Spec)}
    assert not fields & {"B", "V", "rows", "columns", "cluster", "ignore_index", "z_loss_multiplier", "scale", "mean"}


def test_archs_name_their_exact_features():
    assert all(re.fullmatch(r"sm_\d+a", arch) for arch in ARCHS)
    assert len(set(ARCHS)) == len(ARCHS)


def test_one_piece_has_a_kernel_of_its_own_and_several_share_one():
    asked = {
        "rows": (False, False, False, False, False),
        "softcap": (True, False, False, False, False),
        "smoothing": (False, True, False, False, False),
        "entropy": (False, False, False, True, False),
        "entropy_backward": (False, False, False, False, True),
    }
    assert {name: options_kind(*each) for name, each in asked.items()} == {name: name for name in asked}
    assert options_kind(False, False, True, False, False) == "rows"  # the target's weight alone is a number of the row
    assert options_kind(False, False, False, True, True) == "entropy_backward"
    several = [(True, True, False, False, False), (False, True, True, False, False), (True, False, False, True, False)]
    assert {options_kind(*each) for each in several} == {"any"}


def test_the_kernel_for_several_pieces_knows_all_of_them():
    pieces = OPTIONS["any"]
    assert all(pieces)
    assert OPTIONS[""] is None
    alone = [each for name, each in OPTIONS.items() if each is not None and name != "any"]
    assert not any(each.together for each in alone)
    assert all(any(each[i] for each in alone) for i in range(4))
