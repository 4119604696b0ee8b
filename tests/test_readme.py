"""What the README shows is what happens."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import avmp
from avmp.backends import BACKENDS
from avmp.cli import main
from avmp.options import markdown_table
from avmp.schemas import OPERATIONS
from bench.policy import readme_table
from bench.serving.grid import grid
from bench.serving.record import load
from bench.serving.report import Study
from bench.serving.report import readme_table as serving_table


def block(repository: Path, marker: str) -> str:
    """The fenced block, or the lines up to the next empty one, behind ``<!-- marker -->``."""
    text = (repository / "README.md").read_text(encoding="utf-8").split(f"<!-- {marker} -->\n", 1)[1]
    fenced = re.match(r"```\w+\n(.*?)```\n", text, re.DOTALL)
    return fenced[1] if fenced else text.split("\n\n", 1)[0] + "\n"


def test_the_ten_lines_of_use_run(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = block(repository, "use")
    names: dict[str, Any] = {}
    exec(compile(source, "README.md", "exec"), names)
    assert 8 <= len([line for line in source.splitlines() if line.strip()]) <= 13
    q, k, v, out, pool = (names[name] for name in ("q", "k", "v", "out", "pool"))
    assert names["batch"].num_tokens == len(q) == 637 and pool.kv(4)[0].shape[1:] == (16, 8, 128)
    begin = 100  # the second sequence, by torch's own attention
    q, k, v = (tensor[begin : begin + 37].float().transpose(0, 1) for tensor in (q, k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=128**-0.5, enable_gqa=True)
    torch.testing.assert_close(out[begin : begin + 37].float().transpose(0, 1), expected, rtol=2**-7, atol=2**-7)
    pool.release(names["draft"])
    pool.check()
    assert pool.stats().pages_live == pool.stats().slots_live == 0
    assert re.fullmatch(r"\d+ (True|False) \d+\n", capsys.readouterr().out)


def test_the_ten_lines_for_transformers_run(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version < (5, 24):
        pytest.skip("the README shows the keyword and the attention of transformers 5.24")
    source = block(repository, "transformers")
    assert 8 <= len([line for line in source.splitlines() if line.strip()]) <= 13
    names: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), names)
    assert capsys.readouterr().out == "13 21 20 12 6\n"
    cache = names["cache"]
    cache.reset()  # type: ignore[attr-defined]
    names["branch"].reset()  # type: ignore[attr-defined]
    assert cache.pool.stats().used_bytes == 0  # type: ignore[attr-defined]


DESIGN = """
geometry = avmp.Geometry.from_config("config.json", page_tokens=16)
pool = avmp.CachePool(geometry, "8GiB", device="cuda", max_rows=256, max_tokens_per_sequence=8192)

seqs = pool.admit([1000, 37, 5000])
batch = pool.batch(seqs)
avmp.write_kv(k, v, *pool.kv(layer), batch)
out = avmp.paged_attention(q, *pool.kv(layer), batch, scale=scale)
draft = pool.fork(seqs[0], 1)
pool.extend(seqs)
pool.release(seqs)
"""
JAMBA = {
    "model_type": "jamba",
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "dtype": "float32",
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_design_s_own_lines_run_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: None, backend: str
) -> None:
    """As they stand, but for the device, a small model and short sequences."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(JAMBA), encoding="utf-8")
    source = DESIGN.replace('"8GiB", device="cuda"', f'"64MiB", device="cpu", backend="{backend}"')
    source = source.replace("[1000, 37, 5000]", "[100, 37, 5]")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(142, heads, 16, generator=generator) for heads in (4, 2, 2))
    names: dict[str, Any] = {"avmp": avmp, "q": q, "k": k, "v": v, "layer": 4, "scale": 0.25}
    exec(compile(source, "design", "exec"), names)
    q, k, v = (tensor[100:137].transpose(0, 1) for tensor in (q, k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(names["out"][100:137].transpose(0, 1), expected)
    assert names["out"].shape == (142, 4, 16) and names["pool"].backend.name == backend


def test_the_table_of_operations_names_them_all(repository: Path) -> None:
    rows = [line.split("|")[1:6] for line in block(repository, "operations").splitlines()[2:]]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(OPERATIONS)
    assert all(callable(getattr(avmp, name)) for name in named)
    assert {row[3].strip() for row in rows} == {", ".join(sorted(BACKENDS, reverse=True))}
    elsewhere = [name for row in rows for name in re.findall(r"`(\w+)\.(\w+)`", row[2])]
    assert len(elsewhere) > 5
    for module, name in elsewhere:
        assert callable(getattr(importlib.import_module(f"avmp.compat.{module}"), name))


def test_the_replay_table_is_what_the_command_prints(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay"]) == 0
    assert capsys.readouterr().out == block(repository, "replay")


def test_the_table_of_options_is_complete(repository: Path) -> None:
    assert block(repository, "options") == markdown_table() + "\n"


def test_the_table_of_costs_is_the_recorded_one(repository: Path) -> None:
    lines = (repository / "bench" / "results" / "policy.jsonl").read_text(encoding="utf-8").splitlines()
    assert block(repository, "costs") == readme_table([json.loads(line) for line in lines]) + "\n"


def test_the_table_of_the_serving_study_is_the_recorded_one(repository: Path) -> None:
    found = load(repository / "bench" / "results" / "serving.jsonl")
    assert block(repository, "serving study") == serving_table(Study(found, grid()[0].requests)) + "\n"


def test_the_readme_names_files_that_exist(repository: Path) -> None:
    named = re.findall(r"`((?:avmp|tests|bench|kernels)/[\w./]*)`", (repository / "README.md").read_text())
    assert len(named) > 15
    assert [name for name in named if not (repository / name).exists()] == []
