from dataclasses import replace
from pathlib import Path

import pytest

from bench import report as reports
from bench.cases import Shape
from bench.report import (
    Cell,
    duel_lines,
    duels,
    faster_peers,
    graph_table,
    host_table,
    near_peers,
    ratio_table,
    report,
    share_table,
)
from bench.results import ResultFile, Row, Selection


def changed(rows: list[Row], provider: str, mode: str, vocab: int, ms: float) -> list[Row]:
    """Return the rows with another time for one provider on the 8192 rows of a vocabulary."""
    key = (provider, mode, 8192, vocab)
    return [replace(row, ms=ms) if (row.provider, row.mode, row.rows, row.vocab) == key else row for row in rows]


def ours(rows: list[Row], mode: str, vocab: int) -> float:
    (row,) = [row for row in rows if (row.provider, row.mode, row.rows, row.vocab) == ("greyhound", mode, 8192, vocab)]
    return row.ms


def test_where_every_peer_is_slower_none_is_listed(comparison: list[Row]) -> None:
    assert len(duels(comparison)) == 3 * (2 * 3 + 2)  # three peers with fwd and fwd+bwd, two with raw
    assert faster_peers(comparison) == []
    assert near_peers(comparison) == []
    assert duel_lines([]) == "none"


def test_a_peer_that_is_faster_on_one_cell_is_listed_with_its_ratio(comparison: list[Row]) -> None:
    rows = changed(comparison, "quack", "raw", 32000, 0.8 * ours(comparison, "raw", 32000))
    (found,) = faster_peers(rows)
    assert (found.cell, found.peer) == (Cell(8192, 32000, "bfloat16", "raw"), "quack")
    assert found.ratio == pytest.approx(0.8)
    assert duel_lines([found]) == "- 8192 x 32000 bf16 raw: quack, ratio 0.800"
    assert near_peers(rows) == []


@pytest.mark.parametrize(
    ("ratio", "faster", "near"), [(0.999, 1, 0), (1.0, 0, 1), (1.049, 0, 1), (1.051, 0, 0), (2.0, 0, 0)]
)
def test_near_begins_at_a_tie_and_ends_at_5_percent(
    ratio: float, faster: int, near: int, comparison: list[Row]
) -> None:
    rows = changed(comparison, "liger", "fwd+bwd", 128256, ratio * ours(comparison, "fwd+bwd", 128256))
    assert (len(faster_peers(rows)), len(near_peers(rows))) == (faster, near)


def test_the_copy_is_no_peer_and_a_cell_without_us_is_no_duel(comparison: list[Row]) -> None:
    assert "copy" not in {duel.peer for duel in duels(comparison)}
    assert duels(row for row in comparison if row.provider != "greyhound") == []


def test_the_share_table_has_a_line_a_shape_and_a_column_a_provider_with_us_first(comparison: list[Row]) -> None:
    lines = share_table(comparison, "raw").splitlines()
    assert lines[0] == "| rows x vocabulary | copy ms | greyhound | liger | quack |"
    assert lines[2] == "| 8192 x 128256 bf16 | 1.051 | 0.80 | 0.50 | 0.67 |"
    assert len(lines) == 2 + 3


def test_a_missing_row_leaves_its_cell_empty(comparison: list[Row]) -> None:
    rows = [row for row in comparison if (row.provider, row.rows, row.vocab) != ("quack", 8192, 32000)]
    assert "| 8192 x 32000 bf16 | 0.262 | 0.80 | 0.50 |  |" in share_table(rows, "raw")
    assert "| 8192 x 32000 bf16 | 0.328 | 1.60 |  |" in ratio_table(rows, "raw")


def test_the_ratio_says_how_many_times_as_long_a_peer_takes(comparison: list[Row]) -> None:
    lines = ratio_table(comparison, "fwd+bwd").splitlines()
    assert lines[0] == "| rows x vocabulary | greyhound ms | liger | quack | torch |"
    assert lines[2] == "| 8192 x 128256 bf16 | 1.313 | 1.60 | 1.20 | 3.20 |"


def test_host_times_stand_for_the_shapes_that_have_them(comparison: list[Row]) -> None:
    lines = host_table(comparison).splitlines()
    assert lines[0] == "| rows x vocabulary | greyhound | liger | quack | torch |"
    assert lines[2:] == [
        "| 64 x 32000 bf16 raw | 32 | 51 | 38 |  |",
        "| 64 x 32000 bf16 fwd | 32 | 51 | 38 | 102 |",
        "| 64 x 32000 bf16 fwd+bwd | 32 | 51 | 38 | 102 |",
    ]


def test_the_graph_table_says_yes_no_or_nothing(comparison: list[Row]) -> None:
    assert graph_table(comparison).splitlines()[2:] == [
        "| greyhound | yes | yes | yes |",
        "| liger | no | no | no |",
        "| quack | yes | yes | yes |",
        "| torch |  | yes | yes |",
    ]
    assert graph_table([replace(row, graph=None) for row in comparison]) == "none"


def test_tables_show_the_shapes_asked_for_while_lost_cells_are_listed_from_all(comparison: list[Row]) -> None:
    rows = changed(comparison, "quack", "raw", 32000, 0.5 * ours(comparison, "raw", 32000))
    text = report(Selection(rows, ["3 rows of another commit"]), [Shape(8192, 128256)])
    assert "8192 x 32000 bf16 |" not in text
    assert "- 8192 x 32000 bf16 raw: quack, ratio 0.500" in text
    assert "## A peer is faster: 1 of 24" in text
    assert "Left out:\n- 3 rows of another commit" in text


def test_the_command_prints_the_newest_commit_and_says_what_it_left_out(
    comparison: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = replace(comparison[0], rows=7, commit="old", date="2026-01-01")
    ResultFile(tmp_path, older.gpu).put(older, *comparison)
    assert reports.main(["--results", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("# NVIDIA H200, torch 2.11.0, DSL 4.8.1, commit abc, 2026-11-30\n")
    assert "- 1 rows of NVIDIA H200, commit old" in output
    assert reports.main(["--results", str(tmp_path), "--commit", "old"]) == 0
    assert "commit old, 2026-01-01" in capsys.readouterr().out.splitlines()[0]


def test_a_folder_without_rows_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no rows"):
        reports.main(["--results", str(tmp_path)])
