"""One tree of errors; each class knows its status and its public sentence.

Raised where the trouble is known, caught once, in `Service.handle`. Every app tells them in
its own dialect: problem+json (RFC 9457), zimg's JSON or zimg's HTML.
Rule: `detail` is shown to whoever asked, so it never holds a path, an address or a secret.
"""

from collections.abc import Mapping
from http import HTTPStatus


class UvimgError(Exception):
    """An answer that is not the one asked for. `code` is zimg's number for it (see the API's table)."""

    status = 500
    sentence = "Something went wrong here; the log knows more."
    code = 0

    def __init__(self, detail: str = "", *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail or self.sentence)
        self.detail = detail or self.sentence
        self.headers = dict(headers or {})

    @property
    def title(self) -> str:
        """The status' standard phrase."""
        return HTTPStatus(self.status).phrase


class Elsewhere(Exception):
    """What was asked for in this very call is not at hand: whether it is there at all takes waiting."""


class LogicalError(UvimgError):
    """What Kyoto Tycoon answers where a record is there and should not be, or the other way round."""

    status = 450
    sentence = "The record does not allow this."

    @property
    def title(self) -> str:
        return "Logical Inconsistency"


class BadRequest(UvimgError):
    status = 400
    sentence = "The request is malformed."
    code = 4


class BadParameter(BadRequest):
    """A parameter of the query that cannot be; `parameter` names it."""

    def __init__(self, parameter: str, detail: str) -> None:
        super().__init__(detail)
        self.parameter = parameter


class NoLength(BadRequest):
    sentence = "The request has no body: Content-Length is missing or 0."
    code = 5


class Forbidden(UvimgError):
    status = 403
    sentence = "The access rules do not allow this address to do that."
    code = 3


class NotFound(UvimgError):
    status = 404
    sentence = "There is no such image."
    code = 9


class MethodNotAllowed(UvimgError):
    status = 405
    sentence = "This method is not allowed here."
    code = 2

    def __init__(self, allow: str) -> None:
        super().__init__(f"Allowed here: {allow}.", headers={"Allow": allow})


class NotAcceptable(UvimgError):
    """Accept-Encoding refuses every coding that there is, and none too (RFC 9110 15.5.7)."""

    status = 406
    sentence = "Accept-Encoding refuses all that could be sent."
    code = 4

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail, headers={"Vary": "Accept-Encoding"})


class RequestTimeout(UvimgError):
    status = 408
    sentence = "The body arrived too slowly."
    code = 4


class DigestConflict(UvimgError):
    """Another picture has the same MD5. The new one is kept, under its SHA-256 alone."""

    status = 409

    def __init__(self, sha256: str) -> None:
        super().__init__(
            f"Another image has the same MD5 and keeps that id; this one is stored under its SHA-256 {sha256}."
        )
        self.sha256 = sha256


class PreconditionFailed(UvimgError):
    status = 412
    sentence = "What the request takes for granted does not hold."


class TooLarge(UvimgError):
    status = 413
    sentence = "The body is larger than this server takes."
    code = 7


class TargetTooLong(UvimgError):
    status = 414
    sentence = "The request target is longer than is read here."


class UnsupportedType(UvimgError):
    status = 415
    sentence = "This is not an image of a type that is taken here."
    code = 1


class RangeNotSatisfiable(UvimgError):
    status = 416
    sentence = "There is no such range of bytes."

    def __init__(self, size: int) -> None:
        super().__init__(headers={"Content-Range": f"bytes */{size}"})


class ExpectationFailed(UvimgError):
    status = 417
    sentence = "The only expectation that is met here is 100-continue."


class Undecodable(UvimgError):
    status = 422
    sentence = "The image is damaged: it cannot be decoded to its end."
    code = 1


class BeyondLimits(UvimgError):
    """The header declares more than the limits allow (pixels, side, frames); nothing was decoded."""

    status = 422
    sentence = "The image declares more pixels than are allowed here."
    code = 7


class HeadTooLarge(UvimgError):
    status = 431
    sentence = "The request's head is larger than is read here."


class WorkerFailed(UvimgError):
    sentence = "The image could not be worked on: its worker stopped, twice."


class ScriptFailed(UvimgError):
    sentence = "The script of this type failed; the log knows where."


class NotImplementedHere(UvimgError):
    status = 501
    sentence = "That is not known here."
    code = 2


class Overloaded(UvimgError):
    status = 503
    sentence = "Too much work is waiting; try again in a moment."

    def __init__(self, retry_after_s: int = 1) -> None:
        super().__init__(headers={"Retry-After": str(retry_after_s)})


class TooSlow(UvimgError):
    status = 503
    sentence = "The work on this image took longer than is allowed here."

    def __init__(self) -> None:
        super().__init__(headers={"Retry-After": "10"})


class StoreDown(UvimgError):
    status = 503
    sentence = "The store does not answer; try again in a moment."

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail, headers={"Retry-After": "5"})


class VersionNotSupported(UvimgError):
    status = 505
    sentence = "HTTP/1.1 and HTTP/1.0 are spoken here."


class StoreFull(UvimgError):
    status = 507
    sentence = "The store has no room left for this."
