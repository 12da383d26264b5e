"""Every setting, declared once: flags, environment, the TOML file and its annotated example follow from it.

Later sources win: default < file < environment < flag. A key that is unknown or a value that cannot be
is an error that names the key, the value, where it came from, and what is allowed.
"""

import dataclasses
import math
import os
import re
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from uvimg.core.access import parse_network, parse_rules
from uvimg.core.backend import NEAR_SCHEMES, hide_secrets, split_cache, split_url
from uvimg.core.formats import FORMATS
from uvimg.core.place import check_places
from uvimg.core.types import NO_TABLES, BadTable, Tables, parse_tables, show_tables, show_wrong

ENVIRONMENT_PREFIX = "UVIMG_"
APPS = ("images", "kv", "documents")
# Of each app where it is served alone.
PORTS = {"images": 4869, "kv": 8080, "documents": 4869}


class ConfigError(Exception):
    """A setting that cannot be; the message is one readable line."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """All there is to know of a setting beside its value. `unit` "bytes" allows '100 MiB'."""

    name: str
    kind: Any
    default: Any
    group: str
    help: str
    low: float | None
    high: float | None
    unit: str
    choices: tuple[str, ...]
    check: Callable[[Any], object] | None
    positional: bool
    # Between the items of a list where it comes as text.
    separator: str
    # Whether its flag is given once for each item.
    repeated: bool
    # What of a value may be told in logs and errors; None for all of it.
    hide: Callable[[str], str] | None

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        if self.choices:
            several = "any of" if get_origin(self.kind) is tuple else "one of"
            return f"{several} {', '.join(self.choices)}"
        if self.kind is bool:
            return "true or false"
        if self.kind in (int, float):
            number = (
                "a size such as '100 MiB'"
                if self.unit == "bytes"
                else "a whole number"
                if self.kind is int
                else "a number"
            )
            low = self.show(self.low).strip('"')
            if self.high is not None:
                return f"{number} from {low} to {self.show(self.high)}"
            return number if self.low is None else f"{number} of at least {low}"
        if self.kind is Tables:
            return "tables [types.NAME] of w, h, p, g, x, y, r, q, f, rotate and crop = [x, y, w, h]"
        return "a list of texts" if get_origin(self.kind) is tuple else "a text"

    def show(self, value: Any) -> str:
        """A value as it is written in TOML."""
        if isinstance(value, bool):
            return "true" if value else "false"
        if self.unit == "bytes" and isinstance(value, int):
            return f'"{_show_size(value)}"'
        if isinstance(value, Tables):
            return show_tables(value)
        if isinstance(value, tuple):
            return "[" + ", ".join(_quote(item) for item in value) + "]"
        if isinstance(value, int) and abs(value) >= 100_000:
            return f"{value:_}"
        if isinstance(value, int | float):
            return f"{value:g}"
        return _quote(str(value))


def _setting(
    default: Any,
    group: str,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    choices: Sequence[str] = (),
    check: Callable[[Any], object] | None = None,
    positional: bool = False,
    separator: str = ",",
    repeated: bool = False,
    hide: Callable[[str], str] | None = None,
) -> Any:
    metadata = {
        "group": group,
        "help": help,
        "low": low,
        "high": high,
        "unit": unit,
        "choices": tuple(choices),
        "check": check,
        "positional": positional,
        "separator": separator,
        "repeated": repeated,
        "hide": hide,
    }
    return dataclasses.field(default=default, metadata=metadata)


def parse_colour(text: str) -> tuple[int, int, int]:
    """Red, green and blue from '#rrggbb'."""
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise ValueError("a colour is written #rrggbb")
    red, green, blue = bytes.fromhex(text[1:])
    return red, green, blue


# What every answer has or must not have; saying it twice would break caches, or the connection.
_OUR_HEADERS = frozenset(
    (
        *(
            "accept-ranges",
            "content-length",
            "content-range",
            "content-type",
            "date",
            "etag",
            "last-modified",
            "server",
        ),
        *("connection", "keep-alive", "trailer", "transfer-encoding", "upgrade", "x-content-type-options"),
    )
)


def parse_header(text: str) -> tuple[str, str]:
    """Name and value of a header field (RFC 9110 5.5: nothing that could end the line)."""
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(r"[ -~\t]*", value):
        raise ValueError("a header is written 'Name: value'")
    if name.lower() in _OUR_HEADERS:
        raise ValueError(f"{name} is for uvimg to say")
    return name, value.strip()


def _check_store(url: str) -> None:
    split_url(url)


def _check_cache(url: str) -> None:
    split_cache(url)


def _hide_all(value: str) -> str:
    return "***" if value else ""


def _check_each(check: Callable[[str], object]) -> Callable[[Sequence[str]], None]:
    def check_all(values: Sequence[str]) -> None:
        for value in values:
            check(value)

    return check_all


def _check_file(path: str) -> None:
    if path and not os.path.isfile(path):
        raise ValueError("there is no such file")


_SERVER, _STORE, _IMAGES, _LIMITS, _WORKERS, _ACCESS = "Server", "Store", "Images", "Limits", "Workers", "Access"
_DOCUMENTS = "Documents"
_VALUES = "Key-value"


@dataclass(frozen=True, slots=True)
class Settings:
    """The values. Sizes in bytes, times in seconds."""

    apps: tuple[str, ...] = _setting(
        APPS,
        _SERVER,
        "The apps to serve: one alone is mounted at /; of several images is, kv at /kv/ and documents at /docs/.",
        choices=APPS,
        positional=True,
    )
    host: str = _setting("127.0.0.1", _SERVER, "Address to listen on; 0.0.0.0 or :: is every interface.")
    port: int = _setting(
        4869,
        _SERVER,
        "Port to listen on; 0 takes a free one. Where kv is served alone the default is 8080.",
        low=0,
        high=65_535,
    )
    listen: tuple[str, ...] = _setting(
        (),
        _SERVER,
        "Places to listen on instead of host and port: HOST:PORT, [::1]:PORT, :PORT (every interface), unix:/path, "
        "fd:N (a socket that was opened before). The flag may be repeated.",
        check=check_places,
        repeated=True,
    )
    front_end: Literal["transport", "streams", "aiohttp"] = _setting("transport", _SERVER, "What speaks HTTP.")
    loop: Literal["uvloop", "asyncio"] = _setting("uvloop", _SERVER, "The event loop it runs on.")
    max_connections: int = _setting(20_000, _SERVER, "Connections at a time; more are closed.", low=1)
    backlog: int = _setting(
        4096, _SERVER, "Connections the kernel may hold until they are accepted.", low=1, high=65_535
    )
    processes: int = _setting(
        0,
        _SERVER,
        "Serving processes, under one more that replaces them when they die and, at SIGHUP, without a failed request; "
        "0 serves in this process alone.",
        low=0,
        high=1024,
    )
    tls_certificate: str = _setting(
        "",
        _SERVER,
        "PEM file with the certificate and its chain; with it every TCP address speaks TLS.",
        check=_check_file,
    )
    tls_key: str = _setting("", _SERVER, "PEM file with the certificate's key, not encrypted.", check=_check_file)
    keepalive_s: float = _setting(75.0, _SERVER, "How long an idle connection is kept open.", low=1, unit="s")
    grace_s: float = _setting(30.0, _SERVER, "How long requests in flight may go on after SIGTERM.", low=0, unit="s")
    drain_delay_s: float = _setting(
        0.0,
        _SERVER,
        "How long it goes on as before after SIGTERM, while its health says 503 so that balancers look elsewhere.",
        low=0,
        unit="s",
    )
    operations_listen: tuple[str, ...] = _setting(
        (),
        _SERVER,
        "Places where /health and /metrics are answered instead, in plain HTTP, to whoever can connect, to the end.",
        check=check_places,
        repeated=True,
    )
    metrics_dir: str = _setting(
        "",
        _SERVER,
        "Folder in which processes that serve together leave their numbers, so that any of them tells those of all.",
    )
    log: Literal["text", "json"] = _setting("text", _SERVER, "Form of the log on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", _SERVER, "The least that is logged.")
    access_log: bool = _setting(True, _SERVER, "Log one line for each request.")
    store: str = _setting(
        "local:./data",
        _STORE,
        "Where images live: local:DIR, memory: which forgets, or servers (see 'Beyond one machine').",
        check=_check_store,
        hide=hide_secrets,
    )
    store_timeout_s: float = _setting(
        2.0, _STORE, "How long a server behind the store is waited for, where the store is one.", low=0.05, unit="s"
    )
    tier: str = _setting(
        "",
        _STORE,
        "Folder in which this node keeps what it has seen of a store that is far away, so that it serves that at local "
        "speed; its processes may share it. Empty for none.",
    )
    tier_size: int = _setting(10 << 30, _STORE, "Most disk space that the tier takes.", low=16 << 20, unit="bytes")
    tier_valid_s: float = _setting(
        5.0,
        _STORE,
        "How long a node with a tier may go on serving what another process has deleted or replaced; what is used is "
        "looked up in the store about twice in that time. What is added elsewhere is there at once.",
        low=0.1,
        high=3600,
        unit="s",
    )
    cache: str = _setting(
        "none",
        _STORE,
        "Where renditions and compressed copies up to a megabyte are kept instead, for all nodes, and may be lost: "
        "redis://…, redis+cluster://… or memcached://… (see 'Beyond one machine'); none for in the store.",
        check=_check_cache,
        hide=hide_secrets,
    )
    cache_ttl_s: int = _setting(
        7 * 24 * 3600,
        _STORE,
        "How long the shared cache may keep one; memcached takes a month at most.",
        low=1,
        unit="s",
    )
    cache_timeout_s: float = _setting(
        0.25, _STORE, "How long the shared cache is waited for, before the work is done again.", low=0.01, unit="s"
    )
    cache_secret: str = _setting(
        "",
        _STORE,
        "A text that all nodes have and nobody else: what others have put into the shared cache does not count then. "
        "Better in the environment or the file than in a flag.",
        hide=_hide_all,
    )
    durability: Literal["commit", "os"] = _setting(
        "commit",
        _STORE,
        "commit: what was answered survives a power cut. os: about half the waiting for the disk; a power cut may undo "
        "the last commit, that is what was answered last, until the system has written it by itself (half a minute at "
        "most). Nothing older is lost, and the end of the process loses nothing either way.",
    )
    save_new: Literal["0", "1", "2"] = _setting(
        "1",
        _STORE,
        "Which renditions are kept in the store: 0 none, 1 all, 2 only those of types (t=).",
    )
    intermediates_from: int = _setting(
        2_000_000,
        _STORE,
        "Pixels from which on reduced versions of a JPEG are kept too, whatever save_new says, so that later "
        "renditions take a fraction of the work; 0 for none.",
        low=0,
    )
    intermediates_percent: int = _setting(
        100,
        _STORE,
        "Most bytes that all reduced versions of an original may take, in percent of its own; usually it is half.",
        low=1,
        high=1000,
    )
    recode: bool = _setting(
        False,
        _STORE,
        "While nothing else is to do, replace kept renditions by smaller ones that their encoder took longer over.",
    )
    cache_size: int = _setting(64 << 20, _STORE, "Memory for renditions at hand; 0 for none.", low=0, unit="bytes")
    memo_size: int = _setting(
        64 << 20,
        _STORE,
        "Memory for whole answers to requests that repeat to the byte; 0 for none.",
        low=0,
        unit="bytes",
    )
    format: Literal["jpeg", "png", "webp", "gif", "avif", "none"] = _setting(
        "jpeg", _IMAGES, "Format of a rendition where f is not given; none keeps the source's."
    )
    quality: int = _setting(75, _IMAGES, "Quality of a rendition where q is not given.", low=1, high=100)
    background: str = _setting(
        "#ffffff",
        _IMAGES,
        "Colour behind transparent pixels in JPEG, and in the corners of a turned image.",
        check=parse_colour,
    )
    allowed_types: tuple[str, ...] = _setting(
        tuple(format for format in FORMATS if format != "svg"),
        _IMAGES,
        "Types of images that may be uploaded. svg is not among them unless you put it there.",
        choices=FORMATS,
    )
    image_headers: tuple[str, ...] = _setting(
        ("Cache-Control: max-age=7776000",),
        _IMAGES,
        "Headers of every image. In the environment one a line; the flag may be repeated.",
        check=_check_each(parse_header),
        separator="\n",
        repeated=True,
    )
    types: Tables = _setting(  # noqa: RUF009 (it makes a field of a dataclass, as for all the others)
        NO_TABLES,
        _IMAGES,
        "Types of images by name, asked for with t=NAME; each is a table of parameters, such as [types.small] w = 200.",
    )
    script: str = _setting(
        "", _IMAGES, "Lua file whose function f() makes the types that no table names, as zimg's do.", check=_check_file
    )
    disable_args: bool = _setting(False, _IMAGES, "Ignore the parameters w, h, p, g, x, y, r, q and f.")
    disable_type: bool = _setting(False, _IMAGES, "Ignore the parameter t.")
    disable_zoom_up: bool = _setting(False, _IMAGES, "Never enlarge: w and h are at most the image's own.")
    fast_shrink: bool = _setting(
        False,
        _IMAGES,
        "Leave most of the scaling of JPEGs to their decoder, for a third less time. Photographs lose nothing that can"
        " be measured (below 0.1 dB), drawings up to 0.8 dB and small text up to 2.7 dB, at quality 75.",
    )
    webp_effort: int = _setting(
        2, _IMAGES, "Work on a smaller WebP, 0 fastest: 0 takes half as long as 2 for 3 % more bytes.", low=0, high=6
    )
    avif_effort: int = _setting(
        1,
        _IMAGES,
        "Work on a smaller AVIF, 0 fastest. 0 does as well on photographs in two thirds of the time, and takes a fifth"
        " more bytes for drawings and text; 2 takes three times as long for nothing, 4 twenty times for 20 % less.",
        low=0,
        high=9,
    )
    gif_effort: int = _setting(3, _IMAGES, "Work on a smaller GIF, 1 fastest.", low=1, high=10)
    png_compression: int = _setting(6, _IMAGES, "zlib level of PNG, 0 fastest.", low=0, high=9)
    index_page: str = _setting("", _IMAGES, "HTML file to show at / instead of the built-in page.", check=_check_file)
    admin_page: str = _setting(
        "", _IMAGES, "HTML file to show at /admin instead of the built-in page.", check=_check_file
    )
    document_write_rule: str = _setting(
        "allow 127.0.0.0/8; allow ::1",
        _DOCUMENTS,
        "Who may put documents, also in place of others'. Where documents are served alone the default is allow all.",
        check=parse_rules,
    )
    document_headers: tuple[str, ...] = _setting(
        (
            "Cache-Control: no-cache",
            "Content-Security-Policy: sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts",
        ),
        _DOCUMENTS,
        "Headers of every document. The sandbox keeps a stored page from acting on this server in the name of whoever "
        "looks at it; leave it out only where all who may upload are trusted. In the environment one a line; the flag "
        "may be repeated.",
        check=_check_each(parse_header),
        separator="\n",
        repeated=True,
    )
    zstd_level: int = _setting(3, _DOCUMENTS, "How hard zstd works while a client waits, 1 fastest.", low=1, high=19)
    coded_copies: Literal["none", "first", "best"] = _setting(
        "best",
        _DOCUMENTS,
        "Which compressed copies are kept in the store: none, the first that was made, or the best, which is made "
        "when nobody waits.",
    )
    coding_memory: int = _setting(
        256 << 20,
        _DOCUMENTS,
        "Memory for compressing while clients wait, half of it for what ?compression= chooses. In each half at most "
        "100 wait for room; where there is none soon, all but those who chose get a document as it is.",
        low=1 << 20,
        unit="bytes",
    )
    compression_parameter: bool = _setting(
        True, _DOCUMENTS, "Let ?compression=none|gzip|zstd&level=N choose how a document is compressed."
    )
    max_size: int = _setting(100 << 20, _LIMITS, "Largest upload.", low=1, unit="bytes")
    max_pixels: int = _setting(75_000_000, _LIMITS, "Most pixels an upload may declare, over all its frames.", low=1)
    max_side: int = _setting(16_384, _LIMITS, "Longest side an upload may declare, in pixels.", low=1, high=65_535)
    max_frames: int = _setting(1_000, _LIMITS, "Most frames an upload may declare.", low=1)
    max_progressive_pixels: int = _setting(
        40_000_000,
        _LIMITS,
        "Most pixels of a progressive JPEG or interlaced PNG, which has to be held in memory whole.",
        low=1,
    )
    max_output_side: int = _setting(
        10_000, _LIMITS, "Longest side of a rendition that enlarges, in pixels.", low=1, high=65_535
    )
    max_output_pixels: int = _setting(50_000_000, _LIMITS, "Most pixels of a rendition that enlarges.", low=1)
    max_output_frames: int = _setting(100, _LIMITS, "Most frames that a rendition keeps of an animation.", low=1)
    kv_dialect: Literal["olegdb", "kyoto"] = _setting(
        "olegdb",
        _VALUES,
        "Whose answers kv gives where OlegDB and Kyoto Tycoon differ: to POST, PUT and DELETE of a key.",
    )
    kv_max_size: int = _setting(64 << 20, _VALUES, "Largest value.", low=1, high=99_999_999, unit="bytes")
    kv_read_rule: str = _setting("allow all", _VALUES, "Who may read values and list keys.", check=parse_rules)
    kv_write_rule: str = _setting(
        "allow 127.0.0.0/8; allow ::1",
        _VALUES,
        "Who may write and delete values, and call procedures. Where kv is served alone the default is allow all.",
        check=parse_rules,
    )
    workers: int = _setting(
        0,
        _WORKERS,
        "Image worker processes; 0 is one for each core, by CPU affinity and a container's quota. As many more, which "
        "are nice to these, come and go with slow jobs.",
        low=0,
        high=1024,
    )
    queue_limit: int = _setting(
        1000,
        _WORKERS,
        "Image jobs that may wait, uploads and fast renditions each; more are answered 503 at once.",
        low=0,
        high=100_000,
    )
    slow_queue_limit: int = _setting(
        100,
        _WORKERS,
        "Renditions that may wait of those that are predicted to be slow (AVIF, large sources, long animations); the "
        "fast ones do not wait for them.",
        low=0,
        high=100_000,
    )
    worker_timeout_s: float = _setting(
        30.0,
        _WORKERS,
        "Longest time for one image job, past which its worker is killed, and longest wait for a worker.",
        low=0.1,
        unit="s",
    )
    worker_memory: int = _setting(4 << 30, _WORKERS, "Address space of a worker; 0 for no limit.", low=0, unit="bytes")
    worker_jobs: int = _setting(10_000, _WORKERS, "Jobs after which a worker is replaced; 0 for never.", low=0)
    sandbox: Literal["auto", "require", "off"] = _setting(
        "auto",
        _WORKERS,
        "Confine workers (no new privileges, Landlock, seccomp): as far as the kernel can, or not at all; "
        "with require uvimg does not start without Landlock.",
    )
    upload_rule: str = _setting("allow all", _ACCESS, "Who may upload images.", check=parse_rules)
    download_rule: str = _setting(
        "allow all", _ACCESS, "Who may see images, their facts, and documents.", check=parse_rules
    )
    admin_rule: str = _setting(
        "allow 127.0.0.0/8; allow ::1",
        _ACCESS,
        "Who may delete images and documents, and see /admin.",
        check=parse_rules,
    )
    trusted_proxies: tuple[str, ...] = _setting(
        (),
        _ACCESS,
        "Addresses and networks of your proxies, whose X-Forwarded-For or Forwarded is believed.",
        check=_check_each(parse_network),
    )


GROUP_NOTES = {
    _ACCESS: "Rules are 'allow|deny ADDRESS|ADDRESS/MASK|all', joined by ';'. The first that matches decides."
}


@cache
def declarations() -> tuple[Declaration, ...]:
    """Every setting, in order."""
    hints = typing.get_type_hints(Settings)
    found: list[Declaration] = []
    for item in dataclasses.fields(Settings):
        metadata = dict(item.metadata)
        kind = hints[item.name]
        if get_origin(kind) is Literal:
            metadata["choices"] = get_args(kind)
        found.append(Declaration(name=item.name, kind=kind, default=item.default, **metadata))
    return tuple(found)


def load(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, config_file: str | None = None
) -> Settings:
    """The settings from all four sources. ConfigError for the first that cannot be."""
    environment = os.environ if environment is None else environment
    by_name = {declaration.name: declaration for declaration in declarations()}
    values: dict[str, Any] = {}
    path = config_file or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    if path:
        for key, value in _read_file(path).items():
            _put(values, by_name, key, value, f"in {path}")
    for key, value in environment.items():
        if key.startswith(ENVIRONMENT_PREFIX) and key != f"{ENVIRONMENT_PREFIX}CONFIG":
            name = key.removeprefix(ENVIRONMENT_PREFIX)
            _put(values, by_name, name.lower() if name.isupper() else name, value, f"from the environment's {key}")
    for key, value in flags.items():
        if value is not None:
            flag = key if key in by_name and by_name[key].positional else "--" + key.replace("_", "-")
            _put(values, by_name, key, value, f"from {flag}")
    apps = values.get("apps", APPS)
    if "port" not in values and len(apps) == 1:
        values["port"] = PORTS[apps[0]]
    # Beside images nobody expects that whoever may see one may empty a database, or put a page in another's place.
    if tuple(apps) == ("kv",):
        values.setdefault("kv_write_rule", "allow all")
    if tuple(apps) == ("documents",):
        values.setdefault("document_write_rule", "allow all")
    settings = Settings(**values)
    _check_together(settings)
    return settings


def _check_together(settings: Settings) -> None:
    if settings.recode and settings.store.startswith("memcached:"):
        raise ConfigError("recode goes through all renditions, which a memcached store cannot list")
    if bool(settings.tls_certificate) != bool(settings.tls_key):
        raise ConfigError("tls_certificate and tls_key go together: give both or none")
    both = [place for place in settings.listen if place in settings.operations_listen and not place.endswith(":0")]
    if both:
        raise ConfigError(f"listen and operations_listen both name {both[0]}")
    if settings.processes and settings.store == "memory:":
        raise ConfigError(f"processes = {settings.processes}: each process would have a memory: store of its own")
    scheme = split_url(settings.store)[0]
    if settings.tier and scheme in NEAR_SCHEMES:
        raise ConfigError(f"tier is for a store that is far away, and {scheme}: is as near as a tier would be")


def _read_file(path: str) -> dict[str, Any]:
    try:
        return _parse_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _parse_toml(text: str) -> dict[str, Any]:
    """ValueError, with words, where it is none."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _put(values: dict[str, Any], by_name: Mapping[str, Declaration], key: str, value: Any, origin: str) -> None:
    if key not in by_name:
        shown = key if key.isprintable() else show_wrong(key)
        raise ConfigError(f"unknown setting {shown} ({origin}); 'uvimg config' lists those there are")
    declaration = by_name[key]
    try:
        values[key] = _convert(declaration, value)
        if declaration.check is not None:
            declaration.check(values[key])
    except BadTable as exc:
        # It says itself which key it is, and the whole would be a long line.
        raise ConfigError(f"{exc} ({origin})") from None
    except ValueError as exc:
        allowed = str(exc) or f"it must be {declaration.allowed}"
        raise ConfigError(f"{key} = {show_wrong(_hide(declaration, value))} ({origin}): {allowed}") from None


def _convert(declaration: Declaration, value: Any) -> Any:
    """A value of the declared kind, from TOML or from text. ValueError, without words, when it is none."""
    kind = declaration.kind
    if kind is Tables:
        return parse_tables(_read_table(value) if isinstance(value, str) else value)
    if get_origin(kind) is tuple:
        items = value
        if isinstance(value, str):
            items = [item.strip() for item in value.split(declaration.separator) if item.strip()]
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise ValueError
        if declaration.choices and (not items or not set(items) <= set(declaration.choices)):
            raise ValueError
        return tuple(items)
    if declaration.choices:
        # A number in TOML may stand for a choice that looks like one.
        text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if text not in declaration.choices:
            raise ValueError
        return text
    if kind is bool:
        if isinstance(value, str):
            value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(value.lower())
        if not isinstance(value, bool):
            raise ValueError
        return value
    if kind in (int, float):
        return _convert_number(declaration, value)
    if not isinstance(value, str):
        raise ValueError
    return value


def _read_table(text: str) -> Any:
    """A table written on one line, which is how it comes in the environment."""
    try:
        parsed = _parse_toml(f"table = {text or '{}'}")
    except ValueError as exc:
        raise ValueError(f"written on one line it is a table as in TOML, {{small = {{w = 200}}}}: {exc}") from None
    if parsed.keys() != {"table"}:
        raise ValueError("one table, in braces")
    return parsed["table"]


def _convert_number(declaration: Declaration, value: Any) -> int | float:
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        size = _SIZE.fullmatch(text) if declaration.unit == "bytes" else None
        try:
            number = int(size[1]) * _UNITS[size[2].lower()] if size else declaration.kind(text)
        except ValueError:
            raise ValueError from None
    elif isinstance(value, bool) or not isinstance(value, int if declaration.kind is int else int | float):
        raise ValueError
    else:
        number = declaration.kind(value)
    # Written so that NaN fails too.
    if (
        not (isinstance(number, int) or math.isfinite(number))
        or not (declaration.low is None or number >= declaration.low)
        or not (declaration.high is None or number <= declaration.high)
    ):
        raise ValueError
    return number


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]iB|B|)", re.IGNORECASE | re.ASCII)


def _show_size(size: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B" if size else "0"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def changed(settings: Settings) -> dict[str, str]:
    """The settings that differ from their defaults, as TOML shows them, without secrets."""
    return {
        declaration.name: declaration.show(_hide(declaration, getattr(settings, declaration.name)))
        for declaration in declarations()
        if getattr(settings, declaration.name) != declaration.default
    }


def _hide(declaration: Declaration, value: Any) -> Any:
    """A value as it may be told to whoever reads a log."""
    return declaration.hide(value) if declaration.hide is not None and isinstance(value, str) else value


def to_environment(settings: Settings) -> dict[str, str]:
    """The variables that say all of these settings, so that nothing is left for a file to say."""
    spelled: dict[str, str] = {}
    for declaration in declarations():
        value = getattr(settings, declaration.name)
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, Tables):
            text = declaration.show(value)
        else:
            text = declaration.separator.join(value) if isinstance(value, tuple) else str(value)
        spelled[ENVIRONMENT_PREFIX + declaration.name.upper()] = text
    return spelled


def to_toml(settings: Settings | None = None) -> str:
    """An annotated configuration file. Without settings it shows every default, commented out."""
    lines = [
        "# uvimg's settings. What is commented out is the default.",
        "# An environment variable (UVIMG_PORT) wins over this file, a flag (--port) over both.",
    ]
    group = ""
    for declaration in declarations():
        if declaration.group != group:
            group = declaration.group
            lines += ["", f"# {group}", *([f"# {GROUP_NOTES[group]}"] if group in GROUP_NOTES else [])]
        value = declaration.default if settings is None else getattr(settings, declaration.name)
        comment = "# " if value == declaration.default else ""
        lines += ["", f"# {declaration.help}", f"# Allowed: {declaration.allowed}."]
        lines.append(f"{comment}{declaration.name} = {declaration.show(value)}")
    return "\n".join(lines) + "\n"


def to_markdown() -> str:
    """The table of settings in the README."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for declaration in declarations():
        help_text = declaration.help.replace("|", "\\|")
        lines.append(f"| `{declaration.name}` | `{declaration.show(declaration.default)}` | {help_text} |")
    return "\n".join(lines) + "\n"
