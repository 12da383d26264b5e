"""All of them at once: ten who look for each who uploads, and programs that keep small values beside them.

locust -f bench/locust/mixed.py --headless -u 200 -r 20 -t 60s --host http://127.0.0.1:4869
"""

from bench.locust.keyvalue import KeyValueUser
from bench.locust.upload import Uploader
from bench.locust.view import Viewer

__all__ = ["KeyValueUser", "Uploader", "Viewer"]
