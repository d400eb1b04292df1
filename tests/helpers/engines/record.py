"""Record the signatures of vLLM's and SGLang's calls from their published archives into signatures.json.

    python tests/helpers/engines/record.py vllm-0.33.0-*.whl sglang-0.5.23-*.whl

The archives are those of the package registry. Their code is parsed, not imported.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

TARGET = Path(__file__).with_name("signatures.json")

METHODS = {
    "vllm": {
        "LLM": (
            "vllm/entrypoints/llm.py",
            ["__init__", "generate", "apply_model", "collective_rpc", "reset_prefix_cache", "sleep", "wake_up"],
        ),
        "RLOfflineMixin": (
            "vllm/entrypoints/rl/offline.py",
            ["start_weight_update", "update_weights", "finish_weight_update"],
        ),
        "LLMEngine": ("vllm/v1/engine/llm_engine.py", ["reset_encoder_cache"]),
        "GPUModelRunner": ("vllm/v1/worker/gpu_model_runner.py", ["reload_weights"]),
        "WeightTransferEngine": (
            "vllm/distributed/weight_transfer/base.py",
            [
                "__init__", "init_transfer_engine", "start_weight_update", "update_weights", "receive_weights",
                "finish_weight_update", "shutdown", "parse_update_info",
            ],
        ),
        "WeightTransferEngineFactory": ("vllm/distributed/weight_transfer/factory.py", ["register_engine"]),
        "WeightTransferTrainerFactory": ("vllm/distributed/weight_transfer/factory.py", ["trainer_init"]),
        "WeightSource": ("vllm/distributed/weight_transfer/base.py", ["metadata", "iter_full"]),
        "SparseNCCLTrainerWeightTransferEngine": (
            "vllm/distributed/weight_transfer/sparse_nccl_engine.py",
            ["trainer_init", "send_weights"],
        ),
    },
    "sglang": {
        "Engine": (
            "sglang/srt/entrypoints/engine.py",
            [
                "__init__", "generate", "begin_weight_update", "update_weights_from_tensor", "end_weight_update",
                "flush_cache", "release_memory_occupation", "resume_memory_occupation", "shutdown",
            ],
        ),
    },
}  # fmt: skip
"""The methods that are called or defined, by package and class, and the file of the class."""

FUNCTIONS = {
    "vllm": {
        "initialize_layerwise_reload": "vllm/model_executor/model_loader/reload/layerwise.py",
        "finalize_layerwise_reload": "vllm/model_executor/model_loader/reload/layerwise.py",
        "load_checkpoint_weight_patches": "vllm/model_executor/model_loader/checkpoint_weight_patch.py",
    },
    "sglang": {},
}
"""The functions that are called, and their files."""

FIELDS = {
    "vllm": {
        "EngineArgs": ("vllm/engine/arg_utils.py", "EngineArgs"),
        "SamplingParams": ("vllm/sampling_params.py", "SamplingParams"),
        "WeightTransferConfig": ("vllm/config/weight_transfer.py", "WeightTransferConfig"),
        "ParamMeta": ("vllm/distributed/weight_transfer/base.py", "ParamMeta"),
        "CheckpointWeightPatch": (
            "vllm/model_executor/model_loader/checkpoint_weight_patch.py",
            "CheckpointWeightPatch",
        ),
        "SparseWeightPatch": ("vllm/distributed/weight_transfer/sparse_nccl_engine.py", "SparseWeightPatch"),
    },
    "sglang": {
        "ServerArgs": ("sglang/srt/arg_groups/fields/*.py", "*"),
        "SamplingParams": ("sglang/srt/sampling/sampling_params.py", "SamplingParams"),
    },
}
"""Classes whose fields are arguments: options that ``**kwargs`` of a constructor takes, of sampling, and of weights."""


def sources(archive):
    """Return the Python files of an archive by path from the package's folder, and the version."""
    version = re.match(r"[a-z]+-([^-]+?)(-|\.tar)", archive.name)[1]
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return {name: opened.read(name) for name in opened.namelist() if name.endswith(".py")}, version
    with tarfile.open(archive) as opened:
        members = [member for member in opened if member.isfile() and member.name.endswith(".py")]
        return {member.name.partition("/")[2]: opened.extractfile(member).read() for member in members}, version


def classes(files, pattern, name):
    """Return the classes with a name in the files with a path."""
    for path in sorted(files):
        if fnmatch(path, pattern):
            for node in ast.walk(ast.parse(files[path])):
                if isinstance(node, ast.ClassDef) and fnmatch(node.name, name):
                    yield node


def parameters(function, *, of_class=True):
    """Return the parameters of a method or function, in order: name, kind, and whether a call must pass it."""
    taken = function.args
    found = []
    positional = [*taken.posonlyargs, *taken.args][1 if of_class else 0 :]
    first_default = len(positional) - len(taken.defaults)
    for index, arg in enumerate(positional):
        kind = "positional_only" if arg in taken.posonlyargs else "positional_or_keyword"
        found.append({"name": arg.arg, "kind": kind, "required": index < first_default})
    if taken.vararg:
        found.append({"name": taken.vararg.arg, "kind": "var_positional", "required": False})
    for arg, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
        found.append({"name": arg.arg, "kind": "keyword_only", "required": default is None})
    if taken.kwarg:
        found.append({"name": taken.kwarg.arg, "kind": "var_keyword", "required": False})
    return found


def record(archive):
    """Return the signatures of one package."""
    package = archive.name.partition("-")[0]
    files, version = sources(archive)
    recorded = {"version": version, "archive": archive.name, "methods": {}, "functions": {}, "fields": {}}
    for name, (path, methods) in METHODS[package].items():
        (owner,) = classes(files, path, name)
        own = {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}
        recorded["methods"][name] = {method: parameters(own[method]) for method in methods}
    for name, path in FUNCTIONS[package].items():
        (function,) = (n for n in ast.parse(files[path]).body if isinstance(n, ast.FunctionDef) and n.name == name)
        recorded["functions"][name] = parameters(function, of_class=False)
    for name, (path, pattern) in FIELDS[package].items():
        fields = {
            node.target.id
            for owner in classes(files, path, pattern)
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        recorded["fields"][name] = sorted(field for field in fields if not field.startswith("_"))
    return package, recorded


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dict(record(Path(archive)) for archive in sys.argv[1:]), indent=1) + "\n")
