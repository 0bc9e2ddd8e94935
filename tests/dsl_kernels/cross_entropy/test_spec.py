"""The grid of kernels: names, sizes, and that a spec holds what is compiled in and nothing of a call."""

import dataclasses
import re

import pytest

from dsl_kernels.cross_entropy.plan import SPECS
from dsl_kernels.cross_entropy.spec import ARCHS, DTYPE_NAMES, ITEM_BYTES, VECTOR_BYTES, Spec


def test_every_kernel_has_its_own_name_which_is_a_c_symbol():
    names = [spec.name for spec in SPECS]
    assert len(set(names)) == len(names)
    assert len(set(SPECS)) == len(SPECS)
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", name) for name in names)


def test_every_field_shows_in_the_name():
    spec = Spec("fused", "bfloat16", 256)
    others = [
        Spec("scale", "bfloat16", 256),
        Spec("fused", "float16", 256),
        Spec("fused", "bfloat16", 512),
        Spec("fused", "bfloat16", 256, grad=False),
        Spec("fused", "bfloat16", 256, streamed=True),
    ]
    assert len(others) == len(dataclasses.fields(Spec))
    assert len({spec.name, *(other.name for other in others)}) == 6


def test_the_example_in_the_docstring_is_a_name():
    assert Spec("fused", "bfloat16", 256).name == "ce_fused_bfloat16_grad_t256"


def test_a_block_is_whole_warps_that_a_gpu_accepts():
    for spec in SPECS:
        assert spec.threads % 32 == 0
        assert 32 <= spec.threads <= 1024


def test_every_dtype_has_every_kernel():
    kinds = {dtype: {dataclasses.replace(s, dtype="") for s in SPECS if s.dtype == dtype} for dtype in DTYPE_NAMES}
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
