"""`perdure completion`: the script that makes a shell complete verbs, options and run ids."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from perdure.cli import common


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL. For bash: eval "$(perdure completion bash)" in ~/.bashrc.

    Run ids and approvals are completed from the database. A server is only asked if PERDURE_URL or --url names it.
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    common.out(kind(ctx.find_root().command, {}, "perdure", "_PERDURE_COMPLETE").source())
