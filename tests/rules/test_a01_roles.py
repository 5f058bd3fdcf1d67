"""docs/rules.md A1: the certificate names the role, and each role may use only its opcodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shell.controllers import CONTROLLER, Controllers, peer, sqlite_url
from tests.testbed.stage import Stage
from xce_supervisor.errors import RequestRefused
from xce_supervisor.wire.words import (
    CtrlStatus,
    CtrlStatusReply,
    ErrorCode,
    GateSet,
    HostRole,
    JobQuery,
    JobSubmit,
)


async def test_each_role_may_use_only_its_opcodes(tmp_path: Path) -> None:
    """docs/rules.md A1: by the certificate; a role that is not the certificate's cannot be joined; told once in the log."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path))
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        async with await peer(controllers, one, "supervisor", "c1") as supervisor:
            assert isinstance(await supervisor.ask(CtrlStatus()), CtrlStatusReply)
            for message in (
                JobSubmit(job_id="j", command=("true",)),
                JobQuery(),
                GateSet(gate="apply-divergent", closed=True),
            ):
                with pytest.raises(RequestRefused) as refused:
                    await supervisor.ask(message)
                assert refused.value.code == ErrorCode.DENIED
            with pytest.raises(RequestRefused) as refused:
                await supervisor.join(HostRole.SCHEDULER, "scheduler", controller_id="c1", term=1)
            assert refused.value.code == ErrorCode.DENIED
        async with await peer(controllers, one, "worker", "w1") as worker:
            for role, name in ((HostRole.SCHEDULER, "w1"), (HostRole.WORKER, "w2")):
                with pytest.raises(RequestRefused) as refused:
                    await worker.join(role, name, controller_id="c1", term=1, slots=1)
                assert refused.value.code == ErrorCode.DENIED
        assert one.program.output().count("opcode.denied") == 2


async def test_without_certificates_it_says_so_loudly(tmp_path: Path) -> None:
    """docs/rules.md A1: a controller without TLS warns at its start."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), secure=False)
        (one,) = controllers.hosts
        await controllers.says(one, lambda s: s.role == "primary")
        assert "[warning" in one.program.output() and "tls.missing" in one.program.output()


async def test_a_certificate_of_another_name_is_refused_at_the_start(tmp_path: Path) -> None:
    """A controller that pretends to be another does not start: file, what it names, and what to do."""
    with Stage(tmp_path) as stage:
        controllers = Controllers(stage, sqlite_url(tmp_path), 0)
        files = stage.files("worker", "w1")
        given = {
            "controller_id": "c1",
            "listen": "127.0.0.1:0",
            "store": controllers.store,
            "tls": [str(files.ca), str(files.cert), str(files.key)],
        }
        program = stage.start("c1", CONTROLLER, given, {})
        assert await program.exit_code() == 78
        assert "worker/w1" in program.output() and str(files.cert) in program.output()
