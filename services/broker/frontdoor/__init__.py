# SPDX-License-Identifier: Apache-2.0
"""The broker's front door: wire messages in, `Work` out; results in, wire messages out.

servicer.py      the RPCs, one method each
exchange.py      one batched stream: its window, its outbox, its report
live.py          one live call
intake.py        requests -> plans, a batch at a time: rules, engine choice, tokens
rules.py         what a request may say, whatever engine serves it
selection.py     which engines may serve a request; what each engine allows
tokenization.py  text -> token ids, and the store of tokenizers
vocabulary.py    the bytes behind each token of a byte-level tokenizer
detokenization.py  token ids -> text, incrementally; stop strings
transcript.py    what a request has produced so far, as deltas and as its result
journal_lines.py   canonical log lines
"""
