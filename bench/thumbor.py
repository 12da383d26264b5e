"""thumbor, from a package index, on plain files; what it makes it keeps in files or not at all."""

import tempfile
from pathlib import Path

from bench import serving
from bench.exchange import Ask
from bench.programs import THUMBOR, lacks_thumbor
from bench.serving import Address, BenchError, Launch
from bench.site import FILE_NAMES, ZIMG_TASK, Content, Site, Variant
from bench.work import Task, Walk

_CONFIGURATION = """
LOADER = "thumbor.loaders.file_loader"
FILE_LOADER_ROOT_PATH = {files!r}
STORAGE = "thumbor.storages.no_storage"
ALLOW_UNSAFE_URL = True
"""
_KEPT = """
RESULT_STORAGE = "thumbor.result_storages.file_storage"
RESULT_STORAGE_FILE_STORAGE_ROOT_PATH = {kept!r}
RESULT_STORAGE_STORES_UNSAFE = True
"""


class _Thumbor(Variant):
    __slots__ = ()

    def ask(self, site: Site, content: Content, address: Address) -> Ask:
        if content is not Content.RENDITION:
            raise BenchError(f"thumbor has no {content}")
        return _ask(FILE_NAMES[Content.ORIGINAL], ZIMG_TASK)


def _ask(file: str, task: Task) -> Ask:
    size = f"{'fit-in/' if task.fit == 'inside' else ''}{task.width}x{task.height}"
    filters = f"filters:{'grayscale():' if task.gray else ''}quality({task.quality})"
    kind = (("Content-Type", "image/jpeg"),)
    return Ask(f"/unsafe/{size}/{filters}/{file}", 200, None, expected=kind, task=task)


def _thumbor(name: str, *, keeps: bool = False) -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        folder = Path(tempfile.mkdtemp(prefix="thumbor-", dir=site.folder))
        files = site.folder / ("pictures" if content is Content.MADE else "www")
        conf, port = folder / "thumbor.conf", serving.find_port()
        text = _CONFIGURATION.format(files=str(files)) + (_KEPT.format(kept=str(folder)) if keeps else "")
        conf.write_text(text)
        command = (str(THUMBOR), "--conf", str(conf), "--ip", "127.0.0.1", "--port", str(port))
        return Launch(((*command, f"--processes={processes}"),), (("127.0.0.1", port),))

    def ask_for(site: Site, walk: Walk, address: Address) -> list[Ask]:
        file = site.find(walk.picture).name
        return [_ask(file, task) for task in walk.tasks]

    return _Thumbor(name, False, launch, ask_for=ask_for, lacks=lacks_thumbor)


MAKING = _thumbor("thumbor")
KEEPING = _thumbor("thumbor, kept", keeps=True)
