"""Configurations that are not as they should be: one ConfigError that names the file or the key,
whatever the text or the value is.
"""

from __future__ import annotations

import json
import os
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zeroshard as zs
from zeroshard import ConfigError
from zeroshard.config import build_config
from zeroshard.deepspeed.keys.table import KEYS

TEXTS: list[tuple[bytes, str]] = [
    (b'{"stage": 2, "comm": {"transport": "\xff"}}', "it is not UTF-8 text, from byte 36 on"),
    (b"[" * 100_000, "nested too deep"),
    (b'{"a":' * 100_000, "nested too deep"),
    (b'{"stall_timeout_s": Infinity}', "Infinity is not a finite number"),
    (b'{"stall_timeout_s": -Infinity}', "-Infinity is not a finite number"),
    (b'{"stall_timeout_s": NaN}', "NaN is not a finite number"),
    (b'{"stall_timeout_s": 1e999}', "1e999 is not a finite number"),
    (b'{"stage": 2, "stage": 3}', "the key 'stage' is there twice"),
    (b'{"comm": {"ordered": true, "ordered": false}}', "the key 'ordered' is there twice"),
    (b'{"stage": ' + b"1" * 5000 + b"}", "not JSON"),
    (b"", "not JSON"),
]


@pytest.mark.parametrize(("text", "message"), TEXTS, ids=range(len(TEXTS)))
def test_a_file_that_is_no_plain_json_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    for read in (build_config, zs.Config.read, zs.Config.from_deepspeed):
        with pytest.raises(ConfigError, match=message) as caught:
            read(path)
        assert f"config='{path}'" in str(caught.value) and "\n" not in str(caught.value)
    if text.isascii():
        with pytest.raises(ConfigError, match=message):
            zs.Config.from_json(text.decode())


@pytest.mark.parametrize(
    "path", [Path("/"), Path("a\0b")], ids=["a directory", "a zero in the name"]
)
def test_a_path_that_is_no_file_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config=.* cannot be read"):
        build_config(path)


def test_a_pipe_is_not_waited_for_and_levels_have_a_limit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe' cannot be read: it is not a regular file"):
        build_config(tmp_path / "pipe")
    (tmp_path / "deep").write_text('{"a":' * 101 + "1" + "}" * 101)
    with pytest.raises(ConfigError, match="nested too deep"):
        build_config(tmp_path / "deep")


def test_a_byte_order_mark_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + b'{"stage": 2}')
    assert build_config(tmp_path / "config.json").stage == 2


NO_NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"stage": True}, "stage: True is not a number"),
    ({"stage": "2"}, "stage: '2' is not a number"),
    ({"prefetch_bytes": False}, "prefetch_bytes: False is not a number"),
    ({"stall_timeout_s": True}, "stall_timeout_s: True is not a number"),
    ({"stall_timeout_s": float("inf")}, "stall_timeout_s: inf is not a finite number"),
    ({"gradient_clipping": float("nan")}, "gradient_clipping: nan is not a finite number"),
    ({"train_batch_size": True}, "train_batch_size: True is not a number"),
    ({"strict": 1}, "strict: 1 is neither true nor false"),
    ({"broadcast_buffers": "no"}, "broadcast_buffers: 'no' is neither true nor false"),
    ({"comm": {"node_size": True}}, r"comm\.node_size: True is not a number"),
    ({"comm": {"ordered": "false"}}, r"comm\.ordered: 'false' is neither true nor false"),
    ({"comm": {"codec_block": True}}, r"comm\.codec_block: True is not a number"),
    (
        {"comm": {"grad_codec": "int8", "error_feedback": 1}},
        r"comm\.error_feedback: 1 is neither true nor false",
    ),
    (
        {"comm": {"grad_codec": "int8", "error_feedback": {"beta": True}}},
        r"comm\.error_feedback\..*: True is not a number",
    ),
    (
        {"offload": {"optimizer": "host", "fraction": True}},
        r"offload\.fraction: True is not a number",
    ),
    (
        {"offload": {"optimizer": "host", "fraction": "half"}},
        r"offload\.fraction: 'half' is not a number",
    ),
    (
        {"offload": {"optimizer": "host", "fraction": float("nan")}},
        r"offload\.fraction=nan is not in \[0, 1\]",
    ),
    (
        {"offload": {"optimizer": "host", "fraction": {"optimizer": True}}},
        r"offload\.fraction: .* is not a number",
    ),
    (
        {"offload": {"optimizer": "host", "delayed_update": True}},
        r"offload\.delayed_update: True is not a number",
    ),
]


@pytest.mark.parametrize(
    ("config", "message"), NO_NUMBERS, ids=[json.dumps(config) for config, _ in NO_NUMBERS]
)
def test_true_and_text_are_no_numbers_and_numbers_are_not_true(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(config)


def test_numbers_keep_being_numbers() -> None:
    config = build_config(
        {
            "stage": 2,
            "prefetch_bytes": 1e6,
            "stall_timeout_s": 5,
            "offload": {"optimizer": "host", "fraction": "auto"},
        }
    )
    assert (config.prefetch_bytes, config.stall_timeout_s, config.offload.fraction) == (
        1_000_000,
        5.0,
        "auto",
    )


DEEPSPEED: list[tuple[dict[str, Any], str]] = [
    ({"bf16": {"enabled": "false"}}, r"bf16\.enabled='false' is neither true nor false"),
    ({"gradient_clipping": False}, "gradient_clipping=False is not a number"),
    ({"train_batch_size": True}, "train_batch_size=True is not a number"),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": True}},
        r"zero_hpz_partition_size=True is not a number of ranks",
    ),
    (
        {"zero_optimization": {"stage": 3, "mics_shard_size": "8"}},
        r"mics_shard_size='8' is not a number of ranks",
    ),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": "false"}},
        r"zero_quantized_weights='false' is neither true nor false",
    ),
    (
        {"zero_optimization": {"stage": 3, "zeropp_loco_param": 5}},
        r"zeropp_loco_param=5 is not an object",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": ["cpu"]}}},
        r"offload_optimizer\.device=\['cpu'\] is not one of",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": True}}},
        r"offload_optimizer\.ratio=True is not a number",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": 3}},
        r"offload_optimizer=3 is not an object",
    ),
    ({"zero_optimization": {"stage": [3]}}, "stage"),
]


@pytest.mark.parametrize(
    ("config", "message"), DEEPSPEED, ids=[json.dumps(config) for config, _ in DEEPSPEED]
)
def test_deepspeeds_values_of_another_kind_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zs.Config.from_deepspeed(config)


_SECTION = sorted({name.split(".")[1] for name in KEYS if name.startswith("zero_optimization.")})
_WORDS = ["auto", "cpu", "nvme", "host", "zero3", "hpz"]
_KEYS = sorted({name.split(".")[-1] for name in KEYS} | {"beta"})
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(_WORDS),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)


_OUTER = st.sampled_from(sorted({name.split(".")[0] for name in KEYS} - {"zero_optimization"}))
_INNER = st.sampled_from([*zs.Comm.model_fields, *zs.Offload.model_fields])


@given(st.dictionaries(_OUTER, _VALUES), st.dictionaries(st.sampled_from(_SECTION), _VALUES))
def test_any_deepspeed_configuration_is_read_or_named(
    outer: dict[str, Any], section: dict[str, Any]
) -> None:
    try:
        zs.Config.from_deepspeed({**outer, "zero_optimization": section})
    except ConfigError as error:
        refused = zs.read_deepspeed({**outer, "zero_optimization": section}).refusals()
        lines = str(error).split("\n")
        assert len(lines) == (1 if len(refused) == 1 else 1 + len(refused))


@given(
    st.dictionaries(
        st.sampled_from([*zs.Config.model_fields]), _VALUES | st.dictionaries(_INNER, _VALUES)
    )
)
def test_any_dictionary_is_a_configuration_or_named(data: dict[str, Any]) -> None:
    try:
        build_config(data).refuse_unsupported()
    except ConfigError as error:
        assert "\n" not in str(error)


LINES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: zs.Offload("host"),  # type: ignore[call-arg]
        r"Offload\('host'\): every option is given by name, one of weight, grad, .*; did you mean"
        r" Offload\(optimizer='host'\)\?",
    ),
    (
        lambda: zs.Config(offload="host"),  # type: ignore[arg-type]
        r"offload='host' is neither a zeroshard.Offload nor a dictionary; did you mean"
        r" Offload\(optimizer='host'\)\?",
    ),
    (
        lambda: zs.Config(offload="cpu"),  # type: ignore[arg-type]
        r"offload='cpu' is neither .*; did you mean Offload\(optimizer='host'\)\?",
    ),
    (
        lambda: zs.Comm("gloo"),  # type: ignore[call-arg]
        r"Comm\('gloo'\): every option is given by name, one of transport, ordered, .*feedback$",
    ),
    (
        lambda: zs.Config(comm="gloo"),  # type: ignore[arg-type]
        r"comm='gloo' is neither a zeroshard.Comm nor a dictionary$",
    ),
    (
        lambda: zs.Comm(grad_codec="int6"),
        r"comm.grad_codec: codec 'int6' is not one of int8, int4, fp8; did you mean 'int8'\?",
    ),
    (lambda: zs.Comm(frozen_codec="int3"), r"comm.frozen_codec: codec 'int3' is not one of"),
]


@pytest.mark.parametrize("name", ["bfloat16", torch.bfloat16, "float16", "half", "float32"])
def test_precision_takes_torchs_names(name: Any) -> None:
    short = {"bfloat16": "bf16", torch.bfloat16: "bf16", "float32": "fp32"}.get(name, "fp16")
    assert build_config(None, precision=name).precision == short


@pytest.mark.parametrize(("make", "line"), LINES, ids=range(len(LINES)))
def test_a_section_that_is_made_wrongly_is_a_line_that_says_how_it_is_made(
    make: Callable[[], Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", [zs.Offload, zs.Comm, zs.LossScale, zs.Config])
def test_help_shows_the_options_of_a_section_and_nothing_of_pydantic(section: type) -> None:
    text = pydoc.plain(pydoc.render_doc(section))
    named = set(section.model_fields) - {"units"}  # type: ignore[attr-defined]
    assert all(f" |  {name}: " in text for name in named)
    assert "(*, " in text.splitlines()[3] and "Annotated" not in text
    assert "model_dump" not in text and "__pydantic" not in text
    assert len(text.splitlines()) < 160
    assert not [name for name in dir(section) if name.startswith(("model_", "__pydantic"))]
