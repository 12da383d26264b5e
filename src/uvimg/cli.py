"""The `uvimg` command: serve · put · kv · echo · copy · import-zimg · scrub · gc · config.

Whatever goes wrong is one readable line on stderr and exit status 2 (asked wrongly), 1 (found damage or
could not do it), never a traceback.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, get_origin

from uvimg import __version__, config
from uvimg.config import ConfigError, Settings
from uvimg.core.backend import hide_secrets, split_url
from uvimg.core.errors import NotFound, NotImplementedHere, UvimgError
from uvimg.core.keyvalue import check_database, name_record, show_key
from uvimg.core.types import Tables
from uvimg.put import CannotPut, find_items, put_by_url, put_into_store, split_destination
from uvimg.store import Finding, open_store

if TYPE_CHECKING:
    from uvimg.apps.values import Values
    from uvimg.web.echo import Style


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    parser = _make_parser()
    arguments = vars(parser.parse_args(argv))
    command, path = arguments.pop("command"), arguments.pop("config", None)
    # No app named is not the same as no app.
    if not arguments.get("apps"):
        arguments.pop("apps", None)
    own = {
        *("sources", "destination", "certificate", "dry_run", "defaults", "markdown", "supervisor_pid"),
        *("action", "database", "databases", "key", "file", "style"),
        *("origin", "target", "ids", "renditions"),
    }
    options = {name: arguments.pop(name) for name in own & arguments.keys()}
    try:
        settings = config.load(arguments, config_file=path)
        match command:
            case "serve" if settings.processes:
                return _supervise(settings, arguments, path)
            case "serve":
                return _serve(settings, **options)
            case "kv":
                return asyncio.run(_work_on_values(settings, **options))
            case "put":
                return asyncio.run(_put(settings, **options))
            case "echo":
                return _echo(settings, **options)
            case "copy":
                return asyncio.run(_copy(settings, **options))
            case "import-zimg":
                return _import_zimg(settings, **options)
            case "scrub":
                return asyncio.run(_scrub(settings))
            case "gc":
                return asyncio.run(_collect(settings, dry_run=options["dry_run"]))
            case _:
                return _show_config(settings, **options)
    except ConfigError as exc:
        return _complain(str(exc), 2)
    except CannotPut as exc:
        return _complain(str(exc), 1)
    except NotImplementedHere as exc:
        return _complain(exc.detail, 2)
    except UvimgError as exc:
        return _complain(exc.detail, 1)
    except ValueError as exc:
        # A store that this command has no use for.
        return _complain(str(exc), 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has seen enough; but work that stopped in the middle is not done.
        return 0 if command in ("kv", "config") else 128 + signal.SIGPIPE
    except OSError as exc:
        # Such as a full disk under what is printed.
        return _complain(exc.strerror or str(exc), 1)


def _complain(text: str, status: int) -> int:
    print(f"uvimg: {text}", file=sys.stderr)
    return status


def _announce(line: str) -> None:
    # Also into a pipe at once: somebody waits for it.
    print(line, flush=True)


def _supervise(settings: Settings, arguments: Mapping[str, Any], path: str | None) -> int:
    from uvimg.supervisor import ChildFailed, Supervisor
    from uvimg.web.listen import CannotListen

    # A fresh interpreter, so that new code is what runs after a reload.
    command = [sys.executable, "-P", "-m", "uvimg", "serve", f"--supervisor-pid={os.getpid()}"]
    supervisor = Supervisor(settings, lambda: config.load(arguments, config_file=path), command)
    try:
        asyncio.run(supervisor.run(_announce))
    except CannotListen as exc:
        return _complain(str(exc), 1)
    except OSError as exc:
        return _complain(f"cannot start: {exc}", 1)
    except ChildFailed as exc:
        # It has said why itself.
        return max(exc.status, 1)
    return 0


def _serve(settings: Settings, supervisor_pid: int | None) -> int:
    if supervisor_pid is not None:
        # By what lets it finish: nobody but us knows what is in flight.
        from uvimg.imaging.confine import die_with_parent

        die_with_parent(supervisor_pid, signal.SIGTERM)
    # Only here: the other commands need neither loop nor server.
    from uvimg.app import serve
    from uvimg.assembly import CannotStart
    from uvimg.imaging.pool import WorkerDied

    try:
        with _make_runner(settings) as runner:
            runner.run(serve(settings, _announce, supervised=supervisor_pid is not None))
    except (CannotStart, WorkerDied) as exc:
        return _complain(str(exc), 1)
    return 0


async def _put(settings: Settings, sources: Sequence[str], destination: str, certificate: str) -> int:
    from tqdm import tqdm

    base, path = split_destination(destination)
    found = find_items(sources, path)
    for note in found.notes:
        print(f"uvimg: {note}", file=sys.stderr)
    total = sum(item.size for item in found.items)
    # disable=None: only where somebody watches.
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False) as bar:
        if base:
            await put_by_url(found.items, base, certificate, bar.update, bar.set_description)
        else:
            await put_into_store(found.items, settings.store, bar.update, bar.set_description)
    count = len(found.items)
    print(f"put {count} {'document' if count == 1 else 'documents'}, {total:,} bytes, to {destination}")
    return 0


def _echo(settings: Settings, style: "Style") -> int:
    from uvimg.web.echo import EchoServer
    from uvimg.web.listen import CannotListen, choose_places, open_sockets, show_address

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        with open_sockets(choose_places(settings.listen, settings.host, settings.port)) as (listeners,):
            server = EchoServer(style, settings.backlog)
            await server.start(listeners)
            where = " ".join(show_address(listener, "tcp") for listener in listeners)
            _announce(f"uvimg {__version__} echoes at {where}  (style {style}, loop {settings.loop})")
            await stop.wait()
            await server.stop()

    try:
        with _make_runner(settings) as runner:
            runner.run(serve())
    except CannotListen as exc:
        return _complain(str(exc), 1)
    return 0


def _make_runner(settings: Settings) -> asyncio.Runner:
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop if settings.loop == "uvloop" else asyncio.new_event_loop)


async def _copy(settings: Settings, origin: str, target: str, *, renditions: bool) -> int:
    from uvimg.apps.copying import Counts, copy

    (scheme, place), (other, where) = split_url(origin), split_url(target)
    if scheme == other and (
        os.path.realpath(place) == os.path.realpath(where) if scheme == "local" else place == where
    ):
        return _complain("a store cannot be copied into itself", 2)
    if "memory" in (scheme, other):
        return _complain("memory: is empty at every start and forgets at the end", 2)
    counts = Counts()
    async with contextlib.AsyncExitStack() as stack:
        source = open_store(origin, create=False, timeout_s=settings.store_timeout_s)
        stack.push_async_callback(source.close)
        into = open_store(target, durability=settings.durability, timeout_s=settings.store_timeout_s)
        stack.push_async_callback(into.close)
        # How many are renditions takes a walk over them.
        measures = source.measure() if renditions else None
        total = measures.names if measures else None
        try:
            await _walk(copy(source, into, counts, renditions=renditions), "names", total)
        finally:
            told = f"{counts.copied} names copied ({counts.bytes:,} bytes of blobs), {counts.there} were there"
            print(f"{told}, {counts.failed} failed" if counts.failed else told)
    return 1 if counts.failed else 0


def _import_zimg(settings: Settings, origin: str, ids: str) -> int:
    from uvimg import logs
    from uvimg.assembly import CannotStart, open_originals
    from uvimg.imaging.pool import WorkerDied
    from uvimg.zimg import CannotImport, Counts, import_images, open_zimg

    if settings.store == "memory:":
        return _complain("memory: is empty at every start and forgets at the end", 2)
    logs.set_up(settings.log, "error")
    counts = Counts()

    async def work() -> None:
        zimg = open_zimg(origin, ids, settings.max_size, settings.store_timeout_s)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(zimg.close)
            store, originals, workers = await stack.enter_async_context(open_originals(settings))
            try:
                await _walk(import_images(zimg, originals, store, counts, 2 * workers), "originals")
            finally:
                told = f"{counts.imported} originals imported, {counts.there} were there"
                print(f"{told}, {counts.failed} failed" if counts.failed else told)

    try:
        with _make_runner(settings) as runner:
            runner.run(work())
    except (CannotImport, CannotStart, WorkerDied) as exc:
        return _complain(str(exc), 1)
    return 1 if counts.failed else 0


async def _scrub(settings: Settings) -> int:
    store = open_store(settings.store, create=False, timeout_s=settings.store_timeout_s)
    try:
        damaged = await _walk(store.scrub(), "blobs verified", await store.size())
    finally:
        await store.close()
    if damaged:
        return _complain(f"{damaged} damaged in {hide_secrets(settings.store)}", 1)
    print(f"no damage found in {hide_secrets(settings.store)}")
    return 0


async def _collect(settings: Settings, *, dry_run: bool) -> int:
    store = open_store(settings.store, create=False, timeout_s=settings.store_timeout_s)
    try:
        removed = await _walk(store.collect(dry_run=dry_run), "removed")
    finally:
        await store.close()
    print(f"{removed} {'would be removed' if dry_run else 'removed'} from {hide_secrets(settings.store)}")
    return 0


async def _work_on_values(settings: Settings, action: str, **options: Any) -> int:
    """One of the commands below `uvimg kv`, on the store itself, beside a service or without one."""
    from uvimg.apps.values import Values, read_pieces

    if settings.store == "memory:":
        return _complain("memory: is empty at every start and forgets at the end", 2)
    store = open_store(settings.store, create=action in ("put", "load"), durability=settings.durability)
    values = Values(store, settings.kv_max_size, time.time)
    try:
        match action:
            case "list":
                await _list_values(values, options["database"])
            case "get":
                found = await values.read(name_record(os.fsencode(options["database"]), os.fsencode(options["key"])))
                if found is None:
                    return _complain("there is no such key", 1)
                async for piece in read_pieces(found[1]):
                    sys.stdout.buffer.write(piece)
                sys.stdout.flush()
            case "put":
                await _put_value(values, options["database"], options["key"], options["file"])
            case "dump":
                await _dump_values(values, options["databases"])
            case _:
                await _load_values(values, options["file"])
    except OSError as exc:
        if isinstance(exc, BrokenPipeError):
            raise
        return _complain(str(exc), 1)
    finally:
        await store.close()
    return 0


async def _list_values(values: "Values", database: str | None) -> None:
    """Databases and how many records each has, or the keys of one."""
    counts = await values.databases()
    if database is None:
        for name, count in sorted(counts.items()):
            sys.stdout.buffer.write(b"%b\t%d\n" % (show_key(name), count))
    else:
        async for key, _ in values.live(_check_there(database, counts)):
            sys.stdout.buffer.write(show_key(key) + b"\n")
    sys.stdout.flush()


def _check_there(name: str, counts: Mapping[bytes, int]) -> bytes:
    database = check_database(os.fsencode(name))
    if database not in counts:
        raise NotFound(f"There is no database {name!a}.")
    return database


async def _put_value(values: "Values", database: str, key: str, path: str) -> None:
    from uvimg.apps.values import UNTYPED

    name = name_record(os.fsencode(database), os.fsencode(key))
    with _open_input(path) as file:

        async def pieces() -> AsyncIterator[bytes]:
            while piece := file.read(1 << 18):
                yield piece

        async with values.receive(pieces()) as received:
            await values.write(name, received, UNTYPED, None, lambda old: None)


async def _dump_values(values: "Values", names: Sequence[str]) -> None:
    from tqdm import tqdm

    from uvimg.apps.dumps import dump

    counts = await values.databases()
    databases = [_check_there(name, counts) for name in names] or sorted(counts)
    total = sum(counts.get(database, 0) for database in databases)
    with tqdm(total=total, unit=" records", unit_scale=True, disable=None, leave=False) as bar:
        async for line in dump(values, databases, bar.update):
            sys.stdout.buffer.write(line)
    sys.stdout.flush()


async def _load_values(values: "Values", path: str) -> None:
    from tqdm import tqdm

    from uvimg.apps.dumps import load

    with _open_input(path) as file, tqdm(unit=" records", unit_scale=True, disable=None, leave=False) as bar:
        loaded = await load(values, file, bar.update)
    print(f"{loaded} records loaded")


def _open_input(path: str) -> BinaryIO:
    return sys.stdin.buffer if path == "-" else open(path, "rb")


async def _walk(findings: AsyncIterator[Finding], unit: str, total: int | None = None) -> int:
    """Follow a long walk, with a bar on a terminal and a line for each note; how many there were."""
    from tqdm import tqdm

    noted = 0
    # disable=None: only where somebody watches.
    with tqdm(total=total, unit=f" {unit}", unit_scale=True, disable=None, leave=False) as bar:
        async for finding in findings:
            bar.update()
            if finding.note:
                noted += 1
                bar.write(f"{finding.subject}: {finding.note}")
    return noted


def _show_config(settings: Settings, *, defaults: bool, markdown: bool) -> int:
    print(config.to_markdown() if markdown else config.to_toml(None if defaults else settings), end="")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="uvimg",
        description="Upload an image once, get any size of it, fast, from one small service.",
        epilog="Every setting can also be given as an environment variable (UVIMG_PORT) or in a TOML file "
        "(--config FILE); 'uvimg config' shows what is in force. A flag wins over the environment, that over the file.",
    )
    parser.add_argument("--version", action="version", version=f"uvimg {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        usage="uvimg serve [--config FILE] [--SETTING VALUE …] [APP …]",
        help="serve images, values and documents over HTTP",
        description="Serve images, values under keys and documents over HTTP until SIGTERM or Ctrl-C.",
        epilog="Then: curl --data-binary @photo.jpg http://127.0.0.1:4869/upload",
    )
    serve.add_argument("--supervisor-pid", type=int, help=argparse.SUPPRESS)
    _add_settings(serve)
    put = commands.add_parser(
        "put",
        usage="uvimg put [--store STORE] FILE|FOLDER … DESTINATION",
        help="store files as documents",
        description="Store files, and all that is in folders, as documents. DESTINATION is a URL of a running server "
        "(http://127.0.0.1:4869/docs/manual/), or a path (/manual/), which goes straight into --store. With a slash at "
        "its end, files keep their names in it.",
    )
    put.add_argument("sources", nargs="+", metavar="FILE|FOLDER")
    put.add_argument("destination", metavar="DESTINATION")
    put.add_argument("--certificate", default="", metavar="FILE", help="PEM file to trust an https server by")
    echo = commands.add_parser(
        "echo",
        help="echo raw TCP, to measure with",
        description="Send back whatever comes, over TCP or a unix socket, in one process, until SIGTERM or Ctrl-C. "
        "Each style is another way to write the same server; buffered is the fast one.",
        epilog="Then: printf 'hello\\n' | nc -N 127.0.0.1 4869",
    )
    echo.add_argument(
        "--style",
        choices=("protocol", "buffered", "streams", "curio-streams", "sockets"),
        default="buffered",
        help="how the server is written. Default: buffered",
    )
    _add_settings(echo, only=("host", "port", "listen", "loop", "backlog"))
    copy = commands.add_parser(
        "copy",
        usage="uvimg copy [--no-renditions] FROM TO",
        help="copy a store into another",
        description="Copy all that is in one store into another, whatever either stands on: images, values and "
        "documents, with their renditions. Every blob is held against its address on its way; what is damaged is "
        "told, and the exit status is 1 then. Stopped, it can be begun again: what is there already is left. A "
        "service may be running on either.",
        epilog="uvimg copy local:./data redis://127.0.0.1",
    )
    copy.add_argument("origin", metavar="FROM", help="a store, written as for --store")
    copy.add_argument("target", metavar="TO", help="another one")
    copy.add_argument(
        "--renditions",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="copy what can be made again too. Default: yes",
    )
    import_ = commands.add_parser(
        "import-zimg",
        usage="uvimg import-zimg [--store STORE] [--ids FILE] FOLDER|redis://HOST:PORT|memcached://HOST:PORT",
        help="take over the images of a zimg",
        description="Store the originals of a zimg under the ids that its clients know: from its img_path (mode 1), or "
        "from the server that it kept them on (modes 2 and 3). "
        "Each is hashed and decoded like an upload; what is damaged, or no image, is told, and the exit status is 1 "
        "then. Stopped, it can be begun again. The service may be running.",
        epilog="uvimg import-zimg /opt/zimg/img",
    )
    import_.add_argument("origin", metavar="FOLDER|URL", help="its img_path, or the server of its modes 2 and 3")
    import_.add_argument(
        "--ids",
        default="",
        metavar="FILE",
        help="the MD5s of what is to be imported, one a line, - for stdin: for servers that cannot list their keys",
    )
    scrub = commands.add_parser(
        "scrub",
        help="verify every stored blob",
        description="Read every blob in the store and hold it against its address. Damage is listed, and the "
        "exit status is 1 then. The service may be running.",
    )
    collect = commands.add_parser(
        "gc",
        help="remove what nobody names",
        description="Remove blobs that no name points at, renditions of images that are gone, and what interrupted "
        "uploads left behind. The service may be running.",
    )
    collect.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    show = commands.add_parser(
        "config",
        usage="uvimg config [--defaults | --markdown] [--config FILE] [--SETTING VALUE …] [APP …]",
        help="show the settings in force",
        description="Show the settings in force as an annotated TOML file, fit for --config.",
    )
    show.add_argument("--defaults", action="store_true", help="show the defaults alone, all commented out")
    show.add_argument("--markdown", action="store_true", help="show the defaults as a table")
    _add_settings(show)
    for command in (put, scrub, collect):
        _add_settings(command, only=("store", "store_timeout_s"))
    _add_settings(copy, only=("durability", "store_timeout_s"))
    _add_settings(import_, only=(*_OF_ORIGINALS, "store", "store_timeout_s", "durability"))
    _add_kv(commands)
    return parser


# What says which images are taken in, and how they are looked at.
_OF_ORIGINALS = (
    *("allowed_types", "max_pixels", "max_side", "max_frames", "max_progressive_pixels"),
    *("max_size", "workers", "worker_timeout_s", "worker_memory", "sandbox"),
)


def _add_kv(commands: Any) -> None:
    """`uvimg kv` and what is below it."""
    kv = commands.add_parser(
        "kv",
        help="list, get, put, dump and load values",
        description="Work on the values under keys in a store. The service may be running.",
    )
    actions = kv.add_subparsers(dest="action", metavar="ACTION", required=True)
    list_ = actions.add_parser(
        "list",
        help="databases and their counts, or the keys of one",
        description="Show every database and how many records it has, or the keys of one, with control characters "
        "and % percent-encoded.",
    )
    list_.add_argument("database", nargs="?", metavar="DATABASE")
    get = actions.add_parser("get", help="write a value to stdout", description="Write a value to stdout.")
    put = actions.add_parser("put", help="store a value", description="Store a value from a file or from stdin.")
    for action in (get, put):
        action.add_argument("database", metavar="DATABASE")
        action.add_argument("key", metavar="KEY")
    put.add_argument("file", nargs="?", default="-", metavar="FILE", help="- is stdin, and the default")
    dump = actions.add_parser(
        "dump",
        help="write values to stdout, for load",
        description="Write all values, or those of some databases, to stdout as lines of JSON that say what they are, "
        "with type and time of expiry.",
        epilog="uvimg kv dump > values.ndjson; uvimg kv load --store local:elsewhere values.ndjson",
    )
    dump.add_argument("databases", nargs="*", metavar="DATABASE")
    load = actions.add_parser(
        "load",
        help="store what dump wrote",
        description="Store what dump wrote, over what is there under the same keys. A dump that is damaged or cut is "
        "told, with how many records were loaded before that place.",
    )
    load.add_argument("file", nargs="?", default="-", metavar="FILE", help="- is stdin, and the default")
    for action in (list_, get, put, dump, load):
        _add_settings(action, only=("store", "durability", "kv_max_size"))


def _add_settings(parser: argparse.ArgumentParser, only: Sequence[str] | None = None) -> None:
    """A flag for each setting. Values stay text here: config.load judges those of every source alike."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (environment: UVIMG_CONFIG)")
    groups: dict[str, Any] = {}
    for declaration in config.declarations():
        if only is not None and declaration.name not in only:
            continue
        group = groups.get(declaration.group)
        if group is None:
            group = groups[declaration.group] = parser.add_argument_group(
                declaration.group.lower(), config.GROUP_NOTES.get(declaration.group)
            )
        text = f"{declaration.help} Default: {declaration.show(declaration.default)}".replace("%", "%%")
        flag = "--" + declaration.name.replace("_", "-")
        if declaration.positional:
            choices = "|".join(declaration.choices)
            parser.add_argument(declaration.name, nargs="*", default=None, metavar=choices, help=text)
        elif declaration.kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif declaration.repeated:
            metavar = "LINE" if declaration.separator == "\n" else "PLACE"
            group.add_argument(flag, action="append", metavar=metavar, help=text)
        else:
            several = get_origin(declaration.kind) is tuple
            metavar = "A,B,…" if several else "|".join(declaration.choices) or _metavar(declaration)
            group.add_argument(flag, default=None, metavar=metavar, help=text)


def _metavar(declaration: config.Declaration) -> str:
    if declaration.unit == "bytes":
        return "SIZE"
    if declaration.unit == "s":
        return "SECONDS"
    if declaration.kind is Tables:
        return "TABLE"
    return "N" if declaration.kind is int else "TEXT"
