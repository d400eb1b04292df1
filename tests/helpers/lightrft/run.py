"""Make folders of tiny models and prompts, and start LightRFT's script on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from helpers.peers import peer

SCRIPT = "examples/gsm8k_geo3k/train_colocate.py"
WORDS = ["[PAD]", "[EOS]", "[UNK]", "<think>", "</think>", "add", "one", "two", "three", "and", "is"]
WORDS += [f"\\boxed{{{n}}}" for n in range(1, 5)]

PATCH, IMAGE_TOKEN = 4, 290


def tokenizer():
    """Return a tokenizer of `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def text_model(folder):
    """Save a tiny Granite with its tokenizer."""
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def vision_model(folder):
    """Save a tiny Qwen2.5-VL with a tokenizer of bytes and `WORDS`."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

    alphabet = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    words = Qwen2Tokenizer(vocab=alphabet, merges=[], unk_token=None, eos_token="[EOS]", pad_token="[PAD]")
    words.add_tokens([word for word in WORDS if not word.startswith("[")])
    words.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": words.eos_token_id,
            "bos_token_id": None, "pad_token_id": words.pad_token_id, "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE_TOKEN, video_token_id=291, vision_start_token_id=292, vision_end_token_id=293,
    )  # fmt: skip
    config.hidden_size = 32  # LightRFT's critic reads it at the top level, where transformers 4 answered it
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


def prompts(path, count=16):
    """Write prompts as LightRFT's data sets of mathematics have them."""
    rows = []
    for n in range(count):
        text = f"add {['one', 'two', 'three'][n % 3]} and {['one', 'two', 'three'][n // 3 % 3]} {'is ' * (n % 5)}is"
        answer = str(n % 4 + 1)
        rows.append({"prompt": text, "label": "gsm8k_rule", "reward_model": {"ground_truth": answer}})
    Path(path).write_text("\n".join(map(json.dumps, rows)))


def arguments(folder, **changed):
    """Return the options of the script, as its own shell script sets them, in small."""
    options = {
        "pretrain": folder / "model", "reward_pretrain": "{}", "prompt_data": folder / "prompts.jsonl",
        "input_key": "prompt", "label_key": "label", "save_path": folder / "out", "ckpt_path": folder / "ckpts",
        "micro_train_batch_size": 2, "train_batch_size": 8, "micro_rollout_batch_size": 4, "rollout_batch_size": 4,
        "n_samples_per_prompt": 4, "max_epochs": 1, "num_episodes": 1, "lr_warmup_ratio": 0.1, "prompt_max_len": 24,
        "generate_max_len": 8, "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "init_kl_coef": 0.01,
        "kl_estimator": "k3", "engine_type": "sglang", "engine_tp_size": 1, "l2": 0.01, "save_steps": 2,
        "max_ckpt_num": 3, "eval_split": "", "advantage_estimator": "group_norm", "fsdp": True, "use_kl_loss": True,
        "text_only": True, "adam_offload": True, "rm_use_engine": True, "bf16": True,
    }  # fmt: skip
    result = []
    for name, value in {**options, **changed}.items():
        if value is True:
            result.append(f"--{name}")
        elif value is not None and value is not False:
            result += [f"--{name}", str(value)]
    return result


def run(tmp_path, args, *, strategy="ours", scripted=True, order="ours", options=None, patches=(), name="record"):
    """Run the script on two ranks; return the records of both, or raise with what it printed."""
    source = peer("lightrft")
    words = AutoTokenizer.from_pretrained(args[args.index("--pretrain") + 1])
    spoken = words.convert_tokens_to_ids([word for word in WORDS if not word.startswith("[")])
    settings = {
        "peer": str(source), "script": SCRIPT, "strategy": strategy, "order": order, "options": options or {},
        "engine": {"scripted": scripted, "words": spoken, "answers": spoken[-4:], "end": words.eos_token_id},
        "patches": list(patches),
        "record": str(tmp_path / name),
    }  # fmt: skip
    (tmp_path / f"{name}.settings.json").write_text(json.dumps(settings))
    child = Path(__file__).with_name("child.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(child)]
    done = subprocess.run(
        [*command, str(tmp_path / f"{name}.settings.json"), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    (tmp_path / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise AssertionError(f"the script failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return [json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in range(2)]
