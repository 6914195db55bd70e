"""What `agentrl.verifiers.json_match` asks in a killable process: whether JSON fits its schema.

A question is `[schema, instance]`. The answer is "" if it fits, else where and why it does not;
with null as the instance's text it is whether the schema is one. Patterns come from the schema
and texts from a policy, so a check may take forever.
"""

import json
from typing import Any


def load() -> None:
    """Import the library once."""
    answer([{}, "1"])


def answer(question: tuple[Any, str | None] | list[Any]) -> str:
    """Validate by jsonschema, after 2020-12 unless `$schema` says otherwise; nothing is fetched."""
    from jsonschema.exceptions import SchemaError, best_match
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema, text = question
    kind: Any = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        return f"the schema is none: {error.message}"
    if text is None:
        return ""
    found = best_match(kind(schema, registry=Registry()).iter_errors(json.loads(text)))
    return "" if found is None else f"{found.json_path}: {found.message}"[:300]
