"""`perdure signal`: send a signal to a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import common
from perdure.cli.steering import by_option, speak, speaker, who_goes_on
from perdure.control import MAX_SIGNAL_BYTES
from perdure.core import codec
from perdure.errors import InvalidInput, NotEncodable

if TYPE_CHECKING:
    from perdure.app import Perdure
    from perdure.store.api import RunRow


@click.command("signal")
@common.run_argument
@click.argument("topic", metavar="TOPIC")
@click.argument("payload", metavar="[JSON]", required=False)
@click.option("--key", metavar="K", help="A second signal with the same topic and key changes nothing.")
@by_option("Who sends it.")
@common.url_option
@common.json_option
def command(run_id: str, topic: str, payload: str | None, key: str | None, by: str | None, url: str | None, as_json: bool) -> None:
    """Send JSON to RUN, whose agent gets it from run.receive(TOPIC). `-` reads JSON from stdin; the default is null.

    Signals on one topic keep their order, and wait until the agent receives them. Code 2 when the run has ended.
    """
    settings = common.settings_with(url=url)
    value = _value(payload)

    async def send(app: Perdure) -> tuple[RunRow, str]:
        await app.signal(run_id, topic, value, key=key, by=speaker(by))
        row = await app.handle(run_id).row()
        return row, who_goes_on(app.reading, row, settings, url)

    row, then = speak(settings, send)
    if as_json:
        common.out_json({"run_id": run_id, "topic": topic, "key": key, "status": row.status})
    else:
        common.out(common.clean(f"run {run_id} has the signal on {topic}; {then}"))


def _value(payload: str | None) -> Any:
    if payload is None:
        return None
    if payload == "-":
        sent = sys.stdin.buffer.read(MAX_SIGNAL_BYTES + 1)
        if len(sent) > MAX_SIGNAL_BYTES:
            raise InvalidInput(f"stdin has more than the {MAX_SIGNAL_BYTES:,} bytes that a signal may have: send a reference to it instead")
        return codec.parse(sent, "stdin")
    try:
        return codec.parse(payload, "the signal")
    except NotEncodable as error:
        raise InvalidInput(f"{error}; text is written '\"like this\"'") from None
