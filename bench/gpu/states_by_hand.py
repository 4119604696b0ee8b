"""What is right for the state operations, token by token in float64, and what a careful low precision makes of it: for
calls as ``problems.py`` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

Call = dict[str, Any]
Results = tuple[torch.Tensor, torch.Tensor]


def by_hand(operation: str, call: Call, dtype: torch.dtype = torch.float64) -> Results:
    """Output and state afterwards of ``selective_state_update`` or ``causal_conv1d_update``, on the CPU, computed in
    ``dtype``: results are float64, or with another dtype rounded to those of x and of the state. The call stays as it
    is."""
    compute, state = {
        "selective_state_update": (updated, "state"),
        "causal_conv1d_update": (convolved, "conv_state"),
    }[operation]
    on_cpu = {name: value.cpu() if torch.is_tensor(value) else value for name, value in call.items()}
    wide = {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in on_cpu.items()
    }
    out, after = compute(wide)
    return (out, after) if dtype == torch.float64 else (out.to(call["x"].dtype), after.to(call[state].dtype))


def rows(call: Call) -> Iterator[tuple[bool, int, range, list[int]]]:
    """Of each row that has a slot: whether it begins from its state, that slot, its tokens, and the slot that the state
    after each of them goes to."""
    ids = call["state_indices"].view(len(call["state_indices"]), -1)
    starts = call["query_start_loc"].tolist() if "query_start_loc" in call else range(len(ids) + 1)
    for row, own in enumerate(ids.tolist()):
        accepted = int(call["num_accepted_tokens"][row]) if "num_accepted_tokens" in call else 1
        if own[accepted - 1] < 1:
            continue
        slots = call["slot_table"][own].tolist()
        tokens = range(starts[row], starts[row + 1])
        targets = slots[: len(tokens)] if len(own) > 1 else slots * len(tokens)
        yield bool(call.get("has_initial_state", [True] * len(ids))[row]), slots[accepted - 1], tokens, targets


def updated(call: Call) -> Results:
    """``h = h * exp(dt * A) + dt * x * B``, and ``y = (C . h + D * x) * silu(z)``."""
    state, out = call["state"].clone(), torch.zeros_like(call["x"])
    for known, source, tokens, targets in rows(call):
        h = call["state"][source] * known
        for token, target in zip(tokens, targets, strict=True):
            x, z = call["x"][token], call["z"][token]
            delta = F.softplus(call["dt"][token] + call["dt_bias"])
            b, c = call["B"][token], call["C"][token]
            if h.dim() == 3:  # groups of heads share B and C
                b, c = (one.repeat_interleave(len(h) // len(one), 0).unsqueeze(1) for one in (b, c))
            h = h * torch.exp(delta.unsqueeze(-1) * call["A"]) + (delta * x).unsqueeze(-1) * b
            out[token] = ((h * c).sum(-1) + call["D"] * x) * z * torch.sigmoid(z)
            state[target] = h
    return out, state


def convolved(call: Call) -> Results:
    """Every channel's latest inputs, times its weights; the state is what comes before the next token."""
    state, out = call["conv_state"].clone(), torch.zeros_like(call["x"])
    for known, source, tokens, targets in rows(call):
        window = call["conv_state"][source] * known
        for token, target in zip(tokens, targets, strict=True):
            window = torch.cat([window, call["x"][token].unsqueeze(1)], 1)
            y = (window * call["weight"]).sum(1) + call["bias"]
            out[token] = y * torch.sigmoid(y)
            window = window[:, 1:]
            state[target] = window
    return out, state
