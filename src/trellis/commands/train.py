"""`trellis train`."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from trellis.commands.command import Command, called, whole
from trellis.errors import UserError
from trellis.files import typed, unread, write_json, write_whole

if TYPE_CHECKING:
    from trellis.inspect import Ledger
    from trellis.run.config import Run
    from trellis.train.assemble import Assembled
    from trellis.train.corpus import Corpus
    from trellis.train.loop import Feed

# The tokens of the sample at the end of a run.
_SAMPLE_TOKENS = 200


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis train`."""
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: runs/NAME-DATE)")
    parser.add_argument(
        "--until", type=whole(), metavar="N", help="pause after step N, with a checkpoint; 0 writes the first state"
    )


def execute(args: argparse.Namespace) -> int:
    """`trellis train`."""
    from trellis.checkpoints.checkpoints import told_of_last_good
    from trellis.checkpoints.manifest import finished_steps
    from trellis.recipes import RECIPES
    from trellis.run.folder import (
        check_run_folder,
        claim,
        has_begun,
        made,
        new_folder,
        unchanged_if_refused,
        with_own_tokenizer,
    )
    from trellis.run.unheeded import check_given
    from trellis.train.choices import as_it_began, choose
    from trellis.train.compilation import use_persistent_cache
    from trellis.train.devices import find_devices
    from trellis.train.distributed import initialize, is_first
    from trellis.train.stopping import left_alone
    from trellis.train.together import alone_together, check_alike, check_devices, check_folder

    run: Run = args.run
    check_given(run, args.given)
    if args.run_dir == "":
        fix = "name one, or leave the option out for a new one: runs/NAME-DATE"
        raise UserError("A run's folder must have a name.", seen="no letter", where="--run-dir", fix=fix)
    several = run.distributed
    use_persistent_cache()
    initialize(coordinator=several.coordinator, processes=several.processes, process=several.process)
    of_folder = args.recipe not in RECIPES and (Path(args.recipe) / "run.yaml").is_file()
    resumed = Path(args.recipe) if of_folder else None
    if args.run_dir or resumed:
        there = Path(args.run_dir or resumed)
        run = as_it_began(run if "data.tokenizer" in args.given else with_own_tokenizer(run, there), there)
    devices = find_devices(run)  # the first look at the devices, which fixes how many a CPU has
    if args.run_dir is None and resumed is None and jax.process_count() > 1:
        raise UserError(
            "All processes of a run must use the same folder.",
            seen=f"{jax.process_count()} processes and no --run-dir",
            where="trellis train",
            fix="add --run-dir DIR, a folder that all of them can see",
        )
    check_run_folder(folder := Path(args.run_dir) if args.run_dir else resumed or new_folder(run))
    if str(folder) in RECIPES:  # as a command's first argument its bare name is the recipe
        folder = folder.absolute()
    _check_home(args.recipe, folder)
    if args.until is not None and args.until < 0:
        fix = "use --until 0 for the first checkpoint only"
        raise UserError("`--until` must be 0 or more.", seen=args.until, where="--until", fix=fix)
    if args.until is not None and args.until > run.steps:
        raise UserError(
            "A run cannot pause after its end.",
            seen=f"--until {args.until}, steps {run.steps}",
            where="--until",
            fix=f"leave it out, or use --steps {args.until} for more steps",
        )
    done = lambda: max(finished_steps(folder / "checkpoints"), default=0)
    check_devices()
    if args.run_dir is None and resumed is None:
        folder = made(folder)
    with left_alone(lambda: told_of_last_good(folder / "checkpoints")), alone_together(folder):
        check_folder(folder)
        check_alike(run, until=args.until)
        if not has_begun(folder):
            chosen = choose(run, devices, tell=_say)
            if chosen.devices != run.devices:
                devices = devices[: chosen.devices]
            run = chosen
        with unchanged_if_refused(folder, write=is_first()):
            changed = _changed(folder, run, done())
            claim(folder, run, done=done(), write=is_first())
            for line in changed if is_first() else ():
                _say(line)
            try:
                code = train_run(run, folder, devices, until=args.until)
            finally:
                if is_first():
                    _report(folder)
        if is_first() and (code or args.until is not None) and done() < run.steps:
            word = "stopped" if code else "paused"  # by a signal, or by request
            _say(f"{word:<8} after step {done()}; `{called()} train {typed(folder)}` resumes it")
        elif code == 0 and is_first():
            _say(_NEXT.format(trellis=called(), folder=typed(folder)))
        return code


def _check_home(recipe: str, folder: Path) -> None:
    """Refuses a new folder for the run of an imported model: its file says nothing of the weights."""
    from trellis.run.folder import IMPORTED, has_begun

    home = Path(recipe).parent if Path(recipe).name == "run.yaml" else Path(recipe)
    if (home / IMPORTED).is_file() and home.resolve() != folder.resolve() and not has_begun(folder):
        raise UserError(
            "The run of an imported model needs a folder with its weights.",
            seen=f"no checkpoint in {folder}",
            where="--run-dir",
            fix=f"copy the run first, cp -r {typed(home)} {typed(folder)}, or import the model once more",
        )


def _changed(folder: Path, run: "Run", done: int) -> list[str]:
    """Lines about what a run continues with otherwise than it began, where that is allowed and changes its numbers."""
    from trellis.run.folder import has_begun, open_run

    if not done or not has_begun(folder) or not (folder / "run.yaml").is_file():
        return []
    before = open_run(folder)
    return list(filter(None, (_other_rate(before, run, done), _other_parts(before, run))))


def _other_rate(before: "Run", run: "Run", done: int) -> str:
    """Words for the learning rate that a run continues with, if a new number of steps changes it."""
    from trellis.optim import learning_rates

    peak = run.optimizer.learning_rate
    was, now = (float(learning_rates(run.schedule, peak, steps)(done)) for steps in (before.steps, run.steps))
    if was == now:
        return ""
    rates = f"with a learning rate in step {done + 1} of {now:.3g} instead of {was:.3g}"
    return f"steps    {before.steps:,} -> {run.steps:,}: the schedule follows the new number, {rates}"


def _other_parts(before: "Run", run: "Run") -> str:
    """Words about dropout, which is drawn for each part of a batch, if a run continues with other parts."""
    from trellis.models.protocol import dropout

    parts = lambda run: (run.parts, run.mesh.stage, run.layout.pipeline_microbatches)
    if not dropout(run.model) or parts(before) == parts(run):
        return ""
    return "dropout  is drawn for each part of a batch: the parts differ from here on, and so does what is dropped"


# Three things to do after a run has ended.
_NEXT = """next     {trellis} generate {folder} --prompt "def "    more text, from your own prompt
         {trellis} compare {folder} OTHER_RUN    beside a run with another model, learning rate or batch
         {trellis} tokenize texts/*.txt --out stores/mine --train-bpe 4096    your own text, to train on"""

_WITHOUT_VALIDATION = """text     all of it is trained on, so there is no validation loss
         To measure one, tokenize a held-out part on its own, and add {option} stores/validation to a new run:
         trellis tokenize HELD_OUT --out stores/validation --tokenizer {tokenizer}"""

_WITHOUT_TOKENIZER = "samples  none: the token store has no tokenizer; set one with --data.tokenizer tokenizer.json"


def _without_validation(run: "Run", corpus: "Corpus") -> str:
    """How a run gets the validation text that it has not."""
    source, option = run.data.source, "--data.source"
    if source.kind == "mixture":
        source, option = source.parts[0], f"{option}.parts.0"
    has_tokenizer = next(iter(corpus.stores.values())).tokenizer_sha256 is not None
    tokenizer = shlex.quote(source.path if has_tokenizer else run.data.tokenizer or "TOKENIZER")
    return _WITHOUT_VALIDATION.format(option=f"{option}.validation", tokenizer=tokenizer)


def _report(folder: Path) -> None:
    """Writes the page of a run, however it ended."""
    from trellis.pages.run import write_report
    from trellis.run.folder import has_begun

    if has_begun(folder) and (folder / "metrics.jsonl").exists():
        try:
            path = write_report(folder)
        except (OSError, UserError) as error:
            why = error.strerror if isinstance(error, OSError) else f"{error.where}: {error.seen}"
            print(f"report   not written: {why}", file=sys.stderr)
        else:
            _say(f"report   {path}")


def _say(text: str) -> None:
    """Prints a line about a run. If its reader is gone, as after `| head`, the run goes on, and ends, all the same."""
    with unread(sys.stdout):
        print(text, flush=True)


def train_run(run: "Run", folder: Path, devices: Sequence[Any], *, until: int | None = None) -> int:
    """Trains a run in a folder on devices, to its end or until a given step, and returns the exit code."""
    from trellis.data.store.identity import identity
    from trellis.run.folder import has_begun
    from trellis.run.on_mesh import as_the_model_is
    from trellis.train.assemble import assemble
    from trellis.train.checks import check_state
    from trellis.train.corpus import check_lasts, open_corpus
    from trellis.train.distributed import is_first
    from trellis.train.flops import costs, work_of
    from trellis.train.loop import train
    from trellis.train.pace import expected_pace, keep_pace, tried_pace, worth_a_trial
    from trellis.train.structure import StructureCheck
    from trellis.train.summary import describe, lengths, sections
    from trellis.train.together import check_text

    with as_the_model_is(has_begun(folder)):
        assembled = assemble(run, devices)
    check_state(assembled)
    corpus = open_corpus(run, progress=is_first())
    check_lasts(run, corpus)
    text = {name: identity(store) for name, store in corpus.all_stores.items()}
    check_text(text)
    ledgers, memory = _by_types(assembled)
    found = sections(assembled, memory[0], ledgers[0], corpus.num_tokens, corpus.batches.filled(run.steps))
    found["lengths"] = lengths(assembled, memory)
    found["tokenizer"] = None if corpus.tokenizer is None else corpus.tokenizer.sha256
    if is_first():
        _write_ledger(folder, ledgers, assembled)
        write_sections(folder, found)
        _say(f"{describe(found)}\nfolder   {folder}")
        if not corpus.validation:
            _say(_without_validation(run, corpus))
        if corpus.tokenizer is None:
            _say(_WITHOUT_TOKENIZER)
    feed = _feed(assembled, corpus, text)
    work, check = work_of(assembled), StructureCheck(assembled, ledgers[0], folder)
    pace = expected_pace(assembled, work)
    if worth_a_trial(assembled, pace, run.steps if until is None else until):
        _say("tries    a few steps on made-up tokens, to estimate how long the run takes")
        pace = tried_pace(assembled)
    with assembled.layout:
        told = {"compiled": check, "first_collective": _first(ledgers[0])}
        outcome = train(assembled, feed, folder, until=until, work=work, pace=pace, **told)
    if is_first() and outcome.token_seconds is not None:
        last = assembled.at(outcome.step - 1)
        keep_pace(last, dataclasses.replace(work, **costs(last)), outcome.token_seconds)
    if is_first() and outcome.programs:
        found["structure"] = check.found
        _write_compiled(outcome.programs[-1], found, folder, assembled, unsaid=ledgers[0].auto)
    return outcome.exit_code


def _by_types(assembled: "Assembled") -> tuple[dict[int, "Ledger"], dict[int, dict[str, int]]]:
    """The ledger and the memory of a step of each sequence length, by the step that it begins with.

    Raises:
        UserError: a step that cannot run here, or not as the run says.
    """
    from trellis.inspect.ledger import ledger_of
    from trellis.inspect.memory import memory_of
    from trellis.run.lengths import as_of_phase
    from trellis.train.checks import check_guard, check_marks, check_step
    from trellis.train.summary import step_program

    programs, memory = {}, {}
    for step, made in assembled.phases().items():
        with as_of_phase(step):
            programs[step] = step_program(made)
            check_marks(assembled.run, programs[step])
            largest = step_program(made, made.largest) if made.largest else programs[step]
            memory[step] = memory_of(largest).per_kind()
            check_step(memory[step], made)
            check_guard(memory[step], made)
    return {step: ledger_of(program) for step, program in programs.items()}, memory


def _feed(assembled: "Assembled", corpus: "Corpus", text: dict[str, Any]) -> "Feed":
    """What the loop reads: batches, the validation set, and samples of text; and how it knows the text again."""
    from trellis.data import Loader
    from trellis.data.loader import sharded
    from trellis.data.store.identity import check_identities
    from trellis.models.generate import Sampling, sample
    from trellis.train.corpus import open_corpus
    from trellis.train.evaluation import Evaluator
    from trellis.train.loop import Feed
    from trellis.train.restoring import model_in_use
    from trellis.train.state import TrainState

    def sampled(state: TrainState) -> str:
        how = Sampling(temperature=0.8, top_k=50)
        return sample(model_in_use(assembled, state), corpus.tokenizer, "", new_tokens=_SAMPLE_TOKENS, sampling=how)[0]

    sharding = assembled.batch_sharding
    evaluators = {
        step: Evaluator(open_corpus(made.run).validation if step else corpus.validation, made.options, sharding)
        for step, made in assembled.phases().items()
    }

    def evaluated(state: TrainState, made: int) -> dict[str, jax.Array]:
        return [evaluate for start, evaluate in evaluators.items() if start < made][-1](state)

    return Feed(
        batches=lambda start: Loader(corpus.batches, sharding, start_step=start),
        tokens=None if corpus.all_count else corpus.batches.num_tokens,
        again=lambda step: sharded(corpus.batches, step, sharding),
        evaluate=evaluated if corpus.validation else None,
        validation_batches=sum(chosen.num_batches for chosen in corpus.validation.values()),
        sample=None if corpus.tokenizer is None else sampled,
        text=text,
        check_text=lambda before: check_identities(before, text, {n: s.url for n, s in corpus.all_stores.items()}),
    )


def _write_compiled(compiled, found: dict[str, Any], folder: Path, assembled: "Assembled", unsaid: bool) -> None:
    """Writes what the compiled step says of itself beside what its types said.

    Args:
        unsaid: whether the types do not say what moves; the compiled program does.
    """
    from trellis.inspect import collectives, compiled_memory
    from trellis.inspect.graph import step_svg
    from trellis.train.summary import ledger_sums

    found["compiled"] = dataclasses.asdict(compiled_memory(compiled))
    if unsaid:
        ledger = collectives(compiled, assembled.layout.mesh)
        _write_ledger(folder, {0: ledger}, assembled)
        found["ledger"] = ledger_sums(ledger)
    write_sections(folder, found)
    if assembled.run.profile is not None:
        (folder / "profile").mkdir(exist_ok=True)
        write_whole(folder / "profile" / "step.svg", step_svg(compiled.as_text()))


def _write_ledger(folder: Path, ledgers: Mapping[int, "Ledger"], assembled: "Assembled") -> None:
    """Writes `ledger.txt`: what moves in a step of each sequence length, and then what moves to compare copies."""
    from trellis.train.guard import Guard

    titles = {step: f"from step {step + 1} on\n\n" if len(ledgers) > 1 else "" for step in ledgers}
    text = "\n".join(f"{titles[step]}{ledger}\n" for step, ledger in ledgers.items())
    every = assembled.run.guard.every
    if every is not None:
        text += f"\nguard: after every {every} steps and before each checkpoint\n{Guard(assembled).ledger()}\n"
    write_whole(folder / "ledger.txt", text)


def _first(ledger: "Ledger") -> str | None:
    """Words for the first communication of a step."""
    row = next(iter(ledger), None)
    return None if row is None else f"the {row.kind} along {row.axis} of {row.dtype}[{row.what}] at {row.source}"


def write_sections(folder: Path, found: dict[str, Any]) -> None:
    """Keeps what the page of a run shows besides its metrics, as `about.json`."""
    write_json(folder / "about.json", found)


COMMAND = Command(
    name="train",
    summary="train a recipe or a YAML file; on an existing run folder, resume",
    description="Trains a run. The same command, or `trellis train RUN`, resumes what is in a run's folder.",
    arguments=arguments,
    execute=execute,
    recipe="starter",
)
