"""Commands: `python -m scripts` lists them."""

from pathlib import Path

# Maintainers' tools stand in dev/, and are also found under the names they had before: python -m scripts.theorem
__path__ = [*__path__, str(Path(__file__).parent / "dev")]
