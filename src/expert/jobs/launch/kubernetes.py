"""A Kubernetes Job with one pod per machine, and the Service through which pods find the first.

A plain indexed Job works on every cluster since 1.24. Kubeflow's TrainJob needs a controller and a
runtime that may not be installed, and its volume fields changed between releases.
"""

from __future__ import annotations

from typing import Any

from expert.core.errors import EXIT_DOES_NOT_FIT, EXIT_NO_SPACE, EXIT_USAGE
from expert.jobs.launch.cluster import PORT, ClusterJob, start_line, yaml_text

_SECONDS_TO_END = 10
"""Part of the time to save that is reserved for ranks to end."""


def text(job: ClusterJob) -> str:
    head = [
        f"{job.name}: {job.ranks} ranks, {job.gpus} in each of {job.nodes} pods.",
        f"The claim {job.claim} must hold the folder of the expert as {job.folder}, and is where",
        "prepared data and runs go. Submit it with: kubectl apply -f FILE",
        "A pod that is evicted or fails is replaced, and the run resumes from its last checkpoint.",
        "Applied again under the same name, it resumes the run; a new run needs another name.",
    ]
    meta = {"name": job.name, **({"namespace": job.namespace} if job.namespace else {})}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": dict(meta),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
            "ports": [{"name": "ranks", "port": PORT}],
        },
    }
    return yaml_text([*([service] if job.nodes > 1 else []), _job(job, meta)], head)


def _job(job: ClusterJob, meta: dict[str, str]) -> dict[str, Any]:
    fatal = sorted([EXIT_USAGE, EXIT_DOES_NOT_FIT, EXIT_NO_SPACE])  # would fail again
    codes = {"containerName": "ranks", "operator": "In", "values": fatal}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": dict(meta),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": job.restarts * job.nodes,  # a crash ends the pods of all machines
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                    {"action": "FailJob", "onExitCodes": codes},
                ]
            },
            "template": {
                "spec": {
                    **({"subdomain": job.name} if job.nodes > 1 else {}),
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": job.warning,
                    "containers": [_container(job)],
                    "volumes": [
                        {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}},
                        {"name": "shm", "emptyDir": {"medium": "Memory"}},
                    ],
                }
            },
        },
    }


def _container(job: ClusterJob) -> dict[str, Any]:
    wanted = {} if job.on_cpu else {"nvidia.com/gpu": job.gpus}
    more = {"memory": job.memory} if job.memory else {}
    return {
        "name": "ranks",
        "image": job.image,
        "command": ["bash", "-c", _script(job)],
        "env": [
            # How long torchrun waits for its ranks to save after the pod gets SIGTERM.
            {
                "name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
                "value": str(max(1, job.warning - _SECONDS_TO_END)),
            },
        ],
        "resources": {
            "requests": {"cpu": job.cpus * job.gpus, **more},
            **({"limits": wanted} if wanted else {}),
        },
        "volumeMounts": [
            {"name": "shared", "mountPath": job.shared},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _script(job: ClusterJob) -> str:
    words = job.train_words(f"{job.shared}/runs/{job.name}")
    address = f"{job.name}-0.{job.name}"
    start = start_line(job, words, node="$JOB_COMPLETION_INDEX", address=address)
    return "\n".join(["set -e", *job.setup, start, ""])
