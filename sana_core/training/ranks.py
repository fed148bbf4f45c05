"""The processes that train one model together: how they connect, communicate, and notice that one of them has died.

A launcher, such as torchrun or accelerate launch, starts the same command in each process and sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. torch.distributed connects the processes. Numbers that steer the run are sent over gloo
between the CPUs, gradients over the backend of the device.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from datetime import timedelta
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from os import _exit, getpid
from pathlib import Path
from platform import node
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints
from uuid import uuid4

import torch

from ..errors import InputError, SanaError, TrainingError, first_line
from ..runtime.accelerator import chosen_device, set_current_device
from ..runtime.text import Json, brief, get_logger
from .settings import Place, TrainingSettings

if TYPE_CHECKING:
    from torch.distributed import Store

logger = get_logger(__name__)
T = TypeVar("T")
# Timeout of a collective. It may wait for a rank that encodes or generates images meanwhile. The heartbeat notices dead
# ranks.
PATIENCE = timedelta(hours=24)
HARMLESS = (
    # No code changes the output of a projection in place.
    "FSDP2-wrapped module .* returned a view",
    # The gradients of depthwise convolutions, 0.2 % of all, are copied into their bucket.
    "Grad strides do not match bucket view",
)
# Time in which the processes of a run have to find each other.
MEETING = timedelta(minutes=10)
# Seconds after which a process that waits for the others logs a line.
LOG_WAIT_AFTER = 2.0
# Seconds between two heartbeats, and seconds without one after which a rank counts as dead.
BEAT = 2.0
LOST = 20.0
# Seconds in which the other ranks can end by themselves after a rank has failed.
GRACE = 10.0
# Seconds in which the first rank can complete a state after another rank has died. The digests and the disk take a
# minute for a state of 20 GB.
SAVE_PATIENCE = 600.0
# Ends the first rank's beats while it completes a state.
SAVING = b"s"
BEATS, NAMES, FAILED, HEARD = "beat", "name", "failed", "heard"
# Settings of accelerate launch that this package does not read, with the names of its own settings. They reach the
# processes as ACCELERATE_MIXED_PRECISION and so on.
ACCELERATE = {
    "mixed_precision": "dtype",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clipping": "optimizer.clip",
    "dynamo_backend": "none, nothing is compiled",
    "use_cpu": "device",
    "use_fsdp": "parallel.kind",
    "use_deepspeed": "parallel.kind",
    "use_megatron_lm": "parallel.kind",
}
# Values of these settings, in lower case, that have no effect.
UNSET = ("", "no", "none", "false", "0", "0.0", "1")
# Packages whose versions have to be the same on all ranks, because the values of a step depend on them.
LIBRARIES = ("torch", "diffusers", "transformers", "peft")


class Ranks(NamedTuple):
    """The processes of a run, seen from one of them."""

    # Number of this process.
    rank: int = 0
    # Number of processes.
    size: int = 1
    # Whether a launcher has started the process.
    launched: bool = False
    # The device of this rank. None: the process was not launched.
    device: torch.device | None = None
    # Held while a state is completed, so that the heartbeat does not end this process meanwhile.
    completing: AbstractContextManager[object] = nullcontext()

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes, generates and reports."""
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Return the sums of `values` over all ranks. All of them have to call this."""
        if self.size == 1:
            return list(values)
        return self.all_reduce(torch.tensor(values, dtype=torch.float64)).tolist()

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, summed over all ranks in place."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values

    def broadcast(self, value: T) -> T:
        """Return the first rank's `value`."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        gathered: list[T] = [value] * self.size
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on all ranks and wait for all of them. Returns its result on this rank.

        Raises the error of `action`, or a TrainingError if it has failed on another rank only. `action` must not
        communicate: if one rank failed in it, the others would wait there for ever.
        """
        error = None
        results: list[T] = []
        try:
            results.append(action())
        except BaseException as raised:
            if self.size == 1:
                raise
            error = raised
        self.agree(error)
        return results[0]

    def run_on_rank0(self, action: Callable[[], T]) -> T | None:
        """Run `action` on the first rank while the others wait. Returns its result there, None on the others."""
        chosen: Callable[[], T | None] = action if self.first else lambda: None
        return self.run_on_all(chosen)

    def agree(self, error: BaseException | None) -> None:
        """Raise an error on all ranks if `error` is set on one of them. All ranks have to call this.

        A rank without an error raises a TrainingError, or KeyboardInterrupt if another rank was interrupted. `all_know`
        is true for these errors.
        """
        if not self.total(float(error is not None))[0]:
            return
        errors = self.all_gather(None if error is None else (type(error).__name__, str(error)))
        if error is None:
            number, (kind, text) = next((number, described) for number, described in enumerate(errors) if described)
            if kind in ("KeyboardInterrupt", "SystemExit"):
                error = KeyboardInterrupt()
            else:
                error = TrainingError(f"training: rank {number} has failed ({text or kind:.200}); see what it says")
        vars(error)[AGREED] = True
        raise error

    def all_know(self, error: BaseException) -> bool:
        """Whether `agree` has raised this error, or its cause, on all ranks.

        After any other error this rank must not enter a collective, because the other ranks wait in another one.
        """
        if self.size == 1:
            return True
        cause: BaseException | None = error
        while cause is not None and AGREED not in vars(cause):
            cause = cause.__cause__
        return cause is not None


# Attribute of an error that all ranks have agreed on.
AGREED = "agreed_by_all_ranks"
ALONE = Ranks()


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Connect to the other processes that a launcher has started. Gives their ranks, ALONE without a launcher.

    `device` is the setting of that name. If a machine has several accelerators, each of its ranks takes another one. If
    a rank dies or does not connect, the TrainingError names it.
    """
    connection = connect_store()
    if connection is None or connection[1] == 0:
        warn_of_unused_settings()
    if connection is None:
        yield ALONE
        return
    store, rank, count = connection
    from torch.distributed import Backend, get_default_backend_for_device, init_process_group, is_backend_available

    attempt = meet(store, rank, count)
    store = torch.distributed.PrefixStore(attempt, store)
    heartbeat = Heartbeat(store, rank, count, f"rank {rank} on {node()}, process {getpid()}")
    ranks = Ranks(rank, count, True, completing=heartbeat.completing)
    try:
        heartbeat.start()
        rank_device = choose_device(device)
        ranks = ranks._replace(device=rank_device)
        kind = rank_device.type
        backend = get_default_backend_for_device(kind)
        if not is_backend_available(backend) or kind not in Backend.backend_capability.get(backend, [kind]):
            raise InputError(
                f"launcher: got processes on {kind}, which this torch cannot connect (it has no {backend} for {kind}), "
                "expected GPUs on Linux; unset RANK to train in one process, or set device to cpu"
            )
        # Norms of offloaded gradients are summed on the CPU, so gloo is needed as well (pytorch issue 148532).
        backends = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{backend}"
        init_process_group(backends, store=store, rank=rank, world_size=count, timeout=PATIENCE)
        warn_of_shared_gpus(ranks)
        with warnings.catch_warnings():
            for message in HARMLESS:
                warnings.filterwarnings("ignore", message)
            yield ranks
        # The rank with the store ends last.
        ranks.total(0.0)
    except BaseException as error:
        if is_lost(error):
            raise TrainingError(f"training: {name_lost(heartbeat, error)}; the same command resumes") from error
        if not ranks.all_know(error):
            heartbeat.announce(error)
        raise
    finally:
        # A backend may wait for the other ranks while it is destroyed. The heartbeat, still running, ends the process.
        try:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        except RuntimeError as error:
            # The run has ended, with its result or with a more specific error.
            logger.warning("training: the connection to the other ranks was not closed (%s)", first_line(error))
        finally:
            heartbeat.stop()


def connect_store() -> tuple[Store, int, int] | None:
    """Connect to the launcher's store. Returns the store, the rank and the number of ranks.

    None: no launcher has started this process.

    Waits for the other processes, and logs this after LOG_WAIT_AFTER seconds.
    """
    if not torch.distributed.is_available():
        return None
    from torch.distributed.rendezvous import rendezvous

    results: list[tuple[Store, int, int] | Exception] = []

    def connect() -> None:
        try:
            # A longer timeout than the wait below: the process would abort if the thread returned while Python ends.
            results.append(next(rendezvous("env://", timeout=2 * MEETING)))
        except Exception as error:
            # torch raises TypeError for a number that C++ cannot hold.
            results.append(error)

    # In a thread, because torch does not notice Ctrl+C while it waits, and waits forever if another program answers.
    thread = threading.Thread(target=connect, name="sana training rendezvous", daemon=True)
    thread.start()
    thread.join(LOG_WAIT_AFTER)
    if not results:
        log_line(
            f"waiting for the other processes of this run, as {describe_launch()}; to train in one process, unset RANK"
        )
        thread.join(MEETING.total_seconds() - LOG_WAIT_AFTER)
    result = results[0] if results else None
    if isinstance(result, tuple):
        result[0].set_timeout(MEETING)
        return result
    if isinstance(result, Exception) and not isinstance(result, RuntimeError):
        if "expected, but not set" in str(result):
            return None
        reason = " ".join(str(result).split())
        raise InputError(
            f"launcher: got {describe_launch()}, expected numbers in RANK, WORLD_SIZE and MASTER_PORT "
            f"({reason:.100}); set them, or unset RANK to train in one process"
        ) from result
    if re.search("EADDRINUSE|[Aa]ddress already in use", str(result)):
        raise InputError(
            f"MASTER_PORT: another program on this machine uses it, got {describe_launch()}; set another port, or end "
            "that program"
        ) from result
    raise not_met_error(int(variable("RANK")), int(variable("WORLD_SIZE"))) from result


def describe_launch() -> str:
    """Return the launcher's variables as text."""
    rank, count, host, port = map(variable, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return f"rank {rank:.10} of {count:.10} at {host:.80}:{port:.10}"


def not_met_error(rank: int, count: int) -> TrainingError:
    return TrainingError(
        f"training: rank {rank} has not met the {count - 1} others in {MEETING.total_seconds():.0f} s; start them all"
    )


def variable(name: str) -> str:
    """Return the environment variable `name`. Empty: it is not set. accelerate reads it, because this package must not
    access the environment."""
    from accelerate.utils.environment import parse_choice_from_env

    return parse_choice_from_env(name, "")


def warn_of_unused_settings() -> None:
    """Log the settings of accelerate launch that have no effect here."""
    values = {name: variable(f"ACCELERATE_{name.upper()}") for name in ACCELERATE}
    unused = [name for name, value in values.items() if value.lower() not in UNSET]
    if unused:
        named = ", ".join(f"{name} {values[name]:.20} (here: {ACCELERATE[name]})" for name in unused)
        log_line(f"warning: these settings of accelerate launch are not used, set them in the settings file: {named}")


def choose_device(name: str) -> torch.device:
    """Return the device of this rank. Without a number in the setting, it is the rank's number on its machine."""
    device = chosen_device(name)
    if device.type != "cpu" and not (name and device.index is not None):
        device = torch.device(device.type, torch.distributed.get_node_local_rank(fallback_rank=0))
        device = chosen_device(str(device))
    # FSDP takes the current device of the process.
    set_current_device(device)
    return device


def warn_of_shared_gpus(ranks: Ranks) -> None:
    """Log a warning if several ranks use one GPU. NCCL refuses it later with an error that looks like a lost rank."""
    uuid: object = None
    # AMD's driver may report zeros.
    if ranks.device is not None and ranks.device.type != "cpu" and torch.version.hip is None:
        module = torch.get_device_module(ranks.device)
        uuid = getattr(module.get_device_properties(ranks.device), "uuid", None)
    uuids = ranks.all_gather(str(uuid or ranks.rank))
    if uuids.index(uuids[ranks.rank]) < ranks.rank:
        log_line(
            f"warning: rank {ranks.rank} uses {ranks.device} of {node()} like another rank, but NCCL needs a GPU for "
            "each; leave device empty, and start with torchrun, which sets LOCAL_RANK"
        )


def meet(store: Store, rank: int, count: int) -> str:
    """Return a name for this start of the run that all ranks agree on.

    A launcher that restarts a run keeps its store, with the keys of dead processes. So each process writes a new
    identity, the first rank proposes a name together with the identities that it has read, and a process agrees only to
    a proposal with its own identity. Logs after LOG_WAIT_AFTER seconds which ranks are missing.
    """
    identity, began, name, has_logged = uuid4().hex, time.monotonic(), "", False
    end = began + MEETING.total_seconds()
    proposed: list[str] = []

    def missing() -> str:
        """Return as text the ranks that have not written their identity yet."""
        if rank:
            return "rank 0"
        late = [str(other) for other in range(1, count) if not store.check([f"here/{other}"])]
        return f"rank {', '.join(late[:8])}" if late else "the others"

    try:
        store.set(f"here/{rank}", identity)
        while time.monotonic() < end:
            if rank == 0:
                keys = [f"here/{number}" for number in range(count)]
                present = [store.get(key).decode() for key in keys] if store.check(keys) else []
                if present and present != proposed:
                    proposed, name = present, uuid4().hex
                    store.set("proposal", json.dumps([name, present]))
                keys = [f"agreed/{number}" for number in range(1, count)]
                if present and (not keys or store.check(keys)) and all(store.get(key).decode() == name for key in keys):
                    store.set("begun", name)
                    return name
            elif store.check(["proposal"]):
                name, present = json.loads(store.get("proposal"))
                if present[rank] == identity:
                    store.set(f"agreed/{rank}", name)
                    if store.check(["begun"]) and store.get("begun").decode() == name:
                        return name
            if not has_logged and time.monotonic() > began + LOG_WAIT_AFTER:
                has_logged = True
                log_line(f"waiting for {missing()} of this run, as rank {rank} of {count}")
            time.sleep(0.02)
        raise not_met_error(rank, count)
    except SanaError:
        raise
    except RuntimeError as error:
        raise TrainingError(
            f"training: rank {rank} has lost the machine that the run was started on; the same command resumes"
        ) from error


def is_lost(error: BaseException) -> bool:
    """Whether the connection to another rank has failed with `error`."""
    if not torch.distributed.is_available():
        return False
    errors = tuple(getattr(torch.distributed, name) for name in ("DistBackendError", "DistNetworkError"))
    # The errors of gloo are plain RuntimeErrors.
    is_gloo = isinstance(error, RuntimeError) and not isinstance(error, SanaError) and "gloo" in str(error)
    return isinstance(error, errors) or is_gloo


def log_line(line: str) -> None:
    """Write a line for the user who started the run."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


class Heartbeat:
    """A thread that shows to the other ranks that this rank is alive, and notices dead ranks.

    Each rank counts up a number in the launcher's store. The first rank watches all numbers, the others watch the first
    rank's. If a process is killed or a machine is lost, its number no longer changes. A collective on an accelerator
    would wait for it for ever. A rank that fails writes its error into the store.
    """

    def __init__(self, store: Store, rank: int, count: int, name: str) -> None:
        self.store, self.rank, self.count, self.name = store, rank, count, name
        self.ended = threading.Event()
        # Held by the thread that completes a state.
        self.completing = threading.Lock()
        self.thread = threading.Thread(target=self.run, name="sana training heartbeat", daemon=True)
        # The name and the error of a rank that has failed, once the heartbeat has read them. The store may end then.
        self.failure = ""
        # The last number of each watched rank, and the time when it was read first.
        self.seen: dict[int, tuple[bytes, float]] = {}

    def start(self) -> None:
        # The thread needs a connection of its own: a call that waits would block the calls of the main thread.
        self.store = self.store.clone()
        self.store.set(f"{NAMES}/{self.rank}", self.name)
        self.store.set(f"{BEATS}/{self.rank}", "0")
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def announce(self, error: BaseException) -> None:
        """Write this rank's error into the store, unless another rank has failed before."""
        answers = [f"{HEARD}/{rank}" for rank in range(1, self.count)]
        # Without an agent the store ends with the first rank, so the others have to read the error before that.
        waits = self.rank == 0 and answers and isinstance(error, Exception)
        end = time.monotonic() + (2 * BEAT + 1.0 if waits else 0.0)
        try:
            self.store.compare_set(FAILED, "", f"{self.name}: {str(error) or type(error).__name__:.300}")
            while time.monotonic() < end and not self.store.check(answers):
                time.sleep(0.05)
        except RuntimeError:
            # The rank with the store has ended, and the store with it.
            return

    def run(self) -> None:
        """Beat and watch until the end. If another rank has died, end this process after GRACE seconds.

        In these seconds the main thread may notice by itself, and a rank that was only silent may beat again. All ranks
        wait longer, up to SAVE_PATIENCE, while the first rank completes a state. If one of them ended, a launcher such
        as torchrun would kill the first rank.
        """
        number, lost_since, looked = 0, math.inf, time.monotonic()
        while not self.ended.wait(BEAT):
            number += 1
            now = time.monotonic()
            if now - looked > 4 * BEAT:
                # This thread stood still, for example while safetensors copied a large state and held the GIL. It saw
                # no beats meanwhile, so silence counts from now.
                self.seen.clear()
            looked = now
            is_saving = self.completing.locked()
            try:
                self.store.set(f"{BEATS}/{self.rank}", str(number) + SAVING.decode() * is_saving)
                silent = self.silent(range(self.count) if self.rank == 0 else (0,))
                lost = self.failed() or silent
                if self.rank:
                    is_saving = not silent and self.seen[0][0].endswith(SAVING)
            except RuntimeError:
                lost = "the machine that the run was started on is gone"
            lost_since = min(lost_since, now) if lost else math.inf
            if now - lost_since >= (SAVE_PATIENCE if is_saving else GRACE):
                try:
                    sys.stderr.write(f"\ntraining: {lost}; the same command resumes\n")
                    sys.stderr.flush()
                finally:
                    # The main thread may wait for the dead process in a collective, where no exception reaches it. The
                    # terminal may be closed, so an error of the write must not prevent the exit.
                    _exit(1)

    def failed(self) -> str:
        """Return the name and the error of a rank that has failed. Empty: none has."""
        if not self.failure and self.store.check([FAILED]):
            self.failure = self.store.get(FAILED).decode(errors="replace")
            self.store.set(f"{HEARD}/{self.rank}", "")
        return self.failure

    def silent(self, ranks: Iterable[int]) -> str:
        """Return as text the names of the `ranks` that have not beaten for LOST seconds."""
        silent_ranks, now = [], time.monotonic()
        for rank in ranks:
            key = f"{BEATS}/{rank}"
            number = self.store.get(key) if self.store.check([key]) else b""
            if rank not in self.seen or self.seen[rank][0] != number:
                self.seen[rank] = number, now
            elif now - self.seen[rank][1] > LOST:
                silent_ranks.append(self.store.get(f"{NAMES}/{rank}").decode())
        return f"lost {' and '.join(silent_ranks)}" if silent_ranks else ""


def name_lost(heartbeat: Heartbeat, error: BaseException) -> str:
    """Return as text which rank has died, after a collective has failed with `error`. This can take LOST seconds.

    If all ranks are alive, `error` is announced to them.
    """
    end = time.monotonic() + LOST + 3 * BEAT
    monitor = Heartbeat(heartbeat.store, heartbeat.rank, heartbeat.count, heartbeat.name)
    while time.monotonic() < end:
        try:
            # Any rank may be dead, so this rank watches all of them.
            lost = heartbeat.failure or monitor.failed() or monitor.silent(range(monitor.count))
        except RuntimeError:
            return heartbeat.failure or "lost the machine that the run was started on"
        if lost:
            return lost
        time.sleep(BEAT / 4)
    heartbeat.announce(error)
    return f"lost the connection to another rank ({' '.join(str(error).split()):.200})"


def check_settings_and_code(ranks: Ranks, settings: TrainingSettings) -> None:
    check_same(ranks, all_values(settings), "settings")
    check_same(ranks, code_versions(), "code")


def check_same(ranks: Ranks, values: Json, what: str) -> None:
    """Raise InputError on all ranks if `values` differ between ranks. `what` names them in the error."""
    gathered = ranks.all_gather((node(), values))
    first_host, expected = gathered[0]
    for number, (host, rank_values) in enumerate(gathered):
        for name in sorted(expected.keys() | rank_values.keys()):
            if rank_values.get(name) != expected.get(name):
                raise InputError(
                    f"{what}: rank {number} on {host} has {name} {brief(rank_values.get(name))}, but rank 0 on "
                    f"{first_host} has {brief(expected.get(name))}; start all with the same"
                )


def all_values(settings: Any, prefix: str = "") -> Json:
    """Return the values of `settings` by name.

    For paths it returns only how many are set, because the same file may have different paths on the machines. The
    contents are compared later.
    """
    values: Json = {}
    for field, hint in get_type_hints(type(settings), include_extras=True).items():
        value, name = getattr(settings, field), prefix + field
        if hint in (Place, tuple[Place, ...]):
            values[name] = len(value) if isinstance(value, tuple) else bool(value)
        elif is_dataclass(value):
            values |= all_values(value, f"{name}.")
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            for number, inner in enumerate(value, 1):
                values |= all_values(inner, f"{name} {number}: ")
        elif name != "device":
            values[name] = value
    return values


def code_versions() -> Json:
    """Return the digest of this package's code, and the versions of Python and LIBRARIES."""
    package = Path(__file__).parents[1]
    digest = sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()} ".encode() + file.read_bytes())
    versions: Json = {"sana_core": digest.hexdigest()[:16], "Python": "{}.{}".format(*sys.version_info)}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions
