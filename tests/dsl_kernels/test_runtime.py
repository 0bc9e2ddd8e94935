"""Where the DSL's run-time libraries are found, and what is said where they are not."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from dsl_kernels import runtime


def test_one_folder_holds_what_is_linked_and_what_is_loaded() -> None:
    folder = runtime.library_folder()
    assert (folder / runtime.SHARED_LIBRARY).is_file()
    assert (folder / runtime.STATIC_LIBRARY).is_file()


@pytest.mark.parametrize(
    "folders",
    [
        None,  # no DSL
        [],  # the DSL without the libraries' distributions
        ["cu12/lib"],  # the DSL as it comes without the extra
    ],
)
def test_missing_libraries_are_named_with_what_brings_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: list[str] | None
) -> None:
    spec = None
    if folders is not None:
        spec = importlib.machinery.ModuleSpec("nvidia_cutlass_dsl", None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path)]
        for folder in folders:
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / runtime.SHARED_LIBRARY).touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(FileNotFoundError, match=rf"{runtime.SHARED_LIBRARY}.*nvidia-cutlass-dsl\[cu13\]"):
        runtime.library_folder()
