"""Pickles that another person could write: into the store of a training, or into the folder of its checkpoints."""

import hashlib
import json
import pickle
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from tests.ray_on_ecs.checkpoint.loop import Stateful

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
    "getattr of an allowed class": lambda: pickle.dumps(Calls(getattr, MetadataIndex, "__init__")),
    "getattr of a value": lambda: pickle.dumps(Calls(getattr, "text", "format")),
    "a method of an enum": lambda: pickle.dumps(Calls(getattr, WriteItemType, "__init__")),
    "the base of an enum": lambda: pickle.dumps(Calls(getattr, WriteItemType, "mro")),
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


@pytest.mark.parametrize("call", [(getattr, WriteItemType, "SHARD"), (WriteItemType, WriteItemType.SHARD.value)])
def test_enum_is_read_as_each_version_of_python_writes_it(call: tuple[Any, ...]) -> None:
    assert plain_pickle.loads(pickle.dumps(Calls(*call))) is WriteItemType.SHARD


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


@pytest.mark.parametrize("path", ["../../secret", "/secret", "a/../../../secret", "..", "a\0b"])
def test_metadata_that_name_a_file_elsewhere_are_refused(folder: Path, path: str) -> None:
    saved = save(folder / "ck")
    metadata = plain_pickle.loads((saved / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    replace(saved, ".metadata", plain_pickle.dumps(metadata))
    checkpoint = Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": Stateful(1)})
    with pytest.raises(ResumeError, match=r"does not fit this script: .* has an empty part"):
        checkpoint.resume()


@pytest.mark.parametrize("depth", ["the bytes", "the values"])
def test_hostile_values_are_refused(folder: Path, depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = evil()
    if depth == "the bytes":
        monkeypatch.setattr("ray_on_ecs.checkpoint.plain_pickle.pack", lambda _: value)
        saved = save(folder / "ck", trust_pickle=True)
    else:
        saved = save(folder / "ck", value, trust_pickle=True)
    checkpoint = Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": Stateful(1)})
    with pytest.raises(ResumeError, match=r"a value can't be read: builtins\.exec"):
        checkpoint.resume()
    assert saved.exists()
    assert not (folder / MARK).exists()


class Color(Enum):
    RED = 1


class Level(IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int = 1


NOT_PLAIN = {
    "a date": date(2026, 11, 27),
    "a time": datetime(2026, 11, 27),
    "a date of NumPy": np.datetime64("2026-11-27"),
    "a long number of NumPy": np.longdouble(1),
    "a Decimal": Decimal(1),
    "a date in ns": np.datetime64("2026-11-27", "ns"),
    "a duration of NumPy": np.timedelta64(1, "s"),
    "an array of objects": np.array([Decimal(1), None], dtype=object),
    "an array of dates": np.array(["2026-11-27"], dtype="datetime64[D]"),
    "an array of records": np.zeros(2, dtype=[("a", "i4")]),
    "a matrix": np.zeros((2, 2)).view(np.matrix),
    "a generator of NumPy": np.random.default_rng(0),
    "an integer of 300 bytes": 1 << 2400,
    "an integer of 256 bytes": -(1 << 2040),
    "a path": Path("a"),
    "a range": range(2),
    "a function": print,
    "a partial": partial(print, 1),
    "a class": Stateful,
    "an object": Stateful(1),
    "a slice": slice(1),
    "an enum": Color.RED,
    "a number of an enum": Level.LOW,
    "a defaultdict": defaultdict(list, a=[1]),
    "a named tuple": Point(),
    "a frozenset": frozenset((1, 2)),
    "a tensor with an attribute": with_attribute(torch.ones(1), Decimal(1)),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_value_that_could_not_be_loaded_is_refused_at_the_save(folder: Path, kind: str) -> None:
    value = NOT_PLAIN[kind]
    own = Stateful(1)
    checkpoint = Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": own})
    checkpoint.save()  # a plain value does not vouch for a later one
    own.value = {"a": [0, (value,)]}
    with pytest.raises(ValueError, match="can't be loaded without running code") as refused:
        checkpoint.save()
    kind = "an array of .+" if type(value) is np.ndarray else rf"a value of class \S*{type(value).__name__}"
    assert re.fullmatch(
        rf"state\.own\.value\.a\.1\.0: {kind} can't be loaded .*"
        r"Checkpointer\(trust_pickle=True\).*",
        str(refused.value),
    )


def test_value_that_could_not_be_loaded_is_refused_before_the_training(folder: Path) -> None:
    checkpoint = Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": Stateful(date(2026, 11, 27))})
    with pytest.raises(ValueError, match=r"state\.own\.value: a value of class datetime\.date can't be loaded"):
        checkpoint.resume()


@pytest.mark.parametrize("kind", [kind for kind in NOT_PLAIN if "tensor" not in kind])
def test_trusted_values_keep_their_class(folder: Path, kind: str) -> None:
    save(folder / "ck", NOT_PLAIN[kind], trust_pickle=True)
    checkpoint = Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": Stateful(1)})
    with pytest.raises(ResumeError, match="a value can't be read: "):
        checkpoint.resume()
    own = Stateful(1)
    assert Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": own}, trust_pickle=True).resume()
    assert type(own.value) is type(NOT_PLAIN[kind])


def test_value_that_can_not_be_saved_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"state\.own\.value: a value of class builtins\.function can't be saved"):
        save(folder / "ck", lambda: 1)


CIRCLE: list[Any] = [1]
CIRCLE.append(CIRCLE)
MODULE = nn.BatchNorm1d(1).state_dict()
PLAIN = {
    "a float64": (np.float64(0.5), 0.5),
    "a float32": (np.float32(0.5), 0.5),
    "an int64": (np.int64(3), 3),
    "a bool_": (np.bool_(True), True),
    "a text of NumPy": (np.str_("a"), "a"),
    "a complex number of NumPy": (np.complex64(1j), 1j),
    "numbers of NumPy": ({np.int64(1): [np.float32(2), (np.int8(3),)]}, {1: [2.0, (3,)]}),
    "an OrderedDict": (OrderedDict(b=np.float64(1), a=torch.Size([2])), OrderedDict(b=1.0, a=torch.Size([2]))),
    "a Counter": (Counter("aab"), Counter("aab")),
    "an array": (np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3)),
    "an array without a dimension": (np.array(0.5), np.array(0.5)),
    "an array of complex numbers": (np.ones(1, np.complex64), np.ones(1, np.complex64)),
    "an array of flags": ([np.array([True])], [np.array([True])]),
    "a generator's state": (np.random.RandomState(0).get_state(), np.random.RandomState(0).get_state()),
    "the largest integers": ([2**2039 - 1, -(2**2039)], [2**2039 - 1, -(2**2039)]),
    "a set": ({(1, np.int64(2))}, {(1, 2)}),  # of one element: the order of several is not that of their copies
    "a data type": (torch.bfloat16, torch.bfloat16),
    "a device": (torch.device("cuda", 1), torch.device("cuda", 1)),
    "a size": (torch.Size([2, 3]), torch.Size([2, 3])),
    "a state of a module": (MODULE, MODULE),
    "a list in itself": (CIRCLE, CIRCLE),
    "others": ([None, 10**30, b"a", bytearray(b"b"), 1j], [None, 10**30, b"a", bytearray(b"b"), 1j]),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_value_comes_back(folder: Path, kind: str) -> None:
    value, expected = PLAIN[kind]
    save(folder / "ck", value)
    own = Stateful(1)
    assert Checkpointer(folder / "ck", model=nn.Linear(2, 1), state={"own": own}).resume()
    assert type(own.value) is type(expected)
    assert repr(own.value) == repr(expected)
    assert getattr(own.value, "_metadata", None) == getattr(expected, "_metadata", None)


def test_pickle_does_not_change_a_class() -> None:
    hostile = b"\x80\x04cpathlib\nPosixPath\nN}Vparent\nV/etc\ns\x86b."
    plain_pickle.loads(hostile)
    assert Path("a/b").parent == Path("a")
