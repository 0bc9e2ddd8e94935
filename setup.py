"""Puts compiled kernels into a wheel; everything else is in pyproject.toml.

    GREYHOUND_WHEEL_ARCHS="sm_90a sm_100a" pip wheel . --no-deps

compiles every kernel for those archs into the wheel. Without the variable the wheel holds what `greyhound/artifacts`
holds, or no kernels. A wheel with kernels is tagged for this platform but for no Python version: the kernels' shared
objects call nothing of Python's. Kernels of another source or another version of the DSL are refused here, since they
would be refused when loaded.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
SOURCE_ARTIFACTS = ROOT / "greyhound" / "artifacts"
ARCHS = os.environ.get("GREYHOUND_WHEEL_ARCHS", "").split()

sys.path.insert(0, str(ROOT))
from dsl_kernels import manifest  # noqa: E402 - the build runs without the source on the path


def pin(distribution: str) -> str:
    """Return the exact requirement of a distribution, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (found,) = (text for text in project["dependencies"] if text.startswith(distribution) and "==" in text)
    return str(found)


def check_artifacts(folder: Path) -> None:
    """Refuse kernels that the installed package would refuse to load."""
    found = manifest.read(folder)
    if found is None:
        return
    dsl, tvm_ffi = (pin(name).split("==")[1] for name in (manifest.DSL_DISTRIBUTION, manifest.TVM_FFI_DISTRIBUTION))
    expected = manifest.new(dsl, tvm_ffi)
    for field in ("source_hash", "dsl", "tvm_ffi"):
        if found[field] != expected[field]:
            raise SetupError(
                f"{folder}: built with {field} {found[field]}, but this source has {expected[field]}; "
                f"rebuild with `{manifest.BUILD_COMMAND}` or remove the folder"
            )


class Package(Distribution):
    """Says whether the wheel depends on the platform."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel will hold kernels."""
        return bool(ARCHS) or (SOURCE_ARTIFACTS / manifest.MANIFEST_NAME).is_file()


class BuildWithKernels(build_py):
    """Copies the package, then compiles the kernels asked for beside it."""

    def run(self) -> None:
        """Leave in the build folder the kernels of this build, and none of an earlier one."""
        artifacts = Path(self.build_lib) / "greyhound" / "artifacts"
        if not self.editable_mode:
            shutil.rmtree(artifacts, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        if ARCHS:
            shutil.rmtree(artifacts, ignore_errors=True)
            command = [sys.executable, "-m", "dsl_kernels.build", "--out", str(artifacts.resolve()), "--arch", *ARCHS]
            subprocess.run(command, cwd=ROOT, check=True)
        check_artifacts(artifacts)


class TaggedWheel(bdist_wheel):
    """Names the wheel after what it depends on."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag: any Python 3, and this platform where the wheel holds kernels."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(
    distclass=Package,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": TaggedWheel},
    # A build in isolation brings the compiler where it is needed, and only there.
    setup_requires=[pin(manifest.DSL_DISTRIBUTION), pin(manifest.TVM_FFI_DISTRIBUTION)] if ARCHS else [],
)
