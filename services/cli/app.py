# SPDX-License-Identifier: Apache-2.0
"""All commands of `ifab` in one application."""

from __future__ import annotations

import typer

from services.cli import bulk, connection, engine, nodes
from services.cli.explain import explain
from services.cli.generate import generate
from services.cli.jobs import live
from services.cli.key import key
from services.cli.mine.command import mine
from services.cli.up import up

app = typer.Typer(
    name="ifab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(connection.configure)
app.command("up")(up)
app.command("generate")(generate)
app.add_typer(bulk.app, name="bulk")
app.command("mine")(mine)
app.add_typer(live.app, name="jobs")
app.command("explain")(explain)
app.add_typer(nodes.app, name="nodes")
app.command("key")(key)
app.add_typer(engine.app, name="engine")
