"""Pickles that another person could write: into the store of a training, or into the folder of its checkpoints."""

import hashlib
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import WriteItemType

from ray_on_ecs import Checkpointer
from ray_on_ecs.checkpoint import plain_pickle
from ray_on_ecs.checkpoint.checkpointer import ResumeError
from ray_on_ecs.checkpoint.collectives import Collectives

# Each makes this file if it runs.
MARK = "ran"


class Calls:
    """A value whose loading calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def opcodes(module: str, name: str, argument: str) -> bytes:
    """A pickle of protocol 4 that calls a function by name."""

    def text(value: str) -> bytes:
        return b"\x8c" + struct.pack("<B", len(value)) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


def with_attribute(value: object, attribute: object) -> object:
    vars(value)["attribute"] = attribute
    return value


def evil() -> Calls:
    return Calls(exec, f"open({MARK!r}, 'w').close()")


HOSTILE = {
    "exec": lambda: pickle.dumps(evil()),
    "protocol 0": lambda: pickle.dumps(evil(), 0),
    "protocol 2": lambda: pickle.dumps(evil(), 2),
    "protocol 5": lambda: pickle.dumps(evil(), 5),
    "in a list": lambda: pickle.dumps([1, [evil()]]),
    "as a key": lambda: pickle.dumps({"a": (evil(), 1)}),
    "a class's attribute": lambda: pickle.dumps(with_attribute(MetadataIndex("a"), evil())),
    "an enum's value": lambda: pickle.dumps(Calls(WriteItemType, evil())),
    "a size": lambda: pickle.dumps(Calls(torch.Size, evil())),
    "os.system": lambda: f"cos\nsystem\n(Vtouch {MARK}\ntR.".encode(),
    "INST": lambda: f"(Vtouch {MARK}\nios\nsystem\n.".encode(),
    "a dotted name": lambda: opcodes("os", "path.os.system", f"touch {MARK}"),
    "a name in torch": lambda: opcodes("torch", "os.system", f"touch {MARK}"),
    "another name in torch": lambda: opcodes("torch", "load", MARK),
    "a method of an allowed class": lambda: opcodes("pathlib", "PosixPath.touch", MARK),
    "the globals of an allowed class": lambda: opcodes("collections", "OrderedDict.fromkeys", MARK),
    "getattr": lambda: pickle.dumps(Calls(getattr, Path, "touch")),
    "partial": lambda: pickle.dumps(Calls(partial, Path(MARK).touch)),
    "import": lambda: pickle.dumps(Calls(__import__, "antigravity")),
    "torch.load": lambda: pickle.dumps(Calls(torch.load, MARK)),
    "an array": lambda: pickle.dumps(np.zeros(2)),
    "a persistent ID": lambda: b"Pid\n.",
    "an extension": lambda: b"\x82\x01.",
    "nothing": lambda: b"",
    "text": lambda: b"weights",
    "a truncated pickle": lambda: pickle.dumps({"a": 1})[:-3],
    "a negative size": lambda: b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
    "an unknown opcode": lambda: b"\x80\x04\xff.",
    "an empty stack": lambda: b"\x80\x040.",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_message_is_refused(folder: Path, kind: str) -> None:
    ranks = Collectives()
    ranks._store.set("1/outcome/0", cast(Any, HOSTILE[kind]()))  # annotated as str, but takes bytes
    with pytest.raises(OSError, match="a message was not sent by a Checkpointer"):
        ranks.receive("1/outcome")
    assert not (folder / MARK).exists()


def test_plain_values_and_descriptions_of_tensors_are_read() -> None:
    values = [
        None,
        (1, 2.5, "text", b"bytes", True),
        {"a": [OrderedDict(b={1, 2})]},
        MetadataIndex("weight", torch.Size([1, 2])),
        Metadata({"bytes": BytesStorageMetadata()}),
        ChunkStorageMetadata(torch.Size([0]), torch.Size([2])),
        WriteItemType.SHARD,
        TensorProperties(torch.bfloat16),
        torch.float8_e4m3fn,
    ]
    assert plain_pickle.loads(plain_pickle.dumps(values)) == values


class Stateful:
    """An object whose state is a value of any class."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def save(folder: Path, value: object = 1, **options: Any) -> Path:
    own = Stateful(value)
    checkpoint = Checkpointer(folder, model=nn.Linear(2, 1), state={"own": own}, keep_best="loss", **options)
    checkpoint.after_step()
    checkpoint.end_epoch(loss=1.0)
    checkpoint.close()
    [saved] = folder.glob("step-*")
    return saved


def replace(saved: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and its record in the manifest."""
    (saved / name).write_bytes(content)
    manifest = json.loads((saved / "checkpoint.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (saved / "checkpoint.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_metadata_are_refused(folder: Path, kind: str) -> None:
    replace(save(folder / "ck"), ".metadata", HOSTILE[kind]())
    checkpoint = Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": Stateful(1)}, keep_best="loss")
    with pytest.raises(ValueError, match="a pickle can't be read"):
        checkpoint.load_best()
    with pytest.raises(ResumeError, match="a pickle can't be read"):
        checkpoint.resume()
    assert not (folder / MARK).exists()


@pytest.mark.parametrize("depth", ["the bytes", "the values"])
def test_hostile_values_are_refused(folder: Path, depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = evil()
    if depth == "the bytes":
        monkeypatch.setattr("ray_on_ecs.checkpoint.state._pack", lambda _: value)
        saved = save(folder / "ck", trust_pickle=True)
    else:
        saved = save(folder / "ck", value, trust_pickle=True)
    checkpoint = Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": Stateful(1)})
    with pytest.raises(ResumeError, match=r"a value can't be read: builtins\.exec"):
        checkpoint.resume()
    assert saved.exists()
    assert not (folder / MARK).exists()


VALUES = {
    "a date": date(2026, 11, 27),
    "a Decimal": Decimal(1),
    "a number of NumPy": np.float64(0.5),
    "an array of NumPy": np.zeros(2),
    "a path": Path("a"),
    "a range": range(2),
    "a function": print,
    "a class": Stateful,
    "an object": Stateful(1),
    "a slice": slice(1),
}


@pytest.mark.parametrize("kind", VALUES)
def test_value_that_could_not_be_loaded_is_refused_at_the_first_save(folder: Path, kind: str) -> None:
    with pytest.raises(ValueError, match=r"a value can't be read: \w+\.\w.*Checkpointer\(trust_pickle=True\)"):
        save(folder / "ck", VALUES[kind])
    save(folder / "ck", VALUES[kind], trust_pickle=True)
    checkpoint = Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": Stateful(1)})
    with pytest.raises(ResumeError, match="a value can't be read: "):
        checkpoint.resume()
    own = Stateful(1)
    assert Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": own}, trust_pickle=True).resume()
    assert type(own.value) is type(VALUES[kind])


def test_plain_values_of_a_state_come_back(folder: Path) -> None:
    value = {"a": [1, 2.5, None, True, "text", (1, {2})], "b": OrderedDict(c=torch.ones(2)), "d": torch.bfloat16}
    save(folder / "ck", value)
    own = Stateful(1)
    assert Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": own}).resume()
    assert str(own.value) == str(value)
