"""Signed heads: statements about all runs of a journal, signed with an Ed25519 key that the database does not have.

A user with write access to the whole database can compute all hashes again. But such a user cannot make a signature.
So a statement shows later whether the journal was changed since then. `perdure sign` writes a statement, and `perdure
verify --signatures` compares it with the journal.

The file has lines of JSON. First come lines for the runs that have changed since the last statement, then a statement:

    {"kind": "run", "run_id": …, "seq": 12, "head": …}       the last event of a run, and its hash; `removed` and
        `removed_head`: the events 2 to `removed` were removed before a checkpoint, and the hash of the last of them
    {"kind": "gone", "run_id": …, "seq": 12, "head": …}      a run that was pruned: what its tombstone says
    {"kind": "signed", "statement": …, "key": …, "signature": …}

`statement` is the exact text that was signed: its number, the Merkle root over all runs, the heads of the journal-wide
chain, the hash of the lines above it, and the hash of the statement before. The root covers the whole journal. But
only with the lines of the runs can a statement name the run that was changed. Specimens are left out.

If a process is killed while it writes, the file ends with lines without a statement, or with half a line: a torn tail.
A torn tail states nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from perdure.engine.api import Reading
from perdure.errors import InvalidInput, NotReady
from perdure.inspect.chain import ChainHead, chain_heads
from perdure.inspect.text import iso, plural
from perdure.inspect.view import all_rows

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FORMAT = 1
NAMED = 20  # the most runs that a message names one by one
# With this prefix, a signature cannot count for any other text that the key may sign.
_PREFIX = b"perdure-statement-1\n"
_LONGEST_LINE = 1 << 20


# -- keys -------------------------------------------------------------------------------------------------------------
def new_key() -> tuple[bytes, bytes]:
    """A new key pair in PEM: the private key, and the public key."""
    ed25519, serialization = _library()
    private = ed25519.Ed25519PrivateKey.generate()
    form = serialization.PrivateFormat.PKCS8
    secret = private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return secret, private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


class SigningKey:
    """A private key, from a file that only its owner can read."""

    def __init__(self, path: Path) -> None:
        ed25519, serialization = _library()
        try:
            can_others_read = path.stat().st_mode & 0o077
            private = serialization.load_pem_private_key(_small_file(path), password=None)
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}; make a key with: perdure sign --new-key") from None
        except (ValueError, TypeError):
            raise InvalidInput(f"{path} holds no private key; make one with: perdure sign --new-key") from None
        if can_others_read:
            raise InvalidInput(f"other users can read the private key {path}; take their rights away: chmod 600 {path}")
        if not isinstance(private, ed25519.Ed25519PrivateKey):
            raise InvalidInput(f"{path} holds a private key of another kind; perdure signs with Ed25519: perdure sign --new-key")
        self._private: Ed25519PrivateKey = private
        self.public = PublicKey(private.public_key())

    def sign(self, text: bytes) -> bytes:
        return self._private.sign(_PREFIX + text)


class PublicKey:
    def __init__(self, public: Ed25519PublicKey) -> None:
        self._public = public
        self.id = hashlib.sha256(public.public_bytes_raw()).hexdigest()[:32]

    @classmethod
    def read(cls, path: Path) -> PublicKey:
        ed25519, serialization = _library()
        try:
            public = serialization.load_pem_public_key(_small_file(path))
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}") from None
        except (ValueError, TypeError):
            raise InvalidInput(
                f"{path} holds no public key; `perdure sign --new-key` writes it beside the private key, as FILE.pub"
            ) from None
        if not isinstance(public, ed25519.Ed25519PublicKey):
            raise InvalidInput(f"{path} holds a public key of another kind; perdure signs with Ed25519")
        return cls(public)

    def is_signed(self, text: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._public.verify(signature, _PREFIX + text)
        except InvalidSignature:
            return False
        return True


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise NotReady("signatures need the package cryptography: pip install 'perdure[sign]'") from None
    return ed25519, serialization


def _small_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 16)


# -- statements -------------------------------------------------------------------------------------------------------
class RunHead(Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="run", forbid_unknown_fields=True):
    run_id: str
    seq: int
    head: str
    removed: int = 0  # the events from 2 to this one were removed before a checkpoint; 0: none
    removed_head: str = ""  # the hash of that event


class GoneHead(Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="gone", forbid_unknown_fields=True):
    run_id: str
    seq: int
    head: str
    returned: bool = False  # the run was a copy, and the move was undone: its id can be used again


class Signed(Struct, frozen=True, tag_field="kind", tag="signed", forbid_unknown_fields=True):
    statement: str
    key: str  # the id of the key that has signed: the beginning of the hash of the public key
    signature: str


class Statement(Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    n: int  # the number of the statement, from 1
    at: str
    runs: int
    events: int
    root: str  # the Merkle root over (run id, seq, head) of all runs, in the order of their ids
    chain: tuple[ChainHead, ...]
    changed: int  # how many lines of runs belong to this statement
    changed_sha256: str  # the hash of these lines
    previous: str | None  # the hash of the previous statement's line


class Leaf(Struct, frozen=True, gc=False):
    """What a statement says about a run."""

    seq: int
    head: str
    statement: Statement
    removed: int = 0
    removed_head: str = ""
    gone: bool = False  # the run had been pruned, or was a copy that had been taken back

    @property
    def compared_from(self) -> int:
        """The signer has compared earlier statements about this event or a later one. Earlier events were removed."""
        return self.seq if self.gone else self.removed


_decode = msgspec.json.Decoder(RunHead | GoneHead | Signed).decode
_decode_statement = msgspec.json.Decoder(Statement).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def merkle_root(heads: Mapping[str, tuple[int, str]]) -> str:
    """One hash over all runs. A leaf and an inner node are hashed with different first bytes, as in RFC 6962."""
    level = [
        hashlib.sha256(b"\0" + msgspec.json.encode((run_id, *heads[run_id]))).digest()
        for run_id in sorted(heads, key=lambda one: one.encode("utf-8", "surrogatepass"))
    ]
    if not level:
        return hashlib.sha256().hexdigest()
    while len(level) > 1:
        pairs = [hashlib.sha256(b"\1" + level[at] + level[at + 1]).digest() for at in range(0, len(level) - 1, 2)]
        level = pairs if len(level) % 2 == 0 else [*pairs, level[-1]]
    return level[0].hex()


class Book:
    """The statements of a file. They are read and checked up to the first line that is wrong."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.heads: dict[str, tuple[int, str]] = {}  # run id → (seq, head), for all runs as of the last statement
        # Run id → all statements about the run, in order. If it is gone, the last one is what its tombstone says.
        self.signed: dict[str, list[Leaf]] = {}
        self.problem: str | None = None
        self.good_bytes = 0  # the position in the file where the last complete statement ends
        self.torn_bytes = 0  # how many bytes follow that position, if they are a torn tail
        self.last: str | None = None  # the hash of the line of the last statement

    @classmethod
    def read(cls, path: Path, key: PublicKey) -> Book:
        """Raises InvalidInput only if the file cannot be opened. Problems of its content are in `problem`."""
        book = cls()
        try:
            with path.open("rb") as file:
                lines: list[bytes] = []
                number = 0
                while raw := file.readline(_LONGEST_LINE + 1):
                    number += 1
                    if not raw.endswith(b"\n"):
                        if len(raw) > _LONGEST_LINE or file.read(1):
                            book.problem = f"{path}, line {number}: longer than a line of a statement can be"
                        break
                    book.problem = book._take(path, number, raw, lines, key)
                    if book.problem is not None:
                        break
                file.seek(0, 2)
                book.torn_bytes = 0 if book.problem is not None else file.tell() - book.good_bytes
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}") from None
        if book.problem is None and book.statements and merkle_root(book.heads) != book.statements[-1].root:
            book.problem = f"{path}: the Merkle root of statement {book.statements[-1].n} is not that of the runs in the file"
        return book

    def _take(self, path: Path, number: int, raw: bytes, lines: list[bytes], key: PublicKey) -> str | None:
        where = f"{path}, line {number}"
        try:
            line = _decode(raw)
        except _UNREADABLE as error:
            return f"{where}: it cannot be read ({error}): the file was edited or is damaged"
        if not isinstance(line, Signed):
            lines.append(raw)
            return None
        problem = self._check(where, line, lines, key)
        if problem is None:
            self._believe(lines, _decode_statement(line.statement.encode()))
            self.last = hashlib.sha256(raw).hexdigest()
            self.good_bytes += sum(map(len, lines)) + len(raw)
            lines.clear()
        return problem

    def _check(self, where: str, line: Signed, lines: Sequence[bytes], key: PublicKey) -> str | None:
        if line.key != key.id:
            return f"{where}: signed by another key ({line.key!r:.40}, and the public key here is {key.id})"
        text = line.statement.encode("utf-8", "surrogatepass")
        try:
            signature = base64.b64decode(line.signature, validate=True)
        except (binascii.Error, ValueError):
            signature = b""
        if not key.is_signed(text, signature):
            return f"{where}: the signature is not right: the statement was edited, or this key did not sign it"
        try:
            statement = _decode_statement(text)
        except _UNREADABLE as error:
            return f"{where}: the statement is signed, and this version of perdure cannot read it ({error}): update perdure"
        if statement.format != FORMAT:
            return f"{where}: the statement has format {statement.format}, and this version of perdure reads {FORMAT}: update perdure"
        if (statement.n, statement.previous) != (len(self.statements) + 1, self.last):
            after = f"after statement {self.statements[-1].n}" if self.statements else "at the beginning"
            return f"{where}: statement {statement.n} does not belong {after}: statements were deleted, added or reordered"
        if (statement.changed, statement.changed_sha256) != (len(lines), _digest(lines)):
            return f"{where}: the lines of runs before statement {statement.n} are not those that were signed: the file was edited"
        return None

    def _believe(self, lines: Sequence[bytes], statement: Statement) -> None:
        for raw in lines:
            line = _decode(raw)
            assert not isinstance(line, Signed)
            if isinstance(line, RunHead):
                self.heads[line.run_id] = (line.seq, line.head)
                leaf = Leaf(line.seq, line.head, statement, line.removed, line.removed_head)
            else:
                # The statements about a copy that was taken back stay as well. Its id can be used again: if it comes back,
                # it must be the same run.
                self.heads.pop(line.run_id, None)
                leaf = Leaf(line.seq, line.head, statement, gone=True)
            self.signed.setdefault(line.run_id, []).append(leaf)
        self.statements.append(statement)


def _digest(lines: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


# -- making a statement -----------------------------------------------------------------------------------------------
class Contradiction(Exception):
    """The journal no longer has everything that the last statement says. Each line names one run."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(lines[0])
        self.lines = lines


class NewStatement(Struct, frozen=True):
    lines: list[bytes]  # the lines of the runs that have changed
    signed: bytes  # the line of the statement itself
    statement: Statement
    uncompared: list[str]  # the runs that could not be compared with the last statement: those events were removed


def state(store: Reading, book: Book, key: SigningKey, *, now: int) -> NewStatement:
    """The next statement after the statements of the book.

    Raises Contradiction if signed events are missing or changed.
    """
    chain = tuple(chain_heads(store))
    now_has = {row.run_id: (row.seq, row.head.hex()) for row in all_rows(store) if row.specimen is None}
    removed = store.removed()
    changed = {
        run_id: head
        for run_id, head in now_has.items()
        if book.heads.get(run_id) != head or book.signed[run_id][-1].removed != removed.get(run_id, (0,))[0]
    }
    missing = [run_id for run_id in book.heads if run_id not in now_has]
    graves = _graves(store, missing)
    wrong = [_grave_problem(run_id, book.signed[run_id][-1], graves.get(run_id)) for run_id in missing]
    compared = {
        run_id: _compared(store, run_id, book.signed[run_id][-1:], *head) for run_id, head in changed.items() if run_id in book.signed
    }
    wrong += [problem for problem, _ in compared.values()]
    if found := [problem for problem in wrong if problem is not None]:
        raise Contradiction(found)
    # Read this after the comparison: what was removed since then counts as not compared.
    gone = {run_id: (last, head.hex()) for run_id, (last, head) in store.removed().items()}
    lines = [_line(RunHead(run_id, *changed[run_id], *gone.get(run_id, ()))) for run_id in sorted(changed)]
    lines += [_line(graves[run_id]) for run_id in sorted(missing)]
    statement = Statement(
        *(FORMAT, len(book.statements) + 1, iso(now), len(now_has), sum(seq for seq, _ in now_has.values())),
        *(merkle_root(now_has), chain, len(lines), _digest(lines), book.last),
    )
    text = msgspec.json.encode(statement)
    signed = Signed(text.decode(), key.public.id, base64.b64encode(key.sign(text)).decode())
    return NewStatement(lines, _line(signed), statement, [run_id for run_id, (_, uncompared) in compared.items() if uncompared])


def _line(line: RunHead | GoneHead | Signed) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _graves(store: Reading, run_ids: Sequence[str]) -> dict[str, GoneHead]:
    """The tombstones of these runs.

    `returned` is True if the run was a copy that was taken back: its id is free again.
    """
    if not run_ids:
        return {}
    wanted, found, after = set(run_ids), dict[str, GoneHead](), 0
    while page := store.tombstones(after):
        after = page[-1][0]
        for _, one in page:
            if one.run_id in wanted:
                found[one.run_id] = GoneHead(one.run_id, one.events, one.head.hex(), one.status == "returned")
    return found


# -- comparing --------------------------------------------------------------------------------------------------------
class Comparison(Struct, frozen=True):
    """How a journal and the statements about it compare."""

    problems: list[str]  # how the journal contradicts the statements, in words, run by run
    # The runs of which signed events were removed before a checkpoint, and no later statement proves the checkpoint.
    uncompared: list[str]


def compare(store: Reading, book: Book) -> Comparison:
    found = Comparison([], [])
    missing: list[str] = []
    for run_id, leaves in book.signed.items():
        row = store.get(run_id)
        if row is not None and row.specimen is None:
            problem, uncompared = _compared(store, run_id, leaves, row.seq, row.head.hex())
            found.problems.extend([] if problem is None else [problem])
            found.uncompared.extend([run_id] if uncompared else [])
        else:  # a specimen is a copy, and not the run that was signed
            missing.append(run_id)
    graves = _graves(store, missing)
    wrong = [_grave_problem(run_id, book.signed[run_id][-1], graves.get(run_id)) for run_id in missing]
    found.problems.extend(problem for problem in wrong if problem is not None)
    return found


def _grave_problem(run_id: str, last: Leaf, grave: GoneHead | None) -> str | None:
    if grave is None:
        return f"{_stated(run_id, last)}, and it is gone without a tombstone: it was deleted, or the whole database was rolled back"
    if grave.seq > last.seq or (grave.seq, grave.head) == (last.seq, last.head):
        return None
    return f"{_stated(run_id, last)}, and its tombstone says {plural(grave.seq, 'event')}, or another head: the tombstone was forged"


def _compared(store: Reading, run_id: str, leaves: Sequence[Leaf], seq: int, head: str) -> tuple[str | None, bool]:
    """The problem of a run whose last event is `seq`, with the hash `head`; and whether it cannot be compared in full.

    A signed event that was removed cannot be compared. But a later statement proves it, if the event was still there
    when that statement was made: the signer has compared the two, and the later hash covers the earlier one.
    """
    unproven: list[int] = []  # signed events that were removed, and that no later statement proves
    was_gone = "; it was gone meanwhile, and another run has its id now" if any(leaf.gone for leaf in leaves) else ""
    for leaf in leaves:
        unproven = [one for one in unproven if one < leaf.compared_from]
        if seq < leaf.seq:
            problem = f"and its journal ends with event {seq}: its end was cut off, or the whole database was rolled back; restore it from a backup"
            return f"{_stated(run_id, leaf)}, {problem}{was_gone}", False
        has = [head] if seq == leaf.seq else [one.hex() for one in store.hashes(run_id, leaf.seq - 1, 1)]
        # Read this after the hash: if the event was removed meanwhile, this says so.
        now = store.checkpoint(run_id) if not has or leaf.removed else None
        gone, gone_head = (0, "") if now is None or now.head is None else (now.removed, now.head.hex())
        if gone < leaf.removed or (gone == leaf.removed and gone_head != leaf.removed_head):
            problem = "and these are there again, or the hash of the last one is another one: its journal was rewritten after it was signed"
            return f"{_stated(run_id, leaf)}, without the events 2 to {leaf.removed}, {problem}", False
        if not has and 1 < leaf.seq < gone:
            unproven.append(leaf.seq)
        elif (has or [gone_head]) != [leaf.head]:
            problem = f"and event {leaf.seq} is another one now: its journal was rewritten after it was signed"
            return f"{_stated(run_id, leaf)}, {problem}{was_gone}", False
    return None, bool(unproven)


def _stated(run_id: str, leaf: Leaf) -> str:
    return f"run {run_id}: statement {leaf.statement.n} of {leaf.statement.at} signed it with {plural(leaf.seq, 'event')}"


def kept_heads(book: Book) -> list[ChainHead]:
    """The heads of the journal-wide chain in all statements."""
    return list(dict.fromkeys(head for statement in book.statements for head in statement.chain))
