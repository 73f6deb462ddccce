"""A family of models at Hugging Face: its configuration there, and where each parameter is."""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trellis.errors import UserError
from trellis.hub.keys import Key

# What every model here does, and `transformers` may be told not to do.
_ALWAYS: Mapping[str, Any] = {"is_causal": True, "per_layer_config": None}
# Names that `transformers` has for the functions of which we write one name.
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
_ACTIVATIONS = {"silu": ("swish",), "gelu_new": _GELU, "gelu_pytorch_tanh": _GELU}
# Fields that count layers, of which some families list the kinds; and far more than any model has.
_LAYERS = ("num_hidden_layers", "n_layer", "num_nextn_predict_layers")
_MOST_LAYERS = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        config: our configuration's class.
        model_type: what `config.json` calls it.
        architecture: the class in `transformers`.
        keys: where each parameter is, by its path in the model; or a function that gives this for a configuration.
        to_hub: the fields of `config.json`, from a configuration and the longest sequence.
        from_hub: our fields, from those of `config.json`.
        fixed: fields of `config.json` that must have these values, since our model has no others.
        dropped: fields of `config.json` that say what share of something training drops, which our model keeps whole;
            with what `transformers` takes for each if it is left out.
        defaults: what `transformers` takes for fields that `config.json` leaves out, if `from_hub` takes another value.
        aliases: other names that `transformers` takes for fields of `config.json`, and those fields.
        zeros: tensors that a folder always has; zeros if our model has no such parameter.
        elsewhere: for folders that hold a tensor elsewhere: from its key to another key, and what to take there.
    """

    config: type
    model_type: str
    architecture: str
    keys: Mapping[str, Key] | Callable[[Any], Mapping[str, Key]]
    to_hub: Callable[[Any, int], dict]
    from_hub: Callable[[Mapping], dict]
    fixed: Mapping[str, Any]
    dropped: Mapping[str, float] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    zeros: Sequence[Key] = ()
    elsewhere: Callable[[str], tuple[str, Callable]] | None = None

    def keys_of(self, config: Any) -> Mapping[str, Key]:
        """Where each parameter of a model of this configuration is, by its path."""
        return self.keys if isinstance(self.keys, Mapping) else self.keys(config)

    def to_config_json(self, config: Any, *, positions: int, dtype: str) -> dict:
        """The contents of `config.json`.

        Args:
            config: our configuration.
            positions: the longest sequence, if our configuration does not say.
            dtype: of the weights.
        """
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "torch_dtype": dtype,
            **self.to_hub(config, positions),
            **self.fixed,
        }

    def dropped_in(self, hub: Mapping) -> dict[str, float]:
        """The shares that training elsewhere drops and training here keeps, by their fields in `config.json`."""
        given = {name: hub.get(name, default) or 0.0 for name, default in self.dropped.items()}
        return {name: share for name, share in given.items() if share}

    def from_config_json(self, hub: Mapping, where: str) -> Any:
        """Our configuration, from the contents of `config.json`.

        Args:
            hub: the contents.
            where: the file, for messages.

        Raises:
            UserError: something about this model is not known here, or a field is absent or of another type.
        """
        if (quantized := hub.get("quantization_config")) is not None:
            method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
            raise UserError(
                "Imported weights must be stored in bfloat16, float16, float32 or float64.",
                seen=f"quantization_config: {method}",
                where=where,
                fix="use a folder of the same model in bfloat16, or write one: "
                "AutoModelForCausalLM.from_pretrained(..., quantization_config=...).save_pretrained(...), "
                "with Mxfp4Config(dequantize=True), or what transformers has for this method",
            )
        for field, value in {**_ALWAYS, **self.fixed}.items():
            others = _ACTIVATIONS.get(value, ()) if isinstance(value, str) else (None,) * (value == [])
            if hub.get(field, value) not in (value, *others):
                raise UserError(
                    f"A {self.model_type} must have {field} {value} here.",
                    seen=f"{field}: {hub[field]}",
                    where=where,
                    fix=f"use a model with {field} {value}",
                )
        for alias, field in self.aliases.items():
            if alias in hub and hub.get(field, hub[alias]) != hub[alias]:
                raise UserError(
                    f"In a {self.model_type} {alias} and {field} are names of one field and must have one value.",
                    seen=f"{alias}: {hub[alias]}, {field}: {hub[field]}",
                    where=where,
                    fix="remove the one that does not hold",
                )
        hub = {self.aliases.get(name, name): value for name, value in hub.items()}
        fix = "use the folder's config.json as `save_pretrained` writes it"
        for field in _LAYERS:
            if isinstance(count := hub.get(field), int) and count > _MOST_LAYERS:
                rule = f"The configuration of a {self.model_type} must have at most {_MOST_LAYERS:,} layers."
                raise UserError(rule, seen=f"{field}: {count}", where=where, fix=fix)
        rule = f"The configuration of a {self.model_type} must have values of the types that transformers writes."
        for field, share in self.dropped_in(hub).items():
            if type(share) not in (int, float) or not 0 <= share <= 1:
                raise UserError(rule, seen=f"{field}: {share!r}, which is no share from 0 to 1", where=where, fix=fix)
        try:
            fields = self.from_hub({**self.defaults, **hub})
        except KeyError as error:
            complete = f"The configuration of a {self.model_type} must be complete."
            raise UserError(complete, seen=f"no {error.args[0]}", where=where, fix=fix) from None
        except (TypeError, ValueError, ArithmeticError) as error:  # a field was computed from what is not a number
            raise UserError(rule, seen=str(error), where=where, fix=fix) from None
        except UserError as error:  # a family's function sees the fields, not the file
            raise type(error)(error.rule, seen=error.seen, where=where, fix=error.fix) from None
        if wrong := _mistyped(self.config, fields):
            raise UserError(rule, seen=wrong, where=where, fix=fix)
        try:
            return self.config(**fields)
        except UserError as error:  # its fix is for one whose configuration is not that of a folder
            fix = "use another model, since an import has its folder's configuration"
            raise type(error)(error.rule, seen=error.seen, where=f"{where}, as {error.where}", fix=fix) from None


def _mistyped(config: type, fields: Mapping[str, Any]) -> str | None:
    """The first field with a value that is not of the type that the class declares, or None."""
    hints = typing.get_type_hints(config)
    for name, value in fields.items():
        if dataclasses.is_dataclass(value):
            inner = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            if wrong := _mistyped(type(value), inner):
                return wrong
        members = typing.get_args(hints[name]) or (hints[name],)
        kinds = [kind for kind in members if isinstance(kind, type)]  # a literal's members are values
        if kinds and type(value) not in (*kinds, *([int] if float in kinds else [])):
            return f"{name}: {value!r}, which is no {' or '.join(kind.__name__ for kind in kinds)}"
    return None


def family_in(families: Mapping[str, Family], hub: Mapping, where: str) -> Family:
    """The family that `config.json` names.

    Args:
        families: those that are known.
        hub: the contents of `config.json`.
        where: the file, for messages.

    Raises:
        UserError: it is not known here.
    """
    kind = hub.get("model_type")
    known = {family.model_type: family for family in families.values()}
    family = known.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(
            "An imported model must be of a family that Trellis knows.",
            seen=f"model_type: {kind}",
            where=where,
            fix=f"use one of: {', '.join(known)}",
        )
    return family
