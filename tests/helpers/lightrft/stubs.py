"""Stand in for the packages that LightRFT imports and that are not installed here; one row each in `STUBS`."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

STUBS = {
    "deepspeed": "imported by models and strategies; nothing is called without DeepSpeed",
    "flash_attn": "`utils.distributed.all_gather` is imported, and called with packed samples only",
    "easydict": "`EasyDict`: a dict whose keys are attributes",
    "loguru": "`logger`: remove and add do nothing, all levels are silent",
    "datasets": "`load_dataset` of JSON files, `Dataset` (select, map, filter), `interleave_datasets` of one data set",
    "mathruler": "`grader.extract_boxed_content`: the last \\boxed{}; `grader.grade_answer`: equality of the texts",
    "pandas": "imported by data sets of reward models; nothing is called",
    "librosa": "imported by data sets of audio; nothing is called",
    "torchvision": "`AutoProcessor.from_pretrained` returns the tokenizer where it needs torchvision; no image is read",
    "sglang": "`lightrft.strategy.sglang_utils`, which imports it, is replaced for LightRFT's own strategy: its "
    "`get_sglang_engine_for_rollout` returns an engine of `engine`",
}
"""The packages, and what of them is used."""


class EasyDict(dict):
    """A dict whose keys are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Silent:
    """A logger that drops everything."""

    def __getattr__(self, name):
        return lambda *_, **__: self


class Dataset:
    """A list of dicts, with the methods of datasets.Dataset that the script calls."""

    def __init__(self, rows):
        self.rows = list(rows)

    @property
    def column_names(self):
        return list(self.rows[0]) if self.rows else []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, key):
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]

    def select(self, indices):
        return Dataset(self.rows[i] for i in indices)

    def map(self, function, remove_columns=(), num_proc=1):
        return Dataset({**{k: v for k, v in r.items() if k not in remove_columns}, **function(r)} for r in self.rows)

    def filter(self, function):
        return Dataset(filter(function, self.rows))


class DatasetDict(dict):
    """Data sets by split."""


def load_dataset(kind, data_files=None, data_dir=None):
    if kind != "json" or data_dir:
        raise ValueError(f"the stub reads JSON lines only, not {kind!r}")
    return DatasetDict(train=Dataset(map(json.loads, Path(data_files).read_text().splitlines())))


def interleave_datasets(datasets, probabilities, seed, stopping_strategy):
    (only,) = datasets
    return only


def extract_boxed_content(text):
    found = re.findall(r"\\boxed\{(.*?)\}", text)
    return found[-1].strip() if found else "None"


def install():
    """Put the stubs of all packages that are not installed on the path."""
    content = {
        "easydict": {"EasyDict": EasyDict},
        "loguru": {"logger": Silent()},
        "datasets": {
            "Dataset": Dataset,
            "DatasetDict": DatasetDict,
            "load_dataset": load_dataset,
            "load_from_disk": None,
            "interleave_datasets": interleave_datasets,
        },
        "mathruler.grader": {
            "extract_boxed_content": extract_boxed_content,
            "grade_answer": lambda answer, truth: str(answer).strip() == str(truth).strip(),
        },
        "deepspeed.ops.adam": {"DeepSpeedCPUAdam": None, "FusedAdam": None},
        "deepspeed.runtime.zero.partition_parameters": {"ZeroParamStatus": None},
        "flash_attn.utils.distributed": {"all_gather": None},
        "pandas": {},
        "librosa": {},
    }
    _processors_without_torchvision()
    missing = {name for name in STUBS if importlib.util.find_spec(name) is None}
    for path, names in content.items():
        if path.partition(".")[0] not in missing:
            continue
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            _module(".".join(parts[:depth]))
        vars(sys.modules[path]).update(names)


def _processors_without_torchvision():
    from transformers import AutoProcessor, AutoTokenizer

    load = AutoProcessor.from_pretrained

    def from_pretrained(path, **kwargs):
        try:
            return load(path, **kwargs)
        except (ImportError, OSError):  # torchvision, or the processor's files, which only torchvision could make
            return AutoTokenizer.from_pretrained(path, **kwargs)

    AutoProcessor.from_pretrained = from_pretrained


def _module(path):
    if path in sys.modules:
        return
    module = types.ModuleType(path)
    module.__spec__ = ModuleSpec(path, None)
    module.__path__ = []
    sys.modules[path] = module
    parent, _, name = path.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)
