# SPDX-License-Identifier: Apache-2.0
"""The provisioner: reads engine contracts and decides which nodes may serve.

settings.py   what it is told
main.py       puts the parts together
servicer.py   the wire: messages in, domain calls, messages out
intake.py     one registration from first look to verdict: judge, probe, judge again
verdict.py    the verdict, a pure function of description, report and probe
prober.py     runs one request through a loaded engine
registry.py   nodes with a live lease; soft state
watching.py   streams of changes, each with its bound
wording.py    values and paths as short text
explain.py    a node's state in sentences
"""
