"""A transformers ``Cache`` whose memory is one arena, and ``attn_implementation="avmp"``, which reads it in place.

Importing this module registers the attention. It raises ImportError without transformers, and Unsupported for a version
of it that does not work.
"""

from __future__ import annotations

from avmp.integrations.transformers_versions import require_installed

require_installed()

from avmp.integrations.transformers_attention import register  # noqa: E402
from avmp.integrations.transformers_cache import AvmpCache, Checkpoint  # noqa: E402

__all__ = ["AvmpCache", "Checkpoint"]

register()
