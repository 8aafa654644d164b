# SPDX-License-Identifier: Apache-2.0
"""Checks the kernels of norm and gated unit on a card against PyTorch, and times them beside the bytes they must move.

    python3 -m benchmarks.gpu.row_kernels BUILD/plugins/libifab_plugins.so

Needs PyTorch, the library and a card; no TensorRT. A result is right where it is what the same roundings of exact
arithmetic give, or in one value of a hundred at most its neighbour (in bfloat16 the next but one, since a normed value
that is rounded to its own neighbour is then multiplied); sums are equal to the bit. The exit status is 1 where a case
is wrong. Times are medians, rows of 4,096 values for norms and 11,008 for gated units.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.kernel_times import SETS, bytes_of, show

FP8_LARGEST: Final = 448.0
EPSILON: Final = 1e-5
NEIGHBOURS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Case:
    """One norm or gated unit; `scale` 0 gives bfloat16, `added` is of norms alone."""

    kind: str
    tokens: int
    width: int
    scale: float
    added: bool = False


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a launch reads and writes."""

    x: Any
    addend: Any
    weight: Any
    total: Any
    output: Any


class Kernels:
    """The library's kernels on PyTorch's current stream."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._norm, self._gated = library.ifab_norm_launch, library.ifab_gated_unit_launch
        self._norm.restype = self._gated.restype = ctypes.c_char_p
        self._norm.argtypes = [
            *[ctypes.c_void_p] * 5,
            ctypes.c_int64,
            ctypes.c_int32,
            *[ctypes.c_float] * 2,
            ctypes.c_void_p,
        ]
        self._gated.argtypes = [
            *[ctypes.c_void_p] * 2,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_float,
            ctypes.c_void_p,
        ]

    def __call__(self, case: Case, on: Buffers) -> None:
        """Enqueues one launch; raises RuntimeError with the library's sentence where it is refused."""
        stream = torch.cuda.current_stream().cuda_stream
        x, addend, weight, total, output = (
            None if tensor is None else tensor.data_ptr()
            for tensor in (on.x, on.addend, on.weight, on.total, on.output)
        )
        problem = (
            self._norm(x, addend, weight, total, output, case.tokens, case.width, EPSILON, case.scale, stream)
            if case.kind == "norm"
            else self._gated(x, output, case.tokens, case.width, case.scale, stream)
        )
        if problem is not None:
            raise RuntimeError(problem.decode())


def make_buffers(case: Case, seed: int) -> Buffers:
    """Random inputs, and memory for results."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def random(*extents: int) -> Any:
        return torch.randn(*extents, generator=generator, device="cuda").to(torch.bfloat16)

    norm, extents = case.kind == "norm", (case.tokens, case.width)
    dtype = torch.float8_e4m3fn if case.scale > 0.0 else torch.bfloat16
    return Buffers(
        random(*extents) if norm else random(case.tokens, 2 * case.width),
        random(*extents) if case.added else None,
        random(case.width) if norm else None,
        torch.empty(extents, dtype=torch.bfloat16, device="cuda") if case.added else None,
        torch.empty(extents, dtype=dtype, device="cuda"),
    )


def reference(case: Case, on: Buffers) -> tuple[Any, Any]:
    """The result in double before it is rounded to leave, and the sum, None for none."""
    if case.kind != "norm":
        gate, up = on.x.double().chunk(2, -1)
        return gate * torch.sigmoid(gate) * up, None
    total = (on.x.float() + on.addend.float()).to(torch.bfloat16) if case.added else None
    wide = (on.x if total is None else total).double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()).to(torch.bfloat16)
    return normed.double() * on.weight.double(), total


def wrong(kernels: Kernels, case: Case) -> bool:
    """Runs a case, prints what came out, and says whether it is wrong."""
    on = make_buffers(case, 11)
    kernels(case, on)
    torch.cuda.synchronize()
    exact, total = reference(case, on)
    if case.scale > 0.0:
        wanted = (exact / case.scale).float().clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
        got, want = (tensor.view(torch.uint8).int() for tensor in (on.output, wanted))
    else:
        got, want = (tensor.view(torch.int16).int() for tensor in (on.output, exact.float().to(torch.bfloat16)))
    steps = (got - want).abs()
    next_to = (steps > 0).float().mean().item()
    furthest = 2 if case.kind == "norm" and case.scale == 0.0 else 1
    bad = int(steps.max()) > furthest or next_to > max(NEIGHBOURS, 1.5 / steps.numel())
    bad = bad or (total is not None and not torch.equal(on.total, total))
    print(f"{'WRONG' if bad else 'ok   '} neighbours {next_to:.4%} furthest {int(steps.max())}  {case}", flush=True)
    return bad


def timed(kernels: Kernels, case: Case, repeats: int) -> None:
    """Prints the time of a launch beside the bytes that it moves."""
    sets = [make_buffers(case, seed) for seed in range(SETS)]
    one = sets[0]
    moved = bytes_of(one.x, one.addend, one.weight, one.total, one.output)
    label = f"{case.kind + (' of a sum' if case.added else ''):13} {case.tokens:5} tokens"
    label += " fp8 " if case.scale else " bf16"
    show(label, [partial(kernels, case, on) for on in sets], moved, repeats)


def main() -> None:
    """Checks, then measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--repeats", type=int, default=50)
    said = parser.parse_args()
    kernels = Kernels(said.library)
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    print(torch.cuda.get_device_name(), flush=True)
    widths = {"norm": (8, 64, 256, 1032, 4096, 5120, 32768), "gated_unit": (8, 136, 1088, 11008, 14336, 32768)}
    failed = 0
    for kind, added in (("norm", False), ("norm", True), ("gated_unit", False)):
        for width, tokens, scale in itertools.product(widths[kind], (1, 130, 2048), (0.0, 0.02)):
            failed += wrong(kernels, Case(kind, tokens, width, scale, added))
    for kind, added in (("norm", False), ("norm", True), ("gated_unit", False)):
        for scale, tokens in itertools.product((0.0, 0.02), (1024, 2048, 8192)):
            timed(kernels, Case(kind, tokens, 4096 if kind == "norm" else 11008, scale, added), said.repeats)
    print(f"{failed} wrong")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
