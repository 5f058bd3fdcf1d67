"""A small language in which a test says what a fake controller does when: one line a step, "MILLISECONDS VERB WORDS".

       0 primary 7              role and term
     300 standby 7
     600 primary 8
     700 restart                a new instance id, connections closed
     800 silent ctrl_status     never answer this opcode any more
     900 answer ctrl_status     answer it as it should be again ("answer" alone: everything)
    1000 delay ctrl_status 400  answer it so many milliseconds late
    1100 garbage ctrl_status    answer it by bytes that are no frame
    1200 refuse join 10         answer it no, with this error code
    1300 hang_up heartbeat      close the connection instead
    1400 foreign stranger       somebody else's scheduler session, with this token ("foreign" alone: none)
    1500 stall 12000            the oldest push is unacted on for so many milliseconds ("stall" alone: what is true)
    1600 quorum 6000            the last confirmation by a quorum is so old
    1700 gate recovery-truncated
    1800 demote                 exit push, then standby
    1900 push 3                 three pending jobs

Empty lines and what follows a # do not count. Times must not go back.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.fakes.controller import FakeController
from xce_supervisor.wire.words import ErrorCode, JobView, Opcode, SchedulerSession


@dataclass(frozen=True, slots=True)
class Step:
    """One line."""

    at_ms: int
    verb: str
    words: tuple[str, ...]
    line: int


def parse(text: str) -> tuple[Step, ...]:
    """Return the steps of a script. Raises ValueError naming the line."""
    steps: list[Step] = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        if len(parts) < 2 or not parts[0].isdigit():
            raise ValueError(f"line {number}: {line!r} is not MILLISECONDS VERB WORDS")
        step = Step(int(parts[0]), parts[1], tuple(parts[2:]), number)
        if steps and step.at_ms < steps[-1].at_ms:
            raise ValueError(f"line {number}: {step.at_ms} ms comes after {steps[-1].at_ms} ms")
        steps.append(step)
    return tuple(steps)


async def play(fake: FakeController, text: str) -> None:
    """Do what a script says, at its times from now on."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for step in parse(text):
        await asyncio.sleep(max(0.0, began + step.at_ms / 1000 - loop.time()))
        await _do(fake, step)


async def _do(fake: FakeController, step: Step) -> None:
    match (step.verb, *step.words):
        case ("primary" | "standby" as role, term):
            await fake.say(role=role, term=int(term))
        case ("restart",):
            await fake.restart()
        case ("demote",):
            await fake.demote()
        case ("foreign", token):
            fake.foreign = SchedulerSession(joined=True, name="foreign", spawn_token=token)
            await fake.say()
        case ("foreign",):
            fake.foreign = None
            await fake.say()
        case ("stall", age):
            fake.forced_stall_ms = int(age)
        case ("stall",):
            fake.forced_stall_ms = None
        case ("quorum", age):
            await fake.say(quorum_age_ms=int(age))
        case ("gate", name):
            await fake.say(gate=name)
        case ("gate",):
            await fake.say(gate="")
        case ("push", count):
            first = len(fake.jobs)
            fake.push_jobs(*(JobView(job_id=f"scripted-{first + n}", command=("true",)) for n in range(int(count))))
        case _:
            _trouble(fake, step)


def _trouble(fake: FakeController, step: Step) -> None:
    trouble = fake.trouble
    match (step.verb, *step.words):
        case ("silent", name):
            trouble.silent.add(_opcode(name, step))
        case ("garbage", name):
            trouble.garbage.add(_opcode(name, step))
        case ("hang_up", name):
            trouble.hang_up.add(_opcode(name, step))
        case ("delay", name, late_ms):
            trouble.delay_s[_opcode(name, step)] = int(late_ms) / 1000
        case ("refuse", name, code):
            trouble.refuse[_opcode(name, step)] = ErrorCode(int(code))
        case ("answer", name):
            trouble.clear(_opcode(name, step))
        case ("answer",):
            trouble.clear()
        case _:
            raise ValueError(f"line {step.line}: no such step: {step.verb} {' '.join(step.words)}")


def _opcode(name: str, step: Step) -> Opcode:
    try:
        return Opcode[name.upper()]
    except KeyError:
        raise ValueError(f"line {step.line}: no such opcode: {name}") from None
