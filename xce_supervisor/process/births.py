"""Who is being born: keeps the reaper of orphans from a child whose lane has not told who it is yet.

A child may be dead before its lane has read its identity. An orphan looks the same to the reaper: a zombie that nobody
watches. So a lane announces each birth before the spawn and claims the child after it. A zombie that nobody claimed is an
orphan only when every birth that was open at its first sight is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from xce_supervisor.core.words import Identity


class Births:
    """The open births and the claimed, not yet watched children of one process. Every method may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._issued = 0
        self._open: set[int] = set()
        self._claimed: dict[int, Identity] = {}
        self._listeners: tuple[Callable[[], None], ...] = ()

    def when_over(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback`, in the lane's thread, whenever a birth is over. Returns a function that ends this."""
        with self._lock:
            self._listeners = (*self._listeners, callback)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not callback)

        return end

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Announce a birth for as long as the block runs; `claim` is called inside it when the spawn went well."""
        with self._lock:
            self._issued += 1
            number = self._issued
            self._open.add(number)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(number)
            for listener in self._listeners:
                listener()

    def claim(self, identity: Identity) -> None:
        """Tell that this child is ours; it keeps its exit status until somebody watches it."""
        with self._lock:
            self._claimed[identity.pid] = identity

    def release(self, pid: int) -> None:
        """Tell that the child is watched from now on."""
        with self._lock:
            self._claimed.pop(pid, None)

    def claimed(self, pid: int) -> bool:
        """Is it a child that is claimed and not watched yet?"""
        with self._lock:
            return pid in self._claimed

    def mark(self) -> int:
        """Return the number of births that have begun so far."""
        with self._lock:
            return self._issued

    def any_open(self) -> bool:
        """Is a birth going on?"""
        with self._lock:
            return bool(self._open)

    def over_since(self, mark: int) -> bool:
        """Are all births over that had begun at `mark`?"""
        with self._lock:
            return all(number > mark for number in self._open)
