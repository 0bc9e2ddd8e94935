import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import plot
from bench.results import ResultFile, Row, Selection

LARGEST_BYTES = 150_000
README_WIDTH = (600, 2000)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures drawn, kept beside their files."""
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    save = plot.save

    def keep(figure: Any, title: str, selection: Selection, path: Path) -> Path:
        figures.append(figure)
        return save(figure, title, selection, path)

    monkeypatch.setattr(plot, "save", keep)
    return figures


def test_every_picture_is_a_png_of_a_size_fit_for_a_readme(comparison: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ResultFile(tmp_path, comparison[0].gpu).put(*comparison)
    assert plot.main(["--results", str(tmp_path)]) == 0
    paths = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in paths] == ["host.png", "share.png", "speedup.png"]
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < LARGEST_BYTES
        width, _ = struct.unpack(">II", data[16:24])
        assert README_WIDTH[0] <= width <= README_WIDTH[1]


def test_titles_hold_gpu_versions_commit_and_date(comparison: list[Row], tmp_path: Path, saved: list[Any]) -> None:
    plot.draw_all(Selection(comparison, []), tmp_path)
    assert len(saved) == 3
    for figure in saved:
        assert figure.get_suptitle().endswith("\nNVIDIA H200, torch 2.11.0, DSL 4.8.1, commit abc, 2026-11-30")


def test_a_panel_shows_each_provider_of_its_mode_at_one_number_of_rows(
    comparison: list[Row], tmp_path: Path, saved: list[Any]
) -> None:
    plot.draw_share(Selection(comparison, []), tmp_path / "share.png")
    panels = {panel.get_title(): panel for panel in saved[0].axes}
    assert set(panels) == {"raw", "fwd", "fwd+bwd"}
    lines = {line.get_label(): line for line in panels["raw"].lines if not line.get_label().startswith("_")}
    assert set(lines) == {"greyhound", "quack", "liger"}
    assert list(lines["quack"].get_xdata()) == [32000, 128256]  # not the 64 rows' point
    assert list(lines["quack"].get_ydata()) == pytest.approx([1 / 1.5] * 2)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({8192: 2, 4096: 5}, 8192),
        ({4096: 2, 1024: 9}, 4096),
        ({8192: 1, 1024: 2}, 1024),  # one vocabulary makes no line
        ({8192: 1, 1024: 1}, 8192),
    ],
)
def test_the_rows_shown_are_the_nearest_to_8192(counts: dict[int, int], expected: int, comparison: list[Row]) -> None:
    rows = [replace(comparison[0], rows=count, vocab=1000 + step) for count in counts for step in range(counts[count])]
    assert plot.nearest_rows(rows) == expected


def test_a_bar_rises_where_a_peer_is_slower_and_hangs_where_it_is_faster(
    comparison: list[Row], tmp_path: Path, saved: list[Any]
) -> None:
    rows = [replace(row, ms=row.ms / 3) if row.provider == "quack" else row for row in comparison]
    plot.draw_speedup(Selection(rows, []), tmp_path / "speedup.png")
    raw = saved[0].axes[0]
    heights = {bars.get_label(): {round(bar.get_height(), 6) for bar in bars} for bars in raw.containers}
    assert heights == {"liger": {0.6}, "quack": {-0.6}}  # 1.6 and 0.4 times our time, drawn from 1


def test_host_times_are_those_of_the_shape_that_has_them(
    comparison: list[Row], tmp_path: Path, saved: list[Any]
) -> None:
    plot.draw_host(Selection(comparison, []), tmp_path / "host.png")
    (panel,) = saved[0].axes
    bars = {container.get_label(): [bar.get_height() for bar in container] for container in panel.containers}
    assert bars["torch"] == pytest.approx([25.4 * 4] * 2)  # it has no raw mode
    assert bars["greyhound"] == pytest.approx([25.4 * 1.25] * 3)


def test_without_host_times_there_is_no_such_picture(comparison: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [replace(row, host_us=None) for row in comparison]
    drawn = plot.draw_all(Selection(rows, []), tmp_path)
    assert [path.name for path in drawn] == ["share.png", "speedup.png"]


def test_without_matplotlib_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="the pictures need matplotlib, the extra `bench`"):
        plot.new_figure(1, 1)


def test_rows_of_another_commit_are_left_out_aloud(
    comparison: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    older = replace(comparison[0], rows=7, commit="old", date="2026-01-01")
    ResultFile(tmp_path, older.gpu).put(older, *comparison)
    plot.main(["--results", str(tmp_path), "--out", str(tmp_path / "elsewhere")])
    assert "left out: 1 rows of NVIDIA H200, commit old" in capsys.readouterr().out
    assert (tmp_path / "elsewhere" / "share.png").exists()
