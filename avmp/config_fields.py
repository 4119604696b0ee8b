"""Reading one field of a transformers configuration, whichever way it comes: object, mapping or config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from avmp.errors import InvalidArgument


class Fields:
    """The fields of a configuration, whether a mapping or an object; a field that is None counts as missing."""

    def __init__(self, config: object, model_type: str) -> None:
        self._config = config
        self.model_type = model_type

    def get(self, *names: str) -> Any:
        """The first of the fields ``names`` (today's name, then older ones) that is there; otherwise None."""
        for name in names:
            value = field(self._config, name)
            if value is not None:
                return value
        return None

    def optional_count(self, *names: str) -> int | None:
        """A field that is an integer above zero, None if it is missing; InvalidArgument for anything else."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InvalidArgument(f"{self.model_type} config: {names[0]}={value!r}: expected an integer above zero")
        return value

    def count(self, *names: str, default: int | None = None) -> int:
        """A field that is an integer above zero; ``default`` if it is missing, InvalidArgument without a default."""
        value = self.optional_count(*names) or default
        if value is None:
            raise self.missing(*names)
        return value

    def list(self, *names: str) -> Sequence[Any] | None:
        """A field that is a list; None if it is missing."""
        value = self.get(*names)
        if value is not None and not isinstance(value, (list, tuple)):
            raise InvalidArgument(f"{self.model_type} config: {names[0]}={value!r}: expected a list")
        return value

    def missing(self, *names: str) -> InvalidArgument:
        """The error for a field that is not there."""
        return InvalidArgument(f"{self.model_type} config: field {' or '.join(names)} is missing")


def dtype_name(dtype: object) -> str | None:
    """The name "bfloat16" for "bfloat16", "torch.bfloat16" or torch.bfloat16 itself; None for None and "auto"."""
    name = str(dtype).removeprefix("torch.")
    return None if dtype is None or name == "auto" else name


def config_dtype(config: object) -> str | None:
    """The dtype that the configuration itself names, today's field before the older one."""
    # Asking a newer configuration object for torch_dtype logs a deprecation warning.
    has_dtype = "dtype" in config if isinstance(config, Mapping) else hasattr(config, "dtype")
    return dtype_name(field(config, "dtype" if has_dtype else "torch_dtype"))


def field(config: object, name: str) -> Any:
    """One field, None if it is not there."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def load_config(config: object) -> object:
    """``config`` itself, or what the config.json at that path or in that folder holds; InvalidArgument without one."""
    if not isinstance(config, (str, os.PathLike)):
        return config
    path = Path(config)
    file = path / "config.json" if path.is_dir() else path
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"config file {str(file)!r}: {error}") from error
    if not isinstance(loaded, dict):
        raise InvalidArgument(f"config file {str(file)!r}: expected a JSON object, got {type(loaded).__name__}")
    return loaded
