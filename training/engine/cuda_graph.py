"""A step as a CUDA graph: its kernels are recorded once, and each later step launches all of them at once.

It pays where launching the kernels one by one takes longer than running them: a small network on a fast GPU.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from training.errors import UsageError

# The first steps run as they are: cuDNN tries its algorithms, and the optimizer makes its state.
WARM_UP_STEPS = 3

# The micro-batches of a step: what the model takes, and its answers.
Inputs = Sequence[tuple[Tensor, Tensor]]


def check_graph(device: torch.device, world_size: int) -> None:
    """Raise UsageError unless a step on this device, and on so many ranks, can be a CUDA graph."""
    if device.type != "cuda":
        raise UsageError(f"--cuda-graph: 'on' needs a GPU, and this runs on {device.type}; leave it off")
    if world_size > 1:
        raise UsageError(f"--cuda-graph: 'on' needs a single worker, and there are {world_size}; leave it off")


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Record the kernels of a step, without running them, and return what runs them."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on with the GPU meanwhile: those that store a checkpoint or read ahead.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


class GraphedStep:
    """Takes steps whose inputs have the same shapes each time, from the fourth on as a CUDA graph.

    All that the step does in Python happens while it is recorded, and not again. So its numbers have to be in tensors;
    of the optimizer's, which are not, the learning rates are copied into tensors before each step.

    Args:
        step: Computes the gradients of the inputs and calls the optimizer's `step`.
        optimizer: A fused optimizer, whose state is on the GPU.
    """

    def __init__(self, step: Callable[[Inputs], None], optimizer: Optimizer) -> None:
        self._step = step
        self._optimizer = optimizer
        self._warm_up_stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.forget()

    def forget(self) -> None:
        """Record the step anew: the optimizer's state, or another tensor that it uses, is another one now."""
        self._steps_done = 0
        self._replay: Callable[[], None] | None = None

    def __call__(self, inputs: Inputs) -> None:
        """Take a step.

        Raises:
            UsageError: The step does what can't be recorded.
        """
        if self._steps_done < WARM_UP_STEPS:
            self._run(inputs)
            self._steps_done += 1
            return
        if self._replay is None:
            self._replay = self._record(inputs)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            rate.fill_(group["lr"])
        torch._foreach_copy_(_flat(self._inputs), _flat(inputs))
        self._replay()

    def _run(self, inputs: Inputs) -> None:
        """Run the step as it is, on a stream of its own, as PyTorch asks of what is recorded later."""
        if self._warm_up_stream is None:
            self._step(inputs)
            return
        self._warm_up_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._warm_up_stream):
            self._step(inputs)
        torch.cuda.current_stream().wait_stream(self._warm_up_stream)

    def _record(self, inputs: Inputs) -> Callable[[], None]:
        self._inputs = [(given.clone(), answers.clone()) for given, answers in inputs]
        self._rates = [torch.tensor(group["lr"], device=inputs[0][0].device) for group in self._optimizer.param_groups]
        self._optimizer.zero_grad(set_to_none=True)  # so that the gradients are in the graph's memory
        with self._capturable():
            try:
                return record(lambda: self._step(self._inputs))
            except RuntimeError as error:
                reason = str(error).strip().partition("\n")[0]
                raise UsageError(
                    f"--cuda-graph: 'on' needs a model whose step never waits for the GPU, and this one's can't be "
                    f"recorded ({reason}); leave it off"
                ) from error

    @contextmanager
    def _capturable(self) -> Generator[None]:
        """Let the optimizer read its learning rates from tensors meanwhile; its state keeps the form of a plain run."""
        groups = self._optimizer.param_groups
        before = [{name: group[name] for name in ("lr", "capturable") if name in group} for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group.update({"lr": rate, **({"capturable": True} if "capturable" in group else {})})
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


def _flat(inputs: Inputs) -> list[Tensor]:
    return [tensor for each in inputs for tensor in each]
