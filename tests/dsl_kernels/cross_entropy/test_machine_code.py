"""What the compiler made of every kernel, for every arch: read from the shared objects, no GPU needed."""

import os
import re
import shutil
import struct
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from dsl_kernels import build, manifest
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import ARCHS

EM_CUDA = 190


class Kernel(NamedTuple):
    name: str
    registers: int
    stack_bytes: int
    local_bytes: int
    opcodes: frozenset[str]

    @property
    def is_rows(self) -> bool:
        return "_rows_" in self.name and "_add_rows_" not in self.name


def cuobjdump() -> str:
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "cuobjdump"
    found = str(packaged) if packaged.exists() else shutil.which("cuobjdump")
    if found is None:
        pytest.skip("cuobjdump is not installed: packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
    return found


def cubins_of(library: Path) -> list[bytes]:
    """The GPU programs embedded in a shared object: ELF files of machine EM_CUDA, cut at their section header's end."""
    content = library.read_bytes()
    cubins = []
    for match in re.finditer(rb"\x7fELF\x02\x01", content):
        start = match.start()
        machine = struct.unpack_from("<H", content, start + 18)[0]
        if machine != EM_CUDA:
            continue
        program_headers, sections = struct.unpack_from("<QQ", content, start + 32)
        program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", content, start + 54)
        end = max(sections + section_size * section_count, program_headers + program_size * program_count)
        cubins.append(content[start : start + end])
    return cubins


def read_cubin(tool: str, path: Path) -> list[Kernel]:
    usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    listing = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    opcodes = {}
    for part in listing.split("Function :")[1:]:
        name, _, body = part.partition("\n")
        found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(\S+)", body, re.MULTILINE)
        opcodes[name.strip()] = frozenset(each.rstrip(";") for each in found)
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
    return [
        Kernel(name, int(registers), int(stack), int(local), opcodes[name])
        for name, registers, stack, local in re.findall(pattern, usage)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels of this source for every arch: those that GREYHOUND_ARTIFACTS names, or built here."""
    given = os.environ.get("GREYHOUND_ARTIFACTS")
    if given:
        found = manifest.read(Path(given))
        if found and found["source_hash"] == manifest.source_hash() and set(found["archs"]) == set(ARCHS):
            return Path(given)
    out = tmp_path_factory.mktemp("kernels")
    build.build(plan.SPECS, ARCHS, out, os.cpu_count() or 1, progress=False)
    return out


@pytest.fixture(scope="module", params=ARCHS)
def kernels(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[list[Kernel]]:
    """The kernels of each spec of one arch."""
    tool = cuobjdump()
    scratch = tmp_path_factory.mktemp(request.param)
    paths = []
    for number, cubin in enumerate(cubins_of(folder / manifest.object_name(request.param))):
        paths.append(scratch / f"{number}.cubin")
        paths[-1].write_bytes(cubin)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda path: read_cubin(tool, path), paths))


def test_every_spec_is_there_with_its_kernels(kernels: list[list[Kernel]]) -> None:
    fused = [spec for spec in plan.SPECS if spec.op == "fused"]
    assert len(kernels) == len(plan.SPECS)
    assert sum(kernel.is_rows for of_spec in kernels for kernel in of_spec) == len(fused)
    assert sum("_add_rows_" in kernel.name for of_spec in kernels for kernel in of_spec) == len(fused)
    assert sum("_count_valid_" in kernel.name for of_spec in kernels for kernel in of_spec) == len(fused)
    assert sum("_scale_" in kernel.name for of_spec in kernels for kernel in of_spec) == len(plan.SPECS) - len(fused)


def test_no_kernel_uses_a_stack_or_local_memory(kernels: list[list[Kernel]]) -> None:
    spilled = [kernel for of_spec in kernels for kernel in of_spec if kernel.stack_bytes or kernel.local_bytes]
    assert not spilled
    assert not [k for of_spec in kernels for k in of_spec if any(o.startswith(("LDL", "STL")) for o in k.opcodes)]


def test_the_registers_are_those_that_the_plan_counts_on(kernels: list[list[Kernel]]) -> None:
    allowed = sorted(plan.max_registers(spec) for spec in plan.SPECS if spec.op == "fused")
    taken = sorted(kernel.registers for of_spec in kernels for kernel in of_spec if kernel.is_rows)
    assert all(registers <= limit for registers, limit in zip(taken, allowed, strict=True))


def test_rows_come_by_bulk_copy_or_by_16_byte_loads(kernels: list[list[Kernel]]) -> None:
    rows = [kernel for of_spec in kernels for kernel in of_spec if kernel.is_rows]
    bulk = [kernel for kernel in rows if any(each.startswith("UBLKCP") for each in kernel.opcodes)]
    vector = [kernel for kernel in rows if any(re.match(r"LDG\.E.*\.128", each) for each in kernel.opcodes)]
    streamed = [spec for spec in plan.SPECS if spec.streamed]
    assert len(vector) == len(streamed)
    assert len(bulk) == len(rows) - len(streamed)
    assert not set(bulk) & set(vector)


def test_gradients_leave_by_16_byte_stores(kernels: list[list[Kernel]]) -> None:
    stores = [
        kernel
        for of_spec in kernels
        for kernel in of_spec
        if any(re.match(r"STG\.E.*\.128", each) for each in kernel.opcodes)
    ]
    assert len(stores) == sum(spec.grad for spec in plan.SPECS)
