"""Typed dataclasses from YAML, with one precise line per mistake, and JSON Schema from the same types.

The dataclasses are the only definition of a configuration: ``build`` turns parsed YAML into them and
``schema`` turns them into JSON Schema 2020-12. Supported field types: bool, int, float, str, Literal,
``X | Y``, ``tuple[X, ...]``, ``tuple[X, Y]``, ``dict[str, X]`` and nested dataclasses.

Field metadata: ``doc`` (one line), ``min`` and ``above`` (inclusive and exclusive lower bound of a
number), ``max``, ``pattern`` (of a string, or of the keys of a dict), ``allowed`` (a function that
returns the valid strings when they are known elsewhere, as format names are).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml


class ConfigError(ValueError):
    """One line: file, key path, what was found, what is allowed and how to mend it."""


def entry(default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """A dataclass field with metadata for the loader and the schema."""
    return dataclasses.field(default=default, metadata=metadata)


def fail(where: str, key: str, message: str) -> typing.NoReturn:
    raise ConfigError(": ".join(part for part in (where, key, message) if part))


def nearest(word: str, allowed: typing.Iterable[str]) -> str:
    """``, did you mean 'x'?`` when something close exists, else nothing."""
    match = difflib.get_close_matches(str(word), list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML would silently keep the last one)."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, typing.Hashable):
            raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key {key!r} is given twice (first in line {seen[key]}); keep one of them",
                problem_mark=key_node.start_mark,
            )
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> Any:
    """Parsed YAML of ``path``. Raises ConfigError when it is missing, no text or no YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        fail(str(path), "", "no such file")
    except (OSError, UnicodeDecodeError) as error:
        fail(str(path), "", f"cannot be read: {error}")
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}" if mark else ""
        fail(str(path), line, f"not valid YAML: {getattr(error, 'problem', None) or error}")


def build(cls: type, data: Any, where: str, key: str = "") -> Any:
    """An instance of dataclass ``cls`` from parsed YAML. Raises ConfigError naming file and key path."""
    if not isinstance(data, dict):
        fail(where, key, f"got {_shown(data)}, needed a mapping with the keys {_names(cls)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in data:
        if name not in fields:
            hint = nearest(name, fields)
            fail(where, _join(key, name), f"unknown key; allowed: {', '.join(fields)}{hint}")
    values = {}
    hints = typing.get_type_hints(cls)
    for name, field in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], field.metadata, where, _join(key, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            doc = field.metadata.get("doc")
            kind = describe(hints[name], field.metadata)
            fail(where, _join(key, name), f"missing; needed {kind}{f' ({doc})' if doc else ''}")
    return cls(**values)


def to_plain(value: Any) -> Any:
    """Dataclasses to dicts and tuples to lists, ready for JSON."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def describe(hint: Any, meta: typing.Mapping[str, Any]) -> str:
    """What a field accepts, in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if "allowed" in meta and (hint is str):
        return f"one of {', '.join(meta['allowed']())}"
    if hint in _WORDS:
        return _WORDS[hint] + _bounds(meta)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args)) if len(args) > 1 else str(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a, meta) for a in args)
    if origin is tuple:
        inner = describe(args[0], meta)
        return f"a list of {inner}" if args[-1] is Ellipsis else f"a list of exactly {len(args)} x {inner}"
    if origin is dict:
        return f"a mapping of names to {describe(args[1], meta)}"
    return f"a mapping with the keys {_names(hint)}"


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def _bounds(meta: typing.Mapping[str, Any]) -> str:
    words = [f"{w} {meta[k]}" for k, w in (("min", ">="), ("above", ">"), ("max", "<=")) if k in meta]
    return f" {' and '.join(words)}" if words else ""


def _names(cls: type) -> str:
    return ", ".join(f.name for f in dataclasses.fields(cls))


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, str):
        return f"the string {value!r}"
    if isinstance(value, dict):
        return f"a mapping with the keys {', '.join(map(str, value)) or '(none)'}"
    return repr(value)


def _value(hint: Any, data: Any, meta: typing.Mapping[str, Any], where: str, key: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, data, where, key)
    if origin is Literal:
        if data in args and type(data) in {type(a) for a in args}:
            return data
        hint_text = nearest(data, map(str, args))
        fail(where, key, f"got {_shown(data)}; allowed: {', '.join(map(str, args))}{hint_text}")
    if origin in (typing.Union, types.UnionType):
        return _union(args, hint, data, meta, where, key)
    if origin is tuple:
        fixed = args[-1] is not Ellipsis
        if not isinstance(data, list) or (fixed and len(data) != len(args)):
            fail(where, key, f"got {_shown(data)}, needed {describe(hint, meta)}")
        inner = args if fixed else args[:1] * len(data)
        return tuple(_value(a, d, meta, where, f"{key}[{i}]") for i, (a, d) in enumerate(zip(inner, data)))
    if origin is dict:
        return _dict(args[1], hint, data, meta, where, key)
    return _scalar(hint, data, meta, where, key)


def _union(args: tuple, hint: Any, data: Any, meta: typing.Mapping[str, Any], where: str, key: str) -> Any:
    """The member whose kind of YAML node fits; its own error is then the useful one."""
    for arg in args:
        origin = typing.get_origin(arg)
        fits = (
            (arg is type(None) and data is None)
            or (origin is tuple and isinstance(data, list))
            or (origin is dict and isinstance(data, dict))
            or (dataclasses.is_dataclass(arg) and isinstance(data, dict))
            or (arg in (int, float) and isinstance(data, int | float) and not isinstance(data, bool))
            or (origin is Literal and isinstance(data, str) and data in typing.get_args(arg))
            or (arg is str and isinstance(data, str))
        )
        if fits:
            return _value(arg, data, meta, where, key)
    words = [w for a in args if typing.get_origin(a) is Literal for w in typing.get_args(a)]
    close = nearest(data, words) if isinstance(data, str) else ""
    mend = _number_mend(data) if {int, float} & set(args) else ""
    fail(where, key, f"got {_shown(data)}, needed {describe(hint, meta)}{close}{mend}")


def _dict(inner: Any, hint: Any, data: Any, meta: typing.Mapping[str, Any], where: str, key: str) -> dict:
    if not isinstance(data, dict):
        fail(where, key, f"got {_shown(data)}, needed {describe(hint, meta)}")
    allowed = meta["keys"]() if "keys" in meta else None
    for name in data:
        if not isinstance(name, str):
            fail(where, _join(key, name), f"got the key {name!r}, needed text; quote it")
        if allowed is not None and name not in allowed:
            fail(
                where,
                _join(key, name),
                f"unknown name; allowed: {', '.join(allowed)}{nearest(name, allowed)}",
            )
    return {name: _value(inner, item, meta, where, _join(key, name)) for name, item in data.items()}


def _scalar(hint: Any, data: Any, meta: typing.Mapping[str, Any], where: str, key: str) -> Any:
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        data = float(data)
    if not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool):
        mend = _number_mend(data) if hint in (int, float) else ""
        if hint is str and isinstance(data, bool | int | float):
            mend = f"; quote it: '{str(data).lower() if isinstance(data, bool) else data}'"
        fail(where, key, f"got {_shown(data)}, needed {describe(hint, meta)}{mend}")
    if hint in (int, float):
        bad = (
            data != data
            or data in (float("inf"), float("-inf"))
            or ("min" in meta and data < meta["min"])
            or ("above" in meta and data <= meta["above"])
            or ("max" in meta and data > meta["max"])
        )
        if bad:
            fail(where, key, f"got {data!r}, needed {describe(hint, meta)}")
    if hint is str:
        if "allowed" in meta:
            allowed = meta["allowed"]()
            if data not in allowed:
                fail(where, key, f"got {data!r}; allowed: {', '.join(allowed)}{nearest(data, allowed)}")
        if "pattern" in meta and not re.fullmatch(meta["pattern"], data):
            fail(where, key, f"got {data!r}, needed text that matches {meta['pattern']}")
    return data


def _number_mend(data: Any) -> str:
    """YAML 1.1 reads ``1e-3``, ``1e3`` and ``1.0e3`` as text: say so and spell the number it will read."""
    if not isinstance(data, str):
        return ""
    try:
        value = float(data)
    except ValueError:
        return ""
    if value != value or value in (float("inf"), float("-inf")):
        return ""
    match = re.fullmatch(r"([+-]?\d+)(\.\d*)?[eE]([+-]?)(\d+)", data.strip())
    if match:
        whole, part, sign, power = match.groups()
        fraction = part if part and part != "." else ".0"
        return f"; YAML reads {data} as text: write {whole}{fraction}e{sign or '+'}{power}"
    return f"; remove the quotes: {data.strip()}"


# ---- JSON Schema ---------------------------------------------------------------------------------


def schema(cls: type, title: str, description: str) -> dict[str, Any]:
    """JSON Schema 2020-12 of dataclass ``cls``; every object is closed (additionalProperties: false)."""
    definitions: dict[str, Any] = {}
    body = _object_schema(cls, definitions)
    definitions.pop(cls.__name__, None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": description,
        **body,
        **({"$defs": dict(sorted(definitions.items()))} if definitions else {}),
    }


def _object_schema(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        item = _type_schema(hints[field.name], field.metadata, definitions)
        if "doc" in field.metadata:
            item = {"description": field.metadata["doc"], **item}
        if field.default is not dataclasses.MISSING:
            item["default"] = to_plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            item["default"] = to_plain(field.default_factory())
        else:
            required.append(field.name)
        properties[field.name] = item
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_JSON = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def _type_schema(hint: Any, meta: typing.Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # break cycles
            definitions[hint.__name__] = _object_schema(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if origin is Literal:
        return {"enum": list(args)} if len(args) > 1 else {"const": args[0]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(a, meta, definitions) for a in args]}
    if origin is tuple:
        items = {"type": "array", "items": _type_schema(args[0], meta, definitions)}
        return items if args[-1] is Ellipsis else {**items, "minItems": len(args), "maxItems": len(args)}
    if origin is dict:
        names = {"propertyNames": {"enum": list(meta["keys"]())}} if "keys" in meta else {}
        return {"type": "object", **names, "additionalProperties": _type_schema(args[1], meta, definitions)}
    out: dict[str, Any] = {"type": _JSON[hint]}
    if hint in (int, float):
        bounds = (("min", "minimum"), ("above", "exclusiveMinimum"), ("max", "maximum"))
        out.update({name: meta[k] for k, name in bounds if k in meta})
    if hint is str and "allowed" in meta:
        out["enum"] = list(meta["allowed"]())
    if hint is str and "pattern" in meta:
        out["pattern"] = f"^(?:{meta['pattern']})$"
    return out
