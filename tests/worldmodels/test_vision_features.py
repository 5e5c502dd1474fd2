"""Frozen features of a vision model from a folder: what is read off them, what stays as it is, and what is refused."""

import shutil
import sys
from dataclasses import replace

import pytest
import torch
from dot_world import IMAGE, SPEC, recorded

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.randomness import Generators
from robopolicy.core.storage import read_json, write_json
from robopolicy.nn.vision import feature_maps, is_vision_folder, load_vision_model
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig, LatentEnsembleConfig
from worldmodels.encoding import encode
from worldmodels.latent_ensemble import LatentEnsembleModel
from worldmodels.protocol import LATENT

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.long

CONFIG = LatentEnsembleConfig(
    features=4,
    channels=(8, 8, 8),
    batch_size=8,
    ensemble=EnsembleConfig(members=2, width=16, depth=1, head_width=8, rollout_step_ratio=0),
)
FIT = FitConfig(steps=3, learning_rate=3e-3)
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}


def tiny(family):
    """A vision model with random weights; images of 16 px have 4 x 4 patches."""
    wide = {**SIZE, "intermediate_size": 32, "image_size": 16}
    if family == "vjepa2":
        predictor = {"pred_hidden_size": 8, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
        settings = {**SIZE, "crop_size": 16, "frames_per_clip": 2, "mlp_ratio": 2.0, **predictor}
        return transformers.VJEPA2Model(transformers.VJEPA2Config(**settings))
    kinds = {
        "dinov2": (transformers.Dinov2Model, transformers.Dinov2Config, {**wide, "image_size": 32}),
        "registers": (transformers.Dinov2WithRegistersModel, transformers.Dinov2WithRegistersConfig, wide),
        "clip": (transformers.CLIPVisionModel, transformers.CLIPVisionConfig, wide),
    }
    model, config, settings = kinds[family]
    return model(config(**settings))


def saved(family, folder):
    torch.manual_seed(0)
    tiny(family).save_pretrained(folder)
    if family == "dinov2":  # its config names the largest size, its processor the usual one
        write_json(folder / "preprocessor_config.json", {"crop_size": {"height": 16, "width": 16}})
    return folder


@pytest.mark.parametrize("family", ["dinov2", "registers", "clip", "vjepa2"])
def test_a_layer_condenses_frozen_features_and_the_checkpoint_has_all_it_needs(family, tmp_path):
    folder = saved(family, tmp_path / family)
    data = recorded(12)
    model = LatentEnsembleModel.build(replace(CONFIG, encoder=folder), SPEC, data, seed=1)
    vision = model.autoencoder.vision
    assert vision is not None and next(iter(model.stages())) == "encoder"
    before = {name: value.clone() for name, value in vision.state_dict().items()}
    head = {name: value.clone() for name, value in model.autoencoder.encoders.state_dict().items()}
    fit_stages(model, data, FIT, Generators(0))
    model.calibrate(data)
    assert all(torch.equal(value, before[name]) for name, value in vision.state_dict().items())
    assert any(not torch.equal(value, head[name]) for name, value in model.autoencoder.encoders.state_dict().items())
    frames = {key: data.observation[key][:20] for key in model.reads}
    latents = encode(model.eval(), frames)[LATENT]
    assert latents.isfinite().all() and float(latents[:, 2:].std(0).min()) > 0
    save_world_model(model, tmp_path / "model")
    shutil.rmtree(folder)
    loaded = load_world_model(tmp_path / "model")
    assert torch.equal(encode(loaded, frames)[LATENT], latents)
    assert not any(weight.requires_grad for weight in loaded.autoencoder.vision.parameters())
    other = LatentEnsembleModel.build(replace(CONFIG, encoder=tmp_path / "model"), SPEC, data, seed=5)
    assert torch.equal(encode(other, frames)[LATENT], latents) and "encoder" not in other.stages()


def test_maps_are_the_features_of_the_patches(tmp_path):
    """The class token and registers come first, and belong to no patch; pixels are standardised."""
    frames = recorded(4).observation[IMAGE][:3]
    for family, skipped in (("clip", 1), ("registers", 5)):
        model, pixels = load_vision_model(saved(family, tmp_path / family), "encoder")
        images = (frames.permute(0, 3, 1, 2) / 255 - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor(
            [0.229, 0.224, 0.225]
        )[:, None, None]
        with torch.no_grad():
            tokens = model.eval()(pixel_values=images).last_hidden_state[:, skipped:]
        maps = feature_maps(model, pixels, frames)
        assert maps.shape == (3, 16, 4, 4)
        for patch in range(16):
            assert torch.allclose(maps[:, :, patch // 4, patch % 4], tokens[:, patch], atol=1e-4)


def test_a_video_model_sees_a_frame_that_stands_still(tmp_path):
    model, pixels = load_vision_model(saved("vjepa2", tmp_path / "vjepa2"), "encoder")
    frames = recorded(4).observation[IMAGE][:3]
    images = (frames.permute(0, 3, 1, 2) / 255 - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor(
        [0.229, 0.224, 0.225]
    )[:, None, None]
    with torch.no_grad():
        tokens = model.get_vision_features(torch.stack([images, images], 1))
    assert torch.allclose(feature_maps(model, pixels, frames).flatten(2).mT, tokens, atol=1e-4)


def test_the_image_size_is_the_processors_where_the_model_reads_it(tmp_path):
    _, pixels = load_vision_model(saved("dinov2", tmp_path / "dinov2"), "encoder")
    assert pixels["size"] == [16, 16]
    folder = saved("clip", tmp_path / "clip")
    write_json(folder / "preprocessor_config.json", {"crop_size": {"height": 24, "width": 24}, "image_mean": [0, 0, 0]})
    _, pixels = load_vision_model(folder, "encoder")
    assert pixels["size"] == 16 and pixels["mean"] == [0, 0, 0]


def test_nothing_is_unpickled_downloaded_or_run(tmp_path, monkeypatch):
    folder = saved("clip", tmp_path / "clip")
    weights = tiny("clip").state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(ConfigError, match=r"worldmodel\.config\.encoder=.* could not be loaded as a vision model"):
        LatentEnsembleModel.build(replace(CONFIG, encoder=folder), SPEC, recorded(4), seed=0)
    folder = saved("clip", tmp_path / "code")
    (folder / "evil.py").write_text("raise SystemExit('run')")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "model_type": "evil", "auto_map": {"AutoModel": "evil.Evil"}})
    with pytest.raises(ConfigError, match="could not be loaded as a vision model"):
        LatentEnsembleModel.build(replace(CONFIG, encoder=folder), SPEC, recorded(4), seed=0)
    assert "evil" not in sys.modules
    assert not is_vision_folder(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="nothing"):
        LatentEnsembleModel.build(replace(CONFIG, encoder=tmp_path / "nothing"), SPEC, recorded(4), seed=0)


def test_a_model_of_words_is_refused(tmp_path):
    settings = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    transformers.BertModel(transformers.BertConfig(**settings, num_attention_heads=2)).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(ConfigError, match="is a bert model, not a vision model"):
        LatentEnsembleModel.build(replace(CONFIG, encoder=tmp_path / "bert"), SPEC, recorded(4), seed=0)
