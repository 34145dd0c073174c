"""Contents of the image, and files that it must not contain."""

import json
import re

from tests.containers.engine import Engine
from tests.containers.image_layers import layers_pushed_by_a_change

BUILD_TOOLS = ("clang", "make", "nvcc")
LIBRARIES = """
import os
for folder, _, files in os.walk("/usr"):
    for name in files:
        if ".so" in name and not os.path.islink(os.path.join(folder, name)):
            print(name)
"""

# The large CUDA libraries that no other library links or loads by name.
UNUSED = """
import pathlib, subprocess, sysconfig
packages = pathlib.Path(sysconfig.get_path("purelib"))
files = [path for path in packages.rglob("*.so*") if not path.is_symlink()]
stem = {str(path): path.name.partition(".so")[0].removeprefix("lib") for path in files}
large = {stem[str(path)] for path in files if "/nvidia/" in str(path) and path.stat().st_size > 20e6}
search = ["grep", "--text", "--only-matching", "--with-filename", "--fixed-strings", "--file=-", "--null", *stem]
found = subprocess.run(search, input="\\n".join(large).encode(), capture_output=True, env={"LC_ALL": "C"}).stdout
pairs = {tuple(line.decode().split("\\0")) for line in set(found.splitlines())}
print(len(large), *sorted(large - {name for path, name in pairs if name != stem[path]}))
"""


def inside(engine: Engine, image: str, *command: str) -> str:
    """Run a command in a temporary container of the image and return its output."""
    return engine.run("run", "--rm", image, *command).stdout


def test_compiler_of_triton_and_torch_compile_works(engine: Engine, image: str) -> None:
    program = "echo 'int main() { return 42; }' > /tmp/a.cpp"
    build = f"command -v gcc && {program} && g++ -std=c++20 -fopenmp /tmp/a.cpp -o /tmp/a"
    command = ("run", "--rm", "--read-only", "--volume=/tmp", image, "sh", "-c", f"{build} && /tmp/a")
    assert engine.run(*command, check=False).returncode == 42


def test_image_has_no_other_build_tools(engine: Engine, image: str) -> None:
    assert not inside(engine, image, "sh", "-c", "; ".join(f"command -v {tool}" for tool in BUILD_TOOLS) + "; true")


def test_image_has_no_caches_or_build_files(engine: Engine, image: str) -> None:
    kept = "find /tmp /var/cache/apt/archives /root /src -type f -size +4k 2>/dev/null; true"
    listed = engine.run("run", "--rm", "--user=0", image, "sh", "-c", kept).stdout
    assert not listed
    archives = engine.run("run", "--rm", image, "find", "/", "-xdev", "-name", "*.a", "-path", "*nvidia*", check=False)
    assert not archives.stdout, "Triton and torch.compile don't link static libraries"


def test_cuda_libraries_are_not_duplicated(engine: Engine, image: str) -> None:
    names = inside(engine, image, "python", "-c", LIBRARIES).split()
    # Wheels that bundle a copy add a hash to its name.
    plain = [re.sub(r"[.-][0-9a-f]{8}(?=\.)", "", name) for name in names]
    cuda = [name for name in plain if name.startswith(("libcu", "libnv", "libnccl"))]
    assert len(cuda) > 20, "the search finds CUDA's libraries"
    twice = sorted(name for name in set(cuda) if cuda.count(name) > 1)
    assert not twice


def test_each_large_cuda_library_is_loaded_by_another(engine: Engine, image: str) -> None:
    number, *unused = inside(engine, image, "python", "-c", UNUSED).split()
    assert int(number) > 15, "the search finds CUDA's libraries"
    assert not unused


def test_packages_are_complete(engine: Engine, image: str) -> None:
    assert inside(engine, image, "python", "-m", "pip", "check").startswith("No broken requirements")
    inside(engine, image, "python", "-c", "import torch, torchvision, triton, ray.train, ray_on_ecs.node, training")


def test_training_code_change_pushes_small_layers(engine: Engine, image: str) -> None:
    pushed = layers_pushed_by_a_change(engine.command)
    assert pushed
    # The code and its bytecode, without any dependency.
    assert sum(layer.size for layer in pushed) < 6e6, f"one line pushes {pushed}"


def test_image_is_labeled_and_runs_unprivileged(engine: Engine, image: str) -> None:
    config = json.loads(engine.run("image", "inspect", image).stdout)[0]["Config"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert (
        labels["version"]
        == inside(engine, image, "python", "-c", "import ray_on_ecs as r; print(r.__version__)").strip()
    )
    assert labels["source"]
    assert config["User"] == "ray"
    assert inside(engine, image, "id", "-u").strip() == "1000"
