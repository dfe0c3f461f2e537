"""Fields and types of Kubernetes objects, by the models of kubeflow-trainer-api 2.3.0.

    pip install kubeflow-trainer-api==2.3.0 pyyaml
    python tests/golden/make_kubernetes_fields.py

The schemas are those of JobSet, TrainJob and TrainingRuntime, with the fields that no job file has
by name alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from kubeflow_trainer_api import models

GOLDEN = Path(__file__).parent
KINDS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


def cut(schema: dict[str, Any], definitions: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """Return a schema without references, and without what is below fields that no value has."""
    if "anyOf" in schema:
        (schema,) = [option for option in schema["anyOf"] if option.get("type") != "null"]
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema or "oneOf" in schema or "type" not in schema:
        return {}
    if schema["type"] == "array":
        items = [item for value in values for item in value]
        return {"type": "array", "items": cut(schema["items"], definitions, items)}
    if "properties" not in schema:
        return {"type": schema["type"]}
    properties = {}
    for name, field in schema["properties"].items():
        below = [value[name] for value in values if name in value]
        properties[name] = cut(field, definitions, below) if below else {}
    return {
        "type": "object",
        "properties": properties,
        "required": schema.get("required", []),
        "additionalProperties": False,
    }


if __name__ == "__main__":
    files = (GOLDEN / "jobs").glob("*.yaml")
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    schemas = {}
    for kind, model in KINDS.items():
        schema = model.model_json_schema(by_alias=True)
        values = [document for document in documents if document.get("kind") == kind]
        schemas[kind] = cut(schema, schema["$defs"], values)
    text = json.dumps(schemas, separators=(",", ":"))
    (GOLDEN / "jobs" / "kubernetes_fields.json").write_text(text + "\n")
