# SPDX-License-Identifier: Apache-2.0
"""One weight matrix as the model means it, `[outputs, inputs]`, wherever its rows lie in a stored tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    import numpy.typing as npt

    from engines.audit.storage import Rows, Stored, TensorFile

_SCALE_VALUES_MAX: Final = 1 << 22
"""Most values of a scale; they are kept in memory."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What stored weights are multiplied by: one value, one a row, or one a block of rows and columns."""

    name: str
    values: npt.NDArray[np.float32]
    """`[row blocks, column blocks]`."""

    @classmethod
    def read(cls, file: TensorFile, stored: Stored) -> Self:
        """Reads all values.

        Raises:
            FailedPreconditionError: There are more than a scale has.
        """
        if stored.rows * stored.columns > _SCALE_VALUES_MAX:
            raise FailedPreconditionError(f"{file.path}: {stored.name} has {stored.rows * stored.columns} values")
        values = file.rows(stored, 0, stored.rows)
        return cls(stored.name, values.reshape(-1, 1) if len(stored.shape) < 2 else values)

    def over(self, start: int, stop: int, rows: int, columns: int) -> npt.NDArray[np.float32]:
        """The factors of rows `start` to `stop` of a matrix `[rows, columns]`, to multiply with."""
        blocks, across = self.values.shape
        picked = self.values[np.arange(start, stop) // -(-rows // blocks)] if blocks > 1 else self.values
        return picked if across == 1 else np.repeat(picked, -(-columns // across), axis=1)[:, :columns]


@dataclass(frozen=True, slots=True)
class View:
    """Rows of a stored tensor in the order and orientation of the model."""

    role: str
    stored: Stored
    start: int
    """First row in the stored tensor; with `exchanged`, first column."""
    rows: int
    columns: int
    exchanged: bool = False
    """Whether the file stores rows as columns."""
    head_rows: int = 0
    """Rows of a head whose two rotary halves the file interleaves; 0 where it does not."""
    scale: Scale | None = None

    @classmethod
    def whole(
        cls,
        role: str,
        stored: Stored,
        *,
        scale: Scale | None = None,
        exchanged: bool = False,
        per_row: bool = False,
    ) -> Self:
        """A whole tensor. One with a single extent is one row, or, with `per_row`, one value a row."""
        if per_row and len(stored.shape) == 1:
            stored = replace(stored, shape=(stored.shape[0], 1))
        rows, columns = (stored.columns, stored.rows) if exchanged else (stored.rows, stored.columns)
        return cls(role, stored, 0, rows, columns, exchanged, scale=scale)

    def part(self, role: str, start: int, rows: int, *, head_rows: int) -> Self:
        """Some of the rows, under a role of their own."""
        return replace(self, role=role, start=self.start + start, rows=rows, head_rows=head_rows)

    @property
    def step(self) -> int:
        """Rows must be read in multiples of this, from a multiple of it."""
        return self.head_rows or 1

    def read(self, file: TensorFile, start: int, stop: int) -> Rows:
        """Rows `start` to `stop`, both multiples of `step`, as float32 `[stop - start, columns]`.

        Raises:
            FailedPreconditionError: The file ends early or cannot be turned into numbers.
        """
        first, last = self.start + start, self.start + stop
        values = file.columns(self.stored, first, last) if self.exchanged else file.rows(self.stored, first, last)
        if self.scale is not None:
            total = self.stored.columns if self.exchanged else self.stored.rows
            with np.errstate(all="ignore"):
                values = values * self.scale.over(first, last, total, self.columns)
        return halves_apart(values, self.head_rows) if self.head_rows else values


def halves_apart(values: Rows, head_rows: int) -> Rows:
    """Puts the rotary halves of each head one after the other: its row 2k + s becomes row s * head_rows / 2 + k."""
    heads = values.shape[0] // head_rows
    return values.reshape(heads, head_rows // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def halves_interleaved(values: Rows, head_rows: int) -> Rows:
    """The inverse of `halves_apart`."""
    heads = values.shape[0] // head_rows
    return values.reshape(heads, 2, head_rows // 2, -1).swapaxes(1, 2).reshape(values.shape)
