"""Job files: the engines' parsers accept them, and what runs is the command, retried on 75."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.host.launchers import find_place
from pipeline.stages.launch.job_file import ENGINES, GIB, JobLimits, JobRequest, render_job

GOLDEN = Path(__file__).parents[2] / "golden" / "jobs"
HOSTILE = ('note=it\'s "$(id)" `id` $HOME {{x}} #a: b', "-x", "a\\b", "ü€😀", "", "%s", "<&>")
PLAIN = JobRequest(
    recipe="LeNet5_Digits",
    arguments=["+recipe=lenet5_digits", "train.resume=auto"],
    processes=1,
    cores=2,
    gpus=0,
    gpu_kind=None,
    image=None,
    limits=JobLimits(time_s=5400, grace_s=120, memory_gib=3, notes=("time: a note",)),
)
LARGE = replace(
    PLAIN,
    arguments=[*PLAIN.arguments, *HOSTILE],
    processes=4,
    gpus=2,
    gpu_kind="H100",
    image="team/image:1",
)
REQUESTS = {"plain": PLAIN, "large": LARGE}
EXTENSIONS = {"slurm": "sh", "ray": "txt"}


def render(name: str, request: JobRequest) -> str:
    """Render a job of an engine, with the engine's image as the command does."""
    engine = ENGINES[name]
    return render_job(engine, replace(request, image=request.image or engine.image))


def documents(name: str, request: JobRequest) -> list[Any]:
    return list(yaml.safe_load_all(render(name, request)))


@pytest.mark.parametrize("size", REQUESTS)
@pytest.mark.parametrize("name", ENGINES)
def test_job_file_matches_golden_file(name: str, size: str, request: pytest.FixtureRequest) -> None:
    """The recorded files are those that the engines' parsers have accepted."""
    file = GOLDEN / f"{name}_{size}.{EXTENSIONS.get(name, 'yaml')}"
    text = render(name, REQUESTS[size])
    if request.config.getoption("--update-golden"):
        file.write_text(text)
    assert text == file.read_text()


# Kubernetes


@pytest.mark.medium
@pytest.mark.parametrize("size", REQUESTS)
@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_kubernetes_files_match_the_schema(name: str, size: str) -> None:
    schemas = json.loads((GOLDEN / "kubernetes_fields.json").read_text())
    for document in documents(name, REQUESTS[size]):
        jsonschema.validate(document, schemas[document["kind"]])
    document["spec"]["unknown"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unknown"):
        jsonschema.validate(document, schemas[document["kind"]])


def pod_jobs(name: str, request: JobRequest) -> tuple[Any, Any]:
    """Return the specification of a JobSet and of the job in it."""
    spec = documents(name, request)[0]["spec"]
    spec = spec["template"]["spec"] if name == "trainjob" else spec
    (job,) = spec["replicatedJobs"]
    return spec, job["template"]["spec"]


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_pod_runs_the_command_within_its_limits(name: str) -> None:
    _, job = pod_jobs(name, LARGE)
    (container,) = job["template"]["spec"]["containers"]
    words = [word.replace("$$(", "$(") for word in container["command"]]
    assert words == ["python", "-m", "pipeline", *LARGE.arguments]
    assert container["image"] == LARGE.image
    assert container["resources"]["limits"] == {"memory": "3Gi", "nvidia.com/gpu": "2"}
    assert (job["completions"], job["parallelism"]) == (4, 4)
    assert job["activeDeadlineSeconds"] == LARGE.limits.time_s
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == LARGE.limits.grace_s


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_kubernetes_restarts_only_after_status_75(name: str) -> None:
    spec, job = pod_jobs(name, LARGE)
    assert job["backoffLimit"] == 0
    *_, failed = job["podFailurePolicy"]["rules"]
    assert failed == {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [75]}}
    # FailJob has the reason PodFailurePolicy, and no rule restarts it.
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["BackoffLimitExceeded"]
    assert spec["failurePolicy"]["maxRestarts"] == 0


def test_jobset_pods_find_each_other() -> None:
    _, job = pod_jobs("jobset", LARGE)
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    place = find_place("auto", {**environment, "JOB_COMPLETION_INDEX": "3"})
    assert place is not None
    assert (place.rank, place.size) == (3, 4)
    assert place.address == "lenet5-digits-node-0-0.lenet5-digits:29500"
    (container,) = pod_jobs("jobset", PLAIN)[1]["template"]["spec"]["containers"]
    assert "env" not in container


def test_kubeflow_models_accept_the_files() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api")
    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    for name in ("jobset", "trainjob"):
        for document in documents(name, LARGE):
            assert kinds[document["kind"]].from_dict(document).to_dict() == document


# Slurm


def write_program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def run_batch(folder: Path, request: JobRequest, status: int) -> tuple[int, list[str], str]:
    """Run a batch script with programs in place of Slurm's; return its exit status, the words after
    `srun`, and those of `scontrol`."""
    write_program(folder, "srun", f"printf '%s\\0' \"$@\" > words; exit {status}")
    write_program(folder, "scontrol", 'echo "$@" > requeued')
    (folder / "job.sh").write_text(render("slurm", request))
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    ended = subprocess.run(["bash", "job.sh"], cwd=folder, env=environment)
    words = (folder / "words").read_text().split("\0")[:-1]
    requeued = folder / "requeued"
    return ended.returncode, words, requeued.read_text() if requeued.exists() else ""


@pytest.mark.parametrize("size", REQUESTS)
@pytest.mark.parametrize(("status", "requeued"), [(0, ""), (1, ""), (2, ""), (75, "requeue 7\n")])
def test_slurm_requeues_only_after_status_75(
    size: str, status: int, requeued: str, tmp_path: Path
) -> None:
    request = REQUESTS[size]
    ended, words, seen = run_batch(tmp_path, request, status)
    assert (ended, seen) == (status, requeued)
    assert words[-len(request.arguments) :] == list(request.arguments)
    container = ["apptainer", "exec", "--nv", LARGE.image] if request.image else []
    assert words[1 : -len(request.arguments)] == [*container, "python", "-m", "pipeline"]


def test_slurm_sends_the_signal_before_the_limit() -> None:
    lines = [line for line in render("slurm", LARGE).splitlines() if line.startswith("#SBATCH")]
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)
    assert options["time"] == "92"
    assert options["signal"] == "TERM@120"
    assert options["ntasks"] == "4"
    assert options["mem-per-cpu"] == "1536M"
    assert options["gpus-per-task"] == "H100:2"
    assert "requeue" in options


def test_sbatch_accepts_the_file(tmp_path: Path) -> None:
    if shutil.which("sbatch") is None or subprocess.run(["scontrol", "ping"]).returncode != 0:
        pytest.skip("no Slurm controller answers: apt-get install slurm-wlm, and start it")
    (tmp_path / "job.sh").write_text(render("slurm", replace(PLAIN, processes=2)))
    tested = subprocess.run(["sbatch", "--test-only", tmp_path / "job.sh"])
    assert tested.returncode == 0


# SkyPilot


@pytest.mark.parametrize("size", REQUESTS)
def test_skypilot_runs_the_command_within_its_limits(size: str) -> None:
    request = REQUESTS[size]
    (task,) = documents("skypilot", request)
    assert task["num_nodes"] == request.processes
    assert task["resources"]["memory"] == "3+"
    assert task["resources"].get("accelerators") == ("H100:2" if request.gpus else None)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    words = shlex.split(task["run"].partition("exec ")[2].replace("\\\n", ""))
    limit = ["timeout", "--preserve-status", "--kill-after=120", "5400"]
    assert words == [*limit, "python", "-m", "pipeline", *request.arguments]


def test_skypilot_accepts_the_file(tmp_path: Path) -> None:
    sky = pytest.importorskip("sky", reason="skypilot")
    for request in REQUESTS.values():
        (tmp_path / "job.yaml").write_text(render("skypilot", request))
        task = sky.Task.from_yaml(str(tmp_path / "job.yaml"))
        assert task.num_nodes == request.processes
        assert task.run.endswith(f"python -m pipeline {shlex.join(request.arguments)}\n")


# Ray


class RecordedCall(SimpleNamespace):
    """The arguments of a call, as attributes."""


def run_script(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, RecordedCall]:
    """Run a script with modules in place of Ray's; return its exit status and the trainer's
    arguments."""
    trainers = []

    class Trainer(RecordedCall):
        def __init__(self, function: Callable[[Any], None], **settings: Any) -> None:
            super().__init__(function=function, **settings)
            trainers.append(self)

        def fit(self) -> Any:
            return SimpleNamespace(return_value=self.function(self.train_loop_config))

    context = SimpleNamespace(
        get_world_rank=lambda: 1, get_world_size=lambda: 4, get_local_rank=lambda: 0
    )
    train = {
        "get_context": lambda: context,
        **dict.fromkeys(("ScalingConfig", "RunConfig", "FailureConfig"), RecordedCall),
    }
    modules: Mapping[str, Mapping[str, Any]] = {
        "ray": {"init": lambda **settings: None, "train": SimpleNamespace(**train)},
        "ray.train": train,
        "ray.train.collective": {"broadcast_from_rank_zero": lambda value: value},
        "ray.train.v2": {},
        "ray.train.v2.api": {},
        "ray.train.v2.api.data_parallel_trainer": {"DataParallelTrainer": Trainer},
        "ray.util": {"get_node_ip_address": lambda: "10.0.0.1"},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(SystemExit) as ended:
        exec(compile(text, "job.py", "exec"), {"__file__": "/shared/job.py"})
    return int(str(ended.value.code)), trainers[0]


@pytest.mark.parametrize("status", [0, 1, 75])
def test_ray_restarts_only_after_status_75(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, cwd: str, env: dict[str, str]) -> Any:
        assert cwd == "/shared"
        calls.append((command, env))
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", run)
    text = render("ray", LARGE)
    if status == 75:
        with pytest.raises(Exception, match=r"^$") as caught:
            run_script(text, monkeypatch)
        assert type(caught.value).__name__ == "Stopped"
        return
    ended, trainer = run_script(text, monkeypatch)
    assert ended == status
    assert trainer.scaling_config == RecordedCall(
        num_workers=4,
        use_gpu=True,
        resources_per_worker={"CPU": 2, "GPU": 2, "memory": 3 * GIB},
    )
    assert trainer.run_config.failure_config == RecordedCall(max_failures=-1)
    ((command, environment),) = calls
    assert command[:4] == ["timeout", "--preserve-status", "--kill-after=120", "5400"]
    assert command[4:] == [sys.executable, "-m", "pipeline", *LARGE.arguments]
    place = find_place("auto", environment)
    assert place is not None
    assert (place.rank, place.size, place.host) == (1, 4, "10.0.0.1")


def test_ray_file_uses_existing_ray_api() -> None:
    pytest.importorskip("ray.train", reason="ray[train]")
    from ray import train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    for request in REQUESTS.values():
        tree = ast.parse(render("ray", request))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in calls:
            name = ast.unparse(call.func)
            if name in ("train.ScalingConfig", "train.FailureConfig"):
                keywords = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
                getattr(train, name.partition(".")[2])(**keywords)
        trainer = next(call for call in calls if ast.unparse(call.func) == "DataParallelTrainer")
        names = {str(word.arg) for word in trainer.keywords}
        assert names <= set(DataParallelTrainer.__init__.__annotations__)


# All engines

PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "))


@pytest.mark.medium
@given(arguments=st.lists(PRINTABLE, min_size=1, max_size=3))
def test_arguments_are_passed_unchanged(arguments: list[str]) -> None:
    request = replace(PLAIN, arguments=arguments)
    (task,) = documents("skypilot", request)
    assert shlex.split(task["run"])[-len(arguments) :] == arguments
    (container,) = pod_jobs("jobset", request)[1]["template"]["spec"]["containers"]
    expanded = [word.replace("$$(", "$(") for word in container["command"][3:]]
    assert expanded == arguments
    tree = ast.parse(render("ray", request))
    (values,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ARGUMENTS"
    )
    assert ast.literal_eval(values) == arguments


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("lenet5_digits", "lenet5-digits"),
        ("3D+net.v2", "job-3d-net-v2"),
        ("ü", "job"),
        ("a" * 100, "a" * 40),
        ("a" * 39 + "_b", "a" * 39),
    ],
)
def test_job_name_is_a_dns_label(recipe: str, name: str) -> None:
    assert replace(PLAIN, recipe=recipe).name == name
