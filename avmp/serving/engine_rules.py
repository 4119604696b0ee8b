"""What the engine of a server is set to."""

from __future__ import annotations

from dataclasses import dataclass

from avmp.errors import InvalidArgument
from avmp.geometry import require_count

PREEMPTIONS = ("recompute", "swap")


@dataclass(frozen=True)
class EngineRules:
    """What an engine is set to; budget and batch are those of vLLM's server on a large GPU.

    ``reserve_tokens`` is the room that an admission must leave for each running request, the new one included, to grow
    into; a request that runs alone needs none. A page each, the default, prevents nearly all preemptions, most of
    which would follow from the admission just before; vLLM admits without (0). With ``swap`` the host has room for all.
    """

    token_budget: int = 8192
    max_batch: int = 1024
    preemption: str = "recompute"
    reserve_tokens: int = 16

    def __post_init__(self) -> None:
        require_count("token_budget", self.token_budget)
        require_count("max_batch", self.max_batch)
        require_count("reserve_tokens", self.reserve_tokens, 0)
        if self.token_budget < self.max_batch:
            raise InvalidArgument(
                f"token_budget={self.token_budget} is less than max_batch={self.max_batch}: a decoding batch must fit"
            )
        if self.preemption not in PREEMPTIONS:
            raise InvalidArgument(f"preemption {self.preemption!r}: expected one of {', '.join(PREEMPTIONS)}")
