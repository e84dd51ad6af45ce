"""What Lightning asks about the ranks of a SLURM job step."""

from lightning.fabric.plugins import ClusterEnvironment

from pipeline.runtime.slurm import JobStep, known_nodes, main_address, main_port


class StepEnvironment(ClusterEnvironment):
    """Ranks and address of the job step that srun started this process in.

    Lightning's `SLURMEnvironment` reads the name of a job as what the job is, and short forms of node lists wrongly.
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
