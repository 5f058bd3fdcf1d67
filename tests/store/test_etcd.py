"""What is the etcd engine's own: answers that are lost on the way, members that stop, and renewals whose answer binds nobody."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.store.proxy import Relay
from tests.store.stage import Contender, EtcdStore
from xce_supervisor.store.engine import Fact, Unavailable
from xce_supervisor.testbed.etcd_cluster import free_ports
from xce_supervisor.testbed.pki import Subject, make_pki

pytestmark = pytest.mark.needs("etcd")


@asynccontextmanager
async def relayed(store: EtcdStore, ttl_s: int = 2) -> AsyncIterator[tuple[str, list[Relay]]]:
    """The store behind one relay a member: its address, and the relays."""
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(Relay(port)) for port in store.cluster.client_ports]
        prefix = store.url.rpartition("/")[2].partition("?")[0]
        members = ",".join(f"127.0.0.1:{relay.port}" for relay in relays)
        yield f"etcd://{members}/{prefix}?ttl_s={ttl_s}", relays


async def test_an_append_whose_answer_was_lost_is_written_once(etcd_store: EtcdStore) -> None:
    """The member carries it out and nobody hears of it: the engine asks the next one, finds its own fact, and answers."""
    async with relayed(etcd_store) as (url, relays), Contender(url, "c1") as one:
        term = await one.elected()
        first = await one.engine.append(term, [Fact("test", "a", b"{}")])
        relays[0].mute = True
        second = await one.engine.append(term, [Fact("test", "b", b"{}")], after=first)
        assert relays[0].dropped > 0, "nothing was lost: the test tests nothing"
        log = await one.engine.read()
        assert [(fact.key, fact.index) for fact in log] == [("a", first), ("b", second)]
        assert one.engine.leads(term)


async def test_an_election_whose_answer_was_lost_is_found_by_its_nonce(etcd_store: EtcdStore) -> None:
    """The first member answers nothing at all: the candidate still leads, in a term that was counted up once."""
    async with relayed(etcd_store) as (url, relays), Contender(url, "c1") as one:
        term = await one.elected()
        await one.engine.resign(term)
        relays[0].mute = True
        assert await one.elected(above=term) == term + 1
        assert relays[0].dropped > 0, "nothing was lost: the test tests nothing"


async def test_a_candidate_that_was_overtaken_after_its_look_is_not_elected(etcd_store: EtcdStore) -> None:
    """Between seeing no leader and asking to be elected another one is elected: the transaction itself must refuse."""
    async with Contender(etcd_store.url, "c1") as winner:
        term = await winner.elected()
        await winner.engine.resign(term, hold_ms=60_000)
        slow = Contender(etcd_store.url, "c2")
        calls = slow.engine._calls  # type: ignore[attr-defined]
        plain_range = calls.range

        async def overtaken(request: Any, deadline_s: float) -> Any:
            if request.key.endswith(b"/term") and not rivals:
                rivals.append(await stack.enter_async_context(Contender(etcd_store.url, "c3")))
                await rivals[0].elected()
            return await plain_range(request, deadline_s)

        rivals: list[Contender] = []
        calls.range = overtaken
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(slow)
            await slow.sees("c3")
            assert slow.terms() == [] and rivals[0].terms() == [term + 1]


async def test_a_leader_outlives_the_loss_of_one_member(etcd_store: EtcdStore) -> None:
    """One of three members stops, whichever it is: leadership, appends and confirmations go on through the others."""
    async with Contender(etcd_store.cluster.url(etcd_store.url.rpartition("/")[2].partition("?")[0], ttl_s=5), "c1") as one:
        term = await one.elected()
        for member in range(3):
            etcd_store.cluster.signal(member, signal.SIGSTOP)
            await _until_answered(one, term, f"{member}")
            assert one.engine.leads(term), [event for _, event in one.events]
            etcd_store.heal()
        assert [fact.key for fact in await one.engine.read()] == ["0", "1", "2"]


async def _until_answered(one: Contender, term: int, key: str) -> None:
    """Append and confirm, again if the store was between two leaders of its own: an append is harmless to repeat."""
    async with asyncio.timeout(8):
        while True:
            try:
                await one.engine.append(term, [Fact("test", key, b"{}")])
                await one.engine.confirm(term)
                return
            except Unavailable:
                await asyncio.sleep(0.05)


async def test_the_lease_is_what_etcd_grants_not_what_was_asked(etcd_store: EtcdStore) -> None:
    """etcd never grants less than one and a half election time-outs; authority counts by the reply."""
    async with Contender(etcd_store.url, "c1") as one:
        term = await one.elected()
        lead = one.engine._lead  # type: ignore[attr-defined]
        granted_s = lead.bid.granted_ns / 1e9
        assert granted_s >= 1 and granted_s == int(granted_s)
        left_s = lead.until.remaining_ns(lead.bid.anchor) / 1e9
        assert left_s == pytest.approx(granted_s * 0.9) or left_s > granted_s * 0.9, "a tenth is kept back, more only by renewal"
        assert one.engine.leads(term)


async def test_a_store_that_went_back_is_not_led(etcd_store: EtcdStore) -> None:
    """A backup put back under the running candidate: terms that were given out are not given out again."""
    async with Contender(etcd_store.url, "c1") as one:
        first = await one.elected()
        await one.engine.resign(first)
        second = await one.elected(above=first)
        etcd_store.put("term", "0")
        await one.engine.resign(second)
        with pytest.raises(TimeoutError):
            await one.until(lambda: one.terms()[2:] or None, limit_s=1.0)


async def test_certificates_are_shown_and_checked(tmp_path: Path) -> None:
    """An etcd that wants client certificates: with them it is led in, without them or with a foreign authority it is not."""
    pki = tmp_path / "pki"
    server, client = make_pki(pki, "test", [Subject("controller", "etcd"), Subject("controller", "c1")]).certificates
    make_pki(tmp_path / "foreign", "test", [Subject("controller", "c1")])
    binary = shutil.which("etcd")
    assert binary is not None
    client_port, peer_port = free_ports(2)
    address = f"https://127.0.0.1:{client_port}"
    peer = f"http://127.0.0.1:{peer_port}"
    command = [
        binary, "--data-dir", str(tmp_path / "data"), "--listen-client-urls", address, "--advertise-client-urls", address,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        "--client-cert-auth", "--trusted-ca-file", str(pki / "ca.pem"), "--cert-file", str(server.cert),
        "--key-file", str(server.key),
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    url = f"etcd://127.0.0.1:{client_port}/tls?ttl_s=2"
    pair = f"&cert={client.cert}&key={client.key}"
    try:
        async with Contender(f"{url}&ca={pki}/ca.pem{pair}", "c1") as one:
            term = await one.elected(limit_s=20)
            await one.engine.append(term, [Fact("test", "a", b"{}")])

        async def refused(options: str) -> None:
            async with Contender(url + options, "c1") as one:
                with pytest.raises(Unavailable):
                    await one.engine.read()

        await asyncio.gather(*map(refused, ("", f"&ca={pki}/ca.pem", f"&ca={tmp_path}/foreign/ca.pem{pair}")))
    finally:
        process.kill()
        process.wait()
