"""What ``--on kubernetes --dry-run`` prints, compared whole, and known to the published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.lab.kubernetes_api import check

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.launchers.base import JobSpec, Rendered
from paceline.launchers.kubernetes.launcher import Kubernetes
from paceline.launchers.kubernetes.options import KubernetesOptions
from paceline.launchers.registry import jobs_directory
from paceline.launchers.submission import task_job

pytestmark = pytest.mark.k8s
IMAGE = "registry.example/train:1"


def render(options: dict[str, Any], **fields: Any) -> Rendered:
    described = {
        "command": ("python", "train.py", "--lr", "0.1"),
        "name": "train",
        "directory": Path("/state/t-1"),
        "nodes": (2, 2),
        "nproc": (4,),
        "python": "python",
        **fields,
    }
    rendered = Kubernetes().render(JobSpec(**described), KubernetesOptions(**{"image": IMAGE, **options}))
    documents = list(yaml.safe_load_all(rendered.files["job.yaml"]))
    assert documents == list(rendered.objects)
    for document in documents:
        check(document)
    return rendered


def test_an_indexed_job() -> None:
    rendered = render(
        {
            "kind": "job",
            "namespace": "team",
            "volume": ("runs:/runs",),
            "memory": "64Gi",
            "service_account": "trainer",
            "secret": ("HF_TOKEN=hub/token",),
            "label": ("team=vision",),
            "node_selector": ("zone=a",),
            "workdir": "/work",
            "grace": "2min",
        },
        gpus_per_node=4,
        cpus_per_task=8,
        walltime_s=7200.0,
        env={"NOTE": "it's $(HOME)"},
        threads=2,
    )
    assert rendered.text == JOB


def test_a_train_job_with_a_runtime_of_its_own() -> None:
    run = ("python", "-m", "paceline", "train", "fashion-mnist", "--run-dir", "/runs/a")
    rendered = render(
        {"volume": ("runs:/runs",)},
        nodes=(2, 4),
        inner="agent",
        is_task=True,
        run=Path("/runs/a"),
        command=run,
    )
    assert rendered.text == TRAIN_JOB


def test_a_train_job_with_a_runtime_of_the_clusters() -> None:
    options = {"runtime": "torch-distributed", "volume": ("runs:/runs",)}
    assert render(options, walltime_s=60.0, gpus_per_node=4).text == WITH_RUNTIME


def test_a_job_set() -> None:
    assert render({"kind": "jobset"}, nodes=(1, 1), nproc=(2,)).text == JOB_SET


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"image": None}, {}, "needs --image"),
        ({"kind": "pod"}, {}, "--kind must be one of trainjob, jobset, job, but is 'pod'"),
        ({"namespace": "My Team"}, {}, "--namespace"),
        ({"memory": "64 GB"}, {}, "--memory must be a quantity such as 64Gi"),
        ({"kind": "job", "runtime": "torch"}, {}, "--runtime belongs to --kind trainjob"),
        ({"runtime": "torch", "workdir": "/w"}, {}, "leave out --runtime"),
        ({"volume": ("runs",)}, {}, "--volume must be CLAIM:/PATH"),
        ({"volume": ("a:/x", "b:/x")}, {}, "given before"),
        ({"secret": ("HF_TOKEN=abc",)}, {}, "--secret must be VARIABLE=SECRET/KEY"),
        ({"label": ("a b=c",)}, {}, "--label must be KEY=VALUE"),
        ({"node_selector": ("zone",)}, {}, "--node-selector must be KEY=VALUE"),
        ({"grace": "0s"}, {}, "--grace"),
        ({}, {"env": {"HF_TOKEN": "x"}}, "--secret VARIABLE=SECRET/KEY"),
        ({}, {"directory": Path("/state/1train")}, "Give another --name"),
        ({}, {"directory": Path("/state") / ("a" * 60)}, "at most 54 characters"),
        ({}, {"run": Path("/data/a"), "is_task": True}, "--run /data/a is in no volume"),
        ({}, {"nodes": (1, 2), "inner": "spawn"}, "--nodes MIN:MAX"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_before(
    options: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        render(options, **fields)


@pytest.mark.parametrize("run", [None, "runs/a"])
def test_a_run_needs_a_place_in_the_pods(run: str | None) -> None:
    with pytest.raises(ConfigError, match="Give --run with an absolute path there"):
        task_job(RunConfig(task="fashion-mnist", run=run), {}, Kubernetes(), "python")
    spec = task_job(RunConfig(task="fashion-mnist", run="/runs/a"), {}, Kubernetes(), "python")
    assert (spec.run, spec.inner) == (Path("/runs/a"), "agent")
    assert spec.directory.parent == jobs_directory()


def test_addresses_and_settings_are_no_secrets() -> None:
    render({}, env={"TOKENIZERS_PARALLELISM": "false", "MONKEY": "1"})


JOB = """\
# /state/t-1/job.yaml
apiVersion: v1
kind: Service
metadata:
  name: t-1
  namespace: team
  labels:
    app.kubernetes.io/managed-by: paceline
    app.kubernetes.io/instance: t-1
    team: vision
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: t-1
  ports:
    - name: rendezvous
      port: 29500
---
apiVersion: batch/v1
kind: Job
metadata:
  name: t-1
  namespace: team
  labels:
    app.kubernetes.io/managed-by: paceline
    app.kubernetes.io/instance: t-1
    team: vision
spec:
  completionMode: Indexed
  completions: 2
  parallelism: 2
  backoffLimit: 0
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      - action: Ignore
        onExitCodes:
          containerName: node
          operator: In
          values:
            - 75
      - action: FailJob
        onExitCodes:
          containerName: node
          operator: In
          values:
            - 2
  activeDeadlineSeconds: 7200
  template:
    metadata:
      labels:
        app.kubernetes.io/managed-by: paceline
        app.kubernetes.io/instance: t-1
        team: vision
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 120
      serviceAccountName: trainer
      nodeSelector:
        zone: a
      volumes:
        - name: shm
          emptyDir:
            medium: Memory
        - name: volume-0
          persistentVolumeClaim:
            claimName: runs
      containers:
        - name: node
          image: registry.example/train:1
          command:
            - python
            - "-m"
            - paceline.launchers.node
            - "--inner"
            - torchrun
            - "--nodes"
            - "2"
            - "--nproc"
            - "4"
            - "--threads"
            - "2"
            - "--master-port"
            - "29500"
            - "--"
            - python
            - train.py
            - "--lr"
            - "0.1"
          workingDir: /work
          env:
            - name: PYTHONUNBUFFERED
              value: "1"
            - name: PACELINE_NODES
              value: "2"
            - name: PACELINE_HOSTS
              value: "t-1-0.t-1,t-1-1.t-1"
            - name: NOTE
              value: "it's $$(HOME)"
            - name: HF_TOKEN
              valueFrom:
                secretKeyRef:
                  name: hub
                  key: token
          resources:
            requests:
              cpu: "32"
              memory: "64Gi"
            limits:
              memory: "64Gi"
              nvidia.com/gpu: "4"
          ports:
            - containerPort: 29500
          volumeMounts:
            - name: shm
              mountPath: /dev/shm
            - name: volume-0
              mountPath: /runs
      subdomain: t-1
"""

TRAIN_JOB = """\
# /state/t-1/job.yaml
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: t-1
  namespace: default
  labels:
    app.kubernetes.io/managed-by: paceline
    app.kubernetes.io/instance: t-1
spec:
  mlPolicy:
    numNodes: 2
    torch: {}
  template:
    spec:
      network:
        enableDNSHostnames: true
        publishNotReadyAddresses: true
      failurePolicy:
        maxRestarts: 0
      replicatedJobs:
        - name: node
          replicas: 1
          template:
            metadata:
              labels:
                app.kubernetes.io/managed-by: paceline
                app.kubernetes.io/instance: t-1
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:
              completionMode: Indexed
              completions: 2
              parallelism: 2
              backoffLimit: 6
              podReplacementPolicy: Failed
              podFailurePolicy:
                rules:
                  - action: Ignore
                    onPodConditions:
                      - type: DisruptionTarget
                        status: "True"
                  - action: Ignore
                    onExitCodes:
                      containerName: node
                      operator: In
                      values:
                        - 75
              template:
                metadata:
                  labels:
                    app.kubernetes.io/managed-by: paceline
                    app.kubernetes.io/instance: t-1
                spec:
                  restartPolicy: Never
                  terminationGracePeriodSeconds: 300
                  volumes:
                    - name: shm
                      emptyDir:
                        medium: Memory
                    - name: volume-0
                      persistentVolumeClaim:
                        claimName: runs
                  containers:
                    - name: node
                      image: registry.example/train:1
                      ports:
                        - containerPort: 29500
                      volumeMounts:
                        - name: shm
                          mountPath: /dev/shm
                        - name: volume-0
                          mountPath: /runs
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: t-1
  namespace: default
  labels:
    app.kubernetes.io/managed-by: paceline
    app.kubernetes.io/instance: t-1
spec:
  runtimeRef:
    kind: TrainingRuntime
    name: t-1
  trainer:
    image: registry.example/train:1
    command:
      - python
      - "-m"
      - paceline.launchers.node
      - "--inner"
      - agent
      - "--nodes"
      - "2:4"
      - "--nproc"
      - "4"
      - "--master-port"
      - "29500"
      - "--"
      - python
      - "-m"
      - paceline
      - train
      - fashion-mnist
      - "--run-dir"
      - /runs/a
    numNodes: 2
    numProcPerNode: 4
    env:
      - name: PYTHONUNBUFFERED
        value: "1"
      - name: PACELINE_NODES
        value: "4"
      - name: PACELINE_HOSTS
        value: "t-1-node-0-0.t-1,t-1-node-0-1.t-1,t-1-node-0-2.t-1,t-1-node-0-3.t-1"
"""

WITH_RUNTIME = """\
# /state/t-1/job.yaml
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: t-1
  namespace: default
  labels:
    app.kubernetes.io/managed-by: paceline
    app.kubernetes.io/instance: t-1
spec:
  runtimeRef:
    kind: ClusterTrainingRuntime
    name: torch-distributed
  trainer:
    image: registry.example/train:1
    command:
      - python
      - "-m"
      - paceline.launchers.node
      - "--inner"
      - torchrun
      - "--nodes"
      - "2"
      - "--nproc"
      - "4"
      - "--master-port"
      - "29500"
      - "--"
      - python
      - train.py
      - "--lr"
      - "0.1"
    numNodes: 2
    numProcPerNode: 4
    env:
      - name: PYTHONUNBUFFERED
        value: "1"
      - name: PACELINE_NODES
        value: "2"
      - name: PACELINE_HOSTS
        value: "t-1-node-0-0.t-1,t-1-node-0-1.t-1"
    resourcesPerNode:
      limits:
        nvidia.com/gpu: "4"
  runtimePatches:
    - manager: paceline/launcher
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        terminationGracePeriodSeconds: 300
                        volumes:
                          - name: shm
                            emptyDir:
                              medium: Memory
                          - name: volume-0
                            persistentVolumeClaim:
                              claimName: runs
                        containers:
                          - name: node
                            volumeMounts:
                              - name: shm
                                mountPath: /dev/shm
                              - name: volume-0
                                mountPath: /runs
  activeDeadlineSeconds: 60
"""

JOB_SET = """\
# /state/t-1/job.yaml
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: t-1
  namespace: default
  labels:
    app.kubernetes.io/managed-by: paceline
    app.kubernetes.io/instance: t-1
spec:
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: 0
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        metadata:
          labels:
            app.kubernetes.io/managed-by: paceline
            app.kubernetes.io/instance: t-1
        spec:
          completionMode: Indexed
          completions: 1
          parallelism: 1
          backoffLimit: 0
          podReplacementPolicy: Failed
          podFailurePolicy:
            rules:
              - action: Ignore
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
              - action: Ignore
                onExitCodes:
                  containerName: node
                  operator: In
                  values:
                    - 75
              - action: FailJob
                onExitCodes:
                  containerName: node
                  operator: In
                  values:
                    - 2
          template:
            metadata:
              labels:
                app.kubernetes.io/managed-by: paceline
                app.kubernetes.io/instance: t-1
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 300
              volumes:
                - name: shm
                  emptyDir:
                    medium: Memory
              containers:
                - name: node
                  image: registry.example/train:1
                  command:
                    - python
                    - "-m"
                    - paceline.launchers.node
                    - "--inner"
                    - torchrun
                    - "--nproc"
                    - "2"
                    - "--master-port"
                    - "29500"
                    - "--"
                    - python
                    - train.py
                    - "--lr"
                    - "0.1"
                  env:
                    - name: PYTHONUNBUFFERED
                      value: "1"
                    - name: PACELINE_NODES
                      value: "1"
                    - name: PACELINE_HOSTS
                      value: t-1-node-0-0.t-1
                  ports:
                    - containerPort: 29500
                  volumeMounts:
                    - name: shm
                      mountPath: /dev/shm
"""
