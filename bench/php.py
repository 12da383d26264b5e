"""nginx and PHP: the rival of zimg's tables, by Debian's php-fpm with GD or ImageMagick and a script of the same job.

PHP's processes wait and work by turns, so there are two for each core that they have.
"""

import os
import string
import tempfile
from pathlib import Path

from bench import nginx
from bench.exchange import Ask
from bench.programs import find_fpm, lacks_php
from bench.serving import Address, BenchError, Launch
from bench.site import FILE_NAMES, ZIMG_TASK, Content, Site, Variant
from bench.work import Walk

_SCRIPTS = Path(__file__).parent / "rivals" / "php"
_CHILDREN = 2
_PLACE = """
            fastcgi_pass behind;
            fastcgi_buffers 16 16k;
            fastcgi_param SCRIPT_FILENAME $script;
            fastcgi_param REQUEST_METHOD $request_method;
            fastcgi_param REQUEST_URI $request_uri;
            fastcgi_param QUERY_STRING $query_string;
            fastcgi_param HTTP_ACCEPT_ENCODING $http_accept_encoding;
            fastcgi_param FOLDER $folder;
            fastcgi_param ENGINE $engine;
            fastcgi_param KEPT $kept;"""


def launch(
    site: Site, files: Path, script: str, processes: int = 1, *, engine: str = "", keeps: bool = False
) -> Launch:
    """nginx before so many processes' worth of PHP, which runs a script of ours on these files."""
    folder = Path(tempfile.mkdtemp(prefix="php-", dir=site.folder))
    socket = folder / "fpm.sock"
    conf = folder / "fpm.conf"
    conf.write_text(
        string.Template((_SCRIPTS / "fpm.conf.in").read_text()).safe_substitute(
            USER="user = root" if os.geteuid() == 0 else "",
            FOLDER=folder,
            SOCKET=socket,
            CHILDREN=_CHILDREN * processes,
        )
    )
    place = _PLACE
    for name, value in (
        ("script", _SCRIPTS / script),
        ("folder", files),
        ("engine", engine),
        ("kept", folder if keeps else ""),
    ):
        place = place.replace(f"${name};", f'"{value}";')
    # Several threads for each of several processes would be in each other's way.
    command = ("env", "MAGICK_THREAD_LIMIT=1", find_fpm(), "--nodaemonize", "--fpm-config", str(conf))
    root = ("--allow-to-run-as-root",) if os.geteuid() == 0 else ()
    return nginx.launch(site, processes, behind=nginx.Behind((*command, *root), socket, place))


class _Images(Variant):
    """Its renditions are not those of others, to the byte."""

    __slots__ = ()

    def ask(self, site: Site, content: Content, address: Address) -> Ask:
        path, kind = f"/{FILE_NAMES[Content.ORIGINAL]}", (("Content-Type", "image/jpeg"),)
        if content is Content.ORIGINAL:
            return Ask(path, 200, site.bodies[content], expected=kind)
        if content is not Content.RENDITION:
            raise BenchError(f"the script in PHP has no {content}")
        task = ZIMG_TASK
        return Ask(f"{path}?w={task.width}&h={task.height}&g=1&q={task.quality}", 200, None, expected=kind, task=task)


def _images(name: str, engine: str, *, keeps: bool = False) -> Variant:
    def start(site: Site, content: Content, processes: int) -> Launch:
        files = "pictures" if content is Content.MADE else "www"
        return launch(site, site.folder / files, "image.php", processes, engine=engine, keeps=keeps)

    def ask_for(site: Site, walk: Walk, address: Address) -> list[Ask]:
        file = site.find(walk.picture).name
        return [
            Ask(
                f"/{file}?w={task.width}&h={task.height}&q={task.quality}"
                f"{'&p=4' if task.fit == 'inside' else ''}{'&g=1' if task.gray else ''}",
                *(200, None),
                task=task,
            )
            for task in walk.tasks
        ]

    return _Images(name, False, start, program="nginx", ask_for=ask_for, lacks=lambda: lacks_php(engine))


GD = _images("nginx + PHP (GD)", "gd")
IMAGEMAGICK = _images("nginx + PHP (ImageMagick)", "imagick")
KEEPING = _images("nginx + PHP (GD), kept", "gd", keeps=True)
