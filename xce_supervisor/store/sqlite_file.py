"""The blocking half of the sqlite engine: one database file, its leader row and its facts. Runs in the engine's own thread.

The leader row is a lease on a clock that every process of the machine reads alike: CLOCK_BOOTTIME, valid for one boot (its id
is in the row; after a reboot the row is void). A transaction that writes takes the file's write lock first (BEGIN IMMEDIATE),
reads the clock and the row under it, and only then decides; so two candidates never decide on the same row, and a fact is
written only under a row that is still the writer's. Nobody but the leader and a candidate for a vacant row writes: one busy
writer starves all others of a sqlite file.
"""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xce_supervisor.core.words import Now
from xce_supervisor.errors import ConfigError
from xce_supervisor.store.clocks import boot_ns, read_boot_id, read_now
from xce_supervisor.store.engine import Behind, Candidate, Conflict, Fact, Fenced, StoredFact, Unavailable

APPLICATION_ID = 0x58434531
FORMAT = 1
# Short, so that the thread is soon free again; whoever needs the lock longer asks again.
BUSY_TIMEOUT_S = 0.1
_BUSY_CODES = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})

_SCHEMA = """
CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), cluster TEXT NOT NULL);
CREATE TABLE leader (
    one INTEGER PRIMARY KEY CHECK (one = 1), term INTEGER NOT NULL, nonce TEXT NOT NULL, controller_id TEXT NOT NULL,
    instance_id TEXT NOT NULL, address TEXT NOT NULL, boot_id TEXT NOT NULL, until_boot_ns INTEGER NOT NULL);
CREATE TABLE fact (
    idx INTEGER PRIMARY KEY AUTOINCREMENT, term INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
    body BLOB NOT NULL, UNIQUE (kind, key));
"""


class Busy(Exception):
    """Another process holds the file's write lock."""


class StoreLost(Exception):
    """The file is gone, replaced, or older than what this process has already seen."""


@dataclass(frozen=True, slots=True)
class LeaderRow:
    """The leader row as read. nonce "" means vacant; until_boot_ns: CLOCK_BOOTTIME of boot `boot_id`."""

    term: int
    nonce: str
    controller_id: str
    instance_id: str
    address: str
    boot_id: str
    until_boot_ns: int

    def vacant(self, boot_id: str, at_boot_ns: int) -> bool:
        """May somebody else be elected at `at_boot_ns`? A row of another boot binds nobody: its writer is gone."""
        return not self.nonce or self.boot_id != boot_id or at_boot_ns >= self.until_boot_ns


@dataclass(frozen=True, slots=True)
class Granted:
    """Leadership as written. anchor: both clocks, read before the row was written; the lease counts from there."""

    term: int
    anchor: Now


class SqliteFile:
    """One open database. Every method blocks, and is called by the engine's thread alone."""

    def __init__(self, path: Path, lease_ns: int) -> None:
        self._path = path
        self._lease_ns = lease_ns
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None
        self._cluster = ""
        self._term_seen = 0
        self.boot_id = read_boot_id()

    # ------------------------------------------------------------ opening

    def open(self) -> None:
        """Open the file, create it with its tables where there is none.

        Raises:
            ConfigError: the path cannot be a store. Busy: locked by somebody; try again.
        """
        folder = self._path.parent
        if not folder.is_dir():
            raise ConfigError(f"sqlite://{self._path}: the directory {folder} does not exist; create it, then start again")
        try:
            self._connect(create=True)
            # Without a write transaction where the store exists: somebody who is stopped may hold the lock, and has to be fenced
            # by us later.
            if self._application() != APPLICATION_ID:
                self._create_tables()
            self._check_identity()
        except sqlite3.Error as error:
            self.close()
            if _is_busy(error):
                raise Busy(str(error)) from error
            hint = "it is not a database of this program" if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB else "check it"
            raise ConfigError(f"sqlite://{self._path}: cannot be opened: {error}; {hint}, or name another path") from error
        except ConfigError:
            self.close()
            raise

    def reopen(self) -> None:
        """Open the file anew if the path leads to another one than before. Never creates one: its terms would start anew.

        Raises:
            StoreLost: there is no file, or it is another store, or an older state of this one. Busy.
        """
        try:
            if self._db is not None and self._identity() == self._opened:
                return
            self.close()
            self._connect(create=False)
            self._check_identity()
        except (OSError, ConfigError) as error:
            self.close()
            raise StoreLost(f"{self._path}: {error}") from error
        except sqlite3.Error as error:
            self.close()
            if _is_busy(error):
                raise Busy(str(error)) from error
            raise StoreLost(f"{self._path}: {error}") from error

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _connect(self, *, create: bool) -> None:
        mode = "rwc" if create else "rw"
        self._db = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        self._db.execute("PRAGMA journal_mode = WAL").fetchone()
        self._db.execute("PRAGMA synchronous = FULL")
        self._opened = self._identity()

    def _identity(self) -> tuple[int, int]:
        seen = os.stat(self._path)
        return seen.st_dev, seen.st_ino

    def _create_tables(self) -> None:
        with self._writing() as db:
            if self._application() == APPLICATION_ID:
                return
            (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables:
                raise ConfigError(f"sqlite://{self._path}: a database of another program; name another path")
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.execute("INSERT INTO store VALUES (1, ?)", (uuid.uuid4().hex,))
            db.execute("INSERT INTO leader VALUES (1, 0, '', '', '', '', '', 0)")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT}")

    def _application(self) -> int:
        (application,) = self._handle().execute("PRAGMA application_id").fetchone()
        return int(application)

    def _check_identity(self) -> None:
        db = self._handle()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise ConfigError(f"sqlite://{self._path}: format {version}, this program writes {FORMAT}; run what wrote it")
        (cluster,) = db.execute("SELECT cluster FROM store").fetchone()
        if self._cluster and cluster != self._cluster:
            raise ConfigError("another store lies there now")
        self._cluster = cluster
        self.look()

    # ------------------------------------------------------------ leadership

    def look(self) -> LeaderRow:
        """Return the leader row; a read, it waits for no writer.

        Raises:
            StoreLost: the file is gone, or its term is lower than one seen before (an old copy was put back).
        """
        (values,) = self._reading("SELECT term, nonce, controller_id, instance_id, address, boot_id, until_boot_ns FROM leader")
        row = LeaderRow(*values)
        if row.term < self._term_seen:
            raise StoreLost(f"{self._path}: term {row.term} after term {self._term_seen}: an older copy was put back")
        self._term_seen = row.term
        return row

    def take(self, candidate: Candidate, nonce: str) -> Granted | None:
        """Become leader of the next term if the row is vacant; None if it is not. Raises Busy, StoreLost, Unavailable."""
        with self._writing() as db:
            anchor = read_now()
            row = self.look()
            if not row.vacant(self.boot_id, anchor.boot_ns):
                return None
            db.execute(
                "UPDATE leader SET term = ?, nonce = ?, controller_id = ?, instance_id = ?, address = ?, boot_id = ?,"
                " until_boot_ns = ?",
                (
                    row.term + 1, nonce, candidate.controller_id, candidate.instance_id, candidate.address, self.boot_id,
                    anchor.boot_ns + self._lease_ns,
                ),
            )  # fmt: skip
        self._term_seen = row.term + 1
        return Granted(row.term + 1, anchor)

    def renew(self, term: int, nonce: str) -> Now:
        """Lease the row for another period, counted from the returned clocks. Raises Fenced, Busy, StoreLost, Unavailable."""
        with self._writing(synced=False) as db:
            anchor = read_now()
            self._still_mine(term, nonce, anchor.boot_ns)
            db.execute("UPDATE leader SET until_boot_ns = ?", (anchor.boot_ns + self._lease_ns,))
        return anchor

    def release(self, nonce: str) -> None:
        """Make the row vacant if it is still ours. Raises Busy, StoreLost, Unavailable."""
        with self._writing(synced=False) as db:
            db.execute("UPDATE leader SET nonce = '', until_boot_ns = 0 WHERE nonce = ?", (nonce,))

    def confirm(self, term: int, nonce: str) -> None:
        """Read the row afresh: is it ours and not run out? Raises Fenced, StoreLost, Unavailable."""
        self._check_place()
        self._still_mine(term, nonce, boot_ns())

    def _still_mine(self, term: int, nonce: str, at_boot_ns: int) -> None:
        row = self.look()
        if row.nonce != nonce or row.term != term:
            raise Fenced(f"term {term} is over: the store is in term {row.term}")
        # A row that has run out is nobody's. Its writer may not revive it: others already count on it.
        if row.vacant(self.boot_id, at_boot_ns):
            raise Fenced(f"the lease of term {term} ran out")

    # ------------------------------------------------------------ facts

    def append(self, term: int, nonce: str, facts: Sequence[Fact], after: int | None) -> int:
        """See Engine.append. Raises Fenced, Conflict, Behind, Busy, StoreLost, Unavailable."""
        with self._writing() as db:
            self._still_mine(term, nonce, boot_ns())
            known = [self._index_of(fact) for fact in facts]
            if None in known and after is not None and after != self.newest():
                raise Behind(f"the log ends at {self.newest()}, the appender has seen {after}")
            last = 0
            for fact, index in zip(facts, known, strict=True):
                last = index or self._insert(db, term, fact)
        return last

    def _index_of(self, fact: Fact) -> int | None:
        rows = self._handle().execute("SELECT idx, body FROM fact WHERE kind = ? AND key = ?", (fact.kind, fact.key)).fetchall()
        if not rows:
            return None
        index, body = rows[0]
        if body != fact.body:
            raise Conflict(f"{fact.kind} {fact.key} exists at index {index} with another body")
        return int(index)

    def _insert(self, db: sqlite3.Connection, term: int, fact: Fact) -> int:
        values = (term, fact.kind, fact.key, fact.body)
        cursor = db.execute("INSERT INTO fact (term, kind, key, body) VALUES (?, ?, ?, ?)", values)
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def newest(self) -> int:
        """Return the index of the newest fact, 0 when there is none."""
        (index,) = self._handle().execute("SELECT coalesce(max(idx), 0) FROM fact").fetchone()
        return int(index)

    def read(self, after: int, limit: int) -> list[StoredFact]:
        """See Engine.read. Raises StoreLost, Unavailable."""
        self._check_place()
        rows = self._reading("SELECT idx, term, kind, key, body FROM fact WHERE idx > ? ORDER BY idx LIMIT ?", (after, limit))
        return [StoredFact(*row) for row in rows]

    # ------------------------------------------------------------ transactions

    def _handle(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreLost(f"{self._path}: not open")
        return self._db

    def _check_place(self) -> None:
        """A file that was moved or deleted can still be written to, by us alone: that would be a second store."""
        self._handle()
        try:
            same = self._identity() == self._opened
        except OSError as error:
            raise StoreLost(f"{self._path}: {error.strerror}") from error
        if not same:
            raise StoreLost(f"{self._path}: replaced by another file")

    def _reading(self, query: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._handle().execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise Unavailable(f"{self._path}: {error}") from error

    @contextmanager
    def _writing(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """One short write transaction. It never spans an await: it lives in one call on the engine's thread.

        synced: on disk when it ends. A renewal need not be: the other processes of the machine see it at once, and after a crash
        of the machine every lease is void anyway. So a disk that is slow to sync costs no idle leader its lease. Elections and
        facts are synced: a term or a fact that was told must outlast everything.
        """
        self._check_place()
        db = self._handle()
        try:
            db.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                # Moved or deleted meanwhile: the commit would go to a file that nobody else will ever read.
                self._check_place()
                db.execute("COMMIT")
            finally:
                # After a failed COMMIT sqlite may have rolled back by itself; what it did is read back, never assumed.
                if db.in_transaction:
                    db.execute("ROLLBACK")
        except sqlite3.Error as error:
            if _is_busy(error):
                raise Busy(str(error)) from error
            raise Unavailable(f"{self._path}: {error}") from error


def _is_busy(error: sqlite3.Error) -> bool:
    # The low byte is the primary code; extended codes (BUSY_RECOVERY, BUSY_SNAPSHOT) carry more above it.
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _BUSY_CODES
