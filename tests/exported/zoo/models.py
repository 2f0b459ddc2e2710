# SPDX-License-Identifier: Apache-2.0
"""The models of the zoo: of transformers, timm and torchvision, tiny, with random weights."""

import dataclasses
import importlib
import typing

import torch

VOCABULARY = 40
LENGTH = 8
CLASSES = 7


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and its arguments: tensors by name, whose axis 0 is the batch."""

    name: str
    package: str
    make: typing.Callable
    inputs: typing.Callable  # function of the number of samples
    loss: str  # a formula of reference.loss_of
    targets: typing.Callable = lambda size: {}


MODELS = []


def _add(*arguments, **options):
    MODELS.append(Model(*arguments, **options))


def tokens(size):
    return torch.randint(3, VOCABULARY, (size, LENGTH))


def classes(size):
    return torch.randint(0, CLASSES, (size,))


# transformers: configuration and model by name, so that only requested ones are imported.

SIZES = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
             intermediate_size=24, max_position_embeddings=32)
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def _make(config, model, options):
    import transformers
    transformers.logging.set_verbosity_error()
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def _transformer(name, model, options, inputs, loss="own", config=None):
    configuration = config or f"{name}Config"
    _add(name, "transformers", lambda: _make(configuration, model, options), inputs, loss)


def _language_inputs(size):
    text = tokens(size)
    return {"input_ids": text, "labels": text.clone()}


def _masked_inputs(size):
    mask = torch.ones(size, LENGTH, dtype=torch.int64)
    mask[:, -2:] = 0
    return {"input_ids": tokens(size), "attention_mask": mask, "labels": tokens(size)}


def _class_inputs(size):
    return {"input_ids": tokens(size), "labels": classes(size)}


def _language(name, model=None, inputs=_language_inputs, **options):
    _transformer(name, model or f"{name}ForCausalLM",
                 {**SIZES, **SPECIAL, "use_cache": False, **options}, inputs)


_language("GPT2", "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=32)
_language("GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=2,
          window_size=4, attention_dropout=0.1, embed_dropout=0.1, resid_dropout=0.1)
_language("GPTNeoX", rotary_pct=0.5, hidden_dropout=0.1, attention_dropout=0.1)
_language("GPTJ", n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4, attn_pdrop=0.1,
          resid_pdrop=0.1, embd_pdrop=0.1)
_language("GPTBigCode", n_embd=16, n_layer=2, n_head=2, n_positions=32)
_language("OPT", ffn_dim=24, word_embed_proj_dim=16, dropout=0.1, attention_dropout=0.1,
          layerdrop=0.0)
_language("Bloom", n_layer=2, n_head=2, hidden_dropout=0.1, attention_dropout=0.1)
_language("Llama", num_key_value_heads=1, attention_dropout=0.1)
_language("Mistral", num_key_value_heads=1, sliding_window=4)
_language("Qwen2", num_key_value_heads=1)
_language("Qwen3", num_key_value_heads=1, head_dim=8)
_language("Gemma", num_key_value_heads=1, head_dim=8)
_language("Gemma2", num_key_value_heads=1, head_dim=8, sliding_window=4)
_language("Phi", num_key_value_heads=2, resid_pdrop=0.1, embd_pdrop=0.1)
_language("Phi3", num_key_value_heads=1, resid_pdrop=0.1)
_language("StableLm", num_key_value_heads=1)
_language("Cohere", num_key_value_heads=1)
_language("Olmo2", num_key_value_heads=1)
_language("Granite", num_key_value_heads=1)
_language("Starcoder2", num_key_value_heads=1, residual_dropout=0.1, embedding_dropout=0.1)
_language("Falcon", alibi=True, hidden_dropout=0.1, attention_dropout=0.1)
_language("Mpt", d_model=16, n_heads=2, n_layers=2, max_seq_len=32)
_language("Mixtral", num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1)
_language("Qwen2Moe", num_key_value_heads=1, num_experts=2, num_experts_per_tok=1,
          moe_intermediate_size=8, shared_expert_intermediate_size=8,
          experts_implementation="batched_mm")
_language("Mamba", state_size=4, expand=2, conv_kernel=3, time_step_rank=4)

_HIDDEN = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


def _masked(name, model=None, **options):
    _transformer(name, model or f"{name}ForMaskedLM", {**SIZES, **SPECIAL, **_HIDDEN, **options},
                 _masked_inputs)


_masked("Bert")
_masked("Roberta")
_masked("XLMRoberta")
_masked("Albert", embedding_size=8)
_masked("Electra", embedding_size=8)
_masked("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=24)
_masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4)
_masked("MPNet")
_masked("ModernBert", global_attn_every_n_layers=2, local_attention=4, cls_token_id=1,
        sep_token_id=2, attention_dropout=0.1, mlp_dropout=0.1, embedding_dropout=0.1)
_masked("ConvBert", embedding_size=16, conv_kernel_size=3, head_ratio=1)
_masked("SqueezeBert", embedding_size=16, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1,
        intermediate_groups=2, output_groups=2)
_masked("RoFormer", embedding_size=16)
_masked("Nystromformer", num_landmarks=LENGTH, segment_means_seq_len=LENGTH, conv_kernel_size=3)
_transformer("FNet", "FNetForSequenceClassification",
             {**SIZES, **SPECIAL, "num_hidden_layers": 1, "hidden_dropout_prob": 0.1,
              "num_labels": CLASSES}, _class_inputs)

_SEQUENCES = dict(vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1,
                  encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
                  decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.1, use_cache=False,
                  attention_dropout=0.1, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
                  decoder_start_token_id=1, **SPECIAL)


def _pair_inputs(size):
    return {"input_ids": tokens(size), "decoder_input_ids": tokens(size), "labels": tokens(size)}


def _sequences(name, model=None, **options):
    _transformer(name, model or f"{name}ForConditionalGeneration", {**_SEQUENCES, **options},
                 _pair_inputs)


_sequences("Bart")
_sequences("MBart")
_sequences("Pegasus")
_sequences("Marian", "MarianMTModel")
_sequences("T5", d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2,
           dropout_rate=0.1)

_IMAGES = dict(image_size=16, patch_size=4, num_channels=3, hidden_size=16, num_hidden_layers=2,
               num_attention_heads=2, intermediate_size=24, num_labels=CLASSES, **_HIDDEN)


def _image_inputs(size):
    return {"pixel_values": torch.randn(size, 3, 16, 16), "labels": classes(size)}


def _large_image_inputs(size):
    return {"pixel_values": torch.randn(size, 3, 32, 32), "labels": classes(size)}


def _images(name, model=None, inputs=_image_inputs, **options):
    _transformer(name, model or f"{name}ForImageClassification", {**_IMAGES, **options}, inputs)


_images("ViT")
_images("DeiT")
_images("Beit", drop_path_rate=0.1)
_images("Dinov2", drop_path_rate=0.1)
_images("Swin", embed_dim=8, depths=[1, 1], num_heads=[2, 2], num_attention_heads=[2, 2],
        window_size=2, patch_size=2, drop_path_rate=0.1)
_images("ResNet", inputs=_large_image_inputs, embedding_size=8, hidden_sizes=[8, 16],
        depths=[1, 1], layer_type="basic")
_images("ConvNext", inputs=_large_image_inputs, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
        drop_path_rate=0.1)
_images("PoolFormer", inputs=_large_image_inputs, depths=[1, 1], hidden_sizes=[8, 16],
        num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1],
        drop_path_rate=0.1)
_images("Segformer", inputs=_large_image_inputs, num_encoder_blocks=2, depths=[1, 1],
        sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], drop_path_rate=0.1)
_images("MobileNetV2", inputs=_large_image_inputs, depth_multiplier=0.25)


def _waves(size):
    return {"input_values": torch.randn(size, 400), "labels": classes(size)}


_transformer("Wav2Vec2", "Wav2Vec2ForSequenceClassification",
             {**SIZES, **SPECIAL, "conv_dim": (8, 8), "conv_kernel": (10, 3),
              "conv_stride": (5, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
              "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "layerdrop": 0.0,
              "num_labels": CLASSES, "classifier_proj_size": 8, "feat_extract_norm": "layer"},
             _waves)


def _series(size):
    return {"past_values": torch.randn(size, 16, 2), "future_values": torch.randn(size, 4, 2)}


_transformer("PatchTST", "PatchTSTForPrediction",
             dict(num_input_channels=2, context_length=16, patch_length=4, patch_stride=4,
                  num_hidden_layers=1, d_model=16, num_attention_heads=2, ffn_dim=24,
                  prediction_length=4, attention_dropout=0.1, ff_dropout=0.1, path_dropout=0.1,
                  loss="mse"), _series)


# timm: by a name of its registry, or a class of one of its modules.

def _timm(name, size=32, where=None, **options):
    def make():
        import timm
        if where is None:
            return timm.create_model(name, num_classes=CLASSES, **options)
        module, kind = where
        return getattr(importlib.import_module(f"timm.models.{module}"), kind)(
            num_classes=CLASSES, **options)

    _add(name, "timm", make, lambda count: {"x": torch.randn(count, 3, size, size)},
         "cross_entropy", lambda count: {"y": classes(count)})


_VIT = dict(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2)
_DROPS = dict(drop_rate=0.1, drop_path_rate=0.2)

_timm("resnet18", layers=(1, 1, 1, 1), channels=(8, 12, 16, 20), **_DROPS)
_timm("seresnet50", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), **_DROPS)
_timm("vit_tiny_patch16_224", size=16, **_VIT, **_DROPS, attn_drop_rate=0.1)
_timm("deit3_small_patch16_224", size=16, **_VIT, **_DROPS)
_timm("beit_base_patch16_224", size=16, **{**_VIT, "depth": 1}, **_DROPS)
_timm("eva02_tiny_patch14_224", size=16, **_VIT, **_DROPS)
_timm("cait_xxs24_224", size=16, **_VIT, **_DROPS)
_timm("xcit_nano_12_p16_224", size=32, img_size=32, embed_dim=16, depth=2, num_heads=2, **_DROPS)
_timm("MlpMixer", size=16, where=("mlp_mixer", "MlpMixer"), img_size=16, patch_size=4,
      embed_dim=16, num_blocks=2, **_DROPS)
_timm("ConvMixer", where=("convmixer", "ConvMixer"), dim=16, depth=2, patch_size=4,
      kernel_size=3, drop_rate=0.1)
_timm("MetaFormer", where=("metaformer", "MetaFormer"), depths=(1, 1), dims=(8, 16), **_DROPS)
_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), **_DROPS)
_timm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), **_DROPS)
_timm("mobilenetv3_small_050", **_DROPS)
_timm("mobilenetv2_050", **_DROPS)
_timm("test_efficientnet", **_DROPS)
_timm("test_byobnet", **_DROPS)
_timm("test_nfnet", **_DROPS)
_timm("swin_tiny_patch4_window7_224", img_size=32, embed_dim=8, depths=(1, 1), num_heads=(2, 2),
      window_size=4, **_DROPS)
_timm("swinv2_tiny_window8_256", img_size=32, embed_dim=8, depths=(1, 1), num_heads=(2, 2),
      window_size=4, **_DROPS)
_timm("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2),
      **_DROPS)
_timm("edgenext_xx_small", size=64, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16),
      heads=(2, 2, 2, 2), drop_path_rate=0.2)
_timm("ghostnet_050", drop_rate=0.1)


# torchvision

def _vision(name, make, shape=(3, 32, 32), argument="x", loss="cross_entropy", targets=classes):
    def made():
        import torchvision
        return make(torchvision.models)

    _add(name, "torchvision", made, lambda size: {argument: torch.randn(size, *shape)}, loss,
         (lambda size: {"y": targets(size)}) if loss == "cross_entropy" else lambda size: {})


def _blocks(module, name, *settings):
    config = getattr(module, name)
    return [config(*setting) for setting in settings]


_vision("ResNet50Narrow", lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], CLASSES,
                                             width_per_group=8))
_vision("DenseNet", lambda m: m.DenseNet(4, (2, 2), 8, drop_rate=0.1, num_classes=CLASSES))
_vision("SqueezeNet", lambda m: m.squeezenet1_1(num_classes=CLASSES))
_vision("MobileNetV2Quarter", lambda m: m.mobilenet_v2(width_mult=0.25, num_classes=CLASSES))
_vision("MobileNetV3Half", lambda m: m.mobilenet_v3_small(width_mult=0.5, num_classes=CLASSES))
_vision("ShuffleNetV2", lambda m: m.ShuffleNetV2([1, 1, 1], [8, 8, 16, 16, 32], CLASSES))
_vision("MNASNet", lambda m: m.MNASNet(0.25, CLASSES))
_vision("EfficientNet", lambda m: m.EfficientNet(
    [m.efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1), m.efficientnet.MBConvConfig(4, 3, 2, 8, 16, 2)],
    0.1, stochastic_depth_prob=0.2, num_classes=CLASSES, last_channel=32))


def _google_net(models):
    """Returns named tuples in training, which torch saves once they have a name."""
    from torch.utils import _pytree as pytree
    pytree._register_namedtuple(models.GoogLeNetOutputs,
                                serialized_type_name="torchvision.models.GoogLeNetOutputs")
    return models.GoogLeNet(CLASSES, aux_logits=True, init_weights=False)


_vision("GoogLeNet", _google_net, shape=(3, 64, 64), loss="squares")
_vision("RegNet", lambda m: m.regnet_y_400mf(num_classes=CLASSES))
_vision("ConvNeXt", lambda m: m.ConvNeXt(
    _blocks(m.convnext, "CNBlockConfig", (8, 16, 1), (16, None, 1)), 0.2, num_classes=CLASSES))
_vision("VisionTransformer", lambda m: m.VisionTransformer(
    16, 4, 2, 2, 16, 24, dropout=0.1, attention_dropout=0.1, num_classes=CLASSES),
        shape=(3, 16, 16))
_vision("SwinTransformer", lambda m: m.SwinTransformer(
    [2, 2], 8, [2, 2], [2, 2], [4, 4], dropout=0.1, attention_dropout=0.1, num_classes=CLASSES))
_vision("SwinTransformerV2", lambda m: m.SwinTransformer(
    [2, 2], 8, [2, 2], [2, 2], [4, 4], block=m.swin_transformer.SwinTransformerBlockV2,
    downsample_layer=m.swin_transformer.PatchMergingV2, num_classes=CLASSES))
_vision("MaxVit", lambda m: m.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 4, 0.2, num_classes=CLASSES))
def _backbone(models):
    """The inner features of a small net."""
    net = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], CLASSES)
    return models._utils.IntermediateLayerGetter(net, {"layer1": "out"})


_vision("FCN", lambda m: m.segmentation.FCN(_backbone(m), m.segmentation.fcn.FCNHead(64, 3)),
        loss="squares")
_vision("DeepLabV3", lambda m: m.segmentation.DeepLabV3(
    _backbone(m), m.segmentation.deeplabv3.DeepLabHead(64, 3, (2, 4))), loss="squares")
_vision("LRASPP", lambda m: m.segmentation.lraspp_mobilenet_v3_large(
    weights_backbone=None, num_classes=3), argument="input", loss="squares")
