# SPDX-License-Identifier: Apache-2.0
"""How far apart the hidden states of two engines are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from engines.compare.requests import hidden_state
from ifabric.engine.v1 import contract_pb2
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from engines.targets.broker import BrokerTarget
    from ifabric.engine.v1 import generation_pb2

    Floats = npt.NDArray[np.float64]

_DTYPES: Final[dict[int, Any]] = {
    contract_pb2.PAYLOAD_DTYPE_FLOAT32: np.dtype("<f4"),
    contract_pb2.PAYLOAD_DTYPE_FLOAT16: np.dtype("<f2"),
    contract_pb2.PAYLOAD_DTYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class PayloadComparison:
    """What was found over all prompts."""

    prompts: int
    layers: tuple[int, ...]
    """As in the contract; -1 is after the final norm."""
    cosine: Floats
    """Of the last token's state, `[prompts, layers]`."""
    error: Floats
    """Length of the difference over that of A's state, `[prompts, layers]`."""
    nonfinite: int
    """Values of B that are no numbers."""

    @property
    def cosine_min(self) -> float:
        """The least over all prompts and layers."""
        return float(self.cosine.min())


async def compare(a: BrokerTarget, b: BrokerTarget, prompts: Sequence[Sequence[int]]) -> PayloadComparison:
    """Compares two engines that carry hidden states.

    Args:
        a: The engine that is believed.
        b: The engine that is judged.
        prompts: Token ids that fit both.

    Raises:
        FabricError: An engine refused or failed a request.
        FailedPreconditionError: An extraction failed, or the payloads are of other layers or extents.
    """
    requests = [hidden_state(ids) for ids in prompts]
    left = [result.payload for result in await a.answers(requests)]
    right = [result.payload for result in await b.answers([hidden_state(ids) for ids in prompts])]
    if list(left[0].layers) != list(right[0].layers):
        raise FailedPreconditionError(
            f"one engine carries the layers {list(left[0].layers)} and the other {list(right[0].layers)}"
        )
    layers = tuple(left[0].layers)
    x = np.stack([_values(each, len(layers)) for each in left])
    y = np.stack([_values(each, len(layers)) for each in right])
    if x.shape != y.shape:
        raise FailedPreconditionError(
            f"the states have {x.shape[-1]} values on one side and {y.shape[-1]} on the other"
        )
    nonfinite = int(np.count_nonzero(~np.isfinite(y)))
    y = np.nan_to_num(y, nan=0.0, posinf=0.0, neginf=0.0)
    lengths = np.linalg.norm(x, axis=-1)
    products = lengths * np.linalg.norm(y, axis=-1)
    cosine = np.where(products > 0, (x * y).sum(axis=-1) / np.maximum(products, 1e-300), 0.0)
    error = np.linalg.norm(y - x, axis=-1) / np.maximum(lengths, 1e-300)
    return PayloadComparison(len(prompts), layers, cosine, error, nonfinite)


def _values(payload: generation_pb2.Payload, layers: int) -> Floats:
    """The payload as float64 `[layers, values]`."""
    if payload.failure or payload.dtype not in _DTYPES:
        raise FailedPreconditionError(f"a payload is missing: {payload.failure or 'its number format is not known'}")
    return np.frombuffer(payload.data, _DTYPES[payload.dtype]).astype(np.float64).reshape(layers, -1)
