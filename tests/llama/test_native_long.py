# SPDX-License-Identifier: Apache-2.0
"""The long forms of native tests of the llama backend: many random batches, on the real engine where there is one."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support import native

ENGINE = native.ROOT / "build" / "engines" / "smollm2-135m"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_tokens_in_two_hundred_random_batches() -> None:
    native.build("llama_reproducible_test")
    program = native.BUILD / "tests" / "llama_reproducible_test"
    environment = {**os.environ, "IFAB_TEST_LONG": "1", "IFAB_TEST_LLAMA_ENGINE": str(ENGINE)}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False, timeout=1790)
    assert done.returncode == 0, done.stdout[-8000:]
