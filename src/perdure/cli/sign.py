"""`perdure sign`: signed statements about the heads of all runs.

Keep them where users of the database cannot write.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click
import msgspec

from perdure.cli import common
from perdure.cli.times import parse_length
from perdure.errors import InvalidInput, StoreUnavailable
from perdure.inspect.newfile import new_file, require_new
from perdure.inspect.signed import NAMED, Book, Contradiction, NewStatement, SigningKey, new_key, state
from perdure.inspect.text import plural
from perdure.settings import Settings

if TYPE_CHECKING:
    from perdure.engine.notify.webhook import Endpoint

_KEY, _STATEMENTS = "perdure-sign.key", "perdure-statements.jsonl"


@click.command("sign")
@click.option("--new-key", "make", is_flag=True, help="Make a key pair, and sign nothing.")
@click.option("--out", metavar="FILE", help=f"With --new-key: the file of the private key; the public key is FILE.pub. Default: {_KEY}.")
@click.option("--key", metavar="FILE", help="The private key to sign with.")
@click.option(
    "--to",
    "places",
    multiple=True,
    metavar="FILE|URL",
    help=f"The file to append to; and a webhook that gets each statement too. Can be repeated. Default: {_STATEMENTS}.",
)
@click.option("--every", metavar="T", help="Sign again and again, with this pause: 15m, 1h. Until it is stopped.")
@common.url_option
@common.json_option
def command(
    make: bool, out: str | None, key: str | None, places: tuple[str, ...], every: str | None, url: str | None, as_json: bool
) -> int:
    """Sign the heads of all runs of the journal: one statement, appended to a file.

    `perdure verify --signatures FILE --public-key FILE` shows later whether the journal still has everything that was
    signed. This finds changes even by a user who can write to the whole database and compute every hash again. Keep
    the private key and the file where that user cannot write. A statement names every run, of all tenants, that has
    changed since the last statement. Code 7, and nothing is signed, when the journal no longer has everything that the
    last statement says.

    With a URL, each statement is also sent by webhook, signed with webhook_secret, under the rules of webhook_hosts.
    """
    if make:
        if key is not None or places or every is not None:
            raise InvalidInput("--new-key only makes a key pair: leave --key, --to and --every out")
        return _make(Path(out or _KEY), as_json)
    if key is None or out is not None:
        raise InvalidInput("say which key signs: --key FILE; make one with: perdure sign --new-key --out FILE")
    pause_s = None if every is None else parse_length(every, "--every")
    files = [place for place in places if not place.startswith(("http://", "https://"))] or ([] if places else [_STATEMENTS])
    if len(files) != 1:
        raise InvalidInput("name one file with --to, beside any webhooks: the next statement continues the one before, in that file")
    hooks = [place for place in places if place not in files]
    settings = common.settings_with(url=url)
    signer = _Signer(settings, SigningKey(Path(key)), Path(files[0]), hooks)
    while True:
        code = _once(signer, url, as_json, again=pause_s is not None)
        if pause_s is None or code == common.DIFFERENT:
            return code
        time.sleep(pause_s)


def _make(path: Path, as_json: bool) -> int:
    public = path.with_name(f"{path.name}.pub")
    require_new(path)
    require_new(public)
    secret, shown = new_key()
    with new_file(path) as file, new_file(public, 0o644) as beside:
        file.write(secret)
        beside.write(shown)
    if as_json:
        common.out_json({"private_key": str(path), "public_key": str(public)})
    else:
        common.out(common.clean(f"{path}: the private key; {public}: the public key, to verify with"))
    return common.SUCCEEDED


def _once(signer: _Signer, url: str | None, as_json: bool, *, again: bool) -> int:
    try:
        made = signer.sign(url)
    except Contradiction as contradiction:
        for line in contradiction.lines[:NAMED]:
            common.note(common.clean(line))
        more = len(contradiction.lines) - NAMED
        wrong = plural(len(contradiction.lines), "run contradicts", "runs contradict") + " what was signed"
        raise common.ExitWith(
            f"{wrong}{f' ({more:,} are not named above)' if more > 0 else ''}; nothing was signed. If you have restored a backup on purpose, "
            "begin another file with --to, and keep this one",
            common.DIFFERENT,
        ) from None
    except StoreUnavailable as error:
        if not again:
            raise
        common.note(common.clean(f"perdure: {error.in_full()}; trying again later"))
        return common.FAILED
    statement = made.statement
    if as_json:
        common.out_json({"file": str(signer.file), **msgspec.to_builtins(statement)})
    else:
        said = (
            f"statement {statement.n}: {plural(statement.runs, 'run')}, {plural(statement.changed, 'of them changed', 'of them changed')}"
        )
        common.out(common.clean(f"{signer.file}: {said}; root {statement.root}"))
        if made.uncompared:
            names = ", ".join(made.uncompared[:NAMED]) + ("" if len(made.uncompared) <= NAMED else " …")
            common.note(
                common.clean(
                    f"perdure: {plural(len(made.uncompared), 'run')} could not be compared with the statement before: prune --before-checkpoint "
                    f"has removed the events that it signed: {names}"
                )
            )
    common.flush()
    failed = signer.post(made)
    for line in failed:
        common.note(common.clean(f"perdure: {line}"))
    return common.FAILED if failed else common.SUCCEEDED


class _Signer:
    def __init__(self, settings: Settings, key: SigningKey, file: Path, hooks: list[str]) -> None:
        self.file = file
        self._key = key
        self._hooks: list[Endpoint] = []
        if hooks:
            from perdure.engine.notify.webhook import Endpoint

            self._hooks = [Endpoint(hook, settings.webhook_secret, settings.webhook_hosts) for hook in hooks]

    def sign(self, url: str | None) -> NewStatement:
        """Append the next statement to the file. When this returns, the statement is durable."""
        with self._opened() as file:
            # While this process has the lock, no other process can append. Without it, two statements could follow the
            # same one.
            fcntl.flock(file, fcntl.LOCK_EX)
            book = Book.read(self.file, self._key.public)
            if book.problem is not None:
                raise InvalidInput(
                    f"{book.problem}; nothing was signed: keep that file, see what happened, and begin another one with --to"
                )
            with common.existing_runs(url) as store:
                made = state(store, book, self._key, now=common.now_at(store))
            if book.torn_bytes:
                common.note(
                    f"perdure: {self.file} ends with {plural(book.torn_bytes, 'byte')} of a statement that was never finished; "
                    f"going on after statement {len(book.statements)}"
                )
                file.truncate(book.good_bytes)
            file.seek(book.good_bytes)
            # A crash from here on leaves a torn tail: lines without the statement that signs them.
            for line in made.lines:
                file.write(line)
            file.write(made.signed)
            file.flush()
            os.fsync(file.fileno())
        return made

    def _opened(self) -> BinaryIO:
        try:
            is_new = not self.file.exists()
            file = os.fdopen(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")
            if is_new:  # the name of the file must be on the disk before the statement counts as durable
                folder = os.open(self.file.parent, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)
        except OSError as error:
            raise InvalidInput(f"{self.file}: {error.strerror}") from None
        return file

    def post(self, made: NewStatement) -> list[str]:
        """Send the statement, without the lines of its runs, to each webhook. Returns the failures in words."""
        return asyncio.run(self._post(made)) if self._hooks else []

    async def _post(self, made: NewStatement) -> list[str]:
        from perdure.engine.notify.webhook import Accepted, NotDelivered
        from perdure.engine.threads import Threads

        failed = []
        notice_id = f"statement-{made.statement.n}-{hashlib.sha256(made.signed).hexdigest()[:16]}"
        told = {"id": notice_id, "type": "heads_signed", "n": made.statement.n, "at": made.statement.at, "line": made.signed[:-1].decode()}
        for endpoint in self._hooks:
            answer = await endpoint.post(Threads(1), notice_id, msgspec.json.encode(told), int(time.time()))
            if not isinstance(answer, Accepted):
                why = answer.why if isinstance(answer, NotDelivered) else "it answered 410 Gone"
                failed.append(f"statement {made.statement.n} is in {self.file}, and could not be posted to {endpoint.place}: {why}")
        return failed
