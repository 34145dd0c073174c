"""What Ray Train prepares for a script: the GPUs, and no process group, which is the script's own affair."""

from ray.train.backend import Backend, BackendConfig


class SharedGpus(Backend):
    """Lets every worker see all GPUs that the run has on its node, as torchrun does: LOCAL_RANK is the index."""

    share_cuda_visible_devices = True


class ScriptBackend(BackendConfig):
    """Makes no process group."""

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train sets up on each worker."""
        return SharedGpus
