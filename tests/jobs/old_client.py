# SPDX-License-Identifier: Apache-2.0
"""A client that knows nothing of this checkout but the messages that it finds on its path; run as a program.

    python tests/jobs/old_client.py BROKER

Sends a stream of requests and a job, and prints one JSON line with what came back.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import grpc

from ifabric.broker.v1 import broker_service_pb2 as broker
from ifabric.broker.v1 import broker_service_pb2_grpc, job_service_pb2, job_service_pb2_grpc

ROWS = 20
NAME: dict[str, Any] = {"job_id": "from-long-ago", "tenant": "old"}


def requests(prefix: str) -> list[broker.GenerationRequest]:
    """What is asked for."""
    return [
        broker.GenerationRequest(
            request_id=f"{prefix}{number}" if prefix else "",
            prompt=broker.Prompt(text=f"An old prompt {number}"),
            max_tokens=4,
        )
        for number in range(ROWS)
    ]


def main(address: str) -> None:
    """Runs it."""
    with grpc.insecure_channel(address) as channel:
        exchange = broker_service_pb2_grpc.BrokerServiceStub(channel).Exchange
        sent = broker.ExchangeRequest(open=broker.ExchangeOpen(job_id="old"), requests=requests("r"))
        outcomes = [outcome for message in exchange(iter([sent]), timeout=30) for outcome in message.outcomes]
        texts = {int(each.request_id[1:]): each.finished.samples[0].text for each in outcomes}
        jobs = job_service_pb2_grpc.JobServiceStub(channel)
        jobs.CreateJob(job_service_pb2.CreateJobRequest(spec=job_service_pb2.JobSpec(**NAME)), timeout=30)
        rows = [job_service_pb2.JobRow(row_id=str(n), request=sent) for n, sent in enumerate(requests(""))]
        upload = job_service_pb2.UploadRowsRequest(first_row=0, rows=rows, **NAME)
        acknowledged = [answer.durable_rows for answer in jobs.UploadRows(iter([upload]), timeout=30)]
        jobs.SealJob(job_service_pb2.SealJobRequest(row_count=ROWS, **NAME), timeout=30)
        fetch = job_service_pb2.FetchResultsRequest(follow=True, **NAME)
        results = [result for message in jobs.FetchResults(fetch, timeout=60) for result in message.results]
        deadline = time.monotonic() + 20
        while (job := jobs.GetJob(job_service_pb2.GetJobRequest(**NAME), timeout=30).job).state == 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        print(
            json.dumps(
                {
                    "messages": broker.__file__,
                    "exchanged": [texts[number] for number in range(ROWS)],
                    "acknowledged": acknowledged,
                    "results": [result.finished.samples[0].text for result in results],
                    "state": job_service_pb2.JobState.Name(job.state),
                }
            )
        )


if __name__ == "__main__":
    main(sys.argv[1])
