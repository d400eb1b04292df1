"""`integrations.lightrft`, called as LightRFT's trainers call their strategy: names and their order, in our own words.

tests/test_peers_lightrft.py runs LightRFT's own code; this file needs none of it.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.models import build, tokens
from helpers.reference import assert_parameters_close, full_grads, full_parameters
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fsdp2_strategy import FSDPV2Strategy
from fsdp2_strategy.errors import CheckpointError, ConfigError, MeshError, RolloutError, SequenceError
from fsdp2_strategy.integrations.lightrft import EngineStatus, Generation, LightRFTStrategy, get_strategy, is_engine
from fsdp2_strategy.integrations.lightrft.generation import LengthStatistics, generate, prompts_with_media
from fsdp2_strategy.integrations.lightrft.settings import OPTIONS
from fsdp2_strategy.rollout import ENGINES


class Actor(nn.Module):
    """A policy as the trainer wraps it."""

    def __init__(self, seed=0):
        super().__init__()
        self.model = build("llama", seed)

    def forward(self, sequences):
        return self.model(input_ids=sequences).logits


class Critic(nn.Module):
    """A value model: a backbone and a head, which the trainer saves as one."""

    def __init__(self, seed=1):
        super().__init__()
        self.model = build("llama", seed).model
        torch.manual_seed(seed)
        self.score = nn.Linear(32, 1, bias=False)
        self.register_buffer("mean", torch.zeros(1), persistent=False)

    def forward(self, sequences):
        return self.score(self.model(input_ids=sequences).last_hidden_state).squeeze(-1)


class Engine:
    """Answer each prompt with its last token and the number of prompts, as SGLang answers; note the calls."""

    def __init__(self):
        self.calls = []
        self.weights = {}

    def update_weights(self, weights):
        self.calls.append("update")
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def sleep(self):
        self.calls.append("sleep")

    def wake_up(self):
        self.calls.append("wake_up")

    def generate(self, *, sampling_params, input_ids=None, prompt=None, image_data=None):
        self.calls.append("generate")
        self.given = (input_ids, prompt, image_data)
        if "fails_on" in sampling_params and sampling_params["fails_on"] == dist.get_rank():
            raise ValueError("prompt 0 is too long")
        count = len(input_ids or prompt)
        lasts = [ids[-1] for ids in input_ids] if input_ids else [7] * count
        return [{"output_ids": [last, count]} for last in lasts]


def arguments(**changed):
    """Return a namespace with the options of the parser that matter here."""
    options = {
        "fsdp": True, "seed": 7, "max_norm": 0.5, "micro_train_batch_size": 1, "train_batch_size": 4, "bf16": False,
        "engine_type": "sglang", "engine_tp_size": 1, "enable_engine_sleep": True, "adam_offload": True,
        "actor_learning_rate": 1e-3, "critic_learning_rate": 2e-3, "adam_betas": (0.9, 0.95), "l2": 0.01,
        "lr_warmup_ratio": 0.25, "fsdp_cpu_offload": False, "mixed_mm_data": False, "use_mp_opt": False, "sp_size": 1,
        "advantage_estimator": "group_norm", "n_samples_per_prompt": 2, "remote_rm_url": None, "critic_pretrain": "x",
        "kl_target": None, "plot_every": 1, "grad_accum_dtype": None, "zpg": 1, "local_rank": -1,
    }  # fmt: skip
    return SimpleNamespace(**{**options, **changed})


def loss_of(model, step, rank):
    ids = tokens(torch.Generator().manual_seed(100 * step + rank))
    return model(ids).float().square().mean()


# --- the sequence of calls -------------------------------------------------------------------------------------------


def prepared(strategy, args):
    """Make the models as the script does; return (actor, critic, reference, optimizers and schedules)."""
    with strategy.init_model_context(meta_init=False):
        actor = Actor()
    actor.is_actor = True
    actor = strategy.prepare_model(actor, is_training=True)
    critic = strategy.prepare_model(Critic(), is_training=True)
    reference = strategy.prepare_model(Actor(), is_training=False, shard_size=strategy.world_size)
    strategy.offload_model(reference)
    return strategy.prepare_models_and_optimizers(actor, critic, [], reference, args, 8)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_the_calls_of_the_trainers_run_in_their_order(tmp_path, monkeypatch):
    args, engine, rank = arguments(), Engine(), dist.get_rank()
    strategy = get_strategy(args)
    strategy.setup_distributed(timeout=None)
    strategy.set_seed(args.seed)
    (actor, optim, sched), (critic, critic_optim, critic_sched), rewards, reference = prepared(strategy, args)
    assert rewards == [] and reference is not None
    strategy.update_engine_weights(actor)  # before there is an engine: nothing happens
    with monkeypatch.context() as patch:
        patch.setitem(ENGINES, "sglang", lambda *_: engine)
        assert strategy.setup_inference_engine(args, engine_type=args.engine_type, actor=actor) is engine
    assert engine.calls == ["update", "sleep"] and strategy.inference_engine_status is EngineStatus.SLEEPED

    for rollout in range(2):
        engine.calls.clear()
        out = strategy.gather_and_generate(
            sampling_params={"max_new_tokens": 2},
            all_prompt_token_ids=[[1, 2 + rank], [3]],
            all_prompts=None,
            sleep_engine=args.enable_engine_sleep,
        )
        assert [o.output_token_ids for o in out] == [[2 + rank, 2], [3, 2]] and out[1].prompt_token_ids == [3]
        assert engine.calls == [*([] if rollout else ["wake_up"]), "generate", "sleep"] or rollout
        samples = strategy.sp_data_processor.postprocess(strategy.sp_data_processor.preprocess([1, 2]))
        assert samples == [1, 2]
        strategy.reload_model(reference)
        with torch.no_grad():
            reference(tokens(torch.Generator().manual_seed(rollout)))
        strategy.offload_model(reference)
        assert strategy.all_reduce({"sum": 1.0, "count": 2}, "sum") == {"sum": 2.0, "count": 4}

        strategy.maybe_load_optimizer(optim)
        for micro in range(4):
            strategy.backward(loss_of(actor, micro, rank), actor, optim)
            strategy.optimizer_step(optim, actor, sched, name="actor")
            strategy.backward(loss_of(critic, micro, rank), critic, critic_optim)
            strategy.optimizer_step(critic_optim, critic, critic_sched, name="critic")
            assert sched.last_epoch == critic_sched.last_epoch == 2 * rollout + (micro + 1) // 2
        strategy.maybe_offload_optimizer(optim)
        strategy.report_memory("after train")
        engine.calls.clear()
        strategy.update_engine_weights(actor)
        assert engine.calls == ["wake_up", "update"] and strategy.inference_engine_status is EngineStatus.WAKEUP
        tag = f"global_step{rollout + 1}"
        strategy.save_ckpt(actor.model, tmp_path / "_actor", tag, 3, 1e8, {"consumed_samples": rollout + 1})
        strategy.save_ckpt(critic, tmp_path / "_critic", tag, 3, 1e8)
    full = full_parameters(actor.model)
    assert all(torch.equal(engine.weights[name], full[name]) for name in ("lm_head.weight", "model.norm.weight"))
    strategy.save_model(actor, None, tmp_path / "out")
    strategy.save_model(critic, output_dir=tmp_path / "out_critic")

    again = get_strategy(args)
    (actor_2, optim_2, sched_2), (critic_2, critic_optim_2, _), *_ = prepared(again, args)
    path, states = again.load_ckpt(actor_2.model, tmp_path / "_actor", optimizer=optim_2, scheduler=sched_2)
    again.load_ckpt(critic_2, tmp_path / "_critic")
    assert path.endswith("global_step2") and states == {"consumed_samples": 2} and sched_2.last_epoch == 4
    assert len(optim_2.state) == len(optim.state) and len(critic_optim_2.state) == len(critic_optim.state)
    assert_parameters_close(full_parameters(critic_2), full_parameters(critic), 0)
    again.close()
    strategy.close()


@pytest.mark.ranks(2)
def test_the_broadcast_manager_and_the_count_of_averages_are_those_of_the_base_class():
    engine = Engine()
    with get_strategy(arguments()) as strategy:
        actor, average = (strategy.prepare_model(Actor(), is_training=training) for training in (True, False))
        assert strategy.broadcast_manager is None and strategy.time_steps["ema"] == 0
        strategy.setup_inference_engine(arguments(), engine, actor)
        engine.calls.clear()
        strategy.update_engine_weights(actor)
        strategy.broadcast_manager.broadcast_to_engine()
        assert engine.calls[-1] == "update" and engine.calls.count("update") == 2
        strategy.moving_average(actor, average)
        assert strategy.time_steps["ema"] == 1


@pytest.mark.ranks(2)
def test_a_critic_is_exported_as_its_backbone_and_its_head(tmp_path):
    strategy = get_strategy(arguments())
    critic = strategy.prepare_model(Critic(), is_training=True)
    strategy.save_model(critic, None, tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.model_type == "llama" and config.architectures == ["LlamaModel"]
    loaded = AutoModel.from_pretrained(tmp_path / "out")
    trained = full_parameters(critic)
    assert all(torch.equal(trained[f"model.{name}"], tensor) for name, tensor in loaded.state_dict().items())
    head = load_file(tmp_path / "out" / "value_head.safetensors")
    assert head.keys() == {"score.weight"} and torch.equal(head["score.weight"], trained["score.weight"])
    averaged = strategy.prepare(Actor(), is_rlhf=True)  # the trainer does not set is_actor
    strategy.save_model(averaged, None, tmp_path / "actor")
    assert not (tmp_path / "actor" / "value_head.safetensors").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "actor").config.vocab_size
    strategy.close()


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("holders", [(0, 1, 2, 3), (0, 2)], ids=["an-engine-on-each-rank", "on-the-first-of-two"])
def test_ranks_that_share_an_engine_generate_together(holders):
    rank, engine = dist.get_rank(), Engine()
    strategy = get_strategy(arguments(engine_tp_size=2, train_batch_size=None))
    assert dist.get_process_group_ranks(strategy.engine_mp_group) == ([0, 1] if rank < 2 else [2, 3])
    assert dist.get_process_group_ranks(strategy.engine_dp_group) == ([0, 2] if rank % 2 == 0 else [1, 3])
    ENGINES["test"] = lambda *_: engine if rank in holders else None
    try:
        strategy.setup_inference_engine(engine_type="test")
    finally:
        del ENGINES["test"]
    prompts = [[10 * rank + n] for n in range(1 + rank % 2)]  # not the same number on each rank
    out = strategy.gather_and_generate({}, all_prompt_token_ids=prompts)
    assert [o.prompt_token_ids for o in out] == prompts
    assert [o.output_token_ids for o in out] == [[ids[0], 3] for ids in prompts]
    if rank in holders:
        first = 20 * (rank // 2)
        assert engine.given[0] == [[first], [first + 10], [first + 11]]
    assert strategy.genlen_analyser.lengths == [2] * 6
    images = [["a"]] if rank % 2 else None  # only one of the ranks that share an engine has an image
    out = strategy.gather_and_generate({}, [[5]], ["text"], images, images_num=[1] if images else [0])
    assert out == [Generation([5], [7, 2])]
    if rank in holders:
        assert engine.given == (None, ["text", "text"], [None, "a"])
    with pytest.raises(RolloutError, match=r"failed on rank 2.* ValueError: prompt 0 is too long"):
        strategy.gather_and_generate({"fails_on": 2}, all_prompt_token_ids=[[1]])
    strategy.close()


@pytest.mark.ranks(2)
def test_generation_without_an_engine_is_an_error_on_each_rank():
    for size in (1, 2):
        strategy = get_strategy(arguments(engine_tp_size=size))
        with pytest.raises(RolloutError, match="there is no inference engine"):
            strategy.gather_and_generate({}, all_prompt_token_ids=[[1]])
        strategy.close()


def test_images_and_videos_are_split_by_prompt_from_a_list_of_lists_or_one_list():
    texts = [
        "a<|vision_start|><|image_pad|><|image_pad|><|vision_end|>",
        "b",
        "<|vision_start|><|video_pad|><|vision_end|>c",
    ]
    nested = prompts_with_media(texts, [["i1", "i2"], ["i3"], []], [2, 1, 0], None, None)
    flat = prompts_with_media(texts, ["i1", "i2", "i3"], [2, 1, 0], None, None)
    assert nested == flat
    assert flat[0] == {"prompt": texts[0], "multi_modal_data": {"image": ["i1", "i2"]}}
    assert flat[2] == {"prompt": "c"}, "a text without images or videos keeps no placeholder"
    assert prompts_with_media(texts, [None] * 3, [0, 0, 0], [None] * 3, None)[0] == {"prompt": "a"}
    videos = prompts_with_media(texts, None, None, ["v"], [0, 0, 1])
    assert videos[2] == {"prompt": texts[2], "multi_modal_data": {"video": ["v"]}}
    assert LightRFTStrategy._build_multimodal_inputs(texts, None, None, None, None)[1] == {"prompt": "b"}


def test_engines_are_called_as_lightrft_calls_them():
    class VLLM:
        def generate(self, *, sampling_params, prompts, use_tqdm):
            assert (sampling_params, use_tqdm) == ("params", False)
            return [
                SimpleNamespace(prompt_token_ids=(1,), outputs=[SimpleNamespace(token_ids=(2, 3))]) for _ in prompts
            ]

    assert generate(VLLM(), "vllm", "params", token_ids=[[1]]) == [Generation([1], [2, 3])]
    media = [{"prompt": "a", "multi_modal_data": {"image": ["i"]}}, {"prompt": "b"}]
    media.append({"prompt": "c", "multi_modal_data": {"image": ["i", "j"]}})
    assert len(generate(VLLM(), "vllm", "params", inputs=media)) == 3
    engine = Engine()
    assert generate(engine, "sglang", {}, inputs=media)[0] == Generation(None, [7, 3])
    assert engine.given == (None, ["a", "b", "c"], ["i", None, ["i", "j"]])
    assert generate(engine, "sglang", {}, token_ids=[]) == []
    with pytest.raises(RolloutError, match="a prompt has a video, expected images only"):
        generate(engine, "sglang", {}, inputs=[{"prompt": "a", "multi_modal_data": {"video": ["v"]}}])
    with pytest.raises(RolloutError, match="neither of prompt_token_ids and multi_modal_inputs"):
        generate(engine, "sglang", {})
    engine.generate = lambda **_: []
    with pytest.raises(RolloutError, match="returned 0 outputs for 1 prompt, expected one for each"):
        generate(engine, "sglang", {}, token_ids=[[1]])


@pytest.mark.ranks(2)
def test_lengths_of_outputs_are_summarized_over_all_ranks():
    outputs = [Generation([0], [0] * length) for length in ((1, 2), (3, 6))[dist.get_rank()]]
    lengths = LengthStatistics(dist.group.WORLD, every=2)
    assert lengths.collect(outputs, 0) == {
        "total_samples": 4, "min_length": 1, "max_length": 6, "mean_length": 3.0, "median_length": 2.5,
        "percentiles": {50: 2, 80: 4},
    }  # fmt: skip
    assert lengths.collect(outputs, 1) is None and lengths.lengths == [1, 2, 3, 6]
    assert lengths.collect([], 2) == {"total_samples": 0}


# --- sequence parallelism --------------------------------------------------------------------------------------------


class ActorOfSamples(Actor):
    """A policy that returns log-probabilities of the last tokens of samples, else the model's output."""

    def forward(self, sequences, num_actions=None, attention_mask=None):
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        output = self.model(sequences, attention_mask=attention_mask, position_ids=positions)
        if num_actions is None:
            return output
        log_probs = output["logits"][:, :-1].log_softmax(-1).gather(2, sequences[:, 1:, None])
        return log_probs.squeeze(2)[:, -num_actions:]


class CriticOfSamples(nn.Module):
    """A value model over a model with a head of its own, as LightRFT's critic of images."""

    def __init__(self):
        super().__init__()
        self.model = build("llama", 1)
        torch.manual_seed(1)
        self.score = nn.Linear(32, 1, bias=False)

    def forward(self, input_ids, num_actions, attention_mask=None):
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        return self.score(output["hidden_states"][-1]).squeeze(-1)[:, :-1][:, -num_actions:]


def samples(seed, length=11):
    """Return tokens, an odd number of them, and a mask of padding at both ends."""
    ids = tokens(torch.Generator().manual_seed(seed), length=length)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, -2:] = 0, 0
    return ids, mask


@pytest.mark.ranks(4)
def test_ranks_that_share_sequences_compute_the_samples_of_all_of_them_and_keep_their_own():
    rank = dist.get_rank()
    strategy = get_strategy(arguments(sp_size=2, train_batch_size=4))
    assert strategy.config.sp_size == strategy.sp_data_processor.sp_size == 2
    assert strategy.accumulated_gradient == 2, "4 samples, of which each of two groups computes one at a time"
    shared = strategy.sp_data_processor.preprocess([10 * rank, 10 * rank + 1])
    first = rank - rank % 2
    assert shared == [10 * first, 10 * first + 1, 10 * first + 10, 10 * first + 11]
    assert strategy.sp_data_processor.postprocess(shared) == [10 * rank, 10 * rank + 1]
    with pytest.raises(SequenceError, match=r"on rank 2.*cannot divide 3 samples between 2 ranks"):
        strategy.sp_data_processor.postprocess(shared[: 3 if rank > 1 else 4])
    loader = strategy.setup_dataloader(list(range(8)), 2, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[rank, rank + 4]], "each rank generates samples of its own"
    strategy.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ActorOfSamples, CriticOfSamples])
def test_ranks_that_share_sequences_split_them_within_the_forward(kind):
    rank, lengths = dist.get_rank(), []
    strategy = get_strategy(arguments(sp_size=2, train_batch_size=1, max_norm=0.0))
    (ids, mask), weights = strategy.sp_data_processor.preprocess([samples(0)])[0], torch.linspace(1, 2, 5)
    plain = kind()
    model = strategy.prepare_model(kind(), is_training=True)
    model = strategy.prepare_model(model, is_training=True)  # no second hook
    model.model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    expected, found = (own(ids, 5, attention_mask=mask) for own in (plain, model))
    assert lengths == [6], "half of eleven tokens, padded to twelve"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (expected * weights).mean().backward()
    strategy.backward((found * weights).mean(), model)
    root, inner = (own.model if kind is ActorOfSamples else own for own in (model, plain))
    for name, gradient in full_grads(root).items():
        if gradient is not None:
            torch.testing.assert_close(gradient, inner.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)
    with torch.no_grad(), pytest.raises(SequenceError, match="differ from those of rank 0, expected the same batch"):
        model(samples(rank)[0], 5, attention_mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, 5, attention_mask=mask), expected, rtol=1e-5, atol=1e-5)
    strategy.close()


@pytest.mark.ranks(2)
def test_ranks_that_share_sequences_compute_losses_of_their_own_texts_in_full():
    """As the PTX loss, which LightRFT's trainers compute without ``num_actions``."""
    strategy = get_strategy(arguments(sp_size=2, train_batch_size=1, max_norm=0.0))
    strategy.sp_data_processor.preprocess([])
    plain = ActorOfSamples()
    model = strategy.prepare_model(ActorOfSamples(), is_training=True)
    for seed in range(2):
        ids, mask = samples(seed)
        (plain(ids, attention_mask=mask).logits.square().mean() / 2).backward()
    ids, mask = samples(dist.get_rank())
    strategy.backward(model(ids, attention_mask=mask).logits.square().mean(), model)
    for name, gradient in full_grads(model.model).items():
        torch.testing.assert_close(gradient, plain.model.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)
    strategy.close()


@pytest.mark.ranks(2)
def test_a_trainer_that_does_not_share_samples_cannot_share_sequences():
    strategy = get_strategy(arguments(sp_size=2, train_batch_size=1))
    model = strategy.prepare_model(Actor(), is_training=True)
    with pytest.raises(SequenceError, match=r"has not called sp_data_processor.preprocess.* Use sp_size 1"):
        strategy.backward(loss_of(model, 0, 0), model)
    strategy.close()


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_checkpoint_of_lightrft_is_loaded_with_trust_and_without_its_optimizer(tmp_path):
    args = arguments()
    strategy = get_strategy(args, trust_checkpoints=True)
    (actor, optim, sched), (critic, *_), *_ = prepared(strategy, args)
    saved = {"actor": full_parameters(actor.model), "critic": full_parameters(critic)}
    for name, model in (("_actor", actor.model), ("_critic", critic)):  # as its save_ckpt writes them
        dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / name / "global_step3")
    if dist.get_rank() == 0:
        torch.save({"consumed_samples": 12}, tmp_path / "_actor" / "global_step3" / "client_state.pt")
    dist.barrier()
    with torch.no_grad():
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter.add_(1)
    path, states = strategy.load_ckpt(actor.model, tmp_path / "_actor", optimizer=optim, scheduler=sched)
    assert path.endswith("global_step3") and states == {"consumed_samples": 12}
    assert not optim.state and sched.last_epoch == 0
    assert strategy.load_ckpt(critic, tmp_path / "_critic")[1] == {}
    assert_parameters_close(full_parameters(actor.model), saved["actor"], 0)
    assert_parameters_close(full_parameters(critic), saved["critic"], 0)
    strategy.trust_checkpoints = False
    with pytest.raises(CheckpointError, match=r"contains pickles.*get_strategy\(args, trust_checkpoints=True\)"):
        strategy.load_ckpt(actor.model, tmp_path / "_actor")
    assert strategy.load_ckpt(actor.model, tmp_path / "_actor", trust=True)[0] == path
    assert strategy.load_ckpt(actor.model, tmp_path / "nothing") == (None, {})
    strategy.close()


# --- settings and names ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_options_that_the_arguments_lack_have_the_values_of_lightrft():
    strategy = get_strategy(SimpleNamespace(train_batch_size=4, kl_target=0.5))
    assert (strategy.max_norm, strategy.config.adam_offload, strategy.config.timeout_minutes) == (1.0, False, 60.0)
    assert {name: getattr(strategy.config, name) for name in OPTIONS} == OPTIONS
    assert strategy.config.kl_target == 0.5 and strategy.args.train_batch_size == 4
    _, optimizer, _ = strategy.prepare_reward_model(build("llama"), max_steps=10)
    assert optimizer.param_groups[0]["initial_lr"] == 1e-5 and strategy.engine_type == "vllm"
    strategy.close()
    strategy = get_strategy(None, train_batch_size=2, max_norm=3)
    assert (strategy.train_batch_size, strategy.max_norm, strategy.args) == (2, 3.0, None)
    strategy.close()
    strategy = LightRFTStrategy(5, 0.25, 1, 2, False, arguments())
    assert (strategy.seed, strategy.max_norm, strategy.bf16, strategy.config.l2) == (5, 0.25, False, 0.01)
    strategy.close()


@pytest.mark.ranks(2)
def test_arguments_that_cannot_be_met_are_errors():
    with pytest.raises(ConfigError, match=r"fsdp is false, which selects DeepSpeed.* Pass --fsdp"):
        get_strategy(arguments(fsdp=False))
    with pytest.raises(MeshError, match=r"sequence_parallel_size is 3, expected a divisor of the number of ranks 2"):
        get_strategy(arguments(sp_size=3))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, expected 1, because LightRFT's trainers draw"):
        get_strategy(arguments(tp_size=2))
    for size in (3, 0, "2"):
        with pytest.raises(ConfigError, match=r"engine_tp_size is .* expected a divisor of the number of ranks 2"):
            get_strategy(arguments(engine_tp_size=size))


@pytest.mark.ranks(2)
def test_plain_attributes_of_the_original_class_are_on_the_strategy_itself():
    strategy = FSDPV2Strategy(3, 0.5, 2, 8, False, {"engine_type": "sglang"})
    assert (strategy.seed, strategy.max_norm, strategy.bf16, strategy.engine_type) == (3, 0.5, False, "sglang")
    assert (strategy.micro_train_batch_size, strategy.train_batch_size, strategy.accumulated_gradient) == (2, 8, 2)
    strategy.close()
    strategy = FSDPV2Strategy(micro_train_batch_size=3, gradient_accumulation_steps=5)
    assert (strategy.train_batch_size, strategy.bf16, strategy.engine_type) == (30, True, "vllm")
    assert FSDPV2Strategy.is_rank_0() == (dist.get_rank() == 0) == LightRFTStrategy.is_rank_0()
    with redirect_stdout(io.StringIO()) as printed:
        FSDPV2Strategy.print("a", 1)
    assert printed.getvalue() == ("a 1\n" if dist.get_rank() == 0 else "")
    strategy.close()


def test_an_engine_is_told_apart_from_a_model():
    assert is_engine(Engine()) and not is_engine(nn.Linear(1, 1))
