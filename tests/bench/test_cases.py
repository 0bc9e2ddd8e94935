import argparse

import pytest
import torch

from bench.cases import Shape, dtype_name, make_inputs, parse_dtypes, parse_integers, parse_shapes


def test_shapes_are_rows_by_columns_with_commas_between() -> None:
    assert parse_shapes("8192x128256, 256X32000") == [Shape(8192, 128256), Shape(256, 32000)]


def test_a_shape_prints_as_it_is_written() -> None:
    assert parse_shapes(str(Shape(3, 5))) == [Shape(3, 5)]


@pytest.mark.parametrize(
    "text", ["", "8192", "8192x", "x5", "8192x0", "0x5", "8192x-1", "8192x5x6", "8192x5,", "1e3x5"]
)
def test_what_is_no_shape_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected ROWSxVOCAB"):
        parse_shapes(text)


def test_dtypes_go_by_short_and_by_full_names() -> None:
    assert parse_dtypes("bf16,float16, fp32") == [torch.bfloat16, torch.float16, torch.float32]


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'fp8'"):
        parse_dtypes("bf16,fp8")


@pytest.mark.parametrize("text", ["", "0", "a", "1,,2", "-1"])
def test_what_is_no_positive_integer_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected positive integers"):
        parse_integers(text)


def test_rows_spell_a_dtype_in_full() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_inputs_are_the_same_each_time_and_their_labels_are_columns() -> None:
    first, second = (make_inputs(Shape(64, 5), torch.bfloat16, torch.device("cpu")) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.labels, second.labels)
    assert set(first.labels.tolist()) == set(range(5))
