"""Tiny processors and models of the vision-language families, made on the spot without downloads.

Every model has a vision tower whose layers add nothing, so that an image feature depends only on
the pixels under its own patches. A test can change pixels and see which tokens change. Processors
are made without their video part, which needs torchvision.
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import nn

from made_tokenizers import byte_level

SIDE, PATCH = 32, 4
SPECIAL = {
    "image_token": "<image>",
    "video_token": "<video>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<ctx>",
    "vision_start_token": "<vs>",
    "vision_end_token": "<ve>",
    "fake_token": "<fake_token_around_image>",
    "global_token": "<global-img>",
    "turn_token": "<end_of_utterance>",
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}


class Family(NamedTuple):
    """A processor, its model, and the text that stands for a picture."""

    processor: Any
    model: Any
    mark: str


def tokenizer() -> Any:
    """A byte-level tokenizer with the special tokens of all families."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(500).backend_tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=SPECIAL,
    )


def text_config(**more: Any) -> dict[str, Any]:
    """A Llama of three layers, big enough for every added token."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "vocab_size": 2000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "rope_parameters": rope,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def pil(model_type: str, **settings: Any) -> Any:
    """The image processor of a family that needs pillow alone."""
    module = import_module(f"transformers.models.{model_type}.image_processing_pil_{model_type}")
    (name,) = (name for name in module.__all__ if name.endswith("Pil"))
    return getattr(module, name)(**settings)


def joined(name: str, *parts: Any, **settings: Any) -> Any:
    """A processor of these parts; transformers would refuse one without a video processor.

    SmolVLM's asks for num2words, which it uses for videos alone.
    """
    proper = "transformers.ProcessorMixin.check_argument_for_proper_class"
    words = "transformers.models.smolvlm.processing_smolvlm.num2words"
    with patch(proper, lambda self, name, part: type(part)), patch(words, str):
        return getattr(transformers, f"{name}Processor")(*parts, **settings)


def ids(tokenizer: Any) -> dict[str, int]:
    """The ids of the special tokens."""
    return {name: tokenizer.convert_tokens_to_ids(text) for name, text in SPECIAL.items()}


def llava(**settings: Any) -> Family:
    made = tokenizer()
    square = {"height": SIDE, "width": SIDE}
    images = pil("llava", size={"shortest_edge": SIDE}, crop_size=square, **settings)
    processor = joined("Llava", images, made, PATCH, "default", num_additional_image_tokens=1)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**text_config()),
        image_token_index=processor.image_token_id,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    return Family(processor, transformers.LlavaForConditionalGeneration(config), "<image>")


PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96], [64, 96]]


def llava_next() -> Family:
    made = tokenizer()
    square = {"height": SIDE, "width": SIDE}
    images = pil(
        "llava_next",
        size={"shortest_edge": SIDE},
        crop_size=square,
        image_grid_pinpoints=PINPOINTS,
    )
    processor = joined("LlavaNext", images, made, PATCH, "default", num_additional_image_tokens=1)
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**text_config()),
        image_token_index=processor.image_token_id,
        image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    return Family(processor, transformers.LlavaNextForConditionalGeneration(config), "<image>")


def onevision() -> Family:
    made = tokenizer()
    square = {"height": SIDE, "width": SIDE}
    images = pil("llava_onevision", size=square, image_grid_pinpoints=PINPOINTS)
    side = SIDE // PATCH
    processor = joined(
        "LlavaOnevision", images, made, None, side**2, "full", vision_aspect_ratio="anyres_max_3"
    )
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=transformers.Qwen2Config(**text_config()),
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_3",
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return Family(processor, transformers.LlavaOnevisionForConditionalGeneration(config), "<image>")


def gemma3(**settings: Any) -> Family:
    made = tokenizer()
    images = pil("gemma3", size={"height": SIDE, "width": SIDE}, **settings)
    processor = joined("Gemma3", images, made, image_seq_length=16)
    known = ids(made)
    text = text_config(sliding_window=12, query_pre_attn_scalar=16)
    del text["rope_parameters"]
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config=transformers.SiglipVisionConfig(**TOWER, vision_use_head=False),
        mm_tokens_per_image=16,
        image_token_index=known["image_token"],
        boi_token_index=known["boi_token"],
        eoi_token_index=known["eoi_token"],
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return Family(processor, model, "<boi>")


def paligemma() -> Family:
    made = tokenizer()
    images = pil("siglip", size={"height": SIDE, "width": SIDE})
    images.image_seq_length = (SIDE // PATCH) ** 2
    processor = joined("PaliGemma", images, made)
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**text_config()),
        vision_config=transformers.SiglipVisionConfig(
            **TOWER, projection_dim=64, vision_use_head=False
        ),
        image_token_index=processor.image_token_id,
        projection_dim=64,
    )
    return Family(processor, transformers.PaliGemmaForConditionalGeneration(config), "<image>")


def qwen(name: str) -> Family:
    made = tokenizer()
    images = pil(
        "qwen2_vl",
        patch_size=PATCH,
        merge_size=2,
        size={"shortest_edge": 8 * 8 * 16, "longest_edge": 64 * 64 * 4},
    )
    known = ids(made)
    processor = joined(name, images, made)
    tower = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if name == "Qwen2VL":
        tower |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        tower |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    if name == "Qwen2_5_VL":
        tower |= {"fullatt_block_indexes": [1], "window_size": 16}
    if name == "Qwen3VL":
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = getattr(transformers, f"{name}Config")(
        text_config=text_config(rope_parameters=rope),
        vision_config=tower,
        image_token_id=known["image_token"],
        video_token_id=known["video_token"],
        vision_start_token_id=known["vision_start_token"],
        vision_end_token_id=known["vision_end_token"],
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return Family(processor, model, "<vs><image><ve>")


def idefics(name: str) -> Family:
    made = tokenizer()
    images = pil(
        name.lower(), size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    video = (None,) if name == "SmolVLM" else ()
    processor = joined(name, images, made, *video, image_seq_len=16)
    config = getattr(transformers, f"{name}Config")(
        text_config=transformers.LlamaConfig(**text_config()).to_dict(),
        vision_config=TOWER,
        scale_factor=2,
        image_token_id=processor.image_token_id,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return Family(processor, model, "<image>")


def internvl() -> Family:
    made = tokenizer()
    images = pil("got_ocr2", size={"height": SIDE, "width": SIDE})
    processor = joined("InternVL", images, made, None, image_seq_length=16)
    tower = TOWER | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **text_config()},
        vision_config=tower,
        image_token_id=processor.image_token_id,
        downsample_ratio=0.5,
    )
    return Family(processor, transformers.InternVLForConditionalGeneration(config), "<ctx>")


FAMILIES: dict[str, Callable[[], Family]] = {
    "llava": llava,
    "llava-padded": lambda: llava(do_pad=True),
    "llava-next": llava_next,
    "llava-onevision": onevision,
    "gemma3": gemma3,
    "paligemma": paligemma,
    "qwen2-vl": lambda: qwen("Qwen2VL"),
    "qwen2.5-vl": lambda: qwen("Qwen2_5_VL"),
    "qwen3-vl": lambda: qwen("Qwen3VL"),
    "idefics3": lambda: idefics("Idefics3"),
    "smolvlm": lambda: idefics("SmolVLM"),
    "internvl": internvl,
}


@cache
def made(name: str) -> Family:
    """The processor and model of a family, made once per run, from a fixed seed."""
    torch.manual_seed(0)
    family = FAMILIES[name]()
    silence_tower(family.model)
    with torch.no_grad():  # generated tokens are those of the tokenizer
        family.model.get_output_embeddings().weight[len(family.processor.tokenizer) :] = 0
    return family._replace(model=family.model.eval())


def silence_tower(model: nn.Module) -> None:
    """Set the last projection of every layer of the vision tower to 0."""
    last = ("out_proj", "projection_layer", "proj", "fc2", "down_proj", "linear_fc2")
    for name, module in model.named_modules():
        parts = name.split(".")
        tower = {"vision_tower", "vision_model", "visual"} & {*parts} and "merger" not in name
        if tower and parts[-1] in last and isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def first_embeddings(model: Any, **inputs: Any) -> torch.Tensor:
    """[batch, tokens, size]: what the first layer of the language model gets."""
    captured: list[torch.Tensor] = []

    def capture(module: Any, args: Any, kwargs: Any) -> None:
        captured.append(args[0] if args else kwargs["hidden_states"])

    layers = model.get_decoder().layers
    hook = layers[0].register_forward_pre_hook(capture, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        hook.remove()
    return captured[0]


def model_inputs(family: Family, texts: Any, images: Any, **options: Any) -> Any:
    """What the processor makes of prompts, without the labels of PaliGemma."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PaliGemma's processor
        inputs = family.processor(
            text=texts, images=images, return_tensors="pt", padding=True, **options
        )
    inputs.pop("labels", None)
    return inputs
