"""Whether a wheel is what its name says: installs it apart and asks the installed package which kernels it accepts.

    python .ci/check_wheel.py greyhound_ce-0.3.0-py3-none-linux_x86_64.whl sm_90a

Without archs the wheel must hold no kernels and run on any platform. Needs an environment with the dependencies.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ASK = """
import json, pathlib, sys
import greyhound, greyhound.nn.functional
from greyhound import _artifacts
from dsl_kernels.cross_entropy import plan
for arch in sys.argv[1:]:
    for spec in plan.SPECS:
        _artifacts.load(arch, spec)
print(json.dumps({
    "imported from": str(pathlib.Path(greyhound.__file__).parents[1]),
    "version": greyhound.__version__,
    "compiler imported": "cutlass" in sys.modules,
    "kernels compiled": _artifacts.cache_folder().exists(),
}))
"""
"""Needs no GPU: a launcher is loaded, not called. One that the wheel lacks would be compiled, into a new cache."""


def main(wheel: Path, *archs: str) -> None:
    """Exit with a message where the wheel is not as it should be."""
    names = zipfile.ZipFile(wheel).namelist()
    kernels = sorted(name for name in names if name.startswith("greyhound/artifacts/"))
    expected = [f"greyhound/artifacts/greyhound_{arch}.so" for arch in archs]
    expected += ["greyhound/artifacts/manifest.json"] if archs else []
    demand(kernels, sorted(expected), "kernels in the wheel")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_") if archs else "any"
    demand(wheel.stem.split("-", 2)[2], f"py3-none-{platform}", "tag")
    for typed in ("greyhound/py.typed", "dsl_kernels/py.typed"):
        demand(typed in names, True, f"{typed} in the wheel")
    demand(
        sorted({name.split("/")[0] for name in names if ".dist-info" not in name}),
        ["dsl_kernels", "greyhound"],
        "packages",
    )
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, str(wheel)]
        subprocess.run(install, check=True)
        environment = {name: value for name, value in os.environ.items() if name != "GREYHOUND_ARTIFACTS"}
        environment |= {"PYTHONPATH": folder, "GREYHOUND_CACHE": str(Path(folder) / "cache")}
        ask = [sys.executable, "-c", ASK, *archs]
        asked = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
        expected_answer = {
            "imported from": str(Path(folder).resolve()),
            "version": wheel.name.split("-")[1],
            "compiler imported": False,
            "kernels compiled": False,
        }
        demand(json.loads(asked.stdout), expected_answer, "the installed package")
    print(f"{wheel.name}: {len(names)} files, kernels for {', '.join(archs) or 'no arch'}, imports")


def demand(got: object, expected: object, what: str) -> None:
    """Exit where a fact about the wheel is not the expected one."""
    if got != expected:
        sys.exit(f"{what}: expected {expected}, got {got}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
