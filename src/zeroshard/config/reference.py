"""The reference of every option, from the fields of Config and its sections. Each option is
described where it is declared; these are renderings of that.

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

from zeroshard.config.native import AUTO, Config
from zeroshard.config.option_sections import Comm, ErrorFeedback, LossScale, Offload
from zeroshard.core.policy import ROWS, STAGES
from zeroshard.core.precision import PRECISIONS

SECTIONS: dict[str, type[BaseModel]] = {
    "offload": Offload, "comm": Comm, "comm.error_feedback": ErrorFeedback, "loss_scale": LossScale,
}  # fmt: skip


def options() -> dict[str, FieldInfo]:
    """Return every option of ours by its dotted name, options of sections included."""
    named = dict(Config.model_fields)
    for section, model in SECTIONS.items():
        fields = {name: field for name, field in model.model_fields.items() if not field.exclude}
        named |= {f"{section}.{name}": field for name, field in fields.items()}
    return named


def reference_markdown() -> str:
    """Return a table of every option with its default and one sentence, in Markdown."""
    rows = []
    for name, field in options().items():
        is_section = isinstance(field.default, BaseModel)
        default = "see below" if is_section else f"`{field.default!r}`"
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(["| option | default | |", "|---|---|---|", *rows]) + "\n"


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
    dtypes["master"]["enum"].append("remainder")
    dtypes["moments"] = {"enum": ["bf16"]}
    exact = {"type": "object", "properties": dtypes, "additionalProperties": False}
    forms: dict[str, list[dict[str, Any]]] = {
        "stage": [{"enum": [*STAGES]}, null],
        "policy": [{"enum": [*ROWS, AUTO]}, null],
        "precision": [{"enum": [*PRECISIONS]}, exact],
        "units": [{"type": "array", "items": {"type": "string"}}, null],
    }
    for name, form in forms.items():
        fields[name] = {**fields[name], "anyOf": form}
    made["$defs"] = {model.__name__: made["$defs"][model.__name__] for model in SECTIONS.values()}
    for model in (made, *made["$defs"].values()):
        model["description"] = model["description"].partition("\n\n")[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _main(kind: str) -> None:
    if kind == "deepspeed":
        from zeroshard.deepspeed.keys.table import deepspeed_markdown

        sys.stdout.write(deepspeed_markdown())
    else:
        sys.stdout.write(
            json.dumps(schema(), indent=2) + "\n" if kind == "schema" else reference_markdown()
        )


if __name__ == "__main__":
    _main(sys.argv[1])
