import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import results
from bench.results import ResultFile, Row, gpu_slug, merge, select_rows

ROW = Row(
    op="cross_entropy",
    provider="greyhound",
    mode="raw",
    rows=8192,
    vocab=128256,
    dtype="bfloat16",
    ms=1.0,
    ms_low=0.9,
    ms_high=1.1,
    copy_ms=0.95,
    of_copy=0.95,
    peak_mib=0.1,
    host_us=None,
    graph=None,
    gpu="NVIDIA H200",
    driver="580.0",
    torch="2.11.0",
    dsl="4.8.1",
    commit="abc",
    date="2026-11-30",
)


@pytest.fixture
def file(tmp_path: Path) -> ResultFile:
    return ResultFile(tmp_path / "results", ROW.gpu)


@pytest.mark.parametrize(
    ("gpu", "expected"), [("NVIDIA H200", "nvidia-h200"), ("NVIDIA GeForce RTX 5090 (D)", "nvidia-geforce-rtx-5090-d")]
)
def test_a_file_is_named_after_its_gpu(gpu: str, expected: str) -> None:
    assert gpu_slug(gpu) == expected


def test_a_row_reads_back_as_it_was_written(file: ResultFile) -> None:
    file.put(ROW)
    assert file.read() == [ROW]


def test_a_gpu_without_results_has_no_rows(file: ResultFile) -> None:
    assert file.read() == []
    assert not file.path.exists()


def test_a_row_replaces_the_one_with_its_key(file: ResultFile) -> None:
    file.put(ROW)
    again = replace(ROW, ms=0.5, commit="def", torch="2.13.0", date="2026-12-01")
    file.put(again)
    assert file.read() == [again]


@pytest.mark.parametrize(
    "change",
    [
        {"op": "linear_cross_entropy"},
        {"provider": "torch"},
        {"mode": "fwd"},
        {"rows": 1},
        {"vocab": 1},
        {"dtype": "float32"},
        {"gpu": "NVIDIA B200"},
    ],
)
def test_a_row_that_differs_in_any_part_of_the_key_is_kept_beside(file: ResultFile, change: dict[str, object]) -> None:
    other = replace(ROW, **change)  # type: ignore[arg-type]
    file.put(ROW)
    file.put(other)
    assert sorted(file.read(), key=lambda row: row.key) == sorted([ROW, other], key=lambda row: row.key)


def test_rows_lie_in_the_order_of_their_keys_however_they_came(file: ResultFile) -> None:
    for rows in (3, 1, 2):
        file.put(replace(ROW, rows=rows))
    assert [row.rows for row in file.read()] == [1, 2, 3]


def test_a_file_is_json_with_one_row_a_line(file: ResultFile) -> None:
    file.put(ROW)
    file.put(replace(ROW, rows=1))
    assert len(json.loads(file.path.read_text())) == 2
    assert sum(line.startswith("{") for line in file.path.read_text().splitlines()) == 2


@pytest.mark.parametrize("ms", [float("nan"), float("inf"), 0.0, -1.0])
def test_what_is_no_time_makes_no_row(ms: float) -> None:
    with pytest.raises(ValueError, match="ms: expected a positive time"):
        replace(ROW, ms=ms)


def test_an_unknown_mode_makes_no_row() -> None:
    with pytest.raises(ValueError, match="mode: expected one of raw, fwd, fwd"):
        replace(ROW, mode="backward")


def test_a_write_that_fails_leaves_the_old_rows_and_no_other_file(
    file: ResultFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.put(ROW)

    def full(handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        file.put(replace(ROW, rows=1))
    assert file.read() == [ROW]
    assert list(file.path.parent.iterdir()) == [file.path]


def test_resuming_finds_a_row_of_the_same_commit_only(file: ResultFile) -> None:
    file.put(ROW)
    assert file.find(ROW.key, "abc") == ROW
    assert file.find(ROW.key, "def") is None
    assert file.find(replace(ROW, rows=1).key, "abc") is None


@pytest.mark.parametrize("commit", [None, "abc-dirty"])
def test_resuming_never_trusts_a_source_that_no_commit_names(file: ResultFile, commit: str | None) -> None:
    file.put(replace(ROW, commit=commit))
    assert file.find(ROW.key, commit) is None


def test_merging_replaces_by_key_and_keeps_the_rest(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    kept, newer, added = replace(ROW, rows=1), replace(ROW, ms=0.5), replace(ROW, gpu="NVIDIA B200")
    for row in (kept, ROW):
        ResultFile(here, row.gpu).put(row)
    for row in (newer, added):
        ResultFile(there, row.gpu).put(row)
    assert merge(there, here) == 2
    assert ResultFile(here, ROW.gpu).read() == [kept, newer]
    assert ResultFile(here, added.gpu).read() == [added]


def test_a_row_with_an_unknown_field_is_refused(file: ResultFile) -> None:
    with pytest.raises(ValueError, match="unknown fields speed"):
        results.row_from({"speed": 1})


def test_a_file_from_before_a_field_reads_with_null_there(file: ResultFile) -> None:
    record = {name: value for name, value in vars(ROW).items() if name != "graph"}
    file.path.parent.mkdir()
    file.path.write_text(json.dumps([record]))
    assert file.read() == [ROW]
    assert file.read()[0].graph is None


@pytest.mark.parametrize("graph", [True, False, None])
def test_whether_a_graph_holds_a_call_is_kept(graph: bool | None, file: ResultFile) -> None:
    file.put(replace(ROW, graph=graph))
    (row,) = ResultFile(file.path.parent, ROW.gpu).read()
    assert row.graph is graph


def test_a_file_that_another_process_has_changed_is_read_anew(file: ResultFile) -> None:
    file.put(ROW)
    other = ResultFile(file.path.parent, ROW.gpu)
    other.put(replace(ROW, rows=1))
    assert len(file.read()) == 2


def test_several_rows_are_written_at_once(file: ResultFile) -> None:
    file.put(replace(ROW, rows=2), replace(ROW, rows=1))
    file.put(replace(ROW, rows=2, ms=3.0), replace(ROW, rows=3))
    assert [(row.rows, row.ms) for row in file.read()] == [(1, 1.0), (2, 3.0), (3, 1.0)]


OLD = [replace(ROW, commit="old1", date="2026-11-29", rows=rows) for rows in (1, 2, 3)]
NEW = [replace(ROW, commit="new1", date="2026-11-30", rows=rows) for rows in (4, 5)]


def test_commits_are_not_mixed_and_what_is_left_out_is_told() -> None:
    selection = select_rows([*OLD, *NEW])
    assert selection.rows == NEW
    assert selection.left_out == ["3 rows of NVIDIA H200, commit old1"]
    assert selection.about == "NVIDIA H200, torch 2.11.0, DSL 4.8.1, commit new1, 2026-11-30"


def test_commits_that_are_named_are_taken_together_and_all_shown_in_the_title() -> None:
    selection = select_rows([*OLD, *NEW], ["new", "old1"])
    assert (selection.rows, selection.left_out) == ([*OLD, *NEW], [])
    assert "commit new1, old1, 2026-11-29, 2026-11-30" in selection.about


def test_of_commits_of_one_day_the_one_that_git_places_last_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "git_history", lambda: ["b" * 40, "a" * 40])
    rows = [*(replace(ROW, commit="aaaa", rows=rows) for rows in (1, 2)), replace(ROW, commit="bbbb-dirty")]
    assert [row.commit for row in select_rows(rows).rows] == ["bbbb-dirty"]


def test_of_commits_that_git_does_not_know_the_one_with_more_rows_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "git_history", lambda: [])
    rows = [replace(ROW, commit="bbbb"), *(replace(ROW, commit="aaaa", rows=rows) for rows in (1, 2))]
    assert {row.commit for row in select_rows(rows).rows} == {"aaaa"}


def test_gpus_are_not_mixed() -> None:
    other = replace(ROW, gpu="NVIDIA B200")
    rows = [ROW, replace(ROW, rows=1), other]
    assert select_rows(rows).left_out == ["1 rows of NVIDIA B200, commit abc"]
    assert select_rows(rows, gpu="b200").rows == [other]


@pytest.mark.parametrize(
    ("commits", "gpu", "reason"), [(["zzz"], None, "no rows of commit zzz; there are abc"), (None, "A100", "A100")]
)
def test_a_selection_without_rows_says_what_there_is(commits: list[str] | None, gpu: str | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        select_rows([ROW], commits, gpu)


def test_what_was_just_written_is_not_read_again(file: ResultFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.put(ROW)

    def parse(record: dict[str, object]) -> Row:
        raise AssertionError("the file was parsed")

    monkeypatch.setattr(results, "row_from", parse)
    file.put(replace(ROW, rows=1))
    assert [row.rows for row in file.read()] == [1, ROW.rows]
