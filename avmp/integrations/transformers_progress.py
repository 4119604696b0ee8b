"""How far each layer of a cache has come: what shows that a forward was interrupted."""

from __future__ import annotations

from collections.abc import Iterable

from avmp.errors import Inconsistent


class Progress:
    """``seen[layer]`` is how many tokens an attention layer has brought, padding included, ``advanced[layer]`` how many
    have gone into the state of a state layer, and ``reach`` is the most of all layers.

    Between two forwards ``reach == seen[layer] == advanced[layer]`` for every layer, and ``halfway``, a layer whose
    window is ahead of its recurrent state, is None. A forward that begins otherwise is refused, for the last one was
    interrupted.
    """

    def __init__(self, attention_layers: Iterable[int], state_layers: Iterable[int]) -> None:
        self.seen, self.advanced = dict.fromkeys(attention_layers, 0), dict.fromkeys(state_layers, 0)
        self.set_length(0)

    def set_length(self, length: int) -> None:
        """All layers are equally far."""
        self.reach = length
        self.seen, self.advanced = dict.fromkeys(self.seen, length), dict.fromkeys(self.advanced, length)
        self.halfway: int | None = None
        self._asked: tuple[int, int, int] | None = None

    @property
    def is_first(self) -> bool:
        """Whether no forward has come to its end yet."""
        return 0 in (*self.seen.values(), *self.advanced.values())

    @property
    def behind(self) -> list[int]:
        """Layers that the last forward did not come to, or not to the end of."""
        counts = (*self.seen.items(), *self.advanced.items())
        halfway = set() if self.halfway is None else {self.halfway}
        return sorted({layer for layer, tokens in counts if tokens != self.reach} | halfway)

    def require_whole(self) -> None:
        """Raises Inconsistent where the last forward brought its tokens to some of the layers only."""
        behind = self.behind
        if behind:
            raise Inconsistent(
                f"the last forward was interrupted: it did not come to layers {behind}; crop the cache to a length "
                "that it had before (with states, to a checkpoint), or reset() it"
            )

    def go_on(self, layer: int, before: int, tokens: int | None) -> None:
        """A layer that had ``before`` tokens gets more, None: an unknown number. Raises Inconsistent where others have
        got another number of them, or where a forward begins behind one that was interrupted."""
        if before == self.reach:
            self.require_whole()
        elif tokens is not None and before + tokens != self.reach:
            raise Inconsistent(
                f"layer {layer} brings {tokens} tokens behind {before}, others have brought {self.reach} in all: "
                "crop the cache to a length that it had before (with states, to a checkpoint), or reset() it"
            )

    def ask(self, layer: int, tokens: int | None) -> None:
        """A state layer has asked for its state, for so many tokens (None: not known). Nobody is told if it changes it
        in place, as it does for one token: it counts as changed then, until ``take_back`` says that it was not."""
        before = self.advanced[layer]
        self.go_on(layer, before, tokens)
        if tokens in (None, 1):
            self._asked = layer, before, self.reach
            self.advanced[layer] = self.reach = max(self.reach, before + 1)

    def take_back(self, layer: int) -> None:
        """The state that the layer has just asked for will be replaced, and was not changed in place."""
        if self._asked is not None and self._asked[0] == layer:
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
