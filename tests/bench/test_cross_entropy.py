import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import cross_entropy as benchmark
from bench.cases import Inputs
from bench.check import Outcome
from bench.providers import PROVIDERS, Prepared, Provider
from bench.results import Row

ROW = Row(
    op="cross_entropy",
    provider="greyhound",
    mode="raw",
    rows=1000,
    vocab=1000,
    dtype="float32",
    ms=0.5,
    ms_low=0.4,
    ms_high=0.6,
    copy_ms=0.25,
    of_copy=0.5,
    peak_mib=1.5,
    host_us=None,
    gpu="NVIDIA H200",
    driver=None,
    torch="2.11.0",
    dsl=None,
    commit=None,
    date="2026-11-30",
)


def run(out: Path, *arguments: str, providers: str = "copy,greyhound") -> int:
    fixed = ["--device", "cpu", "--budget", "0", "--out", str(out), "--shapes", "8x33", "--providers", providers]
    return benchmark.main([*fixed, "--commit", "abc", *arguments])


def written(out: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads((out / "cpu.json").read_text())
    return rows


def broken(name: str, outcome: Outcome | None) -> Provider:
    def build(inputs: Inputs, mode: str) -> Prepared:
        if outcome is None:
            raise ImportError("No module named 'liger_kernel'")
        return Prepared(lambda: None, lambda: outcome)

    return Provider(name, ("fwd",), build)


def test_an_ideal_forward_reads_and_an_ideal_gradient_also_writes() -> None:
    assert benchmark.ideal_bytes("fwd", 10, 100, torch.bfloat16) == 2000
    assert benchmark.ideal_bytes("raw", 10, 100, torch.bfloat16) == 4000
    assert benchmark.ideal_bytes("fwd+bwd", 10, 100, torch.float32) == 8000


def test_the_table_shows_share_of_copy_rate_spread_and_peak() -> None:
    line = benchmark.format_table([ROW]).splitlines()[-1]
    assert " ".join(line.split()) == ("1000 x 1000 float32 raw greyhound 0.500 16 0.5000 0.4000..0.6000 0.2500 1.5")


def test_the_table_is_ordered_by_shape_then_mode_then_time() -> None:
    rows = [
        replace(ROW, vocab=2000),
        replace(ROW, mode="fwd"),
        replace(ROW, provider="slow", ms=0.6),
        replace(ROW, provider="fast", ms=0.4),
    ]
    lines = [line.split() for line in benchmark.format_table(rows).splitlines()[2:] if line]
    assert [(line[2], line[4], line[5]) for line in lines] == [
        ("1000", "raw", "fast"),
        ("1000", "raw", "slow"),
        ("1000", "fwd", "greyhound"),
        ("2000", "raw", "greyhound"),
    ]


def test_columns_line_up_under_their_titles() -> None:
    title, rule, line = benchmark.format_table([replace(ROW, host_us=12.5)]).splitlines()
    assert len(title) == len(rule) == len(line)


def test_a_run_writes_a_row_for_every_provider_and_mode_it_has(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    assert [(row["provider"], row["mode"]) for row in written(tmp_path)] == [
        ("copy", "raw"),
        ("greyhound", "fwd"),
        ("greyhound", "fwd+bwd"),
        ("greyhound", "raw"),
    ]
    assert all(row["commit"] == "abc" and row["copy_ms"] for row in written(tmp_path))


def test_the_copy_is_its_own_ceiling(tmp_path: Path) -> None:
    run(tmp_path, providers="copy")
    (row,) = written(tmp_path)
    assert (row["of_copy"], row["copy_ms"]) == (1.0, row["ms"])


def test_host_time_is_there_where_asked_for(tmp_path: Path) -> None:
    run(tmp_path, "--host-time", providers="copy")
    (row,) = written(tmp_path)
    assert isinstance(row["host_us"], float)
    assert row["host_us"] > 0


def test_resuming_measures_only_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--modes", "raw")
    before = written(tmp_path)
    capsys.readouterr()
    assert run(tmp_path, "--resume", "--modes", "raw,fwd") == 0
    output = capsys.readouterr().out
    assert "greyhound fwd 8x33" in output
    assert "greyhound raw 8x33" not in output
    assert "3 rows in" in output
    assert [row for row in written(tmp_path) if row["mode"] == "raw"] == before


def test_another_commit_is_measured_again(tmp_path: Path) -> None:
    run(tmp_path, providers="copy")
    run(tmp_path, "--resume", "--commit", "def", providers="copy")
    assert [row["commit"] for row in written(tmp_path)] == ["def"]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (None, "ImportError: No module named 'liger_kernel'"),
        (Outcome(torch.tensor(float("nan")), None, "mean"), "Mismatch: mean loss: expected"),
    ],
)
def test_a_provider_that_fails_gives_a_reason_no_row_and_exit_code_1(
    outcome: Outcome | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PROVIDERS, "broken", broken("broken", outcome))
    assert run(tmp_path, providers="broken,copy") == 1
    assert f"FAILED broken fwd 8x33 bfloat16: {reason}" in capsys.readouterr().out
    assert [row["provider"] for row in written(tmp_path)] == ["copy"]


@pytest.mark.parametrize(
    "arguments", [["--providers", "nobody"], ["--modes", "bwd"], ["--shapes", "8"], ["--dtypes", "fp8"]]
)
def test_an_unknown_name_ends_the_command_before_anything_runs(arguments: Sequence[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *arguments)
    assert list(tmp_path.iterdir()) == []
