# SPDX-License-Identifier: Apache-2.0
"""The broker's front door: wire messages in, `Work` out; results in, wire messages out.

servicer.py        the RPCs, one method each
live.py            one live call
exchange.py        one batched stream: its windows, its outbox, its report
intake.py          requests -> plans, a batch at a time
rules.py           what a request may say, whatever engine serves it
selection.py       which engines may serve a request
fit.py             a request against one engine's contract
tokenization.py    text -> token ids, and the store of tokenizers
vocabulary.py      the bytes behind each token of a byte-level tokenizer
detokenization.py  token ids -> text, incrementally; stop strings
transcript.py      what a request has produced: deltas, and the result
records.py         canonical log lines, counts and times
"""
