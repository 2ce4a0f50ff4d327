"""Commands: `python -m scripts` lists them."""

from pathlib import Path

# Maintainers' tools stand in dev/, and are also found without it, as they were before: scripts.theorem
__path__ = [*__path__, str(Path(__file__).parent / "dev")]
