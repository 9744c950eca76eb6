"""The manifests are what Kubernetes and JobSet publish, and give each pod what kerasdist reads.

The schema is that of kubeflow-trainer-api: models of Kubernetes' and JobSet's own types, made from
their OpenAPI documents, with strict types. They pass over fields that they do not know; those are
found by writing back what was read.
"""

import copy
import re

import pytest
import yaml
from kubeflow_trainer_api import models

from kerasdist.cluster import KubernetesClusterResolver, detect
from kerasdist.job.interruption import ExitCode
from tests.fresh import ROOT

FOLDER = ROOT / "integrations" / "kubernetes"
SCHEMAS = {
    ("v1", "Service"): models.IoK8sApiCoreV1Service,
    ("batch/v1", "Job"): models.IoK8sApiBatchV1Job,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
}
WORKERS = 4


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


SERVICE, JOB = documents("job.yaml")
[JOBSET] = documents("jobset.yaml")
JOB_OF_SET = JOBSET["spec"]["replicatedJobs"][0]


def accepted(document) -> bool:
    """Whether a document is of its schema, with no field beside; raises where a type is wrong."""
    schema = SCHEMAS[document["apiVersion"], document["kind"]]
    return schema.from_dict(document).to_dict() == document


@pytest.mark.parametrize("document", [SERVICE, JOB, JOBSET], ids=lambda each: each["kind"])
def test_it_is_of_the_published_schema(document):
    assert accepted(document)


def test_a_field_that_is_not_there_is_found():
    document = copy.deepcopy(JOBSET)
    document["spec"]["failurePolicy"]["maxRestart"] = 3
    assert not accepted(document)


def environment_of_pod(job: str, spec, index: int) -> dict[str, str]:
    """Returns what the container of an indexed Job's pod has, by Kubernetes' rules.

    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables
    """
    variables = {
        "HOSTNAME": f"{job}-{index}",
        "JOB_COMPLETION_INDEX": str(index),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    }
    [container] = spec["template"]["spec"]["containers"]
    for variable in container["env"]:
        if "valueFrom" in variable:
            assert variable["valueFrom"]["secretKeyRef"] == {"name": "train", "key": "secret"}
            variables[variable["name"]] = "of the Secret"
            continue
        variables[variable["name"]] = re.sub(
            r"\$\((\w+)\)", lambda found: variables[found[1]], variable["value"]
        )
    return variables


CASES = [
    pytest.param("train", JOB["spec"], "train", id="Job"),
    # <jobset>-<replicated job>-<number of the job>, and a service of the set's name
    pytest.param("train-workers-0", JOB_OF_SET["template"]["spec"], "train", id="JobSet"),
]


@pytest.mark.parametrize(("job", "spec", "service"), CASES)
def test_each_pod_finds_its_place(job, spec, service):
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == WORKERS
    for index in range(spec["completions"]):
        environ = environment_of_pod(job, spec, index)
        place = KubernetesClusterResolver(environ).membership()
        assert (place.rank, place.num_workers) == (index, WORKERS)
        assert place.coordinator == f"{job}-0.{service}:27182"
        assert detect(environ).membership() == place


def test_the_names_of_the_pods_are_those_that_the_service_knows():
    name = JOB["metadata"]["name"]
    assert SERVICE["metadata"]["name"] == JOB["spec"]["template"]["spec"]["subdomain"]
    # A label that Kubernetes gives to a Job's pods.
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    # Without a subdomain of its own a set's service has the set's name.
    assert "subdomain" not in JOBSET["spec"]["network"]
    assert (JOBSET["metadata"]["name"], JOB_OF_SET["name"], JOB_OF_SET["replicas"]) == (
        "train",
        "workers",
        1,
    )


@pytest.mark.parametrize(
    ("spec", "codes", "action"),
    [
        (JOB["spec"], [ExitCode.LOST_WORKER, ExitCode.PREEMPTED], "Ignore"),
        (JOB_OF_SET["template"]["spec"], [ExitCode.PREEMPTED], "FailJob"),
    ],
    ids=["Job", "JobSet"],
)
def test_exit_codes_are_ours(spec, codes, action):
    codes_rule, disruption_rule = spec["podFailurePolicy"]["rules"]
    assert codes_rule["onExitCodes"]["values"] == codes
    [container] = spec["template"]["spec"]["containers"]
    assert codes_rule["onExitCodes"]["containerName"] == container["name"]
    assert codes_rule["action"] == disruption_rule["action"] == action
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a policy needs it
