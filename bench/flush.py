"""Evicts from a device's L2 what calls before have left there, whatever its eviction priority.

Lines that were read or written with `evict_last` stay where others want their place. After plain writes of twice the L2
a part of what Greyhound's kernels had read was still there, which made out-of-place calls and the loss alone look up to
3 % faster, and, where a restoring copy had since made those lines dirty, in-place calls up to 2.5 us slower (H200,
2026-12-01). So each line of the buffer is written with that priority too, which leaves nothing older, and then given
the normal one, so that the call that is timed finds an L2 where everything may be evicted.
"""

import torch
import triton
import triton.language as tl

LINE_BYTES = 128
WRITE_BLOCK = 4096
"""Numbers of 4 bytes that a program writes."""

LINES_BLOCK = 1024
"""Lines that a program gives back."""


@triton.jit
def _write_to_stay(
    buffer,  # (n,) int32, n a multiple of BLOCK
    BLOCK: tl.constexpr,
):
    addresses = (buffer + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    tl.inline_asm_elementwise(
        """{
        .reg .b64 policy;
        createpolicy.fractional.L2::evict_last.b64 policy, 1.0;
        st.global.L2::cache_hint.b32 [$1], 0, policy;
        mov.b32 $0, 0;
        }""",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _let_go(
    buffer,  # (n,) int32, on a line's boundary, of whole blocks of lines
    BLOCK: tl.constexpr,
    NUMBERS_A_LINE: tl.constexpr,
):
    lines = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.inline_asm_elementwise(
        """{
        applypriority.global.L2::evict_normal [$1], 128;
        mov.b32 $0, 0;
        }""",
        "=r,l",
        [(buffer + lines * NUMBERS_A_LINE).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def buffer_of(least_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a buffer of at least so many bytes for `evict_all`."""
    block_bytes = LINES_BLOCK * LINE_BYTES
    blocks = -(-least_bytes // block_bytes)
    return torch.zeros(blocks * block_bytes // 4, dtype=torch.int32, device=device)


def evict_all(buffer: torch.Tensor) -> None:
    """Replace what the L2 holds by the lines of a `buffer_of` at least its size, dirty and of normal priority.

    What the last of these kernels asks of the L2 may outlast it: a short call right after it takes 4 us longer.
    """
    _write_to_stay[(buffer.numel() // WRITE_BLOCK,)](buffer, BLOCK=WRITE_BLOCK)
    lines = buffer.numel() * 4 // LINE_BYTES
    _let_go[(lines // LINES_BLOCK,)](buffer, BLOCK=LINES_BLOCK, NUMBERS_A_LINE=LINE_BYTES // 4)
