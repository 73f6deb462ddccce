"""What happens to runs. Each fault is a function of a case, whose run may be anywhere; it says how that went.

Afterwards whatever a person would mend is mended, and the run can go on.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.bench import Case, Wrong
from tests.data.test_full_disk import available_wrapper
from trellis.checkpoints.manifest import own_checksum

# Exit codes of a run that ended well.
DONE, WRONG, STOPPED = 0, 2, 3


def killed(case: Case) -> str:
    started = case.start()
    case.moment(started)
    started.send_signal(signal.SIGKILL)
    return "had ended" if case.expect(started.end(), (DONE, -signal.SIGKILL)).code == 0 else "killed"


def _signalled(case: Case, number: int, times: int) -> str:
    started = case.start()
    case.moment(started)
    for _ in range(times):
        started.send_signal(number)
        time.sleep(case.random.uniform(0, 0.2))
    end = case.expect(started.end(), (DONE, 128 + number, -number))
    if end.code == 128 + number and times == 1 and case.lines() and not case.checkpoints():
        raise Wrong("steps were made, and none was saved")
    return {DONE: "had ended", -number: "ended while it started"}.get(end.code, f"exit code {end.code}")


def terminated(case: Case) -> str:
    return _signalled(case, signal.SIGTERM, 1)


def interrupted(case: Case) -> str:
    return _signalled(case, signal.SIGINT, 1)


def interrupted_twice(case: Case) -> str:
    return _signalled(case, signal.SIGINT, 2)


def terminated_twice(case: Case) -> str:
    return _signalled(case, signal.SIGTERM, 2)


def paused(case: Case) -> str:
    """Ctrl-Z, and `fg` later."""
    started = case.start(*case.part())
    case.moment(started)
    started.send_signal(signal.SIGSTOP)
    time.sleep(case.random.uniform(0.2, 2))
    started.send_signal(signal.SIGCONT)
    case.expect(started.end(), (DONE,))
    return "went on"


def second_run(case: Case) -> str:
    first = case.start(*case.part())
    case.moment(first)
    second = case.start(*case.part()).end()
    ends = case.expect(first.end(), (DONE, WRONG), "Only one process at a time"), second
    case.expect(second, (DONE, WRONG), "Only one process at a time")
    if all(end.code for end in ends):
        raise Wrong("both were refused")
    return "one was refused" if any(end.code for end in ends) else "the first had ended"


def moved(case: Case) -> str:
    terminated(case)
    if not case.run.exists():
        return "had not begun"
    other = case.run.with_name(f"moved-{time.monotonic_ns()}")
    case.run.rename(other)
    case.run = other
    return "went on there"


def copied(case: Case) -> str:
    """Copied while it trains, file after file: the copy goes on instead of the run."""
    started = case.start(*case.part())
    case.moment(started)
    copy = case.run.with_name(f"copy-{time.monotonic_ns()}")
    if case.run.exists():
        subprocess.run(["cp", "-r", str(case.run), str(copy)], capture_output=True)
    case.expect(started.end(), (DONE,))
    if not copy.exists():
        return "had not begun"
    case.run, case.torn = copy, True
    return "the copy went on"


def other_version(case: Case) -> str:
    """The newest checkpoint was written by a later version."""
    case.begin()
    names = case.checkpoints()  # half a one that a killed run left is removed
    manifest = names[-1] / "manifest.json"
    before = manifest.read_text()
    later = {**json.loads(before), "format": 9}
    later.pop("crc")
    manifest.write_text(json.dumps({**later, "crc": own_checksum(later)}))
    case.expect(case.start().end(), (WRONG,), "format 9")
    if case.checkpoints() != names:
        raise Wrong("checkpoints were touched")
    manifest.write_text(before)
    return "refused in one message"


def _damage(case: Case, checkpoint: Path) -> tuple[str, str]:
    """Something happens to a file of a checkpoint: to which, and what."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    file, how = case.random.choice(files), case.random.choice(("truncated", "changed", "missing", "emptied"))
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "emptied" or not data:
        file.write_bytes(b"" if data else b"x")
    elif how == "truncated":
        file.write_bytes(data[: case.random.randrange(len(data))])
    else:
        data[case.random.randrange(len(data))] ^= 1 << case.random.randrange(8)
        file.write_bytes(data)
    return file.name, how


def damaged_checkpoint(case: Case) -> str:
    case.begin()
    newest = case.checkpoints()[-1]
    unfinished = _damage(case, newest) == ("manifest.json", "missing")  # like one that a kill cut off
    end = case.expect(case.start(*case.part()).end(), (DONE,))
    if not unfinished and f"checkpoint {newest.name} is damaged and is set aside" not in end.err:
        raise Wrong(f"nothing was said of the damage: {end.err}")
    return "the one before it was used"


def damaged_checkpoints(case: Case) -> str:
    """All of them."""
    case.begin()
    backup = case.folder / "backup"
    shutil.copytree(case.run, backup)
    for checkpoint in case.checkpoints():
        (checkpoint / "state" / "_METADATA").unlink()
    for _ in range(2):  # a second time, too: nothing begins anew without a word
        case.expect(case.start().end(), (WRONG,), "A run can resume only from a complete, undamaged checkpoint.")
    shutil.rmtree(case.run)
    backup.rename(case.run)
    return "refused in one message"


def no_room(case: Case) -> str:
    """The kernel refuses files that are longer than some kilobytes, as it does where a disk is full."""
    begun = len(case.lines())
    end = case.start(file_bytes=case.random.randrange(2_000, 60_000)).end()
    case.expect(end, (DONE, WRONG, STOPPED), "room")
    if len(case.lines()) < begun and end.code:
        raise Wrong("lines of metrics were lost")
    return {DONE: "had ended", WRONG: "refused in one message"}.get(end.code, "stopped in one message")


def read_only(case: Case) -> str:
    """The run's folder is on a file system that was mounted read-only."""
    if not (case.run / "run.yaml").exists():
        case.begin()
    wrapper = available_wrapper(case.stores)
    if not wrapper:
        return "not tried: no mounts allowed here"
    script = f'mount --bind "{case.run}" "{case.run}" && mount -o remount,bind,ro "{case.run}" && exec "$@"'
    words = ["train", str(case.run_file), "--run-dir", str(case.run), "--devices", "2"]
    command = [*wrapper, "sh", "-c", script, "sh", sys.executable, "-m", "trellis_start", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    parts = ("trellis: The run's folder must be writable.", "Read-only file system", "Traceback")
    if done.returncode != WRONG or [part in done.stderr for part in parts] != [True, True, False]:
        raise Wrong(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    return "refused in one message"


def lost_mount(case: Case) -> str:
    """The run's folder is gone while it trains, and comes back afterwards."""
    started = case.start()
    case.moment(started)
    aside = case.folder / "aside"
    gone = case.run.exists()
    if gone:
        case.run.rename(aside)
        case.run.write_text("")  # nothing can be made there
    end = started.end()
    if gone:
        case.run.unlink()
        aside.rename(case.run)
    case.expect(end, (DONE, WRONG, STOPPED), "must be")
    return {DONE: "had ended", WRONG: "refused in one message"}.get(end.code, "stopped in one message")


def replaced_chunk(case: Case) -> str:
    """A chunk of the store holds something else."""
    chunk = case.stores / "train" / "tokens" / "c" / "0"
    before = chunk.read_bytes()
    other = bytearray(before)
    if case.random.random() < 0.5:
        other[case.random.randrange(len(other))] ^= 255
    else:
        other = other[: case.random.randrange(len(other))]
    early = case.random.random() < 0.5
    if early:
        chunk.write_bytes(other)
    started = case.start()
    if not early:
        case.moment(started)
        chunk.write_bytes(other)
    end = started.end()
    chunk.write_bytes(before)
    case.expect(end, (DONE, WRONG, STOPPED), "chunk of a token store")
    return "the chunk had been read" if end.code == 0 else "stopped in one message"


def clock_jump(case: Case) -> str:
    far = case.random.choice((-1, 1)) * 10 ** case.random.uniform(0, 8)
    case.expect(case.start(*case.part(), jump=(case.random.uniform(0, case.bench.seconds), far)).end(), (DONE,))
    return "went on"


def slow_disk(case: Case) -> str:
    case.expect(case.start(*case.part(), slow=case.random.uniform(0.05, 0.3)).end(), (DONE,))
    return "went on"


def half_a_line(case: Case) -> str:
    """A kill cut the last line of metrics.jsonl."""
    case.begin()
    with open(case.run / "metrics.jsonl", "a") as file:
        file.write('{"step": 99, "loss": 3.'[: case.random.randrange(1, 24)])
    case.expect(case.start(*case.part()).end(), (DONE,))
    return "went on"


def spoiled_run_file(case: Case) -> str:
    case.begin()
    path = case.run / "run.yaml"
    before = path.read_text()
    text = case.random.choice(("", "steps: [", before[: len(before) // 2], "steps: 3\n", "\0"))
    path.write_text(text)
    case.expect(case.start().end(), (WRONG,), "run.yaml")
    path.write_text(before)
    return "refused in one message"


def spoiled_cache(case: Case) -> str:
    """Compiled programs that were kept are cut short: they are compiled anew."""
    files = sorted((case.bench.folder / "cache").rglob("*-cache"))
    if not files:
        raise Wrong("nothing is kept")
    for file in case.random.sample(files, len(files) // 2):
        file.write_bytes(file.read_bytes()[: case.random.randrange(200)])
    case.expect(case.start(*case.part()).end(), (DONE,))
    return "went on"


FAULTS: dict[str, Callable[[Case], str]] = {
    f.__name__.replace("_", " "): f
    for f in (
        *(killed, terminated, interrupted, interrupted_twice, terminated_twice, paused, second_run, moved, copied),
        *(other_version, damaged_checkpoint, damaged_checkpoints, no_room, read_only, lost_mount, replaced_chunk),
        *(clock_jump, slow_disk, half_a_line, spoiled_run_file, spoiled_cache),
    )
}
