"""``deepspeed.utils.zero_to_fp32``: whole fp32 weights from a checkpoint, DeepSpeed's or ours.

A tag that ``save_checkpoint()`` wrote is read as it is; one that DeepSpeed wrote is imported into a
temporary directory first. Cost: the whole checkpoint in memory, on CPU.

    python zero_to_fp32.py . OUTPUT_DIR                            in the checkpoint's folder
    python -m deepspeed.utils.zero_to_fp32 DIRECTORY OUTPUT_DIR    below `zeroshard as-deepspeed`
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from zeroshard.deepspeed.checkpoint_tags import step_of
from zeroshard.formats import export, import_checkpoint, whole_weights

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _step(checkpoint_dir: Any, tag: str | None, work: Path) -> Path:
    """Return the directory of a step of ours; one of DeepSpeed's is imported into `work`."""
    source = Path(checkpoint_dir)
    found = step_of(source, tag)
    if found is not None:
        return found
    import_checkpoint(source if tag is None else source / tag, work / "imported")
    return next((work / "imported").glob("step-*"))


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the whole weights in fp32, tied ones under each of their names. `lazy_mode` changes
    nothing: they are in memory. Raises CheckpointError.
    """
    with tempfile.TemporaryDirectory() as folder:
        step = _step(checkpoint_dir, tag, Path(folder))
        return whole_weights(step, dtype=torch.float32, frozen=not exclude_frozen_parameters)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write them to `output_dir`: ``pytorch_model.bin``, or safetensors files of at most
    `max_shard_size` with `safe_serialization`. Raises CheckpointError.
    """
    output = Path(output_dir)
    limit = _num_bytes(max_shard_size)
    if safe_serialization and not exclude_frozen_parameters:
        with tempfile.TemporaryDirectory() as folder:
            step = _step(checkpoint_dir, tag, Path(folder))
            export(step, output, "hf", dtype=torch.float32, max_shard_bytes=limit)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    output.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        from safetensors.torch import save_file

        save_file({name: value.clone() for name, value in state.items()},
                  output / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    else:
        torch.save(state, output / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Any, tag: str | None = None
) -> nn.Module:
    """Load them into `model`, on CPU, and return it. Raises CheckpointError."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def main() -> None:
    """Run ``zero_to_fp32.py`` with DeepSpeed's arguments."""
    parser = argparse.ArgumentParser(description="write whole fp32 weights of a ZeRO checkpoint")
    parser.add_argument("checkpoint_dir", help="the directory with the file 'latest'")
    parser.add_argument("output_dir", help="where the weights go")
    parser.add_argument("--max_shard_size", default="5GB", help="of safetensors files")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="of the checkpoint, in place of the one in 'latest'")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="changes nothing here")
    arguments = vars(parser.parse_args())
    arguments.pop("debug")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**arguments)
    except (zs.CheckpointError, zs.ConfigError) as error:
        sys.exit(f"zero_to_fp32: {error}")


def _num_bytes(size: int | str | None) -> int:
    if size is None:
        return 2**62
    if isinstance(size, int):
        return size
    number, unit = size[:-2].strip(), size[-2:].upper()
    if unit not in _UNITS or not number.isdecimal():
        raise zs.ConfigError(f"max_shard_size={size!r} is neither bytes nor such as '5GB'")
    return int(number) * _UNITS[unit]
