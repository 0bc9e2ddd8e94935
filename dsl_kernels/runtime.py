"""Where the DSL's run-time libraries lie, found without importing the DSL. Standard library only."""

import importlib.util
from pathlib import Path

SHARED_LIBRARY = "libcute_dsl_runtime.so"
STATIC_LIBRARY = "libcuda_dialect_runtime_static.a"


def library_folder() -> Path:
    """Return the folder of the CUDA 13 run-time libraries of the DSL.

    Raises:
        FileNotFoundError: the DSL's libraries are not installed.
    """
    found = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in found.submodule_search_locations or () if found else ():
        folder = Path(root) / "cu13" / "lib"
        if (folder / SHARED_LIBRARY).is_file():
            return folder
    raise FileNotFoundError(
        f"{SHARED_LIBRARY} for CUDA 13 not found: install `nvidia-cutlass-dsl[cu13]`, whose extra brings it"
    )
