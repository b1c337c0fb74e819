"""params.yaml <-> frozen dataclasses, one per section. The only module that knows OmegaConf.

params.yaml has two halves. The upper one says *what* is learned: a change there trains again. The lower
one says *how* it runs: a change there never does. Each section is declared here once, in `Params`, as one
or the other; dvc.yaml's `params:`, and whatever else must know, follow from that declaration.

There are no defaults here: params.yaml holds every key, so that one file tells the whole story.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.errors import UserError

PRECISIONS = ("fp32", "amp_fp16", "amp_bf16")
STATE_BITS = (32, 8, 4)
SAVERS = ("uncached_casts", "checkpointing_half", "checkpointing", "offload", "optimizer_on_host")
NOT_COMPILED = ("checkpointing_half", "checkpointing", "offload")
NEVER_EMPTY = (
    "model.name",
    "model.weights",
    "checkpoint.resume",
    "checkpoint.folder",
    "tracking.experiment",
    "tracking.run_name",
)
OTHER_NAMES = {  # what other tools call our values
    "16-mixed": "amp_fp16",
    "fp16-mixed": "amp_fp16",
    "fp16": "amp_fp16",
    "float16": "amp_fp16",
    "16": "amp_fp16",
    "amp": "amp_fp16",
    "bf16-mixed": "amp_bf16",
    "bf16": "amp_bf16",
    "bfloat16": "amp_bf16",
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
    "gpu": "cuda",
    "adam": "adamw",
    "null": "none",
    "None": "none",
}


def key(
    *,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    word: str | None = None,
    reference: bool = False,
    besides: str = "",
) -> Any:
    """A key of params.yaml and the values it allows.

    `choices` are the allowed words, `word` the one word allowed besides numbers, `reference` allows
    `package.module:function` besides the choices; the bounds are of numbers. `besides` says what else is
    allowed, which `_contradictions` checks.
    """
    bounds = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    rules = {
        "choices": choices,
        "word": word,
        "reference": reference,
        "besides": besides,
        "bounds": {name: value for name, value in bounds.items() if value is not None},
    }
    return field(metadata=rules)


def what(**rules: Any) -> Any:
    """Declares a section (or a key at the top) whose change trains again."""
    declared = key(**rules)
    return field(metadata={**declared.metadata, "half": "what"})


def how() -> Any:
    """Declares a section whose change never trains again."""
    return field(metadata={"half": "how"})


@dataclass(frozen=True)
class Data:
    """Which images are used and how they are split."""

    source: str = key(choices=("digits",), reference=True)
    image_size: Union[int, str] = key(word="auto", at_least=1)  # noqa: UP007  pixels, square
    validation_fraction: float = key(above=0, below=1)
    test_fraction: float = key(above=0, below=1)


@dataclass(frozen=True)
class Model:
    """What is trained; `args` go to the model's function, `weights` are what it starts from."""

    name: str
    args: dict[str, Any]
    weights: str
    freeze: list[str] = key(besides="a list of name patterns, [] for none")


@dataclass(frozen=True)
class Loss:
    name: str = key(choices=("cross_entropy",), reference=True)
    label_smoothing: float = key(at_least=0, below=1)
    class_weights: Any = key(choices=("none", "balanced"), besides="a list of numbers, one a class")


@dataclass(frozen=True)
class Batch:
    """Samples of one optimizer step, and of one forward/backward."""

    effective_batch_size: int = key(at_least=1)
    micro_batch_size: Union[int, str] = key(word="auto", at_least=1)  # noqa: UP007

    @property
    def planned(self) -> int:
        """The micro-batch as a number: what the file says, or what train's plan put in place of auto."""
        assert isinstance(self.micro_batch_size, int), "auto: only train's plan makes a number of it"
        return self.micro_batch_size


@dataclass(frozen=True)
class Scaler:
    """torch.amp.GradScaler's settings, and the two limits past which a run ends."""

    init_scale: float = key(above=0)
    growth_factor: float = key(above=1)
    backoff_factor: float = key(above=0, below=1)
    growth_interval: int = key(at_least=1)  # clean optimizer steps
    min_scale: float = key(above=0)
    max_consecutive_skips: int = key(at_least=1)


@dataclass(frozen=True)
class Optimizer:
    name: str = key(choices=("adamw", "sgd"))
    lr: float = key(above=0)
    momentum: float = key(at_least=0, below=1)
    weight_decay: float = key(at_least=0)
    max_grad_norm: float = key(at_least=0)  # 0 is without
    state_bits: int = key(at_least=4, at_most=32)  # of a moment: STATE_BITS


@dataclass(frozen=True)
class Schedule:
    name: str = key(choices=("constant", "linear", "cosine", "one_cycle"))
    warmup_fraction: float = key(at_least=0, at_most=1)


@dataclass(frozen=True)
class Train:
    epochs: int = key(at_least=1)
    ema_decay: float = key(at_least=0, below=1)  # 0 is without
    batchnorm_per_window: bool = key()
    save: str = key(choices=("best", "last"))
    deterministic: bool = key()


@dataclass(frozen=True)
class Memory:
    """What a training may take of its device, and by which means it is made to fit."""

    budget_gib: Union[float, str] = key(word="auto", above=0)  # noqa: UP007
    savers: Any = key(choices=("auto",), besides=f"a list of {' '.join(SAVERS)}, [] for none")
    blocks: Any = key(choices=("auto",), besides='a list of name patterns: ["encoder.layers.*"]')

    @property
    def chosen(self) -> list[str]:
        """The savers as a list: what the file says, or what train's plan put in place of auto."""
        assert isinstance(self.savers, list), "auto: only train's plan makes a list of it"
        return self.savers


@dataclass(frozen=True)
class Execution:
    device: str = key(choices=("auto", "cpu", "cuda"))
    workers: Union[int, str] = key(word="auto", at_least=0)  # noqa: UP007  loader processes
    compile: bool = key()
    channels_last: bool = key()


@dataclass(frozen=True)
class Checkpoint:
    """What survives a crash, how often it is written and how long it is kept."""

    resume: str
    every_minutes: float = key(above=0)
    every_steps: Union[int, str] = key(word="none", at_least=1)  # noqa: UP007
    keep: int = key(at_least=1)
    keep_finished: int = key(at_least=0)
    folder: str = key()


@dataclass(frozen=True)
class Tracking:
    experiment: str
    run_name: str
    log_every_steps: int = key(at_least=1)
    log_model: bool = key()


@dataclass(frozen=True)
class Params:
    """All of params.yaml. `what` and `how` are the two halves that the file's banners name."""

    seed: int = what(at_least=0, at_most=2**32 - 1)
    data: Data = what()
    model: Model = what()
    loss: Loss = what()
    batch: Batch = what()
    precision: str = what(choices=PRECISIONS)
    scaler: Scaler = what()
    optimizer: Optimizer = what()
    schedule: Schedule = what()
    train: Train = what()
    memory: Memory = how()
    execution: Execution = how()
    checkpoint: Checkpoint = how()
    tracking: Tracking = how()


def sections(half: str) -> list[str]:
    """The names at the top of params.yaml that belong to `half`: "what" or "how"."""
    return [entry.name for entry in fields(Params) if entry.metadata["half"] == half]


def load(path: Path = Path("params.yaml")) -> Params:
    """Reads and validates the file; raises one UserError that lists every problem in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return parse(text, str(path))


def parse(text: str, name: str = "params.yaml") -> Params:
    """`load`, from the file's text. `name` stands in the message."""
    values, problems = _read(text)
    config = _writable(Params)
    for section in (entry for entry in fields(Params) if is_dataclass(entry.type)):
        config[section.name] = _writable(section.type)
    known = _declared()
    for dotted, value in values.items():
        problems += _assign(config, known, dotted, value)
    mentioned = " ".join(problems)  # a misspelt key and its right name are one problem, not two
    problems += [
        f"{dotted}: missing; add it to {name}"
        for dotted in known
        if values and dotted not in values and f"did you mean {dotted}?" not in mentioned
    ]
    if not problems:
        params: Params = OmegaConf.to_object(config)  # type: ignore[assignment]
        problems = list(_contradictions(params))
        if not problems:
            return params
    lines = "\n".join(f"  {problem}" for problem in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise UserError(f"{name}: {count}\n{lines}")


def overridden(text: str, overrides: Iterable[str]) -> str:
    """The file's text with key=value put in, dotted keys as everywhere. Raises UserError for another form."""
    tree = yaml.safe_load(text)
    for override in overrides:
        dotted, equals, value = override.partition("=")
        *sections, name = dotted.split(".")
        section = tree
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if not equals or not isinstance(section, dict):
            raise UserError(
                f"{override!r} is not key=value with a key of params.yaml, as in optimizer.lr=1e-3"
            )
        section[name] = yaml.safe_load(value)
    return yaml.safe_dump(tree, sort_keys=False)


def flatten(params: Params, half: str | None = None) -> dict[str, Any]:
    """Dotted keys and plain values, of one half or of both: {"optimizer.lr": 0.001, ...}."""
    flat: dict[str, Any] = {}
    for section in fields(params):
        if half not in (None, section.metadata["half"]):
            continue
        value = getattr(params, section.name)
        if is_dataclass(value):
            flat |= {f"{section.name}.{entry.name}": getattr(value, entry.name) for entry in fields(value)}
        else:
            flat[section.name] = value
    return flat


def to_yaml(params: Params) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(params))


def raw_values(text: str) -> dict[str, Any]:
    """Dotted keys of a params.yaml that may be an older one: read, not validated."""
    return _read(text)[0]


def _writable(schema: Any) -> DictConfig:
    """A typed, empty config; OmegaConf locks what comes from a frozen dataclass, here it is filled first."""
    config: DictConfig = OmegaConf.structured(schema)
    OmegaConf.set_readonly(config, False)
    return config


def _declared() -> dict[str, Field[Any]]:
    """Every dotted key and its declaration."""
    known: dict[str, Field[Any]] = {}
    for section in fields(Params):
        if is_dataclass(section.type):
            known |= {f"{section.name}.{entry.name}": entry for entry in fields(section.type)}
        else:
            known[section.name] = section
    return known


def _read(text: str) -> tuple[dict[str, Any], list[str]]:
    """The file's values under dotted keys, two levels deep, and what cannot be read from it."""
    try:
        problems = list(_ambiguous(yaml.compose(text, Loader=yaml.SafeLoader)))
        config = OmegaConf.create(text)
        tree = OmegaConf.to_container(config, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        return {}, [f"not readable as YAML: {' '.join(str(error).split())}"]
    if not isinstance(tree, dict) or not tree:
        return {}, ["expected `key: value` lines"]
    flat: dict[str, Any] = {}
    for name, value in ((str(name), value) for name, value in tree.items()):
        declared = next((entry for entry in fields(Params) if entry.name == name), None)
        is_section = declared is not None and is_dataclass(declared.type)
        if isinstance(value, dict) and (is_section or declared is None):
            flat |= {f"{name}.{entry}": content for entry, content in value.items()}
        elif is_section:
            problems.append(f"{name}: {value!r} stands where a section with keys is expected")
        else:
            flat[name] = value
    return flat, problems


AMBIGUOUS = {  # plain words that YAML readers take differently
    re.compile(r"(?i)(y|n|yes|no|on|off)"): "write true or false, or quote it",
    re.compile(r"[-+]?0[0-9_]+"): "write it without the leading zero, or quote it",
    re.compile(r"[-+]?[0-9]+(:[0-9]+)+(\.[0-9]*)?"): "quote it",
    re.compile(r"[-+]?[0-9]+_[0-9_]*"): "write it without the underscore",
}


def _ambiguous(node: yaml.Node | None, dotted: str = "") -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _ambiguous(value, f"{dotted}.{name.value}" if dotted else str(name.value))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _ambiguous(value, dotted)
    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        for pattern, remedy in AMBIGUOUS.items():
            if pattern.fullmatch(node.value):
                yield f"{dotted}: {node.value} means different things to YAML readers; {remedy}"


def _assign(config: Any, known: dict[str, Field[Any]], dotted: str, value: Any) -> list[str]:
    """Puts the value into the typed config; returns what is wrong with it."""
    if dotted not in known:
        return [f"{dotted}: unknown{_suggestion(dotted, known)}"]
    declared = known[dotted]
    if value is None:
        return [f"{dotted}: is empty; {_allowed(declared)}"]
    mistyped = [f"{dotted}: {value!r} is not possible; {_allowed(declared)}"]
    if isinstance(value, bool) != (declared.type is bool):
        return mistyped
    if type(value) is int and float in get_args(declared.type):  # `8` for a key that takes 7.4
        value = float(value)
    try:
        OmegaConf.update(config, dotted, value, merge=False)
    except OmegaConfBaseException:
        hint = OTHER_NAMES.get(str(value))
        return [f"{dotted} {value}: here {hint}"] if hint in _choices(declared) else mistyped
    return _out_of_range(dotted, OmegaConf.select(config, dotted), declared)


def _out_of_range(dotted: str, value: Any, declared: Field[Any]) -> list[str]:
    refused = [f"{dotted}: {value!r} is not possible; {_allowed(declared)}"]
    if isinstance(value, bool):
        return []
    if isinstance(value, int | float):
        tests = {
            "at_least": lambda bound: value >= bound,
            "at_most": lambda bound: value <= bound,
            "above": lambda bound: value > bound,
            "below": lambda bound: value < bound,
        }
        bounds = declared.metadata.get("bounds", {})
        fine = math.isfinite(value) and all(tests[name](bound) for name, bound in bounds.items())
        return [] if fine else refused
    choices = _choices(declared)
    if not isinstance(value, str) or not choices or value in choices:
        return []
    if declared.metadata.get("reference") and ":" in value:
        return [] if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value) else refused
    if OTHER_NAMES.get(value) in choices:
        return [f"{dotted} {value}: here {OTHER_NAMES[value]}"]
    close = difflib.get_close_matches(value, choices, 1)
    return [f"{refused[0]}; did you mean {close[0]}?"] if close else refused


def _choices(declared: Field[Any]) -> tuple[str, ...]:
    if word := declared.metadata.get("word"):
        return (word,)
    return declared.metadata.get("choices") or ()


def _allowed(declared: Field[Any]) -> str:
    """What a key allows, in words."""
    if choices := declared.metadata.get("choices"):
        besides = "package.module:function" if declared.metadata.get("reference") else None
        besides = declared.metadata["besides"] or besides
        return f"allowed: {' '.join(choices)}{f' or {besides}' if besides else ''}"
    if besides := declared.metadata.get("besides"):
        return f"allowed: {besides}"
    kinds: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    number = "a number" if float in get_args(declared.type) else "a whole number"
    default = number if declared.metadata.get("word") else "a map, {} when there is nothing to say"
    kind = kinds.get(declared.type, default)
    signs = {"at_least": ">=", "at_most": "<=", "above": ">", "below": "<"}
    bounds = declared.metadata.get("bounds", {})
    limits = " and ".join(f"{signs[name]} {bound}" for name, bound in bounds.items())
    word = f", or {declared.metadata['word']}" if declared.metadata.get("word") else ""
    return f"allowed: {kind}{' ' + limits if limits else ''}{word}"


def _suggestion(dotted: str, known: Iterable[str]) -> str:
    leaf = dotted.rsplit(".", 1)[-1]
    same_leaf = [name for name in known if name.rsplit(".", 1)[-1] == leaf]
    close = difflib.get_close_matches(dotted, known, 1) or same_leaf
    if not close:
        leaves = {name.rsplit(".", 1)[-1]: name for name in known}
        close = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, 1)]
    return f"; did you mean {close[0]}?" if close else "; params.yaml in the repository lists every key"


def _contradictions(params: Params) -> Iterator[str]:
    """What is wrong between keys that are each fine alone."""
    batch, data, scaler = params.batch, params.data, params.scaler
    if batch.micro_batch_size != "auto" and batch.planned > batch.effective_batch_size:
        yield (
            f"batch.micro_batch_size: {batch.micro_batch_size} is more than batch.effective_batch_size, "
            f"{batch.effective_batch_size}; a micro-batch is a part of the effective batch"
        )
    if params.optimizer.state_bits not in STATE_BITS:
        yield f"optimizer.state_bits: {params.optimizer.state_bits} is not possible; allowed: 32 8 4"
    elif params.optimizer.state_bits != 32 and params.optimizer.name != "adamw":
        yield f"optimizer.state_bits: {params.optimizer.state_bits} is of adamw alone; 32 for others"
    if data.validation_fraction + data.test_fraction >= 1:
        yield (
            "data.validation_fraction + data.test_fraction: "
            f"{data.validation_fraction + data.test_fraction:g} leaves nothing to train on; below 1"
        )
    if scaler.min_scale > scaler.init_scale:
        yield f"scaler.min_scale: {scaler.min_scale:g} is more than scaler.init_scale, {scaler.init_scale:g}"
    weights = params.loss.class_weights
    if not isinstance(weights, str) and not _are_weights(weights):
        yield (
            f"loss.class_weights: {weights!r} is not possible; allowed: none balanced or a list of numbers, "
            "one a class, none below 0 and not all of them 0"
        )
    savers, blocks = params.memory.savers, params.memory.blocks
    if savers != "auto" and not (_are_words(savers) and set(savers) <= set(SAVERS)):
        yield f"memory.savers: {savers!r} is not possible; allowed: auto or a list of {' '.join(SAVERS)}"
    elif {"checkpointing", "checkpointing_half"} <= set(savers):
        yield "memory.savers: checkpointing and checkpointing_half are two ways of one: take one of them"
    in_the_way = [saver for saver in savers if saver in NOT_COMPILED] if savers != "auto" else []
    if params.execution.compile and in_the_way:
        yield (
            f"execution.compile: a compiled model cannot do with memory.savers {' '.join(in_the_way)}: take "
            "one or the other"
        )
    if blocks != "auto" and not (_are_words(blocks) and blocks):
        yield f"memory.blocks: {blocks!r} is not possible; allowed: auto or a list of name patterns"
    for dotted in NEVER_EMPTY:
        section, name = dotted.split(".")
        if not getattr(getattr(params, section), name).strip():
            yield f"{dotted}: is empty"


def _are_words(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _are_weights(values: Any) -> bool:
    return (
        isinstance(values, list)
        and all(type(value) in (int, float) and 0 <= value < math.inf for value in values)
        and any(values)
    )
