"""SCRIPT as users of other tools type it: it starts, or an error has the command to type."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from ray_on_ecs.cli.run import command
from ray_on_ecs.cli.run_flags import settings_of
from ray_on_ecs.cli.script_name import ScriptName
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.program.launchers import LAUNCHER

FILES = {
    "train.py": "",
    "src/mypkg/__init__.py": "",
    "src/mypkg/train.py": "",
    "pkg/__init__.py": "",
    "pkg/train.py": "",
    "pkg/cli/__main__.py": "",
    "folder/__main__.py": "",
    "tools/other.py": "",
    "data/x.csv": "",
    "notes.ipynb": "{}",
    "task.yaml": "",
    "run.sh": "#!/bin/sh\necho\n",
    "plain.sh": "echo\n",
    "shebang": "#!/usr/bin/env bash\n",
    "own": "#!/usr/bin/env python3\n",
    "program": "\x7fELF",
}
GROUP = "import os\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\n"
GROUP += "def work(rank):\n  dist.init_process_group('gloo', rank=rank, world_size=2)\n"
SPAWNS = GROUP + "if __name__ == '__main__':\n  mp.spawn(work, nprocs=2)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code, beside another one."""
    code = tmp_path / "code"
    for name, text in FILES.items():
        file = code / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="latin-1")
    for name in ("run.sh", "shebang", "program"):
        (code / name).chmod(0o755)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "else.py").touch()
    (code / "link.py").symlink_to(tmp_path / "other" / "else.py")
    (code / "inner.py").symlink_to("train.py")
    (code / "nothing.py").symlink_to("no-file.py")
    (code / "outer").mkdir()
    (code / "outer" / "__main__.py").symlink_to(tmp_path / "other" / "else.py")
    monkeypatch.chdir(code)
    return code


def typed(words: str) -> tuple[RunConfig, str | None]:
    """The settings of a command, and its hint."""
    with command.make_context("run", shlex.split(words)) as context:
        config, _ = settings_of(context.params)
        return config, ScriptName(config, context.params["typed"]).check_launcher()


def refusal(words: str) -> str:
    with pytest.raises(UsageError) as caught:
        typed(words)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("words", "argv", "workers"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", "python -u train.py --lr 1", 2),
        ("torchrun --standalone --nnodes=1 --nproc_per_node=2 --tee 3 train.py", "python -u train.py", 2),
        ("--num-workers 2 torchrun --nproc-per-node 2 train.py", "python -u train.py", 2),
        ("python -m torch.distributed.launch --use_env -r 3 -t 3 --log_dir x train.py", "python -u train.py", None),
        ("--standalone torchrun --standalone -m pkg.train -x", "python -u -m pkg.train -x", None),
        ("torchrun --no-python python train.py", "python train.py", None),
        ("torchrun --max_restarts=3 --logs_specs x --numa-binding node train.py", "python -u train.py", None),
        ("python train.py python", "python -u train.py python", None),
        ("python3 -u -m pkg.train", "python -u -m pkg.train", None),
        ("python -m torch.distributed.run --nproc-per-node 4 train.py", "python -u train.py", 4),
        ("-- python -u train.py", "python -u train.py", None),
        ("--mpi python train.py", "python -u train.py", None),
        ("folder", "python -u folder", None),
        ("own", "python -u own", None),
        ("./train.py", "python -u ./train.py", None),
        ("inner.py", "python -u inner.py", None),
        ("-m pkg.cli", "python -u -m pkg.cli", None),
        ("--local -m timeit", "python -u -m timeit", None),
        ("-m of_the_image.train", "python -u -m of_the_image.train", None),
        ("--env PYTHONPATH=src -m mypkg.train", "python -u -m mypkg.train", None),
        ("--no-python python -O train.py", "python -O train.py", None),
        ("--no-python ./run.sh", "./run.sh", None),
        ("--no-python run-anything", "run-anything", None),
    ],
)
def test_what_people_type_first_is_started(words: str, argv: str, workers: int | None) -> None:
    config, hint = typed(words)
    assert shlex.join(config.argv("python", {})) == argv
    assert (config.workers or (None,))[0] == workers
    assert hint is None


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("python3.11 -u train.py", "train.py"),
        (".venv/bin/python -m pkg.train", "-m pkg.train"),
        ("python -O train.py", "--no-python python -O train.py"),
        ("python -c pass", "--no-python python -c pass"),
        ("accelerate launch --num_processes 2 train.py --lr 1", "--num-workers 2 train.py --lr 1"),
        ("--num-workers 4 accelerate launch --machine-rank=0 -m pkg.train", "--num-workers 4 -m pkg.train"),
        ("deepspeed --num_gpus=4 train.py --deepspeed ds.json", "--num-workers 4 train.py --deepspeed ds.json"),
        ("composer -n 2 train.py", "--num-workers 2 train.py"),
        ("lightning run model train.py", "--per-node --no-python lightning run model train.py"),
        ("fabric run --devices 2 train.py", "--per-node --no-python fabric run --devices 2 train.py"),
        ("ray-on-ecs run train.py", "train.py"),
        ("horovodrun -np 4 -H a:2,b:2 python train.py", "--mpi --num-workers 4 train.py"),
        ("mpirun -n 4 python train.py", "--mpi --num-workers 4 train.py"),
        ("--mpi mpiexec -n 4 ./program -x", "--mpi --num-workers 4 --no-python ./program -x"),
        ("tune run --nproc_per_node 2 full", "--per-node --no-python tune run --nproc_per_node 2 full"),
        ("tune run full --config x.yaml", "--no-python tune run full --config x.yaml"),
        ("yolo detect train", "--no-python yolo detect train"),
        ("--local trl sft", "--local --no-python trl sft"),
        ("llamafactory-cli train x.yaml", "--no-python llamafactory-cli train x.yaml"),
        ("uv run train.py", "train.py"),
        ("conda run -n env python train.py", "train.py"),
        ("env A=1 B=2 python train.py", "--env A=1 --env B=2 train.py"),
        ("srun -n 2 python train.py", "train.py"),
        ("'python train.py' --lr 1", "train.py --lr 1"),
        ("env A=1 python train.py lr=1", "--env A=1 train.py lr=1"),
        ("A=1 B=2 python train.py lr=1", "--env A=1 --env B=2 train.py lr=1"),
        ("A=1 torchrun --nproc-per-node 2 train.py", "--env A=1 --nproc-per-node 2 train.py"),
        ("/usr/bin/env python train.py", "train.py"),
        ("{python} train.py --lr 1", "train.py --lr 1"),
        ("/bin/sh run.sh", "--no-python /bin/sh run.sh"),
        ("torchrun --no_python ./train.py", "train.py"),
        ("'torchrun --nproc-per-node 2 train.py'", "--nproc-per-node 2 train.py"),
        ("bash run.sh", "--no-python bash run.sh"),
        ("./run.sh -x", "--no-python ./run.sh -x"),
        ("plain.sh", "--no-python bash plain.sh"),
        ("shebang", "--no-python ./shebang"),
        ("program", "--no-python ./program"),
        ("--no-python run.sh", "--no-python ./run.sh"),
        ("--no-python ./plain.sh", "--no-python bash plain.sh"),
        ("--no-python ./train.py", "train.py"),
        ("pkg.train --lr 1", "-m pkg.train --lr 1"),
        ("pkg.cli", "-m pkg.cli"),
        ("mypkg.train", "--env PYTHONPATH=src -m mypkg.train"),
        ("-m mypkg.train", "-m --env PYTHONPATH=src mypkg.train"),
        ("-m pkg/train", "-m pkg.train"),
        ("-m pkg/train.py", "pkg/train.py"),
        ("-m train.py", "train.py"),
        ("-m pkg.trian", "-m pkg.train"),
        ("-m pkg", "-m pkg.train"),
        ("pkg/train", "pkg/train.py"),
        ("pkg train --lr 1", "--no-python pkg train --lr 1"),
        ("tools", "tools/other.py"),
        ("trian.py", "train.py"),
        ("train", "train.py"),
        ("other.py", "tools/other.py"),
        ("../other/else.py", "--working-dir {parent}/other else.py"),
        ("--working-dir . {parent}/other/else.py", "--working-dir {parent}/other else.py"),
        ("--no-python ../other/else.py", "--no-python --working-dir {parent}/other ./else.py"),
        ("link.py -x", "--working-dir {parent}/other else.py -x"),
        ("outer -x", "--working-dir {parent}/other else.py -x"),
        ("notes.ipynb", "notes.py"),
    ],
)
def test_another_word_has_the_command_to_type(words: str, command: str, folder: Path) -> None:
    parent = os.path.realpath(folder.parent)
    line = refusal(words.format(parent=parent, python=sys.executable))
    assert line.startswith("SCRIPT: ")
    assert f"ray-on-ecs run {command.format(parent=parent)}" in [part.strip("?") for part in _commands_in(line)]


def _commands_in(line: str) -> list[str]:
    """The commands in an error, each of which ends it or is followed by another choice."""
    return [f"ray-on-ecs run {part.partition(', or ')[0]}" for part in line.split("ray-on-ecs run ")[1:]]


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("accelerate launch --mixed_precision fp16 --multi_gpu {}", "--mixed_precision"),
        ("accelerate launch --mixed-precision=bf16 --num-processes=2 {}", "--mixed_precision"),
        ("accelerate launch --config_file x.yaml {} --lr 1", "--config_file"),
        (
            "accelerate launch --use_fsdp --num_processes 2 --fsdp_offload_params true {}",
            "--use_fsdp, --fsdp_offload_params",
        ),
        ("accelerate launch --use_deepspeed --zero_stage 2 {}", "--use_deepspeed, --zero_stage"),
        ("accelerate launch --cpu {}", "--cpu"),
        ("accelerate-launch --dynamo_backend inductor {}", "--dynamo_backend"),
        ("fabric run {}", "how to train"),
        ("fabric run --strategy fsdp --precision bf16-mixed {}", "how to train"),
        ("lightning run model --devices 2 {}", "how to train"),
        ("accelerate launch --num_machines 1 --main_process_port 0 {} --mixed_precision fp16", ""),
        ("deepspeed --num_gpus 2 {} --deepspeed x.json", ""),
        ("composer -n 2 {}", ""),
    ],
)
@pytest.mark.parametrize("program", ["train.py", "-m pkg.train"])
def test_launcher_that_tells_the_script_how_to_train_is_not_left_out(words: str, more: str, program: str) -> None:
    """Fabric's script without `fabric run` trains on each worker alone; Accelerate's, in another precision."""
    line = refusal(words.format(program))
    text = f"starts workers, as the run does, and tells the script {more}; start it once on each node"
    assert (text in line, "leave it out" in line) == (bool(more), not more)
    assert ("leave it out" in refusal(f"--no-python --num-workers 2 {words.format(program)}")) == (not more)


INSTALLS = "'{name}' in {folder}, which this project's package installs; write -e . into a file for --requirements"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", '[project.scripts]\nother-cli = "pkg.cli:main"\n'),
        ("pyproject.toml", '[project.scripts]\n"other-cli" = "pkg.cli:main"\n'),
        ("pyproject.toml", 'scripts = {a = "b:c", other-cli = "pkg.cli:main"}\n'),
        ("pyproject.toml", '[tool.poetry.scripts]\nother-cli = { reference = "pkg:main", type = "console" }\n'),
        ("setup.cfg", "[options.entry_points]\nconsole_scripts =\n    other-cli = pkg.cli:main\n"),
        ("setup.py", "setup(entry_points={'console_scripts': ['other-cli = pkg.cli:main']})\n"),
        ("setup.py", "setup(entry_points={'console_scripts': ['other-cli=pkg:main [x]']})\n"),
    ],
)
def test_program_of_the_projects_own_package_is_no_similar_script(file: str, text: str, folder: Path) -> None:
    """LLaMA-Factory's `llamafactory-cli` was taken for a misspelled src/llamafactory/cli.py."""
    (folder / "other-cl.py").touch()
    assert "did you mean" in refusal("other-cli train")
    (folder / file).write_text(text)
    line = refusal("--local other-cli train x.yaml")
    assert INSTALLS.format(name="other-cli", folder=folder) in line
    assert line.endswith(": ray-on-ecs run --local --requirements FILE --no-python other-cli train x.yaml")
    (folder / "req.txt").write_text("-e .")
    line = refusal("--requirements req.txt other-cli train")
    assert line.endswith(
        "a program needs --no-python: ray-on-ecs run --requirements req.txt --no-python other-cli train"
    )
    (folder / file).write_text(text.replace("other-cli", "another-cli"))
    assert "did you mean" in refusal("other-cli train")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("task.yaml", "'task.yaml' is not a program; give the script, and its arguments after it"),
        ("nothing.py", "there is no file 'nothing.py' in {folder}; correct it, or give --working-dir"),
        ("data", "'data' is a folder without __main__.py; correct it"),
        ("nosuch.py", "there is no file 'nosuch.py' in {folder}; correct it, or give --working-dir"),
        ("--no-python ./nosuch.sh", "there is no file './nosuch.sh' in {folder}; correct it, or give --working-dir"),
        (
            "--local -m nosuch.train",
            "there is no module 'nosuch.train' to run in {folder}; code below another folder needs --env "
            "PYTHONPATH=FOLDER, and a package --requirements FILE",
        ),
    ],
)
def test_what_can_not_be_guessed_is_refused(words: str, line: str, folder: Path) -> None:
    assert refusal(words) == f"SCRIPT: {line.format(folder=folder)}"


@pytest.mark.parametrize(
    ("words", "line", "leave_out"),
    [
        ("--no-python torchrun --standalone --nnodes=1 train.py -x", "torchrun starts workers itself", "train.py -x"),
        ("--no-python accelerate launch --num_machines 1 train.py", "accelerate launch starts", "train.py"),
        ("--no-python deepspeed train.py", "deepspeed starts workers itself", "train.py"),
        ("--no-python composer train.py", "composer starts workers itself", "train.py"),
        ("--no-python python -m torch.distributed.run train.py", "torch.distributed.run starts workers", "train.py"),
        ("-m torch.distributed.launch train.py", "torch.distributed.launch starts workers itself", "train.py"),
        ("-m accelerate.commands.launch -m pkg.train", "accelerate.commands.launch starts", "-m pkg.train"),
        ("--no-python env A=1 /opt/bin/torchrun train.py", "torchrun starts workers itself", "train.py"),
        ("--no-python tune run --nproc_per_node 2 full", "tune run starts workers itself", None),
        ("--no-python mpirun -n 2 python train.py", "mpirun starts workers itself", "train.py"),
        ("--no-python bash -ec 'cd x && exec torchrun train.py'", "bash calls torchrun, which starts", None),
    ],
)
def test_launcher_on_every_worker_is_refused(words: str, line: str, leave_out: str | None) -> None:
    found = refusal(f"--num-workers 2 {words}")
    assert line in found
    assert "so each of 2 workers would train on its own" in found
    assert f"start it once on each node: ray-on-ecs run --num-workers 2 {words.split()[0]} --per-node " in found
    assert (f"leave it out: ray-on-ecs run --num-workers 2 {leave_out}, or" in found) is (leave_out is not None)
    assert typed(f"--num-workers 1 {words}")[1] is None
    assert typed(f"--driver {words}")[1] is None if words.startswith("-m") else True


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("pip install x\ntorchrun --nproc-per-node 1 train.py\n", True),
        ("set -e; cd x && FOO=1 exec torchrun \\\n  train.py", True),
        ("for lr in 1 2; do accelerate launch train.py --lr $lr; done", True),
        ("if [ $# = 1 ]; then accelerate launch train.py; else python train.py; fi", False),
        ("case $1 in a) torchrun a.py;; esac", False),
        ("train() { torchrun train.py; }; $1", False),
        ("test -f x && torchrun train.py", False),
        ("torchrun train.py || python train.py", False),
        ('"$VENV/bin/torchrun" train.py', True),
        ("uv run torchrun train.py", True),
        ("conda run -n env torchrun train.py", True),
        ("timeout -k 5 2h nice -n 5 torchrun train.py", True),
        ("numactl --cpunodebind=0 accelerate launch train.py", True),
        ("srun --ntasks-per-node 1 torchrun --nnodes $N train.py", False),
        ("timeout 9 pip install deepspeed", None),
        ("torchrun train.py --data data/test --exit", True),
        ("until torchrun train.py; do sleep 1; done", False),
        ("python3 -u -m torch.distributed.run train.py", True),
        ('torchrun --nnodes=$WORLD_SIZE --node-rank="$RANK" train.py', False),
        ('[ "$LOCAL_RANK" = 0 ] && torchrun --nproc-per-node 4 train.py', False),
        ("torchrun --nnodes 2 --rdzv-endpoint=$HOST:1 train.py", False),
        ("deepspeed --hostfile hosts train.py", False),
        ("pip install deepspeed accelerate\n# torchrun train.py\npython train.py", None),
        ("echo torchrun; command -v torchrun; python torchrun.py", None),
        ("python mpirun.py; ./torchrun-like x", None),
    ],
)
def test_launcher_in_a_shell_script_is_found(text: str, is_refused: bool | None, folder: Path) -> None:
    (folder / "run.sh").write_text(text)
    for words in ("--no-python ./run.sh", "--no-python bash -e run.sh"):
        if is_refused:
            assert "would train on its own; start it once on each node" in refusal(f"--num-workers 2 {words}")
        else:
            hint = typed(f"--num-workers 2 {words}")[1]
            assert (hint is not None) is (is_refused is False)


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [
        (SPAWNS, True),
        (SPAWNS.replace("mp.spawn", "torch.multiprocessing.spawn").replace("import os", "import torch"), True),
        (SPAWNS.replace("mp.spawn(work, nprocs=2)", "mp.Process(target=work, args=(0,)).start()"), True),
        (
            GROUP + "from torch.multiprocessing import spawn, start_processes as go\ndef main():\n  go(work)\nmain()",
            True,
        ),
        ("import os\nos.environ['RANK'] = '0'\nimport torch.multiprocessing as mp\nmp.spawn(print)", True),
        ("import subprocess\nsubprocess.run(['torchrun', 'train.py'])", True),
        (
            "import subprocess, sys\nsubprocess.check_call([sys.executable, '-m', 'torch.distributed.run', 'x.py'])",
            True,
        ),
        ("import os\nos.system('accelerate launch train.py')", True),
        (GROUP + "from torch.multiprocessing.spawn import spawn\nspawn(work)", True),
        (GROUP + "ctx = mp.get_context('spawn')\nctx.Process(target=work, args=(0,)).start()", True),
        (GROUP + "mp.get_context('spawn').Process(target=work, args=(0,)).start()", True),
        (GROUP + "import psutil\npsutil.Process()", None),
        (GROUP.replace("multiprocessing", "nn") + "import simpy\nenv = simpy.Environment()\nenv.Process(work)", False),
        ("import subprocess\nstrategy = 'deepspeed'\nsubprocess.check_output(['git', 'rev-parse'])", None),
        ("import os\nnames = ['composer', 'ddp']\nos.system('nvidia-smi')", None),
        ("import subprocess\ncmd = ['torchrun', 'train.py']\nsubprocess.run(cmd)", False),
        ("import os\ncmd = f'torchrun --nproc-per-node {2} x.py'\nos.system(cmd)", False),
        ("from detectron2.engine import launch\nlaunch(print, 2)", False),
        (SPAWNS + "print(os.environ['RANK'])", False),
        (GROUP + "if 'RANK' not in os.environ:\n  mp.spawn(work)", False),
        (GROUP + "import sys\nif len(sys.argv) > 1:\n  mp.spawn(work)\nelse:\n  work(0)", False),
        (GROUP + "def local():\n  mp.spawn(work)\nwork(0)", False),  # it is not called
        (GROUP + "def main(a):\n  if a:\n    work(0)\n    return\n  mp.spawn(work)\nmain(1)", False),
        (GROUP + "if dist.is_torchelastic_launched():\n  work(0)\nmp.spawn(work)", False),
        (GROUP + "def a():\n  b()\ndef b():\n  a()\n  mp.spawn(work)\na()", True),
        (GROUP + "def a():\n  b()\ndef b():\n  a()\n  mp.spawn(work)", False),
        (GROUP + "def main():\n  mp.spawn(work)\nimport fire\nfire.Fire(main)", True),
        ("import torch.multiprocessing as mp\nfrom work import main\nmp.spawn(main)", False),
        ("from torch.distributed.launcher.api import elastic_launch\nelastic_launch(c, f)()", False),
        ("from accelerate import notebook_launcher\nnotebook_launcher(f)", False),
        ("import torch.multiprocessing as mp\nmp.set_start_method('spawn')\nmp.Process(target=print).start()", None),
        ("import torch.distributed as d, multiprocessing as m\nd.init_process_group()\nm.Process(target=print)", None),
        ("import subprocess\nsubprocess.run(['nvidia-smi'])\nsubprocess.run(['pip', 'install', 'deepspeed'])", None),
        ("import subprocess, os\nsubprocess.run(['torchrun', '--node-rank', os.environ['RANK'], 'x.py'])", None),
        ("def spawn(f): f()\nspawn(print)", None),
    ],
)
def test_source_that_starts_workers_is_found(source: str, is_refused: bool | None, folder: Path) -> None:
    for name in ("train.py", "pkg/train.py"):
        (folder / name).write_text(source)
    for words in ("train.py", "-m pkg.train"):
        if is_refused:
            line = refusal(f"--num-workers 2 {words} -x")
            assert line.startswith("SCRIPT: train.py:")
            assert "so each of 2 workers would train on its own; start it once on each node: " in line
        else:
            hint = typed(f"--num-workers 2 {words}")[1]
            assert (hint is not None) is (is_refused is False)
        assert typed(f"--num-workers 1 {words}")[1] is None


def test_ranks_that_the_command_hands_over_are_no_launcher(folder: Path) -> None:
    (folder / "train.py").write_text(GROUP + "ctx = mp.get_context('spawn')\nctx.Process(target=load).start()")
    assert typed("--num-workers 2 train.py --rank '$RANK' --world-size '$WORLD_SIZE'")[1] is not None


def test_many_flags_of_a_wrapper_end_the_search() -> None:
    assert not LAUNCHER.search(f"timeout {'-p 1 ' * 200} x")  # a search that is exponential would not end


ONE_GPU = "import torch, torchvision\nfrom torch import nn\nimport numpy as np, json\n"


@pytest.mark.parametrize(
    ("source", "flags", "has_hint"),
    [
        (ONE_GPU, "--num-workers 2", True),
        (ONE_GPU, "", True),
        (ONE_GPU, "--num-workers 1:4", True),
        (ONE_GPU + "# torch.distributed comes later\n", "--num-workers 2", True),
        (ONE_GPU, "--num-workers 1", False),
        (ONE_GPU, "--per-node", False),
        (ONE_GPU, "--mpi", False),
        (ONE_GPU + "import torch.distributed as dist\n", "--num-workers 2", False),
        (ONE_GPU + "from torch.nn.parallel import DistributedDataParallel\n", "--num-workers 2", False),
        (ONE_GPU + "from torch.distributed.fsdp import fully_shard\n", "--num-workers 2", False),
        (ONE_GPU + "import os\nseed = os.environ['RANK']\n", "--num-workers 2", False),
        (ONE_GPU + "from accelerate import Accelerator\n", "--num-workers 2", False),
        (ONE_GPU + "import lightning\n", "--num-workers 2", False),
        (ONE_GPU + "from transformers import AutoModel\n", "--num-workers 2", False),
        (ONE_GPU + "from models import build\n", "--num-workers 2", False),
        (ONE_GPU + "from ray_on_ecs import Checkpointer\n", "--num-workers 2", False),
        ("import json\n", "--num-workers 2", False),
        ("import torch (\n", "--num-workers 2", False),
    ],
)
def test_script_for_one_gpu_has_a_hint(source: str, flags: str, has_hint: bool, folder: Path) -> None:
    (folder / "alone.py").write_text(source)
    hint = typed(f"{flags} alone.py")[1]
    assert (hint is not None and "trains a separate model" in hint) is has_hint


@pytest.mark.parametrize("words", ["--no-python trl sft", "--no-python llamafactory-cli train x.yaml"])
def test_program_that_may_start_a_launcher_has_a_hint(words: str) -> None:
    assert "starts workers itself where it sees several GPUs" in (typed(f"--num-workers 2 {words}")[1] or "")
    assert typed("--num-workers 2 --no-python yolo train")[1] is None
