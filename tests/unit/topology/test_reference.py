from __future__ import annotations

from pathlib import Path

from topology.reference import page


def test_the_configuration_page_is_what_the_classes_say() -> None:
    assert Path("docs/configuration.md").read_text() == page(), (
        "run: python -m topology.reference > docs/configuration.md"
    )
