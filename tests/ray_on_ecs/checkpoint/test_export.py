"""The export of weights as safetensors: one file or several, written by all ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.export import export_weights
from ray_on_ecs.checkpoint.location import RUN_VARIABLE, open_file, open_folder
from tests.aws import BUCKET
from tests.training.ranks import Ranks


class Tied(nn.Module):
    """Two layers and a head that share weights, in two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.layer = nn.Linear(6, 6).to(torch.bfloat16)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight


def built() -> Tied:
    torch.manual_seed(0)
    return Tied()


def export(rank: int, ranks: int, folder: Path, file_bytes: int, name: str = "model.safetensors") -> None:
    model = built()
    if ranks > 1:
        fully_shard(model)
    export_weights(model, *open_file(folder / name), Collectives(), file_bytes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("file_bytes", "files"), [(10**9, 1), (100, 3)], ids=["one file", "several"])
def test_the_weights_are_those_of_the_model(
    on_ranks: Ranks, tmp_path: Path, ranks: int, file_bytes: int, files: int
) -> None:
    on_ranks(ranks, export, tmp_path, file_bytes)
    found, expected = weights(tmp_path), built().state_dict()
    del expected["head.weight"]  # it is the embedding's
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    if files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}


def fail(rank: int, ranks: int, folder: Path) -> str:
    with pytest.raises(OSError, match="the weights could not be written to ") as found:
        export(rank, ranks, folder, 100, "file/model.safetensors")
    return str(found.value)


def test_failed_export_raises_on_all_ranks(on_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = on_ranks(2, fail, tmp_path)
    assert first == second


def test_an_export_reaches_a_bucket(s3: Any) -> None:
    export_weights(built(), *open_file(f"s3://{BUCKET}/exported/model.safetensors"), Collectives())
    body = s3.get_object(Bucket=BUCKET, Key="exported/model.safetensors")["Body"].read()
    assert int.from_bytes(body[:8], "little") < len(body)


def test_export_is_reproducible(tmp_path: Path) -> None:
    model, metadata = built(), {"classes": '["Kätzchen"]', "mean": "0.5", "about": "flowers"}
    files = [tmp_path / f"{number}.safetensors" for number in range(10)]
    for file in files:
        export_weights(model, *open_file(file), Collectives(), metadata=metadata)
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {**metadata, "format": "pt"}
    tensors = load_file(files[0])
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items() if name in tensors)


def test_another_dtype_for_floating_point_numbers(tmp_path: Path) -> None:
    model = built()
    export_weights(model, *open_file(tmp_path / "model.safetensors"), Collectives(), dtype=torch.bfloat16)
    found, expected = weights(tmp_path), model.state_dict()
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(found["embedding.weight"], expected["embedding.weight"].bfloat16())


def test_sizes_are_those_of_the_stored_dtypes(tmp_path: Path) -> None:
    dtypes = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "complex64")
    model = nn.Module()
    for name in dtypes:
        values = torch.ones(50, dtype=getattr(torch, name))
        model.register_parameter(f"of_{name}", nn.Parameter(values, requires_grad=False))
        model.register_buffer(f"buffer_{name}", values)
    export_weights(model, *open_file(tmp_path / "model.safetensors"), Collectives(), 400, dtype=torch.bfloat16)
    stored = weights(tmp_path)
    assert {name for name in dtypes if stored[f"of_{name}"].dtype == torch.bfloat16} == set(dtypes[:4])
    assert all(stored[f"buffer_{name}"].dtype == getattr(torch, name) for name in dtypes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    assert max(sum(tensor.nbytes for tensor in file.values()) for file in files) <= 400


@pytest.mark.parametrize(
    ("path", "key"), [(".", ""), ("./", ""), ("./ck", "/ck"), ("a/./b/", "/a/b"), ("a/../b", "/b"), ("a//b", "/a/b")]
)
def test_folder_in_a_bucket_has_one_key(s3: Any, monkeypatch: pytest.MonkeyPatch, path: str, key: str) -> None:
    monkeypatch.setenv(RUN_VARIABLE, f"s3://{BUCKET}/runs/first")
    assert open_folder(path).uri == f"s3://{BUCKET}/runs/first{key}"


@pytest.mark.parametrize("path", ["s3://", "s3:///", f"s3://{BUCKET}", f"s3://{BUCKET}/", f"s3://{BUCKET}/."])
def test_bucket_without_a_folder_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is not a folder; give the path of a folder, or s3://bucket/prefix"):
        open_folder(path)
