"""The manifests are valid, give a run what it needs, and agree with the image and the configurations."""

import os
import re
import tomllib

import pytest
import yaml
from check_manifests import ManifestChecker, problems
from manifests import FOLDER, JOBS, ROOT, bytes_or_count, command, groups, manifests, of_kind

from nemo_rl.config import GRPOMasterConfig
from nemo_rl.config.loading.load import load_config

IN_IMAGE = "/opt/nemo-rl/"


def clusters():
    return [job["spec"]["rayClusterSpec"] for job in of_kind("RayJob")] + [
        item["spec"] for item in of_kind("RayCluster")
    ]


def config_of(job) -> GRPOMasterConfig:
    python, program, flag, config, *overrides = command(job)
    assert (python, flag) == ("python", "--config")
    assert (ROOT / program).is_file()
    return load_config(ROOT / config, overrides, GRPOMasterConfig)


def test_all_fields_are_in_the_definitions():
    assert list(problems([FOLDER])) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("gpu/rayjob.yaml", "backoffLimit: 3", 'backoffLimit: "3"', "spec.backoffLimit: '3' is not of type 'integer'"),
        ("gpu/rayjob.yaml", "shutdownAfterJobFinishes", "shutdownAfterJobFinished", "'shutdownAfterJobFinished' was"),
        ("gpu/rayjob.yaml", "maxReplicas: 2", "", "workerGroupSpecs.0: 'maxReplicas' is a required property"),
        (
            "gpu/raycluster.yaml",
            "imagePullPolicy",
            "imagePulPolicy",
            "spec.containers.0: Additional properties",
        ),
        (
            "cpu/rayjob.yaml",
            "mountPath: /data",
            "mountPth: /data",
            "volumeMounts.0: 'mountPath' is a required",
        ),
        ("cpu/rayjob.yaml", "runAsUser: 10001", "runAsUser: nemo", "securityContext.runAsUser: 'nemo' is not of type"),
        (
            "cpu/rayjob.yaml",
            "sizeLimit: 4Gi",
            "sizeLimit: 4Gi\n                sizeLimit: 8",
            "sizeLimit is given",
        ),
        ("cpu/storage.yaml", "storage: 10Gi", "storage: [10Gi]", "spec.resources.requests.storage: ['10Gi'] is not"),
        ("cpu/storage.yaml", "PersistentVolumeClaim", "PersistentVolumClaim", "no kind 'PersistentVolumClaim'"),
        (
            "kueue/queue.yaml",
            "LowerPriority",
            "LowPriority",
            "preemption.withinClusterQueue: 'LowPriority' is",
        ),
        ("gpu/localqueue.yaml", "v1beta2", "v1beta1", "apiVersion 'kueue.x-k8s.io/v1beta1' has no kind 'LocalQueue'"),
    ],
)
def test_a_misspelled_field_is_named(tmp_path, file, old, new, said):
    text = (FOLDER / file).read_text()
    assert old in text
    (tmp_path / "given.yaml").write_text(text.replace(old, new))
    assert any(said in problem for problem in problems([tmp_path])), list(problems([tmp_path]))


QUEUE_SPEC = {
    "type": "object",
    "required": ["clusterQueue"],
    "properties": {
        "clusterQueue": {"type": "string", "maxLength": 8},
        "stopPolicy": {"type": "string", "enum": ["None", "Hold"], "default": "None", "nullable": True},
        "share": {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]},
        "weights": {"type": "object", "additionalProperties": {"type": "integer", "format": "int32"}},
        "raw": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "flavors": {"type": "array", "items": {"type": "object", "properties": {"default": {"type": "boolean"}}}},
    },
}


@pytest.fixture(scope="module")
def of_a_cluster(tmp_path_factory):
    """Return a checker with definitions as `kubectl get crd -o yaml` lists them."""
    top = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
    schema = {"type": "object", "properties": top | {"spec": QUEUE_SPEC}}
    spec = {
        "group": "kueue.x-k8s.io",
        "names": {"kind": "LocalQueue"},
        "versions": [{"name": "v1beta2", "schema": {"openAPIV3Schema": schema}}],
    }
    file = tmp_path_factory.mktemp("crds") / "crds.yaml"
    definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "spec": spec}
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [definition]}))
    return ManifestChecker([file])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"stopPolicy": None, "share": "1Gi", "weights": {"a": 1}, "raw": {"b": [2]}, "flavors": [{}]}, None),
        ({"share": 3, "flavors": [{"default": True}]}, None),
        ({"clusterQueue": "longer than eight"}, "spec.clusterQueue: 'longer than eight' is too long"),
        ({"clusterQueues": "x"}, "spec: Additional properties are not allowed ('clusterQueues' was unexpected)"),
        ({"stopPolicy": "Stop"}, "spec.stopPolicy: 'Stop' is not one of ['None', 'Hold', None]"),
        ({"share": 0.5}, "spec.share: 0.5 is not of type"),
        ({"weights": {"a": "1"}}, "spec.weights.a: '1' is not of type 'integer'"),
        ({"flavors": [{"defaults": True}]}, "spec.flavors.0: Additional properties are not allowed ('defaults'"),
    ],
)
def test_definitions_of_a_cluster_are_used_if_given(of_a_cluster, spec, said):
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "a"}}
    errors = of_a_cluster.errors(queue | {"spec": {"clusterQueue": "b"} | spec})
    assert any(said in error for error in errors) if said else errors == []


def test_definitions_of_a_cluster_do_not_change_other_kinds(of_a_cluster):
    assert [error for item in manifests(FOLDER) for error in of_a_cluster.errors(item)] == []


def test_a_file_without_definitions_is_named(tmp_path):
    (tmp_path / "none.yaml").write_text("kind: List\nitems: []\n")
    with pytest.raises(ValueError, match=r"none\.yaml: no CustomResourceDefinition"):
        ManifestChecker([tmp_path / "none.yaml"])


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.parent.name)
def test_a_job_runs_a_configuration_that_loads_and_fits_its_pods(path):
    (job,) = manifests(path)
    config = config_of(job)
    workers = job["spec"]["rayClusterSpec"].get("workerGroupSpecs", [])
    gpus = {group["replicas"]: int(limits(group)["nvidia.com/gpu"]) for group in workers}
    assert gpus == ({config.cluster.num_nodes: config.cluster.gpus_per_node} if workers else {})
    assert config.cluster.device == ("cuda" if workers else "cpu")


def limits(group) -> dict[str, str]:
    return group["template"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.parent.name)
def test_a_run_has_time_to_write_its_last_checkpoint_to_a_lasting_volume(path):
    (job,) = manifests(path)
    config = config_of(job)
    claims = {
        item["metadata"]["name"]: item for item in manifests(path.parent) if item["kind"] == "PersistentVolumeClaim"
    }
    for count, pod in groups(job["spec"]["rayClusterSpec"]):
        (container,) = pod["containers"]
        (hook,) = container["lifecycle"]["preStop"]["exec"]["command"]
        wait = int(next(item["value"] for item in container["env"] if item["name"] == "RAY_JOB_STOP_WAIT_TIME_S"))
        assert config.checkpointing.signal_grace_s < wait < pod["terminationGracePeriodSeconds"]
        assert os.access(ROOT / hook.removeprefix(IN_IMAGE), os.X_OK)
        mounts = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
        volumes = {item["name"]: item for item in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        claim = claims[volumes[mounts["/data"]]["persistentVolumeClaim"]["claimName"]]
        assert count == 1 or claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert config.checkpointing.checkpoint_dir.startswith("/data/")
    assert config.logger.log_dir.startswith("/data/")
    assert job["spec"]["backoffLimit"] > 0
    assert job["spec"]["shutdownAfterJobFinishes"], "Kueue takes no others"


def test_pods_run_as_the_unprivileged_user_of_the_image():
    user = int(re.findall(r"^USER (\d+)$", (ROOT / "docker/Dockerfile").read_text(), flags=re.MULTILINE)[-1])
    for cluster in clusters():
        for _, pod in groups(cluster):
            context = pod["securityContext"]
            assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] == user
            assert not pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"]


def test_pods_run_the_pinned_ray_version():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray,) = [item.partition("==")[2] for item in dependencies if item.startswith("ray[")]
    assert {cluster["rayVersion"] for cluster in clusters()} == {ray}


def test_secrets_are_given_by_reference():
    assert of_kind("Secret") == []
    for cluster in clusters():
        for _, pod in groups(cluster):
            secret = [item for item in pod["containers"][0]["env"] if re.search("TOKEN|KEY|SECRET", item["name"])]
            assert all("value" not in item and "secretKeyRef" in item["valueFrom"] for item in secret)
            assert {item["name"] for item in secret} in (set(), {"HF_TOKEN", "WANDB_API_KEY"})


def test_the_interactive_cluster_equals_that_of_the_job():
    (cluster,) = manifests(FOLDER / "gpu/raycluster.yaml")
    (job,) = manifests(FOLDER / "gpu/rayjob.yaml")
    for _, pod in groups(cluster["spec"]):
        pod["containers"][0]["image"] = pod["containers"][0]["image"].removesuffix(":gpu")
    assert cluster["spec"] == job["spec"]["rayClusterSpec"]


def test_the_queue_has_quota_for_the_job():
    (queue,) = of_kind("ClusterQueue")
    (group,) = queue["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    (local,) = of_kind("LocalQueue")
    (job,) = manifests(FOLDER / "gpu/rayjob.yaml")
    assert flavor["name"] == of_kind("ResourceFlavor")[0]["metadata"]["name"]
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": local["metadata"]["name"]}
    # Resources of KubeRay's pod that submits the job.
    needed = {"cpu": 0.5, "memory": 200 * 2.0**20, "nvidia.com/gpu": 0.0}
    for count, pod in groups(job["spec"]["rayClusterSpec"]):
        for name, quantity in pod["containers"][0]["resources"]["requests"].items():
            needed[name] += count * bytes_or_count(quantity)
    quota = {item["name"]: bytes_or_count(item["nominalQuota"]) for item in flavor["resources"]}
    assert set(quota) == set(needed) == set(group["coveredResources"])
    assert all(needed[name] <= quota[name] < 2 * needed[name] for name in needed)


@pytest.mark.parametrize("folder", ["cpu", "gpu", "kueue"])
def test_a_kustomization_has_all_files_that_it_names(folder):
    (kustomization,) = manifests(FOLDER / folder / "kustomization.yaml")
    assert [name for name in kustomization["resources"] if not (FOLDER / folder / name).is_file()] == []
    images = {
        pod["containers"][0]["image"]
        for item in manifests(FOLDER / folder)
        if item["kind"] == "RayJob"
        for _, pod in groups(item["spec"]["rayClusterSpec"])
    }
    assert images <= {image["name"] for image in kustomization.get("images", [])}
