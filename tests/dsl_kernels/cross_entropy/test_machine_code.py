"""What the compiler made of every kernel, for every arch: read from the shared objects, no GPU needed."""

import dataclasses
import functools
import itertools
import os
import re
import shutil
import struct
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from dsl_kernels import build, manifest
from dsl_kernels.cross_entropy import plan
from dsl_kernels.cross_entropy.spec import ARCHS, Spec

EM_CUDA = 190
MANGLED_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
NO_SCOREBOARD = 7


class Instruction(NamedTuple):
    """One line of the listing."""

    address: int
    guard: str
    """The predicate that decides whether it does anything, e.g. `!P0`; empty where it always does."""
    opcode: str
    """With its modifiers, e.g. `STG.E.128`."""
    operands: tuple[str, ...]
    scoreboard: int = NO_SCOREBOARD
    """What it sets until its result has come."""
    waits: int = 0
    """The scoreboards that it waits for, a bit each."""

    def matches(self, prefix: str, suffix: str = "") -> bool:
        return self.opcode.startswith(prefix) and self.opcode.endswith(suffix)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    name: str
    registers: int
    stack_bytes: int
    local_bytes: int
    instructions: tuple[Instruction, ...]

    @property
    def is_rows(self) -> bool:
        return re.match(r"kernel_cutlass_rows_.*(Wide|Narrow|Held)Rows_", self.name) is not None

    def count(self, prefix: str, suffix: str = "") -> int:
        """Instructions whose opcode begins and ends like this."""
        return sum(each.matches(prefix, suffix) for each in self.instructions)

    def __repr__(self) -> str:
        return f"{self.name[:80]}: {self.registers} registers, {self.stack_bytes} + {self.local_bytes} bytes"


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


LISTED = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T\d]+) )?(\S+?)(?:\s+([^;]*?))?\s*;", re.MULTILINE)


CONTROL = re.compile(r";\s+/\* 0x[0-9a-f]{16} \*/\n\s+/\* 0x([0-9a-f]{16}) \*/")
"""The second word of an instruction, whose bits from 41 on say how long it stalls and what it sets and waits for."""


def instructions_of(listing: str) -> tuple[Instruction, ...]:
    """Parse a function's part of the listing."""
    controls = [int(word, 16) >> 41 for word in CONTROL.findall(listing)]
    return tuple(
        Instruction(
            int(address, 16),
            guard,
            opcode,
            tuple(filter(None, re.split(r",\s*|\s+", operands))),
            control >> 5 & 7,
            control >> 11 & 63,
        )
        for (address, guard, opcode, operands), control in zip(LISTED.findall(listing), controls, strict=True)
    )


def read_cubin(tool: str, path: Path) -> list[Kernel]:
    usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    listing = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    instructions = {}
    for part in listing.split("Function :")[1:]:
        name, _, body = part.partition("\n")
        instructions[name.strip()] = instructions_of(body)
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
    return [
        Kernel(name, int(registers), int(stack), int(local), instructions[name])
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


Kernels = dict[Spec, list[Kernel]]
Reader = Callable[[str], Kernels]


@pytest.fixture(scope="module")
def kernels_of(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A function that returns the kernels of each spec of an arch; the linker keeps the order of `plan.SPECS`."""
    tool = cuobjdump()

    @functools.cache
    def read(arch: str) -> Kernels:
        scratch = tmp_path_factory.mktemp(arch)
        paths = []
        for number, cubin in enumerate(cubins_of(folder / manifest.object_name(arch))):
            paths.append(scratch / f"{number}.cubin")
            paths[-1].write_bytes(cubin)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            found = list(threads.map(lambda path: read_cubin(tool, path), paths))
        return dict(zip(plan.SPECS, found, strict=True))

    return read


@pytest.fixture(params=ARCHS)
def kernels(request: pytest.FixtureRequest, kernels_of: Reader) -> Kernels:
    """The kernels of each spec of one arch."""
    return kernels_of(request.param)


def rows_kernel(of_spec: Iterable[Kernel]) -> Kernel:
    (kernel,) = [kernel for kernel in of_spec if kernel.is_rows]
    return kernel


def test_every_spec_has_its_own_kernels_and_they_are_of_its_kind(kernels: Kernels) -> None:
    for spec, of_spec in kernels.items():
        dtype = MANGLED_DTYPES[spec.dtype]
        if spec.op == "scale":
            (kernel,) = of_spec
            assert re.match(rf"kernel_cutlass_scale_.*ScaleGradient_object_at__tensorptr{dtype}gmem", kernel.name)
            continue
        if spec.op == "combine":
            names = sorted(re.sub(r"_dsl_kernels.*", "", kernel.name) for kernel in of_spec)
            assert names == ["kernel_cutlass_combine", "kernel_cutlass_finish"]
            continue
        rows = "HeldRows" if spec.held else "NarrowRows" if spec.narrow else "WideRows"
        assert re.match(rf"kernel_cutlass_rows_.*{rows}_object_at__tensorptr{dtype}gmem", rows_kernel(of_spec).name)
        others = sorted(re.sub(r"_dsl_kernels.*", "", kernel.name) for kernel in of_spec if not kernel.is_rows)
        plain, with_options = ["add_rows", "count_valid"], ["count", "finish"]
        assert others == [f"kernel_cutlass_{name}" for name in (with_options if spec.options else plain)]


def test_no_kernel_uses_a_stack_or_local_memory(kernels: Kernels) -> None:
    every = [(spec.name, kernel) for spec, of_spec in kernels.items() for kernel in of_spec]
    assert not [each for each in every if each[1].stack_bytes or each[1].local_bytes]
    assert not [each for each in every if each[1].count("LDL") or each[1].count("STL")]


MULTIPROCESSOR_REGISTERS = 65536


def max_registers(arch: str, spec: Spec) -> int:
    """The registers of a thread with which a multiprocessor still holds the blocks that the plan counts on."""
    threads = spec.threads + (0 if spec.narrow or spec.held else plan.WARP)  # wide rows add a warp that copies
    return MULTIPROCESSOR_REGISTERS // (plan.resident_blocks(arch, spec) * threads) // 8 * 8


@pytest.mark.parametrize("arch", ARCHS)
def test_the_registers_are_those_that_the_plan_counts_on(kernels_of: Reader, arch: str) -> None:
    kernels = kernels_of(arch)
    fused = {spec: rows_kernel(of_spec) for spec, of_spec in kernels.items() if spec.op == "fused"}
    assert not [(s.name, k.registers) for s, k in fused.items() if k.registers > max_registers(arch, s)]


RELEASE_OFFSET = 8 * plan.MAX_CHUNKS
"""Of the mbarriers that say that a place has been read."""


def test_a_place_is_released_only_when_what_was_loaded_from_it_has_come(kernels: Kernels) -> None:
    """A load that is merely issued can be overtaken by the release, and by the copy that follows it."""
    for spec, of_spec in kernels.items():
        if spec.op != "fused" or spec.narrow or spec.held:
            continue
        instructions = rows_kernel(of_spec).instructions
        releases = [
            place
            for place, each in enumerate(instructions)
            if each.matches("SYNCS.ARRIVE", ".A1T0") and f"+{RELEASE_OFFSET:#x}]" in "".join(each.operands)
        ]
        assert releases, spec.name
        for release in releases:
            before = instructions[: release + 1]
            load = max(i for i, each in enumerate(before) if each.matches("LDS") and each.scoreboard != NO_SCOREBOARD)
            assert any(each.waits >> before[load].scoreboard & 1 for each in before[load + 1 :]), spec.name


def loads_together(kernel: Kernel) -> int:
    """The most loads of device memory that are on their way before anything waits for one of them."""
    most, flying = 0, []
    for each in kernel.instructions:
        if any(each.waits >> scoreboard & 1 for scoreboard in flying):
            flying = []
        if each.matches("LDG."):
            flying.append(each.scoreboard)
            most = max(most, len(flying))
    return most


def test_labels_that_are_counted_and_entries_that_are_added_are_loaded_together(kernels: Kernels) -> None:
    """A loop that is only unrolled may end after each of its turns, and then waits for each load."""
    expected = {
        **dict.fromkeys(("count_valid", "count"), plan.SUM_LABELS),
        **dict.fromkeys(("add_rows", "finish"), plan.SUM_ENTRIES),
    }
    seen = set()
    for spec, of_spec in kernels.items():
        for kernel in of_spec:
            name = kernel.name.removeprefix("kernel_cutlass_").split("_dsl_kernels")[0]
            if name in expected:
                assert loads_together(kernel) >= expected[name], (spec.name, name)
                seen.add(name)
        if spec.op == "fused" and spec.grad and not spec.options and not spec.narrow:
            assert loads_together(rows_kernel(of_spec)) >= plan.SUM_LABELS, spec.name  # of few rows
    assert seen == set(expected)


def test_rows_come_by_bulk_copy_or_where_they_are_held_by_16_byte_loads(kernels: Kernels) -> None:
    for spec, of_spec in kernels.items():
        if spec.op != "fused":
            continue
        kernel = rows_kernel(of_spec)
        bulk, vector = kernel.count("UBLKCP"), kernel.count("LDG", ".128") + kernel.count("LDG.E.128")
        if spec.options and (spec.streamed or not (spec.grad or spec.narrow)):
            # They do not keep the row, and look up the predicted token where it came from.
            assert bulk > 0
            continue
        assert (bulk > 0, vector >= max(spec.held, 1)) == ((False, True) if spec.held else (True, False)), spec.name


def test_gradients_leave_by_16_byte_stores(kernels: Kernels) -> None:
    def stores(kernel: Kernel) -> int:
        return kernel.count("STG.E", ".128") + kernel.count("STG.E.128.")

    for spec, of_spec in kernels.items():
        if spec.op == "scale":
            assert stores(of_spec[0]) >= plan.SCALE_STEPS
        elif spec.op == "fused" and spec.grad:
            forward = {"entropy_backward": "entropy"}.get(spec.options, spec.options)
            # It stores entries alone.
            without = kernels[dataclasses.replace(spec, grad=False, streamed=False, options=forward)]
            entries = stores(rows_kernel(without))
            assert entries >= 1
            assert stores(rows_kernel(of_spec)) - entries >= max(spec.held, plan.STEPS), spec.name


# --- Instructions of the inner loops --------------------------------------------------------------------


class Block(NamedTuple):
    """Instructions that are issued one after another, and where they may lead."""

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]
    """Addresses of blocks."""


def successors_of(instruction: Instruction, following: int | None) -> tuple[int, ...] | None:
    """Return where an instruction that ends a block may lead, None for one that ends none.

    A call comes back, and to the instruction after it. A branch is conditional where it is guarded or has an operand
    besides its target (a predicate); `BRA.DIV` and the like, which leave only where the warp has diverged, are.
    """
    fall_through = () if following is None else (following,)
    base = instruction.opcode.split(".")[0]
    if base == "BRA":
        target = int(instruction.operands[-1], 16)
        always = not instruction.guard and len(instruction.operands) == 1
        return (target,) if always else (target, *fall_through)
    if base in ("EXIT", "RET", "BRX", "JMP", "KILL", "BREAK"):
        return fall_through if instruction.guard else ()
    return None


def blocks_of(instructions: tuple[Instruction, ...]) -> dict[int, Block]:
    """Cut a kernel into basic blocks, by the address of their first instruction."""
    following = {a.address: b.address for a, b in itertools.pairwise(instructions)}
    leaders = {instructions[0].address}
    for each in instructions:
        leads_to = successors_of(each, following.get(each.address))
        if leads_to is not None:
            leaders |= {*leads_to, following.get(each.address, each.address)}
    blocks, current = {}, []
    for each in instructions:
        current.append(each)
        after = following.get(each.address)
        leads_to = successors_of(each, after)
        if leads_to is not None or after is None or after in leaders:
            ends = leads_to if leads_to is not None else (() if after is None else (after,))
            blocks[current[0].address] = Block(tuple(current), ends)
            current = []
    return blocks


Edge = tuple[int, int]


def back_edges_of(blocks: dict[int, Block], entry: int) -> set[Edge]:
    """Return the jumps (from, to) that close a loop: there is no way to `from` but through `to`.

    Without them no way leads in circles; nothing that a compiler makes of loops with one entry each is left over.
    """
    edges = set()
    for header in {successor for block in blocks.values() for successor in block.successors}:
        seen, waiting = {header}, [entry]
        while waiting:
            address = waiting.pop()
            if address not in seen:
                seen.add(address)
                waiting += blocks[address].successors
        inside = set(blocks) - seen | {header}
        edges |= {(address, header) for address in inside if header in blocks[address].successors}
    return edges


def loops_of(blocks: dict[int, Block], back_edges: set[Edge]) -> dict[int, set[int]]:
    """Return the blocks of every natural loop, by its header: what leads to a jump back without passing the header."""
    before: dict[int, set[int]] = {address: set() for address in blocks}
    for address, block in blocks.items():
        for successor in block.successors:
            before[successor].add(address)
    loops: dict[int, set[int]] = {}
    for latch, header in back_edges:
        body = loops.setdefault(header, {header})
        waiting = [latch]
        while waiting:
            address = waiting.pop()
            if address not in body:
                body.add(address)
                waiting += before[address]
    return loops


KINDS = {
    "exponentials": re.compile(r"MUFU\.EX2"),
    "loads": re.compile(r"LDS\..*128|LDS\.128"),
    "stores": re.compile(r"STG\.E.*\.128"),
}


def kinds_in(block: Block) -> Counter[str]:
    """Count a block's instructions of each kind."""
    return Counter(kind for each in block.instructions for kind, pattern in KINDS.items() if pattern.match(each.opcode))


def shortest_round(
    header: int, blocks: dict[int, Block], back_edges: set[Edge], wanted: dict[str, int]
) -> tuple[int, int] | None:
    """Return (instructions, exponentials) of the shortest way once round a loop that issues what is wanted, if any.

    A chunk that is whole takes the shortest such way: the masked one issues tests and selections besides. An
    instruction whose predicate is false takes a slot like any other. Inner loops are passed once at most.

    Args:
        header: where the loop begins and ends.
        blocks: those of the loop.
        back_edges: the kernel's.
        wanted: how many of each of `KINDS` at least; of those that are missing none.
    """
    caps = tuple(wanted.get(kind, 0) for kind in KINDS)

    @functools.cache
    def rest(address: int, have: tuple[int, ...]) -> tuple[int, int] | None:
        """From a block on to the header, where `have` has been issued before it, each number up to its cap."""
        counts = kinds_in(blocks[address])
        if any(counts[kind] and kind not in wanted for kind in KINDS):
            return None
        have = tuple(min(n + counts[kind], cap) for n, cap, kind in zip(have, caps, KINDS, strict=True))
        ways = []
        for successor in blocks[address].successors:
            if successor == header and have == caps:
                ways.append((0, 0))
            elif successor in blocks and (address, successor) not in back_edges:
                ways.append(rest(successor, have))
        possible = [way for way in ways if way is not None]
        if not possible:
            return None
        length, exponentials = min(possible)
        return length + len(blocks[address].instructions), exponentials + counts["exponentials"]

    return rest(header, (0,) * len(caps))


def shortest_loop(kernel: Kernel, wanted: dict[str, int]) -> tuple[int, int]:
    """Return (instructions, exponentials) of the shortest way round any loop of a kernel that issues what is wanted."""
    blocks = blocks_of(kernel.instructions)
    back_edges = back_edges_of(blocks, kernel.instructions[0].address)
    rounds = [
        shortest_round(header, {address: blocks[address] for address in body}, back_edges, wanted)
        for header, body in loops_of(blocks, back_edges).items()
    ]
    found = [each for each in rounds if each is not None]
    assert found, f"no loop with {wanted} in {kernel}"
    return min(found)


def listing(text: str) -> tuple[Instruction, ...]:
    """Instructions 16 bytes apart, from lines without addresses."""
    lines = [line.strip() for line in text.strip().splitlines()]
    words = f"/* 0x{0:016x} */\n    /* 0x{NO_SCOREBOARD << 46:016x} */"
    return instructions_of("\n".join(f"        /*{16 * i:04x}*/    {line} ; {words}" for i, line in enumerate(lines)))


EXAMPLE = """
    MOV R0, RZ
    @P0 EXIT
    LDS.128 R4, [R3]
    @!P0 BRA 0x70
    MUFU.EX2 R4, R4
    FADD R4, R4, R5
    BRA 0xb0
    FSEL R4, R4, -INF, P1
    FSEL R5, R5, -INF, P1
    MUFU.EX2 R4, R4
    FADD R4, R4, R5
    @P2 BRA 0x20
    BRA.U !UP0, 0x0
    EXIT
"""
"""A loop from 0x20 to 0xb0, which issues 6 instructions where it does not branch at 0x30 and 7 where it does, in
another one from 0x0 to 0xc0."""


def test_the_counting_follows_branches_and_takes_the_way_that_does_the_work() -> None:
    instructions = listing(EXAMPLE)
    assert [each.guard for each in instructions if each.opcode == "BRA"] == ["!P0", "", "P2"]
    blocks = blocks_of(instructions)
    assert {address: block.successors for address, block in blocks.items()} == {
        0x00: (0x20,),
        0x20: (0x70, 0x40),
        0x40: (0xB0,),
        0x70: (0xB0,),
        0xB0: (0x20, 0xC0),
        0xC0: (0x0, 0xD0),
        0xD0: (),
    }
    back_edges = back_edges_of(blocks, 0)
    assert back_edges == {(0xB0, 0x20), (0xC0, 0x0)}
    inner = {0x20, 0x40, 0x70, 0xB0}
    assert loops_of(blocks, back_edges) == {0x20: inner, 0x0: {0x0, *inner, 0xC0}}
    kernel = Kernel("example", 0, 0, 0, instructions)
    assert shortest_loop(kernel, {"exponentials": 1, "loads": 1}) == (6, 1)
    for nowhere in ({"exponentials": 2, "loads": 1}, {"exponentials": 1}, {"exponentials": 1, "loads": 1, "stores": 1}):
        with pytest.raises(AssertionError, match="no loop with"):
            shortest_loop(kernel, nowhere)


def passes_of(kernel: Kernel, elements: int, share: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (instructions, exponentials) of a thread's whole chunk in the first pass and in the second.

    Args:
        kernel: of wide rows.
        elements: of a thread in a chunk.
        share: of the exponentials on the special-function unit.
    """
    work = {"exponentials": int(elements * share), "loads": plan.STEPS}
    return shortest_loop(kernel, work), shortest_loop(kernel, {**work, "stores": plan.STEPS})


INSTRUCTIONS_PER_ELEMENT = {"sm_90a": 14.0, "sm_100a": 16.6}
"""Of both passes together; 13.5 are issued on sm_90a, 16.1 on sm_100a, where half the exponentials are polynomials."""
EXPONENTIALS_PER_ELEMENT = 2.2
"""Of both passes together, on whichever unit: two, and the first pass rescales its sums once a chunk."""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_whole_chunk_of_a_wide_row_takes_few_instructions_for_each_element(
    kernels_of: Reader, arch: str, dtype: str
) -> None:
    spec, launch = plan.select_fused(arch, dtype, 128256, True, 8192, 132)
    assert isinstance(launch, plan.WideLaunch)
    assert not spec.streamed
    kernel = rows_kernel(kernels_of(arch)[spec])
    elements = plan.STEPS * spec.vector_elements  # of a thread in a chunk
    polynomial = plan.arithmetic(arch, dtype).polynomial
    share = (8 - polynomial) / 8  # on the special-function unit
    passes = passes_of(kernel, elements, share)
    instructions, exponentials = (sum(each) / elements for each in zip(*passes, strict=True))
    measured = f"(instructions, exponentials) of {elements} elements: first pass {passes[0]}, second {passes[1]}"
    assert instructions <= INSTRUCTIONS_PER_ELEMENT[arch], f"{instructions:.2f} an element; {measured}"
    assert exponentials <= EXPONENTIALS_PER_ELEMENT * share, f"{exponentials:.2f} an element; {measured}"


INSTRUCTIONS_WITH_OPTIONS = {"rows": 12.8, "smoothing": 14.4, "entropy": 14.6}
"""Of both passes together for each bf16 or fp16 element on sm_90a. Issued are 12.3, 13.9 and 14.1."""


@pytest.mark.parametrize("options", INSTRUCTIONS_WITH_OPTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_options_cost_few_instructions_for_each_element(kernels_of: Reader, dtype: str, options: str) -> None:
    spec, _ = plan.select_fused("sm_90a", dtype, 128256, True, 8192, 132, options)
    elements = plan.STEPS * spec.vector_elements
    passes = passes_of(rows_kernel(kernels_of("sm_90a")[spec]), elements, 1.0)
    instructions = sum(each[0] for each in passes) / elements
    assert instructions <= INSTRUCTIONS_WITH_OPTIONS[options], f"{instructions:.2f} an element; {passes}"
