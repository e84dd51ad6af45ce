"""Lightning's Trainer, its options that depend on the machine and the SLURM job, DDP, and a job step's ranks."""

import atexit
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from data_module.errors import InputError
from pipeline.ranks.rank_messages import RANKS_TOKEN, value_of_each_rank
from pipeline.ranks.rendezvous import GROUP_ERRORS, Rendezvous, listen, not_connected, use_loopback
from pipeline.runtime import signals
from pipeline.runtime.console import RendezvousError
from pipeline.runtime.devices import TrainerOptions, best_precision, device_indices, missing_gpu, sees_own_gpu_only
from pipeline.runtime.launch import (
    JobStep,
    check_place,
    main_address,
    main_ports,
    node_name,
    rank_variable,
)
from pipeline.runtime.lightning_private import SingleStreamDDP, precision_plugin
from pipeline.training.graceful_stop import MARGIN_SECONDS

Plugin: TypeAlias = ClusterEnvironment | CheckpointIO | Precision
Value = TypeVar("Value")


def trainer_options(
    recipe_options: TrainerOptions, job: JobStep | None = None, timeout_seconds: int = 600
) -> TrainerOptions:
    """Return a recipe's `trainer:`, completed by accelerator, precision, devices and strategy.

    In a job, its nodes and tasks replace those of the recipe. `timeout_seconds` is how long a rank waits for another.

    Raises InputError if a GPU is missing, and if `devices` names no devices.
    """
    options = {"val_check_interval": 1000, "accelerator": "auto", **recipe_options}
    if missing := missing_gpu(options["accelerator"]):
        raise InputError(missing)
    if options["accelerator"] == "auto" and not torch.cuda.is_available():
        options["accelerator"] = "cpu"
    options["precision"] = options.get("precision") or best_precision(options["accelerator"])
    if job is not None:
        options |= {"num_nodes": job.num_nodes, "devices": job.tasks_per_node}
    options["strategy"] = strategy(options, timeout_seconds)
    if job is not None and options["accelerator"] != "cpu" and sees_own_gpu_only(job, torch.cuda.device_count()):
        # Lightning refuses `devices` that this process does not see. It counts ranks of a node by `parallel_devices`,
        # from which each rank takes its device by index.
        options["strategy"].parallel_devices = [torch.device("cuda", 0)] * job.tasks_per_node
        options["devices"] = 1
    return options


def make_trainer(options: TrainerOptions, job: JobStep | None, plugins: tuple[Plugin, ...] = (), **own: Any) -> Trainer:
    """Return Lightning's Trainer with the result of `trainer_options`, further plugins and `own` arguments.

    Raises InputError if Lightning refuses an option, or this process has not its place among ranks.
    """
    float16 = precision_plugin(options)
    given = [*plugins, cluster_environment(job), float16]
    # `GracefulStop` implements max_time; Lightning accepts either a precision or a plugin for it.
    elsewhere = ("max_time",) if float16 is None else ("max_time", "precision")
    try:
        trainer = Trainer(
            **{key: value for key, value in options.items() if key not in elsewhere},
            max_epochs=-1,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            plugins=[plugin for plugin in given if plugin is not None],
            **own,
        )
    except (MisconfigurationException, ValueError, ImportError) as error:
        raise InputError(f"trainer: {' '.join(str(error).split())}") from None
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, LightningEnvironment) and trainer.num_nodes > 1:
        raise InputError(
            f"trainer.num_nodes {trainer.num_nodes}: nothing starts ranks on other nodes here; use srun in a SLURM job,"
            " as slurm/train.sbatch does, or torchrun on each node, or set it to 1"
        )
    if environment is None and job is None:  # One device, but a launcher may have started several processes.
        launchers = (TorchElasticEnvironment, LSFEnvironment, MPIEnvironment)
        environment = next((launcher() for launcher in launchers if launcher.detect()), None)
    if job is None:
        _check_launch(trainer, environment)
    if environment is not None:
        environment.validate_settings(trainer.num_devices, trainer.num_nodes)
    return trainer


def _check_launch(trainer: Trainer, environment: ClusterEnvironment | None) -> None:
    """Check that this process has the place among ranks that a launcher gave it, and that it can meet the others.

    Raises InputError if not.
    """
    rank, size, variable = trainer.global_rank, trainer.num_devices * trainer.num_nodes, rank_variable()
    place: dict[str, int | None] = {"LOCAL_RANK": trainer.local_rank}
    place.setdefault(variable, rank)
    if variable in ("RANK", "LOCAL_RANK"):
        place["WORLD_SIZE"] = size
    if environment is None or isinstance(environment, LightningEnvironment):
        if size > 1 or variable == "LOCAL_RANK":  # Otherwise nothing reads the node's index.
            place["NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"] = 0
        if size > 1 and "LOCAL_RANK" not in os.environ:
            place["RANK"] = None  # The ranks that this process starts would inherit it.
    elif variable != "RANK":
        raise InputError(
            f"{type(environment).__name__} says that this process is rank {environment.global_rank()} of"
            f" {environment.world_size()}, and RANK does not; start ranks by trainer.devices, srun or torchrun"
        )
    check_place(place, rank, size)
    note = waits_for_ranks(environment) if size > 1 else ""
    if note and "MASTER_PORT" not in os.environ and "STANDALONE_PORT" not in os.environ:
        raise InputError(f"{note}, or export one MASTER_PORT for all of them")


def waits_for_ranks(environment: ClusterEnvironment | None) -> str:
    """Return why this process does not start the other ranks of its machine; empty if it does, or torchrun or srun."""
    if not isinstance(environment, LightningEnvironment) or not environment.creates_processes_externally:
        return ""
    return "LOCAL_RANK is set, so this process does not start the other ranks: unset LOCAL_RANK if nothing else does"


def cluster_environment(job: JobStep | None) -> ClusterEnvironment | None:
    """Return the plugin that gives Lightning ranks and address; None leaves the choice to Lightning.

    Raises InputError if only some of torchrun's variables are set.
    """
    if job is not None:
        return StepEnvironment(job)
    if TorchElasticEnvironment.detect():
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            if not os.environ.get(name, "").isdigit():
                raise InputError(f"{name} is not set, but TORCHELASTIC_RUN_ID is; unset it, or start ranks by torchrun")
        return None
    # Otherwise Lightning would take any process inside a job for one of its tasks.
    return LightningEnvironment() if {"SLURM_JOB_ID", "SLURM_NTASKS"} & os.environ.keys() else None


def strategy(options: TrainerOptions, timeout_seconds: int = 600) -> "ConnectedDDP | str":
    """Return DDP, with gradients as views of its buckets, for more than one device; else Lightning's choice.

    Raises InputError for more than one device in an interactive session: other ranks could not be started there.
    """
    num_devices = len(device_indices(options))
    if num_devices * int(options.get("num_nodes", 1)) > 1:
        if hasattr(sys, "ps1"):
            raise InputError(
                f"trainer.devices: a notebook trains on one device, not {num_devices}; set it to 1, or use the "
                "command fit"
            )
        return ConnectedDDP(timeout_seconds)
    return "auto"


class ConnectedDDP(SingleStreamDDP):
    """DDP with gradients as views of its buckets, whose ranks name those that are missing."""

    def __init__(self, timeout_seconds: int) -> None:
        """Ranks wait this long for one another to connect."""
        timeout = timedelta(seconds=timeout_seconds + MARGIN_SECONDS)
        super().__init__(gradient_as_bucket_view=True, timeout=timeout)
        self._patience = timeout_seconds
        self._group_timeout = timeout
        self.settings: Mapping[str, object] = {}
        """Settings that must be the same on all ranks."""
        self._listener: socket.socket | None = None
        self._starts_ranks = False

    def prepare_launch(self) -> None:
        """Set a secret token for the ranks that are started next and, unless the user has set one, a free port."""
        self._starts_ranks = True
        os.environ[RANKS_TOKEN] = secrets.token_hex(32)
        if "MASTER_PORT" not in os.environ:
            assert self.cluster_environment is not None
            self._listener = listen(self.cluster_environment.main_address, 0)
            os.environ["MASTER_PORT"] = str(self._listener.getsockname()[1])

    def setup_distributed(self) -> None:
        """Create the process group, which Lightning then finds.

        Raises RendezvousError if a rank is missing or cannot be reached.
        """
        if not dist.is_initialized():
            self.set_world_ranks()
            try:
                self._connect()
            except RendezvousError as error:
                raise RendezvousError(f"rank {self.global_rank} on {node_name()}: {error}") from None
        super().setup_distributed()

    def _connect(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        rank, size, host = environment.global_rank(), environment.world_size(), environment.main_address
        if isinstance(environment, StepEnvironment):
            meeting = Rendezvous.of_job(environment.job)
            meeting.timeout_seconds = self._patience
        else:
            port = environment.main_port
            # The store of torchrun's agent still has the keys of earlier starts.
            start = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
            meeting = Rendezvous(host, [port], rank, size, self._patience, start=f"{start} {port}")
            meeting.listener = self._listener
        meeting.settings = self.settings
        if not self._starts_ranks and (note := waits_for_ranks(environment)):
            meeting.note = f" ({note})"
        store = meeting.connect()
        if size == self.num_processes:  # all on this machine
            use_loopback()
        store.set_timeout(timedelta(seconds=self._patience))
        on_gpu = self.root_device.type == "cuda"
        backend, device = ("nccl", self.root_device) if on_gpu else ("gloo", None)
        try:
            # If a connection fails, gloo retries for many times its timeout, and Python's signal handlers do not run
            # meanwhile: let a signal end the process.
            with signals.not_recorded():
                prefixed = dist.PrefixStore("default_pg", store)
                dist.init_process_group(
                    *(backend, None, self._group_timeout, size, rank), store=prefixed, device_id=device
                )
        except GROUP_ERRORS as error:
            raise not_connected(backend, f" at {host}", error) from None
        store.set_timeout(self._group_timeout)
        if on_gpu:
            # NCCL warns about a group that is not destroyed.
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())

    def broadcast(self, obj: Value, src: int = 0) -> Value:
        """Return the value of rank `src`, which JSON can hold; Lightning's own method would unpickle it."""
        return value_of_each_rank(obj)[src]


class StepEnvironment(ClusterEnvironment):
    """Ranks and address of the job step that srun started this process in.

    Lightning's `SLURMEnvironment` takes a job of certain names for an interactive one, and misreads short forms of node
    lists.
    """

    creates_processes_externally = True

    def __init__(self, job: JobStep) -> None:
        super().__init__()
        self.job = job

    @staticmethod
    def detect() -> bool:
        """Return False: `cluster_environment` chooses this class."""
        return False

    @property
    def main_address(self) -> str:
        """Name or address of the node on which rank 0 listens."""
        return main_address(self.job.num_nodes)

    @property
    def main_port(self) -> int:
        """First port that rank 0 tries to listen on."""
        return main_ports()[0]

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.job.num_tasks

    def set_world_size(self, size: int) -> None:
        """Do nothing: the step sets it."""

    def global_rank(self) -> int:
        """Return this process's rank."""
        return self.job.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the step sets it."""

    def local_rank(self) -> int:
        """Return this process's rank among those of its node."""
        return self.job.local_rank

    def node_rank(self) -> int:
        """Return the index of this process's node."""
        return self.job.node
