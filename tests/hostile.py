"""What the world does to files: pickles that run code, disks that are full."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Touch:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


@contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """Inside, no file of this process can grow past so many bytes: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
