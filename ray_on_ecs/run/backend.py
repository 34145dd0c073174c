"""Ray Train's backend of a script: it shares the GPUs of a node, and leaves the process group to the script."""

from ray.train.backend import Backend, BackendConfig


class SharedGpus(Backend):
    """Lets every worker see all GPUs that the run has on its node, as torchrun does: LOCAL_RANK is the index."""

    share_cuda_visible_devices = True


class ScriptBackend(BackendConfig):
    """Makes no process group."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend class of each worker."""
        return SharedGpus
