# SPDX-License-Identifier: Apache-2.0
"""The worker: one process, one engine. Moves frames between gRPC and the native library and decides nothing.

settings.py      what the process is told; no limit of the engine
description.py   the engine directory, as read, and the card -> the node's description
registration.py  life with the provisioner: register, load when allowed, heartbeat, register again
engine_host.py   the loaded engine and the thread that polls it; events arrive on the event loop
items.py         one dispatched attempt: wire form -> native request, events -> wire form
outbox.py        what one stream has to send, as columns
credit.py        how much a broker may have outstanding
streams.py       one Execute stream
files.py         files of the engine directory, for brokers
servicer.py      the RPCs
health.py        health by progress
metrics.py       the engine's counters as metrics
main.py          puts these together; start, drain, end
native/          the C interface; the only place that knows ctypes
"""
