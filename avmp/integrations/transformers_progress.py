"""How far each layer of a cache has come: what shows that a forward was interrupted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from avmp.errors import Inconsistent


class Asked(NamedTuple):
    """The layer that asked for its state last, and its ``advanced`` and the ``reach`` before that."""

    layer: int
    advanced: int
    reach: int


class Progress:
    """``seen[layer]`` is how many tokens an attention layer has brought, padding included, ``advanced[layer]`` how many
    have gone into the state of a state layer, and ``reach`` is how many the layer that is furthest has, or those that
    there is memory for, where these are more.

    Between two forwards ``reach == seen[layer] == advanced[layer]`` for every layer, ``halfway``, a layer whose window
    is ahead of its recurrent state, is None, and ``torn``, rows that are on their way back to fewer tokens, is False.
    A forward that begins otherwise is refused, for the last one, or the way back, was interrupted.
    """

    def __init__(self, attention_layers: Iterable[int], state_layers: Iterable[int]) -> None:
        self.seen, self.advanced = dict.fromkeys(attention_layers, 0), dict.fromkeys(state_layers, 0)
        self.set_length(0)

    def tear(self, length: int) -> None:
        """The rows are about to go back to ``length``, and are not whole until ``set_length`` says that they have."""
        self.torn = True
        self.seen, self.advanced = dict.fromkeys(self.seen, length), dict.fromkeys(self.advanced, length)

    def set_length(self, length: int) -> None:
        """All layers are equally far."""
        self.tear(length)
        self.halfway: int | None = None
        self._asked: Asked | None = None
        self.reach = length
        self.torn = False

    @property
    def whole(self) -> int:
        """How many tokens all layers have."""
        return min((*self.seen.values(), *self.advanced.values()))

    @property
    def is_first(self) -> bool:
        """Whether some layer has no tokens: in the first forward, and behind a crop to 0."""
        return self.whole == 0

    @property
    def behind(self) -> list[int]:
        """Layers that the last forward did not come to, or not to the end of; all of them where rows are torn."""
        counts = (*self.seen.items(), *self.advanced.items())
        halfway = set() if self.halfway is None else {self.halfway}
        return sorted({layer for layer, tokens in counts if self.torn or tokens != self.reach} | halfway)

    @property
    def remedy(self) -> str:
        """What helps where layers are behind."""
        if not self.seen:
            return "reset() the cache: with states only, it has nothing to go back to"
        if self.advanced:
            return f"crop the cache to a checkpoint (all layers have {self.whole} tokens), or reset() it"
        return f"crop the cache (crop(0) goes back to the {self.whole} tokens that all layers have), or reset() it"

    def require_whole(self) -> None:
        """Raises Inconsistent where the last forward brought its tokens to some of the layers only."""
        if self.torn:
            raise Inconsistent(f"the last crop() or reset() was interrupted; {self.remedy}")
        behind = self.behind
        if behind:
            raise Inconsistent(
                f"the last forward was interrupted: it did not come to layers {behind}, or not to the end of them; "
                f"{self.remedy}"
            )

    def go_on(self, layer: int, before: int, tokens: int | None) -> None:
        """A layer that had ``before`` tokens gets more, None: an unknown number. Raises Inconsistent where others have
        got another number of them, or where a forward begins behind one that was interrupted."""
        if self.torn or before == self.reach:
            self.require_whole()
        elif tokens is not None and before + tokens != self.reach:
            raise Inconsistent(
                f"layer {layer} brings {tokens} tokens behind {before}, others have brought {self.reach} in all; "
                f"{self.remedy}"
            )

    def ask(self, layer: int, tokens: int | None) -> None:
        """A state layer has asked for its state, for so many tokens (None: not known). Nobody is told if it changes it
        in place, as it does for one token: it counts as changed then, until ``take_back`` says that it was not."""
        self.no_longer_asking()
        before = self.advanced[layer]
        self.go_on(layer, before, tokens)
        if tokens in (None, 1):
            self._asked = Asked(layer, before, self.reach)
            self.advanced[layer] = self.reach = max(self.reach, before + 1)

    def take_back(self, layer: int) -> None:
        """The state that the layer has just asked for will be replaced, and was not changed in place."""
        if self._asked is not None and self._asked.layer == layer:
            _, self.advanced[layer], self.reach = self._asked
        self.no_longer_asking()

    def no_longer_asking(self) -> None:
        """What was asked for last has been changed."""
        self._asked = None

    def advance(self, layer: int, tokens: int, halfway: bool) -> None:
        """A state layer replaces its window by that ``tokens`` later, and, if ``halfway``, its recurrent state next."""
        before = self.advanced[layer]
        self.go_on(layer, before, tokens)
        self.advanced[layer] = self.reach = before + tokens
        self.halfway = layer if halfway else None
