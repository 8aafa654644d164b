# SPDX-License-Identifier: Apache-2.0
"""Why a converted tensor is not what its source says: the mistakes that conversions make, tried one by one.

A few runs of rows are read of both sides. Each mistake is undone on what was converted, or done to the source; the one
after which both agree within what the format explains is the reason. Sentences are for people who did not write the
converter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from engines.audit.storage import PLAIN, decode
from engines.audit.view import halves_apart, halves_interleaved

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from engines.audit.limits import Limit
    from engines.audit.measure import Comparison
    from engines.audit.model import Model
    from engines.audit.storage import Rows
    from engines.audit.view import View

_RUN_ROWS: Final = 64
"""Rows of one run; three runs are read."""
_SHIFTS_MAX: Final = 4
_SHARE: Final = 0.9
"""Of the sampled rows that must agree for a mistake to be the reason."""
_ALIKE: Final = 0.98
"""Cosine from which two rows are taken to hold the same thing, whatever else was done to them."""
_ALIKE_MAX: Final = 64
"""Rows of a block that are followed up: single values of a bias are often alike by chance."""
_FIND_VALUES: Final = 1 << 18
"""Values of a source that are searched at a time."""
_VECTOR_PART: Final = 16
"""Values of a bias that must agree: fewer may by chance."""
_STRIP_VALUES_MAX: Final = 1 << 26
"""Most values of a source that are read to find an exchange of rows and columns."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What happened to a tensor."""

    kind: str
    """Such as `transposed`, or `unexplained`."""
    sentence: str


class Diagnosis:
    """Tells why tensors of one conversion fail."""

    def __init__(self, source: Model, converted: Model) -> None:
        self._source = source
        self._converted = converted

    def explain(self, view: View, found: View, measured: Comparison, limit: Limit) -> Reason:
        """The reason why `found` is not `view`.

        Args:
            view: What the source says.
            found: What was converted, of the same extents.
            measured: How far they are apart.
            limit: What the converted format explains.
        """
        starts = self._runs(view, found)
        x = np.concatenate([view.read(self._source.file, at, stop) for at, stop in starts])
        y = np.concatenate([found.read(self._converted.file, at, stop) for at, stop in starts])
        for reason in (
            self._byte_order(view, found, starts, x, limit),
            self._not_numbers(measured),
            self._factor(found, x, y, measured),
            self._rotary(view, x, y, limit),
            self._elsewhere(view, starts, y, limit),
            self._exchanged(view, starts, y, limit),
            self._shifted(view, found, limit),
            self._some_rows(view, found, measured, limit),
        ):
            if reason is not None:
                return reason
        return self._unexplained(found, measured, limit)

    def _runs(self, view: View, found: View) -> list[tuple[int, int]]:
        unit = int(np.lcm(view.step, found.step))
        length = max(unit, _RUN_ROWS // unit * unit)
        last = max(0, (view.rows - length) // unit * unit)
        return [(at, min(view.rows, at + length)) for at in sorted({0, last // 2 // unit * unit, last})]

    def _byte_order(
        self, view: View, found: View, starts: list[tuple[int, int]], x: Rows, limit: Limit
    ) -> Reason | None:
        plain = PLAIN.get(found.stored.dtype)
        if plain is None or plain.itemsize == 1 or found.exchanged:
            return None
        parts = []
        for at, stop in starts:
            raw = self._converted.file.raw(found.stored, found.start + at, found.start + stop)
            swapped = np.frombuffer(raw, f"V{plain.itemsize}").view(np.uint8).reshape(-1, plain.itemsize)[:, ::-1]
            rows = decode(swapped.tobytes(), found.stored.dtype, found.columns)
            parts.append(halves_apart(rows, found.head_rows) if found.head_rows else rows)
        if not _agree(x, np.concatenate(parts), limit):
            return None
        return Reason(
            "byte_order", "its bytes are in the wrong order: read backwards, value by value, it is the source"
        )

    @staticmethod
    def _not_numbers(measured: Comparison) -> Reason | None:
        if not measured.nonfinite:
            return None
        return Reason(
            "not_numbers", f"{measured.nonfinite:,} of its values are NaN or infinite, and the source's are not"
        )

    def _factor(self, found: View, x: Rows, y: Rows, measured: Comparison) -> Reason | None:
        """One factor over all rows, or signs turned round."""
        factors = _factors(x, y)
        if factors is None or _share(_cosines(x, y) > _ALIKE) < _SHARE:
            if _share(_cosines(x, y) < -_ALIKE) >= _SHARE:
                return Reason("negated", "all its values have the wrong sign")
            return None
        low, middle, high = np.quantile(factors, (0.05, 0.5, 0.95))
        if abs(middle - 1) < 0.02 or high > 1.1 * low:
            return None
        if found.scale is not None and bool((found.scale.values == 1.0).all()):
            return Reason(
                "unit_scale",
                f"its values are {middle:.4g} times the source's, and {found.scale.name} is exactly 1.0: the scale was "
                "never filled in",
            )
        return Reason("factor", f"all its values are {middle:.4g} times what the source says")

    @staticmethod
    def _rotary(view: View, x: Rows, y: Rows, limit: Limit) -> Reason | None:
        """Query and key rows in the order of the other convention."""
        if _placed(view.role)[1] not in ("q", "k", "q.bias", "k.bias"):
            return None
        for head in (32, 64, 80, 96, 128, 256):
            if x.shape[0] % head:
                continue
            if _agree(x, halves_apart(y, head), limit) or _agree(x, halves_interleaved(y, head), limit):
                return Reason(
                    "rotary_order",
                    f"its rows are in the other rotary order: the two halves of each head of {head} rows must be "
                    "interleaved, or must not be",
                )
        return None

    def _elsewhere(self, view: View, starts: list[tuple[int, int]], y: Rows, limit: Limit) -> Reason | None:
        """The rows of another tensor of the source."""
        for other in self._candidates(view):
            if any(at % other.step or stop % other.step for at, stop in starts):
                continue
            rows = np.concatenate([other.read(self._source.file, at, stop) for at, stop in starts])
            if _agree(rows, y, limit):
                return Reason("swapped", f"it holds what the source calls {other.role}")
        return self._inside(view, y[: starts[0][1] - starts[0][0]], limit)

    def _inside(self, view: View, part: Rows, limit: Limit) -> Reason | None:
        """Its first rows somewhere among those of the layer: parts of a fused tensor that stand in another order."""
        layer, _ = _placed(view.role)
        least = _VECTOR_PART if view.columns == 1 else 1
        for role, other in self._source.views.items():
            if not layer or not role.startswith(f"{layer}.") or other.columns != view.columns or other.rows < 4:
                continue
            for at in self._find(other, part[0], limit):
                after = min(part.shape[0], other.rows - at) // 2
                if after < least or (at == 0 and role == view.role):
                    continue
                first = at // other.step * other.step
                last = -(-(at + after) // other.step) * other.step
                rows = other.read(self._source.file, first, last)[at - first : at - first + after]
                if _agree(rows, part[:after], limit):
                    return Reason("swapped", f"it begins with row {at} of what the source calls {role}")
        return None

    def _find(self, view: View, row: Rows, limit: Limit) -> Iterator[int]:
        """Rows of a source tensor that are `row`, within what the format explains; the first few of each block."""
        block = max(view.step, _FIND_VALUES // view.columns // view.step * view.step)
        for start in range(0, view.rows, block):
            rows = view.read(self._source.file, start, min(view.rows, start + block))
            alike = np.flatnonzero(_close(rows, np.broadcast_to(row, rows.shape), limit))
            yield from (start + int(each) for each in alike[:_ALIKE_MAX])

    def _candidates(self, view: View) -> Iterator[View]:
        """Tensors of the source of the same extents: of the same layer first, then of the same place elsewhere."""
        layer, name = _placed(view.role)
        same = [
            other
            for role, other in self._source.views.items()
            if role != view.role and (other.rows, other.columns) == (view.rows, view.columns)
        ]
        yield from (other for other in same if other.role.startswith(f"{layer}."))
        yield from (
            other for other in same if not other.role.startswith(f"{layer}.") and other.role.endswith(f".{name}")
        )
        yield from (other for other in same if other.role in ("embedding", "head"))

    def _exchanged(self, view: View, starts: list[tuple[int, int]], y: Rows, limit: Limit) -> Reason | None:
        """Rows and columns exchanged, and written under the old extents."""
        rows, columns = view.rows, view.columns
        if min(rows, columns) < 2 or rows * columns > _STRIP_VALUES_MAX:
            return None
        at, stop = starts[0]
        # Value f of the exchanged matrix, counted through, is column f // rows, row f % rows of the source.
        last = -(-stop * columns // rows)
        strips = np.empty((last, rows), dtype=np.float32)
        block = max(view.step, (1 << 18) // columns // view.step * view.step)
        for first in range(0, rows, block):
            end = min(rows, first + block)
            strips[:, first:end] = view.read(self._source.file, first, end)[:, :last].T
        written = strips.reshape(-1)[at * columns : stop * columns].reshape(stop - at, columns)
        if not _agree(written, y[: stop - at], limit):
            return None
        return Reason(
            "transposed", "its rows and columns are exchanged: it is the transposed matrix under the old shape"
        )

    def _shifted(self, view: View, found: View, limit: Limit) -> Reason | None:
        """Rows that slid along: from some row on, or throughout; or values that slid along within their rows."""
        unit = int(np.lcm(view.step, found.step))
        length = max(unit, (2 * _RUN_ROWS) // unit * unit)
        start = max(0, (view.rows - length) // unit * unit)
        x = view.read(self._source.file, start, view.rows)
        y = found.read(self._converted.file, start, view.rows)
        for shift in (s for size in range(1, _SHIFTS_MAX + 1) for s in (size, -size)):
            if x.shape[0] > 2 * abs(shift) and _agree(_slid(x, shift), _slid(y, -shift), limit):
                return Reason("shifted_rows", f"its rows are shifted by {shift:+d}: row n holds row {_place(-shift)}")
            if x.shape[1] > 2 * abs(shift) and _agree(_slid(x.T, shift).T, _slid(y.T, -shift).T, limit):
                return Reason("shifted_columns", f"the values of its rows are shifted by {shift:+d} columns")
        return None

    def _some_rows(self, view: View, found: View, measured: Comparison, limit: Limit) -> Reason | None:
        """Few rows are wrong: what is the worst of them?"""
        if not measured.worst or measured.bad_rows > view.rows // 2:
            return None
        row = measured.worst[0].row
        x, y = self._row(self._source, view, row), self._row(self._converted, found, row)
        many = f"{measured.bad_rows:,} of {view.rows:,} rows are wrong; "
        cosine = float(_cosines(x, y)[0])
        factors = _factors(x, y)
        if factors is not None and cosine > _ALIKE:
            return Reason("row_factor", f"{many}row {row} is {float(factors[0]):.4g} times what the source says")
        for shift in (s for size in range(1, _SHIFTS_MAX + 1) for s in (size, -size)):
            if _agree(_slid(x.T, shift).T, _slid(y.T, -shift).T, limit):
                return Reason("shifted_row", f"{many}the values of row {row} are shifted by {shift:+d} columns")
            if 0 <= row - shift < view.rows and _agree(self._row(self._source, view, row - shift), y, limit):
                return Reason("shifted_rows", f"{many}row {row} holds row {row - shift} of the source")
        for other in measured.worst[1:]:
            if _agree(self._row(self._source, view, other.row), y, limit):
                return Reason("swapped_rows", f"{many}row {row} holds row {other.row} of the source")
        apart = np.abs(y - x)[0]
        at = int(apart.argmax())
        if x[0, at] != 0 and float(np.square(apart).sum() - apart[at] ** 2) < 0.1 * float(apart[at] ** 2):
            times = float(y[0, at] / x[0, at])
            return Reason(
                "value", f"{many}in row {row} the value in column {at} is {times:.4g} times what the source says"
            )
        return Reason(
            "rows", f"{many}row {row} is apart by {measured.worst[0].error:.0%} of its length (cosine {cosine:.3f})"
        )

    @staticmethod
    def _row(model: Model, view: View, row: int) -> Rows:
        first = row // view.step * view.step
        return view.read(model.file, first, first + view.step)[row - first : row - first + 1]

    @staticmethod
    def _unexplained(found: View, measured: Comparison, limit: Limit) -> Reason:
        if not measured.worst:
            row, column = measured.worst_value
            return Reason(
                "value",
                f"the value in row {row}, column {column} is off by {measured.max_value_error:.3g} of the largest one "
                f"around it, where {found.stored.dtype} explains {limit.value_error:.3g}",
            )
        if abs(measured.cosine) < 0.5:
            return Reason(
                "foreign",
                f"it agrees with nothing in the source (cosine {measured.cosine:.3f}): it comes from another "
                "checkpoint, or was never written",
            )
        return Reason(
            "unexplained",
            f"it differs from the source by {measured.error:.2%} of its length, where {found.stored.dtype} explains "
            f"{limit.row_error:.2%} (cosine {measured.cosine:.4f}): it comes from a checkpoint that is alike, or its "
            "rounding is wrong",
        )


def _placed(role: str) -> tuple[str, str]:
    """Layer and name of a role: `layers.0` and `q.bias` of `layers.0.q.bias`; no layer for what is in none."""
    first, _, rest = role.partition(".")
    number, _, name = rest.partition(".")
    return (f"{first}.{number}", name) if name else ("", role)


def _place(shift: int) -> str:
    return f"n {'+' if shift > 0 else '-'} {abs(shift)}"


def _slid(rows: Rows, shift: int) -> Rows:
    """Without the last `shift` rows, or without the first `-shift`."""
    return rows[:-shift] if shift > 0 else rows[-shift:]


def _agree(x: Rows, y: Rows, limit: Limit) -> bool:
    """Whether nearly all rows are within what the format explains."""
    return _share(_close(x, y, limit)) >= _SHARE


def _close(x: Rows, y: Rows, limit: Limit) -> npt.NDArray[np.bool_]:
    """Which rows are within what the format explains."""
    with np.errstate(all="ignore"):
        apart = np.sqrt(np.square(y.astype(np.float64) - x).sum(axis=1))
        length = np.sqrt(np.square(x.astype(np.float64)).sum(axis=1))
        least = max(limit.row_error, 2 * limit.peak_error, 1e-6)
        return np.asarray(apart <= 1.5 * least * np.maximum(length, 1e-30), np.bool_)


def _cosines(x: Rows, y: Rows) -> Rows:
    with np.errstate(all="ignore"):
        xs, ys = x.astype(np.float64), y.astype(np.float64)
        product = (xs * ys).sum(axis=1)
        length = np.sqrt(np.square(xs).sum(axis=1) * np.square(ys).sum(axis=1))
        return np.where(length > 0, product / length, 0.0).astype(np.float32)


def _factors(x: Rows, y: Rows) -> Rows | None:
    """The factor of each row; None where rows are empty."""
    with np.errstate(all="ignore"):
        xs = x.astype(np.float64)
        length = np.square(xs).sum(axis=1)
        if not (length > 0).all():
            return None
        return np.asarray((xs * y).sum(axis=1) / length, np.float32)


def _share(truths: npt.NDArray[np.bool_]) -> float:
    return float(np.count_nonzero(truths)) / truths.size
