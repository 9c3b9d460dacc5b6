# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transfers through a folder between real processes: bits, versions, failures of each side, room, and leftovers."""

import multiprocessing
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.weight_sync import transport as transport_module
from nemo_rl_moe.weight_sync import transport_backends as backends
from nemo_rl_moe.weight_sync.bucket import BucketLabel, write_bucket
from nemo_rl_moe.weight_sync.transport import NamedTensor, TransportSpec, WeightTransport, folder_of_one_machine
from tests.support.quick_list import some_of

BUCKET_BYTES = 4096
STALLED_S = 4.0  # of tests that wait for it: all processes have begun by then, on a busy machine too
VERSION = 7
CONTEXT = multiprocessing.get_context("fork")  # a fresh interpreter would import torch for each process


def tensors_of(sender: int) -> list[NamedTensor]:
    """Tensors of all types and of sizes from nothing to four buckets; those of the last sender are none."""
    if sender == 2:
        return []
    generator = torch.Generator().manual_seed(sender)
    bits = partial(torch.randint, 0, 256, generator=generator, dtype=torch.uint8)
    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes = [*floats, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    # All bit patterns, not-a-numbers with a payload and infinities among them.
    found = [(f"{dtype}.{sender}", bits(size=(7, 24 * 8)).view(dtype)) for dtype in dtypes]
    whole = torch.randn(6, 20, generator=generator)
    return [
        *found,
        (f"bool.{sender}", bits(size=(5,)) < 128),
        (f"empty.{sender}", torch.empty(0, 3, dtype=torch.bfloat16)),
        (f"scalar.{sender}", torch.tensor(1.5, dtype=torch.bfloat16)),
        (f"large.{sender}", torch.randn(4 * BUCKET_BYTES // 4 + 3, generator=generator)),
        (f"transposed.{sender}", whole.T),
        (f"tied.{sender}", whole),
        (f"slice.{sender}", whole[2:4]),
        *((f"small {index}.{sender}", torch.full((index,), float(index))) for index in range(1, 40)),
    ]


def bits_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """A tensor with its numbers as bytes: NaN differs from itself."""
    return tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def run_processes(tasks: dict[str, Callable[[], Any]], timeout_s: float = 250.0) -> dict[str, Any]:
    """Runs each in a process of its own at the same time; results, or the errors as text; None of one killed.

    All begin after the last fork. A fork while a store serves the first ones may copy the lock of glibc's resolver,
    which a thread of the store holds while it looks up the name of a client; the copy would stay locked for ever.
    """
    all_forked = CONTEXT.Event()

    def report(task: Callable[[], Any], connection: Any) -> None:
        try:
            all_forked.wait()
            result = task()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        connection.send(result)
        connection.close()
        os._exit(0)

    started = {}
    for name, task in tasks.items():
        receiving, sending = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=report, args=(task, sending))
        process.start()
        sending.close()
        started[name] = process, receiving
    all_forked.set()
    results: dict[str, Any] = dict.fromkeys(tasks)
    for name, (process, receiving) in started.items():
        with suppress(EOFError):
            assert receiving.poll(timeout_s), f"{name} neither ended nor failed"
            results[name] = receiving.recv()
        process.join(timeout_s)
    return results


def send(spec: TransportSpec, sender: int, tensors: Callable[[int], Any] = tensors_of, version: int = VERSION) -> int:
    return spec.send(iter(tensors(sender)), sender, version)


def receive(spec: TransportSpec, receiver: int) -> dict[str, Any]:
    """All that arrived, in bits: copied, since the memory is the transport's."""
    found = {}

    def load(tensors: Iterator[NamedTensor]) -> None:
        for name, tensor in tensors:
            assert name not in found
            found[name] = bits_of(tensor)

    spec.receive(receiver, load)
    return found


def transfer(
    parent: Path,
    senders: list[Callable[[TransportSpec], Any]],
    receivers: list[Callable[[TransportSpec], Any]],
    **settings: Any,
) -> dict[str, Any]:
    """One transfer between processes of all of these; nothing may be left of it."""
    with WeightTransport(parent, len(senders), lambda spec: 0, bucket_bytes=BUCKET_BYTES, **settings) as transport:
        spec = pickle.loads(pickle.dumps(transport.open(len(receivers), VERSION)))  # noqa: S301  (its own)
        tasks = {f"sender {index}": partial(task, spec) for index, task in enumerate(senders)}
        tasks |= {f"receiver {index}": partial(task, spec) for index, task in enumerate(receivers)}
        found = run_processes(tasks)
    assert list(parent.iterdir()) == []
    return found


def all_senders(count: int = 3) -> list[Callable[[TransportSpec], Any]]:
    return [partial(send, sender=sender) for sender in range(count)]


def all_receivers(count: int = 2) -> list[Callable[[TransportSpec], Any]]:
    return [partial(receive, receiver=receiver) for receiver in range(count)]


@pytest.mark.parametrize("max_unacknowledged", [1, 2])
@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 1), (3, 2)])
def test_every_receiver_gets_the_bits_of_every_sender(
    num_senders: int, num_receivers: int, max_unacknowledged: int, tmp_path: Path
) -> None:
    found = transfer(
        tmp_path, all_senders(num_senders), all_receivers(num_receivers), max_unacknowledged=max_unacknowledged
    )
    expected = {name: bits_of(tensor) for sender in range(num_senders) for name, tensor in tensors_of(sender)}
    assert len(expected) > 50
    for receiver in range(num_receivers):
        assert found[f"receiver {receiver}"] == expected
    for sender in range(num_senders):
        assert found[f"sender {sender}"] == sum(tensor.nbytes for _, tensor in tensors_of(sender))


def test_a_buckets_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket holds at most its bytes, or one tensor; and there are no more of them than needed."""
    sizes: list[tuple[int, int]] = []

    def record(path: Path, label: BucketLabel, content: dict[str, torch.Tensor]) -> None:
        sizes.append((len(content), sum(tensor.nbytes for tensor in content.values())))
        path.touch()

    monkeypatch.setattr(backends, "write_bucket", record)
    spec = TransportSpec(tmp_path, VERSION, num_senders=1, num_receivers=0, bucket_bytes=100)
    spec.send(
        [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (40, 60, 1, 300, 100, 99, 1, 1)], 0, VERSION
    )
    assert sizes == [(2, 100), (1, 1), (1, 300), (1, 100), (2, 100), (1, 1)]


def watched_send(spec: TransportSpec, sender: int, *, log: Path) -> None:
    """Sends many tensors of a quarter of a bucket, and notes before each how many bytes lie in the folder."""

    def tensors() -> Iterator[NamedTensor]:
        with log.open("a") as file:
            for index in range(80):
                files = [path for path in spec.folder.iterdir() if path.name.startswith(f"{sender:04d}-")]
                held = 0
                for path in files:
                    with suppress(FileNotFoundError):
                        held += path.stat().st_size
                file.write(f"{held}\n")
                yield f"{index}.{sender}", torch.zeros(BUCKET_BYTES // 16)

    spec.send(tensors(), sender, VERSION)


def slow_receive(spec: TransportSpec, receiver: int) -> None:
    def load(tensors: Iterator[NamedTensor]) -> None:
        for index, _ in enumerate(tensors):
            if index % 8 == 0:
                time.sleep(0.01)

    spec.receive(receiver, load)


@pytest.mark.parametrize("max_unacknowledged", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5)), 2])
def test_the_bytes_in_flight_are_bounded(max_unacknowledged: int, tmp_path: Path) -> None:
    """With a receiver that is slower than the senders, they wait for it."""
    log, folder = tmp_path / "held", tmp_path / "transfers"
    log.touch()
    found = transfer(
        folder,
        [partial(watched_send, sender=sender, log=log) for sender in range(2)],
        [partial(slow_receive, receiver=0), partial(receive, receiver=1)],
        max_unacknowledged=max_unacknowledged,
    )
    assert found["sender 0"] is None
    held = [int(line) for line in log.read_text().splitlines()]
    header = 1024
    assert max(held) <= max_unacknowledged * (BUCKET_BYTES + header)
    assert max(held) >= max_unacknowledged * BUCKET_BYTES, "the senders were held up"


def failing_send(spec: TransportSpec, sender: int) -> None:
    def tensors() -> Iterator[NamedTensor]:
        yield from tensors_of(sender)
        raise MemoryError("rank out of memory")

    spec.send(tensors(), sender, VERSION)


def test_a_sender_that_raises_ends_all(tmp_path: Path) -> None:
    found = transfer(tmp_path, [*all_senders(1), partial(failing_send, sender=1)], all_receivers())
    reason = "sender 1 raised MemoryError: rank out of memory"
    assert found["sender 1"] == "MemoryError: rank out of memory"
    for receiver in range(2):
        assert found[f"receiver {receiver}"] == f"WeightSyncError: {reason}"


def failing_receive(spec: TransportSpec, receiver: int) -> None:
    def load(tensors: Iterator[NamedTensor]) -> None:
        next(tensors)
        raise ValueError("no parameter of this name")

    spec.receive(receiver, load)


def test_a_receiver_that_raises_ends_all(tmp_path: Path) -> None:
    found = transfer(tmp_path, all_senders(2), [*all_receivers(1), partial(failing_receive, receiver=1)])
    assert found["receiver 1"] == "ValueError: no parameter of this name"
    for name in ("sender 0", "sender 1", "receiver 0"):
        assert found[name] == "WeightSyncError: receiver 1 raised ValueError: no parameter of this name"


def lazy_receive(spec: TransportSpec, receiver: int) -> None:
    spec.receive(receiver, lambda tensors: [next(tensors) for _ in range(3)])


def test_a_loader_takes_all_tensors(tmp_path: Path) -> None:
    found = transfer(tmp_path, all_senders(1), [partial(lazy_receive, receiver=0)])
    num_left = len(tensors_of(0)) - 3
    assert found["receiver 0"] == f"WeightSyncError: receiver 0: its loader did not take the last {num_left} tensors"


def killed_send(spec: TransportSpec, sender: int) -> None:
    def tensors() -> Iterator[NamedTensor]:
        yield from tensors_of(sender)
        os.kill(os.getpid(), 9)

    spec.send(tensors(), sender, VERSION)


def killed_receive(spec: TransportSpec, receiver: int) -> None:
    def load(tensors: Iterator[NamedTensor]) -> None:
        next(tensors)
        os.kill(os.getpid(), 9)

    spec.receive(receiver, load)


@pytest.mark.full
def test_a_killed_sender_is_noticed(tmp_path: Path) -> None:
    found = transfer(
        tmp_path, [*all_senders(1), partial(killed_send, sender=1)], all_receivers(1), stall_timeout_s=STALLED_S
    )
    assert found["sender 1"] is None, "it is dead"
    assert found["receiver 0"] == "WeightSyncError: receiver 0: waited for 4 s for tensors of senders [1]"


@pytest.mark.full
def test_a_killed_receiver_is_noticed(tmp_path: Path) -> None:
    found = transfer(
        tmp_path, all_senders(1), [*all_receivers(1), partial(killed_receive, receiver=1)], stall_timeout_s=STALLED_S
    )
    assert found["receiver 1"] is None, "it is dead"
    # Whoever notices it first warns the other; or both notice it at the same moment.
    for side in ("sender 0", "receiver 0"):
        assert re.fullmatch(r"WeightSyncError: \w+ 0: waited for 4 s for receivers \[1\] to take .*", found[side])


def robbed_send(spec: TransportSpec, sender: int) -> None:
    """Sends while somebody deletes one of its buckets, before any receiver has begun."""

    def tensors() -> Iterator[NamedTensor]:
        yield "first", torch.zeros(BUCKET_BYTES // 4)
        yield "second", torch.zeros(BUCKET_BYTES // 4)
        (spec.folder / "0000-000000.bucket").unlink()
        yield "third", torch.zeros(1)

    spec.send(tensors(), sender, VERSION)


def test_a_lost_bucket_is_reported(tmp_path: Path) -> None:
    def wait_and_receive(spec: TransportSpec) -> Any:
        time.sleep(0.3)
        return receive(spec, 0)

    found = transfer(tmp_path, [partial(robbed_send, sender=0)], [wait_and_receive])
    reason = "0000-000000.bucket is gone before receivers [0] have taken it"
    assert found["sender 0"] == found["receiver 0"] == f"WeightSyncError: sender 0: {reason}"


def spoiling_send(spec: TransportSpec, sender: int, *, spoil: Callable[[Path, TransportSpec], None]) -> int:
    """Sends while something happens to the second bucket, before any receiver sees it."""

    def write(path: Path, label: BucketLabel, content: dict[str, torch.Tensor]) -> None:
        original(path, label, content)
        if label.number == 1:
            spoil(path, spec)

    original, backends.write_bucket = backends.write_bucket, write  # of this process alone
    quarter = BUCKET_BYTES // 16
    return spec.send([(f"weight {index}", torch.full((quarter,), index + 1.0)) for index in range(12)], sender, VERSION)


def replaced(old: bytes, new: bytes, *, last: bool = False) -> Callable[[Path, TransportSpec], None]:
    """Other bytes in the place of some, the first or the last ones."""

    def spoil(path: Path, spec: TransportSpec) -> None:
        content = path.read_bytes()
        place = (content.rindex if last else content.index)(old)
        path.write_bytes(content[:place] + new + content[place + len(new) :])

    return spoil


def rewritten(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path, TransportSpec], None]:
    """Return a writer of the same bucket with the same checksums, and other tensors."""

    def spoil(path: Path, spec: TransportSpec) -> None:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata)

    return spoil


def of_another(**changes: Any) -> Callable[[Path, TransportSpec], None]:
    """A whole bucket, of another transfer, version or place."""

    def spoil(path: Path, spec: TransportSpec) -> None:
        write_bucket(path, replace(spec.label(0, 1), **changes), load_file(path))

    return spoil


def as_bfloat16(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight 5"] = tensors["weight 5"].bfloat16()


DAMAGES: dict[str, tuple[Callable[[Path, TransportSpec], None], str]] = {
    "one bit of a tensor": (
        replaced(b"\0\0\xc0\x40", b"\0\0\xc0\x41", last=True),
        "0000-000001.bucket is damaged in weight 5: not what sender 0 has sent",
    ),
    "a name": (replaced(b'"weight 6":{', b'"weight x":{'), "is damaged in weight x, weight 6: not what"),
    "a checksum": (replaced(b'\\"weight 7\\": \\"', b'\\"weight 7\\"; \\"'), "cannot be read: "),
    "the header": (replaced(b"F32", b"F23"), "0000-000001.bucket cannot be read: "),
    "an end that is missing": (
        lambda path, spec: os.truncate(path, path.stat().st_size - 1),
        "0000-000001.bucket cannot be read: ",
    ),
    "no bucket": (
        lambda path, spec: path.write_bytes(b"\x10\0\0\0\0\0\0\0 no manifest"),
        "0000-000001.bucket cannot be read: ",
    ),
    "no label": (lambda path, spec: save_file(load_file(path), path), "cannot be read: it has no label"),
    "another dtype": (rewritten(as_bfloat16), "is damaged in weight 5: "),
    "another shape": (
        rewritten(lambda tensors: tensors.update({"weight 4": tensors["weight 4"].view(2, -1)})),
        "is damaged in weight 4: ",
    ),
    "a tensor too few": (rewritten(lambda tensors: tensors.pop("weight 4")), "is damaged in weight 4: "),
    "a tensor too many": (rewritten(lambda tensors: tensors.update(more=torch.zeros(1))), "is damaged in more: "),
    "two tensors changed places": (
        rewritten(lambda tensors: tensors.update({"weight 4": tensors["weight 5"], "weight 5": tensors["weight 4"]})),
        "is damaged in weight 4, weight 5: ",
    ),
    "all tensors": (
        rewritten(lambda tensors: tensors.update({name: tensor + 1 for name, tensor in tensors.items()})),
        "is damaged in weight 4, weight 5, weight 6 and 1 more: ",
    ),
    "the version before": (
        of_another(version=VERSION - 1),
        "0000-000001.bucket is bucket 1 of sender 0, version 6, transfer nemo_rl_moe-weights-",
    ),
    "an earlier transfer": (
        of_another(transfer="earlier"),
        "0000-000001.bucket is bucket 1 of sender 0, version 7, transfer earlier; expected bucket 1 of sender 0",
    ),
    "the bucket before": (
        lambda path, spec: path.write_bytes((spec.folder / "0000-000000.bucket").read_bytes()),
        "0000-000001.bucket is bucket 0 of sender 0, version 7",
    ),
    "another sender's": (of_another(sender=1), "0000-000001.bucket is bucket 1 of sender 1, version 7"),
}


@pytest.mark.parametrize("damage", some_of(DAMAGES, 5))
def test_a_damaged_bucket_is_reported(damage: str, tmp_path: Path) -> None:
    spoil, problem = DAMAGES[damage]
    taken: list[str] = []

    def receiving(spec: TransportSpec) -> Any:
        with pytest.raises(WeightSyncError) as error:
            spec.receive(0, lambda tensors: taken.extend(name for name, _ in tensors))
        return [str(error.value), taken]

    # The bucket before it is still there.
    found = transfer(tmp_path, [partial(spoiling_send, sender=0, spoil=spoil)], [receiving], max_unacknowledged=3)
    reason, names = found["receiver 0"]
    assert reason.startswith("receiver 0: 0000-000001.bucket ")
    assert problem in reason
    assert found["sender 0"] == f"WeightSyncError: {reason}"
    assert names == [f"weight {index}" for index in range(4)], "the loader gets nothing of it"


def forgetful_send(spec: TransportSpec, sender: int) -> None:
    """Leaves a tensor out of a bucket."""

    def forget(path: Path, label: BucketLabel, content: dict[str, torch.Tensor]) -> None:
        content = dict(content)
        content.popitem()
        original(path, label, content)

    original, backends.write_bucket = backends.write_bucket, forget
    spec.send([("one", torch.zeros(3)), ("two", torch.zeros(3))], sender, VERSION)


def test_a_missing_tensor_is_reported(tmp_path: Path) -> None:
    found = transfer(tmp_path, [partial(forgetful_send, sender=0)], all_receivers(1))
    assert "sender 0 has sent {'buckets': 1, 'tensors': 2, 'bytes': 24, 'version': 7}" in found["receiver 0"]


def test_another_version_is_reported(tmp_path: Path) -> None:
    found = transfer(tmp_path, [*all_senders(1), partial(send, sender=1, version=6)], all_receivers(1))
    reason = "sender 1: it has the weights of version 6, expected 7"
    assert found["sender 1"] == found["receiver 0"] == f"WeightSyncError: {reason}"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (lambda sender: [("same", torch.zeros(3))], "receiver 0: same was sent twice"),
        (lambda sender: [(f"own {sender}", torch.zeros(3))] * 2, "it has two tensors of the name own"),
    ],
)
def test_a_name_stands_for_one_tensor(tensors: Any, reason: str, tmp_path: Path) -> None:
    found = transfer(tmp_path, [partial(send, sender=each, tensors=tensors) for each in range(2)], all_receivers(1))
    assert reason in found["receiver 0"]


def test_a_full_folder_is_reported(tmp_path: Path) -> None:
    def send_into_full_disk(spec: TransportSpec) -> int:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BUCKET_BYTES, 2 * BUCKET_BYTES))
        return send(spec, 0)

    found = transfer(tmp_path, [send_into_full_disk], all_receivers(1))
    assert "cannot write 0000-0000" in found["sender 0"]
    assert "File too large" in found["sender 0"]
    assert found["receiver 0"] == found["sender 0"]


def test_the_driver_ends_the_transfer_when_the_trainer_died(tmp_path: Path) -> None:
    def die(spec: TransportSpec) -> int:
        raise RuntimeError("rank 1 died")

    with WeightTransport(tmp_path, 1, die) as transport:
        spec = transport.open(1, VERSION)
        with pytest.raises(RuntimeError, match="rank 1 died"):
            transport.send()
        with pytest.raises(WeightSyncError, match="the trainer's ranks ended: rank 1 died"):
            receive(spec, 0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightSyncError, match="the folder of the transfer cannot be read"):
        receive(spec, 0)


def test_a_driver_that_raises_leaves_nothing(tmp_path: Path) -> None:
    transport = WeightTransport(tmp_path, 1, lambda spec: 0)
    with pytest.raises(RuntimeError, match="before opening it"):
        transport.open(1, VERSION)
    with pytest.raises(KeyError), transport:
        transport.open(1, VERSION).board.put("bucket", "")
        assert len(list(tmp_path.iterdir())) == 1
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_driver_left_is_removed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    prefix = f"nemo_rl_moe-weights-{socket.gethostname()}"
    for name in (
        f"{prefix}-{process.pid}-abc",
        f"{prefix}-{os.getpid()}-abc",
        "nemo_rl_moe-weights-other-1-abc",
        "mine",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0000-000000.bucket").touch()
    with WeightTransport(tmp_path, 1, lambda spec: 0):
        pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{prefix}-{os.getpid()}-abc", "nemo_rl_moe-weights-other-1-abc", "mine"}


def test_shared_memory_is_taken_where_it_has_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transport_module, "SHARED_MEMORY", tmp_path)
    free = transport_module.shutil.disk_usage(tmp_path).free
    assert free > 2**28
    assert folder_of_one_machine(1) == tmp_path
    assert folder_of_one_machine(free // 2**27) != tmp_path
    monkeypatch.setattr(transport_module, "SHARED_MEMORY", tmp_path / "none")
    assert folder_of_one_machine(1) not in (tmp_path, tmp_path / "none")
