"""``--patch FILE``: partial objects that are merged into a job's manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.core.errors import ConfigError

_KEYS = {"ports": "containerPort", "volumeMounts": "mountPath", "tolerations": None}
"""The key that identifies an entry of a list, if it is not ``name``; None: the list is replaced as a whole.

As in Kubernetes' strategic merge patches: https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""


def apply_patches(objects: Sequence[Mapping[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Merge each document of a YAML file into the objects of its kind.

    Mappings are merged, and null removes a key. Entries of a list with a ``name`` (containers, variables, volumes) are
    merged into the entry of that name, or added; other lists are replaced.
    """
    try:
        patches = [patch for patch in yaml.safe_load_all(path.read_text(encoding="utf-8")) if patch is not None]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--patch {path} cannot be read: {error}") from error
    kinds = ", ".join(str(each["kind"]) for each in objects)
    merged = [dict(each) for each in objects]
    for patch in patches:
        if not isinstance(patch, dict) or "kind" not in patch:
            raise ConfigError(f"--patch {path}: each document must be an object with a kind, one of {kinds}.")
        targets = [number for number, each in enumerate(merged) if each["kind"] == patch["kind"]]
        if not targets:
            raise ConfigError(f"--patch {path}: this job has no {patch['kind']!r:.80}, but {kinds}.")
        if patch.get("metadata", {}).keys() & {"name", "namespace"}:
            raise ConfigError(f"--patch {path}: leave name and namespace out; --name and --namespace decide them.")
        for number in targets:
            merged[number] = _merge(merged[number], patch)
    return merged


def _merge(current: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(current)
    for key, value in patch.items():
        before = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _merge(before if isinstance(before, dict) else {}, value)
        elif isinstance(value, list) and isinstance(before, list):
            result[key] = _merge_lists(key, before, value)
        else:
            result[key] = value
    return result


def _merge_lists(key: str, current: Sequence[Any], patch: Sequence[Any]) -> list[Any]:
    by = _KEYS.get(key, "name")
    if by is None or not all(isinstance(entry, dict) and by in entry for entry in (*current, *patch)):
        return list(patch)
    result = [dict(entry) for entry in current]
    for change in patch:
        found = next((number for number, entry in enumerate(result) if entry[by] == change[by]), None)
        if change.get("$patch") == "delete":
            if found is not None:
                del result[found]
        elif found is None:
            result.append(_merge({}, change))
        else:
            result[found] = _merge(result[found], change)
    return result
