"""What is written to stderr: lines for people or, as JSON, for machines; one for each request if wanted."""

import logging
import sys
import time
from typing import Literal

import msgspec

from uvimg.core.message import AccessLog, Request

_access = logging.getLogger("uvimg.access")
_encode = msgspec.json.Encoder().encode


def set_up(form: Literal["text", "json"], level: str) -> None:
    """Send every log line to stderr, in this form, from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if form == "json" else _TextLines())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # Warnings about malformed requests are the client's business, and anybody can cause them.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


def make_access_log() -> AccessLog:
    """One line a request. The target is logged as it came, still encoded, so it cannot break the line."""

    def write(request: Request, peer: str, status: int, size: int, seconds: float) -> None:
        told = {
            "method": _printable(request.method),
            "target": _printable(request.target),
            "status": status,
            "bytes": size,
            "ms": round(seconds * 1000, 2),
            "peer": peer,
        }
        # A message too, for the log of somebody else's process.
        _access.info("%(peer)s %(method)s %(target)s %(status)d %(bytes)d B %(ms).2f ms", told, extra={"request": told})

    return write


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if hasattr(record, "request"):
            return f"{_timestamp(record)} {text}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return f"{_timestamp(record)} {record.levelname} {text}"


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": _timestamp(record), "level": record.levelname.lower(), "name": record.name}
        request = getattr(record, "request", None)
        if request is not None:
            line |= request
        else:
            line["message"] = record.getMessage()
            if record.exc_info:
                line["traceback"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def _printable(text: str) -> str:
    return text if text.isprintable() and text.isascii() else ascii(text)[1:-1]
