"""The configuration's page is written from the settings."""

from __future__ import annotations

from pathlib import Path

from xce_supervisor.config.reference import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_the_settings_say() -> None:
    """Run `python -m xce_supervisor.config.reference > docs/configuration.md` after a change of settings."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_key_says_what_it_means() -> None:
    """No row of any table ends in nothing."""
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 45
    assert not [row for row in rows if row.split(" | ")[-1].strip(" |") == ""]
