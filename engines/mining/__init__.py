# SPDX-License-Identifier: Apache-2.0
"""Engines without a cache whose output is a hidden state: the network, its calibration, its reference.

One forward pass over packed rows: a row holds up to 128 tokens of one or several prompts, told apart by `segments`; the
last token of each prompt is gathered inside the network, so that one vector a prompt comes back and no more.
"""
