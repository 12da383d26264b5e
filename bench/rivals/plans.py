"""uvimg's own work alone: what a worker does for a plan, in a loop, with no service, pool or socket around it.

python -m bench.rivals.plans PORT FOLDER

What a request costs above this is what the service and the pool cost. It calls the function by which a worker
answers a job, so the same engines do the same plans.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.rivals import loop
from bench.work import Task
from uvimg.core.formats import FORMATS, recognise
from uvimg.core.plan import Plan, Rules, Source, make_plan
from uvimg.core.route import Params
from uvimg.imaging import Inspect, Inspected, Limits, Render, Rendered, rendering, worker


def _carry_out(data: bytes, job: Render) -> bytes:
    with worker.Original(data, None, len(data)) as original:
        answer, body = worker._answer(job, original, None)
    assert isinstance(answer, Rendered), answer
    return body


def _prepare(data: bytes, tasks: Sequence[Task]) -> list[loop.Job]:
    format = recognise(data[:64])
    assert format is not None
    with worker.Original(data, None, len(data)) as original:
        inspected, _ = worker._answer(Inspect(format, Limits()), original, None)
    assert isinstance(inspected, Inspected), inspected
    source = inspected.source
    return [partial(_carry_out, data, rendering(_plan(task, source, len(data)), source)) for task in tasks]


def _plan(task: Task, source: Source, size: int) -> Plan:
    params = Params(
        w=task.width,
        h=task.height,
        p=1 if task.fit == "cover" else 4,
        g=int(task.gray),
        q=task.quality,
        f=task.format,
    )
    return make_plan(params, source, size, Rules())


if __name__ == "__main__":
    worker._set_up_libvips(FORMATS)
    loop.serve(int(sys.argv[1]), Path(sys.argv[2]), _prepare)
