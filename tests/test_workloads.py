"""Request traces: what the readers accept, what they refuse and with which line, and what the built-in shapes give."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from avmp.errors import InvalidArgument
from avmp.workloads import MAX_TOKENS, TABLES, WORKLOADS, Trace, builtin_trace, percentile_table, read_trace, workload

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT_HEADER = "Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type"


@pytest.fixture
def write(tmp_path):
    """Writes a trace file and returns its path."""

    def write(name: str, content: str | bytes | list) -> Path:
        path = tmp_path / name
        data = json.dumps(content, indent=1) if isinstance(content, list) else content
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write


def azure(*rows: str) -> str:
    return "\r\n".join([AZURE_HEADER, *rows])


def mooncake(**changes) -> str:
    row = {"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [0]} | changes
    return json.dumps({key: value for key, value in row.items() if value is not None})


def conversation(*turns: tuple[str, str]) -> dict:
    return {"id": "x", "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def refusal(path: Path) -> str:
    with pytest.raises(InvalidArgument) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(str(path)), "a refusal names the file first"
    return message.removeprefix(str(path))


class TestReaders:
    def test_azure_csv(self, write):
        rows = "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109", "2023-11-17 00:00:00,1,0"
        trace = read_trace(write("azure.csv", azure(*rows)))
        assert trace.name == "azure.csv"
        assert trace.arrival_seconds == pytest.approx([0, 4.314579, 20653.31941], abs=1e-6)
        assert trace.prompt_tokens.tolist() == [374, 396, 1]
        assert trace.output_tokens.tolist() == [44, 109, 0]
        assert trace.block_hashes is None

    def test_azure_csv_with_offsets_from_utc(self, write):
        rows = "2024-05-10 00:00:00.5+00:00,5,1", "2024-05-10T02:00:01+02:00,5,1", "2024-05-10 00:00:02Z,5,1"
        trace = read_trace(write("azure.csv", azure(*rows)))
        assert trace.arrival_seconds.tolist() == [0, 0.5, 1.5]

    @pytest.mark.parametrize("header", [BURSTGPT_HEADER, BURSTGPT_HEADER.replace(", ", ",")])
    def test_burstgpt_csv(self, write, header):
        rows = "5,ChatGPT,472,18,490,Conversation log", "45.25, GPT-4, 1087, 0, 1087, API log"
        trace = read_trace(write("burst.csv", "\n".join([header, *rows, ""])))
        assert trace.arrival_seconds.tolist() == [0, 40.25]
        assert trace.prompt_tokens.tolist() == [472, 1087]
        assert trace.output_tokens.tolist() == [18, 0], "a request without output is a prefill alone"

    def test_mooncake_jsonl_keeps_the_block_hashes(self, write):
        lines = mooncake(timestamp=1000, hash_ids=[0, 7]), mooncake(timestamp=1500, hash_ids=[0]), ""
        trace = read_trace(write("mooncake.jsonl", "\n".join(lines)))
        assert trace.arrival_seconds.tolist() == [0, 0.5]
        assert [ids.tolist() for ids in trace.block_hashes] == [[0, 7], [0]]

    def test_mooncake_jsonl_without_block_hashes(self, write):
        assert read_trace(write("mooncake.jsonl", mooncake(hash_ids=None))).block_hashes is None

    def test_sharegpt_json_takes_the_first_question_and_the_answer_to_it(self, write):
        entries = [
            conversation(("human", "one two three"), ("gpt", " ".join("w" * 10)), ("human", "more"), ("gpt", "no")),
            conversation(("gpt", "left over"), ("system", "be kind"), ("user", "hi"), ("chatgpt", "")),
        ]
        trace = read_trace(write("sharegpt.json", entries))
        assert trace.prompt_tokens.tolist() == [4, 1], "round(1.3 * words)"
        assert trace.output_tokens.tolist() == [13, 0]
        assert trace.arrival_seconds.tolist() == [0, 0]
        assert trace.skipped == 0

    def test_sharegpt_conversations_without_an_exchange_are_counted(self, write):
        entries = [
            conversation(),
            conversation(("human", "hello")),
            conversation(("gpt", "hello")),
            conversation(("human", "  "), ("gpt", "hello")),
            conversation(("human", "hello"), ("gpt", "hello")),
        ]
        trace = read_trace(write("sharegpt.json", entries))
        assert (len(trace), trace.skipped) == (1, 4)

    @pytest.mark.parametrize(
        "content",
        [
            azure("2023-11-16 18:15:46,7,2"),
            mooncake(input_length=7),
            [conversation(("human", "a b c d e"), ("gpt", "b"))],
        ],
    )
    def test_the_content_decides_where_the_name_says_nothing(self, write, content):
        assert len(read_trace(write("trace.txt", content))) == 1

    def test_a_byte_order_mark_is_not_part_of_the_first_column(self, write):
        assert len(read_trace(write("azure.csv", b"\xef\xbb\xbf" + azure("2023-11-16 18:15:46,7,2").encode()))) == 1

    def test_blank_lines_are_no_rows(self, write):
        path = write("azure.csv", azure("", "2023-11-16 18:15:46,7,2", "", ""))
        assert len(read_trace(path)) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        "row",
        [
            "2023-11-16 18:15:46,-3,44",
            "2023-11-16 18:15:46,0,44",
            "2023-11-16 18:15:46,,44",
            "2023-11-16 18:15:46,many,44",
            "2023-11-16 18:15:46,3.5,44",
            "2023-11-16 18:15:46,1_000,44",
            "2023-11-16 18:15:46,nan,44",
            "2023-11-16 18:15:46,12,-1",
            f"2023-11-16 18:15:46,{MAX_TOKENS + 1},44",
            pytest.param(f"2023-11-16 18:15:46,{'9' * 5000},44", id="5000 digits"),
            "2023-11-16 18:15:46,12",
            "2023-11-16 18:15:46,12,44,9",
            "2023-11-16 18:15:45,12,44",
            "2023-02-30 18:15:46,12,44",
            "2023-11-16 25:15:46,12,44",
            "yesterday,12,44",
            ",,",
            '2023-11-16 18:15:46,"12,44',
        ],
    )
    def test_azure_row(self, write, row):
        path = write("azure.csv", azure("2023-11-16 18:15:46,7,2", row))
        message = refusal(path)
        assert message.startswith(":3: ")
        assert len(message) < 300, "a corrupt value is not printed at full length"

    def test_the_longest_length_is_accepted(self, write):
        path = write("azure.csv", azure(f"2023-11-16 18:15:46,{MAX_TOKENS},{MAX_TOKENS}"))
        assert read_trace(path).prompt_tokens.tolist() == [MAX_TOKENS]

    @pytest.mark.parametrize("time", ["-1", "nan", "inf", "1e400", "1e14", "", "noon"])
    def test_burstgpt_time(self, write, time):
        path = write("burst.csv", "\n".join([BURSTGPT_HEADER, f"{time},ChatGPT,472,18,490,API log"]))
        assert refusal(path).startswith(":2: Timestamp is ")

    @pytest.mark.parametrize("header", ['""', "374,44,9", ",", "\x00"])
    def test_no_header(self, write, header):
        assert refusal(write("azure.csv", header)).startswith(":1: ")

    def test_missing_column(self, write):
        message = refusal(write("azure.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,7"))
        assert message.startswith(":1: ")
        assert "GeneratedTokens" in message and "Response tokens" in message

    @pytest.mark.parametrize(
        "line",
        [
            mooncake(input_length=-1),
            mooncake(input_length=0),
            mooncake(input_length=True),
            mooncake(input_length="many"),
            mooncake(input_length=2.5),
            mooncake(input_length=[1]),
            mooncake(input_length={"tokens": 1}),
            mooncake(input_length=10**30),
            mooncake(output_length=-1),
            mooncake(output_length=None),
            mooncake(timestamp=-5),
            mooncake(timestamp=1),
            mooncake(timestamp=True),
            mooncake(timestamp=float("nan")),
            mooncake(timestamp=10**400),
            mooncake(hash_ids="none"),
            mooncake(hash_ids=[-1]),
            mooncake(hash_ids=[2**63]),
            mooncake(hash_ids=[False]),
            mooncake(hash_ids=None),
            "[1, 2]",
            "7",
            '{"timestamp": 5',
            pytest.param('{"timestamp": ' + "1" * 5000 + "}", id="5000 digits"),
            pytest.param("[" * 100_000, id="nested too deeply"),
        ],
    )
    def test_mooncake_line(self, write, line):
        path = write("mooncake.jsonl", "\n".join([mooncake(timestamp=3), "", line]))
        message = refusal(path)
        assert message.startswith(":3: ")
        assert len(message) < 300

    @pytest.mark.parametrize(
        "entry",
        [
            "{}",
            "7",
            '{"conversations": 3}',
            '{"conversations": [3]}',
            '{"conversations": [{"from": "human"}]}',
            '{"conversations": [{"from": "human", "value": null}]}',
            '{"conversations": [',
            pytest.param("[" * 100_000, id="nested too deeply"),
            "",
        ],
    )
    def test_sharegpt_entry(self, write, entry):
        first = json.dumps(conversation(("human", "hello"), ("gpt", "hello")))
        assert refusal(write("sharegpt.json", f"[\n{first},\n{entry}]")).startswith(":3: ")

    @pytest.mark.parametrize(
        ("text", "line"),
        [("[\n", 2), ("[]\n\n x", 3), ("[\n{},", 2), ("[\n{\n}\n\n{}]", 2), ('[{"conversations": []}\n}', 2)],
    )
    def test_sharegpt_list(self, write, text, line):
        assert refusal(write("sharegpt.json", text)).startswith(f":{line}: ")

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("empty.csv", b""),
            ("blank.jsonl", b" \n\r\n\t"),
            ("mark.json", b"\xef\xbb\xbf"),
            ("header.csv", AZURE_HEADER.encode()),
            ("list.json", b"[]"),
            ("talk.json", json.dumps([conversation(("human", "hello"))]).encode()),
        ],
    )
    def test_file_without_a_request(self, write, name, content):
        assert refusal(write(name, content)).startswith(": ")

    @pytest.mark.parametrize("wrong", [b"\xe9", b"\xff\xfe1\x00", b"\xc3\x28"])
    @pytest.mark.parametrize("name", ["azure.csv", "mooncake.jsonl", "sharegpt.json"])
    def test_undecodable_bytes(self, write, name, wrong):
        message = refusal(write(name, AZURE_HEADER.encode() + b"\n\n" + wrong))
        assert message.startswith(":3: ") and "UTF-8" in message

    def test_unreadable_files(self, tmp_path):
        assert "No such file" in refusal(tmp_path / "missing.csv")
        assert "cannot be read" in refusal(tmp_path)

    @given(st.binary(max_size=200), st.sampled_from([".csv", ".jsonl", ".json", ""]))
    def test_arbitrary_bytes_are_refused_and_never_crash(self, tmp_path_factory, data, suffix):
        path = tmp_path_factory.mktemp("fuzz") / f"trace{suffix}"
        path.write_bytes(data)
        refusal(path)

    @given(st.data())
    def test_a_damaged_trace_is_read_or_refused_and_never_crashes(self, tmp_path_factory, data):
        exchange = [conversation(("human", "a b"), ("gpt", "c"))]
        name, text = data.draw(
            st.sampled_from(
                [
                    ("a.csv", azure("2023-11-16 18:15:46,7,2", "2023-11-16 18:15:46,8,2")),
                    ("b.csv", "\n".join([BURSTGPT_HEADER, "5,ChatGPT,472,18,490,API log"])),
                    ("c.jsonl", mooncake() + "\n" + mooncake()),
                    ("d.json", json.dumps(exchange * 2)),
                ]
            )
        )
        at = data.draw(st.integers(0, len(text)))
        damaged = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
        path = tmp_path_factory.mktemp("damaged") / name
        path.write_bytes(damaged.encode(errors="replace"))
        try:
            trace = read_trace(path)
        except InvalidArgument as error:
            assert str(path) in str(error)
        else:
            assert 1 <= len(trace) <= 3


class TestTrace:
    def make(self, **changes) -> Trace:
        fields = {"name": "t", "arrival_seconds": [0.0, 1.0], "prompt_tokens": [3, 4], "output_tokens": [0, 1]}
        return Trace(**(fields | changes))

    def test_arrays_are_typed_copies_that_cannot_be_written(self):
        prompts = np.array([3, 4], dtype=np.int32)
        trace = self.make(prompt_tokens=prompts)
        prompts[0] = 99
        assert trace.prompt_tokens.tolist() == [3, 4]
        assert (trace.arrival_seconds.dtype, trace.prompt_tokens.dtype) == (np.float64, np.int64)
        with pytest.raises(ValueError, match="read-only"):
            trace.output_tokens[0] = 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            trace.name = "other"

    @pytest.mark.parametrize(
        "changes",
        [
            {"arrival_seconds": []},
            {"arrival_seconds": [[0.0], [1.0]]},
            {"arrival_seconds": [1.0, 0.5]},
            {"arrival_seconds": [-1.0, 0.0]},
            {"arrival_seconds": [0.0, float("nan")]},
            {"arrival_seconds": [0.0, 1.0, 2.0]},
            {"prompt_tokens": [3]},
            {"prompt_tokens": [3, 0]},
            {"prompt_tokens": [3, MAX_TOKENS + 1]},
            {"prompt_tokens": [3.0, 4.0]},
            {"output_tokens": [0, -1]},
            {"output_tokens": [True, False]},
            {"block_hashes": (np.array([1]),)},
        ],
    )
    def test_wrong_values_are_refused(self, changes):
        with pytest.raises(InvalidArgument, match="trace 't'"):
            self.make(**changes)


class TestBuiltinShapes:
    @pytest.mark.parametrize("name", sorted(WORKLOADS))
    def test_the_seed_decides_everything(self, name):
        first, again, other = (builtin_trace(name, 200, seed, rate=2.0) for seed in (1, 1, 2))
        for field in ("arrival_seconds", "prompt_tokens", "output_tokens"):
            assert np.array_equal(getattr(first, field), getattr(again, field))
            assert not np.array_equal(getattr(first, field), getattr(other, field))

    @pytest.mark.parametrize("name", sorted(WORKLOADS))
    def test_a_shorter_trace_begins_a_longer_one_and_the_rate_changes_no_length(self, name):
        long, short = builtin_trace(name, 300, 5, rate=2.0), builtin_trace(name, 100, 5)
        assert np.array_equal(long.prompt_tokens[:100], short.prompt_tokens)
        assert np.array_equal(long.output_tokens[:100], short.output_tokens)

    def test_arrivals(self):
        assert not builtin_trace("sharegpt", 50, 1).arrival_seconds.any()
        arrivals = builtin_trace("sharegpt", 20_000, 1, rate=4.0).arrival_seconds
        assert arrivals[-1] == pytest.approx(5000, rel=0.05)

    @pytest.mark.parametrize(
        ("name", "field", "table"),
        [
            ("sharegpt", "prompt_tokens", "sharegpt_prompt"),
            ("azure_conv", "prompt_tokens", "azure_conv_prompt"),
            ("azure_conv", "output_tokens", "azure_conv_output"),
        ],
    )
    def test_samples_have_the_percentiles_of_their_table(self, name, field, table):
        """The share of samples up to the p-th percentile is p; 200,000 samples put it within 0.4 % (over 3 sigma)."""
        samples = getattr(builtin_trace(name, 200_000, 3), field)
        values = np.array(TABLES[table].values)
        assert samples.min() >= values[0] and samples.max() <= values[-1]
        below = np.array([(samples < value).mean() for value in values])
        up_to = np.array([(samples <= value).mean() for value in values])
        wanted = np.arange(101) / 100
        assert (below - 0.004 <= wanted).all() and (up_to + 0.004 >= wanted).all()

    def test_sharegpt_outputs_follow_the_published_rule(self):
        outputs = builtin_trace("sharegpt", 50_000, 9).output_tokens
        assert (outputs.min(), outputs.max()) == (32, 2048)
        assert np.median(outputs) == pytest.approx(np.exp(4.5), rel=0.03)

    def test_azure_lengths_are_independent(self):
        trace = builtin_trace("azure_conv", 50_000, 9)
        assert abs(np.corrcoef(trace.prompt_tokens, trace.output_tokens)[0, 1]) < 0.02

    @pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
    def test_tables_are_whole(self, table):
        assert len(table.values) == 101
        assert list(table.values) == sorted(table.values) and table.values[0] >= 1
        assert table.source and table.licence

    def test_wrong_arguments_are_refused(self):
        with pytest.raises(InvalidArgument, match=r"unknown workload 'nope'; known: azure_conv, sharegpt"):
            builtin_trace("nope", 10, 0)
        for requests, seed, rate in ((0, 0, None), (-1, 0, None), (10, -1, None), (10, 0, 0.0), (10, 0, float("nan"))):
            with pytest.raises(InvalidArgument, match="expected"):
                builtin_trace("sharegpt", requests, seed, rate)

    def test_a_new_workload_is_one_function_registered_by_name(self, monkeypatch):
        monkeypatch.setattr("avmp.workloads.shapes.WORKLOADS", dict(WORKLOADS))

        @workload("constant")
        def constant(requests, prompts, outputs):
            return np.full(requests, 7), np.full(requests, 3)

        assert builtin_trace("constant", 4, 0).prompt_tokens.tolist() == [7] * 4
        with pytest.raises(InvalidArgument, match="registered already"):
            workload("constant")(constant)


class TestPercentileTable:
    def test_interpolates_and_rounds(self):
        assert percentile_table(range(201)) == tuple(range(0, 201, 2))
        assert percentile_table([5]) == (5,) * 101

    @pytest.mark.parametrize("lengths", [[], [1.5], [[1, 2]]])
    def test_wrong_values_are_refused(self, lengths):
        with pytest.raises(InvalidArgument, match="percentile_table"):
            percentile_table(lengths)


class TestRecordedTraces:
    """The committed figures against the recorded traces they come from."""

    def test_sharegpt_prompts(self, recorded_traces):
        lengths = json.loads((recorded_traces / "sharegpt_prompt_tokens.json").read_text())
        table = TABLES["sharegpt_prompt"]
        assert (percentile_table(lengths), len(lengths)) == (table.values, table.requests)

    def test_azure_conversations(self, recorded_traces):
        trace = read_trace(recorded_traces / "azure_llm_2023_conv.csv")
        for table, lengths in (("prompt", trace.prompt_tokens), ("output", trace.output_tokens)):
            expected = TABLES[f"azure_conv_{table}"]
            assert (percentile_table(lengths), len(lengths)) == (expected.values, expected.requests)

    def test_mooncake_conversations(self, recorded_traces):
        trace = read_trace(recorded_traces / "mooncake_conversation.jsonl")
        assert (len(trace), len(trace.block_hashes)) == (12_031, 12_031)
        assert trace.arrival_seconds[-1] == pytest.approx(3536.999)
        blocks = np.array([len(ids) for ids in trace.block_hashes])
        assert np.array_equal(blocks, -(-trace.prompt_tokens // 512)), "one hash for each block of 512 tokens"
