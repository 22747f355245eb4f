"""A SkyPilot task, to be started as a managed job, which recovers from preemption."""

from __future__ import annotations

from typing import Any

from expert.jobs.launch.cluster import ClusterJob, start_line, yaml_text


def text(job: ClusterJob) -> str:
    head = [
        f"{job.name}: {job.ranks} ranks, {job.gpus} on each of {job.nodes} machines.",
        f"Submit it with: sky jobs launch --name {job.name} FILE",
        f"Prepared data and runs go to {job.bucket}, mounted at {job.shared} on every machine.",
        "A machine that is preempted is replaced, and the run resumes from its last checkpoint.",
    ]
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": _resources(job),
        "workdir": str(job.source.parent),
        "file_mounts": {job.shared: {"source": job.bucket, "mode": "MOUNT"}},
        **({"setup": "\n".join([*job.setup, ""])} if job.setup else {}),
        "run": _script(job),
    }
    return yaml_text([task], head)


def _resources(job: ClusterJob) -> dict[str, Any]:
    resources: dict[str, Any] = {"infra": job.infra} if job.infra else {}
    if not job.on_cpu:
        resources["accelerators"] = f"{job.accelerator}:{job.gpus}"
    resources["cpus"] = f"{job.cpus * job.gpus}+"
    if job.memory:
        resources["memory"] = f"{job.memory.rstrip('GBgbi')}+"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    return {
        **resources,
        "use_spot": job.spot,
        "job_recovery": {"max_restarts_on_errors": job.restarts},
    }


def _script(job: ClusterJob) -> str:
    # A managed job keeps its number when it is recovered.
    runs, cache = f"{job.shared}/runs/$SKYPILOT_TASK_ID", f"{job.shared}/cache/{job.name}"
    words = job.train_words(runs)
    words += ["--set", f"training.config.pretokenized_cache={cache}"]
    lines = ['first=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")'] if job.nodes > 1 else []
    start = start_line(job, words, node="$SKYPILOT_NODE_RANK", address="$first")
    return "\n".join(["set -e", *lines, start, ""])
