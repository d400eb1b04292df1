"""LightRFT's real script `train_colocate.py` on two CPU ranks, with our strategy and with its own.

No file of LightRFT is changed: `lightrft.strategy` is a module with our `get_strategy`. helpers/lightrft lists what
stands in for packages that are not installed, for the accelerator and for transformers 4. docs/coming_from_lightrft.md
quotes these lists.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.folders import tensors_in
from helpers.lightrft import fake, redirections, renames, run, stubs
from helpers.peers import peer
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from fsdp2_strategy.config.strategy_config import StrategyConfig
from fsdp2_strategy.integrations.lightrft import LightRFTStrategy
from fsdp2_strategy.integrations.lightrft.settings import OPTIONS

pytestmark = pytest.mark.xdist_group("lightrft")  # the runs are shared

PAGE = Path(__file__).parents[1] / "docs" / "coming_from_lightrft.md"
FIELDS = {field.name for field in dataclasses.fields(StrategyConfig)}

PPO = {"advantage_estimator": "gae", "text_only": False, "use_kl_loss": False, "kl_estimator": "k1"}
PPO |= {"save_value_network": True}
AS_THEIRS = {"loss_reduction": "sum"}
"""What makes our numbers those of LightRFT, with ``max_norm`` so large that its clipping by groups has no effect."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that makes a folder with a model, and with prompts; the models are made once."""
    models = tmp_path_factory.mktemp("models")
    run.text_model(models / "text")
    run.vision_model(models / "vision")

    def folder(kind):
        made = tmp_path_factory.mktemp(kind)
        (made / "model").symlink_to(models / kind)
        run.prompts(made / "prompts.jsonl")
        texts = ["add one and two is three", "one and one is two", "three is three", "two is two"] * 4
        (made / "texts.jsonl").write_text("\n".join(json.dumps({"input": text}) for text in texts))
        return made

    return folder


def rows(records, *names):
    """Return some columns of the calls of `optimizer_step`, for each rank."""
    return [[tuple(call[name] for name in ("name", *names)) for call in record["calls"]] for record in records]


def assert_same_steps(ours, theirs):
    """Compare optimizer steps and learning rates after every call of `optimizer_step`, on both ranks."""
    assert rows(ours, "steps", "rate") == rows(theirs, "steps", "rate")


def losses_before(records, steps):
    """Return the losses of both ranks that were computed before optimizer step number ``steps`` + 1 of any model."""
    found = []
    for record in records:
        taken = dict.fromkeys((call["name"] for call in record["calls"]), 0)
        for call in record["calls"]:
            if taken[call["name"]] <= steps:
                found += call["losses"]
            taken[call["name"]] = call["steps"]
    return found


# --- the script runs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grpo(folders):
    """Run GRPO on texts with generation by the actor: eight prompts, four samples of each, two rollouts of four."""
    folder = folders("text")
    options = {"max_samples": 8, "meta_init": True, "gradient_checkpointing": True, "enable_ema": True}
    return folder, options, run.run(folder, run.arguments(folder, **options), scripted=False)


@pytest.mark.full
def test_grpo_runs_from_the_script_as_published(grpo):
    folder, _, records = grpo
    assert [call["steps"] for call in records[0]["calls"]] == [0, 1, 1, 2, 2, 3, 3, 4]
    norms = [call["grad_norm"] for call in records[0]["calls"][1::2]]
    assert sum(norm > 0 for norm in norms) >= 2, "0 if the samples of each prompt have equal rewards"
    assert rows(records, "steps", "rate")[0] == rows(records, "steps", "rate")[1]
    assert [record["updates"] for record in records] == [[3], [3]], "once at the start, and after each rollout"
    tags = sorted(path.name for path in (folder / "ckpts" / "_actor").iterdir() if path.is_dir())
    assert tags == ["global_step2"]
    state = json.loads((folder / "ckpts" / "_actor" / "global_step2" / "trainer_state.json").read_text())
    assert state["step"] == 4 and state["client_state"] == {"consumed_samples": 8}


@pytest.mark.full
def test_the_script_exports_the_averages_as_a_model_that_transformers_loads(grpo):
    folder, *_ = grpo
    exported = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert AutoTokenizer.from_pretrained(folder / "out")("add one")["input_ids"]
    trained = tensors_in(folder / "ckpts" / "_actor" / "global_step2" / "model")
    started = tensors_in(folder / "model")
    name = "model.embed_tokens.weight"
    average = exported.state_dict()[name].float()
    moved, behind = (trained[name] - started[name]).norm(), (trained[name] - average).norm()
    assert 0 < (average - started[name]).norm() < moved and behind < moved, "between the start and the trained weights"


@pytest.mark.full
def test_the_script_goes_on_from_its_checkpoint_with_optimizer_and_schedule(grpo):
    folder, options, _ = grpo
    args = run.arguments(folder, **options, load_checkpoint=True)
    records = run.run(folder, args, scripted=False, name="again")
    assert [call["steps"] for call in records[0]["calls"]] == [4, 5, 5, 6, 6, 7, 7, 8]
    log = (folder / "again.log").read_text()
    assert "(step 4)" in log and "consumed_samples: 8" in log


# --- the numbers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ppo_of_lightrft(folders):
    """Run PPO with a critic, without clipping, with LightRFT's own strategy; it saves checkpoints."""
    folder = folders("vision")
    args = run.arguments(folder, **PPO, critic_pretrain=folder / "model", max_norm=1e9)
    return folder, run.run(folder, args, strategy="theirs")


@pytest.mark.full
def test_ppo_with_a_critic_has_each_loss_of_lightrft_bitwise(folders, ppo_of_lightrft):
    folder = folders("vision")
    args = run.arguments(folder, **PPO, critic_pretrain=folder / "model", max_norm=1e9)
    ours = run.run(folder, args, order="theirs", options=AS_THEIRS)
    theirs = ppo_of_lightrft[1]
    assert_same_steps(ours, theirs)
    assert [call["steps"] for call in ours[0]["calls"] if call["name"] == "critic"][-1] == 8
    assert rows(ours, "losses") == rows(theirs, "losses")

    critic = AutoModelForImageTextToText.from_pretrained(folder / "out_critic")
    assert AutoConfig.from_pretrained(folder / "out_critic").model_type == "qwen2_5_vl"
    saved = folder / "ckpts" / "_critic" / "global_step4"
    saved = tensors_in(saved / "model") | tensors_in(saved / "wrapper")
    head = load_file(folder / "out_critic" / "value_head.safetensors")
    assert torch.equal(head["score.weight"], saved["score.weight"])
    assert torch.equal(critic.state_dict()["lm_head.weight"].float(), saved["lm_head.weight"])


@pytest.mark.full
def test_grpo_with_the_settings_of_the_script_has_the_steps_and_first_losses_of_lightrft(folders):
    records = {}
    for strategy in ("ours", "theirs"):
        folder = folders("text")
        args = run.arguments(folder, max_samples=8)
        records[strategy] = run.run(folder, args, strategy=strategy, order="theirs")
    assert_same_steps(records["ours"], records["theirs"])
    first = losses_before(records["ours"], 1)
    assert first == losses_before(records["theirs"], 1) and any(first), "before and after the first step"


@pytest.mark.full
def test_two_backward_passes_in_a_micro_batch_are_counted_as_lightrft_counts_them(folders):
    """The PTX loss: see helpers/lightrft/patches.py for why the script needs another data set, and rounded tables."""
    records = {}
    settings = {"text_only": False, "max_samples": 8, "max_norm": 1e9, "l2": 0}  # l2: one of its norms decays there
    for strategy in ("ours", "theirs"):
        folder = folders("vision")
        args = run.arguments(folder, **settings, pretrain_data=folder / "texts.jsonl")
        options = AS_THEIRS if strategy == "ours" else {}
        patches = ("pretraining_data", "rotary_tables_in_bf16")
        records[strategy] = run.run(folder, args, strategy=strategy, order="theirs", options=options, patches=patches)
    ours, theirs = records["ours"], records["theirs"]
    assert all(len(call["losses"]) == 2 for record in ours for call in record["calls"])
    assert_same_steps(ours, theirs)
    assert ours[0]["calls"][-1]["steps"] == 4
    assert rows(ours, "losses") == rows(theirs, "losses")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["text", "vision"], ids=["grpo-on-texts", "ppo-with-a-critic"])
def test_ranks_that_share_sequences_have_the_losses_of_ranks_that_do_not(folders, kind):
    """All samples of a rollout make one optimizer step: the same micro-batches of two samples, on one rank or both."""
    records = {}
    settings = {"max_samples": 8, "train_batch_size": 16, "gradient_checkpointing": True, "bf16": False}
    for size in (1, 2):
        folder = folders(kind)
        critic = {**PPO, "critic_pretrain": folder / "model"} if kind == "vision" else {}
        records[size] = run.run(folder, run.arguments(folder, **settings, **critic, sp_size=size))
    log = (folder / "record.log").read_text()
    assert "splits sequences over 2 ranks" in log and "computes full sequences" not in log
    for name in ("actor", "critic") if kind == "vision" else ("actor",):
        losses = {
            size: [[call["losses"][0] for call in record["calls"] if call["name"] == name] for record in records[size]]
            for size in records
        }
        assert losses[2][0] == losses[2][1] and len(losses[2][0]) == 16, "both ranks compute all samples"
        per_rollout = [[rank[4 * rollout :][:4] for rank in losses[1]] for rollout in range(2)]
        expected = [loss for ranks in per_rollout for rank in ranks for loss in rank]
        assert any(expected[8:])
        torch.testing.assert_close(torch.tensor(losses[2][0]), torch.tensor(expected), rtol=1e-4, atol=1e-6)
        steps = {
            size: [call["steps"] for call in records[size][0]["calls"] if call["name"] == name][-1] for size in records
        }
        assert steps == {1: 2, 2: 2}


# --- LightRFT's own checkpoints --------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_checkpoint_that_lightrft_wrote_is_loaded_by_the_script(folders, ppo_of_lightrft):
    written = ppo_of_lightrft[0] / "ckpts"
    folder = folders("vision")
    settings = {"critic_pretrain": folder / "model", "ckpt_path": written, "load_checkpoint": True, "save_steps": -1}
    settings |= {"max_samples": 4, "actor_learning_rate": 1e-30, "critic_learning_rate": 1e-30, "l2": 0}
    args = run.arguments(folder, **PPO, **settings)
    with pytest.raises(AssertionError, match=r"get_strategy\(args, trust_checkpoints=True\) if you trust its source"):
        run.run(folder, args, name="untrusted")
    records = run.run(folder, args, options={"trust_checkpoints": True})
    assert records[0]["calls"][0]["steps"] == 0, "its trainers save neither optimizer nor schedule"
    log = (folder / "record.log").read_text()
    assert "has no state for optimizer and scheduler: the run continues with new ones" in log
    assert "consumed_samples: 16" in log
    for role, out in (("_actor", "out"), ("_critic", "out_critic")):
        dcp_to_torch_save(written / role / "global_step4", folder / "theirs.pt")
        stored = torch.load(folder / "theirs.pt", weights_only=False)
        exported = AutoModelForImageTextToText.from_pretrained(folder / out).state_dict()
        prefix = "model." if role == "_critic" else ""
        for name, tensor in exported.items():
            torch.testing.assert_close(tensor.float(), stored[prefix + name], rtol=0, atol=1e-20)


# --- names -----------------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "get_ds_train_config": "DeepSpeed, called without --fsdp only",
    "get_ds_eval_config": "DeepSpeed, called without --fsdp only",
    "load_model": "DeepSpeed only; LightRFT's FSDP strategy lacks it, too",
}
"""Names of a strategy that LightRFT reads and ours does not have."""


def reads(source, owner):
    """Return the attributes of ``owner`` (``strategy``, ``self.strategy``, …) that a source file reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and re.fullmatch(owner, ast.unparse(node.value)):
            found.add(node.attr)
    return found


def sources():
    root = peer("lightrft")
    files = [*(root / "lightrft").rglob("*.py"), *(root / "examples").rglob("*.py")]
    return [path.read_text() for path in files if "strategy" not in path.relative_to(root).parts]


def test_each_name_that_lightrft_reads_of_a_strategy_exists():
    read = set().union(*(reads(source, r"(self\.)?strategy") for source in sources()))
    assert len(read) > 30
    strategy = LightRFTStrategy(bf16=False)
    with strategy:
        missing = {name for name in read if not hasattr(strategy, name)}
    assert missing <= set(ELSEWHERE), missing
    assert "is_rank_0" in read and callable(LightRFTStrategy.is_rank_0)


def test_each_option_that_its_trainers_read_of_the_configuration_has_a_value():
    read = set().union(*(reads(source, r"(self\.)?strategy\.config|config") for source in sources()))
    own = next(node for node in ast.walk(ast.parse(peer("lightrft/lightrft/strategy/config.py").read_text()))
               if isinstance(node, ast.ClassDef))  # fmt: skip
    defaults = {
        node.target.id: ast.literal_eval(node.value)
        for node in own.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.Tuple)
    }
    options = {name: value for name, value in defaults.items() if name in OPTIONS and name != "fsdp"}
    assert options == {name: OPTIONS[name] for name in options} and len(options) > 30
    assert read & set(defaults) <= {*OPTIONS, *FIELDS}
    assert set(defaults) <= {*OPTIONS, *FIELDS}


_CASE, _WITH_CONFIG = "TestFakeStrategy.test", "TestFakeStrategyWithConfig.test"
FAILURES = {
    f"{_CASE}_all_gather": "expects a list of one tensor; LightRFT's real strategy concatenates, and so does ours",
    f"{_CASE}_inference_engine_methods": "expects an engine without model and weights, and no outputs without prompts",
    f"{_CASE}_optimizer_step": "steps after loss.backward() instead of strategy.backward()",
    f"{_CASE}_prepare": "prepares a model for inference, then for training, which only the fake's no-op allows",
    f"{_CASE}_save_and_load_ckpt": "saves a model that was not prepared, and expects the fake's own file",
    f"{_WITH_CONFIG}_config_from_args_in_strategy": "asks for sp_size 2 and DeepSpeed, which the fake ignores",
}
"""Tests of LightRFT's FakeStrategy that fail with our strategy, and why."""


def test_the_tests_of_its_fake_strategy_pass_as_far_as_they_mean_a_real_one():
    done = subprocess.run(
        [sys.executable, fake.__file__, str(peer("lightrft"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["run"] == 17 and result["failed"].keys() == FAILURES.keys(), result


def test_the_page_lists_what_stands_in_for_what():
    page = PAGE.read_text()
    for table in (stubs.STUBS, redirections.REDIRECTIONS, renames.RENAMES, FAILURES, ELSEWHERE):
        for name, text in table.items():
            assert f"| `{name}` | {text} |" in page, f"add the row of {name}"
