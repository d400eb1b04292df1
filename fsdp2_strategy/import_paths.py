"""Import public names when they are first used, and redirect old module paths to the new ones.

Input: the public names that a package lists. Output: ``__getattr__`` and ``__dir__`` of the package (PEP 562). With
them, importing the package does not import torch or pyarrow. `MOVED` lists the old module paths; each works for one
release, with a `DeprecationWarning`.
"""

from __future__ import annotations

import ast
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "fsdp2_strategy"

MOVED = {
    "accelerate_file": "config.accelerate",
    "accelerate_keys": "config.accelerate_keys",
    "blocks": "sharding.blocks",
    "checkpoint.background": "checkpoint.background_save",
    "checkpoint.data": "checkpoint.data_position",
    "checkpoint.foreign": "checkpoint.foreign_formats",
    "checkpoint.frozen": "checkpoint.trainable_only",
    "checkpoint.gathered": "checkpoint.gathered_policy",
    "checkpoint.lerobot": "lerobot.checkpoint_layout",
    "checkpoint.opened": "checkpoint.reader",
    "checkpoint.parts": "checkpoint.components",
    "checkpoint.places": "checkpoint.paths",
    "checkpoint.rng": "checkpoint.random_state",
    "checkpoint.state": "checkpoint.training_state",
    "collect": "distributed.collectives",
    "damage": "model.failed_loads",
    "data.ahead": "data.prefetch",
    "data.bijection": "data.permutation",
    "divergence": "sharding.rank_divergence",
    "ema": "optim.ema",
    "fingerprint": "model.fingerprint",
    "garbage": "checkpoint.gc_pause",
    "hf.adapter_files": "hf.peft.files",
    "hf.adapters": "hf.peft.merge",
    "hf.arrange": "hf.save_plan",
    "hf.checksum": "hf.checksums",
    "hf.container": "hf.safetensors_format",
    "hf.copy": "hf.copy_folder",
    "hf.folder": "hf.weights_folder",
    "hf.initialize": "hf.meta.initialize",
    "hf.match": "hf.load_plan",
    "hf.read": "hf.verified_read",
    "hf.region": "hf.regions",
    "hf.share": "hf.replicated_reads",
    "hf.tape": "hf.meta.recorded_init",
    "hf.twin": "hf.skeleton",
    "ignored": "sharding.ignored",
    "masters": "optim.masters",
    "memory": "distributed.memory",
    "mesh": "distributed.mesh",
    "modality": "sharding.vision_encoders",
    "names": "model.names",
    "optimizer": "optim.groups",
    "plan": "sharding.plan",
    "policies": "sharding.known_policies",
    "preemption": "distributed.preemption",
    "ranks": "distributed.process_group",
    "recompute": "sharding.activation_checkpointing",
    "rendezvous": "distributed.rendezvous",
    "residency": "model.placeholders",
    "rollout.link": "rollout.connection",
    "schedule": "optim.schedule",
    "shard": "sharding.shard",
    "step": "optim.step",
    "vla.export": "lerobot.policy_export",
    "vla.groups": "vla.parameter_groups",
    "vla.lerobot": "lerobot",
    "vla.lerobot.cache": "lerobot.byte_cache",
    "vla.lerobot.counts": "lerobot.worker_counters",
    "vla.lerobot.files": "lerobot.episode_files",
    "vla.lerobot.remote": "lerobot.remote_requests",
    "vla.lerobot.source": "lerobot.dataset_source",
    "vla.lerobot.staging": "lerobot.prefetch",
    "vla.loop": "vla.training_loop",
    "vla.shortage": "vla.shortages",
    "walk": "sharding.bypassed_units",
}
"""Old module path -> new path, relative to the package. Submodules of an old path are redirected as well."""


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], Iterable[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that imports its names when they are first used.

    The names are read from the package's source: each ``from a.module import Name as Name`` in its ``if TYPE_CHECKING``
    block is one name. So the list exists once, and type checkers can read it.

    Args:
        package: ``__name__`` of the package.
    """
    source = ast.parse(inspect.getsource(sys.modules[package]))
    module_of = {
        alias.asname: node.module
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname
    }

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    public = sorted(module_of)
    return load, lambda: sorted({*vars(sys.modules[package]), *public}), public


class _MovedModules(MetaPathFinder, Loader):
    """Find and load old module paths: importing one returns the module object of its new path."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Return a module spec for an old path; None for other paths."""
        return ModuleSpec(fullname, self) if _new_path(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module in ``sys.modules`` by the module of the new path, and warn."""
        old = module.__name__
        new = _new_path(old)
        assert new is not None
        sys.modules[old] = import_module(new)
        message = f"{old} was renamed to {new}; the next release removes the old path"
        warnings.warn(message, DeprecationWarning, stacklevel=2)


def _new_path(fullname: str) -> str | None:
    top, _, path = fullname.partition(".")
    if top != PACKAGE:
        return None
    for old in sorted(MOVED, key=len, reverse=True):
        if path == old or path.startswith(f"{old}."):
            return f"{PACKAGE}.{MOVED[old]}{path[len(old) :]}"
    return None


def install_old_paths() -> None:
    """Insert the finder of `MOVED` ahead of Python's own finders.

    Python's finders would find a submodule of an old path, too, and import it a second time as another module object.
    """
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())
