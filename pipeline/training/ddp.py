"""DDP as `fit` uses it: ranks that cannot connect to one another say so in one line; and the ranks of a job step."""

import atexit
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from pipeline.compat.lightning import SingleStreamDDP
from pipeline.runtime.console import RendezvousError
from pipeline.runtime.launch import JobStep, known_nodes, main_address, main_port, node_name
from pipeline.runtime.rendezvous import Rendezvous, reason_of
from pipeline.training.graceful_stop import MARGIN_SECONDS


class ConnectedDDP(SingleStreamDDP):
    """DDP, with gradients as views of its buckets, whose ranks name those that are missing."""

    def __init__(self, timeout_seconds: int, **options: Any) -> None:
        """Ranks wait this long for one another to connect."""
        timeout = timedelta(seconds=timeout_seconds + MARGIN_SECONDS)
        super().__init__(gradient_as_bucket_view=True, timeout=timeout, **options)
        self._patience = timeout_seconds
        self._group_timeout = timeout

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
        rank, size = environment.global_rank(), environment.world_size()
        # torchrun's agent has a store already.
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        host, port = environment.main_address, environment.main_port
        store = Rendezvous(host, port, rank, size, self._patience, getattr(environment, "nodes", ())).connect(serves)
        store.set_timeout(timedelta(seconds=self._patience))
        on_gpu = self.root_device.type == "cuda"
        backend, device = ("nccl", self.root_device) if on_gpu else ("gloo", None)
        options: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": self._group_timeout}
        try:
            prefixed = dist.PrefixStore("default_pg", store)
            dist.init_process_group(backend, store=prefixed, device_id=device, **options)
        except (RuntimeError, dist.DistError) as error:
            raise RendezvousError(
                f"all {size} ranks have met at {host}:{port}, but {backend} does not connect them"
                f" ({reason_of(error)}); export {backend.upper()}_SOCKET_IFNAME=the interface between"
                " nodes, and check firewalls"
            ) from None
        store.set_timeout(self._group_timeout)
        if on_gpu:
            atexit.register(_destroy_group)  # NCCL warns about a group that is left


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class StepEnvironment(ClusterEnvironment):
    """Ranks and address of the job step that srun started this process in.

    Lightning's `SLURMEnvironment` takes a job of certain names for an interactive one, and misreads short forms of node
    lists.
    """

    def __init__(self, job: JobStep) -> None:
        super().__init__()
        self._job = job

    @staticmethod
    def detect() -> bool:
        """Return False: it is chosen by `cluster_environment`."""
        return False

    @property
    def creates_processes_externally(self) -> bool:
        """Whether something else than Lightning starts the ranks."""
        return True

    @property
    def main_address(self) -> str:
        """Name or address of the node on which rank 0 listens."""
        return main_address()

    @property
    def main_port(self) -> int:
        """Port on which rank 0 listens."""
        return main_port()

    @property
    def nodes(self) -> list[str]:
        """Names of the step's nodes; empty if SLURM does not tell them."""
        return known_nodes()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._job.num_tasks

    def set_world_size(self, size: int) -> None:
        """Do nothing: the step sets it."""

    def global_rank(self) -> int:
        """Return this process's rank."""
        return self._job.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the step sets it."""

    def local_rank(self) -> int:
        """Return this process's rank among those of its node."""
        return self._job.local_rank

    def node_rank(self) -> int:
        """Return the index of this process's node."""
        return self._job.node
