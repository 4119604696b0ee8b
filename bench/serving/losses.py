"""The part of the report that comes first: where avmp loses, and what the losses are due to."""

from __future__ import annotations

import textwrap

from avmp.layout import Layout
from avmp.named_models import named_model
from avmp.text_table import format_table
from bench.serving.causes import BATCH, BOTH, EITHER, NEITHER, NULL_AREA, ORDER, cause
from bench.serving.study import NOTHING, SOME, Gain, Record, Study


def losses(study: Study) -> str:
    """Every cell in which best-static or vllm is ahead of avmp, over the whole run or while requests arrive."""
    compared = len(study.gains("best-static")) + len(study.gains("vllm"))
    behind = study.losses()
    if not behind:
        return f"## Where avmp loses\n\nIn none of {compared} comparisons with best-static and vllm."
    rows, found = [], []
    for gain in behind:
        oracle, theirs, ours = (study.get(*gain.cell, policy) for policy in ("oracle", gain.other, "avmp"))
        assert oracle and theirs and ours
        why = study.causes.get(theirs["key"])
        found.append((gain, cause(why, NOTHING) if why else "not known yet"))
        rows.append(
            [
                gain.place,
                gain.other,
                _hundredths(1 + gain.whole),
                str(gain),
                _over(oracle, theirs),
                f"{_null_share(gain.model, ours):.2%}",
                *_changed(why),
                found[-1][1],
            ]
        )
    header = ["cell", "against", "whole run", "while requests arrive", "the oracle", "null area"]
    changes = ["other less the null area", "avmp with it given back", "avmp, batch bounded", "both", "due to"]
    return f"""## Where avmp loses

In {len(behind)} of {compared} comparisons with best-static and vllm, avmp serves fewer tokens per second over
the whole run (by more than {NOTHING:.3%}) or while requests arrive (by more than {SOME:.1%}). All columns after that of
the interval are over the whole run. To find the cause, one thing is changed at a time: the other policy gets the arena
less avmp's null area (a split is searched for anew); avmp gets the null area on top; avmp's batch is bounded by the
other's largest; the last two together. The columns show how far avmp is then ahead.

{format_table([*header, *changes], rows)}

{_in_words(study, found)}"""


def _over(ours: Record, theirs: Record) -> str:
    return _hundredths(ours["result"]["tokens_per_second"] / theirs["result"]["tokens_per_second"])


def _changed(why: Record | None) -> list[str]:
    """How far avmp is ahead with each change."""
    if why is None:
        return ["-"] * 4
    gains = [why["avmp"] / why["other_less_null"]]
    gains += [why[name] / why["other"] for name in ("null_given_back", "batch_bounded", "both")]
    return [_hundredths(gain) for gain in gains]


def _hundredths(ratio: float) -> str:
    """``+0.12%`` of 1.0012, and never ``-0.00%``."""
    return f"{round(ratio - 1, 4) + 0.0:+.2%}"


def _in_words(study: Study, found: list[tuple[Gain, str]]) -> str:
    """What the causes mean for whoever runs a server; only of those that occur."""
    names = [name for _, name in found]
    neither = [gain for gain, name in found if name == NEITHER]
    meaning = {
        NULL_AREA: "avmp sets a null page and slot aside for padded rows, and the splits here pay for nothing of the "
        "kind (real ones do: SGLang's slot 0), vLLM's rule for one block. This is avmp's own: bounding its batch "
        "does not make up for it, an arena that is larger by the null area does.",
        BATCH: "a split found with hindsight bounds the batch, and a smaller one mixes prompts and decoding better on "
        "this trace. avmp with `max_batch` set to the same bound is level or ahead, in the same arena.",
        EITHER: "each of the two is enough to undo it.",
        BOTH: "only the two changes together make up for it.",
        ORDER: "over the whole run avmp is level or ahead; its tokens come at other times.",
        NEITHER: "no change makes up for it. " + _preempted(study, neither),
    }
    items = [f"- {name} ({names.count(name)}): {text}" for name, text in meaning.items() if name in names]
    return "\n".join(textwrap.fill(item, 120, subsequent_indent="  ", break_on_hyphens=False) for item in items)


def _preempted(study: Study, gains: list[Gain]) -> str:
    """How often avmp and the others preempt in these cells."""
    told = []
    for gain in gains:
        records = [study.get(*gain.cell, policy) for policy in ("avmp", gain.other)]
        ours, theirs = (record["result"]["preemptions"] if record else 0 for record in records)
        told.append(f"{ours:,} times, {gain.other} {theirs:,} ({gain.place})")
    return f"avmp preempts {'; '.join(told)}." if told else ""


def _null_share(model: str, record: Record) -> float:
    layout = Layout.plan(named_model(model, convention="vllm"), record["arena_bytes"])
    return layout.null_bytes / layout.arena_bytes
