"""Moves a whole journal from one database to another, or copies its history. Both may have any dialect.

    close the source → page by page: copy the families, read them back and verify them → mark the move as done

A run must never be driven from two journals, so the source is closed first and stays closed. If a move is killed, the
same call continues it: a family is copied whole or not at all, and families that are already in the target are
skipped. Workers of the target may drive the copied runs at once, since the source is closed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct, structs

from perdure.core.identity import genesis, link
from perdure.errors import AlreadyRunning, Conflict, InvalidInput, StoreCorrupt
from perdure.store.api import ArtifactRow, Checkpoint, Family, Head, Member, Moved, ScheduleCopy, Store, Stored, Whole
from perdure.store.artifacts import stored_chunks
from perdure.store.places import open_place
from perdure.store.url import shown_url

PAGE = 500  # how many families are compared at a time
BATCH_EVENTS = 5_000  # the most events in one transaction (unless a single family has more), and in memory
_BLOB_BYTES = 32 << 20  # a transaction that stores blobs ends once it has this many bytes
_LOOK_AGAIN_S = 0.25


class CopySurvey(Struct, frozen=True):
    """How much the source has to copy, and how much of that is in the target already."""

    families: int = 0
    runs: int = 0
    events: int = 0
    unfinished: int = 0  # unfinished runs in the source
    there: int = 0  # runs that are in the target already
    tables: tuple[str, ...] = ()  # other tables in the source, which are not copied


class Copied(Struct, frozen=True):
    runs: int = 0
    events: int = 0
    blobs: int = 0
    artifacts: int = 0
    tombstones: int = 0
    schedules: int = 0
    there: int = 0  # runs that were in the target already
    tables: tuple[str, ...] = ()  # other tables in the source, which were not copied
    damaged: tuple[str, ...] = ()  # runs whose hash chain is broken, in the source and in the target alike


Progress = Callable[[str, int, int], None]  # (what is being done, number of runs done, number of all runs)


def silent(what: str, done: int, whole: int) -> None:
    """The default for `progress`: report nothing."""


class Copying:
    """One copy or move from `source` to `target`. A move stores `to_url` in the source, as the journal's new place."""

    def __init__(self, source: Store, target: Store, *, to_url: str, by: str, progress: Progress = silent) -> None:
        self._source = source
        self._target = target
        self._to_url = shown_url(to_url)
        self._by = by
        self._progress = progress

    # -- the survey ---------------------------------------------------------------------------------------------------
    def survey(self, *, only_finished: bool = False, gone_on: bool = False) -> CopySurvey:
        """Compare source and target, and write nothing. Conflict if the target has another run with the same id.

        With `gone_on`, a run in the target may have continued since it was copied.
        """
        if (moved := self._target.moved()) is not None:
            raise Conflict(f"{shown_url(self._target.url)} was itself moved to {moved.to_url}; copy to that one")
        families = runs = events = unfinished = there = 0
        for page in self._pages(only_finished):
            heads = self._heads(page)
            for family in page:
                is_there = self._is_there(family, heads, gone_on)
                families, runs = families + 1, runs + len(family.members)
                events += sum(member.seq for member in family.members)
                unfinished += sum(not member.finished for member in family.members)
                there += len(family.members) if is_there else 0
            self._progress("comparing", runs, 0)
        if not only_finished:
            self._check_schedules()
        return CopySurvey(families, runs, events, unfinished, there, tuple(self._source.other_tables()))

    # -- the move -----------------------------------------------------------------------------------------------------
    def move(self, *, now: int, lease_us: int, wait_s: float = 0.0, leave_tables: bool = False) -> Copied:
        """Move everything, and close the source for ever.

        InvalidInput if unfinished runs may need tables that are not copied, unless `leave_tables` allows that.
        """
        before = self._source.moved()
        if before is None:
            found = self.survey()  # a Conflict must be raised before the source is closed
            if found.tables and found.unfinished and not leave_tables:
                raise InvalidInput(
                    f"{shown_url(self._source.url)} has {found.unfinished:,} unfinished run{'' if found.unfinished == 1 else 's'}, and tables "
                    f"beside the journal that do not come along: {some_tables(found.tables)}. A transaction tool would not find them there; "
                    "nothing was changed: copy them yourself, with the workers stopped, then say --leave-tables"
                )
        moved = self._close(now, lease_us, wait_s)
        if self._target.moved() is not None:
            self._source.reopen_journal()
            raise InvalidInput(f"{self._to_url} is the very journal that is to be moved; name another database with --to")
        survey = self.survey(gone_on=before is not None)
        self._check_all_have_a_root(survey)
        copied = self._copy(survey, only_finished=False)
        self._target.take_in_rates(self._source.rates())
        tombstones = self._copy_tombstones()
        if not moved.done:
            self._source.finish_move()
        # Only now: a move that has finished cannot be abandoned, so the ticks of a schedule are never started in both
        # journals. If this process is killed before this line, no tick is started, and the same command goes on.
        schedules = self._copy_schedules()
        return structs.replace(copied, tombstones=tombstones, schedules=schedules, there=survey.there, tables=survey.tables)

    def everything(self) -> Copied:
        """Copy everything that is not in the target yet. The source does not change meanwhile, or is a snapshot."""
        survey = self.survey(gone_on=True)
        self._check_all_have_a_root(survey)
        copied = self._copy(survey, only_finished=False)
        self._target.take_in_rates(self._source.rates())
        tombstones = self._copy_tombstones()
        return structs.replace(copied, tombstones=tombstones, schedules=self._copy_schedules(), there=survey.there, tables=survey.tables)

    def _copy_schedules(self) -> int:
        return self._target.take_in_schedules(
            [ScheduleCopy(row, self._source.schedule_events(row.schedule_id)) for row in self._source.schedules()]
        )

    def _check_schedules(self) -> None:
        """Conflict if the target has another schedule under the id of a schedule of the source."""
        for row in self._source.schedules():
            there = self._target.schedule(row.schedule_id)
            if there is None:
                continue
            (last,) = self._target.schedule_events(row.schedule_id, row.seq - 1)[:1] or (None,)
            if last is None or last.hash != row.head:
                raise Conflict(
                    f"schedule {row.schedule_id} is also in {self._to_url}, with another journal; nothing was written: copy to another database"
                )

    def history(self) -> Copied:
        """Copy only finished families; the source stays open.

        Notices are not copied, because the source sends them. Workers may continue meanwhile: a family that ends
        during the copy is copied or left out as a whole.
        """
        survey = self.survey(only_finished=True)
        return structs.replace(self._copy(survey, only_finished=True), there=survey.there, tables=survey.tables)

    def abandon(self, *, now: int) -> int:
        """Undo a move that has not finished: delete copies in the target, then reopen the source.

        Copies of unfinished families are deleted. Copies of finished families stay, except those whose artifacts are
        in a folder or bucket: source and target would share these bytes, and a prune of one journal would delete the
        bytes of the other.

        Returns how many runs of the source were unfinished, so that their copies were deleted.

        Conflict if one of these runs has continued in the target: then the move can only be finished.
        """
        if (moved := self._source.moved()) is None:
            raise Conflict("this journal is not being moved; there is no move to undo")
        if moved.done or moved.to_url != self._to_url:
            raise Conflict(
                f"this journal was moved to {moved.to_url}" + ("" if moved.done else f", not to {self._to_url}") + "; nothing was changed"
            )
        taken = 0
        shared = self._families_that_share_bytes()
        # Compare everything before anything is deleted, so that a Conflict changes nothing.
        for act in (self._continued, self._delete_copies):
            for page in self._pages(only_finished=False):
                back = [family for family in page if not family.finished or family.root in shared]
                if names := act(back, now):
                    raise self._cannot_undo(f"run {names[0]} has continued in {self._to_url} since it was copied")
                if act == self._delete_copies:
                    taken += sum(len(family.members) for family in back if not family.finished)
        # The source stays closed until this line. So if this process is killed earlier, the two journals are never
        # both open while they name the same bytes, and the same command continues.
        self._source.reopen_journal()
        return taken

    # -- the steps of a move ------------------------------------------------------------------------------------------
    def _close(self, now: int, lease_us: int, wait_s: float) -> Moved:
        begun_s = time.monotonic()
        deadline_s = begun_s + wait_s
        while True:
            waited_us = round((time.monotonic() - begun_s) * 1e6)
            try:
                return self._source.close_journal(self._to_url, by=self._by, now=now + waited_us, lease_us=lease_us)
            except AlreadyRunning:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(min(_LOOK_AGAIN_S, max(deadline_s - time.monotonic(), 0.0)))

    def _check_all_have_a_root(self, survey: CopySurvey) -> None:
        lost = self._source.count_runs() - survey.runs
        if lost:
            raise StoreCorrupt(
                f"{lost} runs of {shown_url(self._source.url)} belong to a parent that does not exist, and would not be copied;  "
                "see what is damaged: perdure verify; --abandon undoes the move"
            )

    def _copy(self, survey: CopySurvey, *, only_finished: bool) -> Copied:
        """Copy what is missing in the target, and read back every family, also those that were there already.

        A page is read back before the next page is read. If the source is open, a later query would also find families
        that have ended in the meantime and were not copied.
        """
        copied = Copied()
        seen = 0
        for page in self._pages(only_finished):
            heads = self._heads(page)
            missing = [family for family in page if not self._is_there(family, heads, gone_on=True)]
            for batch in _batches(missing):
                sent, blobs, artifacts = self._copy_batch(batch, only_finished)
                runs = sum(len(family.members) for family in sent)
                events = sum(member.seq for family in sent for member in family.members)
                copied = structs.replace(
                    copied,
                    runs=copied.runs + runs,
                    events=copied.events + events,
                    blobs=copied.blobs + blobs,
                    artifacts=copied.artifacts + artifacts,
                )
                self._progress("copying", seen + runs, max(seen + runs, survey.runs))
            copied = structs.replace(copied, damaged=(*copied.damaged, *self._read_back(page)))
            seen += sum(len(family.members) for family in page)
            self._progress("copying", seen, max(seen, survey.runs))
        return copied

    def _copy_batch(self, batch: Sequence[Family], only_finished: bool) -> tuple[Sequence[Family], int, int]:
        """Copy these families in one transaction. Returns the copied families, and how many blobs and artifacts.

        A family that is pruned in the source meanwhile is left out.
        """
        while batch:
            try:
                return batch, *self._send(batch, only_finished)
            except (_Pruned, StoreCorrupt):  # StoreCorrupt: a blob was pruned, or is really missing
                gone = self._pruned(batch)
                if not gone:
                    raise
                batch = [family for family in batch if family.root not in gone]
        return batch, 0, 0

    def _pruned(self, batch: Sequence[Family]) -> set[str]:
        """The roots of the families that are no longer in the source, because they were pruned."""
        heads = self._source.heads([family.root for family in batch])
        return {root for root, head in heads.items() if head.pruned}

    def _send(self, batch: Sequence[Family], only_finished: bool) -> tuple[int, int]:
        parts = list(_parts(batch))
        # If the whole batch fits into memory, it is read once and kept. A larger batch is read again for each use.
        kept = [self._source.wholes(parts[0])] if len(parts) == 1 else None

        def read() -> Iterator[Sequence[Whole]]:
            yield from kept or map(self._source.wholes, parts)
            # A run and its rows are read in several statements. If a prune came in between, there is a tombstone.
            if self._pruned(batch):
                raise _Pruned

        blobs, (artifacts, outside) = self._copy_blobs(read()), self._copy_artifacts(read(), only_finished)

        def sent(whole: Whole) -> Whole:
            return structs.replace(
                self._changed(whole, only_finished),
                outside=[outside[artifact] for artifact in whole.artifacts if artifact in outside],
            )

        # The blobs and artifacts are copied first: if the process is killed in between, blobs and artifacts without a
        # run do no harm. A run never arrives without its blobs or without its family.
        self._target.take_in(lambda: (list(map(sent, part)) for part in read()))
        return blobs, artifacts

    def _changed(self, whole: Whole, only_finished: bool) -> Whole:
        """The run as it is written into the target."""
        return structs.replace(whole, notices=[]) if only_finished else whole  # the source sends the notices

    def _copy_artifacts(self, parts: Iterable[Sequence[Whole]], only_finished: bool) -> tuple[int, dict[str, ArtifactRow]]:
        """Copy artifacts, chunk by chunk. In a move, bytes that lie outside of the database stay where they are.

        Returns how many were copied, and the rows whose bytes stay: `take_in` inserts these rows with their run.

        With `only_finished` both journals stay in use, and each deletes its own artifacts later. So the copy gets
        bytes of its own, under a name that the same command uses again after an interruption.
        """
        copied = 0
        stay: dict[str, ArtifactRow] = {}
        for artifact in dict.fromkeys(artifact for part in parts for whole in part for artifact in whole.artifacts):
            row = self._source.artifact(artifact)
            if row is None or row.state != "saved":
                continue  # the artifact was pruned meanwhile, together with its family; `take_in` reports that
            if row.place is not None and only_finished:
                self._target.take_in_artifact(self._copy_object(row), ())
            elif row.place is not None:
                stay[artifact] = row
            else:
                self._target.take_in_artifact(row, stored_chunks(self._source, row))
            copied += 1
        return copied, stay

    def _copy_object(self, row: ArtifactRow) -> ArtifactRow:
        assert row.place is not None
        name = f"{row.artifact}-{hashlib.sha256(self._to_url.encode()).hexdigest()[:16]}"
        writer = open_place(row.place).create(name)
        for piece in stored_chunks(self._source, row):
            writer.write(piece)
        writer.close()
        return structs.replace(row, object=name)

    def _copy_blobs(self, parts: Iterable[Sequence[Whole]]) -> int:
        wanted = {digest for part in parts for whole in part for digest in whole.blobs}
        held: list[bytes] = []
        missing = self._target.missing_blobs(wanted)
        for digest in missing:
            held.append(self._source.blob(digest))
            if sum(map(len, held)) >= _BLOB_BYTES:
                self._target.put_blobs(held)
                held = []
        if held:
            self._target.put_blobs(held)
        return len(missing)

    def _copy_tombstones(self) -> int:
        after = count = 0
        while page := self._source.tombstones(after):
            after = page[-1][0]
            pruned = [tombstone for _, tombstone in page if tombstone.status != "returned"]
            self._target.take_in_tombstones(pruned)
            count += len(pruned)
        return count

    def _read_back(self, page: Sequence[Family]) -> list[str]:
        """Recompute every hash chain from the bytes in the target. StoreCorrupt if a run differs from the source.

        Returns the runs whose hash chain is broken in the source and in the target alike.
        """
        damaged: list[str] = []
        heads = self._heads(page)
        for member in (member for family in page for member in family.members):
            if member.run_id in heads and heads[member.run_id].pruned:
                continue  # the run was copied, and was then pruned in the target
            stored = [one for one in self._target.stored(member.run_id) if one.seq <= member.seq]
            if head_of(member.run_id, stored, self._target.checkpoint(member.run_id)) == member.head:
                continue
            there = [one for one in self._source.stored(member.run_id) if one.seq <= member.seq]
            if not there and self._source.tombstone(member.run_id) is not None:
                continue  # the run was pruned in the source before it was copied
            if stored != there:
                raise StoreCorrupt(
                    f"run {member.run_id} is not in {self._to_url} as it was sent there; nothing is lost here: see what is wrong with that database"
                )
            damaged.append(member.run_id)
        return damaged

    def _families_that_share_bytes(self) -> set[str]:
        """The roots of the families whose artifacts are in a folder or bucket. Both journals name the same bytes.

        Conflict if the target has pruned such a family, or has given such an artifact to a run of its own. A prune of
        the target that runs at the same time as --abandon is not seen here, and deletes bytes of the source.
        """
        roots: set[str] = set()
        after = ""
        while page := self._source.outside_artifacts(after):
            after = page[-1].artifact
            for row in page:
                families = self._source.artifact_families(row.artifact)
                there = self._target.artifact(row.artifact)
                if there is None or there.state == "deleting":
                    pruned = [root for root, head in self._target.heads(families).items() if head.pruned]
                    if pruned:
                        raise self._cannot_undo(f"run {pruned[0]} was pruned in {self._to_url}, and its artifacts with it")
                elif (there.place, there.object) == (row.place, row.object):
                    new = sorted(set(self._target.artifact_families(row.artifact)).difference(families))
                    if new:
                        raise self._cannot_undo(f"run {new[0]} was started in {self._to_url} with artifact {row.artifact} of this journal")
                    roots.update(families)
        return roots

    def _cannot_undo(self, why: str) -> Conflict:
        return Conflict(f"{why}, so the move cannot be undone;  finish it: the same command without --abandon")

    def _continued(self, open_: Sequence[Family], _: int) -> list[str]:
        heads = self._heads(open_)
        members = (member for family in open_ for member in family.members)
        return [member.run_id for member in members if member.run_id in heads and not _is_same(member, heads[member.run_id])]

    def _delete_copies(self, open_: Sequence[Family], now: int) -> list[str]:
        told = [[(member.run_id, member.seq, member.head) for member in family.members] for family in open_]
        return self._target.delete_copies(told, by=self._by, now=now)

    # -- comparing ----------------------------------------------------------------------------------------------------
    def _pages(self, only_finished: bool) -> Iterator[list[Family]]:
        after = 0
        while page := self._source.families(after, PAGE):
            after = page[-1].place
            yield [family for family in page if family.finished or not only_finished]

    def _heads(self, page: Sequence[Family]) -> dict[str, Head]:
        return self._target.heads([member.run_id for family in page for member in family.members])

    def _is_there(self, family: Family, heads: dict[str, Head], gone_on: bool) -> bool:
        known = [member for member in family.members if member.run_id in heads]
        for member in known:
            if not _is_same(member, head := heads[member.run_id]) and not (gone_on and self._continues(member, head)):
                raise Conflict(
                    f"run {member.run_id} is also in {self._to_url}, with another journal; nothing was written:  "
                    "copy to another database, or prune that run there"
                )
        if known and len(known) < len(family.members):
            missing = next(member.run_id for member in family.members if member.run_id not in heads)
            raise Conflict(
                f"run {known[0].run_id} is in {self._to_url} without {missing} of its family; nothing was written: copy to another database"
            )
        return bool(known)

    def _continues(self, member: Member, head: Head) -> bool:
        """Does the target's journal of this run begin with the source's journal of it?

        If the run was pruned in the target, this cannot be checked; then a longer journal is enough.
        """
        return head.seq > member.seq and (head.pruned or self._target.hash_at(member.run_id, member.seq) == member.head)


class _Pruned(Exception):
    """A family was pruned in the source while it was read."""


def some_tables(names: Sequence[str]) -> str:
    """The first ten names and the number of the other names, for a message."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")


def _is_same(member: Member, head: Head) -> bool:
    return (member.seq, member.head) == (head.seq, head.head)


def head_of(run_id: str, stored: Sequence[Stored], checkpoint: Checkpoint | None) -> bytes:
    head = genesis(run_id)
    for place, event in enumerate(stored):
        if place == 1 and checkpoint is not None and checkpoint.head is not None:
            if event.seq != checkpoint.removed + 1:
                return b""
            head = checkpoint.head  # the events between were removed
        head = link(head, event.seq, event.event_id.hex(), event.ts, event.epoch, event.call, event.cause, event.data)
        if head != event.hash:
            return b""
    return head


def _batches(families: Sequence[Family]) -> Iterator[list[Family]]:
    """Groups of families, one group for each transaction: several small families, or one large family."""
    batch: list[Family] = []
    events = 0
    for family in families:
        size = sum(member.seq for member in family.members)
        if batch and events + size > BATCH_EVENTS:
            yield batch
            batch, events = [], 0
        batch.append(family)
        events += size
    if batch:
        yield batch


def _parts(batch: Sequence[Family]) -> Iterator[list[str]]:
    """The run ids of the batch, in parts that fit into memory."""
    part: list[str] = []
    events = 0
    for member in (member for family in batch for member in family.members):
        if part and events + member.seq > BATCH_EVENTS:
            yield part
            part, events = [], 0
        part.append(member.run_id)
        events += member.seq
    if part:
        yield part
