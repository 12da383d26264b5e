"""Where to listen, as it is written: HOST:PORT · [::1]:PORT · :PORT · unix:/path · fd:N."""

import re
from dataclasses import dataclass

# struct sockaddr_un has room for so much, and a NUL behind it.
_MAX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class Tcp:
    """A host of "" is every interface, a port of 0 any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Unix:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class Inherited:
    """A socket that whoever started us has opened."""

    fd: int

    def __str__(self) -> str:
        return f"fd:{self.fd}"


Place = Tcp | Unix | Inherited


def parse_place(text: str) -> Place:
    """ValueError with a sentence when it is none."""
    if text.startswith("unix:/"):
        path = text.removeprefix("unix:")
        if len(path.encode(errors="surrogateescape")) > _MAX_PATH_BYTES or "\0" in path:
            raise ValueError(f"the path of a unix socket has at most {_MAX_PATH_BYTES} bytes")
        return Unix(path)
    if found := re.fullmatch(r"fd:(\d{1,9})", text, re.ASCII):
        # 0 to 2 are the terminal's, and would be missed.
        if int(found[1]) < 3:
            raise ValueError("inherited sockets begin at fd:3")
        return Inherited(int(found[1]))
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+(?:%\w+)?)\]|([\w.-]*)):(\d{1,5})", text, re.ASCII)
    if found is None or int(found[3]) > 65_535 or found[2] in ("unix", "fd"):
        raise ValueError("a place is written HOST:PORT, [::1]:PORT, :PORT, unix:/path or fd:N")
    return Tcp(found[1] or found[2], int(found[3]))


def check_places(texts: tuple[str, ...]) -> None:
    """ValueError unless each is a place, and none is there twice."""
    places = [parse_place(text) for text in texts]
    for place in places:
        # A free port is another one each time.
        if places.count(place) > 1 and not (isinstance(place, Tcp) and place.port == 0):
            raise ValueError(f"{place} is there twice")
