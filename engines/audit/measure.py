# SPDX-License-Identifier: Apache-2.0
"""How far converted values are from their source, row by row, in memory that does not grow with the tensor.

Errors are relative to something that cannot vanish: that of a row to the length of the source's row and to the peaks of
its blocks, that of a value to the peak of its block: the largest source value in 256 columns, which is what block
formats round against, so that a row with one large value among small ones is not held to its own length alone. Ratios
are kept as a histogram over their binary logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from engines.audit.limits import Limit
    from engines.audit.storage import Rows

    Sums = npt.NDArray[np.float64]

BLOCK: Final = 256
"""Columns within which a value's error is measured."""
OCTAVES: Final = 16
"""The histogram of ratios reaches from 2^-16 to 2^16."""
BINS_AN_OCTAVE: Final = 32
WORST_KEPT: Final = 16
_HUGE: Final = np.float32(1e15)
"""Larger values count as this, so that their squares stay finite."""
_SOLID: Final = 0.25
"""Ratios are taken of values of at least this much of their row's root mean square: below it rounding decides them."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row whose error is over the limit."""

    row: int
    error: float


@dataclass(slots=True)
class Comparison:
    """What was counted over the rows so far.

    Args (to `add`): source and converted rows, float32 `[rows, columns]`.
    """

    limit: Limit
    """What the format explains. Rows that are over it are kept, the worst of them."""
    values: int = 0
    nonfinite: int = 0
    """Converted values that are NaN or infinite where the source's are finite."""
    source_nonfinite: int = 0
    zeros: int = 0
    """Converted values that are 0."""
    source_zeros: int = 0
    sign_flips: int = 0
    """Solid values whose sign changed."""
    lost: int = 0
    """Solid values that became 0."""
    max_relative_error: float = 0.0
    """Largest |converted - source| / |source| of solid values."""
    max_row_error: float = 0.0
    """Largest length of a row's difference over the row's length."""
    max_peak_error: float = 0.0
    """Largest length of a row's difference over that of a row that is at its blocks' peaks throughout."""
    max_value_error: float = 0.0
    """Largest |converted - source| over the largest |source| of the block."""
    worst_value: tuple[int, int] = (0, 0)
    """Row and column of it."""
    bad_rows: int = 0
    bad_blocks: int = 0
    """Blocks with a value whose error is over the limit."""
    worst: list[BadRow] = field(default_factory=list)
    ratios: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(2 * OCTAVES * BINS_AN_OCTAVE, dtype=np.int64)
    )
    _xx: float = 0.0
    _yy: float = 0.0
    _xy: float = 0.0
    _ee: float = 0.0

    def add(self, first_row: int, source: Rows, converted: Rows) -> None:
        """Counts rows; `first_row` is the number of the first one."""
        x, y = self._finite(source, converted)
        with np.errstate(all="ignore"):
            difference = y - x
            size = np.abs(x)
            xx = np.einsum("ij,ij->i", x, x).astype(np.float64)
            ee = np.einsum("ij,ij->i", difference, difference).astype(np.float64)
            self._xx += float(xx.sum())
            self._ee += float(ee.sum())
            self._yy += float(np.einsum("ij,ij->i", y, y).astype(np.float64).sum())
            self._xy += float(np.einsum("ij,ij->i", x, y).astype(np.float64).sum())
            starts = np.arange(0, x.shape[1], BLOCK)
            peaks = np.maximum.reduceat(size, starts, axis=1)
            self._rows(first_row, xx, ee, peaks, x.shape[1])
            self._values(first_row, peaks, np.abs(difference), starts)
            self._ratios(x, y, size, xx)
        self.values += x.size

    @property
    def cosine(self) -> float:
        """Of all values as one vector; 1 where both are 0."""
        if self._xx == 0.0 or self._yy == 0.0:
            return 1.0 if self._xx == self._yy else 0.0
        return float(self._xy / np.sqrt(self._xx * self._yy))

    @property
    def factor(self) -> float:
        """What the source must be multiplied by to come nearest to what was converted."""
        return self._xy / self._xx if self._xx else 1.0

    @property
    def error(self) -> float:
        """Length of the difference over the length of the source."""
        return float(np.sqrt(self._ee / self._xx)) if self._xx else float(np.inf if self._ee else 0.0)

    def quantile(self, share: float) -> float:
        """The ratio converted / source below which `share` of the solid values lie; 1 where there are none."""
        total = int(self.ratios.sum())
        if total == 0:
            return 1.0
        place = int(np.searchsorted(np.cumsum(self.ratios), share * total))
        return float(2.0 ** ((place + 0.5) / BINS_AN_OCTAVE - OCTAVES))

    def _finite(self, source: Rows, converted: Rows) -> tuple[Rows, Rows]:
        bad_x, bad_y = ~np.isfinite(source), ~np.isfinite(converted)
        self.source_nonfinite += int(np.count_nonzero(bad_x))
        self.nonfinite += int(np.count_nonzero(bad_y & ~bad_x))
        self.zeros += int(np.count_nonzero(converted == 0))
        self.source_zeros += int(np.count_nonzero(source == 0))
        if bad_x.any() or bad_y.any():
            source = np.where(bad_x | bad_y, np.float32(0), source)
            converted = np.where(bad_x | bad_y, np.float32(0), converted)
        if converted.size and max(float(converted.max()), -float(converted.min())) > _HUGE:
            converted = np.clip(converted, -_HUGE, _HUGE)
        return source, converted

    def _rows(self, first_row: int, xx: Sums, ee: Sums, peaks: Rows, columns: int) -> None:
        least = self.limit.floor * self.limit.floor * columns + 1e-300
        errors = np.sqrt(ee / np.maximum(xx, least))
        widths = np.diff([*range(0, columns, BLOCK), columns])
        to_peaks = np.sqrt(ee / np.maximum(np.square(peaks.astype(np.float64)) @ widths, least))
        self.max_row_error = max(self.max_row_error, float(errors.max()))
        self.max_peak_error = max(self.max_peak_error, float(to_peaks.max()))
        # A row of one value, of a bias, has nothing to average over: it may be as far off as a value may.
        allowed = max(self.limit.row_error, self.limit.value_error) if columns == 1 else self.limit.row_error
        over = np.flatnonzero((errors > allowed) & (to_peaks > self.limit.peak_error))
        if over.size:
            self.bad_rows += int(over.size)
            kept = over[np.argsort(errors[over])[::-1][:WORST_KEPT]]
            self.worst += [BadRow(first_row + int(row), float(errors[row])) for row in kept]
            self.worst.sort(key=lambda each: -each.error)
            del self.worst[WORST_KEPT:]

    def _values(self, first_row: int, peaks: Rows, error: Rows, starts: npt.NDArray[np.int64]) -> None:
        scale = np.maximum(peaks, np.float32(3 * self.limit.floor + 1e-30))
        relative = np.maximum.reduceat(error, starts, axis=1) / scale
        self.bad_blocks += int(np.count_nonzero(relative > self.limit.value_error))
        largest = float(relative.max())
        if largest > self.max_value_error:
            self.max_value_error = largest
            row, block = np.unravel_index(int(relative.argmax()), relative.shape)
            inside = error[row, block * BLOCK : (block + 1) * BLOCK]
            self.worst_value = (first_row + int(row), int(block) * BLOCK + int(inside.argmax()))

    def _ratios(self, x: Rows, y: Rows, size: Rows, xx: Sums) -> None:
        least = (_SOLID * np.sqrt(xx / x.shape[1])).astype(np.float32)[:, None]
        solid = (size >= least) & (size > 0)
        xs, ys = x[solid], y[solid]
        if not xs.size:
            return
        ratio = ys / xs
        self.sign_flips += int(np.count_nonzero(ratio < 0))
        self.lost += int(np.count_nonzero(ratio == 0))
        self.max_relative_error = max(self.max_relative_error, float(np.abs(ratio - 1).max()))
        place = (np.log2(ratio[ratio > 0]) + OCTAVES) * BINS_AN_OCTAVE
        bins = np.clip(place, 0, self.ratios.size - 1).astype(np.int64)
        self.ratios += np.bincount(bins, minlength=self.ratios.size)
