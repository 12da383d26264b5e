"""What a cache that several nodes share may hold: what was made of something else, and can be made again.

Rule: the reduced versions of originals (core/pyramid.py) are not among it. They take the longest to make, and serve
to make all else.
"""

from uvimg.core.address import RENDITIONS
from uvimg.core.coding import CODINGS
from uvimg.core.pyramid import LEVELS


def may_be_shared(name: bytes) -> bool:
    """Whether what has this name is a rendition or a coded copy."""
    if name.startswith(RENDITIONS):
        return not name.rpartition(b"/")[2].startswith(LEVELS.encode())
    return name.startswith(CODINGS)
