"""Types of images by name (t=NAME): tables of parameters, compiled once, and which names there may be.

A table says what a query would say, in the same words and under the same rules, so that a request by type makes
the same plan as the plain one. What no table knows is for the script, where there is one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from uvimg.core.errors import BadParameter
from uvimg.core.params import PARAMETERS, Params, read_params

# They become parts of names in the store, of lines in the log and of what a script sees.
_NAME = re.compile(r"[A-Za-z0-9_.,:;@~+*=!()-]{1,64}")
# All of them go through one variable of the environment, which Linux bounds at 128 KiB.
_MOST_TYPES = 500
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# Of what is wrong; more of it helps nobody.
_LONGEST_SHOWN = 200


class BadTable(ValueError):
    """A table that cannot be; the message names it and what is wrong, in one line."""


class Tables(msgspec.Struct, frozen=True):
    """Every type that the settings declare, compiled."""

    by_name: tuple[tuple[str, Params], ...] = ()


NO_TABLES = Tables()


@dataclass(frozen=True, slots=True)
class Types:
    """What t= may name. With neither tables nor a script, t is ignored as zimg ignores it."""

    tables: Mapping[str, Params] = field(default_factory=dict)
    scripted: bool = False

    @property
    def are_on(self) -> bool:
        return self.scripted or bool(self.tables)


NO_TYPES = Types()


def is_type_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def parse_tables(value: object) -> Tables:
    """The types of a TOML table of tables. BadTable for the first that cannot be."""
    if not isinstance(value, Mapping):
        raise BadTable("types must be tables: [types.NAME]")
    if len(value) > _MOST_TYPES:
        raise BadTable(f"types holds {len(value)} tables; allowed are {_MOST_TYPES}")
    return Tables(tuple((name, _compile(name, table)) for name, table in value.items()))


def _compile(name: str, table: object) -> Params:
    if not is_type_name(name):
        raise BadTable(f"types has the name {show_wrong(name)}: 1 to 64 letters, digits and _.,:;@~+*=!()- make a name")
    if not isinstance(table, Mapping):
        raise BadTable(f"types.{name} must be a table, [types.{name}]")
    fields: dict[str, str] = {}
    for key, value in table.items():
        for parameter, text in _spell(name, key, value):
            if parameter in fields:
                raise BadTable(f"types.{name}.{key}: {parameter} is given twice")
            fields[parameter] = text
    try:
        params = read_params(fields, None)
    except BadParameter as exc:
        raise BadTable(f"types.{name}.{exc.parameter} = {_show_text(fields[exc.parameter])}: {exc.detail}") from None
    if params.p == 0 and bool(params.w) != bool(params.h):
        raise BadTable(f"types.{name}: p = 0 stretches to w and h, so it needs both")
    return params


def _spell(name: str, key: str, value: Any) -> list[tuple[str, str]]:
    """What one key of a table says as parameters of a query."""
    if key == "crop":
        if not isinstance(value, list) or len(value) != 4 or not all(map(_is_whole, value)):
            raise BadTable(f"types.{name}.crop = {show_wrong(value)}: crop is [x, y, w, h], four whole numbers")
        return [(parameter, str(number)) for parameter, number in zip("xywh", value, strict=True)]
    parameter = "r" if key == "rotate" else key
    if parameter not in PARAMETERS:
        known = ", ".join(PARAMETERS)
        raise BadTable(f"types.{name}.{_show_text(key)}: there is no such key; there are {known}, rotate and crop")
    if parameter == "g" and isinstance(value, bool):
        value = int(value)
    if not (isinstance(value, str) and value if parameter == "f" else _is_whole(value)):
        wanted = "a text" if key == "f" else "a whole number"
        raise BadTable(f"types.{name}.{key} = {show_wrong(value)}: it must be {wanted}")
    return [(parameter, str(value))]


def _is_whole(value: object) -> bool:
    # TOML's are of 64 bits; Python reads longer ones, and cannot spell them.
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 64


def show_wrong(value: object) -> str:
    """A value that cannot be, in one line of bounded length."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + " …"


def _show_text(text: str) -> str:
    return text if text.isprintable() and len(text) <= _LONGEST_SHOWN else show_wrong(text)


def show_tables(tables: Tables) -> str:
    """As an inline table of TOML."""
    return "{" + ", ".join(f"{_show_key(name)} = {_show_params(params)}" for name, params in tables.by_name) + "}"


def _show_key(name: str) -> str:
    # Nothing that a name may hold needs an escape.
    return name if _BARE_KEY.fullmatch(name) else f'"{name}"'


def _show_params(params: Params) -> str:
    plain = Params()
    given = {name: getattr(params, name) for name in PARAMETERS if getattr(params, name) != getattr(plain, name)}
    spelled = (f'{name} = "{value}"' if name == "f" else f"{name} = {value}" for name, value in given.items())
    return "{" + ", ".join(spelled) + "}"
