"""Operations as torch knows them: ``torch.ops.avmp``, with declared mutation and fakes, for whatever traces code.

Every operation is registered twice. ``torch.ops.avmp.write_kv`` takes caches as tensors, each of its own, as anybody's
caches are. ``torch.ops.avmp.write_kv.arena`` is for views of an arena (``avmp/places.py``): the one mutated argument
is the memory of the arena, uint8 ``[bytes]``, and a cache is ``[byte offset, *sizes, *strides]`` in it with a dtype. So
a graph has the arena as one input, and nothing has to be copied to keep its views apart. ``out`` and ``arena_out`` are
the same with a result written in place.

Eager calls do not come here: ``run`` tells them apart, for the way through the dispatcher costs about 10 µs, as much as
launching a kernel. Inference only: no operation has a gradient, and one is never dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from avmp import bounds
from avmp.backends import chosen_backend, load
from avmp.errors import Unsupported
from avmp.id_checks import check_arguments, check_ids
from avmp.places import Place, place_of, view_at
from avmp.schemas import OPERATIONS
from avmp.step_tables import BatchLike

_KINDS = (torch.Tensor, torch.nn.Parameter)


# -- called ----------------------------------------------------------------------------------------------------------


def run(operation: str, arguments: dict[str, Any], backend: str | None = None, batch: BatchLike | None = None) -> Any:
    """What the operation returns for these arguments, by name, the first as in its schema: computed at once, or, where
    code is traced, entered into the graph. A graph runs with other batches than it was traced with, and so knows no
    limits; ``use_bounds_checks`` counts there as well."""
    if torch.is_grad_enabled():
        _refuse_gradients(operation, arguments)
    pool_backend = None if batch is None else batch.backend
    if traced(next(iter(arguments.values()))):
        return _enter(operation, arguments, backend, pool_backend)
    return _compute(operation, arguments, backend, pool_backend, None if batch is None else batch.limits)


def traced(tensor: torch.Tensor) -> bool:
    """Whether torch looks at what is done instead of doing it: compiling, exporting, fake or meta tensors, and
    whoever else intercepts operations."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _KINDS
        or tensor.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _refuse_gradients(operation: str, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise Unsupported(
                f"{operation}: {name} requires a gradient, and there is none to be had; call it under torch.no_grad() "
                "or torch.inference_mode()"
            )


def _compute(
    operation: str,
    arguments: dict[str, Any],
    backend: str | None,
    pool_backend: str | None,
    limits: bounds.Limits | None = None,
) -> Any:
    subject = next(iter(arguments.values()))
    chosen = chosen_backend(subject, backend, pool_backend)
    if bounds.wanted(limits):
        check_arguments(operation, arguments)  # first: checks of ids take the shapes for granted
        check_ids(operation, arguments, limits, chosen)
    return load(operation, chosen)(**arguments)


def _enter(operation: str, arguments: dict[str, Any], backend: str | None, pool_backend: str | None) -> Any:
    """The call in the form that suits where its caches lie. Dynamo traces this."""
    caches = [name for name in OPERATIONS[operation].caches if arguments[name] is not None]
    given = {name: value for name, value in arguments.items() if name != "out"}
    out = arguments.get("out")
    arena, offsets = _places([given[name] for name in caches])
    if arena is not None:
        given["arena"] = arena
        for name in OPERATIONS[operation].caches:
            given[name + "_dtype"] = None
        for name, offset in zip(caches, offsets, strict=True):
            cache = given[name]
            given[name] = [offset, *cache.shape, *cache.stride()]
            given[name + "_dtype"] = cache.dtype
    packet = getattr(torch.ops.avmp, operation)
    if out is None:
        overload = packet.default if arena is None else packet.arena
        return overload(**given, backend=backend, pool_backend=pool_backend)
    overload = packet.out if arena is None else packet.arena_out
    rest = overload(**given, out=out, backend=backend, pool_backend=pool_backend)
    return out if rest is None else (out, rest)


def _places(caches: list[torch.Tensor]) -> tuple[torch.Tensor | None, list[int]]:
    """The memory of the arena that all of them lie in, and at which bytes; None where there is no such."""
    arena, offsets = None, []
    for cache in caches:
        place = place_of(cache)
        if place is None or (arena is not None and arena is not place.memory):
            return None, []
        arena = place.memory
        offsets.append(place.offset)
    return arena, offsets


# -- registered ------------------------------------------------------------------------------------------------------


def _view(arena: torch.Tensor, place: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The view at ``[byte offset, *sizes, *strides]``."""
    behind_sizes = 1 + len(place) // 2
    return view_at(Place(arena, place[0]), place[1:behind_sizes], place[behind_sizes:], dtype)


def _numbers(values: Iterable[Any]) -> Iterator[Any]:
    """All values, and all sizes and strides of those that are tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield from (*value.shape, *value.stride())
        else:
            yield value


class _Form:
    """One operation in one form, as the dispatcher calls it: registered when made, after the plain form."""

    def __init__(self, library: torch.library.Library, name: str, in_arena: bool, has_out: bool) -> None:
        self.name, self.in_arena, self.has_out = name, in_arena, has_out
        self.operation = OPERATIONS[name]
        overload = "_".join(word for word, there in (("arena", in_arena), ("out", has_out)) if there)
        self.full_name = f"{name}.{overload}" if overload else name
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        library.define(self._schema(), tags=tags)  # type: ignore[no-untyped-call]
        packet = getattr(torch.ops.avmp, name)
        plain = [argument.name for argument in packet.default._schema.arguments]
        own = getattr(packet, overload or "default")._schema.arguments
        self._names = [argument.name for argument in own]
        defaults = {argument.name: argument.default_value for argument in own}
        self._defaults = {name: defaults.get(name) for name in plain} | defaults
        library.impl(self.full_name, self._compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"avmp::{self.full_name}", self._fake, lib=library)

    def _schema(self) -> str:
        arguments, operation = self.operation.arguments, self.operation
        if self.in_arena:
            written = False
            for cache in operation.caches:
                kind = re.search(rf"Tensor(\(\w!\))?(\??) {cache}\b", arguments)
                assert kind is not None
                written |= kind[1] is not None
                place = f"SymInt[]{kind[2]} {cache}, ScalarType{kind[2]} {cache}_dtype"
                arguments = arguments.replace(kind[0], place)
            arguments = f"Tensor{'(a!)' if written else ''} arena, *, {arguments.replace('*, ', '')}"
        elif "*" not in arguments:
            arguments += ", *"
        if self.has_out:
            arguments += ", Tensor(z!) out"
        results = ", ".join(["Tensor"] * (operation.results - self.has_out))
        return f"{self.full_name}({arguments}, str? backend=None, str? pool_backend=None) -> ({results})"

    def _given(self, positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, in the order of the plain form, caches as tensors. The dispatcher leaves out what
        equals its default."""
        given = self._defaults | dict(zip(self._names, positional, strict=False)) | keywords
        if self.in_arena:
            arena = given.pop("arena")
            for cache in self.operation.caches:
                dtype = given.pop(f"{cache}_dtype")
                if dtype is not None:
                    given[cache] = _view(arena, given[cache], dtype)
        return given

    def _compute(self, *positional: Any, **keywords: Any) -> Any:
        given = self._given(positional, keywords)
        backend, pool_backend = given.pop("backend"), given.pop("pool_backend")
        return self._results(_compute(self.name, given, backend, pool_backend))

    def _fake(self, *positional: Any, **keywords: Any) -> Any:
        given = self._given(positional, keywords)
        del given["backend"], given["pool_backend"]
        # Sizes that stand for any number are left alone: a check would bind the graph to what it was traced with.
        if not any(isinstance(one, torch.SymInt) for one in _numbers(given.values())):
            check_arguments(self.name, given)
        return self._results(self.operation.fake(**given))

    def _results(self, made: Any) -> Any:
        """As the schema has them: without what was written in place, and an empty tensor for None."""
        if not self.operation.results:
            return None
        made = made if isinstance(made, tuple) else (made,)
        results = [made[0].new_empty(0) if one is None else one for one in made][self.has_out :]
        return tuple(results) if len(results) > 1 else results[0] if results else None


def _register() -> torch.library.Library:
    library = torch.library.Library("avmp", "DEF")  # type: ignore[no-untyped-call]
    for name, operation in OPERATIONS.items():
        for in_arena in (False, True) if operation.caches else (False,):
            for has_out in (False, True) if operation.out else (False,):
                _Form(library, name, in_arena, has_out)
    return library


_LIBRARY = _register()
"""The registrations last as long as this."""
