import sys
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu import Stage, run_stage, run_stages, summary_line
from bench.sanitize_target import GROUPS


def python(name: str, code: str, must_say: str = "") -> Stage:
    return Stage(name, [sys.executable, "-c", code], must_say=must_say)


def test_a_stage_is_summed_up_by_its_last_line(tmp_path: Path) -> None:
    ended = run_stage(python("a", "print('first'); print('12 passed'); print()"), tmp_path, 60)
    assert (ended.passed, ended.summary) == (True, "12 passed")
    assert "first" in ended.log.read_text()


def test_a_sanitizer_is_summed_up_by_what_it_found() -> None:
    output = "3 calls on cuda, 0 wrong results\n========= ERROR SUMMARY: 2 errors\n========= Target returned\n"
    assert summary_line(output) == "3 calls on cuda, 0 wrong results; ERROR SUMMARY: 2 errors"


def test_a_failing_stage_does_not_stop_the_others_and_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [python("bad", "import sys; print('broken'); sys.exit(3)"), python("good", "print('fine')")]
    assert run_stages(chosen, tmp_path, 60) == 1
    output = capsys.readouterr().out
    assert "exit code 3; broken" in output
    assert "fine" in output.splitlines()[-1]


def test_a_run_whose_stages_all_pass_exits_with_0(tmp_path: Path) -> None:
    assert run_stages([python("good", "print('fine')")], tmp_path, 60) == 0


def test_tests_that_were_all_skipped_have_not_passed(tmp_path: Path) -> None:
    assert not run_stage(python("tests", "print('5 skipped')", must_say=" passed"), tmp_path, 60).passed


def test_a_stage_that_runs_out_of_time_is_stopped_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', 'input()'])"
    ended = run_stage(python("slow", code.replace("input()", "import time; time.sleep(600)")), tmp_path, 2)
    assert not ended.passed
    assert ended.seconds < 60
    assert ended.summary == "stopped after 2 s; begun"


def test_a_program_that_is_not_there_fails_its_stage(tmp_path: Path) -> None:
    ended = run_stage(Stage("none", ["no-such-program"]), tmp_path, 60)
    assert not ended.passed
    assert "no-such-program" in ended.summary


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """The stages that the command line asks for, kept instead of run."""
    kept: list[Stage] = []

    def keep(stages: list[Stage], logs: Path, timeout_s: float) -> int:
        kept.extend(stages)
        return 0

    monkeypatch.setattr(gpu, "run_stages", keep)
    return kept


def test_without_a_choice_tests_sanitizer_and_benchmark_run(chosen: list[Stage], tmp_path: Path) -> None:
    gpu.main(["--out", str(tmp_path)])
    assert [stage.name for stage in chosen] == ["tests", "memcheck", "racecheck", "bench"]


def test_a_choice_runs_nothing_else(chosen: list[Stage], tmp_path: Path) -> None:
    gpu.main(["--tune", "--bench", "--out", str(tmp_path)])
    assert [stage.name for stage in chosen] == ["bench", "tune"]


def test_the_sanitizer_sees_where_each_allocation_ends(chosen: list[Stage], tmp_path: Path) -> None:
    gpu.main(["--sanitize", "--out", str(tmp_path)])
    assert [stage.environment for stage in chosen] == [{"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}] * 2


def test_racecheck_alone_is_kept_from_the_plans_it_does_not_follow(chosen: list[Stage], tmp_path: Path) -> None:
    gpu.main(["--sanitize", "--out", str(tmp_path), "--sanitize-arguments", "--rows 3"])
    memcheck, racecheck = (list(stage.command) for stage in chosen)
    assert "--groups" not in memcheck
    assert set(racecheck[racecheck.index("--groups") + 1].split(",")) == set(GROUPS) - {"wide", "streamed", "sums"}
    assert memcheck[-2:] == racecheck[-2:] == ["--rows", "3"]


def test_any_tool_of_the_sanitizer_may_be_asked_for(chosen: list[Stage], tmp_path: Path) -> None:
    gpu.main(["--sanitize", "--tools", "initcheck,synccheck", "--out", str(tmp_path)])
    assert [stage.name for stage in chosen] == ["initcheck", "synccheck"]
    for stage in chosen:
        command = list(stage.command)
        assert command[command.index("--tool") + 1] == stage.name
        assert "bench.sanitize_target" in command
        # A block that PyTorch keeps and gives out again counts as written.
        assert stage.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_the_soak_runs_where_asked_for_alone_and_must_say_that_nothing_failed(
    chosen: list[Stage], tmp_path: Path
) -> None:
    arguments = ["--only-quick", "--out", str(tmp_path), "--soak-arguments", "--minutes 3 --seed 5"]
    gpu.main(["--soak", *arguments])
    (soak,) = chosen
    assert soak.name == "soak"
    assert "bench.soak" in soak.command
    assert set(gpu.QUICK_SOAK) <= set(soak.command)
    assert list(soak.command)[-4:] == ["--minutes", "3", "--seed", "5"]
    assert soak.must_say == " 0 failures"


def test_a_quick_run_leaves_slow_tests_out_and_takes_fewer_shapes(chosen: list[Stage], tmp_path: Path) -> None:
    gpu.main(["--only-quick", "--out", str(tmp_path)])
    commands = {stage.name: list(stage.command) for stage in chosen}
    assert "gpu and not slow" in commands["tests"]
    assert set(gpu.QUICK_SANITIZE) <= set(commands["memcheck"])
    assert set(gpu.QUICK_BENCH) <= set(commands["bench"])


def test_arguments_reach_their_stage_and_come_after_the_quick_ones(chosen: list[Stage], tmp_path: Path) -> None:
    gpu.main(
        ["--bench", "--only-quick", "--out", str(tmp_path), "--commit", "abc", "--bench-arguments", "--shapes 8x10"]
    )
    (bench,) = chosen
    assert bench.command[-2:] == ["--shapes", "8x10"]
    assert bench.command[-4:-2] == ["--commit", "abc"]
    assert str(tmp_path / "results") in bench.command


def test_the_linear_benchmark_runs_where_asked_for_with_arguments_and_a_folder_of_its_own(
    chosen: list[Stage], tmp_path: Path
) -> None:
    arguments = ["--only-quick", "--out", str(tmp_path), "--commit", "abc", "--linear-arguments", "--minutes 3"]
    gpu.main(["--linear", *arguments])
    (linear,) = chosen
    assert linear.name == "linear"
    assert "bench.linear_cross_entropy" in linear.command
    assert set(gpu.QUICK_LINEAR) <= set(linear.command)
    assert linear.command[-6:] == [
        "--out",
        str(tmp_path / "results" / "linear"),
        "--commit",
        "abc",
        "--minutes",
        "3",
    ]
