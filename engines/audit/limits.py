# SPDX-License-Identifier: Apache-2.0
"""How far honest rounding to each number format moves a weight.

A limit leaves room above what libllama's own quantisers were seen to do on every tensor of a real model
(`docs/judging.md` has the figures and the command), and, where the format says it, above the largest possible rounding.
What stays below a limit cannot be told from rounding by looking at weights alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limit:
    """What a format explains."""

    row_error: float
    """Length of a row's difference over the row's length; a row must be over this and over `peak_error`."""
    peak_error: float
    """Length of a row's difference over that of a row that is at its blocks' peaks throughout."""
    value_error: float
    """Difference of one value over the peak of its block of 256 columns."""
    floor: float
    """Root mean square below which a row is no longer held to its own size; 0 where the format has range enough."""


_HALF_SCALES: Final = 1e-3
"""Block formats keep their scales as half floats, whose steps are coarse below this size of weights."""
LIMITS: Final[dict[str, Limit]] = {
    "f64": Limit(1e-6, 0.0, 1e-6, 0.0),
    "f32": Limit(1e-6, 0.0, 1e-6, 0.0),
    "f16": Limit(0.0006, 0.0, 0.0006, 2.0**-14),
    "bf16": Limit(0.0025, 0.0, 0.0042, 0.0),
    "f8_e4m3": Limit(0.045, 0.0, 0.07, 0.0),
    "f8_e5m2": Limit(0.09, 0.0, 0.14, 0.0),
    "i8": Limit(0.05, 0.02, 0.05, 0.0),
    "q8_0": Limit(0.012, 0.003, 0.006, _HALF_SCALES),
    "q8_1": Limit(0.012, 0.003, 0.006, _HALF_SCALES),
    "q6_k": Limit(0.045, 0.01, 0.03, _HALF_SCALES),
    "q5_1": Limit(0.08, 0.024, 0.045, _HALF_SCALES),
    "q5_0": Limit(0.09, 0.024, 0.08, _HALF_SCALES),
    "q5_k": Limit(0.08, 0.024, 0.07, _HALF_SCALES),
    "q4_1": Limit(0.13, 0.04, 0.085, _HALF_SCALES),
    "q4_0": Limit(0.17, 0.047, 0.16, _HALF_SCALES),
    "q4_k": Limit(0.15, 0.047, 0.13, _HALF_SCALES),
    "iq4_nl": Limit(0.16, 0.042, 0.16, _HALF_SCALES),
    "iq4_xs": Limit(0.17, 0.045, 0.18, _HALF_SCALES),
    "nvfp4": Limit(0.2, 0.07, 0.25, _HALF_SCALES),
    "mxfp4": Limit(0.22, 0.075, 0.32, _HALF_SCALES),
    "q3_k": Limit(0.25, 0.085, 0.3, _HALF_SCALES),
    "iq3_s": Limit(0.28, 0.09, 0.5, _HALF_SCALES),
}
"""By number format. Formats of less than three bits are not judged: they need an importance matrix to be of use."""


def limit_of(dtype: str) -> Limit | None:
    """The limit of a format; None where none is known."""
    return LIMITS.get(dtype)
