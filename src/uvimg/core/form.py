"""multipart/form-data, without the socket: bytes in, events out.

python-multipart does the parsing; here stand the limits around it and the shape that an app wants to
read: a part begins, some of its bytes, it ends.
"""

from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from uvimg.core.errors import BadRequest

# Its files are held, as descriptors or up to 64 KiB in memory, until the form has come to its end.
MAX_PARTS = 100


@dataclass(frozen=True, slots=True)
class PartBegins:
    """A part's head. `filename` is None for a plain field, "" where a form's file was left empty."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnds:
    pass


Event = PartBegins | PartData | PartEnds


class FormReader:
    """Feeds a body to the parser. BadRequest for what is no form, and from `close` for one that ends too soon."""

    def __init__(self, content_type: str) -> None:
        # A boundary is ASCII (RFC 2046 5.1.1); whatever else stands there must not break the parser.
        _, options = parse_options_header(content_type.encode("ascii", "replace"))
        boundary = options.get(b"boundary")
        if not boundary:
            raise BadRequest("The multipart form has no boundary in its Content-Type.")
        self._events: list[Event] = []
        self._header = self._value = b""
        self._disposition = b""
        self._parts = 0
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._name_header,
                    "on_header_value": self._give_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_head,
                    "on_part_data": lambda data, start, stop: self._events.append(PartData(data[start:stop])),
                    "on_part_end": lambda: self._events.append(PartEnds()),
                    "on_end": self._end,
                },
            )
        except FormParserError as exc:
            raise BadRequest("The multipart form's boundary is not allowed.") from exc

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes."""
        try:
            self._parser.write(data)
            return self._events
        except FormParserError as exc:
            raise BadRequest("The multipart form is malformed.") from exc
        finally:
            # The parser and this hold each other, for as long as it takes until somebody looks for cycles: what they
            # hold beside that is little.
            self._events = []

    def close(self) -> None:
        """The body is over: was the form?"""
        if not self._ended:
            raise BadRequest("The multipart form ends before its last boundary.")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadRequest(f"The multipart form has more than {MAX_PARTS} parts.")
        self._disposition = b""

    def _name_header(self, data: bytes, start: int, stop: int) -> None:
        self._header += data[start:stop]

    def _give_value(self, data: bytes, start: int, stop: int) -> None:
        self._value += data[start:stop]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_head(self) -> None:
        _, options = parse_options_header(self._disposition)
        name, filename = options.get(b"name", b""), options.get(b"filename")
        decoded = None if filename is None else filename.decode(errors="replace")
        self._events.append(PartBegins(name.decode(errors="replace"), decoded))

    def _end(self) -> None:
        self._ended = True
