"""The reference of every option: from the fields of Config and its sections, and from the table of
DeepSpeed's keys. Each option is described where it is declared; these are renderings of that.

    python -m zeroshard.config.reference options      Markdown: every option of ours
    python -m zeroshard.config.reference deepspeed    Markdown: docs/deepspeed-keys.md
    python -m zeroshard.config.reference schema       docs/zeroshard.schema.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import CoreSchema

from zeroshard.config.deepspeed.key_rows import Key, an_object
from zeroshard.config.deepspeed.table import KEYS
from zeroshard.config.native import AUTO, Config
from zeroshard.config.sections import Comm, ErrorFeedback, LossScale, Offload
from zeroshard.core.policy import ROWS, STAGES
from zeroshard.core.precision import PRECISIONS

__all__ = ["SECTIONS", "deepspeed_markdown", "options", "reference_markdown", "schema"]

SECTIONS: dict[str, type[BaseModel]] = {
    "offload": Offload, "comm": Comm, "comm.error_feedback": ErrorFeedback, "loss_scale": LossScale,
}  # fmt: skip


def options() -> dict[str, FieldInfo]:
    """Return every option of ours by its dotted name, those of sections included."""
    named = dict(Config.model_fields)
    for section, model in SECTIONS.items():
        fields = {name: field for name, field in model.model_fields.items() if not field.exclude}
        named |= {f"{section}.{name}": field for name, field in fields.items()}
    return named


def reference_markdown() -> str:
    """Return a table of every option with its default and one sentence, in Markdown."""
    rows = [
        f"| `{name}` | {_default(field)} | {field.description} |"
        for name, field in options().items()
    ]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows]) + "\n"


def _default(field: FieldInfo) -> str:
    default = field.default
    return "see below" if isinstance(default, BaseModel) else f"`{default!r}`"


def deepspeed_markdown() -> str:
    """Return the table of DeepSpeed's keys in Markdown."""
    rows = [f"| `{name}` | {_shown(key.default)} | {_effect(key)} |" for name, key in KEYS.items()]
    return "\n".join([_HEAD, "| key | its default | here |", "|---|---|---|", *rows]) + "\n"


_HEAD = """# DeepSpeed's keys

What each key of a DeepSpeed configuration does here: it *becomes* an option of ours, it makes *no
difference*, or it is *refused* where it asks for something else than happens here anyway. Defaults
are those of DeepSpeed's code. `zeroshard config explain FILE` says the same of one file. A key that
is not in this table is refused, with the nearest one.

Made by `python -m zeroshard.config.reference deepspeed`.
"""


def _shown(default: Any) -> str:
    text = f"{default:g}".replace("e+0", "e") if type(default) is float else json.dumps(default)
    return "" if default is None else f"`{text}`"


def _effect(key: Key) -> str:
    if key.lower is not None:
        return f"becomes ours: {key.why}"
    if not key.instead:
        return f"no difference: {key.why}"
    where = "where it is on" if key.kind is an_object else "otherwise"
    return f"refused {where}: {key.why} ({key.instead})"


class _Generator(GenerateJsonSchema):
    """Leaves types without a JSON form open; `schema` writes the form in which they are read."""

    def handle_invalid_for_json_schema(
        self, schema: CoreSchema, error_info: str
    ) -> JsonSchemaValue:
        return {}

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        pass  # of defaults without a JSON form


def schema() -> dict[str, Any]:
    """Return the JSON schema of our form of the configuration."""
    made = Config.model_json_schema(schema_generator=_Generator)
    fields, null = made["properties"], {"type": "null"}
    names = ("compute", "reduce", "accumulate", "master")
    dtypes = {name: {"enum": [*PRECISIONS]} for name in names}
    exact = {"type": "object", "properties": dtypes, "additionalProperties": False}
    forms: dict[str, list[dict[str, Any]]] = {
        "stage": [{"enum": [*STAGES]}, null],
        "policy": [{"enum": [*ROWS, AUTO]}, null],
        "precision": [{"enum": [*PRECISIONS]}, exact],
        "units": [{"type": "array", "items": {"type": "string"}}, null],
    }
    for name, form in forms.items():
        fields[name] = {**fields[name], "anyOf": form}
    del made["$defs"]["Offload"]["properties"]["link"]  # not for files
    made["$defs"] = {model.__name__: made["$defs"][model.__name__] for model in SECTIONS.values()}
    for model in (made, *made["$defs"].values()):
        model["description"] = model["description"].partition("\n\n")[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _main(kind: str) -> None:
    texts = {"options": reference_markdown, "deepspeed": deepspeed_markdown}
    text = json.dumps(schema(), indent=2) + "\n" if kind == "schema" else texts[kind]()
    sys.stdout.write(text)


if __name__ == "__main__":
    _main(sys.argv[1])
