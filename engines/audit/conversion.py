# SPDX-License-Identifier: Apache-2.0
"""Holds converted weights against their source, tensor by tensor.

    result = audit(Path("smollm2-f16.gguf"), Path("build/engines/smollm2-135m"))
    result.holds, result.findings

Every tensor is read once, a few rows at a time, so that memory does not grow with the model. Each is judged by the
limit of the number format in which it was stored; for one that fails, `engines.audit.diagnosis` says why.
"""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from engines.audit import disk
from engines.audit.diagnosis import Diagnosis, Reason
from engines.audit.limits import Limit, limit_of
from engines.audit.measure import Comparison
from engines.audit.model import Model, geometry_of, open_tensors, read_model
from engines.audit.scales import check_scales

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engines.audit.view import View

_BLOCK_VALUES: Final = 1 << 18
"""Values of one tensor that are compared at a time."""
_PADDED: Final = ("embedding", "head")
"""Roles whose rows a converter may fill up, to a round number of tokens."""
_OF_OTHERS: Final = ("foreign", "unexplained", "swapped")


@dataclass(frozen=True, slots=True)
class TensorResult:
    """One weight, on both sides."""

    role: str
    name: str
    """In the converted file."""
    source_name: str
    dtype: str
    """Number format in the converted file."""
    rows: int
    columns: int
    limit: Limit
    measured: Comparison
    reason: Reason | None
    """Why it fails; None where it holds."""

    @property
    def layer(self) -> int:
        """Its layer, -1 outside of layers."""
        first, _, rest = self.role.partition(".")
        return int(rest.partition(".")[0]) if first == "layers" else -1


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """Something that is wrong."""

    tensor: str
    """Its name in the converted file; in the source, where the conversion lacks it."""
    kind: str
    sentence: str


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What an audit found."""

    source: Path
    converted: Path
    tensors: tuple[TensorResult, ...]
    """In the order of the model."""
    findings: tuple[AuditFinding, ...]
    notes: tuple[str, ...]
    """What is worth knowing and not wrong."""
    bytes_read: int
    wall_s: float
    disk_bytes_per_s: float
    """Of a plain read of the same files, just after; 0 where they are too small to tell."""

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def bytes_per_s(self) -> float:
        """Bytes of both sides that were compared in a second."""
        return self.bytes_read / self.wall_s if self.wall_s else 0.0


def ignore(_done: int, _total: int) -> None:
    """The progress of those who do not watch."""


def audit(
    source: Path,
    converted: Path,
    *,
    accept_unit_scales: bool = False,
    jobs: int = 2,
    progress: Callable[[int, int], None] = ignore,
) -> AuditResult:
    """Compares all weights.

    Args:
        source: The weights that were converted: a GGUF or safetensors file, or a folder with safetensors files.
        converted: What became of them: such a file or folder, or an engine directory with a GGUF file.
        accept_unit_scales: Whether scales of the cache and of activations may all be exactly 1.0, as some calibrators
            leave those that would be smaller.
        jobs: Tensors that are compared at a time.
        progress: Told how many tensors are done, of how many.

    Raises:
        NotFoundError: One of the two is not there, or holds no weights.
        FailedPreconditionError: One cannot be read, or is no model of the llama or qwen2 family.
        UnimplementedError: One is split over ranks.
        OSError: A file cannot be opened.
    """
    with open_tensors(source) as source_file, open_tensors(converted) as converted_file:
        own, other = geometry_of(source_file), geometry_of(converted_file)
        a, b = read_model(source_file, own or other), read_model(converted_file, other or own)
        run = _Audit(a, b)
        started = time.perf_counter()
        pairs = list(run.pairs())
        results: list[TensorResult] = []
        with ThreadPoolExecutor(jobs, thread_name_prefix="audit") as pool:
            for done, result in enumerate(pool.map(run.compare, pairs), start=1):
                results.append(result)
                progress(done, len(pairs))
        wall_s = time.perf_counter() - started
        bad, notes = check_scales(b, accept_unit_scales=accept_unit_scales)
        run.findings += [AuditFinding(name, "scale", sentence) for name, sentence in bad]
        findings = [*_of_tensors(results), *run.findings]
        return AuditResult(
            source,
            converted,
            tuple(results),
            tuple(findings),
            (*run.notes, *notes),
            source_file.bytes_read + converted_file.bytes_read,
            wall_s,
            disk.read_rate([source_file, converted_file]),
        )


class _Audit:
    def __init__(self, source: Model, converted: Model) -> None:
        self._source = source
        self._converted = converted
        self._diagnosis = Diagnosis(source, converted)
        self.findings: list[AuditFinding] = []
        self.notes: list[str] = []

    def pairs(self) -> Iterator[tuple[View, View]]:
        """Source and converted view of every weight that both have; the rest becomes findings."""
        source, converted = dict(self._source.views), dict(self._converted.views)
        if "head" in converted and "head" not in source and "embedding" in source:
            self.notes.append("the source uses its embedding as output matrix; the conversion has one of its own")
            source["head"] = replace(source["embedding"], role="head")
        if "head" in source and "head" not in converted and "embedding" in converted:
            self.notes.append("the conversion uses its embedding as output matrix")
            converted["head"] = replace(converted["embedding"], role="head")
        for role, view in source.items():
            found = converted.get(role)
            if found is None:
                self._add(view.stored.name, "missing", f"the conversion has no {role}")
            elif self._comparable(view, found):
                yield view, found
        for role, view in converted.items():
            if role not in source:
                self._add(view.stored.name, "extra", f"it is {role}, which the source does not have")
        for name in self._converted.unknown:
            self._add(
                name,
                "unknown",
                "it has no place in a model of the llama or qwen2 family, so nobody knows what it should be",
            )
        if self._source.unknown:
            self.notes.append(f"not compared, since unknown: {', '.join(self._source.unknown[:8])} of the source")

    def compare(self, pair: tuple[View, View]) -> TensorResult:
        """Goes through one weight."""
        view, found = pair
        limit = limit_of(found.stored.dtype)
        assert limit is not None  # noqa: S101 -- `pairs` yields no others
        measured = Comparison(limit)
        unit = int(np.lcm(view.step, found.step))
        block = max(unit, _BLOCK_VALUES // view.columns // unit * unit)
        for start in range(0, view.rows, block):
            stop = min(view.rows, start + block)
            measured.add(
                start,
                view.read(self._source.file, start, stop),
                found.read(self._converted.file, start, stop),
            )
        wrong = measured.nonfinite or measured.bad_rows or measured.bad_blocks
        reason = self._diagnosis.explain(view, found, measured, limit) if wrong else None
        return TensorResult(
            view.role, found.stored.name, view.stored.name, found.stored.dtype, view.rows, view.columns, limit,
            measured, reason,
        )  # fmt: skip

    def _comparable(self, view: View, found: View) -> bool:
        name = found.stored.name
        if limit_of(found.stored.dtype) is None:
            self._add(name, "format", f"it is stored as {found.stored.dtype}, which the audit cannot judge")
            return False
        if (view.rows, view.columns) == (found.rows, found.columns):
            return True
        if view.role in _PADDED and view.columns == found.columns and view.rows < found.rows:
            self.notes.append(f"{name} has {found.rows - view.rows} rows more than the source, as converters pad them")
            return True
        kind = "transposed" if (view.rows, view.columns) == (found.columns, found.rows) else "shape"
        exchanged = ": rows and columns are exchanged" if kind == "transposed" else ""
        self._add(
            name,
            kind,
            f"it is {found.rows} by {found.columns}, and the source is {view.rows} by {view.columns}{exchanged}",
        )
        return False

    def _add(self, tensor: str, kind: str, sentence: str) -> None:
        self.findings.append(AuditFinding(tensor, kind, sentence))


def _of_tensors(results: list[TensorResult]) -> Iterator[AuditFinding]:
    """Findings of tensors, and one more for each layer that is not the source's as a whole."""
    matrices: dict[int, list[TensorResult]] = defaultdict(list)
    for result in results:
        if result.layer >= 0 and min(result.rows, result.columns) > 1:
            matrices[result.layer].append(result)
        if result.reason is not None:
            yield AuditFinding(result.name, result.reason.kind, result.reason.sentence)
    for layer, members in matrices.items():
        if all(each.reason is not None and each.reason.kind in _OF_OTHERS for each in members):
            names = f"{members[0].name} and the {len(members) - 1} other matrices of layer {layer}"
            origin = "of another layer" if all(_swapped(each) for each in members) else "from another checkpoint"
            yield AuditFinding(members[0].name, "foreign_layer", f"layer {layer} is {origin}: {names} do not match")


def _swapped(result: TensorResult) -> bool:
    return result.reason is not None and result.reason.kind == "swapped"
