# SPDX-License-Identifier: Apache-2.0
"""The command lines of TensorRT-LLM 1.2.1 for a planned engine, every flag with its reason.

Nothing is left to a default: several of them size buffers by what the model could do (131,072 tokens, 2,048 sequences),
and others change what an engine is without a word. Whether a tool knows every flag is asked of the tool itself
(`engines.vendor.tools`), since flags come and go between releases.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from engines.planner import EnginePlan

QUANTIZE: Final = "quantize.py"
BUILD: Final = "trtllm-build"
CALIBRATION_PROMPTS: Final = 512
CALIBRATION_TOKENS: Final = 512
CALIBRATION_SEED: Final = 1234


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a command line."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Command:
    """One command line."""

    tool: str
    """`quantize.py` or `trtllm-build`."""
    purpose: str
    flags: tuple[Flag, ...]

    def arguments(self) -> list[str]:
        """The words behind the tool's name."""
        return [word for flag in self.flags for word in (flag.name, flag.value)]

    def line(self) -> str:
        """The command as one types it."""
        words = ["python3", self.tool] if self.tool.endswith(".py") else [self.tool]
        return shlex.join([*words, *self.arguments()])


def quantize(plan: EnginePlan, source: Path, calibration: Path, checkpoint: Path) -> Command:
    """Makes the calibrated FP8 checkpoint. It depends on the card set only by how many parts it is cut into.

    Args:
        plan: An engine of a tier that generates.
        source: The model as published.
        calibration: Folder or data set with the texts to calibrate on.
        checkpoint: Where the checkpoint goes.
    """
    cards = plan.cards
    return Command(
        QUANTIZE,
        "calibrate and quantise; once for all tiers of as many cards",
        (
            Flag("--model_dir", str(source), "the model as published, in 16 bits"),
            Flag("--dtype", "bfloat16", "activations: the range of float32, so that nothing overflows"),
            Flag("--qformat", "fp8", "weights and activations in e4m3; convert_checkpoint --use_fp8 fails"),
            Flag("--kv_cache_dtype", "fp8", "the cache halves, and FP8 context attention refuses any other cache"),
            Flag("--calib_dataset", str(calibration), "texts like those to be served; from a hub by default"),
            Flag("--calib_size", str(CALIBRATION_PROMPTS), "texts, as many as the vendor's own recipes take"),
            Flag("--calib_max_seq_length", str(CALIBRATION_TOKENS), "tokens of each"),
            Flag("--seed", str(CALIBRATION_SEED), "the same scales again from the same texts"),
            Flag("--tp_size", str(cards.tensor_parallel), "parts that matrices are cut into: cards side by side"),
            Flag("--pp_size", str(cards.pipeline_parallel), "parts that the layers are cut into: cards in a row"),
            Flag("--output_dir", str(checkpoint), "where the checkpoint goes"),
        ),
    )


def build(plan: EnginePlan, checkpoint: Path, output: Path) -> Command:
    """Makes the engine of a tier that generates from the quantised checkpoint."""
    limits = plan.tier.generation
    several = plan.cards.count > 1
    return Command(
        BUILD,
        "compile the engine for this card set",
        (
            Flag("--checkpoint_dir", str(checkpoint), "what quantize.py wrote"),
            Flag("--output_dir", str(output), "config.json and one engine a rank"),
            Flag("--max_batch_size", str(plan.slots), "the derived slots; 2,048 by default, and buffers grow with it"),
            Flag("--max_num_tokens", str(limits.step_token_budget), "the step token budget; activations grow with it"),
            Flag("--max_input_len", str(limits.max_input_tokens), "ignored with packed input, and said all the same"),
            Flag("--max_seq_len", str(plan.max_sequence_tokens), "prompt and output; the model's own by default"),
            Flag("--max_beam_width", "1", "requests ask for samples, not beams"),
            Flag("--kv_cache_type", "paged", "blocks, so that slots share the pool and heads are kept"),
            Flag("--tokens_per_block", str(limits.kv_block_tokens), "a power of two; only whole blocks are shared"),
            Flag("--remove_input_padding", "enable", "packed prompts: the Executor takes no other engine"),
            Flag("--gpt_attention_plugin", "auto", "the attention kernels with cache; in the checkpoint's format"),
            Flag("--context_fmha", "enable", "fused attention over prompts"),
            Flag("--use_paged_context_fmha", "enable", "without it no chunks, and reuse is off with a warning"),
            Flag("--use_fp8_context_fmha", "enable", "prompts' attention in FP8; needs the FP8 cache"),
            Flag("--gemm_plugin", "disable", "the vendor's advice for FP8: leave it off"),
            Flag("--use_fused_mlp", "enable", "gate and up as one product; their scales become the larger of both"),
            Flag("--multiple_profiles", "enable", "kernels by batch size: worth 19 % as the vendor measured"),
            Flag(
                "--reduce_fusion",
                "enable" if several else "disable",
                "sums between cards, fused with the norm",
            ),
            Flag("--logits_dtype", "float32", "the decoder takes float32 or float16"),
            Flag("--profiling_verbosity", "layer_names_only", "names for a profiler, no cost"),
            Flag("--workers", str(plan.cards.count), "one builder a rank"),
        ),
    )
