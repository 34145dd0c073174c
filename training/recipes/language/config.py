"""The settings of a language model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ray_on_ecs.config import ON_OFF, flag, setting
from ray_on_ecs.errors import UsageError
from training.engine.config import TrainingConfig, how, how_fast
from training.recipes import RECIPES

PYTHON = "python"
SHARDINGS = ("none", "full")
# Settings of a model from scratch, which a checkpoint has itself.
OF_A_CHECKPOINT = ("layers", "width", "heads", "kv_heads", "vocab_size", "tied_weights")

_what = partial(setting, group="what to train")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model's size before it is known how many tokens its vocabulary has."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    context: int
    vocab_size: int


SIZES = {
    "tiny": Size(layers=4, width=128, heads=4, kv_heads=2, context=128, vocab_size=2048),
    "small": Size(layers=8, width=512, heads=8, kv_heads=4, context=512, vocab_size=16_384),
    "medium": Size(layers=12, width=768, heads=12, kv_heads=4, context=1024, vocab_size=32_768),
    "1b": Size(layers=22, width=2048, heads=32, kv_heads=8, context=2048, vocab_size=32_768),
}


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(TrainingConfig):
    """All settings of `python -m training`."""

    PROGRAM = "python -m training --recipe language"

    ABOUT = "Train a language model with PyTorch DDP or FSDP on a Ray cluster, or on this machine."
    EXAMPLES = """\
        examples:
          python -m training --recipe language --max-steps 200
          python -m training --recipe language --model small --corpus s3://my-bucket/texts --sharding full
          python -m training --recipe language --model ~/models/SmolLM2-135M --corpus ~/texts --lr 1e-4

        """

    recipe: str = _what("language", "what is trained", choices=RECIPES)
    model: str = _what(
        "tiny",
        f"a size to start from scratch ({', '.join(SIZES)}); or a folder or s3://bucket/prefix with a Hugging Face "
        "checkpoint of the Llama family to start from",
    )
    corpus: str = _what(
        PYTHON,
        "folder or s3://bucket/prefix with text files (UTF-8); python: the source files of this Python's own library",
        metavar="DIR|python",
    )
    test_fraction: float = _what(0.05, "fraction of the corpus that is for testing", type=float, above=0.0, at_most=0.5)
    vocab_size: int | None = _what(
        None,
        "tokens of the vocabulary, which is learned from the corpus (default: the size's; a checkpoint has its own)",
        type=int,
        at_least=257,  # the bytes, and the end of a document
    )
    context: int | None = _what(
        None, "tokens of a sequence (default: the size's, or a checkpoint's, up to 2048)", type=int, at_least=2
    )
    layers: int | None = _what(None, "layers of the model (default: the size's)", type=int, at_least=1)
    width: int | None = _what(None, "numbers per token between the layers (default: the size's)", type=int, at_least=2)
    heads: int | None = _what(None, "attention heads (default: the size's)", type=int, at_least=1)
    kv_heads: int | None = _what(
        None,
        "heads of keys and values, which several attention heads share (default: the size's)",
        type=int,
        at_least=1,
    )
    tied_weights: str | None = _what(
        None,
        "use the same weights for the tokens that go in and those that come out (default: on, or a checkpoint's)",
        choices=ON_OFF,
    )
    max_steps: int | None = how(
        None,
        "train for so many steps instead, in --epochs equal parts, each of which ends with a test and a checkpoint",
        type=int,
        at_least=1,
    )
    global_batch: int | None = how(
        None, "sequences per step over all workers (default: --batch-size times the workers)", type=int, at_least=1
    )
    warmup_fraction: float = how(
        0.05, "fraction of the steps in which the learning rate rises", type=float, at_least=0.0, at_most=1.0
    )
    final_lr_fraction: float = how(
        0.1,
        "the learning rate falls, along a cosine, to this fraction of its peak",
        type=float,
        at_least=0.0,
        at_most=1.0,
    )
    clip_norm: float = how(1.0, "the norm that gradients are clipped to; 0: never", type=float, at_least=0.0)
    sharding: str = how_fast(
        "none",
        "none: each worker has all weights (DDP); full: each has its share of weights, gradients and optimizer (FSDP)",
        choices=SHARDINGS,
    )
    activation_checkpointing: str = how_fast(
        "off",
        "compute each layer again in the backward pass instead of keeping what it computed",
        choices=ON_OFF,
        may_change=True,
    )
    prompt: str = how("\n", "what the sample of generated text at the end continues", metavar="TEXT", may_change=True)
    sample_tokens: int = how(
        200, "tokens of the sample of generated text; 0: none", type=int, at_least=0, may_change=True
    )

    def __post_init__(self) -> None:
        """Check the values, those of a step against each other, and the shape of a model from scratch."""
        super().__post_init__()
        if self.max_steps is not None and self.max_steps % self.epochs:
            down = max(self.max_steps // self.epochs, 1) * self.epochs
            raise UsageError(
                f"--max-steps: {self.max_steps} is not allowed; it must be a multiple of --epochs {self.epochs}, such "
                f"as {down}, since the run is tested after each of so many equal parts"
            )
        if self.model in SIZES:
            _check_shape(self.size)
        elif shape := [name for name in OF_A_CHECKPOINT if getattr(self, name) is not None]:
            raise UsageError(
                f"{flag(shape[0])}: a checkpoint has its own; leave it out, or give --model one of {', '.join(SIZES)}"
            )

    @property
    def label(self) -> str:
        """The model and the corpus."""
        return f"{self.model.rstrip('/').rpartition('/')[2]}-{self.corpus.rstrip('/').rpartition('/')[2]}"[:80]

    @property
    def size(self) -> Size:
        """The size of a model from scratch: that of `model`, with what is given instead."""
        size = SIZES[self.model]
        given = {name: value for name in vars(size) if (value := getattr(self, name)) is not None}
        return replace(size, **given)

    def step_sequences(self, world_size: int) -> int:
        """Return the sequences in a step over all workers, whatever the number of those that are there."""
        return self.global_batch or self.local_batch_size * self.microbatches(world_size)


def _check_shape(size: Size) -> None:
    if size.width % size.heads or size.width // size.heads % 2:
        raise UsageError(
            f"--heads: {size.heads} is not allowed; it must divide --width {size.width} into even parts, such as of 64"
        )
    if size.heads % size.kv_heads:
        raise UsageError(f"--kv-heads: {size.kv_heads} is not allowed; it must divide --heads {size.heads}")
