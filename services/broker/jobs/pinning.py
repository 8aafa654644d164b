# SPDX-License-Identifier: Apache-2.0
"""Which build of an engine a job is held to.

A job's rows run on one digest, unless its spec says `any_digest`. Where several builds serve, such as one for short
prompts and one for long ones, the first rows of the job decide: the build that takes most of them, then the one with
most nodes that get work, then the one with most nodes. An analysis decides by the same rows.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from services.broker.frontdoor.intake import Plan
from services.common import reasons
from services.common.errors import FabricError, InvalidArgumentError, UnavailableError, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ifabric.broker.v1 import broker_service_pb2
    from services.broker.frontdoor.intake import Intake
    from services.broker.work import CatalogEngine

    Requests = Sequence[broker_service_pb2.GenerationRequest]

ROWS = 256
"""Rows from the start of a job that decide."""
_ELSEWHERE = Violation("spec.any_digest", "is not set, and another build of the engine takes this row")


def passes(error: FabricError) -> bool:
    """Whether a row may be planned later: nothing is wrong with it."""
    return isinstance(error, UnavailableError) or error.reason == reasons.ENGINE_UNKNOWN


async def choose(
    intake: Intake, engines: Sequence[CatalogEngine], requests: Requests, nodes_taking: Callable[[str], int]
) -> CatalogEngine:
    """Chooses the build that a job is held to.

    Args:
        intake: Plans requests.
        engines: Builds that serve, at least one.
        requests: The first rows of the job, held to no build.
        nodes_taking: How many nodes of a digest get work now.

    Raises:
        FabricError: nobody can tell now what the rows are, because their tokenizer cannot be had.
    """
    if len(engines) == 1:
        return engines[0]
    takes: Counter[str] = Counter()
    for plan in await intake.plan(requests):
        if isinstance(plan, Plan):
            takes.update(plan.engine_digests)
        elif passes(plan):
            raise plan
    return max(engines, key=lambda each: (takes[each.digest], nodes_taking(each.digest), len(each.node_ids)))


async def told(
    intake: Intake, requests: Requests, plans: Sequence[Plan | FabricError], wanted: broker_service_pb2.EngineSelector
) -> list[Plan | FabricError]:
    """Adds to refusals by the build that a job is held to whether another build would take the row.

    Args:
        intake: Plans requests.
        requests: The rows, held to the build.
        plans: What came of them.
        wanted: The engine that the job's spec names.
    """
    refused = [at for at, plan in enumerate(plans) if isinstance(plan, InvalidArgumentError)]
    freed = [type(requests[at]).FromString(requests[at].SerializeToString()) for at in refused]
    for request in freed:
        request.engine.CopyFrom(wanted)
    elsewhere = dict(zip(refused, await intake.plan(freed) if freed else (), strict=True))
    return [
        InvalidArgumentError.of([*plan.violations, _ELSEWHERE])
        if isinstance(plan, InvalidArgumentError) and isinstance(elsewhere[at], Plan)
        else plan
        for at, plan in enumerate(plans)
    ]
