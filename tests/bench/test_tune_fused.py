from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import tune_fused
from bench.cases import Shape, make_inputs
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import Spec
from greyhound import _artifacts
from greyhound.kernels import cross_entropy as kernels


def test_a_sweep_times_the_chosen_plan_even_where_it_is_no_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    spec, launch = plan.select_fused("sm_90a", "float32", 1000, True)
    arguments = ["--device", "cpu", "--budget", "0", "--shapes", "4x1000", "--dtypes", "fp32", "--threads", "512"]
    assert tune_fused.main([*arguments, "--clusters", "16", "--rows", "1"]) == 0
    output = capsys.readouterr().out
    marked = [line.split() for line in output.splitlines() if line.startswith("* ")]
    assert [line[1:4] for line in marked] == [[str(spec.threads), str(launch.cluster), str(launch.rows)]]
    assert "2 plans timed, 0 failed" in output


def test_a_plan_that_does_not_fit_is_named_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--device",
        "cpu",
        "--budget",
        "0",
        "--shapes",
        "1x400000",
        "--threads",
        "128",
        "--clusters",
        "1",
        "--rows",
        "1",
    ]
    assert tune_fused.main(arguments) == 0
    assert "does not fit (threads x cluster x rows): 128x1x1" in capsys.readouterr().out


def test_a_wrong_result_fails_the_sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "launch", lambda *arguments: arguments[4].zero_())
    arguments = [
        "--device",
        "cpu",
        "--budget",
        "0",
        "--shapes",
        "2x10",
        "--threads",
        "128",
        "--clusters",
        "1",
        "--rows",
        "1",
    ]
    assert tune_fused.main(arguments) == 1
    assert "FAILED 128 threads, cluster 1, 1 rows: wrong result" in capsys.readouterr().out


def test_a_forced_plan_is_the_one_that_the_kernel_is_launched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def load(arch: str, spec: Spec) -> Callable[..., None]:
        return lambda *arguments: taken.append((spec, arguments))

    monkeypatch.setattr(kernels, "_arch_or_warn", lambda device: "sm_90a")
    monkeypatch.setattr(_artifacts, "load", load)
    monkeypatch.setattr(kernels, "_on_device", lambda device, function, *arguments: function(*arguments))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    inputs = make_inputs(Shape(4, 1000), torch.bfloat16, torch.device("cpu"))
    chosen, _ = plan.select_fused("sm_90a", "bfloat16", 1000, True)
    spec = replace(chosen, threads=512)
    launch = plan.fused_launch(spec, 1000, 16, 1)
    run, outcome = tune_fused.forced_call(spec, launch, inputs, inputs.logits)
    outcome()
    run()
    kernels._compiled_fused.cache_clear()
    assert [each for each, _ in taken] == [spec, spec]
    for _, arguments in taken:
        assert {launch.cluster, launch.smem_bytes} <= {each for each in arguments if isinstance(each, int)}
