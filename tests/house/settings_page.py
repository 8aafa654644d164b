# SPDX-License-Identifier: Apache-2.0
"""Writes docs/settings.md from the settings themselves.

python -m tests.house.settings_page > docs/settings.md
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticUndefined

from services.broker.settings import BrokerSettings
from services.common.settings import ServiceSettings
from services.provisioner.settings import ProvisionerSettings
from services.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

SERVICES: dict[str, type[ServiceSettings]] = {
    "broker": BrokerSettings,
    "provisioner": ProvisionerSettings,
    "worker": WorkerSettings,
}
HEAD = """# Settings

Every setting of the three services, as `python -m services.SERVICE --help` has it; a test holds this page to them. A
setting `drain_grace_s` of the broker is given in one of three ways, of which the first that is there counts:

* a flag: `--drain-grace-s 60`
* an environment variable: `IFAB_BROKER_DRAIN_GRACE_S=60` (`IFAB_WORKER_…`, `IFAB_PROVISIONER_…`)
* a line `drain_grace_s = 60` of a configuration file in TOML, which `--config FILE` or `IFAB_BROKER_CONFIG` names

Lists and objects are JSON in flags and variables. A key that no service knows and a value that is not allowed stop the
start with status 2 and one sentence that names them. The settings of the `ifab` command are its options, each with its
variable, which `ifab COMMAND --help` shows (`IFAB_CLI_BROKER`, `IFAB_CLI_TOKEN_FILE`, …).

Names that end in `_s` are seconds, in `_ms` milliseconds, in `_bytes_max` bytes.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "\n## Every service\n\n", _table(ServiceSettings.model_fields)]
    for name, settings in SERVICES.items():
        common = ServiceSettings.model_fields
        own = {key: field for key, field in settings.model_fields.items() if _differs(field, common.get(key))}
        parts += [f"\n## {name.capitalize()}\n\n", _table(own)]
    return "".join(parts)


def _differs(field: FieldInfo, common: FieldInfo | None) -> bool:
    return common is None or (field.default, field.description) != (common.default, common.description)


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = [f"| `{key}` | {_default(field)} | {_cell(field.description or '')} |\n" for key, field in fields.items()]
    return "| setting | default | meaning |\n| --- | --- | --- |\n" + "".join(rows)


def _default(field: FieldInfo) -> str:
    default: Any = field.get_default(call_default_factory=True)
    if field.is_required() or default is PydanticUndefined:
        return "*required*"
    if default is None or default == "":
        return "none"
    return f"`{default if isinstance(default, str) else json.dumps(default, default=str)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
