"""Programmatic dependent launch: a kernel is brought to the multiprocessors while the one before it ends (sm_90 and later)."""

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits for the launch before this one and its writes.

    Every program of every kernel calls it before it reads, writes or leaves, so that the end of a launch implies that of all before it.
    The first launch of a call is an ordinary one, which waits for whatever was on the stream. No kernel lets the next one start before
    its own programs leave: on an H200 that cost 9 us of 119 in one layer, and won 1 to 5 us in others.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
