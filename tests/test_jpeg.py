"""The engine "jpeg": it makes what libvips makes, as good, of whatever it is given, or leaves it to libvips.

Both engines work in a real, confined worker. UVIMG_JPEG_CASES says how many cases are drawn; some thousand
take some minutes and have been run whenever the engine was changed.
"""

import asyncio
import functools
import io
import math
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench import corpus
from tests.conftest import decode
from uvimg.core.errors import BadParameter, UvimgError
from uvimg.core.formats import FORMATS
from uvimg.core.message import FilePart
from uvimg.core.plan import Crop, Encode, Engine, Gray, Load, Plan, Rotate, Rules, Source, choose_engine, make_plan
from uvimg.core.route import Params
from uvimg.imaging import Inspect, Inspected, Limits, Render, Rendered, rendering
from uvimg.imaging.pool import Pool, PoolSettings

CASES = int(os.environ.get("UVIMG_JPEG_CASES", "60"))
# What the engine may be worse than libvips' own thumbnail, both against a full decode and Lanczos at full precision.
MOST_LOSS_DB = 0.3
# Of less, one value that is rounded the other way changes a whole block, for the better or the worse: there the mean of
# all cases counts.
MANY_PIXELS = 1024

ENGINES: tuple[Engine, ...] = ("jpeg", "libvips")
Run = Callable[[Any, Any], tuple[Any, bytes]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Has a confined worker do a job on bytes or a file."""
    settings = PoolSettings(
        workers=1,
        queue_limit=9,
        slow_queue_limit=9,
        timeout_s=60,
        memory_bytes=4 << 30,
        jobs_per_worker=0,
        sandbox="auto",
        formats=FORMATS,
    )
    with asyncio.Runner() as runner:
        pool = Pool(settings)
        runner.run(pool.start())
        try:
            yield lambda job, original: runner.run(pool.run(job, original, "fast"))
        finally:
            runner.run(pool.stop())


def inspect(run: Run, data: bytes) -> Source:
    found, _ = run(Inspect("jpeg", Limits()), data)
    assert isinstance(found, Inspected)
    return found.source


def render_by_both(run: Run, data: bytes, plan: Plan, source: Source) -> tuple[Any, Any]:
    """The renditions of both engines, decoded."""
    job = rendering(plan, source)
    assert job.engine == "jpeg"
    made, body = run(job, data)
    other, other_body = run(Render("jpeg", plan), data)
    assert (made.engine, other.engine) == ("jpeg", "libvips")
    assert (made.format, made.width, made.height) == (other.format, other.width, other.height)
    assert not {"exif-data", "icc-profile-data", "xmp-data"} & set(decode(body).get_fields())
    if made.format == "jpeg":
        assert tables(body) == tables(other_body)
    # Huffman codes made to measure on both sides; what is left is which pixels differ in their last bit.
    assert len(body) < 1.05 * len(other_body) + 40
    return decode(body), decode(other_body)


def tables(data: bytes) -> list[Any]:
    """Quantization tables and sampling factors."""
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "JPEG"
        return [image.quantization, image.layer]  # type: ignore[attr-defined]


def reference(data: bytes, plan: Plan) -> Any:
    """What a plan asks for: every pixel decoded, Lanczos in floating point."""
    load, *rest, _ = plan.steps
    assert isinstance(load, Load)
    image = decode(data).autorot()
    if any(isinstance(step, Gray) for step in rest):
        image = image.recomb([[0.299, 0.587, 0.114]])
    image = image.cast("float")
    if (image.width, image.height) != (load.width, load.height):
        across, down = load.width / image.width, load.height / image.height
        # libvips' own limit for what it can do in one step.
        gap = 0 if min(across, down) > 1 / 16 else 8
        image = image.resize(across, vscale=down, kernel="lanczos3", gap=gap)
    for step in rest:
        if isinstance(step, Crop):
            image = image.crop(step.left, step.top, step.width, step.height)
        elif isinstance(step, Rotate):
            image = image.copy_memory().rot(f"d{step.degrees}")
    return image


def psnr(found: Any, wanted: Any) -> float:
    assert (found.width, found.height, found.bands) == (wanted.width, wanted.height, wanted.bands)
    difference = found.cast("float") - wanted
    return 10 * math.log10(255**2 / max(1e-9, (difference * difference).avg()))


@functools.cache
def picture(kind: str) -> Any:
    make = {"photo": corpus.photo, "text": corpus.text, "line art": corpus.line_art}[kind]
    return make(900, 700).copy_memory()


def encode(image: Any, quality: int, subsampling: int, *, progressive: bool = False, orientation: int = 1) -> bytes:
    """By Pillow, for libvips writes no 4:2:2. Sampling 0, 1 and 2 are 4:4:4, 4:2:2 and 4:2:0."""
    pixels = Image.frombytes("L" if image.bands == 1 else "RGB", (image.width, image.height), image.write_to_memory())
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    pixels.save(
        file, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive, exif=exif, comment=b"secret"
    )
    return file.getvalue()


def draw_source(dice: random.Random, kind: str) -> bytes:
    whole = picture(kind)
    width, height = dice.choice([(900, 700), (640, 480), (641, 479), (333, 500), (899, 64), (31, 601), (24, 17)])
    image = whole.crop(dice.randrange(901 - width), dice.randrange(701 - height), width, height)
    if dice.random() < 0.15:
        image = image.colourspace("b-w")
    return encode(
        image,
        dice.randrange(30, 96),
        dice.randrange(3),
        progressive=dice.random() < 0.3,
        orientation=dice.choice([1, 1, 1, 2, 3, 4, 5, 6, 7, 8]),
    )


def draw_params(dice: random.Random, source: Source) -> Params:
    """Mostly smaller, sometimes nearly as large, in all the modes."""
    width, height = source.upright_size
    factor = dice.choice([1, 1.01, 1.1, 1.5, 2, 2.3, 3, 3.9, 4, 4.1, 5.5, 6.4, 7.9, 8, 10, 15, 16, 17, 30, 100])
    w, h = max(1, round(width / factor)), max(1, round(height / factor / dice.choice([1, 1, 1.3, 4])))
    p = dice.choice([0, 1, 1, 1, 2, 3, 4])
    if p == 3:
        w, h = dice.randrange(1, 101), dice.randrange(1, 101)
    at = dice.random() < 0.1
    return Params(
        w=w,
        h=h,
        p=p,
        x=dice.randrange(width) if at else -1,
        y=dice.randrange(height) if at else -1,
        g=int(dice.random() < 0.4),
        r=dice.choice([0, 0, 0, 0, 90, 180, 270]),
        q=dice.choice([30, 50, 75, 75, 75, 89, 90, 95, 100]),
        f=dice.choice(["jpeg", "jpeg", "jpeg", "webp"]),
    )


@pytest.mark.parametrize("kind", ["photo", "text", "line art"])
def test_both_engines_make_the_same_as_well(run: Run, kind: str) -> None:
    dice = random.Random(kind)
    done, small = 0, []
    while done < CASES // 3:
        data = draw_source(dice, kind)
        source = inspect(run, data)
        for _ in range(4):
            params = draw_params(dice, source)
            try:
                plan = make_plan(params, source, len(data), Rules())
            except BadParameter:
                continue
            if choose_engine(plan, source) == "libvips":
                continue
            done += 1
            ours, theirs = render_by_both(run, data, plan, source)
            wanted = reference(data, plan)
            loss = psnr(theirs, wanted) - psnr(ours, wanted)
            if wanted.width * wanted.height >= MANY_PIXELS:
                assert loss <= MOST_LOSS_DB, (source, plan, psnr(theirs, wanted), psnr(ours, wanted))
            else:
                small.append(loss)
    assert sum(small) / len(small) <= MOST_LOSS_DB


def scaled(width: int, height: int, *steps: Any, quality: int = 90) -> Plan:
    return Plan((Load(width, height, 1, managed=False, gray=False), *steps, Encode("jpeg", quality, 0)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("steps", [(), (Crop(3, 11, 30, 20),), (Crop(3, 11, 30, 20), Rotate(90, 20, 30, (9, 9, 9)))])
def test_every_orientation_is_shown_upright_whole_and_cropped(run: Run, orientation: int, steps: Any) -> None:
    data = encode(picture("photo").crop(0, 0, 403, 240), 95, 0, orientation=orientation)
    source = inspect(run, data)
    assert source.orientation == orientation
    plan = scaled(*((40, 67) if orientation >= 5 else (67, 40)), *steps)
    ours, theirs = render_by_both(run, data, plan, source)
    assert psnr(ours, theirs.cast("float")) > 40


def test_a_file_makes_the_same_as_its_bytes(run: Run, tmp_path: Path) -> None:
    plan = scaled(200, 156)
    for progressive in (False, True):
        data = encode(picture("photo"), 98, 0, progressive=progressive)
        # Several times what is read at once.
        assert len(data) > 400_000
        path = tmp_path / "photo.jpg"
        path.write_bytes(data)
        with path.open("rb") as file:
            from_file = run(Render("jpeg", plan, "jpeg"), FilePart(file, 0, len(data)))
        from_memory = run(Render("jpeg", plan, "jpeg"), data)
        assert from_file == from_memory
        assert from_file[0].engine == "jpeg"


def test_gray_is_the_luma_whoever_makes_it(run: Run) -> None:
    """0.299, 0.587 and 0.114 of red, green and blue (ITU-R BT.601), as a JPEG keeps it, also of what is no JPEG."""
    for colour, luma in (((255, 0, 0), 76), ((0, 255, 0), 150), ((0, 0, 255), 29), ((200, 60, 40), 100)):
        image = corpus.flat(64, 64, colour)
        plan = scaled(16, 16, Gray())
        sources: list[tuple[Any, bytes]] = [("jpeg", encode(image, 98, 0)), ("png", bytes(image.pngsave_buffer()))]
        for format, data in sources:
            for engine in ENGINES if format == "jpeg" else ENGINES[1:]:
                made, body = run(Render(format, plan, engine), data)
                assert made.engine == engine
                (found,) = decode(body).getpoint(8, 8)
                assert abs(found - luma) <= 1, (colour, format, engine)


def test_what_is_made_in_haste_is_less_exact_by_both_engines(run: Run) -> None:
    data = encode(picture("text"), 90, 2, orientation=6)
    source = inspect(run, data)
    exact, hasty = (make_plan(Params(w=240), source, len(data), Rules(fast_shrink=fast)) for fast in (False, True))
    wanted = reference(data, exact)
    for engine in ENGINES:
        with_care, in_haste = (
            decode(run(Render("jpeg", plan, engine, source.orientation), data)[1]) for plan in (exact, hasty)
        )
        loss = psnr(with_care, wanted) - psnr(in_haste, wanted)
        assert 0.3 < loss < 6, engine


@pytest.mark.parametrize("quality", [89, 90, 94, 100])
def test_noise_has_room_at_every_quality(run: Run, quality: int, capfd: pytest.CaptureFixture[str]) -> None:
    dice = random.Random(quality)
    noise = Image.frombytes("RGB", (250, 250), bytes(dice.choices((0, 255), k=3 * 250 * 250)))
    file = io.BytesIO()
    noise.save(file, "JPEG", quality=100, subsampling=0)
    for steps in ((), (Gray(),)):
        made, _ = run(Render("jpeg", scaled(250, 250, *steps, quality=quality), "jpeg"), file.getvalue())
        assert made.engine == "jpeg"
    assert capfd.readouterr().err == ""


# What it is not given


PLAIN = Source("jpeg", 800, 600)


@pytest.mark.parametrize(
    ("params", "source", "rules", "engine"),
    [
        (Params(w=100), PLAIN, Rules(), "jpeg"),
        (Params(w=100, h=100, g=1), PLAIN, Rules(), "jpeg"),
        (Params(w=100, r=270), PLAIN, Rules(), "jpeg"),
        (Params(g=1), PLAIN, Rules(), "jpeg"),
        (Params(w=800), PLAIN, Rules(), "jpeg"),
        # It is asked not to be larger than the original.
        (Params(), PLAIN, Rules(), "libvips"),
        (Params(w=801), PLAIN, Rules(), "libvips"),
        (Params(h=16), PLAIN, Rules(), "jpeg"),
        (Params(h=15), PLAIN, Rules(), "libvips"),
        (Params(w=100, h=601, p=0), PLAIN, Rules(), "libvips"),
        (Params(w=100, r=45), PLAIN, Rules(), "libvips"),
        (Params(w=100, f="webp"), PLAIN, Rules(), "jpeg"),
        (Params(w=100, f="webp", g=1), PLAIN, Rules(), "libvips"),
        (Params(w=100, f="png"), PLAIN, Rules(), "libvips"),
        (Params(w=100), PLAIN, Rules(format="avif"), "libvips"),
        (Params(w=100), Source("png", 800, 600), Rules(), "libvips"),
        (Params(w=100), Source("jpeg", 800, 600, managed=True), Rules(), "libvips"),
        # As much as is held in memory, and more.
        (Params(w=750, h=750, p=0), Source("jpeg", 1400, 1480), Rules(), "jpeg"),
        (Params(w=750, h=750, p=0), Source("jpeg", 1450, 1450), Rules(), "libvips"),
        (Params(w=750, h=750, p=0, g=1), Source("jpeg", 1450, 1450), Rules(), "jpeg"),
        (Params(w=701), Source("jpeg", 5600, 5600), Rules(), "libvips"),
        (Params(w=699), Source("jpeg", 5600, 5600), Rules(), "jpeg"),
    ],
)
def test_only_what_it_does_well_goes_to_the_jpeg_engine(
    params: Params, source: Source, rules: Rules, engine: str
) -> None:
    assert choose_engine(make_plan(params, source, 1000, rules), source) == engine


# What is not as it seems


def sample(**options: Any) -> bytes:
    return encode(picture("photo").crop(0, 0, 320, 240), 85, 2, **options)


def insert(data: bytes, segment: bytes) -> bytes:
    """Behind the start of the image."""
    return data[:2] + segment + data[2:]


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def with_frame(data: bytes, **changes: int) -> bytes:
    """With other claims in its frame header."""
    at = data.index(b"\xff\xc0")
    offsets = {"marker": 1, "precision": 4, "components": 9, "table": 12}
    changed = bytearray(data)
    for name, value in changes.items():
        if name in offsets:
            changed[at + offsets[name]] = value
        else:
            place = at + {"height": 5, "width": 7}[name]
            changed[place : place + 2] = struct.pack(">H", value)
    return bytes(changed)


def cmyk() -> bytes:
    file = io.BytesIO()
    Image.new("CMYK", (320, 240), (20, 200, 90, 30)).save(file, "JPEG")
    return file.getvalue()


def coded_as_rgb() -> bytes:
    file = io.BytesIO()
    pixels = Image.frombytes("RGB", (320, 240), picture("photo").crop(0, 0, 320, 240).write_to_memory())
    pixels.save(file, "JPEG", keep_rgb=True, quality=90)
    return file.getvalue()


def with_restarts() -> bytes:
    return bytes(picture("photo").crop(0, 0, 320, 240).jpegsave_buffer(Q=85, restart_interval=3))


ODD: dict[str, Callable[[], bytes]] = {
    "nothing at all": lambda: b"",
    "only a beginning": lambda: b"\xff\xd8\xff",
    "no frame": lambda: b"\xff\xd8" + segment(0xDA, b"\x01\x01\0\0\x3f\0") + bytes(99),
    "cut in its header": lambda: sample()[:300],
    "cut in its picture": lambda: sample()[:-3000],
    "progressive, cut": lambda: sample(progressive=True)[:-3000],
    "without its end": lambda: sample()[:-2],
    "more behind its end": lambda: sample() + b"<?php" * 999,
    "damaged": lambda: sample()[:4000] + bytes(300) + sample()[4300:],
    "damaged by a marker": lambda: sample()[:4000] + b"\xff\xc4" + sample()[4002:],
    "too wide by its own word": lambda: with_frame(sample(), width=3_000, height=3_000),
    "wider than it is": lambda: with_frame(sample(), width=321),
    "smaller than it is": lambda: with_frame(sample(), width=16, height=16),
    "of no height": lambda: with_frame(sample(), height=0),
    "twelve bits": lambda: with_frame(sample(), precision=12),
    "arithmetic": lambda: with_frame(sample(), marker=0xC9),
    "lossless": lambda: with_frame(sample(), marker=0xC3),
    "of two channels": lambda: with_frame(sample(), components=2),
    "with a table that is not there": lambda: with_frame(sample(), table=3),
    "a second frame": lambda: insert(sample(), segment(0xC0, b"\x08\0\x10\0\x10\x01\x01\x11\0")),
    "CMYK": cmyk,
    "RGB": coded_as_rgb,
    "with restarts": with_restarts,
    "gray": lambda: corpus.jpeg(picture("photo").crop(0, 0, 320, 240).colourspace("b-w")),
    "much before its frame": lambda: functools.reduce(
        lambda data, _: insert(data, segment(0xE1, b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(65_000))),
        range(9),
        sample(),
    ),
    "more before it than is looked through": lambda: functools.reduce(
        lambda data, _: insert(data, segment(0xE4, bytes(65_000))), range(40), sample()
    ),
    "an EXIF that is none": lambda: insert(sample(), segment(0xE1, b"Exif\0\0" + b"\xff" * 50)),
    "wrong about its transform": lambda: insert(sample(), segment(0xEE, b"Adobe\0\x64\0\0\0\0\0")),
    "a tall strip": lambda: encode(picture("photo").crop(0, 0, 3, 700), 85, 2),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_has_the_answer_that_libvips_gives(
    run: Run, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As if the facts had been others at upload, or somebody had changed the file since."""
    data = ODD[name]()
    path = tmp_path / "odd.jpg"
    path.write_bytes(data)
    for from_file, steps in ((False, [Gray()]), (True, [])):
        plan = scaled(2 if "strip" in name else 40, 30, *steps)
        answers: list[Any] = []
        for engine in ENGINES:
            with path.open("rb") as file:
                original = FilePart(file, 0, len(data)) if from_file else data
                try:
                    made, body = run(Render("jpeg", plan, engine), original)
                except UvimgError as exc:
                    answers.append((type(exc), str(exc)))
                else:
                    assert isinstance(made, Rendered)
                    answers.append(decode(body))
        ours, theirs = answers
        if isinstance(ours, tuple) or isinstance(theirs, tuple):
            assert ours == theirs
        else:
            assert psnr(ours, theirs.cast("float")) > 30
    assert "Traceback" not in capfd.readouterr().err
