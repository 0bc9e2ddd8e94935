import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import cross_entropy as benchmark
from bench.cases import Inputs
from bench.check import Outcome
from bench.grids import Cell, cells
from bench.measure import too_large
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
    graph=None,
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


def test_a_package_that_is_missing_is_tried_once_and_the_others_run_on_every_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROVIDERS, "broken", broken("broken", None))
    assert run(tmp_path, "--shapes", "8x33,4x9", providers="broken,copy") == 1
    assert capsys.readouterr().out.count("FAILED broken fwd") == 2  # when it happens, and at the end
    assert [row["vocab"] for row in written(tmp_path)] == [9, 33]


def test_what_a_provider_does_not_support_is_skipped_with_the_reason_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, providers="copy,liger_cute") == 0
    assert "skipped liger_cute raw, fwd, fwd+bwd 8x33 bfloat16: it needs a vocabulary" in capsys.readouterr().out
    assert [row["provider"] for row in written(tmp_path)] == ["copy"]


def test_the_older_greyhound_gives_rows_like_the_others(tmp_path: Path, older: Path) -> None:
    assert run(tmp_path, "--older-greyhound", str(older), "--host-time", providers="torch,greyhound_0_1") == 0
    rows = written(tmp_path)
    assert [row["mode"] for row in rows if row["provider"] == "greyhound_0_1"] == ["fwd", "fwd+bwd", "raw"]
    assert {row["commit"] for row in rows} == {"abc"}
    assert all(row["host_us"] for row in rows)


def test_without_the_older_greyhound_the_reason_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--older-greyhound", str(tmp_path / "none"), providers="copy,greyhound_0_1") == 1
    assert "FAILED greyhound_0_1 raw, fwd, fwd+bwd 8x33 bfloat16: no folder _older" in capsys.readouterr().out


def test_a_run_whose_time_is_up_exits_with_0_and_a_later_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shapes", "8x33,4x9,2x5", "--minutes", "1"]
    clock = iter([0.0, 0.0, 59.0, 61.0, 61.0])  # begin, one look before each shape, the end
    monkeypatch.setattr("bench.cross_entropy.time.monotonic", lambda: next(clock))
    assert run(tmp_path, *arguments, providers="copy") == 0
    assert "time is up, 1 cells left" in capsys.readouterr().out
    assert {row["vocab"] for row in written(tmp_path)} == {33, 9}
    monkeypatch.undo()
    assert run(tmp_path, *arguments, "--resume", providers="copy") == 0
    output = capsys.readouterr().out
    assert "left" not in output
    assert "copy raw 2x5" in output
    assert "copy raw 8x33" not in output
    assert {row["vocab"] for row in written(tmp_path)} == {33, 9, 5}


def test_the_copy_is_timed_once_for_all_modes_of_a_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    copy = PROVIDERS["copy"]

    def build(inputs: Inputs, mode: str) -> Prepared:
        timed.append(mode)
        return copy.build(inputs, mode)

    monkeypatch.setitem(PROVIDERS, "copy", replace(copy, build=build))
    run(tmp_path, providers="greyhound,torch")
    assert len(timed) == 2
    shares = {row["provider"]: row["copy_ms"] for row in written(tmp_path)}
    assert all(row["copy_ms"] == shares[row["provider"]] for row in written(tmp_path))


def test_host_time_is_left_out_where_the_device_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.HOST_TIME_ELEMENTS", 8 * 33)
    run(tmp_path, "--host-time", "--shapes", "8x33,8x34", providers="copy")
    assert [row["host_us"] is None for row in written(tmp_path)] == [False, True]


def test_what_does_not_fit_the_memory_is_told_with_both_sizes() -> None:
    eager = PROVIDERS["torch"]
    reason = too_large(eager, 16384, 262144, torch.bfloat16, 40 << 30)
    assert reason == "it needs 42.0 GiB, the device has 40.0"  # four tensors of 8 GiB beside the logits, and 2 to spare
    assert too_large(eager, 16384, 262144, torch.bfloat16, 42 << 30) is None
    assert too_large(PROVIDERS["copy"], 16384, 262144, torch.bfloat16, 40 << 30) is None


def test_a_grid_measures_every_provider_and_leaves_those_that_compile_each_shape_to_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, set[str]]] = []

    def keep(self: benchmark.Run, cell: Cell, pairs: list[tuple[Provider, str]]) -> None:
        assert self.host_time
        asked.append((str(cell.shape), {which.name for which, _ in pairs}))

    monkeypatch.setattr(benchmark.Run, "cell", keep)
    fixed = ["--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]
    assert benchmark.main([*fixed, "--grid", "full"]) == 0
    assert asked[0] == ("8192x128256", set(PROVIDERS))
    assert ("1024x1000", set(PROVIDERS) - {"compile", "greyhound_0_1"}) in asked
    assert len(asked) == len(cells("full"))


@pytest.mark.parametrize("arguments", [["--shapes", "8x8"], ["--dtypes", "bf16"]])
def test_a_grid_does_not_take_shapes_or_dtypes(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cpu", "--out", str(tmp_path), "--grid", "core", *arguments])


def test_graph_flags_go_into_new_rows_and_those_of_the_commit_and_are_found_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, str]] = []

    def check(pairs: list[tuple[Provider, str]], *rest: object) -> dict[tuple[str, str], bool]:
        tried.extend((which.name, mode) for which, mode in pairs)
        return {(which.name, mode): mode == "fwd" for which, mode in pairs}

    monkeypatch.setattr("bench.graphs.check", check)
    run(tmp_path, providers="copy,torch")
    assert {row["graph"] for row in written(tmp_path)} == {None}
    run(tmp_path, "--graphs", "--resume", "--shapes", "8x33,4x9", providers="copy,torch")
    assert tried == [("torch", "fwd"), ("torch", "fwd+bwd")]
    flags = {(row["vocab"], row["provider"], row["mode"]): row["graph"] for row in written(tmp_path)}
    for vocab in (33, 9):
        assert flags[vocab, "torch", "fwd"] is True
        assert flags[vocab, "torch", "fwd+bwd"] is False
        assert flags[vocab, "copy", "raw"] is None
    run(tmp_path, "--graphs", "--resume", "--shapes", "2x5", providers="torch")
    assert len(tried) == 2
    assert {row["graph"] for row in written(tmp_path) if row["vocab"] == 5} == {True, False}


def test_a_long_run_leaves_the_table_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "TABLE_ROWS", 1)
    run(tmp_path, providers="copy")
    assert "rows x vocab" in capsys.readouterr().out
    run(tmp_path, providers="copy,torch")
    assert "rows x vocab" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--providers", "nobody"], ["--modes", "bwd"], ["--shapes", "8"], ["--dtypes", "fp8"]]
)
def test_an_unknown_name_ends_the_command_before_anything_runs(arguments: Sequence[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *arguments)
    assert list(tmp_path.iterdir()) == []
