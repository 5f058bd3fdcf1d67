"""What tests of the link share: both event loops, certificates made once, and a server with a scripted handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.shell.link.certificates import Authority
from tests.shell.link.peers import Pair

Run = Callable[[Coroutine[Any, Any, None]], None]

TEST_S = 20.0


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine on each kind of loop, within a bound, and fail if it leaves a task behind."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    async def bounded(coroutine: Coroutine[Any, Any, None]) -> None:
        async with asyncio.timeout(TEST_S):
            await coroutine
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    def runs(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded(coroutine))

    return runs


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that the peers of most tests trust."""
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="session")
def pair(authority: Authority) -> Pair:
    """Contexts of a controller and of a supervisor."""
    return Pair(authority.source("controller", "c1"), authority.source("supervisor", "s1"))


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that nobody trusts."""
    return Authority(tmp_path_factory.mktemp("other-pki"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of this test's own."""
    return tmp_path
