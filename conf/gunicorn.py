"""gunicorn's side of uvimg: `gunicorn -c conf/gunicorn.py`.

Whatever uvimg has a setting for is set there (environment, UVIMG_CONFIG) and only passed on here.
"""

import os
import shutil
import sys
import tempfile

from uvimg.config import ConfigError, load
from uvimg.core.place import Tcp, parse_place
from uvimg.cores import usable_cores

try:
    _settings = load({})
except ConfigError as exc:
    sys.exit(f"uvimg: {exc}")
_places = [str(parse_place(text)) for text in _settings.listen] or [str(Tcp(_settings.host, _settings.port))]
_cores = usable_cores()

wsgi_app = "uvimg.gunicorn:application"
# Not the only possible classes, but these two know what a coroutine is.
worker_class = f"aiohttp.Gunicorn{'UVLoop' if _settings.loop == 'uvloop' else ''}WebWorker"
bind = [place.replace("fd:", "fd://") if place.startswith("fd:") else place for place in _places]
# Event loops. The image workers behind them are counted apart, see post_fork.
workers = int(os.environ.get("WEB_CONCURRENCY", _cores))
backlog = _settings.backlog
# One queue for all: with a queue for each worker a reload would reset the connections in that of an old one.
reuse_port = False
# Each worker opens its own store and starts its own children; and a reload is to load new code.
preload_app = False
# The service ends requests itself after grace_s; what is left is for its children and the store.
graceful_timeout = round(_settings.drain_delay_s + _settings.grace_s) + 15
# A worker that has said nothing for so long is killed. It is silent while it starts (its children may take 60 s)
# and while it stops; in between it speaks every second.
timeout = max(75, graceful_timeout + 5)
# The heartbeat is a file's time: in memory, so that a busy disk is not taken for a stuck worker.
worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None
# Nothing here grows with the number of requests; image workers have a count of their own, worker_jobs.
max_requests = 0
max_requests_jitter = 0
# Read by nobody: keepalive_s and trusted_proxies of uvimg decide.
keepalive = round(_settings.keepalive_s)
forwarded_allow_ips = ""
# The access log is uvimg's, and so is its form. gunicorn's own lines go to stderr beside it.
accesslog = None
errorlog = "-"
# Another way in that nobody needs: signals do all of it.
control_socket_disable = True


def on_starting(server):
    """In the master, before it has workers: a folder through which any of them tells the metrics of all."""
    if not _settings.metrics_dir:
        server.uvimg_metrics_dir = os.environ["UVIMG_METRICS_DIR"] = tempfile.mkdtemp(prefix="uvimg-metrics-")


def on_exit(server):
    """In the master, when its workers have ended."""
    shutil.rmtree(getattr(server, "uvimg_metrics_dir", ""), ignore_errors=True)


def pre_fork(server, worker):
    """In the master: the place of a new worker among its siblings. An empty one, else who was there longest goes."""
    # Not by its age: who replaces one that died would have another's share. During a reload a place has two.
    filled = {older.uvimg_place: older.age for older in sorted(server.WORKERS.values(), key=lambda older: older.age)}
    worker.uvimg_place = min(range(server.num_workers), key=lambda place: filled.get(place, 0))


def post_fork(server, worker):
    """In each worker, before it starts: its share of the image workers, which all together are one for each core."""
    total, siblings = _settings.workers or _cores, server.num_workers
    share = total // siblings + (worker.uvimg_place < total % siblings)
    os.environ["UVIMG_WORKERS"] = str(max(1, share))
