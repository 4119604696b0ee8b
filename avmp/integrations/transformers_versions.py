"""Which versions of transformers work, found out without importing it."""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib import metadata

from avmp.errors import InvalidArgument, Unsupported

OLDEST, NEWEST_TESTED = (5, 20), (5, 24)
IN_PLACE = (5, 24)
"""From here on models hand the arguments of their attention to the cache, which can then say where its pages are."""


def require_installed() -> tuple[int, int]:
    """The version that is installed. Raises ImportError without one, otherwise as ``require_version`` does."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise ImportError(
            "avmp.integrations.transformers needs transformers: pip install 'avmp-triton[transformers]'"
        ) from None
    return require_version(version)


def require_version(version: str) -> tuple[int, int]:
    """The version as two numbers. Raises Unsupported below 5.20 and from 6 on; warns where it is newer than tested."""
    pair = version_pair(version)
    if not OLDEST <= pair < (6, 0):
        raise Unsupported(
            f"transformers {version} does not work with avmp: 5.20 to 5.24 do (attn_implementation='avmp' from 5.24 on)"
        )
    if pair > NEWEST_TESTED:
        warnings.warn(f"avmp is tested with transformers 5.20 to 5.24; this is {version}", stacklevel=3)
    return pair


def version_pair(version: str) -> tuple[int, int]:
    """The first two numbers of a version. Raises InvalidArgument for what has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise InvalidArgument(f"transformers {version!r}: expected a version like 5.24.0")
    return int(numbers[1]), int(numbers[2])


@cache
def reads_in_place() -> bool:
    """Whether attention can read pages in place with the version that is installed."""
    return version_pair(metadata.version("transformers")) >= IN_PLACE
