"""MaxText's train step through its own compile-only entry point, and what Trellis reads in the program that comes out.

Run by the Python of an environment with MaxText's requirements, JAX and libtpu in the versions of the table, and
Trellis; MAXTEXT names a clone, which stays as it is. Arguments are the chip and MaxText's own:

    MAXTEXT=~/maxtext PYTHONPATH=src ~/maxtext-env/bin/python benchmarks/workers/compile_maxtext.py v5e \
        compile_topology=v5e-16 compile_topology_num_slices=1 ici_fsdp_parallelism=16 ...

One line a figure comes out: memory, seconds of scheduled computation, bytes over the links, and each Pallas kernel with
the number of its calls, since libtpu says nothing of their time.
"""

import os
import re
import sys
from collections import Counter
from pathlib import Path

os.environ.update(
    JAX_PLATFORMS="cpu", DECOUPLE_GCLOUD="TRUE", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)  # fmt: skip
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-256")  # any that MaxText knows; the topology is an argument
CLONE = Path(os.environ["MAXTEXT"])
sys.path.insert(0, str(CLONE / "src"))

import jax  # noqa: E402
from maxtext.trainers.pre_train import train_compile  # noqa: E402

from trellis.inspect import collectives, parse_program, scheduled_cycles  # noqa: E402
from trellis.plan import chips  # noqa: E402


def kernels(text: str) -> Counter[str]:
    """How often each Pallas kernel of a program is called, by the last names of its scope."""
    calls = Counter[str]()
    for instruction, times, _ in parse_program(text).walk(fusions=False):
        if instruction.op == "custom-call" and "tpu_custom_call" in instruction.attributes:
            scope = (instruction.quoted("op_name") or "").removesuffix("/pallas_call")
            calls[re.sub(r"jit\((.*?)\)", r"\1", scope.rpartition("/")[2])] += times
    return calls


def report(compiled, mesh: jax.sharding.Mesh, clock: float) -> None:
    """Prints the figures of a compiled step."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    rows = collectives(text, mesh).rows
    counted = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    print(f"counted GiB   {counted / 2**30:.2f}")
    print(f"laid out GiB  {(memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes) / 2**30:.2f}")
    print(f"compute s     {scheduled_cycles(text) / clock:.3f}")
    print(f"wire GB       {sum(row.total for row in rows) / 1e9:.1f}")
    print(f"sync GB       {sum(row.total for row in rows if 'asynchronous' not in row.note) / 1e9:.1f}")
    for name, calls in kernels(text).most_common():
        print(f"kernel        {calls} x {name}")


def main(chip: str, *arguments: str) -> None:
    """Compiles with MaxText's arguments and reports."""
    clock, done = chips()[chip].clock, train_compile.jit_and_compile
    if clock is None:
        sys.exit(f"{chip} is no TPU")

    def compile_and_report(*given, **named):
        compiled = done(*given, **named)
        report(compiled, given[3], clock)
        return compiled

    train_compile.jit_and_compile = compile_and_report
    train_compile.main(["train_compile", str(CLONE / "src/maxtext/configs/base.yml"), *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
