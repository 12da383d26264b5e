"""What a job will cost, and so which lane of the pool it stands in."""

from uvimg.core.formats import Format


def takes_long_to_inspect(format: Format, size: int) -> bool:
    return size > 4 << 20
