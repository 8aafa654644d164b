# SPDX-License-Identifier: Apache-2.0
"""The page of settings says what the services take."""

from __future__ import annotations

from tests.house import settings_page
from tests.support.processes import ROOT


def test_the_page_is_what_the_settings_say() -> None:
    written = (ROOT / "docs" / "settings.md").read_text()
    assert written == settings_page.page(), "run: python -m tests.house.settings_page > docs/settings.md"


def test_every_setting_has_a_meaning() -> None:
    for settings in settings_page.SERVICES.values():
        for name, field in settings.model_fields.items():
            assert (field.description or "").strip().endswith("."), name
