"""State updates under their peers' names: orders of arguments, padding, speculation, in place or not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from avmp.backends import use_backend
from avmp.compat import causal_conv1d, mamba_ssm, vllm
from avmp.errors import InvalidArgument, Unsupported
from tests.compat_problems import assert_near
from tests.triton_interpreter import ORDERS, program_order

SLOTS, HEADS, DIM, DSTATE = 9, 4, 8, 16


WAYS = {"torch": ("torch", "forward"), **{f"triton {order}": ("triton", order) for order in ORDERS}}


@pytest.fixture(params=WAYS)
def backend(request: pytest.FixtureRequest, interpreter: None) -> Iterator[str]:
    """For calls that write: by Triton in every order of programs."""
    name, order = WAYS[request.param]
    with use_backend(name), program_order(order, seed=1):
        yield name


class Scan:
    """Arguments of a state update for ``tokens`` tokens, with or without heads, and its step in float64."""

    def __init__(self, tokens: int, heads: bool = True, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        head, group = ((HEADS,), (2,)) if heads else ((), ())
        self.state = torch.randn(SLOTS, *head, DIM, DSTATE, generator=g)
        self.x, self.dt, self.z = (torch.randn(tokens, *head, DIM, generator=g) for _ in range(3))
        self.B, self.C = (torch.randn(tokens, *group, DSTATE, generator=g) for _ in range(2))
        self.A = -torch.rand(*head, DIM, DSTATE, generator=g) - 0.5
        self.D, self.dt_bias = (torch.randn(*head, DIM, generator=g) for _ in range(2))
        self.heads = heads

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.dt, self.A, self.B, self.C

    def step(self, state: torch.Tensor, token: int, with_z: bool = True) -> torch.Tensor:
        """The output of one token; ``state`` float64, updated in place."""
        dt = F.softplus(self.dt[token].double() + self.dt_bias.double())[..., None]
        b, c = self.B[token].double(), self.C[token].double()
        if self.heads:
            b, c = (values.repeat_interleave(HEADS // 2, 0)[:, None] for values in (b, c))
        state.mul_(torch.exp(dt * self.A.double())).add_(dt * b * self.x[token].double()[..., None])
        y = (state * c).sum(-1) + self.D.double() * self.x[token].double()
        return y * F.silu(self.z[token].double()) if with_z else y


@pytest.mark.parametrize("heads", [False, True])
def test_mamba_takes_d_z_dt_bias_and_zeroes_the_output_of_padding(program_order: str, heads: bool) -> None:
    s = Scan(4, heads)
    indices = torch.tensor([3, -1, 0, 7]).int()
    before, state = s.state.clone(), s.state
    with use_backend("triton"):
        out = mamba_ssm.selective_state_update(state, *s.inputs(), s.D, s.z, s.dt_bias, True, indices)
    for token, slot in enumerate(indices.tolist()):
        expected = before[slot].double()
        if slot < 0:
            assert (out[token] == 0).all()
            continue
        assert_near(out[token], s.step(expected, token))
        assert_near(state[slot], expected)
    untouched = [slot for slot in range(SLOTS) if slot not in (3, 0, 7)]
    assert torch.equal(state[untouched], before[untouched])


def test_mamba_without_indices_and_without_options(backend: str) -> None:
    s = Scan(3)
    before = s.state.clone()
    out = mamba_ssm.selective_state_update(s.state, *s.inputs())
    decay = torch.exp(s.dt.double()[..., None] * s.A.double())
    b, c = (values.double().repeat_interleave(2, 1)[:, :, None] for values in (s.B, s.C))
    expected = before[:3].double() * decay + s.dt.double()[..., None] * b * s.x.double()[..., None]
    assert_near(s.state[:3], expected)
    assert_near(out, (expected * c).sum(-1))


@pytest.mark.parametrize(
    ("null", "indices", "padded"),
    [(0, [3, 0, 1], 1), (-1, [3, -1, 0], 1), (5, [3, 0, 5], 2)],
    ids=["block 0", "minus one", "another"],
)
def test_vllm_takes_d_dt_bias_z_and_its_null_block(
    program_order: str, null: int, indices: list[int], padded: int
) -> None:
    s = Scan(3)
    before, out = s.state.clone(), torch.full_like(s.x, 7)
    ids = torch.tensor([*indices, 2]).int()  # one more than there are rows
    with use_backend("triton"):
        result = vllm.selective_state_update(
            s.state, *s.inputs(), s.D, s.dt_bias, s.z, True, ids, null_block_id=null, out=out
        )
    assert result is None and (out[padded] == 0).all()
    for token, slot in enumerate(indices):
        expected = before[slot].double()
        if token != padded:
            assert_near(out[token], s.step(expected, token))
            assert_near(s.state[slot], expected)
    untouched = [slot for slot in range(SLOTS) if slot not in (set(indices) - {indices[padded]})]
    assert torch.equal(s.state[untouched], before[untouched])


def test_vllm_speculation_begins_where_acceptance_says_and_keeps_every_step(program_order: str) -> None:
    s = Scan(5)
    starts, accepted = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 3])
    sources, kept = torch.tensor([[1, 0, 0], [0, 0, 2]]).int(), torch.tensor([[3, 4, 0], [5, 0, 7]]).int()
    before, out = s.state.clone(), torch.empty_like(s.x)
    with use_backend("triton"):
        vllm.selective_state_update(
            s.state, *s.inputs(), s.D, s.dt_bias, None, True, sources, kept,
            out=out, num_accepted_tokens=accepted, cu_seqlens=starts, is_blackwell=True,
        )  # fmt: skip
    for row, slot in enumerate((1, 2)):
        state = before[slot].double()
        for step, token in enumerate(range(int(starts[row]), int(starts[row + 1]))):
            assert_near(out[token], s.step(state, token, with_z=False))
            if kept[row, step]:
                assert_near(s.state[kept[row, step]], state)
    assert torch.equal(s.state[[0, 1, 2, 6, 8]], before[[0, 1, 2, 6, 8]])


def test_vllm_rows_of_several_tokens_go_from_one_slot_to_another(backend: str) -> None:
    s = Scan(5)
    starts, before, out = torch.tensor([0, 2, 2, 5]).int(), s.state.clone(), torch.empty_like(s.x)
    sources, kept = torch.tensor([[1], [2], [3]]).int(), torch.tensor([[4], [5], [3]]).int()
    vllm.selective_state_update(
        s.state, *s.inputs(), s.D, s.dt_bias, s.z, True, sources, kept, out=out, cu_seqlens=starts
    )
    for row, (source, target) in {0: (1, 4), 2: (3, 3)}.items():
        state = before[source].double()
        for token in range(int(starts[row]), int(starts[row + 1])):
            assert_near(out[token], s.step(state, token))
        assert_near(s.state[target], state)
    assert torch.equal(s.state[[0, 1, 2, 5]], before[[0, 1, 2, 5]])


def test_vllm_names_what_it_refuses_of_a_state_update() -> None:
    s = Scan(3)
    with pytest.raises(Unsupported, match="enable_stochastic_rounding is not offered"):
        vllm.selective_state_update(s.state, *s.inputs(), None, None, out=s.x, enable_stochastic_rounding=True)
    with pytest.raises(InvalidArgument, match="out must be given"):
        vllm.selective_state_update(s.state, *s.inputs(), None, None)
    with pytest.raises(InvalidArgument, match="num_accepted_tokens needs"):
        vllm.selective_state_update(s.state, *s.inputs(), None, None, out=s.x, num_accepted_tokens=torch.ones(3))


def last_strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with a stride of 2 along the last dimension."""
    return torch.stack([tensor, torch.full_like(tensor, float("nan"))], -1)[..., 0]


@pytest.mark.parametrize("heads", [False, True])
def test_state_updates_take_any_strides_of_tokens(program_order: str, heads: bool) -> None:
    s = Scan(3, heads)
    indices = torch.tensor([3, 1, 7]).int()
    before, other = s.state.clone(), s.state.clone()
    x, dt, B, C, z = (last_strided(tensor) for tensor in (s.x, s.dt, s.B, s.C, s.z))
    into = last_strided(torch.zeros_like(s.x))
    with use_backend("triton"):
        out = mamba_ssm.selective_state_update(s.state, x, dt, s.A, B, C, s.D, z, s.dt_bias, True, indices)
        vllm.selective_state_update(other, x, dt, s.A, B, C, s.D, s.dt_bias, z, True, indices, out=into)
    for token, slot in enumerate(indices.tolist()):
        expected = before[slot].double()
        assert_near(out[token], s.step(expected, token))
        assert_near(s.state[slot], expected)
    assert torch.equal(into, out) and torch.equal(other, s.state)


def test_a_state_update_s_output_may_be_its_input(program_order: str) -> None:
    s = Scan(5)
    starts, indices, before = torch.tensor([0, 2, 5]).int(), torch.tensor([3, 1]).int(), s.state.clone()
    x = s.x.clone()
    for name in ("torch", "triton"):
        s.state.copy_(before)
        into = x.clone()
        with use_backend(name):
            vllm.selective_state_update(
                s.state, into, *s.inputs()[1:], s.D, s.dt_bias, s.z, True, indices, out=into, cu_seqlens=starts
            )
        for row, slot in enumerate((3, 1)):
            state = before[slot].double()
            for token in range(int(starts[row]), int(starts[row + 1])):
                assert_near(into[token], s.step(state, token))
            assert_near(s.state[slot], state)


@pytest.mark.parametrize("operation", ["state", "convolution"])
def test_vllm_takes_whole_numbers_of_accepted_tokens_only(backend: str, operation: str) -> None:
    s, c, accepted = Scan(2), Conv(3, 4), torch.tensor([1.9, 2.9])
    before, out, ids = s.state.clone(), torch.zeros(2, HEADS, DIM), torch.tensor([[1, 2], [3, 4]]).int()
    with pytest.raises(InvalidArgument, match="num_accepted_tokens must be"):
        if operation == "state":
            vllm.selective_state_update(
                s.state, *s.inputs(), None, None, state_batch_indices=ids, out=out, num_accepted_tokens=accepted
            )
        else:
            vllm.causal_conv1d_update(c.new(2, DIM), c.state, c.weight, None, None, ids[:, 0], accepted)
    assert torch.equal(s.state, before) and not out.any()


# -- convolution -----------------------------------------------------------------------------------------------------


class Conv:
    def __init__(self, width: int, state_len: int, columns_first: bool = False) -> None:
        g = torch.Generator().manual_seed(width)
        shape = (SLOTS, state_len, DIM) if columns_first else (SLOTS, DIM, state_len)
        self.state = torch.randn(shape, generator=g)
        if columns_first:
            self.state = self.state.transpose(1, 2)
        self.weight, self.bias, self.g = torch.randn(DIM, width, generator=g), torch.randn(DIM, generator=g), g

    def new(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.g)

    def of(self, window: torch.Tensor, tokens: torch.Tensor, silu: bool) -> torch.Tensor:
        """``[dim, tokens]`` in float64, from the window ``[dim, width - 1]`` and tokens ``[dim, tokens]``."""
        line = torch.cat([window, tokens], 1).double()[None]
        out = F.conv1d(line, self.weight.double()[:, None], self.bias.double(), groups=DIM)[0]
        return F.silu(out) if silu else out


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize(("width", "state_len", "tokens"), [(4, 3, 1), (2, 4, 3), (3, 2, 5), (4, 5, None)])
def test_causal_conv1d_shifts_whole_states(
    program_order: str, width: int, state_len: int, tokens: int | None, columns_first: bool
) -> None:
    c = Conv(width, state_len, columns_first)
    indices, before = torch.tensor([4, -1, 0, 7]).int(), c.state.clone()
    x = c.new(4, DIM) if tokens is None else c.new(4, DIM, tokens)
    given = x.clone()
    with use_backend("triton"):
        out = causal_conv1d.causal_conv1d_update(x, c.state, c.weight, c.bias, "silu", conv_state_indices=indices)
    assert out.shape == x.shape and torch.equal(x, given)
    for row, slot in enumerate(indices.tolist()):
        if slot < 0:
            assert (out[row] == 0).all()
            continue
        new = x[row].view(DIM, -1)
        line = torch.cat([before[slot], new], 1)
        assert_near(out[row].reshape(DIM, -1), c.of(before[slot][:, state_len - width + 1 :], new, True))
        assert torch.equal(c.state[slot], line[:, -state_len:])
    untouched = [slot for slot in range(SLOTS) if slot not in (4, 0, 7)]
    assert torch.equal(c.state[untouched], before[untouched])


def test_parameters_that_require_gradients_are_taken() -> None:
    """As by the peers, whose state updates have no backward pass."""
    c, s = Conv(4, 3), Scan(3)
    weight = c.weight.clone().requires_grad_()
    assert not causal_conv1d.causal_conv1d_update(c.new(2, DIM), c.state, weight, c.bias).requires_grad
    assert not mamba_ssm.selective_state_update(s.state, *s.inputs(), s.D.requires_grad_()).requires_grad


def test_causal_conv1d_without_indices_and_its_refusal(backend: str) -> None:
    c = Conv(4, 3)
    before, x = c.state.clone(), c.new(2, DIM)
    out = causal_conv1d.causal_conv1d_update(x, c.state, c.weight, c.bias)
    for row in range(2):
        assert_near(out[row][:, None], c.of(before[row], x[row][:, None], False))
    with pytest.raises(Unsupported, match="cache_seqlens is not offered"):
        causal_conv1d.causal_conv1d_update(x, c.state, c.weight, cache_seqlens=torch.zeros(2).int())


@pytest.mark.parametrize("layout", ["rows", "tokens last", "channels last"])
@pytest.mark.parametrize("separate", [False, True])
def test_vllm_convolves_in_place_with_the_first_columns(program_order: str, layout: str, separate: bool) -> None:
    """Of a state that is longer than the window, what lies behind does not change."""
    c = Conv(4, 5)
    before, indices = c.state.clone(), torch.tensor([3, 0, 6]).int()
    x = c.new(3, 2, DIM).transpose(1, 2) if layout == "channels last" else c.new(3, DIM, 2)
    x = x[..., 0].contiguous() if layout == "rows" else x
    given, target = x.clone(), torch.full_like(x, 7) if separate else None
    with use_backend("triton"):
        out = vllm.causal_conv1d_update(x, c.state, c.weight, c.bias, True, indices, out=target, validate_data=True)
    assert out.data_ptr() == (x if target is None else target).data_ptr() and out.shape == x.shape
    assert target is None or torch.equal(x, given)
    for row, slot in ((0, 3), (2, 6)):
        new = given[row].view(DIM, -1) if layout == "rows" else given[row]
        assert_near(out[row].reshape(DIM, -1), c.of(before[slot][:, :3], new, True))
        assert torch.equal(c.state[slot][:, :3], torch.cat([before[slot][:, :3], new], 1)[:, -3:])
        assert torch.equal(c.state[slot][:, 3:], before[slot][:, 3:])
    assert torch.equal(c.state[[0, 1, 2]], before[[0, 1, 2]])


@pytest.mark.parametrize("layout", ["one row", "strided rows", "strided tokens", "ragged"])
@pytest.mark.parametrize("separate", [False, True])
def test_convolutions_take_any_strides_of_tokens(program_order: str, layout: str, separate: bool) -> None:
    """A single row of tokens behind each other in memory among them, which is a view however it is turned."""
    c = Conv(4, 3)
    shape = {"one row": (1, DIM, 3), "strided rows": (2, DIM), "strided tokens": (2, DIM, 3), "ragged": (3, DIM)}[
        layout
    ]
    plain = c.new(*shape)
    x = plain.clone() if layout == "one row" else last_strided(plain)
    target = last_strided(torch.zeros_like(plain)) if separate else None
    before, mine = c.state.clone(), c.state.clone()
    indices = torch.tensor([3, 6]).int()[: 1 if layout == "one row" else 2]
    starts = torch.tensor([0, 1, 3]).int() if layout == "ragged" else None
    with use_backend("triton"):
        shifted = None
        if starts is None:
            shifted = causal_conv1d.causal_conv1d_update(x, mine, c.weight, c.bias, "silu", conv_state_indices=indices)
            assert torch.equal(x, plain)
        out = vllm.causal_conv1d_update(
            x, c.state, c.weight, c.bias, "silu", indices, query_start_loc=starts, out=target
        )
    assert (
        out.data_ptr() == (x if target is None else target).data_ptr()
        and out.stride() == (target if separate else x).stride()
    )
    assert target is None or torch.equal(x, plain)
    for row, slot in enumerate(indices.tolist()):
        tokens = slice(int(starts[row]), int(starts[row + 1])) if starts is not None else row
        new = plain[tokens].T if starts is not None else plain[row].reshape(DIM, -1)
        found = out[tokens].T if starts is not None else out[row].reshape(DIM, -1)
        assert_near(found, c.of(before[slot], new, True))
        assert torch.equal(c.state[slot], torch.cat([before[slot], new], 1)[:, -3:])
    if shifted is not None:
        assert torch.equal(shifted, out) and torch.equal(mine, c.state)


def test_vllm_convolves_ragged_rows_after_acceptance(program_order: str) -> None:
    c = Conv(3, 6)
    counts, accepted = (2, 0, 4), torch.tensor([3, 1, 1]).int()
    starts, indices = torch.tensor([0, 2, 2, 6]).int(), torch.tensor([2, 5, 8]).int()
    x, before = c.new(6, DIM), c.state.clone()
    given = x.clone()
    with use_backend("triton"):
        out = vllm.causal_conv1d_update(
            x, c.state, c.weight, c.bias, "silu", indices, accepted, starts, max_query_len=4
        )
    assert out.data_ptr() == x.data_ptr()
    for row, slot in ((0, 2), (2, 8)):
        tokens, first = slice(int(starts[row]), int(starts[row + 1])), int(accepted[row]) - 1
        window = before[slot][:, first : first + 2]
        assert_near(out[tokens].T, c.of(window, given[tokens].T, True))
        kept = torch.cat([window[:, 1:], given[tokens].T], 1)
        assert torch.equal(c.state[slot][:, : 1 + counts[row]], kept)
    assert torch.equal(c.state[[0, 5]], before[[0, 5]])


def test_vllm_rounds_tokens_to_the_dtype_of_the_state(backend: str) -> None:
    c = Conv(4, 3)
    state = c.state.bfloat16()
    before, x, indices = state.clone(), c.new(2, DIM), torch.tensor([1, 2]).int()
    given = x.clone()
    out = vllm.causal_conv1d_update(x, state, c.weight, c.bias, conv_state_indices=indices)
    assert out.dtype == torch.float32 and torch.equal(x, given)
    for row, slot in enumerate((1, 2)):
        expected = c.of(before[slot], x[row].bfloat16()[:, None], False)
        assert_near(out[row][:, None], expected, 2**-7)
    assert torch.equal(state[1][:, -1], x[0].bfloat16())
    with pytest.raises(InvalidArgument, match="out must be like x"):
        vllm.causal_conv1d_update(x, state, c.weight, out=torch.zeros(3, DIM))


def test_state_updates_wait_for_nothing() -> None:
    """On meta tensors there is no value to wait for: whoever asks for one fails."""
    meta: dict[str, Any] = dict(device="meta")
    ids, starts = torch.zeros(3, 2, dtype=torch.int32, **meta), torch.zeros(4, dtype=torch.int32, **meta)
    state, x, A = torch.empty(SLOTS, DIM, DSTATE, **meta), torch.empty(6, DIM, **meta), torch.empty(DIM, DSTATE, **meta)
    b, accepted = torch.empty(6, DSTATE, **meta), torch.zeros(3, dtype=torch.int64, **meta)
    mamba_ssm.selective_state_update(state, x, x, A, b, b, state_batch_indices=ids.flatten())
    vllm.selective_state_update(
        state, x, x, A, b, b, x[0], x[0], x, True, ids, ids, 5, x, num_accepted_tokens=accepted, cu_seqlens=starts
    )
    window, weight = torch.empty(SLOTS, DIM, 6, **meta), torch.empty(DIM, 4, **meta)
    causal_conv1d.causal_conv1d_update(x, window, weight, conv_state_indices=ids.flatten())
    vllm.causal_conv1d_update(x[:3], window, weight, conv_state_indices=ids[:, 0], null_block_id=3)
    vllm.causal_conv1d_update(
        x, window, weight, None, True, ids[:, 0], accepted, starts, max_query_len=3, null_block_id=None
    )
