"""The GPUs of a machine that a script would see: by the driver's files, or by nvidia-smi of WSL."""

from pathlib import Path

import pytest

from ray_on_ecs.run import local_gpus

INFORMATION = "Model: \t\t NVIDIA {name}\nIRQ:   \t\t 42\nGPU UUID: \t {uuid}\nVideo BIOS: \t ??.??\n"
UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333")
# Prints what nvidia-smi -L does in WSL.
NVIDIA_SMI = """#!/bin/sh
[ "$*" = -L ] || exit 1
echo "GPU 0: NVIDIA GeForce RTX 3080 (UUID: GPU-aaaa1111)"
echo "  MIG 1g.10gb     Device  0: (UUID: MIG-cccc4444)"
echo "GPU 1: NVIDIA RTX A2000 (Laptop GPU) (UUID: GPU-bbbb3333)"
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs."""
    monkeypatch.setattr(local_gpus, "DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(local_gpus, "WSL_PROGRAM", tmp_path / "nvidia-smi")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    local_gpus._gpus_of_wsl.cache_clear()
    return tmp_path


@pytest.fixture
def three(machine: Path) -> None:
    """Three GPUs of different names."""
    for number, uuid in enumerate(UUIDS):
        folder = machine / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION.format(name=f"A{number}", uuid=uuid))


@pytest.mark.parametrize(
    ("visible", "count", "name"),
    [
        (None, 3, "NVIDIA A0"),
        ("0", 1, "NVIDIA A0"),
        ("2,0", 2, "NVIDIA A2"),
        ("0,1,2", 3, "NVIDIA A0"),
        (" 1 , 2 ", 2, "NVIDIA A1"),
        ("+1", 1, "NVIDIA A1"),
        ("1gpu,2", 2, "NVIDIA A1"),
        ("", 0, "GPU"),
        (" ", 0, "GPU"),
        ("-1", 0, "GPU"),
        ("-1,0", 0, "GPU"),
        ("0,-1", 1, "NVIDIA A0"),
        ("0,-1,1", 1, "NVIDIA A0"),
        ("0,,1", 1, "NVIDIA A0"),
        ("3", 0, "GPU"),
        ("0,3,1", 1, "NVIDIA A0"),
        ("0,1,0", 0, "GPU"),
        ("NoDevFiles", 0, "GPU"),
        ("none", 0, "GPU"),
        ("GPU-aaaa2222", 1, "NVIDIA A1"),
        ("GPU-b", 1, "NVIDIA A2"),
        ("GPU-bbbb3333,GPU-aaaa1111", 2, "NVIDIA A2"),
        ("GPU-aaaa", 0, "GPU"),
        ("GPU-aaaa1111,GPU-cccc", 1, "NVIDIA A0"),
        ("GPU-aaaa1111,GPU-aaaa1", 0, "GPU"),
        ("GPU-aaaa1111,2", 1, "NVIDIA A0"),
        ("0,GPU-bbbb3333", 1, "NVIDIA A0"),
        ("MIG-cccc4444", 1, "NVIDIA A0"),
        ("MIG-GPU-aaaa1111/1/0,MIG-GPU-aaaa1111/2/0", 1, "NVIDIA A0"),
    ],
)
def test_hidden_gpus_do_not_count(
    three: None, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, name: str
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (local_gpus.count_gpus(), local_gpus.gpu_name()) == (count, name)


@pytest.mark.parametrize("visible", [None, "0", "GPU-aaaa1111", "MIG-cccc4444", "-1"])
def test_machine_without_gpus_has_none(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (local_gpus.count_gpus(), local_gpus.gpu_name()) == (0, "GPU")


def test_gpu_without_a_description_counts(machine: Path) -> None:
    (machine / "gpus" / "0000:00:1e.0").mkdir(parents=True)
    (machine / "gpus" / "0000:00:1f.0").mkdir(parents=True)
    assert (local_gpus.count_gpus(), local_gpus.gpu_name()) == (2, "GPU")


def test_gpus_of_wsl_are_found(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = machine / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    assert (local_gpus.count_gpus(), local_gpus.gpu_name()) == (2, "NVIDIA GeForce RTX 3080")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert (local_gpus.count_gpus(), local_gpus.gpu_name()) == (1, "NVIDIA RTX A2000 (Laptop GPU)")


@pytest.mark.parametrize("text", ["#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n", "not a program"])
def test_wsl_without_a_driver_has_no_gpus(machine: Path, text: str) -> None:
    program = machine / "nvidia-smi"
    program.write_text(text)
    program.chmod(0o755)
    assert local_gpus.count_gpus() == 0
