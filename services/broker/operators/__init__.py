# SPDX-License-Identifier: Apache-2.0
"""What operators ask of a broker.

servicer.py     the RPCs
cordons.py      which nodes get no new work, kept over restarts
lookup.py       where a row of a job is, while the core does not hold it
analysis.py     what the shared heads of a job's rows are worth
prediction.py   what a run of them would take on the nodes that serve now
"""
