"""Check Kubernetes manifests field by field, without a cluster: `python tools/check_manifests.py [FILE_OR_FOLDER...]`.

Kubernetes' own kinds and all pod templates are checked with the strict schemas of its API in `kubernetes-validate`,
kinds of KubeRay, Kueue and Kustomize with `manifest_schemas.yaml`. Unknown fields and repeated keys are errors. With
`--crds FILE_OR_FOLDER...` the definitions of a cluster or of an operator's chart (`kubectl get crd -o yaml >
crds.yaml`) replace `manifest_schemas.yaml` for the kinds they define. Their CEL rules are not evaluated; `kubectl apply
--dry-run=server` does that.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import relevance
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

KUBERNETES = "1.34"
"""Kubernetes release of the schemas; the manifests use no field newer than 1.27."""
MANIFESTS = Path(__file__).parents[1] / "infra/kubernetes"
CUSTOM_KINDS = Path(__file__).with_name("manifest_schemas.yaml")
_TYPES = {
    "pod_template": "io.k8s.api.core.v1.PodTemplateSpec",
    "metadata": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
}


class _EachKeyOnce(yaml.SafeLoader):
    """YAML loader that refuses repeated keys, like the API server."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def documents(file: Path) -> list[dict[str, Any]]:
    """Load the manifests of a file.

    Raises:
        yaml.YAMLError: not YAML, or a key is given twice.
    """
    return [item for item in yaml.load_all(file.read_text(encoding="utf-8"), _EachKeyOnce) if item]  # noqa: S506


@cache
def _kubernetes_types() -> dict[str, Any]:
    folder = files("kubernetes_validate") / f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
    return json.loads((folder / "_definitions.json").read_text())


def _yaml_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.yaml")) if path.is_dir() else [path]


def defined_kinds(paths: list[Path]) -> dict[str, Any]:
    """Return JSON schemas by `apiVersion/kind` of the CustomResourceDefinitions in files; unknown fields are errors.

    Raises:
        ValueError: there is no definition.
        yaml.YAMLError: not YAML.
    """
    found: dict[str, Any] = {}
    for file in (file for path in paths for file in _yaml_files(path)):
        listed = [item for document in documents(file) for item in document.get("items", [document])]
        for spec in (item["spec"] for item in listed if item.get("kind") == "CustomResourceDefinition"):
            for version in spec["versions"]:
                schema = _strict(version["schema"]["openAPIV3Schema"])
                schema["properties"] |= {key: {"type": "string"} for key in ("apiVersion", "kind")}
                schema["properties"]["metadata"] = {"$ref": "metadata"}
                found[f"{spec['group']}/{version['name']}/{spec['names']['kind']}"] = schema
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))}: no CustomResourceDefinition")
    return found


def _strict(schema: Any) -> Any:
    """Convert a structural schema of Kubernetes into a JSON schema that refuses fields it does not name."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = {"properties": {name: _strict(of) for name, of in schema.get("properties", {}).items()}}
    strict = {key: _strict(of) for key, of in schema.items() if key not in ("properties", "default", "enum", "format")}
    strict |= {key: schema[key] for key in ("enum",) if key in schema}
    if schema.get("type") == "object":
        strict |= named
        if not ({"additionalProperties", "x-kubernetes-preserve-unknown-fields"} & schema.keys()):
            strict["additionalProperties"] = False
    elif named["properties"]:  # below allOf, anyOf and oneOf, which name fields again
        strict |= named
    if schema.get("x-kubernetes-int-or-string"):
        strict["type"] = ["integer", "string"]
    if schema.get("nullable"):
        strict |= {"type": [schema["type"], "null"]} if "type" in schema else {}
        strict |= {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return strict


class ManifestChecker:
    """Finds errors in manifests of any kind.

    Args:
        crds: files and folders of CustomResourceDefinitions that define further kinds.
    """

    def __init__(self, crds: list[Path] | None = None) -> None:
        types = _kubernetes_types()
        self._types: dict[str, Any] = types["$defs"]
        self._types_uri = types["$id"]
        self._custom = yaml.safe_load(CUSTOM_KINDS.read_text(encoding="utf-8"))
        self._custom["kinds"] |= defined_kinds(crds) if crds else {}
        aliases = {name: {"$ref": f"{self._types_uri}#/$defs/{full}"} for name, full in _TYPES.items()}
        resources = {self._types_uri: types, "custom": self._custom, **aliases}
        self._registry: Registry = Registry().with_resources(
            (uri, Resource.from_contents(contents, default_specification=DRAFT202012))
            for uri, contents in resources.items()
        )

    def errors(self, manifest: dict[str, Any]) -> list[str]:
        """List the errors of a manifest, each as `path.to.field: reason`."""
        api_version, kind = str(manifest.get("apiVersion")), str(manifest.get("kind"))
        where = self._schema_of(api_version, kind)
        if where is None:
            return [f"apiVersion {api_version!r} has no kind {kind!r} that is known here"]
        validator = Draft202012Validator({"$ref": where}, registry=self._registry)
        return sorted(map(_told, validator.iter_errors(manifest)))

    def _schema_of(self, api_version: str, kind: str) -> str | None:
        if f"{api_version}/{kind}" in self._custom["kinds"]:
            return "custom#/kinds/" + f"{api_version}/{kind}".replace("/", "~1")
        group, _, version = api_version.rpartition("/")
        of_kind = {"group": group, "version": version, "kind": kind}
        for name, schema in self._types.items():
            if of_kind in schema.get("x-kubernetes-group-version-kind", ()):
                return f"{self._types_uri}#/$defs/{name}"
        return None


def _told(error: Any) -> str:
    """Return the most specific message of an error; if all alternatives fail, that of the deepest failure."""
    while error.context:
        error = max(error.context, key=relevance)
    return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def problems(paths: list[Path], crds: list[Path] | None = None) -> Iterator[str]:
    """Yield the errors of the manifests in files and folders, as `file: Kind name: path: reason`."""
    checker = ManifestChecker(crds)
    for path in paths:
        for file in _yaml_files(path):
            try:
                manifests = documents(file)
            except yaml.YAMLError as error:
                yield f"{file}: {error}"
                continue
            for manifest in manifests:
                name = manifest.get("metadata", {}).get("name", "")
                yield from (f"{file}: {manifest.get('kind')} {name}: {error}" for error in checker.errors(manifest))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check Kubernetes manifests field by field, without a cluster.")
    parser.add_argument("paths", nargs="*", type=Path, default=[MANIFESTS], help="manifests, or folders of them")
    parser.add_argument("--crds", nargs="+", type=Path, help="CustomResourceDefinitions, or folders of them")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    try:
        found = list(problems(arguments.paths, arguments.crds))
    except ValueError as error:
        sys.exit(str(error))
    print("\n".join(found) or "All manifests are valid.")
    sys.exit(bool(found))
