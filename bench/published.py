"""The figures that others have published, with their machine and how they came by them.

They stand beside what is measured here and are never compared with it: they are of other machines, other versions
and other times. Figures are by measure, as in `MEASURES`.
"""

Figures = dict[str, float]

# Server performance report: raw TCP echo, one process, ten connections.
ECHO_ON = "May 2016, Xeon E5-1620 v2, Linux 4.4, 30 s, ten client processes"
ECHO_SIZES_KIB = (1, 10, 100)
_ECHO_COLUMNS = ("rate", "mean_ms", "least_ms", "max_ms", "deviation_ms", "deviation_percent")
_ECHO = {
    "gevent": (
        (30_540.3, 0.319, 0.05, 13.1, 0.029, 9.1),
        (27_579.33, 0.353, 0.06, 8.96, 0.035, 9.98),
        (13_456.87, 0.733, 0.12, 16.21, 0.057, 7.78),
    ),
    "Tornado": (
        (19_862.53, 0.495, 0.13, 15.12, 0.151, 30.51),
        (18_579.77, 0.528, 0.11, 20.32, 0.165, 31.32),
        (6_806.3, 1.459, 0.49, 15.36, 0.151, 10.34),
    ),
    "Twisted": (
        (23_681.5, 0.414, 0.17, 16.98, 0.07, 16.99),
        (21_218.6, 0.462, 0.11, 12.92, 0.086, 18.71),
        (11_616.9, 0.851, 0.26, 20.09, 0.171, 20.08),
    ),
    "curio": (
        (25_143.43, 0.39, 0.03, 22.52, 0.055, 14.22),
        (23_227.27, 0.422, 0.04, 14.55, 0.033, 7.81),
        (14_639.9, 0.674, 0.1, 17.44, 0.056, 8.39),
    ),
    "curio streams": (
        (19_152.4, 0.514, 0.03, 25.95, 0.057, 11.02),
        (17_836.83, 0.551, 0.04, 14.38, 0.028, 5.04),
        (11_129.03, 0.889, 0.09, 32.5, 0.079, 8.84),
    ),
    "Node.js": (
        (44_055.13, 0.218, 0.04, 12.69, 0.078, 35.89),
        (36_515.53, 0.264, 0.04, 12.69, 0.215, 81.31),
        (11_460.23, 0.863, 0.15, 13.48, 0.383, 44.4),
    ),
    "Go": (
        (103_263.87, 0.086, 0.02, 18.39, 0.065, 76.28),
        (84_197.53, 0.107, 0.03, 16.58, 0.09, 84.54),
        (28_327.6, 0.343, 0.06, 13.65, 0.165, 48.1),
    ),
    "asyncio": (
        (41_419.8, 0.232, 0.08, 23.93, 0.077, 33.39),
        (34_147.07, 0.283, 0.07, 17.87, 0.101, 35.63),
        (12_636.63, 0.781, 0.26, 25.47, 0.237, 30.29),
    ),
    "asyncio streams": (
        (17_729.0, 0.554, 0.13, 13.02, 0.037, 6.76),
        (14_363.07, 0.685, 0.1, 14.35, 0.062, 9.0),
        (8_923.0, 1.111, 0.37, 13.3, 0.135, 12.18),
    ),
    "uvloop": (
        (105_458.6, 0.083, 0.02, 16.25, 0.063, 76.17),
        (82_824.93, 0.109, 0.03, 16.9, 0.112, 102.78),
        (23_495.23, 0.415, 0.11, 32.59, 0.157, 37.36),
    ),
    "uvloop streams": (
        (31_930.27, 0.306, 0.06, 11.44, 0.091, 29.9),
        (28_251.03, 0.345, 0.07, 19.65, 0.113, 32.84),
        (11_155.1, 0.886, 0.49, 16.52, 0.263, 29.68),
    ),
}


def tell_echo(kib: int) -> dict[str, Figures]:
    """By server."""
    place = ECHO_SIZES_KIB.index(kib)
    return {name: dict(zip(_ECHO_COLUMNS, sizes[place], strict=True)) for name, sizes in _ECHO.items()}


# zimg 1.0

_XEON = "Xeon E3-1230 V2 (4 cores, 8 threads)"
STATIC_ON = f"August 2013, {_XEON}, ab -c 100 -n 100000"
# zimg, zimg with memcached, nginx with PHP.
STATIC = (2857.80, 4995.95, 426.56)
PROCESSING = (2799.34, 4658.35, 58.61)

# Connections → requests/s of zimg 1.0 and nginx 1.2.9.
IT_WORKS = {
    100: (32_765, 33_412),
    300: (32_992, 32_063),
    500: (31_364, 30_599),
    1_000: (28_937, 28_164),
    2_000: (27_939, 25_125),
    3_000: (28_169, 22_053),
    4_000: (28_463, 21_465),
    5_000: (27_947, 13_537),
    6_000: (27_534, 14_430),
    7_000: (27_502, 14_624),
    8_000: (26_505, 13_389),
    9_000: (27_125, 13_650),
    10_000: (27_446, 10_901),
    11_000: (26_335, 10_586),
    12_000: (27_069, 10_462),
    13_000: (26_799, 8_530),
    14_000: (26_742, 7_628),
    15_000: (26_557, 9_832),
    16_000: (26_816, 8_018),
    17_000: (27_811, 7_951),
    18_000: (25_723, 6_246),
    19_000: (26_730, 8_135),
    20_000: (27_679, 6_107),
}


def tell_it_works(connections: int) -> str:
    zimg, nginx = IT_WORKS[connections]
    told = f"August 2013, {_XEON}, ab -n 200000: zimg 1.0 at {zimg / nginx:.2f} × nginx 1.2.9"
    if connections > 1_000:
        told += ", which failed some" + ("" if connections <= 9_000 else " and did not get to the end")
    return told


# zimg 2.2, 3.0, and a Lua type

# Connections → requests/s and mean ms of zimg 2.2, zimg 3.0 and a Lua type in the latter.
MADE = {
    10: ((73.85, 109.0), (1346.82, 6.0), (1316.37, 6.2)),
    50: ((74.88, 649.0), (1343.75, 36.0), (1305.69, 37.0)),
    100: ((74.98, 1290.0), (1322.64, 73.0), (1319.99, 73.0)),
    300: ((75.04, 3910.0), (1328.88, 223.0), (1324.93, 221.0)),
    500: ((75.53, 6240.0), (1342.05, 368.0), (1321.39, 370.0)),
}
_TIMEOUTS = {300: "2,160", 500: "4,942"}


def tell_made(connections: int) -> str:
    (old, _), (new, _), (script, _) = MADE[connections]
    told = f"{_XEON}, wrk -t8 -d30s: zimg 3.0 at {new / old:.1f} × 2.2, a Lua type at {script / new:.2f} × 3.0"
    return told + (f"; 2.2 had {_TIMEOUTS[connections]} time-outs" if connections in _TIMEOUTS else "")


# Values under keys

VALUES_ON = (
    "April 2014, 8 cores, wrk -t8 -c400 -d30s, a value of about 290 bytes; OlegDB with a new connection for every "
    "request (27 time-outs), Kyoto Tycoon with kept ones: not like for like, so both are measured both ways"
)
OLEG: Figures = {"rate": 35_675.16, "mean_ms": 18.05, "max_ms": 866.0}
KYOTO: Figures = {"rate": 133_041.46, "mean_ms": 3.05, "max_ms": 341.0}

# Output compression in PHP

TEXT_ON = "April 2024, Ryzen 7 5700G, PHP 8.3 under Apache, 100 requests"
TEXT_BYTES = 4_039_229
# Bytes, and seconds of 100 requests.
TEXT = {
    "none": (4_039_229, 3.16),
    "gzip": (1_290_963, 17.65),
    "ob_gzhandler": (1_290_963, 17.27),
    "zstd 1": (1_392_549, 4.01),
    "zstd 2": (1_310_025, 4.32),
    "zstd 3": (1_240_800, 4.45),
    "zstd 4": (1_222_309, 4.76),
    "zstd 5": (1_195_749, 5.84),
    "zstd 6": (1_157_140, 6.94),
    "zstd 7": (1_133_898, 8.18),
    "zstd 8": (1_120_307, 9.71),
    "zstd 9": (1_115_600, 9.80),
    "zstd 10": (1_095_873, 12.33),
    "zstd 11": (1_082_522, 18.20),
    "zstd 12": (1_081_317, 21.91),
    "zstd 13": (1_059_720, 52.40),
    "zstd 14": (1_044_099, 67.91),
    "zstd 15": (1_036_078, 87.37),
    "zstd 16": (983_006, 103.78),
    "zstd 17": (980_923, 115.09),
    "zstd 18": (972_316, 141.62),
    "zstd 19": (971_972, 145.05),
    "zstd 20": (971_972, 146.45),
    "zstd 21": (971_972, 148.13),
    "zstd 22": (971_962, 152.34),
}
