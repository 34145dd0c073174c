from dataclasses import fields
from typing import Any

import pytest

from ray_on_ecs.config import environment_variable, flag, parse
from ray_on_ecs.errors import UsageError
from training.recipes.images.config import ImageConfig


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--epochs", "0"], ["--epochs", "0", "1 or more"]),
        (["--epochs", "many"], ["--epochs", "many"]),
        (["--batch-size", "0"], ["--batch-size", "0", "1 or more"]),
        (["--lr", "0"], ["--lr", "0.0", "above 0"]),
        (["--lr", "nan"], ["--lr", "nan", "finite"]),
        (["--num-workers", "0"], ["--num-workers", "0", "from 1"]),
        (["--num-workers", "2:1"], ["--num-workers", "2:1", "a minimum and a maximum"]),
        (["--num-workers", "1:"], ["--num-workers", "1:", "a minimum and a maximum"]),
        (["--num-workers", "0:4"], ["--num-workers", "0:4", "from 1"]),
        (["--checkpoint-seconds", "-1"], ["--checkpoint-seconds", "0.0 or more"]),
        (["--hang-timeout", "0"], ["--hang-timeout", "above 0"]),
        (["--samples", "9"], ["--samples", "9", "10 or more"]),
        (["--seed", "-1"], ["--seed", "-1", "0 or more"]),
        (["--seed", str(2**32)], ["--seed", str(2**32), "or less"]),
        (["--keep-checkpoints", "0"], ["--keep-checkpoints", "1 or more"]),
        (["--max-restarts", "-1"], ["--max-restarts", "0 or more"]),
        (["--worker-timeout", "inf"], ["--worker-timeout", "inf", "finite"]),
        (["--dataset", "cifar"], ["--dataset", "cifar", "fashion-mnist, digits, synthetic"]),
        (["--device", "tpu"], ["--device", "tpu", "auto, cuda, cpu"]),
        (["--run-name", "a/b"], ["--run-name", "a/b", "letters"]),
        (["--run-name", ".."], ["--run-name", "..", "letters"]),
        (["--cloudwatch-namespace", ""], ["--cloudwatch-namespace", "''", "letters"]),
        (["--cloudwatch-namespace", "a" * 256], ["--cloudwatch-namespace", "255"]),
        (["--cloudwatch-namespace", "AWS/ECS"], ["--cloudwatch-namespace", "AWS/"]),
        (["--cloudwatch-namespace", "naïve"], ["--cloudwatch-namespace", "naïve"]),
        (["--cloudwatch-namespace", ":a"], ["--cloudwatch-namespace", "':'"]),
        (["--epoch", "3"], ["--epoch", "--help"]),
    ],
)
def test_a_bad_value_is_named_with_its_rule_on_one_line(arguments: list[str], named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(ImageConfig, arguments, {})
    message = str(caught.value)
    assert all(word in message for word in named), f"the user must see {named} in: {message}"
    assert "\n" not in message, "an error is one line"


def test_every_setting_has_a_flag_with_a_description() -> None:
    for spec in fields(ImageConfig):
        assert spec.metadata["description"], f"{flag(spec.name)} would be bare in --help"


def test_without_flags_the_defaults_of_the_dataclass_hold() -> None:
    assert parse(ImageConfig, [], {}) == ImageConfig(), "the command line must not have defaults of its own"


def test_an_environment_variable_sets_the_default_and_a_flag_wins_over_it() -> None:
    variables = {environment_variable("storage_path"): "s3://bucket/runs", "RAY_ON_ECS_NUM_WORKERS": "4"}
    assert parse(ImageConfig, [], variables).storage_path == "s3://bucket/runs", (
        "the task definition hands over the bucket so"
    )
    assert parse(ImageConfig, [], variables).num_workers == 4, "a number from the environment is a number"
    assert parse(ImageConfig, ["--num-workers", "2"], variables).num_workers == 2, "what is typed wins"


def test_a_number_of_workers_may_be_a_range_whose_most_makes_the_steps() -> None:
    config = parse(ImageConfig, ["--num-workers", "1:4"], {})
    assert config.workers == (1, 4)
    assert config.microbatches(world_size=3) == 4, "whatever is there"
    assert parse(ImageConfig, ["--num-workers", "3"], {}).workers == (3, 3)
    assert ImageConfig().workers is None
    assert ImageConfig().microbatches(world_size=3) == 3


def test_a_namespace_is_what_cloudwatch_takes() -> None:
    for name in ("ray-dev", "a b/C_1.#:", "AWSome/x", "x" * 255):
        assert parse(ImageConfig, ["--cloudwatch-namespace", name], {}).cloudwatch_namespace == name
    assert parse(ImageConfig, [], {"RAY_ON_ECS_CLOUDWATCH_NAMESPACE": "ray"}).cloudwatch_namespace == "ray"
    assert parse(ImageConfig, [], {"RAY_ON_ECS_CLOUDWATCH_NAMESPACE": ""}).cloudwatch_namespace is None, (
        "an empty one is none"
    )


def test_a_bad_environment_variable_is_refused_like_a_flag() -> None:
    with pytest.raises(UsageError, match="--epochs: 0 is not allowed"):
        parse(ImageConfig, [], {"RAY_ON_ECS_EPOCHS": "0"})


def test_a_run_without_a_name_gets_one_that_tells_what_it_is() -> None:
    name = ImageConfig(dataset="digits").resolve_defaults().run_name
    assert name is not None
    assert name.startswith("resnet18-digits-2"), "a name tells model, data and time"
    assert ImageConfig(run_name="mine").resolve_defaults().run_name == "mine", "a given name stays"


def test_help_is_quick_and_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(ImageConfig, ["--help"], {})
    shown = capsys.readouterr().out
    assert stop.value.code == 0, "asking for help is no mistake"
    assert all(flag(spec.name) in shown for spec in fields(ImageConfig)), "each setting is in --help"
    assert "exit status" in shown, "scripts need to know what the exit status means"


def test_what_is_left_open_is_the_optimizer_s_own() -> None:
    sgd, adamw = (ImageConfig(optimizer=name).resolve_defaults() for name in ("sgd", "adamw"))
    assert (sgd.lr, sgd.weight_decay) == (0.1, 5e-4)
    assert (adamw.lr, adamw.weight_decay) == (3e-3, 0.05)
    assert ImageConfig(lr=0.5).resolve_defaults().lr == 0.5, "what was given stays"


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, "cpu", 64),
        ({"num_workers": 4}, "cpu", 64),
        ({"num_workers": 1}, "cuda", 512),
        ({"num_workers": 2}, "cuda", 2048),
        ({"num_workers": "1:2"}, "cuda", 2048),
        ({"num_workers": 2, "dataset": "digits"}, "cuda", 89),
        ({"num_workers": 2, "batch_size": 100}, "cuda", 100),
        ({"num_workers": 4, "dataset": "folder", "data_dir": "pictures"}, "cuda", 128),
        ({"num_workers": 1, "dataset": "folder", "data_dir": "pictures", "image_size": 150}, "cuda", 256),
        ({"num_workers": 1, "dataset": "folder", "data_dir": "pictures", "image_size": 32}, "cuda", 512),
        ({"num_workers": 1, "dataset": "folder", "data_dir": "pictures", "image_size": 2048}, "cuda", 1),
    ],
)
def test_the_default_batch_size_follows_the_device(settings: dict[str, Any], device: str, expected: int) -> None:
    config = ImageConfig(**settings).resolve_device(device)
    assert (config.device, config.batch_size) == (device, expected)
    assert config.resolve_device(device) == config, "a run that is resumed keeps it"
