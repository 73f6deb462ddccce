"""`trellis import`: a Hugging Face folder to a run."""

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

from trellis.commands.command import Command, some_path
from trellis.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis import`."""
    parser.add_argument("source", metavar="DIR", help="the folder, as `save_pretrained` writes it")
    parser.add_argument("--to", type=some_path, metavar="RUN", help="the run's folder (default: runs/NAME-DATE)")


def execute(args: argparse.Namespace) -> int:
    """`trellis import`."""
    import jax

    from trellis.checkpoints.checkpoints import Checkpoints
    from trellis.hub import Folder, copy_tokenizer
    from trellis.models import FAMILIES
    from trellis.run.data import EmbeddedSource
    from trellis.run.folder import IMPORTED, TOKENIZER, alone, claim, new_folder
    from trellis.run.on_mesh import as_the_model_is
    from trellis.train.assemble import assemble
    from trellis.train.devices import find_devices

    source = Folder(args.source, FAMILIES)
    whole = (source.path / "tokenizer.json").is_file()
    _check_options(args, whole)
    tokenizer = _tokenizer_in(source.path) if whole else None
    name = args.run.name if "name" in args.given else source.path.resolve().name
    run = dataclasses.replace(args.run, name=name, model=source.config)
    folder = Path(args.to) if args.to else new_folder(run)
    theirs = folder / TOKENIZER
    unknown = run.data.tokenizer is None and isinstance(run.data.source, EmbeddedSource)
    if whole or unknown:  # the recipe's text has another tokenizer: a model without one of its own has none
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=str(theirs.resolve())))
    devices = find_devices(run)
    _check_free(folder)
    with as_the_model_is():
        assembled = assemble(run, devices)
    state = _first_state(assembled, source)
    with alone(folder):
        _check_free(folder)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of an import that was cut off
        (folder / "run.yaml").unlink(missing_ok=True)
        shutil.copy(source.path / "config.json", folder / IMPORTED)  # first: an import that is cut off is no new run
        copy_tokenizer(source.path, theirs)
        claim(folder, run)
        largest = max(leaf.nbytes for leaf in jax.tree.leaves(state.model))
        with Checkpoints(folder / "checkpoints", copy=(folder / "run.yaml",), host_bytes=largest) as saved:
            saved.save(0, state, data={"tokens": 0})
    count = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    print(f"{source.hub['model_type']} of {count:,} parameters\nfolder   {folder}")
    if dropped := source.family.dropped_in(source.hub):
        shares = ", ".join(f"{name} {share:g}" for name, share in dropped.items())
        print(f"training here drops nothing of what these say, and an export says it again: {shares}")
    if source.left_out:
        print(f"left out {source.left_out} tensors of layers that predict tokens after the next one")
    if unknown and not whole:
        print(f"no tokenizer: there is no tokenizer.json; put the model's own in {theirs}")
    size = 0 if tokenizer is None else tokenizer.vocab_size
    if size > run.model.vocab:
        print(f"the tokenizer has {size:,} token ids, and the model {run.model.vocab:,}: text with more is refused")
    if tokenizer is not None and tokenizer.around:
        names = " and ".join(tokenizer.around)
        print(f"texts here are without the {names} that `transformers` puts around them: write it in a prompt")
    ids = getattr(run.data.source, "vocab", 0)
    if ids > run.model.vocab:
        print(f"no text: that of the recipe has {ids:,} token ids, and the model {run.model.vocab:,}")
    elif ids and tokenizer is not None and ids != size:
        print(f"no text: that of the recipe has {ids:,} token ids, and the model's tokenizer {size:,}")
    else:
        return 0
    print("to train or evaluate it, import with --data.source store --data.source.path STORE")
    return 0


def _tokenizer_in(folder: Path) -> Any:
    """A folder's tokenizer; None if it has no token that ends a document, which only texts need."""
    from trellis.data import load_tokenizer
    from trellis.data.tokenizer import NO_END

    try:
        return load_tokenizer(str(folder))
    except UserError as error:
        if error.rule != NO_END:
            raise
        return None


def _check_free(folder: Path) -> None:
    """Refuses a folder that holds a run, but for an import that was cut off."""
    from trellis.run.folder import has_begun
    from trellis.train.anew import is_cut_off_import

    cut_off = is_cut_off_import(folder) and not (folder / "metrics.jsonl").exists()
    if ((folder / "run.yaml").exists() or has_begun(folder)) and not cut_off:
        fix = "use another --to, or remove what is there"
        raise UserError(
            "The folder of an import cannot already contain a run.", seen="a run", where=str(folder), fix=fix
        )


def _check_options(args: argparse.Namespace, whole: bool) -> None:
    """Refuses options for what the folder determines: the model, and its tokenizer if it has one."""
    fix = "leave it out"
    for name in sorted(name for name in args.given if name.startswith("model.")):
        rule = "The model of an import is that of its folder and cannot be changed."
        raise UserError(rule, seen=f"{args.source}: it has no effect", where=f"--{name}", fix=fix)
    if whole and (other := args.run.data.tokenizer) is not None:
        rule = "An imported model must use the tokenizer of its folder."
        fix = fix if "data.tokenizer" in args.given else "use --data.tokenizer null"  # the recipe names it
        raise UserError(rule, seen=f"{other}, beside {args.source}/tokenizer.json", where="data.tokenizer", fix=fix)


def _first_state(assembled: Any, source: Any) -> Any:
    """A run's state at step 0 with the folder's parameters."""
    import jax
    import numpy as np

    from trellis.train.state import TrainState

    abstract = assembled.abstract
    model = source.load(abstract.model)
    with assembled.layout:
        shardings = jax.tree.map(lambda x: x.sharding, abstract.optimizer)
        optimizer = jax.jit(assembled.optimizer.init, out_shardings=shardings)(model)
        step = jax.device_put(np.int32(0), abstract.step.sharding)
        key = jax.device_put(jax.random.key(assembled.run.seed), abstract.key.sharding)
        average = None if abstract.average is None else jax.tree.map(lambda x: x.copy(), model)
        blank = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
        scales = jax.tree.map(blank, abstract.scales)
    return TrainState(step, model, optimizer, average, key, scales)


COMMAND = Command(
    name="import",
    summary="import a Hugging Face folder as a run",
    description=(
        "Makes a run from a Hugging Face folder: its model and tokenizer, at step 0 of a recipe (default: starter). "
        "`trellis generate`, `evaluate` and `train` continue from there. To train it further, name data that its own "
        "tokenizer made: --data.source store --data.source.path STORE."
    ),
    arguments=arguments,
    execute=execute,
    recipe="starter",
)
