# SPDX-License-Identifier: Apache-2.0
"""Puts the broker together and runs it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ifabric.broker.v1 import broker_service_pb2_grpc, operator_service_pb2_grpc
from ifabric.kserve.v2 import inference_pb2_grpc
from services.broker.collector import spare_the_collector
from services.broker.core import Broker
from services.broker.core.row_traces import RowTraces
from services.broker.frontdoor.exchange import ExchangeLimits
from services.broker.frontdoor.intake import Intake
from services.broker.frontdoor.selection import EngineDirectory
from services.broker.frontdoor.servicer import FULL_NAME, BrokerServicer, FrontDoorLimits
from services.broker.frontdoor.tokenization import CodecStore
from services.broker.jobs import Jobs
from services.broker.kserve.servicer import FULL_NAME as INFERENCE_SERVICE
from services.broker.kserve.servicer import InferenceServicer
from services.broker.operators.cordons import Cordons
from services.broker.operators.estimate import Estimator
from services.broker.operators.servicer import FULL_NAME as OPERATOR_SERVICE
from services.broker.operators.servicer import OperatorServicer
from services.common.rpc import Dialer, Server

if TYPE_CHECKING:
    from services.broker.settings import BrokerSettings
    from services.broker.work import Catalog
    from services.common.process import Process

_SYNC_POLL_S = 0.05


async def serve(settings: BrokerSettings, process: Process) -> None:
    """Serves until `process.stop` is asked for.

    The broker is ready, for whoever asks its health, once it has heard from the provisioner which engines there are;
    it stays ready when the provisioner goes away, since its workers do not.

    Raises:
        StartError: The address to listen on is taken, or the journal or the cordoned nodes cannot be read.
    """
    cordons = Cordons(settings.cordon_file)
    rows = RowTraces(process.telemetry.kept, settings.trace_row_ratio) if settings.otlp_endpoint else None
    core = Broker(
        settings.core(),
        settings.provisioner,
        broker_id=settings.broker_name,
        telemetry=process.telemetry,
        tasks=process.tasks,
        dialer=Dialer(process.credentials, message_bytes_max=settings.message_bytes_max),
        cordoned=cordons.nodes,
        rows=rows,
    )
    executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
    codecs = CodecStore(
        core.catalog, executor, capacity=settings.tokenizers_max, fetch_timeout_s=settings.tokenizer_fetch_s
    )
    servicer = BrokerServicer(core, core.catalog, codecs, process.telemetry, _limits(settings))

    async def end_tokenizers() -> None:
        await codecs.close()
        executor.shutdown(wait=False, cancel_futures=True)

    server = Server(settings, process.telemetry, credentials=process.credentials, tokens=settings.tokens())
    server.add(broker_service_pb2_grpc.add_BrokerServiceServicer_to_server, servicer, FULL_NAME)
    server.on_drain("front door", servicer.drain)
    inference = InferenceServicer(servicer.live, core.catalog)
    server.add(inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, inference, INFERENCE_SERVICE)
    server.on_drain("inference", inference.drain)
    server.on_close("tokenizers", end_tokenizers)
    server.on_close("core", core.stop)
    jobs = (
        Jobs(settings.jobs(), core, core.catalog, codecs, process.tasks, process.telemetry)
        if settings.journal
        else None
    )
    if jobs is not None:
        jobs.serve(server)
    intake = Intake(EngineDirectory(core.catalog), codecs)
    estimator = Estimator(intake, core.catalog, core, decode_weight=settings.decode_weight)
    operators = OperatorServicer(core, cordons, jobs, estimator)
    server.add(operator_service_pb2_grpc.add_OperatorServiceServicer_to_server, operators, OPERATOR_SERVICE)
    server.on_drain("operators", operators.drain)
    spare_the_collector()
    process.announce(await server.start(), health=server.health_address)
    await core.start()
    if jobs is not None:
        await jobs.start()
    process.tasks.start(_ready(server, core.catalog), name="readiness")
    await server.serve(process.stop)


async def _ready(server: Server, catalog: Catalog) -> None:
    while not catalog.synced:  # noqa: ASYNC110 -- a catalog is read; it calls nobody
        await asyncio.sleep(_SYNC_POLL_S)
    await server.ready()


def _limits(settings: BrokerSettings) -> FrontDoorLimits:
    return FrontDoorLimits(
        live_timeout_s=settings.live_timeout_s,
        streams_max=settings.streams_max,
        exchange=ExchangeLimits(
            prompt_tokens=settings.stream_prompt_tokens_max,
            message_bytes=settings.message_bytes_max,
            result_bytes=settings.stream_result_bytes_max,
            room_patience_s=settings.stream_patience_s,
        ),
    )
