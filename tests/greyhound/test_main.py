"""The main job, `python -m greyhound`, on the CPU."""

import io
import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import greyhound.__main__ as job
from greyhound import _artifacts

CPU = torch.device("cpu")
STEPS = 12  # enough to fall by more than one nat


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def corpus() -> job.Corpus:
    return job.read_corpus(job.standard_library_text())


@pytest.fixture(scope="module")
def comparison(corpus: job.Corpus) -> job.Comparison:
    return job.Comparison(
        job.train("pytorch", job.pytorch_cross_entropy, corpus, STEPS, CPU, io.StringIO()),
        job.train("greyhound", job.greyhound_cross_entropy, corpus, STEPS, CPU, io.StringIO()),
    )


def curve(*losses: float) -> job.Curve:
    return job.Curve("made up", losses, (1.0,) * len(losses))


def run(*arguments: str) -> int:
    return job.main(["--device", "cpu", "--steps", "3", *arguments])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command line is refused with, having printed nothing else."""
    with pytest.raises(SystemExit) as stopped:
        job.main(arguments)
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    return printed.err


def test_curves_agree_on_the_cpu(comparison: job.Comparison) -> None:
    assert comparison.agree
    assert comparison.largest <= job.TOLERANCE / 10


def test_the_loss_falls(comparison: job.Comparison, corpus: job.Corpus) -> None:
    first, last = comparison.actual.losses[0], comparison.actual.losses[-1]
    assert first == pytest.approx(math.log(corpus.vocabulary), abs=0.2)
    assert last < first - 0.5


def test_same_seed_and_loss_give_the_same_curve(comparison: job.Comparison, corpus: job.Corpus) -> None:
    again = job.train("greyhound", job.greyhound_cross_entropy, corpus, STEPS, CPU, io.StringIO())
    assert again.losses == comparison.actual.losses


@pytest.mark.gpu
def test_curves_agree_and_repeat_bit_for_bit_on_the_gpu(corpus: job.Corpus) -> None:
    def curves() -> job.Comparison:
        return job.Comparison(
            job.train("pytorch", job.pytorch_cross_entropy, corpus, 100, torch.device("cuda:0"), io.StringIO()),
            job.train("greyhound", job.greyhound_cross_entropy, corpus, 100, torch.device("cuda:0"), io.StringIO()),
        )

    first, again = curves(), curves()
    assert first.agree
    assert first.expected.losses == again.expected.losses
    assert first.actual.losses == again.actual.losses


def test_same_seed_same_batches_and_another_seed_others(corpus: job.Corpus) -> None:
    def two(seed: int) -> list[torch.Tensor]:
        return [part for batch in itertools.islice(job.batches(corpus, seed), 2) for part in batch]

    assert all(torch.equal(a, b) for a, b in zip(two(0), two(0), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(two(0), two(1), strict=True))


def test_a_batch_is_the_words_before_each_target() -> None:
    words = torch.arange(100)
    contexts, targets = next(job.batches(job.Corpus(words, vocabulary=99), seed=0))
    followed = torch.where(targets == job.IGNORE_INDEX, 99, targets)
    assert contexts.shape == (job.BATCH_ROWS, job.CONTEXT_WORDS)
    assert torch.equal(contexts, followed[:, None] + torch.arange(-job.CONTEXT_WORDS, 0))


def test_rare_words_are_ignored_targets_and_unknown_contexts() -> None:
    corpus = job.read_corpus("to be or not to be ==== that")
    assert corpus.vocabulary == 2
    assert corpus.words.tolist() == [0, 1, 2, 2, 0, 1, 2, 2]
    contexts, targets = next(job.batches(corpus, seed=0))
    assert set(targets.tolist()) == {0, 1, job.IGNORE_INDEX}
    assert contexts.max() == corpus.vocabulary


def test_the_text_fills_a_vocabulary_of_thousands_and_exercises_the_ignored_rows(corpus: job.Corpus) -> None:
    assert 2000 < corpus.vocabulary < 20000
    for _, targets in itertools.islice(job.batches(corpus, job.SEED), 5):
        assert 0 < (targets == job.IGNORE_INDEX).sum() < job.BATCH_ROWS // 10


def test_training_leaves_the_global_generator_and_precision_alone(corpus: job.Corpus) -> None:
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    job.train("greyhound", job.greyhound_cross_entropy, corpus, 1, CPU, io.StringIO())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == precision


def test_exit_code_is_0_when_the_curves_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    printed = capsys.readouterr().out
    assert "the curves agree" in printed
    for stated in ("torch", "artifacts", "portable PyTorch implementation: device cpu", "final loss", "time per step"):
        assert stated in printed


def test_exit_code_is_1_when_the_curves_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "cross_entropy", lambda *a, **k: torch.nn.functional.cross_entropy(*a, **k) * 1.001)
    assert run() == 1
    assert "THE CURVES PART" in capsys.readouterr().out


def test_a_right_loss_with_a_wrong_gradient_parts_the_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient_too_large(*arguments: object, **options: object) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(*arguments, **options)
        return 1.01 * loss - 0.01 * loss.detach()

    monkeypatch.setattr(job, "cross_entropy", gradient_too_large)
    assert run() == 1


def test_exit_code_is_2_when_the_kernel_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object, **__: object) -> torch.Tensor:
        raise _artifacts.ArtifactError("no kernel here")

    monkeypatch.setattr(job, "cross_entropy", missing)
    assert run() == 2
    assert "error: no kernel here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ((1.0, math.nan, 1.0), (1.0, 1.0, 1.0)),
        ((1.0, 1.0, 1.0), (1.0, math.nan, 1.0)),
        ((1.0, math.nan, 5.0), (1.0, math.nan, 1.0)),  # both, and a number that would win a plain max
        ((1.0, math.inf, 1.0), (1.0, math.inf, 1.0)),
    ],
)
def test_a_curve_that_is_not_finite_counts_as_parted(expected: tuple[float, ...], actual: tuple[float, ...]) -> None:
    comparison = job.Comparison(curve(*expected), curve(*actual))
    assert not comparison.agree
    assert comparison.worst_step == 1
    assert any("THE CURVES PART" in line for line in job.comparison_report(comparison))


def test_the_largest_difference_is_the_tolerance_at_most() -> None:
    assert job.Comparison(curve(0.0, 0.0), curve(job.TOLERANCE, 0.0)).agree
    assert not job.Comparison(curve(0.0, 0.0), curve(0.0, job.TOLERANCE * 1.01)).agree


@pytest.mark.parametrize("steps", [1, 2, 11, 12, 300])
def test_the_table_shows_the_first_and_the_last_step_once(steps: int) -> None:
    shown = job.shown_steps(steps)
    assert (shown[0], shown[-1]) == (0, steps - 1)
    assert shown == sorted(set(shown))
    assert len(shown) == min(steps, job.TABLE_ROWS)


@pytest.mark.parametrize("steps", ["0", "-3", "1.5", "many"])
def test_steps_below_one_or_not_whole_are_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"got {steps}" in refusal(capsys, "--steps", steps).replace("'", "")


@pytest.mark.parametrize("device", ["abacus", "meta", "cuda:-1", ""])
def test_an_unknown_device_is_refused(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected cpu, cuda or cuda:N" in refusal(capsys, "--device", device)


def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no usable GPU" in refusal(capsys, "--device", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "there are 2 GPUs" in refusal(capsys, "--device", "cuda:2")


def test_the_device_defaults_to_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert job.parse([]) == job.Options(job.DEFAULT_STEPS, torch.device(device), None)


def test_a_plot_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    assert "there is no folder" in refusal(capsys, "--plot", str(tmp_path / "nowhere" / "curves.png"))
    assert "ends in .png" in refusal(capsys, "--plot", str(tmp_path / "curves.pdf"))
    assert "cannot be written" in refusal(capsys, "--plot", str(tmp_path / "folder.png"))


def test_a_plot_without_matplotlib_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refusal(capsys, "--plot", str(tmp_path / "curves.png"))


def test_plot_writes_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    assert run("--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert str(path) in capsys.readouterr().out


def test_the_plot_names_device_versions_and_date() -> None:
    title = job.plot_title(CPU)
    for stated in ("cpu", job.greyhound.__version__, torch.__version__, str(job.datetime.date.today())):
        assert stated in title


def test_progress_redraws_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    progress = job.Progress("greyhound", 3, terminal)
    for _ in range(3):
        progress.advance("loss 1.0000")
    progress.close()
    assert terminal.getvalue().count("\n") == 1
    lines = terminal.getvalue().strip("\r\n").split("\r")
    assert "3/3" in lines[-1]
    assert all(len(line) == 39 for line in lines)  # one short of the width, so that the terminal does not wrap


def test_progress_is_a_few_lines_elsewhere() -> None:
    log = io.StringIO()
    progress = job.Progress("greyhound", 1000, log)
    for _ in range(1000):
        progress.advance("loss 1.0000")
    progress.close()
    assert [line.split()[1] for line in log.getvalue().splitlines()] == [
        "250/1000",
        "500/1000",
        "750/1000",
        "1000/1000",
    ]


def test_the_command_runs_and_loads_no_compiler_and_no_plotting() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['--steps', '1', '--device', 'cpu']\n"
        "try: runpy.run_module('greyhound', run_name='__main__')\n"
        "except SystemExit as stop: print('code', stop.code)\n"
        "print('loaded', sorted({'cutlass', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-2:] == ["code 0", "loaded []"], done.stdout + done.stderr
    assert done.stderr.splitlines()[0].startswith("pytorch 1/1")
