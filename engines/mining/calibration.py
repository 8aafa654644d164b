# SPDX-License-Identifier: Apache-2.0
"""FP8 scales of activations: the largest magnitude that each quantised product's input reaches on real prompts.

The network in 16 bits is interpreted in NumPy, operation by operation, so that calibration needs no card. It computes
about 2 x parameters x tokens operations: seconds for models of the size that tests use, an hour of a server's cores for
7 billion parameters and 4,096 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.graph.fused_kernels import FP8_LARGEST
from engines.graph.ir import Operation  # noqa: TC001 -- read at run time by whoever watches
from engines.graph.numpy_interpreter import run
from engines.mining.layer import Fp8Scales
from engines.mining.network import QUANTIZED_INPUTS, build_network
from engines.mining.packing import PADDING_SEGMENT, pack
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from engines.mining.layer import Weights
    from engines.model_config import ModelShape

BATCH_PROMPTS: Final = 16
_LEAST: Final = 1e-12


def calibrate(
    shape: ModelShape,
    weights: Weights,
    prompts: Sequence[npt.NDArray[np.int32]],
    *,
    row_tokens: int,
    dtype: str = "bfloat16",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Fp8Scales:
    """Finds the scales.

    Args:
        shape: The model's figures.
        weights: The checkpoint.
        prompts: Token ids, each of 1 to `row_tokens`.
        row_tokens: Tokens of one row.
        dtype: Number format in which activations are computed.
        progress: Told how many prompts are done, and of how many.

    Returns:
        For each layer the scales of `qkv`, `o`, `mlp` and `down`.

    Raises:
        FailedPreconditionError: There are no prompts, or an activation is NaN or infinite: the product is named.
    """
    if not prompts:
        raise FailedPreconditionError("there is no prompt to calibrate on: FP8 scales come from real activations")
    network = build_network(shape, weights, row_tokens=row_tokens, dtype=dtype)
    largest: dict[str, float] = {}
    for begin in range(0, len(prompts), BATCH_PROMPTS):
        feeds = pack(prompts[begin : begin + BATCH_PROMPTS], row_tokens)
        run(network, feeds, watch=_Watch(feeds["segments"].reshape(-1) != PADDING_SEGMENT, largest))
        progress(min(begin + BATCH_PROMPTS, len(prompts)), len(prompts))
    wrong = [name for name, value in largest.items() if not np.isfinite(value)]
    if wrong:
        raise FailedPreconditionError(f"the input of {wrong[0]} is not finite: is the checkpoint whole?")
    return Fp8Scales({name: max(value, _LEAST) / FP8_LARGEST for name, value in largest.items()})


class _Watch:
    """Notes the largest magnitude of each quantised input, padding left out: nobody asks for what it computes."""

    def __init__(self, real: npt.NDArray[np.bool_], largest: dict[str, float]) -> None:
        self._real = real
        self._largest = largest

    def __call__(self, operation: Operation, value: npt.NDArray[Any]) -> None:
        layer, _, rest = operation.name.partition(".")
        if (product := QUANTIZED_INPUTS.get(rest)) is None:
            return
        seen = float(np.abs(value[self._real].astype(np.float32)).max())
        name = f"{layer}.{product}"
        self._largest[name] = max(self._largest.get(name, 0.0), seen) if np.isfinite(seen) else np.inf
