"""Script whose rank HANG_RANK hangs at its third step, in the way that HANG names; all ranks meet in gloo."""

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

HANG, RANK = os.environ["HANG"], int(os.environ["RANK"])
IS_ODD = int(os.environ["HANG_RANK"]) == RANK
BAD_STEP = 3
LOCK = threading.Lock()
WITH_CHECKPOINTER = ("validate", "write")


def load_batch(index: int) -> torch.Tensor:
    if IS_ODD and HANG == "loader" and index >= BAD_STEP:
        time.sleep(1000)
    return torch.ones(4)


class Batches(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return load_batch(index)


def lock() -> None:
    LOCK.acquire()
    with LOCK:
        pass


def imports() -> None:
    folder = Path(tempfile.mkdtemp())
    sys.path.insert(0, str(folder))
    (folder / "deadlock.py").write_text(
        "import threading\ndef again():\n    import deadlock\n    deadlock.value\n"
        "thread = threading.Thread(target=again)\nthread.start()\nthread.join()\n"
    )
    __import__("deadlock")


def read_shard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/shard").read()


def save() -> None:
    while True:
        with suppress(OSError), open("/dev/full", "w") as file:
            file.write("x")
        time.sleep(0.05)


def collect() -> None:
    while True:
        gc.collect()


def ask() -> None:
    reader, _ = os.pipe()
    os.dup2(reader, 0)
    input("continue? ")


def visit(depth: int) -> int:
    return visit(depth - 1) + visit(depth - 2) if depth > 1 else depth


def convert() -> None:
    subprocess.run(["sleep", "1000"])


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def resolve() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.bind(("127.0.0.1", 0))
        asked.recv(512)


def open_file() -> None:
    path = Path(tempfile.mkdtemp()) / "mounted"
    os.mkfifo(path)
    path.open().read()


def show() -> None:
    from tqdm import tqdm

    tqdm.get_lock()
    threading.Thread(target=tqdm.get_lock().acquire).start()
    for _ in tqdm(range(3), file=sys.stdout):
        pass


def hook(gradient: torch.Tensor) -> None:
    if IS_ODD and HANG == "hook":
        time.sleep(1000)


def download() -> None:
    time.sleep(1000)


def pool() -> None:
    with ThreadPoolExecutor(2) as threads:
        threads.submit(download).result()


def log_line() -> None:
    with LOCK:
        pass


def fork() -> None:
    holder = threading.Thread(target=lambda: (LOCK.acquire(), time.sleep(1000)), daemon=True)
    holder.start()
    child = multiprocessing.get_context("fork").Process(target=log_line)
    child.start()
    child.join()


def validate() -> None:
    time.sleep(1000)


def write_part(*_: object) -> None:
    time.sleep(1000)


def write() -> None:
    """Hang in the background, at the next save of the Checkpointer."""
    from ray_on_ecs.checkpoint.background import Writer

    mock.patch.object(Writer, "write_data", write_part).start()


def spin() -> None:
    number = 0
    while True:
        number += 1


def hang(tensor: torch.Tensor) -> None:
    """Do what this rank does instead of its step."""
    functions = {
        "lock": lock,
        "import": imports,
        "S3": read_shard,
        "disk": save,
        "gc": collect,
        "input": ask,
        "recursion": lambda: visit(500),
        "subprocess": convert,
        "stop": stop,
        "DNS": resolve,
        "open": open_file,
        "tqdm": show,
        "pool": pool,
        "fork": fork,
        "loop": spin,
        "validate": validate,
        "write": write,
        "mismatch": lambda: dist.broadcast(tensor, 0),
        "barrier": dist.barrier,
    }
    functions.get(HANG, lambda: None)()


def main() -> None:
    torch.set_num_threads(1)
    if IS_ODD and HANG == "exit":
        return
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    parallel = DistributedDataParallel(model) if os.environ.get("HANG_DDP") else None
    checkpointer = None
    if HANG in WITH_CHECKPOINTER:
        from ray_on_ecs.checkpoint.checkpointer import Checkpointer

        checkpointer = Checkpointer(model=model, every_steps=1)
    loader = DataLoader(Batches(), batch_size=None, num_workers=1 if HANG == "loader" else 0)
    for step, batch in enumerate(loader, 1):
        if IS_ODD and step == BAD_STEP:
            hang(batch)
        if parallel:
            loss = parallel(batch).sum()
            loss.register_hook(hook) if step >= BAD_STEP else None
            loss.backward()
        elif checkpointer:
            checkpointer.after_step()
        else:
            dist.all_reduce(batch)


if __name__ == "__main__":
    main()
