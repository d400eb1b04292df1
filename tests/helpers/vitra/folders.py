"""Make a tiny PaliGemma, episodes of hands and a configuration, in the formats that VITRA reads."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

VOCABULARY = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<image>", "<unused0>", "\n", "▁"]
VOCABULARY += [*string.ascii_letters, ".", ":"]
IMAGE_TOKEN, COGNITION_TOKEN = VOCABULARY.index("<image>"), VOCABULARY.index("<unused0>")
IMAGE, PATCH = 28, 14
FRAMES = 12

SETS = {
    "ego4d_cooking_and_cleaning": ("Ego4D_kitchen", "Ego4D_root/kitchen.mp4"),
    "egoexo4d": ("EgoExo4D_table", "EgoExo4D_root/table.mp4"),
    "epic": ("epic_sink", "Epic-Kitchen_root/sink.MP4"),
    "ssv2": ("somethingsomethingv2_7", "Somethingsomething-v2_root/7.webm"),
    "ego4d_other": ("Ego4D_garden", "Ego4D_root/garden.mp4"),
}
"""The data sets of VITRA's mixture ``magic_mix``: the name of an episode, and its video below ``Video``."""


def tokenizer():
    """Return Gemma's tokenizer with a vocabulary of characters."""
    from transformers import GemmaTokenizer

    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    return GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=256)


def paligemma(folder):
    """Save a tiny PaliGemma with random weights, and its processor; the files can be read by transformers 4.47, too."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        Gemma2Config,
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PaliGemmaProcessor,
        SiglipImageProcessor,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=IMAGE,
        patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    text = Gemma2Config(
        vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        initializer_range=0.2, attn_logit_softcapping=1.0,
    )  # fmt: skip
    config = PaliGemmaConfig(
        text_config=text.to_dict(), vision_config={**vision.to_dict(), "projection_dim": 32},
        image_token_index=IMAGE_TOKEN, projection_dim=32, hidden_size=32, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    PaliGemmaForConditionalGeneration(config).save_pretrained(folder)
    images = SiglipImageProcessor(size={"height": IMAGE, "width": IMAGE})
    images.image_seq_length = (IMAGE // PATCH) ** 2
    PaliGemmaProcessor(images, tokenizer()).save_pretrained(folder)
    images.save_pretrained(folder)
    (Path(folder) / "processor_config.json").unlink()
    words = Path(folder) / "tokenizer_config.json"
    words.write_text(words.read_text().replace("extra_special_tokens", "additional_special_tokens"))
    weights = Path(folder) / "model.safetensors"
    names = {name: name.removeprefix("model.") for name in load_file(weights)}
    save_file({names[name]: tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})


def episodes(root, *, rephrased):
    """Write one episode of each data set: a video, the movement of both hands, and the texts.

    Args:
        root: the folder.
        rephrased: whether each text has other wordings, among which VITRA draws.
    """
    annotations = Path(root) / "Annotation"
    for number, (name, (episode, video)) in enumerate(SETS.items()):
        draw = np.random.default_rng(number)
        path = Path(root) / "Video" / video
        path.parent.mkdir(parents=True, exist_ok=True)
        write_video(path, draw)
        folder = annotations / name / "episodic_annotations"
        folder.mkdir(parents=True)
        content = _episode(path.stem, draw, main="left" if number % 2 else "right")
        if not rephrased:
            del content["text_rephrase"]
        np.save(folder / f"{episode}.npy", content)
        index = np.array([[0, frame] for frame in range(FRAMES)])
        np.savez(folder.parent / "episode_frame_index.npz", index_frame_pair=index,
                 index_to_episode_id=np.array([episode]))  # fmt: skip


def write_video(path, draw):
    """Write a video of coloured squares; ``.webm`` in VP9, others in MPEG-4.

    Its size is that of the model's images, because transformers 5 resizes with torchvision, and 4.47 with PIL, whose
    results differ by 1 of 255.
    """
    import av

    with av.open(str(path), "w", format="webm" if path.suffix == ".webm" else "mp4") as container:
        stream = container.add_stream("vp9" if path.suffix == ".webm" else "mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = IMAGE, IMAGE, "yuv420p"
        stream.time_base = Fraction(1, 10)
        for _ in range(FRAMES):
            image = np.kron(draw.integers(0, 255, (7, 7, 3), dtype=np.uint8), np.ones((4, 4, 1), dtype=np.uint8))
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _episode(video, draw, main):
    other = "left" if main == "right" else "right"
    camera = np.tile(np.eye(4), (FRAMES, 1, 1))
    camera[:, :3, 3] = draw.normal(0, 0.01, (FRAMES, 3))
    return {
        "video_name": video,
        "video_decode_frame": np.arange(FRAMES),
        "anno_type": main,
        "text": {main: [("take the red cup", (0, FRAMES))], other: [("put the blue plate down", (3, 9))]},
        "text_rephrase": {main: [(["take the cup up", "take up the red cup"],)], other: [(["put the plate down"],)]},
        "intrinsics": np.array([[30.0, 0, IMAGE / 2], [0, 30.0, IMAGE / 2], [0, 0, 1]]),
        "extrinsics": camera,
        "left": _hand(draw, -0.1),
        "right": _hand(draw, 0.1),
    }


def _hand(draw, x):
    from scipy.spatial.transform import Rotation

    wrist = np.array([x, 0, 0.6]) + draw.normal(0, 0.02, (FRAMES, 3)).cumsum(axis=0) * 0.2
    turns = Rotation.from_rotvec(draw.normal(0, 0.2, (FRAMES * 15, 3))).as_matrix().reshape(FRAMES, 15, 3, 3)
    return {
        "beta": draw.normal(0, 0.1, 10),
        "kept_frames": np.arange(FRAMES) != 5,
        "global_orient_worldspace": Rotation.from_rotvec(draw.normal(0, 0.3, (FRAMES, 3))).as_matrix(),
        "transl_worldspace": wrist,
        "hand_pose": turns,
        "joints_worldspace": wrist[:, None] + draw.normal(0, 0.03, (FRAMES, 21, 3)),
    }


def statistics(root, peer):
    """Compute the statistics of all data sets with VITRA's own program, in a child process."""
    code = (
        "import sys; from helpers.vitra import stubs; stubs.install();"
        "from vitra.datasets.dataset import FrameDataset; from vitra.datasets import calculate_statistics as c;"
        "[c.compute_statistics(FrameDataset(sys.argv[1], name, load_images=False, state_mask_prob=0.0),"
        " num_workers=0, save_folder=sys.argv[2]) for name in sys.argv[3:]]"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(root), str(Path(root) / "Annotation" / "statistics"), *SETS],
        env={**os.environ, "PYTHONPATH": f"{peer}:{Path(__file__).parents[2]}"},
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip


def configuration(folder, model, data, **changed):
    """Write the configuration of a run, as VITRA's own ``human_pretrain.json``, in small; return its path.

    Args:
        folder: the folder of the run.
        model, data: folders of `paligemma` and `episodes`.
        **changed: other values; those of the sections "trainer", "train_setup" and "train_dataset" by their own names.
    """
    config = {
        "vla_name": "VITRA_Paligemma", "task_name": "pretrain", "model": "vitra_paligemma2", "fwd_pred_next_n": 4,
        "seed": 42, "batch_size": 2, "total_batch_size": 8, "output_root": f"{folder}/checkpoints",
        "log_root": f"{folder}/logs", "cache_root": f"{folder}/cache", "model_load_path": None, "resume": True,
        "wandb_project": "test", "wandb_entity": "", "save_steps": 3, "epoch_save_interval": 1, "use_bf16": False,
        "use_fov": True, "untied_cognition_token": True, "cognition_token_id": COGNITION_TOKEN, "use_state": "DiT",
        "loss_type": "human", "train_setup": {"freeze_option": "freeze_vision_encoder"},
        "state_encoder": {"state_dim": 212},
        "action_model": {"model_type": "DiT-T", "token_size": 32, "action_dim": 192, "hidden_size": 256},
        "vlm": {"type": "PaliGemmaForConditionalGeneration", "name": "paligemma",
                "pretrained_model_name_or_path": str(model)},
        "trainer": {
            "sharding_strategy": "shard-grad-op", "strategy": "fsdp_paligemma_with_checkpointing",
            "lr_scheduler_type": "backbone-freeze-warmup", "gradient_clip_val": 1.0, "learning_rate": 1e-3,
            "weight_decay": 0.1, "max_epochs": 2, "max_steps": 6, "reduce_in_full_precision": True,
            "enable_mixed_precision_training": False, "enable_gradient_checkpointing": True,
            "action_model_learning_rate": 1e-3, "llm_freeze_step": 0, "warmup_ratio": None,
            "optimizer_betas": [0.9, 0.95],
        },
        "train_dataset": {
            "data_root_dir": str(data), "augmentation": True, "set_none_ratio": 0.0, "data_mix": "magic_mix",
            "num_workers": 0, "prefetch_factor": None, "flip_augmentation": 1.0, "action_type": "angle",
            "use_rel": False, "clip_len": None, "normalization": True, "state_mask_prob": 0.1,
            "target_image_height": 48,
        },
        "repeated_diffusion_steps": 2,
    }  # fmt: skip
    for name, value in changed.items():
        sections = [section for section in ("trainer", "train_setup", "train_dataset") if name in config[section]]
        (config[sections[0]] if sections else config)[name] = value
    path = Path(folder) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=1))
    return path
