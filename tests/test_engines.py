"""Engines by name: vLLM and SGLang over stand-ins with their published signatures, and transformers called as both."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.engines import fakes
from helpers.folders import small_tokenizer
from helpers.models import batch_of, build

from fsdp2_strategy import FSDPV2Strategy
from fsdp2_strategy.checkpoint import background_save
from fsdp2_strategy.errors import CheckpointError, RolloutError
from fsdp2_strategy.integrations.lightrft import get_strategy
from fsdp2_strategy.rollout import (
    SGLangEngine,
    TransformersEngine,
    VLLMEngine,
    stream_weights,
    vllm_patches,
    vllm_weight_source,
)
from fsdp2_strategy.rollout.sampling import generate_samples, plan

PROMPTS = [[3, 4, 5], [7], [5, 6, 7, 8, 9], [9, 8, 7]]
GREEDY = {"max_new_tokens": 5, "temperature": 0}


def cleared(name="llama"):
    """Return a model whose weights are all zero, so that only an update can make it right."""
    model = build(name).eval()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter, dtype=torch.bfloat16)
    return model


def generate_tokens(model, prompts, sampling_params):
    return [[sample.token_ids for sample in each] for each in generate_samples(model, prompts, sampling_params)]


@contextmanager
def installed(monkeypatch, package, **options):
    """Put a stand-in for a package on the path; yield the list of its calls."""
    calls = []
    with monkeypatch.context() as patched:
        for path, module in getattr(fakes, package)(cleared, calls, **options).modules.items():
            patched.setitem(sys.modules, path, module)
        yield calls


def arguments(**changed):
    return {"pretrain": "folder", "enable_engine_sleep": True, "bf16": True, **changed}


def expected_of(model, prompts=PROMPTS, params=GREEDY):
    """Return what a transformers engine with the model's weights generates."""
    engine = TransformersEngine(model, dtype=torch.bfloat16)
    engine.update_weights(stream_weights(model))
    return [sequences[0] for sequences in generate_tokens(engine.model, prompts, params)]


# --- sampling parameters ---------------------------------------------------------------------------------------------


def test_parameters_of_both_engines_are_those_of_transformers_and_the_models_own_defaults_do_not_count():
    of_sglang = plan({"max_new_tokens": 7, "temperature": 0.5, "top_k": -1, "skip_special_tokens": False, "n": 2}, [1])
    expected = {"max_new_tokens": 7, "min_new_tokens": 0, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert of_sglang.options == {**expected, "repetition_penalty": 1.0, "do_sample": True}
    assert of_sglang.sequence_count == 2 and of_sglang.end_tokens == (1,)
    given = fakes.vllm(cleared, []).SamplingParams(max_tokens=7, temperature=0.5, stop_token_ids=[4])
    of_vllm = plan(given, [1])
    assert of_vllm.options == of_sglang.options and of_vllm.end_tokens == (1, 4)
    assert not plan({"temperature": 0}, []).options["do_sample"]
    assert plan({"ignore_eos": True}, [1]).end_tokens == ()
    assert plan({"frequency_penalty": 0.0, "json_schema": None}, []).sequence_count == 1


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5"),
        ({"max_new_token": 3}, "max_new_token is 3.*Did you mean.*max_new_tokens"),
        ({"regex": "a*"}, "regex is"),
    ],
)
def test_a_parameter_that_transformers_lacks_is_an_error(params, match):
    with pytest.raises(RolloutError, match=match):
        plan(params, [])


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba"])
def test_each_prompt_is_generated_as_if_it_were_alone(name):
    model = build(name).eval()
    together = generate_tokens(model, PROMPTS, GREEDY)
    alone = [generate_tokens(model, [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert together == alone and len({tuple(sequences[0]) for sequences in together}) > 1
    plain = model.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert plain[0, 5:].tolist()[: len(together[2][0])] == together[2][0]


def test_a_sequence_ends_with_the_first_end_token_and_counts_are_kept():
    model = build("llama").eval()
    with patch.object(logging.getLogger("transformers.generation.utils"), "warning") as warned:
        (sequence,) = generate_tokens(model, [PROMPTS[0]], {**GREEDY, "ignore_eos": True})[0]
    assert len(sequence) == 5 and not warned.called
    ended = generate_tokens(model, PROMPTS[:1], {**GREEDY, "stop_token_ids": [sequence[1]]})[0][0]
    assert ended == sequence[: sequence.index(sequence[1]) + 1]
    assert [len(own) for own in generate_tokens(model, PROMPTS, {"max_new_tokens": 2, "n": 3})] == [3] * 4
    long = generate_tokens(model, [[1, 2, *PROMPTS[0]]], {**GREEDY, "truncate_prompt_tokens": 3, "ignore_eos": True})
    assert long == [[sequence]]
    with pytest.raises(RolloutError, match="prompt 1 has no tokens"):
        generate_tokens(model, [[1], []], GREEDY)


# --- transformers, called as the others ------------------------------------------------------------------------------


def test_a_transformers_engine_takes_the_calls_of_sglang_and_vllm(tmp_path):
    model = build("llama")
    small_tokenizer().save_pretrained(tmp_path)
    engine = TransformersEngine(model, tokenizer=str(tmp_path))
    engine.update_weights(stream_weights(model))
    expected = expected_of(model)
    outputs = engine.generate(sampling_params=GREEDY, input_ids=PROMPTS, image_data=None)
    assert outputs == [{"output_ids": tokens} for tokens in expected]
    assert engine.generate(sampling_params=GREEDY, input_ids=PROMPTS[0]) == outputs[0]
    for prompts in (PROMPTS, [{"prompt_token_ids": prompt} for prompt in PROMPTS]):
        requests = engine.generate(sampling_params=GREEDY, prompts=prompts, use_tqdm=False)
        assert [request.outputs[0].token_ids for request in requests] == expected
        assert [request.prompt_token_ids for request in requests] == PROMPTS
    (answer,) = engine.generate(sampling_params=GREEDY, prompt=["a"], image_data=[None])
    assert answer["output_ids"] == expected_of(model, [small_tokenizer()("a")["input_ids"]])[0]
    assert engine.llm_engine.model_config.max_model_len == model.config.max_position_embeddings


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"input_ids": PROMPTS, "image_data": [object(), None, None, None]}, "image_data was passed"),
        ({"input_ids": PROMPTS, "return_hidden_states": True}, "return_hidden_states was passed"),
        ({"input_ids": PROMPTS, "prompt": ["text"]}, "2 of input_ids, prompt and prompts"),
        ({}, "0 of input_ids, prompt and prompts"),
        ({"prompt": ["text"]}, "has no tokenizer"),
        ({"prompts": [{"prompt": "text", "multi_modal_data": {}}]}, "has multi_modal_data"),
        ({"input_id": PROMPTS}, "input_id was passed, .*Did you mean 'input_ids'"),
        ({"input_ids": torch.tensor([[1, 2]])}, "the prompts are a tensor, expected lists of token ids"),
    ],
)
def test_a_call_that_transformers_cannot_answer_is_an_error(call, match):
    model = build("llama")
    engine = TransformersEngine(model)
    engine.update_weights(stream_weights(model))
    with pytest.raises(RolloutError, match=match):
        engine.generate(sampling_params=GREEDY, **call)
    with pytest.raises(RolloutError, match="passed without a name"):
        engine.generate(PROMPTS, sampling_params=GREEDY)


# --- vLLM and SGLang over their published signatures -----------------------------------------------------------------


@pytest.mark.parametrize("package", ["sglang", "vllm"])
@pytest.mark.ranks(1, 2)
def test_a_trainer_uses_an_engine_by_name(package, monkeypatch):
    with installed(monkeypatch, package) as calls:
        strategy = FSDPV2Strategy(args=arguments())
        actor = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(actor, lr=0.1)
        engine = strategy.setup_inference_engine(strategy.args, package, actor)
        ((_, options),) = [call for call in calls if call[0] == "build"]
        assert options["dtype"] == "bfloat16" and "folder" in options.values()
        assert options[{"sglang": "random_seed", "vllm": "seed"}[package]] == 42 + dist.get_rank()
        assert engine.is_asleep
        strategy.backward(actor(**batch_of("llama", 0, dist.get_rank())).logits.square().mean(), actor, optimizer)
        strategy.optimizer_step(optimizer, actor)
        strategy.update_engine_weights(actor)
        assert engine.is_asleep, "as before the update"
        with pytest.raises(RolloutError, match="asleep"):
            engine.generate(sampling_params=GREEDY, **{"input_ids" if package == "sglang" else "prompts": PROMPTS})
        strategy.wakeup_inference_engine()
        expected = expected_of(actor)
        if package == "sglang":
            outputs = engine.generate(sampling_params=GREEDY, input_ids=PROMPTS, image_data=None)
            assert [output["output_ids"] for output in outputs] == expected
        else:
            params = sys.modules["vllm"].SamplingParams(max_tokens=5, temperature=0)
            for passed, named in (((), {"prompts": PROMPTS}), ((PROMPTS,), {})):
                outputs = engine.generate(*passed, sampling_params=params, use_tqdm=False, **named)
                assert [output.outputs[0].token_ids for output in outputs] == expected
        strategy.close()
        assert package == "vllm" or calls[-1] == ("shutdown",)


@pytest.mark.ranks(2)
def test_ranks_that_share_an_sglang_engine_generate_with_that_of_the_first(monkeypatch):
    with installed(monkeypatch, "sglang") as calls:
        args = arguments(engine_tp_size=2, engine_type="sglang", train_batch_size=2, micro_train_batch_size=1)
        strategy = get_strategy(args)
        actor = strategy.prepare_model(build("llama"), is_training=True)
        engine = strategy.setup_inference_engine(args, "sglang", actor)
        assert (engine is None) == (dist.get_rank() == 1)
        assert not calls or calls[0][1]["tp_size"] == 2
        strategy.update_engine_weights(actor)
        own = PROMPTS[2 * dist.get_rank() :][: 2 - dist.get_rank()]
        outputs = strategy.gather_and_generate(GREEDY, own)
        assert [output.output_token_ids for output in outputs] == expected_of(actor, own)
        strategy.close()


@pytest.mark.parametrize("package", ["sglang", "vllm"])
def test_the_trainers_arguments_are_those_of_the_engine(package, monkeypatch):
    args = arguments(
        engine_mem_util=0.3, seed=7, prompt_max_len=10, generate_max_len=20, text_only=False,
        limit_mm_image_per_prompt=2, enable_engine_sleep=False,
    )  # fmt: skip
    with installed(monkeypatch, package) as calls:
        engine = {"sglang": SGLangEngine, "vllm": VLLMEngine}[package].from_args(args, torch.float16)
        (_, options), *_ = calls
        if package == "sglang":
            assert options["mem_fraction_static"] == 0.3 and not options["enable_memory_saver"]
        else:
            assert options["gpu_memory_utilization"] == 0.3 and not options["enable_sleep_mode"]
            assert options["max_model_len"] == 30 and options["limit_mm_per_prompt"] == {"image": 2}
            assert options["distributed_executor_backend"] == "external_launcher"
            assert engine.llm_engine.model_config.max_model_len == 30
        assert options["dtype"] == "float16"
        with pytest.raises(RolloutError, match="built without allows_sleep"):
            engine.sleep()


def test_weights_are_sent_to_sglang_in_buckets_and_its_failure_is_an_error(monkeypatch):
    model = build("llama")
    largest = max(parameter.nbytes for parameter in model.parameters())
    with installed(monkeypatch, "sglang") as calls:
        engine = SGLangEngine("folder", bucket_bytes=2 * largest)
        engine.update_weights(stream_weights(model))
        sent = [call[1] for call in calls if call[0] == "bucket"]
        assert len(sent) > 1 and sum(sent) == len(list(model.parameters())) and calls[-1] == ("flush",)
        engine.sleep()
        assert calls[-1] == ("release", ["kv_cache", "cuda_graph"]), "the weights stay"
        engine.wake_up()
        assert calls[-1] == ("resume", ["kv_cache", "cuda_graph"])
    with installed(monkeypatch, "sglang", fails=True) as calls:
        engine = SGLangEngine("folder")
        for _ in range(2):  # the session is closed after an error
            with pytest.raises(RolloutError, match="an unknown name"):
                engine.update_weights(stream_weights(model))
            assert calls[-1] == ("end",)
        with pytest.raises(RolloutError, match="does not have all of its weights"):
            engine.generate(sampling_params=GREEDY, input_ids=PROMPTS)


@pytest.mark.parametrize("has_sessions", [True, False])
def test_weights_are_sent_to_sglang_in_a_session_if_its_version_has_them(has_sessions, monkeypatch):
    model = build("llama")
    with installed(monkeypatch, "sglang", has_sessions=has_sessions) as calls:
        engine = SGLangEngine("folder")
        for _ in range(2):
            engine.update_weights(stream_weights(model))
        session = ["begin", "bucket", "end", "flush"] if has_sessions else ["bucket", "flush"]
        assert [call[0] for call in calls] == ["build", *session, *session]
        outputs = engine.generate(sampling_params=GREEDY, input_ids=PROMPTS, image_data=None)
        assert [output["output_ids"] for output in outputs] == expected_of(model)


TRANSFER = ["start", "reload", "convert", "finish", "reset encoder", "reset"]


def vllm_tokens(engine):
    params = sys.modules["vllm"].SamplingParams(max_tokens=5, temperature=0)
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("options", "update"),
    [
        ({}, TRANSFER),
        ({"experts": "FLASHINFER_CUTLASS"}, TRANSFER),
        ({"has_transfer": False}, ["reload", "convert", "reset"]),
    ],
)
def test_vllm_reloads_its_layers_in_every_update_whatever_layout_its_kernels_need(options, update, monkeypatch):
    model = build("llama")
    with installed(monkeypatch, "vllm", **options) as calls:
        engine = VLLMEngine("folder")
        for _ in range(2):
            for parameter in model.parameters():
                parameter.data.mul_(1.1)
            engine.update_weights(stream_weights(model))
            assert vllm_tokens(engine) == expected_of(model)
        assert [call[0] for call in calls] == ["build", *update, *update]


@pytest.mark.parametrize("fault", ["a tensor is missing", "the stream raises"])
def test_vllm_does_not_generate_after_a_failed_update_and_takes_the_next(fault, monkeypatch):
    model = build("llama")
    with installed(monkeypatch, "vllm") as calls:
        engine = VLLMEngine("folder")
        engine.update_weights(stream_weights(model))

        def broken():
            for index, pair in enumerate(stream_weights(model)):
                if index == 3:
                    if fault == "the stream raises":
                        raise RolloutError("cannot go on")
                    continue
                yield pair

        with pytest.raises(RolloutError, match=r"cannot go on|not received"):
            engine.update_weights(broken())
        assert calls[-1] == ("convert",), "no layer stays half loaded"
        with pytest.raises(RolloutError, match="does not have all of its weights"):
            vllm_tokens(engine)
        engine.update_weights(stream_weights(model))
        assert vllm_tokens(engine) == expected_of(model)


@pytest.mark.parametrize("experts", [None, "TRITON"])
@pytest.mark.ranks(1, 2)
def test_vllm_takes_differences(experts, monkeypatch):
    with installed(monkeypatch, "vllm", experts=experts) as calls:
        strategy = FSDPV2Strategy(args=arguments(), bf16=True)
        actor = strategy.prepare_model(build("llama"), is_training=True)
        optimizer = strategy.create_optimizer(actor, lr=1e-4)
        engine = strategy.setup_inference_engine(strategy.args, "vllm", actor)
        updates = []
        for step in range(3):
            strategy.backward(
                actor(**batch_of("llama", step, dist.get_rank())).logits.square().mean(), actor, optimizer
            )
            strategy.optimizer_step(optimizer, actor)
            updates.append(strategy.update_engine_weights(actor, by_difference=True))
            assert engine.weights_version == updates[-1].version
        assert [update.is_full for update in updates] == [True, False, False]
        assert updates[1].sent_bytes < updates[0].sent_bytes
        assert [call[0] for call in calls if call[0] in ("reload", "patch")] == ["reload"] * 2 + ["patch"] * 2
        strategy.wakeup_inference_engine()
        assert vllm_tokens(engine) == expected_of(actor)
        with pytest.raises(RolloutError, match=r"has version .*, expected other, since which"):
            engine.update_changed_weights(iter(()), since="other", version="new")
        strategy.close()


def test_patches_are_written_in_batches_of_a_limited_size(monkeypatch):
    model = build("llama")
    with installed(monkeypatch, "vllm") as calls:
        engine = VLLMEngine("folder")
        stream = stream_weights(model, since="")
        engine.update_changed_weights(stream, since="", version=stream.version)
        for parameter in model.parameters():
            parameter.data.view(-1)[0] += 1
        stream = stream_weights(model, since=stream.version)
        monkeypatch.setattr("fsdp2_strategy.sizes.BUCKET_BYTES", model.lm_head.weight.nbytes)
        engine.update_changed_weights(stream, since=engine.weights_version, version=stream.version)
        assert len([call for call in calls if call[0] == "patch"]) > 1
        assert sum(call[1] for call in calls if call[0] == "patch") == len(list(model.parameters()))
        assert vllm_tokens(engine) == expected_of(model)


@pytest.mark.parametrize(
    ("package", "options", "match"),
    [
        ("vllm", {"experts": "FLASHINFER_CUTLASS"}, "vLLM converts 1 layer .experts .Module.. for its kernels"),
        ("vllm", {"has_transfer": False}, "this version of vLLM reloads weights layer by layer"),
        ("sglang", {}, "SGLangEngine has no update_changed_weights"),
    ],
)
@pytest.mark.ranks(2)
def test_differences_that_an_engine_does_not_take_are_an_error_on_every_rank(package, options, match, monkeypatch):
    with installed(monkeypatch, package, **options):
        strategy = FSDPV2Strategy(args=arguments())
        actor = strategy.prepare_model(build("llama"), is_training=True)
        strategy.setup_inference_engine(strategy.args, package, actor)
        with pytest.raises(RolloutError, match=match):
            strategy.update_engine_weights(actor, by_difference=True)
        strategy.update_engine_weights(actor)
        strategy.close()


@pytest.mark.ranks(1)
def test_a_difference_is_written_when_no_save_copies_tensors(monkeypatch):
    """While vLLM writes patches, torch.Tensor.copy_ is its own, in all threads."""
    saved = []

    def fail_late():
        time.sleep(1)
        saved.append(True)
        raise OSError("the disk is full")

    with installed(monkeypatch, "vllm") as calls:
        engine, model = VLLMEngine("folder"), cleared()
        stream = stream_weights(model, since="")
        engine.update_changed_weights(stream, since="", version=stream.version)
        next(model.parameters()).data.view(-1)[0] += 1
        background_save.save_in_background("a checkpoint", fail_late)
        patches = sys.modules["vllm.model_executor.model_loader.checkpoint_weight_patch"]
        load = patches.load_checkpoint_weight_patches

        def noted(*args, **options):
            calls.append(("after", len(saved)))
            load(*args, **options)

        patches.load_checkpoint_weight_patches = noted
        changes = stream_weights(model, since=stream.version)
        engine.update_changed_weights(changes, since=engine.weights_version, version=changes.version)
        assert {call for call in calls if call[0] == "after"} == {("after", 1)}
        with pytest.raises(CheckpointError, match="the disk is full"):  # the next save or wait hears of it
            background_save.wait()


def test_a_difference_of_integers_is_an_error(monkeypatch):
    with installed(monkeypatch, "vllm"):
        engine = VLLMEngine("folder")
        engine.update_changed_weights(stream_weights(build("llama")), since="", version="1")
        with pytest.raises(RolloutError, match="count has dtype int64, expected a floating-point dtype"):
            engine.update_changed_weights(iter([("count", torch.ones(2, dtype=torch.int64))]), since="1", version="2")


def test_a_vllm_without_a_documented_way_to_update_weights_is_an_error(monkeypatch):
    with installed(monkeypatch, "vllm", has_transfer=False, has_reload=False):
        with pytest.raises(RolloutError, match=r"vllm has version 0\.33\.0, expected one that transfers weights"):
            VLLMEngine("folder")
        for send in (vllm_weight_source, lambda model: vllm_patches(stream_weights(model, since=""))):
            with pytest.raises(RolloutError, match="cannot send weights to vLLM: its version"):
                send(build("llama"))
    with installed(monkeypatch, "vllm"), pytest.raises(RolloutError, match="weight_transfer_config was passed"):
        VLLMEngine("folder", weight_transfer_config={"backend": "nccl"})


@pytest.mark.ranks(1, 2)
def test_a_source_for_vllm_declares_what_it_streams_in_the_same_order(monkeypatch):
    with installed(monkeypatch, "vllm"):
        actor = FSDPV2Strategy().prepare_model(build("gemma3"), is_training=True)
        source = vllm_weight_source(actor, bucket_bytes=1000)
        for _ in range(2):
            sent = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source.iter_full()]
            assert sent == [(each.name, each.dtype, each.shape) for each in source.metadata]
            next(actor.parameters()).data.mul_(2)


@pytest.mark.ranks(1, 2)
def test_patches_for_vllm_are_the_changes_of_a_stream(monkeypatch):
    with installed(monkeypatch, "vllm"):
        actor = FSDPV2Strategy().prepare_model(build("llama"), is_training=True)
        stream = stream_weights(actor, since="")
        with pytest.raises(RolloutError, match="the stream has all weights"):
            vllm_patches(stream)
        stream = stream_weights(actor, since="")
        weights = dict(stream)
        for parameter in actor.parameters():
            parameter.data.mul_(1.01)
        patches = vllm_patches(stream_weights(actor, since=stream.version))
        assert {patch.indices.dtype for patch in patches} == {torch.int32}
        for patch in patches:
            weights[patch.name].view(-1)[patch.indices.long()] = patch.values
            assert patch.full_shape == tuple(weights[patch.name].shape)
        for name, tensor in stream_weights(actor):
            assert torch.equal(weights[name], tensor)


@pytest.mark.parametrize("package", ["sglang", "vllm"])
@pytest.mark.ranks(2)
def test_a_missing_package_or_argument_is_an_error_on_every_rank(package, monkeypatch):
    strategy = FSDPV2Strategy()
    actor = strategy.prepare_model(build("llama"), is_training=False)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, package, None)
        with pytest.raises(RolloutError, match=f"the package {package} is not installed"):
            strategy.setup_inference_engine(arguments(), package, actor)
    with pytest.raises(RolloutError, match="args has no pretrain"):
        strategy.setup_inference_engine({}, package, actor)
    with pytest.raises(RolloutError, match="expected a divisor of the number of ranks 2"):
        strategy.setup_inference_engine(arguments(engine_tp_size=3), package, actor)


def test_the_stand_ins_refuse_arguments_that_the_published_versions_do_not_take():
    sglang, vllm = fakes.sglang(cleared, []), fakes.vllm(cleared, [])
    with pytest.raises(TypeError, match=r"ServerArgs of sglang 0\.5\.\d+ has no \['modelpath'\]"):
        sglang.Engine(modelpath="folder")
    with pytest.raises(TypeError, match=r"EngineArgs of vllm 0\.\d+\.\d+ has no \['sleep'\]"):
        vllm.LLM(model="folder", sleep=True)
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        vllm.LLM()
    with pytest.raises(TypeError, match="named_tensor"):
        sglang.Engine().update_weights_from_tensor(named_tensor=[])
    with pytest.raises(TypeError, match="SamplingParams of vllm"):
        vllm.SamplingParams(max_new_tokens=3)
