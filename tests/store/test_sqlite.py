"""What is the sqlite engine's own: fencing by kill, the file's fate, and what an operator may get wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.store.stage import ROOT, Contender, Member, SqliteStore
from xce_supervisor.core.words import Identity
from xce_supervisor.errors import ConfigError
from xce_supervisor.store.clocks import boot_ns, read_boot_id
from xce_supervisor.store.engine import Candidate, Elected, Fact, Fenced, LeaderSeen, Loss, Unavailable
from xce_supervisor.store.open import open_engine
from xce_supervisor.store.sqlite_fence import Fence, Holder

_HOLD = """
import sqlite3, sys, os, signal
from pathlib import Path
from xce_supervisor.store.sqlite_fence import Fence
if sys.argv[2] == "declared":
    Fence(Path(sys.argv[1])).declare()
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE leader SET address = 'half written'")
print("holds", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""


@contextmanager
def holder(path: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A real process stopped inside a write transaction: a declared candidate, or a stranger."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(path), kind], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "holds\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def make(store: SqliteStore) -> None:
    """Create the file, with a leader that is gone."""
    async with Contender(store.url, "c0") as first:
        await first.elected()


# ---------------------------------------------------------------- fencing by kill


async def test_a_candidate_stopped_inside_a_transaction_is_killed(sqlite_store: SqliteStore) -> None:
    """The lease has run out and a declared candidate keeps the write lock: it is killed, its half transaction is gone."""
    await make(sqlite_store)
    with holder(sqlite_store.path, "declared") as stopped:
        started_at = time.monotonic()
        async with Contender(sqlite_store.url, "c1") as one:
            await one.elected(limit_s=3.0)
            assert time.monotonic() - started_at > 0.3, "it must have been seen holding the lock for 0.3 s"
            assert stopped.wait(timeout=5) == -signal.SIGKILL
            assert sqlite_store.execute("SELECT address FROM leader") == [("c1:7301",)]


async def test_the_leader_itself_is_killed_when_it_is_stopped_inside_a_write(sqlite_store: SqliteStore) -> None:
    """A real leader that stops in the middle of an append: what it had acknowledged stays, what it had not is not there."""
    async with Member(sqlite_store.url, "c1", "append", "stop-in-transaction") as leader:
        await leader.tells("acked", 2)
        async with Contender(sqlite_store.url, "c2") as other:
            await other.elected(limit_s=sqlite_store.lease_s + 3.0)
            assert [fact.key for fact in await other.engine.read()] == ["c1/1/0", "c1/1/1"]
        assert leader.exit_code == -signal.SIGKILL


async def test_a_stranger_with_the_lock_is_left_alone(sqlite_store: SqliteStore) -> None:
    """Somebody's shell is not killed, whatever it blocks; when it lets go, the election goes on."""
    await make(sqlite_store)
    with holder(sqlite_store.path, "stranger") as stopped:
        async with Contender(sqlite_store.url, "c1") as one:
            with pytest.raises(TimeoutError):
                await one.elected(limit_s=1.2)
            assert stopped.poll() is None
            stopped.kill()
            await one.elected(limit_s=3.0)


async def test_a_live_lease_protects_whoever_holds_the_lock(sqlite_store: SqliteStore) -> None:
    """While the lease has not run out nobody is judged, however long the lock is held."""
    await make(sqlite_store)
    sqlite_store.execute(
        "UPDATE leader SET nonce = 'n', boot_id = ?, until_boot_ns = ?", read_boot_id(), boot_ns() + 60_000_000_000
    )
    with holder(sqlite_store.path, "declared") as stopped:
        async with Contender(sqlite_store.url, "c1") as one:
            with pytest.raises(TimeoutError):
                await one.elected(limit_s=1.0)
            assert stopped.poll() is None


async def test_a_card_of_a_reused_pid_kills_nobody(sqlite_store: SqliteStore) -> None:
    """docs/rules.md S15: pid, start ticks and boot id must all be the holder's, else it is a stranger."""
    await make(sqlite_store)
    with holder(sqlite_store.path, "stranger") as stopped:
        fence = Fence(sqlite_store.path)
        found = fence.holder()
        assert found is not None and found.identity.pid == stopped.pid and found.stopped and not found.candidate
        cards = Path(f"{sqlite_store.path}.candidates")
        (cards / f"{stopped.pid}.{found.identity.start_ticks + 1}.{read_boot_id()}").touch()
        (cards / f"{stopped.pid}.{found.identity.start_ticks}.another-boot").touch()
        (cards / "rubbish").write_bytes(b"\xff")
        again = fence.holder()
        assert again is not None and not again.candidate
        other = Identity(stopped.pid, found.identity.start_ticks + 1, read_boot_id())
        assert not fence.kill(Holder(other, stopped=True, candidate=True))
        assert stopped.poll() is None
        fence.declare()
        assert {card.name.partition(".")[0] for card in cards.iterdir()} == {"rubbish", str(os.getpid())}, (
            "cards of the gone stay"
        )
        fence.withdraw()


# ---------------------------------------------------------------- the file's fate


async def test_leadership_ends_when_the_directory_goes_away_and_comes_back_with_it(tmp_path: Path) -> None:
    """A moved file can still be written to, by us alone: the leader steps down at once, and campaigns when it is back."""
    folder, aside = tmp_path / "store", tmp_path / "aside"
    folder.mkdir()
    store = SqliteStore(folder)
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
        await one.engine.append(term, [Fact("test", "a", b"{}")])
        folder.rename(aside)
        assert (await one.deposed(term, limit_s=store.lease_s)).reason is Loss.STORE_LOST
        with pytest.raises((Fenced, Unavailable)):
            await one.engine.append(term, [Fact("test", "b", b"{}")])
        with pytest.raises(Unavailable):
            await one.engine.read()
        aside.rename(folder)
        later = await one.elected(above=term)
        await one.engine.append(later, [Fact("test", "c", b"{}")])
        assert [fact.key for fact in await one.engine.read()] == ["a", "c"]


async def test_a_new_file_in_the_place_of_the_store_is_not_led(tmp_path: Path) -> None:
    """A store that was replaced by another, or by an older copy of itself, has terms that went back: nobody campaigns in it."""
    folder = tmp_path / "store"
    folder.mkdir()
    store = SqliteStore(folder)
    async with Contender(store.url, "c1") as one:
        term = await one.elected()
    shutil.copytree(folder, tmp_path / "copy")
    async with Contender(store.url, "c1") as one:
        term = await one.elected(above=term)
        folder.rename(tmp_path / "aside")
        (tmp_path / "copy").rename(folder)
        assert (await one.deposed(term)).reason is Loss.STORE_LOST
        # Elected again it would be in a term that was given out before.
        with pytest.raises(TimeoutError):
            await one.until(lambda: one.terms()[1:] or None, limit_s=1.0)


async def test_a_lease_of_another_boot_binds_nobody(sqlite_store: SqliteStore) -> None:
    """After a reboot the old leader is gone for certain, however long its lease would last by the clock."""
    await make(sqlite_store)
    sqlite_store.execute(
        "UPDATE leader SET nonce = 'n', boot_id = 'an older boot', until_boot_ns = ?", boot_ns() + 3_600_000_000_000
    )
    async with Contender(sqlite_store.url, "c1") as one:
        assert await one.elected(limit_s=1.0) == 2


async def test_the_leader_deposes_itself_before_others_may_lead(sqlite_store: SqliteStore) -> None:
    """With the store lost, the deposal comes while the row is still the leader's by the clock that others read."""
    async with Contender(sqlite_store.url, "c1") as one:
        term = await one.elected()
        sqlite_store.lose()
        await one.deposed(term)
        ((until_boot_ns,),) = sqlite_store.execute("SELECT until_boot_ns FROM leader")
        assert boot_ns() < until_boot_ns


async def test_standbys_only_read(sqlite_store: SqliteStore) -> None:
    """While somebody leads, a standby writes nothing: a busy writer would starve the leader."""
    async with Member(sqlite_store.url, "c1") as leader:
        await leader.tells("elected")
        async with Contender(sqlite_store.url, "c2") as standby:
            await standby.sees("c1")
            traced: list[str] = []
            database = standby.engine._file._db  # type: ignore[attr-defined]
            database.set_trace_callback(traced.append)
            async with asyncio.timeout(5):
                while len(traced) <= 5:
                    await asyncio.sleep(0.01)
            database.set_trace_callback(None)
        assert all(statement.startswith("SELECT") for statement in traced), traced


# ---------------------------------------------------------------- what an operator may get wrong


async def refused(url: str) -> str:
    """The text of the ConfigError that this address comes to."""
    with pytest.raises(ConfigError) as caught:
        engine = open_engine(url)
        await engine.start(Candidate("c1", "i", "h:1"), lambda event: None)
    return str(caught.value)


async def test_a_place_that_cannot_be_a_store_is_refused_by_name(tmp_path: Path) -> None:
    """A missing directory, another program's database, no database at all: path and reason, and nothing is harmed."""
    assert f"{tmp_path}/none does not exist" in await refused(f"sqlite://{tmp_path}/none/store.db")

    text = tmp_path / "text"
    text.write_text("not a database, and somebody's only copy\n" * 20)
    assert str(text) in await refused(f"sqlite://{text}")
    assert text.read_text().startswith("not a database")

    foreign = tmp_path / "foreign.db"
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    assert "another program" in await refused(f"sqlite://{foreign}")

    folder = tmp_path / "folder"
    folder.mkdir()
    assert str(folder) in await refused(f"sqlite://{folder}")


async def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    """Permissions: the file or folder, and what to do."""
    if os.geteuid() == 0:
        # Root may write anywhere but in a file system that nobody may write to.
        assert "/proc" in await refused("sqlite:///proc/store.db")
        return
    tmp_path.chmod(0o500)
    assert str(tmp_path) in await refused(f"sqlite://{tmp_path}/store.db")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("store.db", "not a store's address"),
        ("mysql://h/db", "'mysql'"),
        ("sqlite://", "names no file"),
        ("sqlite:///tmp/", "names no file"),
        ("sqlite:///tmp/s.db?lease_ms=soon", "lease_ms=soon"),
        ("sqlite:///tmp/s.db?lease_ms=1", "200 to"),
        ("sqlite:///tmp/s.db?lease=1", "'lease'"),
        ("sqlite:///tmp/s.db?lease_ms=500&lease_ms=600", "twice"),
        ("sqlite:///tmp/s.db?lease_ms", "key=value"),
        ("etcd://", "HOST:PORT"),
        ("etcd://h1", "'h1'"),
        ("etcd://h1:2379,h1:2379", "twice"),
        ("etcd://h1:99999", "'h1:99999'"),
        ("etcd://h1:2379?ttl_s=0", "ttl_s=0"),
        ("etcd://h1:2379?ttl_s=1.5", "whole seconds"),
        ("etcd://h1:2379?cert=/x&key=/y", "ca, cert and key together"),
        ("etcd://h1:2379?ca=/nowhere/ca.pem", "/nowhere/ca.pem"),
    ],
)
async def test_an_address_that_cannot_be_used_is_refused_by_part_and_reason(url: str, told: str) -> None:
    """Each wrong part of a store's address is named."""
    if url.startswith("etcd"):
        pytest.importorskip("grpc", reason="needs etcd: install the extra `etcd`")
    with pytest.raises(ConfigError) as caught:
        open_engine(url)
    assert told in str(caught.value)


async def test_several_candidates_create_the_store_at_once(tmp_path: Path) -> None:
    """Eight candidates start on an empty directory: all open it, one leads."""
    contenders = [Contender(f"sqlite://{tmp_path}/store.db", f"c{number}") for number in range(8)]
    try:
        for contender in contenders:
            await contender.__aenter__()
        first = contenders[0]
        await first.until(lambda: first.events or None)
        seen = [event for contender in contenders for _, event in contender.events]
        assert sum(isinstance(event, Elected) for event in seen) <= 1
        assert all(isinstance(event, Elected | LeaderSeen) for event in seen)
    finally:
        for contender in contenders:
            await contender.engine.close()
