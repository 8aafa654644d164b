# SPDX-License-Identifier: Apache-2.0
"""The verbs of `ifab engine` that judge engines: audit, compare, probe-guided, ladder, sweep, verdict.

What they find out is the business of the packages of the same names under `engines`; here are their command lines, and
the suites that they start to run engines.
"""
