"""What every Store must do about artifacts. Part of StoreConformance."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator

import pytest
from msgspec import structs
from tests.conformance.suite_waiting import NOW, create, end, payload, tell_all

from perdure.core.events import RunCancelled, RunCreated
from perdure.errors import Conflict, NotFound, StoreError
from perdure.store.api import ArtifactRow, NewRun, Store
from perdure.store.artifacts import CHUNK_BYTES, stored_chunks, sweep
from perdure.store.open import open_store
from perdure.store.transfer import Copying

A, B = "a" * 32, "b" * 32
LARGE = b"0123456789abcdef" * (CHUNK_BYTES // 16) + b"the rest"
LATER = 1 << 60


def row(artifact: str = A, run_id: str = "r") -> ArtifactRow:
    return ArtifactRow(artifact, run_id, "", 1, 1, "saving", None, None, None, None, "text/plain", NOW)


def save(store: Store, artifact: str = A, run_id: str = "r", data: bytes = LARGE) -> None:
    store.begin_artifact(row(artifact, run_id))
    for number, start in enumerate(range(0, len(data), CHUNK_BYTES)):
        store.add_chunk(artifact, number, data[start : start + CHUNK_BYTES])
    store.finish_artifact(artifact, hashlib.sha256(data).digest(), len(data))


def bytes_of(store: Store, artifact: str = A) -> bytes:
    found = store.artifact(artifact)
    assert found is not None
    return b"".join(stored_chunks(store, found))


def naming(run_id: str, artifact: str = A, *, needed: bool = True, tenant: str = "default") -> NewRun:
    """A run whose input names the artifact."""
    created = RunCreated(run_id, "a", "1", tenant, payload(1), queue="q")
    named = (artifact,)
    return NewRun(run_id, created, uuid.uuid4().hex, NOW, "0" * 64, artifacts=named, needed_artifacts=named if needed else ())


class ArtifactConformance:
    @pytest.fixture
    def elsewhere(self) -> Iterator[Store]:
        opened = open_store("sqlite://")
        yield opened
        opened.close()

    def test_a_saved_artifact_has_its_bytes_and_the_tenant_of_its_run(self, store: Store) -> None:
        create(store, "r")
        save(store)
        found = store.artifact(A)
        assert found is not None
        assert (found.state, found.run_id, found.size, found.sha256) == ("saved", "r", len(LARGE), hashlib.sha256(LARGE).digest())
        run = store.get("r")
        assert run is not None
        assert found.tenant == run.tenant
        assert bytes_of(store) == LARGE
        assert [one.artifact for one in store.artifacts_of("r")] == [A]
        assert store.artifact_runs() == ["r"]
        assert store.artifact_chunk(A, 7) is None
        assert store.artifact(B) is None

    def test_an_artifact_needs_a_run(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.begin_artifact(row(run_id="nobody"))

    def test_only_the_family_that_saved_it_may_open_it_and_those_that_got_it(self, store: Store) -> None:
        for run_id in ("r", "rr", "s"):
            create(store, run_id)
        save(store)
        assert store.may_open(A, "r")
        assert store.may_open(A, "r/1/undo"), "a run below belongs to the family"
        assert not store.may_open(A, "rr"), "an id that only begins alike does not"
        assert not store.may_open(A, "s")
        store.use_artifacts("s", [A, B])
        assert store.may_open(A, "s")

    def test_a_run_that_names_an_artifact_of_its_tenant_uses_it(self, store: Store) -> None:
        create(store, "r")
        save(store)
        store.create_run(naming("s"))
        assert store.may_open(A, "s")
        for wrong in (naming("t", tenant="other"), naming("t", B)):
            with pytest.raises(NotFound):
                store.create_run(wrong)
        assert store.get("t") is None, "nothing was created"
        store.create_run(naming("t", needed=False, tenant="other"))
        assert not store.may_open(A, "t"), "a mention in a text gives no right to the artifact of another tenant"

    def test_what_is_not_being_saved_takes_no_more_bytes(self, store: Store) -> None:
        create(store, "r")
        save(store)
        for late in (
            lambda: store.add_chunk(A, 9, b"x"),
            lambda: store.finish_artifact(A, b"0" * 32, 0),
            lambda: store.place_artifact(A, "file:///tmp", A),
            lambda: store.add_chunk(B, 0, b"x"),
        ):
            with pytest.raises(Conflict):
                late()
        assert bytes_of(store) == LARGE

    def test_prune_dooms_what_no_other_family_uses_and_a_sweep_deletes_it(self, store: Store) -> None:
        for run_id in ("r", "s"):
            create(store, run_id)
        save(store)
        save(store, B, data=b"small")
        store.use_artifacts("s", [A])
        for run_id in ("r", "s"):
            end(store, run_id, RunCancelled("enough"))
        tell_all(store)
        assert store.prune(["r"], LATER, by="me", now=NOW).artifacts == 1
        assert [one.artifact for one in store.doomed_artifacts()] == [B]
        assert sweep(store) == 1
        assert (store.artifact(B), bytes_of(store)) == (None, LARGE)
        assert store.may_open(A, "s")
        assert store.prune(["s"], LATER, by="me", now=NOW).artifacts == 1
        assert sweep(store) == 1
        assert store.facts()["artifacts"] == "0"

    def test_an_orphan_is_doomed_unless_another_family_uses_it(self, store: Store) -> None:
        for run_id in ("r", "s"):
            create(store, run_id)
        save(store)
        store.use_artifacts("s", [A])
        assert not store.doom_artifact(A)
        assert not store.doom_artifact(B)
        store.begin_artifact(row(B))
        assert store.doom_artifact(B)
        assert sweep(store) == 1
        assert store.may_open(A, "r")

    def test_a_copy_has_the_bytes_and_the_rights_and_a_journal_that_moved_takes_none(self, store: Store, elsewhere: Store) -> None:
        for run_id in ("r", "s"):
            create(store, run_id)
        save(store)
        store.use_artifacts("s", [A])
        store.begin_artifact(row(B))  # not finished: its attempt is dead, or the journal would not move
        elsewhere.take_in_artifact(structs.replace(row(), tenant="t", sha256=b"0" * 32, size=4), [b"half"])  # of a copy that was killed
        moved = Copying(store, elsewhere, to_url=elsewhere.url, by="me").move(now=NOW, lease_us=1)
        assert moved.artifacts >= 1
        assert bytes_of(elsewhere) == LARGE
        assert [elsewhere.may_open(A, run_id) for run_id in ("r", "s")] == [True, True]
        assert elsewhere.artifact(B) is None
        with pytest.raises(StoreError, match="moved"):
            store.begin_artifact(row("c" * 32))

    def test_a_copy_that_is_taken_back_leaves_no_artifact(self, store: Store, elsewhere: Store) -> None:
        create(store, "r")
        save(store)
        family = [("r", 1, store.hash_at("r", 1))]
        Copying(store, elsewhere, to_url=elsewhere.url, by="me").move(now=NOW, lease_us=1)
        assert elsewhere.delete_copies([family], by="me", now=NOW) == []
        assert elsewhere.artifact(A) is None
        assert elsewhere.doomed_artifacts() == [], "the bytes in other places belong to the journal that was copied"
        assert bytes_of(store) == LARGE
