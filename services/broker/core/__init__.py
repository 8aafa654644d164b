# SPDX-License-Identifier: Apache-2.0
"""The core of the broker: what runs next and where.

ids, entry, tree            prompts as the core keeps them; the waiting tree
heads, flow                 shared heads at workers; who owns what, and in what order it goes
workers, holdings           what a worker may be sent, and what it is believed to hold
fair, scheduler             whose turn it is; giving work out
attempts, loss              dispatches, and what becomes of those that are lost
accounting                  what a job was worth and what it cost
decision                    all of this together: plain calls, no wire, no clock
wire, worker_link,          the stream to a worker; the list of nodes; engines for the front door
node_watch, catalog
broker                      decisions on the event loop: what the broker process starts
"""

from __future__ import annotations

from services.broker.core.broker import Broker
from services.broker.core.settings import CoreSettings

__all__ = ["Broker", "CoreSettings"]
