"""docs/rules.md S20: what happens to the disk damages neither the state file nor the journal, and stops nobody.

Full, hung and vanished disks are tried in tests/shell/test_statefile.py and tests/shell/test_journal.py; here the writer dies.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from xce_supervisor.supervisor.journal import read
from xce_supervisor.supervisor.statefile import Host, StateFile

WRITER = """
import itertools, sys
from pathlib import Path
from xce_supervisor.core.words import Now
from xce_supervisor.supervisor.journal import Journal
from xce_supervisor.supervisor.statefile import Host, State, StateFile
folder = Path(sys.argv[1])
file = StateFile(folder / "state.json", Host(name="a", machine_id="m", boot_id="b"), "c1")
journal = Journal(folder / "journal.jsonl", "b", bytes_max=50_000, files_max=3)
for number in itertools.count(1):
    assert file.save(State(generations={"scheduler": number, "x" * 3000: number}), 0.0).problem == ""
    journal.append("child.spawned", Now(number, number), fields={"n": number})
    if number == 5:
        print("writing", flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_state_and_whole_lines(tmp_path: Path) -> None:
    """docs/rules.md S20, S17: twelve times kill -9 in the middle of saving: the state is always one that was saved whole."""
    chance = random.Random(7)
    for _ in range(12):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        time.sleep(chance.uniform(0, 0.02))  # the moment of the fault, not a wait for anything
        writer.kill()
        writer.wait(10)
        writer.stdout.close()
        loaded = StateFile(tmp_path / "state.json", Host(name="a", machine_id="m", boot_id="b"), "c1").load()
        assert loaded.refused == ""
        assert len(set(loaded.state.generations.values())) == 1 and loaded.state.generations["scheduler"] >= 5
        assert not list(tmp_path.glob("*.bad-*"))
    found = read(tmp_path / "journal.jsonl")
    numbers = [entry.seq for entry in found.entries]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert found.damaged <= 12
