"""The manifest for KubeRay has the form of its CRD (the fields that it uses), and room for the config that it runs."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.topology.test_shipped_configs import MODELS
from topology.bundles import Node
from topology.capacity import Capacity
from topology.config import load_config
from topology.plan import make_plan

FOLDER = Path("deploy/kuberay")
UNITS = {"Gi": 1.0, "Ti": 1024.0}


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, COUNT, FLAG = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
PATH = {"type": "string", "pattern": "^/"}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[KMGTP]i?)?$"}  # as text: what YAML reads is kept
AMOUNTS = {"type": "object", "additionalProperties": QUANTITY, "propertyNames": {"pattern": "^[a-z0-9./-]+$"}}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = closed(("name",), name=NAME)
CONTAINER = closed(
    ("name", "image", "resources"),
    name=NAME,
    image={"type": "string", "pattern": "^[a-z0-9./-]+:[A-Za-z0-9._-]+$"},
    workingDir=PATH,
    env=array(closed(("name", "value"), name={"type": "string", "pattern": "^[A-Z_]+$"}, value=TEXT)),
    resources=closed(("requests", "limits"), requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts=array(closed(("name", "mountPath"), name=NAME, mountPath=PATH)),
)
POD = closed(
    ("containers",),
    securityContext=closed(runAsUser=COUNT, fsGroup=COUNT),
    containers=array(CONTAINER),
    volumes=array(
        closed(
            ("name", "persistentVolumeClaim"),
            name=NAME,
            persistentVolumeClaim=closed(("claimName",), claimName=NAME),
        )
    ),
)
TEMPLATE = closed(("spec",), spec=POD)
WORKERS = closed(
    ("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=NAME,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
CLUSTER = closed(
    ("rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"),
    rayVersion=TEXT,
    authOptions=closed(("mode",), mode={"const": "token"}),
    headGroupSpec=closed(("template",), rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=array(WORKERS),
)
JOB = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=METADATA,
    spec=closed(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        backoffLimit=COUNT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=CLUSTER,
    ),
)
CLAIM = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "v1"},
    kind={"const": "PersistentVolumeClaim"},
    metadata=METADATA,
    spec=closed(
        ("accessModes", "resources"),
        accessModes=array({"const": "ReadWriteMany"}),
        resources=closed(("requests",), requests=closed(("storage",), storage=QUANTITY)),
    ),
)


@pytest.fixture
def manifest() -> tuple[Any, Any]:
    claim, job = yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text())
    return claim, job


def pods(job: Any) -> list[Any]:
    """Of the head and of each group of workers."""
    cluster = job["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def node(pod: Any, name: str) -> Node:
    """What Ray finds in a pod: KubeRay tells it the limits."""
    limits = pod["containers"][0]["resources"]["limits"]
    memory, unit = re.fullmatch(r"(\d+)(\w+)", limits["memory"]).groups()  # type: ignore[union-attr]
    return Node(name, float(limits["cpu"]), float(limits.get("nvidia.com/gpu", 0)), float(memory) * UNITS[unit])


def test_the_manifest_has_the_form_of_its_kinds(manifest: tuple[Any, Any]) -> None:
    for document, schema in zip(manifest, (CLAIM, JOB), strict=True):
        jsonschema.Draft202012Validator(schema).validate(document)


def test_every_pod_sees_the_claim_where_the_runs_and_the_model_are(manifest: tuple[Any, Any]) -> None:
    claim, job = manifest
    for pod in pods(job):
        (volume,), (container,) = pod["volumes"], pod["containers"]
        (mount,) = container["volumeMounts"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mount["name"] == volume["name"]
        inside = [variable["value"] for variable in container["env"] if variable["name"].startswith("TANDEM_")]
        assert all(path.startswith(mount["mountPath"] + "/") for path in [*inside, container["workingDir"]])
        assert f"model.path={mount['mountPath']}/" in job["spec"]["entrypoint"]


def test_its_nodes_hold_the_plan_of_its_config_and_no_gpu_is_left_over(manifest: tuple[Any, Any]) -> None:
    _, job = manifest
    command, verb, path, *words = shlex.split(job["spec"]["entrypoint"])
    assert (command, verb) == ("tandem", "run")
    config = load_config(path.removeprefix("/opt/tandem/"), [word for word in words if word != "--set"])
    assert config.cluster.address is None, "the address is the job's"
    (workers,), (head, worker) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"], pods(job)
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    nodes = [node(head, "head"), *(node(worker, f"worker {index}") for index in range(workers["replicas"]))]
    model = next(model for name, model in MODELS.items() if name.endswith(Path(config.model.path).name))

    plan = make_plan(config, model, Capacity("the manifest", tuple(nodes)))

    offered = {node.name: node.gpus for node in nodes}
    assert {load.name: load.resources.gpus for load in plan.nodes} == offered


def test_the_manifest_names_the_ray_version_that_is_pinned(manifest: tuple[Any, Any]) -> None:
    assert manifest[1]["spec"]["rayClusterSpec"]["rayVersion"] == version("ray")


def test_the_image_is_built_from_the_pinned_requirements_and_has_the_configs_where_the_job_looks() -> None:
    recipe = (FOLDER / "Containerfile").read_text()
    used = re.findall(r"requirements/[a-z]+\.txt", recipe)
    assert set(used) == {f"requirements/{name}.txt" for name in ("torch", "runtime", "extra")}
    assert all(Path(file).exists() for file in used)
    assert "\nvllm-cpu==" in Path("requirements/runtime.txt").read_text(), "the line that the recipe replaces"
    assert "WORKDIR /opt/tandem\n" in recipe
