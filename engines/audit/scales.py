# SPDX-License-Identifier: Apache-2.0
"""Scales of a conversion that have no counterpart in the source: judged by themselves and by each other."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from engines.audit.model import Model

_APART: Final = 32.0
"""Factor from the median of its kind at which a scale is wrong."""
_OUTLIER: Final = 8.0
"""Factor from the median of its kind at which a scale is worth a note."""
_VALUES_MAX: Final = 1 << 20


def check_scales(model: Model, *, accept_unit_scales: bool) -> tuple[list[tuple[str, str]], list[str]]:
    """Looks at scales of weights, of activations and of the cache.

    Args:
        model: The converted side.
        accept_unit_scales: Whether all scales of the cache and of activations may be exactly 1.0.

    Returns:
        Names and sentences of those that are wrong; and notes.
    """
    wrong: list[tuple[str, str]] = []
    notes: list[str] = []
    kinds: dict[str, dict[str, npt.NDArray[np.float32]]] = defaultdict(dict)
    for name, stored in model.scales.items():
        if stored.rows * stored.columns > _VALUES_MAX:
            wrong.append((name, f"a scale of {stored.rows * stored.columns:,} values is none"))
            continue
        kinds[_kind(name)][name] = model.file.rows(stored, 0, stored.rows).reshape(-1)
    for kind, members in kinds.items():
        if all((values == 1.0).all() for values in members.values()) and not accept_unit_scales:
            wrong.append(
                (
                    next(iter(members)),
                    f"it and all other {kind}, {len(members)} of them, are exactly 1.0: they were never filled in",
                )
            )
    for view in model.views.values():
        if view.scale is not None:
            kinds[_kind(view.scale.name)][view.scale.name] = view.scale.values.reshape(-1)
    for kind, members in kinds.items():
        found, said = _outliers(kind, members)
        wrong += found
        notes += said
    return wrong, notes


def _kind(name: str) -> str:
    """The name without the number of its layer: scales of one kind are compared with each other."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _outliers(kind: str, members: dict[str, npt.NDArray[np.float32]]) -> tuple[list[tuple[str, str]], list[str]]:
    wrong: list[tuple[str, str]] = []
    notes: list[str] = []
    good = {}
    for name, values in members.items():
        bad = int(np.count_nonzero(~np.isfinite(values) | (values <= 0)))
        if bad:
            wrong.append((name, f"{bad} of its {values.size} values are no positive numbers"))
        else:
            good[name] = float(np.median(values))
    if len(good) < 3:
        return wrong, notes
    middle = float(np.median(list(good.values())))
    for name, value in good.items():
        apart = max(value / middle, middle / value)
        if apart > _APART:
            wrong.append((name, f"it is {value:.4g}, {apart:.0f} times apart from the median of {kind}, {middle:.4g}"))
        elif apart > _OUTLIER:
            notes.append(f"{name} is {value:.4g}, {apart:.1f} times apart from the median of its kind")
    return wrong, notes
