"""A model's directory in Transformers' format, for ``zeroshard generate``: its configuration, its
tokenizer, and how it generates.

The directory may come from somebody else. None of its Python is run (``auto_map``, generate.py),
nor kernels or decoding loops that its files name on a hub: they are refused. A file that is no
regular one, JSON that is too deep, and whatever else Transformers cannot read is a UsageError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.errors import ZeroshardError
from zeroshard.system.safe_files import NotReadable, read_json
from zeroshard.terminal.declared import UsageError

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_JSON_BYTES = 256 << 20  # of one file; the largest tokenizers and indices have a tenth
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_GENERATION = "generation_config.json"
_OWN_CODE = (
    "it has Python code of its own (auto_map), which zeroshard generate never runs: read it, load"
    " the model in a script with trust_remote_code=True, and give it to zs.shard()"
)
_NEW_TOKENS = 32  # where neither an option nor the directory says a length
# they compare or count the tokens of a prompt, the padding before a shorter one among them
_BY_LENGTH = (
    "bad_words_ids", "encoder_no_repeat_ngram_size", "forced_bos_token_id", "guidance_scale",
    "min_length", "no_repeat_ngram_size", "sequence_bias", "stop_strings", "token_healing",
    "watermarking_config",
)  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """Token numbers of every prompt, and the tokenizer, if there is one."""

    texts: list[str]
    ids: list[list[int]]
    tokenizer: Any

    def text(self, tokens: list[int]) -> str | None:
        """Return tokens as text; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


class ModelDirectory:
    """What stands in a model's directory beside its weights."""

    config: Any  # Transformers' configuration

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a directory of which something cannot be read."""
        from transformers import AutoConfig

        self.path = path
        self._check_files()
        with refusals(f"{path / 'config.json'} describes no model that this Transformers knows"):
            self.config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        parts = [getattr(self.config, name, None) for name in self.config.sub_configs]
        for one in (self.config, *parts):
            kernel = getattr(one, "_attn_implementation", None)
            if "/" in str(kernel or ""):
                raise UsageError(
                    f"{path / 'config.json'} asks for attention from a hub ({kernel!r}), whose code"
                    " is not run here: take attn_implementation out"
                )

    def _check_files(self) -> None:
        """Raise UsageError for what Transformers would wait for, or pass over without a word."""
        for file in sorted(self.path.iterdir()):
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise UsageError(f"{file} is not a regular file: take it out of the directory")
            if file.suffix != ".json" or not file.is_file():
                continue
            try:
                read = read_json(file, _JSON_BYTES)
            except NotReadable as error:
                raise UsageError(f"{file} cannot be read: {error}") from None
            if file.name in ("config.json", _GENERATION) and not isinstance(read, dict):
                raise UsageError(f"{file} cannot be read: it is not a JSON object")

    def prompts(self, texts: list[str]) -> Prompts:
        """Return the tokens of `texts`. Raises UsageError."""
        from transformers import AutoTokenizer

        tokenizer = None
        if any((self.path / name).is_file() for name in _TOKENIZERS):
            with refusals(f"{self.path} holds no tokenizer that this Transformers knows"):
                tokenizer = AutoTokenizer.from_pretrained(
                    self.path, local_files_only=True, trust_remote_code=False
                )
        with refusals(f"{self.path}: its tokenizer cannot read a prompt"):
            ids = [_tokens(text, tokenizer, self.config.vocab_size) for text in texts]
        return Prompts(texts, ids, tokenizer)

    def generation(self, max_new_tokens: int | None, sample: bool | None, num_ranks: int) -> Any:
        """Return how to generate, as ``from_pretrained`` reads it: generation_config.json, else
        the older fields of config.json, with the options that are given.

        Raises UsageError for what cannot be done here.
        """
        from transformers import GenerationConfig

        name: str = _GENERATION
        more: dict[str, Any] = {}
        if not (self.path / name).is_file():
            name, more = "config.json", {"_from_model_config": True}
        where = self.path / name
        with refusals(f"{where} does not say how to generate"):
            read: Any = GenerationConfig.from_pretrained(
                self.path, config_file_name=name, local_files_only=True, **more
            )
            if max_new_tokens is not None:
                read.max_new_tokens = max_new_tokens
            elif not {"max_new_tokens", "max_length"} & set(read.to_diff_dict()):
                read.max_new_tokens = _NEW_TOKENS
            if sample is not None:
                read.do_sample = sample
            mode = str(read.get_generation_mode().value)
            if read.pad_token_id is None:
                read.pad_token_id = next(iter(end_tokens(read)), 0)
        several = (read.num_return_sequences or 1) > 1
        guided = num_ranks > 1 and read.guidance_scale not in (None, 1, 1.0)
        for is_so, what in (
            (mode not in _MODES, mode.replace("_", " ")),
            (several, f"num_return_sequences={read.num_return_sequences}"),
            (guided, "guidance_scale on several ranks"),
            (read.cache_implementation == "paged", "a paged cache"),
        ):  # fmt: skip
            if is_so:
                raise UsageError(
                    f"{where} asks for {what}, which zeroshard generate does not do: take it out,"
                    " or call model.generate() in a script"
                )
        # ranks whose prompts have other lengths run as many forwards
        read.prefill_chunk_size = None
        read.return_dict_in_generate = False
        return read


def looks_at_lengths(generation: Any) -> bool:
    """Return whether a prompt's padding changes what `generation` gives."""
    counts = generation.max_new_tokens is None  # max_length counts the prompt
    return counts or any(getattr(generation, name, None) for name in _BY_LENGTH)


@contextmanager
def refusals(fact: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Raise UsageError, `fact` and a reason in one line, for errors of Transformers' of these
    `kinds`: by default of all, as files that it does not expect can make it raise anything.
    """
    try:
        yield
    except (UsageError, ZeroshardError):
        raise
    except kinds as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = _OWN_CODE
        raise UsageError(f"{fact}: {reason}") from error


def end_tokens(generation: Any) -> list[int]:
    """Return the tokens that end a text. Raises TypeError."""
    ends = generation.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
    if not all(type(one) is int for one in ends):
        raise TypeError(f"eos_token_id={ends!r:.60} is no list of token numbers")
    return ends


def _tokens(text: str, tokenizer: Any, vocabulary: int) -> list[int]:
    if tokenizer is not None:
        ids: list[int] = list(tokenizer(text)["input_ids"])
    else:
        words = text.split()
        if not all(word.isdecimal() for word in words):
            raise UsageError(
                f"--prompt {text!r}: the model's directory holds no tokenizer: give token numbers,"
                " as in --prompt '1 2 3'"
            )
        ids = [int(word) for word in words]
    if not ids:
        raise UsageError(f"--prompt {text!r} has no tokens: give some text")
    if max(ids) >= vocabulary:
        raise UsageError(
            f"--prompt {text!r} has token {max(ids)}, and the model knows {vocabulary} tokens"
        )
    return ids
