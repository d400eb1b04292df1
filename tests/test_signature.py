"""Signed checkpoints: a load with the key refuses whatever the key did not sign, on every rank, by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import xxhash
from helpers.models import build
from helpers.training import prepared, strategy_for, train

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, list_checkpoints, verify_checkpoint
from fsdp2_strategy.checkpoint import load_checkpoint, reader, save_checkpoint
from fsdp2_strategy.checkpoint.listing import digest_of_manifest
from fsdp2_strategy.checkpoint.paths import CheckpointPaths
from fsdp2_strategy.checkpoint.signature import read_key
from fsdp2_strategy.cli import main
from fsdp2_strategy.errors import ArgumentError, CheckpointError, DamageError
from fsdp2_strategy.integrations.lerobot import LeRobotLayout
from fsdp2_strategy.integrations.trl import TrainerLayout
from fsdp2_strategy.model.failed_loads import check_usable

KINDS = ("own", "several", "lerobot", "trainer", "only trainable", "async")


def make_key(path, content=b"k" * 32, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path / "key")


def strategy_with(key):
    return FSDPV2Strategy(config=StrategyConfig(bf16=False, checkpoint_key_file=key and str(key)))


def made(strategy, kind):
    """Return a model, or several, and the options of a save."""
    model, optimizer, scheduler = prepared(strategy)
    if kind == "only trainable":
        model.get_input_embeddings().requires_grad_(False)
    train(strategy, model, optimizer, scheduler, range(1))
    options = {"async_save": kind == "async", "only_trainable": kind == "only trainable"}
    if kind == "lerobot":
        options["layout"] = LeRobotLayout(total_steps=9, batch_size=1, train_config={"a": 1})
    if kind == "trainer":
        options["layout"] = TrainerLayout(files={"trainer_state.json": "{}"})
    if kind == "several":
        critic, critics, schedule = prepared(strategy)
        train(strategy, critic, critics, schedule, range(1))
        return {"actor": model, "critic": critic}, options
    return model, options


def saved(folder, key, kind):
    strategy = strategy_with(key)
    model, options = made(strategy, kind)
    strategy.save_ckpt(model, folder / "ckpts", "one", client_state={"value": 1}, meta={"a": 1}, **options)
    strategy.wait_for_checkpoint()


def loaded(folder, key, kind, refusal=None):
    """Load into an other state; it is refused with this text, or restores the values."""
    strategy = strategy_with(key)
    model, _ = made(strategy, kind)
    parts = [*model.values()] if kind == "several" else [model]
    before = [p.detach().clone() for part in parts for p in part.parameters()]
    if refusal is None:
        assert strategy.load_ckpt(model, folder / "ckpts")[1] == {"value": 1}
        return
    with pytest.raises(DamageError, match=refusal):
        strategy.load_ckpt(model, folder / "ckpts")
    after = [p.detach() for part in parts for p in part.parameters()]
    if not all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(before, after, strict=True)):
        with pytest.raises(CheckpointError, match="a load failed midway"):
            for part in parts:
                check_usable(part)


def reseal(path):
    """Make all checksums match again after a change, as somebody without the key can."""
    paths = CheckpointPaths.found_in(path)
    manifest = json.loads(paths.manifest.read_bytes())
    for name in manifest["checksums"]:
        listed = json.loads((path / name).read_bytes())
        for file, blocks in listed["blocks"].items():
            content = (path / file).read_bytes()
            for block in blocks:
                part = content[block[0] : block[1]]
                if len(block) == 5:
                    run, stride = block[3:]
                    part = b"".join(part[at : at + run] for at in range(0, len(part), stride))
                block[2] = xxhash.xxh3_64_hexdigest(part)
        text = json.dumps(listed).encode()
        (path / name).write_bytes(text)
        manifest["files"][name], manifest["checksums"][name] = len(text), xxhash.xxh3_64_hexdigest(text)
    manifest["digest"] = digest_of_manifest(manifest)
    paths.manifest.write_text(json.dumps(manifest))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["own", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS[1:])])
def test_a_signed_checkpoint_loads_with_its_key_and_without_one(kind, tmp_path, key, run_on):
    run_on(2, saved, folder=tmp_path, key=key, kind=kind)
    for ranks, used in ((2, key), (1, key), (3, key), (2, None)):
        run_on(ranks, loaded, folder=tmp_path, key=used, kind=kind)
    assert [c.tag for c in list_checkpoints(tmp_path / "ckpts", key_file=key)] == ["one"]
    assert verify_checkpoint(tmp_path / "ckpts/one", key_file=key).ok and verify_checkpoint(tmp_path / "ckpts/one").ok


@pytest.mark.parametrize("kind", ["own", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS[1:])])
def test_a_changed_byte_of_any_file_is_refused_whoever_makes_the_checksums_match(kind, tmp_path, key, run_on):
    run_on(2, saved, folder=tmp_path, key=key, kind=kind)
    path = tmp_path / "ckpts/one"
    kept = tmp_path / "kept"
    shutil.copytree(path, kept)
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and f.name != "manifest.json"]
    changed = [f for f in files if f.parent.name != "checksums"]
    assert len(changed) > 5
    if kind == "own":  # of each kind of file one, in the default tests
        changed = [
            next(f for f in changed if f.suffix == suffix and f.parent.name == folder) for suffix, folder in SOME
        ]
    for file in changed:
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[-1] ^= 1
        else:
            content = content.replace(b"1", b"2")
        if content == file.read_bytes():
            continue
        file.write_bytes(content)
        reseal(path)
        run_on(2, loaded, folder=tmp_path, key=key, kind=kind, refusal="does not match its manifest")
        assert not verify_checkpoint(path, key_file=key).ok
        # A changed number may be one that no save writes, but xxh3 is no signature.
        assert not any("checksum" in problem for problem in verify_checkpoint(path).problems)
        shutil.rmtree(path)
        shutil.copytree(kept, path)


SOME = [(".safetensors", "optimizer"), (".json", "model"), (".safetensors", "rng"), (".json", "one")]


def change(folder, file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("name", ["model/model.safetensors", "model/config.json", "rng/rank00001.safetensors"])
def test_a_changed_byte_is_found_by_its_digest_on_other_numbers_of_ranks(name, tmp_path, key, run_on):
    run_on(2, saved, folder=tmp_path, key=key, kind="own")
    change(tmp_path, tmp_path / "ckpts/one" / name, -1)
    for ranks in (1, 2):
        run_on(ranks, loaded, folder=tmp_path, key=key, kind="own", refusal=f"{Path(name).name}.*have the checksum")


def test_unsigned_stripped_changed_and_otherwise_signed_manifests_are_refused(tmp_path, key, run_on):
    other = make_key(tmp_path / "other", b"o" * 40)
    run_on(2, saved, folder=tmp_path, key=None, kind="own")
    run_on(2, loaded, folder=tmp_path, key=key, kind="own", refusal="it has no signature, expected")
    run_on(2, saved, folder=tmp_path, key=key, kind="own")
    run_on(
        2, loaded, folder=tmp_path, key=other, kind="own", refusal="it is signed with the key '[0-9a-f]{16}', and this"
    )
    assert list_checkpoints(tmp_path / "ckpts", key_file=other) == []
    assert "signed with the key" in verify_checkpoint(tmp_path / "ckpts/one", key_file=other).problems[0]
    path = tmp_path / "ckpts/one"
    manifest = json.loads((path / "manifest.json").read_bytes())
    signature = manifest["signature"]
    for changed, refusal in (
        ({k: v for k, v in manifest.items() if k != "signature"}, "it has no signature"),
        (manifest | {"step": 7}, "does not match its manifest"),
        (manifest | {"sequence": 700}, "does not match its manifest"),
        (manifest | {"signature": signature | {"hmac": "0" * 64}}, "does not match its manifest"),
        (manifest | {"signature": signature | {"hmac": None}}, "does not match its manifest"),
        (manifest | {"signature": signature | {"checksums": {}}}, "does not match its manifest"),
        (manifest | {"signature": {**signature, "algorithm": "none"}}, "of an unknown kind"),
        (manifest | {"signature": "x"}, "of an unknown kind"),
        (manifest | {"signature": signature | {"key": ["x"] * 1000}}, "it is signed with the key"),
    ):
        (path / "manifest.json").write_text(json.dumps(changed | {"digest": digest_of_manifest(changed)}))
        (problem,) = verify_checkpoint(path, key_file=key).problems
        assert refusal in problem and len(problem) < 1000
        assert list_checkpoints(tmp_path / "ckpts", key_file=key) == []
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert verify_checkpoint(path, key_file=key).ok


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("name", ["trainable", "ema"])
def test_a_folder_that_a_load_would_read_instead_is_refused(name, tmp_path, key, run_on):
    run_on(2, saved, folder=tmp_path, key=key, kind="own")
    (tmp_path / "ckpts/one/eval_results.json").write_text("{}")
    (tmp_path / "ckpts/one/model/notes.txt").write_text("mine")
    run_on(2, loaded, folder=tmp_path, key=key, kind="own")
    (tmp_path / "ckpts/one" / name).mkdir()
    run_on(2, loaded, folder=tmp_path, key=key, kind="own", refusal=rf"/{name} was added after it was signed")


@pytest.mark.ranks(2)
def test_a_fallback_goes_to_an_older_signed_checkpoint(tmp_path):
    key = tmp_path / "key"
    if dist.get_rank() == 0:
        make_key(key)
    dist.barrier()
    model = strategy_for().prepare_model(build("llama"), is_training=False)
    save_checkpoint(model, tmp_path / "ckpts", "signed", key_file=key)
    save_checkpoint(model, tmp_path / "ckpts", "not signed")
    with pytest.raises(DamageError, match=r"cannot trust .*/not signed: it has no signature"):
        load_checkpoint(model, tmp_path / "ckpts", key_file=key)
    found = load_checkpoint(model, tmp_path / "ckpts", key_file=key, fallback=True)
    assert found.path.name == "signed"
    with pytest.raises(ArgumentError, match="verify is False and there is a key file"):
        load_checkpoint(model, tmp_path / "ckpts", key_file=key, verify=False)
    torch.save({}, tmp_path / "theirs.pt") if dist.get_rank() == 0 else None
    dist.barrier()
    with pytest.raises(DamageError, match="it has no signature, because another system wrote it"):
        load_checkpoint(model, tmp_path / "theirs.pt", key_file=key, trust=True)


@pytest.mark.ranks(2)
def test_a_key_file_that_others_can_read_is_an_error_on_all_ranks_before_a_save_or_load(tmp_path):
    model = strategy_for().prepare_model(build("llama"), is_training=False)
    if dist.get_rank() == 0:
        make_key(tmp_path / "key", mode=0o640)
    dist.barrier()
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(
            CheckpointError,
            match=r"cannot use the key file .*/key: its mode is 0640, expected",
        ):
            call(model, tmp_path / "ckpts", key_file=tmp_path / "key")
    assert not (tmp_path / "ckpts").exists()


def test_key_files_that_are_no_keys_are_named(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    make_key(tmp_path / "short", b"k" * 31)
    make_key(tmp_path / "long", bytes(1 << 20) + b"k")
    for name, problem in {
        "pipe": "not a regular file",
        "folder": "not a regular file",
        "short": "it has 31 bytes",
        "long": "it has 1048577 bytes",
        "missing": "No such file",
        "nul\0": "null byte",
    }.items():
        with pytest.raises(CheckpointError, match=rf"cannot use the key file .*: .*{problem}.*expected a regular file"):
            read_key(tmp_path / name)
    (tmp_path / "link").symlink_to(make_key(tmp_path / "key", b"q" * 32, 0o400))
    assert read_key(tmp_path / "link") == b"q" * 32
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CheckpointError, match="it belongs to user"):
        read_key(tmp_path / "key")


def test_a_checksum_manifest_with_the_same_xxh3_is_refused(tmp_path, key, run_on, monkeypatch):
    """Whoever finds a collision of xxh3 can replace a checksum manifest without a change of the manifest."""
    run_on(2, saved, folder=tmp_path, key=key, kind="own")
    path = tmp_path / "ckpts/one"
    manifest = json.loads((path / "manifest.json").read_bytes())
    name = "checksums/rank00000.json"
    content = (path / name).read_bytes()
    monkeypatch.setattr(reader, "digest_of", lambda content: manifest["checksums"][name])
    (path / name).write_bytes(content.replace(b"0", b"1"))
    problems = verify_checkpoint(path, key_file=key).problems
    assert any("rank00000.json is not the file that was signed" in problem for problem in problems)


def test_every_command_takes_the_key(tmp_path, key, run_on, capsys):
    run_on(2, saved, folder=tmp_path, key=key, kind="own")
    other = make_key(tmp_path / "other", b"o" * 40)
    ckpts, out = str(tmp_path / "ckpts"), str(tmp_path / "out")
    commands = [["ls", ckpts], ["verify", ckpts], ["inspect", ckpts], ["diff", ckpts, ckpts], ["export", ckpts, out]]
    for command in commands:
        assert main([*command, "--key-file", str(other)]) in (1, 2)
        assert "it is signed with the key" in "".join(capsys.readouterr())
        assert main([*command, "--key-file", str(key)]) == 0
    change(tmp_path, tmp_path / "ckpts/one/model/config.json", -3)
    reseal(tmp_path / "ckpts/one")
    assert main(["export", ckpts, str(tmp_path / "again")]) == 0
    assert main(["export", ckpts, str(tmp_path / "signed"), "--key-file", str(key)]) == 2
    assert "does not match its manifest" in capsys.readouterr().err
