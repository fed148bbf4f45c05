"""The trained checkpoints that tests load: a small one of their own, and the pack's demo model."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "models" / "sana-tiny"
CHECKPOINTS = {"sana-tiny": TINY, "sana-posters": ROOT / "demo" / "sana-posters"}
# Training the larger model takes ten times longer.
trained_on_both = pytest.mark.parametrize("name", ["sana-tiny", pytest.param("sana-posters", marks=pytest.mark.slow)])


def link_tiny(base: Path) -> None:
    """Put sana-tiny into models/diffusers of a server's base directory."""
    link = base / "models" / "diffusers" / "sana-tiny"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(TINY, target_is_directory=True)
