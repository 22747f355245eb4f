"""A Slurm batch script: one task per rank, requeued and resumed after preemption."""

from __future__ import annotations

import shlex

from expert.jobs.launch.cluster import ClusterJob, shell_words

_SCRIPT = """\
#!/bin/bash
# {title}
# Submit it with: sbatch FILE
{directives}

# Every task is a rank: expert reads its number and the address of rank 0 from Slurm's variables.
set -u
runs={shared}/runs/{name}-$SLURM_JOB_ID
mkdir -p "$runs"
# The first rank that fails records why, and its exit code: srun returns the largest one of all.
export TORCHELASTIC_ERROR_FILE=$runs/failure.json
rm -f "$TORCHELASTIC_ERROR_FILE"
{setup}
# {warning} seconds before the time limit or preemption, Slurm sends USR1 to this script only: it
# asks the ranks to save and end, and requeues the job. TERM comes with scancel, scontrol requeue
# and preemption; Slurm sends it to the ranks itself, which save and end.
requeue=no
stopped=no
save_and_requeue() {{
    requeue=yes
    scancel --signal=TERM "$SLURM_JOB_ID.0"
}}
trap save_and_requeue USR1
trap stopped=yes TERM

srun --kill-on-bad-exit=1 --cpus-per-task={cpus} \\
    {command} &
ranks=$!
wait "$ranks"
code=$?
while kill -0 "$ranks" 2>/dev/null; do  # a signal ends `wait`, but not the ranks
    wait "$ranks"
    code=$?
done

if [ "$code" -ne 0 ] && [ -f "$TORCHELASTIC_ERROR_FILE" ]; then
    code=$(grep -o '"exit_code": [0-9]*' "$TORCHELASTIC_ERROR_FILE" | grep -o '[0-9]*$')
fi

# After a crash the job is requeued at most {restarts} times; not after errors that would repeat:
# 2 wrong command line or manifest, 3 does not fit, 75 no space on the disk.
case $requeue-$code in
    yes-0) requeue=no ;;  # it finished meanwhile
    no-0 | no-2 | no-3 | no-75) ;;
    no-*)
        echo "$code" >>"$runs/crashes"
        [ "$(wc -l <"$runs/crashes")" -gt {restarts} ] || requeue=yes
        ;;
esac
if [ "$requeue" = yes ] && [ "$stopped" = no ]; then
    echo "ended with code $code: requeued, to resume"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
"""


def script(job: ClusterJob) -> str:
    title = f"{job.name}: {job.ranks} ranks, {job.gpus} on each of {job.nodes} machines"
    if job.nodes == 1:
        title = f"{job.name}: {job.ranks} ranks on one machine"
    command = [job.python, "-P", "-m", "expert", *job.train_words("$runs")]
    return _SCRIPT.format(
        title=title,
        directives="\n".join(f"#SBATCH --{line}" for line in _directives(job)),
        shared=shlex.quote(job.shared),
        name=job.name,
        setup="".join(f"{line}\n" for line in job.setup),
        warning=job.warning,
        cpus=job.cpus,
        command=shell_words(command),
        restarts=job.restarts,
    )


def _directives(job: ClusterJob) -> list[str]:
    directives = [
        f"job-name={job.name}",
        f"nodes={job.nodes}",
        f"ntasks-per-node={job.gpus}",
        f"cpus-per-task={job.cpus}",
        *([] if job.on_cpu else [f"gpus-per-node={job.gpus}"]),
        *([f"mem={job.memory}"] if job.memory else []),
    ]
    for name in ("time", "partition", "account", "qos"):
        value = getattr(job, name)
        directives += [f"{name}={value}"] if value else []
    return [
        *directives,
        f"signal=B:USR1@{job.warning}",
        "requeue",
        f"output={job.name}-%j.log",
        "open-mode=append",
    ]
